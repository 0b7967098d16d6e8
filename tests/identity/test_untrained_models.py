"""Untrained models: reproducible, of every style, and switched one part at a time."""

import functools

import numpy as np
import pytest
import torch
from rounding import assert_close

from sink_lens.activations.record import capture
from sink_lens.errors import InputError
from sink_lens.identity.untrained_models import UntrainedConfig, read_untrained, untrained

STYLES = ("llama", "qwen", "gpt2")
SMALL = {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 100, "n_context": 64}
TOKENS = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))


@functools.cache
def small(style="llama", *, seed=0, **fields):
    return untrained(UntrainedConfig(style=style, **SMALL | fields), seed=seed)


def weights(lens):
    return dict(lens.plain.named_parameters())


@pytest.mark.parametrize("style", STYLES)
def test_equal_seeds_give_equal_weights_and_others_do_not(style):
    one, other = small(style), small(style, seed=1)
    same = untrained(UntrainedConfig(style=style, **SMALL), seed=0)
    assert all(torch.equal(weights(one)[name], weights(same)[name]) for name in weights(one))
    assert not torch.equal(
        one.plain.get_input_embeddings().weight, other.plain.get_input_embeddings().weight
    )


def test_the_callers_random_state_neither_matters_nor_changes():
    torch.manual_seed(1)
    before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one = untrained(UntrainedConfig(style="llama", **SMALL), seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == legacy).all()  # noqa: NPY002
    assert torch.equal(weights(one)["lm_head.weight"], weights(small())["lm_head.weight"])


SWITCHED = [
    {},
    {"activation": "tanh"},
    {"activation": "identity"},
    {"norm": "rms"},
    {"norm": "layer"},
]
SWITCHED += [
    {"positions": "none"},
    {"positions": "learned"},
    {"attention": False},
    {"mlp": False},
    {"tied": True},
]
SWITCHED += [{"tied": False}, {"gated": False}]


@pytest.mark.parametrize("fields", SWITCHED, ids=str)
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_every_part_can_be_switched_and_the_bridge_agrees(style, fields):
    lens = small(style, **fields)  # building it compares the bridge's logits with the plain model's
    assert lens.plain(TOKENS).logits.shape == (2, 16, 100)
    config = UntrainedConfig(style=style, **SMALL | fields)
    assert read_untrained(config.label) == config
    assert lens.name == f"untrained {config.label} seed 0"


@pytest.mark.parametrize("style", STYLES)
def test_what_is_off_writes_nothing_and_the_rest_is_drawn_alike(style):
    whole, without = small(style), small(style, attention=False)
    found = capture(without, TOKENS, sites=("attn_out", "mlp_out"))
    assert found["attn_out", 0].abs().max() == 0
    assert found["mlp_out", 0].abs().max() > 0
    assert (
        capture(small(style, mlp=False), TOKENS, sites=("mlp_out",))["mlp_out", 1].abs().max() == 0
    )
    different = {
        name for name, one in weights(whole).items() if not torch.equal(one, weights(without)[name])
    }
    assert all("attn" in name for name in different)
    assert len(different) == 2  # the output projection of each layer


@pytest.mark.parametrize("style", ["llama", "qwen"])
def test_without_a_gate_the_neurons_are_the_activation_alone(style):
    lens = small(style, gated=False, activation="relu", d_mlp=48)
    found = capture(lens, TOKENS, sites=("gate", "neurons"))
    assert_close(found["neurons", 1], found["gate", 1].relu())
    gated = capture(
        small(style, activation="relu", d_mlp=48), TOKENS, sites=("gate", "up", "neurons")
    )
    assert torch.equal(gated["gate", 0], found["gate", 0])
    assert torch.equal(gated["neurons", 0], gated["gate", 0].relu() * gated["up", 0])


def test_norms_and_positions_are_what_was_asked_for():
    layer = capture(small(norm="layer"), TOKENS, sites=("attn_in",))["attn_in", 0]
    assert layer.mean(-1).abs().max() < 1e-6
    assert (
        capture(small(norm="rms"), TOKENS, sites=("attn_in",))["attn_in", 0].mean(-1).abs().max()
        > 1e-3
    )
    assert small(norm="layer").family.centred_norm
    assert not small("gpt2", norm="rms").family.centred_norm
    for style in STYLES:  # without positions, equal tokens are equal wherever they stand
        x = capture(small(style, positions="none"), torch.full((1, 8), 5), sites=("final",))[
            "final"
        ]
        assert torch.allclose(x, x[:, :1].expand_as(x), atol=1e-5)
        x = capture(small(style, positions="learned"), torch.full((1, 8), 5), sites=("resid_pre",))[
            "resid_pre", 0
        ]
        assert not torch.allclose(x[:, 0], x[:, 1])


def test_writers_are_scaled_where_gpt2_or_the_caller_says_so():
    places = {
        "llama": "model.layers.0.mlp.down_proj.weight",
        "gpt2": "transformer.h.0.attn.c_proj.weight",
    }
    for style, scaled in (("llama", True), ("gpt2", None)):
        narrow, wide = (
            weights(small(style, scaled_writers=one))[places[style]] for one in (scaled, False)
        )
        assert torch.allclose(narrow * 2, wide)  # 2 layers: sqrt(2 x 2)
    assert float(weights(small(init_std=0.2))["lm_head.weight"].detach().std()) == pytest.approx(
        0.2, rel=0.05
    )


def test_sizes_and_groups_are_taken():
    lens = small("qwen", n_kv_heads=2, n_layers=3, d_mlp=40)
    assert (lens.n_layers, lens.n_kv_heads, lens.d_mlp, lens.n_context, lens.d_vocab) == (
        3,
        2,
        40,
        64,
        100,
    )
    assert UntrainedConfig(d_model=96, n_heads=4, gated=False).d_mlp == 384
    assert (
        UntrainedConfig(style="llama", d_model=96, n_heads=4).d_mlp == 256
    )  # 8/3 x 96, to a multiple of 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bert", "style is 'bert'; need one of llama, qwen, gpt2"),
        ("gpt2,activation=sine", "activation is 'sine'; need one of relu"),
        ("gpt2,gated=true", "GPT-2 has no gate"),
        ("gpt2,positions=rotary", "need style='llama', which takes norm='layer'"),
        ("llama,norm=batch", "norm is 'batch'; need one of rms, layer"),
        ("llama,n_layers=0", "n_layers is 0; need at least 1"),
        ("llama,n_layers=two", "n_layers is 'two'; need a whole number"),
        ("llama,tied=maybe", "tied is 'maybe'; need true or false"),
        ("llama,width=3", "'width=3' in 'llama,width=3' is no field=value"),
        ("llama,init_std=0", "need a positive number"),
        ("llama,d_model=30", "12 heads over 12 of width 30"),
        ("llama,d_model=36", "a head has 3 dimensions; need an even number"),
    ],
)
def test_what_cannot_be_is_refused(text, says):
    with pytest.raises(InputError, match=says):
        read_untrained(text)
    with pytest.raises(InputError, match="seed is -1; need a whole number from 0 on"):
        small(seed=-1)

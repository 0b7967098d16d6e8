import copy
import warnings

import pytest
import torch
from rounding import assert_rows_close

from sink_lens.activations.precision import HALF, in_float32, measure_rounding
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import (
    BY_LAYER_FAMILIES,
    LATENT_FAMILIES,
    MORE_FAMILIES,
    TINY_FAMILIES,
    tiny,
)

TOKENS = torch.randint(3, VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "family", TINY_FAMILIES + MORE_FAMILIES + BY_LAYER_FAMILIES + LATENT_FAMILIES
)
def test_widened_weights_compute_what_a_model_in_float32_does(family):
    model = tiny(family).bfloat16().eval()
    before = {name: own.clone() for name, own in model.state_dict().items()}
    wide = copy.deepcopy(model).float()
    with torch.no_grad(), in_float32(model):
        found = model(TOKENS).logits
    assert_rows_close(found, wide(TOKENS).logits.detach())
    after = model.state_dict()
    assert {name: own.dtype for name, own in after.items()} == {
        name: own.dtype for name, own in before.items()
    }
    assert all(torch.equal(own, after[name]) for name, own in before.items())


def test_weights_are_given_back_after_an_error():
    model = tiny("llama").bfloat16()
    with pytest.raises(IndexError), in_float32(model):
        model(TOKENS + VOCAB_SIZE)
    assert {own.dtype for own in model.parameters()} == {torch.bfloat16}


def erasing():
    """A GPT-2 whose dimension 7 grows to 4,012 in two layers; the third takes all of it away again."""
    model = tiny("gpt2")
    first, second, third = model.transformer.h
    with torch.no_grad():
        for bias, value in (
            (first.mlp.c_proj.bias, 3008.0),
            (second.mlp.c_proj.bias, 1004.0),
            (third.attn.c_proj.bias, -3008.0),
            (third.mlp.c_proj.bias, -1004.0),
        ):
            bias[7] = value
    return model


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_left_of_a_large_value_is_rounding(dtype):
    model = erasing().to(dtype).eval()
    wide = copy.deepcopy(model).float()
    batch = from_tensor(TOKENS)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = measure_rounding(wrap(model), batch, position=2)
    assert (
        found.spoils_logits or dtype == torch.float16
    )  # which of the two float16 is hangs on the order of sums
    assert found.spoils_logits == any(
        "load the model in float32" in str(one.message) for one in warned
    )
    assert (found.dimension, found.spacing) == (
        7,
        {torch.bfloat16: 16.0, torch.float16: 2.0}[dtype],
    )
    assert found.value == pytest.approx(4012, rel=0.002)
    with torch.no_grad():
        exact, own = wide(TOKENS).logits, model(TOKENS).logits.float()
    off = (own - exact).pow(2).mean(-1).sqrt() / exact.std(-1)
    assert found.at_position == pytest.approx(float(off[:, 2].mean()), rel=0.05)
    others = torch.cat([off[:, :2], off[:, 3:]], dim=1)
    assert found.elsewhere == pytest.approx(float(others.median()), rel=0.05)


def test_a_value_past_the_largest_of_the_type_is_said_not_to_be_finite():
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight[9, 7] = 60_000
        model.transformer.h[1].mlp.c_proj.bias[7] = 30_000
    with pytest.warns(
        UserWarning, match="are not finite: in float32 the stream's dimension 7 is 90,0.. there"
    ):
        found = measure_rounding(wrap(model.half().eval()), from_tensor(TOKENS), position=9)
    assert found.spoils_logits
    assert "float16's numbers end before; load the model in float32" in found.sentence()


def test_sequences_without_the_position_count_for_nothing():
    model = erasing().bfloat16().eval()
    lengths = torch.tensor([12, 2, 12])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = measure_rounding(wrap(model), from_tensor(TOKENS[::2]), position=5)
        found = measure_rounding(wrap(model), from_tensor(TOKENS, lengths=lengths), position=5)
    assert found.at_position == pytest.approx(alone.at_position, rel=0.05)
    assert (
        measure_rounding(wrap(model), from_tensor(TOKENS[1:2], lengths=lengths[1:2]), position=5)
        is None
    )
    assert measure_rounding(wrap(tiny("gpt2")), from_tensor(TOKENS), position=5) is None  # float32


def test_the_median_of_two_other_positions_is_their_mean():
    model, ids = tiny("llama").bfloat16(), TOKENS[:1, :3]
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        off = (model(ids).logits.float() - wide(ids).logits).pow(2).mean(-1).sqrt()
        off = (off / wide(ids).logits.std(-1))[0, 1:]
    found = measure_rounding(wrap(model), from_tensor(ids), position=0)
    assert off.max() > 1.02 * off.min()
    assert found.elsewhere == pytest.approx(float(off.mean()), rel=0.005)

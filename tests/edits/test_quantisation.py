"""Rounding of each format against torch and ml_dtypes, to the last bit; kept values; weights that come back."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.pytorch_utils import Conv1D

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import EditError
from sink_lens.edits.quantisation import (
    look_up_format,
    power_of_two_scale,
    quantisation,
    quantised_weights,
    round_to_float8,
    round_to_format,
    round_to_fp4,
)
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, SiteError
from sink_lens.models.load import wrap
from sink_lens.schema import LINEAR_INPUTS, QUANTISED_FORMATS
from tests.tiny_families import TINY_FAMILIES, tiny

TOKENS = torch.randint(3, 300, (3, 20), generator=torch.Generator().manual_seed(0))


def drawn(*shape, seed=0, outliers=True):
    """Normal values of very different sizes by token and channel, one of them huge."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(*shape, generator=generator)
        * torch.randn(*shape[:2], 1, generator=generator).exp()
    )
    x = x * (2 * torch.randn(shape[-1], generator=generator)).exp()
    if outliers:
        x[:, 0, 3] = 900.0
    return x


def integers_of(rows, top):
    """Each row rounded by torch to the integers up to ``top``."""
    scale, zeros = rows.abs().amax(1) / top, torch.zeros(len(rows), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(rows.contiguous(), scale, zeros, 0, -top - 1, top)


def exactly(a, b):
    """Equal to the last bit; a zero of either sign is 0."""
    return torch.equal((a + 0.0).view(torch.int32), (b + 0.0).view(torch.int32))


@pytest.mark.parametrize(("element", "top"), [("int8", 127), ("int4", 7)])
def test_integers_of_one_scale_or_of_one_a_token_or_a_group_are_those_of_torch(element, top):
    x = drawn(2, 9, 256)
    for scope, rows in (
        ("tensor", x.flatten(1)),
        ("token", x.flatten(0, 1)),
        ("group", x.reshape(-1, 128)),
    ):
        assert exactly(
            round_to_format(x, look_up_format(f"{element}_{scope}")),
            integers_of(rows, top).view_as(x),
        ), scope


def test_halves_go_to_the_even_integer():
    x = torch.tensor(
        [[[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, -127.0]]]
    )  # scale 1: max|x| is 127
    assert round_to_format(x, look_up_format("int8_tensor")).tolist() == [
        [[0, 2, 2, 0, -2, 126, 127, -127]]
    ]


@pytest.mark.parametrize(
    ("element", "name"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")]
)
def test_fp8_is_that_of_torch_and_of_ml_dtypes(element, name):
    dtype, other = getattr(torch, name), getattr(ml_dtypes, name)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    assert exactly(round_to_float8(every, element), every)  # what the format holds stays
    between = (every[:, None] + every[None]).flatten() / 2  # ties among them
    for x in (between, drawn(2, 9, 70).flatten()):
        x = x[x.abs() <= torch.finfo(dtype).max]
        assert exactly(round_to_float8(x, element), x.to(dtype).float())
        assert exactly(
            round_to_float8(x, element),
            torch.from_numpy(x.numpy().astype(other).astype(np.float32)),
        )
    assert round_to_float8(torch.tensor([1e30, -1e30]), element).tolist() == [
        torch.finfo(dtype).max,
        -torch.finfo(dtype).max,
    ]
    x = drawn(2, 9, 70)
    scale = x.abs().amax((1, 2), keepdim=True) / torch.finfo(dtype).max
    assert exactly(
        round_to_format(x, look_up_format(f"{element}_tensor")),
        (x / scale).to(dtype).float() * scale,
    )


def test_fp4_is_that_of_ml_dtypes():
    x = torch.cat(
        [torch.arange(-26, 27) / 4, drawn(2, 9, 70).flatten(), torch.tensor([5.0, 2.5, 1e9, -0.0])]
    )
    wanted = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert exactly(round_to_fp4(x), torch.from_numpy(wanted))


def test_mxfp4_has_a_power_of_two_for_32_channels():
    x = drawn(2, 3, 96)
    found = round_to_format(x, look_up_format("mxfp4"))
    for block, got in zip(x.reshape(-1, 32), found.reshape(-1, 32), strict=True):
        scale = 2.0 ** (np.floor(np.log2(float(block.abs().max()))) - 2)
        assert float(np.float32(scale).astype(ml_dtypes.float8_e8m0fnu)) == scale
        assert float(power_of_two_scale(block.abs().max())) == scale
        wanted = (block / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(
            np.float32
        ) * scale
        assert exactly(got, torch.from_numpy(wanted.astype(np.float32)))


def test_nvfp4_has_an_e4m3_scale_for_16_channels_and_one_scale_a_sequence():
    x = drawn(2, 3, 48)
    found = round_to_format(x, look_up_format("nvfp4"))
    for sequence, got in zip(x, found, strict=True):
        unit = sequence.abs().max() / (6.0 * 448.0)
        for block, part in zip(sequence.reshape(-1, 16), got.reshape(-1, 16), strict=True):
            inner = (
                (block.abs().max() / 6.0 / unit)
                .numpy()
                .astype(ml_dtypes.float8_e4m3fn)
                .astype(np.float32)
            )
            scale = torch.tensor(inner) * unit
            if scale == 0:
                assert (part == 0).all()
                continue
            wanted = (
                (block / scale)
                .clamp(-6, 6)
                .numpy()
                .astype(ml_dtypes.float4_e2m1fn)
                .astype(np.float32)
            )
            assert exactly(part, torch.from_numpy(wanted) * scale)


@pytest.mark.parametrize("name", QUANTISED_FORMATS)
def test_zeros_stay_and_a_width_that_is_no_multiple_of_a_group_is_rounded_too(name):
    assert (round_to_format(torch.zeros(2, 3, 21), look_up_format(name)) == 0).all()
    x = drawn(2, 3, 130, outliers=False)
    found = round_to_format(x, look_up_format(name))
    assert found.shape == x.shape
    assert 0 < float((found - x).norm() / x.norm()) < 0.6
    assert round_to_format(x.bfloat16(), look_up_format(name)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", QUANTISED_FORMATS)
@given(seed=st.integers(0, 1000), dim=st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_what_a_format_holds_is_near_odd_and_of_no_larger_size(name, seed, dim):
    x, form = drawn(1, 2, dim + 4, seed=seed), look_up_format(name)
    found = round_to_format(x, form)
    assert exactly(round_to_format(-x, form), -found)  # odd: the integers here are symmetric
    assert float(found.abs().max()) <= float(x.abs().max()) * (
        1 + 1 / 5
    )  # mxfp4: 5 and more of a scale become 6
    assert float((x - found).abs().max()) <= float(x.abs().max()) * 0.34


def test_a_kept_outlier_stays_and_makes_the_steps_of_the_others_finer():
    x, form = drawn(1, 6, 16), look_up_format("int8_tensor")
    keep = torch.zeros(1, 6, 1, dtype=torch.bool)
    keep[0, 0] = True
    found = round_to_format(x, form, keep=keep)
    assert torch.equal(found[:, 0], x[:, 0])
    assert exactly(
        found[:, 1:], round_to_format(x[:, 1:], form)
    )  # as if the kept token were not there
    channel = torch.zeros(1, 1, 16, dtype=torch.bool)
    channel[..., 3] = True
    found = round_to_format(x, form, keep=channel)
    others = [c for c in range(16) if c != 3]
    assert torch.equal(found[..., 3], x[..., 3])
    assert exactly(found[..., others], round_to_format(x[..., others], form))


def test_an_edit_rounds_a_site_as_a_raw_hook_of_hugging_face_does():
    model = tiny("llama")
    lens = wrap(model)
    edits = [
        quantisation("neurons", "int8_token"),
        quantisation("z", "fp8_e4m3_tensor", layers=[1]),
    ]
    edited = run_with(lens, TOKENS, edits, layers=[0], logits=True).logits

    def raw(form):
        return lambda module, args: (round_to_format(args[0], look_up_format(form)), *args[1:])

    assert not torch.allclose(
        edited, run_with(lens, TOKENS, layers=[0], logits=True).logits, atol=1e-4
    )
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(raw("int8_token"))
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(raw("fp8_e4m3_tensor"))
    model.set_attn_implementation(
        "eager"
    )  # the bridge's: other sums would fall on other sides of a rounding
    with torch.no_grad():
        assert torch.allclose(edited, model(TOKENS).logits, atol=1e-5)


def test_keeping_every_token_or_every_channel_is_the_clean_run():
    lens = wrap(tiny("llama"))
    clean = run_with(lens, TOKENS, layers=[0], logits=True).logits
    every = torch.ones(3, 20, dtype=torch.bool)
    channels = {layer: range(48) for layer in range(lens.n_layers)}
    of_json = {str(layer): list(some) for layer, some in channels.items()}
    for kept in ({"tokens": every}, {"channels": channels}, {"channels": of_json}):
        edit = quantisation("mlp_in", "int4_tensor", **kept)
        assert torch.equal(
            run_with(lens, TOKENS, edit, layers=[0], logits=True, quiet=True).logits, clean
        )


def test_kept_tokens_follow_their_sequences_through_batches():
    lens = wrap(tiny("llama"))
    keep = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.3
    edit = quantisation("attn_in", "int4_tensor", tokens=keep)
    together, alone = (
        run_with(lens, TOKENS, edit, layers=[0], logits=True, batch_size=size).logits
        for size in (3, 1)
    )
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("form", ["int8_tensor", "int4_tensor", "nvfp4"])
def test_padding_sets_no_scale(form):
    lens = wrap(tiny("llama"))
    edits = [quantisation(site, form) for site in LINEAR_INPUTS]
    alone = from_tensor(TOKENS[:1, :6])
    padded = dataclasses.replace(from_tensor(TOKENS), lengths=torch.tensor([6, 20, 20]))
    losses = [
        run_with(lens, batch, edits, layers=[0], loss=True, quiet=True).loss[0]
        for batch in (alone, padded)
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)


def test_what_cannot_be_quantised_is_refused():
    lens = wrap(tiny("llama"))
    with pytest.raises(InputError, match="no format 'int3'; need one of int8_tensor"):
        look_up_format("int3")
    with pytest.raises(SiteError, match="'pattern' cannot be quantised; need one of"):
        quantisation("pattern", "int8_tensor")
    with pytest.raises(InputError, match="layer 0 keeps a channel of 'z' twice"):
        quantisation("z", "int8_tensor", channels={0: [1, 1]})
    with pytest.raises(InputError, match="'z'"):
        quantisation("z", "int8_tensor", channels={"z": [1]})
    with pytest.raises(EditError, match="'z' has 48 channels, and channel 48"):
        run_with(lens, TOKENS, quantisation("z", "int8_tensor", channels={0: [48]}), layers=[0])
    with pytest.raises(EditError, match=r"shape \(1, 20\) and the run has 3 sequences"):
        run_with(
            lens,
            TOKENS,
            quantisation("z", "int8_tensor", tokens=torch.ones(1, 20, dtype=torch.bool)),
            layers=[0],
        )
    with (
        pytest.raises(InputError, match="mixture of experts"),
        quantised_weights(wrap(tiny("gpt_oss")), "int8_token"),
    ):
        pass


@pytest.mark.parametrize(
    "family",
    [*(name for name in TINY_FAMILIES if name != "gpt_oss"), "falcon", "falcon_h1", "gemma4"],
)
def test_rounded_weights_of_every_linear_layer_reach_both_paths_and_come_back(family):
    model = tiny(family)
    lens = wrap(model)
    before = {parameter: parameter.clone() for parameter in model.parameters()}
    layers = [module for layer in range(lens.n_layers) for module in lens.layer(layer).modules()]
    linear = {module.weight for module in layers if isinstance(module, torch.nn.Linear | Conv1D)}
    clean = run_with(lens, TOKENS, layers=[0], logits=True).logits
    with quantised_weights(lens, "int4_token"):
        assert {
            parameter for parameter, old in before.items() if not torch.equal(parameter, old)
        } == linear
        edited = run_with(lens, TOKENS, layers=[0], logits=True).logits
        with torch.no_grad():
            wanted = model(TOKENS).logits
    assert torch.allclose(edited, wanted, atol=1e-4)
    assert not torch.allclose(edited, clean, atol=1e-3)
    assert all(torch.equal(parameter, old) for parameter, old in before.items())
    assert torch.equal(run_with(lens, TOKENS, layers=[0], logits=True).logits, clean)


def test_the_rows_of_a_weight_are_its_output_channels():
    for family, path in (
        ("llama", "model.layers.0.mlp.down_proj"),
        ("gpt2", "transformer.h.0.mlp.c_proj"),
    ):
        model = tiny(family)
        own = model.get_submodule(path).weight.detach()
        rows = own.T.clone() if family == "gpt2" else own.clone()
        with quantised_weights(wrap(model), "int8_token"):
            found = own.T.clone() if family == "gpt2" else own.clone()
        assert exactly(found, integers_of(rows, 127))


def test_a_weight_that_layers_share_comes_back():
    model = tiny("llama")
    first, second = (layer.mlp.down_proj for layer in model.model.layers[:2])
    second.weight = first.weight
    before = first.weight.detach().clone()
    with quantised_weights(wrap(model), "int4_token"):
        assert not torch.equal(first.weight, before)
    assert torch.equal(first.weight, before)

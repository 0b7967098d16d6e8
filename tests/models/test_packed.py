"""Packed weights are read as the matrix that the layer multiplies by, and refused where they would be changed."""

import pytest
import torch
from lenses import tokens
from torch import nn

from sink_lens import direct_logit_attribution
from sink_lens.activations.record import capture
from sink_lens.activations.sink_mask import sink_mask
from sink_lens.edits.constructors import scalar, zero
from sink_lens.edits.quantisation import quantised_weights
from sink_lens.engine.forward import run_with
from sink_lens.errors import ModelError
from sink_lens.models.load import wrap
from sink_lens.models.packed import is_packed, unpacked_weight
from sink_lens.models.weights import attention_weights, mlp_weights
from tests.tiny_families import tiny

NEEDED = "the weight of Packed is packed, .* need it in 16 or 32 bit"


class Packed(nn.Module):
    """Two weights of 4 bits in a byte and a scale for each row, stored as one column, as bitsandbytes does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        codes = (linear.weight.detach() / scale).round().clamp(-7, 7).to(torch.int64) + 8
        pairs = codes.flatten().unflatten(0, (-1, 2))
        self.weight = nn.Parameter(
            (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8), requires_grad=False
        )
        self.scale, self.bias = nn.Parameter(scale), linear.bias

    def unpacked(self) -> torch.Tensor:
        codes = torch.cat([self.weight // 16, self.weight % 16], dim=1).reshape(
            self.out_features, self.in_features
        )
        return (codes.float() - 8) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.unpacked(), self.bias)


def both(family: str, *, kind: type[Packed] = Packed, **fields):
    """A tiny model whose layers are packed, and the same with the numbers that these multiply by."""
    packed, plain = tiny(family, **fields), tiny(family, **fields)
    with torch.no_grad():
        for name, module in list(packed.named_modules()):
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                path, _, leaf = name.rpartition(".")
                setattr(packed.get_submodule(path), leaf, own := kind(module))
                plain.get_submodule(name).weight.copy_(own.unpacked())
    return wrap(packed), wrap(plain)


class Rounding(Packed):
    """Packed weights whose kernel computes in 16 bit, as bitsandbytes does on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return nn.functional.linear(x.bfloat16(), self.unpacked().bfloat16(), bias).to(x.dtype)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("by", ["head", "neuron"])
def test_what_the_kernel_of_packed_weights_rounds_is_in_a_row_of_its_own(family, by):
    lens, _ = both(family, kind=Rounding)
    found, whole = (direct_logit_attribution(lens, tokens(), 5, by=one) for one in (by, "layer"))
    assert torch.allclose(found.values.sum(0), found.logits, atol=1e-4)
    part = {"head": "attention", "neuron": "mlp"}[by]
    for layer in range(3):
        own, wanted = (
            one.frame["layer"].eq(layer).fillna(False).to_numpy(dtype=bool)
            for one in (found, whole)
        )
        rounding = own & found.frame["part"].eq(part).to_numpy()
        wanted &= whole.frame["part"].eq(part).to_numpy()
        parts = found.values[own & found.frame["part"].isin([by, part]).to_numpy()]
        assert torch.allclose(parts.sum(0), whole.values[wanted][0], atol=1e-4)
        assert 0 < found.values[rounding].abs().max() < 0.02 * parts.abs().sum(0).max()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_weights_are_read_as_the_matrix_that_the_layer_multiplies_by(family):
    packed, plain = both(family)
    assert packed.d_mlp == plain.d_mlp
    for layer in range(3):
        found, expected = (attention_weights(one, layer=layer) for one in (packed, plain))
        for name in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k"):
            torch.testing.assert_close(
                getattr(found, name), getattr(expected, name), atol=1e-6, rtol=0
            )
        found, expected = (mlp_weights(one, layer=layer) for one in (packed, plain))
        for name in ("w_gate", "w_up", "w_down"):
            torch.testing.assert_close(
                getattr(found, name), getattr(expected, name), atol=1e-6, rtol=0
            )


def test_an_edit_that_reads_weights_has_the_effect_of_the_unpacked_model():
    logits = [
        run_with(one, tokens(), scalar(one, layer=1, neurons=[3, 5], dimensions=[0, 7])).logits
        for one in both("llama")
    ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_what_changes_a_packed_weight_is_refused():
    lens, _ = both("llama")
    with pytest.raises(ModelError, match=NEEDED), quantised_weights(lens, "int8_token"):
        pass


def test_fused_projections_that_are_packed_are_measured_and_not_changed():
    packed, plain = both("phi3")
    found, expected = (
        capture(one, tokens(), sites=["q", "up", "resid_post"], path="plain")
        for one in (packed, plain)
    )
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], atol=1e-5, rtol=1e-5)
    assert torch.equal(sink_mask(packed, tokens()), sink_mask(plain, tokens()))
    with pytest.raises(
        ModelError,
        match=r"fused projections of .* are packed \(Packed\), .* need weights in 16 or 32",
    ):
        run_with(packed, tokens(), zero("z", layers=[0]))


def test_what_is_packed_is_told_by_its_type():
    layer = nn.Linear(4, 4)
    assert not is_packed(layer)
    assert not is_packed(layer.to(torch.bfloat16))
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert is_packed(layer)
    assert is_packed(nn.Module())  # GPTQ's layers have no weight at all
    embedding = nn.Embedding(4, 4)
    embedding.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ModelError, match="the weight of Embedding is packed"):
        unpacked_weight(embedding, dtype=torch.float32)


class Dropped(Packed):
    """Packed weights and a small change beside them that drops inputs in training, as QLoRA has."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        generator = torch.Generator().manual_seed(0)
        change = torch.randn(linear.weight.shape, generator=generator) * 1e-3
        self.change = nn.Parameter(change)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.dropout(x, 0.5, self.training) @ self.change.T


def test_weights_of_a_model_in_training_are_those_of_eval_mode():
    lens, _ = both("llama", kind=Dropped)
    down = lens.layer(0).mlp.down_proj
    wanted = down.unpacked() + down.change
    lens.plain.train()
    found = mlp_weights(lens, layer=0).w_down
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert all(module.training for module in lens.plain.modules())


def test_a_linear_layer_in_the_place_of_a_conv1d_is_read_as_it_is():
    model = tiny("gpt2")
    given = model.transformer.h[0].attn.c_proj
    linear = nn.Linear(48, 48)
    linear.weight, linear.bias = nn.Parameter(given.weight.detach().T.clone()), given.bias
    model.transformer.h[0].attn.c_proj = linear
    found, expected = (attention_weights(wrap(one), layer=0) for one in (model, tiny("gpt2")))
    assert torch.equal(found.w_o, expected.w_o)

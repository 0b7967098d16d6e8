"""Models that bitsandbytes and torchao quantised, where these are installed: right, or refused with the way out."""

import importlib

import peft
import pytest
import torch
from own_attention import batch
from torch import nn

from sink_lens import capture, direct_logit_attribution, run_with, wrap
from sink_lens.circuits import find
from sink_lens.edits import freeze, zero
from sink_lens.edits.metrics import loss
from sink_lens.errors import ModelError
from sink_lens.patching import patch
from sink_lens.patching.attribution import attribution_patch
from tests.tiny_families import tiny

CLEAN, CORRUPTED = batch(length=7), batch(1, length=7)


def of_bitsandbytes(model, make):
    for layer in model.model.layers:
        for path in (
            "self_attn.q_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ):
            parent, _, leaf = path.rpartition(".")
            holder = layer.get_submodule(parent)
            setattr(holder, leaf, make(getattr(holder, leaf)).to("cpu"))
    return model


def int8(model):
    import bitsandbytes as bnb

    def make(base):
        made = bnb.nn.Linear8bitLt(
            base.in_features, base.out_features, bias=False, has_fp16_weights=False
        )
        made.weight = bnb.nn.Int8Params(
            base.weight.data.clone(), requires_grad=False, has_fp16_weights=False
        )
        return made

    return of_bitsandbytes(model, make)


def nf4(model):
    import bitsandbytes as bnb

    def make(base):
        kind = {"quant_type": "nf4", "compute_dtype": torch.float32}
        made = bnb.nn.Linear4bit(base.in_features, base.out_features, bias=False, **kind)
        made.weight = bnb.nn.Params4bit(
            base.weight.data.clone(), requires_grad=False, quant_type="nf4"
        )
        return made

    return of_bitsandbytes(model, make)


def qlora(model):
    settings = peft.LoraConfig(r=2, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(nf4(model), settings)


def of_torchao(name, **settings):
    def change(model):
        quantization = importlib.import_module("torchao.quantization")
        quantization.quantize_(model.model, getattr(quantization, name)(**settings))
        return model

    return change


KINDS = {
    "int8": int8,
    "nf4": nf4,
    "QLoRA": qlora,
    "torchao int8": of_torchao("Int8WeightOnlyConfig"),
    "torchao int4": of_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8": of_torchao("Float8WeightOnlyConfig"),
    "torchao int8 with int8 activations": of_torchao("Int8DynamicActivationInt8WeightConfig"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model_is_right_or_refused(kind):
    pytest.importorskip("torchao" if "torchao" in kind else "bitsandbytes")
    model = KINDS[kind](tiny("llama", hidden_size=64, intermediate_size=128)).eval()
    with torch.no_grad():
        wanted = model(CLEAN.tokens, use_cache=False).logits
    lens = wrap(model)
    assert any("quantised model" in one for one in lens.notes)
    rounds = (
        kind in ("nf4", "QLoRA") or "activations" in kind
    )  # to 16 or 8 bit in each layer, which enlarges 1e-7
    room = (0.1 if rounds else 1e-5) * wanted.abs().max()
    run = run_with(lens, CLEAN, logits=True)
    assert (run.logits - wanted).abs().max() < room
    with torch.no_grad():
        model(CLEAN.tokens, use_cache=False)
    assert torch.equal(run_with(lens, CLEAN, logits=True).logits, run.logits)
    assert not torch.equal(run_with(lens, CLEAN, zero("z", layers=[1])).loss, run.loss)
    z = capture(lens, CLEAN, sites=["z"], path="bridge")["z", 1]
    found = patch(
        lens, CLEAN, CORRUPTED, site="z", by=("layer",), metric="loss", controls=0, progress=False
    )
    alone = run_with(lens, CORRUPTED, freeze("z", {1: z})).loss.double().mean().item()
    assert found.frame["value"][1] == pytest.approx(alone, abs=0.05 if rounds else 1e-3)
    for by in ("layer", "head", "neuron"):
        parts = direct_logit_attribution(lens, CLEAN, 5, by=by)
        assert torch.allclose(parts.values.sum(0), run.logits[:, -1, 5].double(), atol=1e-3)
        assert any("quantised model" in one for one in parts.notes)
    assert find(lens, CLEAN, CORRUPTED, metric=loss(), method="exact", edges=20).edges is not None
    try:
        effects = attribution_patch(
            lens, CLEAN, CORRUPTED, site="z", by=("layer",), metric="loss"
        ).frame["effect"]
        assert len(find(lens, CLEAN, CORRUPTED, metric=loss()).every_edge)
    except ModelError as error:
        assert "gradients do not pass" in str(error) and "dequantize" in str(error)  # noqa: PT017, PT018
        assert rounds
    else:
        assert effects.abs().min() > 0


class NoBackward(nn.Module):
    """A packed projection whose kernel passes no gradient, as that of bitsandbytes for 4 bit on a CPU."""

    def __init__(self, base):
        super().__init__()
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, None
        scale = base.weight.detach().abs().max() / 127
        self.weight = nn.Parameter(
            (base.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x.detach(), self.weight.float() * self.scale)


def test_gradients_that_a_packed_layer_does_not_pass_are_no_effects_of_0():
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj = NoBackward(model.model.layers[1].mlp.down_proj)
    lens = wrap(model)
    for door in (
        lambda: attribution_patch(lens, CLEAN, CORRUPTED, site="z", by=("layer",), metric="loss"),
        lambda: find(lens, CLEAN, CORRUPTED, metric=loss()),
    ):
        with pytest.raises(ModelError, match=r"gradients do not pass through NoBackward"):
            door()
    found = patch(
        lens, CLEAN, CORRUPTED, site="z", by=("layer",), metric="loss", controls=0, progress=False
    )
    assert found.frame["effect"].abs().min() > 0

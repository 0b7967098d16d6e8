"""In a process of its own: what must work without our package's help, or without the checks of shapes of a test run."""

import os
import subprocess
import sys

import pytest

from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import tiny

_SCRIPT = """
import sys, torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
assert not any(name.startswith("sink_lens") for name in sys.modules)
from sink_lens.models.headnorm import HeadNormConfig, HeadNormForCausalLM
assert "sink_lens.models.headnorm.adapter" not in sys.modules

def model_of(**fields):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=30)
    return HeadNormForCausalLM(HeadNormConfig(**sizes, num_key_value_heads=1, **fields))

ids = torch.tensor([[3, 4, 5, 6]])
model = model_of(attention="sigmoid", value_norm="shared").eval()
model.set_attn_implementation("eager")
with torch.no_grad():
    expected = model(ids, use_cache=False).logits
    bridge = build_bridge_from_module(model, "HeadNormForCausalLM", hf_config=model.config)
    assert torch.allclose(bridge(ids, use_cache=False), expected, rtol=1e-5, atol=1e-6)
print("found", type(bridge.adapter).__name__)

norms = ("position", "per_head", "none", "shared", "shared")
for attention, norm in zip(("softmax", "sigmoid", "gate_elementwise", "gate_headwise", "sink_logit"), norms):
    model = model_of(attention=attention, value_norm=norm).train()
    assert model.config._attn_implementation == "sdpa"
    expected = model(ids, labels=ids, use_cache=False).loss
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(ids, labels=ids, use_cache=False).loss, expected, rtol=1e-5), attention
    print("compiled", attention)
"""
_FRONT_DOOR = """
import sys
from sink_lens import HeadNormForCausalLM
from transformer_lens.model_bridge import TransformerBridge
print(type(TransformerBridge.boot_transformers(sys.argv[1], device="cpu").adapter).__name__)
"""


def output_of(script, *arguments):
    env = os.environ | {"HOSTILE_CPU": "0", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


@pytest.mark.exhaustive
def test_transformer_lens_finds_the_adapter_without_us_and_every_variant_compiles_without_a_break():
    """By the entry point of the installed package: the process imports the class and no adapter.

    Under a full graph a break is an error. No mode of torch's dispatch may be on where a model is compiled.
    """
    variants = ("softmax", "sigmoid", "gate_elementwise", "gate_headwise", "sink_logit")
    assert output_of(_SCRIPT) == ["found HeadNormAdapter", *(f"compiled {one}" for one in variants)]


@pytest.mark.exhaustive
def test_the_front_door_of_transformerlens_opens_a_saved_model_after_one_import(tmp_path):
    tiny("headnorm_gate").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert output_of(_FRONT_DOOR, str(tmp_path))[-1] == "HeadNormAdapter"

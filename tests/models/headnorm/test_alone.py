"""In a process of its own: what must work without our package's help, or without the checks of shapes of a test run."""

import os
import subprocess
import sys

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


def test_transformer_lens_finds_the_adapter_without_us_and_every_variant_compiles_without_a_break():
    """By the entry point of the installed package: the process imports the class and no adapter.

    Under a full graph a break is an error. No mode of torch's dispatch may be on where a model is compiled.
    """
    env = os.environ | {"HOSTILE_CPU": "0"}
    run = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, check=False)
    said = ["found HeadNormAdapter"]
    said += [f"compiled {one}" for one in ("softmax", "sigmoid", "gate_elementwise", "gate_headwise", "sink_logit")]
    assert run.stdout.splitlines() == said, run.stderr[-2000:]

"""OPT through the adapter with rebuilt attention equals Hugging Face; test_sites has the edits of its sites."""

import copy

import pytest
import torch
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.model_bridge.supported_architectures import OptArchitectureAdapter

from sink_lens.models.opt import EDITABLE_OPT, EditableOptAdapter, register
from sink_lens.models.tiny import VOCAB_SIZE, tiny

LAYER, LENGTH = 1, 24
WIDE = {"hidden_size": 64}
"""d_head 16: the scale 1/4 is a power of two, so scaling the query or the scores is equal to the last bit."""


def build(architecture=None, **overrides):
    """A plain eager OPT and a bridge over a copy of it."""
    plain = tiny("opt", attn_implementation="eager", **overrides)
    inner = copy.deepcopy(plain)
    return plain, build_bridge_from_module(inner, architecture or register(), hf_config=inner.config)


def tokens(batch=2):
    return torch.randint(3, VOCAB_SIZE, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model, ids, **kwargs):
    out = model(ids, **kwargs)
    return out if isinstance(out, torch.Tensor) else out.logits


@torch.no_grad()
def edited(bridge, hook, edit, ids):
    return bridge.run_with_hooks(ids, fwd_hooks=[(f"blocks.{LAYER}.attn.{hook}", lambda t, hook: edit(t))])


def scale_first_key(t):
    """Takes 70% of the mass of key 0 away."""
    t = t.clone()
    t[..., 0] *= 0.3
    return t


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        WIDE,
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
        {"do_layer_norm_before": False, "word_embed_proj_dim": 24},  # as opt-350m
    ],
    ids=["default", "wide", "no-bias", "no-gain", "post-norm"],
)
def test_bridge_equals_hugging_face(overrides):
    plain, bridge = build(**overrides)
    ids = tokens()
    torch.testing.assert_close(logits(bridge, ids), logits(plain, ids), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_a_2d_mask_equals_hugging_face_and_the_sequence_alone(side):
    plain, bridge = build()
    ids, n_padding = tokens(), 5
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    real = slice(n_padding, None) if side == "left" else slice(None, LENGTH - n_padding)
    mask[1] = 0
    mask[1, real] = 1
    ids[1, mask[1] == 0] = 0
    out = logits(bridge, ids, attention_mask=mask)
    torch.testing.assert_close(out, logits(plain, ids, attention_mask=mask), rtol=0.0, atol=1e-5)
    alone = logits(bridge, ids[1:, real])
    torch.testing.assert_close(out[1:, real], alone, rtol=0.0, atol=1e-5)


def test_a_4d_mask_equals_hugging_face_when_positions_are_given():
    # Without position_ids Hugging Face takes the positions of OPT from the mask, which then must be 2-D.
    plain, bridge = build()
    ids, positions = tokens(), torch.arange(LENGTH).expand(2, -1)
    keep = torch.ones(LENGTH, LENGTH).tril().bool()
    keep[10, :10] = False
    additive = torch.zeros(LENGTH, LENGTH).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = logits(plain, ids, attention_mask=additive[None, None], position_ids=positions)
    for mask in (keep, additive):
        out = logits(bridge, ids, attention_mask=mask[None, None], position_ids=positions)
        torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-5)
    assert (expected - logits(plain, ids)).abs().max() > 0.1


def test_per_head_results_sum_to_the_attention_output():
    _, bridge = build()
    bridge.set_use_attn_result(True)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens())
    summed = cache[f"blocks.{LAYER}.attn.hook_result"].sum(-2) + bridge.blocks[LAYER].attn.b_O
    torch.testing.assert_close(summed, cache[f"blocks.{LAYER}.hook_attn_out"], rtol=0.0, atol=1e-6)


def test_register_adds_a_name_and_leaves_the_stock_adapter():
    assert register() == register() == EDITABLE_OPT == "SinkLensOPTForCausalLM"
    adapters = ArchitectureAdapterFactory._adapters
    assert adapters[EDITABLE_OPT] is EditableOptAdapter
    assert adapters["OPTForCausalLM"] is OptArchitectureAdapter


def test_the_stock_adapter_throws_pattern_edits_away():
    # Why this adapter exists; if it fails after an upgrade, the adapter may no longer be needed.
    plain, bridge = build("OPTForCausalLM")
    with pytest.warns(UserWarning, match="The edit is discarded"):
        out = edited(bridge, "hook_pattern", scale_first_key, tokens())
    torch.testing.assert_close(out, logits(plain, tokens()), rtol=0.0, atol=1e-5)

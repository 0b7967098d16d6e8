"""GPT-NeoX through the adapter that shares its fused projection: nothing is copied, and gradients reach it."""

import torch
from lenses import tokens

from sink_lens.models.bridge_adapters import FusedRowsLinear, SharedNeoxAdapter
from sink_lens.models.load import wrap
from tests.tiny_families import tiny


def test_a_part_of_a_fused_projection_by_hand():
    """2 heads of 1: rows are q0 k0 v0 q1 k1 v1, so the key part of rows 0..5 is rows 1 and 4."""
    fused = torch.nn.Linear(3, 6)
    with torch.no_grad():
        fused.weight.copy_(torch.arange(6.0)[:, None].expand(6, 3))
        fused.bias.copy_(torch.arange(6.0) * 10)
    key = FusedRowsLinear(fused, rows=torch.tensor([1, 4]))
    assert key.weight[:, 0].tolist() == [1, 4]
    assert key.bias is not None
    assert key.bias.tolist() == [10, 40]
    # 1 * (1 + 1 + 1) + 10 and 4 * 3 + 40
    assert key(torch.ones(1, 1, 3)).tolist() == [[[13, 52]]]
    assert list(key.parameters()) == []


def test_a_loss_through_the_bridge_trains_the_shared_projection():
    lens = wrap(tiny("gpt_neox", attn_implementation="eager"))
    assert isinstance(lens.bridge.adapter, SharedNeoxAdapter)
    fused = lens.layer(1).attention.query_key_value
    lens.plain(tokens(), labels=tokens(), use_cache=False).loss.backward()
    expected = [parameter.grad.clone() for parameter in fused.parameters()]
    lens.plain.zero_grad()
    lens.bridge(tokens(), return_type="loss", use_cache=False).backward()
    for parameter, gradient in zip(fused.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_bridge_shows_the_weights_as_they_are_now():
    lens = wrap(tiny("gpt_neox"))
    for values in (True, False):
        assert all(getattr(lens.bridge, name).any() == values for name in ("W_Q", "W_K", "W_V"))
        for layer in lens.layers:
            layer.attention.query_key_value.weight.data.zero_()

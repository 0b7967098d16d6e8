"""The weights of every family, in one layout, reproduce what the model computes."""

import functools

import pytest
import torch
from einops import einsum

from sink_lens.capture.record import capture
from sink_lens.models.load import wrap
from sink_lens.models.tiny import TINY_FAMILIES, tiny
from sink_lens.models.weights import attention_weights, mlp_weights, norm_weights

IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))


@functools.cache
def lens(family):
    return wrap(tiny(family))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_projections_give_queries_keys_and_values(family):
    model = lens(family)
    found = capture(model, IDS, sites=["attn_in", "q", "k", "v"], layers=[1])
    weights = attention_weights(model, layer=1)
    pairs = ((weights.w_q, weights.b_q, "q"), (weights.w_k, weights.b_k, "k"), (weights.w_v, weights.b_v, "v"))
    for matrix, bias, site in pairs:
        product = einsum(
            found["attn_in", 1], matrix, "batch position d_model, head d_head d_model -> batch position head d_head"
        )
        close(product + bias, found[site, 1])


@pytest.mark.parametrize("family", [family for family in TINY_FAMILIES if family != "gpt_oss"])
def test_the_down_projection_gives_the_output_up_to_the_norm_after_it(family):
    model = lens(family)
    found = capture(model, IDS, sites=["neurons", "mlp_out"], layers=[1])
    weights = mlp_weights(model, layer=1)
    output = found["neurons", 1] @ weights.w_down.T + weights.b_down
    norm = norm_weights(model, layer=1, which="mlp_post_norm")
    if norm is not None:
        output = output / norm.scale(output)[..., None] * norm.gain
    close(output, found["mlp_out", 1])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_norm_before_the_attention_gives_its_input(family):
    model = lens(family)
    found = capture(model, IDS, sites=["resid_pre", "attn_in"], layers=[1])
    norm = norm_weights(model, layer=1, which="attn_norm")
    x = found["resid_pre", 1]
    if norm is not None:
        centred = x - x.mean(-1, keepdim=True) if norm.centred else x
        x = centred / norm.scale(x)[..., None] * norm.gain + norm.bias
    close(x, found["attn_in", 1])


def test_a_mixture_of_experts_has_no_mlp_weights():
    assert mlp_weights(lens("gpt_oss"), layer=0) is None

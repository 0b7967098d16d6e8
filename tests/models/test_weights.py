"""The weights of a layer, in one layout for all families, do what the layer does."""

import functools
from typing import get_args

import pytest
import torch
from einops import einsum
from lenses import lens_of as lens
from lenses import tokens
from mlps import EXPERTS, UNGATED
from rounding import assert_rows_close

from sink_lens.activations.record import capture
from sink_lens.models.sites import sites_of
from sink_lens.models.weights import NormName, attention_weights, mlp_weights, norm_weights
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES

LAYERS = (0, 1, 2)
ALL_FAMILIES = (*TINY_FAMILIES, *MORE_FAMILIES)
DENSE = tuple(family for family in ALL_FAMILIES if family not in EXPERTS)
SANDWICHED = ("gemma2", "gemma3")
PARALLEL = ("gpt_neox", "cohere", "cohere2", "phi", "falcon", "gptj")
POST_NORMED = ("olmo2", "olmo3", "exaone4", "flex_olmo")
QK_NORMED = (
    *(
        "qwen3",
        "gemma3",
        "headnorm_gate",
        "qwen3_moe",
        "olmoe",
        "apertus",
        "hunyuan",
        "minimax_m2",
        "nanochat",
    ),
    "glm4_moe",
    *POST_NORMED,
)
CENTRED = (
    *set(UNGATED) - {"arcee", "apertus", "nanochat"},
    "stablelm",
    "cohere",
    "cohere2",
    "olmo",
    "phimoe",
)


@functools.cache
def sites(family):
    names = [name for name in sites_of(lens(family).family) if name not in ("scores", "pattern")]
    return capture(lens(family), tokens(), sites=names)


def through(family, which, layer, x):
    """(x - mean) / scale * gain + bias, the mean only where the norm centres; x where there is no such norm."""
    norm = norm_weights(lens(family), layer=layer, which=which)
    if norm is None:
        return x
    centre = x.mean(-1, keepdim=True) if norm.centred else 0
    return (x - centre) / norm.divisor(x)[..., None] * norm.gain + norm.bias


@pytest.mark.every_family
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_queries_keys_and_values_come_from_the_attentions_input(family):
    for layer in LAYERS:
        weights = attention_weights(lens(family), layer=layer)
        x = sites(family)["attn_in", layer]
        for site, weight, bias in (
            ("q", weights.w_q, weights.b_q),
            ("k", weights.w_k, weights.b_k),
            ("v", weights.w_v, weights.b_v),
        ):
            made = einsum(x, weight, "b position d, head dh d -> b position head dh") + bias
            assert_rows_close(made.flatten(2), sites(family)[site, layer].flatten(2), (site, layer))


@pytest.mark.every_family
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_outputs_are_sums_over_heads_and_over_neurons(family):
    for layer in LAYERS:
        attention, mlp = (
            attention_weights(lens(family), layer=layer),
            mlp_weights(lens(family), layer=layer),
        )
        of_heads = einsum(
            sites(family)["z", layer],
            attention.w_o,
            "b position head dh, head dh d -> b position d",
        )
        of_neurons = einsum(
            sites(family)["neurons", layer], mlp.w_down, "b position n, d n -> b position d"
        )
        made = through(family, "attn_post_norm", layer, of_heads + attention.b_o)
        assert_rows_close(made, sites(family)["attn_out", layer])
        made = through(family, "mlp_post_norm", layer, of_neurons + mlp.b_down)
        assert_rows_close(made, sites(family)["mlp_out", layer])


@pytest.mark.every_family
@pytest.mark.parametrize("family", DENSE)
def test_gate_and_up_come_from_the_mlps_input(family):
    """Compared by differences between neighbouring positions, since the weights lack the bias."""
    for layer in LAYERS:
        weights = mlp_weights(lens(family), layer=layer)
        assert (weights.w_gate is not None) == (family not in UNGATED)
        x = sites(family)["mlp_in", layer].diff(dim=1)
        for site, weight in (("up", weights.w_up), ("gate", weights.w_gate)):
            if weight is not None and (site, layer) in sites(
                family
            ):  # where experts stand beside, there is none
                made = einsum(x, weight, "b position d, n d -> b position n")
                assert_rows_close(made, sites(family)[site, layer].diff(dim=1), (site, layer))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_attention_and_the_mlp_read_the_stream_through_their_norms(family):
    for layer in LAYERS:
        stream = sites(family)["resid_pre", layer]
        assert_rows_close(
            through(family, "attn_norm", layer, stream), sites(family)["attn_in", layer]
        )
        if family not in PARALLEL:  # their MLP reads the stream before the attention
            stream = stream + sites(family)["attn_out", layer]
        assert_rows_close(
            through(family, "mlp_norm", layer, stream), sites(family)["mlp_in", layer]
        )


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family_has_the_norms_that_it_has(family):
    expected = {"attn_norm", "mlp_norm"}
    if family in (*SANDWICHED, "glm4", "granite", "granitemoe"):
        expected |= {"attn_post_norm", "mlp_post_norm"}
    if family in POST_NORMED:
        expected = {"attn_post_norm", "mlp_post_norm"}
    if family in QK_NORMED:
        expected |= {"q_norm", "k_norm"}
    found = {
        which: norm_weights(lens(family), layer=1, which=which) for which in get_args(NormName)
    }
    assert {which for which, norm in found.items() if norm is not None} == expected
    assert {norm.centred for norm in found.values() if norm is not None} == {family in CENTRED}


@pytest.mark.parametrize(
    ("family", "variance"), [("llama", 25 / 48), ("gpt2", 25 / 48 - (7 / 48) ** 2)]
)
def test_the_scale_of_a_norm_by_hand(family, variance):
    """For (3, 4, 0, ...) the mean of squares is (9 + 16) / 48; LayerNorm takes off the square of the mean, 7 / 48."""
    x = torch.zeros(48)
    x[0], x[1] = 3.0, 4.0
    norm = norm_weights(lens(family), layer=0, which="attn_norm")
    assert norm is not None
    torch.testing.assert_close(norm.divisor(x), torch.tensor(variance + norm.eps).sqrt())

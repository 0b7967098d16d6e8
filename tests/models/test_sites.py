"""Every site of every family is the same tensor on both paths, and an edit there does what it says."""

import functools

import pytest
import torch
from lenses import ALL_FAMILIES, tokens
from lenses import lens_of as lens
from mlps import EXPERTS, UNGATED
from raw_models import raw_logits

from sink_lens import edits
from sink_lens.activations.record import capture
from sink_lens.errors import ModelError, SiteError
from sink_lens.models.families import FAMILIES, family_of
from sink_lens.models.sites import SITES, bridge_hook_name, site_of, sites_of
from tests.tiny_families import HYBRID_FAMILIES, LATENT_FAMILIES

BATCH, LENGTH, LAYER = 2, 24, 1
NO_GATE = ("gate", "up")
UNGROUPED = ("gpt2", "gpt_neox", "opt", "gptj", "gpt_neo", "bloom", *LATENT_FAMILIES)
WIDE_HEAD = (
    *("qwen3", "gemma2", "gemma3", "gpt_oss", "headnorm_gate", "headnorm_sink"),
    *(
        "gemma",
        "glm4",
        "qwen3_moe",
        "glm",
        "ministral3",
        "seed_oss",
        "hunyuan",
        "vaultgemma",
        "minimax_m2",
        "glm4_moe",
    ),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "falcon_h1", *LATENT_FAMILIES),
)
MIXED = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v2", "glm4_moe_lite"), 4 * 40 + 40),
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe", "qwen3_next"), 4 * 40 + 56),
    **dict.fromkeys(("glm4_moe", "ernie4_5_moe"), 4 * 40 + 2 * 40),
    "lfm2_moe": 4 * 40,
    "jamba": 4 * 80,
}
"""Neurons of families with routed experts beside a shared one or beside dense layers, on one axis."""
D_MLP = (
    dict.fromkeys(EXPERTS, 4 * 80) | MIXED | {"bloom": 192, "gpt_oss": 4 * 81, "qwen3_moe": 4 * 40}
)
GEMMA4 = [
    {
        "kv_head": 1 if layer % 2 else 2,
        "d_head": width,
        "d_value": width,
        "d_mlp": 80 if layer < 2 else 160,
    }
    for layer, width in enumerate((16, 24, 16, 24))
]
"""Sizes of its layers: every other one has fewer and wider heads; those with keys of an earlier layer a wider MLP."""
NORMED = ("headnorm", "headnorm_gate", "bitnet")
"""Families with a step between the aggregated values and W_O."""
GATED_Q = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
EVERY = pytest.mark.parametrize("family", ALL_FAMILIES)


@functools.cache
def captured(family, path):
    """All sites, those of some layers apart: a capture is of layers that have all its sites."""
    model = lens(family)
    found = {}
    for layers in {model.layers_with(site) for site in sites_of(model.family)}:
        own = [site for site in sites_of(model.family) if model.layers_with(site) == layers]
        found |= capture(model, tokens(), sites=own, path=path).tensors
    return found


@functools.cache
@torch.no_grad()
def baseline(family):
    return lens(family).bridge(tokens(), use_cache=False)


@torch.no_grad()
def edited_bridge(family, places, edit):
    model = lens(family)
    hooks = [
        (bridge_hook_name(SITES[site], family=model.family, layer=layer), edit)
        for site, layer in places
    ]
    return model.bridge.run_with_hooks(tokens(), fwd_hooks=hooks, use_cache=False)


def assert_close(found, expected, tolerance=1e-5, *, of=None, cancels=False):
    """Within the tolerance of the norm of each row; what the mask blocks is equal.

    Where its entries are sums that may cancel to near 0, within that of the largest row of the head: rounding is
    relative to what is summed up.
    """
    found, expected = found.double(), expected.double()
    blocked = expected < -1e30
    assert torch.equal(found < -1e30, blocked), of
    found, expected = found.masked_fill(blocked, 0), expected.masked_fill(blocked, 0)
    size = expected.norm(dim=-1)
    if cancels:
        size = size.amax(-1, keepdim=True)
    assert ((found - expected).norm(dim=-1) <= tolerance * size + 1e-12).all(), of


def noise_like(tensor):
    return 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2))


@EVERY
def test_a_family_has_every_site_but_those_that_it_lacks(family):
    lacking = NO_GATE if family in EXPERTS else ("gate",) if family in UNGATED else ()
    lacking = NO_GATE if family in MIXED else lacking
    lacking += ("z_raw",) if family in GATED_Q else ()
    lacking += () if family in HYBRID_FAMILIES else ("mixer_out",)
    lacking += () if family == "gemma4" else ("per_layer_out",)
    lacking += ("q_latent",) if family == "deepseek_v2" else ()
    lacking += () if family in LATENT_FAMILIES else ("q_latent", "kv_latent")
    assert sites_of(lens(family).family) == tuple(name for name in SITES if name not in lacking)


@pytest.mark.every_family
@EVERY
def test_every_site_is_equal_on_both_paths(family):
    plain, bridge = captured(family, "plain"), captured(family, "bridge")
    model = lens(family)
    expected = {
        (one, at)
        for one in sites_of(model.family)
        for at in model.layers_with(one)
        if one != "final"
    }
    assert plain.keys() == bridge.keys() == expected | {("final", 0)}
    for site, layer in plain:
        assert plain[site, layer].dtype == bridge[site, layer].dtype == torch.float32
        # A score is a product of a query and a key: where these are rounded in another way, so is a score near 0.
        assert_close(
            plain[site, layer], bridge[site, layer], of=(site, layer), cancels=site == "scores"
        )


@EVERY
def test_every_site_has_the_sizes_of_its_axes(family):
    sizes = {
        "batch": BATCH,
        "position": LENGTH,
        "query": LENGTH,
        "key": LENGTH,
        "d_model": 48,
        "head": 4,
        "kv_head": 4 if family in UNGROUPED else 1 if family in ("falcon", "gpt_bigcode") else 2,
        "d_head": 16 if family in WIDE_HEAD else 12,
        "d_value": 14 if family in LATENT_FAMILIES else 16 if family in WIDE_HEAD else 12,
        "d_q_latent": 20,
        "d_kv_latent": 18,
        "d_mlp": D_MLP.get(family, 80),
    }
    found = captured(family, "plain")
    for site, layer in found:
        here = sizes | GEMMA4[layer] if family == "gemma4" else sizes
        assert found[site, layer].shape == tuple(here[axis] for axis in SITES[site].axes.split()), (
            site
        )
        assert found[site, layer].shape[1:] == lens(family).axis_sizes(
            SITES[site].axes, n_positions=LENGTH, layer=layer
        )


@EVERY
def test_the_sites_add_up_to_the_stream(family):
    sites = captured(family, "plain")
    for layer in range(lens(family).n_layers):
        adds = ("attn_out", "mixer_out", "mlp_out", "per_layer_out")
        written = [sites[name, layer] for name in adds if (name, layer) in sites]
        scalar = getattr(lens(family).layer(layer), "layer_scalar", 1.0)
        assert_close(
            (sites["resid_pre", layer] + sum(written)) * scalar, sites["resid_post", layer]
        )
        if ("z_raw", layer) in sites:
            assert torch.equal(sites["z", layer], sites["z_raw", layer]) == (family not in NORMED)


@EVERY
def test_edits_of_every_site_with_the_same_values_leave_the_logits_as_they_are(family):
    found = edited_bridge(family, captured(family, "plain"), lambda tensor, hook: tensor.clone())
    assert torch.equal(found, baseline(family))


@pytest.mark.every_family
@EVERY
def test_an_edit_of_any_site_on_the_bridge_is_the_same_edit_of_the_raw_model(family):
    layers = (LAYER, 0) if family in HYBRID_FAMILIES else (LAYER,)  # where their mixers are
    having = lens(family).layers_with
    for site, layer in (
        (one, at) for one in sites_of(lens(family).family) for at in layers if at in having(one)
    ):
        found = edited_bridge(
            family, [(site, layer)], lambda tensor, hook: tensor + noise_like(tensor)
        )
        noise = (site, layer, lambda view: view.add_(noise_like(view)))
        expected = raw_logits(family, tokens(), [noise], lens=lens(family))
        assert (found - baseline(family)).norm() > 1e-2 * baseline(family).norm(), site
        assert_close(found, expected, of=(site, layer))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("GptOssForCausalLM", "it is a mixture of experts.*resid_post"),
        ("GPT2LMHeadModel", "it has no gate in its MLP"),
    ],
)
def test_a_family_without_a_gate_says_why(architecture, reason):
    with pytest.raises(SiteError, match=rf"{architecture} has no site 'gate': {reason}"):
        site_of("gate", family=family_of(architecture))


def test_an_unknown_site_or_architecture_is_refused_with_the_list():
    with pytest.raises(SiteError, match=r"no site 'nowhere'; need one of resid_pre, .*final"):
        site_of("nowhere", family=family_of("LlamaForCausalLM"))
    families = [family for family in ALL_FAMILIES if not family.startswith("headnorm_")]
    assert len(FAMILIES) == len(families)
    with pytest.raises(
        ModelError, match=r"'MambaForCausalLM' is not known; need one of LlamaForCausalLM, .*GptOss"
    ):
        family_of("MambaForCausalLM")


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("blocks.1.attn.hook_z", "'z'"),
        ("hook_attn_out", "'attn_out'"),
        ("blocks.0.mlp.hook_post", "'neurons'"),
        ("attn_scores", "'scores'"),
        ("blocks.2.hook_resid_mid", "'attn_out', which a layer adds"),
        ("result", "'z' by heads"),
    ],
)
def test_a_place_of_transformer_lens_is_told_its_site(name, site):
    with pytest.raises(SiteError, match=f"there is no site '{name}'; it is called {site}"):
        edits.zero(name)

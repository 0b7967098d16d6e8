"""Hybrids: attention is read in the layers that have it, the others are named and skipped, and the rest is refused."""

import functools

import pytest
import torch
from lenses import speaking as lens_of
from lenses import tokens

from sink_lens import patching
from sink_lens.activations.attention import OBSERVED
from sink_lens.activations.record import Reading, capture, stream
from sink_lens.activations.sink_mask import sink_mask, sink_scores
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.edits.constructors import freeze
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, ModelError, SiteError
from sink_lens.identity.contraction import contraction
from sink_lens.measures.attention import sink_mass
from sink_lens.models.families import family_of
from sink_lens.models.load import load, random_init, wrap
from sink_lens.models.sites import sites_of
from sink_lens.models.weights import attention_weights, mlp_weights, norm_weights
from sink_lens.studies.card import card, card_text_rows
from sink_lens.studies.tokens.run import sink_tokens
from sink_lens.sweeps.grid import EditGrid, Grid
from sink_lens.sweeps.sweep import sweep
from sink_lens.training.monitor import SinkMonitor
from tests.tiny_families import HYBRID_FAMILIES, tiny
from tests.zoo import build

WITH = (1, 3)
INTERLEAVED = tuple(family for family in HYBRID_FAMILIES if family != "falcon_h1")
"""The families whose layers have attention or a mixer."""
EVERY = pytest.mark.parametrize("family", INTERLEAVED)


@EVERY
def test_the_layers_without_attention_are_named(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    lens = load(tmp_path)
    assert lens.attention_layers == WITH
    assert not lens.offloaded
    assert lens.notes[-1].startswith("layers 0,2 of ")
    assert lens.notes[-1].endswith(": they are skipped where attention is read")
    assert random_init(lens, seed=0).attention_layers == WITH


@EVERY
@pytest.mark.parametrize("kernel", ["fused", "eager"])
@torch.no_grad()
def test_the_pattern_is_that_of_eager_attention(family, kernel):
    model = tiny(family, attn_implementation="eager")
    kept = {}
    for layer in WITH:
        model.model.layers[layer].self_attn.register_forward_hook(
            lambda module, args, output, layer=layer: kept.update({layer: output[1]})
        )
    model(tokens(), use_cache=False)
    mass = Reading(name="mass", sites=("mass",), function=lambda view: view["mass"])
    found = stream(lens_of(family), tokens(), [mass], keys=range(24), kernel=kernel)
    pattern = capture(lens_of(family), tokens(), sites=["pattern"])
    assert {layer for _, layer in pattern} == {*found.values["mass"]} == {*WITH}
    for layer in WITH:
        torch.testing.assert_close(found["mass", layer], kept[layer], atol=1e-5, rtol=0)
        torch.testing.assert_close(pattern["pattern", layer], kept[layer], atol=1e-5, rtol=0)


@EVERY
@torch.no_grad()
def test_sites_and_weights_are_those_of_one_layer(family):
    lens = lens_of(family)
    sites = [name for name in sites_of(lens.family) if name not in (*OBSERVED, "mixer_out")]
    found = capture(lens, tokens(), sites=sites)
    reading = Reading(name="q", sites=("rotated_q",), function=lambda view: view["rotated_q"])
    for layer in WITH:
        weights = attention_weights(lens, layer=layer)
        close = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
        here = {name: found[name, layer] for name in sites if name != "final"}
        close(here["q"], torch.einsum("bpd,hed->bphe", here["attn_in"], weights.w_q) + weights.b_q)
        close(here["k"], torch.einsum("bpd,hed->bphe", here["attn_in"], weights.w_k) + weights.b_k)
        made = torch.einsum("bphe,hed->bpd", here["z"], weights.w_o) + weights.b_o
        if (norm := norm_weights(lens, layer=layer, which="attn_post_norm")) is not None:
            made = made / norm.divisor(made)[..., None] * norm.gain
        close(here["attn_out"], made)
        close(here["resid_post"], here["resid_pre"] + here["attn_out"] + here["mlp_out"])
        if "neurons" in here:
            close(here["down_out"], here["neurons"] @ mlp_weights(lens, layer=layer).w_down.T)
        norm = norm_weights(lens, layer=layer, which="q_norm")
        first = here["q"][:, 0]
        if norm is not None:
            wide = first if lens.family.qk_norm == "head" else first.flatten(1)
            first = (wide / norm.divisor(wide)[..., None] * norm.gain).view_as(first)
        rotated = stream(lens, tokens(), [reading])["q", layer][
            :, :, 0
        ]  # nothing is rotated at position 0
        scaling = getattr(lens.config, "attention_multiplier", lens.d_head**-0.5)
        close(rotated, first * scaling)


@EVERY
def test_a_layer_without_attention_is_refused_by_name_and_otherwise_left_out(family, tmp_path):
    lens = lens_of(family)
    with pytest.raises(
        SiteError, match=r"layers 0,2 of .* have no attention .*; need one of the layers 1,3"
    ):
        capture(lens, tokens(), sites=["pattern"], layers=[0])
    with pytest.raises(SiteError, match="need one of the layers 1,3"):
        attention_weights(lens, layer=2)
    entropy = Reading(name="z", sites=("z",), function=lambda view: view["z"].mean((1, 2, 3)))
    found = stream(lens, tokens(), [entropy])
    assert found.stacked("z").isnan().all(1).tolist() == [True, False, True, False]
    with pytest.raises(ModelError, match="need one of the layers 1,3"):
        found["z", 0]
    assert sink_mask(lens, tokens()).shape == (2, 24)
    assert sink_scores(lens, tokens(), by="norm").isfinite().all()
    found = sink_tokens(lens, tokens=from_tensor(tokens()), out=tmp_path / "run", progress=False)
    assert len(found.tables["tokens"]) == tokens().numel()


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_sweeps_and_patches_go_over_the_layers_that_have_the_site(family, tmp_path):
    lens, clean = lens_of(family), tokens()
    grid = Grid.of(EditGrid(kind="zero", site="z", heads="each"))
    found = sweep(
        lens,
        grid,
        tokens=from_tensor(clean),
        metrics=metrics.loss(),
        out=tmp_path / "run",
        progress=False,
    )
    frame = found.tables["cells"]
    assert {*frame["layer"]} == {*lens.attention_layers}
    assert frame["error"].isna().all()
    options = {"metric": metrics.loss(), "progress": False}
    for site in ("resid_post", "mixer_out", "z"):
        patched = patching.patch(
            lens, clean, clean.flip(0), site=site, by="layer,position", **options
        )
        assert {*patched.frame["layer"]} == {*lens.layers_with(site)}
        first = patching.attribution_patch(
            lens, clean, clean.flip(0), site=site, metric=metrics.loss()
        )
        assert {*first.frame["layer"]} == {*lens.layers_with(site)}
    if family in INTERLEAVED:
        with pytest.raises(InputError, match="have 'mixer_out'; need some of 0,2"):
            patching.patch(lens, clean, clean.flip(0), site="mixer_out", layers=[1], **options)


@EVERY
def test_a_direct_path_freezes_the_mixers_between(family):
    """Nothing is left of a path from one layer's stream but what the residual stream itself carries."""
    lens, clean = lens_of(family), tokens()
    at = {
        "sender": ("mlp_out", 0),
        "receiver": ("resid_post", 3),
        "metric": metrics.loss(),
        "progress": False,
    }
    found = patching.path_patch(lens, clean, clean.flip(0), **at)
    runs = [
        run_with(lens, batch, sites=["mlp_out", "resid_post"]).tensors
        for batch in (clean.flip(0), clean)
    ]
    given = runs[0]["resid_post", 3] + runs[1]["mlp_out", 0] - runs[0]["mlp_out", 0]
    direct = run_with(lens, clean.flip(0), freeze("resid_post", {3: given}, layers=[3])).loss
    torch.testing.assert_close(
        torch.tensor(found.frame["value"]).float().mean(), direct.mean(), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm2", "layers 0,2 of .* have no attention .*, and this needs it in every layer"),
        ("falcon_h1", "layers 0-2 of .* have a mixer beside their attention"),
    ],
)
def test_what_needs_every_layer_is_refused(family, reason):
    with pytest.raises(ModelError, match=f"{reason}.*; need another model"):
        contraction(lens_of(family), sequences=50, length=16)


def test_a_hybrid_that_cannot_be_shown_is_refused_with_the_reason():
    with pytest.raises(
        ModelError, match=r"Zamba2ForCausalLM' is not known; need one of Llama.*It is left out: its"
    ):
        family_of("Zamba2ForCausalLM")
    with pytest.raises(ModelError, match="need 'rope' or 'nope'"):
        wrap(tiny("granitemoehybrid", position_embedding_type=None))
    with pytest.raises(ModelError, match="routed experts beside a shared MLP"):
        wrap(tiny("granitemoehybrid", num_local_experts=4))


def test_a_jamba_without_experts_has_neurons():
    lens = wrap(tiny("jamba", num_experts=1))
    found = capture(lens, tokens(), sites=["neurons", "down_out"])
    for layer in range(4):
        made = found["neurons", layer] @ mlp_weights(lens, layer=layer).w_down.T
        torch.testing.assert_close(found["down_out", layer], made, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "family", "seed"),
    [
        ("in_mixer_layer", "lfm2", 0),
        pytest.param("mixer_spike", "jamba", 5, marks=pytest.mark.exhaustive),
    ],
)
def test_a_card_of_a_hybrid_names_what_writes_and_where_nothing_attends(
    name, family, seed, tmp_path
):
    zoo = build(name, seed=seed, family=family)
    tokens = from_tensor(zoo.draw(6, length=32, generator=torch.Generator().manual_seed(0)))
    found = card(wrap(zoo.model), tokens=tokens, out=tmp_path / "run", progress=False)
    (row,) = found.decision["writers"]
    (maker,) = zoo.truth.makers
    assert row["layer"] == maker.layer
    assert [*row] == ["layer", "dimension", "change", "mixer_out", "mlp_out", "neurons"]
    assert row["mixer_out"] == pytest.approx(float(maker.kind == "mixer"), abs=0.02)
    assert [one for one, _ in row["neurons"]] == ([] if maker.kind == "mixer" else [maker.index])
    assert found.decision["sink"]["positions"] == [0]
    assert found.decision["sink"]["first_layer"] == zoo.truth.locked[0]
    assert ("the mixer (" in str(card_text_rows(found.decision))) == (maker.kind == "mixer")
    found.report()


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_monitor_reads_the_attention_of_the_layers_that_have_it(family):
    model, ids = tiny(family), tokens().repeat(1, 2)
    with SinkMonitor(model, every=1, sequences=len(ids)) as monitor:
        model(input_ids=ids, use_cache=False)
        found = monitor.step()
    lens = lens_of(family)
    for key, layers in (("mass_first", lens.attention_layers), ("kurtosis", range(lens.n_layers))):
        assert {name for name in found if name.startswith(f"sinks/{key}/")} == {
            f"sinks/{key}/layer_{layer}" for layer in layers
        }
    mass = Reading(
        name="mass",
        sites=("mass",),
        function=lambda view: sink_mass(view["mass"][..., 0], valid=view.valid, key=0),
    )
    read = stream(lens, ids, [mass]).values["mass"]
    for layer in lens.attention_layers:
        assert found[f"sinks/mass_first/layer_{layer}"] == pytest.approx(
            float(read[layer].mean()), abs=1e-5
        )

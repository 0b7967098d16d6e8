"""Activation patching: equal to TransformerLens, to a loop, and to the clean run where everything is patched."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
import transformer_lens.patching as reference
from lenses import lens_of, speaking
from matplotlib.figure import Figure
from matplotlib.text import Text
from prompt_pairs import pair

from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.edits.constructors import freeze, zero
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, SiteError
from sink_lens.models.sites import sites_of
from sink_lens.patching import path, run_pair
from sink_lens.patching.attribution import attribution_patch
from sink_lens.patching.config import PatchConfig
from sink_lens.patching.patch import patch
from sink_lens.patching.path import path_patch
from sink_lens.report.style import figure_bytes
from tests.tiny_families import TINY_FAMILIES

CORRECT, WRONG = [5, 6], [7, 8]
DIFFERENCE = metrics.logit_difference(CORRECT, WRONG)
_ALL_AXES = ("layer", "head", "position", "key")


def their_metric(logits):
    rows = torch.arange(len(CORRECT))
    return (logits[rows, -1, CORRECT] - logits[rows, -1, WRONG]).mean()


@pytest.mark.parametrize(
    ("family", "site", "by", "theirs"),
    [
        ("gpt2", "resid_pre", ("layer", "position"), reference.get_act_patch_resid_pre),
        ("llama", "attn_out", ("layer", "position"), reference.get_act_patch_attn_out),
        ("gpt2", "mlp_out", ("layer", "position"), reference.get_act_patch_mlp_out),
        ("llama", "z", ("layer", "position", "head"), reference.get_act_patch_attn_head_out_by_pos),
        ("gpt2", "z", ("layer", "head"), reference.get_act_patch_attn_head_out_all_pos),
        ("llama", "k", ("layer", "position", "head"), reference.get_act_patch_attn_head_k_by_pos),
        ("llama", "pattern", ("layer", "head"), reference.get_act_patch_attn_head_pattern_all_pos),
        (
            "gpt2",
            "pattern",
            ("layer", "head", "position"),
            reference.get_act_patch_attn_head_pattern_by_pos,
        ),
        ("llama", "pattern", _ALL_AXES, reference.get_act_patch_attn_head_pattern_dest_src_pos),
    ],
)
def test_it_equals_transformer_lens(family, site, by, theirs):
    lens, (clean, corrupted) = speaking(family), pair(length=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, cache = lens.bridge.run_with_cache(clean)
        expected = theirs(lens.bridge, corrupted, cache, their_metric)
    found = patch(lens, clean, corrupted, site=site, by=by, metric=DIFFERENCE, progress=False)
    assert list(found.frame.columns)[: len(by)] == list(by)
    assert torch.allclose(
        torch.tensor(found.frame["value"].to_numpy()).view(expected.shape).float(),
        expected,
        atol=2e-5,
    )
    assert found.frame["effect"].abs().max() > 1e-3


@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize(
    "metric",
    [
        metrics.sink_mass(0),
        metrics.sink_mass(1, layers=[1]),
        metrics.loss(),
        metrics.norm(3, layer=1),
    ],
)
def test_it_equals_a_loop_of_whole_runs(direction, metric):
    lens, (clean, corrupted) = speaking(), pair()
    run, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    found = patch(
        lens, clean, corrupted, site="v", by=("layer", "head"), metric=metric, direction=direction
    )
    values = run_with(lens, source, sites=("v",)).tensors
    for row in found.frame.itertuples():
        part = values["v", row.layer][:, :, [row.head]]
        edit = freeze("v", {row.layer: part}, heads=[row.head])
        outcome = run_with(lens, run, edit, positions=(0, 1, 3), sites=("resid_post",))
        assert row.value == pytest.approx(float(metrics.evaluate(metric, outcome).mean()), abs=1e-5)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_site_of_every_family_is_patched(family):
    lens, (clean, corrupted) = speaking(family), pair()
    for site in sites_of(lens.family):
        found = patch(
            lens, clean, corrupted, site=site, by=("layer",), layers=[1], metric=DIFFERENCE
        )
        assert abs(found.frame["effect"].item()) > 1e-6, site


def test_a_patch_of_its_own_values_changes_nothing_and_says_so():
    lens, (clean, corrupted) = speaking(), pair()
    with pytest.warns(UserWarning, match="the same z in all that is patched"):
        found = patch(lens, clean, corrupted, site="z", metric=DIFFERENCE, edits=zero("z"))
    assert (found.frame["effect"] == 0).all()
    assert not found.frame["changed"].any()


def test_a_result_does_not_keep_the_activations_of_its_runs():
    lens, (clean, corrupted) = speaking(), pair()
    found = patch(lens, clean, corrupted, site="z", metric=DIFFERENCE)
    assert set(found.opens.keywords) == {"lens", "metric", "pair", "config"}


def test_a_configuration_holds_functions_and_edits_as_the_call_does():
    lens, given = (
        speaking(),
        {"metric": DIFFERENCE, "put": zero, "edits": zero("mlp_out", layers=[0])},
    )
    at = {"site": "z", "by": ("layer",), "controls": 0, "progress": False}
    called = patch(lens, *pair(), **given, **at)
    held = patch(lens, *pair(), config=PatchConfig(**given), **at)
    assert held.frame.equals(called.frame)
    assert not held.frame.equals(patch(lens, *pair(), **{**given, "edits": ()}, **at).frame)
    with pytest.raises(InputError, match=r"edits have 3 .*; need edits of sink_lens\.edits"):
        patch(lens, *pair(), metric=DIFFERENCE, edits=[3])
    with pytest.raises(
        InputError, match="approximates patches of the unedited model; leave out edits"
    ):
        attribution_patch(lens, *pair(), metric=DIFFERENCE, edits=zero("z"))


def test_equal_prompts_are_refused_before_the_model_runs(monkeypatch):
    lens, (clean, _) = speaking(), pair()
    assert (
        patch(lens, clean, clean, site="z", put=zero, metric=DIFFERENCE, layers=[0])
        .frame["changed"]
        .all()
    )

    for module in (run_pair, path):
        monkeypatch.setattr(
            module, "run_batches", lambda *args, **options: pytest.fail("the model ran")
        )
    for call in (
        lambda: patch(lens, clean, clean, site="z", metric=DIFFERENCE),
        lambda: attribution_patch(lens, clean, clean, site="z", metric=DIFFERENCE),
        lambda: path_patch(
            lens, clean, clean, sender=("z", 0), receiver=("resid_post", 2), metric=DIFFERENCE
        ),
    ):
        with pytest.raises(
            InputError, match="have the same tokens, so that every patch puts in what is there"
        ):
            call()


def test_several_patches_in_a_forward_give_the_numbers_of_one():
    lens, (clean, corrupted) = speaking(), pair(n=3, length=9)
    options = {"site": "z", "by": ("position", "head"), "layers": [1], "metric": metrics.loss()}
    many = patch(lens, clean, corrupted, **options)
    one = patch(lens, clean, corrupted, **options, batch_size=2)
    assert np.allclose(many.frame["value"], one.frame["value"], atol=1e-6)


def test_what_is_not_swept_is_patched_together():
    lens, (clean, corrupted) = speaking(), pair()
    found = patch(
        lens,
        clean,
        corrupted,
        site="z",
        by=(),
        layers=[1, 2],
        heads=[0],
        positions=[4, 5],
        metric=DIFFERENCE,
    )
    values = run_with(lens, clean, sites=("z",)).tensors
    put = {layer: values["z", layer][:, [4, 5]][:, :, [0]] for layer in (1, 2)}
    outcome = run_with(lens, corrupted, freeze("z", put, heads=[0], positions=[4, 5]), logits=True)
    assert found.frame["value"].item() == pytest.approx(
        float(their_metric(outcome.logits)), abs=1e-5
    )
    assert len(found.frame) == 1
    assert "baseline" in found._repr_html_()


def test_both_baselines_are_those_of_the_runs():
    lens, (clean, corrupted) = speaking(), pair()
    found = patch(
        lens, clean, corrupted, site="z", by=("layer",), metric=metrics.loss(), direction="noising"
    )
    assert found.baseline == pytest.approx(float(run_with(lens, clean).loss.mean()))
    assert found.source == pytest.approx(float(run_with(lens, corrupted).loss.mean()))
    expected = (found.frame["value"] - found.baseline) / (found.source - found.baseline)
    assert np.allclose(found.frame["normalised_effect"], expected)


@pytest.mark.filterwarnings("ignore:Positions .* are not the same place")
def test_sequences_of_several_lengths_are_patched_at_their_own_positions():
    lens, (clean, corrupted) = speaking(), pair(n=2, length=9)
    lengths = torch.tensor([9, 5])
    found = patch(
        lens,
        from_tensor(clean, lengths=lengths),
        from_tensor(corrupted, lengths=lengths),
        site="z",
        metric=DIFFERENCE,
    )
    short = patch(
        lens, clean[1:, :5], corrupted[1:, :5], site="z", metric=metrics.logit_difference(6, 8)
    )
    assert torch.allclose(found.values.view(3, 9, 2)[:, :5, 1], short.values.view(3, 5), atol=1e-5)


def test_a_sequence_without_a_number_is_left_out_and_counted():
    for nothing in (torch.nan, torch.inf):
        first_only = metrics.on_logits(
            lambda logits, plus: logits[:, -1, 0] + plus, plus=[0.0, nothing]
        )
        found = patch(speaking(), *pair(), site="z", by=("layer",), metric=first_only)
        assert (found.frame["n"] == 1).all()
        assert found.frame["effect"].notna().all()
        assert torch.isfinite(torch.tensor([found.baseline, found.source])).all()


def test_text_is_read_and_the_differences_are_shown():
    found = patch(
        speaking(),
        "the cat and",
        "the bat and",
        site="z",
        by=("layer", "position"),
        metric=metrics.loss(),
    )
    position = int(found.differences["position"].item())
    assert found.labels[position].count("/") == 1


def test_the_tokens_that_all_prompts_share_are_labels_and_others_are_not():
    clean, corrupted = ["the cat and", "the hat and"], ["the bat and", "the bat and"]
    found = patch(speaking(), clean, corrupted, site="z", by=("layer",), metric=metrics.loss())
    alone = patch(
        speaking(), clean[0], corrupted[0], site="z", by=("layer",), metric=metrics.loss()
    )
    differing = set(found.differences["position"])
    assert found.labels == {
        place: "(differ)" if place in differing else text for place, text in alone.labels.items()
    }


def test_a_heat_map_is_of_the_normalised_effect_and_fits_a_column_with_a_title_that_wraps():
    found = patch(speaking(), *pair(), site="z", by=("layer", "position"), metric=DIFFERENCE)
    (drawn,) = [
        axes for axes in found.heatmap().axes if axes.images and axes.get_label() != "<colorbar>"
    ]
    shares = found.frame.pivot(
        index="position", columns="layer", values="normalised_effect"
    ).to_numpy()
    assert np.allclose(np.asarray(drawn.images[0].get_array()), shares)
    figure = found.heatmap("effect", style="paper", width=2.0)
    figure_bytes(figure, "png")
    assert figure.get_figwidth() == 2.0
    title = figure.get_suptitle()
    assert "\n" in title
    drawn = figure.findobj(lambda one: isinstance(one, Text) and one.get_text() == title)[0]
    assert drawn.get_window_extent().x1 <= figure.bbox.x1
    assert drawn.get_fontname() != found.heatmap().axes[0].yaxis.label.get_fontname()


def test_a_result_is_drawn_with_one_call_and_shows_itself():
    found = patch(
        speaking(), *pair(), site="z", by=("layer", "position", "head"), metric=DIFFERENCE
    )
    assert isinstance(found.heatmap(), Figure)
    assert "data:image/png;base64" in found._repr_html_()
    top = found.strongest(3)["effect"].abs().tolist()
    assert top == sorted(top, reverse=True)
    assert top[0] == found.frame["effect"].abs().max()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"by": ("layer", "head")}, "by head is not possible; need some of layer, position"),
        ({"by": ("layer", "layer")}, "names something twice"),
        ({"heads": [0]}, "heads were chosen and 'resid_pre' has the axes"),
        ({"layers": [3]}, "layers: 3 does not exist; need 0 to 2"),
        ({"positions": []}, "no positions were chosen"),
        ({"units": [1, 1]}, "units are named twice"),
        ({"metric": lambda logits: logits}, "need one number per sequence"),
    ],
)
def test_a_sweep_that_is_not_possible_is_refused(options, text):
    with pytest.raises(InputError, match=text):
        patch(speaking(), *pair(), **({"site": "resid_pre", "metric": DIFFERENCE} | options))


def test_sequences_that_do_not_fit_and_delegated_attention_are_refused():
    lens, (clean, corrupted) = speaking(), pair()
    with pytest.raises(InputError, match="2 clean and 1 corrupted sequences"):
        patch(lens, clean, corrupted[:1], site="z", metric=DIFFERENCE)
    with pytest.raises(
        InputError,
        match=r"sequence 0 has \d+ clean and \d+ corrupted tokens \(.* \| .*need the same",
    ):
        patch(lens, "the cat sat", "the elephant sat", site="z", metric=DIFFERENCE)
    with pytest.raises(InputError, match="has no tokenizer; need token ids"):
        patch(lens_of(), "a cat", "a bat", site="z", metric=DIFFERENCE)
    stock = dataclasses.replace(speaking(), uneditable=frozenset({"pattern"}))
    with pytest.raises(SiteError, match="delegates its attention"):
        patch(stock, *pair(), site="pattern", by=("layer",), metric=DIFFERENCE)


def test_the_cells_are_every_combination_in_order_whatever_the_axes_are_called():
    found = patch(
        speaking(),
        *pair(),
        site="q",
        by=("layer", "position", "head"),
        layers=[2, 1],
        heads=[3],
        metric=DIFFERENCE,
    )
    places = [tuple(row) for row in found.frame[["layer", "position", "head"]].to_numpy().tolist()]
    assert places == list(itertools.product([2, 1], range(7), [3]))
    ours, theirs = ("layer", "position", "head", "key"), ("layer", "pos", "head_index", "src_pos")
    assert PatchConfig(by=theirs).by == PatchConfig(by=ours).by == ours

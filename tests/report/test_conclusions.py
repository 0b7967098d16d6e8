"""The sentence at the top of a page, and the notes that keep two of its numbers apart."""

import math
import re

import pandas as pd
import pytest

from sink_lens.chain.page import story
from sink_lens.chain.page import tables as trace_tables
from sink_lens.chain.page import trace as trace_page
from sink_lens.errors import InputError
from sink_lens.identity.pages import fingerprint
from sink_lens.patching import page as patch
from sink_lens.records import read_run
from sink_lens.report.html import page_content
from sink_lens.sweeps.config import SweepConfig
from sink_lens.sweeps.grid import EditGrid, Grid
from sink_lens.sweeps.words import cell_name

from .circuits import write_run


def a_run(folder, kind, *, config=None, provenance=None, **frames):
    record = {"config": config, "provenance": provenance, "expects": tuple(frames)}
    return read_run(write_run(folder, kind, **record, **frames))


MAKERS = {
    "set": ["half"],
    "control_of": "",
    "removed": 0.6,
    "ci_low": 0.5,
    "ci_high": 0.7,
    "n": 8,
    "target": "sink",
}


@pytest.mark.parametrize(("studied", "said"), [(21, "that were not used"), (20, "that were used")])
def test_a_page_says_whether_the_makers_were_chosen_on_other_sequences(tmp_path, studied, said):
    record = {
        "config": {"intervention_sequences": 20},
        "provenance": {"sequences": 32},
        "tokens": {"sequence": 2 * [*range(studied)]},
    }
    sets = MAKERS | {"size": 1, "parts": "1.2", "control_largest": 0.0}
    see, _ = trace_tables._maker_table(a_run(tmp_path / "run", "trace", maker_sets=sets, **record))
    assert said in see


def test_one_part_is_ablated_and_two_are(tmp_path):
    for parts, said in (("1.2", "L1.N2 is ablated"), ("1.2, 1.3", "L1.N2 and L1.N3 are ablated")):
        frame = MAKERS | {"size": parts.count(",") + 1, "parts": parts, "control_largest": 0.02}
        run = a_run(tmp_path / parts, "trace", maker_sets=frame)
        beside = "([50%, 70%], 8 sequences; random parts: at most 2%)"
        assert ("60%", f"of the sink is lost if {said} {beside}") in story.headline_numbers(run)
    none = a_run(tmp_path / "none", "trace", maker_sets=frame | {"target": "outlier dimensions"})
    assert (
        f"of the outlier dimensions' size is lost if {said} {beside}"
        in dict(story.headline_numbers(none)).values()
    )
    neurons = {
        "layer": [1],
        "neuron": [52],
        "sink_position": 0,
        "contribution": 0.9,
        "is_super": True,
    }
    run = a_run(tmp_path / "untested", "trace", neurons=neurons)
    assert ("1", "super neuron, L1.N52") in story.headline_numbers(run)


def test_an_amplification_that_only_takes_attention_away_is_not_said_to_add_most(tmp_path):
    rows = {
        "centre": ["values", "values"],
        "factor": [1.0, 30.0],
        "mass": [0.007, 0.002],
        "baseline_mass": 0.007,
    }
    rows |= {
        "target_position": 21,
        "read_layers": "7-17",
        "times": 1.0,
        "change_low": 0.0,
        "change_high": 0.0,
    }
    for change, said in (
        (-0.005, "No factor adds as much as 0.01."),
        (0.2, "The most is added at factor 30 from"),
    ):
        frame = rows | {"change": [0.0, change]}
        see, _ = trace_page._amplification_figure(
            a_run(tmp_path / str(change), "trace", amplification=frame)
        )
        assert said in see


def test_a_row_of_freezes_in_which_no_sink_was_made_is_said_to_be_empty(tmp_path):
    rows = {
        "intervention": ["isolation", "natural"],
        "frozen": "neurons",
        "step": 0,
        "layers_from": 1,
        "layers_to": 2,
    }
    rows |= {"surviving_share": [float("nan"), 0.1], "control_surviving_share": 1.0}
    for frame, empty in ((rows, True), (rows | {"surviving_share": [0.2, 0.1]}, False)):
        see, _ = trace_page._mediation_figure(
            a_run(tmp_path / str(empty), "trace", mediation=frame)
        )
        assert ("Where the row is empty, the intervention made no sink." in see) == empty


def test_patches_that_are_as_good_as_the_strongest_are_counted(tmp_path):
    patches = {"layer": [0, 1, 2, 3], "effect": [-10.0, -9.8, 9.9, -9.0], "changed": True}
    run = a_run(tmp_path / "run", "patch", config={"metric": "loss"}, patches=patches)
    assert page_content(run).title.endswith(
        "loss is moved most at layer 0: −10; 1 more within 5% of it"
    )


def test_the_title_of_a_patch_names_an_effect_whose_interval_excludes_zero(tmp_path):
    noisy = {
        "layer": [0, 1],
        "effect": [10.0, 5.0],
        "ci_low": [-1.0, 4.0],
        "ci_high": [21.0, 6.0],
        "changed": True,
    }
    for at, low, said in (
        (0, 4.0, "loss is moved most at layer 1: 5"),
        (1, -4.0, "no patch is shown to move"),
    ):
        patches = noisy | {"ci_low": [-1.0, low]}
        run = a_run(tmp_path / str(at), "patch", config={"metric": "loss"}, patches=patches)
        assert said in page_content(run).title


@pytest.mark.parametrize(
    ("p", "said"), [(0.011, "no patch is shown"), (0.009, "is carried at position 0 up to layer 1")]
)
def test_a_position_carries_what_chance_does_not(tmp_path, p, said):
    patches = {
        "layer": [0, 1],
        "position": 0,
        "effect": 9.0,
        "normalised_effect": 0.9,
        "changed": True,
    }
    patches |= {"ci_low": 8.0, "ci_high": 10.0, "corrected_p": p}
    run = a_run(
        tmp_path / "run", "patch", config={"metric": "loss", "site": "resid_pre"}, patches=patches
    )
    assert said in page_content(run).title


def test_a_monitor_without_a_sink_says_its_rate_and_shows_no_empty_table(tmp_path):
    readings = {
        "step": [0, 8],
        "key": "rate_first",
        "layer": pd.array([pd.NA] * 2, dtype="Int64"),
        "value": 0.02,
    }
    alarms = pd.DataFrame({"step": [0], "rule": "", "position": 0, "sentence": ""}).head(0)
    part = page_content(
        a_run(tmp_path / "run", "monitor", monitor=readings | {"unit": "1"}, alarms=alarms)
    )
    assert (
        part.title
        == "Training watched: no sink is born (2.0% of heads have it at position 0 at first, 2.0% at the end)"
    )
    assert "No alarm." in part.headline
    assert [table.title for table in part.tables] == ["Readings"]


def swept(*, effect, ci_low, ci_high, **more):
    more = dict.fromkeys(("control_effect", "over_low", "over_high", "n"), float("nan")) | more
    more = {"kind": "zero", "site": "z", "n_controls": 0, "corrected_p": 0.0} | more
    rows = pd.DataFrame({"effect": effect, "ci_low": ci_low, "ci_high": ci_high}).assign(**more)
    where = [f"layer {layer}" for layer in (1, 2, 3)]
    named = {
        "cell": range(3),
        "where": where,
        "metric": "loss",
        "error": pd.array([None] * 3, dtype="string"),
        "changed": True,
    }
    return rows.assign(**named, baseline=float("nan"), effect_in_sds=rows["effect"] / 0.1)


def test_the_sentences_of_a_sweep_do_not_say_its_title_again(tmp_path):
    rows = swept(
        effect=[-0.1, -0.5, -0.3], ci_low=[-0.2, -0.6, -0.4], ci_high=[0.1, -0.4, -0.2], control_effect=0.01,
        over_low=-1.0, over_high=-0.1,
    )  # fmt: skip
    cells = pd.concat([rows.assign(metric="sink mass"), rows])
    shown = page_content(a_run(tmp_path / "run", "sweep", cells=cells))
    assert shown.title == (
        "2 of 3 edits change sink mass. The largest change is −0.5 [−0.6, −0.4], by zero head output (z), layer 2"
    )
    assert shown.headline == [
        "Random edits of the same size change it by 0.01 on average.",
        "The next largest that is shown is −0.3 [−0.4, −0.2], by zero head output (z), layer 3.",
        "A change counts if its 95% interval excludes 0, and if that of the change above random edits does too, and "
        "if chance makes the largest of all edits as large in at most 1% of sweeps.",
        "2 of 3 edits change loss. The largest change is −0.5 [−0.6, −0.4], by zero head output (z), layer 2; "
        "random edits of the same size: 0.01.",
    ]


@pytest.mark.parametrize(
    ("p", "counted"), [((0.5, 0.02, 0.011), 0), ((0.5, 0.02, 0.009), 1), ((0.5, 0.0, 0.0), 2)]
)
def test_a_title_counts_what_chance_does_not_make_the_largest_of_all(tmp_path, p, counted):
    ends = {
        "effect": [-0.1, -0.5, -0.3],
        "ci_low": [-0.2, -0.6, -0.4],
        "ci_high": [0.1, -0.4, -0.2],
    }
    shown = page_content(a_run(tmp_path / "run", "sweep", cells=swept(**ends, corrected_p=list(p))))
    assert shown.title.split(" edit")[0] == ("None of 3", "1 of 3", "2 of 3")[counted]
    assert ("layer 3" in shown.title) == (counted == 1)
    told = f"{2 - counted} {'more ' * (counted > 0)}interval"
    assert any(told in one for one in shown.headline) == (counted < 2)


def test_a_title_names_the_largest_change_and_says_if_it_is_not_shown(tmp_path):
    ends = {
        "effect": [-0.0204, 1.317, 0.1],
        "ci_low": [-0.03, -0.2, -0.1],
        "ci_high": [-0.01, 3, 0.3],
    }
    cells = swept(**ends, corrected_p=[0.005, 1.0, 1.0])
    title = page_content(a_run(tmp_path / "run", "sweep", cells=cells)).title
    assert title.startswith("1 of 3 edits is shown")
    assert re.findall(
        r"−0.0204 .*, layer 1\..*, 1.32 \[−0.2, 3\], .*, layer 2, is not shown: its interval", title
    )


def test_a_largest_change_of_one_sequence_has_no_interval(tmp_path):
    ends = {"effect": [-0.02, 1.3, 0.1], "ci_low": [-0.03, math.nan, -0.1]}
    cells = swept(**ends, ci_high=[-0.01, math.nan, 0.3], corrected_p=[0.005, math.nan, 1.0])
    title = page_content(a_run(tmp_path / "run", "sweep", cells=cells)).title
    assert "by zero head output (z), layer 2, is not shown: one sequence" in title
    assert "includes 0" not in title


def test_effects_that_are_all_undefined_are_said_to_be(tmp_path):
    none = dict.fromkeys(("effect", "ci_low", "ci_high", "corrected_p"), [math.nan] * 3)
    shown = page_content(a_run(tmp_path / "sweep", "sweep", cells=swept(**none)))
    assert shown.title == "None of 3 edits has a defined effect on loss"
    patches = {"layer": [0, 1], "effect": math.nan, "changed": True}
    run = a_run(tmp_path / "patch", "patch", config={"metric": "loss"}, patches=patches)
    shown = page_content(run)
    assert shown.title.endswith(": no patch has a defined effect on loss")
    assert not any("argest effect" in one for one in shown.headline)


def test_an_infinite_change_is_named(tmp_path):
    ends = {"effect": [-0.02, math.inf, 0.1], "ci_low": [-0.03, math.nan, -0.1], "n": 4}
    cells = swept(**ends, ci_high=[-0.01, math.nan, 0.3], corrected_p=[0.005, math.nan, 1.0])
    title = page_content(a_run(tmp_path / "run", "sweep", cells=cells)).title
    assert "of all, ∞, by zero head output (z), layer 2, is not shown: it has no interval" in title


def test_one_sequence_has_controls_although_they_have_no_interval(tmp_path):
    ends = {"effect": [0.1, 0.5, 0.3], "ci_low": math.nan, "ci_high": math.nan, "n": 1}
    cells = swept(**ends, n_controls=5, control_effect=0.01, corrected_p=math.nan)
    shown = page_content(a_run(tmp_path / "run", "sweep", cells=cells))
    assert "Random edits of the same size change it by 0.01 on average." in shown.headline
    assert not any("without random edits" in one or "No edit has" in one for one in shown.headline)


def test_a_title_says_that_the_largest_change_has_no_random_edits(tmp_path):
    ends = {
        "effect": [-0.02, 1.3, 0.1],
        "ci_low": [-0.03, 1.2, -0.1],
        "ci_high": [-0.01, 1.4, 0.3],
    }
    own = {"n_controls": [3, 0, 3], "control_effect": [0.0, math.nan, 0.0]}
    own |= {"over_low": [-0.03, math.nan, -0.1], "over_high": [-0.01, math.nan, 0.3]}
    cells = swept(**ends, **own, corrected_p=[0.005, 0.001, 1.0])
    title = page_content(a_run(tmp_path / "run", "sweep", cells=cells)).title
    assert title.endswith("is not shown: it has no random edits")


@pytest.mark.parametrize("n", [6, 20])
def test_where_few_sequences_can_show_nothing_the_title_says_so_and_how_many_can(tmp_path, n):
    ends = {"effect": [0.1, 0.5, 0.3], "ci_low": [-0.1, 0.4, 0.2], "ci_high": [0.3, 0.6, 0.4]}
    shown = page_content(
        a_run(tmp_path / "run", "sweep", cells=swept(**ends, corrected_p=0.02, n=n))
    )
    assert ("6 sequences are too few" in shown.title) == (n == 6)
    assert "is 0.5 [0.4, 0.6], by zero head output (z), layer 2" in shown.title
    assert "2 intervals exclude 0." in shown.headline
    # t of 5 degrees passes 5.25 = 2.14 sqrt(6) with probability .01 / 3; with 14 sequences sqrt(14) is enough
    said = [
        one for one in shown.headline if "must be 2.14 " in one and "5.25" in one and "(14:" in one
    ]
    assert len(said) == (n == 6)


@pytest.mark.parametrize("low", [0.22, -0.1])
def test_one_edit_alone_is_judged_at_its_interval(tmp_path, low):
    cells = swept(effect=0.39, ci_low=[low] * 3, ci_high=0.56, corrected_p=0.08, n=6).head(1)
    shown = page_content(a_run(tmp_path / "run", "sweep", cells=cells))
    how = (
        "changes loss: 0.39 [0.22, 0.56]"
        if low > 0
        else "is not shown to change loss: 0.39 [−0.1, 0.56]"
    )
    assert shown.title == f"Zero head output (z), layer 1 {how}"
    assert not any("chance" in one or "more interval" in one for one in shown.headline)


def test_edits_of_whole_layers_say_once_why_they_have_no_controls(tmp_path):
    for place, why in (("layer 1", 1), ("layer 1, head 3", 0)):
        cells = swept(effect=[0.1, 0.5, 0.3], ci_low=-1.0, ci_high=1.0).assign(where=place)
        shown = page_content(a_run(tmp_path / place, "sweep", cells=cells))
        assert sum("No edit has random edits" in one for one in shown.headline) == 1
        assert (
            sum(
                "other heads, units or positions of the same layer" in one for one in shown.headline
            )
            == why
        )


def test_a_change_has_a_size_and_intervals_of_few_sequences_are_marked(tmp_path):
    cells = swept(
        effect=[0.5, 0.003, 0.002], ci_low=[0.4, 0.002, 0.001], ci_high=[0.6, 0.004, 0.003], n=2
    )
    shown = page_content(
        a_run(tmp_path / "run", "sweep", provenance={"least_effect": 0.2}, cells=cells)
    )
    assert shown.title == (
        "1 of 3 edits changes loss. The largest change is 0.5 [0.4, 0.6]†, by zero head output (z), layer 1"
    )
    assert shown.headline == [
        "2 more edits change loss by less than 0.2 standard deviations of the baseline over sequences.",
        "With 2 sequences the mean of one of 3 changes must be 135 standard deviations over sequences (|t| 191) to be "
        "shown: use more sequences (14: one standard deviation) or fewer edits.",
        "A change counts if its 95% interval over 2 sequences excludes 0, and the change is 0.2 standard deviations of "
        "the baseline over sequences or more, and if chance makes the largest of all edits as large in at most 1% of "
        "sweeps.",
        "No edit has random edits to compare with: they edit other heads, units or positions of the same layer, and no "
        "edit names some.",
        "Intervals marked † are of fewer than 5 sequences (2).",
    ]
    (table,) = [one for one in shown.tables if one.key == "cell-table"]
    assert all(any(cell.endswith("]†") for cell in row) for row in table.table.rows)
    with pytest.raises(InputError, match="least_effect is -1"):
        SweepConfig(grid=Grid.of(EditGrid(site="z")), least_effect=-1.0)


def test_models_of_a_fingerprint_are_named_by_what_tells_them_apart():
    names = [f"gpt2,n_layers=4,vocab_size=200 seed {seed}" for seed in range(3)]
    found, shared = fingerprint.short_names(names)
    assert list(found.values()) == ["seed 0", "seed 1", "seed 2"]
    assert shared == ["gpt2", "n_layers=4", "vocab_size=200"]
    alike = ["runs/a step 100", "runs/a, step 100"]
    assert fingerprint.short_names(alike) == (dict(zip(alike, alike, strict=True)), [])


def test_the_map_of_a_pair_of_prompts_names_every_token(tmp_path):
    patches = {
        "layer": [0, 0, 0],
        "position": [0, 1, 2],
        "value": 1.0,
        "effect": [0.0, 0.5, 1.0],
        "changed": True,
    }
    tokens = {"position": [0, 1, 2], "text": [" In", " Paris/ Rome", ","]}
    changed = {"sequence": [0], "position": [1], "clean": [" Paris"], "corrupted": [" Rome"]}
    run = a_run(tmp_path / "run", "patch", patches=patches, tokens=tokens, differences=changed)
    figure = patch._heatmap_figure(run)[1]
    ticks = [
        label.get_text()
        for axes in figure.axes
        for label in (*axes.get_yticklabels(), *axes.get_xticklabels())
    ]
    assert {"0 ·In", "1 ·Paris/·Rome", "2 ,"} <= set(ticks)
    assert patch._prompt_sentences(run) == ["changed (clean/corrupted): 1 ·Paris/·Rome"]


def test_cells_that_differ_in_strength_have_names_of_their_own_on_the_page():
    row = {"kind": "scale", "site": "z", "where": "layer 1"}
    for factor, times in ((0.5, " x 0.5"), (float("nan"), "")):
        assert cell_name(row | {"factor": factor}) == f"scale head output (z){times}, layer 1"
    assert cell_name({"name": "mine", "kind": "zero"}) == "mine"

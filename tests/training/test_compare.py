"""Comparing variants: known crossings and differences, and what may not be compared."""

import math

import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import InputError, RunError
from sink_lens.records import add_to_run, create_run, read_run
from sink_lens.stats import summarise_differences
from sink_lens.training.compare import compare, write_comparison
from sink_lens.training.config import CompareConfig
from sink_lens.training.loss_curves import running_mean, tokens_to_reach
from sink_lens.training.pages.training import COMPARE
from sink_lens.training.variants import group_runs

from .runs import EACH, log, watched, write_run

BASE = [6.0, 5.0, 4.0, 3.0]
"""At 640, 1280, 1920 and 2560 tokens."""


def generator():
    return np.random.default_rng(0)


def variants(tmp_path, *, seeds=(0, 1, 2), masses=None, other=None, **options):
    """Runs of softmax, and of it with a norm; a seed adds a tenth of itself to both, so that pairs differ alike."""
    norm = {"value_norm": "per_head", "masses": other or masses}
    return [
        write_run(
            tmp_path / f"{name}-{seed}",
            [loss + seed * slope for loss in curve],
            seed=seed,
            **fields,
            **options,
        )
        for seed in seeds
        for name, curve, slope, fields in (
            ("base", BASE, 0.1, {"masses": masses}),
            ("norm", [5.5, 4.5, 3.0, 2.0], 0.101, norm),
        )
    ]


def test_a_moving_mean_looks_backwards_only():
    assert running_mean(np.array([4.0, 2.0, 6.0, 0.0]), window=2).tolist() == [4.0, 3.0, 4.0, 3.0]
    assert running_mean(np.array([4.0, 2.0]), window=0).tolist() == [4.0, 2.0]
    assert running_mean(np.array([4.0, 2.0, 0.0]), window=9).tolist() == [4.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("losses", "target", "tokens"),
    [
        ([5.0, 4.0, 3.0], 3.5, 25.0),  # half way between 4 at 20 and 3 at 30
        ([5.0, 4.0, 3.0], 3.0, 30.0),
        ([5.0, 4.0, 3.0], 2.9, math.nan),
        ([5.0, 3.0, 5.0, 3.0], 4.0, 35.0),  # it touches at 15, and stays from 35 on
        ([5.0, 3.0, 5.0], 4.0, math.nan),
        ([2.0, 1.0], 3.0, 10.0),  # under it from the first point on
    ],
)
def test_a_target_is_reached_where_the_loss_stays_under_it(losses, target, tokens):
    at = 10.0 * np.arange(1, len(losses) + 1)
    assert tokens_to_reach(at, np.array(losses), target=target) == pytest.approx(
        tokens, nan_ok=True
    )


def test_a_paired_difference_by_hand():
    # Mean 2, standard deviation 1, over 3: t = 2 / (1 / sqrt 3) = 3.4641; t(0.975, 2) = 4.3027, so 2 -+ 2.4841.
    found = summarise_differences([1.0, 2.0, 3.0], generator=generator())
    assert found.mean == 2
    assert (found.low, found.high) == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    assert found.t_p == pytest.approx(0.0742, abs=1e-4)
    assert (
        found.flip_p == found.flip_smallest == 0.25
    )  # all of one sign: 2 of the 8 flips are as large
    assert not found.excludes_zero
    assert 1 <= found.boot_low <= found.boot_high <= 3


def test_few_seeds_tell_little():
    one = summarise_differences([-1.0], generator=generator())
    assert one.n == 1
    assert math.isnan(one.low)
    assert not one.excludes_zero
    assert summarise_differences([-1.0, -1.01], generator=generator()).flip_smallest == 0.5
    alike = summarise_differences([-1.0, -1.0, -1.0], generator=generator())
    assert (alike.low, alike.high) == (-1, -1)
    assert math.isnan(alike.t_p)
    many = summarise_differences(np.arange(1.0, 21.0), generator=generator())
    assert many.flip_p == many.flip_smallest == pytest.approx(2 / 4097)  # of 4096 that are drawn


# --- a comparison


def test_an_arm_that_is_ahead(tmp_path):
    found = compare(variants(tmp_path), generator=generator())
    assert found.variants.group_by == ("value_norm",)
    assert list(found.variants.runs) == ["none", "per_head"]
    assert found.variants.seeds == (0, 1, 2)
    finals = found.tables["finals"].query("variant == 'per_head' and curve == 'evaluation'")
    # 1 below the baseline at the end, and a thousandth of the seed more.
    assert finals["difference"].tolist() == pytest.approx([-1.0, -0.999, -0.998])
    # It is at 3.0 + seed / 10 + seed / 1000 at 1920 tokens, and loses 1 in the next 640.
    wanted = [1920 + 640 * seed / 1000 for seed in range(3)]
    assert finals["reached"].tolist() == pytest.approx(wanted)
    assert finals["acceleration"].tolist() == pytest.approx([2560 / one for one in wanted])
    row = found.tables["differences"].query("curve == 'evaluation'").iloc[0]
    # Mean -0.999, standard deviation 0.001: -+ 4.3027 * 0.001 / sqrt 3.
    assert (row["mean"], row["low"], row["high"]) == pytest.approx(
        (-0.999, -1.00148, -0.99652), abs=1e-5
    )
    assert "ends at 2.1010 nats for “per_head” and at 3.1000 for “none”" in found.headline
    assert "“per_head” is ahead of the baseline: −0.9990 " in found.headline
    sooner = "reaches the baseline's final evaluation loss sooner: after 1.92k tokens, the baseline after 2.56k"
    assert sooner in found.headline
    assert "sign flips: p = 0.25, at least 0.25 with so many seeds" in found.headline
    assert "sink and disparity are not compared" in found.notes[0]


def test_where_no_difference_can_be_told_nobody_is_called_faster(tmp_path):
    runs = [
        write_run(tmp_path / f"{variant}-{seed}", [6.0, 5.0, end], seed=seed, value_norm=variant)
        for variant, ends in (("none", (4.0, 4.0, 4.0)), ("shared", (3.0, 4.5, 4.6)))
        for seed, end in enumerate(ends)
    ]
    found = compare(runs, generator=generator())
    assert "No difference can be told" in found.headline
    # From 5 at 1280 to 3 at 1920 tokens: 4 at 1600, where the baseline needs 1920.
    said = "told either if “shared” reaches the baseline's final evaluation loss sooner (seed by seed: 1.20x as fast"
    assert said in found.headline
    assert "never and never)" in found.headline
    for word in ("times as fast", "in the others", "ahead of", "behind"):
        assert word not in found.headline


def test_a_difference_that_is_rounding_is_told_neither_in_the_title_nor_as_speed(tmp_path):
    runs = [
        write_run(tmp_path / f"{variant}-{seed}", [6.0, 5.0, end], seed=seed, value_norm=variant)
        for variant, ends in (("none", (4.0,) * 3), ("shared", (4 - 1e-6, 4 - 2e-6, 4 - 1.5e-6)))
        for seed, end in enumerate(ends)
    ]
    found = compare(runs, out=tmp_path / "out", generator=generator())
    assert (found.tables["differences"]["high"] < 0).all()
    assert "No difference can be told" in found.headline
    assert "times as fast" not in found.headline
    assert COMPARE.title(found.run).endswith("no difference can be told")


def test_of_a_baseline_that_ends_above_its_start_no_speed_is_told(tmp_path):
    runs = []
    for lr, losses in ((0.1, [6.0, 9.0, 7.0]), (0.001, [6.0, 5.0, 4.0])):
        for seed in (0, 1, 2):
            runs.append(write_run(tmp_path / f"{lr}-{seed}", losses, lr=lr, seed=seed))
            with add_to_run(runs[-1]) as writer:  # the first row is of the initial weights
                table = log(losses)
                writer.write_table("log", table.assign(tokens=table["tokens"] - 10 * EACH))
    said = compare(runs, generator=generator()).headline
    assert "begins at or under the baseline's final evaluation loss in 3 of 3 seeds" in said
    assert "nan" not in said


def test_without_an_evaluation_the_training_loss_is_compared(tmp_path):
    found = compare(variants(tmp_path, evaluation=False), generator=generator())
    assert set(found.tables["finals"]["curve"]) == {"training"}
    assert "The training loss ends at" in found.headline
    found.figure()


def test_curves_are_set_beside_each_other_seed_by_seed(tmp_path):
    found = compare(variants(tmp_path), generator=generator())
    curves = found.tables["curves"].query(
        "variant == 'per_head' and seed == 1 and curve == 'evaluation'"
    )
    assert curves["tokens"].tolist() == [640, 1280, 1920, 2560]
    assert curves["difference"].tolist() == pytest.approx([-0.499, -0.499, -0.999, -0.999])
    bands = found.tables["bands"].query("variant == 'per_head' and curve == 'evaluation'")
    loss = bands.query("quantity == 'loss'")
    assert loss["mean"].tolist() == pytest.approx([5.601, 4.601, 3.101, 2.101])
    assert ((loss["low"] < loss["mean"]) & (loss["mean"] < loss["high"])).all()
    # What the seeds share cancels in the difference: its interval is far narrower.
    gap = bands.query("quantity == 'difference'")
    (end,) = (
        found.tables["differences"]
        .query("variant == 'per_head' and curve == 'evaluation'")
        .to_dict("records")
    )
    assert tuple(gap.iloc[-1][["mean", "low", "high"]]) == pytest.approx(
        (end["mean"], end["low"], end["high"])
    )
    assert ((gap["high"] - gap["low"]) < 0.1 * (loss["high"] - loss["low"]).to_numpy()).all()


def test_runs_that_logged_at_other_steps_are_compared_where_both_were(tmp_path):
    short = [
        write_run(tmp_path / f"n{seed}", [6.0, 4.0], seed=seed, value_norm="shared")
        for seed in (0, 1)
    ]
    long = [write_run(tmp_path / f"b{seed}", BASE, seed=seed) for seed in (0, 1)]
    curves = compare(long + short, generator=generator()).tables["curves"]
    assert curves["tokens"].max() == 2 * 10 * EACH


# --- sinks


def test_sinks_are_set_beside_each_other(tmp_path):
    found = compare(
        variants(tmp_path, masses=[0.0, 0.2, 0.6], other=[0.0, 0.02, 0.04]), generator=generator()
    )
    assert "“none” has a sink in 3 of 3 seeds, born by 640, 640 and 640 tokens" in found.headline
    assert "“per_head” has no sink in any of 3 seeds (fewer than 5% of heads)" in found.headline
    assert (
        "The dominance ratio, averaged over layers, is 11 for “none” and 5.4 for “per_head”."
        in found.headline
    )
    assert (
        "The effective rank, averaged over layers, is 14 for “none” and 19.6 for “per_head”."
        in found.headline
    )
    rows = found.tables["measures"].query("measure == 'top_mass'").set_index("variant")
    assert rows.loc["per_head", "mean"] == pytest.approx(0.04)
    assert rows.loc["per_head", "difference"] == pytest.approx(-0.56)
    assert rows.loc["none", "step"] == 20
    assert found.notes == ()


def test_a_sink_of_the_first_checkpoint_is_not_called_born(tmp_path):
    masses = {0: [0.4, 0.5, 0.6], 1: [0.0, 0.2, 0.6]}
    runs = [
        write_run(tmp_path / f"{name}-{seed}", BASE, seed=seed, masses=own, value_norm=name)
        for seed, some in masses.items()
        for name, own in (("none", some), ("per_head", masses[0]))
    ]
    found = compare(runs, generator=generator()).headline
    assert (
        "“none” has a sink in 2 of 2 seeds, born by 640 tokens, and there at the first checkpoint already in 1"
        in found
    )
    assert (
        "“per_head” has a sink in 2 of 2 seeds, there at the first checkpoint already in 2" in found
    )


def test_runs_of_other_batches_are_compared_after_as_many_tokens(tmp_path):
    runs = []
    for batch, masses in ((4, [0.0, 0.2, 0.6]), (8, [0.0, 0.6])):
        for seed in (0, 1):
            given = {"seed": seed, "batch": batch, "masses": masses}
            runs.append(write_run(tmp_path / f"{batch}-{seed}", BASE, **given))
            with add_to_run(runs[-1]) as writer:
                for name, table in (("watch", watched(masses)), ("log", log(BASE))):
                    tokens = table["tokens"] * batch // 4
                    writer.write_table(name, table.assign(tokens=tokens))
    found = compare(runs, generator=generator())
    rows = found.tables["measures"].query("measure == 'top_mass'").set_index("variant")
    assert rows["step"].to_dict() == {"4": 20, "8": 10}
    assert rows["mean"].to_dict() == pytest.approx({"4": 0.6, "8": 0.6})
    assert "2.56k to 5.12k tokens per run" in found.headline


def test_sinks_are_compared_after_tokens_that_all_runs_have(tmp_path):
    runs = variants(tmp_path, seeds=(0, 1), masses=[0.0, 0.2, 0.6], other=[0.0, 0.1])
    with pytest.warns(UserWarning, match="compared after 640 tokens"):
        found = compare(runs, generator=generator())
    assert set(found.tables["measures"]["step"]) == {10}


def test_runs_that_were_watched_on_other_sequences_have_their_losses_compared_only(tmp_path):
    runs = variants(tmp_path, masses=[0.0, 0.2])
    with add_to_run(runs[0]) as writer:
        writer.write_table("watch", watched([0.0, 0.2], tokens_sha256="b" * 64))
    found = compare(runs, generator=generator())
    assert "watched on different sequences" in found.notes[0]
    assert "measures" not in found.tables


def test_a_threshold_that_was_not_measured_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"not watched at threshold 0\.2; need one of 0\.1, 0\.3"):
        compare(variants(tmp_path, masses=[0.1]), generator=generator(), threshold=0.2)


# --- what may be compared


def test_any_field_can_be_compared_by_name(tmp_path):
    runs = [
        write_run(tmp_path / f"{lr}-{seed}", BASE, lr=lr, seed=seed)
        for lr in (0.002, 0.001)
        for seed in (0, 1, 2)
    ]
    found = group_runs(runs)
    assert found.group_by == ("lr",)
    assert list(found.runs) == ["0.002", "0.001"]  # the first run's variant is the baseline
    assert group_runs(runs, group_by="lr", baseline="0.001").baseline == "0.001"
    with pytest.raises(InputError, match=r"no variant is '5'; need one of 0\.002, 0\.001"):
        group_runs(runs, baseline="5")


def test_three_architectures_are_compared_with_the_one_that_changes_nothing(tmp_path):
    made = [{"attention": "sigmoid"}, {"value_norm": "per_head"}, {}]
    runs = [
        write_run(tmp_path / f"{i}-{s}", BASE, seed=s, **one)
        for i, one in enumerate(made)
        for s in (0, 1, 2)
    ]
    found = group_runs(runs)
    assert found.group_by == ("attention", "value_norm")
    assert "up to 10%" in found.notes[0]  # 1 - .95^2 = .0975
    assert list(found.runs) == ["softmax/none", "sigmoid/none", "softmax/per_head"]


def test_two_changes_at_once_must_be_asked_for(tmp_path):
    runs = [write_run(tmp_path / f"b{s}", BASE, seed=s) for s in (0, 1, 2)]
    runs += [
        write_run(tmp_path / f"n{s}", BASE, seed=s, attention="sigmoid", value_norm="shared")
        for s in (0, 1, 2)
    ]
    with pytest.raises(
        RunError, match="differs from the baseline in attention and value_norm at once"
    ):
        group_runs(runs)
    assert list(group_runs(runs, group_by="attention,value_norm").runs) == [
        "softmax/none",
        "sigmoid/shared",
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lr": 7}, r"the runs also differ in lr: .*b0\), 7 \(.*n0\); need variants that differ"),
        ({"data_seed": 7}, "the runs also differ in data_seed"),
        ({"provenance": {"data_sha256": "other"}}, "the runs have another data_sha256"),
        ({"provenance": {"tokenizer_sha256": "other"}}, "the runs have another tokenizer_sha256"),
    ],
)
def test_arms_that_differ_in_something_else_are_refused(tmp_path, fields, says):
    runs = [write_run(tmp_path / f"b{s}", BASE, seed=s) for s in (0, 1, 2)]
    runs += [
        write_run(tmp_path / f"n{s}", BASE, seed=s, value_norm="shared", **fields)
        for s in (0, 1, 2)
    ]
    for by in (None, "value_norm"):
        with pytest.raises(RunError, match=says):
            group_runs(runs, group_by=by)


def test_a_field_that_only_one_variant_has_a_use_for_may_differ_from_the_others(tmp_path):
    runs = [write_run(tmp_path / f"b{s}", BASE, seed=s, decay_unshared_gain=False) for s in (0, 1)]
    norm = {"value_norm": "per_head", "decay_unshared_gain": True}
    runs += [write_run(tmp_path / f"d{s}", BASE, seed=s, **norm) for s in (0, 1)]
    for by in (None, "value_norm"):
        assert list(group_runs(runs, group_by=by).runs) == ["none", "per_head"]
    other = write_run(
        tmp_path / "o", BASE, seed=2, value_norm="per_head", decay_unshared_gain=False
    )
    with pytest.raises(RunError, match="also differ in decay_unshared_gain"):
        group_runs([*runs, other])


def test_other_software_or_devices_are_said_and_not_refused(tmp_path):
    unlike = {"watch": True}  # which touch no number: not even said
    base = [write_run(tmp_path / f"b{s}", BASE, seed=s, **unlike) for s in (0, 1, 2)]
    changed = {"provenance": {"versions": {"torch": "3.0"}, "processes": 2}, "compile": True}
    other = [
        write_run(tmp_path / f"n{s}", BASE, seed=s, value_norm="shared", **changed)
        for s in (0, 1, 2)
    ]
    with pytest.warns(UserWarning, match="differ in") as said:
        found = group_runs(base + other)
    assert len(said) == len(found.notes) == 3
    assert 'versions: {"torch": "2.13.0"} and {"torch": "3.0"}' in found.notes[0]
    assert "processes: null and 2" in found.notes[1]
    assert "compile: null and true" in found.notes[2]


def test_runs_that_are_no_arms_or_not_whole_are_refused(tmp_path):
    base = [write_run(tmp_path / f"b{s}", BASE, seed=s) for s in (0, 1, 2)]
    norm = [write_run(tmp_path / f"n{s}", BASE, seed=s, value_norm="shared") for s in (0, 1, 2)]
    with pytest.raises(InputError, match="1 runs were given; need two"):
        group_runs(base[:1])
    with pytest.raises(
        RunError, match="the same configuration but for the seed; need two variants"
    ):
        group_runs(base)
    with pytest.raises(RunError, match="all runs are softmax; need two variants"):
        group_runs(base, group_by="attention")
    with pytest.raises(
        InputError, match="no run has colour; need a field of the configuration: attention, "
    ):
        group_runs(base + norm, group_by="colour")
    with pytest.raises(
        RunError, match=r"other seeds \(none: 0, 1, 2; shared: 0, 1\); need the same in each"
    ):
        group_runs(base + norm[:2])
    with pytest.raises(RunError, match="are both none with seed 0; need each once"):
        group_runs([*base, *norm, base[0]])
    failed = write_run(tmp_path / "failed", BASE, value_norm="shared", status="failed")
    with pytest.raises(RunError, match="failed is failed, not finished; need whole runs"):
        group_runs([*base[:2], failed])
    with create_run(tmp_path / "sweep", kind="sweep", config={}, provenance={}) as writer:
        writer.write_text("a", "b")
    with pytest.raises(RunError, match="holds a sweep run; need runs of sink-lens train"):
        group_runs([*base[:2], tmp_path / "sweep"])
    bad = write_run(tmp_path / "bad", [5.0, math.inf], value_norm="shared", seed=0)
    with pytest.raises(RunError, match="a loss that is not finite"):
        compare([base[0], bad], generator=generator())


def test_an_interval_of_few_seeds_is_said_to_say_little(tmp_path):
    two = compare(variants(tmp_path / "two", seeds=(0, 1)), generator=generator())
    assert "an interval of two seeds says little" in two.notes
    assert "3 seeds are needed to tell a difference" in two.headline
    assert "the baseline: " not in two.headline  # neither ahead of it nor behind
    one = compare(variants(tmp_path / "one", seeds=(0,)), generator=generator())
    assert "one seed has no interval: no difference can be told from chance" in one.notes
    assert "is of one seed, so it has no interval." in one.headline


def test_a_comparison_is_kept_as_a_run(tmp_path):
    folder = tmp_path / "out"
    config = CompareConfig(runs=("none",))  # which the folders replace
    found = compare(
        variants(tmp_path, masses=[0.0, 0.2]), config=config, out=folder, generator=generator()
    )
    assert found.folder == folder
    kept = read_run(folder)
    assert (kept.kind, kept.status, kept.missing) == ("compare", "finished", [])
    assert set(kept.tables) == {"curves", "bands", "finals", "differences", "measures", "course"}
    pd.testing.assert_frame_equal(kept.tables["finals"], found.tables["finals"])
    assert kept.config["runs"]["per_head"]["2"].endswith("norm-2")
    assert COMPARE.headline(kept) == list(found.sentences)
    with pytest.raises(RunError, match=r"holds a finished run \(compare, "):
        write_comparison(found, folder)

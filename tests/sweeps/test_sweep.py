"""``sweep``: its numbers against loops, what a folder keeps, how a stopped sweep goes on, and what is refused."""

import functools
import gc
import hashlib
import json
import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rounding import CLOSE, close

import sink_lens
from sink_lens import TokenBatch, read_run, run_with
from sink_lens.edits.constructors import edit, scale, zero
from sink_lens.edits.metrics import (
    evaluate,
    logit_difference,
    loss,
    on_batch,
    on_outcome,
    sink_mass,
)
from sink_lens.edits.references import References
from sink_lens.engine import engine
from sink_lens.engine import plan as planning
from sink_lens.engine.engine import Engine
from sink_lens.engine.passes import Passes
from sink_lens.errors import InputError, RunError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.records.writing import RunWriter, goes_on_note
from sink_lens.report import style
from sink_lens.sweeps import EditGrid, Grid, MetricSpec, SweepConfig, cell_of
from sink_lens.sweeps.cells import grid_cells
from sink_lens.sweeps.page import SWEEP
from sink_lens.sweeps.sweep import sweep
from sink_lens.sweeps.words import cell_name, changed_rows, effect_text
from tests.tiny_families import tiny

runner = import_module("sink_lens.sweeps.sweep")

LENGTHS = (12, 9, 5, 12)
NEURONS = EditGrid(kind="zero", site="neurons", layers=[0, 2], units=[3, [7, 9], 40])
HEADS = EditGrid(kind="scale", site="z", layers=1, heads="each", factors=[0.5, 2.0])
GRID = Grid.of(NEURONS, HEADS, controls=2)
FEW = Grid.of(HEADS, controls=0)
METRICS = (MetricSpec(name="sink_mass"), MetricSpec(name="loss"))
TABLES = ("cells", "controls", "values")
ROUNDING = {"rtol": CLOSE, "atol": CLOSE}


@functools.cache
def llama(seed=0):
    return wrap(tiny("llama", seed=seed), tokenizer=tiny_tokenizer())


def sequences(*, seed=1, lengths=LENGTHS):
    ids = torch.randint(
        3, 300, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed)
    )
    return TokenBatch.from_tensor(ids, lengths=torch.tensor(lengths))


def swept(out, *, lens=None, what=GRID, **options):
    given = {"tokens": sequences(), "metrics": METRICS, "progress": False} | options
    return sweep(llama() if lens is None else lens, what, out=out, **given)


def blocks(folder):
    return sorted(folder.glob("block-*.parquet"))


def stamps(folder):
    """What tells a file that was written again: its name, time and content."""
    return {
        path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder
    }


def assert_same(one, other, **options):
    """Two results and their folders hold the same; to the last bit without options."""
    options = options or {"check_exact": True}
    for name in TABLES:
        there = [pd.read_parquet(result.folder / f"{name}.parquet") for result in (one, other)]
        pd.testing.assert_frame_equal(*there, **options)
    for name in ("frame", "controls", "values"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name), **options)
    assert one.headline == other.headline


def make_blocks_small(monkeypatch):
    """Blocks of the size of a pack, so that a small sweep has many."""
    monkeypatch.setattr(engine, "CELLS_A_BLOCK", 1)
    monkeypatch.setattr(
        planning, "_CPU_TOKENS", 100
    )  # two cells of four sequences of twelve tokens


@pytest.fixture(scope="module", autouse=True)
def plain_picture():
    """Drawing takes longer than the tests' sweeps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(style, "figure_bytes", lambda figure, form: b"a picture")
        yield


@pytest.fixture(scope="module")
def in_small_blocks(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        make_blocks_small(patched)
        return swept(tmp_path_factory.mktemp("small") / "run")


def watch_blocks(monkeypatch, *, stop=None):
    """The cells of every block that is computed, as it begins; from the ``stop``-th on it is interrupted."""
    found, run = [], Engine.run

    def watched(self, block, **options):
        found.append(block.cells)
        if stop and len(found) >= stop:
            raise KeyboardInterrupt
        return run(self, block, **options)

    monkeypatch.setattr(Engine, "run", watched)
    return found


# --- the numbers


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("whole") / "run")


def slow_values(lens, tokens, edits):
    run = run_with(lens, tokens, edits, quiet=True)
    return {
        metric.name: evaluate(metric, run).double().numpy() for metric in (sink_mass(0), loss())
    }


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
def test_every_number_is_that_of_run_with_on_one_cell_and_the_plan_says_how_close(
    family, tmp_path, whole
):
    # gpt2's bridge multiplies in another order than its plain module; an expert sees all tokens of the forward.
    lens, tokens, grid, result = llama(), sequences(), GRID, whole
    if family != "llama":
        grid = Grid.of(EditGrid(site="z", heads="each"), EditGrid(site="resid_post"), controls=0)
        lens = wrap(tiny(family))
        result = swept(tmp_path, lens=lens, what=grid)
    plan = json.loads((result.folder / "plan.json").read_text())
    assert plan["deviation"] < CLOSE
    assert (plan["path"], plan["pack"] > 1) == ("blocks", True)
    found, references = (
        grid_cells(grid, lens, n_positions=tokens.n_positions),
        References(lens, tokens),
    )
    for number, cell in enumerate(found.every[: found.n]):
        for metric, wanted in slow_values(lens, tokens, cell.make(references)).items():
            rows = result.values[
                (result.values["cell"] == number) & (result.values["metric"] == metric)
            ]
            assert rows["sequence"].tolist() == [0, 1, 2, 3]
            assert rows["value"].tolist() == close(wanted.tolist())
    assert len(result.values) == found.n * 2 * 4


def test_the_columns_say_where_each_edit_is(whole):
    frame = whole.frame.query("metric == 'loss'")
    neurons, heads = frame.query("site == 'neurons'"), frame.query("site == 'z'")
    assert neurons["layer"].tolist() == [0, 0, 0, 2, 2, 2]
    assert neurons["unit"].fillna(-1).tolist() == [3, -1, 40, 3, -1, 40]  # a set has no one number
    assert neurons["where"].tolist()[1] == "layer 0, unit 7,9"
    assert heads["head"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert heads["factor"].tolist() == [0.5, 2.0] * 4
    assert frame["metric_unit"].unique().tolist() == ["nats"]


def test_controls_are_as_many_units_of_the_same_layer_and_none_of_the_cell_s_own(whole):
    lens, tokens = llama(), sequences()
    before = slow_values(lens, tokens, ())
    drawn = whole.controls.query("site == 'neurons' and metric == 'loss'")
    for row in whole.frame.query("site == 'neurons'").to_dict("records"):
        own = units_of(row["where"])
        pool = [
            units_of(place)
            for place in drawn["where"]
            if place.startswith(f"layer {row['layer']},")
        ]
        fit = [units for units in pool if len(units) == len(own) and not set(units) & set(own)][:2]
        assert len(fit) == row["n_controls"] == 2
        values = [
            slow_values(lens, tokens, zero("neurons", layers=[row["layer"]], units=units))
            for units in fit
        ]
        values = np.stack([one[row["metric"]] for one in values])
        effects = (values - before[row["metric"]]).mean(1)
        assert row["control_effect"] == close(effects.mean())
        assert row["control_sd"] == close(abs(effects[0] - effects[1]) / 2**0.5)
        assert row["over_control"] == pytest.approx(
            row["effect"] - row["control_effect"], rel=1e-9, abs=1e-12
        )
        assert row["over_low"] <= row["over_control"] <= row["over_high"]


def units_of(place):
    (text,) = re.findall(r"unit ([\d,-]+)$", place)
    ends = [piece.partition("-") for piece in text.split(",")]
    return [unit for first, _, last in ends for unit in range(int(first), int(last or first) + 1)]


def test_the_run_folder_holds_what_the_result_holds(whole):
    run = read_run(whole.folder)
    assert (run.kind, run.status, run.missing) == ("sweep", "finished", [])
    pd.testing.assert_frame_equal(run.tables["values"], whole.values, check_exact=True)
    for name, frame in {"cells": whole.frame, "controls": whole.controls}.items():
        there = run.tables[name]
        assert there.columns.tolist() == frame.columns.tolist()
        for column in ("baseline", "effect", "ci_low", "control_sd", "layer", "unit", "factor"):
            np.testing.assert_array_equal(
                there[column].to_numpy(float), frame[column].to_numpy(float)
            )
    assert run.config["metrics"] == [{"name": "sink_mass"}, {"name": "loss"}]
    assert run.config["grid"]["edits"][0]["units"] == [3, [7, 9], 40]
    assert run.provenance["kernel"] == "eager"
    assert (whole.folder / "effects.png").read_bytes() == b"a picture"


def test_the_headline_names_the_strongest_cell_of_each_metric_as_the_page_does(whole):
    run = read_run(whole.folder)
    assert whole.headline == "\n".join([f"{SWEEP.title(run)}.", *SWEEP.headline(run)])
    assert " of 14 edits " in whole.headline.splitlines()[0]
    assert (
        "over 4 sequences excludes 0, and if that of the change above random edits does too"
        in whole.headline
    )
    for name in ("sink mass at position 0", "loss"):
        changed = changed_rows(whole.frame, name, least=0.2)
        best = (changed if len(changed) else whole.top(1, metric=name)).to_dict("records")[0]
        assert f" is {effect_text(best)}, by {cell_name(best)}" in whole.headline


def test_a_configuration_is_the_same_sweep(tmp_path):
    saved = tmp_path / "model"
    llama().plain.save_pretrained(saved)
    llama().tokenizer.save_pretrained(saved)
    last = EditGrid(site="mlp_out", layers=1, positions=[-1, [-2, 0]])
    grid = Grid.of(NEURONS, HEADS, last, controls=2)
    config = SweepConfig(
        model=str(saved),
        device="cpu",
        tokens="random",
        sequences=3,
        length=10,
        grid=grid,
        metrics=METRICS,
        seed=3,
    )
    by_config = sweep(config.model, config=config, out=tmp_path / "a", progress=False)
    lens = sink_lens.load(saved, device="cpu")
    generator = torch.Generator().manual_seed(3)
    tokens = sink_lens.TokenBatch.random(
        lens.tokenizer, generator=generator, sequences=3, length=10, vocab_size=300
    )
    by_hand = swept(tmp_path / "b", lens=lens, what=grid, tokens=tokens, seed=3)
    assert_same(by_config, by_hand)


# --- cells of one's own


def test_cells_and_metrics_of_one_s_own_are_swept(tmp_path):
    twice = on_outcome(lambda run: 2 * run.loss, name="twice")
    lens, tokens = llama(), sequences()
    edits = {
        "halved": scale("z", 0.5, layers=[1], heads=[2]),
        "both": (zero("z", layers=[0]), zero("z", layers=[2])),
    }
    cells = [cell_of(some, name=name, dose=dose) for dose, (name, some) in enumerate(edits.items())]
    result = swept(tmp_path, what=cells, metrics=[twice, loss()])
    assert result.frame["name"].tolist() == ["halved", "both"] * 2
    assert result.frame["dose"].tolist() == [0, 1] * 2
    assert result.frame["n_controls"].tolist() == [3, 0] * 2  # three other heads; "both" names none
    for name, some in edits.items():
        wanted = slow_values(lens, tokens, some)["loss"]
        by_metric = result.frame[result.frame["name"] == name].set_index("metric")["value"]
        assert by_metric["loss"] == pytest.approx(wanted.mean(), rel=1e-12)
        assert by_metric["twice"] == pytest.approx(2 * wanted.mean(), rel=1e-7)
    assert ", by both" in result.headline or ", by halved" in result.headline
    assert swept(tmp_path, what=cells, metrics=[twice, loss()]).headline == result.headline


def test_an_edit_that_does_nothing_and_one_sequence_are_said_in_the_headline(tmp_path):
    cells = [cell_of(scale("z", 1.0), name="nothing"), cell_of(zero("z"), name="everything")]
    result = swept(tmp_path / "two", what=cells)
    assert "1 edit changed nothing that the metrics read." in result.headline
    frame = result.frame.query("metric == 'loss'")
    assert frame["changed"].tolist() == [False, True]
    assert frame["effect"].tolist()[0] == 0
    said = swept(tmp_path / "one", what=FEW, tokens=sequences(lengths=(12,))).headline
    assert ", by scale head output (z)" in said
    assert "nan" not in said


# --- the same call again


def test_the_same_call_computes_nothing_and_gives_the_identical_table(tmp_path, monkeypatch, whole):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    kept = stamps(blocks(tmp_path))
    monkeypatch.setattr(Engine, "run", lambda *args, **options: pytest.fail("a block was computed"))
    monkeypatch.setattr(
        runner, "make_engine", lambda *args, **options: pytest.fail("the sweep was cut again")
    )
    assert_same(whole, swept(tmp_path))
    assert stamps(blocks(tmp_path)) == kept
    assert read_run(tmp_path).status == "finished"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            lambda: {"what": replace(GRID, controls=3)},
            "differs in grid: .*'controls': 2.* there, .*'controls': 3",
        ),
        (
            lambda: {"metrics": METRICS[1:]},
            r"differs in metrics: .*sink_mass.*there, \[\{'name': 'loss'\}\]",
        ),
        (lambda: {"tokens": sequences(seed=2)}, r"differs in tokens_sha256: \w+ there, \w+ here"),
        (lambda: {"lens": llama(seed=1)}, r"differs in weights_sha256: \w+ there, \w+ here"),
        (lambda: {"seed": 4}, "differs in grid: .*'seed': 0.* there, .*'seed': 4"),
    ],
)
def test_another_sweep_in_the_folder_is_refused_by_its_difference_and_left_alone(
    whole, changes, text
):
    before = stamps(whole.folder.iterdir())
    with pytest.raises(RunError, match=text):
        swept(whole.folder, **changes())
    assert stamps(whole.folder.iterdir()) == before


def test_a_metric_of_other_tokens_is_another_sweep_though_its_name_is_the_same(tmp_path):
    swept(tmp_path, metrics=[logit_difference(5, 6)])
    with pytest.raises(RunError, match="differs in metrics"):
        swept(tmp_path, metrics=[logit_difference(5, 7)])
    swept(tmp_path, metrics=[logit_difference(5, 6)])


# --- stopped and gone on with


def test_a_keyboard_interrupt_leaves_a_folder_to_go_on_with_as_it_was_cut(
    tmp_path, monkeypatch, in_small_blocks
):
    make_blocks_small(monkeypatch)
    n_blocks = len(blocks(in_small_blocks.folder))
    assert n_blocks > 6
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        watch_blocks(patched, stop=4)
        swept(tmp_path)
    assert read_run(tmp_path).status == "interrupted"
    kept, plan = stamps(blocks(tmp_path)), (tmp_path / "plan.json").read_bytes()
    assert len(kept) == 3
    ran = watch_blocks(monkeypatch)
    monkeypatch.setattr(
        planning, "_CPU_TOKENS", 12
    )  # less memory: a new plan would run one sequence at a time
    result = swept(tmp_path)
    assert len(ran) == n_blocks - 3
    assert {name: stamp for name, stamp in stamps(blocks(tmp_path)).items() if name in kept} == kept
    assert (tmp_path / "plan.json").read_bytes() == plan
    assert_same(in_small_blocks, result)


def test_without_out_nothing_is_written_until_a_result_is_saved_or_a_call_is_stopped(
    tmp_path, monkeypatch, in_small_blocks
):
    monkeypatch.chdir(tmp_path)
    make_blocks_small(monkeypatch)
    result = swept(None)
    assert (list(tmp_path.iterdir()), result.folder) == ([], None)
    assert len(str(result).splitlines()) <= 3
    assert result.report("page.html").is_file()
    assert result.draw() is not None
    assert (
        read_run(result.save("saved"))
        .tables["cells"]
        .equals(read_run(in_small_blocks.folder).tables["cells"])
    )
    temporary, run = result.run.folder, result.run
    del result
    assert len(run.tables["cells"])  # the run holds its folder too
    del run
    gc.collect()
    assert not temporary.exists()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as stopped:
        watch_blocks(patched, stop=4)
        swept(None)
    (kept,) = (tmp_path / "runs").iterdir()
    assert [note for note in stopped.value.__notes__ if "finished" in note] == [
        goes_on_note(Path("runs", kept.name))
    ]
    assert_same(in_small_blocks, swept(kept))


def test_blocks_whose_plan_is_gone_are_not_taken_for_those_of_another(
    tmp_path, monkeypatch, in_small_blocks
):
    make_blocks_small(monkeypatch)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(planning, "_CPU_TOKENS", 12)
        watch_blocks(patched, stop=9)
        swept(tmp_path / "b")
    assert len(blocks(tmp_path / "b")) == 8
    (tmp_path / "b" / "plan.json").unlink()
    assert_same(in_small_blocks, swept(tmp_path / "b"))


def test_a_damaged_block_is_computed_again(tmp_path, monkeypatch, in_small_blocks):
    make_blocks_small(monkeypatch)
    shutil.copytree(in_small_blocks.folder, tmp_path / "b")
    blocks(tmp_path / "b")[1].write_bytes(b"PAR1")
    blocks(tmp_path / "b")[3].unlink()
    ran = watch_blocks(monkeypatch)
    assert_same(in_small_blocks, swept(tmp_path / "b"))
    assert len(ran) == 2


# --- cells that fail


class Luck(dict):
    """A property of a machine, such as free memory: no part of what a cell does."""

    def __reduce_ex__(self, protocol):
        return Luck, ()


def some_cells(state):
    def change(x, at):
        if state["broken"]:
            raise ValueError("no luck")
        return x * 0.5

    sound = [cell_of(zero("z", layers=[1], heads=[head]), name=f"head {head}") for head in range(4)]
    fragile = [
        cell_of(edit("z", change, layers=[1]), name=name) for name in ("fragile", "also fragile")
    ]
    return [*sound[:2], fragile[0], *sound[2:], fragile[1]]


def test_cells_that_fail_are_recorded_with_their_error_and_computed_again_only_when_that_is_asked(
    tmp_path, monkeypatch
):
    state = Luck(broken=True)
    cells, ran = some_cells(state), watch_blocks(monkeypatch)
    result = swept(tmp_path / "a", what=cells)
    state["broken"] = False
    sound = swept(tmp_path / "b", what=cells)
    assert result.failed["name"].tolist() == ["fragile", "also fragile"]
    assert result.failed["error"].tolist() == ["ValueError: no luck"] * 2
    assert "2 edits failed; the table has the reasons." in result.headline
    failed = result.frame["error"].notna()
    assert np.isnan(
        result.frame.loc[failed, ["value", "effect", "ci_low", "over_control"]].to_numpy()
    ).all()
    assert result.frame.loc[failed, "n"].tolist() == [0] * 4
    fine = ["name", "metric", "baseline", "value", "effect"]
    pd.testing.assert_frame_equal(
        result.frame.loc[~failed, fine], sound.frame.loc[~failed, fine], **ROUNDING
    )
    assert read_run(tmp_path / "a").status == "finished"
    ran.clear()
    assert len(swept(tmp_path / "a", what=cells).failed) == 2
    assert ran == []
    again = swept(tmp_path / "a", what=cells, retry_failed=True)
    assert len(ran) == 1
    assert {2, 5} <= set(ran[0])
    assert len(again.failed) == 0
    assert_same(again, sound, **ROUNDING)
    ran.clear()
    swept(tmp_path / "a", what=cells, retry_failed=True)
    assert ran == []


def test_a_retry_that_was_stopped_before_its_tables_does_not_leave_the_old_ones(
    tmp_path, monkeypatch
):
    state = Luck(broken=True)
    cells = some_cells(state)
    swept(tmp_path, what=cells)
    state["broken"] = False
    write = RunWriter.write_table

    def stopped(self, name, frame):
        if name == "cells":
            raise KeyboardInterrupt
        return write(self, name, frame)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunWriter, "write_table", stopped)
        swept(tmp_path, what=cells, retry_failed=True)
    result = swept(tmp_path, what=cells)
    assert len(result.failed) == 0
    assert pd.read_parquet(tmp_path / "cells.parquet")["error"].isna().all()


def test_a_metric_that_cannot_be_read_is_refused_and_leaves_no_table(tmp_path):
    with pytest.raises(InputError, match="need one number per sequence"):
        swept(tmp_path / "run", metrics=[lambda logits: logits])
    assert not (tmp_path / "run" / "cells.parquet").exists()


# --- never believing a pack


@pytest.mark.parametrize(
    ("wrong", "path"), [("shared", "blocks"), ("all", "bridge"), ("unedited", "bridge")]
)
def test_forwards_that_are_wrong_are_run_in_another_way_and_what_is_off_by_rounding_is_taken(
    tmp_path, monkeypatch, wrong, path
):
    right, pack, baseline = (
        swept(tmp_path / "right", what=FEW),
        Passes.run_pack,
        Passes.run_baseline,
    )
    by = 1e-3

    def wrong_pack(self, edits, **options):
        outcomes, changed = pack(self, edits, **options)
        if wrong == "all" or (wrong == "shared" and len(edits) > 1):
            outcomes = [replace(one, mass=one.mass + by) for one in outcomes]
        return outcomes, changed

    def wrong_baseline(self, part, **named):
        found = baseline(self, part, **named)
        outcome = replace(found.outcome, mass=found.outcome.mass + by)
        return (
            replace(found, early=replace(found.early, outcome=outcome))
            if wrong == "unedited"
            else found
        )

    monkeypatch.setattr(Passes, "run_pack", wrong_pack)
    monkeypatch.setattr(Passes, "run_baseline", wrong_baseline)
    result = swept(tmp_path / "wrong", what=FEW)
    plan = json.loads((tmp_path / "wrong" / "plan.json").read_text())
    assert plan["path"] == path
    assert wrong == "unedited" or plan["pack"] == 1
    assert plan["deviation"] < CLOSE
    pd.testing.assert_frame_equal(result.frame, right.frame, **ROUNDING)
    if wrong == "all":
        by = 1e-6
        result = swept(tmp_path / "near", what=FEW)
        plan = json.loads((tmp_path / "near" / "plan.json").read_text())
        assert (plan["path"], plan["cut"], plan["deviation"]) == (
            "blocks",
            True,
            pytest.approx(1e-6, rel=0.2),
        )
        assert np.abs(result.frame["value"] - right.frame["value"]).max() < 2e-6


# --- what is refused


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda out: swept(out, what=None), "needs a grid"),
        (
            lambda out: sweep(llama(), GRID, config=SweepConfig(grid=GRID), out=out),
            "has its own: leave one out",
        ),
        (lambda out: swept(out, sequences=3), "has 'sequences', which is not known"),
        (lambda out: swept(out, engine="cloud"), "engine is 'cloud'; need one of local, ray"),
        (lambda out: swept(out, what=[]), "there are no cells"),
        (
            lambda out: swept(out, what=[cell_of(zero("z"), name="a")] * 2),
            "two cells have the same name",
        ),
        (
            lambda out: swept(out, what=Grid.of(EditGrid(site="z", layers=7))),
            "7 does not exist; need 0 to 2",
        ),
        (lambda out: swept(out, metrics=[MetricSpec(name="mass")]), "there is no metric 'mass'"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_written(tmp_path, call, text):
    with pytest.raises(InputError, match=text):
        call(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sequences_without_a_cells_position_are_left_out_of_it(tmp_path):
    ragged = sequences(lengths=(12, 6, 12, 8))
    late, early = (
        cell_of(scale("z", 3.0, layers=[0], positions=[at]), name=str(at)) for at in (9, 3)
    )
    keys = cell_of(scale("pattern", 0.0, layers=[0], keys=[7]), name="key")
    total = on_batch(on_outcome(lambda run: run.loss.sum(), name="total", layers=(0,)))
    for what, rows in (
        ([early, late, keys], {"3": [0, 1, 2, 3], "9": [0, 2], "key": [0, 2, 3]}),
        (
            Grid.of(
                EditGrid(kind="scale", site="z", layers=[0], positions=[3, 9], factors=[3.0]),
                controls=2,
            ),
            None,
        ),
    ):
        out = tmp_path / ("own" if rows else "grid")
        result = swept(out, what=what, tokens=ragged, metrics=[loss(), total])
        before = run_with(llama(), ragged).loss.double().numpy()
        for cell, (_, row) in enumerate(result.frame[result.frame["metric"] == "loss"].iterrows()):
            kept = rows[row["name"]] if rows else ([0, 1, 2, 3] if cell == 0 else [0, 2])
            one = (early, late, keys)[cell].edits
            after = run_with(llama(), ragged, one).loss.double().numpy()
            assert row["n"] == len(kept)
            assert row["baseline"] == pytest.approx(before[kept].mean(), rel=1e-6)
            assert row["value"] == pytest.approx(after[kept].mean(), rel=1e-6)
            assert row["effect"] == pytest.approx((after - before)[kept].mean(), rel=1e-4)
            values = result.values.query("metric == 'loss' and cell == @cell").set_index(
                "sequence"
            )["value"]
            assert values.dropna().index.tolist() == kept
        whole = result.frame[result.frame["metric"] == "total"]
        assert whole["n"].tolist() == [1, 0, 0][: len(whole)]
        if not rows:
            drawn = result.frame[(result.frame["metric"] == "loss")].iloc[1]
            controls = result.controls[result.controls["metric"] == "loss"]
            assert drawn["n_controls"] == 2
            assert len(controls) >= 2


# --- functions of one's own under the same name


def in_notebook(text):
    """The function f of a notebook."""
    found = {"__name__": "__main__"}
    exec(text, found)
    return found["f"]


READS = "def g(logits): return {}\ndef f(logits): return g(logits)"
EDITS = "def g(x): return {}\ndef f(x, at): return g(x)"


def with_function(text):
    """The options of a sweep with a function of a notebook, as its metric or as the edit of its one cell."""
    own = in_notebook(text)
    if text.startswith("def g(logits)"):
        return {"what": FEW, "metrics": own}
    return {"what": [cell_of(edit("z", own, layers=[1]), name="mine")]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [(READS, ("logits[:, -1, 5]", "-logits[:, -1, 5]")), (EDITS, ("x * 0", "x * 2"))],
)
def test_a_function_whose_helper_was_redefined_is_another_run(tmp_path, text, parts):
    first = swept(tmp_path / "a", **with_function(text.format(parts[0])))
    assert_same(
        first, swept(tmp_path / "a", **with_function(text.format(parts[0])))
    )  # defined again, as it was
    with pytest.raises(RunError, match="numbers of something else: a metric of"):
        swept(tmp_path / "a", **with_function(text.format(parts[1])))
    other = swept(tmp_path / "a", **with_function(text.format(parts[1])), overwrite=True)
    assert other.frame["effect"].tolist() != first.frame["effect"].tolist()

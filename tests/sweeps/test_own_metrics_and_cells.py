"""Metrics, prompts and cells of one's own in a sweep: from a file, in any unit, and with controls."""

import functools
import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from lenses import speaking, tokens

from sink_lens import run_with, sweep
from sink_lens.data.tokens import TokenBatch, from_tensor
from sink_lens.edits import (
    amplify,
    centring_means,
    clamp,
    freeze,
    isolate,
    mean_aligned,
    mean_all,
    metrics,
    resample,
    scalar,
    scale,
    set_to,
    zero,
)
from sink_lens.edits.normalisation import head_rms_norm, variance_calibration
from sink_lens.errors import InputError
from sink_lens.sweeps import EditGrid, Grid, cell_of, read_sweep
from sink_lens.sweeps.grid import control_axis
from sink_lens.sweeps.words import changed_rows

BATCH = from_tensor(tokens(6, 12))
HEADS = Grid.of(EditGrid(kind="zero", site="z", layers=[0, 1, 2], heads="each"), controls=3)


def test_the_unit_of_a_metric_does_not_change_what_counts_as_a_change(tmp_path):
    counts, chances, batch = [], [], from_tensor(tokens(12, 12))
    for factor in (1.0, 1e-4, 1e4):
        small = metrics.on_logits(
            lambda logits, factor=factor: factor * logits[:, -1].softmax(-1)[:, 5]
        )
        result = sweep(
            speaking(),
            HEADS,
            tokens=batch,
            metrics=small,
            out=tmp_path / str(factor),
            progress=False,
        )
        frame = result.frame.drop(
            columns="corrected_p"
        )  # few sequences cannot carry the correction
        counts.append(len(changed_rows(frame, "<lambda>", least=0.2)))
        chances.append(result.frame["corrected_p"].to_numpy(float))
        row = result.frame.iloc[0]
        assert row["effect_in_sds"] == pytest.approx(row["effect"] / row["control_sd"])
        assert "0.2 standard deviations of the effects of random edits" in result.headline
    assert len(set(counts)) == 1
    assert counts[0]
    for other in chances[1:]:
        np.testing.assert_allclose(other, chances[0], rtol=1e-3)


def test_without_controls_the_unit_is_the_spread_of_the_baseline(tmp_path):
    cell = cell_of(scale("z", 2.0, layers=[1]), name="whole")
    result = sweep(
        speaking(),
        [cell],
        tokens=BATCH,
        metrics=metrics.loss(),
        out=tmp_path / "run",
        progress=False,
    )
    row, spread = result.frame.iloc[0], run_with(speaking(), BATCH).loss.double().std().item()
    assert row["n_controls"] == 0
    assert row["effect_in_sds"] == pytest.approx(row["effect"] / spread, rel=1e-4)
    assert "of the baseline over sequences" in result.headline


def test_a_cell_of_ones_own_is_compared_with_the_same_edits_elsewhere(tmp_path):
    edits = (
        zero("z", layers=[1], heads=[2]),
        scale("z", 3.0, layers=[2], heads=[2]),
        scale("mlp_out", 2.0, layers=[0]),
    )
    result = sweep(
        speaking(),
        [cell_of(edits, name="mine")],
        tokens=BATCH,
        metrics=metrics.loss(),
        out=tmp_path / "a",
        progress=False,
    )
    row, controls = result.frame.iloc[0], result.controls
    assert row["n_controls"] == len(controls) == 3  # of four heads
    assert [one.split("; ")[0] for one in controls["where"]] == [
        one.split("; ")[1].replace("2,", "1,", 1) for one in controls["where"]
    ]
    before, found = run_with(speaking(), BATCH).loss.double(), []
    for head in (0, 1, 3):
        elsewhere = (
            zero("z", layers=[1], heads=[head]),
            scale("z", 3.0, layers=[2], heads=[head]),
            edits[2],
        )
        found.append(float((run_with(speaking(), BATCH, elsewhere).loss.double() - before).mean()))
    assert sorted(controls["effect"]) == pytest.approx(sorted(found), abs=1e-5)
    assert row["control_effect"] == pytest.approx(np.mean(found), abs=1e-5)
    none = sweep(
        speaking(),
        [cell_of(edits, name="mine")],
        tokens=BATCH,
        controls=0,
        out=tmp_path / "b",
        progress=False,
    )
    assert len(none.controls) == 0


def effects_of_controls(made):
    """Return index -> effect of the random controls of a cell."""
    cells, how = [cell_of(made, name="mine")], {"metrics": metrics.loss(), "progress": False}
    found = sweep(speaking(), cells, tokens=BATCH, controls=11, **how)
    rows, axis = found.controls, control_axis(made.part)
    assert len(rows) == found.frame["n_controls"].item()
    return dict(zip(rows[axis].tolist(), rows["effect"], strict=True)) if len(rows) else {}


@functools.cache
def centres():
    return centring_means(speaking(), seed=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda at: mean_all(speaking(), BATCH, "z", layers=[1], heads=[at]),
        lambda at: mean_aligned(speaking(), BATCH, "resid_post", layers=[1], positions=[at]),
        lambda at: amplify(3.0, positions=[2], layers=[1], heads=[at], means=centres()),
        lambda at: variance_calibration(torch.arange(2.0, 6.0), layers=[1], heads=[at]),
        lambda at: head_rms_norm({1: torch.arange(1.0, 5.0)[:, None]}, heads=[at]),
        lambda at: scalar(speaking(), layer=1, neurons=[3, 5], dimensions=[at]),
    ],
)
def test_a_random_control_has_the_values_of_its_own_part(make):
    found = effects_of_controls(make(0))
    assert found
    before = run_with(speaking(), BATCH).loss.double()
    for index, effect in found.items():
        after = run_with(speaking(), BATCH, make(index)).loss.double()
        assert effect == pytest.approx(float((after - before).mean()), abs=1e-6), index


def test_values_of_one_part_are_given_to_no_other():
    values = {1: torch.ones(1, 1, 1, speaking().d_head)}
    assert not effects_of_controls(freeze("z", values, heads=[0]))
    assert not effects_of_controls(
        resample(
            "z",
            {1: torch.rand(6, 12, 1, speaking().d_head)},
            heads=[0],
            generator=torch.Generator(),
        )
    )


def test_no_random_control_isolates_the_first_token():
    assert 0 not in effects_of_controls(isolate([5], layers=[0]))


def test_an_edit_with_each_is_the_grid_of_it_and_texts_are_tokens(tmp_path):
    lens, texts = speaking(), ["x y z x", "y x z", "z z x y"]
    how = {"metrics": metrics.loss(), "progress": False, "seed": 3}
    tokens = TokenBatch.from_prompts(texts, lens.tokenizer)
    for made, same in (
        (zero("z", heads="each"), EditGrid(kind="zero", site="z", heads="each")),
        (
            scale("q", 2.0, layers=[1, 2], heads="each"),
            EditGrid(kind="scale", site="q", layers=[[1, 2]], heads="each", factors=[2]),
        ),
        (set_to("mlp_out", 0.5, layers="each", positions=[1, 2]), None),
        ([zero("k", heads="each"), zero("v", heads="each")], None),
    ):
        found = sweep(lens, made, tokens=texts, out=tmp_path / "run", overwrite=True, **how)
        if same is not None:
            wanted = sweep(lens, Grid.of(same, seed=3), tokens=tokens, **how)
            pd.testing.assert_frame_equal(found.frame, wanted.frame)
        assert sweep(lens, made, tokens=texts, out=tmp_path / "run", **how).frame.equals(
            found.frame
        )
    by_head = sweep(lens, zero("z", heads="each"), tokens=texts, controls=0, **how).frame
    assert by_head[["layer", "head"]].drop_duplicates().shape == (lens.n_layers * lens.n_heads, 2)
    one = zero("z", layers=[1], heads=[2])
    alone = sweep(lens, [one, scale("z", 0.0)], tokens=texts[0], controls=0, **how).frame
    row = by_head.loc[by_head["layer"].eq(1) & by_head["head"].eq(2)].iloc[0]
    assert alone["name"].tolist() == [f"{one.label}, layer 1, head 2", "z x 0"]
    assert sweep(lens, one, tokens=texts, controls=0, **how).frame[
        "effect"
    ].item() == pytest.approx(row["effect"])


def test_copies_among_the_sequences_are_told(caplog):
    rows, how = BATCH.tokens[[0, 1, 0]], {"metrics": metrics.loss(), "progress": False}
    for some, said in ((rows, True), (rows[:2], False)):
        caplog.clear()
        sweep(speaking(), zero("z", layers=[1]), tokens=some, **how)
        assert ("1 of 3 sequences are copies of others" in caplog.text) is said


def test_the_seed_of_a_call_draws_the_controls_of_its_grid():
    grid, how = EditGrid(kind="zero", site="z", layers=1, heads="0-1"), {"metrics": metrics.loss()}
    how |= {"tokens": BATCH, "controls": 1, "progress": False}
    found = sweep(speaking(), Grid.of(grid), seed=5, **how)
    wanted = sweep(speaking(), Grid.of(grid, seed=5), seed=5, **how)
    other = sweep(speaking(), Grid.of(grid), seed=0, **how)
    pd.testing.assert_frame_equal(found.controls, wanted.controls)
    assert found.controls["head"].tolist() != other.controls["head"].tolist()


def test_cells_of_ones_own_have_the_columns_of_a_grid():
    how = {"tokens": BATCH, "metrics": metrics.loss(), "controls": 1, "progress": False}
    one, last = zero("z", layers=[1], heads=[3]), scale("z", 2.0, layers=[-1])
    two = cell_of([one, zero("z", layers=[1], heads=[0])], name="two", layer=7)
    result = sweep(speaking(), [one, last, two], **how)
    grid = sweep(speaking(), zero("z", layers=[1], heads="each"), **how).frame
    assert set(grid) <= set(result.frame)
    assert set(result.frame) - set(grid) == {"name"}
    found = result.frame[["kind", "site", "where", "layer", "head", "factor"]].to_numpy(object)
    assert [[None if pd.isna(value) else value for value in row] for row in found] == [
        ["zero", "z", "layer 1, head 3", 1, 3, None],
        ["scale", "z", f"layer {speaking().n_layers - 1}", speaking().n_layers - 1, None, 2.0],
        ["zero", "z", "layer 1, head 3; layer 1, head 0", 7, None, None],  # 7 is the caller's own
    ]
    assert result.controls["head"].tolist()[0] != 3
    alone = sweep(speaking(), one, **how).frame
    assert (alone["site"].item(), alone["layer"].item(), alone["head"].item()) == ("z", 1, 3)


def test_an_edit_with_each_is_for_a_sweep_alone():
    each = zero("z", heads="each")
    for call in (
        lambda: run_with(speaking(), BATCH, each),
        lambda: cell_of(each, name="mine"),
        lambda: sweep(speaking(), [each, zero("z")], tokens=BATCH),
        lambda: clamp("z", low=0.0, heads="each"),
        lambda: sweep(speaking(), zero("mlp_out", heads="each"), tokens=BATCH),
    ):
        with pytest.raises(InputError, match=r"each|no heads"):
            call()


def test_a_file_takes_prompts_and_a_metric_that_may_be_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    lens = speaking()
    lens.plain.save_pretrained("model")
    lens.tokenizer.save_pretrained("model")
    (tmp_path / "prompts.txt").write_text("x y z\n\ny x\n")
    (tmp_path / "own_sweep_metrics.py").write_text(
        "def last(logits):\n    return logits[:, -1, 5]\n"
    )
    asked = {"model": "model", "tokens": {"prompts_file": "prompts.txt"}, "controls": 0}
    asked |= {
        "edits": [{"site": "z", "layers": 1}],
        "metrics": [{"name": "own_sweep_metrics:last"}],
    }
    (tmp_path / "s.json").write_text(json.dumps(asked))
    with pytest.raises(InputError, match="imports='own_sweep_metrics:last'"):
        read_sweep("s.json")
    config = read_sweep("s.json", imports=("own_sweep_metrics:last",))
    assert config.prompts == ("x y z", "y x")
    found = sweep(config.model, config=config, out=tmp_path / "run", progress=False).values["value"]
    for row, text in enumerate(config.prompts):
        ids = torch.tensor([lens.tokenizer(text)["input_ids"]])
        alone = run_with(lens, ids, zero("z", layers=[1]), logits=True).logits[0, -1, 5]
        assert found[row] == pytest.approx(float(alone), abs=1e-5)
    (tmp_path / "s.json").write_text(json.dumps(asked | {"imports": ["own_sweep_metrics:last"]}))
    with pytest.raises(InputError, match="a file cannot ask for"):
        read_sweep("s.json")
    sys.modules.pop("own_sweep_metrics", None)

"""Tasks as batches of tokens."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from lenses import speaking

from sink_lens import circuits, run_with
from sink_lens.circuits.runs import with_spans
from sink_lens.circuits.tasks import task_of
from sink_lens.edits import metrics
from sink_lens.edits.metrics import evaluate
from sink_lens.errors import InputError, RunError
from sink_lens.patching.pair_file import read_pairs

from .tiny_runs import pair, reference_pairs, unfinish


def test_induction_begins_with_bos_unless_told_otherwise():
    lens = speaking("llama")
    for bos, begins in (("auto", True), ("with", True), ("without", False)):
        task = task_of(
            lens, "induction", pairs=4, generator=np.random.default_rng(0), bos=bos, least=0.0
        )
        assert (set(task.clean.tokens[:, 0].tolist()) == {lens.tokenizer.bos_token_id}) == begins
        assert (task.clean.bos, task.clean.bos_condition) == (begins, bos)  # what a run records


def test_pairs_that_are_left_out_are_counted(tmp_path, caplog):
    file = reference_pairs(tmp_path / "pairs.jsonl", n=8)
    more = {"clean": [5, 6, 7], "corrupted": [5, 6], "correct": 8, "incorrect": 9}
    file.write_text(file.read_text() + "\n" + json.dumps(more))
    task_of(speaking("llama"), "file", pairs_file=str(file), generator=np.random.default_rng(0))
    assert "1 of the first 9 pairs of" in caplog.text


def test_pairs_that_do_not_fit_are_refused_with_their_line(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"clean": "a"}\n')
    with pytest.raises(InputError, match="line 1"):
        read_pairs(file)
    file.write_text(
        '{"clean": "a b c d e f", "corrupted": "a b", "correct": " b", "incorrect": " c"}\n'
    )
    with pytest.raises(InputError, match="no pair of 'file'"):
        task_of(speaking("llama"), "file", pairs_file=str(file), generator=np.random.default_rng(0))
    rows = [json.loads(line) for line in reference_pairs(file).read_text().splitlines()]
    for row in rows:
        row["correct"], row["incorrect"] = row["incorrect"], row["correct"]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match="does not do"):
        task_of(speaking("llama"), "file", pairs_file=str(file), generator=np.random.default_rng(0))
    for row in rows[: len(rows) * 5 // 8]:  # as chance does it
        row["correct"], row["incorrect"] = row["incorrect"], row["correct"]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"15 of 24 .* chance .* 15\.4%"):
        task_of(speaking("llama"), "file", pairs_file=str(file))
    with (
        torch.no_grad()
    ):  # answers that both prompts prefer: there and back, the differences cancel
        logits = sum(
            speaking("llama").plain(tokens).logits[:, -1] for tokens in pair(n=6, length=9)
        )
    best, worst = logits.argmax(-1).tolist(), logits.argmin(-1).tolist()
    there = [
        {**row, "correct": best[at], "incorrect": worst[at]} for at, row in enumerate(rows[:6])
    ]
    back = [{**row, "clean": row["corrupted"], "corrupted": row["clean"]} for row in there]
    file.write_text("\n".join(map(json.dumps, there + back)))
    with pytest.raises(InputError, match="covers 0"):
        circuits.run(
            speaking("llama"),
            task="file",
            pairs_file=str(file),
            pairs=12,
            out=tmp_path / "r",
            random=0,
        )


def of_file(tmp_path, **more):
    """A file of pairs with two right answers, and a span at another place in each pair."""
    rows = [
        json.loads(line)
        for line in reference_pairs(tmp_path / "pairs.jsonl", n=8).read_text().splitlines()
    ]
    rows = [
        {**row, "correct": [row["correct"], 5], "at": str(2 + number % 3)}
        for number, row in enumerate(rows)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows, {"task": "file", "pairs_file": str(tmp_path / "pairs.jsonl"), "pairs": 8} | more


def test_of_several_right_answers_the_mean_of_their_logits_counts(tmp_path):
    _, fields = of_file(tmp_path)
    lens, task = speaking("llama"), task_of(speaking("llama"), **fields)
    for start in (0, 3):  # a batch of a sweep knows its pairs
        few = task.clean[start : start + 3]
        with torch.no_grad():
            logits = lens.plain(few.tokens).logits[:, -1]
        run = replace(
            run_with(lens, few, loss=False, logits=True), sequences=slice(start, start + 3)
        )
        for at, value in enumerate(evaluate(task.metric, run).tolist()):
            right, wrong = (list(side[start + at]) for side in (task.correct, task.incorrect))
            assert len(right) == 2
            assert value == pytest.approx(
                float(logits[at, right].mean() - logits[at, wrong[0]]), abs=1e-5
            )
    with pytest.raises(InputError, match="no right, or no wrong, answer"):
        metrics.logit_difference([[]], [5])


def test_a_span_by_pair_is_the_same_part_of_every_pair(tmp_path):
    """Its edges' scores are those of each pair alone with its own fixed span."""
    _, fields = of_file(tmp_path)
    lens, more = speaking("llama"), {"method": "eap", "edges": 20}
    task = task_of(lens, **fields, spans={"subject": "at", "last": "-1"})
    assert task.spans["subject"] == tuple((2 + number % 3,) for number in range(len(task.correct)))
    spans = ("subject=at", "last=-1")
    found = circuits.find(lens, task, spans=spans, **more)
    assert found.graph.spans == ("subject", "last", "rest")
    for row in (0, 2):
        prompts = task.clean[[row]], task.corrupted[[row]]
        metric = metrics.logit_difference(
            task.correct[row : row + 1], task.incorrect[row : row + 1]
        )
        fixed = (f"subject={task.spans['subject'][row][0]}", "last=-1")
        with warnings.catch_warnings(action="ignore"):
            alone = circuits.find(lens, *prompts, metric=metric, spans=fixed, **more)
        np.testing.assert_allclose(found.scores.values[row], alone.scores.values[0], atol=1e-6)
    with pytest.warns(UserWarning, match="found on these same pairs"):
        judged = circuits.evaluate(lens, task, found, spans=spans, random=0)
    assert judged.frame["n"].iloc[0] == found.n_edges
    with pytest.raises(
        InputError, match="is the column 'at' of a file of pairs, which were not read with it"
    ):
        circuits.find(lens, task.clean, task.corrupted, metric=task.metric, spans=spans)
    with pytest.raises(InputError, match="positions of 8 pairs; need those of 2"):
        with_spans(found.runs.select_pairs([0, 1]), task.spans)


def test_a_run_does_not_go_on_with_another_circuit_or_other_prompts_answers_or_spans_in_the_same_file(
    tmp_path,
):
    rows, fields = of_file(
        tmp_path, check=0, random=0, nodes=False, sizes=(1.0,), method="eap", report=False
    )
    file, first = tmp_path / "c.csv", {"correct": rows[0]["correct"][:1]}
    fields |= {"spans": ("subject=at",), "out": tmp_path / "run", "circuit": str(file)}
    file.write_text("node\ninput\na0.h0\n")
    circuits.run(speaking("llama"), **fields)
    unfinish(tmp_path / "run")
    for said, others in (
        ("answers_sha256", [row | {"at": 1} for row in rows]),
        ("answers_sha256", [rows[0] | first, *rows[1:]]),
        (
            "corrupted_sha256",
            [row | {"corrupted": [*row["corrupted"][:-1], row["clean"][0]]} for row in rows],
        ),
    ):
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, others)))
        with pytest.raises(RunError, match=said):
            circuits.run(speaking("llama"), **fields)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file.write_text("node\ninput\na0.h1\n")
    with pytest.raises(RunError, match="circuit_sha256"):
        circuits.run(speaking("llama"), **fields)

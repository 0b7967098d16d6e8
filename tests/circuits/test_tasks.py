"""Tasks as batches of tokens."""

import json

import numpy as np
import pytest
import torch
from lenses import speaking

from sink_lens import circuits
from sink_lens.circuits.pairs import read_pairs
from sink_lens.circuits.tasks import task_of
from sink_lens.errors import InputError

from .tiny_runs import pair, reference_pairs


def test_induction_begins_with_bos_unless_told_otherwise():
    lens = speaking("llama")
    for bos, begins in (("auto", True), ("with", True), ("without", False)):
        task = task_of(lens, "induction", pairs=4, generator=np.random.default_rng(0), bos=bos, least=0.0)
        assert (set(task.clean.tokens[:, 0].tolist()) == {lens.tokenizer.bos_token_id}) == begins


def test_pairs_that_are_left_out_are_counted(tmp_path, caplog):
    file = reference_pairs(tmp_path / "pairs.jsonl", n=8)
    more = {"clean": [5, 6, 7], "corrupted": [5, 6], "correct": 8, "incorrect": 9}
    file.write_text(file.read_text() + "\n" + json.dumps(more))
    task_of(speaking("llama"), "file", file=file, generator=np.random.default_rng(0))
    assert "1 of the first 9 pairs of" in caplog.text


def test_pairs_that_do_not_fit_are_refused_with_their_line(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"clean": "a"}\n')
    with pytest.raises(InputError, match="line 1"):
        read_pairs(file)
    file.write_text('{"clean": "a b c d e f", "corrupted": "a b", "correct": "b", "incorrect": "c"}\n')
    with pytest.raises(InputError, match="no pair of 'file'"):
        task_of(speaking("llama"), "file", file=file, generator=np.random.default_rng(0))
    rows = [json.loads(line) for line in reference_pairs(file).read_text().splitlines()]
    for row in rows:
        row["correct"], row["incorrect"] = row["incorrect"], row["correct"]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match="does not do"):
        task_of(speaking("llama"), "file", file=file, generator=np.random.default_rng(0))
    with torch.no_grad():  # answers that both prompts prefer: there and back, the differences cancel
        logits = sum(speaking("llama").plain(tokens).logits[:, -1] for tokens in pair(n=6, length=9))
    best, worst = logits.argmax(-1).tolist(), logits.argmin(-1).tolist()
    there = [{**row, "correct": best[at], "incorrect": worst[at]} for at, row in enumerate(rows[:6])]
    back = [{**row, "clean": row["corrupted"], "corrupted": row["clean"]} for row in there]
    file.write_text("\n".join(map(json.dumps, there + back)))
    with pytest.raises(InputError, match="covers 0"):
        circuits.run(speaking("llama"), task="file", pairs_file=str(file), pairs=12, out=tmp_path / "r", random=0)

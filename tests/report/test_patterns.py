"""Patterns in a page: the strongest heads first, as many as fit, each value where it belongs."""

import base64

import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import RunError
from sink_lens.records import create_run, read_run
from sink_lens.report.patterns import embed_patterns

LENGTH = 4
ENTRIES = 10  # of the lower triangle: 1 + 2 + 3 + 4


def a_run(folder, *, scores=((0.1, 0.9), (0.5, np.nan)), position=0, kept=True):
    """Two layers of two heads; the pattern of each holds 64 x layer + 32 x head + 4 x query + key."""
    rows = [(layer, head, position, score) for layer, of in enumerate(scores) for head, score in enumerate(of)]
    heads = pd.DataFrame(rows, columns=["layer", "head", "sink_position", "sink_score"]).assign(sink_rate=0.5)
    place = np.arange(LENGTH)
    patterns = np.zeros((2, 2, LENGTH, LENGTH)) + 4 * place[:, None] + place
    patterns += 64 * np.arange(2)[:, None, None, None] + 32 * np.arange(2)[None, :, None, None]
    with create_run(folder, kind="trace", config={}, provenance={}, expects=()) as writer:
        writer.write_table("heads", heads)
        texts = ["<b>", " the", "\u202e", "x" * 99]
        tokens = {"sequence": 0, "position": place, "token_id": place, "text": texts}
        writer.write_table("tokens", pd.DataFrame(tokens))
        if kept:
            writer.write_tensors("patterns", {"pattern": patterns.astype(np.uint8)})
    return read_run(folder)


def unpacked(found):
    values = np.frombuffer(base64.b64decode(found["data"]["patterns"]), dtype=np.uint8)
    return values.reshape(len(found["data"]["chosen"]), ENTRIES)


def test_heads_come_strongest_first_and_the_undefined_last(tmp_path):
    found = embed_patterns(a_run(tmp_path / "run"))
    assert found["data"]["chosen"] == [1, 2, 0, 3]  # scores 0.9, 0.5, 0.1 and none; 2 x layer + head
    assert found["data"]["scores"] == [[0.1, 0.9], [0.5, None]]
    assert found["said"].startswith("Patterns of all 4 heads are in this page")


def test_a_value_lies_at_its_query_and_key(tmp_path):
    values = unpacked(embed_patterns(a_run(tmp_path / "run")))
    # query 2, key 1 is entry 2 x 3 / 2 + 1 = 4; of layer 1, head 0 (second): 64 + 4 x 2 + 1
    assert values[1, 4] == 64 + 9
    assert values[0].tolist() == [32, 36, 37, 40, 41, 42, 44, 45, 46, 47]


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    # two patterns of ten bytes are 20 bytes, 27 in base64; three are 40
    found = embed_patterns(a_run(tmp_path / "run"), most_bytes=30)
    assert found["data"]["chosen"] == [1, 2]
    assert "2 of 4 heads" in found["said"]
    assert "(0.5 and above)" in found["said"]
    assert len(found["data"]["patterns"]) <= 30


def test_tokens_are_cut_and_made_visible(tmp_path):
    tokens = embed_patterns(a_run(tmp_path / "run"))["data"]["tokens"]
    assert tokens[:3] == ["<b>", "·the", "⟨U+202E⟩"]
    assert len(tokens[3]) == 25


def test_a_run_without_patterns_says_so(tmp_path):
    with pytest.raises(RunError, match=r"patterns\.safetensors"):
        embed_patterns(a_run(tmp_path / "run", kept=False))

"""Patterns in a page: the strongest heads first, as many as fit, each value where it belongs."""

import base64

import numpy as np
import pandas as pd
import pytest

from sink_lens.chain.page.story import find_story
from sink_lens.errors import RunError
from sink_lens.records import read_run
from sink_lens.report.patterns import embed_patterns, studied_position

from .circuits import grid, write_run


def a_run(folder, *, kept=True):
    """Two layers of two heads; the pattern of each holds 64 x layer + 32 x head + 4 x query + key."""
    heads = grid(layer=range(2), head=range(2)).assign(
        sink_position=0, sink_score=[0.1, 0.9, 0.5, np.nan]
    )
    layer, head, query, key = np.indices((2, 2, 4, 4), dtype=np.uint8)
    tokens = {
        "sequence": 0,
        "position": range(4),
        "token_id": range(4),
        "text": ["<b>", " the", "\u202e", "x" * 99],
    }
    tensors = {"patterns": {"pattern": 64 * layer + 32 * head + 4 * query + key}} if kept else {}
    heads = heads.assign(sink_rate=0.5)
    return read_run(write_run(folder, "trace", heads=heads, tokens=tokens, tensors=tensors))


def test_heads_come_strongest_first_and_a_value_lies_at_its_query_and_key(tmp_path):
    found = embed_patterns(a_run(tmp_path / "run"))
    assert found["data"]["chosen"] == [
        1,
        2,
        0,
        3,
    ]  # scores 0.9, 0.5, 0.1 and none; 2 x layer + head
    assert found["data"]["scores"] == [[0.1, 0.9], [0.5, None]]
    assert found["said"].startswith("Patterns of all 4 heads are in this page")
    values = np.frombuffer(base64.b64decode(found["data"]["patterns"]), dtype=np.uint8).reshape(
        4, 1 + 2 + 3 + 4
    )
    # query 2, key 1 is entry 2 x 3 / 2 + 1 = 4; of layer 1, head 0 (second): 64 + 4 x 2 + 1
    assert values[1, 4] == 64 + 9
    assert values[0].tolist() == [32, 36, 37, 40, 41, 42, 44, 45, 46, 47]
    assert found["data"]["tokens"][:3] == ["<b>", "·the", "⟨U+202E⟩"]
    assert len(found["data"]["tokens"][3]) == 25


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    # two patterns of ten bytes are 20 bytes, 27 in base64; three are 40
    found = embed_patterns(a_run(tmp_path / "run"), most_bytes=30)
    assert found["data"]["chosen"] == [1, 2]
    assert "2 of 4 heads" in found["said"]
    assert "(0.5 and above)" in found["said"]
    assert len(found["data"]["patterns"]) <= 30


def test_a_run_without_patterns_says_so(tmp_path):
    with pytest.raises(RunError, match=r"patterns\.safetensors"):
        embed_patterns(a_run(tmp_path / "run", kept=False))


def test_the_studied_position_is_that_of_the_trace_and_not_the_highest_in_the_table(tmp_path):
    """A trace of a long text samples the queries that choose it; the table has them all."""
    heads = pd.concat(
        grid(layer=range(2), head=range(2)).assign(sink_position=at, sink_rate=rate, sink_score=0.5)
        for at, rate in ((3, 0.40), (0, 0.41))
    )
    run = read_run(write_run(tmp_path / "run", "trace", heads=heads))
    story = find_story(run)
    assert (studied_position(run), story.position, story.others) == (3, 3, (0,))

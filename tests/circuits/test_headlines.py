"""What a circuit can say is in tests/headlines.md, is said if what it stands on holds, and else not."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from headlines import keys, without_numbers

from sink_lens.circuits.given import CircuitComparison
from sink_lens.circuits.page import CIRCUIT
from sink_lens.circuits.sentences import brief_sentences, circuit_sentences
from sink_lens.circuits.tasks import Task
from sink_lens.data.tokens import from_tensor
from sink_lens.records import create_run, read_run

ROW = {
    "metric": "logit_diff", "method": "eap-ig", "ablation": "resample", "frozen": -1, "pairs": 16, "chosen_on": 8,
    "judged_on": 8, "seen": False, "rule": "smallest", "edges": 152, "asked_edges": 152, "all_edges": 70512,
    "gap": 4.0, "gap_low": 3.5, "gap_high": 4.5, "clean": 3.0, "corrupted": -1.0,
    "completeness": 0.99, "completeness_error_median": 0.01, "completeness_error_largest": 0.1, "steps_mean": 9.0,
    "cpr": 0.8, "cmd": 0.2, "cpr_log": 0.6, "cmd_log": 0.4, "share_at_80": 0.002, "most_kept": 1.0, "most_kept_at": 0.1,
    "jaccard_halves": 0.4, "stable_edges": 90, "rank_correlation": 0.9, "missed": 0.05, "weakest": 0.01,
    "outside_over": 2, "outside_sampled": 40, "outside_at_most": 900, "patched_nodes": 301, "unseen_nodes": "",
    "core_edges": 30, "confirmed_edges": 20, "together_edges": 4, "undecided_edges": 50, "contingent_edges": 70,
    "left_sum": 1.2, "left_pairs": 8, "sink_share": 0.3, "sink_share_top": 0.5,
    **{f"{name}faithfulness{end}": 0.9 for name in ("", "without_", "as_many_", "core_", "without_sink_")
       for end in ("", "_low", "_high")},
}  # fmt: skip
UNDEFINED = {"gap_low": -1.0, "core_faithfulness": np.nan, "without_sink_faithfulness": np.nan}
ALIKE = {"sink_share": 0.0, "without_sink_faithfulness": 1.0}
MEAN = {"ablation": "mean_ordinary"}
GIVEN = {"rule": "given", "chosen_on": 0, "judged_on": 16}
ASKED, MISSED = {"rule": "asked"}, {"unseen_nodes": "a1.h2"}
NO_SIZE = {"share_at_80": np.nan}
NONE_OUTSIDE = {"outside_sampled": -1}
CASES = {
    "kept": ({}, UNDEFINED),
    "rest": ({}, UNDEFINED),
    "undefined": (UNDEFINED, {}),
    "smallest": ({}, NO_SIZE | {"rule": "none"}),
    "largest": (NO_SIZE | {"rule": "none"}, {}),
    "asked": (ASKED, {}),
    "kept, given": (GIVEN, {}),
    "given": (GIVEN, {}),
    "seen": (GIVEN | {"seen": True}, GIVEN),
    "left out": ({"asked_edges": 160}, {"asked_edges": 152}),
    "incomplete": ({"completeness": -6.8}, {"completeness": 0.95}),
    "incomplete, sink": ({"completeness_error_median": 0.7}, {"completeness": -6.8} | ALIKE),
    "threshold": ({"rule": "threshold"}, {}),
    "from": (ASKED, ASKED | NO_SIZE),
    "no size": (ASKED | NO_SIZE, ASKED),
    "overshoots": ({"most_kept": 1.3}, {}),
    "swapped": ({"swapped_faithfulness": 0.6}, {}),
    "sink's scores": ({}, ALIKE),
    "without the sink": ({}, ALIKE),
    "sink carries": ({"without_sink_faithfulness": 0.7}, {}),
    "ranks": ({}, {"rank_correlation": np.nan}),
    "nodes seen": ({"unseen_nodes": np.nan}, MISSED),  # as an empty text comes back from a file
    "nodes seen, zero": ({"ablation": "zero"}, {}),
    "nodes missed": (MISSED, {}),
    "nodes missed, zero": (MISSED | {"ablation": "zero"}, MISSED),
    "nodes missed, eap": (MISSED | {"method": "eap"}, MISSED),
    "stable": ({}, {"stable_edges": 89}),
    "core": ({}, {"core_edges": -1}),
    "confirmed": ({}, {"confirmed_edges": 19}),
    "cancel": ({}, {"together_edges": 0}),
    "core alone": ({}, UNDEFINED),
    "undecided": ({}, {"undecided_edges": 49}),
    "contingent": ({}, {"contingent_edges": 69}),
    "chosen by": ({}, {"chosen_on": 0}),
    "scored by": ({"chosen_on": 0}, {}),
    "resample": ({}, MEAN),
    "zero": ({"ablation": "zero"}, {}),
    "mean_ordinary": (MEAN, {}),
    "mean_all": ({"ablation": "mean_all"}, {}),
    "mean_aligned": ({"ablation": "mean_aligned"}, {}),
    "frozen": (MEAN | {"frozen": 0}, MEAN | {"frozen": -1}),
    "metric": ({}, MEAN),
    "metric, input": (MEAN, {}),
    "complete": ({}, {"method": "gim"}),
    "areas": ({}, UNDEFINED),
    "left sum": ({}, {"left_sum": np.nan}),
    "outside": ({}, {"outside_at_most": 54733}),
}
COUNTED = ("stable", "confirmed", "undecided", "contingent")
"""Sentences that count: false is another count, and not their absence."""


def sentences_after(change, **options):
    return " ".join(circuit_sentences(pd.DataFrame([ROW | change]), **options))


def test_the_table_has_all_that_a_circuit_says_and_each_has_its_test():
    elsewhere = {"answered", "heads", "areas, part", "two: edges", "two: spans", "two: scores"}
    assert keys("circuit") == {
        *CASES,
        *elsewhere,
        "title",
        "title: undefined",
        "title: no size",
        "title: of the sink",
        "title: of pairs",
    }


@pytest.mark.parametrize("key", CASES)
def test_what_is_said_if_it_holds_is_not_said_else(key):
    texts = map(sentences_after, CASES[key])
    true, false = texts if key in COUNTED else map(without_numbers, texts)
    assert true != false


@pytest.mark.parametrize("change", [{"rule": "none"}, ASKED, {"rule": "threshold"}, GIVEN])
def test_no_size_is_said_to_keep_too_little_that_keeps_too_much_or_fails_at_a_larger_one(change):
    said = sentences_after({"faithfulness": 0.88, "asked_edges": 200} | NO_SIZE | change)
    assert "keeps 88%" in said
    assert not re.search("[Nn]o (circuit|size)[^:.]* keeps? ", said)


def test_one_pair_that_judges_has_no_interval_and_says_nothing_of_0():
    change = {"gap_low": np.nan, "gap_high": np.nan, "judged_on": 1}
    said = sentences_after(change | {"chosen_on": 2, "pairs": 3})
    assert "4 pairs" in said
    assert "2 pairs" in brief_sentences(ROW | GIVEN | change)[0]
    assert "from 0" not in said


def test_a_given_circuit_says_nothing_of_sizes_that_one_pair_judged_or_none():
    unjudged = {key: np.nan for key in ROW if key.startswith("as_many_")} | NO_SIZE
    brief = {key: value for key, value in ROW.items() if key not in unjudged}
    for said in (sentences_after(GIVEN | unjudged), " ".join(brief_sentences(brief | GIVEN))):
        assert "It was given." in said
        assert "No size" not in said


@pytest.mark.parametrize("sizes", [(0.01, 0.1), (0.5, 1.0)])
def test_areas_of_a_curve_that_ends_early_or_begins_late_are_not_cpr(sizes):
    assert "CPR" in sentences_after({})
    assert "CPR" not in sentences_after({}, sizes=sizes)


def page_of(folder, *, config, change=None, heads=True):
    names = ["a0.h1", "m0"] if heads else ["m0"]
    nodes = pd.DataFrame({"node": names, "kind": ["head", "mlp"][-len(names) :], "score": 0.5})
    with create_run(
        folder, kind="circuit", config=config, provenance={}, expects=("nodes",)
    ) as writer:
        writer.write_table("nodes", nodes)
        writer.write_csv("summary", pd.DataFrame([ROW | (change or {})]))
    run = read_run(folder)
    return CIRCUIT.title(run), " ".join(CIRCUIT.headline(run))


def test_the_title_says_of_what_it_is_and_the_page_which_heads_score_most(tmp_path):
    task = {"task": "ioi"}
    title, said = page_of(tmp_path / "one", config=task)
    assert "ioi" in title
    assert "152 of 70,512" in title
    assert "90%" in title
    assert "L0.H1" in said
    title, said = page_of(tmp_path / "none", config=task, change=NO_SIZE | {"rule": "none"})
    assert title.startswith("Ioi: no size below all edges")
    assert "152 of 70,512" in title
    whole = NO_SIZE | {"rule": "none", "asked_edges": ROW["all_edges"]}
    assert all(
        "enough; 152" not in one for one in page_of(tmp_path / "whole", config=task, change=whole)
    )
    title, said = page_of(tmp_path / "two", config=task, change=UNDEFINED, heads=False)
    assert "undefined" in title
    assert "L0.H1" not in said
    for name, config in (("sink", {"task": "text"}), ("pairs", {"task": "file"})):
        assert name in page_of(tmp_path / name, config=config)[0].partition(":")[0]
        assert name not in page_of(tmp_path / f"{name}-not", config=task)[0].partition(":")[0]


def test_how_often_the_model_answers_right_is_counted():
    tokens = from_tensor(torch.tensor([[1, 2], [1, 3]]))
    task = Task(
        name="ioi", clean=tokens, corrupted=tokens, correct=(4, 5), incorrect=(5, 4), templates=("", ""), n_tried=9,
        n_answered=8,
    )  # fmt: skip
    assert "8 of 9 prompts" in task.sentence
    assert "7 of 9 prompts" in replace(task, n_answered=7).sentence


def test_two_circuits_are_compared_by_their_edges_and_scores():
    edges = pd.DataFrame({"edge": ["a", "b"], "one": True, "other": [True, False]})
    found = CircuitComparison(frame=edges, jaccard=0.5, rank_correlation=0.8, copies=2)
    assert "1 are in both" in found.sentences[0]
    assert ["0.8" in one for one in found.sentences] == [False, False, True]
    without = CircuitComparison(
        frame=edges.assign(other=False), jaccard=0.0, rank_correlation=np.nan
    )
    assert "0 are in both" in without.sentences[0]
    assert len(without.sentences) == 1

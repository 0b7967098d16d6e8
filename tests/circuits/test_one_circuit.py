"""A run has one circuit: on models with heads that cancel, with a backup and with a negation, wired by hand."""

import json

import numpy as np
import pytest
import torch
from lenses import speaking

from sink_lens import circuits, wrap
from sink_lens.circuits.checks import cancelling_groups, patch_core
from sink_lens.circuits.circuit import find_in_runs
from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.curve import FaithfulnessJudge, smallest_faithful_share
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.page import CIRCUIT, read_edge_circuit
from sink_lens.circuits.runs import Runs
from sink_lens.records import read_run
from tests.zoo.mechanisms import wire
from tests.zoo.wiring import vocabulary

FIELDS = {
    "task": "file",
    "pairs": 10,
    "method": "eap",
    "random": 0,
    "nodes": False,
    "check": 4,
    "check_pairs": 3,
}


def wired(name, family, *, seed=7):
    """A mechanism with a tokenizer, which its token ids do not need."""
    mechanism = wire(name, seed=seed, family=family)
    return mechanism, wrap(mechanism.model, tokenizer=speaking("llama").tokenizer)


def found_in(name, family):
    """The circuit of a mechanism at its own size, on all pairs."""
    mechanism, lens = wired(name, family)
    clean, corrupted, metric = mechanism.pairs(10, generator=torch.Generator().manual_seed(7))
    runs = Runs.make(lens, clean, corrupted, graph=Graph.of(lens), metric=metric)
    size = len(mechanism.carrying("resample"))
    return mechanism, find_in_runs(runs, config=CircuitConfig(edges=size, most_steps=10))


@pytest.mark.parametrize(("name", "family"), [("opposed", "gpt2"), ("negation", "llama")])
def test_a_size_at_which_parts_of_a_mechanism_cancel_is_no_answer(name, family):
    """Single sizes keep all of the metric, a larger one keeps nothing: then the smaller one carries nothing."""
    mechanism, circuit = found_in(name, family)
    n = circuit.graph.n_edges
    curve = circuit.evaluate([k / n for k in range(2, 13)] + [1.0], random=0, nodes=False)
    f = curve.frame.set_index("n")["faithfulness"]
    reached = int(f.index[f.ge(0.8).to_numpy()][0])
    assert f.loc[reached:].min() < 0.2
    steady = round(smallest_faithful_share(curve.frame) * n)
    assert steady > reached
    assert f.loc[steady:].between(0.8, 1.2).all()
    assert circuit.with_size(steady).n_edges <= len(mechanism.carrying("resample"))


@pytest.mark.parametrize(
    ("name", "family"), [("opposed", "gpt2"), ("negation", "llama"), ("backup", "llama")]
)
def test_core_edges_that_cancel_can_go_together_and_all_others_are_confirmed(name, family):
    mechanism, circuit = found_in(name, family)
    core = np.flatnonzero(np.isin(circuit.graph.names, list(mechanism.needed("resample"))))
    real, together = patch_core(
        circuit.runs, core, difference=circuit.difference, seed=circuit.seed, pairs=3
    )
    assert np.abs(real).min() > 0.03 * abs(
        circuit.difference
    )  # a patch of each alone confirms them all
    heads = {edge.partition("->")[0] for edge in circuit.graph.names[core[together]]} - {"input"}
    assert len(heads) == (2 if name == "opposed" else 0)
    if name == "opposed":
        without = np.ones(circuit.graph.n_edges, dtype=bool)
        without[core[together]] = False
        kept = circuit.faithfulness_judge.faithfulness_table(
            circuit.faithfulness_judge.metric_values(without[None])
        )["faithfulness"].item()
        assert kept == pytest.approx(1, abs=0.05)
        assert together.sum() >= 4


def test_edges_that_cancel_share_an_end():
    graph = Graph(n_layers=2, n_heads=2, n_kv_heads=2, d_model=4)
    names = ["a0.h0->logits", "a0.h1->logits", "a1.h0->logits", "input->m0", "input->m1"]
    edges = np.array([graph.index[name] for name in names])
    groups = cancelling_groups(graph, edges, np.array([2.0, -1.9, 1.0, 0.5, -0.5]))
    assert [set(graph.names[group]) for group in groups] == [
        {"a0.h0->logits", "a0.h1->logits"},
        {"input->m0", "input->m1"},
    ]


def test_headline_files_core_and_checks_of_a_run_are_of_one_circuit(tmp_path):
    mechanism, lens = wired("opposed", "gpt2")
    rows = mechanism.rows(16, generator=torch.Generator().manual_seed(7))
    good = [one for one in rows if answers(lens, one)]
    fields = ("clean", "correct", "corrupted", "incorrect")
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(json.dumps(dict(zip(fields, ids(one), strict=True))) for one in good)
    )
    asked = FIELDS | {
        "pairs_file": str(tmp_path / "pairs.jsonl"),
        "save": (str(tmp_path / "c.json"),),
    }
    sizes = (*(k / 110 for k in (4, 6, 7, 9, 11)), 1.0)
    run = circuits.run(lens, out=tmp_path / "run", sizes=sizes, core=True, **asked)
    (summary,) = run.tables["summary"].to_dict("records")
    assert summary["rule"] == "smallest"
    assert summary["edges"] == len(run.frame) == run.circuit.n_edges == 9
    assert summary["chosen_on"] == len(run.circuit.halves[0])
    held = circuits.read(tmp_path / "c.json")
    assert (held.chosen == run.circuit.chosen).all()
    curve = run.tables["curve"].set_index("by")
    again = run.circuit.faithfulness_judge.faithfulness_table(
        run.circuit.faithfulness_judge.metric_values(held.chosen[None])
    ).iloc[0]
    assert (
        curve.loc["circuit", "faithfulness"]
        == summary["faithfulness"]
        == pytest.approx(again["faithfulness"])
    )
    assert f"9 of 110 edges (8.2%) and keeps {again['faithfulness']:.0%}" in run.sentences[1]
    assert run.frame["drawn"].sum() == 9
    core = run.tables["core"]
    assert set(core.loc[core["core"], "edge"]) <= set(run.frame["edge"])
    assert summary["together_edges"] == core["together"].sum() >= 4
    assert summary["confirmed_edges"] == summary["core_edges"] - summary["together_edges"]
    assert "can go together at no loss, since they cancel. The core alone keeps" in "".join(
        run.sentences
    )
    read = read_run(tmp_path / "run")
    low, high = (f"{summary[f'faithfulness_{end}']:.0%}" for end in ("low", "high"))
    of = "of what all edges add to the logit difference"
    assert CIRCUIT.title(read).endswith(f"9 of 110 edges (8.2%) keep 100% [{low}, {high}] {of}")
    assert len(read_edge_circuit(read).drawn_edges) == 9
    held = circuits.read(tmp_path / "run")
    assert (held.chosen == run.circuit.chosen).all()
    half = circuits.read(tmp_path / "c.json").edges.head(6)
    half.to_csv(tmp_path / "six.csv", index=False)
    del asked["check_pairs"]
    asked |= {"check": 0, "save": (), "circuit": str(tmp_path / "six.csv")}
    given = circuits.run(lens, out=tmp_path / "given", sizes=(1.0,), report=False, **asked)
    (told,) = given.tables["summary"].to_dict("records")
    assert (told["rule"], told["edges"], told["chosen_on"]) == ("given", 6, 0)
    mask = np.isin(held.graph.names, half["edge"].to_numpy())
    every, part = FaithfulnessJudge(runs=given.circuit.runs, seed=0), run.circuit.faithfulness_judge
    judged = every.faithfulness_table(every.metric_values(np.stack([mask, ~mask])))["faithfulness"]
    assert (
        told["judged_on"] == given.circuit.runs.n_pairs == 2 * part.runs.n_pairs
    )  # a given circuit chooses nothing
    assert [told["faithfulness"], told["without_faithfulness"]] == pytest.approx(judged.tolist())
    assert told["gap"] == pytest.approx(every.gap.estimate)
    like = given.tables["curve"].set_index("by").loc["as_many", "value"]
    assert like == pytest.approx(part.metric_values(run.circuit.with_size(6).chosen[None]).mean())
    assert f"on all {told['judged_on']} pairs. All other" in "".join(given.sentences)
    assert not told["seen"]
    asked |= {"circuit": str(tmp_path / "run")}
    again = circuits.run(lens, out=tmp_path / "again", sizes=(1.0,), report=False, **asked)
    assert "It was found on these same pairs" in "".join(again.sentences)


def test_a_picture_is_the_strongest_part_and_a_circuit_of_its_own():
    _, circuit = found_in("negation", "llama")
    drawn = circuit.strongest_edges(4)
    assert 0 < drawn.sum() <= 4
    assert set(np.flatnonzero(drawn)) < set(np.flatnonzero(circuit.chosen))
    assert (circuit.strongest_edges() == circuit.chosen).all()


def ids(row):
    """Prompts and answers of a row as a file of pairs has them."""
    return row[0], vocabulary(row[1]), row[2], vocabulary(row[3])


def answers(lens, row):
    """Check that the model prefers the right answer."""
    clean, right, _, wrong = ids(row)
    with torch.no_grad():
        logits = lens.plain(torch.tensor([clean])).logits[0, -1]
    return bool(logits[right] > logits[wrong])

"""The edges that each mechanism needs, as its wiring says, are those that exact patching of every edge finds."""

import numpy as np
import pytest
import torch

from analyses.zoo.mechanisms import LATER, MECHANISMS, wire
from analyses.zoo.wiring import WIRED
from sink_lens import wrap
from sink_lens.circuits.ablated import circuit_values
from sink_lens.circuits.exact import exact_scores
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.errors import ModelError

SMALL = 0.03
"""Part of the difference between the two prompts that an edge without a part may change, and one with a part must."""
CONFIRMED = [(name, WIRED[at % 6]) for at, name in enumerate(sorted(MECHANISMS, key=lambda one: one in LATER))]
"""Each mechanism in one architecture; the analysis `circuit_truth` confirms all of them in all."""


def runs_of(mechanism, ablation, *, n=3):
    clean, corrupted, metric = mechanism.pairs(n, generator=torch.Generator().manual_seed(mechanism.seed))
    lens = wrap(mechanism.model)
    return Runs.of(lens, clean, corrupted, graph=Graph.of(lens), metric=metric, ablation=ablation)


def without(runs, edges):
    kept = np.ones((1, runs.graph.n_edges), dtype=bool)
    kept[0, [runs.graph.index[edge] for edge in edges]] = False
    return float((runs.clean_values - circuit_values(runs, kept)[0]).mean())


@pytest.mark.parametrize(("name", "family"), CONFIRMED)
def test_needed_edges_change_the_answer_alone_and_no_other_edge_does(name, family):
    mechanism = wire(name, seed=7, family=family)
    whole = None
    for ablation in ("resample", "mean_ordinary", "zero"):
        runs = runs_of(mechanism, ablation)
        whole = whole or abs(float(runs.gap.mean()))  # a negation lowers the answer
        names = runs.graph.names
        needed = np.isin(names, list(mechanism.needed(ablation)))
        assert needed.sum() == len(mechanism.needed(ablation)) > 0
        others = ~needed & ~np.isin(names, list(mechanism.unjudged(ablation, names)))
        effects = np.abs(exact_scores(runs, range(len(names))).mean(0)) / whole
        assert effects[needed].min() > SMALL, (ablation, names[needed][effects[needed].argmin()])
        assert effects[others].max() < SMALL, (ablation, names[others][effects[others].argmax()])


@pytest.mark.parametrize(("name", "family"), [("redundant", "qwen3"), ("either", "gemma2"), ("redundant", "gpt_neox")])
def test_spare_edges_change_the_answer_together_and_not_apart(name, family):
    mechanism = wire(name, seed=5, family=family)
    runs = runs_of(mechanism, "resample")
    whole = float(runs.gap.mean())
    spare = mechanism.spare("resample")
    carriers = sorted({edge.split("->")[0] for edge in spare} - {"input"})
    assert len(carriers) == 2
    out = [[edge for edge in spare if edge.startswith(f"{carrier}->")] for carrier in carriers]
    assert all(abs(without(runs, edges)) < 0.1 * whole for edges in out)
    assert without(runs, [edge for edges in out for edge in edges]) > 0.4 * whole


@pytest.mark.parametrize("family", ["llama", "olmo2", "gpt2"])
def test_a_backup_head_answers_where_the_mover_is_gone(family):
    mechanism = wire("ioi", seed=5, family=family)
    runs = runs_of(mechanism, "zero")
    (waiting,) = (edge for edge in mechanism.needed("zero") if edge.startswith("a1.") and "->a2." in edge)
    mover = waiting.partition("->")[0]
    out = f"{mover}->logits"
    lost = without(runs, [out])
    assert lost > 0.8 * float(runs.clean_values.mean())
    assert without(runs, [out, waiting]) < 0.2 * lost


def test_seeds_move_the_heads_and_ablations_change_what_is_needed():
    first = [wire("induction", seed=seed, family="gpt2") for seed in range(4)]
    assert len({frozenset(one.needed("resample")) for one in first}) > 1
    one = first[0]
    assert one.needed("resample") < one.needed("mean_ordinary") < one.needed("zero")
    assert one.needed("resample") == one.needed("mean_aligned")
    tokens = one.pairs(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(tokens[0], one.pairs(3, generator=torch.Generator().manual_seed(0))[0])


def test_what_cannot_be_wired_is_refused():
    with pytest.raises(ModelError, match="no mechanism 'luck'; need one of copy, "):
        wire("luck")
    with pytest.raises(ModelError, match="wired in 'bloom'; need one of llama, "):
        wire("copy", family="bloom")

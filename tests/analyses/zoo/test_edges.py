"""The edges that are said to carry the sinks of the zoo: real patches confirm them."""

import numpy as np
import pytest
import torch

from analyses.zoo import ZOO, build
from analyses.zoo.edges import sink_edges
from sink_lens import wrap
from sink_lens.circuits.exact import exact_scores
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.edits import metrics


@pytest.mark.parametrize(
    ("name", "family"),
    [("first_window", "mistral"), ("head_feeds", "gemma3"), ("variance", "olmo2"), ("two_dimensions", "qwen3")],
)
def test_needed_edges_change_the_sink_and_edges_without_a_part_do_not(name, family):
    zoo = build(name, seed=11, family=family)
    truth, lens = sink_edges(zoo), wrap(zoo.model)
    assert truth is not None
    graph = Graph.of(lens)
    needed, spare = (np.isin(graph.names, list(names)) for names in (truth.needed, truth.spare))
    assert needed.sum() == len(truth.needed)
    others = np.random.default_rng(0).choice(np.flatnonzero(~needed & ~spare), 40, replace=False)
    tokens = zoo.draw(4, length=12, generator=torch.Generator().manual_seed(0))
    metric = metrics.sink_mass(0, layers=zoo.truth.locked)
    runs = Runs.of(lens, tokens, None, graph=graph, metric=metric, ablation="mean_ordinary")
    effects = np.abs(exact_scores(runs, [*map(int, (*np.flatnonzero(needed), *others))]).mean(0)) / float(
        runs.gap.mean()
    )
    assert effects[: needed.sum()].min() >= 0.03
    assert effects[needed.sum() :].max() < 0.03


def test_every_model_says_which_edges_it_has_or_that_none_is_needed_alone():
    without = set()
    for name, kind in ZOO.items():
        zoo = build(name, seed=3, family=kind.families[-1])
        truth = sink_edges(zoo)
        if truth is None:
            without.add(name)
        else:
            assert truth.needed | truth.spare <= set(Graph.of(wrap(zoo.model)).names), name
    parts = {"slow_growth", "either_layer", "sink_logit", "delimiter"}
    not_derived = {"behind_bos", "common_beside_direction", "common_dimension", "either_embedding", "held_down"}
    not_derived |= {"half_of_sequences", "sixth_of_sequences", "second", "two_sinks"}
    not_derived |= {"in_mixer_layer", "mixer_spike", "state_sink", "latent_key"}
    assert without == parts | not_derived | {name for name in ZOO if name.startswith("broken_")} | {
        "unread_variance",
        "spike",
        "sigmoid",
        "untrained",
    }

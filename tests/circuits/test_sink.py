"""The sink's part of a circuit: its share of the scores, faithfulness without it, and a sink that is frozen."""

import numpy as np
import pytest
from lenses import lens_of

from sink_lens.circuits.ablated import compute_circuit_metrics
from sink_lens.circuits.circuit import find_in_runs
from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.circuits.scores import score_by_gradients
from sink_lens.circuits.sink import sink_fields, with_sink_span

from .tiny_runs import SIX, pair


def six(ablation, **more):
    lens = lens_of("llama")
    return Runs.make(lens, *pair(n=6), graph=Graph.of(lens), metric=SIX, ablation=ablation, **more)


def test_scores_parted_by_position_give_the_sinks_share_and_the_rest_its_faithfulness():
    runs = six("mean_all")
    circuit = find_in_runs(runs, config=CircuitConfig(method="eap", ablation="mean_all", edges=20))
    found = sink_fields(circuit, CircuitConfig(method="eap", ablation="mean_all"))
    parted = score_by_gradients(with_sink_span(runs, 0), method="eap").mean
    n = runs.graph.n_edges
    assert parted[:n] + parted[n:] == pytest.approx(circuit.scores.mean, abs=1e-6)
    assert found["sink_share"] == pytest.approx(np.abs(parted[:n]).sum() / np.abs(parted).sum())
    top = np.argsort(-np.abs(parted))[:200]
    assert found["sink_share_top"] == pytest.approx((top < n).mean())
    judged = runs.select_pairs(circuit.halves[1].tolist())
    kept = np.zeros((1, 2 * n), dtype=bool)
    kept[0, n:] = True
    m, nothing = (
        compute_circuit_metrics(with_sink_span(judged, 0), kept)[0].mean(),
        circuit.faithfulness_judge.values_without_edges.mean(),
    )
    expected = (m - nothing) / (circuit.faithfulness_judge.values_of_model.mean() - nothing)
    if circuit.faithfulness_judge.gap.excludes_zero:
        assert found["without_sink_faithfulness"] == pytest.approx(float(expected))
    else:
        assert np.isnan(found["without_sink_faithfulness"])


def test_prompts_that_begin_alike_have_no_edge_at_the_sink():
    circuit = find_in_runs(six("resample"), config=CircuitConfig(method="eap", edges=20))
    found = sink_fields(circuit, CircuitConfig(method="eap"))
    assert (found["sink_share"], found["sink_share_top"]) == (0, 0)


@pytest.mark.parametrize("ablation", ["mean_all", "zero"])
def test_a_frozen_sink_has_no_scores_and_all_edges_but_its_own_are_the_model(ablation):
    runs = six(ablation, freeze="sink")
    parted = with_sink_span(runs, 0)
    n = runs.graph.n_edges
    assert np.abs(score_by_gradients(parted, method="gim").mean[:n]).max() == 0
    kept = np.zeros((2, 2 * n), dtype=bool)
    kept[0, n:] = True
    values = compute_circuit_metrics(parted, kept)
    assert (values[0] - runs.clean_values).abs().max() < 1e-5
    loose = compute_circuit_metrics(with_sink_span(six(ablation), 0), kept)
    assert (loose[0] - runs.clean_values).abs().max() > 1e-3

"""Scores of edges: equal to autograd through readers that are written out, to TransformerLens, to real patches."""

import numpy as np
import pytest
import torch
from lenses import lens_of
from transformer_lens.tools.analysis import attribution_patching as reference

from sink_lens.circuits.ablated import compute_circuit_metrics
from sink_lens.circuits.scores import score_by_gradients
from sink_lens.edits import metrics
from sink_lens.errors import InputError

from .tiny_runs import DENSE, SINGLE, exact_lens, pair, runs_of
from .written_out import written_out


@pytest.mark.parametrize("family", DENSE)
def test_scores_equal_autograd_through_readers_written_out_one_by_one(family):
    lens = exact_lens(family)
    runs = runs_of(lens)
    found = score_by_gradients(runs, method="eap").values
    expected = written_out(lens, runs.graph.names).numpy()
    scale = np.abs(expected).max()
    assert scale > 0, family
    allowed = 2e-5 if family in SINGLE else 1e-6
    assert np.abs(found - expected).max() < allowed * scale, (
        family,
        np.abs(found - expected).max() / scale,
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi3", "granite"])
def test_neurons_of_their_own_split_the_mlps_edges_and_change_no_other(family):
    lens = exact_lens(family)
    whole, split = (
        score_by_gradients(runs_of(lens, neurons=one), method="eap")
        for one in (None, {1: [3, 5, 9]})
    )
    own = {name: split.values[:, at] for name, at in split.graph.index.items()}
    scale = np.abs(whole.values).max()
    for name, at in whole.graph.index.items():
        writer, reader = name.split("->")
        writers = ["m1", "m1.n"] if writer == "m1" else [writer]
        readers = ["m1", "m1.n"] if reader == "m1" else [reader]
        total = sum(own[f"{one}->{other}"] for one in writers for other in readers)
        assert np.abs(total - whole.values[:, at]).max() < 1e-6 * scale, (family, name)


def test_scores_equal_transformer_lens_on_gpt2():
    lens = lens_of("gpt2")
    clean, corrupted = pair()
    runs = runs_of(lens)
    found = score_by_gradients(runs, method="eap-corrupted")
    total = np.zeros(runs.graph.n_edges)
    for row, (right, wrong) in enumerate(zip([5, 6, 9], [7, 8, 10], strict=True)):
        one = reference.attribution_patch(
            lens.bridge,
            clean[row : row + 1],
            corrupted[row : row + 1],
            lambda logits, right=right, wrong=wrong: logits[0, -1, right] - logits[0, -1, wrong],
            reference.EdgeAttributionConfig(granularity="edge"),
        )
        for (writer, reader), value in one.edge_scores.items():
            total[found.graph.index[f"{theirs(writer)}->{theirs(reader)}"]] += value / 3
    assert np.abs(found.mean - total).max() < 1e-5 * np.abs(total).max()


def theirs(node):
    letter = {"q_input": "<q>", "k_input": "<k>", "v_input": "<v>"}.get(node.kind, "")
    if node.head is not None:
        return f"a{node.layer}.h{node.head}{letter}"
    return {"embed": "input", "logits": "logits"}.get(node.kind, f"m{node.layer}")


def test_edges_out_of_the_input_sum_to_the_difference_of_the_metric():
    lens = lens_of("llama")
    for ablation in ("resample", "mean_ordinary", "mean_all", "mean_aligned"):
        freeze = "sink" if ablation == "mean_all" else None
        found = score_by_gradients(runs_of(lens, ablation=ablation, freeze=freeze), steps=5)
        assert found.completeness_by_pair["error"].abs().max() < 0.01, ablation
        assert found.completeness_ratio == pytest.approx(1, abs=0.01)
        assert found.steps.max() > 5
    few = score_by_gradients(runs_of(lens), steps=1, most_steps=1)
    assert few.completeness_by_pair["error"].abs().max() > 0.05


def test_a_method_of_real_patches_takes_no_gradient():
    with pytest.raises(InputError, match="exact"):
        score_by_gradients(runs_of(lens_of("llama")), method="exact")


def test_spans_share_the_score_of_an_edge():
    lens = lens_of("llama")
    masks = torch.zeros(2, 3, 11, dtype=torch.bool)
    masks[0, :, :6], masks[1, :, 6:] = True, True
    whole, apart = (
        score_by_gradients(runs_of(lens), method="eap"),
        score_by_gradients(runs_of(lens, spans=("early", "late"), masks=masks), method="eap"),
    )
    by_span = apart.graph.matrix(apart.mean)
    assert by_span.sum(0) == pytest.approx(whole.graph.matrix(whole.mean)[0], abs=1e-5)
    assert np.abs(by_span).max(axis=(1, 2)).min() > 1e-3
    assert "a0.h1->m2@late" in apart.graph.index
    runs = runs_of(lens, spans=("early", "late"), masks=masks)
    kept = np.ones((1, runs.graph.n_edges), dtype=bool)
    assert (compute_circuit_metrics(runs, kept)[0] - runs.clean_values).abs().max() < 1e-4


def test_sink_mass_is_explained_by_queries_and_keys_up_to_its_layer():
    lens = lens_of("llama")
    runs = runs_of(lens, metric=metrics.sink_mass(0, layers=[1]))
    found = score_by_gradients(runs, steps=20)
    assert found.completeness_ratio == pytest.approx(1, abs=0.01)
    names = runs.graph.names[np.abs(found.values).max(0) > 1e-6]
    assert len(names)
    assert not any(
        "a2." in name.split("->")[1] or "logits" in name or "a1.kv0<v>" in name for name in names
    )
    runs = runs_of(lens, metric=metrics.sink_mass(0, layers=[1]), ablation="mean_ordinary")
    kept = np.ones((1, runs.graph.n_edges), dtype=bool)
    assert (compute_circuit_metrics(runs, kept)[0] - runs.clean_values).abs().max() < 1e-5

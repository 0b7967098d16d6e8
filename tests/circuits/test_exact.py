"""Exact scores: path patching, by hand too, and a node that is patched whole; ``test_ablated.py`` has other edges."""

import numpy as np
import pytest
import torch
from lenses import lens_of

from sink_lens.circuits.ablated import compute_circuit_metrics
from sink_lens.circuits.circuit import find
from sink_lens.circuits.exact import exact_node_scores, exact_scores
from sink_lens.models.load import wrap
from sink_lens.patching.path import path_patch
from tests.zoo.mechanisms import wire

from .tiny_runs import METRIC, circuit, exact_lens, pair, runs_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "gpt_neox", "headnorm"])
def test_a_node_that_is_patched_whole_is_a_circuit_without_its_edges(family):
    runs = runs_of(exact_lens(family), neurons={1: [3, 5, 9]})
    graph = runs.graph
    nodes = range(0, len(graph.writers), 4)
    kept = np.stack([graph.ends[1] != node for node in nodes])
    expected = (runs.clean_values - compute_circuit_metrics(runs, kept)).T.numpy()
    found = exact_node_scores(runs)[:, nodes]
    assert np.abs(found).max() > 1e-3
    assert np.abs(found - expected).max() < 6e-6, family


def test_a_real_patch_of_a_node_shows_what_cancels_before_a_threshold():
    for name, ablation in (
        ("hidden", "resample"),
        ("hidden", "mean_ordinary"),
        ("cancellation", "resample"),
    ):
        mechanism = wire(name, seed=20, family="llama")
        clean, corrupted, metric = mechanism.pairs(4, generator=torch.Generator().manual_seed(0))
        lens = wrap(mechanism.model)
        found = find(
            lens, clean, corrupted, metric=metric, ablation=ablation, edges=10, most_steps=5
        )
        nodes = found.check_nodes()
        cancels = {edge.partition("->")[0] for edge in mechanism.edges if edge.endswith("->m1")} - {
            "input"
        }
        assert len(cancels) == (2 if name == "hidden" else 0)
        assert set(nodes["node"][nodes["unseen"]]) == cancels
        assert (nodes["magnitude"] >= nodes["score"].abs() - 1e-6).all()


def test_a_patch_of_the_other_sign_is_missed_however_large_the_scores_are(monkeypatch):
    found = circuit()
    node = found.check_nodes()["score"]
    other = np.where(node.abs() == node.abs().max(), -1.0, 1.0) * node
    monkeypatch.setattr(
        "sink_lens.circuits.checks.exact_node_scores", lambda runs, advance: other.to_numpy()[None]
    )
    nodes = found.check_nodes()
    assert nodes["unseen"].tolist() == (node.abs() == node.abs().max()).tolist()


def test_an_exact_edge_equals_path_patching_by_hand():
    lens = lens_of("llama")  # two heads share a key
    runs = runs_of(lens)
    tokens, corrupted = pair()
    model, layer = lens.plain, 2
    z, x = [], []
    handles = [
        lens.layer(0).self_attn.o_proj.register_forward_pre_hook(
            lambda module, given: z.append(given[0])
        ),
        lens.layer(layer).register_forward_pre_hook(lambda module, given: x.append(given[0])),
    ]
    with torch.no_grad():
        clean_logits = model(tokens).logits
        model(corrupted)
        for handle in handles:
            handle.remove()
        apart = (z[0] - z[1]).clone()
        apart[..., :12] = 0.0
        apart[..., 24:] = 0.0  # head 1 alone
        stream = x[0] - lens.layer(0).self_attn.o_proj(apart)
        block = lens.layer(layer)
        key = block.self_attn.k_proj(block.input_layernorm(stream))

        def put(module, given, out):
            out = out.clone()
            out[..., 12:] = key[..., 12:]  # the second key-value head
            return out

        handle = block.self_attn.k_proj.register_forward_hook(put)
        logits = model(tokens).logits
        handle.remove()
    rows = torch.arange(3)
    values = [
        one[rows, -1, [5, 6, 9]] - one[rows, -1, [7, 8, 10]] for one in (clean_logits, logits)
    ]
    found = exact_scores(runs, [runs.graph.index["a0.h1->a2.kv1<k>"]])[:, 0]
    assert found == pytest.approx((values[0] - values[1]).numpy(), abs=3e-5)
    assert np.abs(found).max() > 1e-3


REST = [pytest.param(family, marks=pytest.mark.exhaustive) for family in ("llama", "granite")]


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", *REST])
def test_an_exact_edge_equals_path_patching_with_all_outputs_between_frozen(family):
    lens = exact_lens(family)
    runs = runs_of(lens)
    graph, kv_head = runs.graph, lens.n_kv_heads - 1
    senders = {"m0": ("mlp_out", 0)}
    if family != "gemma2":  # a norm behind its heads divides what each writes by the size of all
        senders["a0.h1"] = ("z", 0, 1)
    receivers = {"q": ("q", 2, 1), "k": ("k", 2, kv_head), "v": ("v", 2, kv_head)}
    receivers |= {"mlp": ("mlp_in", 2), "logits": ("final", 2)}
    readers = [
        next(
            one.name
            for one in graph.readers
            if one.kind == kind and one.layer >= 2 and one.head in (-1, end[-1])
        )
        for kind, end in receivers.items()
    ]
    edges = [f"{start}->{end}" for end in readers for start in senders]
    scores = exact_scores(runs, [graph.index[edge] for edge in edges]).mean(0)
    ends = {"sender": list(senders.values()), "metric": METRIC, "direction": "noising"}
    patched = [
        path_patch(lens, *pair(), receiver=end, **ends).frame["effect"]
        for end in receivers.values()
    ]
    assert np.abs(scores).max() > 1e-3
    assert scores == pytest.approx(-np.concatenate(patched), abs=1e-6), edges

"""Pairs, runs and circuits of tiny models, for the tests of this folder."""

import functools
import json
from dataclasses import replace

import pandas as pd
import prompt_pairs
import torch
from lenses import lens_of, speaking
from mlps import BESIDE, EXPERTS

from sink_lens import circuits
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.methods import METHODS
from sink_lens.circuits.runs import Runs
from sink_lens.edits import metrics
from sink_lens.models.load import wrap
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny

DENSE = [family for family in (*TINY_FAMILIES, *MORE_FAMILIES) if family not in (*EXPERTS, *BESIDE)]
SINGLE = ("gptj",)  # computes its attention in float32, whatever the weights are
METRIC = metrics.logit_difference([5, 6, 9], [7, 8, 10])
SIX = metrics.logit_difference([5, 6, 9, 4, 30, 31], [7, 8, 10, 2, 40, 41])
"""The metric of six pairs."""


pair = functools.partial(prompt_pairs.pair, n=3, length=11, at=3)


def exact_lens(family):
    model = tiny(family)
    return wrap(model if family in SINGLE else model.double())


def runs_of(lens, *, neurons=None, metric=METRIC, **more):
    graph = Graph.of(lens, neurons=neurons, spans=more.pop("spans", ("",)))
    masks = more.pop("masks", None)
    return replace(Runs.make(lens, *pair(), graph=graph, metric=metric, **more), masks=masks)


def circuit(family="llama", **more):
    given = {"metric": SIX, "edges": 20, "templates": ["a", "b"] * 3}
    given |= {"most_steps": 5} if METHODS[more.get("method", "eap-ig")].doubles else {}
    return circuits.find(
        more.pop("lens", None) or lens_of(family), *pair(n=6, length=9), **(given | more)
    )


def save_as_tensors(circuit, path):
    """Write EAP-IG's JSON of ``circuit`` as its .pt: matrices, in the order of nodes of its own code."""
    held = json.loads(circuit.save(path.with_suffix(".json")).read_text())
    layers, heads = range(held["cfg"]["n_layers"]), range(held["cfg"]["n_heads"])
    writers, readers = ["input"], []
    for layer in layers:
        writers += [*(f"a{layer}.h{head}" for head in heads), f"m{layer}"]
        readers += [*(f"a{layer}.h{head}<{kind}>" for kind in "qkv" for head in heads), f"m{layer}"]
    readers.append("logits")
    scores = torch.zeros(len(writers), len(readers))
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for name, edge in held["edges"].items():
        writer, reader = name.split("->")
        at = writers.index(writer), readers.index(reader)
        scores[at], kept[at] = edge["score"], edge["in_graph"]
    nodes = {"src_nodes": writers, "dst_nodes": readers, "nodes_in_graph": kept.any(1)}
    torch.save({"cfg": held["cfg"], "edges_scores": scores, "edges_in_graph": kept} | nodes, path)
    return path


def unfinish(folder):
    """A finished run as one that was stopped."""
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"status": "running"}))


def reference_pairs(path, *, n=24):
    """Pairs on which the tiny model has the larger logit for the first answer."""
    lens = speaking("llama")
    clean, corrupted = pair(n=n, length=9)
    with torch.no_grad():
        logits = lens.plain(clean).logits[:, -1]
    rows = pd.DataFrame(
        {
            "clean": clean.tolist(),
            "corrupted": corrupted.tolist(),
            "correct": logits.argmax(-1).tolist(),
        }
    )
    rows = rows.assign(
        incorrect=logits.argmin(-1).tolist(), template=[str(row % 2) for row in range(n)]
    )
    path.write_text("\n".join(map(json.dumps, rows.to_dict("records"))))
    return path

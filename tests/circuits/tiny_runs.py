"""Pairs, runs and circuits of tiny models, for the tests of this folder."""

import json
from dataclasses import replace

import torch
from lenses import lens_of, speaking
from mlps import BESIDE, EXPERTS

from analyses.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny
from sink_lens import circuits
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.edits import metrics
from sink_lens.models.load import wrap

DENSE = [family for family in (*TINY_FAMILIES, *MORE_FAMILIES) if family not in (*EXPERTS, *BESIDE)]
SINGLE = ("gptj",)  # computes its attention in float32, whatever the weights are
METRIC = metrics.logit_difference([5, 6, 9], [7, 8, 10])
SIX = metrics.logit_difference([5, 6, 9, 4, 30, 31], [7, 8, 10, 2, 40, 41])
"""The metric of six pairs."""


def pair(*, n=3, length=11, at=3):
    clean = torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, at] = 3 + (clean[:, at] + 50) % 297
    return clean, corrupted


def exact_lens(family):
    model = tiny(family)
    return wrap(model if family in SINGLE else model.double())


def runs_of(lens, *, neurons=None, metric=METRIC, **more):
    graph = Graph.of(lens, neurons=neurons, spans=more.pop("spans", ("",)))
    masks = more.pop("masks", None)
    return replace(Runs.make(lens, *pair(), graph=graph, metric=metric, **more), masks=masks)


def circuit(family="llama", **more):
    given = {"metric": SIX, "edges": 20, "templates": ["a", "b"] * 3, "most_steps": 5}
    return circuits.find(more.pop("lens", None) or lens_of(family), *pair(n=6, length=9), **(given | more))


def reference_pairs(path, *, n=24):
    """Pairs on which the tiny model has the larger logit for the first answer."""
    lens = speaking("llama")
    clean, corrupted = pair(n=n, length=9)
    with torch.no_grad():
        logits = lens.plain(clean).logits[:, -1]
    rows = [
        {
            "clean": clean[row].tolist(),
            "corrupted": corrupted[row].tolist(),
            "correct": int(logits[row].argmax()),
            "incorrect": int(logits[row].argmin()),
            "template": str(row % 2),
        }
        for row in range(n)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path

"""Runs of ``sink-lens circuit`` with made-up scores."""

import numpy as np
import pandas as pd

from ..report.circuits import write_run

LAYERS, HEADS, GROUP, EDGES = 6, 4, 2, 200
PATTERN = np.array(
    [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.2, 0.6, 0], [0.1, 0.7, 0.1, 0.1]], dtype=np.float32
)
PARTS = [
    {"head": "a5.h1", "query": 3, "key": 1, "share": 0.7, "advantage": 2.5, "side": "key", "by": by}
    | {"part": part, "value": value}
    for by, part, value in (
        ("writer", "m0", 2.0),
        ("writer", "rest", 0.5),
        ("dimension", "7", 2.25),
    )
]
"""Where the head 5.1 looks: its last query at key 1, which the first MLP makes."""


def every_edge(seed=0):
    """All edges of a small model, with scores that few dominate."""
    writers = [("input", 0)]
    readers = []
    for layer in range(LAYERS):
        readers += [(f"a{layer}.h{head}<q>", 2 * layer + 1) for head in range(HEADS)]
        readers += [
            (f"a{layer}.kv{head}<{via}>", 2 * layer + 1)
            for head in range(HEADS // GROUP)
            for via in "kv"
        ]
        readers += [(f"m{layer}", 2 * layer + 2)]
        writers += [(f"a{layer}.h{head}", 2 * layer + 1) for head in range(HEADS)] + [
            (f"m{layer}", 2 * layer + 2)
        ]
    readers += [("logits", 2 * LAYERS + 1)]
    rows = [(one, other) for one, early in writers for other, late in readers if early < late]
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(rows, columns=["writer", "reader"])
    frame.insert(0, "edge", frame["writer"] + "->" + frame["reader"])
    frame["span"] = ""
    frame["score"] = generator.standard_normal(len(frame)) ** 3
    frame["standard_error"] = 0.1
    frame["inclusion"] = generator.uniform(size=len(frame)).round(3)
    frame["in_circuit"] = frame["score"].abs().rank(ascending=False) <= EDGES
    return frame


def a_run(folder, *, seed=0, edges=None, model="tiny", config=None):
    """A run of ``sink-lens circuit``, as its tables are."""
    edges = every_edge(seed) if edges is None else edges
    asked = {
        "task": "ioi",
        "metric": None,
        "edges": EDGES,
        "choice": "top",
        "method": "eap-ig",
        "metric_layers": None,
    }
    config = asked | (config or {})
    known = {"model": model, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": HEADS // GROUP}
    curve = pd.DataFrame({"by": ["edges", "edges", "random"], "share": [0.01, 0.1, 0.01]})
    curve["n"] = (curve["share"] * len(edges)).round().astype(int)
    curve = curve.assign(faithfulness=[0.25, 0.75, 0.01], low=[0.2, 0.7, 0.0], high=[0.3, 0.8, 0.1])
    circuit = edges.loc[edges["in_circuit"]].sort_values("score", key=abs, ascending=False)
    return write_run(
        folder, "circuit", config=config, provenance=known, expects=("edges",), edges=edges, circuit=circuit,
        prompt={"position": range(4), "text": ["The", " cat", " <b>", " sat"]}, attention=PARTS, curve=curve,
        core={"edge": circuit["edge"].head(20), "core": [True] * 5 + [False] * 15},
        tensors={"attention_patterns": {"a5.h1": PATTERN}},
    )  # fmt: skip

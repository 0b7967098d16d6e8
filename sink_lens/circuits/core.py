"""The core of a circuit: the edges that are sure under every ablation and template, each with its real patch."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from . import checks, stability
from .choice import connected_edges, largest_edges
from .circuit import Circuit
from .graph import EdgeMask, EdgeValues

_CORE = 0.95
"""Inclusion probability from which on an edge is in the core."""


def inclusion_by_setting(
    circuit: Circuit, others: Mapping[str, Circuit]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return setting -> each edge's inclusion probability, and setting -> the edges that are chosen there.

    Settings are the ablations, and each template alone. ``others``: another ablation -> the circuit of the same size.
    """
    every = {circuit.runs.ablation: circuit, **others}
    sure = {name: one.inclusion for name, one in every.items()}
    inside = {name: one.chosen for name, one in every.items()}
    for template, rows in stability.rows_by_template(circuit.templates).items():
        if len(rows) < 2 or len(rows) == len(circuit.templates):
            continue
        values = circuit.scores.values[rows]
        generator = np.random.default_rng([circuit.seed, 5, len(sure)])
        weights = stability.bootstrap_weights(
            [template] * len(rows), draws=300, generator=generator
        )
        sure[template] = stability.inclusion_probabilities(values, weights, n=circuit.size)
        mask = largest_edges(values.mean(0), circuit.size)
        inside[template] = connected_edges(circuit.graph, mask, outputs=circuit.outputs)
    return sure, inside


def edge_verdicts(
    settings: Mapping[str, EdgeValues],
    circuits: Mapping[str, EdgeMask],
    *,
    within: EdgeMask | bool = True,
) -> np.ndarray:
    """Return core, undecided, contingent or none for every edge (``stability``); no core edge is outside ``within``."""
    sure = np.array([found >= _CORE for found in settings.values()])
    return np.select(
        [sure.all(0) & within, sure.any(0), np.any(list(circuits.values()), axis=0)],
        ["core", "undecided", "contingent"],
        "none",
    )


def core_table(
    circuit: Circuit, others: Mapping[str, Circuit], *, pairs: int, progress: bool = False
) -> pd.DataFrame:
    sure, inside = inclusion_by_setting(circuit, others)
    verdicts = edge_verdicts(sure, inside, within=circuit.chosen)
    either = np.flatnonzero(verdicts != "none")
    frame = pd.DataFrame({"edge": circuit.graph.names[either]})
    frame["core"], frame["undecided"] = verdicts[either] == "core", verdicts[either] == "undecided"
    frame["score"] = circuit.scores.mean[either].astype(float)
    frame["inclusion"] = circuit.inclusion[either]
    for name, other in others.items():
        frame[f"inclusion_{name}"] = other.inclusion[either]
    every = np.stack([found[either] for found in sure.values()])
    frame["least"] = every.min(0)
    frame["where"] = np.array(list(sure), dtype=object)[every.argmin(0)]
    frame["exact"], frame["together"] = np.nan, False
    patched = frame["core"].to_numpy() & checks.patchable_edges(frame["edge"].to_numpy())
    if patched.any():
        real, together = checks.patch_core(
            circuit.runs,
            either[patched],
            difference=circuit.difference,
            seed=circuit.seed,
            pairs=pairs,
            progress=progress,
        )
        frame.loc[patched, "exact"] = real
        frame.loc[patched, "together"] = together
    order = np.lexsort([-frame["score"].abs(), ~frame["undecided"], ~frame["core"]])
    return frame.iloc[order].reset_index(drop=True)

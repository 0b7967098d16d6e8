"""Tables of a circuit."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..stats import sort_by_magnitude
from . import stability
from .choice import node_scores

if TYPE_CHECKING:
    from .circuit import Circuit

_TOP = 2000


def every_edge_table(circuit: "Circuit") -> pd.DataFrame:
    graph, values = circuit.graph, circuit.scores.values
    spans, writers, readers = graph.ends
    error = np.full(values.shape[1], np.nan)
    if len(values) > 1:
        error = values.std(0, ddof=1) / np.sqrt(len(values))
    return pd.DataFrame(
        {
            "edge": graph.names.astype(str),
            "writer": [graph.writers[one].name for one in writers],
            "reader": [graph.readers[one].name for one in readers],
            "span": [graph.spans[one] for one in spans],
            "score": circuit.scores.mean.astype(float),
            "standard_error": error.astype(float),
            "inclusion": circuit.inclusion,
            "in_circuit": circuit.chosen,
        }
    )


def largest_edge_table(circuit: "Circuit") -> pd.DataFrame:
    scores, every, drawn = circuit.scores, circuit.every_edge, circuit.strongest_edges()
    mean, chosen = scores.mean, np.flatnonzero(circuit.chosen)
    order = np.argsort(-np.abs(mean), kind="stable")[: max(_TOP, len(chosen))]
    order = np.concatenate([order, chosen[~np.isin(chosen, order)]])
    low, high = stability.bootstrap_bounds(scores.values[:, order], circuit.bootstrap_weights)
    gap = float((scores.clean - scores.corrupted).mean()) or np.nan
    found = every.iloc[order].reset_index(drop=True)
    found = found.assign(
        low=low.astype(float), high=high.astype(float), share=mean[order] / gap, drawn=drawn[order]
    )
    columns = [*every.columns[:5], "low", "high", "share", "inclusion", "in_circuit", "drawn"]
    return found[columns]


def node_table(circuit: "Circuit") -> pd.DataFrame:
    graph, (_, writers, readers) = (
        circuit.graph,
        (one[circuit.chosen] for one in circuit.graph.ends),
    )
    frame = pd.DataFrame(graph.writers).drop(columns="stage").rename(columns={"name": "node"})
    frame["score"] = node_scores(graph, circuit.scores.mean)
    into = np.bincount(readers, minlength=len(graph.readers))
    frame["edges_in"] = into @ graph.reader_of_node
    frame["edges_out"] = np.bincount(writers, minlength=len(graph.writers))
    frame["in_circuit"] = frame["edges_out"] > 0
    return sort_by_magnitude(frame, "score").reset_index(drop=True)

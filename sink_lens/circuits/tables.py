"""Tables of a circuit."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from ..stats import sort_by_magnitude
from . import stability
from .choice import node_scores
from .graph import EdgeMask, EdgeValues
from .scores import Scores

_TOP = 2000


def every_edge_table(scores: Scores, chosen: EdgeMask, inclusion: EdgeValues) -> pd.DataFrame:
    graph, values = scores.graph, scores.values
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
            "score": scores.mean.astype(float),
            "standard_error": error.astype(float),
            "inclusion": inclusion,
            "in_circuit": chosen,
        }
    )


def largest_edge_table(
    every: pd.DataFrame,
    scores: Scores,
    *,
    weights: Float[np.ndarray, "sample pair"],
    drawn: EdgeMask,
) -> pd.DataFrame:
    mean, chosen = scores.mean, np.flatnonzero(every["in_circuit"])
    order = np.argsort(-np.abs(mean), kind="stable")[: max(_TOP, len(chosen))]
    order = np.concatenate([order, chosen[~np.isin(chosen, order)]])
    low, high = stability.bootstrap_bounds(scores.values[:, order], weights)
    gap = float((scores.clean - scores.corrupted).mean()) or np.nan
    found = every.iloc[order].reset_index(drop=True)
    found = found.assign(
        low=low.astype(float), high=high.astype(float), share=mean[order] / gap, drawn=drawn[order]
    )
    columns = [*every.columns[:5], "low", "high", "share", "inclusion", "in_circuit", "drawn"]
    return found[columns]


def node_table(scores: Scores, chosen: EdgeMask) -> pd.DataFrame:
    graph = scores.graph
    _, writers, readers = (one[chosen] for one in graph.ends)
    frame = pd.DataFrame(graph.writers).drop(columns="stage").rename(columns={"name": "node"})
    frame["score"] = node_scores(graph, scores.mean)
    into = np.bincount(readers, minlength=len(graph.readers))
    frame["edges_in"] = into @ graph.reader_of_node
    frame["edges_out"] = np.bincount(writers, minlength=len(graph.writers))
    frame["in_circuit"] = frame["edges_out"] > 0
    return sort_by_magnitude(frame, "score").reset_index(drop=True)

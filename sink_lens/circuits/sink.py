"""How much of the scores, and of faithfulness, is the sink's.

The first token is mostly the same in both prompts of a pair, so that under ``resample`` no edge at its position carries
anything. Means and zero replace what is there too, and with it every head's sink: then much of what a circuit keeps may
be the sink alone, whatever the task. A run therefore says which share of its scores lies at that position, and how
faithful the model is with every edge but those there.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from .circuit import Circuit
from .config import CircuitConfig
from .curve import faithfulness_fields
from .methods import METHODS
from .runs import Runs, with_spans
from .scoring import score_edges

_TOP, _PAIRS = 200, 8
"""Largest scores, and pairs, whose scores are parted by position."""


def with_sink_span(runs: Runs, position: int) -> Runs:
    return with_spans(
        replace(runs, graph=replace(runs.graph, spans=("",)), masks=None), {"sink": [position]}
    )


def sink_fields(circuit: Circuit, config: CircuitConfig) -> dict[str, Any]:
    """Return the summary's fields on the sink: its share of the scores, and faithfulness without its position.

    Cost: scores of 8 pairs, and about three forwards of the judged pairs; none if no edge is changed there.
    """
    position, judge = config.sink_position, circuit.faithfulness_judge
    share = top = np.nan
    if circuit.runs.first_difference(slice(None)) > position or config.freeze:
        share = top = 0.0
        whole = 1.0 if judge.gap.excludes_zero else np.nan
        kept = {"faithfulness": whole, "low": whole, "high": whole}
    else:
        if not METHODS[config.method].patches:
            few = range(min(_PAIRS, circuit.runs.n_pairs))
            some = with_sink_span(circuit.runs.select_pairs(few), position)
            size, there = np.abs(score_edges(some, config).mean), some.graph.ends[0] == 0
            largest = np.argsort(-size, kind="stable")[:_TOP]
            share = float(size[there].sum() / (size.sum() or np.nan))
            top = float(there[largest].mean())
        runs = with_sink_span(judge.runs, position)
        values = replace(judge, runs=runs).metric_values((runs.graph.ends[0] != 0)[None])
        (kept,) = judge.faithfulness_table(values).to_dict("records")
    return {"sink_share": share, "sink_share_top": top} | faithfulness_fields(kept, "without_sink_")

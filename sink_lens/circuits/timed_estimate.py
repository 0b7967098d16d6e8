"""Estimate what finding a circuit costs from one timed forward and backward pass of a few pairs."""

import time
from dataclasses import replace

from ..engine.cost import peak_bytes
from .config import CircuitConfig
from .estimate import PASSES_A_POINT, CircuitCost
from .run import model_for, runs_of, task_for
from .scores import Gradients


def timed_cost(config: CircuitConfig) -> CircuitCost:
    """The cost of a run; loads the model and times a pass.

    Raises:
        ModelError, InputError: what the run would refuse before it scores.
    """
    lens = model_for(config)
    task = task_for(lens, replace(config, pairs=min(config.pairs, 8)))
    runs = runs_of(lens, task, config=config, ablation=config.replaced_by)
    rows = next(iter(runs.batches(copies=3)))
    own, begin = runs.some(range(rows.start, rows.stop)), runs.begin(rows)
    added, _ = own.writings(slice(0, own.n_pairs), begin=begin)
    began = time.perf_counter()
    Gradients(own, added, begin=begin).add([], weight=1.0)
    a_pair = (time.perf_counter() - began) / (rows.stop - rows.start)
    return CircuitCost(
        graph=runs.graph,
        n_positions=runs.clean.n_positions,
        seconds_a_pair=a_pair / PASSES_A_POINT,
        bytes_peak=peak_bytes(lens.device),
    )

"""Score every edge of all pairs by any method: in memory, or in parts of 32 pairs that a run folder keeps."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tqdm.auto import tqdm

from ..records import RunWriter
from .config import CircuitConfig
from .exact import exact_scores
from .methods import METHODS, Method
from .runs import Runs
from .scores import Scores, score

PART = 32
"""Pairs in a part."""


def parts_of(n_pairs: int) -> list[range]:
    """The pairs of every part."""
    return [range(start, min(start + PART, n_pairs)) for start in range(0, n_pairs, PART)]


def part_name(name: str, rows: range) -> str:
    """The name of the file with these pairs' scores."""
    return f"{name}-{rows.start // PART:03d}"


def scored(
    runs: Runs,
    config: CircuitConfig,
    *,
    writer: RunWriter | None = None,
    name: str = "scores",
    only: Collection[str] | None = None,
    progress: bool = False,
) -> Scores:
    """Score every edge.

    Args:
        runs: the pairs.
        config: the method, and the points of integrated gradients.
        writer: the run folder that has and gets the parts; None scores all pairs in one go.
        name: of the scores, and of their parts.
        only: the names of the parts of a shard; the scores of other pairs stay 0.
        progress: show a progress bar.
    """
    method = config.method
    limits: dict[str, Any] = {"steps": config.steps, "most_steps": config.most_steps, "tolerance": config.tolerance}
    scale = abs(float(runs.gap.double().mean()))
    found = _empty(runs, method=method)
    with tqdm(total=runs.n_pairs, desc=f"{name} ({method})", unit="pair", disable=not progress, leave=False) as bar:
        for rows in [range(runs.n_pairs)] if writer is None else parts_of(runs.n_pairs):
            part = part_name(name, rows)
            if only is not None and part not in only:
                continue
            if writer is not None and writer.has(part):
                held = load_file(writer.folder / f"{part}.safetensors")
                found.values[rows], found.steps[rows] = held["scores"], held["steps"]
                bar.update(len(rows))
                continue
            some = runs if writer is None else runs.some(rows)
            if METHODS[method].along == "patches":
                one = exact_circuit_scores(some, advance=bar.update)
            else:
                one = score(some, method=method, **limits, scale=scale, advance=bar.update)
            found.values[rows], found.steps[rows] = one.values, one.steps
            if writer is not None:
                writer.write_tensors(part, {"scores": one.values, "steps": one.steps})
    return found


def exact_circuit_scores(runs: Runs, *, advance: Callable[[float], object] = lambda pairs: None) -> Scores:
    """The exact score of every edge: for small models."""
    found, n = _empty(runs, method="exact"), runs.graph.n_edges
    found.values[:] = exact_scores(runs, range(n), advance=lambda edges: advance(edges * runs.n_pairs / n))
    return found


def _empty(runs: Runs, *, method: Method) -> Scores:
    """Scores of 0."""
    return Scores(
        graph=runs.graph,
        values=np.zeros((runs.n_pairs, runs.graph.n_edges), dtype=np.float32),
        method=method,
        steps=np.zeros(runs.n_pairs),
        clean=runs.clean_values.double().numpy(),
        corrupted=runs.corrupted_values.double().numpy(),
    )

"""Score every edge of all pairs by any method: in memory, or in groups of 32 pairs that a run folder keeps.

A group is written pass by pass, so that a run that was killed loses one pass.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..progress import tqdm
from ..records import RunWriter
from ..records.reading import damaged_file_error
from ..records.recomputed import refuse_other_numbers
from .config import CircuitConfig
from .exact import exact_scores
from .methods import METHODS
from .runs import Runs
from .scores import Scores, score_by_gradients, zero_scores

GROUP = 32
"""Pairs in a group."""
_LEFT_PAIRS = 8
_TOLERANCE = 1e-4
"""Largest allowed difference of a pair's scores computed again, relative to the largest: alone the pair's gradients are
summed in another order than beside others, which was seen to change scores by 2e-6."""


def divide_pairs(n_pairs: int) -> list[range]:
    """Divide the indices of pairs into groups, whose scores are a file each."""
    return [range(start, min(start + GROUP, n_pairs)) for start in range(0, n_pairs, GROUP)]


def scores_file_name(name: str, rows: range) -> str:
    return f"{name}-{rows.start // GROUP:03d}"


def score_edges(
    runs: Runs,
    config: CircuitConfig,
    *,
    writer: RunWriter | None = None,
    name: str = "scores",
    only: Collection[str] | None = None,
    progress: bool = False,
) -> Scores:
    """Score every edge of all pairs by the configuration's method.

    With ``writer``, scores that the run folder has under ``name`` are read, and others are written to it. With
    ``only``, a shard's files, the scores of all other pairs stay 0.
    """
    method, limits = config.method, _limits(runs, config)
    found = zero_scores(runs, method=method)
    with tqdm(
        total=runs.n_pairs,
        desc=f"{name} ({method})",
        unit="pair",
        disable=not progress,
        leave=False,
    ) as bar:

        def score_batch(some: Runs) -> tuple[np.ndarray, np.ndarray | int]:
            if METHODS[method].patches:
                n = some.graph.n_edges
                values = exact_scores(
                    some, range(n), advance=lambda edges: bar.update(edges * some.n_pairs / n)
                )
                return values, 0
            one = score_by_gradients(some, method=method, **limits, advance=bar.update)
            return one.values, one.steps

        def read_if_kept(file: str, rows: range) -> bool:
            if writer is None or not writer.has(file):
                return False
            held = load_file(writer.folder / f"{file}.safetensors")
            found.values[rows], found.steps[rows] = held["scores"], held["steps"]
            bar.update(len(rows))
            return True

        def write_once(file: str, rows: range) -> None:
            if writer is not None and not writer.has(file):
                held = {"scores": found.values[rows], "steps": found.steps[rows]}
                writer.write_tensors(file, held)

        for rows in [range(runs.n_pairs)] if writer is None else divide_pairs(runs.n_pairs):
            file = scores_file_name(name, rows)
            if only is not None and file not in only:
                continue
            if not read_if_kept(file, rows):
                some = runs.select_pairs(rows)
                for batch in some.batches(copies=3):
                    own = rows[batch]
                    name_of_pass = file if own == rows else f"{file}-pairs-{own.start}-{own.stop}"
                    if not read_if_kept(name_of_pass, own):
                        few = some.select_pairs(range(batch.start, batch.stop))
                        found.values[own], found.steps[own] = score_batch(few)
                        write_once(name_of_pass, own)
                write_once(file, rows)
            if writer is not None:
                writer.clear(f"{file}-pairs-")
    return found


def _limits(runs: Runs, config: CircuitConfig) -> dict[str, Any]:
    limits = {name: getattr(config, name) for name in ("steps", "most_steps", "tolerance")}
    return limits | {"scale": runs.gap_size}


def check_score_files(
    runs: Runs, config: CircuitConfig, folder: Path, files: Mapping[str, range]
) -> None:
    """Score the first pair of each of a folder's files again, and refuse the folder if the scores differ.

    ``files``: name -> pairs. By real patches, four edges are patched again.
    """
    for file, rows in files.items():
        path = folder / f"{file}.safetensors"
        try:
            held = load_file(path)
            there, points = held["scores"][0], int(held["steps"][0])
        except (OSError, SafetensorError, KeyError, IndexError) as error:
            raise damaged_file_error(path, error) from error
        one = runs.select_pairs(rows[:1])
        if METHODS[config.method].patches:
            edges = np.argsort(-np.abs(there))[:4].tolist()
            there, here = there[edges], exact_scores(one, edges)
        else:
            limits = _limits(runs, config)
            if METHODS[config.method].doubles:
                limits |= dict.fromkeys(("steps", "most_steps"), max(1, points))
            here = score_by_gradients(one, method=config.method, **limits).values
        refuse_other_numbers(
            folder,
            there,
            here,
            what=f"the score of an edge on pair {rows.start}",
            tolerance=_TOLERANCE,
            scale=float(np.abs(there).max()),
        )


def left_sum_completeness(runs: Runs, *, config: CircuitConfig) -> tuple[float, int]:
    """Return the completeness of EAP-IG's own sum with ``steps`` points over the first 8 pairs, and their number.

    (nan, 0) if the method does not integrate by midpoints, or the ablation is zero.
    """
    if not METHODS[config.method].doubles or runs.ablation == "zero":
        return np.nan, 0
    few = runs.select_pairs(range(min(_LEFT_PAIRS, runs.n_pairs)))
    scores = score_by_gradients(few, method="eap-ig-left", steps=config.steps)
    return scores.completeness_ratio, few.n_pairs

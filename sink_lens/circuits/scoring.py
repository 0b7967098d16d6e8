"""Score every edge of all pairs by any method: in memory, or in parts of 32 pairs that a run folder keeps.

A part is written pass by pass, so that a run that was killed loses one pass.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from safetensors.numpy import load_file
from tqdm.auto import tqdm

from ..records import RunWriter
from .config import CircuitConfig
from .exact import exact_scores
from .methods import METHODS
from .runs import Runs
from .scores import Scores, score, zero_scores

PART = 32
"""Pairs in a part."""


def parts_of(n_pairs: int) -> list[range]:
    """Divide the pairs into the parts that are scored and kept together, 32 pairs each."""
    return [range(start, min(start + PART, n_pairs)) for start in range(0, n_pairs, PART)]


def part_name(name: str, rows: range) -> str:
    """The name of the file that holds the scores of these pairs."""
    return f"{name}-{rows.start // PART:03d}"


def score_edges(
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
        writer: the run folder that has and gets the parts; None keeps nothing.
        name: of the scores, and of their parts.
        only: the names of the parts of a shard; the scores of other pairs stay 0.
        progress: show a progress bar.
    """
    method = config.method
    limits: dict[str, Any] = {"steps": config.steps, "most_steps": config.most_steps, "tolerance": config.tolerance}
    scale = abs(float(runs.gap.double().mean()))
    found = zero_scores(runs, method=method)
    with tqdm(total=runs.n_pairs, desc=f"{name} ({method})", unit="pair", disable=not progress, leave=False) as bar:

        def batch_of(some: Runs) -> Scores:
            """The scores of the pairs of one pass."""
            if METHODS[method].along == "patches":
                own, n = zero_scores(some, method=method), some.graph.n_edges
                own.values[:] = exact_scores(some, range(n), advance=lambda edges: bar.update(edges * some.n_pairs / n))
                return own
            return score(some, method=method, **limits, scale=scale, advance=bar.update)

        for rows in [range(runs.n_pairs)] if writer is None else parts_of(runs.n_pairs):
            part = part_name(name, rows)
            if only is not None and part not in only:
                continue
            kept = _Kept(writer, found, bar.update)
            if not kept.read(part, rows):
                some = runs.some(rows)
                for batch in some.batches(copies=3):
                    own = rows[batch]
                    name_of_pass = part if own == rows else f"{part}-pairs-{own.start}-{own.stop}"
                    if not kept.read(name_of_pass, own):
                        one = batch_of(some.some(range(batch.start, batch.stop)))
                        found.values[own], found.steps[own] = one.values, one.steps
                        kept.write(name_of_pass, own)
                kept.write(part, rows)
            if writer is not None:
                writer.clear(f"{part}-pairs-")
    return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """Scores in a run folder: of each part, and of each of its passes until the part is whole."""

    writer: RunWriter | None
    found: Scores
    advance: Callable[[float], object]

    def read(self, name: str, rows: range) -> bool:
        """Take the scores of some pairs if the folder has them."""
        if self.writer is None or not self.writer.has(name):
            return False
        held = load_file(self.writer.folder / f"{name}.safetensors")
        self.found.values[rows], self.found.steps[rows] = held["scores"], held["steps"]
        self.advance(len(rows))
        return True

    def write(self, name: str, rows: range) -> None:
        """Write the scores of some pairs, once."""
        if self.writer is not None and not self.writer.has(name):
            self.writer.write_tensors(name, {"scores": self.found.values[rows], "steps": self.found.steps[rows]})

"""Attribution patching: approximate every patch of a sweep at once, to first order, and measure the error.

Replacing x by x' at a site changes the metric m by about (x' - x) . dm/dx, with the gradient in the baseline run. One
forward and one backward pass give this approximation for every cell, whereas real patching takes a pass per cell. Use
it to screen cells: if the metric is not linear between x and x', as with attention, the approximation can be far off,
even in sign. ``sample`` measures the error against real patches.

With ``steps``, the gradient is averaged over runs whose embeddings lie between those of the baseline run and of the
source run, in the middle of that many equal steps (integrated gradients): where the metric saturates at the baseline
run, its gradient there says nothing.

Reference: Nanda 2023, "Attribution patching"; Syed et al., arXiv 2310.10348; Hanna et al., arXiv 2403.17806 (steps).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor

from ..edits.metrics import Metric
from ..edits.outcome import Outcome
from ..edits.part import Part
from ..engine.trust import TOLERANCE
from ..errors import InputError
from ..models.load import ModelLike, as_lens
from ..records import display
from ..stats import strongest
from .config import PatchConfig
from .first_order import first_order
from .pairs import Direction, PromptPair, Sequences, label_table
from .parts import identity_of, index_of
from .patch import RunPair, patch_config, prepare_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The agreement of an approximation with real patches."""

    frame: pd.DataFrame
    """One row per sampled patch: the swept columns, ``approximation``, ``effect`` (of the real patch), ``error``
    (approximation - effect)."""
    n: int
    """Number of patches compared."""
    mean_error: float
    """Mean magnitude of the error."""
    mean_effect: float
    """Mean magnitude of the real effect, for comparison with the error."""
    rank_correlation: float
    """Spearman's correlation of approximation and effect; nan if either is constant, or for fewer than 3 patches."""
    same_sign_frac: float
    """Share of the compared patches whose approximation has the same sign as the effect; what is within rounding
    (1e-5 of the metric of the baseline run, at least of 1) has none."""

    @property
    def sentence(self) -> str:
        """The error in words."""
        return (
            f"against {self.n} real patches: mean error {self.mean_error:.2g} on effects of {self.mean_effect:.2g}, "
            f"rank correlation {self.rank_correlation:.2f}, same sign in {self.same_sign_frac:.0%}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionResult:
    """The first-order approximation of every patch's effect on the metric."""

    frame: pd.DataFrame
    """One row per patch: the swept columns, ``approximation`` of the effect of ``patch``, ``changed``, ``n``."""
    site: str
    metric: str
    unit: str
    direction: Direction
    by: tuple[str, ...]
    baseline: float
    """The metric of the baseline run."""
    source: float
    """The metric of the source run, from which the patched-in values come."""
    differences: pd.DataFrame = field(repr=False)
    labels: Mapping[int, str] = field(repr=False)
    runs: RunPair = field(repr=False)
    grid: tuple[Part, ...] = field(repr=False)

    def strongest(self, n: int = 10) -> pd.DataFrame:
        """The rows with the largest approximations, positive or negative."""
        return strongest(self.frame, "approximation", n=n)

    def heatmap(self, value: str = "approximation") -> "Figure":
        """The approximation as a heat map; with three axes, it shows the strongest value along the third."""
        title = f"{self.direction}, to first order: {self.site} patched, {self.metric}"
        return display.figure(
            "patches", self.frame, by=self.by, value=value, labels=self.labels, title=title, unit=self.unit
        )

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
        return {"patches": self.frame, "differences": self.differences, "tokens": label_table(self.labels)}

    def _repr_html_(self) -> str:
        """The approximation in a notebook."""
        said = (
            f"{self.site}, {self.direction}, to first order: {self.metric} is {self.baseline:.4g} in the baseline run."
        )
        drawn = [self.heatmap()] if self.by else []
        return display.html(said, *drawn, self.strongest())

    def sample(self, n: int = 30, *, generator: torch.Generator, progress: bool = False) -> Check:
        """Compare the approximation with real patches of randomly drawn cells, among those whose values differ.

        Cost: one pass per drawn cell.

        Raises:
            InputError: fewer than one patch is requested, or no cell's values differ.
        """
        if n < 1:
            raise InputError(f"{n} patches were requested for the comparison; need at least 1")
        able = [number for number, part in enumerate(self.grid) if self.runs.changes(part)]
        if not able:
            raise InputError("no patch of this sweep changes anything; need clean and corrupted runs that differ there")
        drawn = torch.randperm(len(able), generator=generator)[:n].tolist()
        numbers = sorted(able[one] for one in drawn)
        parts = {identity_of(self.grid[number]): self.grid[number] for number in numbers}
        found = self.runs.measure(parts, progress=progress)
        values = torch.stack([found[name].values for name in parts])
        frame = self.frame.iloc[numbers][[*self.by, "approximation"]].reset_index(drop=True)
        frame["effect"] = (values.double() - self.runs.baseline.double()).nanmean(1).numpy()
        frame["error"] = frame["approximation"] - frame["effect"]
        both = frame.dropna()
        rounding = TOLERANCE * max(1.0, abs(self.baseline))
        signs = [np.sign(both[name].where(both[name].abs() > rounding, 0.0)) for name in ("approximation", "effect")]
        ranked = len(both) > 2 and both["approximation"].nunique() > 1 and both["effect"].nunique() > 1
        return Check(
            frame=frame,
            n=len(both),
            mean_error=float(both["error"].abs().mean()),
            mean_effect=float(both["effect"].abs().mean()),
            rank_correlation=_spearman(both) if ranked else float("nan"),
            same_sign_frac=float((signs[0] == signs[1]).mean()),
        )


def attribution_patch(
    lens: ModelLike,
    clean: Sequences | None = None,
    corrupted: Sequences | None = None,
    *,
    metric: Metric | Callable[[Outcome], Any] | str | None = None,
    config: PatchConfig | None = None,
    **fields: Any,
) -> AttributionResult:
    """Approximate every patch of a sweep by the metric's gradient; the arguments are those of ``patch``.

    Cost: four passes, plus one pass with gradients on all sequences at once for each step, which needs the memory of a
    training step.

    Raises:
        InputError: as in ``patch``; or the metric has no gradient (one of ranks, counts or detached tensors).
        SiteError: as in ``patch``.
    """
    lens = as_lens(lens)
    settings = patch_config(config, lens=lens, metric=metric, fields=fields)
    if settings.put != "source":
        raise InputError(
            f"approximate and put {settings.put!r} were given; a gradient approximates values of the other run alone: "
            "leave out one of the two"
        )
    runs, grid, pair = prepare_runs(lens, clean, corrupted, metric=metric, config=settings)
    per_sequence = first_order(runs, grid, steps=settings.steps)
    direction = settings.direction
    return _result(runs, per_sequence, pair=pair, by=settings.by, direction=direction, grid=grid)


def _spearman(both: pd.DataFrame) -> float:
    """Rank correlation of approximation and effect."""
    found: Any = spearmanr(both["approximation"], both["effect"])
    return float(found.statistic)


def _result(
    runs: RunPair,
    per_sequence: Tensor,
    *,
    pair: PromptPair,
    by: tuple[str, ...],
    direction: Direction,
    grid: list[Part],
) -> AttributionResult:
    """The result from the approximation by sequence."""
    by_sequence = len(runs.baseline) == runs.run.n_sequences
    frame = pd.DataFrame([index_of(part, by) for part in grid], columns=list(by), index=range(len(grid)))
    undefined = runs.baseline.isnan() if by_sequence else torch.zeros(per_sequence.shape[1], dtype=torch.bool)
    kept = per_sequence.double()[:, ~undefined]
    frame["approximation"] = (kept.nanmean(1) if by_sequence else kept.sum(1)).numpy()
    frame["changed"] = [runs.differs(part) for part in grid]
    frame["n"] = (~kept.isnan()).sum(1).numpy() if by_sequence else 1 - int(runs.baseline.isnan().sum())
    return AttributionResult(
        frame=frame,
        site=runs.site,
        metric=runs.metric.name,
        unit=runs.metric.unit,
        direction=direction,
        by=by,
        baseline=float(runs.baseline.double().nanmean()),
        source=float(runs.source.double().nanmean()),
        differences=pair.differences,
        labels=pair.labels,
        runs=runs,
        grid=tuple(grid),
    )

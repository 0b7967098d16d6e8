"""Attribution patching: approximate every patch of a sweep at once, to first order, and measure the error.

Replacing x by x' at a site changes the metric m by about (x' - x) . dm/dx, with the gradient in the unpatched run. One
forward and one backward pass give this approximation for every cell, whereas real patching takes a pass per cell. Use
it to screen cells: if the metric is not linear between x and x', as with attention, the approximation can be far off,
even in sign. ``sample`` measures the error against real patches.

Reference: Nanda 2023, "Attribution patching"; Syed et al., arXiv 2310.10348.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor

from ..edits.metrics import Metric, evaluate
from ..edits.outcome import Outcome
from ..engine.forward import sequence_loss
from ..errors import InputError
from ..measures.attention import row_shares, sink_mass
from ..models.evaluating import evaluating
from ..models.load import ModelLike, as_lens
from ..models.sites import SITES, bridge_hook
from ..records import display
from ..stats import strongest
from .activation import Sweep, patch_config, swept
from .cells import Part, place
from .config import PatchConfig
from .pairs import Direction, PromptPair, Sequences

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
    """Share of the compared patches whose approximation has the same sign as the effect."""

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
    unpatched: float
    """The metric of the unpatched run."""
    source: float
    """The metric of the source run, from which the patched-in values come."""
    differences: pd.DataFrame = field(repr=False)
    labels: Mapping[int, str] = field(repr=False)
    sweep: Sweep = field(repr=False)
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
        return {"patches": self.frame, "differences": self.differences}

    def _repr_html_(self) -> str:
        said = f"{self.site}, {self.direction}, to first order: {self.metric} is {self.unpatched:.4g} unpatched."
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
        able = [number for number, cell in enumerate(self.grid) if self.sweep.changes(cell)]
        if not able:
            raise InputError("no patch of this sweep changes anything; need clean and corrupted runs that differ there")
        drawn = torch.randperm(len(able), generator=generator)[:n].tolist()
        numbers = sorted(able[one] for one in drawn)
        values = self.sweep.measure([self.grid[number] for number in numbers], progress=progress)
        frame = self.frame.iloc[numbers][[*self.by, "approximation"]].reset_index(drop=True)
        frame["effect"] = (values.double() - self.sweep.unpatched.double()).nanmean(1).numpy()
        frame["error"] = frame["approximation"] - frame["effect"]
        both = frame.dropna()
        ranked = len(both) > 2 and both["approximation"].nunique() > 1 and both["effect"].nunique() > 1
        return Check(
            frame=frame,
            n=len(both),
            mean_error=float(both["error"].abs().mean()),
            mean_effect=float(both["effect"].abs().mean()),
            rank_correlation=_spearman(both) if ranked else float("nan"),
            same_sign_frac=float((np.sign(both["approximation"]) == np.sign(both["effect"])).mean()),
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

    Cost: four passes, plus one pass with gradients on all sequences at once, which needs the memory of a training step.

    Raises:
        InputError: as in ``patch``; or the metric has no gradient (one of ranks, counts or detached tensors).
        SiteError: as in ``patch``.
    """
    lens = as_lens(lens)
    asked = patch_config(config, lens=lens, metric=metric, fields=fields)
    sweep, grid, pair = swept(lens, clean, corrupted, metric=metric, config=asked)
    per_sequence = _first_order(sweep, grid)
    direction = cast("Direction", asked.direction)
    return _result(sweep, per_sequence, pair=pair, by=asked.by, direction=direction, grid=grid)


def _spearman(both: pd.DataFrame) -> float:
    found: Any = spearmanr(both["approximation"], both["effect"])
    return float(found.statistic)


def _result(
    sweep: Sweep, per_sequence: Tensor, *, pair: PromptPair, by: tuple[str, ...], direction: Direction, grid: list[Part]
) -> AttributionResult:
    by_sequence = len(sweep.unpatched) == sweep.run.n_sequences
    frame = pd.DataFrame([cell.place for cell in grid], columns=list(by), index=range(len(grid)))
    undefined = sweep.unpatched.isnan() if by_sequence else torch.zeros(per_sequence.shape[1], dtype=torch.bool)
    kept = per_sequence.double()[:, ~undefined]
    frame["approximation"] = (kept.mean(1) if by_sequence else kept.sum(1)).numpy()
    frame["changed"] = [sweep.differs(cell) for cell in grid]
    frame["n"] = int((~sweep.unpatched.isnan()).sum())
    return AttributionResult(
        frame=frame,
        site=sweep.site,
        metric=sweep.metric.name,
        unit=sweep.metric.unit,
        direction=direction,
        by=by,
        unpatched=float(sweep.unpatched.double().nanmean()),
        source=float(sweep.source.double().nanmean()),
        differences=pair.differences,
        labels=pair.labels,
        sweep=sweep,
        grid=tuple(grid),
    )


def _first_order(sweep: Sweep, grid: Sequence[Part]) -> Float[Tensor, "sample batch"]:
    """Compute (x' - x) . dm/dx for each cell, by sequence."""
    gradients = _gradients(sweep)
    products = {}
    for key, gradient in gradients.items():
        run, source = sweep.held[key].float(), sweep.given[key].float()
        difference = torch.where(run == source, 0.0, source - run)  # masked scores may be infinite in both runs
        products[key] = difference * gradient.float()
    found = torch.zeros(len(grid), sweep.run.n_sequences)
    for number, cell in enumerate(grid):
        for key in {place(sweep.site, layer) for layer in cell.layers}:
            found[number] += cell.of(products[key]).flatten(1).sum(1)
    return found


def _gradients(sweep: Sweep) -> dict[tuple[str, int], Tensor]:
    """Gradient of the metric, summed over sequences, at the site in every layer of the sweep.

    It is taken through a zero tensor that is added at the site, since the tensor that a hook receives is not always the
    one that later computations use.
    """
    lens, site = sweep.lens, sweep.site
    zeros = {key: torch.zeros_like(sweep.held[key], device=lens.device, requires_grad=True) for key in sweep.given}

    def add(x: Tensor, hook: object, *, zero: Tensor) -> Tensor:
        return x + zero.to(x.device)

    hooks: list[Any] = [
        (bridge_hook(SITES[site], family=lens.family, layer=key[1]), partial(add, zero=zero))
        for key, zero in zeros.items()
    ]
    with torch.enable_grad():
        values = evaluate(sweep.metric, _outcome(sweep, hooks))
        if not values.requires_grad:
            raise InputError(
                f"the metric {sweep.metric.name!r} has no gradient; need one made of the run's tensors by "
                "differentiable operations, without detach, item, argmax or counts. Use patch for this metric"
            )
        total = values[~values.isnan()].sum()
        found = torch.autograd.grad(total, list(zeros.values()), allow_unused=True)
    return {
        key: torch.zeros_like(zero, device="cpu") if gradient is None else gradient.detach().cpu()
        for (key, zero), gradient in zip(zeros.items(), found, strict=True)
    }


def _outcome(sweep: Sweep, hooks: list[Any]) -> Outcome:
    """Repeat the unpatched run with gradients, and read it as ``run_with`` does."""
    lens, metric, batch = sweep.lens, sweep.metric, sweep.run
    layers, valid = metric.over(lens.n_layers) or (lens.n_layers - 1,), batch.valid.to(lens.device)
    mass: dict[int, Tensor] = {}
    state: dict[int, Tensor] = {}
    tensors: dict[tuple[str, int], Tensor] = {}

    def read_mass(x: Tensor, hook: object, *, layer: int) -> None:
        x = row_shares(x) if lens.family.sigmoid else x
        at = {"valid": valid.to(x.device), "reach": lens.reach(layer)}
        found = [sink_mass(x[..., key].float(), key=key, **at) for key in metric.positions]
        mass[layer] = torch.stack(found, dim=-1).cpu()

    def read_state(x: Tensor, hook: object, *, layer: int) -> None:
        state[layer] = x[:, list(metric.positions)].float().cpu()

    def keep(x: Tensor, hook: object, *, key: tuple[str, int]) -> None:
        tensors[key] = x.cpu()

    def name(site: str, layer: int) -> str:
        return bridge_hook(SITES[site], family=lens.family, layer=layer)

    reads: list[Any] = []
    for layer in layers:
        reads.append((name("pattern", layer), partial(read_mass, layer=layer)))
        reads.append((name("resid_post", layer), partial(read_state, layer=layer)))
    for key in {place(site, layer): None for site in metric.sites for layer in layers}:
        reads.append((name(*key), partial(keep, key=key)))
    stop: dict[str, Any] = {} if metric.whole else {"stop_at_layer": max(layers) + 1}
    with evaluating(lens.bridge):
        out = lens.bridge.run_with_hooks(batch.tokens.to(lens.device), fwd_hooks=hooks + reads, use_cache=False, **stop)
    return Outcome(
        positions=metric.positions,
        layers=layers,
        valid=batch.valid.cpu(),
        mass=torch.stack([mass[layer] for layer in layers]),
        state=torch.stack([state[layer] for layer in layers]),
        loss=sequence_loss(out, batch).cpu() if metric.loss else None,
        logits=out.cpu() if metric.logits else None,
        tensors=tensors,
    )

"""A call of ``patch`` for one site, with both runs made and all parts chosen; and its result."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..edits.effect_table import effect_table, share_of_difference
from ..edits.part import Part
from ..engine.plan import Plan
from ..errors import InputError
from ..models.lens import LensModel
from .config import PatchConfig
from .first_order import first_order_effects
from .pairs import PromptPair, Sequences
from .parts import check_put_edit, draw_random_parts, part_identity
from .patches import Patches, Row
from .results import PatchResult, fields_of_patches, mark_unlike, part_table
from .run_pair import RunPair, prepare_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRequest:
    """A checked call of ``patch`` for one site: runs, parts of the site, controls, configuration."""

    runs: RunPair
    grid: Sequence[Part]
    pair: PromptPair
    config: PatchConfig
    controls: Sequence[Sequence[Part]]
    """Random parts, for each part of the grid."""
    approximations: list[float] | None
    n_screened: int = 0
    """The parts of which those of the grid have the largest approximations; 0 if all were taken."""

    @property
    def asked(self) -> dict[str, Any]:
        # not the runs, whose activations a result would keep
        lens, metric = self.runs.lens, self.runs.metric
        return {"lens": lens, "metric": metric, "pair": self.pair, "config": self.config}

    def patches(self, plan: Plan | None = None) -> Patches:
        parts = [part for some in (self.grid, *self.controls) for part in some]
        make = self.runs.edit_maker(self.config)
        return Patches.of(self.runs, parts, make=make, batch_size=self.config.batch_size, plan=plan)

    def result(self, patches: Patches, rows: Iterable[Row]) -> PatchResult:
        runs, (found, changed) = self.runs, patches.values(rows)
        before = runs.baseline.double()

        def values_of(parts: Sequence[Part]) -> Tensor:
            rows = [found[part_identity(part)].double() for part in parts]
            return torch.stack(rows) if rows else before.repeat(0, 1)

        values = values_of(self.grid)
        effects = effect_table(
            values.numpy(),
            before.numpy(),
            controls=[values_of(some).numpy() for some in self.controls],
            generator=np.random.default_rng(self.config.seed),
        )
        n = effects.pop("n")
        share = share_of_difference(values.numpy(), before.numpy(), runs.source.numpy())
        changes = [part_identity(part) in changed for part in self.grid]
        effects = effects.assign(normalised_effect=share, changed=changes, n=n)
        if self.approximations is not None:
            effects["approximation"] = self.approximations
            tested = int(np.isfinite(effects["corrected_p"].to_numpy(float)).sum())
            effects["corrected_p"] *= self.n_screened / max(tested, 1)
            effects["corrected_p"] = effects["corrected_p"].clip(upper=1.0)
        rows = part_table(self.grid, self.config.by).join(effects)
        return PatchResult(
            rows=mark_unlike(rows, self.grid, runs, self.pair),
            values=values,
            baselines=torch.stack([runs.baseline, runs.source]).double(),
            **fields_of_patches(runs, self.pair, self.config),
        )


def make_patch_request(
    lens: LensModel, clean: Sequences | None, corrupted: Sequences | None, *, config: PatchConfig
) -> PatchRequest:
    if config.approximate:
        raise InputError(
            "approximate was given to patch, which makes real patches; call attribution_patch"
        )
    config.check_together()
    check_put_edit(config)
    if config.edits and config.screen:
        raise InputError(
            "screen approximates patches of the unedited model; leave out screen, or edits"
        )
    if config.screen and config.put != "source":
        raise InputError("screen approximates patches from the other run; leave out screen, or put")
    runs, grid, pair = prepare_runs(lens, clean, corrupted, config=config)
    approximations, n_screened = None, 0
    if config.screen:  # the largest effects to first order, in the order of the grid
        effects, n = first_order_effects(runs, grid, steps=config.steps)
        n_screened = int((n > 1).sum())
        order = effects.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)
        best = sorted(order[: config.screen].tolist())
        grid, approximations = [grid[number] for number in best], effects[best].tolist()
    controls = [  # beside a patch that changes nothing, others are no controls
        draw_random_parts(
            part,
            sizes=runs.sizes,
            shortest=int(runs.run.lengths.min()),
            draws=config.controls,
            seed=config.seed,
        )
        if config.put != "source" or runs.has_difference(part)
        else []
        for part in grid
    ]
    return PatchRequest(
        runs=runs,
        grid=grid,
        pair=pair,
        config=config,
        controls=controls,
        approximations=approximations,
        n_screened=n_screened,
    )

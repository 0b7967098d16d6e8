"""Results of patches and of their approximation: tables, figures, and what their run folder holds."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor
from transformer_lens.patching import PatchingResult

from ..edits.effect_table import shown_rows
from ..edits.part import Part
from ..engine.trust import TOLERANCE
from ..errors import InputError, RunError
from ..models.family import ADDED
from ..models.sites import SITES
from ..models.unchanged import TensorValues
from ..records import RunWriter, display, read_run
from ..stats import sort_by_magnitude
from ..text import as_ranges
from .carried import (
    carrying_positions_text,
    comparable_rows,
    position_name,
    unlike_places,
    unlike_text,
)
from .config import EVERY, PatchConfig
from .pairs import Direction, PromptPair, label_table
from .patches import Patches
from .run_pair import RunPair

if TYPE_CHECKING:
    from ..report.style import Picture


SHOWN = 10
"""Rows of the table ``summary``."""
_THEIR_AXES = {"position": "pos"}
_THEIR_MATRIX_AXES = {"position": "dest_pos", "key": "src_pos", "head": "head_index"}
"""Axis of a sweep -> its name in ``transformer_lens.patching``, of activations and of scores and pattern."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MeasuredPatches:
    """What the results of real and of approximated patches share."""

    rows: pd.DataFrame = field(repr=False)
    site: str
    metric: str
    unit: str
    """Unit of value and effect; empty if they are pure numbers."""
    direction: Direction
    by: tuple[str, ...]
    put: str = "source"
    """What was put in, as in the configuration; the name of a function."""
    baseline: float
    """The metric of the patched run before it is patched."""
    source: float
    """The metric of the source run, from which the patched-in values come."""
    differences: pd.DataFrame = field(repr=False)
    """The positions at which the clean and the corrupted tokens differ."""
    labels: Mapping[int, str] = field(repr=False)
    """Position -> the label of its token, or of the clean and the corrupted one; "" or (differ) if pairs differ."""
    bos: bool = False
    """True if the prompts begin with BOS."""
    positions: tuple[int, ...] | None = None
    """The positions that were chosen; None is all."""
    folder: Path | None = None
    """The run folder, if one was written."""
    opens: Callable[..., RunWriter] | None = field(default=None, repr=False)
    """Opens a run folder for a result without one."""
    notes: tuple[str, ...] = ()
    """Notes on the model, such as that its weights are quantised."""
    waits: str = field(default="", repr=False)
    """From a shard, if others are still to be computed: the sentence that says so. The tables then wait."""

    @property
    def finished(self) -> bool:
        """False if other shards of the run are still to be computed."""
        return not self.waits

    @property
    def frame(self) -> pd.DataFrame:
        """One row per patch, with the columns that ``rows`` lists.

        Raises:
            RunError: other shards of the run are still to be computed.
        """
        if self.waits:
            raise RunError(
                f"{self.folder} has no table of patches yet; need all shards of the run: {self.waits}"
            )
        return self.rows

    @property
    def folders(self) -> tuple[Path, ...]:
        """The run folders, one for each patched site; empty if none was written."""
        if self.folder is None:
            return ()
        if self.site != EVERY:
            return (self.folder,)
        of_sites = (self.folder / site for site in ("resid_pre", *ADDED))
        return tuple(folder for folder in of_sites if folder.is_dir())

    def __repr__(self) -> str:
        return self.headline + ("" if self.folder is None else f"\nin {self.folder}")

    @property
    def headline(self) -> str:
        """The metric of both runs and the largest effect that is shown, as sentences; of a shard, that others wait."""
        if self.waits:
            return self.waits
        said = (
            f"{self.site}, {self.direction}{self._order}, {'with' if self.bos else 'without'} BOS: {self.metric} is "
            f"{self.baseline:.4g} in the baseline run and {self.source:.4g} in the source run."
        )
        if not len(self.frame) or not self.by:
            return said
        if "changed" in self.frame and not bool(self.frame["changed"].any()):
            return f"{said}\nNo patch changed anything: what it puts in is there, or the metric reads nothing after it."
        if self.unlike:
            said += f"\n{self.unlike}."
        frame = sort_by_magnitude(comparable_rows(self.frame), "effect")
        if not len(frame):
            return said
        if bool(frame["effect"].isna().all()):
            return f"{said}\nNo patch has a defined effect."
        carried = carrying_positions_text(frame, site=self.site, put=self.put, labels=self.labels)
        shown = shown_rows(frame)
        where = self._place_text((shown if len(shown) else frame).to_dict("records")[0])
        largest = "The" if len(shown) else "No patch is shown to move it; the"
        sentences = [f"It {carried}."] if carried else []
        sentences.append(f"{largest} largest effect is {where}.")
        if "ci_low" in self.frame and bool(self.frame["ci_low"].isna().all()):
            sentences.append("No intervals: they need numbers of two pairs or more.")
        return f"{said}\n{' '.join(sentences)}"

    @property
    def _order(self) -> str:
        return ", to first order" if isinstance(self, AttributionResult) else ""

    @property
    def unlike(self) -> str:
        """A sentence on positions that are not the same place in all pairs; "" if there are none."""
        return unlike_text(unlike_places(self.frame, chosen=self.positions))

    def _place_text(self, row: Mapping[Any, Any]) -> str:
        where = [
            position_name(row[one], self.labels) if one == "position" else f"{one} {row[one]}"
            for one in self.by
        ]
        has_positions = self.site in SITES and "position" in SITES[self.site].axis_names
        if has_positions and "position" not in self.by:
            only = self.positions
            where.append(
                "all positions"
                if only is None
                else f"position{'s' * (len(only) > 1)} {as_ranges(only)}"
            )
        return f"{row['effect']:.4g}, at {', '.join(where)}"

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write a run folder of the result, for ``read_run`` and ``sink-lens report``; return its path.

        Raises:
            RunError: the folder cannot be used; or the result is of several sites or already in a folder.
        """
        if self.opens is None:
            raise RunError(
                "only the result of one site that was patched without out can be saved; give out=FOLDER"
            )
        with self.opens(folder, overwrite=overwrite) as writer:
            write_result(writer, cast("PatchResult", self))
        return Path(folder)

    def report(self, path: str | Path | None = None) -> Path:
        """Draw the page of the result, one HTML file, and return its path; None draws it in the run folder.

        Raises:
            InputError: no path was given and the result has no run folder.
            RunError: it has one for each site.
        """
        if len(self.folders) > 1:
            raise RunError(
                f"the result has {len(self.folders)} run folders; need one. Patch one site with out=FOLDER."
            )
        if self.folders or path is None:
            run = read_run(self.folders[0]) if self.folders else None
            return display.draw_result_page(run, path)
        with tempfile.TemporaryDirectory() as scratch:
            return display.draw_result_page(read_run(self.save(Path(scratch, "run"))), path)

    def draw(self) -> "Picture":
        """Draw the heat map of the patches."""
        return self.heatmap()

    def strongest(self, n: int = 10) -> pd.DataFrame:
        """Return the ``n`` rows of ``frame`` with the largest absolute effects."""
        return sort_by_magnitude(self.frame, "effect").head(n).reset_index(drop=True)

    def heatmap(
        self,
        value: str | None = None,
        *,
        style: Literal["page", "paper"] = "page",
        width: float | None = None,
    ) -> "Picture":
        """Draw a column of ``frame`` as a heat map over the swept axes; along a third axis, its largest magnitude.

        Args:
            value: the column; None is the normalised effect (0: the baseline run, 1: the source run), or the effect
                where the frame has none.
            style: ``page``, or ``paper`` with serifs.
            width: inches; None is 3.25, a single column, for ``paper``, and what the axes need for ``page``.

        Raises:
            RunError: the frame has no such column, or nothing was swept.
        """
        from .page import mapped_column, patch_map

        return patch_map(
            self.frame,
            by=self.by,
            value=value or mapped_column(self.frame),
            labels=self.labels,
            title=f"{self.direction}{self._order}: {self.site} patched, {self.metric}",
            unit=self.unit,
            style=style,
            width=width,
        )


def part_table(grid: Sequence[Part], by: Sequence[str]) -> pd.DataFrame:
    """Return a table of the index of each part on each axis in ``by``."""
    indices = [[chosen[0] for axis in by if (chosen := part.indices_on(axis))] for part in grid]
    return pd.DataFrame(indices, columns=list(by), index=range(len(grid)))


def mark_unlike(
    frame: pd.DataFrame, grid: Sequence[Part], runs: RunPair, pair: PromptPair
) -> pd.DataFrame:
    """Add the column ``alike``, False for a part that is not one place in all pairs, if there is one."""
    alike = [not runs.unlike_places(part, pair.labels) for part in grid]
    return frame if all(alike) else frame.assign(alike=alike)


def fields_of_patches(runs: RunPair, pair: PromptPair, config: PatchConfig) -> dict[str, Any]:
    return {
        "site": runs.site,
        "metric": runs.metric.name,
        "unit": runs.metric.unit,
        "direction": config.direction,
        "by": config.by,
        "put": config.put_name,
        "baseline": float(runs.baseline.double().nanmean()),
        "source": float(runs.source.double().nanmean()),
        "differences": pair.differences,
        "labels": pair.labels,
        "bos": pair.clean.bos,
        "positions": config.positions,
        "notes": runs.lens.notes,
    }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PatchResult(MeasuredPatches):
    """The result of ``patch``: the effect of each patch on the metric."""

    rows: pd.DataFrame = field(repr=False)
    """One row per patch, with the columns that the help of ``patch`` lists."""
    values: Float[Tensor, "sample batch"] = field(repr=False)
    """The metric of each patch by sequence; a single column if the metric gives one number for all sequences."""
    baselines: Float[Tensor, "2 batch"] = field(repr=False)
    """The metric of the baseline run and of the source run, by sequence as in ``values``."""

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Name -> table of the run folder: patches, tokens, differences between prompts, values by sequence."""
        n_patches, n = self.values.shape
        values = {
            "patch": np.repeat(np.arange(n_patches), n),
            "sequence": np.tile(np.arange(n), n_patches),
            "value": self.values.flatten().numpy(),
        }
        return {
            "patches": self.frame,
            "tokens": label_table(self.labels),
            "differences": self.differences,
            "values": pd.DataFrame(values),
        }

    def to_transformer_lens(self) -> PatchingResult:
        """Convert to the result object of ``transformer_lens.patching``: the same numbers, with its axis names.

        ``values`` has an axis for each swept axis if all their combinations were patched, else one axis of all patches;
        its last axis has the sequences. ``normalized(result.baselines[1])`` is 0 at the baseline, 1 at the source run.
        """
        theirs = (
            _THEIR_MATRIX_AXES if self.site in SITES and SITES[self.site].observed else _THEIR_AXES
        )
        names = [theirs.get(axis, axis) for axis in self.by]
        index = pd.DataFrame(self.frame[[*self.by]].to_numpy(), columns=names)
        sizes = [len({*index[name]}) for name in names]
        if math.prod(sizes) != len(index):  # only the largest approximations were patched
            sizes, names = [len(index)], []
        return PatchingResult(
            values=self.values.reshape(*sizes, -1),
            axis_names=names,
            index_df=index,
            metric_names=[self.metric],
            reduced=False,
            baseline=self.baselines[0],
        )

    def _repr_html_(self) -> str:
        if self.waits:
            return display.result_html(self.headline, notes=self.notes)
        drawn = [self.heatmap()] if self.by else []
        return display.result_html(
            self.headline, *drawn, self.strongest().dropna(axis=1, how="all"), notes=self.notes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A comparison of approximated effects with real patches, over a sample of patches."""

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
        """A sentence on how far the approximation is from the real patches."""
        return (
            f"against {self.n} real patches: mean error {self.mean_error:.2g} on effects of {self.mean_effect:.2g}, "
            f"rank correlation {self.rank_correlation:.2f}, same sign in {self.same_sign_frac:.0%}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AttributionResult(MeasuredPatches):
    """The first-order approximation of every patch's effect on the metric."""

    rows: pd.DataFrame = field(repr=False)
    """One row per patch: the swept columns, ``effect`` (approximates that of ``patch``), ``method`` (gradient, or
    integrated gradients), ``changed``, ``n``."""
    runs: RunPair = field(repr=False)
    grid: tuple[Part, ...] = field(repr=False)
    values_then: TensorValues = field(repr=False)
    """The model's weights when the approximation was made."""
    checked: str = ""
    """Agreement with a sample of real patches, in words; empty if none were made."""

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Name -> table of the run folder: approximated patches, differences between prompts, tokens."""
        return {
            "patches": self.frame,
            "differences": self.differences,
            "tokens": label_table(self.labels),
        }

    def _repr_html_(self) -> str:
        drawn = [self.heatmap()] if self.by else []
        return display.result_html(self.headline, *drawn, self.strongest(), notes=self.notes)

    def sample(self, n: int = 30, *, generator: torch.Generator, progress: bool = True) -> Check:
        """Draw ``n`` of the patches that can change something, make them for real, and compare.

        Cost: one pass per drawn patch.

        Raises:
            InputError: fewer than one patch is requested, or no cell's values differ.
            ModelError: the weights were changed in place since the approximation.
        """
        self.values_then.check("approximations")
        if n < 1:
            raise InputError(f"{n} patches were requested for the comparison; need at least 1")
        able = [number for number, part in enumerate(self.grid) if self.runs.can_change(part)]
        if not able:
            raise InputError(
                "no patch of this sweep changes anything; need clean and corrupted runs that differ there"
            )
        drawn = torch.randperm(len(able), generator=generator)[:n].tolist()
        numbers = sorted(able[one] for one in drawn)
        patches = Patches.of(self.runs, [self.grid[number] for number in numbers])
        measured = patches.measure(patches.blocks, progress=progress)
        found, _ = patches.values(row for _, rows in measured for row in rows)
        values = torch.stack([*found.values()])
        chosen = _rename_for_folder(self.frame).iloc[numbers].reset_index(drop=True)
        frame = chosen[[*self.by, "approximation"]]
        effect = (values.double() - self.runs.baseline.double()).nanmean(1).numpy()
        frame = frame.assign(effect=effect, error=frame["approximation"] - effect)
        both = frame.dropna()
        rounding = TOLERANCE * max(1.0, abs(self.baseline))
        pair = both[["approximation", "effect"]]
        signs = np.sign(pair.where(pair.abs() > rounding, 0.0))
        ranked = len(both) > 2 and bool((pair.nunique() > 1).all())
        ranks: Any = spearmanr(pair["approximation"], pair["effect"]) if ranked else None
        return Check(
            frame=frame,
            n=len(both),
            mean_error=float(both["error"].abs().mean()),
            mean_effect=float(both["effect"].abs().mean()),
            rank_correlation=float(ranks.statistic) if ranked else float("nan"),
            same_sign_frac=float((signs["approximation"] == signs["effect"]).mean()),
        )


def join_sites(results: Mapping[str, PatchResult]) -> PatchResult:
    first = results["resid_pre"]  # which every layer has
    by, folder = (*first.by, "site"), None if first.folder is None else first.folder.parent
    of_every: dict[str, Any] = {"site": EVERY, "by": by, "folder": folder, "opens": None}
    if waits := next((one.waits for one in results.values() if one.waits), ""):
        return replace(first, **of_every, waits=waits)
    keys = [
        list(one.frame[list(first.by)].itertuples(index=False, name=None))
        for one in results.values()
    ]
    every = dict.fromkeys(key for some in keys for key in some)  # each site has its own if screened
    rows = {key: number for number, key in enumerate(every)}
    order = np.argsort(
        [rows[key] for some in keys for key in some], kind="stable"
    )  # the sites vary fastest
    frames = [one.frame.assign(site=name) for name, one in results.items()]
    tested = [int(np.isfinite(one["corrected_p"].to_numpy(float)).sum()) for one in frames]
    for one, n in zip(frames, tested, strict=True):  # a site's are corrected for its own patches
        one["corrected_p"] = (one["corrected_p"] * sum(tested) / max(n, 1)).clip(upper=1.0)
    frame = pd.concat(frames, ignore_index=True).iloc[order].reset_index(drop=True)
    frame = frame[[*by, *(name for name in frame if name not in by)]]
    values = torch.cat([one.values for one in results.values()])[torch.from_numpy(order)]
    return replace(first, **of_every, rows=frame, values=values)


def write_result(writer: RunWriter, result: PatchResult | AttributionResult) -> None:
    for name, frame in result.tables.items():
        writer.write_table(name, _rename_for_folder(frame))
    if result.by:
        from ..report.style import figure_bytes

        writer.write_bytes("heatmap.png", figure_bytes(result.heatmap(), "png"))
    about = {
        name: getattr(result, name)
        for name in ("site", "metric", "direction", "baseline", "source")
    }
    writer.write_csv("summary", _rename_for_folder(result.strongest(SHOWN)).assign(**about))


def _rename_for_folder(frame: pd.DataFrame) -> pd.DataFrame:
    if "method" not in frame:
        return frame
    return frame.drop(columns="method").rename(columns={"effect": "approximation"})

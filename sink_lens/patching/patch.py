"""Activation patching: put activations of one run into another, part by part, and measure the effect on a metric.

There are two runs, clean and corrupted, on sequences of the same lengths. *Denoising* puts clean values into the
corrupted run; if the metric recovers, these values were sufficient. *Noising* puts corrupted values into the clean
run; if the metric is lost, the clean values were necessary. Columns and numbers are the same as in
``transformer_lens.patching`` wherever both support a patch; ``PatchResult.patching_result`` is its own result object.

The patches are cells of ``engine``: a patch at layer L and position p takes the stream before the layer, and the keys
and values before the position, from the baseline run, and ends after the last tensor that the metric reads. If both
runs have bit-identical values in a cell, nothing is run and the effect is 0.

Reference: Meng et al., arXiv 2202.05262 (causal tracing); Heimersheim and Nanda, arXiv 2404.15255.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.patching import PatchingResult

from ..configuration import with_fields
from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.effect_table import effect_table
from ..edits.metrics import Metric, as_metric, evaluate, on_tokens
from ..edits.outcome import Outcome
from ..edits.part import Part, Where
from ..edits.references import References
from ..engine.cells import Cell
from ..engine.code_identity import code_of
from ..engine.engine import Engine
from ..engine.forward import run_with
from ..engine.measured import metric_config
from ..engine.plan import Plan
from ..engine.trust import make_engine
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.sites import SITES
from ..records import RunWriter, check_known, display
from ..records.shards import in_shard, remove_shards, take_parts
from ..stats import strongest
from .cells import MakesEdit, cell_of_edit, cell_of_patch, differs
from .config import PatchConfig, check_differ
from .first_order import first_order
from .named_metric import named_metric
from .pairs import Direction, PromptPair, Sequences, label_table, pair_prompts
from .parts import cells, check_put, drawn_parts, identity_of, index_of, open_whole_axes, put_spec
from .run_folder import Kept, Measured, Row, label_of, open_run, write_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THEIR_AXES = {"position": "pos"}
_THEIR_MATRIX_AXES = {"position": "dest_pos", "key": "src_pos", "head": "head_index"}
"""Axis of a sweep -> its name in ``transformer_lens.patching``, of activations and of scores and pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchResult:
    """The effect of every patch of a sweep on the metric."""

    frame: pd.DataFrame
    """One row per patch: the swept columns, ``baseline`` and ``value`` (means of the metric over sequences), ``effect``
    (value - baseline) with its paired 95% interval over sequences; ``control_effect`` and ``control_sd`` (mean and
    standard deviation over random parts of the same size), ``over_control`` (effect - control_effect) with its
    interval; ``normalised_effect`` (0 = the baseline run, 1 = the source run; nan if their metrics are equal),
    ``changed`` (whether the patch changed any value), ``n`` (sequences for which the metric is defined)."""
    site: str
    metric: str
    unit: str
    """Unit of value and effect; empty if they are pure numbers."""
    direction: Direction
    by: tuple[str, ...]
    baseline: float
    """The metric of the patched run before it is patched."""
    source: float
    """The metric of the source run, from which the patched-in values come."""
    values: Float[Tensor, "sample batch"] = field(repr=False)
    """The metric of each patch by sequence; a single column if the metric gives one number for all sequences."""
    baselines: Float[Tensor, "2 batch"] = field(repr=False)
    """The metric of the baseline run and of the source run, by sequence as in ``values``."""
    differences: pd.DataFrame = field(repr=False)
    """The positions at which the clean and the corrupted tokens differ."""
    labels: Mapping[int, str] = field(repr=False)
    """Position -> the label of its token; * marks positions where the tokens differ."""
    folder: Path | None = None
    """The run folder, if one was written."""

    def strongest(self, n: int = 10) -> pd.DataFrame:
        """The rows with the largest effects, positive or negative."""
        return strongest(self.frame, "effect", n=n)

    def heatmap(self, value: str = "effect") -> "Figure":
        """The sweep as a heat map; with three axes, it shows the strongest effect along the third."""
        title = f"{self.direction}: {self.site} patched, {self.metric}"
        return display.figure(
            "patches", self.frame, by=self.by, value=value, labels=self.labels, title=title, unit=self.unit
        )

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
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

    def patching_result(self) -> PatchingResult:
        """The same numbers as the result object of ``transformer_lens.patching``, with its axis names.

        ``values`` has one axis a swept axis if all their combinations were patched, else one axis of all patches, and
        the sequences last. ``normalized(result.baselines[1])`` is 0 at the baseline run and 1 at the source run.
        """
        theirs = _THEIR_MATRIX_AXES if SITES[self.site].observed else _THEIR_AXES
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
        """The patches in a notebook."""
        said = (
            f"{self.site}, {self.direction}: {self.metric} is {self.baseline:.4g} in the baseline run and "
            f"{self.source:.4g} in the source run."
        )
        drawn = [self.heatmap()] if self.by else []
        return display.html(said, *drawn, self.strongest())


def patch(
    lens: ModelLike,
    clean: Sequences | None = None,
    corrupted: Sequences | None = None,
    *,
    metric: Metric | Callable[[Outcome], Any] | str | None = None,
    put: MakesEdit | str | None = None,
    edits: Sequence[Edit] | Edit = (),
    config: PatchConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> PatchResult:
    """Patch every cell of a site and measure the metric for each, beside random parts of the same size.

    Cost: three passes, some more to compare a few patches with forwards of the bridge, and for each cell whose values
    differ the layers and positions from its own on. Several cells share a forward pass if they fit into memory.

    Args:
        lens: the model.
        clean: text, texts, token ids or a token batch; the configuration's texts if None.
        corrupted: the same number of sequences of the same lengths.
        metric: of ``sink_lens.edits.metrics``, a function of the ``logits`` or of an ``Outcome``, or a name; the
            configuration's if None.
        put: what is put into a part: a name, such as ``source`` (the other run's values), ``mean_ordinary`` or
            ``scale`` (with ``factor=2.0``); or any edit, as a function of the site and the arguments that choose a
            part, such as ``edits.zero``. The configuration's if None.
        edits: made in both runs and beside every patch, so that an edited model is patched.
        config: what is patched; the default one if None.
        out: the run folder; None writes none. The same call on a folder that holds a part of it computes the rest.
        overwrite: replace the run that the folder holds.
        progress: show a bar.
        **fields: fields of ``PatchConfig``, such as ``site="z"``; they win over those of ``config``.

    With ``screen``, the effects of all cells are approximated first (``attribution_patch``), and only those with the
    largest are patched; the frame then has the column ``approximation``, as a check of it.

    Raises:
        InputError: sequences of different lengths; a field, sweep, choice or metric that is not possible.
        SiteError: a site that the family lacks, or whose edits have no effect on this bridge.
        RunError: the folder is in use, or holds another run.
    """
    request = _request(lens, clean, corrupted, metric=metric, put=put, edits=edits, config=config, fields=fields)
    if out is None:
        return request.result(None, progress=progress)
    with request.open(Path(out), code=request.code(), overwrite=overwrite) as writer:
        take_parts(writer)
        result = request.finish(writer, progress=progress)
    remove_shards(writer.folder)
    return result


def patch_shard(
    lens: ModelLike,
    clean: Sequences | None = None,
    corrupted: Sequences | None = None,
    *,
    shard: str,
    out: str | Path,
    metric: Metric | Callable[[Outcome], Any] | str | None = None,
    put: MakesEdit | str | None = None,
    edits: Sequence[Edit] | Edit = (),
    config: PatchConfig | None = None,
    progress: bool = True,
    **fields: Any,
) -> PatchResult | None:
    """Compute one of several parts of a patch's cells, each in a process or on a machine of its own, in one folder.

    A shard that was killed goes on where it was, one that is done does nothing, and the one that ends last makes the
    tables. ``patch`` on the same folder takes what the shards have done and computes the rest.

    Args:
        lens: as in ``patch``; the same in every shard.
        clean: as in ``patch``.
        corrupted: as in ``patch``.
        shard: ``3/8`` is the third of eight; ``slurm`` is the task of the array job that this process is.
        out: the run folder of all shards, where each of them can read and write.
        metric: as in ``patch``.
        put: as in ``patch``.
        edits: as in ``patch``.
        config: as in ``patch``.
        progress: show a bar.
        **fields: as in ``patch``.

    Returns:
        The whole result from the shard that ends last, or where the run was finished; None from the others.

    Raises:
        InputError: what ``patch`` refuses, or a shard that is none.
        RunError: the shard is being computed by another process; or what ``patch`` raises, also for another division.
    """
    request = _request(lens, clean, corrupted, metric=metric, put=put, edits=edits, config=config, fields=fields)
    code = request.code()
    check_known(code)
    plans: list[Plan | None] = []

    def begin(writer: RunWriter) -> dict[str, int]:
        """Plan the patches; the number of each block's."""
        kept = Kept(writer, only=())
        request.measure(kept, progress=False)
        plans.append(kept.plan)
        return kept.sizes

    def compute(writer: RunWriter, parts: Collection[str]) -> None:
        """Compute these blocks."""
        request.measure(Kept(writer, planned=plans[0], only=parts), progress=progress)

    return in_shard(
        shard,
        Path(out),
        opened=partial(request.open, code=code, reopen=True),
        begin=begin,
        compute=compute,
        finish=lambda writer: request.finish(writer, progress=False),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Everything that determines the numbers of a patch."""

    runs: "RunPair"
    grid: list[Part]
    pair: PromptPair
    config: PatchConfig
    put: MakesEdit | str | None
    given: tuple[Edit, ...]
    controls: list[list[Part]]
    approximations: list[float] | None
    own_metric: Metric | Callable[[Outcome], Any] | None
    """The metric that was given, if not by its name."""

    def code(self) -> dict[str, Any]:
        """Hashes of the functions that were given: what a run that goes on trusts of them."""
        found: dict[str, Any] = {"metric": metric_config(self.own_metric)} if self.own_metric is not None else {}
        found |= {"put": code_of(self.put)} if callable(self.put) else {}
        return found | ({"edits": [code_of(one) for one in self.given]} if self.given else {})

    def open(self, folder: Path, *, code: Mapping[str, Any], **how: Any) -> RunWriter:
        """Open the run folder of the patch, or of a part of it."""
        own: dict[str, Any] = {"code": code} if code else {}
        own |= {"put": label_of(self.put)} if callable(self.put) else {}
        own |= {"edits": [one.label for one in self.given]} if self.given else {}
        lens, metric = self.runs.lens, self.runs.metric
        return open_run(folder, lens, self.pair, config=self.config, metric=metric, own=own, **how)

    def measure(self, kept: Kept | None, *, progress: bool) -> dict[str, Measured]:
        """Measure all patches, or those that are kept here."""
        make = self.put if callable(self.put) else self.runs.maker(self.config)
        every = {identity_of(part): part for parts in (self.grid, *self.controls) for part in parts}
        return self.runs.measure(every, make=make, kept=kept, batch_size=self.config.batch_size, progress=progress)

    def result(self, kept: Kept | None, *, progress: bool) -> PatchResult:
        """Measure all patches that are not kept, and make the table."""
        config = self.config
        result = _result(
            self.runs,
            self.measure(kept, progress=progress),
            pair=self.pair,
            by=config.by,
            direction=config.direction,
            grid=self.grid,
            controls=self.controls,
            seed=config.seed,
        )
        if self.approximations is not None:
            result.frame["approximation"] = self.approximations
        return result

    def finish(self, writer: RunWriter, *, progress: bool) -> PatchResult:
        """Measure what the folder lacks, and write the tables."""
        result = self.result(Kept(writer), progress=progress)
        write_result(writer, result)
        return replace(result, folder=writer.folder)


def _request(
    model: ModelLike,
    clean: Sequences | None,
    corrupted: Sequences | None,
    *,
    metric: Metric | Callable[[Outcome], Any] | str | None,
    put: MakesEdit | str | None,
    edits: Sequence[Edit] | Edit,
    config: PatchConfig | None,
    fields: Mapping[str, Any],
) -> _Request:
    """Collect everything that determines the numbers; both runs are made, and effects are screened."""
    lens = as_lens(model)
    named: dict[str, Any] = {"put": put} if isinstance(put, str) else {}
    settings = patch_config(config, lens=lens, metric=metric, fields={**fields, **named})
    if settings.approximate:
        raise InputError("approximate was given to patch, which makes real patches; call attribution_patch")
    settings.check_together()
    if not callable(put):
        check_put(settings)
    given = (edits,) if isinstance(edits, Edit) else tuple(edits)
    if given and settings.screen:
        raise InputError("screen approximates patches of the unedited model; leave out screen, or edits")
    if settings.screen and (settings.put != "source" or callable(put)):
        raise InputError("screen approximates patches from the other run; leave out screen, or put")
    runs, grid, pair = prepare_runs(
        lens, clean, corrupted, metric=metric, config=settings, edits=given, own_put=callable(put)
    )
    approximations = None
    if settings.screen:
        grid, approximations = _screen_cells(runs, grid, most=settings.screen, steps=settings.steps)
    at: dict[str, Any] = {"sizes": runs.sizes, "shortest": int(runs.run.lengths.min())}
    return _Request(
        runs=runs,
        grid=grid,
        pair=pair,
        config=settings,
        put=put,
        given=given,
        controls=[drawn_parts(part, **at, draws=settings.controls, seed=settings.seed) for part in grid],
        approximations=approximations,
        own_metric=None if isinstance(metric, str) else metric,
    )


def _screen_cells(runs: "RunPair", grid: Sequence[Part], *, most: int, steps: int) -> tuple[list[Part], list[float]]:
    """The cells with the largest effects to first order, in the order of the grid, and these effects."""
    found = first_order(runs, grid, steps=steps).double()
    by_sequence = len(runs.baseline) == runs.run.n_sequences
    effects = found[:, ~runs.baseline.isnan()].nanmean(1) if by_sequence else found.sum(1)
    best = sorted(effects.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)[:most].tolist())
    return [grid[number] for number in best], effects[best].tolist()


def patch_config(
    config: PatchConfig | None,
    *,
    lens: LensModel,
    metric: Metric | Callable[[Outcome], Any] | str | None,
    fields: Mapping[str, Any],
) -> PatchConfig:
    """The configuration of a call, from another one and from fields, which win.

    Raises:
        InputError: an unknown field, or a value that cannot be used.
    """
    named = {"metric": metric} if isinstance(metric, str) else {}
    return with_fields(PatchConfig, config, {**named, **fields, "model": lens.name}, where="patch")


def prepare_runs(
    lens: LensModel,
    clean: Sequences | None,
    corrupted: Sequences | None,
    *,
    metric: Metric | Callable[[Outcome], Any] | str | None,
    config: PatchConfig,
    edits: tuple[Edit, ...] = (),
    own_put: bool = False,
) -> tuple["RunPair", list[Part], PromptPair]:
    """The two runs of a sweep, its cells, and the pair of sequences; the arguments are those of ``patch``.

    ``own_put`` says that a function makes the edit that is put in, so that the other run's values are not.
    """
    clean = config.clean if clean is None else clean
    corrupted = config.corrupted if corrupted is None else corrupted
    for texts in (clean, corrupted):
        if isinstance(texts, tuple) and not texts:
            raise InputError("patching needs two texts with the same number of tokens; give clean and corrupted")
    pair = pair_prompts(lens, clean, corrupted, bos=config.bos)
    is_source = config.put == "source" and not own_put
    if is_source:
        check_differ(not pair.differences.empty)
    run, source = pair.run_and_source(config.direction)
    read = named_metric(lens, pair, config=config) if metric is None or isinstance(metric, str) else metric
    read = on_tokens(read, pair.clean, pair.corrupted)
    measured = as_metric(read, lens=lens, n_positions=run.n_positions)
    chosen = {name: getattr(config, name) for name in ("layers", "positions", "heads", "keys", "units")}
    grid = cells(lens, config.site, by=config.by, n_positions=run.n_positions, **chosen)
    return (
        RunPair.of(lens, run, source, site=config.site, metric=measured, grid=grid, edits=edits, is_source=is_source),
        grid,
        pair,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """The baseline run and the source run of a sweep."""

    lens: LensModel
    run: TokenBatch
    """The sequences that are patched."""
    other: TokenBatch
    """The sequences of the source run."""
    site: str
    metric: Metric
    baseline: Float[Tensor, " sample"]
    source: Float[Tensor, " sample"]
    """The metric of both runs."""
    held: Mapping[tuple[str, int], Tensor]
    """The site in the baseline run."""
    given: Mapping[tuple[str, int], Tensor]
    """The site in the source run."""
    edits: tuple[Edit, ...] = ()
    """What is changed in both runs, and beside every patch."""

    @classmethod
    def of(
        cls,
        lens: LensModel,
        run: TokenBatch,
        source: TokenBatch,
        *,
        site: str,
        metric: Metric,
        grid: Sequence[Part],
        edits: tuple[Edit, ...] = (),
        is_source: bool = True,
    ) -> "RunPair":
        """Run both; warn if their values at the site are equal and those of the source are put in."""
        layers = sorted({layer for part in grid for layer in part.layers or ()})
        options: dict[str, Any] = {"layers": layers, "loss": False, "logits": not SITES[site].per_layer}
        one_run = metric.layers == () and not metric.sites  # the metric reads no layer, so that it may see others
        if one_run:
            options |= {"positions": metric.positions, "loss": metric.loss, "logits": metric.logits}
        runs = [run_with(lens, tokens, edits, sites=(site,), **options) for tokens in (run, source)]
        held, given = (one.tensors for one in runs)
        if not one_run:
            runs = [run_for_metric(lens, tokens, metric=metric, edits=edits) for tokens in (run, source)]
        baseline, wanted = (evaluate(metric, one) for one in runs)
        if is_source and all(torch.equal(held[key], given[key]) for key in given):
            warnings.warn(
                f"the clean and the corrupted run have the same {site}: patching it changes nothing", stacklevel=3
            )
        return cls(
            lens=lens,
            run=run,
            other=source,
            site=site,
            metric=metric,
            baseline=baseline,
            source=wanted,
            held=held,
            given=given,
            edits=edits,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the site's axes after the sequence axis."""
        return tuple(next(iter(self.held.values())).shape[1:])

    def changes(self, part: Part) -> bool:
        """Check whether patching a part can change the metric: its values differ, and the metric reads what follows."""
        return self.reads(part) and self.differs(part)

    def reads(self, part: Part) -> bool:
        """Check whether the metric reads something that comes after a part."""
        return self.metric.whole or max(self.metric.over(self.lens.n_layers)) >= min(part.layers or (0,))

    def differs(self, part: Part) -> bool:
        """Check whether the two runs have different values in a part."""
        return differs(part, run=self.held, source=self.given)

    def defined(self, part: Part, values: Float[Tensor, " sample"]) -> Float[Tensor, " sample"]:
        """A copy of numbers by sequence, nan where a sequence is too short to have the part."""
        short = self.run.lengths < open_whole_axes(part, sizes=self.sizes).tokens
        return values.masked_fill(short if len(values) == len(short) else short.any(), torch.nan)

    def maker(self, config: PatchConfig) -> MakesEdit | None:
        """Return the maker of the edit that a configuration names; None puts in the values of the source run."""
        if config.put == "source":
            return None
        references = References(self.lens, self.run, known=self.held)

        def make(site: str, **where: Unpack[Where]) -> Edit:
            """The edit of a part."""
            return put_spec(config, Part.at(site, where)).edit(references)

        return make

    def measure(
        self,
        parts: Mapping[str, Part],
        *,
        make: MakesEdit | None = None,
        kept: Kept | None = None,
        batch_size: int | None = None,
        progress: bool = False,
    ) -> dict[str, Measured]:
        """The metric under each patch, by sequence, and whether it changed anything.

        Args:
            parts: identity -> part.
            make: makes the edit of a part; None puts in the values of the source run.
            kept: what an interrupted run has measured, to which each block of patches is added.
            batch_size: sequences per forward pass.
            progress: show a bar.
        """
        found = {
            name: Measured(values=self.defined(part, self.baseline), changed=False) for name, part in parts.items()
        }
        able = self.changes if make is None else self.reads
        todo = [part for part in parts.values() if able(part)]
        if make is None:
            at: dict[str, Any] = {"run": self.held, "source": self.given}
            patches = [cell_of_patch(part, edits=self.edits, **at) for part in todo]
        else:
            at = {"sizes": self.sizes, "make": make}
            patches = [cell_of_edit(part, edits=self.edits, **at) for part in todo]
        if not patches:
            return found
        engine = self._engine(patches, kept=kept, batch_size=batch_size)
        blocks = engine.blocks if kept is None else kept.of(engine.blocks)
        rows: list[Row] = []

        def take(number: int, outcome: Outcome, changed: list[bool]) -> None:
            """Keep a patch's metric by sequence."""
            values, did = evaluate(self.metric, outcome).tolist(), make is None or changed[-1]
            first = 0 if self._is_whole else outcome.sequences.start
            rows.extend((identity_of(todo[number]), first + place, value, did) for place, value in enumerate(values))

        with tqdm(
            total=sum(len(block.cells) for block in blocks),
            desc=f"patching {self.site}",
            unit="patch",
            disable=not progress,
            leave=False,
        ) as bar:
            for block in blocks:
                before = None if kept is None else kept.read(block.number)
                if before is None:
                    engine.map(block, take, advance=bar.update)
                    if kept is not None:
                        kept.add(block.number, rows)
                else:
                    rows.extend(before)
                    bar.update(len(block.cells))
                for name, sequence, value, did in rows:
                    if not found[name].values[sequence].isnan():  # the sequence has the part, and a metric
                        found[name].values[sequence] = value
                    found[name].changed |= bool(did)
                rows.clear()
        return found

    @property
    def _is_whole(self) -> bool:
        """Check whether the metric gives one number for all sequences."""
        return len(self.baseline) != self.run.n_sequences

    def _engine(self, patches: Sequence[Cell], *, kept: Kept | None, batch_size: int | None) -> Engine:
        """The engine of patches, by the plan that an interrupted run began with if there is one."""
        plan = None if kept is None else kept.plan
        if plan is not None:
            return Engine(self.lens, self.run, patches, [self.metric], plan=plan)
        options = {} if kept is None else {"keep_plan": kept.keep_plan}
        whole = self._is_whole
        return make_engine(self.lens, self.run, patches, [self.metric], batch_size=batch_size, whole=whole, **options)


def run_for_metric(lens: LensModel, tokens: TokenBatch, *, metric: Metric, edits: Sequence[Edit] = ()) -> Outcome:
    """Run the model, with edits if any are given, and keep what a metric reads."""
    return run_with(
        lens,
        tokens,
        edits,
        positions=metric.positions,
        layers=metric.over(lens.n_layers) or (lens.n_layers - 1,),
        sites=metric.sites,
        loss=metric.loss,
        logits=metric.logits or (metric.whole and not metric.loss),
    )


def _result(
    runs: RunPair,
    found: Mapping[str, Measured],
    *,
    pair: PromptPair,
    by: tuple[str, ...],
    direction: Direction,
    grid: Sequence[Part],
    controls: Sequence[Sequence[Part]],
    seed: int,
) -> PatchResult:
    """The result from the metric of every patch and control."""
    values = torch.stack([found[identity_of(part)].values for part in grid]) if grid else runs.baseline.repeat(0, 1)
    before = runs.baseline.double().numpy()
    drawn = [[found[identity_of(part)].values.double().numpy() for part in some] for some in controls]
    effects = effect_table(
        values.double().numpy(),
        before,
        controls=[np.array(some).reshape(-1, len(before)) for some in drawn],
        generator=np.random.default_rng(seed),
    )
    baseline, source = (float(one.double().nanmean()) for one in (runs.baseline, runs.source))
    apart = (runs.source.double() - runs.baseline.double()).expand(values.shape)
    spans = apart.masked_fill(values.isnan(), torch.nan).nanmean(1).numpy()
    frame = pd.DataFrame([index_of(part, by) for part in grid], columns=list(by), index=range(len(grid)))
    frame = frame.join(effects)
    frame.insert(
        frame.columns.get_loc("n"),  # type: ignore[arg-type]  # one column has this name
        "normalised_effect",
        frame["effect"] / np.where(spans == 0, np.nan, spans),
    )
    frame.insert(frame.columns.get_loc("n"), "changed", [found[identity_of(part)].changed for part in grid])  # type: ignore[arg-type]
    every = torch.cat([runs.baseline[None], runs.source[None], values]).double()
    return PatchResult(
        frame=frame,
        site=runs.site,
        metric=runs.metric.name,
        unit=runs.metric.unit,
        direction=direction,
        by=by,
        baseline=baseline,
        source=source,
        values=values.double(),
        baselines=every[:2],
        differences=pair.differences,
        labels=pair.labels,
    )

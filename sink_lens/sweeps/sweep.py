"""``sweep``: the blocks of a grid computed, written as they are finished, and made into a table.

A stopped sweep goes on where it was; ``plan.json`` keeps how the cells share forwards, and so the same numbers.
"""

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..activations.forward import resolve
from ..configuration import make_config, refuse_unknown_names
from ..data.tokens import Prompts, TokenBatch, as_batch, warn_of_copies
from ..edits.mean_ablation import tokens_to_average
from ..edits.named_metrics import import_metric
from ..engine.engine import VALUES, Block, Engine
from ..engine.function_identity import function_hash
from ..engine.measured import Measured, metric_config, resolve_metrics
from ..engine.plan import read_plan
from ..engine.trust import make_engine
from ..errors import InputError, RunError
from ..estimate import max_n_tokens
from ..models.bundled import find_header
from ..models.inputs import check_sequences, describe_provenance
from ..models.lens import LensModel
from ..models.load import ModelLike
from ..progress import tqdm
from ..records import RunWriter, create_run, default_run_folder, place_of_run
from ..records.reading import damaged_file_error, read_columns
from ..records.recomputed import FEW, MOST, compute_until_equal, refuse_other_numbers, sample_parts
from ..records.shards import check_shard, compute_run, process_name
from ..schema import MEANS, table_of
from ..signatures import takes
from . import words
from .cells import Cells, Swept, What, cells_of, grid_or_cells, in_texts
from .cluster import Job, check_engine, run_on_ray
from .config import SweepConfig
from .grid import EditGrid, Grid
from .results import SweepResult, effect_tables, mask_short_sequences, values_by_cell

log = logging.getLogger(__name__)

_OF_CALL = ("controls", "seed", "least_effect", "engine", "workers", "retry_failed")
"""Fields of a configuration that mean something beside given tokens."""
FILES = ("plan", "baseline", "cells", "controls", "values")


@takes(SweepConfig, leave_out=("grid",), table=partial(table_of, "sweep", "cells"))
def sweep(
    model: ModelLike,
    what: Swept | None = None,
    *,
    tokens: Prompts | None = None,
    metrics: Sequence[Measured] | Measured = (),
    config: SweepConfig | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> SweepResult:
    """Run a model with the edits of each cell of a grid, and measure what each does to the metrics.

    Cost: a pass for the baseline, and at most one for each cell and for each of its random controls, from its first
    edited layer to the last tensor that a metric reads: ``cells * (1 + controls)``.

    The same call on a folder that holds part of the sweep computes the rest; on one that holds all of it, nothing. It
    first computes the baseline and one cell of each of four blocks again (of 32 blocks, for cells of your own), and
    refuses the folder if they differ.

    With ``shard`` each of several processes or machines computes a part of the cells, all in one folder and in any
    order. A shard that was killed goes on where it was, one that is done does nothing, and the one that ends last makes
    the tables; the result of the others is not ``finished``. Without ``shard`` the same call takes what the shards have
    done and computes the rest.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        what: edits, of which one such as ``edits.zero("z", heads="each")`` is a cell for each head; a grid, or cells of
            your own (``cell_of``); the configuration's grid if None.
        tokens: the sequences, or texts, instead of those that the configuration describes.
        metrics: the metrics to read from each cell, each a name with options (``MetricSpec``), one of
            ``sink_lens.edits.metrics``, or a function of the ``logits`` or of an ``Outcome`` (``metrics.on_outcome``).
            A function gets texts of one length at a time, without padding. If there are none, those of the
            configuration, by default the attention to position 0.
        config: a whole sweep, as ``read_sweep(path)`` reads one.
        out: the run folder; nothing is written if None. All shards need the same one.
        shard: ``3/8`` is the third of eight; ``slurm`` is the task of the array job that this process is.
        overwrite: replace the run in the folder.
        progress: show a progress bar.
        **fields: fields of ``SweepConfig``, such as ``seed=1`` or ``engine="ray"``; they win over those of ``config``.

    Raises:
        InputError: a grid, metric, engine or shard that cannot be used.
        RunError: the folder is in use, or holds another sweep (other cells, metrics, weights, tokens or versions) or
            another division into shards.
    """
    check_shard(shard, out=out, overwrite=overwrite)
    asked = _collect_request(
        model, what, tokens=tokens, metrics=metrics, config=config, fields=fields
    )
    how = asked.how
    check_engine(how.engine, workers=how.workers)
    made: list[tuple[Job, Engine]] = []

    def begin(writer: RunWriter) -> dict[str, int]:
        made.append(asked.begin(writer))
        return {block.name: len(block.cells) for block in made[0][1].blocks}

    def check(folder: Path, parts: Collection[str]) -> None:
        _check_blocks(folder, made[0][1], parts, most=FEW if isinstance(asked.what, Grid) else MOST)

    def compute(writer: RunWriter, parts: Collection[str]) -> None:
        job, own = made[0]
        blocks = [block for block in own.blocks if block.name in parts]
        _run_blocks(writer, job, own, blocks, how=how, progress=progress)

    def finish(writer: RunWriter) -> SweepResult:
        if shard is None:
            compute(writer, [block.name for block in made[0][1].blocks])
        return asked.finish(writer, made[0][1])

    with place_of_run(out, name=asked.lens.name) as place:
        found = compute_run(
            place.folder,
            shard=shard,
            overwrite=overwrite,
            open_run=asked.open,
            begin=begin,
            check=check,
            compute=compute,
            finish=finish,
        )
        if found is None:
            return SweepResult.unfinished(place.folder, shard=str(shard))
    return replace(found, folder=place.named, place=place)


def run_sweep(config: SweepConfig, *, out: Path | None, **how: Any) -> SweepResult:
    folder = default_run_folder(config.model) if out is None else out
    return sweep(config.model, config=config, out=folder, **how)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A call of ``sweep`` with its model loaded and its arguments checked: all that determines the numbers."""

    lens: LensModel
    what: What
    batch: TokenBatch
    metrics: list[Measured]
    how: SweepConfig
    """Seed, what the page counts as a change, and where the blocks are computed."""

    def open(self, folder: Path, *, part: Mapping[str, Any] | None = None, **how: Any) -> RunWriter:
        return create_run(
            folder,
            kind="sweep",
            config=self.config | dict(part or {}),
            provenance=self.provenance | ({"holder": process_name()} if part else {}),
            expects=() if part else FILES,
            reopen=True,
            recomputes=True,
            **how,
        )

    def begin(self, writer: RunWriter) -> tuple[Job, Engine]:
        """Return what Ray's workers and this process compute blocks with; write the plan and the baseline run's table.

        The plan says how cells share forwards; one that the folder has is used again.
        """
        to_run = self.cells.every
        metrics = resolve_metrics(self.metrics, self.lens, tokens=self.batch)
        if writer.has("plan"):
            plan = read_plan(writer.folder / "plan.json")
        else:
            writer.clear()  # blocks without a plan were made by a plan that is lost
            plan = make_engine(self.lens, self.batch, to_run, metrics).plan
            writer.write_text("plan.json", plan.as_json())
        job = Job(
            model=self.lens.name,
            provenance=self.provenance,
            tokens=self.batch,
            what=self.what if isinstance(self.what, Grid) else tuple(self.what),
            metrics=tuple(self.metrics),
            plan=plan,
            controls=self.how.grid.controls,
            seed=self.how.seed,
        )
        own = job.make_engine(self.lens, to_run)
        own.check_metrics()
        baseline = own.baseline_metrics()
        if writer.has("baseline"):
            held = writer.read("baseline", columns=("value",))
            refuse_other_numbers(
                writer.folder, held["value"], baseline["value"], what="a metric of the baseline"
            )
        else:
            writer.write_table("baseline", baseline)
        return replace(job, baseline=baseline["value"].tolist()), own

    def finish(self, writer: RunWriter, own: Engine) -> SweepResult:
        blocks = [_read_block(writer.folder, block) for block in own.blocks]
        numbers = pd.concat(blocks, ignore_index=True)
        numbers = mask_short_sequences(numbers, self.cells, tokens=self.batch)
        frame, drawn = effect_tables(
            self.cells,
            numbers,
            writer.read("baseline", columns=("sequence", "metric", "value")),
            metrics=own.metrics,
            generator=np.random.default_rng(self.how.seed),
        )
        least = self.how.least_effect
        said = words.sweep_sentences(frame, least=least, means=self.mean_sentences)
        result = SweepResult(
            folder=writer.folder,
            tables={
                "cells": frame,
                "controls": drawn,
                "values": values_by_cell(numbers, n=self.cells.n),
            },
            headline="\n".join([f"{words.sweep_title(frame, least=least)}.", *said]),
        )
        for name, table in result.tables.items():
            writer.write_table(name, table)
        with contextlib.suppress(RunError):  # nothing was swept over numbers: there is no figure
            from ..report.style import figure_bytes

            writer.write_bytes("effects.png", figure_bytes(result.figure(), "png"))
        for row in result.failed.head(3).to_dict("records"):
            log.info("failed: %s: %s", words.cell_name(row), row["error"])
        return result

    @cached_property
    def config(self) -> dict[str, Any]:
        if isinstance(self.what, Grid):
            own: dict[str, Any] = {"grid": self.what.config()}
        else:
            own = {
                "grid": [one.identity for one in self.what],
                "code": function_hash([edit.change for one in self.what for edit in one.edits]),
                "controls": self.how.grid.controls,
            }
        metrics = [metric_config(one) for one in self.metrics]
        return own | {"metrics": metrics, "interval_seed": self.how.seed}

    @cached_property
    def cells(self) -> Cells:
        return cells_of(
            self.what, self.lens, self.batch, controls=self.how.grid.controls, seed=self.how.seed
        )

    @cached_property
    def provenance(self) -> dict[str, Any]:
        found = describe_provenance(self.lens, self.batch, kernel="eager")
        found |= {"means": self.mean_sentences} if self.mean_sentences else {}
        seeds = {"tokens": self.batch.seed, "bootstrap": self.how.seed}
        return found | {"seeds": seeds, "least_effect": self.how.least_effect}

    @cached_property
    def mean_sentences(self) -> list[str]:
        kinds = {one.kind for one in self.what.edits} if isinstance(self.what, Grid) else set()
        return [
            tokens_to_average(self.lens, self.batch, mean).words for mean in MEANS if mean in kinds
        ]


def _run_blocks(
    writer: RunWriter,
    job: Job,
    own: Engine,
    blocks: Sequence[Block],
    *,
    how: SweepConfig,
    progress: bool,
) -> None:
    """Compute and write the ``blocks`` that the folder lacks, here by ``own`` or on a cluster by ``job``."""
    todo = [
        block
        for block in blocks
        if not writer.has(block.name)
        or (how.retry_failed and bool(_read_block(writer.folder, block)["error"].notna().any()))
    ]
    total, left = (sum(len(block.cells) for block in some) for some in (blocks, todo))
    with tqdm(
        total=total,
        initial=total - left,
        desc="sweep",
        unit="cell",
        disable=not progress,
        leave=False,
        mininterval=0.5,
    ) as bar:
        if how.engine == "ray":
            on_gpu = own.lens.device.type == "cuda"
            computed = run_on_ray(job, todo, workers=how.workers, on_gpu=on_gpu, advance=bar.update)
        else:
            computed = ((block, own.run(block, advance=bar.update)) for block in todo)
        with contextlib.closing(computed):
            for block, frame in computed:
                writer.write_table(block.name, frame)


def _collect_request(
    model: ModelLike,
    what: Swept | None,
    *,
    tokens: Prompts | None,
    metrics: Sequence[Measured] | Measured,
    config: SweepConfig | None,
    fields: Mapping[str, Any],
) -> _Request:
    given = list(metrics) if isinstance(metrics, Sequence) else [metrics]
    texts = (
        [tokens] if isinstance(tokens, str) else tokens if isinstance(tokens, Sequence) else None
    )
    batch = None if tokens is None or texts is not None else as_batch(tokens)
    if what is None and config is None:
        raise InputError("a sweep needs a grid, or cells, or a configuration with a grid")
    if what is not None and config is not None:
        raise InputError(
            "a configuration and a grid were given; the configuration has its own: leave one out"
        )
    if tokens is not None:
        known = _OF_CALL if texts is None else (*_OF_CALL, "bos")
        refuse_unknown_names(fields, known, where="a sweep of given tokens")
    what = None if what is None else grid_or_cells(what)
    of = config.grid if config is not None else what
    if not isinstance(of, Grid):  # cells of one's own say themselves
        of = Grid.of(EditGrid(site="z"))
    if "seed" in fields:  # it draws the controls
        of = replace(of, seed=fields["seed"])
    named = isinstance(model, str | Path)
    name = {"model": str(model)} if named else {}
    how = make_config(SweepConfig, config, {**fields, "grid": of, **name}, where="sweep")
    what = how.grid if what is None or isinstance(what, Grid) else what
    header = None
    if named:
        header = check_sequences(how) if tokens is None else find_header(how.model)
    if header is not None and isinstance(what, Grid):  # before the weights are read
        longest = max_n_tokens(some) if (some := texts or how.prompts) else how.length
        what.n_cells(header, n_positions=longest if batch is None else batch.n_positions)
        for metric in () if given else how.metrics:
            metric.last_layer(header)
    lens, batch = resolve(model, tokens, config=how, bos="auto" if texts is None else how.bos)
    warn_of_copies(batch, what="sequences")
    given = given or [import_metric(one.name) if ":" in one.name else one for one in how.metrics]
    what = in_texts(what, batch)
    return _Request(lens=lens, what=what, batch=batch, metrics=given, how=how)


def _read_block(folder: Path, block: Block) -> pd.DataFrame:
    path = folder / f"{block.name}.parquet"
    found = read_columns(path, VALUES, kind="sweep")
    if not set(found["cell"].tolist()) <= set(block.cells):
        raise damaged_file_error(path, ValueError("it holds cells of another block"))
    return found


def _check_blocks(folder: Path, own: Engine, parts: Collection[str], *, most: int) -> None:
    by_name = {block.name: block for block in own.blocks}
    for name in sample_parts(list(parts), most=most):
        block = by_name[name]
        held = _read_block(folder, block)
        able = held.loc[held["error"].isna() & held["value"].notna(), "cell"]
        if able.empty:
            continue
        cell = int(able.iloc[0])
        there = held.loc[held["cell"] == cell].sort_values(["metric", "sequence"])["value"]

        def again(block: Block = block, cell: int = cell, **how: bool) -> pd.DataFrame:
            return own.run_cell(block, cell, **how).sort_values(["metric", "sequence"])

        here = compute_until_equal(
            there, partial(again, alone=True), again, numbers=lambda frame: frame["value"]
        )
        if errors := here["error"].dropna().tolist():
            raise RunError(f"cell {cell} of {folder}, which is finished, fails now: {errors[0]}")
        refuse_other_numbers(folder, there, here["value"], what=f"a metric of cell {cell}")

"""``sweep``: the blocks of a grid computed, written as they are finished, and made into a table.

The run folder holds a part for each finished block, so that a run that was stopped goes on where it was: the same
call on the same folder. ``plan.json`` keeps how the cells share forwards, so that the numbers are the same too.
"""

import contextlib
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import RenderableType
from tqdm.auto import tqdm

from ..activations.forward import check_tokens
from ..data.tokens import TokenBatch
from ..edits.metrics import Metric
from ..errors import InputError, RunError
from ..models.inputs import default_folder, model_of, provenance_of, tokens_of
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..records import RunWriter, create_run, display
from .cluster import Blocks, Job, check_engine, distinct, here, processes, ray_cluster
from .config import SweepConfig
from .engine import Block, Engine
from .estimate import cost_of, estimate
from .grid import Cell, Grid
from .needs import Needs
from .plan import Mode, Plan, check_mode, plan_of
from .reads import Measured, MetricSpec, measured, metric_config
from .results import SweepResult, by_cell, failed_cells, named, tables
from .threads import can_copy

log = logging.getLogger(__name__)

FILES = ("plan", "baseline", "cells", "controls", "values")
FAST_TOLERANCE = 1e-5
"""How far fast mode may be from the bridge, of the largest magnitude among a metric's numbers."""
_CHECKED = 3
"""Cells that are compared with passes of the bridge before the sweep begins."""


def sweep(
    model: ModelLike | SweepConfig,
    what: Grid | Sequence[Cell] | None = None,
    *,
    tokens: TokenBatch | None = None,
    metrics: Sequence[Measured] | Measured = (),
    mode: Mode | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    devices: Sequence[str] = (),
    workers: int | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: bool = True,
) -> SweepResult:
    """Edit a model in every cell of a grid and read the metrics of each.

    The same call on a folder that holds part of the sweep computes the rest; on one that holds all of it, nothing.

    Args:
        model: what ``load`` takes, a ``LensModel``, or a configuration (``read_sweep(path)``), which says everything
            but where and how.
        what: a grid, or cells of one's own (``cell_of``); None where a configuration is given.
        tokens: the sequences; those of the configuration if None.
        metrics: what is read of each cell; attention to position 0 if none is given.
        mode: exact (if None) or fast, see ``sweep.engine``; a configuration has its own.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        engine: local, or ray (``pip install 'sink-lens[ray]'``).
        devices: local only: one process for each, such as ``("cuda:0", "cuda:1")``; this process if there is at most
            one.
        workers: ray only: how many; one for each GPU of the cluster if None.
        seed: of the intervals, 0 if None; a configuration has its own.
        overwrite: replace the run that the folder holds.
        retry_failed: compute the cells again that failed.
        progress: show a bar.

    Raises:
        InputError: a grid, metric, mode or engine that cannot be used.
        RunError: the folder is in use, or holds another sweep: other cells, metrics, weights, tokens or versions.
    """
    lens, what, batch, given, mode, seed = _asked(model, what, tokens=tokens, metrics=metrics, mode=mode, seed=seed)
    check_engine(engine, devices=devices, workers=workers, what=what, metrics=given)
    read = measured(given, lens, n_positions=batch.n_positions)
    cells, controls = _cells(what, lens, batch)
    config = {
        "grid": _listed(what.config()) if isinstance(what, Grid) else [cell.identity for cell in cells],
        "metrics": [metric_config(one) for one in given],
        "mode": mode,
        "interval_seed": seed,
    }
    provenance = provenance_of(lens, batch, kernel="fused" if mode == "fast" else "eager")
    provenance["seeds"] = {"tokens": batch.seed, "bootstrap": seed}
    folder = Path(out) if out is not None else default_folder(lens.name)
    writer = create_run(
        folder, kind="sweep", config=config, provenance=provenance, expects=FILES, overwrite=overwrite, reopen=True
    )
    with writer:
        job = Job(
            model=lens.name,
            weights=str(provenance["weights_sha256"]),
            dtype=str(provenance["dtype"]),
            tokens=batch,
            what=what if isinstance(what, Grid) else tuple(cells),
            metrics=tuple(given),
            plan=_plan(writer, lens, batch, distinct(cells, controls), read, mode=mode),
        )
        own = job.engine(lens, distinct(cells, controls))
        todo = [left for block in own.blocks if (left := _left(writer, block, retry_failed=retry_failed)) is not None]
        if not writer.has("baseline"):
            writer.write_table("baseline", own.baseline())
        total = sum(len(block.cells) for block in own.blocks)
        done = total - sum(len(block.cells) for block in todo)
        with tqdm(
            total=total, initial=done, desc="sweep", unit="cell", disable=not progress, leave=False, mininterval=0.5
        ) as bar:
            computed = _computed(job, own, todo, engine=engine, devices=devices, workers=workers, bar=bar)
            with contextlib.closing(computed):
                for block, frame in computed:
                    writer.write_table(_part(block), _joined(writer, block, frame))
        return _finished(
            writer,
            own,
            cells,
            controls,
            most_controls=what.controls if isinstance(what, Grid) else 0,
            generator=np.random.default_rng(seed),
        )


def dry_run(
    model: ModelLike | SweepConfig,
    what: Grid | Sequence[Cell] | None = None,
    *,
    tokens: TokenBatch | None = None,
    metrics: Sequence[Measured] | Measured = (),
    mode: Mode | None = None,
) -> RenderableType:
    """What ``sweep`` would take with these arguments, as a person reads it; loads the model, and writes nothing.

    Raises:
        InputError: what ``sweep`` would refuse.
    """
    lens, what, batch, given, mode, _ = _asked(model, what, tokens=tokens, metrics=metrics, mode=mode, seed=None)
    if not isinstance(what, Grid):
        _cells(what, lens, batch)
    read = measured(given, lens, n_positions=batch.n_positions)

    def check(cells: Sequence[Cell], plan: Plan) -> Plan:
        return checked(lens, batch, cells, read, plan=plan)[0]

    return estimate(cost_of(lens, batch, what, read, mode=mode, check=check))


def _asked(
    model: ModelLike | SweepConfig,
    what: Grid | Sequence[Cell] | None,
    *,
    tokens: TokenBatch | None,
    metrics: Sequence[Measured] | Measured,
    mode: Mode | None,
    seed: int | None,
) -> tuple[LensModel, Grid | Sequence[Cell], TokenBatch, list[Measured], Mode, int]:
    """Everything that decides the numbers, from a model or from a configuration."""
    given = list(metrics) if isinstance(metrics, Sequence) else [metrics]
    if isinstance(model, SweepConfig):
        for name, found in (("grid", what), ("mode", mode), ("seed", seed)):
            if found is not None:
                raise InputError(
                    f"a configuration and a {name} were given; the configuration has its own: leave one out"
                )
        lens = model_of(model)
        what, mode, seed = model.grid, model.mode, model.seed
        given = given or list(model.metrics)
        batch = tokens_of(lens, config=model, bos=model.bos) if tokens is None else tokens
    else:
        if what is None or tokens is None:
            raise InputError("a sweep of a loaded model needs a grid, or cells, and tokens")
        lens, batch, mode, seed = as_lens(model), tokens, mode or "exact", seed or 0
    check_mode(mode)
    check_tokens(lens, batch)
    return lens, what, batch, given or [MetricSpec(name="sink_mass")], mode, seed


def _cells(what: Grid | Sequence[Cell], lens: LensModel, batch: TokenBatch) -> tuple[list[Cell], list[Cell]]:
    if isinstance(what, Grid):
        return what.cells(lens, n_positions=batch.n_positions)
    cells = list(what)
    if not cells or len({cell.identity for cell in cells}) < len(cells):
        raise InputError("there are no cells, or two of one name and place; need different ones")
    return cells, []


def _listed(value: Any) -> Any:
    """A grid's values with every sequence, ranges too, as a list."""
    if isinstance(value, dict):
        return {name: _listed(entry) for name, entry in value.items()}
    return [_listed(entry) for entry in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _plan(
    writer: RunWriter,
    lens: LensModel,
    batch: TokenBatch,
    cells: Sequence[Cell],
    metrics: Sequence[Metric],
    *,
    mode: Mode,
) -> Plan:
    """How the sweep is cut: as it was, where it goes on; else by the memory there is, and checked."""
    if writer.has("plan"):
        found = json.loads((writer.folder / "plan.json").read_text(encoding="utf-8"))
        return Plan(**{name: found[name] for name in ("mode", "path", "prompts", "pack", "lanes") if name in found})
    writer.clear()  # blocks that are there all the same were cut by a plan that is gone
    plan = plan_of(lens, batch, Needs.of(metrics, lens=lens), mode=mode, n_cells=len(cells))
    plan, deviation = checked(lens, batch, cells, metrics, plan=plan)
    writer.write_text("plan.json", json.dumps(asdict(plan) | {"deviation": deviation}, indent=2) + "\n")
    return plan


def checked(
    lens: LensModel, batch: TokenBatch, cells: Sequence[Cell], metrics: Sequence[Metric], *, plan: Plan
) -> tuple[Plan, float]:
    """A plan whose numbers are those of the bridge for one cell at a time, and how far the worst of some cells is off.

    Exact mode on the CPU in float32 asks for equality: where forwards side by side differ, there is one at a time;
    where cells that share a forward differ, they share none; where the plain module differs, or may (see
    ``models.families``), the bridge is taken. Elsewhere, and in fast mode, ``FAST_TOLERANCE`` is asked for.
    """
    strict = plan.mode == "exact" and lens.device.type == "cpu" and lens.dtype == torch.float32
    if strict and not lens.family.same_products:
        plan = replace(plan, path="bridge")  # a few cells that are equal by chance would not speak for the others
    if plan.lanes > 1 and (plan.path == "bridge" or not can_copy(lens)):
        plan = replace(plan, lanes=1)
    order = list(
        dict.fromkeys(
            [
                plan,
                replace(plan, lanes=1),
                replace(plan, lanes=1, pack=1),
                replace(plan, lanes=1, path="bridge"),
                replace(plan, lanes=1, path="bridge", pack=1),
            ]
        )
    )
    worst = float("inf")
    for one in order:
        engine = Engine(lens, batch, cells, metrics, plan=one)
        worst = max(_deviation(engine), engine.pack_deviation() if strict else 0.0)
        if worst == 0 or (not strict and worst <= _allowed(engine, mode=plan.mode)):
            return one, worst
    last = order[-1]
    if plan.mode == "fast":
        warnings.warn(f"fast mode is off by {worst:.1e} on this model; exact mode is taken", stacklevel=4)
        return checked(lens, batch, cells, metrics, plan=replace(plan, mode="exact"))
    log.warning("cells that share a forward, or begin at a later layer, are off by %.1e on %s", worst, lens.device)
    return (order[0] if not strict else last), worst


def _deviation(engine: Engine) -> float:
    """Of the unedited run, and of a cell of each of a few different starts."""
    found = [engine.clean_deviation()]
    starts = {block.first: block for block in engine.blocks if block.first <= engine.lens.n_layers}
    for block in list(starts.values())[:: max(1, len(starts) // _CHECKED)][:_CHECKED]:
        number = block.cells[min(len(block.cells), engine.plan.pack) - 1]
        with contextlib.suppress(Exception):  # a cell that fails is recorded with its error when it is its turn
            found.append(engine.deviation(number))
    return max(found)


def _allowed(engine: Engine, *, mode: Mode) -> float:
    """What may differ: of the largest magnitude of the unedited numbers, or of 1 for an attention mass."""
    if mode == "exact" and engine.lens.dtype != torch.float32:
        return float("inf")  # half precision has no order of sums to keep to: the deviation is reported
    sizes = np.abs(engine.baseline()["value"].to_numpy(dtype=float))
    return FAST_TOLERANCE * max(1.0, float(np.nanmax(sizes, initial=0.0)))


def _computed(
    job: Job,
    own: Engine,
    todo: Sequence[Block],
    *,
    engine: str,
    devices: Sequence[str],
    workers: int | None,
    bar: Any,
) -> Blocks:
    if engine == "ray":
        on_gpu = own.lens.device.type == "cuda"
        return ray_cluster(job, todo, workers=workers, on_gpu=on_gpu, advance=bar.update)
    if len(devices) > 1:
        return processes(job, todo, devices=devices, advance=bar.update)
    return here(own, todo, advance=bar.update)


def _part(block: Block) -> str:
    return f"block-{block.number:06d}"


def _left(writer: RunWriter, block: Block, *, retry_failed: bool) -> Block | None:
    """What of a block has to be computed; None where nothing has."""
    if not writer.has(_part(block)):
        return block
    if retry_failed:
        found = _read(writer, block)
        failed = failed_cells(found)
        if failed:
            return replace(block, cells=tuple(cell for cell in block.cells if cell in failed))
    return None


def _read(writer: RunWriter, block: Block) -> pd.DataFrame:
    return pd.read_parquet(writer.folder / f"{_part(block)}.parquet")


def _joined(writer: RunWriter, block: Block, frame: pd.DataFrame) -> pd.DataFrame:
    """What was computed, and what was there already of the cells that were not computed again."""
    if not writer.has(_part(block)):
        return frame
    before = _read(writer, block)
    return pd.concat([before.loc[~before["cell"].isin(block.cells)], frame], ignore_index=True)


def _finished(
    writer: RunWriter,
    engine: Engine,
    cells: Sequence[Cell],
    controls: Sequence[Cell],
    *,
    most_controls: int,
    generator: np.random.Generator,
) -> SweepResult:
    """The tables of all blocks, written, and the result.

    They are written also where every block was there: a run that was stopped here has none of them, or old ones.
    """
    numbers = pd.concat([_read(writer, block) for block in engine.blocks], ignore_index=True)
    identities = [cell.identity for cell in engine.cells]
    numbers["cell"] = [identities[number] for number in numbers["cell"].tolist()]
    frame, drawn = tables(
        cells,
        controls,
        numbers,
        pd.read_parquet(writer.folder / "baseline.parquet"),
        metrics=engine.metrics,
        most_controls=most_controls,
        generator=generator,
    )
    values = by_cell(numbers, cells)
    result = SweepResult(
        folder=writer.folder, frame=frame, controls=drawn, values=values, headline=headline(frame, engine)
    )
    writer.write_table("cells", frame)
    writer.write_table("controls", drawn)
    writer.write_table("values", values)
    with contextlib.suppress(RunError):  # nothing was swept over numbers: there is no figure
        writer.write_bytes("effects.png", display.image(result.figure(), "png"))
    return result


def headline(frame: pd.DataFrame, engine: Engine) -> str:
    """How many cells, how many failed or changed nothing, and the strongest effect on each metric."""
    n, failed = len(set(frame["cell"].tolist())), len(failed_cells(frame))
    idle = frame["error"].isna().to_numpy(dtype=bool) & ~frame["changed"].to_numpy(dtype=bool)
    still = len(set(frame["cell"][idle].tolist()))
    said = f"{n:,} cells on {engine.tokens.n_sequences} sequences" + (f", {failed:,} failed" if failed else "")
    lines = [said + (f", {still:,} changed nothing that is read" if still else "")]
    for name in dict.fromkeys(frame["metric"].tolist()):
        rows = frame.loc[frame["metric"] == name]
        sizes = rows["effect"].abs().to_numpy()
        if not np.isnan(sizes).all():
            best = rows.iloc[int(np.nanargmax(sizes))].to_dict()
            line = f"{name}: {best['baseline']:.4g} without an edit; strongest {named(best)}: {best['effect']:+.4g}"
            if best["ci_low"] == best["ci_low"]:
                line += f" ({best['ci_low']:+.4g} to {best['ci_high']:+.4g})"
            if best["n_controls"]:
                line += f", {best['n_controls']} random controls {best['control_effect']:+.4g}"
            lines.append(line)
    return "\n".join(lines)

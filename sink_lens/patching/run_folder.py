"""The run folder of a patch: every block of patches as soon as it is measured, and the tables."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from ..edits.metrics import Metric
from ..engine.engine import Block
from ..engine.function_identity import function_hash
from ..engine.measured import metric_config
from ..engine.plan import read_plan
from ..models.inputs import describe_provenance
from ..models.lens import LensModel
from ..records import RunWriter, create_run, default_run_folder
from ..records.reading import read_columns
from ..records.recomputed import (
    FEW,
    compute_until_equal,
    keep_or_compare,
    refuse_other_numbers,
    sample_parts,
)
from ..records.shards import Shard, compute_run, process_name
from ..records.writing import goes_on_note
from .config import PatchConfig
from .pairs import PromptPair
from .parts import part_identity
from .patches import Patches, Row
from .request import PatchRequest
from .results import PatchResult, write_result
from .run_pair import RunPair

_ROW = ("part", "sequence", "value", "changed")


def patch_in_folder(
    request: PatchRequest,
    out: Path,
    *,
    shard: str | None,
    overwrite: bool,
    progress: bool,
    reopen: bool,
) -> PatchResult:
    """Measure the patches of one site (of a ``shard``, if given) that the run folder ``out`` lacks, and write it."""
    planned: list[Patches] = []

    def plan_patches(writer: RunWriter) -> dict[str, int]:
        held = writer.has("plan")
        patches = request.patches(read_plan(writer.folder / "plan.json") if held else None)
        if patches.engine is not None and not held:
            _write_plan(writer, patches)
        _keep_baseline(writer, request.runs)
        planned[:] = [patches]
        return {block.name: len(block.cells) for block in patches.blocks}

    def measure_blocks(
        writer: RunWriter, names: Collection[str], *, progress: bool = progress
    ) -> None:
        blocks = [block for block in planned[0].blocks if block.name in names]
        for name, rows in planned[0].measure(blocks, progress=progress):
            _write_block(writer, name, rows)

    def finish_run(writer: RunWriter) -> PatchResult:
        names = [block.name for block in planned[0].blocks]
        missing = [name for name in names if not writer.has(name)]
        measure_blocks(writer, missing, progress=progress and shard is None)
        tables = (writer.read(name, columns=_ROW) for name in names)
        rows = (
            row for table in tables for row in table[list(_ROW)].itertuples(index=False, name=None)
        )
        result = request.result(planned[0], rows)
        write_result(writer, result)
        return replace(result, folder=writer.folder)

    found = compute_run(
        out,
        shard=shard,
        overwrite=overwrite,
        open_run=partial(open_run, **request.asked, reopen=reopen),
        begin=plan_patches,
        check=lambda folder, names: _check_blocks(planned[0], folder, list(names)),
        compute=measure_blocks,
        finish=finish_run,
    )
    if found is not None:
        return found
    # other shards are still running
    nothing = replace(request, grid=[], controls=[], approximations=None)
    waits = Shard.parse(str(shard)).done_sentence(out)
    return replace(nothing.result(nothing.patches(), ()), folder=out, waits=waits)


def leave_unfinished(
    error: BaseException,
    opens: Callable[[Path], RunWriter],
    patches: Patches,
    rows: Mapping[str, Sequence[Row]],
) -> None:
    """Write measured blocks into a new folder, and say so in a note of the error."""
    if not rows:
        return
    folder = default_run_folder(patches.runs.lens.name)
    with opens(folder) as writer:
        _write_plan(writer, patches)
        _keep_baseline(writer, patches.runs)
        for name, of_block in rows.items():
            _write_block(writer, name, of_block)
        writer.leave_unfinished()
    error.add_note(goes_on_note(folder))


def _write_plan(writer: RunWriter, patches: Patches) -> None:
    assert patches.engine is not None
    writer.clear()
    writer.write_text("plan.json", patches.engine.plan.as_json())


def _keep_baseline(writer: RunWriter, runs: RunPair) -> None:
    keep_or_compare(
        writer,
        "baseline.json",
        {"baseline": runs.baseline.tolist(), "source": runs.source.tolist()},
    )


def _write_block(writer: RunWriter, name: str, rows: Sequence[Row]) -> None:
    writer.write_table(name, pd.DataFrame(rows, columns=list(_ROW)))


def _check_blocks(patches: Patches, folder: Path, names: Sequence[str]) -> None:
    """Measure one patch of some finished blocks again; refuse the folder if the metric differs."""
    engine = patches.engine
    assert engine is not None  # there are blocks
    numbers = {part_identity(part): number for number, part in enumerate(patches.able)}
    blocks = {block.name: block for block in engine.blocks}
    for name in sample_parts(names, most=FEW):
        held, block = read_columns(folder / f"{name}.parquet", _ROW, kind="patch"), blocks[name]
        able = held.loc[held["value"].notna() & held["part"].isin(list(numbers)), "part"]
        if able.empty:
            continue
        part = str(able.iloc[0])
        number = numbers[part]

        def values_in(block: Block, part: str = part) -> pd.Series:
            rows = pd.DataFrame(next(patches.measure([block]))[1], columns=list(_ROW))
            return rows.loc[rows["part"] == part].sort_values("sequence")["value"]

        there = held.loc[held["part"] == part].sort_values("sequence")["value"]
        here = compute_until_equal(
            there,
            partial(values_in, replace(block, cells=(number,))),
            lambda block=block, number=number: values_in(engine.pack_of(block, number)),
            numbers=lambda values: values,
        )
        refuse_other_numbers(folder, there, here, what=f"{patches.runs.metric.name} under a patch")


def open_run(
    out: str | Path,
    *,
    lens: LensModel,
    metric: Metric,
    pair: PromptPair,
    config: PatchConfig,
    part: Mapping[str, Any] | None = None,
    **how: Any,
) -> RunWriter:
    """Open the run folder of ``patch``: a new one, or one in which the same run was stopped.

    Functions and edits are recorded by name and by the hashes of what they do. ``part`` is the number of a shard.
    """
    provenance = describe_provenance(lens, pair.clean, kernel="eager")
    provenance |= {"corrupted_sha256": pair.corrupted.hash, "seeds": {"draws": config.seed}}
    if part:
        provenance["holder"] = process_name()
    asked = asdict(replace(config, metric="loss", put="source", edits=()))
    asked["metric_name"] = metric.name
    asked["metric"] = config.metric if isinstance(config.metric, str) else metric.name
    if config.pairs_file is not None:
        asked["pairs_sha256"] = sha256(Path(config.pairs_file).read_bytes()).hexdigest()
    asked |= {
        "put": config.put_name,
        "edits": [one.label for one in config.edits],
        "pair": [pair.clean.hash, pair.corrupted.hash],
    }
    code: dict[str, Any] = {}
    if config.metric is not None and not isinstance(config.metric, str):
        code["metric"] = metric_config(config.metric)
    if callable(config.put):
        code["put"] = function_hash(config.put)
    if config.edits:
        code["edits"] = [function_hash(one) for one in config.edits]
    if code:
        asked["code"] = code
    return create_run(
        Path(out),
        kind="patch",
        config=asked | dict(part or {}),
        provenance=provenance,
        expects=() if part else ("patches", "differences", "summary"),
        recomputes=True,
        **how,
    )

"""Shards: the parts of one run computed by several processes or machines that share nothing but its folder.

Each shard is a run folder of its own inside that of the run (``shard-3-of-8``), under a lock of its own. The run's
folder holds what all of them need, such as a plan, and takes their parts in the end: the shard that ends last makes the
tables, as one process does that finds all parts there.
"""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import pandas as pd

from ..errors import InputError, RunError
from .reading import RUN_FILE, is_file_intact, read_run_json, read_table, run_state
from .writing import RunWriter, remove_run

_FOLDER = re.compile(r"shard-([0-9]+)-of-([0-9]+)")
_MOST = 10_000
R = TypeVar("R")
_OF_SHARD = ("shard", "parts", "plan_sha256")
"""Fields that the configuration of a shard has beside those of the run."""
_PATIENCE = 600.0
"""Seconds that a shard waits for another that plans the run, or makes its tables."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` of ``count`` equal parts of a run, which separate processes compute."""

    number: int
    """From 1 on."""
    count: int

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> "Shard":
        """Parse a text such as ``3/8``; ``slurm`` reads both numbers from a SLURM array job's ``environment``."""
        number, slash, count = text.partition("/")
        if (
            slash
            and number.isdecimal()
            and count.isdecimal()
            and 1 <= int(number) <= int(count) <= _MOST
        ):
            return cls(int(number), int(count))
        if text != "slurm":
            raise InputError(
                f"shard is {text!r}; need one such as 3/8 (the third of eight), or slurm in an array job"
            )
        names = ("ID", "MIN", "MAX", "COUNT")
        found = [environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in names]
        if not all(one.isdecimal() for one in found):
            raise InputError(
                "shard slurm was asked for outside of an array job; need sbatch --array=1-8, or shard 3/8"
            )
        task, first, last, n_tasks = map(int, found)
        if last - first + 1 != n_tasks:
            raise InputError(
                f"the array job has {n_tasks} tasks between {first} and {last}; need all of them "
                f"(sbatch --array={first}-{last}), or shard I/N, such as 3/8, for those that are to run again"
            )
        return cls(task - first + 1, n_tasks)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, run: Path) -> Path:
        return run / f"shard-{self.number}-of-{self.count}"

    def done_sentence(self, run: Path) -> str:
        return f"shard {self} is done, others are not yet: sink-lens report {run} --status"


def check_shard(shard: str | None, *, out: str | Path | None, overwrite: bool) -> None:
    """Refuse a shard without a folder, or with ``overwrite``."""
    if shard is not None and out is None:
        raise InputError(
            "a shard was asked for without a folder; need the one that all shards share: out=..."
        )
    if shard is not None and overwrite:
        raise InputError(
            "shard and overwrite were given; each shard would remove what the others wrote. Remove the folder yourself"
        )


def compute_run(
    run: Path,
    *,
    shard: str | None = None,
    overwrite: bool = False,
    open_run: Callable[..., RunWriter],
    begin: Callable[[RunWriter], Mapping[str, int]],
    check: Callable[[Path, Collection[str]], None],
    compute: Callable[[RunWriter, Collection[str]], None],
    finish: Callable[[RunWriter], R],
) -> R | None:
    """Compute a run, or one shard of it; the shard that ends last also makes the result of the whole.

    Args:
        run: the folder of the whole run.
        shard: text for ``Shard.parse``; None computes the whole run, and takes the parts of finished shards.
        overwrite: replace the run that the folder holds.
        open_run: opens a run folder for writing; options ``overwrite``, ``patience`` and, of a shard, ``part``.
        begin: writes the files that all shards need, or compares those of the folder; returns part -> number of cells.
        check: computes some cells of finished parts in a folder again, and raises an error if the folder differs.
        compute: computes parts into a shard's folder.
        finish: computes the parts that the run's folder lacks, and makes the result.

    Returns:
        The result; None from a shard if others are still to be computed.
    """
    check_shard(shard, out=run, overwrite=overwrite)
    if shard is None:
        with open_run(run, overwrite=overwrite) as writer:
            parts = begin(writer)
            writer.list_parts(parts)
            _check_parts(writer, parts, check)
            _copy_shard_parts(writer, parts, check)
            result = finish(writer)
        remove_shards(run)
        return result
    one = Shard.parse(shard)
    if others := sorted({of.count for of in _list_shards(run)} - {one.count}):
        raise RunError(
            f"{run} holds shards of {others[0]}, and this is {one}; need one division. Take I/{others[0]}, or "
            "leave out the shard, which takes what is done and computes the rest"
        )
    with contextlib.ExitStack() as stack:
        with open_run(run, patience=_PATIENCE) as writer:
            parts = begin(writer)
            writer.list_parts(parts)
            _check_parts(writer, parts, check)
            is_done = all(map(writer.has, parts))
            writer.leave_unfinished()
            own = dict(list(parts.items())[one.number - 1 :: one.count])
            part = {"shard": str(one), "parts": own} | writer.plan_field()
            if not is_done:  # while the run's folder is held, so that no shard takes these parts and removes this one
                if one.folder(run).is_symlink():
                    raise RunError(
                        f"{one.folder(run)} is a link; need the shard's own folder. Move the link away."
                    )
                writer = stack.enter_context(open_run(one.folder(run), patience=1.0, part=part))
        if not is_done:
            _check_parts(writer, own, check)
            compute(writer, own)
    with open_run(run, patience=_PATIENCE) as writer:
        if not all(map(writer.has, parts)):
            if not all_shards_finished(run):
                writer.leave_unfinished()
                return None
            _copy_shard_parts(writer, parts, check)
        result = finish(writer)
        remove_shards(run)
    return result


def _check_parts(
    writer: RunWriter, parts: Collection[str], check: Callable[[Path, Collection[str]], None]
) -> None:
    if held := [name for name in parts if writer.has(name)]:
        check(writer.folder, held)


def _list_shards(run: Path) -> list[Shard]:
    found = []
    for path in run.glob("shard-*-of-*"):
        one = _FOLDER.fullmatch(path.name)
        if one and (path / RUN_FILE).is_file():
            found.append(Shard(int(one[1]), int(one[2])))
    return sorted(found, key=lambda one: (one.count, one.number))


def all_shards_finished(run: Path) -> bool:
    found = _list_shards(run)
    done = [read_run_json(shard.folder(run))["status"] == "finished" for shard in found]
    return bool(found) and len(found) == found[0].count and all(done)


def process_name() -> str:
    return f"{gethostname()}, process {os.getpid()}"


def _copy_shard_parts(
    writer: RunWriter, parts: Collection[str], check: Callable[[Path, Collection[str]], None]
) -> None:
    """Copy the files of finished ``parts`` from all shards into the run folder of ``writer``, if it lacks them."""
    shards = _list_shards(writer.folder)
    for shard in shards:
        if run_state(shard.folder(writer.folder)) == "running":
            record = read_run_json(shard.folder(writer.folder))
            raise RunError(
                f"shard {shard} of {writer.folder} is being computed ({record['provenance'].get('holder')}); wait for "
                f"it, or stop it. sink-lens report {writer.folder} --status lists all of them"
            )
    for shard in shards:
        folder = shard.folder(writer.folder)
        record = read_run_json(folder)
        if record["config"].get("plan_sha256") != writer.plan_field().get("plan_sha256"):
            continue  # the plan of its forwards is lost, and its parts hold other cells
        config = {name: value for name, value in record["config"].items() if name not in _OF_SHARD}
        writer.refuse_other(folder, record | {"config": config})
        missing = [
            name
            for name, entry in record["files"].items()
            if Path(name).stem in parts
            and not writer.has(name)
            and is_file_intact(folder / name, entry)
        ]
        if missing:
            check(folder, [Path(name).stem for name in missing])
        for name in missing:
            writer.write_bytes(name, (folder / name).read_bytes())


def remove_shards(run: Path) -> None:
    """Remove all shards of a run, after their parts were copied; other files in them stay."""
    for shard in _list_shards(run):
        remove_run(shard.folder(run))


def run_progress(run: Path, shards: pd.DataFrame) -> str:
    """Say how far a run is, and, unless it is finished, how many of its shards or blocks are done."""
    state = run_state(run)
    if len(shards):
        return f"{(shards['state'] == 'finished').sum()} of {len(shards)} shards finished"
    record = read_run_json(run)
    if parts := record.get("parts"):
        done = {Path(name).stem for name in record["files"]}
        state += f", {len(done.intersection(parts))} of {len(parts)} blocks done"
    return state


def shard_progress(run: Path) -> pd.DataFrame:
    """Return a row per shard: state, cells done, all cells, cells failed, and who computes it."""
    begun = _list_shards(run)
    count = begun[0].count if begun else 0
    found = pd.DataFrame([_progress_row(run, Shard(one, count)) for one in range(1, count + 1)])
    return found.astype({"cells": "Int64"}) if count else found


def _progress_row(run: Path, shard: Shard) -> dict[str, Any]:
    folder = shard.folder(run)
    row = {
        "shard": str(shard),
        "state": "not begun",
        "done": 0,
        "cells": None,
        "failed": 0,
        "holder": None,
    }
    if not (folder / RUN_FILE).is_file():
        return row
    record = read_run_json(folder)
    parts, state = record["config"]["parts"], run_state(folder)
    failed = set[int]()
    for name in record["files"] if record["kind"] == "sweep" else ():
        table = read_table(folder / name, kind="sweep")
        failed |= set(table.loc[table["error"].notna(), "cell"].tolist())
    done = sum(parts.get(Path(name).stem, 0) for name in record["files"])
    row.update(state=state, done=done, cells=sum(parts.values()), failed=len(failed))
    if state == "running":
        row["holder"] = record["provenance"].get("holder")
    return row

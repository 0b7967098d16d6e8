"""Shards: the blocks of one sweep computed by several processes or machines that share nothing but its folder.

Each shard is a run folder of its own inside that of the sweep (``shard-3-of-8``), under a lock of its own, so that one
that was killed goes on where it was and one that is started twice is refused. Blocks go to shards in turns, by number.
The sweep's folder holds what all of them need, the plan and the baseline run, and takes their blocks in the end.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

import pandas as pd

from ..engine.engine import Block
from ..errors import InputError, RunError
from ..records import RunWriter, read_table, state_of
from ..records.reading import RUN_FILE, read_record, whole

_FOLDER = re.compile(r"shard-([0-9]+)-of-([0-9]+)")
_PART = re.compile(r"block-[0-9]{6}")
_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal parts of a sweep."""

    number: int
    """From 1 on."""
    count: int

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> "Shard":
        """Read ``3/8``, or ``slurm``: the task of the array job that this process is.

        Raises:
            InputError: it is neither, or this process belongs to no array job.
        """
        if text == "slurm":
            return cls._of_array(environment)
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= _MOST):
            raise InputError(f"shard is {text!r}; need one such as 3/8 (the third of eight), or slurm in an array job")
        return cls(int(number), int(count))

    @classmethod
    def _of_array(cls, environment: Mapping[str, str]) -> "Shard":
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")
        found = [environment.get(name, "") for name in names]
        if not all(one.isdecimal() for one in found):
            raise InputError("shard slurm was asked for outside of an array job; need sbatch --array=1-8, or shard 3/8")
        task, first, last, count = map(int, found)
        if last - first + 1 != count:
            raise InputError(
                f"the array job has {count} tasks between {first} and {last}; need all of them "
                f"(--array={first}-{last}), or shard I/N, such as 3/8, for those that are to run again"
            )
        return cls(task - first + 1, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, run: Path) -> Path:
        """Where the shard's blocks are written."""
        return run / f"shard-{self.number}-of-{self.count}"

    def blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of the sweep's blocks that are the shard's."""
        return [block for block in blocks if block.number % self.count == self.number - 1]

    def check_beside(self, run: Path) -> None:
        """Refuse a folder in which the same sweep is divided otherwise.

        Raises:
            RunError: it is.
        """
        others = sorted({of.count for of in shards_in(run)} - {self.count})
        if others:
            raise RunError(
                f"{run} holds shards of {others[0]}, and this is {self}; need one division. Take I/{others[0]}, or run "
                "the sweep without a shard, which takes what is done and computes the rest"
            )


def shards_in(run: Path) -> list[Shard]:
    """The shards that were begun in a sweep's folder, by number."""
    found = [_FOLDER.fullmatch(path.name) for path in run.glob("shard-*-of-*") if (path / RUN_FILE).is_file()]
    return sorted((Shard(int(one[1]), int(one[2])) for one in found if one), key=lambda one: (one.count, one.number))


def all_finished(run: Path) -> bool:
    """Tell if each shard of the sweep is there and finished."""
    found = shards_in(run)
    done = [read_record(shard.folder(run))["status"] == "finished" for shard in found]
    return bool(found) and len(found) == found[0].count and all(done)


def holder() -> str:
    """Machine and process that compute a shard, for its record."""
    return f"{gethostname()}, process {os.getpid()}"


def take_blocks(writer: RunWriter) -> None:
    """Copy into the sweep's folder the finished blocks of its shards that it lacks.

    Raises:
        RunError: a shard is still being computed.
    """
    shards = shards_in(writer.folder)
    for shard in shards:
        if state_of(shard.folder(writer.folder)) == "running":
            record = read_record(shard.folder(writer.folder))
            raise RunError(
                f"shard {shard} of {writer.folder} is being computed ({record['provenance'].get('holder')}); wait for "
                f"it, or stop it. sink-lens status {writer.folder} lists all of them"
            )
    for shard in shards:
        folder = shard.folder(writer.folder)
        for name, entry in read_record(folder)["files"].items():
            if _PART.fullmatch(Path(name).stem) and not writer.has(name) and whole(folder / name, entry):
                writer.write_bytes(name, (folder / name).read_bytes())


def remove_shards(run: Path) -> None:
    """Remove the folders of the shards whose blocks the sweep has taken."""
    for shard in shards_in(run):
        shutil.rmtree(shard.folder(run), ignore_errors=True)


def progress_of(run: Path) -> pd.DataFrame:
    """A row for each shard of a sweep, begun or not: its state, cells done and failed, and who computes it.

    Args:
        run: the sweep's folder.
    """
    begun = shards_in(run)
    count = begun[0].count if begun else 0
    found = pd.DataFrame([_row(run, Shard(number, count)) for number in range(1, count + 1)])
    return found.astype({"cells": "Int64"}) if count else found


def _row(run: Path, shard: Shard) -> dict[str, object]:
    folder = shard.folder(run)
    if not (folder / RUN_FILE).is_file():
        return {"shard": str(shard), "state": "not begun", "done": 0, "cells": None, "failed": 0, "holder": None}
    record = read_record(folder)
    done, failed = set[int](), set[int]()
    for name in record["files"]:
        table = read_table(folder / name, kind="sweep")
        done |= set(table["cell"].tolist())
        failed |= set(table.loc[table["error"].notna(), "cell"].tolist())
    state = state_of(folder)
    row = {"shard": str(shard), "state": state, "done": len(done), "cells": record["config"]["cells"]}
    return row | {"failed": len(failed), "holder": record["provenance"].get("holder") if state == "running" else None}

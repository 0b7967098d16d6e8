"""A committed table that several processes add trainings to, one training at a time."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from filelock import FileLock, Timeout


class Missing(Protocol):
    """A training that a table lacks."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The name of the row, which no other row of the table has."""
        ...

    @property
    def name(self) -> str:
        """Name of its lock."""
        ...


def append(rows: pd.DataFrame, path: Path, *, by: Sequence[str], locks: Path) -> None:
    """Add rows to a table, but for those of trainings that it has.

    Args:
        rows: of one or more trainings.
        path: the table; it need not be there.
        by: the columns that tell a training from the others, which come first.
        locks: folder of the lock.
    """
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{path.stem}.lock"):
        text = rows
        if path.exists():
            before = pd.read_csv(path)
            known = pd.MultiIndex.from_frame(before[[*by]])
            new = rows[~pd.MultiIndex.from_frame(rows[[*by]]).isin(known)]
            # Not concat: pandas 2 and 3 differ in the type of a column that one of them has empty.
            text = pd.DataFrame([*before.to_dict("records"), *new.to_dict("records")])
        part = path.with_suffix(".part")
        text[[*by, *(name for name in text if name not in by)]].to_csv(
            part, index=False, float_format="%.6g", lineterminator="\n"
        )
        part.replace(path)


def work_off(
    missing: Callable[[], Iterable[Missing]],
    make: Callable[[Any], None],
    *,
    locks: Path,
    until: float,
) -> None:
    """Make what a table lacks and no other process makes now, until nothing is left or the time is up.

    Args:
        missing: what the table lacks now, in the order in which it is to be made.
        make: makes one and adds it to the table.
        locks: folder of the locks.
        until: no training begins after this time (``time.time()``).
    """
    locks.mkdir(parents=True, exist_ok=True)
    while time.time() < until:
        found = list(missing())
        if not found:
            return
        for one in found:
            try:
                with FileLock(locks / f"{one.name}.lock", timeout=0):
                    if all(other.key != one.key for other in missing()):
                        continue  # another process has ended it since
                    make(one)
                    break
            except Timeout:
                continue
        else:
            time.sleep(2)  # what is left waits for what others make

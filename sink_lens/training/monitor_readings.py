"""A monitor's readings: in memory, or in the log of a run folder, each one before the next step."""

import functools
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import RunError
from ..records import (
    LOG_FILE,
    RunLog,
    RunWriter,
    create_run,
    package_versions,
    read_log,
    read_log_lines,
)
from ..records.log import TakenError, refuse_used_log
from .monitor_alarms import Alarm
from .monitor_keys import KEYS, Reading

_LOGGER = logging.getLogger(__name__)
_COLUMNS = {
    "monitor": {"step": "int64", "key": "str", "layer": "Int64", "value": "float64", "unit": "str"},
    "alarms": {"step": "int64", "rule": "str", "position": "Int64", "sentence": "str"},
}
_Names = tuple[tuple[str, int | None], ...]
_MOST_BESIDE = 100
_PATIENCE = 5.0
"""Seconds to wait for a folder whose page is being drawn."""


class Readings:
    """Readings in memory, for a monitor without a run folder."""

    def __init__(self) -> None:
        self._names: dict[_Names, _Names] = {}
        self._held: list[tuple[int, _Names, array[float]]] = []

    def add(self, step: int, reading: Reading, alarms: Sequence[Alarm]) -> None:
        names = tuple(reading)
        names = self._names.setdefault(names, names)
        self._held.append((step, names, array("d", reading.values())))

    def frame(self) -> pd.DataFrame:
        rows = [
            (step, key, layer, value, KEYS[key].unit)
            for step, names, values in self._held
            for (key, layer), value in zip(names, values, strict=True)
        ]
        dtypes = _COLUMNS["monitor"]
        return pd.DataFrame(rows, columns=list(dtypes)).astype(dtypes)

    def close(self, error: BaseException | None, *, finished: bool) -> None:
        """Do nothing."""


class ReadingLog:
    """Readings in the log of a run folder; none is kept in memory."""

    def __init__(
        self,
        log: RunLog,
        making: "functools.partial[RunWriter]",
        beside: "functools.partial[ReadingLog]",
    ) -> None:
        self._log, self._making, self._beside, self._open = log, making, beside, True

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        first_step: int,
        config: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> "ReadingLog":
        """Open a log in the folder, or in a folder beside it if the folder holds another training or other files.

        A training that goes on (``first_step`` above 0) appends to the log in its folder, even if a monitor of this
        process left it open after an error. A new training never touches an existing log.
        """
        refused: RunError | None = None
        others = (folder.with_name(f"{folder.name}.beside-{n}") for n in range(2, _MOST_BESIDE))
        beside = [folder, *others]
        latest = max((number for number, one in enumerate(beside) if one.exists()), default=0)
        for place in beside[latest:]:  # the latest that exists, then free ones
            making = functools.partial(
                create_run,
                place,
                kind="monitor",
                config=config,
                provenance={**provenance, "versions": package_versions()},
                expects=tuple(_COLUMNS),
                patience=_PATIENCE,
            )
            try:
                if first_step == 0:
                    refuse_used_log(place)
                with making(reopen=first_step > 0) as run:
                    log = RunLog(place, columns=_COLUMNS)
                    run.list_file(LOG_FILE)
                    run.leave_unfinished()
            except RunError as error:
                refused = refused or error
                continue
            if refused is not None:
                _LOGGER.warning(
                    "the sink monitor: the readings go into %s, since %s", place, refused
                )
            other = functools.partial(
                cls.open, folder, first_step=0, config=config, provenance=provenance
            )
            return cls(log, making, other)
        assert refused is not None
        raise refused

    def read_before(self, step: int) -> Iterator[tuple[int, Reading]]:
        for line in read_log_lines(self._log.path):
            if line.at < step:
                reading = {
                    (block["key"], layer): value
                    for block in line.tables["monitor"]
                    for layer, value in zip(block["layer"], block["value"], strict=True)
                }
                yield line.at, reading

    def add(self, step: int, reading: Reading, alarms: Sequence[Alarm]) -> None:
        """Write a reading to the log.

        Raises:
            OSError: it cannot be written now; the next call tries again.
        """
        by_key: dict[str, tuple[list[int | None], list[float]]] = {}
        for (key, layer), value in reading.items():
            layers, values = by_key.setdefault(key, ([], []))
            layers.append(layer)
            values.append(value)
        rows = [
            {"step": step, "key": key, "layer": layers, "value": values, "unit": KEYS[key].unit}
            for key, (layers, values) in by_key.items()
        ]
        raised = [{name: getattr(one, name) for name in _COLUMNS["alarms"]} for one in alarms]
        tables = {"monitor": rows, "alarms": raised}
        try:
            self._log.append(step, tables)
        except TakenError:
            other = self._beside()
            self._log.close()
            self._log, self._making = other._log, other._making
            self._log.append(step, tables)

    def frame(self) -> pd.DataFrame:
        return read_log(self._log.path)["monitor"]

    def close(self, error: BaseException | None, *, finished: bool) -> None:
        """Close the log; if the training has ``finished``, make the tables and end the run.

        Raises:
            OSError: readings that waited still cannot be written.
            RunError: the tables cannot be written.
        """
        if not self._open:
            return
        self._open = False
        try:
            self._log.flush()
        finally:
            self._log.close()
        if not finished or self._log.taken:
            return
        run = self._making(reopen=True)
        try:
            for name, frame in read_log(self._log.path).items():
                run.write_table(name, frame)
            run.list_file(LOG_FILE)
        except BaseException as own:
            run.__exit__(type(own), own, None)
            raise
        run.__exit__(None if error is None else type(error), error, None)

"""``Finding``: tables and what they say. ``Result``: those of a run, in whose folder everything in it also lies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd

from ..errors import RunError
from . import display
from .reading import PAGE_FILE
from .shards import Shard


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A result: its tables, and sentences that say in words what they show."""

    main: ClassVar[str] = "summary"
    """Name of the main table."""
    tables: Mapping[str, pd.DataFrame] = field(repr=False)
    """The tables by name."""
    headline: str = ""
    """The result in words, a line for each sentence or paragraph."""
    notes: tuple[str, ...] = field(default=(), repr=False)
    """Warnings that belong to the result."""

    @property
    def finished(self) -> bool:
        """False if other shards of the run are still to be computed."""
        return not isinstance(self.tables, Unfinished)

    @property
    def frame(self) -> pd.DataFrame:
        """The main table of the result, as a data frame."""
        return self.tables[self.main]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentences that say what was found; ``headline`` has them as lines of one text."""
        return tuple(self.headline.splitlines())

    def notebook_parts(self) -> tuple[object, ...]:
        """Return the figures and tables that a notebook shows below the sentences."""
        return (self.frame,)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: the sentences, then figures and tables."""
        shown, folder = self.notebook_parts() if self.finished else (), getattr(self, "folder", None)
        return display.result_html(self.sentences, *shown, notes=self.notes, folder=folder)


@dataclass(frozen=True, kw_only=True)
class Result(Finding):
    """The result of a run, with its run folder, which holds the same tables and sentences."""

    folder: Path
    decision: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The decision and its numbers, as ``--json`` prints them; empty if the run decides nothing."""

    @classmethod
    def unfinished(cls, folder: Path, *, shard: str) -> Self:
        """Return a result without tables, for a finished shard of a run; other shards are still to be computed."""
        return cls(folder=folder, tables=Unfinished(folder), headline=Shard.parse(shard).done_sentence(folder))

    @property
    def report_path(self) -> Path:
        """Path of the run's page, one HTML file; call ``report`` to draw it if the file is not there."""
        return self.folder / PAGE_FILE

    def report(self) -> Path:
        """Draw the page of the run, over an earlier one, and return the path of the HTML file."""
        return display.draw_page(self.folder)


class Unfinished(dict[str, pd.DataFrame]):
    """An empty dict of tables, for a run with shards still to be computed; reading a table raises a RunError."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> pd.DataFrame:
        raise RunError(
            f"{self._folder} has no table {name!r} yet; need all shards of the run: the one that ends last makes the "
            f"tables. sink-lens report {self._folder} --status lists them"
        )

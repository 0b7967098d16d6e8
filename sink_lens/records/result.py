"""``Finding``: tables and what they say. ``Result``: those of a run, in whose folder everything in it also lies."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd

from ..errors import RunError
from . import display
from .place import Place
from .reading import LOCK_FILE, RUN_FILE, Run, read_run
from .shards import Shard
from .writing import check_folder_free, remove_run


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A result: its tables, and sentences that say in words what they show."""

    main: ClassVar[str] = "summary"
    """Name of the main table."""
    tables: Mapping[str, pd.DataFrame] = field(repr=False)
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
        """The main table, as a data frame."""
        return self.tables[self.main]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The lines of ``headline``."""
        return tuple(self.headline.splitlines())

    def notebook_parts(self) -> tuple[object, ...]:
        """Return the figures and tables that a notebook shows below the sentences."""
        return (self.frame,)

    def _repr_html_(self) -> str:
        shown = self.notebook_parts() if self.finished else ()
        notes, folder = (*self.notes, *self._model_notes()), getattr(self, "folder", None)
        return display.result_html(self.sentences, *shown, notes=notes, folder=folder)

    def _model_notes(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Result(Finding):
    """The result of a run: its tables and sentences, in memory and in the run's folder."""

    folder: Path | None
    """The run's folder; None without ``out``: its files are then in a temporary folder, which goes with the result."""
    place: Place | None = field(default=None, repr=False, compare=False)
    """The folder if it is temporary."""
    decision: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The decision and its numbers, as ``--json`` prints them; empty if the run decides nothing."""

    @classmethod
    def unfinished(cls, folder: Path, *, shard: str) -> Self:
        """Return a result without tables, for a finished shard of a run with others still to be computed."""
        said = Shard.parse(shard).done_sentence(folder)
        return cls(folder=folder, tables=Unfinished(folder), headline=said)

    @property
    def run(self) -> Run:
        """The run, as ``read_run`` reads it from its folder."""
        if self.folder is not None:
            return read_run(self.folder)
        if self.place is None:
            raise RunError("the result has no run folder; need one that was given out=FOLDER")
        return replace(read_run(self.place.folder), place=self.place)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Copy the run into a folder, for ``read_run`` and ``sink-lens report``; return the folder's path.

        Raises:
            RunError: the folder cannot be used, or holds a finished run and ``overwrite`` is False.
        """
        run, folder = self.run.folder, Path(folder)
        check_folder_free(folder, overwrite=overwrite)
        if folder.exists() and folder.resolve() == run.resolve():
            return folder
        if (folder / RUN_FILE).is_file():
            remove_run(folder)
        ignore = shutil.ignore_patterns(LOCK_FILE)
        try:
            shutil.copytree(run, folder, dirs_exist_ok=True, ignore=ignore)
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written ({error}). Choose another folder."
            ) from error
        return folder

    def report(self, path: str | Path | None = None) -> Path:
        """Draw the page of the run, one HTML file, and return its path; None draws it in the run's folder.

        Raises:
            InputError: no path was given and the run has no folder.
        """
        return display.draw_result_page(self.run, path)

    def draw(self) -> Any:
        """Draw the first figure of the run's page, as a matplotlib figure; RunError if it has none."""
        return display.draw_first_figure(self.run)

    def _model_notes(self) -> tuple[str, ...]:
        try:
            return tuple(self.run.provenance.get("notes") or ())
        except RunError:  # the folder is gone
            return ()

    def __repr__(self) -> str:
        where = "" if self.folder is None else f"\nin {self.folder}"
        return (self.sentences or ("",))[0] + where


class Unfinished(dict[str, pd.DataFrame]):
    """An empty dict of tables, for a run with shards still to be computed; reading one raises a RunError."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> pd.DataFrame:
        raise RunError(
            f"{self._folder} has no table {name!r} yet; need all shards of the run: the one that ends last makes the "
            f"tables. sink-lens report {self._folder} --status lists them"
        )

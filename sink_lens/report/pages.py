"""What the page of each kind of run is made of: a title, sentences, figures and tables, each from the run's tables.

A page for a new kind is a ``Page`` somewhere in ``sink_lens.report`` and its line in ``PAGES``.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from sink_lens.records import Run
from sink_lens.report.tables import Table


def _always(_: Run) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure of a page."""

    key: str
    """Its id in the page and its file name in ``--figures DIR``: lower-case words with hyphens."""
    title: str
    make: Callable[[Run], tuple[str, Figure]]
    """What to see in it, in a sentence or two, and the figure; RunError where the run lacks what it needs."""
    data: Callable[[Run], pd.DataFrame] | None = None
    """The numbers behind it, which a reader can copy as CSV; those that are drawn if None."""
    when: Callable[[Run], bool] = _always
    """Whether it belongs on this run's page: False where what it shows was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A table of a page."""

    key: str
    title: str
    make: Callable[[Run], tuple[str, Table]]
    """What it says, and the table (``tables.shown_table``); RunError where the run lacks what it needs."""
    when: Callable[[Run], bool] = _always
    """Whether it belongs on this run's page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page of one kind of run. No part of it may raise for what a partial run lacks, but for ``make``."""

    title: Callable[[Run], str]
    """The finding, in a few words."""
    headline: Callable[[Run], list[str]]
    """The run in plain sentences, one for each thing that was found."""
    figures: tuple[Drawn, ...]
    tables: tuple[Listed, ...]
    chained: bool = False
    """Whether the verdicts on the links of the chain stand above the figures."""


_PLACES = {
    "trace": "traces:TRACE",
    "isolate": "studies:ISOLATE",
    "amplify": "studies:AMPLIFY",
    "ablate": "studies:ABLATE",
    "patch": "patches:PATCH",
    "sweep": "grids:SWEEP",
    "train": "trainings:TRAIN",
    "compare": "trainings:COMPARE",
    "preference": "identity:PREFERENCE",
    "contraction": "identity:CONTRACTION",
    "calibration": "identity:CALIBRATION",
    "fingerprint": "seeds:FINGERPRINT",
}
"""Run kind -> module of ``sink_lens.report`` and name of its Page; imported when it is asked for."""


class Pages(Mapping[str, Page]):
    """Run kind -> its page, imported when it is asked for."""

    def __getitem__(self, kind: str) -> Page:
        module, _, name = _PLACES[kind].partition(":")
        return getattr(importlib.import_module(f"sink_lens.report.{module}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


PAGES: Mapping[str, Page] = Pages()

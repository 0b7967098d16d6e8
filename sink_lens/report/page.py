"""A page of a run: a title, sentences, figures and tables, and what each of them is once it is made."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from ..errors import SinkLensError
from ..text import as_text, capitalise, interval_text, name_in_words, safe_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .drawable import Drawable

from ..records import Run

MOST_ROWS = 25
"""More rows than these are not shown, but counted."""
_MOST_COPIED = 2_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table as a page shows it: the cells are texts."""

    heads: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: list[tuple[str, ...]]
    frame: pd.DataFrame | None = None
    """All rows, as they are in the run; None, and no names of columns, where the text is all that there is."""
    columns: tuple[str, ...] = ()
    """Names in the run's tables, as many as heads."""
    meanings: tuple[str, ...] = ()
    """Meaning of each column; "" if the run's tables do not say."""

    @property
    def numbers(self) -> pd.DataFrame:
        """What a reader copies as CSV: the numbers behind the texts, or the texts themselves."""
        if self.frame is not None:
            return self.frame
        return pd.DataFrame(self.rows, columns=list(self.heads))


_BOUNDS = "95% interval; if it contains 0, the number beside it cannot be told from chance."
INTERVALS: dict[str, str] = {"95%": _BOUNDS, "interval": _BOUNDS}
"""Column that pages of several kinds make -> its meaning."""


Headings = Mapping[str, str] | Iterable[str]
"""Columns of a table: each with its head, or by their names, whose heads are the names in words."""


def page_table(frame: pd.DataFrame, headings: Headings, *, most: int = MOST_ROWS) -> PageTable:
    """Make a page's table of a frame's first ``most`` rows; ``headings`` is its columns, or column -> heading."""
    if not isinstance(headings, Mapping):
        headings = {name: name_in_words(str(name)) for name in headings}
    columns = [name for name in headings if name in frame.columns]
    is_numeric, is_bool = pd.api.types.is_numeric_dtype, pd.api.types.is_bool_dtype
    numeric = [is_numeric(frame[name]) and not is_bool(frame[name]) for name in columns]
    undefined = ["undefined" if is_number else "" for is_number in numeric]
    rows = [
        tuple(
            other if pd.isna(one) else as_text(one)
            for one, other in zip(row, undefined, strict=True)
        )
        for row in frame[columns].head(most).itertuples(index=False)
    ]
    return PageTable(
        heads=tuple(headings[name] for name in columns),
        numeric=tuple(numeric),
        rows=rows,
        frame=frame.filter(items=columns),
        columns=tuple(columns),
    )


def summary_lines(run: Run, *, limit: int) -> list[str]:
    """Return the first sentence in a run's table ``summary``, in a list; [] without one."""
    sentences = run.need("summary", columns=["sentence"])["sentence"]
    return [safe_line(text, limit=limit) for text in sentences.tolist()[:1]]


def ci_texts(
    frame: pd.DataFrame,
    low: str = "ci_low",
    high: str = "ci_high",
    *,
    shown: Callable[[Any], str] = as_text,
) -> list[str]:
    bounds = frame[[low, high]].to_numpy(float)
    return [interval_text(one, other, shown=shown) for one, other in bounds]


def rest_note(total: int, name: str, *, most: int = MOST_ROWS) -> str:
    """Return the sentence that a table shows ``most`` of its rows and a file has all; "" if there are no more."""
    file = name if "." in name else f"{name}.parquet"
    return f" The first {most} of {total}; all are in {file}." if total > most else ""


def csv_text(frame: pd.DataFrame) -> str:
    """Return a data frame as CSV: numbers to six digits, and texts that no spreadsheet takes for a formula.

    Of more than ``_MOST_COPIED`` rows, some at equal distances are kept, and the last line says so.
    """

    def harmless(value: object) -> object:
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value

    step = max(-(-len(frame) // _MOST_COPIED), 1)
    part = frame.iloc[::step].map(harmless)
    text = part.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    if step > 1:
        text += f"# every {step}th of {len(frame)} rows; all are in the run's folder\n"
    return text


def run_label(run: Run) -> str:
    return f"{run.folder} is a run of {safe_line(run.kind)}"


def table_reader(name: str) -> Callable[[Run], pd.DataFrame]:
    return lambda run: run.need(name, columns=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure of a page, and the function that draws it from a run."""

    key: str
    """Its id in the page and its file name in ``--figures DIR``: lower-case words with hyphens."""
    title: str
    make: Callable[[Run], tuple[str, "Figure"]]
    """Makes its caption and the figure; RunError if the run lacks what it needs."""
    data: Callable[[Run], pd.DataFrame]
    """The numbers behind it, to be copied as CSV."""
    when: Callable[[Run], bool] = lambda _: True
    """False if what it shows was not asked for."""
    on_page: bool = True
    """False where the page shows the same in another way: the figure is drawn for ``--figures`` only."""


def paper_figure(
    circuit: Callable[[Run], "Drawable"], *, data: Callable[[Run], pd.DataFrame]
) -> Drawn:
    return Drawn(
        key="circuit-paper",
        title="The circuit for a paper",
        make=lambda run: ("", cast("Any", circuit(run)).draw("paper")),
        data=data,
        on_page=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A table of a page, and the function that makes it from a run."""

    key: str
    title: str
    make: Callable[[Run], tuple[str, PageTable]]
    """Makes its caption and the table; RunError if the run lacks what it needs."""
    meanings: Mapping[str, str] = field(default_factory=lambda: INTERVALS)
    """Column that the page makes itself -> its meaning; those of stored tables are in the schema."""
    when: Callable[[Run], bool] = lambda _: True


def has_table(name: str) -> Callable[[Run], bool]:
    return lambda run: name in run.tables


def table_maker(
    name: str, see: str, headings: Headings, *, need: Sequence[str] = ()
) -> Callable[[Run], tuple[str, PageTable]]:
    """Return a function that shows the table ``name`` of a run unchanged, under the caption ``see``.

    ``need``: the columns without which the table cannot be shown; all of ``headings`` if empty.
    """

    def make(run: Run) -> tuple[str, PageTable]:
        frame = run.need(name, columns=need or list(headings))
        shortened = run.tables.shortened.get(name)
        see_all = rest_note(len(frame) if shortened is None else shortened.rows, name)
        return see + see_all, page_table(frame, headings)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page of one kind of run; for a run that lacks files, only a figure's or table's ``make`` may raise."""

    title: Callable[[Run], str]
    """The finding, in a few words."""
    headline: Callable[[Run], list[str]]
    """A plain sentence for each thing that was found."""
    figures: tuple[Drawn, ...]
    tables: tuple[Listed, ...]
    first_screen: Callable[[Run], "FirstScreen"] | None = None
    """Makes what stands above the figures; if None: sentences alone."""
    patterns: Callable[..., dict[str, Any]] | None = None
    """Encodes attention patterns beside the first screen (``report.patterns.embed_patterns``)."""
    circuit: Callable[[Run], "Drawable"] | None = None
    explore: Callable[[Run], dict[str, Any]] | None = None
    """Makes the graph for the explorer, Neuronpedia's JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict of a run, as a page that compares runs shows it."""

    key: str
    """What is judged, the same in every run."""
    name: str
    verdict: str
    why: str
    """Stands after the verdict, on the same line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstScreen:
    """The part of a page above its figures, and the section with the verdicts."""

    numbers: list[tuple[str, str]]
    """Value, and what it is."""
    leads: tuple[str, ...]
    """Keys of its figures."""
    name: str
    """Name of the section in the list of the page's parts."""
    heading: str
    body: str
    """The section as HTML, everything in it escaped."""
    missing: str
    """Why the verdicts are not there; empty if they are."""
    judged: tuple[Judged, ...]
    of: tuple[str, str]
    """What is judged, one and many: link, links of the chain."""
    notes: tuple[str, ...]
    meanings: tuple[tuple[str, str], ...] = ()
    """Words of the first sentences, each with its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One figure or table of a page in its final form, or the reason why it is missing."""

    key: str
    title: str
    see: str = ""
    """Its caption."""
    svg: str = ""
    table: PageTable | None = None
    wide: bool = False
    missing: str = ""
    csv: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Everything that the page says of one run."""

    run: Run
    name: str
    """Its model, else its folder."""
    title: str
    headline: list[str]
    notes: list[str]
    incomplete: str
    """What the folder lacks."""
    first: FirstScreen | None
    figures: list[Shown]
    tables: list[Shown]
    provenance: dict[str, str]


_UNFIT = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
)
"""What comes of a table that holds something else; the last is what Arrow says of a sum of texts."""


def try_make(run: Run, make: Callable[[], Any]) -> tuple[Any, str]:
    """Return (the result of ``make``, ""), or (None, the reason) if the run's tables lack what it needs."""
    try:
        return make(), ""
    except SinkLensError as error:
        text = safe_line(str(error).replace(f"{run.folder}{os.sep}", ""), limit=400)
        return None, capitalise(text) if text.startswith(("this ", "the ", "no ")) else text
    except _UNFIT as error:
        why = safe_line(f"{type(error).__name__}: {error}", limit=200)
        said = (
            f"It cannot be made from what the tables of this run hold ({why}). Run again to see it."
        )
        return None, said

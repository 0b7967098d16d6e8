"""Several runs compared on one page: which may be compared, and where they differ."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from ..errors import InputError, RunError
from ..records import Run
from ..schema import VERDICTS
from ..text import as_text, interval_text, join_and, name_in_words, safe_line
from .page import Content, Shown, csv_text, try_make

MOST_RUNS = 6
"""More than these do not fit beside each other, nor into 5 MB."""

_SAME = {
    "provenance": (
        *("dtype", "bos_condition", "bos", "token_source", "sequences", "length"),
        *("data_sha256", "tokenizer_sha256", "thresholds"),
    ),
    "config": ("threshold", "interventions"),
}
COMPARED_BY = {
    "dtype": ("dtype",),
    "bos": ("bos", "bos_condition", "tokens_sha256"),
    "tokens": ("token_source", "data_sha256", "tokens_sha256", "sequences", "length"),
    "thresholds": ("thresholds", "threshold"),
}
"""What runs may be compared by -> what they then need not share."""
_MOST_MADE = 4
_CIRCUMSTANCE = ("status", "started", "ended", "model")
_OF_MODEL = {"weights_sha256": "weights", "config_sha256": "configurations"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value of one run, and whether it differs from that of the first run."""

    text: str
    differs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A text for every run, in the order of the runs."""

    name: str
    cells: tuple[Entry, ...]

    @property
    def differs(self) -> bool:
        return any(cell.differs for cell in self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsCompared:
    """A comparison of runs: each row has one value of every run."""

    names: tuple[str, ...]
    verdicts: tuple[Row, ...]
    summary: tuple[Row, ...]
    of: tuple[str, str]
    """What the verdicts are of, one and many."""
    provenance: tuple[Row, ...]
    """Where they were made differently first."""

    @property
    def title(self) -> str:
        """It counts the verdicts that differ; for runs without verdicts, the numbers that differ."""
        runs = join_and(self.names) if len(self.names) == 2 else f"{len(self.names)} runs"
        rows = self.verdicts or self.summary
        apart = [row for row in rows if row.differs]
        if not rows:
            return f"{runs} beside each other"
        if not self.verdicts:
            return f"{runs}: {len(apart) or 'none'} of {len(rows)} numbers differ"
        if not apart:
            return f"{runs}: all {len(rows)} {self.of[1]} are judged alike"
        found = []
        for row in apart[:2]:
            verdicts = [cell.text.partition(":")[0] for cell in row.cells]
            each = zip(verdicts, self.names, strict=True)
            said = [f"{verdict} in {name}" for verdict, name in each]
            found.append(f"“{row.name}” {', '.join(said if len(said) == 2 else verdicts)}")
        more = [f"{len(apart) - 2} more"] * (len(apart) > 2)
        how = f"{'is' if len(apart) == 1 else 'are'} judged differently: {'; '.join(found + more)}"
        return f"{runs}: {len(apart)} of {len(rows)} {self.of[1]} {how}"

    @property
    def models_sentence(self) -> str:
        """A sentence that the runs are of different models, whatever these are called."""
        rows = [
            row
            for row in self.provenance
            if row.differs and all(cell.text.strip("–") for cell in row.cells)
        ]
        apart = [_OF_MODEL[row.name] for row in rows if row.name in _OF_MODEL]
        return f"The runs are of different models: their {join_and(apart)} differ." if apart else ""

    @property
    def settings_sentence(self) -> str:
        settings = []
        for row in self.provenance:
            if not row.differs or row.name.partition(".")[0] not in ("model", "config"):
                continue
            texts = [
                "not set" if cell.text == "–" else safe_line(cell.text, limit=40)
                for cell in row.cells
            ]
            values = [f"{text} in {name}" for text, name in zip(texts, self.names, strict=True)]
            # else the names of the runs say it
            if tuple(cell.text for cell in row.cells) != self.names:
                name = name_in_words(row.name.removeprefix("config."))
                settings.append(f"{name} {', '.join(values)}")
        settings = list(dict.fromkeys(settings))  # a model is in the provenance, too
        more = [f"{len(settings) - _MOST_MADE} more"] * (len(settings) > _MOST_MADE)
        return f"Made with {'; '.join(settings[:_MOST_MADE] + more)}." if settings else ""

    @property
    def tables(self) -> tuple[Shown, ...]:
        found = []
        for key in ("verdicts", "summary", "provenance"):
            texts = [(row.name, *(cell.text for cell in row.cells)) for row in getattr(self, key)]
            frame = pd.DataFrame(texts, columns=["", *self.names])
            found.append(Shown(key=key, title="", csv=csv_text(frame)))
        return tuple(found)


def compare_contents(parts: Sequence[Content]) -> RunsCompared:
    names = tuple(part.name for part in parts)
    if len(set(names)) < len(names):
        names = tuple(safe_line(part.run.folder.resolve().name) for part in parts)
    firsts = [part.first for part in parts if part.first]
    judged = {one.key: one.name for first in firsts for one in first.judged}
    summaries = [try_make(part.run, partial(_summary_texts, part.run))[0] or {} for part in parts]
    quantities = dict.fromkeys(name for summary in summaries for name in summary)
    known = dict.fromkeys(name for part in parts for name in part.provenance)
    rows = [_make_row(name, [part.provenance.get(name, "") for part in parts]) for name in known]
    summary = [_make_row(name, [one.get(name, "") for one in summaries]) for name in quantities]
    rows.sort(key=lambda row: not row.differs or row.name in _CIRCUMSTANCE)
    return RunsCompared(
        names=names,
        verdicts=tuple(_verdict_row(key, parts, name=name) for key, name in judged.items()),
        of=firsts[0].of if firsts else ("", ""),
        summary=tuple(summary),
        provenance=tuple(rows),
    )


def check_comparable(runs: Sequence[Run], *, group_by: Sequence[str] = ()) -> None:
    """Refuse runs whose numbers mean different things.

    Models may differ; kind, tokens (or the text that they were made of), BOS, type and thresholds may not, unless they
    are what the runs are compared by.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise InputError(f"{len(runs)} runs were given; need 2 to {MOST_RUNS} beside each other.")
    kinds = [run.kind for run in runs]
    if len(set(kinds)) > 1:
        raise _incomparable_error(runs, {"kind": kinds})
    allowed = {name for one in group_by for name in COMPARED_BY[one]}
    differing: dict[str, list[Any]] = {}
    for where, names in _SAME.items():
        for name in names:
            values = [getattr(run, where).get(name) for run in runs]
            if name not in allowed and any(one != values[0] for one in values):
                differing[name] = values
    models = [run.provenance.get("weights_sha256") or run.provenance.get("model") for run in runs]
    tokens = [run.provenance.get("tokens_sha256") for run in runs]
    same_model, same_tokens = len(set(map(str, models))) == 1, len(set(map(str, tokens))) == 1
    if "tokens_sha256" not in allowed and same_model and not same_tokens:
        differing["tokens_sha256"] = tokens
    if differing:
        raise _incomparable_error(runs, differing)


def _incomparable_error(runs: Sequence[Run], differing: Mapping[str, Sequence[Any]]) -> RunError:
    parts = []
    for name, values in differing.items():
        said = ", ".join(
            f"{safe_line(one, limit=60)} ({run.folder})"
            for run, one in zip(runs, values, strict=True)
        )
        parts.append(f"{name}: {said}")
    return RunError(
        f"the runs are not comparable, they differ in {'; '.join(parts)}; need runs of one kind on the same tokens "
        "with the same settings. Leave some out, run again alike, or name the difference, such as group_by='dtype'."
    )


def _make_row(name: str, texts: Sequence[str]) -> Row:
    return Row(name=name, cells=tuple(Entry(text=text, differs=text != texts[0]) for text in texts))


def _verdict_row(key: str, parts: Sequence[Content], *, name: str) -> Row:
    cells = []
    for part in parts:
        judged = part.first.judged if part.first else ()
        found = next((one for one in judged if one.key == key), None)
        cells.append(("not measured", "") if found is None else (found.verdict, found.why))
    entries = (
        Entry(text=f"{VERDICTS.get(verdict, '?')} {verdict}{why}", differs=verdict != cells[0][0])
        for verdict, why in cells
    )
    return Row(name=name, cells=tuple(entries))


def _summary_texts(run: Run) -> dict[str, str]:
    table = run.need("summary", columns=["quantity", "value"])
    shown = {}
    for row in table.to_dict("records"):
        value = row["value"]
        with contextlib.suppress(TypeError, ValueError):
            value = float(value)
        bounds = interval_text(row.get("ci_low"), row.get("ci_high"))
        shown[safe_line(row["quantity"])] = f"{as_text(value)} {bounds}".strip()
    return shown

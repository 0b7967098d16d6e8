"""The pages that answer whether the papers hold, from ``claims.toml`` and the committed results.

``docs/claims.md`` has each claim in plain words with its verdict and one number; ``docs/claims_in_detail.md`` has it in
its paper's words with all numbers that decide it. Each number is held against the range that its
analysis wrote down before the run (``claim.md``); a range that was written with this page is marked as such. A row
holds where every number's whole interval lies in its range. One number on several texts counts once: the row shows
where all of them lie.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from analyses.verdicts import Claim, line, read_result, shown, span
from sink_lens.errors import InputError
from sink_lens.schema import DEFAULT_MODEL

ANSWERS = ("holds", "holds in part", "does not hold", "not shown", "not tested here")
"""All numbers in their ranges; some; none, and each wholly outside; none, but some lie in part; no number."""
PARTS = {"weaker": "true, but weaker", "settings": "true in some settings"}
"""Part of a claim that holds -> the verdict on the page."""
_MARKS = {"holds": "●", **dict.fromkeys(PARTS.values(), "◐"), "does not hold": "○"}
_MEANINGS = {
    "holds": "all intervals lie in their ranges",
    "true, but weaker": "the effect is smaller or narrower than the paper says",
    "true in some settings": "the effect is there for some models, layers, texts or tasks, but not for all",
    "does not hold": "all intervals lie outside their ranges",
    "not shown": "the intervals decide nothing, or two measurements of the same effect disagree",
    "not tested here": "we could not test the claim",
}
"""Verdict, in the order of the page -> its line in the table of verdicts."""
_ORDER = tuple(_MEANINGS)
_PLACE = re.compile(r"\{([^{}|]+/[^{}|]+)(?:\|([^{}]+))?\}")
_ID = re.compile(r"\[([A-D]\d+[a-z]?)\]")
_AT = " @ "


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One number that decides, and the range that it is held against."""

    of: str
    """Folder and number, as in ``mediation/z @ moby-dick``; ``*`` stands for any text, layer or position."""
    by: str = "reproduced"
    """The rule's range: ``reproduced``, ``predicted`` or ``contradicted``; ``page`` where ``range`` is given."""
    range: tuple[float, float] = (math.nan, math.nan)
    """A range written with this page."""
    says: str = ""
    """Name of the number on the page, if it is not its rule's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claim of a paper; an entry of ``claims.toml``."""

    id: str
    where: str
    """Short name of the paper, and where it says so."""
    words: str
    """In the paper's words, if ``where`` does not say otherwise."""
    plain: str = ""
    """In plain words."""
    short: str = ""
    """The one number of the short page, with places; or why there is none."""
    part: str = ""
    """One of ``PARTS`` if the claim holds in part."""
    decides: tuple[Part, ...] = ()
    on: str = ""
    """On how many models, texts and seeds."""
    note: str = ""
    """What the numbers do not say, and what was there before."""
    more: str = ""
    """What the claim says beyond the numbers: then it holds in part at most."""
    why: str = ""
    """Why it was not tested."""
    trained: Mapping[str, str] = field(default_factory=dict)
    """Models that an analysis trained -> its number that answers for them, in the table by model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper's box on the short page."""

    letter: str
    title: str
    number: str
    """The number at arXiv."""
    holds: str
    fails: str
    words: str
    """Definitions, which stand before its table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A sentence elsewhere in the repository that speaks of a claim."""

    file: str
    claims: tuple[str, ...]
    text: str
    """With its numbers as places: ``{folder/number}`` or ``{folder/number|.2f}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of ``claims.toml``."""

    opening: str
    """The short page's first part, with places for counts, boxes and numbers."""
    closing: str
    long_opening: str
    """The long page's first part."""
    long_closing: str
    """Its last part, with a place for the table by model."""
    papers: tuple[Paper, ...]
    rows: tuple[Row, ...]
    said: tuple[Said, ...]


def read_page(path: Path) -> Page:
    """The claims and the sentences about them.

    Raises:
        InputError: a row with neither numbers nor a reason, or with both, or a name given twice.
    """
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    rows, names = [], fields.get("says", {})
    for one in fields["claim"]:
        parts = tuple(_part(part, names) for part in one.pop("decides", ()))
        row = Row(decides=parts, **one)
        if bool(parts) == bool(row.why):
            raise InputError(
                f"{row.id} has {len(parts)} numbers and the reason {row.why!r}; need one of the two"
            )
        rows.append(row)
    if len({row.id for row in rows}) < len(rows):
        raise InputError(f"{path} gives an id twice: {[row.id for row in rows]}; need each once")
    said = tuple(Said(**(one | {"claims": tuple(one["claims"])})) for one in fields["said"])
    papers = tuple(Paper(**one) for one in fields["paper"])
    texts = {name: fields[name] for name in ("opening", "closing", "long_opening", "long_closing")}
    return Page(**texts, papers=papers, rows=tuple(rows), said=said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Numbers of one model, or of the models that analyses make, and the rules that they are held against."""

    claims: Mapping[str, Claim]
    tables: Mapping[str, pd.DataFrame]
    """Folder -> number, value, low, high, n."""
    of_another_model: bool = False
    """Check that a number may be lacking: another model has other layers and growth steps."""

    def numbers(self, of: str) -> pd.DataFrame:
        """The rows of ``folder/number``, where ``*`` stands for anything; empty where the folder was not run.

        Raises:
            InputError: no such folder, or no such number in a folder that was run on the model that the page is about.
        """
        folder, _, number = of.partition("/")
        if folder not in self.claims or number.partition(_AT)[0] not in self.claims[folder].rules:
            raise InputError(
                f"there is no number {of}; need FOLDER/NUMBER of an analysis and its rules"
            )
        if folder not in self.tables:
            return pd.DataFrame(columns=["number", "value", "low", "high", "n"])
        table = self.tables[folder]
        chosen = table[
            [fnmatchcase(str(name), number.replace("[", "[[]")) for name in table["number"]]
        ]
        if (
            chosen.empty
            and not self.of_another_model
            and not table.empty
            and table["number"].notna().all()
        ):
            raise InputError(
                f"{folder} was run and has no {number}; need one of {', '.join(table['number'])}"
            )
        return chosen

    def judge(self, part: Part) -> str:
        """One of ``ANSWERS`` for one number on all its texts."""
        rows, (low, high) = self.numbers(part.of), self.range_of(part)
        inside = (rows["low"] >= low) & (rows["high"] <= high)
        outside = (rows["high"] < low) | (rows["low"] > high)
        if rows.empty or rows["value"].isna().all():
            return "not tested here"
        if inside.all():
            return "holds"
        if outside.all():
            return "does not hold"
        return "holds in part" if inside.any() else "not shown"

    def says(self, part: Part) -> str:
        """Name a number."""
        folder, _, number = part.of.partition("/")
        return part.says or self.claims[folder].rules[number.partition(_AT)[0]].says

    def range_of(self, part: Part) -> tuple[float, float]:
        """The range of a number.

        Raises:
            InputError: the rule has no such range.
        """
        if part.by == "page":
            return part.range
        folder, _, number = part.of.partition("/")
        found = getattr(self.claims[folder].rules[number.partition(_AT)[0]], part.by)
        if math.isnan(found[0]):
            raise InputError(
                f"the rule of {part.of} has no range {part.by!r}; need one, or a range of the page's own"
            )
        return found

    def fill(self, text: str) -> str:
        """A text with its places filled: ``{folder/number}`` with interval, ``{folder/number|.0%}`` in a format."""

        def one(place: re.Match[str]) -> str:
            rows = self.numbers(place[1])
            if len(rows) != 1:
                raise InputError(f"{place[1]} has {len(rows)} numbers; a sentence needs one")
            row = rows.iloc[0]
            if not place[2]:
                return shown(dict(row))
            field, _, how = place[2].rpartition(":")
            return format(row[field or "value"], how)

        return _PLACE.sub(one, text)


def committed(page: Page, claims: Sequence[Claim]) -> Results:
    """The results that are kept in the folders that the page names."""
    texts = [
        page.opening,
        *(f"{row.short} {row.note} {row.more} {row.why}" for row in page.rows),
        *(one.text for one in page.said),
    ]
    named = {place[1] for text in texts for place in _PLACE.finditer(text)}
    named |= {
        of
        for row in page.rows
        for of in (*(part.of for part in row.decides), *row.trained.values())
    }
    known = {claim.name: claim for claim in claims}
    tables = {
        name: read_result(known[name])
        for name in {of.partition("/")[0] for of in named} & known.keys()
    }
    return Results(
        claims=known, tables={name: table for name, table in tables.items() if not table.empty}
    )


def answer(row: Row, results: Results) -> str:
    """One of ``ANSWERS`` for a claim: from those of its numbers."""
    found = _joined([results.judge(part) for part in row.decides])
    return "holds in part" if row.more and found == "holds" else found


def verdict_of(row: Row, results: Results) -> str:
    """The verdict on the page: ``answer``, or for *holds in part* the entry of ``PARTS``.

    Raises:
        InputError: the claim holds in part and does not say how, or says how and does not.
    """
    found = answer(row, results)
    if (found == "holds in part") != (row.part in PARTS):
        raise InputError(
            f"{row.id} {found} and has part {row.part!r}; need one of {', '.join(PARTS)} if it holds in part"
        )
    return PARTS.get(row.part, found)


def _joined(parts: Sequence[str]) -> str:
    told = [part for part in parts if part != "not tested here"]
    if not told:
        return "not tested here"
    if len(set(told)) == 1:
        return told[0]
    return "holds in part" if {"holds", "holds in part"} & set(told) else "not shown"


def table(rows: Sequence[Row], results: Results) -> str:
    """One line a claim: id and words, verdict, the numbers that decide with their ranges, and on what."""
    lines = [
        "| claim | verdict | what decides: ours (95%) and its range | models, texts, seeds | note |",
        "| --- " * 5 + "|",
    ]
    for row in rows:
        verdict = verdict_of(row, results)
        told = "<br>".join(_cell_of(part, results) for part in row.decides)
        _, _, place = row.where.partition(", ")
        words = f'<a id="{row.id.lower()}"></a>**{row.id}** {row.words} ({place})'
        lines.append(
            line(
                words,
                f"**{verdict}**",
                told or "none",
                row.on,
                _linked(results.fill(f"{row.more} {row.note or row.why}".strip())),
            )
        )
    return "\n".join(lines)


def _cell_of(part: Part, results: Results) -> str:
    folder, _, number = part.of.partition("/")
    says = results.says(part)
    where = number.partition(_AT)[2]
    rows = results.numbers(part.of)
    place = f", {where}" if where and "*" not in where else ""
    known = f"{span(*results.range_of(part))}{'†' if part.by == 'page' else ''}"
    link = f"[{folder}](../analyses/{results.claims[folder].place}/result.csv)"
    return f"{says}{place}: {several(rows)} [{known}] ({link})"


def several(rows: pd.DataFrame) -> str:
    """One number with its interval; of several the range of the values, and of the intervals."""
    known = rows.dropna(subset=["value"])
    if known.empty:
        return "not defined"
    if len(known) == 1 or known["value"].nunique() == 1:
        return shown(dict(known.iloc[0]))
    of_values = _between(known["value"].min(), known["value"].max())
    of_bounds = _between(known["low"].min(), known["high"].max())
    return of_values if of_bounds == of_values else f"{of_values} ({of_bounds})"


def _between(low: float, high: float) -> str:
    """Two numbers, or one where they are written alike."""
    written = f"{low:.3g}", f"{high:.3g}"
    return " to ".join(dict.fromkeys(written))


def counts(page: Page, results: Results) -> dict[str, int]:
    """Verdict -> how many claims have it."""
    found = [verdict_of(row, results) for row in page.rows]
    return {verdict: found.count(verdict) for verdict in _ORDER}


def by_model(page: Page, results: Results, models: Mapping[str, Results]) -> str:
    """The claims about a model that is loaded: one line a claim, one column a model, the first number of each."""
    studied = [
        row
        for row in page.rows
        if any(results.claims[folder].model is None for folder in _folders(row))
    ]
    trained = list(dict.fromkeys(model for row in page.rows for model in row.trained))
    lines = [f"| claim | the paper's | {' | '.join([*models, *trained])} |"]
    lines.append("| --- " * (2 + len(models) + len(trained)) + "|")
    for row in studied:
        part = _own(row, results)[0]
        folder, _, number = part.of.partition("/")
        rule = results.claims[folder].rules[number.partition(_AT)[0]]
        cells = [_cell(row, part, of_model) for of_model in models.values()]
        for model in trained:
            own = Part(of=row.trained[model]) if model in row.trained else None
            cells.append(f"{results.judge(own)}: {several(results.numbers(own.of))}" if own else "")
        lines.append(line(_linked(f"[{row.id}] {results.says(part)}"), rule.theirs, *cells))
    return "\n".join(lines)


def flips(page: Page, results: Results, models: Mapping[str, Results]) -> str:
    """Say of each other model which of the claims that it was asked have another verdict there, by the same numbers."""
    parts = []
    for model, of_model in models.items():
        asked, lines = 0, []
        for row in page.rows:
            own = [part for part in _own(row, results) if of_model.judge(part) != "not tested here"]
            verdicts = [_joined([one.judge(part) for part in own]) for one in (results, of_model)]
            asked += bool(own)
            if own and verdicts[0] != verdicts[1]:
                told = "; ".join(
                    f"{results.says(part)}: {several(of_model.numbers(part.of))} [{span(*results.range_of(part))}]"
                    for part in own
                )
                lines.append(line(_linked(f"[{row.id}] {row.plain}"), *verdicts, told))
        heads = line("claim", DEFAULT_MODEL, model, "its numbers")
        told = (
            "\n".join([heads, "| --- " * 4 + "|", *lines])
            if lines
            else "All have the same verdict there."
        )
        n = sum(bool(_own(row, results)) for row in page.rows)
        parts.append(
            f"**{model}**: {asked} of {n} claims were asked, and {len(lines)} have another verdict.\n\n{told}"
        )
    return "\n\n".join(parts)


def _own(row: Row, results: Results) -> list[Part]:
    """The numbers of a claim that are those of a model that is loaded."""
    return [one for one in row.decides if results.claims[one.of.partition("/")[0]].model is None]


def _cell(row: Row, part: Part, results: Results) -> str:
    own = _own(row, results)
    folder = part.of.partition("/")[0]
    if folder in results.tables and results.tables[folder]["number"].isna().any():
        return str(results.tables[folder]["note"].iloc[0])
    rows = results.numbers(part.of)
    if rows.empty:
        return "not run"
    return f"{_joined([results.judge(one) for one in own])}: {several(rows)}"


def _linked(text: str) -> str:
    """``[A9]`` as a link to its row, in a form that GitHub and Sphinx both follow."""
    return _ID.sub(lambda found: f'<a href="#{found[1].lower()}">{found[1]}</a>', text)


def _folders(row: Row) -> Iterator[str]:
    return (part.of.partition("/")[0] for part in row.decides)


def _part(fields: Any, names: Mapping[str, str]) -> Part:
    if isinstance(fields, str):
        fields = {"of": fields}
    fields = {"says": names.get(fields["of"].partition(_AT)[0], "")} | fields
    if "range" in fields:
        low, high = (float(bound) for bound in fields["range"])
        fields |= {"by": "page", "range": (low, high)}
    return Part(**fields)


def models(folder: Path, known: Results) -> dict[str, Results]:
    """Model -> its results, from the tables that ``--by-model --keep`` wrote."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        rows = pd.read_csv(path)
        tables = {str(name): of.reset_index(drop=True) for name, of in rows.groupby("folder")}
        found[str(rows["model"].iloc[0])] = Results(
            claims=known.claims, tables=tables, of_another_model=True
        )
    return found


def _others(folder: Path, results: Results) -> dict[str, Results]:
    """The other models' results; the default model has read more texts than its own table of this kind holds."""
    return {name: own for name, own in models(folder, results).items() if name != DEFAULT_MODEL}


def cost(folder: Path, *, parameters: float) -> str:
    """Estimate time and memory of all analyses of a model on two cores, by the slowest model that was run."""
    runs = [pd.read_csv(path).drop_duplicates("folder") for path in sorted(folder.glob("*.csv"))]
    if not runs:
        return "No model was timed by this command yet."
    runs = [
        run for run in runs if len(run) == max(map(len, runs))
    ]  # the others were asked only some of the claims
    rate = max(float(run["seconds"].sum() / run["parameters"].iloc[0]) for run in runs)
    run = max(runs, key=lambda one: one["parameters"].iloc[0])
    minutes, size = run["seconds"].sum() / 60, run["parameters"].iloc[0] / 1e6
    return (
        f"{run['model'].iloc[0]} ({size:.0f}M parameters) took {minutes:.0f} minutes on two busy cores. A model of "
        f"{parameters / 1e9:.1f}B would take {rate * parameters / 3600:.0f} hours there, and "
        f"{4 * parameters / 1e9 + 2:.0f} GB in float32. A GPU is used if there is one."
    )


def claims_page(page: Page, results: Results, *, folder: Path) -> str:
    """docs/claims.md: the answer, a box for each paper, each claim with one number, and other models."""
    boxes, tables = [], []
    for paper in page.papers:
        rows = sorted(
            (row for row in page.rows if row.id[0] == paper.letter),
            key=lambda row: _ORDER.index(verdict_of(row, results)),
        )
        bar = "".join(_MARKS.get(verdict_of(row, results), "·") for row in rows)
        name = f"{paper.letter}: *{paper.title}*"
        boxes.append(
            f"> **{name}** (arXiv {paper.number}) {bar}<br>\n> {_linked(paper.holds)}<br>\n"
            f"> **What fails or is weaker:** {_linked(paper.fails)}"
        )
        lines = ["| claim | verdict | one number |", "| --- " * 3 + "|"]
        for row in rows:
            words = f'<a id="{row.id.lower()}"></a>**{row.id}** {row.plain}'
            lines.append(line(words, f"**{verdict_of(row, results)}**", results.fill(row.short)))
        tables.append(f"## {name}\n\n{paper.words}\n" + "\n".join(lines))
    found, tested = counts(page, results), [row for row in page.rows if row.decides]
    opening = _linked(results.fill(page.opening)).format(
        n=len(page.rows),
        tested=len(tested),
        default=sum(
            all(results.claims[folder].model is None for folder in _folders(row)) for row in tested
        ),
        holds=found["holds"],
        part=sum(found[verdict] for verdict in PARTS.values()),
        verdicts="\n".join(
            line(_MARKS.get(one, "·"), one, str(n), _MEANINGS[one]) for one, n in found.items()
        ),
        boxes="\n\n".join(boxes),
    )
    others = flips(page, results, _others(folder, results)) or "No other model was asked."
    return "\n\n".join(
        [opening.rstrip("\n"), *tables, page.closing.lstrip("\n").format(others=others)]
    )


def long_page(page: Page, results: Results, *, folder: Path) -> str:
    """docs/claims_in_detail.md: every number of every claim, and the claims by model."""
    parts = [page.long_opening + "\n"]
    for paper in page.papers:
        rows = [row for row in page.rows if row.id[0] == paper.letter]
        parts.append(f"## {paper.letter}: *{paper.title}*\n\n{table(rows, results)}\n\n")
    told = ""
    if others := _others(folder, results):
        rows = by_model(page, results, {DEFAULT_MODEL: results} | others)
        told = f"{DEFAULT_MODEL} read up to five texts, the other real models one.\n\n{rows}\n\n"
    return "".join(parts) + page.long_closing.format(
        table=told, cost=cost(folder, parameters=6.7e9)
    )


def write_pages(page: Page, results: Results, *, docs: Path, folder: Path) -> None:
    """Write both pages.

    Args:
        page: the claims.
        results: the committed ones.
        docs: the folder that the pages go to.
        folder: the tables by model.
    """
    (docs / "claims.md").write_text(claims_page(page, results, folder=folder), encoding="utf-8")
    (docs / "claims_in_detail.md").write_text(
        long_page(page, results, folder=folder), encoding="utf-8"
    )

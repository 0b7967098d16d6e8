"""What a claim of ``analyses/`` says, how its numbers are judged by it, and the tables that show the verdicts.

A claim is a folder with a ``claim.md``: a title, the question, the prediction, what would refute it, and a TOML block
with the rule of each number, all written before the run. ``result.csv`` beside it holds what came.

A number is judged twice. The *verdict* is on the paper, and there is one only where the paper has a number. The
*prediction* says whether the number is where the claim said, before the run, that it would be.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sink_lens.errors import InputError
from sink_lens.stats import Interval

VERDICTS = ("reproduced", "not reproduced", "not shown", "contradicted", "not comparable")
"""On the paper's number: the whole interval in the range, none of it, a part of it, all of it in the opposite range; or
no range was written down, since ours is of another kind."""
NO_NUMBER = "no number"
"""The verdict where the paper has no number to reproduce."""
PREDICTIONS = ("as predicted", "not as predicted", "not shown", "opposite", "none made")
"""On our own prediction: the whole interval in the range, none of it, a part of it, all of it in the opposite range; or
no range. Where we expected something else than the paper, the range is ``predicted``, and the paper's is the opposite
one."""
_TABLE = re.compile(r"(<!-- result -->\n).*?(<!-- /result -->)", flags=re.S)
_BLOCK = re.compile(r"^```toml\n(.*?)^```$", flags=re.S | re.M)
_AT = " @ "
_BRACKETS = re.compile(r"\(.*?\)")
_BAR = r"\|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one number is judged: the whole interval must lie in a range that was written before the run."""

    says: str
    """What the number is, with its unit."""
    theirs: str = "none given"
    """The paper's number, or what it says without one; brackets say of what it is."""
    reproduced: tuple[float, float] = (math.nan, math.nan)
    """Where the interval must lie for the claim to be reproduced; nan where nothing is judged."""
    contradicted: tuple[float, float] = (math.nan, math.nan)
    """Where the interval must lie for the claim to be contradicted; nan is nowhere."""
    predicted: tuple[float, float] = (math.nan, math.nan)
    """Where our prediction, written before the run, puts it, if that is not ``reproduced``."""

    @property
    def has_number(self) -> bool:
        """Return whether the paper gives a number: a digit outside brackets."""
        return any(letter.isdigit() for letter in _BRACKETS.sub("", self.theirs))

    def verdict(self, found: Interval) -> str:
        """One of ``VERDICTS``, or ``NO_NUMBER``; a number that is not defined, or has no interval, shows nothing."""
        if not self.has_number:
            return NO_NUMBER
        if math.isnan(self.reproduced[0]):
            return "not comparable"
        if _within(found, self.reproduced):
            return "reproduced"
        if _within(found, self.contradicted):
            return "contradicted"
        return "not reproduced" if _outside(found, self.reproduced) else "not shown"

    def prediction(self, found: Interval) -> str:
        """One of ``PREDICTIONS``."""
        ours, opposite = self.reproduced, self.contradicted
        if not math.isnan(self.predicted[0]):
            ours, opposite = self.predicted, self.reproduced
        if math.isnan(ours[0]):
            return "none made"
        if _within(found, ours):
            return "as predicted"
        if _within(found, opposite):
            return "opposite"
        return "not as predicted" if _outside(found, ours) else "not shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What ``claim.md`` says."""

    folder: Path
    title: str
    paper: str
    """Short name of the paper and its figure, as in ``A, figure 3``."""
    model: str | None
    """What it is about where it makes models of its own; None where it studies a model that is loaded."""
    rules: Mapping[str, Rule]
    """Number -> its rule, the most important one first."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def place(self) -> str:
        """Path of the folder from ``analyses/``: the paper's folder and its own."""
        return f"{self.folder.parent.name}/{self.name}"


def read_claim(folder: Path) -> Claim:
    """The claim of a folder.

    Raises:
        InputError: there is no ``claim.md``, or it has no title, no TOML block, or a rule that cannot be used.
    """
    path = folder / "claim.md"
    if not path.is_file():
        raise InputError(
            f"{folder} has no claim.md; need the folder of an analysis. Check the name."
        )
    text = path.read_text(encoding="utf-8")
    block, title = _BLOCK.search(text), text.partition("\n")[0]
    if block is None or not title.startswith("# "):
        raise InputError(
            f"{path} has no title or no TOML block; need both. Write the rules down before the run."
        )
    fields = tomllib.loads(block[1])
    rules = {
        name: _rule(name, fields.pop(name))
        for name, value in list(fields.items())
        if isinstance(value, dict)
    }
    if not rules or set(fields) - {"paper", "model"} or "paper" not in fields:
        raise InputError(
            f"{path}: the TOML block has {sorted(fields)} and {len(rules)} rules; need paper and a rule."
        )
    return Claim(
        folder=folder,
        title=title[2:],
        paper=fields["paper"],
        model=fields.get("model"),
        rules=rules,
    )


def judge(claim: Claim, numbers: pd.DataFrame, *, model: str) -> pd.DataFrame:
    """The result: one row a number, with the paper's, the rule and the verdict.

    Raises:
        InputError: a number without a rule, or a rule without a number.
    """
    names = [str(name) for name in numbers["number"]]
    if {name.partition(_AT)[0] for name in names} != set(claim.rules):
        raise InputError(
            f"{claim.name} gives {names} and has rules for {list(claim.rules)}; need one for each."
        )
    rows = []
    for name, row in zip(names, numbers.to_dict("records"), strict=True):
        rule = claim.rules[name.partition(_AT)[0]]
        found = Interval(estimate=row["value"], low=row["low"], high=row["high"], n=row["n"])
        rows.append(
            {
                "number": name,
                "says": rule.says,
                "value": row["value"],
                "low": row["low"],
                "high": row["high"],
                "n": row["n"],
                "theirs": rule.theirs,
                "reproduced_if": span(*rule.reproduced),
                "contradicted_if": span(*rule.contradicted),
                "verdict": rule.verdict(found),
                "prediction": rule.prediction(found),
                "model": model,
            }
        )
    return pd.DataFrame(rows)


def keep(claim: Claim, result: pd.DataFrame, *, out: Path) -> None:
    """Put a finished run's result and figure into the claim's folder, and its table into ``claim.md``."""
    _write(result, claim.folder)
    (claim.folder / "figure.png").write_bytes((out / "figure.png").read_bytes())
    show(claim)


def show(claim: Claim) -> None:
    """Write the committed result, judged by the rules as they stand, into ``result.csv`` and ``claim.md``."""
    result, path = read_result(claim), claim.folder / "claim.md"
    if not result.empty:
        _write(result, claim.folder)
        path.write_text(with_table(path.read_text(encoding="utf-8"), result), encoding="utf-8")


def read_result(claim: Claim) -> pd.DataFrame:
    """The committed result of a claim, judged by the rules as they stand; empty where it has none."""
    path = claim.folder / "result.csv"
    if not path.is_file():
        return pd.DataFrame()
    table = pd.read_csv(path, dtype={"number": str})
    return judge(claim, table, model=str(table["model"].iloc[0]))


def with_table(text: str, result: pd.DataFrame) -> str:
    """The text of a ``claim.md`` with the table of a result between its two marks."""
    lines = [
        "| number | ours (95%) | theirs | verdict on theirs | our prediction |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result.to_dict("records"):
        where = row["number"].partition(_AT)[2]
        says = f"{row['says']}, {where}" if where else row["says"]
        lines.append(line(says, shown(row), row["theirs"], row["verdict"], row["prediction"]))
    return _TABLE.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], text)


def overview(claims: Sequence[Claim]) -> str:
    """The table of all claims: one line each, its first number, and how many others went which way."""
    lines = [
        "| claim | paper | model | what | ours (95%) | theirs | verdict on theirs | our prediction | further numbers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for claim in claims:
        result = read_result(claim)
        link = f"[{claim.title}]({claim.place}/claim.md) ([figure]({claim.place}/figure.png))"
        if result.empty:
            lines.append(
                line(
                    f"[{claim.title}]({claim.place}/claim.md)",
                    claim.paper,
                    "",
                    "not run yet",
                    *[""] * 5,
                )
            )
            continue
        first, others = result.to_dict("records")[0], result.iloc[1:]
        cells = (
            link,
            claim.paper,
            first["model"],
            first["says"],
            shown(first),
            first["theirs"],
            first["verdict"],
        )
        lines.append(line(*cells, first["prediction"], _counted(others)))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """A figure or table of a paper, and where it is answered here; a row of ``coverage.toml``."""

    where: str
    """Short name of the paper, and its figure or table."""
    shows: str
    """What it shows."""
    folder: str = ""
    """Name of the claim's folder; empty where it was not attempted."""
    numbers: tuple[str, ...] = ()
    """The claim's numbers that answer it; all where none is named."""
    theirs: str = ""
    """Their scale."""
    reason: str = ""
    """Why it was not attempted."""


def read_coverage(path: Path, *, claims: Sequence[Claim]) -> list[Covered]:
    """The rows of the coverage table.

    Raises:
        InputError: a row with neither a folder of a claim nor a reason, or with both, or a number that the claim lacks.
    """
    known = {claim.name: claim for claim in claims}
    rows = []
    for fields in tomllib.loads(path.read_text(encoding="utf-8"))["row"]:
        row = Covered(**(fields | {"numbers": tuple(fields.get("numbers", ()))}))
        if bool(row.folder) == bool(row.reason.strip()):
            raise InputError(
                f"{row.where} has folder {row.folder!r}, reason {row.reason!r}; need one of the two"
            )
        if row.folder and row.folder not in known:
            raise InputError(
                f"{row.where} is said to be in {row.folder}; need one of {', '.join(sorted(known))}"
            )
        if lacking := sorted(set(row.numbers) - set(known[row.folder].rules if row.folder else ())):
            raise InputError(
                f"{row.where} names {', '.join(lacking)}; need numbers of the claim's rules"
            )
        rows.append(row)
    return rows


def coverage(rows: Sequence[Covered], *, claims: Sequence[Claim]) -> str:
    """The table of what of the papers is here: folder, both scales, and what came, or why nothing was."""
    known = {claim.name: claim for claim in claims}
    lines = [
        "| figure or table | what it shows | our table | our model | their model | result |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if not row.folder:
            lines.append(line(row.where, row.shows, "not attempted", "", row.theirs, row.reason))
            continue
        result = read_result(known[row.folder])
        names = result["number"].str.partition(_AT)[0]
        found = result[names.isin(row.numbers)] if row.numbers else result
        link = f"[{row.folder}](../analyses/{known[row.folder].place}/result.csv)"
        lines.append(
            line(
                row.where,
                row.shows,
                link,
                str(result["model"].iloc[0]),
                row.theirs,
                _counted(found),
            )
        )
    return "\n".join(lines)


def shown(row: Mapping[Any, Any]) -> str:
    """A number with its interval as a table shows it."""
    if math.isnan(row["value"]):
        return "not defined"
    value = f"{row['value']:.3g}"
    if math.isnan(row["low"]) or row["low"] == row["high"]:
        return value
    return f"{value} ({row['low']:.3g} to {row['high']:.3g})"


def span(low: float, high: float) -> str:
    """A range in words."""
    if math.isnan(low):
        return "never"
    if math.isinf(high):
        return "always" if math.isinf(low) else f">= {low:g}"
    return f"<= {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def _within(found: Interval, span: tuple[float, float]) -> bool:
    """Return whether the whole interval lies in a range; an undefined one lies in none."""
    return span[0] <= found.low and found.high <= span[1]


def _outside(found: Interval, span: tuple[float, float]) -> bool:
    """Return whether none of the interval lies in a range; an undefined one does not say."""
    return found.high < span[0] or span[1] < found.low


def _counted(numbers: pd.DataFrame) -> str:
    """Return how many numbers went which way: those of the paper's by their verdict, the others by our prediction."""
    theirs = numbers["verdict"] != NO_NUMBER
    sides = (numbers["verdict"][theirs], VERDICTS), (numbers["prediction"][~theirs], PREDICTIONS)
    said = [
        [f"{(side == name).sum()} {name}" for name in names if (side == name).any()]
        for side, names in sides
    ]
    words = zip(("theirs", "ours"), said, strict=True)
    return "; ".join(f"{whose}: {', '.join(counts)}" for whose, counts in words if counts)


def _write(result: pd.DataFrame, folder: Path) -> None:
    result.to_csv(folder / "result.csv", index=False, float_format="%.6g", lineterminator="\n")


def line(*cells: str) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |"


def _rule(name: str, fields: dict[str, Any]) -> Rule:
    for key in ("reproduced", "contradicted", "predicted"):
        if key in fields:
            fields[key] = tuple(float(bound) for bound in fields[key])
    try:
        rule = Rule(**fields)
    except TypeError as error:
        raise InputError(f"the rule {name!r}: {error}; need says and ranges") from error
    (low, high), (other_low, other_high) = rule.reproduced, rule.contradicted
    if low <= other_high and other_low <= high:
        raise InputError(
            f"the rule {name!r} can be reproduced and contradicted at once; need ranges that do not meet"
        )
    return rule

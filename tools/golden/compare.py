"""Compares two folders of ``make.py``, value by value: ``python tools/golden/compare.py BEFORE AFTER [--map FILE]``.

Every parquet, CSV and safetensors file is a *table*; nothing is known of what it holds, so that a new table is compared
too. Tables must have the same columns, of the same type, and the same rows in the same order; floats are equal where
their bits are, and nan equals nan. The order of columns is free. A safetensors file is a table with a column a tensor;
a CSV file is compared as text.

*Texts* (what was printed or told, ``run.json``, plain values) are compared too, without what differs from run to run:
times, versions, and the hashes and sizes of files. With ``--tables-only`` their differences are listed and allowed.

A map says what was renamed on purpose, in TOML. Its names of tables are patterns of the path below the folder,
before the change; the first that fits decides:

    [tables]                                # a file by its last name, or by its path below the folder
    "holds.parquet" = "sublayers.parquet"
    [columns."*/links.parquet"]             # "*" is every table
    verdict = "judgement"
    [values."*/links.parquet"]              # column (by its name before) -> value -> value
    link = { "outlier_key" = "outlier dimension" }
    [dtypes."*/links.parquet"]              # column -> why its type may differ; its values may not
    layer = "nullable now"
    [ignored]                               # table -> why it is not compared, on either side
    "*/old.parquet" = "no longer written"
    [ignored_columns."*/log.parquet"]       # column -> why it is not compared, on either side
    seconds = "a time"
    [[texts]]                               # a regular expression, replaced in the texts of both sides
    find = "carriers"
    replace = "dimensions"

The exit code is 1 where something differs, or where an entry of the map fits nothing.
"""

import argparse
import fnmatch
import json
import re
import struct
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

TABLES = (".parquet", ".csv", ".safetensors")
TEXTS = (".txt", "run.json", ".facts.json")

RUN_TO_RUN = {
    "columns": {("*", "seconds"): "a time", ("*", "tokens_per_second"): "a time"},
    "fields": {
        "started": "a time",
        "ended": "a time",
        "provenance.versions": "versions of packages",
        "files.*.bytes": "pages and figures are not compared, and tables are by their values",
        "files.*.sha256": "the same",
    },
    "texts": [
        (r"\b\d[\d.,]* (s|ms|min|h)\b", "TIME"),
        (r"[^\n]*(\[\d\d:\d\d, |\x1b\[A)[^\n]*", ""),  # progress bars, which are drawn by the clock
    ],
}
"""What differs between two runs of one program, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not the same."""

    where: str
    """Path of the file, and the column where it is one."""
    what: str
    text: bool = False
    """Whether it is one of a text, not of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table, or a tensor."""

    dtype: str
    """Type, and the shape of a tensor."""
    values: list[Any]
    """Floats as their bits (nan and missing are None), everything else as it is."""
    shown: list[Any] = field(repr=False)
    """The same to be read by people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """What was changed on purpose: the sections of the map by their names."""

    given: Mapping[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Entries that fitted something."""

    def entries(self, section: str, table: str) -> dict[str, Any]:
        """Column -> what the section says of it, in one table; the first pattern that has the column decides."""
        found: dict[str, Any] = {}
        for pattern, columns in self.given.get(section, {}).items():
            if fits(table, pattern):
                for column, entry in columns.items():
                    found.setdefault(column, entry)
        return found

    def use(self, section: str, table: str, column: str = "") -> None:
        """Remember that an entry was needed."""
        for pattern, columns in self.given.get(section, {}).items():
            if fits(table, pattern) and (not column or column in columns):
                self.used.add(f"{section}.{pattern}" + (f".{column}" if column else ""))
                return

    def table(self, name: str) -> str:
        """The path of a table after the change."""
        for old, new in self.given.get("tables", {}).items():
            if fits(name, old):
                self.used.add(f"tables.{old}")
                return new if "/" in new else str(Path(name).with_name(new))
        return name

    def ignored(self, name: str) -> bool:
        """Return whether a table, by its path on its own side, is not compared."""
        found = any(fits(name, pattern) for pattern in self.given.get("ignored", {}))
        if found:
            self.use("ignored", name)
        return found

    def text(self, text: str) -> str:
        """A text with what is replaced on both sides."""
        for entry in self.given.get("texts", ()):
            text, n = re.subn(entry["find"], entry["replace"], text)
            if n:
                self.used.add(f"texts.{entry['find']}")
        return text

    @property
    def unused(self) -> list[str]:
        """Entries that fitted nothing: a wrong name, or of a change that was undone."""
        names = [f"tables.{old}" for old in self.given.get("tables", {})]
        names += [f"ignored.{name}" for name in self.given.get("ignored", {})]
        names += [f"texts.{entry['find']}" for entry in self.given.get("texts", ())]
        for section in ("columns", "values", "dtypes", "ignored_columns"):
            names += [
                f"{section}.{table}.{name}"
                for table, of in self.given.get(section, {}).items()
                for name in of
            ]
        return [name for name in names if name not in self.used]


SECTIONS = {"tables", "columns", "values", "dtypes", "ignored", "ignored_columns", "texts"}


def read_map(path: Path | None) -> Renames:
    """The map of a file; an empty one where there is none.

    Raises:
        SystemExit: it has a section that is not known.
    """
    given = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted(set(given) - SECTIONS):
        raise SystemExit(
            f"{path} has {', '.join(unknown)}; need some of {', '.join(sorted(SECTIONS))}"
        )
    return Renames(given=given)


def fits(name: str, pattern: str) -> bool:
    """Return whether a path fits a pattern, whole or by its last part."""
    return fnmatch.fnmatchcase(name, pattern) or (
        "/" not in pattern and fnmatch.fnmatchcase(Path(name).name, pattern)
    )


# --- reading


def files(folder: Path, *, ends: tuple[str, ...]) -> dict[str, Path]:
    """Path below the folder -> the file."""
    found = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name.endswith(ends)
    )
    return {path.relative_to(folder).as_posix(): path for path in found}


def read(path: Path) -> dict[str, Column]:
    """The columns of a table."""
    if path.suffix == ".csv":
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        values = {str(name): frame[name].tolist() for name in frame.columns}
        return {
            name: Column(dtype="text", values=column, shown=column)
            for name, column in values.items()
        }
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return {name: of_arrow(table.column(name)) for name in table.column_names}
    return dict(of_safetensors(path.read_bytes()))


def of_arrow(column: pa.ChunkedArray) -> Column:
    """A column of a parquet file."""
    shown = column.to_pylist()
    return Column(dtype=str(column.type), values=[bits(value) for value in shown], shown=shown)


def bits(value: Any) -> Any:
    """A value in which floats are their bits, at any depth: 0.0 is not -0.0, nan is None."""
    if isinstance(value, float):
        return None if np.isnan(value) else struct.pack("<d", value)
    if isinstance(value, list | tuple):
        return tuple(bits(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, bits(one)) for name, one in value.items())
    return value


_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
}
_FLOATS = {"F64": "<u8", "F32": "<u4", "F16": "<u2"}


def of_safetensors(payload: bytes) -> Iterator[tuple[str, Column]]:
    """The tensors of a file; those whose type NumPy lacks as bytes."""
    size = int.from_bytes(payload[:8], "little")
    for name, entry in json.loads(payload[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = payload[8 + size + begin : 8 + size + end]
        flat = np.frombuffer(raw, dtype=_NUMPY.get(entry["dtype"], "u1"))
        values: list[Any] = flat.tolist()
        if entry["dtype"] in _FLOATS:
            as_bits = np.frombuffer(raw, dtype=_FLOATS[entry["dtype"]]).tolist()
            values = [
                None if lost else one
                for lost, one in zip(np.isnan(flat).tolist(), as_bits, strict=True)
            ]
        yield (
            name,
            Column(dtype=f"{entry['dtype']} {entry['shape']}", values=values, shown=flat.tolist()),
        )


def fields_of(record: Any, *, within: str = "") -> dict[str, Any]:
    """Dotted name -> value, of a JSON without levels."""
    if isinstance(record, dict) and record:
        found: dict[str, Any] = {}
        for name, value in record.items():
            found |= fields_of(value, within=f"{within}.{name}" if within else str(name))
        return found
    return {within: record}


# --- comparing


@dataclass(slots=True, kw_only=True)
class Counts:
    """What was compared."""

    tables: int = 0
    columns: int = 0
    values: int = 0
    texts: int = 0


def compare(
    before: Path, after: Path, *, renames: Renames | None = None
) -> tuple[list[Difference], Counts]:
    """Every difference between two folders, tables first, and how much was compared.

    Raises:
        SystemExit: one of them holds no table.
    """
    renames = Renames() if renames is None else renames
    counts = Counts()
    found = list(compare_tables(before, after, renames=renames, counts=counts))
    found += compare_texts(before, after, renames=renames, counts=counts)
    return found, counts


def compare_tables(
    before: Path, after: Path, *, renames: Renames, counts: Counts
) -> Iterator[Difference]:
    """The differences of the tables."""
    old = {
        name: path for name, path in files(before, ends=TABLES).items() if not renames.ignored(name)
    }
    new = {
        name: path for name, path in files(after, ends=TABLES).items() if not renames.ignored(name)
    }
    for folder, there in ((before, old), (after, new)):
        if not there:
            raise SystemExit(f"{folder} holds no table; need a folder of make.py")
    paired = {name: renames.table(name) for name in old}
    for name, other in paired.items():
        if other in new:
            yield from compare_table(
                name, read(old[name]), read(new[other]), renames=renames, counts=counts
            )
        else:
            yield Difference(where=other, what="the table is missing after")
    for name in sorted(set(new) - set(paired.values())):
        yield Difference(where=name, what="the table is new after")


def compare_table(
    name: str,
    old: Mapping[str, Column],
    new: Mapping[str, Column],
    *,
    renames: Renames,
    counts: Counts,
) -> Iterator[Difference]:
    """The differences of one table, by its path before."""
    counts.tables += 1
    columns, ignored = renames.entries("columns", name), renames.entries("ignored_columns", name)
    values, dtypes = renames.entries("values", name), renames.entries("dtypes", name)
    usual = {column for pattern, column in RUN_TO_RUN["columns"] if fits(name, pattern)}
    for column in {*old, *new} & set(ignored):
        renames.use("ignored_columns", name, column)
    paired = {
        column: columns.get(column, column)
        for column in old
        if column not in ignored and column not in usual
    }
    for column, other in paired.items():
        where = f"{name}: {column}" + (f" (now {other})" if other != column else "")
        if column in columns:
            renames.use("columns", name, column)
        if other not in new:
            yield Difference(where=where, what="the column is missing after")
            continue
        one, two = old[column], new[other]
        counts.columns += 1
        counts.values += len(one.values)
        if one.dtype != two.dtype:
            if column not in dtypes:
                yield Difference(
                    where=where, what=f"the type is {one.dtype} before, {two.dtype} after"
                )
                continue
            renames.use("dtypes", name, column)
            one, two = plain(one), plain(two)
        if column in values:
            renames.use("values", name, column)
            now = values[column]
            pairs = zip(one.values, map(str, one.shown), strict=True)
            mapped = [bits(now[shown]) if shown in now else value for value, shown in pairs]
            one = Column(dtype=one.dtype, values=mapped, shown=one.shown)
        if (what := unequal(one, two)) is not None:
            yield Difference(where=where, what=what)
    for column in sorted(set(new) - set(paired.values()) - set(ignored) - usual):
        yield Difference(where=f"{name}: {column}", what="the column is new after")


def plain(column: Column) -> Column:
    """A column whose type may differ: whole numbers as floats, everything else as it is."""
    whole = [isinstance(one, int) and not isinstance(one, bool) for one in column.shown]
    values = [
        bits(float(one) if is_whole else one)
        for one, is_whole in zip(column.shown, whole, strict=True)
    ]
    return Column(dtype="any", values=values, shown=column.shown)


def unequal(one: Column, two: Column) -> str | None:
    """Return how two columns differ; None where they do not."""
    if one.values == two.values:
        return None
    if len(one.values) != len(two.values):
        return f"{len(one.values)} rows before, {len(two.values)} after"
    rows = [
        row
        for row, pair in enumerate(zip(one.values, two.values, strict=True))
        if pair[0] != pair[1]
    ]
    row = rows[0]
    said = f"{len(rows)} of {len(one.values)} values differ; first in row {row}: {one.shown[row]!r} before, "
    said += f"{two.shown[row]!r} after"
    if sorted(map(repr, one.values)) == sorted(map(repr, two.values)):
        said += " (the same values in another order)"
    return said


def compare_texts(
    before: Path, after: Path, *, renames: Renames, counts: Counts
) -> Iterator[Difference]:
    """The differences of what was printed and of the records."""
    old, new = (files(folder, ends=TEXTS) for folder in (before, after))
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            yield Difference(
                where=name, what=f"only {'after' if name in new else 'before'}", text=True
            )
            continue
        counts.texts += 1
        one, two = (lines_of(there[name], renames=renames) for there in (old, new))
        if one == two:
            continue
        gone, come = (
            [line for line in lines if line not in set(others)]
            for lines, others in ((one, two), (two, one))
        )
        shown = [f"- {line}" for line in gone[:2]] + [f"+ {line}" for line in come[:2]]
        what = (
            f"{len(gone)} lines before and {len(come)} after differ"
            if shown
            else "the order of the lines differs"
        )
        yield Difference(where=name, what="\n    ".join([what, *shown]), text=True)


def lines_of(path: Path, *, renames: Renames) -> list[str]:
    """A text by lines, a JSON by fields, without what differs from run to run."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        left_out = [
            re.compile(re.escape(name).replace(r"\*", ".*") + r"(\..*)?")
            for name in RUN_TO_RUN["fields"]
        ]
        kept = {
            name: value
            for name, value in sorted(fields_of(json.loads(text)).items())
            if not any(pattern.fullmatch(name) for pattern in left_out)
        }
        text = "\n".join(
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in kept.items()
        )
    for pattern, replacement in RUN_TO_RUN["texts"]:
        text = re.sub(pattern, replacement, text)
    return [line for line in renames.text(text).splitlines() if line.strip()]


def main(arguments: list[str] | None = None) -> int:
    """Compare, say what differs, and return the exit code."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("before", type=Path)
    asked.add_argument("after", type=Path)
    asked.add_argument(
        "--map", type=Path, dest="renames", metavar="FILE", help="what was renamed on purpose"
    )
    asked.add_argument("--tables-only", action="store_true", help="allow differences of texts")
    options = asked.parse_args(arguments)
    renames = read_map(options.renames)
    found, counts = compare(options.before, options.after, renames=renames)
    lines = [f"{one.where}\n    {one.what}" for one in found]
    lines += [f"the map: {name} fits nothing" for name in renames.unused]
    texts = sum(one.text for one in found)
    bad = len(found) - texts + len(renames.unused) + (0 if options.tables_only else texts)
    lines.append(
        f"{counts.tables} tables, {counts.columns} columns, {counts.values:,} values, {counts.texts} texts compared: "
        f"{len(found) - texts} differences in tables, {texts} in texts"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

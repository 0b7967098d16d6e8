"""No test passes in which the library writes a table that `sink_lens.schema` describes otherwise.

Tables that a test writes itself, such as a toy run of two columns, are its own affair.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from pandas.api import types

from sink_lens.schema import table_of, tables_of


def complaints(kind: str, name: str, frame: pd.DataFrame, *, file: str = "parquet") -> list[str]:
    """What is wrong with a table that a kind of run writes, a sentence each; nothing of a kind without tables."""
    if not tables_of(kind):
        return []
    table = table_of(kind, name)
    if table is None:
        return [f"a {kind} run has no table {name!r}"]
    where, known = f"{kind}/{name}", {column.name: column for column in table.columns}
    found = (
        []
        if file == table.file
        else [f"{where} is written as {file}; the schema says {table.file}"]
    )
    absent = [
        column.name
        for column in table.columns
        if not column.optional and column.name not in frame.columns
    ]
    found += [f"{where} lacks the column {each!r}" for each in absent]
    for column in map(str, frame.columns):
        if column not in known:
            found += (
                []
                if table.open
                else [f"{where} has a column {column!r} that the schema does not know"]
            )
        elif not (table.open and known[column].optional) and not _fits(
            frame[column], known[column].dtype
        ):
            family = family_of(frame[column])
            found.append(
                f"{where} has {family} in the column {column!r}; the schema says {known[column].dtype}"
            )
    return found


def family_of(column: pd.Series) -> str:
    """int, float, bool or str, whatever the width; else what pandas calls it."""
    families = {"integer": "int", "floating": "float", "boolean": "bool", "string": "str"}
    inferred = types.infer_dtype(column, skipna=True)
    return families.get(inferred, inferred)


def _fits(column: pd.Series, dtype: str) -> bool:
    if dtype == "any" or column.empty or column.isna().all():
        return True  # an empty table, or a column of which nothing is known, has no type
    family = family_of(column)
    if dtype == "int" and family == "float" and column.isna().any():
        return bool((column.dropna() % 1 == 0).all())
    return family == dtype


@pytest.fixture(scope="session", autouse=True)
def _tables_are_as_the_schema_says() -> Iterator[None]:
    """Refuses every table that a module of sink_lens writes against the schema."""
    from sink_lens.records import RunWriter

    def checking(method: str, file: str) -> Any:
        write = getattr(RunWriter, method)

        def checked(self: RunWriter, name: str, frame: pd.DataFrame) -> Any:
            caller = sys._getframe(1)
            if caller.f_code is RunWriter.read_or_make.__code__:
                caller = sys._getframe(2)
            if caller.f_globals.get("__name__", "").startswith("sink_lens."):
                wrong = complaints(self._record["kind"], name, frame, file=file)
                assert not wrong, "; ".join(wrong)
            return write(self, name, frame)

        return checked

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunWriter, "write_table", checking("write_table", "parquet"))
        patched.setattr(RunWriter, "write_csv", checking("write_csv", "csv"))
        yield

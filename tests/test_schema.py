"""Every column has a type, a unit and a sentence, and a table that is written otherwise is refused."""

import math
import re

import pandas as pd
import pytest
from written_tables import complaints

from sink_lens.kinds import all_kinds
from sink_lens.records import create_run
from sink_lens.schema import UNITS, table_of, tables_of

EVERY = [(kind, table) for kind in all_kinds() for table in tables_of(kind)]
COLUMNS = [(f"{kind}/{table.name}", column) for kind, table in EVERY for column in table.columns]


def of_neuron(**changed):
    """A row of trace/selectivity as it should be, with columns changed, or left out where they are None."""
    right = {
        "layer": [0],
        "neuron": [5],
        "position": [3],
        "activation": [1.0],
        "cosine": [0.5],
        "up": [1.0],
    }
    right |= {"gate": [math.nan]}
    return pd.DataFrame(
        {name: value for name, value in (right | changed).items() if value is not None}
    )


def test_meanings_and_units_are_sentences_and_of_the_list():
    # "Share of sequences ..." or "argmax ..." (a value of the column), to a full stop, and no second thought after it.
    wrong = [
        (where, one.meaning)
        for where, one in COLUMNS
        if not re.fullmatch(r"[\w-].{3,}[\w)`]\.", one.meaning)
    ]
    assert wrong == []
    used = {column.unit for _, column in COLUMNS}
    assert used == set(UNITS)
    for kind, table in EVERY:
        if any(column.unit == "of the row" for column in table.columns):
            assert "unit" in [column.name for column in table.columns], (kind, table.name)


def test_the_parts_of_a_table_are_found_under_their_number():
    assert table_of("sweep", "block-000012") is table_of("sweep", "block-*")
    assert table_of("trace", "block-000012") is None


def test_a_table_as_it_is_described_passes():
    assert complaints("trace", "selectivity", of_neuron()) == []
    others = (
        of_neuron()
        .astype("float32")
        .astype({"layer": "int32", "neuron": "int64", "position": "Int64"})
    )
    assert complaints("trace", "selectivity", others) == []


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (
            of_neuron(other=[1.0]),
            "trace/selectivity has a column 'other' that the schema does not know",
        ),
        (of_neuron(activation=None), "trace/selectivity lacks the column 'activation'"),
        (
            of_neuron(activation=[1]),
            "trace/selectivity has int in the column 'activation'; the schema says float",
        ),
        (
            of_neuron(layer=[0.0]),
            "trace/selectivity has float in the column 'layer'; the schema says int",
        ),
        (
            of_neuron(position=[True]),
            "trace/selectivity has bool in the column 'position'; the schema says int",
        ),
    ],
)
def test_a_table_that_is_written_otherwise_is_named(frame, said):
    assert complaints("trace", "selectivity", frame) == [said]


def test_a_table_that_no_run_has_and_a_file_of_another_kind_are_named():
    assert complaints("trace", "lore", of_neuron()) == ["a trace run has no table 'lore'"]
    assert complaints("trace", "selectivity", of_neuron(), file="csv") == [
        "trace/selectivity is written as csv; the schema says parquet"
    ]
    assert complaints("claim", "lore", of_neuron()) == []  # analyses write what they like


def test_optional_columns_may_be_absent_and_open_tables_have_more():
    frame = pd.DataFrame({"layer": [1], "changed": [True], "n": [2]})
    assert complaints("patch", "patches", frame) == []
    assert complaints("patch", "patches", frame.assign(mine=1)) != []
    cells = {
        one.name: {"int": 1, "float": 1.0, "bool": True, "str": "a"}[one.dtype]
        for one in tables_of("sweep")[2].columns
    }
    assert complaints("sweep", "cells", pd.DataFrame([cells]).assign(mine=1, place=3)) == []
    assert complaints("sweep", "cells", pd.DataFrame([cells]).assign(effect=3)) != []


def written(folder, module, frame):
    """A table written by a module of that name, as the library's modules write theirs."""
    names = {"__name__": module, "create_run": create_run, "folder": folder, "frame": frame}
    code = "with create_run(folder, kind='trace', config={}, provenance={}) as writer: "
    code += "writer.write_table('selectivity', frame)"
    exec(code, names)


def test_what_the_library_writes_is_checked_in_every_test(tmp_path):
    written(tmp_path / "right", "sink_lens.chain.planted", of_neuron())
    with pytest.raises(AssertionError, match="trace/selectivity lacks the column 'activation'"):
        written(tmp_path / "wrong", "sink_lens.chain.planted", of_neuron(activation=None))
    written(tmp_path / "toy", "test_of_mine", of_neuron(activation=None))

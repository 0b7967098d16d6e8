"""The comparison of two golden folders: it finds what is planted, and accepts what the map names."""

import json
import math
from pathlib import Path

import forks
import numpy as np
import pandas as pd
import pytest
import safetensors.numpy

from tools.golden.compare import main

ROOT = Path(__file__).parents[2]
LINKS = pd.DataFrame({"link": ["outlier_key", "key_sink", "key_sink"], "layer": [0, 1, 2]})
LINKS = LINKS.assign(value=[0.1, math.nan, -0.0], holds=[True, False, True])
TENSOR = np.arange(6, dtype=np.float32).reshape(2, 3)
RECORD = {
    "kind": "trace",
    "started": "today",
    "provenance": {"versions": {"torch": "2"}, "seed": 1},
    "files": {},
}


def write(
    folder,
    *,
    links=LINKS,
    name="links",
    tensor=TENSOR,
    csv=None,
    printed="it took 1.5 s\nholds\n",
    **record,
):
    out = folder / "runs" / "trace"
    out.mkdir(parents=True)
    if links is not None:
        links.to_parquet(out / f"{name}.parquet", index=False)
    (LINKS if csv is None else csv).to_csv(out / "summary.csv", index=False)
    safetensors.numpy.save_file({"means": tensor}, out / "means.safetensors")
    (out / "terminal.txt").write_text(printed)
    (out / "run.json").write_text(json.dumps(RECORD | record))
    return folder


@pytest.fixture
def compared(tmp_path, capsys):
    """``compared(..., renames=TOML)``: exit code and what was printed, for a folder beside the one of ``write()``."""
    write(tmp_path / "before")

    def run(*, renames=None, options=(), **changes):
        write(tmp_path / "after", **changes)
        if renames is not None:
            (tmp_path / "map.toml").write_text(renames)
            options = [*options, "--map", str(tmp_path / "map.toml")]
        code = main([str(tmp_path / "before"), str(tmp_path / "after"), *options])
        return code, capsys.readouterr().out

    return run


def changed(column, row, value):
    frame = LINKS.copy()
    frame.loc[row, column] = value
    return frame


def test_equal_folders_are_counted(compared):
    code, said = compared(started="tomorrow", provenance={"versions": {"torch": "3"}, "seed": 1})
    assert code == 0
    # 4 columns of 3 rows in the parquet and in the CSV, and a tensor of 6
    assert (
        said
        == "3 tables, 9 columns, 30 values, 2 texts compared: 0 differences in tables, 0 in texts\n"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"links": changed("value", 0, np.nextafter(0.1, 1))},
            "value\n    1 of 3 values differ; first in row 0: 0.1 ",
        ),
        ({"links": changed("value", 2, 0.0)}, "row 2: -0.0 before, 0.0 after"),
        ({"links": changed("value", 0, math.nan)}, "row 0: 0.1 before, None after"),
        ({"links": changed("link", 1, "sink")}, "row 1: 'key_sink' before, 'sink' after"),
        ({"links": changed("holds", 1, True)}, "row 1: False before, True after"),
        ({"links": LINKS.iloc[[1, 0, 2]]}, "(the same values in another order)"),
        ({"links": LINKS.iloc[:2]}, "3 rows before, 2 after"),
        (
            {"links": LINKS.drop(columns="value")},
            "runs/trace/links.parquet: value\n    the column is missing after",
        ),
        (
            {"links": LINKS.assign(more=1)},
            "runs/trace/links.parquet: more\n    the column is new after",
        ),
        ({"links": LINKS.astype({"layer": "int32"})}, "the type is int64 before, int32 after"),
        ({"links": None}, "runs/trace/links.parquet\n    the table is missing after"),
        ({"name": "chains"}, "runs/trace/chains.parquet\n    the table is new after"),
        ({"csv": changed("value", 0, 0.10000000000000002)}, "summary.csv: value"),
        (
            {"tensor": np.nextafter(TENSOR, np.float32(9))},
            "means.safetensors: means\n    6 of 6 values differ",
        ),
        ({"tensor": TENSOR.astype("float64")}, "the type is F32 [2, 3] before, F64 [2, 3] after"),
    ],
)
def test_a_planted_difference_is_found(compared, changes, says):
    code, said = compared(**changes, options=["--tables-only"])
    assert code == 1
    assert says in said


MAP = """
[tables]
"links.parquet" = "chain.parquet"
[columns."*/links.parquet"]
holds = "judgement"
[values."*/links.parquet"]
link = { key_sink = "key to sink" }
holds = { True = "yes", False = "no" }
[dtypes."*/links.parquet"]
holds = "words now"
layer = "narrower"
[ignored_columns."links.parquet"]
unit = "new"
[[texts]]
find = "holds|is found"
replace = "HOLDS"
"""
RENAMED = (
    LINKS.assign(
        link=LINKS["link"].replace("key_sink", "key to sink"), holds=["yes", "no", "yes"], unit="1"
    )
    .astype({"layer": "int32"})
    .rename(columns={"holds": "judgement"})
)


def test_what_the_map_renames_is_accepted(compared):
    code, said = compared(
        links=RENAMED, name="chain", printed="it took 3 s\nis found\n", renames=MAP
    )
    assert (code, said.splitlines()[:-1]) == (0, [])


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        ("link", 0, "key to sink"),
        ("judgement", 1, "yes"),
        ("layer", 2, 3),
        ("value", 0, np.nextafter(0.1, 0)),
    ],
)
def test_a_difference_is_found_behind_the_map(compared, column, row, value):
    links = RENAMED.copy()
    links.loc[row, column] = value
    code, said = compared(
        links=links, name="chain", printed="is found\n", renames=MAP, options=["--tables-only"]
    )
    assert code == 1
    assert f"{column}" in said
    assert "1 differences in tables" in said


@pytest.mark.exhaustive
def test_a_step_is_made_and_equal_to_itself(tmp_path, capsys):
    script, only = ROOT / "tools" / "golden" / "make.py", ("--only", "isolate-planted")
    code, said = forks.run(script, tmp_path / "made", *only, said=tmp_path / "said")
    assert code == 0, said
    run = tmp_path / "made" / "runs" / "isolate-planted"
    assert (
        len(pd.read_parquet(run / "cells.parquet")) == 2 * 4
    )  # two positions; three masses and the loss
    assert (run / "terminal.txt").read_text().startswith("exit code 0\n")
    assert main([str(tmp_path / "made"), str(tmp_path / "made")]) == 0
    assert " 0 differences in tables, 0 in texts" in capsys.readouterr().out

"""The benchmark for a GPU, rehearsed on a CPU with tiny models: every part measures, and what is written is a table."""

import importlib
import os
from pathlib import Path
from unittest import mock

import pytest

DTYPES = ("float32", "bfloat16")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def rehearsed(parts, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu = importlib.import_module("gpu")
    with mock.patch.dict(os.environ):
        gpu.main(["--dry-run", "--out", str(folder), "--parts", parts])
    rows = gpu.rows_of(folder / gpu.RESULTS)
    assert [row for row in rows if "error" in row] == []
    return rows, gpu.tables(rows)


@pytest.mark.exhaustive
def test_a_dry_run_makes_every_measurement_of_a_gpu(monkeypatch, tmp_path):
    rows, shown = rehearsed("cde", tmp_path, monkeypatch)
    made = [(row["part"], row.get("what")) for row in rows]
    kinds = ["eap-ig", "patch z", "patch resid_pre", "sweep heads", "sweep neurons"]
    wanted = [("c", kind) for kind in kinds * 2] + [("c", "ended"), ("d", "2 x 8"), ("d", "ended")]
    assert made == [("machine", None), *wanted, ("e", "eager"), ("e", "ended"), ("end", None)]
    off = {
        dtype: [row["off"] for row in rows if row.get("dtype") == dtype and "off" in row]
        for dtype in DTYPES
    }
    assert max(off["float32"]) < 1e-5  # ours and theirs are the same numbers
    assert max(off["bfloat16"]) < 0.1
    assert shown.count("\n| --- ") == 3
    assert "| eap-ig | random" in shown


@pytest.mark.exhaustive
def test_a_dry_run_makes_the_tests_and_the_trace(monkeypatch, tmp_path):
    rows, shown = rehearsed("ab", tmp_path, monkeypatch)
    tests, trace = (
        next(row for row in rows if row.get("what") == what) for what in ("tests", "trace --quick")
    )
    assert (tests["code"], set(tests["counts"])) == (0, {"PASSED"})
    assert (trace["code"], trace["status"]) == (0, "finished")
    assert "trace --quick of model: " in shown

"""Floors and thresholds that a user moves: what they decide, and that the error rates no longer apply."""

import dataclasses
import math

import pandas as pd
from evidences import planted_evidence
from planted_sequences import planted_lens, sequences

from sink_lens.chain.judge import intervention_verdict, link_table
from sink_lens.chain.trace import trace


def test_a_floor_that_the_user_moves_decides_and_is_said_not_to_be_calibrated():
    evidence = planted_evidence()
    default = link_table(evidence, random_init=None, length=24)
    assert set(default["floors"]) == {"calibrated"}
    assert not default["criterion"].str.contains("calibrated").any()
    high = dataclasses.replace(evidence.config, floors=("key_sink=1000",))
    table = link_table(dataclasses.replace(evidence, config=high), random_init=None, length=24)
    assert set(table["floors"]) == {"not calibrated"}
    assert table["criterion"].str.endswith("; floors not calibrated: floors moved").all()
    found = table.groupby("link")["measured"].first()
    assert (found["key_sink"], found["dimension_key"]) == ("absent", "present")
    other = dataclasses.replace(evidence.config, threshold=0.2)
    moved = link_table(dataclasses.replace(evidence, config=other), random_init=None, length=24)
    assert set(moved["floors"]) == {"not calibrated"}


def test_the_floor_of_every_intervention_can_be_moved():
    row = {
        "baseline_sink_mass": 0.9, "uniform_sink_mass": 0.1, "ci_low": 0.4, "ci_high": 0.45, "control_share": math.nan,
    }  # fmt: skip
    assert intervention_verdict(row) == "holds"
    assert intervention_verdict(row, floor=0.5) == "in part"


def run(out, *, report=False, **fields):
    _, lens = planted_lens()
    given = {"tokens": sequences(), "interventions": False, "random_init": False} | fields
    return trace(lens, out=out, progress=False, report=report, **given)


def test_moved_floors_are_said_in_the_table_and_on_the_page(tmp_path):
    run(tmp_path / "run", report=True, floors={"key_sink": 1000})
    links = pd.read_parquet(tmp_path / "run" / "links.parquet")
    assert set(links["floors"]) == {"not calibrated"}
    assert set(links.query("link == 'key_sink'")["verdict"]) == {"absent"}
    assert "floors not calibrated" in (tmp_path / "run" / "report.html").read_text("utf-8")

import math
import runpy
import sys

import numpy as np
import pandas as pd
import pytest

from analyses.claims import certain, run_claim
from analyses.verdicts import Rule, judged, overview, read_claim, read_result, shown, span, with_table
from sink_lens.errors import InputError
from sink_lens.records import read_run
from sink_lens.stats import Interval

CLAIM = """# One and one is two

**Question.** Is it?

```toml
paper = "A, figure 0"

[total]
says = "sum"
theirs = "2"
reproduced = [1.9, 2.1]
contradicted = [3, inf]
```

## Result

<!-- result -->
<!-- /result -->
"""
RUN = '''
"""Adds."""

import pandas as pd

from analyses.claims import Measured, certain, main
from sink_lens.report.style import canvas


def measure(work):
    count = work.once("count", lambda: pd.DataFrame({"n": [work.lens.n_layers]}))
    return Measured(numbers={"total": certain(2.0), "total @ text": certain(count["n"][0])}, figure=canvas())


if __name__ == "__main__":
    main(measure)
'''


def folder_of(tmp_path, *, claim=CLAIM, run=RUN):
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "claim.md").write_text(claim)
    (folder / "run.py").write_text(run)
    return folder


def between(low, high):
    return Interval(estimate=(low + high) / 2, low=low, high=high, n=9)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.5, 0.9, ("reproduced", "as predicted")),
        (0.4, 0.9, ("not shown", "not shown")),  # reaches out of the range
        (0.0, 0.1, ("contradicted", "opposite")),
        (0.2, 0.3, ("not reproduced", "not as predicted")),  # in neither
        (math.nan, math.nan, ("not shown", "not shown")),
    ],
)
def test_the_whole_interval_must_lie_in_the_range(low, high, words):
    rule = Rule(says="", theirs="0.7", reproduced=(0.5, 1.0), contradicted=(0.0, 0.1))
    found = between(low, high)
    assert (rule.verdict(found), rule.prediction(found)) == words


@pytest.mark.parametrize(
    "theirs", ["none given", "a sink comes there (abstract, figure 6)", "can be fatal (2503.22329)"]
)
def test_without_a_number_of_the_papers_there_is_no_verdict_on_it(theirs):
    rule = Rule(says="", theirs=theirs, reproduced=(0.5, 1.0))
    assert (rule.verdict(between(0.5, 0.9)), rule.prediction(between(0.5, 0.9))) == ("no number", "as predicted")


@pytest.mark.parametrize("theirs", ["262.88 (Llama-2-7B)", "top 5", "-0.039 (152M parameters)"])
def test_with_a_number_of_the_papers_there_is_one(theirs):
    assert Rule(says="", theirs=theirs, reproduced=(0.5, 1.0)).verdict(between(0.5, 0.9)) == "reproduced"


def test_without_a_range_nothing_is_contradicted():
    rule = Rule(says="", theirs="1", reproduced=(0.5, 1.0))
    found = between(-9.0, -8.0)
    assert (rule.verdict(found), rule.prediction(found)) == ("not reproduced", "not as predicted")


def test_what_we_expected_against_the_paper_is_judged_by_our_own_range():
    rule = Rule(says="", theirs="0.32", reproduced=(0.2, 1.0), predicted=(-1.0, 0.1))
    assert (rule.verdict(between(0.01, 0.02)), rule.prediction(between(0.01, 0.02))) == (
        "not reproduced",
        "as predicted",
    )
    assert (rule.verdict(between(0.3, 0.4)), rule.prediction(between(0.3, 0.4))) == ("reproduced", "opposite")
    assert rule.prediction(between(0.05, 0.15)) == "not shown"


def test_without_any_range_nothing_is_judged():
    rule = Rule(says="", theirs="343.7")
    assert (rule.verdict(between(1.0, 2.0)), rule.prediction(between(1.0, 2.0))) == ("not comparable", "none made")
    assert Rule(says="").verdict(between(1.0, 2.0)) == "no number"


def test_an_analysis_is_judged_by_its_rules_and_kept_with_what_it_was_made_from(tmp_path):
    result = run_claim(folder_of(tmp_path), out=tmp_path / "out", tiny=True, progress=False)
    assert result["number"].tolist() == ["total", "total @ text"]
    assert result["verdict"].tolist() == ["reproduced", "contradicted"]  # the planted model has 5 layers
    run = read_run(tmp_path / "out")
    assert (run.kind, run.status, run.missing) == ("claim", "finished", [])
    assert len(run.provenance["weights_sha256"]) == 64


def test_what_is_finished_is_read_and_what_was_interrupted_goes_on(tmp_path):
    folder, out = folder_of(tmp_path, run=RUN.replace("certain(2.0)", "certain(1 / 0)")), tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        run_claim(folder, out=out, tiny=True, progress=False)
    assert read_run(out).status == "failed"
    table = (out / "count.parquet").stat().st_mtime_ns
    with pytest.raises(ZeroDivisionError):
        run_claim(folder, out=out, tiny=True, progress=False)
    assert (out / "count.parquet").stat().st_mtime_ns == table
    (folder / "run.py").write_text(RUN)
    first = run_claim(folder, out=out, tiny=True, progress=False)  # its code is another one: all is made again
    (out / "figure.png").touch()
    figure = (out / "figure.png").stat().st_mtime_ns
    pd.testing.assert_frame_equal(run_claim(folder, out=out, tiny=True, progress=False), first)
    assert (out / "figure.png").stat().st_mtime_ns == figure


def test_the_table_of_a_claim_and_of_all_claims(tmp_path):
    folder = folder_of(tmp_path)
    claim = read_claim(folder)
    assert "not run yet" in overview([claim])
    numbers = pd.DataFrame({"number": ["total"], "value": [2.0], "low": [1.95], "high": [2.05], "n": [4]})
    judged(claim, numbers, model="some model").to_csv(folder / "result.csv", index=False)
    text = with_table(CLAIM, read_result(claim))
    assert "| sum | 2 (1.95 to 2.05) | 2 | reproduced | as predicted |" in text
    assert with_table(text, read_result(claim)) == text
    line = overview([claim]).splitlines()[-1]
    assert "[One and one is two](sums/claim.md)" in line
    assert "| A, figure 0 | some model | sum | 2 (1.95 to 2.05) | 2 | reproduced | as predicted |" in line


def test_numbers_as_they_are_shown():
    assert shown({"value": np.nan, "low": np.nan, "high": np.nan}) == "not defined"
    assert shown({"value": 3.0, "low": 3.0, "high": 3.0}) == "3"
    assert [span(0.5, math.inf), span(-math.inf, 2.0), span(0.0, 1.0), span(math.nan, 1.0)] == [
        ">= 0.5",
        "<= 2",
        "0 to 1",
        "never",
    ]
    assert certain(4) == Interval(estimate=4.0, low=4.0, high=4.0, n=1)


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (CLAIM.replace("```toml", "```"), "no TOML block"),
        (CLAIM.replace('paper = "A, figure 0"', ""), "need paper"),
        (CLAIM.replace("says", "tells"), "the rule 'total'.*need says"),
        (CLAIM.replace("[3, inf]", "[2, inf]"), "reproduced and contradicted at once"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(tmp_path, claim, message):
    with pytest.raises(InputError, match=message):
        read_claim(folder_of(tmp_path, claim=claim))


def test_a_number_without_a_rule_is_refused(tmp_path):
    folder = folder_of(tmp_path, run=RUN.replace('"total @ text"', '"other"'))
    with pytest.raises(InputError, match=r"gives \['total', 'other'\] and has rules for \['total'\]"):
        run_claim(folder, out=tmp_path / "out", tiny=True, progress=False)
    with pytest.raises(InputError, match=r"no claim\.md"):
        read_claim(tmp_path)


def test_run_py_is_a_command(tmp_path, monkeypatch, capsys):
    folder = folder_of(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", "--out", str(tmp_path / "out")])
    runpy.run_path(str(folder / "run.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "One and one is two" in shown
    assert "contradicted" in shown
    monkeypatch.setattr(sys, "argv", ["run.py", "--model", str(tmp_path / "none"), "--out", str(tmp_path / "other")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "run.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "none" in capsys.readouterr().err

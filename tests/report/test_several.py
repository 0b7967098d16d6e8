"""Runs beside each other: refused where their numbers mean different things, differences marked."""

from typing import get_args

import pytest

from sink_lens.errors import InputError, RunError
from sink_lens.records import read_run
from sink_lens.report import config
from sink_lens.report.config import ReportConfig
from sink_lens.report.html import compare_runs, page_html, render
from sink_lens.report.side_by_side import COMPARED_BY, check_comparable

from .circuits import CHAIN, write_run

LINKS = {
    "link": ["key_sink"],
    "statistic": "positive_share",
    "value": 0.9,
    "ci_low": 0.8,
    "ci_high": 1.0,
}
LINKS |= {"null_name": "chance", "null_value": 0.5, "criterion": "over 0.5", "is_primary": True}


def a_run(folder, *, kind="trace", verdict="holds", rate=0.7, config=None, **provenance):
    known = {
        "model": "toy",
        "weights_sha256": "ab",
        "tokens_sha256": "cd",
        "dtype": "float32",
        "bos": False,
    }
    return write_run(
        folder, kind, config={"threshold": 0.3} | (config or {}), provenance=known | provenance, chain=CHAIN,
        links=LINKS | {"verdict": verdict}, summary={"quantity": ["sink_rate", "model"], "value": [rate, "toy"]},
    )  # fmt: skip


def test_alike_runs_stand_beside_each_other_and_differences_are_marked(tmp_path):
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other", verdict="fails", rate=0.25)
    parts, beside = compare_runs([read_run(one), read_run(other)])
    assert beside.names == ("one", "other")
    assert [part.name for part in parts] == ["toy", "toy"]
    (row,) = [row for row in beside.verdicts if row.name == "the sink's key → attention sink"]
    assert [cell.text.split(":")[0] for cell in row.cells] == ["✓ holds", "✗ fails"]
    assert [cell.differs for cell in row.cells] == [False, True]
    assert {row.name: row.differs for row in beside.summary} == {"sink_rate": True, "model": False}
    text = page_html(one, other)
    assert text.count('class="differs"') >= 2
    judged = "“the sink&#39;s key → attention sink” ✓ holds in one, ✗ fails in other"
    assert f"one and other: 1 of 6 links of the chain is judged differently: {judged}" in text
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_a_part_of_one_run_stands_beside_why_the_other_lacks_it(tmp_path):
    asked = {"config": {"interventions": True}}
    sink = a_run(tmp_path / "sink", **asked)
    none = a_run(
        tmp_path / "none", verdict="not applicable", model="b", weights_sha256="ef", **asked
    )
    for runs in ((sink, none), (none, sink)):
        (table,) = page_html(*runs).split('id="run-1-effect-table-card"')[1:]
        assert table.split("</div>")[0].count('class="missing"') == 2


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ({}, {}, ""),
        ({"config_sha256": "1"}, {}, ""),
        ({}, {"weights_sha256": "ef"}, "weights"),
        (
            {"config_sha256": "1"},
            {"config_sha256": "2", "weights_sha256": "ef"},
            "weights and configurations",
        ),
    ],
)
def test_runs_of_different_models_of_one_name_are_said_to_be(tmp_path, there, here, said):
    one, other = (
        a_run(tmp_path / name, token_source="text:a", **more)
        for name, more in (("a", there), ("b", here))
    )
    text = page_html(one, other)
    assert ("different models" in text, f"their {said} differ" in text) == (bool(said), bool(said))


def test_other_models_may_be_compared_on_the_same_text(tmp_path):
    one = a_run(tmp_path / "one", token_source="text:a")
    other = a_run(
        tmp_path / "other",
        model="b",
        weights_sha256="ef",
        tokens_sha256="12",
        token_source="text:a",
    )
    assert compare_runs([read_run(one), read_run(other)])[1].names == ("toy", "b")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kind": "sweep"}, "kind: trace"),
        ({"dtype": "bfloat16"}, "dtype: float32"),
        ({"bos": True}, "bos: False"),
        ({"tokens_sha256": "99"}, "tokens_sha256: cd"),
        ({"config": {"threshold": 0.1}}, r"threshold: 0\.3"),
        ({"thresholds": {"growth_factor": 3}}, "thresholds: None"),
    ],
)
def test_runs_that_are_not_comparable_are_refused(tmp_path, changed, named):
    runs = [read_run(a_run(tmp_path / "one")), read_run(a_run(tmp_path / "other", **changed))]
    with pytest.raises(
        RunError, match=rf"not comparable, they differ in .*{named}.*/one.*/other.*Leave some out"
    ):
        check_comparable(runs)


@pytest.mark.parametrize(
    ("by", "changed", "other"),
    [
        ("dtype", {"dtype": "bfloat16"}, "bos"),
        ("bos", {"bos": True, "bos_condition": "with", "tokens_sha256": "99"}, "dtype"),
        ("tokens", {"tokens_sha256": "99", "token_source": "random"}, "dtype"),
        ("thresholds", {"config": {"threshold": 0.1}}, "tokens"),
    ],
)
def test_runs_may_differ_by_what_they_are_compared_by_and_by_nothing_else(
    tmp_path, by, changed, other
):
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "other", **changed)
    assert "2 runs beside each other" in page_html(one, two, group_by=[by])
    with pytest.raises(RunError, match=r"or name the difference, such as group_by='dtype'"):
        page_html(one, two, group_by=[other])


def test_what_runs_may_be_compared_by_is_what_the_command_offers_and_six_are_the_most(tmp_path):
    assert tuple(COMPARED_BY) == get_args(config.MayDiffer)
    assert ReportConfig(group_by=("bos", "dtype")).group_by == ("bos", "dtype")
    with pytest.raises(InputError, match="by is 'taste'"):
        ReportConfig(group_by=("taste",))
    folder = a_run(tmp_path / "one")
    with pytest.raises(InputError, match="7 runs were given; need 2 to 6"):
        page_html(*[folder] * 7)


def test_a_refused_page_writes_nothing(tmp_path):
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other", dtype="float16")
    with pytest.raises(RunError, match="not comparable"):
        render(one, other, out=tmp_path / "both.html")
    assert not (tmp_path / "both.html").exists()
    assert render(one, one, out=tmp_path / "both.html") == tmp_path / "both.html"
    assert render(one, one, out=tmp_path / "new" / "side") == tmp_path / "new" / "side.html"
    assert render(one, one, out=tmp_path / "new") == tmp_path / "new" / "report.html"

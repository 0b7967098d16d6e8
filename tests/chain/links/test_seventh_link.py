"""A seventh link is one file and its line in the list: it is found wherever the others are, without another change."""

import io

import pytest
from planted_sequences import planted_lens, sequences
from rich.console import Console
from toy_link import TOY_LINK

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.links import LINKS
from sink_lens.chain.terminal import brief_answer
from sink_lens.chain.trace import trace
from sink_lens.records import read_run


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A trace with the seventh link, with its random-init baseline and interventions."""
    config = TraceConfig(
        model="planted", intervention_sequences=3, intervention_length=20, controls=2
    )
    out = tmp_path_factory.mktemp("seventh") / "run"
    _, lens = planted_lens()
    options = {
        "config": config,
        "tokens": sequences(),
        "out": out,
        "progress": False,
        "report": False,
    }
    return trace(lens, links=(*LINKS, TOY_LINK), **options)


@pytest.fixture(scope="module")
def tables(traced):
    return read_run(traced.folder).tables


def test_it_is_the_last_of_the_chain_with_a_value_a_twin_and_a_verdict(tables):
    row = tables["chain"].iloc[-1]
    assert row[["order", "link", "source", "target"]].tolist() == [
        6,
        "sink_toy",
        "attention sink",
        "toy node",
    ]
    assert row[["sentence", "question"]].tolist() == [
        "The sink moves the toy.",
        "does the toy move?",
    ]
    rows = tables["links"].query("link == 'sink_toy'")
    assert set(rows["statistic"]) == {"toy_mass", "intervention_share"}
    assert "random_init" in set(rows["null_name"])
    assert rows["measured"].unique().tolist() == ["present"]  # a mass is over 0
    assert rows["verdict"].isin(["holds", "fails", "undecided"]).all()


def test_it_is_intervened_on_and_frozen(tables):
    (row,) = tables["effects"].query("link == 'sink_toy'").to_dict("records")
    assert (row["edit"], row["layers"], row["is_primary"]) == ("toy x 0", "0", True)
    frozen = tables["mediation"].query("frozen == 'toy'")
    assert set(frozen["intervention"]) == {"isolation", "natural"} | (
        {"amplification"} & set(frozen["intervention"])
    )
    assert frozen["surviving_share"].notna().any()
    assert (frozen["n_controls"] == 2).all()  # asked for


def test_it_is_shown_in_the_terminal(traced):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(brief_answer(traced))
    assert "toy" in console.export_text()


def test_the_others_are_as_without_it(traced, tmp_path):
    config = traced.config
    _, lens = planted_lens()
    six = trace(
        lens, config=config, tokens=sequences(), out=tmp_path / "run", progress=False, report=False
    )
    for name in ("heads", "neurons", "key_split", "amplification", "placement"):
        assert traced.tables[name].equals(six.tables[name]), name
    assert (
        traced.tables["links"]
        .query("link != 'sink_toy'")
        .reset_index(drop=True)
        .equals(six.tables["links"])
    )

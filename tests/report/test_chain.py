"""The chain of a page and a circuit is the run's: a link that no code knows is told, listed and drawn."""

import pandas as pd
import pytest

from sink_lens.chain.page.story import link_rows, named_links
from sink_lens.records import read_run
from sink_lens.report import circuit_of
from sink_lens.report.html import page_html

from .circuits import CHAIN, LINKS, NODES, tables, traced
from .test_page import Page

KNOWN = CHAIN.assign(order=CHAIN["order"] + 1).to_dict("records")
TOY = {"link": "sink_output", "sentence": "A <b>toy</b> link.", "question": "does it write little?"}
LATER = TOY | {"order": 7, "source": "attention sink", "target": "a small output"}
BETWEEN = TOY | {"order": 4, "source": "super neurons", "target": "a down-projection"}
BRANCH = TOY | {"order": 9, "source": "super neurons", "target": "a side effect"}


def with_links(folder, *rows):
    """A run whose table of the chain has further rows, and whose table of links measures them."""
    frames = tables()
    frames["chain"] = pd.DataFrame([*reversed(KNOWN), *rows])
    measured = {
        "statistic": "of_toy",
        "value": 4.25,
        "is_primary": True,
        "verdict": "holds",
        "criterion": "over 4",
    }
    measured |= {
        "ci_low": 4.0,
        "ci_high": 4.5,
        "null_name": "shuffled",
        "null_value": 0.5,
        "intervened": "",
    }
    measured |= {"link": TOY["link"], "measured": "holds"}
    share = measured | {"statistic": "intervention_share", "value": 0.5, "is_primary": False}
    frames["links"] = pd.concat([frames["links"], pd.DataFrame([measured, share])])
    effect = (
        frames["effects"].iloc[[-1]].assign(link=TOY["link"], share=0.5, ci_low=4.0, ci_high=4.5)
    )
    frames["effects"] = pd.concat([frames["effects"], effect])
    return traced(folder, frames=frames)


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    return with_links(tmp_path_factory.mktemp("run") / "run", LATER)


def test_the_chain_of_a_run_is_its_table_and_without_it_there_is_none(tmp_path):
    found = named_links(read_run(traced(tmp_path / "run")))
    assert [link.name for link in found] == LINKS
    assert [found[0].source, *(link.target for link in found)] == NODES
    assert named_links(read_run(traced(tmp_path / "none", without=("chain",)))) == []


def test_a_seventh_link_stands_on_the_page_with_its_node_sentence_and_numbers(later):
    page = Page(page_html(later))
    said = page.text.split("The chain, link by link", 2)[-1].split("What to see")[0]
    assert "4 of 7 links hold" in said
    row = said.split("attention sink → a small output", 1)[1]
    for text in ("A <b>toy</b> link.", "✓ holds", "of toy 4.25 [4, 4.5]", "shuffled 0.5", "over 4"):
        assert text in " ".join(row.split())


def test_a_seventh_link_is_drawn_as_a_plain_box_with_an_arrow_from_every_step(later):
    circuit = circuit_of(read_run(later))
    (plain,) = circuit.nodes[circuit.nodes["id"] == "node_a_small_output"].to_dict("records")
    assert plain["label"] == "a small output"
    arrows = circuit.edges[circuit.edges["link"] == "sink_output"]
    assert arrows["source"].tolist() == ["heads:0", "heads:1"]
    said = arrows[
        ["target", "statistic_value", "verdict", "quantity", "value", "ci_low", "ci_high"]
    ]
    row = ["node_a_small_output", 4.25, "holds", "intervention_share", 0.5, 4.0, 4.5]
    assert said.to_numpy().tolist() == [row, row]
    six = circuit_of(read_run(traced(later.parent / "six")))
    others = circuit.edges[circuit.edges["link"] != "sink_output"].reset_index(drop=True)
    pd.testing.assert_frame_equal(others, six.edges)
    figure = circuit.draw()
    said = [text.get_text() for text in figure.axes[0].texts]
    assert (
        "output" in said[said.index("a small") + 1]
        if "a small" in said
        else "a small output" in said
    )
    assert len(figure.axes[0].lines) == len(circuit.edges.query("quantity == 'intervention_share'"))


def test_a_node_between_the_growth_steps_joins_them(tmp_path):
    later = [
        row | {"order": row["order"] + 1}
        for row in (KNOWN[3] | {"source": "a down-projection"}, *KNOWN[4:])
    ]
    rows = [*KNOWN[:3], BETWEEN, *later]
    frames = tables() | {"chain": pd.DataFrame(rows)}
    circuit = circuit_of(read_run(traced(tmp_path / "run", frames=frames)))
    arrows = circuit.edges[circuit.edges["quantity"] == "intervention_share"]
    assert (
        arrows.loc[arrows["link"] == "neurons_dimension", "source"].tolist()
        == ["node_a_down_projection"] * 2
    )
    circuit.draw()


def test_a_branch_starts_again_from_its_node(tmp_path):
    with_links(tmp_path / "run", BRANCH)
    assert [row.link for row in link_rows(read_run(tmp_path / "run"))] == [
        *LINKS,
        "sink_output",
    ]
    circuit_of(read_run(tmp_path / "run")).draw()


def test_what_keeps_a_link_undecided_stands_under_its_claim(tmp_path):
    frames = tables()
    links = frames["links"].assign(
        present="yes", necessary_or_sufficient="undecided", carries="undecided"
    )
    frames["links"] = links.assign(
        verdict=links["verdict"].mask(links["link"] == "variance_neurons", "undecided")
    )
    at = {"control_largest": 0.01, "read_layers": "0-3", "position": 0, "baseline_sink_mass": 0.5}
    frames["effects"] = frames["effects"].assign(ci_low=0.1, ci_high=0.9, **at)
    folder = traced(tmp_path / "run", frames=frames)
    rows = {row.link: row for row in link_rows(read_run(folder))}
    assert len(rows["variance_neurons"].remarks) == 1
    assert (
        rows["variance_neurons"]
        .remarks[0]
        .startswith("Undecided: breaking it may remove more or less than 25%")
    )
    assert rows["variance_neurons"].remarks[0] in " ".join(Page(page_html(folder)).text.split())

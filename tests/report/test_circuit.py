"""The circuit: its numbers are those of the tables, what was not measured is said, and it is drawn at every size."""

import re

import pytest
from legible import faults
from matplotlib.colors import to_rgba

from sink_lens.errors import RunError
from sink_lens.records import read_run
from sink_lens.report import circuit_of
from sink_lens.report.html import page_html
from sink_lens.report.style import BLUE, GREEN, ORANGE, figure_svg

from .circuits import SHARES, VERDICTS, tables, traced


@pytest.fixture(scope="module")
def circuit(tmp_path_factory):
    return circuit_of(read_run(traced(tmp_path_factory.mktemp("run") / "run")))


def row(frame, **where):
    for name, value in where.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1, where
    return frame.iloc[0]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_link_joins_two_nodes_with_the_share_of_its_cut(circuit):
    assert (
        row(circuit.edges, source="position", target="z")["value"] == SHARES["aggregation_variance"]
    )
    edge = row(
        circuit.edges, source="neurons:1", target="dimension:1", quantity="intervention_share"
    )
    assert edge[["link", "value", "verdict"]].tolist() == ["neurons_dimension", 0.18, "undecided"]
    assert edge[["ci_low", "ci_high", "control"]].tolist() == pytest.approx([0.13, 0.23, 0.01])
    assert edge[["statistic", "statistic_value"]].tolist() == ["of_neurons_dimension", 2.5]
    whole = circuit.edges[circuit.edges["quantity"] == "intervention_share"]
    assert {link: set(part["verdict"]) for link, part in whole.groupby("link")} == {
        k: {v} for k, v in VERDICTS.items()
    }
    assert len(whole) == 2 + 2 * 4  # the first two once, the others for each growth step
    assert set(circuit.edges["source"]) | set(circuit.edges["target"]) <= set(circuit.nodes["id"])


def test_neurons_and_heads_of_a_growth_step_are_counted(circuit):
    assert row(circuit.nodes, id="neurons:0")[["layers", "value"]].tolist() == ["layers 1–2", 4]
    heads = row(circuit.nodes, id="heads:0")
    # layers 3 to 6 lie between the steps: 4 layers of 4 heads, score layer / 12
    assert heads[["layers", "detail", "value"]].tolist() == [
        "layers 3–6",
        "12 of 16\nabove 0.3",
        12,
    ]


def test_paths_join_nodes_with_what_was_read_after_the_step_of_their_end(circuit):
    edge = row(circuit.edges, source="neurons:0", target="neurons:1")
    assert edge[["quantity", "value", "control", "verdict"]].tolist() == [
        "path_share",
        0.35,
        0.01,
        "raises",
    ]
    assert edge[["ci_low", "ci_high"]].tolist() == pytest.approx([0.31, 0.39])
    found = (
        circuit.edges[circuit.edges["quantity"] == "path_share"]
        .set_index(["source", "target"])["value"]
        .to_dict()
    )
    for step in (0, 1):
        expected = {
            ("position", f"neurons:{step}"): 0.03,
            ("attn_out", f"neurons:{step}"): 0.4,
            (f"neurons:{step}", f"dimension:{step}"): 0.5,
            (f"dimension:{step}", f"key:{step}"): -0.3,
            (f"neurons:{step}", f"key:{step}"): 0.6,
            (f"key:{step}", f"heads:{step}"): 0.8,
        }
        assert {ends: found.pop(ends) for ends in expected} == expected
    assert found == {("neurons:0", "neurons:1"): 0.35}
    assert (
        row(circuit.edges, source="dimension:0", target="key:0", quantity="path_share")["verdict"]
        == "lowers"
    )


def test_the_drawing_has_the_shares_of_the_paths(circuit):
    figure = circuit.draw_paths()
    said = texts(figure)
    # of each growth step: from what attention writes, to the dimension, to the key past it, and to the heads; the one
    # number that joins the steps is 35%
    for share, times in (
        ("40%", 2),
        ("50%", 2),
        ("60%", 2),
        ("80%", 2),
        ("−30%", 2),
        ("35%", 1),
        ("3%", 0),
    ):
        assert said.count(share) == times, share
    lines = {(line.get_color(), line.is_dashed()) for line in figure.axes[0].lines}
    assert lines == {(BLUE, False), (ORANGE, True)}
    assert "divides by the size of the token" in " ".join(
        said
    )  # why the arrow from the dimension is negative


@pytest.mark.parametrize("gone", ["layers", "neurons", "growth_steps", "effects", "paths"])
def test_a_partial_run_still_has_its_circuit(tmp_path, gone):
    circuit = circuit_of(read_run(traced(tmp_path / "run", without=(gone,))))
    assert {"the sink's", "key"} <= set(texts(circuit.draw()))
    assert {"position", "z", "attn_out", "neurons:0", "key:0"} <= set(circuit.nodes["id"])


@pytest.mark.parametrize("gone", ["links", "heads"])
def test_without_links_or_sink_position_there_is_none(tmp_path, gone):
    with pytest.raises(RunError, match=gone):
        circuit_of(read_run(traced(tmp_path / "run", without=(gone,))))


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "steps", "supers"),
    [
        (4, 4, ((1, 1),), 1),
        (80, 128, ((0, 9), (12, 30), (40, 41), (50, 50)), 7),
        (80, 64, tuple((4 * n, 4 * n) for n in range(12)), 30),
    ],
)
def test_it_is_readable_at_every_size(tmp_path, n_layers, n_heads, steps, supers):
    frames = tables(n_layers=n_layers, n_heads=n_heads, steps=steps, supers=supers)
    run = traced(tmp_path / "run", frames=frames, n_layers=n_layers, n_heads=1)
    figure = circuit_of(read_run(run)).draw()
    assert figure.get_figwidth() < 9.7
    assert figure.get_figheight() < 16
    assert faults(figure) == []
    if len(steps) > 6:
        assert "6 more growth steps are not drawn" in " ".join(texts(figure))
    assert 1_000 < len(figure_svg(figure, name="circuit")) < 2_000_000


def test_hostile_texts_are_shown_as_text(tmp_path):
    frames = tables()
    frames["tokens"]["text"] = "</text><script>alert(1)</script>$\\frac{1}{0}$" + "a" * 10_000
    frames["effects"]["layers"] = "<img src=x onerror=alert(1)>"
    frames["links"]["statistic"] = "<b>$x$"
    circuit = circuit_of(read_run(traced(tmp_path / "run", frames=frames)))
    assert not re.search("<(script|img|b)[ >]", figure_svg(circuit.draw(), name="circuit"))
    links = circuit_of(
        traced(tmp_path / "links", frames=frames, without=("paths",))
    )  # position 0 is drawn
    assert not re.search("<(script|img|b)[ >]", figure_svg(links.draw(), name="circuit"))
    assert circuit._repr_png_().startswith(b"\x89PNG")


def measured_alone(*, rate=None):
    """The tables of a trace without interventions; with a sink rate of every head if one is given."""
    frames = {
        name: table
        for name, table in tables().items()
        if name not in ("effects", "mediation", "paths")
    }
    links = frames["links"].loc[frames["links"]["statistic"] != "intervention_share"]
    said = {"holds": ("present", "present, not tested"), "fails": ("absent", "absent")}
    measured, verdicts = zip(*(said.get(one, (one, one)) for one in links["measured"]), strict=True)
    frames["links"] = links.assign(
        intervened="no intervention", measured=measured, verdict=verdicts
    )
    if rate is not None:
        frames["heads"] = frames["heads"].assign(sink_rate=rate)
        frames["links"] = frames["links"].assign(verdict="not applicable")
    return frames


def test_without_interventions_nothing_holds_and_no_arrow_is_a_cause(tmp_path):
    folder = traced(tmp_path / "run", frames=measured_alone())
    circuit = circuit_of(folder)
    assert "What was measured at position 0, the attention sink of toy" in " ".join(
        texts(circuit.draw())
    )
    assert set(circuit.edges["verdict"]) == {"present, not tested", "absent", "undecided"}
    faces = {patch.get_facecolor() for patch in circuit.draw().axes[0].patches}
    assert not {to_rgba(GREEN), to_rgba(BLUE), to_rgba(ORANGE)} & faces
    text = page_html(folder)
    shown = re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", text, flags=re.S)
    assert "3 of 6 links are present, 1 is absent and 2 are undecided. No link was tested" in shown
    assert "no arrow says that one thing causes another" in shown
    for claim in ("✓", "holds", "Arrows are measured paths", "What makes position"):
        assert claim not in shown, claim


def test_without_a_sink_nothing_is_said_to_make_one(tmp_path):
    folder = traced(tmp_path / "run", frames=measured_alone(rate=0.0))
    said = " ".join(texts(circuit_of(folder).draw()))
    assert "What was measured at position 0 of toy, which is no attention sink" in said
    assert "It is no attention sink, so no link was intervened on." in said
    text = page_html(folder)
    assert "It is no attention sink, so no link was intervened on" in text
    assert "of heads have a sink score above 0.3 at position 0" in text
    for claim in (
        "What makes position",
        "leave interventions on",
        "as wide as the share of the sink",
    ):
        assert claim not in text, claim

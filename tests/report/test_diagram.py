"""Circuits on pages and in papers: one number an arrow, few words, readable, from traces and edges."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from legible import faults
from matplotlib.text import Annotation

from sink_lens.circuits.picture import draw_edges
from sink_lens.errors import InputError, RunError
from sink_lens.records import read_run
from sink_lens.report import circuit_of, diagram, sketches
from sink_lens.report.diagram import Arrow, Box, Diagram
from sink_lens.report.style import figure_svg
from sink_lens.schema import DIRECTION, DISTANCE, SIZE
from sink_lens.text import percent

from .circuits import tables, traced, write_run

EDGES = pd.DataFrame(
    [
        ("a23.h3", "logits", 0.31), ("a23.h0", "logits", 0.12), ("a23.h1", "logits", 0.11), ("a24.h4", "logits", -0.16),
        ("a20.h0", "a23.h3<q>", 0.18), ("a17.h4", "a20.kv0<v>", 0.14), ("m17", "a20.kv0<v>", 0.09),
        ("a19.h2", "a20.h0<q>", 0.06), ("m0", "a8.h1<q>", 0.1), ("a8.h1", "a17.kv1<v>", 0.08), ("input", "m0", 0.22),
        ("m0", "a17.h4<q>", 0.07), ("m0", "logits", 0.05),
    ],
    columns=["writer", "reader", "share"],
)  # fmt: skip
"""A circuit of edges: strong ones into the logits, grouped keys, one that lowers the metric."""
EDGES = EDGES.assign(score=4 * EDGES["share"], edge=EDGES["writer"] + "->" + EDGES["reader"])


def chain(tmp_path, **named):
    """A trace's circuit of links, as of a run that measured no paths."""
    return circuit_of(
        read_run(traced(tmp_path / "run", frames=tables(**named), without=("paths",)))
    )


def test_every_style_is_legible_with_one_number_an_arrow_and_eight_words_a_box(tmp_path):
    for drawn in (
        sketches.sketch_paths(circuit_of(traced(tmp_path / "run"))),
        sketches.sketch_edges(
            EDGES, group=3, title="Indirect objects", unit="of the logit difference"
        ),
    ):
        assert all(len(box.text.split()) <= 8 for box in drawn.boxes)
        for style, width in (("page", None), ("paper", 3.25), ("paper", 5.5), ("paper", 6.75)):
            figure = diagram.draw_diagram(drawn, style=style, width=width)
            assert faults(figure) == [], (drawn.title, style, width)
            said = [text.get_text() for text in figure.axes[0].texts]
            numbers = [text for text in said if re.fullmatch(r"−?\d+%", text)]
            assert sorted(numbers) == sorted(arrow.label for arrow in drawn.arrows)
            assert len(numbers) == len(drawn.arrows)


def test_a_circle_is_refused_and_so_is_what_does_not_fit():
    circle = [
        Arrow(source=a, target=b, label="1%", share=0.01, kind="holds") for a, b in ("ab", "ba")
    ]
    boxes = (Box(id="a", text="one"), Box(id="b", text="two"))
    with pytest.raises(RunError, match="lead in a circle"):
        diagram.draw_diagram(Diagram(boxes=boxes, arrows=tuple(circle)), style="paper")
    with pytest.raises(RunError, match="no node"):
        diagram.draw_diagram(Diagram(boxes=(), arrows=()), style="paper")
    with pytest.raises(InputError, match="need one of page, paper"):
        diagram.draw_diagram(Diagram(boxes=boxes, arrows=()), style="poster")
    long = tuple(Box(id=str(n), text="supercalifragilistic") for n in range(12))
    arrows = tuple(
        Arrow(source=str(n), target=str(n + 1), label="1%", share=0, kind="holds")
        for n in range(11)
    )
    with pytest.raises(
        InputError, match=r"do not fit into 0\.7 inches at 6 points; need about \d+"
    ):
        diagram.draw_diagram(Diagram(boxes=long, arrows=arrows), style="paper", width=0.7)


def lines_of(figure):
    """(colour, dashes) of each arrow of a picture of a chain."""
    return [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]


VERDICTS_DRAWN = (
    "holds",
    "in part",
    "fails",
    "not in this basis",
    "undecided",
    "not applicable",
    "absent",
)


def test_each_verdict_has_its_own_line_or_is_dotted_and_its_word_and_sign_stand_beside_it(tmp_path):
    circuit = chain(tmp_path)
    found = {}
    for verdict in VERDICTS_DRAWN:
        figure = replace(circuit, edges=circuit.edges.assign(verdict=verdict)).draw()
        assert verdict in " ".join(text.get_text() for text in figure.axes[0].texts)
        (found[verdict],) = {
            (line.get_color(), str(line._unscaled_dash_pattern)) for line in figure.axes[0].lines
        }
    decided = [found[one] for one in VERDICTS_DRAWN[:4]]
    assert len({dashes for _, dashes in decided}) == 4  # not by colour alone
    assert {found[one] for one in VERDICTS_DRAWN[4:]} & set(decided) == set()
    assert len({found[one] for one in VERDICTS_DRAWN[4:]}) == 1


def test_a_link_of_the_picture_has_the_share_of_its_intervention_and_the_interval_once_for_all_growth_steps(
    tmp_path,
):
    circuit = chain(tmp_path)
    for style, width in (("page", None), ("paper", 6.75), ("paper", 3.25), ("page", 4.0)):
        figure = circuit.draw(style, width=width)
        assert faults(figure) == [], (style, width)
        said = [text.get_text() for text in figure.axes[0].texts]
        links = circuit.edges.drop_duplicates("link")
        for link in links.to_dict("records"):
            does = "makes" if link["link"] == "aggregation_variance" else "removes"
            assert said.count(f"{does} {percent(link['value'])}") == 1, link["link"]
            near = 2 * link["control_largest"] > link["value"]
            assert (f"controls ≤{percent(link['control_largest'])}" in said) >= near
            assert f"[{percent(link['ci_low'])}, {percent(link['ci_high'])}]" in said
        assert len(figure.axes[0].patches) == len(lines_of(figure)) + len(circuit.nodes)


def test_the_first_link_says_by_what_the_average_makes_the_sink(tmp_path):
    circuit = chain(tmp_path)
    assert circuit.about["value_average"] == {}
    frames = tables()
    row = frames["effects"].iloc[[0]].assign(is_primary=False)
    shares = {SIZE: (0.015, 0.55), DIRECTION: (0.945, 0.27), DISTANCE: (0.61, np.nan)}
    more = [
        row.assign(edit=edit, share=share, control_largest=random)
        for edit, (share, random) in shares.items()
    ]
    frames["effects"] = pd.concat([frames["effects"], *more], ignore_index=True)
    figure = circuit_of(traced(tmp_path / "more", frames=frames, without=("paths",))).draw()
    said = [text.get_text() for text in figure.axes[0].texts]
    beside = " ".join(said)
    for one in ("size 2% (≤55%)", "direction 94% (≤27%)", "distance 61%"):  # each beside its own
        assert one in beside
    assert faults(figure) == []


def test_what_adds_to_the_sink_is_not_said_to_remove_less_than_nothing(tmp_path):
    circuit = chain(tmp_path)
    drawn = circuit.edges.assign(value=-0.22, ci_low=-0.27, ci_high=-0.12, control_largest=0.2)
    said = [text.get_text() for text in replace(circuit, edges=drawn).draw().axes[0].texts]
    assert "adds 22%" in said
    assert "[12%, 27%]" in said
    assert "controls ≤20%" in said
    assert not [one for one in said if one.startswith("removes")]


def test_measured_paths_stand_for_the_links_and_each_growth_step_for_itself(tmp_path):
    drawn = sketches.sketch_paths(circuit_of(traced(tmp_path / "run")))
    arrows = {(one.source, one.target): (one.label, one.kind) for one in drawn.arrows}
    assert arrows["neurons:0", "neurons:1"] == ("35%", "raises")
    assert arrows["dimension:1", "key:1"] == ("−30%", "lowers")
    assert ("position", "neurons:0") not in arrows  # too little
    assert "does not see what the box at its start writes. All other" in drawn.says


def test_the_edges_drawn_are_the_largest_that_lead_to_the_metric():
    drawn = sketches.sketch_edges(EDGES, group=3, most=4)
    arrows = {
        ("a23.h3", "metric"): "31%",
        ("a20.h0", "a23.h3"): "18%",
        ("a24.h4", "metric"): "−16%",
    }
    assert {(one.source, one.target): one.label for one in drawn.arrows} == arrows
    assert {box.text for box in drawn.boxes} == {"L23.H3", "L20.H0", "L24.H4", "logits"}
    more = sketches.sketch_edges(EDGES, group=3, most=6)
    # an edge into the shared value leads to the head that is drawn
    assert ("a17.h4", "a20.h0") in {(one.source, one.target) for one in more.arrows}


def sink_edges():
    """A circuit of a sink with grouped keys: an edge into a key of layer 3, which is not of the metric, is inside."""
    rows = [
        ("m2", "a4.kv1<k>", 0.51),
        ("m2", "a4.kv0<k>", 0.49),
        ("m2", "a5.h1<q>", 0.1),
        ("input", "m2", 0.33),
    ]
    rows += [("a3.h2", "a5.kv0<k>", 0.2), ("input", "a3.kv1<k>", 0.05), ("m2", "a5.kv0<v>", 0.9)]
    table = pd.DataFrame(rows, columns=["writer", "reader", "share"])
    return table.assign(score=4 * table["share"])


def test_a_circuit_of_a_sink_ends_in_the_queries_and_keys_that_the_metric_reads(tmp_path):
    config, sizes = (
        {"task": "text", "metric_layers": [4, 5]},
        {"n_layers": 6, "n_heads": 4, "n_kv_heads": 2},
    )
    circuit = circuit_of(
        write_run(tmp_path, "circuit", config=config, provenance=sizes, circuit=sink_edges())
    )
    assert circuit.outputs == ["a4.kv1<k>", "a4.kv0<k>", "a5.h1<q>", "a5.kv0<k>"]
    for width in (None, 3.25):
        figure = circuit.draw("paper", width=width)
        assert faults(figure) == []
        said = [text.get_text() for text in figure.axes[0].texts]
        assert {"110%", "20%", "33%", "MLP 2", "L3.H2"} <= set(said)
        words = " ".join(said)
        assert (
            "share of the sink mass that the edges from one box into the other carry together"
            in words
        )
        assert "It shows 5 of the circuit's 7 edges." in words


def test_edges_that_lead_nowhere_and_runs_without_a_circuit_are_refused(tmp_path):
    with pytest.raises(RunError, match="no edge of the circuit leads to the metric"):
        sketches.sketch_edges(sink_edges())
    folder = write_run(tmp_path / "other", "tokens", heads={"layer": [0]})
    with pytest.raises(
        RunError, match=r"is a run of tokens, which has no circuit.*sink-lens circuit"
    ):
        circuit_of(folder)


def test_circuits_of_runs_and_results_are_drawn_and_saved_by_ending(tmp_path):
    runs = [traced(tmp_path / "trace"), write_run(tmp_path / "c", "circuit", circuit=EDGES)]
    for folder in runs:
        circuit = circuit_of(folder)
        for name in (
            "column.png",
            "column.svg",
            "column.pdf",
            *(["a.json"] if folder.name == "trace" else []),
        ):
            file = circuit.save(tmp_path / "new" / folder.name / name, style="paper")
            assert file.stat().st_size > 500
        with pytest.raises(InputError, match=r"need .*\.json, .*\.pdf"):
            circuit.save(tmp_path / "circuit.doc")
        page = circuit.draw("page")
        assert faults(page) == []
        drawn = figure_svg(page, name="circuit")
        assert "fill: var(--card)" in drawn
        assert "fill: #ffffff" not in drawn  # white boxes under light text, in a dark page
        figure = circuit.draw("paper")
        assert (
            figure.save(tmp_path / "more" / f"{folder.name}.svg").read_bytes().startswith(b"<?xml")
        )
        with pytest.raises(InputError, match=r"need \.png, \.svg or \.pdf"):
            figure.save(tmp_path / "x.txt")
        with pytest.raises(InputError, match="belongs to the run"):
            circuit.save(folder / "run.json")


def test_undefined_numbers_are_drawn_as_such(tmp_path):
    figure = circuit_of(traced(tmp_path / "run", without=("effects", "mediation", "paths"))).draw(
        "paper"
    )
    said = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "No link of this run was intervened on" in said
    assert "%" not in said
    assert faults(figure) == []


def arrows_of(figure):
    """The arrows of a page's figure, the strongest last."""
    return [text.arrow_patch for text in figure.axes[0].texts if isinstance(text, Annotation)]


def test_a_page_of_a_large_circuit_says_how_many_edges_it_shows():
    many = pd.DataFrame(
        {"writer": "m0", "reader": [f"m{n}" for n in range(1, 71)], "score": np.linspace(7, 1, 70)}
    )
    figure = draw_edges(many.head(60), title="The circuit", of=70)
    assert len(arrows_of(figure)) == 60
    assert figure.axes[0].get_title(loc="left") == "The circuit\nThe strongest 60 of 70 edges"
    assert draw_edges(many.head(60), title="T", of=60).axes[0].get_title(loc="left") == "T"


def test_an_edge_into_a_shared_key_is_divided_among_its_heads_in_the_picture():
    rows = [
        ("m0", "a2.kv0<k>", 1.0),
        ("m0", "m1", 1.0),
        ("a2.h0", "logits", 0.5),
        ("a2.h1", "logits", 0.5),
    ]
    figure = draw_edges(pd.DataFrame(rows, columns=["writer", "reader", "score"]), group=2)
    widths = sorted(arrow.get_linewidth() for arrow in arrows_of(figure))
    assert widths == pytest.approx(
        [2.25] * 4 + [4.0]
    )  # 0.5 + 3.5 * share: the whole edge is as wide as two halves

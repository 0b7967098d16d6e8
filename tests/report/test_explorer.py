"""Graphs and pages of the explorer; what a browser does with them is in ``tests/browser/test_explorer.py``."""

import json
import re
import tomllib
from hashlib import sha256
from pathlib import Path

import pytest

from sink_lens import views
from sink_lens.errors import InputError
from sink_lens.report import explorer

from ..browser.edges import HEADS, a_run, every_edge
from .circuits import traced

VENDORED = Path(explorer.__file__).parent / "vendor"


def test_javascript_of_others_is_what_its_authors_published():
    table = tomllib.loads((VENDORED / "vendored.toml").read_text())
    assert {*table} == {path.name for path in VENDORED.glob("*.js")}
    for name, row in table.items():
        assert sha256((VENDORED / name).read_bytes()).hexdigest() == row["sha256"], name
        assert row["version"] in (VENDORED / name).read_text()[:100]
        assert (VENDORED / row["licence_file"]).read_text().startswith("Copyright")
        assert row["reason"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("circuit") / "run")


def test_the_graph_of_a_run_is_neuronpedia_s(run):
    graph = views.circuit_of(run).graph
    assert {*graph} == {"metadata", "qParams", "nodes", "links"}
    # what Neuronpedia's graph-schema.json asks for
    assert {"slug", "scan", "prompt_tokens", "prompt"} <= graph["metadata"].keys()
    node = {"node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp"}
    for part, required in (("nodes", node), ("links", {"source", "target", "weight"})):
        assert all(required <= row.keys() for row in graph[part])
    ids = {node["node_id"] for node in graph["nodes"]}
    assert len(ids) == len(graph["nodes"])
    assert {link[end] for link in graph["links"] for end in ("source", "target")} <= ids
    json.dumps(graph, allow_nan=False)
    assert {node["layer"] for node in graph["nodes"]} > {"E"}


def test_every_edge_is_a_link_with_what_the_run_knows_of_it(run):
    graph = views.circuit_of(run).graph
    edges = every_edge().set_index("edge")
    assert len(graph["links"]) == len(edges)
    for link in graph["links"]:
        via = f"<{link['via']}>" if link["via"] else ""
        row = edges.loc[f"{link['source']}->{link['target']}{via}"]
        assert link["weight"] == pytest.approx(row["score"], rel=1e-5)
        assert (link["inclusion"], link["in_circuit"]) == (row["inclusion"], row["in_circuit"])
    judged = [link["core"] for link in graph["links"] if link["core"] is not None]
    assert (judged.count(True), judged.count(False)) == (5, 15)
    assert sum(node["influence"] for node in graph["nodes"]) == pytest.approx(1)
    about = graph["metadata"]["sink_lens"]
    assert [row["faithfulness"] for row in about["curve"]] == [0.25, 0.75, 0.01]
    assert about["outputs"] == ["logits"]


def test_the_sink_is_read_at_queries_and_keys_of_its_layers(tmp_path):
    run = a_run(tmp_path / "run", config={"task": "text", "metric_layers": [2]})
    outputs = views.circuit_of(run).graph["metadata"]["sink_lens"]["outputs"]
    assert sorted(outputs) == sorted(
        [f"a2.h{head}<q>" for head in range(HEADS)] + ["a2.kv0<k>", "a2.kv1<k>"]
    )


def test_a_graph_is_neuronpedia_s_wherever_it_is_written(run, tmp_path):
    circuit = views.circuit_of(run)
    written = json.loads(circuit.save(tmp_path / "c.graph.json").read_text())
    assert {one["in_circuit"] for one in written["links"]} == {True}
    assert {True, False} == {one["in_circuit"] for one in circuit.graph["links"]}


def test_a_page_is_written_by_its_ending_and_asks_nobody(run, tmp_path):
    circuit = views.circuit_of(run)
    text = circuit.save(tmp_path / "new" / "c.html").read_text()
    assert (
        len(text)
        - len(explorer.explorer_script([circuit.graph]))
        + len(explorer.explorer_script([]))
        < 1_500_000
    )
    assert not re.search(r"https?://", text)
    assert "srcdoc=" in circuit.explore()._repr_html_()
    with pytest.raises(InputError, match=r"need \.html"):
        circuit.explore().save(tmp_path / "c.pdf")
    with pytest.raises(InputError, match=r"ends with \.html; need \.json, \.png"):
        views.circuit_of(traced(tmp_path / "trace")).save(
            tmp_path / "c.html"
        )  # a trace's is a drawing alone

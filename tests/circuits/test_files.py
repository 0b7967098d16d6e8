"""Files of circuits: written and read again."""

import json
import pickle
from pathlib import Path

import pandas as pd
import pytest
from lenses import lens_of, speaking

from sink_lens import circuits, views
from sink_lens.errors import InputError

from .tiny_runs import circuit, save_as_tensors


def test_what_is_saved_is_read_again(tmp_path):
    for family in ("llama", "gpt2"):
        found = circuit(family)
        saved = [
            circuits.read(found.save(tmp_path / family / name)) for name in ("c.json", "ioi_tiny")
        ]
        tensors = save_as_tensors(found, tmp_path / family / "c.pt")
        for held in (*saved, circuits.read(tensors, model=lens_of(family))):
            assert held.graph.names.tolist() == found.graph.names.tolist()
            assert held.scores == pytest.approx(found.scores.mean, abs=1e-6)
            assert (held.chosen == found.chosen).all()
    held = json.loads((tmp_path / "llama" / "c.json").read_text())
    begin = {name.partition("->")[0] for name, edge in held["edges"].items() if edge["in_graph"]}
    assert {name for name, node in held["nodes"].items() if node["in_graph"]} == {*begin, "logits"}
    one, other = (
        held["edges"][f"a0.h1->a1.h{head}<k>"] for head in (0, 1)
    )  # share a key-value head
    assert one == other
    assert one["score"] * 2 == pytest.approx(
        found_score(circuit("llama"), "a0.h1->a1.kv0<k>"), abs=1e-6
    )
    for name in ("c.txt", "c.bin", "c.pt", "c.dot"):
        with pytest.raises(InputError, match="ending"):
            found.save(tmp_path / name)
        with pytest.raises(InputError, match=r"\.json"):
            saved[0].save(tmp_path / name)
    for content, said in (
        ('{"cfg": {}}', "cannot be read as a circuit"),
        ("[" * 200_000, "nested too deep"),
    ):
        (tmp_path / "damaged.json").write_text(content)
        with pytest.raises(InputError, match=said):
            circuits.read(tmp_path / "damaged.json")
    table = pd.DataFrame({"edge": ["a0->m0"], "in_circuit": [True], "score": [1.0]})
    table.to_parquet(tmp_path / "damaged.parquet")
    with pytest.raises(InputError, match="cannot be read as a circuit"):
        circuits.read(tmp_path / "damaged.parquet")
    for content in (b"\x80\x02junk", pickle.dumps(Path.cwd, protocol=2)):
        (tmp_path / "damaged.pt").write_bytes(content)
        with pytest.raises(InputError, match="cannot be read as a circuit"):
            circuits.read(tmp_path / "damaged.pt")
    with pytest.raises(InputError, match="most is 0; need at least 1 edge to draw"):
        found.draw(most=0)


def test_a_key_of_which_only_some_heads_have_an_edge_is_said_to_be_read_whole(tmp_path):
    found = circuit("llama")  # two heads share a key
    held = json.loads(found.save(tmp_path / "c.json").read_text())
    assert not held["edges"]["a0.h1->a1.h0<k>"]["in_graph"]
    held["edges"]["a0.h1->a1.h0<k>"]["in_graph"] = (
        True  # as EAP-IG chooses, which has a key for every head
    )
    (tmp_path / "c.json").write_text(json.dumps(held))
    with pytest.warns(
        UserWarning, match="1 edge to a key or value for some of the heads that share it"
    ):
        read = circuits.read(tmp_path / "c.json")
    assert read.n_edges == found.n_edges + 1


@pytest.mark.parametrize(
    "sizes", [{"n_layers": 10**9}, {"n_layers": -5}, {"n_heads": 0}, {"n_heads": 10**9}]
)
@pytest.mark.parametrize("lens", [None, lens_of("llama")], ids=["alone", "with a model"])
def test_a_file_of_a_model_of_impossible_size_is_refused_at_once(tmp_path, sizes, lens):
    cfg = {"n_layers": 3, "n_heads": 4, "d_model": 8} | sizes
    (tmp_path / "c.json").write_text(json.dumps({"cfg": cfg, "nodes": {}, "edges": {}}))
    with pytest.raises(InputError, match="layers"):
        circuits.read(tmp_path / "c.json", model=lens)


def test_a_table_that_names_a_head_of_a_huge_number_is_refused_at_once(tmp_path):
    frame = pd.DataFrame(
        {"edge": ["input->a0.h999999999<q>", "a0.h999999999->logits"], "score": 1.0}
    )
    frame.assign(in_circuit=True).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(InputError, match="not all edges"):
        circuits.read(tmp_path / "c.parquet")


def found_score(one, name):
    return float(one.scores.mean[one.graph.index[name]])


def test_the_circuit_of_a_run_has_and_writes_what_the_found_one_does(tmp_path):
    lens = speaking("llama")
    how = {
        "task": "text",
        "pairs": 6,
        "length": 10,
        "bos": "without",
        "check": 0,
        "random": 0,
        "sizes": (1.0,),
    }
    result = circuits.run(
        lens, out=tmp_path / "run", **how, edges=40, method="eap", report=False, progress=False
    )
    found, shown = result.found, views.circuit_of(result)
    assert shown.nodes["node"].tolist() == found.nodes["node"].tolist()
    assert shown.edges["edge"].tolist() == found.edges["edge"].tolist()
    for name in ("c.json", "mib", "c.parquet"):
        one, other = (
            circuits.read(each.save(tmp_path / side / name))
            for each, side in ((found, "a"), (shown, "b"))
        )
        assert one.sha256 == other.sha256
    links = [
        json.loads(one.save(tmp_path / "c.graph.json").read_text())["links"]
        for one in (found, shown)
    ]
    assert [len(some) for some in links] == [found.n_edges] * 2
    for ending in ("html", "svg", "pdf", "png"):
        assert shown.save(tmp_path / f"c.{ending}").stat().st_size > 500


def test_pictures_and_tables_are_written(tmp_path):
    found = circuit()
    begins = {"c.svg": b"<?xml", "c.png": b"\x89PNG", "c.pdf": b"%PDF", "c.parquet": b"PAR1"}
    for name, start in begins.items():
        assert found.save(tmp_path / name).read_bytes().startswith(start), name
    graph = json.loads(found.save(tmp_path / "c.graph.json").read_text())
    nodes = {node["node_id"] for node in graph["nodes"]}
    assert {link["source"] for link in graph["links"]} | {
        link["target"] for link in graph["links"]
    } <= nodes
    for node in graph["nodes"]:
        assert {
            "node_id",
            "feature",
            "layer",
            "ctx_idx",
            "feature_type",
            "jsNodeId",
            "clerp",
        } <= node.keys()
    assert {"slug", "scan", "prompt_tokens", "prompt"} <= graph["metadata"].keys()
    assert sum(link["weight"] for link in graph["links"]) == pytest.approx(
        found.edges["score"].sum(), abs=1e-4
    )
    assert found.draw().axes
    shown = {text.get_text() for text in found.draw().axes[0].texts}
    assert not any(
        ".kv" in node and f"{node.partition('.')[0]}.h{2 * int(node[-1])}" in shown
        for node in shown
    )

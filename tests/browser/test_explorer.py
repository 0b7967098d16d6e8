"""The explorer of circuits in a real browser, network off: what it draws, says, changes, saves and opens."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiers import first

from sink_lens.records import read_run
from sink_lens.report import circuit_of
from sink_lens.report.explorer import Explorer
from sink_lens.report.html import render
from sink_lens.text import node_label

from .edges import EDGES, GROUP, LAYERS, a_run, every_edge

HOSTILE = (
    "<img src=x onerror=window.hit=1>",
    "</script><script>window.hit=2</script>",
    "\u202eevil",
    "__proto__",
)
ENDS = ["writer", "reader"]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("circuit") / "run")


@pytest.fixture(scope="module")
def page_of_run(run):
    return circuit_of(run).save(run.parent / "explorer.html")


@pytest.fixture
def explored(opened, page_of_run):
    """The explorer of the run, drawn."""

    def explore(path=page_of_run, **options):
        found = opened(path, **options)
        found.page.locator("#explorer[data-state=drawn]").wait_for()
        return found

    return explore


def on_path(edges):
    """The slow twin: edges on a path from the input to the logits, a key and a value being read by all their heads."""

    def owners(reader):
        node = reader.partition("<")[0]
        layer, shared, head = node.partition(".kv")
        return [f"{layer}.h{int(head) * GROUP + one}" for one in range(GROUP)] if shared else [node]

    pairs = [(one, owner) for one, reader in edges[ENDS].to_numpy() for owner in owners(reader)]
    reached, leads = {"input"}, {"logits"}
    for _ in range(3 * LAYERS):
        reached |= {other for one, other in pairs if one in reached}
        leads |= {one for one, other in pairs if other in leads}
    fits = [
        one in reached and not leads.isdisjoint(owners(reader))
        for one, reader in edges[ENDS].to_numpy()
    ]
    return edges.loc[fits]


def largest(edges, n):
    return edges.sort_values("score", key=abs, ascending=False).head(n)


@functools.cache
def ids():
    ends = every_edge()[ENDS].to_numpy().flatten()
    return {node_label(one): one for one in (str(end).partition("<")[0] for end in ends)}


def sentence_of(page):
    return page.locator("[data-said]").inner_text()


def listed(page, table="table"):
    """The rows of a table of the explorer, with the ids of the two nodes that each begins with."""
    page.locator(f"[data-{table}]").evaluate(
        "one => { one.open = true; one.dispatchEvent(new Event('toggle')) }"
    )
    rows = page.locator(f"[data-{table}] tbody tr").all()
    found = [row.locator("td").all_inner_texts() for row in rows]
    return [[*(ids().get(cell, cell) for cell in cells[:2]), *cells[2:]] for cells in found]


def saved(page, button="Save JSON"):
    with page.expect_download() as found:
        page.get_by_role("button", name=button, exact=True).click()
    return Path(found.value.path())


def saved_state(page):
    return json.loads(saved(page).read_text())["qParams"]


def violations(page):
    from axe_playwright_python.sync_playwright import (
        Axe,
    )  # here: what collects every test needs no browser

    broken = Axe().run(page).response["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in broken]


def find(page, what):
    page.fill("[data-find]", what)
    page.press("[data-find]", "Enter")


def test_the_table_holds_the_largest_edges_on_a_path(explored):
    found, truth = explored(), on_path(largest(every_edge(), EDGES))
    rows = listed(found.page)
    assert (
        f"the first 100 of {len(truth)} edges" in found.page.locator("[data-table] p").inner_text()
    )
    names = {"q": "query", "k": "key", "v": "value", "": ""}
    for cells, edge in zip(rows, truth.head(100).to_dict("records"), strict=True):
        node, _, via = edge["reader"].partition("<")
        assert cells[:3] == [edge["writer"], node, names[via.rstrip(">")]]
        assert float(cells[3].replace("−", "-")) == pytest.approx(edge["score"], rel=5e-3)
    assert (
        found.page.locator("[data-stage]")
        .get_attribute("aria-label")
        .startswith("The circuit of ioi")
    )
    assert found.quiet, vars(found)


def test_the_slider_says_what_the_stored_curve_says(explored, run):
    page = explored().page
    n = len(every_edge())
    page.select_option("[data-size]", str(round(0.1 * n)))
    text = page.locator("[data-faithfulness]").inner_text()
    assert "Faithfulness on other pairs, 10% of the edges: 0.75 [0.7, 0.8]." in text
    assert text.startswith(f"{len(on_path(largest(every_edge(), round(0.1 * n))))} of {n} edges")
    page.locator("[data-range]").focus()
    before = page.input_value("[data-number]")
    page.keyboard.press("ArrowLeft")
    assert int(page.input_value("[data-number]")) < int(before)
    text = page.locator("[data-faithfulness]").inner_text()
    assert (
        "1% of the edges: 0.25 [0.2, 0.3]; 10% of the edges: 0.75" in text
    )  # between two sizes: both, and no guess
    assert "Random circuits of 1%: 0.01" in text
    graph = circuit_of(run).graph
    graph["metadata"]["sink_lens"]["curve"][1] |= {"faithfulness": None, "low": None, "high": None}
    partly = explored(Explorer(graphs=[graph]).save(run.parent / "partly.html")).page
    assert (
        "10% of the edges: undefined [undefined"
        in partly.locator("[data-faithfulness]").inner_text()
    )
    page.select_option("[data-which]", "core")
    assert (
        "measured for the largest edges, not for this selection"
        in page.locator("[data-faithfulness]").inner_text()
    )
    page.uncheck("[data-connected]")
    assert {cells[6] for cells in listed(page)} == {"yes"}
    page.select_option("[data-which]", "contingent")
    assert {cells[6] for cells in listed(page)} == {"no"}


def test_the_circuit_of_the_run_is_shown_first_though_others_have_larger_scores(explored, tmp_path):
    edges = every_edge()  # scores of all pairs; the circuit was chosen on some of them
    among = largest(on_path(largest(edges, EDGES)), EDGES)
    outside = edges.loc[edges["reader"].eq("logits") & ~edges["in_circuit"]].index[:3]
    edges.loc[[*among.index[:3], *outside], "in_circuit"] = [False] * 3 + [True] * 3
    truth = on_path(edges.loc[edges["in_circuit"]])
    graph = circuit_of(a_run(tmp_path / "run", edges=edges)).graph
    kept = {"by": "circuit", "share": 0.1, "faithfulness": 0.625, "low": 0.5, "high": 0.75}
    graph["metadata"]["sink_lens"]["curve"].append(kept | {"n": len(truth)})
    page = explored(Explorer(graphs=[graph]).save(tmp_path / "circuit.html")).page
    text = page.locator("[data-faithfulness]")
    assert text.inner_text().startswith(f"{len(truth)} of {len(edges)} edges")
    assert "They are the circuit, and keep 0.625 [0.5, 0.75]." in text.inner_text()
    assert page.input_value("[data-which]") == "circuit"
    page.fill("[data-number]", "90")
    page.press("[data-number]", "Enter")
    assert text.inner_text().startswith(f"{len(on_path(largest(edges, 90)))} of {len(edges)} edges")
    page.select_option("[data-which]", "circuit")
    assert text.inner_text().startswith(f"{len(truth)} of {len(edges)} edges")


def test_a_node_is_hovered_and_pinned_with_mouse_and_keys(explored):
    found = explored()
    page = found.page
    stage = page.locator("[data-stage]")
    stage.focus()
    page.keyboard.press("ArrowUp")
    assert sentence_of(page).startswith("logits: ")
    page.keyboard.press("ArrowDown")
    assert not sentence_of(page).startswith("logits: ")
    page.keyboard.press("Enter")
    assert sentence_of(page).endswith("is pinned.")
    pinned = ids()[sentence_of(page).removesuffix(" is pinned.")]
    assert saved_state(page)["pinnedIds"] == [pinned]
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Unpin all").click()
    x, y, width, height = page.locator("canvas").bounding_box().values()
    heard = set()
    for share in np.linspace(
        0, 1, 60
    ):  # up the middle of the picture: nodes, and edges between them
        page.mouse.move(x + width / 2, y + share * height)
        heard |= {page.locator("[data-panel] h3").inner_text(), sentence_of(page)}
    assert any(re.fullmatch(r"L\d\.(H|KV)\d|MLP \d", one) for one in heard)
    assert any(" → " in one for one in heard)
    assert found.quiet, vars(found)


def test_a_head_is_found_by_its_number_and_shows_what_feeds_it_where_it_looks_and_why(explored):
    found = explored()
    page = found.page
    find(page, "5.1")
    edges = every_edge()
    panel = page.locator("[data-panel]")
    assert panel.locator("h3").inner_text() == "L5.H1"
    for reader, said in (
        ("a5.kv0<k>", "Into its key, which heads 0, 1 share"),
        ("a5.h1<q>", "Into its query"),
    ):
        writer = largest(edges.loc[edges["reader"].eq(reader)], 1)["writer"].item()
        first_of = panel.locator("h4", has_text=said).locator("+ ul li button").first
        assert first_of.inner_text() == node_label(writer)
    assert (
        panel.locator(".cell").inner_text()
        == "Query 3 “·sat” gives key 1 “·cat” 69.8% of its attention."
    )
    assert "whose score is 2.5 above the mean of the other keys" in panel.inner_text()
    rows = (
        panel.locator("p", has_text="what its key reads, by writer")
        .locator("+ ul li")
        .all_inner_texts()
    )
    assert [row.split() for row in rows] == [["MLP", "0", "2"], ["all", "else", "0.5"]]
    panel.locator("canvas").press("ArrowUp")
    panel.locator("canvas").press("ArrowRight")
    assert (
        panel.locator(".cell").inner_text()
        == "Query 2 “·<b>” gives key 2 “·<b>” 60% of its attention."
    )
    find(page, "nowhere")
    assert sentence_of(page) == "0 found."
    assert found.quiet, vars(found)


def test_labels_and_groups_are_written_taken_back_saved_and_opened(explored, run, tmp_path):
    found = explored()
    page = found.page
    find(page, "m0")
    page.fill("[data-label]", HOSTILE[0])
    page.press("[data-label]", "Enter")
    page.locator("[data-panel]").get_by_role("button", name="Pin", exact=True).click()
    find(page, "m1")
    page.locator("[data-panel]").get_by_role("button", name="Pin", exact=True).click()
    page.fill("[data-group-name]", HOSTILE[1])
    page.get_by_role("button", name="Group the pinned").click()
    assert any(HOSTILE[1][:20] in cell for cells in listed(page) for cell in cells)
    file = saved(page)
    held = json.loads(file.read_text())
    assert held["qParams"]["supernodes"] == [[HOSTILE[1], "m0", "m1"]]
    assert next(node for node in held["nodes"] if node["node_id"] == "m0")["clerp"] == HOSTILE[0]
    for _ in range(4):
        page.get_by_role("button", name="Undo").click()
    again = saved_state(page)
    assert (again["supernodes"], again["pinnedIds"]) == ([], [])
    page.get_by_role("button", name="Redo").click()
    page.set_input_files("[data-file]", file)
    page.locator("[data-said]", has_text="opened").wait_for()
    assert json.loads(saved(page).read_text()) == held
    assert page.evaluate("window.hit") is None
    assert page.locator("#explorer img, #explorer script").count() == 0
    assert found.quiet, vars(found)
    whole = circuit_of(run).explore().graphs[0]
    assert held["links"] == json.loads(json.dumps(whole["links"]))


def test_neuronpedia_s_graph_goes_in_and_out_without_loss(explored, tmp_path):
    """A graph as circuit-tracer writes it: further fields everywhere."""
    node = {
        "feature": 7,
        "ctx_idx": 2,
        "feature_type": "cross layer transcoder",
        "clerp": "",
        "influence": None,
    }
    nodes = [
        {
            "node_id": name,
            "layer": name.partition("_")[0],
            "jsNodeId": f"{name}-2",
            "clerp_extra": 1,
        }
        | node
        for name in ("E_2_0", "0_253_1", "5_9_2", "26_7_2")
    ]
    nodes[-1] |= {"feature_type": "logit", "clerp": 'Output " Austin"', "is_target_logit": True}
    ends = [
        ("E_2_0", "0_253_1", 12.5),
        ("0_253_1", "5_9_2", -3.25),
        ("5_9_2", "26_7_2", 1.0),
        ("E_2_0", "26_7_2", 0.1),
    ]
    metadata = {
        "slug": "austin",
        "scan": "gemma-2-2b",
        "prompt_tokens": ["a"],
        "prompt": "a",
        "node_threshold": 0.8,
    }
    shown = {
        "pinnedIds": ["5_9_2"],
        "supernodes": [["state", "0_253_1", "5_9_2"]],
        "linkType": "both",
    }
    graph = {
        "metadata": metadata, "qParams": shown | {"clickedId": "5_9_2", "sg_pos": ""}, "nodes": nodes,
        "links": [{"source": one, "target": other, "weight": weight, "kept": True} for one, other, weight in ends],
        "extra": {"kept": [1, None, "é"]},
    }  # fmt: skip
    file, found = tmp_path / "np.json", explored()
    file.write_text(json.dumps(graph))
    page = found.page
    page.set_input_files("[data-file]", file)
    page.locator("[data-said]", has_text="austin: opened.").wait_for()
    held = json.loads(saved(page).read_text())
    view = held["qParams"].pop("sink_lens")
    assert held == graph
    assert view["n"] == 4
    assert len(listed(page)) == 4
    page.select_option("[data-group]", "hand")
    assert "state (2)" in {cell for cells in listed(page) for cell in cells}
    for text in (
        "{}",
        "[]",
        "no json",
        '{"nodes": [], "links": [{"source": "a", "target": "b", "weight": 1}]}',
    ):
        file.write_text(text)
        page.set_input_files("[data-file]", [])
        page.set_input_files("[data-file]", file)
        page.locator("[data-said].alarm", has_text="np.json cannot be shown").wait_for()
    assert found.quiet, vars(found)


def test_groups_by_layer_and_role_sum_their_edges(explored):
    page = explored().page
    page.uncheck("[data-connected]")
    page.fill("[data-number]", str(len(every_edge())))
    page.press("[data-number]", "Enter")
    page.select_option("[data-group]", "layer")
    edges = every_edge()
    layer = edges["writer"].str.extract(r"[am](\d+)")[0]
    into = edges["reader"].eq("logits") & layer.eq("5")
    row = next(
        cells for cells in listed(page) if cells[0].startswith("layer 5 ") and cells[1] == "logits"
    )
    assert float(row[3].replace("−", "-")) == pytest.approx(
        edges.loc[into, "score"].sum(), rel=5e-3
    )
    page.select_option("[data-group]", "role")
    assert any(cells[0].startswith("feeds ") for cells in listed(page))


def test_two_circuits_stand_side_by_side_with_what_differs(explored, run, tmp_path):
    other = a_run(tmp_path / "other", seed=1, model="other")
    graphs = [circuit_of(one).explore().graphs[0] for one in (run, other)]
    found = explored(Explorer(graphs=graphs).save(tmp_path / "both.html"))
    page = found.page
    assert page.locator("canvas").count() == 2
    own, theirs = (set(on_path(largest(every_edge(seed), EDGES))["edge"]) for seed in (0, 1))
    told = page.locator("[data-faithfulness]").inner_text()
    assert re.fullmatch(rf"First: {len(own)} of .* Second: {len(theirs)} of .*", told), told
    text = page.locator("[data-difference] p").first.inner_text()
    both = len(own & theirs)
    only = f"{len(own) - both} only in the first, {len(theirs) - both} only in"
    assert text.startswith(f"{both} edges are in both, {only}")
    assert {row[5] for row in listed(page, "difference")} >= {"first only", "second only"}
    page.get_by_role("button", name="End comparison").click()
    assert page.locator("canvas").count() == 1
    file = tmp_path / "other.graph.json"
    file.write_text(json.dumps(graphs[1]))
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Compare with JSON").click()
    chooser.value.set_files(file)
    page.locator("canvas >> nth=1").wait_for()
    assert page.locator("[data-difference] p").first.inner_text() == text
    assert violations(page) == []
    assert found.quiet, vars(found)


def test_what_is_shown_is_saved_as_svg_and_png_and_printed(explored):
    found = explored()
    page = found.page
    svg = saved(page, "SVG").read_text()
    dotted = re.findall(
        r'<g[^>]*stroke-dasharray="1 3"[^>]*>.*?</g>', svg, flags=re.S
    )  # a KV head and its heads
    assert svg.count("<path") == len(on_path(largest(every_edge(), EDGES))) + "".join(dotted).count(
        "<path"
    )
    assert ">logits</text>" in svg
    assert "#0072b2" in svg
    assert "#c04f00" in svg
    assert saved(page, "PNG").read_bytes().startswith(b"\x89PNG")
    page.evaluate("() => { window.print = () => dispatchEvent(new Event('beforeprint')) }")
    page.get_by_role("button", name="Print or PDF").click()
    assert page.locator("[data-printed] svg path").count() == svg.count("<path")
    page.emulate_media(media="print")
    assert page.locator("[data-printed] > svg").is_visible()
    assert not page.locator("[data-stage]").is_visible()
    assert page.pdf().startswith(b"%PDF")
    assert found.quiet, vars(found)


@pytest.mark.parametrize(
    "options", first([{}, {"color_scheme": "dark"}, PHONE]), ids=["light", "dark", "phone"]
)
def test_nothing_that_axe_knows_is_violated(explored, options):
    found = explored(**options)
    page = found.page
    find(page, "5.1")
    listed(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert violations(page) == []
    assert found.quiet, vars(found)


def test_the_page_of_a_circuit_s_run_holds_it(opened, run, tmp_path):
    found = opened(render(run, out=tmp_path / "page.html"))
    found.page.locator("#explorer[data-state=drawn]").wait_for()
    assert found.page.locator("#explore canvas").is_visible()
    assert violations(found.page) == []
    assert found.quiet, vars(found)


def test_hostile_names_are_text(explored, tmp_path):
    edges = every_edge()
    edges.loc[edges["writer"].eq("m0"), "writer"] = HOSTILE[0]
    edges["in_circuit"] = True
    found = explored(
        circuit_of(a_run(tmp_path / "run", edges=edges, model=HOSTILE[1])).save(
            tmp_path / "hostile.html"
        )
    )
    page = found.page
    find(page, "<img")
    assert HOSTILE[0] in page.locator("[data-panel]").inner_text()
    for button in ("SVG", "PNG", "Save JSON"):
        saved(page, button)
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0
    assert read_run(tmp_path / "run").kind == "circuit"
    assert found.quiet, vars(found)

"""Circuits chosen, judged, saved and read again; runs of the command."""

import json
import re
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch
from lenses import lens_of, speaking
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Split
from transformer_lens.evals import IOIDataset
from transformers import PreTrainedTokenizerFast

from sink_lens import circuits
from sink_lens.circuits import estimate, pairs, stability
from sink_lens.circuits.ablated import circuit_values
from sink_lens.circuits.choice import connected, greedy, largest, random_like
from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.curve import area
from sink_lens.circuits.exact import exact_scores
from sink_lens.circuits.files import read as read_file
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.pairs import read_pairs
from sink_lens.circuits.tasks import task_of
from sink_lens.cli.circuit import _table
from sink_lens.data.bos import answer_id, text_ids
from sink_lens.edits import metrics
from sink_lens.errors import InputError, RunError
from sink_lens.models.header import read_header
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny
from sink_lens.records.shards import progress_of
from sink_lens.report.edges import circuit_told

record = import_module("sink_lens.circuits.run")

METRIC = metrics.logit_difference([5, 6, 9, 4, 30, 31], [7, 8, 10, 2, 40, 41])


def pair(*, n=6, length=9, at=3):
    clean = torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, at] = 3 + (clean[:, at] + 50) % 297
    return clean, corrupted


def circuit(family="llama", **more):
    given = {"metric": METRIC, "edges": 20, "templates": ["a", "b"] * 3, "most_steps": 5}
    return circuits.find(more.pop("lens", None) or lens_of(family), *pair(), **(given | more))


def reference_pairs(path, *, n=24):
    """Pairs on which the tiny model has the larger logit for the first answer."""
    lens = speaking("llama")
    clean, corrupted = pair(n=n)
    with torch.no_grad():
        logits = lens.plain(clean).logits[:, -1]
    rows = [
        {
            "clean": clean[row].tolist(),
            "corrupted": corrupted[row].tolist(),
            "correct": int(logits[row].argmax()),
            "incorrect": int(logits[row].argmin()),
            "template": str(row % 2),
        }
        for row in range(n)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("ablation", ["resample", "mean_ordinary", "mean_aligned"])
def test_the_difference_that_shares_are_of_is_that_of_every_edge(ablation):
    one = circuit(ablation=ablation)
    rows, edges = list(range(one.runs.n_pairs)), np.zeros((1, one.graph.n_edges), dtype=bool)
    nothing = circuit_values(one.runs.some(rows), edges)[0].mean()
    expected = float(one.runs.clean_values.double().mean() - nothing)
    assert one.difference == pytest.approx(expected, rel=1e-5)
    alone = float(one.runs.gap.double().mean())
    assert (abs(one.difference - alone) > 0.05 * abs(one.difference)) == (ablation != "resample")


def test_a_chain_of_edges_is_connected_and_what_leads_nowhere_is_not():
    graph = Graph(n_layers=2, n_heads=2, n_kv_heads=1, d_model=4)
    chain = ["input->a0.kv0<v>", "a0.h1->m0", "m0->a1.h0<q>", "a1.h0->logits"]
    loose = ["a0.h0->a1.h1<q>", "m1->logits", "input->m1"]
    chosen = np.zeros(graph.n_edges, dtype=bool)
    chosen[[graph.index[name] for name in [*chain, *loose]]] = True
    outputs = [len(graph.readers) - 1]
    kept = set(graph.names[connected(graph, chosen, outputs=outputs)])
    assert kept == {*chain, "m1->logits", "input->m1"}  # a1.h1 is read by nobody
    chosen[graph.index["input->a0.kv0<v>"]] = False
    assert set(graph.names[connected(graph, chosen, outputs=outputs)]) == {"m1->logits", "input->m1"}


def test_numbers_of_edges_are_those_of_eap_ig():
    for n_layers, n_heads, parallel in ((2, 3, False), (3, 2, True)):
        graph = Graph(n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_heads, d_model=4, parallel=parallel)
        total, writers = 0, 1
        for _ in range(n_layers):
            total += 3 * n_heads * writers + writers + (0 if parallel else n_heads)
            writers += n_heads + 1
        assert graph.n_edges == total + writers
        assert len(graph.writers) == writers


def test_edges_are_counted_from_the_headers_of_the_files(tmp_path):
    for family in ("llama", "gpt2", "gptj", "gpt_neox"):
        lens = speaking(family)
        lens.plain.save_pretrained(tmp_path / family)
        lens.tokenizer.save_pretrained(tmp_path / family)
        config = CircuitConfig(model=str(tmp_path / family), task="induction", device="cpu", neurons=("1:0,3",))
        cost = estimate._cost_by_header(config)
        if family == "gpt_neox":  # only its configuration says whether its blocks are parallel
            assert cost is None
            continue
        graph = Graph.of(lens, neurons={1: (0, 3)})
        assert (cost.graph.n_edges, cost.graph.parallel) == (graph.n_edges, graph.parallel)
        task = task_of(lens, "induction", pairs=8, generator=np.random.default_rng([0, 0]), least=0.0)
        assert cost.n_positions >= task.clean.n_positions
        said = estimate.estimate(config)
        assert f"{graph.n_edges:,} edges" in said[0]
        assert any(line.startswith("memory: about ") for line in said)
        assert cost.bytes_peak > read_header(tmp_path / family).weight_bytes


def test_the_templates_of_indirect_objects_are_those_of_transformer_lens():
    assert list(pairs._TEMPLATES[:-1]) == IOIDataset.get_default_templates()
    theirs = {noun: tuple(words) for noun, words in IOIDataset.get_default_nouns().items()}
    assert list(theirs.items()) == list(pairs._OF_TEMPLATES.items())


def test_a_greedy_circuit_grows_from_the_output_and_a_random_one_has_as_many_edges_between_layers():
    graph = Graph(n_layers=3, n_heads=4, n_kv_heads=2, d_model=4)
    values = np.random.default_rng(0).normal(size=graph.n_edges)
    outputs = [len(graph.readers) - 1]
    found = greedy(graph, values, 30, outputs=outputs)
    assert found.sum() == 30
    best = graph.ends[2] == outputs[0]
    first = np.flatnonzero(best)[np.abs(values[best]).argmax()]
    assert found[first]
    other = random_like(graph, found, generator=np.random.default_rng(1))
    layers = [np.array([one.layer for one in some]) for some in (graph.writers, graph.readers)]
    for mask in (found, other):
        assert mask.sum() == 30
    ends = [
        sorted(zip(layers[0][graph.ends[1][one]], layers[1][graph.ends[2][one]], strict=True)) for one in (found, other)
    ]
    assert ends[0] == ends[1]
    assert (found != other).any()


def test_the_area_of_a_straight_line_and_the_interval_of_a_sure_edge():
    share = np.array([0.001, 0.01, 0.1, 1.0])
    assert area(share, share) == pytest.approx((1 - 0.001**2) / 2)
    assert area(share, np.array([0.0, 1.0, 2.0, 3.0]), logarithmic=True) == pytest.approx(1.5)
    values = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32) + np.array([9, 8, 0, 0, 0, 0])
    weights = stability.drawn(["a"] * 10 + ["b"] * 30, draws=200, generator=np.random.default_rng(1))
    assert weights.sum(1) == pytest.approx(np.ones(200))
    assert weights[:, :10].sum(1) == pytest.approx(np.full(200, 0.25))  # a template keeps its share
    found = stability.inclusion(values.astype(np.float32), weights, n=3)
    assert found[:2] == pytest.approx([1, 1])
    assert found.sum() == pytest.approx(3)
    assert found[2:].max() < 1
    first, second = stability.halves(["a"] * 5 + ["b"] * 5, generator=np.random.default_rng(2))
    assert sorted([*first, *second]) == list(range(10))
    assert len(first) == len(second) == 5


def test_an_edge_is_core_undecided_or_contingent_by_how_sure_each_setting_is():
    settings = {"resample": np.array([1.0, 0.96, 0.5, 0.0]), "mean": np.array([0.95, 0.2, 0.1, 0.0])}
    circuits = {"resample": np.array([1, 1, 1, 0], dtype=bool), "mean": np.array([1, 0, 0, 0], dtype=bool)}
    assert stability.verdicts(settings, circuits).tolist() == ["core", "undecided", "contingent", "none"]


def test_a_sample_bounds_the_edges_that_are_missed():
    # 4 of 10 sampled, none found: with 5 such edges the sample avoids all with 5 C 4 / 10 C 4 = 5/210 = 2%, with 4 with
    # 15/210 = 7%; all sampled: what was found is all
    assert stability.most_outside(0, sampled=4, total=10) == 4
    assert stability.most_outside(2, sampled=10, total=10) == 2
    assert stability.most_outside(10, sampled=10, total=70_000) == 70_000
    assert stability.most_outside(0, sampled=10, total=70_000) == pytest.approx(70_000 * (1 - 0.05**0.1), rel=1e-3)
    found = circuit()
    check = found.check(edges=12, pairs=2)
    outside = check.frame[check.frame["drawn"] == "other"]
    assert check.weakest == np.abs(found.scores.mean[found.chosen]).min()
    assert check.outside == ((outside["exact"].abs() > check.weakest).sum(), 6)
    assert check.outside[0] <= check.at_most <= check.n_outside == found.graph.n_edges - found.n_edges


def test_a_circuit_is_judged_on_other_pairs_and_all_edges_are_the_model():
    found = circuit()
    curve = found.evaluate([0.1, 1.0], random=2)
    first, second = found.halves
    assert not set(first) & set(second)
    whole = curve.frame[(curve.frame["by"] == "edges") & (curve.frame["share"] == 1)]
    assert whole["value"].item() == pytest.approx(found.runs.clean_values[second].mean().item(), abs=1e-5)
    assert curve.empty.estimate == pytest.approx(found.runs.corrupted_values[second].mean().item(), abs=1e-5)
    small = curve.frame[curve.frame["share"] == 0.1]
    assert len(small[small["by"] == "random"]) == 2
    if curve.defined:
        f = (small["value"] - curve.empty.estimate) / curve.gap.estimate
        assert small["faithfulness"].to_numpy() == pytest.approx(f.to_numpy())
    else:
        assert small["faithfulness"].isna().all()


def test_the_loss_is_that_of_the_clean_tokens_in_both_runs():
    """Else the difference is that of two texts, which no edge explains."""
    found = circuit(metric=metrics.loss(), most_steps=40)
    assert found.scores.complete == pytest.approx(1, abs=0.02)


def test_a_circuit_above_a_threshold_has_smaller_ones_of_as_many_edges_as_asked():
    found = circuit(choice="threshold", threshold=1e-9)
    assert len(found.frame) >= found.n_edges > 150
    assert found.smaller(20).n_edges == circuit().n_edges
    with pytest.raises(InputError, match="need a threshold above 0"):
        CircuitConfig(choice="threshold").check_together()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"threshold": 0.1}, "threshold is 0.1, which nothing reads here: it is for choice threshold"),
        ({"length": 32}, "it is for task text"),
        ({"sink_position": 1}, "it is for metric sink_mass"),
        ({"metric": "loss", "task": "text", "metric_layers": (1,)}, "it is for metric sink_mass"),
        ({"method": "gim", "steps": 7}, "it is for the methods eap-ig"),
    ],
)
def test_a_field_that_nothing_reads_is_refused(fields, text):
    with pytest.raises(InputError, match=re.escape(text)):
        CircuitConfig(**fields).check_together()


def test_edges_that_make_no_path_are_an_empty_circuit_and_it_says_so():
    with pytest.warns(UserWarning, match="the circuit is empty: of 1 chosen edges none lies on a path"):
        assert circuit(edges=1).n_edges == 0


def test_exact_scores_are_a_method_and_their_check_is_without_error():
    found = circuit(lens=wrap(tiny("llama", num_hidden_layers=2)), method="exact")
    check = found.check(edges=10, pairs=6)
    assert check.frame["error"].abs().max() < 1e-5
    assert check.rank_correlation == pytest.approx(1)


def test_what_is_saved_is_read_again(tmp_path):
    for family in ("llama", "gpt2"):
        found = circuit(family)
        for name in ("c.json", "c.pt", "ioi_tiny"):
            held = circuits.read(found.save(tmp_path / family / name))
            assert held.graph.names.tolist() == found.graph.names.tolist()
            assert held.scores == pytest.approx(found.scores.mean, abs=1e-6)
            assert (held.chosen == found.chosen).all()
    held = json.loads((tmp_path / "llama" / "c.json").read_text())
    one, other = (held["edges"][f"a0.h1->a1.h{head}<k>"] for head in (0, 1))  # share a key-value head
    assert one == other
    assert one["score"] * 2 == pytest.approx(found_score(circuit("llama"), "a0.h1->a1.kv0<k>"), abs=1e-6)
    tensors = torch.load(tmp_path / "gpt2" / "c.pt", weights_only=True)
    layers, heads = 3, 4
    assert tensors["edges_scores"].shape == (1 + layers * (heads + 1), layers * (3 * heads + 1) + 1)
    assert tensors["src_nodes"][:6] == ["input", "a0.h0", "a0.h1", "a0.h2", "a0.h3", "m0"]
    row, column = 1 + 1 * (heads + 1) + 2, 2 * (3 * heads + 1) + "qkv".index("k") * heads + 3  # EAP-IG's indices
    assert tensors["edges_scores"][row, column].item() == pytest.approx(
        found_score(circuit("gpt2"), "a1.h2->a2.h3<k>"), abs=1e-6
    )
    for name in ("c.txt", "c.bin"):
        with pytest.raises(InputError, match="ending"):
            found.save(tmp_path / name)
    (tmp_path / "damaged.json").write_text('{"cfg": {}}')
    with pytest.raises(InputError, match="cannot be read as a circuit"):
        circuits.read(tmp_path / "damaged.json")


def found_score(one, name):
    return float(one.scores.mean[one.graph.index[name]])


def test_pictures_and_tables_are_written(tmp_path):
    found = circuit()
    begins = {"c.svg": b"<?xml", "c.png": b"\x89PNG", "c.pdf": b"%PDF", "c.dot": b"digraph", "c.parquet": b"PAR1"}
    for name, start in begins.items():
        assert found.save(tmp_path / name).read_bytes().startswith(start), name
    drawn = (tmp_path / "c.dot").read_text()
    group, heads = found.graph.group, set(found.edges["writer"])
    layer, shared = next(one.partition("<")[0].split(".kv") for one in found.edges["reader"] if ".kv" in one)
    own = {f"{layer}.h{head}" for head in range(group * int(shared), group * (int(shared) + 1))} & heads
    assert all(f'"{layer}.kv{shared}" -> "{head}" [color="#999999"' in drawn for head in own)
    assert (drawn.count("style=dotted") > 0) == bool(own)
    assert drawn.count("penwidth") == found.n_edges
    graph = json.loads(found.save(tmp_path / "c.graph.json").read_text())
    nodes = {node["node_id"] for node in graph["nodes"]}
    assert {link["source"] for link in graph["links"]} | {link["target"] for link in graph["links"]} <= nodes
    for node in graph["nodes"]:
        assert {"node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp"} <= node.keys()
    assert {"slug", "scan", "prompt_tokens", "prompt"} <= graph["metadata"].keys()
    assert sum(link["weight"] for link in graph["links"]) == pytest.approx(found.edges["score"].sum(), abs=1e-4)
    assert found.draw().axes
    shown = {text.get_text() for text in found.draw().axes[0].texts}
    assert not any(".kv" in node and f"{node.partition('.')[0]}.h{2 * int(node[-1])}" in shown for node in shown)


def test_a_run_is_written_continued_and_equal(tmp_path):
    lens, file = speaking("llama"), reference_pairs(tmp_path / "pairs.jsonl")
    fields = {"task": "file", "pairs_file": str(file), "pairs": 16, "edges": 15, "sizes": (0.1, 1.0), "check": 4}
    fields |= {"check_pairs": 2, "random": 1, "most_steps": 5, "tolerance": 0.5}
    whole = circuits.run(lens, out=tmp_path / "one", **fields)
    assert whole.tables["summary"]["completeness"].item() == pytest.approx(1, abs=0.5)
    assert any("bootstraps" in one for one in whole.sentences)
    summary = whole.tables["summary"].iloc[0]
    bound = (
        f"at most {summary['outside_at_most']:,} of all {summary['all_edges'] - summary['edges']:,} edges outside do"
    )
    assert any(bound in one for one in whole.sentences)
    page = (tmp_path / "one" / "report.html").read_text()
    assert "How faithful it is" in page
    assert "Real patches of nodes" in page
    nodes = whole.tables["check_nodes"]
    assert list(nodes["node"]) == [one.name for one in whole.circuit.graph.writers]
    assert summary["patched_nodes"] == len(nodes)
    blind = summary.to_frame().T.assign(unseen_nodes="a1.h2 m0")
    assert any("Do not believe the circuit at L1.H2 and MLP 0: a real patch" in one for one in circuit_told(blind))
    seen = summary.to_frame().T.assign(unseen_nodes=np.nan)  # as an empty text comes back from a file
    for frame, options, words in (
        (blind, {"ablation": "zero"}, "no sign of a wrong circuit"),
        (seen, {"ablation": "zero"}, "no sign of a right circuit"),
        (blind, {"ablation": "resample", "method": "eap"}, "in many right circuits too; use eap-ig"),
    ):
        assert any(words in one for one in circuit_told(frame.assign(**options)))
    assert any(
        f"Each of the {len(nodes)} nodes was really patched, and gradients miss none of them" in one
        for one in circuit_told(seen)
    )
    written = json.loads((tmp_path / "one" / "run.json").read_text())
    written["status"] = "running"
    for name in list(written["files"]):
        if not name.startswith(("scores", "pairs")):
            del written["files"][name]
            (tmp_path / "one" / name).unlink()
    (tmp_path / "one" / "run.json").write_text(json.dumps(written))
    again = circuits.run(lens, out=tmp_path / "one", **fields)
    assert again.frame.equals(whole.frame)
    assert again.tables["curve"].equals(whole.tables["curve"])


def test_text_has_a_circuit_of_the_sink_and_core_edges_hold_under_every_ablation(tmp_path):
    lens = wrap(tiny("llama"), tokenizer=speaking("llama").tokenizer)
    fields = {
        "task": "text",
        "pairs": 4,
        "length": 24,
        "sizes": (0.1, 1.0),
        "random": 1,
        "check": 0,
        "edges": 20,
        "most_steps": 5,
    }
    found = circuits.run(lens, out=tmp_path / "sink", spans=("sink=0", "rest=1-23"), core=True, **fields)
    assert found.tables["summary"]["metric"].item().startswith("sink mass")
    assert set(found.frame["span"]) <= {"sink", "rest"}
    core = found.tables["core"]
    inclusion = core.filter(like="inclusion") >= 0.95
    undecided = inclusion.any(axis=1) & ~inclusion.all(axis=1)
    assert (core["core"] == inclusion.all(axis=1)).all()
    assert (core["undecided"] == undecided).all()
    assert core["core"].any()
    np.testing.assert_allclose(core["least"], core.filter(like="inclusion").min(axis=1))
    told = "".join(str(one) for one in _table(found.frame, core=core).columns[-1].cells)
    for row in core[core["undecided"] & core["edge"].isin(found.frame["edge"])].to_dict("records"):
        own = "inclusion" if row["where"] == "mean_ordinary" else f"inclusion_{row['where']}"
        assert row[own] == row["least"]
        assert f"undecided: {row['least']:.0%} under {row['where']}" in told
    assert (core["exact"].notna() == core["core"]).all()
    some = found.circuit.runs.some(range(4))
    real = exact_scores(some, [found.circuit.graph.index[core["edge"][0]]]).mean()
    assert core["exact"][0] == pytest.approx(real, abs=1e-6)
    confirmed = int((core["exact"].abs() >= 0.01 * abs(found.circuit.runs.gap.mean().item())).sum())
    assert any(f"a real patch confirms {confirmed} of them" in one for one in found.sentences)
    assert undecided.any()
    assert any(f"{undecided.sum()} are undecided" in one for one in found.sentences)
    assert found.tables["summary"]["undecided_edges"].item() == undecided.sum()
    with pytest.raises(InputError, match="no right and wrong answer"):
        circuits.run(lens, task="text", metric="logit_difference")
    with pytest.raises(InputError, match="no corrupted prompts"):
        circuits.run(lens, task="text", ablation="resample")


def test_the_answer_of_a_year_is_its_next_token():
    """It has two digits in GPT-2, one elsewhere."""
    pieces = {"two": {f"{n:02}": n + 1 for n in range(100)}, "one": {str(n): n + 1 for n in range(10)}}
    for name, width in (("two", 2), ("one", 1)):
        known = Tokenizer(WordLevel({"?": 0, **pieces[name]}, unk_token="?"))
        known.pre_tokenizer = Split(Regex(rf"\d{{{width}}}"), "isolated")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")
        options = {"d_vocab": 200, "generator": np.random.default_rng(0), "file": None, "bos": "without"}
        found = pairs.pairs_that_fit("greater-than", tokenizer, pairs=4, **options)
        for clean, _, correct, incorrect, _ in found:
            right, wrong, year = (
                tokenizer.decode([one]) for one in (correct, incorrect, clean[3 if width == 1 else 2])
            )
            assert len(right) == width
            assert int(wrong[0]) < int(year[0]) < int(right[0])


def test_an_answer_is_the_token_that_it_is_behind_the_prompt():
    """A tokenizer as Mistral's puts a space before a text that stands alone, and has a token for a space alone."""
    words = ["?", "▁", "▁a", *(f"▁{name}" for name in pairs._NAMES)]
    known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    known.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    known.pre_tokenizer = Split("▁", "merged_with_next")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")
    mary = f" {pairs._NAMES[0]}"
    assert len(text_ids(mary, tokenizer)) == 2
    assert tokenizer.convert_ids_to_tokens(answer_id(mary, "a", tokenizer)) == f"▁{pairs._NAMES[0]}"
    options = {"d_vocab": len(words), "generator": np.random.default_rng(0), "file": None, "bos": "without"}
    found = pairs.pairs_that_fit("ioi", tokenizer, pairs=4, **options)
    assert len(found) == 8
    for clean, _, correct, incorrect, _ in found:
        assert {correct, incorrect} <= set(clean)


def test_positions_in_no_span_have_edges_of_their_own():
    whole, apart = (circuit(spans={"early": [0, 1, 2], **more}) for more in ({"rest": range(3, 9)}, {}))
    assert apart.graph.spans == whole.graph.spans == ("early", "rest")
    assert apart.scores.mean == pytest.approx(whole.scores.mean)
    with pytest.raises(InputError, match="positions are in no span, and 'rest' is taken"):
        circuit(spans={"rest": [0]})


def test_spans_and_neurons_are_what_was_given():
    given = CircuitConfig(spans=("last=-2,-1", "sink=0"), neurons=("2:15", "2:8-9"))
    assert given.positions_by_span == {"last": (-2, -1), "sink": (0,)}
    assert given.neurons_by_layer == {2: (15, 8, 9)}
    for spans, said in ((("a=0", "a=1"), "given twice"), (("a=-3--1",), "need numbers such as")):
        with pytest.raises(InputError, match=said):
            CircuitConfig(spans=spans).positions_by_span  # noqa: B018
    with pytest.raises(InputError, match="ending that is not known"):
        CircuitConfig(save=("c.txt",)).check_together()


def test_induction_begins_with_bos_unless_told_otherwise():
    lens = speaking("llama")
    for bos, begins in (("auto", True), ("with", True), ("without", False)):
        task = task_of(lens, "induction", pairs=4, generator=np.random.default_rng(0), bos=bos, least=0.0)
        assert (set(task.clean.tokens[:, 0].tolist()) == {lens.tokenizer.bos_token_id}) == begins


def test_pairs_that_are_left_out_are_counted(tmp_path, caplog):
    file = reference_pairs(tmp_path / "pairs.jsonl", n=8)
    more = {"clean": [5, 6, 7], "corrupted": [5, 6], "correct": 8, "incorrect": 9}
    file.write_text(file.read_text() + "\n" + json.dumps(more))
    task_of(speaking("llama"), "file", file=file, generator=np.random.default_rng(0))
    assert "1 of the first 9 pairs of" in caplog.text


def test_pairs_that_do_not_fit_are_refused_with_their_line(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"clean": "a"}\n')
    with pytest.raises(InputError, match="line 1"):
        read_pairs(file)
    file.write_text('{"clean": "a b c d e f", "corrupted": "a b", "correct": "b", "incorrect": "c"}\n')
    with pytest.raises(InputError, match="no pair of 'file'"):
        task_of(speaking("llama"), "file", file=file, generator=np.random.default_rng(0))
    rows = [json.loads(line) for line in reference_pairs(file).read_text().splitlines()]
    for row in rows:
        row["correct"], row["incorrect"] = row["incorrect"], row["correct"]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match="does not do"):
        task_of(speaking("llama"), "file", file=file, generator=np.random.default_rng(0))
    with torch.no_grad():  # answers that both prompts prefer: there and back, the differences cancel
        logits = sum(speaking("llama").plain(tokens).logits[:, -1] for tokens in pair(n=6))
    best, worst = logits.argmax(-1).tolist(), logits.argmin(-1).tolist()
    there = [{**row, "correct": best[at], "incorrect": worst[at]} for at, row in enumerate(rows[:6])]
    back = [{**row, "clean": row["corrupted"], "corrupted": row["clean"]} for row in there]
    file.write_text("\n".join(map(json.dumps, there + back)))
    with pytest.raises(InputError, match="covers 0"):
        circuits.run(speaking("llama"), task="file", pairs_file=str(file), pairs=12, out=tmp_path / "r", random=0)


def test_largest_takes_magnitudes():
    assert largest(np.array([1.0, -3.0, 2.0]), 2).tolist() == [False, True, True]
    assert largest(np.array([1.0]), 0).sum() == 0


def test_shards_score_their_pairs_and_the_last_one_makes_the_run_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_PART", 3)
    lens, file = speaking("llama"), reference_pairs(tmp_path / "pairs.jsonl")
    fields = {"task": "file", "pairs_file": str(file), "pairs": 16, "edges": 15, "sizes": (0.1, 1.0), "check": 4}
    fields |= {"check_pairs": 2, "random": 1, "most_steps": 5, "tolerance": 0.5, "core": True, "report": False}
    whole, out = circuits.run(lens, out=tmp_path / "whole", **fields), tmp_path / "run"
    scored, n_scored = record.score, []
    monkeypatch.setattr(
        record, "score", lambda runs, **how: (n_scored.append((runs.ablation, runs.n_pairs)), scored(runs, **how))[1]
    )
    for shard in ("2/3", "3/3", "2/3"):  # one is requeued
        assert circuits.run_shard(lens, out=out, shard=shard, **fields) is None
    shown = progress_of(out)
    assert shown["state"].tolist() == ["not begun", "finished", "finished"]
    assert shown["done"].tolist()[1:] == shown["cells"].tolist()[1:]
    with pytest.raises(RunError, match="holds shards of 3, and this is 1/4"):
        circuits.run_shard(lens, out=out, shard="1/4", **fields)
    with pytest.raises(RunError, match="edges"):
        circuits.run_shard(lens, out=out, shard="1/3", **fields | {"edges": 14})
    last = circuits.run_shard(lens, out=out, shard="1/3", **fields)
    assert last is not None
    assert sorted(last.tables) == sorted(whole.tables)
    for name, table in whole.tables.items():
        pd.testing.assert_frame_equal(last.tables[name], table, check_exact=True)
    left_sum = n_scored.pop()[1]  # of the last shard, beside its pairs
    assert left_sum == 8
    settings = {ablation for ablation, _ in n_scored}
    assert len(settings) == 4
    assert {one: sum(n for name, n in n_scored if name == one) for one in settings} == dict.fromkeys(settings, 16)
    assert not list(out.glob("shard-*"))
    assert circuits.run_shard(lens, out=out, shard="3/3", **fields) is not None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[" * 200_000, "nested too deep"),
        (json.dumps({"clean": [10**30, 2], "corrupted": [1, 2], "correct": 1, "incorrect": 2}), "clean is [1000"),
        (json.dumps({"clean": [1, 2], "corrupted": [1, 2], "correct": 10**30, "incorrect": 2}), "correct is 1000"),
        (json.dumps({"clean": [1, True], "corrupted": [1, 2], "correct": 1, "incorrect": 2}), "clean is [1, True]"),
        (json.dumps({"clean": [-1, 2], "corrupted": [1, 2], "correct": 1, "incorrect": 2}), "clean is [-1, 2]"),
    ],
)
def test_lines_that_are_no_pair_are_refused(line, says, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(InputError) as refused:
        read_pairs(tmp_path / "pairs.jsonl")
    assert "line 1 of" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", "a\x0bb", "a\u2029b"])
def test_a_text_of_a_pair_may_hold_any_line_separator_but_a_new_line(text, tmp_path):
    row = {"clean": text, "corrupted": text, "correct": " x", "incorrect": " y"}
    line = json.dumps(row, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(f"\ufeff{line}\r\n{line}\n", "utf-8")
    assert [one.clean for one in read_pairs(tmp_path / "pairs.jsonl")] == [text, text]


def test_a_circuit_of_others_is_refused_in_a_line(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(InputError, match="nested too deep"):
        read_file(tmp_path / "deep.json")

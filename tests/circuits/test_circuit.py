"""Circuits chosen, judged, saved and read again; runs of the command."""

import json
from dataclasses import replace
from importlib import import_module

import numpy as np
import pandas as pd
import prompt_pairs
import pytest
from lenses import speaking

from sink_lens import circuits
from sink_lens.circuits.ablated import compute_circuit_metrics
from sink_lens.circuits.command import show_circuit
from sink_lens.circuits.config import CircuitConfig, CircuitView
from sink_lens.circuits.exact import exact_scores
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.passes import count_circuit_passes
from sink_lens.circuits.runs import Runs, run_given_pairs
from sink_lens.circuits.sentences import circuit_sentences
from sink_lens.circuits.tasks import task_of
from sink_lens.edits import metrics
from sink_lens.engine.answers import answers
from sink_lens.errors import InputError, RunError
from sink_lens.estimate import Sizes
from sink_lens.models.bundled import read_header
from sink_lens.models.load import wrap
from sink_lens.records.shards import shard_progress
from tests.tiny_families import tiny

from . import tiny_runs
from .tiny_runs import circuit, reference_pairs

scoring = import_module("sink_lens.circuits.scoring")


@pytest.mark.parametrize("ablation", ["resample", "mean_ordinary", "mean_aligned"])
def test_the_difference_that_shares_are_of_is_that_of_every_edge(ablation):
    one = circuit(ablation=ablation)
    rows, edges = list(range(one.runs.n_pairs)), np.zeros((1, one.graph.n_edges), dtype=bool)
    nothing = compute_circuit_metrics(one.runs.select_pairs(rows), edges)[0].mean()
    expected = float(one.runs.clean_values.double().mean() - nothing)
    assert one.difference == pytest.approx(expected, rel=1e-5)
    alone = float(one.runs.gap.double().mean())
    assert (abs(one.difference - alone) > 0.05 * abs(one.difference)) == (ablation != "resample")


@pytest.mark.parametrize(
    ("position", "metric"), [(3, tiny_runs.SIX), (3, metrics.loss()), (5, metrics.loss())]
)
def test_the_difference_of_every_edge_leaves_out_what_a_frozen_position_keeps(position, metric):
    one = circuit(metric=metric, edges=1000, freeze="sink", sink_position=position)
    edges = np.zeros((1, one.graph.n_edges), dtype=bool)
    nothing = compute_circuit_metrics(one.runs, edges)[0].mean()
    expected = float(one.runs.clean_values.double().mean() - nothing)
    assert one.difference == pytest.approx(expected, rel=1e-5)
    assert abs(one.difference - float(one.runs.gap.mean())) > 0.01


def test_edges_are_counted_from_the_headers_of_the_files(tmp_path):
    for family in ("llama", "gpt2", "gptj", "gpt_neox"):
        lens = speaking(family)
        lens.plain.save_pretrained(tmp_path / family)
        lens.tokenizer.save_pretrained(tmp_path / family)
        config = CircuitConfig(
            model=str(tmp_path / family), task="induction", device="cpu", neurons=("1:0,3",)
        )
        header = read_header(tmp_path / family)
        found = count_circuit_passes(config, Sizes(header=header, files=tmp_path / family))
        if family == "gpt_neox":  # only its configuration says whether its blocks are parallel
            assert found is None
            continue
        graph = Graph.of(lens, neurons={1: (0, 3)})
        assert found.facts["edges"] == f"{graph.n_edges:,}"
        task = task_of(
            lens, "induction", pairs=8, generator=np.random.default_rng([0, 0]), least=0.0
        )
        assert found.positions >= task.clean.n_positions
        assert found.bytes > 4 * config.pairs * graph.n_edges
        file = reference_pairs(tmp_path / "pairs.jsonl", n=12)
        few = replace(config, task="file", pairs_file=str(file))
        assert count_circuit_passes(few, Sizes(header=header, lens=lens)).sequences == 12
        of_model = count_circuit_passes(config, Sizes(header=header, lens=lens))
        assert (of_model.facts, of_model.positions) == (found.facts, found.positions)


def test_points_that_a_trained_model_does_not_need_are_billed_apart(tmp_path):
    lens = speaking("llama")
    lens.plain.save_pretrained(tmp_path)

    def parts(**fields):
        given = {
            "task": "text",
            "pairs": 16,
            "length": 10,
            "metric": "loss",
            "device": "cpu",
            "check": 0,
        }
        counted = count_circuit_passes(
            CircuitConfig(**given | fields), Sizes(header=read_header(tmp_path))
        ).parts
        return {
            part.only_if[:15]: part.n_forwards * part.tokens
            for part in counted
            if part.name[:6] == "scores"
        }

    # 5 + 10 + 20 points, and 40 + 80 + 160 more; 8 pairs are scored again for the sink, and by 5 points from the left
    assert parts()["no pair's sum i"] == pytest.approx(1.8 * 280 * (160 + 80))
    assert parts(most_steps=20).keys() == parts(method="gim").keys() == {""}
    one, two = (parts(most_steps=20, steps=steps)[""] for steps in (5, 20))  # 35 points, and 20
    assert (one, two) == pytest.approx((1.8 * (35 + 5) * 80, 1.8 * (20 + 20) * 80))


def test_the_loss_is_that_of_the_clean_tokens_in_both_runs():
    """Else the difference is that of two texts, which no edge explains."""
    found = circuit(metric=metrics.loss(), most_steps=40)
    assert found.scores.completeness_ratio == pytest.approx(1, abs=0.02)


def test_a_circuit_above_a_threshold_has_smaller_ones_of_as_many_edges_as_asked():
    found = circuit(choice="threshold", threshold=1e-9, edges=None)
    assert len(found.frame) >= found.n_edges > 150
    assert found.with_size(20).n_edges == circuit().n_edges
    with pytest.raises(InputError, match="need a threshold above 0"):
        CircuitConfig(choice="threshold").check_together()
    with pytest.raises(InputError, match="need a threshold above 0"):
        circuit(choice="threshold", edges=None)
    with pytest.raises(InputError, match="edges is 10"):
        circuit(choice="threshold", threshold=0.05, edges=10)


def test_edges_that_make_no_path_are_an_empty_circuit_and_it_says_so():
    with pytest.warns(
        UserWarning, match="the circuit is empty: of 1 chosen edges none lies on a path"
    ):
        assert circuit(edges=1).n_edges == 0


SMALL = {"most_steps": 5, "tolerance": 0.5}


@pytest.mark.parametrize("edges", [None, 15])
def test_python_and_the_command_choose_the_same_edges_and_say_the_same(
    edges, tmp_path, monkeypatch
):
    monkeypatch.setattr("sink_lens.circuits.curve.CARRIES", 0.3)  # which 20% of the edges keep
    lens, file = speaking("llama"), reference_pairs(tmp_path / "pairs.jsonl")
    asked = {"task": "file", "pairs_file": str(file), "pairs": 16}
    run = circuits.run(lens, **asked, **SMALL, edges=edges, check=0, random=0, nodes=False)
    found = circuits.find(lens, task_of(lens, **asked), **SMALL, edges=edges, progress=False)
    summary = run.tables["summary"].iloc[0]
    assert found.rule == summary["rule"] == ("smallest" if edges is None else "asked")
    assert (found.chosen == run.circuit.chosen).all()
    kept = found.faithfulness
    assert (kept.estimate, kept.n) == (pytest.approx(summary["faithfulness"]), 8)
    assert (kept.low, kept.high) == pytest.approx(
        (summary["faithfulness_low"], summary["faithfulness_high"])
    )
    assert circuit_sentences(run.tables["summary"])[0] in str(found)


def test_a_size_that_no_pair_can_judge_or_that_keeps_too_little_is_said():
    with pytest.warns(UserWarning, match="No size below all edges") as told:
        found = circuit(edges=None)
    assert (told[0].filename, found.rule, found.size) == (tiny_runs.__file__, "none", 190)
    prompts = prompt_pairs.pair(n=1, length=9, at=3)
    with pytest.warns(UserWarning, match="none is left to judge"):
        alone = circuits.find(found.runs.lens, *prompts, metric=metrics.logit_difference(5, 7))
    assert (alone.rule, alone.faithfulness.n) == ("unjudged", 0)


@pytest.mark.parametrize("given", [None, "c.json"])
def test_a_run_of_one_pair_is_not_said_to_have_nothing_to_explain(given, tmp_path):
    file = reference_pairs(tmp_path / "pairs.jsonl", n=1)
    circuit(edges=60).save(tmp_path / "c.json")
    held = None if given is None else str(tmp_path / given)
    with pytest.raises(InputError, match="need at least 2 pairs"):
        circuits.run(speaking("llama"), task="file", pairs_file=str(file), circuit=held)


def test_edges_on_no_path_are_counted():
    found = circuit(edges=20)
    assert 0 < found.n_edges < 20
    assert f"{20 - found.n_edges} of the 20 edges that were chosen lie" in str(found)


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": "top"},
        {"choice": "greedy"},
        {"choice": "greedy", "metric": metrics.sink_mass(0, layers=(0,)), "ablation": "mean_all"},
    ],
)
def test_edges_that_the_model_lacks_are_not_said_to_lie_on_no_path(fields):
    found = circuit(edges=1000, **fields)
    assert found.size == found.n_edges <= found.graph.n_edges
    assert (found.n_edges == found.graph.n_edges) == ("metric" not in fields)
    assert "no path" not in str(found)


def test_exact_scores_are_a_method_and_their_check_is_without_error():
    found = circuit(lens=wrap(tiny("llama", num_hidden_layers=2)), method="exact")
    check = found.check(edges=10, pairs=6)
    assert check.frame["error"].abs().max() < 1e-5
    assert check.rank_correlation == pytest.approx(1)


def test_a_run_is_written_continued_and_equal(tmp_path):
    lens, file = speaking("llama"), reference_pairs(tmp_path / "pairs.jsonl")
    fields = {
        "task": "file",
        "pairs_file": str(file),
        "pairs": 16,
        "edges": 15,
        "sizes": (0.1, 1.0),
        "check": 4,
    }
    fields |= {"check_pairs": 2, "random": 1, "most_steps": 5, "tolerance": 0.5}
    whole = circuits.run(lens, out=tmp_path / "one", **fields)
    assert whole.tables["summary"]["completeness"].item() == pytest.approx(1, abs=0.5)
    assert any("bootstraps" in one for one in whole.sentences)
    summary = whole.tables["summary"].iloc[0]
    outside = summary["all_edges"] - summary["edges"]
    bound = f"So at most {summary['outside_at_most']:,} of all {outside:,} edges outside do, at 95% confidence"
    bounds_something = summary["outside_at_most"] <= outside / 2
    assert any(bound in one for one in whole.sentences) == bounds_something
    page = (tmp_path / "one" / "report.html").read_text()
    assert "How faithful it is" in page
    assert "Real patches of nodes" in page
    nodes = whole.tables["check_nodes"]
    assert list(nodes["node"]) == [one.name for one in whole.circuit.graph.writers]
    assert summary["patched_nodes"] == len(nodes)
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
        "task": "text", "pairs": 4, "length": 24, "sizes": (0.1, 1.0), "random": 1, "check": 0, "edges": 20,
        "most_steps": 5,
    }  # fmt: skip
    found = circuits.run(
        lens, out=tmp_path / "sink", spans=("sink=0", "rest=1-23"), core=True, **fields
    )
    assert found.tables["summary"]["metric"].item().startswith("sink mass")
    assert set(found.frame["span"]) <= {"sink", "rest"}
    core = found.tables["core"]
    inclusion = core.filter(like="inclusion") >= 0.95
    undecided = inclusion.any(axis=1) & ~inclusion.all(axis=1)
    there = core["edge"].isin(
        found.frame["edge"]
    )  # what is sure everywhere and on no path is no part of the core
    assert (core["core"] == (inclusion.all(axis=1) & there)).all()
    assert (core["undecided"] == (undecided | (inclusion.all(axis=1) & ~there))).all()
    assert core["core"].any()
    np.testing.assert_allclose(core["least"], core.filter(like="inclusion").min(axis=1))
    told = "".join([*show_circuit(found, CircuitView())][-1]["over all settings"])
    for row in core[core["undecided"] & core["edge"].isin(found.frame["edge"])].to_dict("records"):
        own = "inclusion" if row["where"] == "mean_ordinary" else f"inclusion_{row['where']}"
        assert row[own] == row["least"]
        assert f"undecided: {row['least']:.0%} under {row['where']}" in told
    assert (core["exact"].notna() == core["core"]).all()
    some = found.circuit.runs.select_pairs(range(4))
    real = exact_scores(some, [found.circuit.graph.index[core["edge"][0]]]).mean()
    assert core["exact"][0] == pytest.approx(real, abs=1e-6)
    confirmed = int((core["exact"].abs() >= 0.01 * abs(found.circuit.runs.gap.mean().item())).sum())
    confirmed -= int(core["together"].sum())
    assert any(f"Real patches confirm {confirmed} of them" in one for one in found.sentences)
    assert undecided.any()
    assert any(f"{core['undecided'].sum()} edges are undecided" in one for one in found.sentences)
    assert found.tables["summary"]["undecided_edges"].item() == core["undecided"].sum()
    with pytest.raises(InputError, match="no right and wrong answer"):
        circuits.run(lens, task="text", metric="logit_difference")
    with pytest.raises(InputError, match="no corrupted prompts"):
        circuits.run(lens, task="text", ablation="resample")


def test_positions_in_no_span_have_edges_of_their_own():
    whole, apart = (circuit(spans=("early=0-2", *more)) for more in (("rest=3-8",), ()))
    assert apart.graph.spans == whole.graph.spans == ("early", "rest")
    assert apart.scores.mean == pytest.approx(whole.scores.mean)
    with pytest.raises(InputError, match="positions are in no span, and 'rest' is taken"):
        circuit(spans=("rest=0",))


@pytest.mark.exhaustive
def test_shards_score_their_pairs_and_the_last_one_makes_the_run_of_one_process(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(scoring, "GROUP", 3)
    lens, file = speaking("llama"), reference_pairs(tmp_path / "pairs.jsonl")
    fields = {
        "task": "file",
        "pairs_file": str(file),
        "pairs": 16,
        "edges": 15,
        "sizes": (0.1, 1.0),
        "check": 4,
    }
    fields |= {
        "check_pairs": 2,
        "random": 1,
        "most_steps": 5,
        "tolerance": 0.5,
        "core": True,
        "report": False,
    }
    whole, out = circuits.run(lens, out=tmp_path / "whole", **fields), tmp_path / "run"
    scored, n_scored = scoring.score_by_gradients, []
    monkeypatch.setattr(
        scoring,
        "score_by_gradients",
        lambda runs, **how: (
            n_scored.append((runs.ablation, runs.n_pairs, how["method"])),
            scored(runs, **how),
        )[1],
    )
    for shard in ("2/3", "3/3", "2/3"):  # one is requeued
        assert not circuits.run(lens, out=out, shard=shard, **fields).finished
    shown = shard_progress(out)
    assert shown["state"].tolist() == ["not begun", "finished", "finished"]
    assert shown["done"].tolist()[1:] == shown["cells"].tolist()[1:]
    with pytest.raises(RunError, match="holds shards of 3, and this is 1/4"):
        circuits.run(lens, out=out, shard="1/4", **fields)
    with pytest.raises(RunError, match="edges"):
        circuits.run(lens, out=out, shard="1/3", **fields | {"edges": 14})
    last = circuits.run(lens, out=out, shard="1/3", **fields)
    assert last.finished
    assert sorted(last.tables) == sorted(whole.tables)
    for name, table in whole.tables.items():
        pd.testing.assert_frame_equal(last.tables[name], table, check_exact=True)
    of_edges = [
        (ablation, n) for ablation, n, method in n_scored if method != "eap-ig-left"
    ]  # which is only compared
    settings = {ablation for ablation, _ in of_edges}
    assert len(settings) == 4
    assert {
        one: sum(n for name, n in of_edges if name == one) for one in settings
    } == dict.fromkeys(settings, 24)  # 16, and a pair of each of 8 files again
    assert not list(out.glob("shard-*"))
    assert circuits.run(lens, out=out, shard="3/3", **fields).finished


def test_a_kill_within_a_part_loses_one_pass_and_no_bit(tmp_path, monkeypatch):
    file = reference_pairs(tmp_path / "pairs.jsonl", n=12)
    fields = {
        "task": "file",
        "pairs_file": str(file),
        "pairs": 12,
        "edges": 15,
        "sizes": (1.0,),
        "nodes": False,
    }
    fields |= {"check": 0, "random": 0, "method": "eap", "report": False, "batch_size": 5}
    whole = circuits.run(speaking("llama"), out=tmp_path / "whole", **fields)
    summary = whole.tables["summary"].iloc[0]  # eap takes no sum over points
    assert (np.isnan(summary["left_sum"]), summary["left_pairs"]) == (True, 0)
    scored, passes = scoring.score_by_gradients, []

    def killed(runs, **how):
        passes.append(runs.n_pairs)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return scored(runs, **how)

    monkeypatch.setattr(scoring, "score_by_gradients", killed)
    with pytest.raises(KeyboardInterrupt):
        circuits.run(speaking("llama"), out=tmp_path / "run", **fields)
    again = circuits.run(speaking("llama"), out=tmp_path / "run", **fields)
    assert passes == [5, 5, 2, 2]
    for name, table in whole.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table, check_exact=True)
    parts = {
        folder: sorted(one.name for one in (tmp_path / folder).glob("scores-*"))
        for folder in ("whole", "run")
    }
    assert parts["run"] == parts["whole"] == ["scores-000.safetensors"]


@pytest.mark.parametrize("method", ["eap-ig", "exact"])
def test_the_size_of_a_pass_changes_no_number(method, monkeypatch):
    lens, sizes = wrap(tiny("llama", num_hidden_layers=1)), []
    outcome = Runs.run_hooked
    monkeypatch.setattr(
        Runs,
        "run_hooked",
        lambda runs, rows, *of, **how: (
            sizes.append(rows.stop - rows.start),
            outcome(runs, rows, *of, **how),
        )[1],
    )
    found = {size: circuit(lens=lens, method=method, batch_size=size) for size in (None, 1, 4)}
    for size, one in found.items():
        assert np.allclose(
            one.scores.values,
            found[None].scores.values,
            atol=1e-5 * np.abs(found[None].scores.values).max(),
        )
        assert (one.chosen == found[None].chosen).all()
        sizes.clear()
        judged = one.evaluate(sizes=(0.2, 1.0), random=0, nodes=False).frame
        assert max(sizes) == min(size or 3, 3)
        assert np.allclose(
            judged["value"],
            found[None].evaluate(sizes=(0.2, 1.0), random=0, nodes=False).frame["value"],
            atol=1e-5,
        )
    with pytest.raises(InputError, match="batch_size is 0; need at least 1"):
        CircuitConfig(batch_size=0)


def test_a_circuit_says_its_first_prompt_and_how_the_model_goes_on():
    one = circuit()
    likeliest = answers(one.runs.lens, one.runs.clean[:1], top=1).iloc[0]
    assert one.first_answer == (likeliest["token"], likeliest["probability"])
    about = one.explore().graphs[0]["metadata"]["sink_lens"]
    assert about["title"] == f"The circuit of logit difference, {one.runs.lens.name}"
    assert (about["answer"], about["prompt"]) == (
        likeliest["token"],
        "".join(one.runs.first_prompt_tokens),
    )
    assert about["probability"] == pytest.approx(likeliest["probability"], rel=1e-5)


def test_a_task_has_its_corrupted_prompts():
    task = task_of(speaking("llama"), "induction", pairs=4, least=0.0)
    with pytest.raises(InputError, match="corrupted prompts were given beside a task"):
        circuits.find(speaking("llama"), task, task.clean)


def test_a_beginning_that_is_asked_of_token_ids_is_refused():
    clean, corrupted = tiny_runs.pair(n=6, length=9)
    with pytest.raises(InputError, match="bos='with' was given beside token ids"):
        circuit(bos="with")
    with pytest.raises(InputError, match="bos='without' was given beside token ids"):
        circuits.evaluate(
            circuit().runs.lens, (clean, corrupted), circuit(), metric=tiny_runs.SIX, bos="without"
        )
    task_lens = speaking("llama")
    task = task_of(task_lens, "induction", pairs=4, least=0.0, bos="with")
    runs = run_given_pairs(task_lens, task, metric=None, config=CircuitConfig(bos="with"))
    assert runs.n_pairs == task.clean.n_sequences
    with pytest.raises(InputError, match="bos='without' was given beside token ids"):
        circuits.find(task_lens, task, bos="without")


def test_a_pair_that_is_there_twice_chooses_and_judges_and_it_says_so():
    twice = [one[:3].repeat(2, 1) for one in tiny_runs.pair(n=6, length=9)]
    given = {"metric": metrics.logit_difference(5, 7), "method": "eap", "edges": 20}
    with pytest.warns(UserWarning, match="3 of 6 pairs are copies") as told:
        circuits.find(speaking("llama"), *twice, **given)
    assert told[0].filename == __file__


def test_a_mean_over_one_sequence_is_that_sequence_and_leaves_nothing_to_explain():
    clean, _ = tiny_runs.pair(n=1, length=9)
    given = {"metric": metrics.logit_difference(5, 7), "ablation": "mean_aligned", "edges": 60}
    with pytest.raises(InputError, match="is the same in every pair"):
        circuits.find(speaking("llama"), clean, method="eap", **given)

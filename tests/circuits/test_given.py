"""A circuit that is given, in any format, judged to the value that a run written out gives; two circuits compared."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from lenses import lens_of
from typer.testing import CliRunner

from sink_lens import TokenBatch, circuits
from sink_lens.circuits.config import CircuitConfig
from sink_lens.cli import app
from sink_lens.edits.mean_ablation import tokens_to_average
from sink_lens.errors import InputError

from .tiny_runs import METRIC, SIX, circuit, exact_lens, pair, save_as_tensors
from .written_out import WithCircuit, WrittenOut


def metric_of(run):
    """The metric of a run that is written out: every reader sums its own stream."""
    rows = torch.arange(3)
    return float((run.logits[rows, -1, [5, 6, 9]] - run.logits[rows, -1, [7, 8, 10]]).mean())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_circuit_of_every_format_is_judged_to_the_value_of_a_run_written_out(tmp_path, family):
    lens, found = lens_of(family), circuit(family, edges=60)
    names = found.graph.names[found.chosen].tolist()
    pairs = pair(n=3, length=9)
    with torch.no_grad():
        whole, nothing = (metric_of(WrittenOut(lens, tokens)) for tokens in pairs)
        kept = metric_of(WithCircuit(lens, pairs[0], kept=names, instead=pairs[1]))
    expected = (kept - nothing) / (whole - nothing)
    assert abs(expected - 1) > 0.05
    files = [found.save(tmp_path / name) for name in ("mib", "c.parquet")]
    files += [save_as_tensors(found, tmp_path / "c.pt"), tmp_path / "c.json"]
    theirs = json.loads((tmp_path / "c.json").read_text())
    del theirs["sink_lens"]  # as EAP-IG's own code writes it
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    inside = [name for name, edge in theirs["edges"].items() if edge["in_graph"]]
    pd.DataFrame({"edge": inside}).to_csv(tmp_path / "list.csv", index=False)
    held = circuits.read(tmp_path / "c.parquet")
    assert (held.graph.names == found.graph.names).all()
    assert held.edges["edge"].tolist() == found.edges["edge"].tolist()
    for one in (*files, tmp_path / "theirs.json", tmp_path / "list.csv", held, found):
        judged = circuits.evaluate(lens, pairs, one, metric=METRIC, random=1)
        judge = judged.frame.set_index("by")
        assert judge.loc["circuit", "n"] == len(names)
        values = judge["value"]
        gap = judged.gap.estimate
        assert (values["circuit"] - nothing) / gap == pytest.approx(expected, abs=1e-4), one
        assert judge.loc["without", "n"] == found.graph.n_edges - len(names)


def test_a_papers_heads_are_all_edges_between_them_and_the_mlps(tmp_path):
    lens = lens_of("llama")
    (tmp_path / "heads.csv").write_text("layer,head\n0,1\n2,3\n")
    (tmp_path / "nodes.csv").write_text("node\nL0H1\n2.3\nMLP 0\nm1\nm2\n")
    first, second = (
        circuits.read(tmp_path / name, model=lens) for name in ("heads.csv", "nodes.csv")
    )
    assert (first.chosen == second.chosen).all()
    ends = [name.split("->") for name in first.graph.names[first.chosen]]
    assert {one for one, _ in ends} == {"input", "a0.h1", "a2.h3", "m0", "m1", "m2"}
    # all edges between its nodes are in it, so that none can be swapped for another
    judged = circuits.evaluate(lens, pair(n=3, length=9), first, metric=METRIC, random=2)
    assert judged.frame["by"].tolist() == ["circuit", "without", "random", "random"]
    kv = first.graph.n_heads // first.graph.n_kv_heads
    assert f"a2.kv{3 // kv}<k>" in {reader for _, reader in ends}
    for text, said in (
        ("node\na9.h1\n", "'a9.h1' is no node of the model"),
        ("edge\nm5->m1\n", "line 2: 'm5->m1' is no edge"),
        ("a,b\n1,2\n", "its columns are a, b"),
        ("node\n12\n", "'12' is no node of the model"),  # of layer 1 or 12
    ):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(InputError, match=said):
            circuits.read(tmp_path / "bad.csv", model=lens)
    with pytest.raises(InputError, match="need the model: model="):
        circuits.read(tmp_path / "heads.csv")


@pytest.mark.parametrize(
    ("family", "ablation"),
    [("llama", "mean_ordinary"), ("gpt2", "mean_aligned"), ("llama", "mean_all"), ("gpt2", "zero")],
)
def test_under_means_and_zero_only_edges_on_a_path_are_run_to_the_value_written_out(
    tmp_path, family, ablation
):
    lens, found = exact_lens(family), circuit(family, edges=15)
    names, nodes = found.graph.names[found.chosen].tolist(), found.nodes
    idle = nodes.loc[nodes["kind"].isin(["head", "mlp"]) & nodes["edges_in"].eq(0), "node"]
    loose = [f"{one}->logits" for one in idle]
    assert loose
    pd.DataFrame({"edge": [*names, *loose]}).to_csv(tmp_path / "c.csv", index=False)
    tokens = pair(n=3, length=9)[0]
    with torch.no_grad():
        run = WrittenOut(lens, tokens)
        ordinary = tokens_to_average(lens, TokenBatch.from_tensor(tokens), "mean_ordinary").mask
        instead = [
            {
                "zero": torch.zeros_like(one),
                "mean_aligned": one.mean(0, keepdim=True).expand_as(one),
                "mean_all": one.mean((0, 1), keepdim=True).expand_as(one),
                "mean_ordinary": one[ordinary].mean(0).expand_as(one),
            }[ablation]
            for one in run.written()
        ]
        sets = {"nothing": [], "kept": names, "loose": [*names, *loose]}
        value = {
            name: metric_of(WithCircuit(lens, tokens, kept=some, instead=instead))
            for name, some in sets.items()
        }
    judged = circuits.evaluate(
        lens, (tokens, None), tmp_path / "c.csv", metric=METRIC, ablation=ablation, random=1
    )
    row = judged.frame.iloc[0]
    assert (row["n"], row["connected"]) == (len(names) + len(loose), len(names))
    assert row["value"] == pytest.approx(value["kept"], abs=1e-6)
    assert abs(value["loose"] - value["kept"]) > 1e-4
    assert judged.gap.estimate == pytest.approx(metric_of(run) - value["nothing"], abs=1e-6)


def test_no_code_of_a_file_is_run_and_a_circuit_of_another_model_is_refused(tmp_path, capsys):
    class Harmful:
        def __reduce__(self):
            return (print, ("this code was run",))

    torch.save({"cfg": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(InputError, match="cannot be read as a circuit"):
        circuits.read(tmp_path / "bad.pt")
    assert "this code was run" not in capsys.readouterr().out
    found = circuit("gpt2")
    with pytest.raises(InputError, match=r"edges that the model lacks, such as .* key-value heads"):
        circuits.evaluate(lens_of("llama"), pair(n=3, length=9), found, metric=METRIC)
    with pytest.raises(InputError, match="no metric was given"):
        circuits.evaluate(lens_of("gpt2"), pair(n=3, length=9), found)
    with pytest.raises(
        InputError, match="a circuit was given, and edges or choice would choose another"
    ):
        CircuitConfig(circuit="c.json", edges=5).check_together()


def test_two_circuits_are_compared_from_python_and_the_command_line(tmp_path):
    one, other = circuit(edges=60), circuit(edges=60, method="eap")
    found = circuits.compare(one, other)
    both = (one.chosen & other.chosen).sum()
    assert found.jaccard == pytest.approx(both / (one.chosen | other.chosen).sum())
    assert len(found.frame) == (one.chosen | other.chosen).sum()
    files = [str(each.save(tmp_path / f"{at}.json")) for at, each in enumerate((one, other))]
    said = CliRunner().invoke(app, ["circuit", files[0], "--against", files[1], "--json"])
    assert said.exit_code == 0, said.output
    answer = json.loads(said.stdout)
    assert answer["jaccard"] == pytest.approx(found.jaccard)
    assert f"{both:,} are in both" in answer["sentences"][0]
    for more in (["--edges", "5"], ["--out", str(tmp_path / "run")]):  # a comparison reads no more
        said = CliRunner().invoke(app, ["circuit", files[0], "--against", files[1], *more])
        assert said.exit_code == 2, said.output
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"against is .*, which nothing reads here"):
        circuits.run(lens_of("llama"), against=files[1])


def test_scores_over_all_positions_are_not_put_beside_those_of_spans():
    spans, whole = circuit(edges=60, spans=("first=0",)), circuit(edges=60)
    found = circuits.compare(spans, whole)
    assert found.frame["score_other"].isna().all()
    assert found.frame["score_one"].notna().all()
    assert np.isnan(found.rank_correlation)
    assert found.frame["other"].sum() == 2 * whole.n_edges
    assert "each of its edges counts 2 times: once in each span" in found.sentences[1]


def test_sizes_of_a_given_circuit_are_those_of_its_own_scores():
    found = circuit()
    with pytest.warns(UserWarning, match="found on these same pairs, which flatters it"):
        judged = circuits.evaluate(
            found.runs.lens, pair(n=6, length=9), found, metric=SIX, sizes=[0.5, 1.0], random=0
        )
    assert judged.frame["by"].tolist() == ["circuit", "without", "edges", "edges"]
    whole = judged.frame["value"].iloc[-1]
    assert whole == pytest.approx(float(found.runs.clean_values.mean()), abs=1e-5)
    np.testing.assert_equal(judged.without_faithfulness, judged.frame["faithfulness"].iloc[1])


def test_a_given_circuit_has_the_neurons_of_its_mlps_and_the_spans_of_its_run(tmp_path):
    lens, pairs, found = lens_of("llama"), pair(n=3, length=9), circuit(edges=60)
    found.save(tmp_path / "c.json")

    def value(path, **fields):
        judged = circuits.evaluate(lens, pairs, path, metric=METRIC, random=0, **fields)
        return judged.frame["value"].tolist()

    whole, split = (value(tmp_path / "c.json", **more) for more in ({}, {"neurons": ("0:1,2",)}))
    assert split == pytest.approx(whole, abs=1e-5)
    split = circuit(edges=60, neurons=("0:1,2",), spans=("first=0-3",))
    split.save(tmp_path / "c.parquet")
    same = {"neurons": ("0:1,2",), "spans": ("first=0-3",)}
    assert value(tmp_path / "c.parquet", **same) == pytest.approx(value(split, **same))
    for lacking, said in (
        ("neurons", "neurons of the layers 0"),
        ("spans", "the spans first, rest"),
    ):
        less = {name: given for name, given in same.items() if name != lacking}
        with pytest.raises(InputError, match=said):
            value(tmp_path / "c.parquet", **less)

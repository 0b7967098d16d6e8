"""Runs of pairs: what replaces a writer, the first position that differs, and some of the pairs."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from lenses import lens_of

from sink_lens import circuits
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.edits import metrics
from sink_lens.errors import InputError

from .tiny_runs import METRIC, pair, runs_of


def written_by_mlp(lens, tokens, layer):
    """What an MLP adds, by a hook on the plain model."""
    kept = []
    handle = lens.layer(layer).mlp.register_forward_hook(lambda module, given, out: kept.append(out))
    with torch.no_grad():
        logits = lens.plain(tokens).logits
    handle.remove()
    return kept[0], logits


def test_prompts_that_do_not_differ_have_no_circuit():
    clean, _ = pair()
    with pytest.raises(InputError, match="the clean and the corrupted prompts have the same tokens"):
        circuits.find(lens_of("llama"), clean, clean, metric=METRIC)


def test_writings_and_the_metric_are_those_of_the_plain_model():
    lens, runs = lens_of("llama"), runs_of(lens_of("llama"))
    at = [one.name for one in runs.graph.writers].index("m1")
    for corrupted, tokens in enumerate(pair()):
        by_hand, logits = written_by_mlp(lens, tokens, 1)
        added, values = runs.writer_outputs(slice(0, 3), corrupted=bool(corrupted))
        torch.testing.assert_close(added[:, at], by_hand, rtol=1e-4, atol=1e-5)
        rows = torch.arange(3)
        wanted = logits[rows, -1, [5, 6, 9]] - logits[rows, -1, [7, 8, 10]]
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            runs.corrupted_values if corrupted else runs.clean_values, values, rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(runs.gap, runs.clean_values - runs.corrupted_values)


@pytest.mark.parametrize("ablation", ["mean_all", "mean_aligned", "mean_ordinary", "zero"])
def test_what_replaces_a_writer_is_a_mean_of_the_clean_runs(ablation, monkeypatch):
    lens = lens_of("llama")
    ordinary = torch.ones(3, 11, dtype=torch.bool)
    ordinary[:, :4] = False
    module = import_module("sink_lens.circuits.runs")
    monkeypatch.setattr(module, "tokens_to_average", lambda *_: SimpleNamespace(mask=ordinary))
    runs = runs_of(lens, ablation=ablation)
    at = [one.name for one in runs.graph.writers].index("m1")
    found = runs.replacements(slice(0, 3), begin=2)[:, at]
    by_hand, _ = written_by_mlp(lens, pair()[0], 1)
    wanted = {
        "mean_all": by_hand.mean((0, 1))[None, None],
        "mean_aligned": by_hand.mean(0)[None, 2:],
        "mean_ordinary": by_hand[:, 4:].mean((0, 1))[None, None],
        "zero": torch.zeros(1, 1, 48),
    }
    torch.testing.assert_close(found, wanted[ablation], rtol=1e-4, atol=1e-5)


def test_nothing_is_computed_before_the_first_position_that_differs():
    assert runs_of(lens_of("llama")).first_difference(slice(0, 3)) == 3
    assert runs_of(lens_of("llama"), ablation="mean_all").first_difference(slice(0, 3)) == 0
    clean, _ = pair()
    same = Runs.make(lens_of("llama"), clean, clean, graph=Graph.of(lens_of("llama")), metric=METRIC)
    assert same.first_difference(slice(0, 3)) == 10
    assert float(same.gap.abs().max()) == 0


def test_some_of_the_pairs_have_their_own_numbers():
    runs = runs_of(lens_of("llama"))
    some = runs.select_pairs([2, 0])
    assert torch.equal(some.clean.tokens, runs.clean.tokens[[2, 0]])
    assert torch.equal(some.clean_values, runs.clean_values[[2, 0]])
    _, values = some.writer_outputs(slice(0, 2))
    torch.testing.assert_close(values, runs.clean_values[[2, 0]], rtol=1e-5, atol=1e-5)


def test_batches_cover_every_pair_once(monkeypatch):
    runs = runs_of(lens_of("llama"))
    monkeypatch.setattr(Graph, "n_pairs_per_pass", lambda self, **sizes: 2)
    assert [*runs.batches()] == [slice(0, 2), slice(2, 3)]


def test_a_metric_of_all_pairs_is_refused():
    with pytest.raises(InputError, match=r"gave a tensor of shape (.*) for 3 sequences; need one number per sequence"):
        runs_of(
            lens_of("llama"), metric=metrics.Metric(name="all", function=lambda run: run.loss.mean()[None], loss=True)
        )

"""Runs of pairs: the first position that differs, and some of the pairs."""

import pytest
import torch
from lenses import lens_of

from sink_lens import circuits
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.edits import metrics
from sink_lens.errors import InputError

from .tiny_runs import METRIC, pair, runs_of


def test_prompts_that_do_not_differ_have_no_circuit():
    clean, _ = pair()
    with pytest.raises(
        InputError, match="the clean and the corrupted prompts have the same tokens"
    ):
        circuits.find(lens_of("llama"), clean, clean, metric=METRIC)


def test_nothing_is_computed_before_the_first_position_that_differs():
    assert runs_of(lens_of("llama")).first_difference(slice(0, 3)) == 3
    assert runs_of(lens_of("llama"), ablation="mean_all").first_difference(slice(0, 3)) == 0
    clean, _ = pair()
    same = Runs.make(
        lens_of("llama"), clean, clean, graph=Graph.of(lens_of("llama")), metric=METRIC
    )
    assert same.first_difference(slice(0, 3)) == 10


def test_some_of_the_pairs_have_their_own_numbers():
    runs = runs_of(lens_of("llama"))
    some = runs.select_pairs([2, 0])
    assert torch.equal(some.clean.tokens, runs.clean.tokens[[2, 0]])
    assert torch.equal(some.clean_values, runs.clean_values[[2, 0]])
    _, values = some.writer_outputs(slice(0, 2))
    torch.testing.assert_close(values, runs.clean_values[[2, 0]], rtol=1e-5, atol=1e-5)


def test_a_metric_of_all_pairs_is_refused():
    with pytest.raises(InputError, match="one number for all sequences"):
        runs_of(lens_of("llama"), metric=metrics.on_batch(lambda logits: logits.mean()))

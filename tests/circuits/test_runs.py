"""Runs of pairs: the first position that differs, and some of the pairs."""

import pytest
import torch
from lenses import lens_of

from sink_lens import circuits
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.edits import metrics
from sink_lens.errors import InputError

from .tiny_runs import METRIC, circuit, pair, runs_of


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


def test_a_metric_of_an_outcome_reads_what_its_values_hang_on():
    named = circuit(metric=metrics.sink_mass(0, layers=(1,)), ablation="mean_all", method="eap")
    mass = metrics.on_outcome(lambda run: run.mass_at(0), layers=(1,))
    own = circuit(metric=mass, ablation="mean_all", method="eap")
    assert set(named.outputs) < set(own.outputs)
    assert named.n_edges == own.n_edges > 0
    logits = metrics.on_outcome(lambda run: run.logits[:, -1, 5], layers=(1,))
    of_logits = circuit(metric=logits, ablation="mean_all", method="eap").outputs
    assert of_logits == (len(own.graph.readers) - 1,)
    stream = metrics.on_outcome(lambda run: run.state_at(0)[0].norm(dim=-1), layers=(1,))
    with pytest.raises(InputError, match="reads the residual stream"):
        circuit(metric=stream, ablation="mean_all", method="eap")


def test_a_sink_that_some_prompt_lacks_is_refused_before_anything_is_scored():
    with pytest.raises(InputError, match="sink_position is 9, and a sequence has 9 tokens"):
        circuit(freeze="sink", sink_position=9)

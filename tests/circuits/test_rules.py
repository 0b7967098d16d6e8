"""Rules of the backward pass: norms held, softmax smoothed; what a plain gradient misses is seen."""

import numpy as np
import pytest
import torch

from sink_lens.circuits import rules
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.circuits.scores import score_by_gradients
from sink_lens.models.load import wrap
from tests.zoo.mechanisms import wire

from .tiny_runs import DENSE, exact_lens, runs_of
from .written_out import HeldNorms, written_out


@pytest.mark.parametrize("family", DENSE)
def test_rules_for_the_backward_pass_know_the_norms_of_every_family(family):
    score_by_gradients(
        runs_of(exact_lens(family)), method="gim"
    )  # refuses where a norm is not found


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox"])
def test_rules_for_the_backward_pass_equal_autograd_with_norms_held(family, monkeypatch):
    monkeypatch.setattr(rules, "TEMPERATURE", 1.0)
    lens = exact_lens(family)
    found = score_by_gradients(runs_of(lens), method="gim")
    theirs = written_out(lens, found.graph.names, made=HeldNorms).float().detach().numpy()
    off = np.abs(found.values - theirs).max()
    assert off < 5e-6 * np.abs(theirs).max()  # the model's own norms round to float32
    assert (
        np.abs(found.values - score_by_gradients(runs_of(lens), method="eap").values).max()
        > 0.01 * np.abs(theirs).max()
    )


@pytest.mark.parametrize(
    ("name", "ablation", "method"), [("redundant", "resample", "eap"), ("copy", "zero", "eap-ig")]
)
def test_rules_see_edges_that_a_saturated_softmax_and_norms_hide(name, ablation, method):
    mechanism = wire(name, seed=20, family="llama")
    clean, corrupted, metric = mechanism.pairs(6, generator=torch.Generator().manual_seed(0))
    lens = wrap(mechanism.model)
    runs = Runs.make(lens, clean, corrupted, graph=Graph.of(lens), metric=metric, ablation=ablation)
    names = runs.graph.names
    needed = np.isin(names, list(mechanism.needed(ablation)))
    judged = ~np.isin(names, list(mechanism.unjudged(ablation, names)))

    def share_found(method):
        size = np.where(
            judged, np.abs(score_by_gradients(runs, method=method, most_steps=10).mean), -1
        )
        return needed[np.argsort(-size)[: needed.sum()]].mean()

    assert share_found("gim") >= 0.8
    assert share_found(method) <= share_found("gim") - 0.25


def test_a_smoothed_pattern_is_the_pattern_with_the_slope_of_a_warmer_softmax():
    scores = torch.tensor([[9.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    pattern = torch.softmax(scores, -1)
    found = rules._with_smooth_softmax(pattern, None, seen={0: scores}, key=0)
    assert torch.equal(found, pattern)
    (gradient,) = torch.autograd.grad(found[0, 0], scores)
    warm = torch.softmax(scores.detach() / 2, -1)[0]
    # d p_0 / d s_j at temperature 2 is p_0 (1[j = 0] - p_j) / 2, and the rule takes it twice
    assert gradient[0].tolist() == pytest.approx(
        [float(warm[0] * (float(j == 0) - warm[j])) for j in range(3)]
    )


def test_a_sink_logit_is_one_of_the_scores_that_are_smoothed():
    scores = torch.tensor([[2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    sink = torch.tensor([[3.0]], dtype=torch.float64, requires_grad=True)
    pattern = torch.softmax(torch.cat([scores, sink], -1), -1)[:, :2]
    found = rules._with_smooth_softmax(pattern, None, seen={0: scores}, key=0, sink=True)
    assert torch.equal(found, pattern)
    gradients = torch.autograd.grad(found[0, 0], [scores, sink])
    warm = torch.softmax(torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64) / 2, -1)
    # as without a sink: p_0 (1[j = 0] - p_j), where p has the sink's share too
    expected = [float(warm[0] * (float(j == 0) - warm[j])) for j in range(3)]
    assert torch.cat(gradients, -1)[0].tolist() == pytest.approx(expected)

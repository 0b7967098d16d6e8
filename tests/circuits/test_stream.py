"""The outputs of all writers sum to the stream."""

import pytest
import torch
from lenses import lens_of
from torch._subclasses.fake_tensor import FakeTensorMode

from sink_lens import capture
from sink_lens.circuits.stream import output_biases, post_norm_factor, read_weights
from sink_lens.models.weights import Norm

from .tiny_runs import DENSE, exact_lens, pair, runs_of


@pytest.mark.parametrize("family", DENSE)
def test_what_all_writers_add_is_the_stream_behind_the_last_layer(family):
    lens = exact_lens(family)
    runs = runs_of(lens, neurons={1: [3, 5]})
    added, _ = runs.writer_outputs(slice(0, 3))
    last = capture(lens, pair()[0], sites=["resid_post"], path="bridge")[
        "resid_post", lens.n_layers - 1
    ]
    total = added.sum(1) + output_biases(runs.graph, runs.weights).sum(0)
    assert (total - last).abs().max() < 1e-5 * last.abs().max()


def test_sums_are_in_the_models_type_and_in_single_precision_at_least():
    lens = lens_of("llama")
    assert read_weights(lens, runs_of(lens).graph).dtype == torch.float32
    assert runs_of(exact_lens("llama")).weights.dtype == torch.float64


def test_a_factor_lies_on_its_norms_device_wherever_the_stream_lies():
    with FakeTensorMode():  # shapes and devices alone, without a GPU
        gain = torch.ones(6, device="cuda")
        after = Norm(gain=gain, bias=torch.zeros_like(gain), eps=1e-5, centred=False, divides=True)
        assert post_norm_factor(torch.randn(2, 3, 6), after).device.type == "cuda"

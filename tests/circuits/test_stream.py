"""What writers add sums to the stream, and a reader's gradient through its norm is autograd's."""

import pytest
import torch
from lenses import lens_of
from torch._subclasses.fake_tensor import FakeTensorMode

from sink_lens import capture
from sink_lens.circuits.stream import apply_norm, gradient_before_norm, output_biases, post_norm_factor, read_weights
from sink_lens.models.weights import Norm

from .tiny_runs import DENSE, exact_lens, pair, runs_of


def norm(*, centred, divides=True):
    drawn = torch.Generator().manual_seed(0)
    gain, bias = (torch.randn(6, dtype=torch.float64, generator=drawn) for _ in range(2))
    return Norm(gain=gain, bias=bias, eps=1e-5, centred=centred, divides=divides)


@pytest.mark.parametrize("family", DENSE)
def test_what_all_writers_add_is_the_stream_behind_the_last_layer(family):
    lens = exact_lens(family)
    runs = runs_of(lens, neurons={1: [3, 5]})
    added, _ = runs.writer_outputs(slice(0, 3))
    last = capture(lens, pair()[0], sites=["resid_post"], path="bridge")["resid_post", lens.n_layers - 1]
    total = added.sum(1) + output_biases(runs.graph, runs.weights).sum(0)
    assert (total - last).abs().max() < 1e-5 * last.abs().max()


def test_a_normed_stream_is_that_of_torchs_norms():
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    centred, plain = norm(centred=True), norm(centred=False)
    theirs = torch.nn.functional.layer_norm(x, (6,), centred.gain, centred.bias, 1e-5)
    torch.testing.assert_close(apply_norm(x, centred), theirs)
    theirs = torch.nn.functional.rms_norm(x, (6,), plain.gain, 1e-5) + plain.bias
    torch.testing.assert_close(apply_norm(x, plain), theirs)
    torch.testing.assert_close(apply_norm(x, norm(centred=False, divides=False)), x * plain.gain)
    assert apply_norm(x, None) is x


@pytest.mark.parametrize("centred", [False, True])
def test_a_gradient_through_a_norm_is_autograds(centred):
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    given = torch.randn(2, 4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    one = norm(centred=centred)
    found = gradient_before_norm(given, x.detach(), one)
    for reader in range(4):
        (wanted,) = torch.autograd.grad((apply_norm(x, one) * given[:, reader]).sum(), x)
        torch.testing.assert_close(found[:, reader], wanted)
    assert gradient_before_norm(given, x, None) is given


def test_a_norm_behind_a_sublayer_multiplies_each_part_by_what_it_multiplies_the_whole_by():
    parts = torch.randn(2, 3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    after = norm(centred=False)
    factor = post_norm_factor(parts.sum(1), after)
    torch.testing.assert_close((parts * factor[:, None]).sum(1), apply_norm(parts.sum(1), after) - after.bias)
    assert float(post_norm_factor(parts.sum(1), None)) == 1


def test_sums_are_in_the_models_type_and_in_single_precision_at_least():
    lens = lens_of("llama")
    assert read_weights(lens, runs_of(lens).graph).dtype == torch.float32
    assert runs_of(exact_lens("llama")).weights.dtype == torch.float64


def test_a_factor_lies_on_its_norms_device_wherever_the_stream_lies():
    with FakeTensorMode():  # shapes and devices alone, without a GPU
        gain = torch.ones(6, device="cuda")
        after = Norm(gain=gain, bias=torch.zeros_like(gain), eps=1e-5, centred=False, divides=True)
        assert post_norm_factor(torch.randn(2, 3, 6), after).device.type == "cuda"

"""Calibrating and normalising aggregated values: the formulas by hand, and equal to the raw model's."""

import pytest
import torch
from rounding import assert_moved, assert_rows_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sink_lens.activations.record import capture
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import EditError, set_value, zero
from sink_lens.edits.normalisation import head_rms_norm, natural_rms, variance_calibration
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import TINY_FAMILIES, tiny

BATCH, LENGTH, LAYER, N_HEADS = 2, 14, 1, 4
TOKENS = torch.randint(3, VOCAB_SIZE, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def draw(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits(lens, edits=()):
    return run_with(lens, TOKENS, edits, logits=True, loss=False).logits


def z_after(lens, edits):
    return run_with(lens, TOKENS, edits, sites=("z_raw",)).tensors["z_raw", LAYER]


def constant_z(value):
    """An edit after which every z of the layer is the value: all values are, and rows of the pattern sum to 1."""
    return set_value("v", value, layers=[LAYER])


def test_calibration_by_hand(lens_of):
    # z = 3 everywhere. Around 1: 1 + 2 (3 - 1) = 5; around 0: 2 * 3 = 6.
    lens, centre = lens_of("llama"), {LAYER: torch.ones(4, 12)}
    around = [constant_z(3.0), variance_calibration(2.0, centre=centre, positions=[2])]
    found = z_after(lens, around)
    torch.testing.assert_close(found[:, 2], torch.full((BATCH, 4, 12), 5.0))
    torch.testing.assert_close(found[:, 3], torch.full((BATCH, 4, 12), 3.0))
    scaled = z_after(lens, [constant_z(3.0), variance_calibration(2.0, layers=[LAYER])])
    torch.testing.assert_close(scaled, torch.full((BATCH, LENGTH, 4, 12), 6.0))


def test_by_dimension_means_those_of_the_values_where_queries_are_wider(lens_of):
    lens, clean = lens_of("deepseek_v3"), z_after(lens_of("deepseek_v3"), ())
    own = draw(4, lens.d_value)
    assert lens.d_value != lens.d_head
    calibrated, normed = (
        z_after(lens, one)
        for one in (variance_calibration(2.0, centre={LAYER: own}), head_rms_norm({LAYER: own}))
    )
    assert_rows_close(calibrated, own + 2 * (clean - own))
    assert_rows_close(normed, own * torch.nn.functional.rms_norm(clean, clean.shape[-1:], eps=1e-6))


def test_the_norm_by_hand(lens_of):
    # Every z is 3 or -3 in a head: RMS 3, so that z / RMS is the sign, and the target is what remains.
    lens = lens_of("llama")
    both = [constant_z(3.0), set_value("v", -3.0, layers=[LAYER], units=[0])]
    found = z_after(lens, [*both, head_rms_norm(0.5, layers=[LAYER], eps=0.0)])
    torch.testing.assert_close(found[..., 1:], torch.full((BATCH, LENGTH, 4, 11), 0.5))
    torch.testing.assert_close(found[..., 0], torch.full((BATCH, LENGTH, 4), -0.5))
    # eps 27: 3 / sqrt(9 + 27) = 1/2.
    found = z_after(lens, [constant_z(3.0), head_rms_norm(1.0, layers=[LAYER], eps=27.0)])
    torch.testing.assert_close(found, torch.full((BATCH, LENGTH, 4, 12), 0.5))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (torch.arange(1.0, 5.0), lambda head, unit: head + 1.0),
        (torch.arange(12.0), lambda head, unit: unit),
        (torch.arange(48.0).view(4, 12), lambda head, unit: 12.0 * head + unit),
        (torch.arange(1.0, 5.0)[:, None], lambda head, unit: head + 1.0),
        (torch.arange(12.0)[None], lambda head, unit: unit),
    ],
    ids=["head", "d_head", "both", "head-1", "1-d_head"],
)
def test_the_target_is_by_head_by_dimension_or_both(lens_of, target, expected):
    lens = lens_of("llama")
    by_hand = torch.tensor(
        [[float(expected(head, unit)) for unit in range(12)] for head in range(4)]
    )
    found = z_after(lens, [constant_z(3.0), head_rms_norm({LAYER: target}, eps=0.0)])
    torch.testing.assert_close(found[1, 4], by_hand)
    found = z_after(lens, [constant_z(3.0), head_rms_norm({LAYER: target}, eps=0.0, heads=[2, 0])])
    torch.testing.assert_close(found[1, 4, [0, 2]], by_hand[[0, 2]])
    assert torch.equal(found[1, 4, [1, 3]], z_after(lens, constant_z(3.0))[1, 4, [1, 3]])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_calibration_is_the_same_edit_of_the_raw_model(lens_of, raw_run, family):
    lens = lens_of(family)
    factor, mu = torch.tensor([0.5, -1.0, 3.0, 2.0]), draw(N_HEADS, lens.d_head)
    places, heads = [6, 0, 3], [3, 0]

    def by_hand(view):
        for position in places:
            for head in heads:
                view[:, position, head] = mu[head] + factor[head] * (
                    view[:, position, head] - mu[head]
                )

    one = variance_calibration(
        factor, layers=[LAYER], positions=places, heads=heads, centre={LAYER: mu}
    )
    found = logits(lens, one)
    assert_rows_close(found, raw_run(family, TOKENS, [("z_raw", LAYER, by_hand)]))
    assert_moved(found, logits(lens))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_norm_is_that_of_hugging_face_in_the_raw_model(lens_of, raw_run, family):
    lens = lens_of(family)
    target = {layer: draw(N_HEADS, lens.d_head, seed=layer) for layer in (0, 2)}

    def by_hand(layer):
        norms = [LlamaRMSNorm(lens.d_head, eps=1e-5) for _ in range(N_HEADS)]
        for norm, gain in zip(norms, target[layer], strict=True):
            norm.weight.data = gain

        def change(view):
            view.copy_(torch.stack([norm(view[:, :, head]) for head, norm in enumerate(norms)], 2))

        return ("z_raw", layer, change)

    found = logits(lens, head_rms_norm(target, eps=1e-5))
    assert_rows_close(found, raw_run(family, TOKENS, [by_hand(0), by_hand(2)]))
    assert_moved(found, logits(lens))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_factor_of_1_changes_no_bit_whatever_the_centre(lens_of, family):
    lens = lens_of(family)
    centre = {layer: draw(N_HEADS, lens.d_head, seed=layer) for layer in range(3)}
    for factor in (1.0, torch.ones(N_HEADS)):
        with pytest.warns(UserWarning, match="changed nothing"):
            found = logits(lens, variance_calibration(factor, centre=centre))
        assert torch.equal(found, logits(lens))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_natural_size_is_the_mean_over_tokens_from_the_eighth_on(lens_of, family):
    lens, batch = lens_of(family), from_tensor(TOKENS, lengths=torch.tensor([14, 10]))
    found = natural_rms(lens, batch)
    z = capture(lens, batch, sites=("z_raw",)).tensors
    assert list(found) == [0, 1, 2]
    for layer in range(3):
        for head in range(N_HEADS):
            own = z["z_raw", layer][:, :, head].square().mean(-1).sqrt()  # sequence, position
            torch.testing.assert_close(
                found[layer][head], torch.cat([own[0, 8:14], own[1, 8:10]]).mean()
            )
    some = natural_rms(lens, batch, layers=[2], first_position=9)
    assert list(some) == [2]
    torch.testing.assert_close(some[2][3], torch.cat([own[0, 9:14], own[1, 9:10]]).mean())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: variance_calibration(float("nan")),
            "the factor is nan; need a finite number, or one for each head",
        ),
        (
            lambda: variance_calibration(2.0, layers=[0, 1], centre={1: draw(4, 12)}),
            r"no centre for layers \[0\]",
        ),
        (
            lambda: head_rms_norm(float("inf")),
            "the target is inf; need a finite number, or layer -> tensor",
        ),
        (lambda: head_rms_norm({0: torch.ones(4)}, layers=[2]), r"no target for layers \[2\]"),
        (lambda: head_rms_norm(1.0, eps=-1.0), "eps is -1.0; need 0 or a small positive number"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make, text):
    with pytest.raises(InputError, match=text):
        make()


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            variance_calibration(torch.ones(3)),
            r"factor of layer 0 has the shape \(3, 1\); need the model's 4 heads",
        ),
        (
            head_rms_norm({1: torch.ones(5)}),
            r"target of layer 1 has the shape \(5,\); need the model's 4 heads, its",
        ),
        (head_rms_norm({1: torch.ones(12, 4)}), r"shape \(12, 4\); need .* heads first"),
    ],
)
def test_tensors_of_another_shape_are_refused(lens_of, one, text):
    with pytest.raises(EditError, match=text):
        run_with(lens_of("llama"), TOKENS, one)


def test_a_target_that_could_be_by_head_or_by_dimension_is_refused():
    square = wrap(tiny("llama", head_dim=4, num_key_value_heads=4))
    with pytest.raises(
        EditError, match=r"as many heads as dimensions of a head; need an axis of size 1 beside it"
    ):
        run_with(square, TOKENS, head_rms_norm({0: torch.ones(4)}))
    factor = torch.tensor([1.0, 0.0, 1.0, 1.0])
    after = run_with(
        square, TOKENS, variance_calibration(factor, layers=[0]), sites=("z",)
    ).tensors["z", 0]
    assert (after[:, :, 1] == 0).all()
    assert (after[:, :, [0, 2, 3]] != 0).any()


def test_the_norm_of_a_token_without_values_needs_eps(lens_of):
    lens, nothing = lens_of("llama"), zero("v", layers=[LAYER])
    run_with(lens, TOKENS, [nothing, head_rms_norm(1.0, layers=[0, LAYER])])
    with pytest.raises(
        EditError, match=r"'head RMSNorm, target 1' of 'z_raw' gave numbers that are not finite"
    ):
        run_with(lens, TOKENS, [nothing, head_rms_norm(1.0, layers=[LAYER], eps=0.0)])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"first_position": 14},
            "no real token stands at position 14 or after it; need longer .* at most 14 tokens",
        ),
        ({"first_position": -1}, "no real token stands at position -1"),
        ({"layers": [3]}, "layer 3 does not exist; need 0 to 2"),
    ],
)
def test_a_natural_size_of_nothing_is_refused(lens_of, options, text):
    with pytest.raises(InputError, match=text):
        natural_rms(lens_of("llama"), TOKENS, **options)

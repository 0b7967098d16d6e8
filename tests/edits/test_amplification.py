"""Amplification by hand, its means against the plain model, and its no-op."""

import functools

import pytest
import torch
from lenses import lens_of
from rounding import assert_moved, assert_rows_close

from sink_lens.data.tokens import random_tokens
from sink_lens.edits.amplification import CENTRES, CentringMeans, amplify, centring_means
from sink_lens.edits.constructors import At, EditError
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.measures.heads import expand_kv
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import TINY_FAMILIES

P = 5
TOKENS = torch.randint(3, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(3))


@functools.cache
def means_of(family):
    return centring_means(lens_of(family), n_tokens=128)


@functools.cache
def unedited(lens):
    return run_with(lens, TOKENS, logits=True, loss=False).logits


def by_number(value):
    """Means that are one number in one layer."""
    values, aggregated = ({0: torch.full((2, 3), one)} for one in (value, 10 * value))
    return CentringMeans(values=values, aggregated=aggregated, n_tokens=64, seed=0)


def changed(one, z, *, layer=0):
    at = At(
        layer=layer, sequences=slice(0, len(z)), n_sequences=len(z), positions=torch.tensor([0]),
        valid=torch.ones(len(z), 1).bool(), read=None, part=one.part,
    )  # fmt: skip
    return one.change(z, at)


@pytest.mark.parametrize(
    ("centre", "factor", "expected"),
    [
        ("values", 3.0, 7.0),  # 1 + 3 (3 - 1)
        ("values", 0.0, 1.0),  # the centre itself
        ("aggregated", 3.0, -11.0),  # 10 + 3 (3 - 10)
        ("none", 3.0, 9.0),
    ],
)
def test_a_number_by_hand(centre, factor, expected):
    one = amplify(factor, positions=[0], layers=[0], centre=centre, means=by_number(1.0))
    assert (changed(one, torch.full((1, 1, 2, 3), 3.0)) == expected).all()


def test_each_head_has_its_own_mean():
    means = CentringMeans(
        values={0: torch.tensor([[1.0], [2.0], [4.0]])}, aggregated={}, n_tokens=64, seed=0
    )
    z = torch.zeros(1, 1, 3, 1)
    every = amplify(2.0, positions=[0], layers=[0], means=means)
    assert changed(every, z).flatten().tolist() == [-1.0, -2.0, -4.0]  # mu + 2 (0 - mu)
    some = amplify(2.0, positions=[0], layers=[0], means=means, heads=[2, 0])
    assert changed(some, z[:, :, :2]).flatten().tolist() == [-4.0, -1.0]


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("centre", CENTRES)
def test_factor_1_changes_nothing(family, centre):
    lens = lens_of(family)
    one = amplify(1.0, positions=[P], layers=[0, 1, 2], centre=centre, means=means_of(family))
    assert torch.equal(
        run_with(lens, TOKENS, one, logits=True, loss=False, quiet=True).logits, unedited(lens)
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_it_is_the_edit_of_the_raw_model(raw_run, family):
    mu = means_of(family).values[1]

    def five_times(z):
        z[:, P] = mu + 5 * (z[:, P] - mu)

    expected = raw_run(family, TOKENS, [("z_raw", 1, five_times)])
    one = amplify(5.0, positions=[P], layers=[1], means=means_of(family))
    found = run_with(lens_of(family), TOKENS, one, logits=True, loss=False).logits
    assert_rows_close(found, expected)
    clean = unedited(lens_of(family))
    assert_rows_close(found[:, :P], clean[:, :P])
    assert_moved(found, clean)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_means_are_those_of_the_plain_model(raw_run, family):
    means, seen = means_of(family), {}
    options = {
        "generator": torch.Generator().manual_seed(0),
        "vocab_size": VOCAB_SIZE,
        "bos": "without",
    }
    ids = random_tokens(None, sequences=2, length=64, **options).tokens

    def keep(site):
        return site, 1, lambda view: seen.update({site: view.clone()})

    raw_run(family, ids, [keep("v"), keep("z_raw")])
    values = expand_kv(seen["v"].flatten(0, 1), n_heads=seen["z_raw"].shape[2]).mean(0)
    torch.testing.assert_close(means.values[1], values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        means.aggregated[1], seen["z_raw"].flatten(0, 1).mean(0), rtol=1e-4, atol=1e-5
    )
    assert means.n_tokens == 128
    assert sorted(means.values) == sorted(means.aggregated) == [0, 1, 2]


def test_the_seed_decides_the_tokens_which_are_whole_sequences():
    lens = lens_of("llama")
    again, other = (centring_means(lens, n_tokens=128, seed=seed) for seed in (0, 1))
    assert torch.equal(again.values[2], means_of("llama").values[2])
    assert not torch.equal(other.values[2], again.values[2])
    assert (other.seed, again.seed) == (1, 0)
    assert centring_means(lens, n_tokens=100).n_tokens == 64


def test_what_cannot_be_amplified_is_refused():
    for factor in (float("inf"), float("nan")):
        with pytest.raises(InputError, match=f"the factor is {factor}; need a finite number"):
            amplify(factor, positions=[1], layers=[0], centre="none")
    for centre in ("values", "aggregated"):
        with pytest.raises(
            InputError,
            match=rf"the centre '{centre}' needs means; compute them once with centring_m",
        ):
            amplify(2.0, positions=[1], layers=[0], centre=centre)
    with pytest.raises(
        InputError, match="the centre 'none' has no means; need values or aggregated"
    ):
        by_number(1.0).of_centre("none")
    with pytest.raises(
        InputError, match="n_tokens is 63; need at least 64, one sequence of random tokens"
    ):
        centring_means(lens_of("llama"), n_tokens=63)


def test_means_of_another_model_or_without_the_layer_are_refused():
    lens, means = lens_of("llama"), centring_means(lens_of("llama"), n_tokens=64, layers=[0])
    for layer, own in ((2, means), (0, means_of("gpt_oss"))):
        for heads in (None, [1]):
            one = amplify(2.0, positions=[1], layers=[layer], means=own, heads=heads)
            with pytest.raises(EditError, match=f"for layer {layer}, .* need means of this model"):
                run_with(lens, TOKENS, one)


def test_in_16_bit_only_the_result_is_rounded():
    z, mu = torch.randn(2, 64, 2, 12, generator=torch.Generator().manual_seed(0)).bfloat16(), 1.003
    means = CentringMeans(values={0: torch.full((2, 12), mu)}, aggregated={}, n_tokens=64, seed=0)
    found = changed(amplify(8.0, positions=[0], layers=[0], means=means), z)
    assert torch.equal(found, (mu + 8 * (z.double() - mu)).bfloat16())

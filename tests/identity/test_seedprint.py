"""SeedPrint: it tells seeds apart, ignores what all coordinates share, and says when it has no answer."""

import math

import numpy as np
import pytest
import torch

from sink_lens.errors import InputError
from sink_lens.identity.features import Inputs, read_features
from sink_lens.identity.nulls import NULLS
from sink_lens.identity.seedprint import (
    NO_ANSWER,
    NOT_SHOWN,
    SAME,
    FingerprintConfig,
    compare_states,
)
from sink_lens.identity.untrained_models import UntrainedConfig, untrained

N = 400
CONFIG = FingerprintConfig(sequences=N, coordinates=32)
SMALL = UntrainedConfig(
    style="gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=2000, n_context=64
)


def compared(x, y, *, config=CONFIG, seed=0):
    return compare_states(("a", x), ("b", y), config=config, generator=np.random.default_rng(seed))


def states(seed, *, noise=0.0, sequences=N):
    lens = untrained(SMALL, seed=seed)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in lens.plain.parameters():
            if parameter.ndim > 1:
                parameter.add_(
                    noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
                )
    return read_features(
        lens, Inputs(kind="tokens", sequences=sequences, length=8, seed=0, ids=tuple(range(2000)))
    )


def test_half_a_sigma_of_noise_leaves_the_print_and_another_seed_has_another():
    config = FingerprintConfig(sequences=2000, coordinates=32)
    mine, noisy, other = (
        states(0, sequences=2000),
        states(0, noise=0.5, sequences=2000),
        states(1, sequences=2000),
    )
    same = compared(mine, noisy, config=config)
    assert same.verdict == SAME
    assert same.shared > same.expected
    p = {row["null"]: row["log10_p_code"] for row in same.null_rows()}
    assert max(p[name] for name in NULLS if name != "relabelled") < -50
    assert p["relabelled"] < -10  # |S|! relabellings have no smaller p
    assert not same.shares_scale
    apart = compared(mine, other, config=config)
    assert apart.verdict == NOT_SHOWN
    assert abs(apart.tau_bar) < 0.05 < 0.2 < same.tau_bar


def test_a_factor_of_each_input_makes_unrelated_models_look_related_to_the_published_nulls_only():
    # x = g (u + e): what an input scales, it scales in all coordinates of every model that sees it.
    called, warned = dict.fromkeys(NULLS, 0), 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        factor = np.exp(0.7 * generator.standard_normal((N, 1)))
        x, y = (
            factor * (generator.standard_normal(64) + 0.2 * generator.standard_normal((N, 64)))
            for _ in range(2)
        )
        found = compared(x, y, seed=seed)
        warned += found.shares_scale
        for row in found.null_rows():
            p = 10 ** row["log10_p_code"] if math.isnan(row["p_draws"]) else row["p_draws"]
            called[row["null"]] += p < 0.01
    assert called["analytical"] >= 5
    assert called["pipeline"] >= 5
    assert called["relabelled"] <= 2
    assert warned == 20


def test_relabelling_is_right_where_inputs_are_shared():
    # What two models know of an input goes into all their coordinates; of 40 pairs 1% may have p under 0.01.
    shares = []
    for seed in range(40):
        generator = np.random.default_rng(seed)
        known = generator.standard_normal((N, 3))
        x, y = (
            known @ generator.standard_normal((3, 64)) + generator.standard_normal((N, 64))
            for _ in range(2)
        )
        found = compared(x, y, seed=seed)
        shares.append(found.nulls["relabelled"].p_by_draws(found.tau_bar))
    assert sum(share < 0.01 for share in shares) <= 3
    assert sum(share < 0.5 for share in shares) == pytest.approx(20, abs=10)


@pytest.mark.parametrize("shared", [0, 5])
def test_a_small_intersection_is_no_answer_and_never_a_p(shared):
    x, y = np.random.default_rng(0).standard_normal((2, N, 64))
    x[:, :16] -= 10
    y[:, 16 - shared : 32 - shared] -= 10
    found = compared(x, y, config=FingerprintConfig(sequences=N, coordinates=16))
    assert found.verdict == NO_ANSWER
    assert found.why.startswith(
        f"{shared} of 16 coordinates in common (4 by chance), where 8 are needed"
    )
    assert math.isnan(found.tau_bar)
    assert found.null_rows() == []


def test_constant_states_are_no_answer_and_states_that_do_not_belong_together_are_refused():
    x = np.random.default_rng(0).standard_normal((N, 64))
    found = compared(
        x, np.ones((N, 64)) * np.arange(64), config=FingerprintConfig(sequences=N, coordinates=48)
    )
    assert found.verdict == NO_ANSWER
    assert "the same on every input" in found.why
    with pytest.raises(InputError, match="read 400 inputs and b 399"):
        compared(x, x[1:])
    with pytest.raises(InputError, match="the states of b are not finite"):
        compared(x, np.where(x > 3, np.inf, x))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decides": "bayes"}, "need one of analytical"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"coordinates": 3}, "3 coordinates per model; need at least 8"),
        ({"draws": 50}, "draws is 50; need 100 for a p under 0.01"),
        ({"seeds": (3, 4)}, "no untrained model"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(change, says):
    with pytest.raises(InputError, match=says):
        FingerprintConfig(**change)


def test_how_many_coordinates_a_model_has():
    assert [FingerprintConfig().n_coordinates(width) for width in (48, 192, 768, 4096)] == [
        48,
        192,
        400,
        400,
    ]
    with pytest.raises(InputError, match="6 of 6 coordinates"):
        FingerprintConfig().n_coordinates(6)
    with pytest.raises(InputError, match="32 of 24 coordinates"):
        CONFIG.n_coordinates(24)


@pytest.mark.parametrize("null", NULLS)
def test_any_null_can_decide(null):
    x = np.random.default_rng(0).standard_normal((N, 64))
    config = FingerprintConfig(sequences=N, coordinates=32, decides=null)
    found = compared(x, x + 0.1, config=config)
    assert found.verdict == SAME
    assert null in found.why
    itself = compared(x, x)
    assert itself.tau_bar == pytest.approx(1)
    assert itself.shared == 32

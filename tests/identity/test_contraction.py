"""Contraction: the sums against loops over pairs, the floor, and what switches it off."""

import functools
import itertools

import numpy as np
import pytest
import torch

from sink_lens.activations.record import capture
from sink_lens.errors import InputError
from sink_lens.identity.contraction import contraction, direction_cosines
from sink_lens.identity.cosine_sums import BLOCKS, CosineSums, jackknife_interval
from sink_lens.identity.models_to_measure import RandomSequences
from sink_lens.identity.untrained_models import UntrainedConfig, untrained
from sink_lens.models.load import load
from tests.tiny_families import tiny

SMALL = {
    "n_layers": 2,
    "d_model": 32,
    "n_heads": 4,
    "vocab_size": 100,
    "n_context": 64,
    "init_std": 0.2,
}


@functools.cache
def small(style="gpt2", *, seed=0, **fields):
    return untrained(UntrainedConfig(style=style, **SMALL | fields), seed=seed)


def value(found, measure):
    return found.frame.set_index("measure")["value"][measure]


def mean_cosine(vectors):
    """The mean over all pairs of vectors, one by one."""
    pairs = itertools.combinations(vectors, 2)
    return np.mean([float(torch.nn.functional.cosine_similarity(a, b, dim=0)) for a, b in pairs])


def test_the_sums_are_the_loop_over_pairs():
    lens, draws = small(), RandomSequences(sequences=60, length=12, seed=0)
    tokens = torch.cat([chunk.tokens for chunk in draws.chunks(lens)])
    x = capture(lens, tokens, sites=("resid_pre", "attn_out", "final"))
    found = contraction(lens, sequences=60, length=12, sinks=False)
    places = {(-1, "embedding"): x["resid_pre", 0], (2, "final"): x["final"]}
    places[1, "attention"] = x["resid_pre", 1] + x["attn_out", 1]
    rows = found.tables["layers"].set_index(["measure", "stage", "layer"])["value"]
    for (layer, place), state in places.items():
        assert rows["inter", place, layer] == pytest.approx(mean_cosine(state[:, -1]), abs=1e-5)
        within = [mean_cosine(one) for one in state[:8]]
        own = CosineSums(2, sequences=40, length=12)
        own.add((layer, place), state[:8])
        assert float(own.within[layer, place].sum()) / 8 == pytest.approx(np.mean(within), abs=1e-5)


def test_leaving_out_a_block_is_leaving_out_its_sequences():
    sums = CosineSums(0, sequences=BLOCKS * 2, length=3)
    x = torch.randn(BLOCKS * 2, 3, 8, generator=torch.Generator().manual_seed(0)) + 1
    sums.places = [(-1, "embedding")]
    sums.add((-1, "embedding"), x[:5])
    sums.add((-1, "embedding"), x[5:])
    # without the first block of two
    assert sums.inter_cosines()[1, 0] == pytest.approx(mean_cosine(x[2:, -1]), abs=1e-5)
    assert sums.inter_cosines(end=0)[0, 0] == pytest.approx(mean_cosine(x[:, 0]), abs=1e-5)


def test_the_jackknife_of_a_mean_is_its_t_interval():
    blocks = np.random.default_rng(0).normal(size=BLOCKS)
    left = (blocks.sum() - blocks) / (BLOCKS - 1)
    mean, low, high = jackknife_interval(np.concatenate([[blocks.mean()], left]))
    half = 2.093 * blocks.std(ddof=1) / BLOCKS**0.5  # t with 19 degrees of freedom
    assert (mean - low, high - mean) == (
        pytest.approx(half, rel=1e-3),
        pytest.approx(half, rel=1e-3),
    )


def test_a_model_that_writes_nothing_has_its_floor_and_no_excess():
    found = contraction(small(attention=False, mlp=False), sequences=64, length=16)
    assert value(found, "inter_floor") > 0.3  # the last position's embedding is shared
    for measure in ("inter_excess", "intra_excess", "discrepancy", "inter_by_mlp"):
        assert value(found, measure) == pytest.approx(0, abs=1e-6)
    without = contraction(
        small(attention=False, mlp=False, positions="none"), sequences=64, length=16
    )
    assert abs(value(without, "inter_floor")) < 0.1


def test_gains_add_up_to_the_excess():
    found = contraction(small(), sequences=64, length=16)
    for name in ("inter", "intra"):
        gains = value(found, f"{name}_by_attention") + value(found, f"{name}_by_mlp")
        assert gains == pytest.approx(value(found, f"{name}_excess"), abs=1e-6)
        rows = found.tables["layers"][found.tables["layers"]["measure"] == name]
        assert rows["gain"].sum() == pytest.approx(rows["excess"].iloc[-1], abs=1e-6)
        assert (rows["excess_low"] <= rows["excess"]).all()


def test_asymmetric_activations_make_sequences_alike_and_odd_ones_do_not():
    options = {"sequences": 64, "length": 16, "sinks": False}
    relu, tanh = (
        contraction(small(activation=name, n_layers=4), **options) for name in ("relu", "tanh")
    )
    assert value(relu, "inter_excess") > value(tanh, "inter_excess") + 0.1


def test_without_attention_positions_do_not_meet():
    on, off = (
        contraction(small("llama", attention=one), sequences=64, length=16) for one in (True, False)
    )
    assert value(on, "intra_by_attention") > 0.02
    assert value(off, "intra_by_attention") == pytest.approx(0, abs=1e-6)
    # with neither attention nor positions a sequence is one token; position 0 is like the last
    plain = contraction(
        small("llama", attention=False, activation="relu", gated=False), sequences=256, length=16
    )
    assert abs(value(plain, "discrepancy")) < 0.1


def test_sink_measures_stand_beside_it():
    found = contraction(small(), sequences=64, length=16)
    assert value(found, "sink_mass") == pytest.approx(value(found, "uniform_mass"), rel=0.1)
    assert {"sink_rate", "s2_ratio", "norm_ratio", "dominance_ratio", "loss"} <= set(
        found.frame["measure"]
    )
    left = contraction(small(), sequences=64, length=16, sinks=False)
    assert "sink_mass" not in set(left.frame["measure"])


def test_directions_and_alignment():
    one, same, other = (
        contraction(small(seed=seed, activation="relu"), sequences=64, length=16)
        for seed in (0, 0, 1)
    )
    assert next(iter(one.directions)) == "-1.embedding"
    assert np.linalg.norm(one.directions["2.final"]) == pytest.approx(1)
    pairs = direction_cosines({"a": one.directions, "b": same.directions, "c": other.directions})
    cosines = pairs[pairs["stage"] == "final"].set_index(["a", "b"])["cosine"]
    assert cosines["a", "b"] == pytest.approx(1)
    assert abs(cosines["a", "c"]) < 0.7
    assert pairs["chance"].iloc[0] == pytest.approx(32**-0.5)
    rows = one.tables["alignment"].set_index("what")
    assert rows.loc["argmax token", "rank"] <= 10
    assert rows.loc["argmin token", "cosine"] < 0
    assert rows.loc[rows.index[-1], "of"] == 32
    against = contraction(small(seed=3, activation="relu"), sequences=64, length=16, sinks=False)
    *_, last = against.tables["alignment"].to_dict("records")
    place = f"{last['what'].split()[-1]}.mlp"
    assert last["cosine"] == pytest.approx(against.directions[place][last["which"]])
    assert last["cosine"] < 0
    wide = contraction(small(d_model=40), sequences=64, length=16)
    assert direction_cosines({"a": one.directions, "b": wide.directions}).empty


def test_tokens_of_a_half_precision_model_are_ranked_without_ties():
    lens = load(tiny("llama").to(torch.bfloat16))
    found = contraction(lens, sequences=64, length=16, sinks=False)
    weight = lens.plain.lm_head.weight.detach().double().numpy()
    cosine = weight @ found.directions["3.final"] / np.linalg.norm(weight, axis=1)
    rows = found.tables["alignment"].to_dict("records")[:2]
    for row, order in zip(rows, (cosine, -cosine), strict=True):
        assert row["rank"] == 1 + (order > order[row["which"]]).sum()
        assert row["cosine"] == pytest.approx(cosine[row["which"]], abs=1e-6)


def test_bad_input_is_refused():
    lens = small()
    with pytest.raises(InputError, match="the length is 9; need 10 tokens"):
        contraction(lens, sequences=64, length=9)
    with pytest.raises(InputError, match="49 sequences were asked for"):
        contraction(lens, sequences=49, length=16)
    with pytest.raises(InputError, match="takes at most 64"):
        contraction(lens, sequences=64, length=128)
    sums = CosineSums(1, sequences=50, length=2)
    with pytest.raises(InputError, match=r"states in float16 are not finite \(layer 0, mlp\)"):
        sums.add((0, "mlp"), torch.tensor([[[6e4, torch.inf], [1.0, 1.0]]]).half())

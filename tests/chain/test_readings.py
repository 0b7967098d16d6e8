"""What the passes read, against slow and independent ways."""

import copy
import math

import pytest
import torch
from lenses import lens_of

from sink_lens.activations.record import LayerView, capture, stream
from sink_lens.activations.sink_mask import sink_rate_reading
from sink_lens.chain import readings as r
from sink_lens.chain.links import LINKS
from sink_lens.chain.locate import MeasuringPlan
from sink_lens.data.tokens import from_tensor
from sink_lens.measures.sink_tokens import sampled_queries
from sink_lens.models import unembedding
from sink_lens.models.load import wrap
from tests.tiny_families import HYBRID_FAMILIES, MORE_FAMILIES, TINY_FAMILIES, tiny


def batch(sequences=4, length=16, *, lengths=None, pad=0):
    tokens = torch.randint(3, 300, (sequences, length), generator=torch.Generator().manual_seed(1))
    if lengths is not None:
        lengths = torch.tensor(lengths)
        tokens[torch.arange(length) >= lengths[:, None]] = pad
    return from_tensor(tokens, lengths=lengths)


def streamed(lens, tokens, readings, **options):
    options.setdefault("rows", sampled_queries(tokens.n_positions))
    return stream(lens, tokens, readings, **options)


PLAN = MeasuringPlan(sink_positions=(0, 2), layers=(1,), dimensions={1: (5,)})


def all_readings(lens, length, moments):
    positions, generator = r.sampled_positions(length), torch.Generator().manual_seed(0)
    one = r.MeasuringPass(lens=lens, plan=PLAN, length=length, controls=5, generator=generator)
    return [
        *r.attention_readings(PLAN.sink_positions),
        sink_rate_reading(0.3),
        *r.position_readings(one, positions, moments=moments),
        *r.state_readings(PLAN.sink_positions, positions=positions),
        r.dominance_elsewhere_reading(positions),
        r.value_norm_reading(lens, sink_positions=PLAN.sink_positions, positions=positions),
        *(reading for link in LINKS for reading in link.readings(one)),
        *r.neuron_readings(lens, PLAN, positions=positions),
        r.loss_reading(lens),
    ]


@pytest.mark.parametrize("length", [65, 100, 1024, 8192])
def test_long_sequences_are_sampled_from_both_ends_and_short_ones_in_full(length):
    assert r.sampled_positions(64).tolist() == list(range(64))
    positions = r.sampled_positions(length, sink_positions=(0, length - 2)).tolist()
    assert positions[:33] == list(range(33))
    assert positions[-1] == length - 1
    assert length - 2 in positions
    assert len(positions) == len(set(positions)) <= 66
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("length", "key", "places"),
    [
        (64, 0, [8, 19, 30, 41, 52]),  # 8, 19, 30, 41, 52, (63)
        (64, 19, [8, 30, 41, 52]),
        (10, 0, [8, 9]),
        (8, 0, []),
    ],
)
def test_control_positions_are_five_others(length, key, places):
    assert r.control_positions(length, key=key, controls=5) == places


def test_ratio_to_others_is_over_the_median_from_position_8_on():
    x = torch.arange(1.0, 13.0)[None]  # the key 0 has 1; positions 8 to 11 have 9, 10, 11, 12
    positions = torch.arange(12)
    assert r.ratio_to_others(x, positions=positions, key=0).item() == pytest.approx(1 / 10.5)
    assert r.ratio_to_others(x, positions=positions, key=8).item() == pytest.approx(
        9 / 11
    )  # itself left out
    x[0, 10:] = math.nan  # padding
    assert r.ratio_to_others(x, positions=positions, key=0).item() == pytest.approx(1 / 9.5)
    assert r.ratio_to_others(torch.ones(3, 8), positions=torch.arange(8), key=0).isnan().all()


def test_a_rate_sees_no_sink_in_late_keys_or_padding():
    def rate_of(pattern, threshold, length=None):
        n, tokens = len(pattern), torch.zeros(1, len(pattern), dtype=torch.long)
        seen = {
            "tensors": {"rows": pattern[None, None]},
            "valid": torch.arange(n)[None] < (length or n),
        }
        return sink_rate_reading(threshold).function(
            LayerView(layer=0, tokens=tokens, rows=torch.arange(n), **seen)
        )[0]

    pattern = torch.ones(64, 64).tril()
    rate = rate_of(pattern / pattern.sum(-1, keepdim=True), 0.3)
    assert rate[:55].tolist() == [0.0] * 55
    assert rate[55:].isnan().all()  # from key 55 on fewer than 10 queries
    pattern = torch.eye(64) / 2 + torch.eye(64).roll(-1, dims=1) / 2
    pattern = pattern.tril()  # late keys score 1/n with n queries: 1/9 at key 55, which is over 0.1
    assert rate_of(pattern, 0.1).nan_to_num(0).max() == 0
    pattern = torch.zeros(32, 32)
    pattern[:16, 0] = 1.0  # the real queries look at key 0
    pattern[16:, 3] = 1.0  # the padding at key 3
    assert rate_of(pattern, 0.3, length=16)[:4].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *MORE_FAMILIES, *HYBRID_FAMILIES])
def test_the_loss_is_that_of_hugging_face(family, monkeypatch):
    monkeypatch.setattr(unembedding, "LOSS_CHUNK", 7)
    lens, tokens = lens_of(family), batch(4, 16, lengths=[16, 9, 2, 1])
    found = streamed(lens, tokens, [r.loss_reading(lens)])["loss", lens.n_layers]
    assert found[-1].isnan()  # one token has no loss
    for ids, length, ours in zip(tokens.tokens[:-1], tokens.lengths, found, strict=False):
        own = ids[None, :length]
        with torch.no_grad():
            theirs = lens.plain(input_ids=own, labels=own, use_cache=False).loss
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox", "opt"])
def test_batches_give_the_same_as_all_at_once(family):
    lens, tokens = lens_of(family), batch(5, 14, lengths=[14, 14, 9, 14, 3])
    moments = ({}, {})
    whole, parts = (
        streamed(
            lens, tokens, all_readings(lens, 14, kept), keys=PLAN.sink_positions, batch_size=size
        )
        for kept, size in zip(moments, (5, 2), strict=True)
    )
    assert whole.values.keys() == parts.values.keys()
    for name, by_layer in whole.values.items():
        assert by_layer.keys() == parts.values[name].keys()
        for layer, tensor in by_layer.items():
            torch.testing.assert_close(
                parts[name, layer], tensor, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
            )
    for place in moments[0]:
        torch.testing.assert_close(
            moments[1][place].std(), moments[0][place].std(), equal_nan=True, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_what_stands_at_padding_never_matters(family):
    lens = lens_of(family)
    found = []
    for pad in (0, 77):
        tokens = batch(4, 14, lengths=[14, 11, 9, 4], pad=pad)
        chosen = [
            one
            for one in all_readings(lens, 14, {})
            if lens.family.down or "neurons" not in one.name
        ]
        chosen = [
            one
            for one in chosen
            if lens.family.down or not set(one.sites) & {"neurons", "mlp_in", "mlp_out"}
        ]
        found.append(streamed(lens, tokens, chosen, keys=PLAN.sink_positions))
    for name, by_layer in found[0].values.items():
        for layer, tensor in by_layer.items():
            torch.testing.assert_close(
                found[1][name, layer], tensor, equal_nan=True, rtol=1e-4, atol=1e-5, msg=name
            )


def test_constants_of_biases_are_no_part_of_what_tokens_bring():
    """One function written twice: a bias of the norm that queries and output take back changes no reading."""
    plain = tiny("gpt2")
    other, beta = (
        copy.deepcopy(plain),
        torch.randn(3, 48, generator=torch.Generator().manual_seed(2)),
    )
    with torch.no_grad():
        for block, bias in zip(other.transformer.h, beta, strict=True):
            of_q, _, of_v = (bias @ block.attn.c_attn.weight).chunk(3)
            block.ln_1.bias += bias
            block.attn.c_attn.bias[:48] -= of_q
            block.attn.c_proj.bias -= of_v @ block.attn.c_proj.weight
    tokens = batch(4, 14)
    one, two = (
        streamed(wrap(model), tokens, all_readings(wrap(model), 14, {}), keys=PLAN.sink_positions)
        for model in (plain, other)
    )
    for name in ("std:z", "std:attn_out", "key_cosine", "loss"):
        for layer, tensor in one.values[name].items():
            torch.testing.assert_close(
                two[name, layer], tensor, equal_nan=True, rtol=1e-3, atol=1e-4, msg=name
            )


def test_neurons_elsewhere_is_the_mean_over_the_other_real_positions():
    lens, tokens = lens_of("gpt2"), batch(2, 10, lengths=[10, 5])
    found = streamed(lens, tokens, r.neuron_readings(lens, PLAN, positions=torch.arange(10)))
    neurons = capture(lens, tokens, sites=["neurons"], path="plain")["neurons", 1]
    for index, places in enumerate(
        ([1, 3, 4, 5, 6, 7, 8, 9], [1, 3, 4])
    ):  # without the keys 0 and 2
        torch.testing.assert_close(
            found["neurons_elsewhere", 1][index], neurons[index, places].abs().mean(0)
        )
    torch.testing.assert_close(found["neurons_at_sinks", 1], neurons[:, [0, 2]])

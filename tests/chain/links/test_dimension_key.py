"""What makes the studied key, and its advantage, against slow loops and the model's own scores."""

import functools

import lenses
import link_readings
import pytest
import torch
from link_readings import DIMS, batch, plan

from sink_lens.activations.record import stream
from sink_lens.chain.links.dimension_key import DIMENSION_KEY
from sink_lens.chain.locate import MeasuringPlan
from sink_lens.models.load import wrap
from sink_lens.models.weights import AttentionWeights, attention_weights
from tests.tiny_families import TINY_FAMILIES, tiny

LINK = DIMENSION_KEY
own, read = (functools.partial(one, LINK) for one in (link_readings.own, link_readings.read))
NORMED = ("qwen3", "olmo2")  # a norm of the key of each head, and of the whole key
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}


def lens_of(family):
    return (
        wrap(tiny("gpt_oss", rope_parameters=YARN))
        if family == "gpt_oss_yarn"
        else lenses.lens_of(family)
    )


@pytest.mark.parametrize("family", [*TINY_FAMILIES, "gpt_oss_yarn"])
def test_the_parts_of_the_logit_sum_to_the_models_own_score(family):
    lens, tokens = lens_of(family), batch()  # 8 tokens: the sliding windows still see position 0
    found = read(lens, tokens, keep=["key_scores"])
    cap = getattr(lens.config, "attn_logit_softcapping", None)
    for layer in range(lens.n_layers):
        scores = found["kept:key_scores", layer][:, :, 1:, 0]  # of the later queries on position 0
        if cap is not None:  # the parts are those before the cap
            scores = (scores.double() / cap).atanh() * cap
        parts = found["logit_split", layer]
        torch.testing.assert_close(
            parts[..., :3].sum(-1), scores.mean(-1).float(), rtol=1e-4, atol=1e-4
        )
        assert parts.isfinite().all()


def bias_before(lens, layer):
    """The bias of the norm before the attention, which is the same in every token."""
    norm = lens.layer(layer).get_submodule(lens.family.attn_norm) if lens.family.attn_norm else None
    bias = getattr(norm, "bias", None)
    return torch.zeros(lens.d_model) if bias is None else bias.detach()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt", "gpt_neox"])
def test_the_part_of_the_dimensions_is_their_columns_of_w_k(family):
    lens, tokens = lens_of(family), batch(sequences=2)
    found = read(lens, tokens, keep=["attn_in", "rotated_q"])
    layer, groups = 1, lens.n_heads // lens.n_kv_heads
    weights = attention_weights(lens, layer=layer)
    alike = bias_before(lens, layer)
    x, query = found["kept:attn_in", layer] - alike, found["kept:rotated_q", layer]
    for head in range(lens.n_heads):
        written = sum(x[:, 0, d, None] * weights.w_k[head // groups, :, d] for d in DIMS)
        logit = torch.stack([(query[:, head, i] * written).sum(-1) for i in range(1, 8)]).mean(0)
        torch.testing.assert_close(
            found["logit_split", layer][:, head, 0], logit, rtol=1e-4, atol=1e-5
        )
        bias = weights.b_k[head // groups] + weights.w_k[head // groups] @ alike
        logit = torch.stack([query[:, head, i] @ bias for i in range(1, 8)]).mean(0)
        torch.testing.assert_close(
            found["logit_split", layer][:, head, 2], logit, rtol=1e-4, atol=1e-5
        )


def test_the_logit_is_not_split_where_the_key_is_turned():
    tokens = batch(length=16)
    assert not read(lens_of("llama"), tokens, position=2).values.get("logit_split")
    lens = lens_of("gpt2")  # learned positions: any key can be split
    found = read(lens, tokens, position=2, keep=["key_scores"], keys=(2,))
    scores = found["kept:key_scores", 1][:, :, 3:, 0].mean(-1)
    torch.testing.assert_close(
        found["logit_split", 1][..., :3].sum(-1), scores, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2", "gpt2", "phi3", "gpt_neox"])
def test_the_key_cosine_is_that_with_the_dimensions_alone(family):
    lens, tokens = lens_of(family), batch(sequences=2, length=12, lengths=[12, 10])
    found = read(lens, tokens, keep=["attn_in", "k"])
    layer = 2
    w_k = attention_weights(lens, layer=layer).w_k
    alike = bias_before(lens, layer)
    x, k = found["kept:attn_in", layer] - alike, found["kept:k", layer]
    gain, bias = torch.ones(k.shape[2:]), attention_weights(lens, layer=layer).b_k + w_k @ alike
    if family in NORMED:
        own = lens.plain.get_decoder().layers[layer].self_attn.k_norm.weight.detach()
        gain = own.repeat(gain.numel() // len(own)).reshape(gain.shape)

    def slow(sequence, position, head):
        alone = sum(x[sequence, position, d] * w_k[head, :, d] for d in DIMS)
        written = k[sequence, position, head] - bias[head]  # a bias is at every position
        pair = written * gain[head], alone * gain[head]  # as the key's norm leaves them
        return abs(torch.nn.functional.cosine_similarity(*pair, dim=0).item())

    for sequence, length in enumerate((12, 10)):
        for head in range(lens.n_kv_heads):
            ours = found["key_cosine", layer][sequence, head]
            assert ours[0].item() == pytest.approx(slow(sequence, 0, head), abs=1e-4)
            others = [slow(sequence, position, head) for position in range(8, length)]
            assert ours[2].item() == pytest.approx(sum(others) / len(others), abs=1e-4)


def test_all_dimensions_make_the_whole_key_of_a_model_without_biases():
    lens = lens_of("llama")
    everything = MeasuringPlan(sink_positions=(0,), dimensions={1: tuple(range(48))})
    found = read(lens, batch(), of=everything)
    torch.testing.assert_close(found["key_cosine", 1][..., 0], torch.ones(3, lens.n_kv_heads))
    assert found["logit_split", 1][..., 1].abs().max() < 1e-4
    assert list(found.values["key_cosine"]) == [1]  # only the layer that they enter
    assert own(lens_of("llama"), MeasuringPlan(sink_positions=(0,)), length=8) == []


def test_random_dimensions_are_as_many_and_drawn_by_the_generator():
    a, b, c = (
        stream(
            lens_of("llama"), batch(length=12), own(lens_of("llama"), plan(), length=12, seed=seed)
        )
        for seed in (0, 0, 1)
    )
    assert torch.equal(a["key_cosine", 1], b["key_cosine", 1])
    assert not torch.equal(a["key_cosine", 1][..., 1], c["key_cosine", 1][..., 1])
    assert torch.equal(a["key_cosine", 1][..., 0], c["key_cosine", 1][..., 0])


def test_random_dimensions_are_none_of_the_outlier_ones(monkeypatch):
    seen, keys = [], AttentionWeights.keys

    def spy(self, x, *, dimensions=None):
        seen.append(dimensions)
        return keys(self, x, dimensions=dimensions)

    monkeypatch.setattr(AttentionWeights, "keys", spy)
    wide = MeasuringPlan(sink_positions=(0,), dimensions={1: tuple(range(20))})
    read(lens_of("llama"), batch(length=12), of=wide)
    drawn = [one for one in seen if isinstance(one, torch.Tensor)]
    assert {one.shape for one in drawn} == {(5, 20)}
    assert min(int(one.min()) for one in drawn) >= 20

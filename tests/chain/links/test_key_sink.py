"""The advantage of the studied key, against slow loops."""

import functools
import math

import link_readings
import pytest
import torch
from lenses import lens_of
from link_readings import batch

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.links.key_sink import KEY_SINK
from sink_lens.chain.locate import MeasuringPlan
from sink_lens.chain.readings import control_positions

LINK = KEY_SINK
own, read = (functools.partial(one, LINK) for one in (link_readings.own, link_readings.read))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("position", [0, 3])
def test_the_advantage_is_the_logit_over_the_mean_of_the_others(family, position):
    lens, tokens = lens_of(family), batch(sequences=2, length=14, lengths=[14, 11])
    found = read(lens, tokens, position=position, keep=["rotated_q", "rotated_k"])
    layer, groups = 1, lens.n_heads // lens.n_kv_heads
    query, keys = found["kept:rotated_q", layer], found["kept:rotated_k", layer]

    def slow(sequence, head, key):
        over = []
        for i in range(key + 1, int(tokens.lengths[sequence])):
            logits = [
                float(query[sequence, head, i] @ keys[sequence, head // groups, j])
                for j in range(i + 1)
            ]
            others = logits[:key] + logits[key + 1 :]
            over.append(logits[key] - sum(others) / len(others))
        return sum(over) / len(over) if over else math.nan

    for sequence in range(2):
        for head in range(lens.n_heads):
            ours = found["logit_advantage", layer][sequence, head]
            assert ours[0].item() == pytest.approx(slow(sequence, head, position), abs=1e-4)
            controls = [
                slow(sequence, head, place) for place in control_positions(14, key=position)
            ]
            controls = [value for value in controls if not math.isnan(value)]
            assert ours[1].item() == pytest.approx(sum(controls) / len(controls), abs=1e-4)


def test_without_other_positions_or_outlier_dimensions_less_is_read():
    found = read(lens_of("llama"), batch(length=6))["logit_advantage", 0]
    assert found[..., 0].isfinite().all()
    assert found[..., 1].isnan().all()
    readings = own(lens_of("llama"), MeasuringPlan(sink_positions=(0,)), length=8)
    assert [reading.name for reading in readings] == ["positive_share", "logit_advantage"]


def test_the_share_of_positive_products_is_read_at_each_position():
    lens, tokens = lens_of("llama"), batch(sequences=2, length=10)
    two = MeasuringPlan(sink_positions=(0, 4))
    found = read(lens, tokens, of=two, keep=["q", "k"])
    q, k = found["kept:q", 0], found["kept:k", 0]
    for index, key in enumerate((0, 4)):
        for head in range(lens.n_heads):
            slow = torch.stack(
                [(q[:, i, head] * k[:, key, head // 2]).sum(-1) > 0 for i in range(key + 1, 10)]
            )
            torch.testing.assert_close(
                found["positive_share", 0][:, head, index], slow.float().mean(0)
            )


@pytest.mark.parametrize("position", [0, 8])
def test_the_floor_gives_one_key_among_equal_ones_the_threshold_of_a_sink(position):
    floor = LINK.floor(TraceConfig(model="m", threshold=0.3), 64, position)
    scores = torch.zeros(64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), -math.inf)
    scores[position:, position] = floor
    assert float(scores.softmax(1)[position + 1 :, position].mean()) == pytest.approx(0.3)

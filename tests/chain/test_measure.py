"""The scout, the measuring pass, and the location made from it."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from lenses import lens_of

from sink_lens.chain import measure as measuring
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.links import LINKS
from sink_lens.chain.locate import Location
from sink_lens.chain.measure import measure, scout, scout_and_measure
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted

CONFIG = TraceConfig(model="tiny")
OWN = [link.readings for link in LINKS]


@functools.cache
def truth():
    return planted()


@functools.cache
def planted_lens():
    return wrap(truth().model)


def tokens_with_bos(sequences=10, length=24, *, at=0, lengths=None):
    tokens = torch.randint(3, 300, (sequences, length), generator=torch.Generator().manual_seed(0))
    tokens[:, at] = truth().bos_id
    return from_tensor(tokens, lengths=None if lengths is None else torch.tensor(lengths))


def steps_of(location):
    return [(step.first_layer, step.last_layer, step.dimension) for step in location.steps]


def test_the_scout_finds_the_planted_truth_where_it_stands():
    aim = scout(planted_lens(), tokens_with_bos(), config=CONFIG)
    assert (aim.sink_position, aim.sink_found) == (0, True)
    assert steps_of(aim) == [(truth().layer, truth().layer, truth().outlier_dimension)]
    assert aim.entering_dimensions(truth().layer) == ()
    assert aim.entering_dimensions(truth().layer + 1) == (truth().outlier_dimension,)
    aim = scout(planted_lens(), tokens_with_bos(at=5), config=CONFIG)
    assert aim.sink_positions == (5,)
    assert steps_of(aim) == [(truth().layer, truth().layer, truth().outlier_dimension)]


@pytest.mark.parametrize(("at", "n_passes"), [(0, 1), (5, 2)])
def test_a_scout_passes_again_only_for_a_sink_that_is_not_first(monkeypatch, at, n_passes):
    seen, real = [], measuring.stream_batch
    counted = lambda *given, **how: seen.append(0) or real(*given, **how)  # noqa: E731
    monkeypatch.setattr(measuring, "stream_batch", counted)
    assert scout(planted_lens(), tokens_with_bos(at=at), config=CONFIG).sink_positions == (at,)
    assert len(seen) == n_passes


def test_a_given_position_and_steps_are_taken():
    aim = scout(planted_lens(), tokens_with_bos(), config=CONFIG, position=3, forced=((1, 2),))
    assert aim.sink_positions == (3,)
    assert [(step.first_layer, step.last_layer) for step in aim.steps] == [(1, 2)]
    assert sorted(aim.outliers) == [-1, 0, 1, 2, 3, 4]
    late = from_tensor(torch.randint(3, 300, (2, 100), generator=torch.Generator().manual_seed(0)))
    assert scout(planted_lens(), late, config=CONFIG, position=90).sink_positions == (90,)


def test_only_positions_that_every_sequence_has_can_be_sinks():
    assert scout(planted_lens(), tokens_with_bos(at=5), config=CONFIG).sink_found
    short = tokens_with_bos(
        at=5, lengths=[24] * 9 + [4]
    )  # the last sequence ends before position 5
    aim = scout(planted_lens(), short, config=CONFIG)
    assert (aim.sink_positions, aim.sink_found) == ((0,), False)
    panel = measure(planted_lens(), short, plan=aim.measuring_plan(range(5)), config=CONFIG)
    assert panel.find_sink_positions(min_rate=0.05) == ()


def test_tokens_too_few_for_a_score_have_no_sink():
    aim = scout(planted_lens(), tokens_with_bos(length=7), config=CONFIG)
    assert not aim.sink_found
    (step,) = (
        aim.steps
    )  # it is seen in the token itself, for there is no position 8 to compare with
    assert steps_of(aim) == [(truth().layer, truth().layer, truth().outlier_dimension)]
    assert math.isnan(step.ratio_before)
    assert math.isnan(step.ratio_after)


def test_the_norm_ratio_is_before_layer_0_and_after_each_layer():
    tokens = tokens_with_bos(sequences=2)
    aim = scout(planted_lens(), tokens, config=CONFIG)
    panel = measure(planted_lens(), tokens, plan=aim.measuring_plan(range(5)), config=CONFIG)
    with torch.no_grad():
        hidden = (
            planted_lens()
            .plain(tokens.tokens, output_hidden_states=True, use_cache=False)
            .hidden_states
        )
    for index in range(5):  # Hugging Face norms the last one
        norms = hidden[index].norm(dim=-1)
        by_hand = norms[:, 0] / norms[:, 8:].quantile(0.5, dim=-1)
        torch.testing.assert_close(panel.norm_ratio()[index], by_hand, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(panel.sink_states()[2], hidden[2][:, 0], rtol=1e-4, atol=1e-5)


def aim_first_at(location, monkeypatch):
    """Let the scout say this, unless it is sent to a position."""

    def wrong(*args, position=None, **given):
        return location if position is None else scout(*args, position=position, **given)

    monkeypatch.setattr("sink_lens.chain.measure.scout", wrong)


def test_a_scout_that_looked_elsewhere_is_put_right(monkeypatch):
    tokens = tokens_with_bos(at=5)
    right = scout_and_measure(planted_lens(), tokens, config=CONFIG, own=OWN)
    aim_first_at(
        Location(sink_positions=(0,), sink_found=False, steps=(), outliers={}), monkeypatch
    )
    reasons = []
    found = scout_and_measure(
        planted_lens(), tokens, config=CONFIG, own=OWN, tell_repeat=reasons.append
    )
    assert "5" in reasons[0]
    assert found.location == right.location
    assert found.location.sink_positions == (5,)
    assert found.sink_rate(0.3).mean() == pytest.approx(
        (4 - truth().layer) / 5, abs=0.05
    )  # all heads after the layer
    assert found.streamed.values.keys() == right.streamed.values.keys()
    torch.testing.assert_close(found["key_cosine"], right["key_cosine"], equal_nan=True)


def test_a_second_sink_that_the_scout_missed_is_read_too(monkeypatch):
    tokens = tokens_with_bos()
    tokens.tokens[:, 4] = truth().bos_id  # a second BOS takes part of the mass
    config = replace(CONFIG, threshold=0.2)
    right = scout_and_measure(planted_lens(), tokens, config=config)
    assert set(right.location.sink_positions) == {0, 4}
    aim = scout(planted_lens(), tokens, config=config)
    aim_first_at(replace(aim, sink_positions=aim.sink_positions[:1]), monkeypatch)
    assert scout_and_measure(planted_lens(), tokens, config=config).location == right.location


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_long_sequences_are_read_at_sampled_positions(family):
    lens = lens_of(family)
    tokens = from_tensor(
        torch.randint(3, 300, (2, 100), generator=torch.Generator().manual_seed(0))
    )
    panel = measure(
        lens,
        tokens,
        plan=scout(lens, tokens, config=CONFIG).measuring_plan(range(3)),
        config=CONFIG,
    )
    assert len(panel.positions) <= 66
    assert panel["std:z"].shape == (3, 2, len(panel.positions))
    assert panel["rate_by_key"].shape == (3, 2, 100)
    assert panel.norm_ratio().isfinite().all()

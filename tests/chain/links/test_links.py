"""S2 of aggregated values at the sink, over that of other positions."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from evidences import CONFIG, OWN, evidence_of, planted_evidence, random_batch
from lenses import lens_of

from sink_lens.activations.record import stream
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.evidence import gather_evidence
from sink_lens.chain.judge import link_table
from sink_lens.chain.links.aggregation_variance import AGGREGATION_VARIANCE
from sink_lens.chain.links.link import Trial
from sink_lens.chain.links.neurons_dimension import NEURONS_DIMENSION
from sink_lens.chain.links.variance_preserved import VARIANCE_PRESERVED
from sink_lens.chain.locate import MeasuringPlan
from sink_lens.chain.measure import measure, scout, scout_and_measure
from sink_lens.chain.readings import MeasuringPass, control_positions
from sink_lens.chain.setting import Maker, add_makers, make_setting
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted
from sink_lens.schema import DIRECTION, DISTANCE, SIZE
from tests.zoo import build


def test_s2_ratio_and_its_null_by_hand():
    evidence = evidence_of("llama")
    std = evidence.panel["std:z"][[0]]  # no growth: the first quarter of three layers is layer 0
    ratio = (std[..., 0] / std[..., 8:].quantile(0.5, dim=-1)).mean()
    others = std[0, :, 8:] / std[0, :, 8:].median(dim=-1, keepdim=True).values
    table = link_table(evidence, random_init=None, length=24).set_index("statistic")
    row = table.loc[["s2_ratio"]].iloc[0]
    assert row["value"] == pytest.approx(float(ratio), rel=1e-4)
    assert row["null_value"] == pytest.approx(float(others.mean(0).quantile(0.95)), rel=1e-4)


def test_padded_sequences_count_only_where_they_reach():
    lengths = [24] * 6 + [5, 12]
    table = link_table(
        evidence_of("llama", lengths=lengths), random_init=None, length=24
    ).set_index("statistic")
    assert table.loc[["s2_ratio"], "n"].iloc[0] == 7  # five tokens have no others
    assert table.loc[["s2_decay_exponent"], "n"].iloc[0] == 8
    assert table.loc[["kendall_tau"], "n"].iloc[0] == 8


def test_a_first_token_that_is_always_the_same_has_no_spread():
    table = link_table(planted_evidence(), random_init=None, length=24).set_index("statistic")
    row = table.loc[["kendall_tau"]].iloc[0]
    assert math.isnan(row["value"])
    assert (row["n"], row["is_primary"]) == (
        0,
        False,
    )  # undefined by construction, so that it decides nothing
    assert table.loc[["s2_ratio_after_w_o"], "is_primary"].all()


def test_aggregated_values_are_undefined_where_a_sequence_has_ended():
    lens, tokens = lens_of("llama"), random_batch(2, 20, lengths=[20, 9])
    plan, generator = MeasuringPlan(sink_positions=(0, 2), layers=(1,)), torch.Generator()
    one = MeasuringPass(lens=lens, plan=plan, length=20, controls=5, generator=generator)
    found = stream(lens, tokens, VARIANCE_PRESERVED.readings(one))["z_at", 1]
    assert [0, *control_positions(20, key=0, controls=5)] == [0, 8, 10, 12, 15, 17]
    assert found.isnan().any(-1).tolist() == [[False] * 6, [False, False, True, True, True, True]]


def test_the_spike_ratio_and_the_contribution_share_are_those_of_the_planted_neuron():
    evidence, truth = planted_evidence(), planted()
    at_sink = (
        evidence.panel.at_layer("neurons_at_sinks", truth.layer)[:, 0, truth.neuron].abs().mean()
    )
    elsewhere = evidence.panel.at_layer("neurons_elsewhere", truth.layer)[:, truth.neuron].mean()
    table = link_table(evidence, random_init=None, length=24).set_index("statistic")
    assert table.loc[["spike_ratio"], "value"].iloc[0] == pytest.approx(
        float(at_sink / elsewhere), rel=1e-3
    )
    (split,) = [one for one in evidence.splits if one.position == 0]
    share = float(split.terms[:, truth.neuron].mean() / split.change.mean())
    for name in ("contribution_share", "contribution_share_step_0"):
        assert table.loc[[name], "value"].iloc[0] == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_neurons_that_are_silent_elsewhere_give_a_large_finite_ratio(family):
    # ReLU neurons are often exactly 0, so that ratios of single sequences are infinite or undefined
    lens, forced = lens_of(family), ((1, 1),)
    aim = scout(lens, random_batch(), config=CONFIG, position=0, forced=forced)
    panel = measure(
        lens,
        random_batch(),
        plan=aim.measuring_plan(range(3)),
        own=OWN,
        config=CONFIG,
        forced=forced,
    )
    values = {name: dict(by_layer) for name, by_layer in panel.streamed.values.items()}
    values["neurons_elsewhere"][1] = torch.zeros_like(values["neurons_elsewhere"][1])
    panel = replace(panel, streamed=replace(panel.streamed, values=values))
    table = link_table(
        gather_evidence(lens, panel, config=CONFIG), random_init=None, length=24
    ).set_index("statistic")
    row = table.loc[["spike_ratio"]].iloc[0]
    assert (
        1e4 < row["value"] <= 1e6 * (1 + 1e-6)
    )  # a geometric mean, whose strongest neuron has the largest ratio
    assert np.isfinite(row["null_value"])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_zeroed_weights_are_zeroed_at_every_position(family):
    zoo = build("held_down", seed=1, family=family)
    lens = wrap(zoo.model)
    tokens = from_tensor(zoo.draw(4, length=28, generator=torch.Generator().manual_seed(1)))
    config = TraceConfig(model="held_down", random_init=False, controls=3)
    location = scout_and_measure(lens, tokens, config=config).location
    (maker,) = (Maker(kind="neuron", layer=one.layer, unit=one.index) for one in zoo.truth.makers)
    setting = add_makers(make_setting(lens, tokens, location=location, config=config), [maker])
    trial = Trial(setting=setting, generator=setting.make_generator(), means=None, curve=None)
    entries = next(
        one
        for one in NEURONS_DIMENSION.interventions(trial)
        if one.name.startswith("entries of down_proj")
    )

    def mass(edits):
        return float(setting.run(edits, quiet=True).mass_at(0, layers=setting.sink_layers).mean())

    before = mass([])
    assert (
        mass(entries.edits) < 0.2 * before
    )  # the neuron is silent at the sink: there it has nothing to lose
    assert all(mass(control) > 0.8 * before for control in entries.controls)


def value_averages(name, family):
    """Edit of the value averages -> share of the sink that it removes, and that its largest control removes."""
    zoo = build(name, seed=1, family=family)
    lens, tokens = (
        wrap(zoo.model),
        from_tensor(zoo.draw(8, length=28, generator=torch.Generator().manual_seed(1))),
    )
    config = TraceConfig(model=name, random_init=False, controls=3)
    location = scout_and_measure(lens, tokens, config=config).location
    setting = make_setting(lens, tokens, location=location, config=config)
    found = [
        one for one in AGGREGATION_VARIANCE.interventions(trial_of(setting)) if one.position == 0
    ]

    def removed(edits):
        mass = [
            setting.run(one, quiet=True).mass_at(0, layers=setting.sink_layers).mean()
            for one in ([], edits)
        ]
        return float(1 - mass[1] / mass[0])

    assert {one.name: one.carries for one in found} == {
        SIZE: False,
        DIRECTION: False,
        DISTANCE: True,
    }
    return {one.name: (removed(one.edits), max(map(removed, one.controls))) for one in found}


def trial_of(setting):
    curve = pd.DataFrame({"centre": [], "factor": [], "mass": []})
    return Trial(setting=setting, generator=setting.make_generator(), means=None, curve=curve)


@pytest.mark.parametrize(
    ("family", "by", "other"), [("llama", SIZE, DIRECTION), ("olmo2", DIRECTION, SIZE)]
)
def test_the_value_average_makes_the_sink_by_its_size_or_by_its_direction(family, by, other):
    found = value_averages(
        "bystanders", family
    )  # seven values a head that nothing reads make most of its variance
    for edit in (by, DISTANCE):
        assert found[edit][0] > 0.8
        assert found[edit][1] < 0.7
    assert found[other][0] < 0.2

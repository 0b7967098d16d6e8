"""How much more the super neurons fire at the sink."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from evidences import CONFIG, OWN, planted_evidence, random_batch
from lenses import lens_of

from sink_lens.chain.evidence import gather
from sink_lens.chain.judge import link_table
from sink_lens.chain.measure import measure, scout
from sink_lens.models.tiny import planted


def test_the_spike_ratio_is_the_mean_at_the_sink_over_that_elsewhere():
    evidence, truth = planted_evidence(), planted()
    at_sink = evidence.panel.at("neurons_at_sinks", truth.layer)[:, 0, truth.neuron].abs().mean()
    elsewhere = evidence.panel.at("neurons_elsewhere", truth.layer)[:, truth.neuron].mean()
    table = link_table(evidence, random_init=None, length=24).set_index("statistic")
    assert table.loc[["spike_ratio"], "value"].iloc[0] == pytest.approx(float(at_sink / elsewhere), rel=1e-3)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_neurons_that_are_silent_elsewhere_give_a_large_finite_ratio(family):
    # ReLU neurons are often exactly 0, so that ratios of single sequences are infinite or undefined
    lens, forced = lens_of(family), ((1, 1),)
    aim = scout(lens, random_batch(), config=CONFIG, position=0, forced=forced)
    panel = measure(lens, random_batch(), plan=aim.plan(range(3)), own=OWN, config=CONFIG, forced=forced)
    values = {name: dict(by_layer) for name, by_layer in panel.streamed.values.items()}
    values["neurons_elsewhere"][1] = torch.zeros_like(values["neurons_elsewhere"][1])
    panel = replace(panel, streamed=replace(panel.streamed, values=values))
    table = link_table(gather(lens, panel, config=CONFIG), random_init=None, length=24).set_index("statistic")
    row = table.loc[["spike_ratio"]].iloc[0]
    assert row["value"] == pytest.approx(1e6)
    assert np.isfinite(row["null_value"])

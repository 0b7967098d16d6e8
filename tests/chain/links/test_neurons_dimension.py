"""What the super neurons make of the outlier dimension."""

import pytest
import torch
from evidences import planted_evidence

from analyses.zoo import build
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.judge import link_table
from sink_lens.chain.links.link import Trial
from sink_lens.chain.links.neurons_dimension import NEURONS_DIMENSION
from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.setting import Maker, setting_of, with_makers
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_zeroed_weights_are_zeroed_at_every_position(family):
    zoo = build("held_down", seed=1, family=family)
    lens = wrap(zoo.model)
    tokens = from_tensor(zoo.draw(4, length=28, generator=torch.Generator().manual_seed(1)))
    config = TraceConfig(model="held_down", random_init=False, controls=3)
    location = scout_and_measure(lens, tokens, config=config).location
    (maker,) = (Maker(kind="neuron", layer=one.layer, unit=one.index) for one in zoo.truth.makers)
    setting = with_makers(setting_of(lens, tokens, location=location, config=config), [maker])
    trial = Trial(setting=setting, generator=setting.generator(), means=None, curve=None)
    entries = NEURONS_DIMENSION.interventions(trial)[0]

    def mass(edits):
        return float(setting.run(edits, quiet=True).mass_at(0, layers=setting.sink_layers).mean())

    before = mass([])
    assert mass(entries.edits) < 0.2 * before  # the neuron is silent at the sink: there it has nothing to lose
    assert all(mass(control) > 0.8 * before for control in entries.controls)


def test_the_contribution_share_is_the_planted_neurons():
    evidence = planted_evidence()
    truth = planted()
    (split,) = [one for one in evidence.splits if one.position == 0]
    table = link_table(evidence, random_init=None, length=24).set_index("statistic")
    by_hand = float(split.terms[:, truth.neuron].mean() / split.change.mean())
    assert table.loc[["contribution_share"], "value"].iloc[0] == pytest.approx(by_hand, rel=1e-4)
    assert table.loc[["contribution_share_step_0"], "value"].iloc[0] == pytest.approx(by_hand, rel=1e-4)

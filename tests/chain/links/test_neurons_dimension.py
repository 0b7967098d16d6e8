"""What the super neurons make of the outlier dimension."""

import pytest
from evidences import planted_evidence

from sink_lens.chain.judge import link_table
from sink_lens.models.tiny import planted


def test_the_contribution_share_is_the_planted_neurons():
    evidence = planted_evidence()
    truth = planted()
    (split,) = [one for one in evidence.splits if one.position == 0]
    table = link_table(evidence, random_init=None, length=24).set_index("statistic")
    by_hand = float(split.terms[:, truth.neuron].mean() / split.change.mean())
    assert table.loc[["contribution_share"], "value"].iloc[0] == pytest.approx(by_hand, rel=1e-4)
    assert table.loc[["contribution_share_step_0"], "value"].iloc[0] == pytest.approx(by_hand, rel=1e-4)

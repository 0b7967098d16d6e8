"""What W_O reads, and the values that are kept for it."""

import math

import torch
from evidences import evidence_of, planted_evidence, random_batch
from lenses import lens_of

from sink_lens.activations.record import stream
from sink_lens.chain.judge import link_table
from sink_lens.chain.links.variance_preserved import VARIANCE_PRESERVED
from sink_lens.chain.locate import MeasuringPlan
from sink_lens.chain.readings import MeasuringPass, control_positions


def test_a_first_token_that_is_always_the_same_has_no_spread():
    table = link_table(planted_evidence(), random_init=None, length=24).set_index("statistic")
    row = table.loc[["kendall_tau"]].iloc[0]
    assert math.isnan(row["value"])
    assert row["n"] == 0
    # Undefined by construction, so that it decides nothing.
    assert not row["is_primary"]
    assert table.loc[["s2_ratio_after_w_o"], "is_primary"].all()


def test_few_sequences_have_a_tau_without_an_interval():
    table = link_table(evidence_of("llama", sequences=4), random_init=None, length=24).set_index("statistic")
    row = table.loc[["kendall_tau"]].iloc[0]
    assert not math.isnan(row["value"])
    assert math.isnan(row["ci_low"])


def test_aggregated_values_are_undefined_where_a_sequence_has_ended():
    lens, tokens = lens_of("llama"), random_batch(2, 20, lengths=[20, 9])
    plan, generator = MeasuringPlan(sink_positions=(0, 2), layers=(1,)), torch.Generator()
    one = MeasuringPass(lens=lens, plan=plan, length=20, controls=5, generator=generator)
    found = stream(lens, tokens, VARIANCE_PRESERVED.readings(one))["z_at", 1]
    assert [0, *control_positions(20, key=0, controls=5)] == [0, 8, 10, 12, 15, 17]
    assert found.isnan().any(-1).tolist() == [[False] * 6, [False, False, True, True, True, True]]

"""S2 of aggregated values at the sink, over that of other positions."""

import pytest
from evidences import evidence_of

from sink_lens.chain.judge import link_table


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
    table = link_table(evidence_of("llama", lengths=lengths), random_init=None, length=24).set_index("statistic")
    assert table.loc[["s2_ratio"], "n"].iloc[0] == 7  # five tokens have no others
    assert table.loc[["s2_decay_exponent"], "n"].iloc[0] == 6  # those that reach the last position
    assert table.loc[["kendall_tau"], "n"].iloc[0] == 8

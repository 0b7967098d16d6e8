"""The tables of a run: columns, types, keys, and numbers against the panel."""

import functools
from dataclasses import replace

import pytest
import torch
from evidences import CONFIG, OWN, planted_evidence

from sink_lens.activations.record import capture
from sink_lens.chain import tables
from sink_lens.chain.locate import GrowthStep, Location
from sink_lens.chain.measure import measure
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted
from tests.tiny_families import tiny


@functools.cache
def two_keys():
    """A random Llama read at positions 0 and 3, the last sequence short."""
    lens = wrap(tiny("llama"))
    tokens = torch.randint(3, 300, (4, 20), generator=torch.Generator().manual_seed(0))
    batch = from_tensor(tokens, lengths=torch.tensor([20, 20, 20, 13]))
    aim = Location(sink_positions=(0, 3), sink_found=True, steps=(), outliers={})
    panel = measure(lens, batch, plan=aim.measuring_plan(range(3)), config=CONFIG, own=OWN)
    return lens, batch, replace(panel, location=aim)


def test_head_numbers_are_means_over_sequences():
    lens, batch, panel = two_keys()
    pattern = capture(lens, batch, sites=["pattern"], path="plain")["pattern", 1]
    table = tables.head_table(lens, panel, threshold=0.3).set_index(
        ["layer", "head", "sink_position"]
    )
    for key in (0, 3):
        for head in range(4):
            scores, masses = [], []
            for sequence, length in enumerate(batch.lengths.tolist()):
                column = pattern[sequence, head, :length, key]
                scores.append(float(column[key:].mean()))
                masses.append(float(column[key + 1 :].mean()))
            row = table.loc[(1, head, key)]
            assert row["sink_score"] == pytest.approx(sum(scores) / 4, abs=1e-5)
            assert row["sink_mass"] == pytest.approx(sum(masses) / 4, abs=1e-5)
            assert row["sink_rate"] == pytest.approx(sum(score > 0.3 for score in scores) / 4)


def test_labels_are_given_to_sinks_only():
    table = tables.head_table(planted_evidence().lens, planted_evidence().panel, threshold=0.3)
    sinks = table["sink_score"] > 0.3
    assert sinks.any()
    assert (table.loc[~sinks, "label"] == "").all()
    assert table.loc[sinks, "label"].isin(["no-op", "broadcast"]).all()


def test_alignment_is_read_where_outlier_dimensions_enter():
    table = tables.head_table(
        planted_evidence().lens, planted_evidence().panel, threshold=0.3
    ).groupby("layer")["qk_alignment"]
    after = planted().layer + 1
    assert table.apply(lambda column: bool(column.notna().all())).tolist() == [
        layer >= after for layer in range(5)
    ]
    # W_Q's first direction is the slowest pair, which the planted W_K column also is
    assert table.min().loc[after:].min() > 0.8


@pytest.mark.parametrize("site", ["z", "mlp_out", "resid_post"])
def test_s1_s2_and_norm_by_hand(site):
    lens, batch, panel = two_keys()
    x = capture(lens, batch, sites=[site], path="plain")[site, 2].flatten(2)
    table = tables.position_table(panel)
    table = table[(table["layer"] == 2) & (table["site"] == site)].set_index("position")
    for position in (0, 5, 11, 15):
        real = x[batch.lengths > position, position]
        assert table.loc[position, "s2"] == pytest.approx(float(real.std(-1).mean()), rel=1e-4)
        assert table.loc[position, "s1"] == pytest.approx(float(real.std(0).mean()), rel=1e-4)
        assert table.loc[position, "norm"] == pytest.approx(
            float(real.norm(dim=-1).mean()), rel=1e-4
        )


def test_every_outlier_is_in_the_table_however_many_there_are():
    config = replace(CONFIG, dominance_threshold=1.01, max_outliers=48, energy_frac=0.99999)
    table = tables.dimension_table(planted_evidence().panel, config=config)
    assert table.loc[table["layer"] == 0, "is_outlier"].sum() > 16


def test_other_sink_positions_have_outliers_of_their_own():
    _, _, panel = two_keys()
    values = {name: dict(by_layer) for name, by_layer in panel.streamed.values.items()}
    state = values["state"][1].clone()
    state[:, 1, 7] = 1e4  # at position 3, the second key
    values["state"][1] = state
    panel = replace(panel, streamed=replace(panel.streamed, values=values))
    outliers = tables.dimension_table(panel, config=CONFIG).query("is_outlier")
    assert outliers[["layer", "sink_position", "dimension"]].to_numpy().tolist() == [[1, 3, 7]]
    planted_ones = tables.dimension_table(planted_evidence().panel, config=CONFIG).query(
        "is_outlier"
    )
    assert planted_ones[["layer", "dimension"]].to_numpy().tolist() == [
        [layer, planted().outlier_dimension] for layer in range(planted().layer, 5)
    ]


def test_layers_have_one_row_each():
    table = tables.layer_table(planted_evidence().panel)
    assert table["layer"].tolist() == list(range(5))
    after = table[table["layer"] >= planted().layer]
    assert (after["outlier_dimension"] == planted().outlier_dimension).all()
    assert (after["dominance_ratio"] > 25).all()
    assert (after["effective_rank"] < after["effective_rank_without"]).all()
    states = planted_evidence().panel.sink_states()
    assert table.loc[3, "norm"] == pytest.approx(float(states[4].norm(dim=-1).mean()), rel=1e-5)


def test_outlier_dimensions_of_an_arm_are_sorted_by_the_layers_that_have_them():
    panel = planted_evidence().panel
    step = GrowthStep(first_layer=1, last_layer=2, ratio_before=1.0, ratio_after=9.0, dimension=7)
    outliers = {0: (7,), 1: (7, 400), 2: (12, 7), 3: (12,)}
    panel = replace(panel, location=replace(panel.location, steps=(step,), outliers=outliers))
    row = tables.condition_row(panel, condition="without", chosen=False, config=CONFIG)
    assert row["outlier_dimensions"] == "7,12,400"
    assert row["growth_steps"] == "1-2"
    assert row["chosen"] is False

"""Two runs side by side: differences, shares and outcomes by hand."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import scale
from sink_lens.edits.effects import classify_change, effect, gained_share, removed_share
from sink_lens.edits.outcome import Outcome
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.models.tiny import VOCAB_SIZE

TARGET, SINK = 5, 0


def outcome(new, old, *, layers=(1, 2), loss=None, state=None, keys=(TARGET, SINK)):
    """Two layers, one head, a sequence a number; mass by sequence at the target and the sink position."""
    mass = torch.stack([torch.tensor(new), torch.tensor(old)], dim=-1)  # batch, key
    n = len(mass)
    return Outcome(
        positions=keys,
        layers=layers,
        valid=torch.ones(n, 8).bool(),
        mass=mass[None, :, None].expand(len(layers), n, 1, 2).clone(),
        state=torch.zeros(len(layers), n, 2, 4) if state is None else state,
        loss=None if loss is None else torch.tensor(loss),
        logits=None,
        tensors={},
    )


def rng():
    return np.random.default_rng(0)


def test_an_effect_is_edited_less_baseline_in_pairs():
    before = outcome([0.1, 0.2], [0.8, 0.6], loss=[1.0, 3.0])
    after = outcome([0.3, 0.4], [0.2, 0.4], loss=[2.0, 4.0])
    table = effect(before, after, generator=rng()).set_index(["quantity", "layer", "position"])
    row = table.loc[("mass", 2, TARGET)]
    assert row[["baseline", "edited", "effect"]].tolist() == pytest.approx([0.15, 0.35, 0.2])
    assert (row["ci_low"], row["ci_high"]) == pytest.approx(
        (0.2, 0.2)
    )  # both sequences gain the same
    row = table.loc[("mass", 1, SINK)]
    assert row[["baseline", "edited", "effect"]].tolist() == pytest.approx([0.7, 0.3, -0.4])
    wide = 12.7062 * 0.2  # Student's t of -0.6 and -0.2
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((-0.4 - wide, -0.4 + wide), rel=1e-4)
    losses = table.loc["loss_nats"].iloc[0]
    assert losses[["baseline", "edited", "effect", "n"]].tolist() == [2.0, 3.0, 1.0, 2]


def test_one_row_per_quantity_layer_and_key_and_one_of_the_loss():
    before = outcome([0.1], [0.8], loss=[1.0])
    table = effect(before, before, generator=rng())
    assert table["quantity"].value_counts().to_dict() == {"mass": 4, "norm": 4, "loss_nats": 1}
    assert not table.duplicated(["quantity", "layer", "position"]).any()
    assert (table["effect"] == 0).all()
    assert table[table["quantity"] == "loss_nats"][["layer", "position"]].isna().all(axis=None)
    assert (str(table["layer"].dtype), str(table["position"].dtype)) == ("Int64", "Int64")
    without = effect(outcome([0.1], [0.8]), before, generator=rng())
    assert "loss_nats" not in set(without["quantity"])


def test_a_norm_is_that_of_the_stream_at_the_key():
    state = torch.zeros(2, 1, 2, 4)
    state[1, 0, 1] = torch.tensor([3.0, 0.0, 4.0, 0.0])  # layer 2, the sink position: norm 5
    table = effect(outcome([0.1], [0.8]), outcome([0.1], [0.8], state=state), generator=rng())
    norms = table.set_index(["quantity", "layer", "position"])["effect"]["norm"]
    assert (norms[2, SINK], norms[1, SINK]) == (5.0, 0.0)


def test_the_effect_of_an_edit_of_a_model_is_the_difference_of_its_runs(lens_of):
    ids = torch.randint(3, VOCAB_SIZE, (3, 10), generator=torch.Generator().manual_seed(1))
    before, after = (
        run_with(lens_of("llama"), ids, edits, positions=(0, 9))
        for edits in ((), scale("attn_out", 3.0, layers=[1], positions=[0]))
    )
    table = effect(before, after, generator=rng()).set_index(["quantity", "layer", "position"])
    by_hand = float((after.mass - before.mass)[2, :, :, 0].mean())
    assert table.loc[("mass", 2, 0), "effect"] == pytest.approx(by_hand, abs=1e-6)
    assert table.loc[("mass", 0, 0), "effect"] == 0.0
    assert math.isnan(table.loc[("mass", 2, 9), "effect"])  # no query comes after the last position
    assert table.loc[("mass", 2, 9), "n"] == 0
    losses = table.loc["loss_nats"].iloc[0]
    assert losses["effect"] == pytest.approx(float((after.loss - before.loss).mean()), abs=1e-6)


def test_padding_is_no_token_of_a_table(lens_of):
    """Ids at padded positions change no number, and count for none."""
    ids = torch.randint(3, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(1))
    tables = []
    for pad in (0, 7):
        batch = replace(from_tensor(ids), lengths=torch.tensor([6, 12]))
        batch.tokens[0, 6:] = pad
        runs = [
            run_with(lens_of("llama"), batch, one, positions=(8, 0))
            for one in ((), scale("attn_out", 3.0))
        ]
        tables.append(effect(*runs, generator=rng()))
    pd.testing.assert_frame_equal(*tables)
    by_position = tables[0].set_index(["quantity", "layer", "position"])["n"]
    assert (by_position["norm", 1, 8], by_position["norm", 1, 0]) == (1, 2)


def test_the_share_made_is_what_came_over_what_the_old_one_had():
    # gained 0.2 and 0.4, had 0.8 and 0.4: ratio of means 0.3 / 0.6, not the mean of 0.25 and 1
    before, after = outcome([0.0, 0.1], [0.8, 0.4]), outcome([0.2, 0.5], [0.8, 0.4])
    found = gained_share(
        before, after, target_position=TARGET, sink_position=SINK, layers=[1, 2], generator=rng()
    )
    assert found.estimate == pytest.approx(0.5)
    # residuals 0.2 - 0.5 * 0.8 and 0.4 - 0.5 * 0.4: standard error 0.2, over 0.6; t of 1 degree of freedom is 12.706
    assert (found.low, found.high) == pytest.approx((0.5 - 12.706 / 3, 0.5 + 12.706 / 3), abs=1e-3)
    assert found.n == 2


def test_the_share_removed_is_what_left_over_what_was_there():
    before, after = outcome([0.0, 0.0], [0.8, 0.4]), outcome([0.9, 0.9], [0.2, 0.1])
    found = removed_share(before, after, sink_position=SINK, layers=[2], generator=rng())
    assert found.estimate == pytest.approx(0.75)
    assert (found.low, found.high) == pytest.approx((0.75, 0.75))
    more = removed_share(after, before, sink_position=SINK, layers=[2], generator=rng())
    assert more.estimate == pytest.approx(-3.0)  # it came instead


def test_shares_are_of_the_chosen_layers():
    before, after = outcome([0.0, 0.0], [0.8, 0.4]), outcome([0.0, 0.0], [0.8, 0.4])
    after.mass[1, ..., 1] = 0  # layer 2 only
    for layers, share in (([1], 0.0), ([2], 1.0), ([1, 2], 0.5)):
        found = removed_share(before, after, sink_position=SINK, layers=layers, generator=rng())
        assert found.estimate == pytest.approx(share)


def test_a_share_of_nothing_is_undefined_and_one_of_one_sequence_has_no_interval():
    nothing = outcome([0.1, 0.1], [0.0, 0.0])
    assert math.isnan(
        removed_share(nothing, nothing, sink_position=SINK, layers=[1], generator=rng()).estimate
    )
    where = {"target_position": TARGET, "sink_position": SINK, "layers": [1], "generator": rng()}
    found = gained_share(outcome([0.0], [0.5]), outcome([0.1], [0.5]), **where)
    assert found.estimate == pytest.approx(0.2)
    assert math.isnan(found.low)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (0.0, 0.4, "removed"),  # half of 0.8 is enough
        (0.1, 0.2, "removed"),
        (0.2, 0.2, "relocated"),  # a quarter of 0.8 is enough
        (0.3, 0.6, "shared"),
        (0.1, 0.6, "unchanged"),
        (0.0, 0.9, "unchanged"),
    ],
)
def test_outcomes(new, old, expected):
    before, after = outcome([0.0], [0.8]), outcome([new], [old])
    assert (
        classify_change(before, after, target_position=TARGET, sink_position=SINK, layers=[1, 2])
        == expected
    )


@pytest.mark.parametrize(
    "other",
    [
        outcome([0.1], [0.8], keys=(5, 1)),
        outcome([0.1], [0.8], layers=(1, 3)),
        outcome([0.1, 0.1], [0.8, 0.8]),
    ],
)
def test_runs_that_are_no_pair_are_refused(other):
    run = outcome([0.1], [0.8])
    with pytest.raises(
        InputError, match="need the same: give both runs the same tokens, positions and layers"
    ):
        effect(run, other, generator=rng())

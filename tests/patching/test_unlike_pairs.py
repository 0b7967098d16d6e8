"""Pairs of prompts whose positions are not the same place: said everywhere, and compared from their ends."""

import numpy as np
import pytest
import torch
from prompt_pairs import pair

from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.edits.part import Part
from sink_lens.errors import InputError
from sink_lens.patching import attribution_patch, patch, path_patch
from sink_lens.patching.carried import unlike_places
from sink_lens.records import read_run
from tests.tiny_families import tiny

CORRECT, WRONG = [5, 6], [7, 8]
SHORT = [11, 12, 13, 14], [11, 12, 23, 14]
LONG = [15, 16, 11, 12, 17, 14], [15, 16, 11, 12, 27, 14]
"""Prompts that differ at the last position but one; the token at position 2 is another one in each."""


def batches(*pairs, lengths=None):
    width = max(len(one) for one, _ in pairs)
    rows = [[one + [0] * (width - len(one)) for one in side] for side in zip(*pairs, strict=True)]
    known = torch.tensor(lengths or [len(one) for one, _ in pairs])
    return [from_tensor(torch.tensor(side), lengths=known) for side in rows]


def difference(*rows):
    return metrics.logit_difference([CORRECT[one] for one in rows], [WRONG[one] for one in rows])


def alone(at, **options):
    one = batches((SHORT, LONG)[at])
    return patch(tiny("llama"), *one, metric=difference(at), progress=False, **options).frame


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed") / "run"
    with pytest.warns(UserWarning, match="Positions 0-5 are not the same place"):
        return patch(
            tiny("llama"),
            *batches(SHORT, LONG),
            metric=difference(0, 1),
            out=folder,
            progress=False,
        )


def test_no_sentence_is_made_of_a_mean_over_unlike_positions(mixed):
    assert not mixed.frame["alike"].any()
    assert "largest effect" not in mixed.headline
    assert "Positions 0-5" in mixed.headline
    run = read_run(mixed.folder)
    assert unlike_places(run.need("patches", columns=[]), chosen=None)[:6] == [*range(6)]
    page = mixed.report().read_text(encoding="utf-8")
    assert "Largest effect" not in page
    assert "Positions 0-5" in page


def test_negative_positions_are_those_of_each_prompts_own_end():
    found = patch(
        tiny("llama"),
        *batches(SHORT, LONG),
        metric=difference(0, 1),
        positions=[-3, -2, -1],
        progress=False,
    )
    each = [alone(at, positions=[-3, -2, -1]) for at in (0, 1)]
    assert found.frame["position"].tolist() == [-3, -2, -1] * 3
    expected = np.stack([one["effect"].to_numpy() for one in each])
    assert np.allclose(found.frame["effect"], expected.mean(0), atol=2e-6)
    assert np.abs(expected[:, 1]).min() > 1e-3
    assert "alike" not in found.frame
    near = [
        attribution_patch(
            tiny("llama"), *batches(*some), metric=difference(*rows), positions=[-2]
        ).frame["effect"]
        for some, rows in (((SHORT, LONG), (0, 1)), ((SHORT,), (0,)), ((LONG,), (1,)))
    ]
    assert np.allclose(near[0], (near[1] + near[2]) / 2, atol=2e-5)


def test_keys_count_back_too_and_what_is_outside_is_refused():
    options = {"site": "pattern", "by": ("layer", "head"), "positions": [-1], "keys": [-2]}
    found = patch(
        tiny("llama"), *batches(SHORT, LONG), metric=difference(0, 1), progress=False, **options
    )
    each = [alone(at, **options)["effect"].to_numpy() for at in (0, 1)]
    assert np.allclose(found.frame["effect"], np.mean(each, axis=0), atol=2e-6)
    with pytest.raises(InputError, match="-5"):
        patch(tiny("llama"), *batches(SHORT, LONG), metric=difference(0, 1), positions=[-5])
    with pytest.raises(InputError, match="-1"):  # an edit is of positions that all share
        patch(
            tiny("llama"),
            *batches(SHORT, LONG),
            metric=difference(0, 1),
            positions=[-1],
            put="zero",
        )


def test_pairs_of_one_length_that_differ_elsewhere_are_unlike_there_alone():
    other = [11, 22, 13, 14], [11, 32, 13, 14]
    with pytest.warns(UserWarning, match="Positions 1-2 are not"):
        found = patch(
            tiny("llama"), *batches(SHORT, other), metric=difference(0, 1), progress=False
        )
    rows = found.frame.drop_duplicates("position")
    assert rows["alike"].tolist() == [True, False, False, True]
    texts = (
        [11, 12, 13, 14],
        [21, 12, 23, 24],
    )  # another text, in which a token is the same by chance
    far = [15, 16, 17, 18], [25, 26, 27, 28]
    by_chance = patch(tiny("llama"), *batches(texts, far), metric=difference(0, 1), progress=False)
    assert "alike" not in by_chance.frame
    same = patch(tiny("llama"), *pair(length=4), metric=difference(0, 1), progress=False)
    assert "alike" not in same.frame


def test_a_place_before_pairs_part_is_the_same_in_all():
    first = [11, 12, 13], [21, 12, 13]
    second = [14, 12, 15, 13], [24, 12, 15, 13]
    with pytest.warns(UserWarning, match="Positions 2-3"):
        found = patch(
            tiny("llama"), *batches(first, second), metric=difference(0, 1), progress=False
        )
    assert found.frame.drop_duplicates("position")["alike"].tolist() == [True, True, False, False]
    assert "position 0 (differ)" in found.headline


def test_a_patch_that_changes_nothing_has_no_controls():
    frame = alone(0)
    still = frame.loc[~frame["changed"]]
    assert still["position"].isin([0, 1]).any()
    assert still[["control_effect", "over_control"]].isna().all(axis=None)
    assert (still["n_controls"] == 0).all()
    assert (still["effect"] == 0).all()
    assert frame.loc[frame["changed"], "n_controls"].ge(1).all()


def test_a_path_from_unlike_positions_is_told():
    ends = {"sender": Part(site="z", layers=(0,), positions=(2,)), "receiver": ("resid_post", 2)}
    with pytest.warns(UserWarning, match="Position 2 is not"):
        path_patch(tiny("llama"), *batches(SHORT, LONG), metric=difference(0, 1), **ends)

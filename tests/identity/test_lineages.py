import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import InputError
from sink_lens.identity.lineages import are_related, auc, calibration_table, matrix, score_table, true_positives
from sink_lens.identity.nulls import NULLS


def test_auc_by_hand():
    # Of 4 comparisons: 3 > 1, 3 > 2, 2 > 1, and 2 = 2 is half.
    assert auc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == 3.5 / 4
    assert np.isnan(auc(np.array([]), np.array([1.0])))


def test_true_positives_by_hand():
    unrelated = np.arange(100.0)
    # One of 100 may pass: the threshold is the second largest, 98.
    assert true_positives(np.array([97.0, 98.0, 98.5, 200.0]), unrelated) == 0.5
    # Of ten none may.
    assert true_positives(np.array([8.5, 9.5]), np.arange(10.0)) == 0.5
    assert np.isnan(true_positives(np.array([1.0]), np.array([])))


def pair_table(names, groups, generator):
    rows = []
    for i, a in enumerate(names):
        for j in range(i + 1, len(names)):
            is_related = groups[i] == groups[j]
            value = float(generator.standard_normal() + 10 * is_related)
            scores = {f"z_{null}": value for null in NULLS}
            rows.append({"a": a, "b": names[j], "related": is_related, "tau_bar": value / 100, **scores})
    return pd.DataFrame(rows).astype({"related": "boolean"})


def test_lineages_that_are_far_apart_are_told_apart():
    generator = np.random.default_rng(0)
    pairs = pair_table([f"m{i}" for i in range(9)], [i // 3 for i in range(9)], generator)
    pairs.loc[0, ["tau_bar", *(f"z_{null}" for null in NULLS)]] = np.nan  # no answer
    table = score_table(pairs, generator=generator)
    assert set(table["value"]) == {1.0}
    assert (table["low"] <= 1).all()
    assert (table["related"].iloc[0], table["unrelated"].iloc[0], table["unanswered"].iloc[0]) == (8, 27, 1)


def test_a_score_needs_both_kinds_of_pairs():
    pairs = pair_table(["a", "b", "c"], [0, 0, 0], np.random.default_rng(0))
    with pytest.raises(InputError, match="3 pairs are known to be related and 0 not"):
        score_table(pairs, generator=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (("run", 0), ("run", 0), True),  # two checkpoints of one training
        (("run", 0), ("run", 1), False),
        (("softmax", 0), ("headnorm", 0), None),  # one seed in two kinds of model
        (("softmax", 0), ("headnorm", 1), False),
        (("x", None), ("x", None), True),  # labels
        (("x", None), ("y", None), False),
        ((None, None), ("y", 0), None),
        (("x", None), ("y", 0), None),
    ],
)
def test_what_is_known_of_a_pair(a, b, expected):
    assert are_related(a, b) is expected
    assert are_related(b, a) is expected


def test_calibration_by_hand():
    rows = [{"a": "a", "b": str(i), "null": "analytical", "z": z} for i, z in enumerate([3.0, -4.0, 0.0])]
    frame = pd.DataFrame(rows).assign(log10_p_paper=[-2.87, -0.0, np.log10(0.5)], p_draws=np.nan)
    found = calibration_table(frame, unrelated=[("a", "0"), ("a", "1")])
    row = found.to_dict("records")[0]
    assert row["pairs"] == 2
    assert row["p_over_01"] == 0.5
    assert row["too_narrow"] == pytest.approx((25 / 2) ** 0.5)
    assert row["largest_z"] == 4.0
    assert calibration_table(frame, unrelated=[]).empty


def test_a_matrix_is_symmetric():
    pairs = pd.DataFrame({"a": ["x", "x"], "b": ["y", "z"], "tau_bar": [0.1, 0.2]})
    found = matrix(pairs, names=["x", "y", "z"], value="tau_bar")
    np.testing.assert_array_equal(found, found.T)
    assert found[0, 2] == 0.2
    assert np.isnan(found[1, 2])

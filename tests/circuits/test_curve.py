"""The curve of a circuit: its areas, and circuits judged on other pairs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from sink_lens.circuits.curve import (
    FaithfulnessJudge,
    judged_rows,
    smallest_faithful_share,
    trapezoid_area,
)
from sink_lens.edits import metrics
from sink_lens.errors import InputError

from .tiny_runs import circuit


def test_a_circuit_is_judged_on_other_pairs_and_all_edges_are_the_model():
    found = circuit()
    curve = found.evaluate([0.1, 1.0], random=2)
    first, second = found.halves
    assert not set(first) & set(second)
    whole = curve.frame[(curve.frame["by"] == "edges") & (curve.frame["share"] == 1)]
    assert whole["value"].item() == pytest.approx(
        found.runs.clean_values[second].mean().item(), abs=1e-5
    )
    nothing = found.faithfulness_judge.values_without_edges.mean()
    assert nothing == pytest.approx(found.runs.corrupted_values[second].mean().item(), abs=1e-5)
    small = curve.frame[curve.frame["share"] == 0.1]
    assert len(small[small["by"] == "random"]) == 2
    if found.faithfulness_judge.gap.excludes_zero:
        f = (small["value"] - nothing) / curve.gap.estimate
        assert small["faithfulness"].to_numpy() == pytest.approx(f.to_numpy())
    else:
        assert small["faithfulness"].isna().all()


def test_few_pairs_have_student_s_intervals():
    # gaps 2, 4 and 6: mean 4, standard error 2 / sqrt(3); t of 2 degrees of freedom is 4.3027
    clean, kept = torch.tensor([2.0, 4.0, 6.0]), np.array([[1.0, 1.0, 4.0], [2.0, 4.0, 6.0]])
    judge = FaithfulnessJudge(runs=SimpleNamespace(clean_values=clean), seed=0)
    judge.__dict__["values_without_edges"] = np.zeros(3)
    wide = 4.3027 * 2 / 3**0.5
    assert (judge.gap.low, judge.gap.high) == pytest.approx((4 - wide, 4 + wide), rel=1e-4)
    assert judge.faithfulness_table(kept)["faithfulness"].isna().all()  # 4 - 4.97 is below 0

    judge = FaithfulnessJudge(runs=SimpleNamespace(clean_values=clean + 4), seed=0)
    judge.__dict__["values_without_edges"] = np.zeros(3)
    found = judge.faithfulness_table(np.array([[3.0, 4.0, 5.0], [6.0, 8.0, 10.0]]))
    assert found["faithfulness"].tolist() == pytest.approx([0.5, 1.0])
    # residuals of a half of 6, 8, 10: all 0
    assert found["low"].tolist() == found["high"].tolist() == pytest.approx([0.5, 1.0])
    found = judge.faithfulness_table(np.array([[2.0, 4.0, 6.0]]))
    # residuals -1, 0, 1: standard error 1 / sqrt(3), over the gap of 8
    wide = 4.3027 / 3**0.5 / 8
    assert found[["low", "high"]].to_numpy() == pytest.approx(
        np.array([[0.5 - wide, 0.5 + wide]]), rel=1e-4
    )


def test_sizes_by_the_scores_of_a_given_circuit_are_judged_on_pairs_that_chose_none():
    found = circuit(edges=40)
    given = replace(found, rule="given")
    assert given.evaluate([0.2, 0.5], random=1).frame.equals(
        found.evaluate([0.2, 0.5], random=1).frame
    )
    assert given.faithfulness_judge.runs.n_pairs == 2 * found.faithfulness_judge.runs.n_pairs


def test_the_area_of_a_straight_line():
    share = np.array([0.001, 0.01, 0.1, 1.0])
    assert trapezoid_area(share, share) == pytest.approx((1 - 0.001**2) / 2)
    assert trapezoid_area(share, np.array([0.0, 1.0, 2.0, 3.0]), logarithmic=True) == pytest.approx(
        1.5
    )
    assert np.isnan(trapezoid_area(share[:1], share[:1]))


def test_areas_are_those_of_the_table():
    found = circuit().evaluate([0.1, 0.5, 1.0], random=1)
    frame = pd.DataFrame({"by": "edges", "share": [0.1, 0.5, 1.0], "faithfulness": [0.2, 0.9, 1.0]})
    by_hand = replace(found, frame=frame)
    # trapezoids of 0.4 and 0.5 width: (0.2 + 0.9) / 2 * 0.4 + (0.9 + 1) / 2 * 0.5
    (areas,) = by_hand.areas.to_dict("records")
    assert areas["cpr"] == pytest.approx(0.22 + 0.475)
    assert areas["cmd"] == pytest.approx((0.8 + 0.1) / 2 * 0.4 + 0.1 / 2 * 0.5)


@pytest.mark.parametrize("sizes", [(), (0.0, 1.0), (0.5, 1.1)])
def test_sizes_that_are_no_shares_are_refused(sizes):
    with pytest.raises(InputError, match="need shares of all edges, above 0 and at most 1"):
        circuit().evaluate(sizes)


@pytest.mark.parametrize(
    ("f", "low", "expected"),
    [
        (
            [1.976, 0.0, 0.998, 1.0],
            [1.9, -0.1, 0.95, 1.0],
            0.05,
        ),  # 1% keeps twice the metric, 2% nothing
        (
            [0.9, 0.9, 0.9, 1.0],
            [0.7, 0.85, 0.85, 1.0],
            0.02,
        ),  # the interval of 1% reaches below 80%
        ([0.9, 1.3, 0.9, 1.0], [0.85, 1.2, 0.85, 1.0], 0.05),  # 2% overshoots
        ([0.9, 0.9, 0.9, 0.7], [0.85, 0.85, 0.85, 0.6], np.nan),
    ],
)
def test_a_size_carries_the_metric_if_every_larger_one_does(f, low, expected):
    frame = pd.DataFrame(
        {"by": "edges", "share": [0.01, 0.02, 0.05, 1.0], "faithfulness": f, "low": low}
    )
    assert smallest_faithful_share(frame.iloc[::-1]) == pytest.approx(expected, nan_ok=True)


def test_the_nodes_of_a_circuit_are_those_that_its_edges_touch():
    found = circuit(metric=metrics.sink_mass(0, layers=(0,)), ablation="mean_all", edges=1000)
    curve = found.evaluate(sizes=(1.0,), random=0, nodes=False, progress=False).frame
    assert curve["nodes"].tolist() == [
        1 + found.graph.n_heads
    ]  # the input and all heads of layer 0
    nothing = np.zeros(found.graph.n_edges, dtype=bool)
    rows = judged_rows(found.faithfulness_judge, [{"by": "none"}], [nothing])
    assert rows[["connected", "nodes"]].to_numpy().tolist() == [[0, 0]]

"""The row of a circuit run's summary, in groups of fields."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from .checks import CONFIRMED, make_check
from .choice import choose_edges
from .circuit import Circuit
from .curve import FaithfulnessJudge, faithfulness_fields, smallest_faithful_share
from .scores import Scores
from .stability import jaccard


def summary_row(
    circuit: Circuit,
    *,
    seen: bool,
    curve: pd.DataFrame,
    gap: Mapping[str, float],
    areas: pd.DataFrame,
    sink: Mapping[str, Any],
    check: pd.DataFrame | None,
    nodes: pd.DataFrame | None,
    core: pd.DataFrame | None,
    judge: FaithfulnessJudge,
) -> dict[str, Any]:
    """Return the row of the summary but for the left sum; ``schema/circuit.toml`` says what each field is.

    ``check`` and ``nodes`` are real patches; ``judge`` judges the ``core``.
    """
    answer, probability = circuit.first_answer
    return {
        **circuit.choice_fields,
        "seen": seen,
        **_faithfulness_fields(curve),
        "gap": gap["estimate"],
        "gap_low": gap["low"],
        "gap_high": gap["high"],
        **_score_fields(circuit.scores),
        **areas.set_index("by").loc["edges"].to_dict(),
        **_stability_fields(circuit),
        **sink,
        **_real_patch_fields(circuit, check, nodes),
        **_core_fields(circuit, core, judge),
        "answer": answer,
        "answer_probability": probability,
    }


def _stability_fields(circuit: Circuit) -> dict[str, Any]:
    first, second = (
        choose_edges(
            circuit.graph,
            circuit.scores.values[rows].mean(0),
            circuit.size,
            how=circuit.choice,
            outputs=circuit.outputs,
        )
        for rows in circuit.halves
    )
    stable = int((circuit.inclusion[circuit.chosen] >= 0.95).sum())
    return {"jaccard_halves": jaccard(first, second), "stable_edges": stable}


def _faithfulness_fields(curve: pd.DataFrame) -> dict[str, Any]:
    by = curve.drop_duplicates("by").set_index("by").to_dict("index")
    row = faithfulness_fields(by["circuit"], "")
    row |= faithfulness_fields(by["without"], "without_")
    row |= faithfulness_fields(by["as_many"], "as_many_")
    row["swapped_faithfulness"] = curve.loc[curve["by"].eq("swapped"), "faithfulness"].mean()
    of_edges = curve.loc[curve["by"].eq("edges")].sort_values("faithfulness", ascending=False)
    most, share = of_edges.to_dict("records")[0], smallest_faithful_share(curve)
    row["share_at_80"] = share if share < 1 else np.nan
    return row | {"most_kept": most["faithfulness"], "most_kept_at": most["share"]}


def _score_fields(scores: Scores) -> dict[str, float]:
    errors = scores.completeness_by_pair["error"].abs().to_numpy(float)
    return {
        "clean": float(scores.clean.mean()),
        "corrupted": float(scores.corrupted.mean()),
        "completeness": scores.completeness_ratio,
        "completeness_error_median": float(np.median(errors)),
        "completeness_error_largest": float(errors.max()),
        "steps_mean": float(scores.steps.mean()),
    }


def _real_patch_fields(
    circuit: Circuit, check: pd.DataFrame | None, nodes: pd.DataFrame | None
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("rank_correlation", "missed", "weakest"), np.nan)
    row |= dict.fromkeys(
        ("outside_over", "outside_sampled", "outside_at_most", "patched_nodes"), -1
    )
    row["unseen_nodes"] = ""
    if check is not None:
        made = make_check(circuit.scores, circuit.chosen, check)
        row |= {name: getattr(made, name) for name in ("rank_correlation", "missed", "weakest")}
        row["outside_over"], row["outside_sampled"] = made.outside_counts
        row["outside_at_most"] = made.most_outside
    if nodes is not None:
        unseen = nodes.loc[nodes["unseen"]].sort_values("exact", key=abs, ascending=False)
        row |= {"patched_nodes": len(nodes), "unseen_nodes": " ".join(unseen["node"].tolist())}
    return row


def _core_fields(
    circuit: Circuit, core: pd.DataFrame | None, judge: FaithfulnessJudge
) -> dict[str, Any]:
    if core is None:
        names = ("core", "confirmed", "together", "undecided", "contingent")
        return dict.fromkeys([f"{name}_edges" for name in names], -1)
    inside, together, undecided = (
        core[name].to_numpy(bool) for name in ("core", "together", "undecided")
    )
    does = np.abs(core["exact"].to_numpy(float)) >= CONFIRMED * abs(circuit.difference)
    mask = np.isin(circuit.graph.names, core.loc[inside, "edge"].to_numpy())
    (alone,) = judge.faithfulness_table(judge.metric_values(mask[None])).to_dict("records")
    return {
        "core_edges": int(inside.sum()),
        "confirmed_edges": int((does & ~together).sum()),
        "together_edges": int(together.sum()),
        "undecided_edges": int(undecided.sum()),
        "contingent_edges": int((~inside & ~undecided).sum()),
    } | faithfulness_fields(alone, "core_")

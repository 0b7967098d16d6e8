"""The six links of the chain: what is measured, against which nulls, and by which criterion it holds.

A link holds if the interval of its primary statistic lies over a stated floor and over every null; it fails if
the interval lies under the floor or under a null, or if what it would be measured on is not there (no growth step,
no outlier dimension); else, and wherever it cannot be measured, it is undecided. The randomly initialised twin is
one draw, and one draw is not a control: its values stand beside the others and decide nothing. Where the links
are cut too (``cuts.py``), a link holds only if measuring and cutting agree.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from ..models.lens import LensModel
from . import evidence as measured
from .config import TraceConfig
from .evidence import Evidence, Statistic
from .neurons import split_layers
from .panel import Panel

Verdict = Literal["holds", "fails", "undecided"]

CUT_FLOOR = 0.25
"""A cut shows the link where it makes or removes more than this share of the sink."""
_LEAST_SINK = 0.05
"""Where the model's own sink has less attention than this, a share of it means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One arrow of the chain."""

    name: str
    question: str
    floor: Callable[[TraceConfig, int], float]
    """What the primary statistic must lie over, from the configuration and the length."""
    measure: Callable[[Evidence, np.random.Generator], list[Statistic]]
    """The statistics, the primary one first."""


def verdict(statistic: Statistic, *, floor: float) -> Verdict:
    """Holds, fails or undecided, from the interval, the floor and the nulls; see the module's docstring."""
    low, high = statistic.interval.low, statistic.interval.high
    if math.isnan(statistic.interval.estimate):
        return "fails" if statistic.absent else "undecided"
    bars = [floor, *(null for null in statistic.nulls.values() if not math.isnan(null))]
    if all(low > bar for bar in bars):
        return "holds"
    if any(high < bar for bar in bars):
        return "fails"
    return "undecided"


def cut_verdict(row: Mapping[Hashable, Any]) -> Verdict:
    """What the cut of a link says, from its row of the effects: the interval against the floor and the controls."""
    if not row["baseline_mass_old"] >= _LEAST_SINK or math.isnan(row["ci_low"]):
        return "undecided"
    bars = [CUT_FLOOR, *([] if math.isnan(row["control_share"]) else [row["control_share"]])]
    if all(row["ci_low"] > bar for bar in bars):
        return "holds"
    return "fails" if any(row["ci_high"] < bar for bar in bars) else "undecided"


def both(measured: Verdict, cut: Verdict) -> Verdict:
    """A link holds only if measuring and cutting agree that it does; it fails where either fails."""
    if measured == cut == "holds":
        return "holds"
    return "fails" if "fails" in (measured, cut) else "undecided"


def link_values(evidence: Evidence) -> pd.DataFrame:
    """The value of every statistic of every link: link, statistic, value. Of the random twin, these are nulls."""
    evidence = replace(evidence, n_resamples=2)  # the intervals are not looked at, and fewer cannot be drawn
    rng = np.random.default_rng(evidence.config.seed)
    rows = [(link.name, found.name, found.interval.estimate) for link in LINKS for found in link.measure(evidence, rng)]
    return pd.DataFrame(rows, columns=["link", "statistic", "value"])


def link_table(
    evidence: Evidence, *, twin: pd.DataFrame | None, effects: pd.DataFrame | None = None, length: int
) -> pd.DataFrame:
    """One row per (link, statistic, null): value, interval, null, criterion and the link's verdict.

    The random twin's value of every statistic (``link_values``) is a row of its own, and so is the share of the sink
    that the link's cut makes or removes (``cut_share``), where there is one. ``measured`` is the verdict of the primary
    statistic, ``cut`` that of the cut, and ``verdict`` that of both; they stand on all rows of a link.

    Args:
        evidence: what was measured.
        twin: the random twin's values.
        effects: the cuts; None where none were made, and the verdict is the measured one.
        length: positions of the sequences.
    """
    cuts = {} if effects is None else {row["link"]: row for row in _rows(effects) if row["is_primary"]}
    of_twin = {} if twin is None else {(row["link"], row["statistic"]): row["value"] for row in _rows(twin)}
    rng = np.random.default_rng(evidence.config.seed)
    rows = []
    for link in LINKS:
        floor = link.floor(evidence.config, length)
        found = link.measure(evidence, rng)
        primary = found[0]
        measured_verdict = verdict(primary, floor=floor)
        cut = cuts.get(link.name)
        cut_says = None if cut is None else cut_verdict(cut)
        decided = measured_verdict
        if effects is not None and len(effects):
            decided = both(measured_verdict, cut_says or "undecided")
        criterion = _criterion(primary, floor=floor)
        common = {"verdict": decided, "measured": measured_verdict, "cut": cut_says or "not cut"}
        if cut is not None:
            criterion += f", and that of the cut over {CUT_FLOOR:.0%} and over its controls"
            rows.append(_cut_row(link.name, cut, criterion=criterion) | common)
        for statistic in found:
            nulls = {**statistic.nulls, **statistic.references}
            if (link.name, statistic.name) in of_twin:
                nulls["random_twin"] = of_twin[link.name, statistic.name]
            for null_name, null_value in (nulls or {"none": math.nan}).items():
                rows.append(
                    {
                        "link": link.name,
                        "statistic": statistic.name,
                        "value": statistic.interval.estimate,
                        "ci_low": statistic.interval.low,
                        "ci_high": statistic.interval.high,
                        "null_name": null_name,
                        "null_value": null_value,
                        "criterion": criterion,
                        "is_primary": statistic is primary,
                        "n": statistic.interval.n,
                    }
                    | common
                )
    return pd.DataFrame(rows)


def _cut_row(link: str, cut: Mapping[Hashable, Any], *, criterion: str) -> dict[str, Any]:
    return {
        "link": link,
        "statistic": "cut_share",
        "value": cut["share"],
        "ci_low": cut["ci_low"],
        "ci_high": cut["ci_high"],
        "null_name": "matched_controls",
        "null_value": cut["control_share"],
        "criterion": criterion,
        "is_primary": False,
        "n": cut["n"],
    }


def _rows(frame: pd.DataFrame) -> list[dict[Hashable, Any]]:
    return frame.to_dict("records")


def _criterion(primary: Statistic, *, floor: float) -> str:
    text = f"holds if the interval of {primary.name} is over {floor:.3g}"
    if primary.nulls:
        text += f" and over {', '.join(primary.nulls)}"
    return f"{text} (here: {primary.note})" if primary.note else text


def _needed_advantage(config: TraceConfig, length: int) -> float:
    """Nats over the other keys' logit with which one key takes the threshold's mass among half the length's keys."""
    return math.log(config.threshold / (1 - config.threshold) * length / 2)


LINKS = (
    Link(
        name="aggregation_variance",
        question="is the aggregated value of the sink token more spread than that of other tokens?",
        floor=lambda config, length: 1.25,
        measure=measured.aggregation_variance,
    ),
    Link(
        name="variance_preserved",
        question="does W_O read most from the inputs in which the sink token is spread (Kendall tau)?",
        floor=lambda config, length: 0.1,
        measure=measured.variance_preserved,
    ),
    Link(
        name="variance_neurons",
        question="do the super neurons fire at the sink token only?",
        floor=lambda config, length: 10.0,
        measure=measured.variance_neurons,
    ),
    Link(
        name="neurons_dimension",
        question="do the super neurons make the outlier dimension?",
        floor=lambda config, length: 0.5,
        measure=measured.neurons_dimension,
    ),
    Link(
        name="dimension_key",
        question="does the outlier dimension make the sink's key?",
        floor=lambda config, length: 0.5,
        measure=measured.dimension_key,
    ),
    Link(
        name="key_sink",
        question="does every query meet that key with an advantage that makes a sink?",
        floor=_needed_advantage,
        measure=measured.key_sink,
    ),
)
"""The chain, in its order."""


def gather(lens: LensModel, panel: Panel, *, config: TraceConfig) -> Evidence:
    """The evidence of a panel, with its growth steps split by neurons."""
    return Evidence(
        lens=lens, panel=panel, splits=split_layers(lens, panel, super_share=config.super_share), config=config
    )

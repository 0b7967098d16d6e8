"""Which links hold: the verdict of what is measured, of the intervention, and of both.

A link holds if the interval of its primary statistic lies over a stated floor and over every null; it fails if
the interval lies under the floor or under a null, or if what it would be measured on is not there (no growth step,
no outlier dimension); else, and wherever it cannot be measured, it is undecided. The random-init baseline is
one draw, and one draw is not a control: its values stand beside the others and decide nothing. Where the links
are intervened on too, a link holds only if measuring and intervening agree. Where the model has no sink, no link leads
to one: every link is not applicable, and what was measured is still there.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from ..schema import INTERVENTION_FLOOR, LEAST_SINK
from .config import EVERY_INTERVENTION
from .evidence import Evidence, Statistic
from .links import LINKS
from .links.link import Link

Verdict = Literal["holds", "fails", "undecided", "not applicable"]


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


def intervention_verdict(row: Mapping[Hashable, Any], *, floor: float = INTERVENTION_FLOOR) -> Verdict:
    """What an intervention says, from its row of the effects: the interval against the floor and the controls.

    Undecided where the sink has hardly more attention than uniform attention would give it.
    """
    if not row["baseline_sink_mass"] - row["uniform_sink_mass"] >= LEAST_SINK or math.isnan(row["ci_low"]):
        return "undecided"
    bars = [floor, *([] if math.isnan(row["control_share"]) else [row["control_share"]])]
    if all(row["ci_low"] > bar for bar in bars):
        return "holds"
    return "fails" if any(row["ci_high"] < bar for bar in bars) else "undecided"


def both(measured: Verdict, intervened: Verdict) -> Verdict:
    """A link holds only if measuring and intervening agree that it does; it fails where either fails."""
    if measured == intervened == "holds":
        return "holds"
    return "fails" if "fails" in (measured, intervened) else "undecided"


def chain_table(links: Sequence[Link] = LINKS) -> pd.DataFrame:
    """One row a link, in order: order, link, source, target, sentence, question."""
    columns = ["order", "link", "source", "target", "sentence", "question"]
    rows = [(i, one.name, one.source, one.target, one.sentence, one.question) for i, one in enumerate(links)]
    return pd.DataFrame(rows, columns=columns)


def link_values(evidence: Evidence, *, links: Sequence[Link] = LINKS) -> pd.DataFrame:
    """The value of every statistic of every link: link, statistic, value; nulls, if of the random-init baseline."""
    evidence = replace(evidence, n_resamples=2)  # the intervals are not looked at, and fewer cannot be drawn
    rng = np.random.default_rng(evidence.config.seed)
    found = [(link.name, statistic) for link in links for statistic in link.statistics(evidence, rng)]
    rows = [(name, statistic.name, statistic.interval.estimate) for name, statistic in found]
    return pd.DataFrame(rows, columns=["link", "statistic", "value"])


def link_table(
    evidence: Evidence,
    *,
    random_init: pd.DataFrame | None,
    effects: pd.DataFrame | None = None,
    length: int,
    links: Sequence[Link] = LINKS,
) -> pd.DataFrame:
    """One row per (link, statistic, null): value, interval, null, criterion and the link's verdict.

    The random-init baseline's value of every statistic (``link_values``) is a row of its own, and so is the share of
    the sink that the link's intervention makes or removes (``intervention_share``), where there is one. ``measured`` is
    the verdict of the primary statistic, ``intervened`` that of the intervention, ``verdict`` that of both, on all rows
    of a link; without a sink it is not applicable. ``floors`` says whether the user moved a floor or threshold: the
    error rates of the verdicts were measured with the defaults.

    Args:
        evidence: what was measured.
        random_init: the random-init baseline's values.
        effects: the interventions; None where none were made, and the verdict is the measured one.
        length: positions of the sequences.
        links: the chain.
    """
    intervened = {} if effects is None else {row["link"]: row for row in _rows(effects) if row["is_primary"]}
    of_baseline = (
        {} if random_init is None else {(row["link"], row["statistic"]): row["value"] for row in _rows(random_init)}
    )
    config = evidence.config
    own = config.own_floors
    effect_floor = own.get(EVERY_INTERVENTION, INTERVENTION_FLOOR)
    rng = np.random.default_rng(config.seed)
    rows = []
    for link in links:
        floor = own.get(link.name, link.floor(config, length))
        found = link.statistics(evidence, rng)
        primary = found[0]
        measured_verdict = verdict(primary, floor=floor)
        effect = intervened.get(link.name)
        effect_says = None if effect is None else intervention_verdict(effect, floor=effect_floor)
        decided = measured_verdict
        if effects is not None and len(effects):
            decided = both(measured_verdict, effect_says or "undecided")
        if evidence.panel.lacks_sink:
            decided = "not applicable"
        criterion = _criterion(primary, floor=floor)
        common = {"verdict": decided, "measured": measured_verdict, "intervened": effect_says or "no intervention"}
        common["floors"] = "not calibrated" if config.moved else "calibrated"
        if effect is not None:
            criterion += f", and that of the intervention over {effect_floor:.0%} and over its controls"
        if config.moved:
            criterion += f"; floors not calibrated: {', '.join(config.moved)} moved"
        if effect is not None:
            rows.append(_effect_row(link.name, effect, criterion=criterion) | common)
        for statistic in found:
            nulls = {**statistic.nulls, **statistic.references}
            if (link.name, statistic.name) in of_baseline:
                nulls["random_init"] = of_baseline[link.name, statistic.name]
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


def _effect_row(link: str, effect: Mapping[Hashable, Any], *, criterion: str) -> dict[str, Any]:
    return {
        "link": link,
        "statistic": "intervention_share",
        "value": effect["share"],
        "ci_low": effect["ci_low"],
        "ci_high": effect["ci_high"],
        "null_name": "matched_controls",
        "null_value": effect["control_share"],
        "criterion": criterion,
        "is_primary": False,
        "n": effect["n"],
    }


def _rows(frame: pd.DataFrame) -> list[dict[Hashable, Any]]:
    return frame.to_dict("records")


def _criterion(primary: Statistic, *, floor: float) -> str:
    text = f"holds if the interval of {primary.name} is over {floor:.3g}"
    if primary.nulls:
        text += f" and over {', '.join(primary.nulls)}"
    return f"{text} (here: {primary.note})" if primary.note else text

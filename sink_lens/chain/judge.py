"""The verdict on each link, from three answers.

1. Take the link's primary statistic with its interval over sequences, its floor and its nulls. The random-init baseline
   is one draw, and one draw is not a control: its values stand beside the others and decide nothing.
2. *Present*: yes if the interval lies over the floor and over every null; no if it lies under the floor or under a
   null, or if what it would be measured on is not there (without a sink: undecided); not asked in a hybrid that has no
   layer to ask it in. Not applicable if there is no outlier dimension to be read, or to be written without a growth
   step; and without a sink, if the link before is not present (``can_start`` excepted).
3. *Necessary or sufficient*: take the share of the sink that the link's intervention removes, (A - A_edited) / A, or
   makes. Yes if its interval is over a floor and over the largest control; no if it is under ``LEAST_SHARE`` or under a
   control; *in part* between. Undecided where the sink is weak, or the edit takes the model off its distribution.
4. *Carries*: the same, with a floor of its own (``ANOTHER_PATH``). For the first link the value average is moved to the
   ordinary distance from the mean; from neurons to dimensions the dimensions are mean ablated; the other four ask the
   ablation of step 3 once more: *in part* then goes up to this floor.
5. Without a sink steps 3 and 4 are not applicable, and what was measured is still there. Without interventions they are
   not tested, and the verdict is *present, not tested* or *absent*: a link holds only where an intervention says so.
   Where the sequences are too short to tell a sink, no answer is no, and steps 3 and 4 are undecided. Absent parts that
   leave nothing to edit answer no to all three.
6. Look the three answers up in ``DERIVED``. No link is failed because another one is absent.
7. A link about single dimensions hangs on the basis of the stream, which a rotation changes without changing the
   function. If it fails or has no source where no dimension dominates, ask the same of the directions that the token
   has (``Link.own_direction``). If they hold, or hold in part, the link is *not in this basis*.

Every other answer of yes, no or in part (where steps 3 and 4 share an ablation, the verdict) is given only if its
interval lies wholly on one side of its bars: more sequences can settle an open answer, and do not turn over a settled
one. The links are those of arXiv 2605.06611; the rules are ours, and their error rates are in ``docs/zoo.md``.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from ..schema import (
    ANOTHER_PATH,
    DERIVED,
    INTERVENTION_FLOOR,
    LEAST_SHARE,
    LEAST_SINK,
    NOT_IN_BASIS,
    OWN_RATIO,
    QUESTIONS,
    UNTESTED,
    column_names,
)
from ..stats import Interval
from ..text import as_ranges
from .config import EVERY_INTERVENTION
from .evidence import Evidence, Statistic
from .links import LINKS
from .links.link import Link
from .page.words import is_off_distribution

Verdict = Literal[
    "holds", "in part", "fails", "not in this basis", "undecided", "not applicable", "not asked"
]
Answer = Literal["yes", "in part", "no", "undecided", "not applicable", "not tested", "not asked"]
_MEASURED = {"holds": "present", "fails": "absent"}
"""Verdict on a statistic -> what it shows of its link."""


class Answers(NamedTuple):
    """Is the link present, is it necessary or sufficient, and does it carry the sink?"""

    present: Answer
    necessary_or_sufficient: Answer
    carries: Answer


def statistic_verdict(statistic: Statistic, *, floor: float) -> Verdict:
    """Judge by step 2; without a value it *fails* if its parts are absent."""
    if math.isnan(statistic.interval.estimate):
        return "fails" if statistic.absent else "undecided"
    bars = [bar for bar in (floor, *statistic.nulls.values()) if not math.isnan(bar)]
    if all(statistic.interval.low > bar for bar in bars):
        return "holds"
    return "fails" if any(statistic.interval.high < bar for bar in bars) else "undecided"


def intervention_verdict(
    row: Mapping[Hashable, Any], *, floor: float = INTERVENTION_FLOOR, part_until: float = 0.0
) -> Verdict:
    """Judge a ``row`` of ``effects`` by step 3; *in part* ends at ``part_until`` if that is above the floor."""
    over = row["baseline_sink_mass"] - row["uniform_sink_mass"]
    if not over >= LEAST_SINK or is_off_distribution(row):
        return "undecided"
    low, high, control = row["ci_low"], row["ci_high"], row.get("control_largest", math.nan)
    nothing = max(min(LEAST_SHARE, floor), -math.inf if math.isnan(control) else control)
    if low > max(floor, nothing):
        return "holds"
    if low > nothing and high < max(floor, part_until):
        return "in part"
    return "fails" if high < nothing else "undecided"


def derive_verdict(answers: Answers) -> Verdict:
    """Return the verdict of the first row of ``DERIVED`` that fits."""
    for *pattern, decided in DERIVED:
        if all(want in ("any", one) for want, one in zip(pattern, answers, strict=True)):
            return decided  # type: ignore[return-value]  # one of the verdicts, by a test
    raise AssertionError(answers)


_ANSWER: Mapping[str, Answer] = {
    "holds": "yes",
    "in part": "in part",
    "fails": "no",
    "undecided": "undecided",
}
Effect = Mapping[Hashable, Any] | None
"""A row of ``effects``; None if there was nothing to intervene on."""


def link_answers(
    primary: Statistic,
    *,
    floor: float,
    effects: tuple[Effect, Effect] | None,
    has_sink: bool,
    starts: bool = True,
    can_tell_sinks: bool = True,
    effect_floor: float = INTERVENTION_FLOOR,
) -> Answers:
    """Answer the three questions about one link.

    Args:
        primary: the link's primary statistic.
        floor: what its interval must lie over.
        effects: the rows of the link's intervention and of the mean ablation of what it leads to; None if no
            interventions were made.
        has_sink: if not, only *present* has an answer.
        starts: what the link starts from is there, in a model without a sink.
        can_tell_sinks: the sequences can show a sink at all.
        effect_floor: what the interval of the intervention's share must lie over.
    """
    present: Answer = _ANSWER[statistic_verdict(primary, floor=floor)]
    if not primary.asked:
        asked: Answer = "not asked" if has_sink else "not applicable"
        return Answers("not asked", asked, asked)
    if primary.no_source or not starts:
        return Answers("not applicable", "not applicable", "not applicable")
    if not has_sink:  # neurons that fire without a growth step are not looked for
        measured: Answer = "undecided" if primary.absent else present
        return Answers(measured, "not applicable", "not applicable")
    if not can_tell_sinks:
        untold: Answer = "not tested" if effects is None else "undecided"
        return Answers("yes" if present == "yes" else "undecided", untold, untold)
    if effects is None:
        return Answers(present, "not tested", "not tested")

    def answer(row: Effect, least: float, part_until: float = 0.0) -> Answer:
        if row is None:  # what is not there cannot make the sink that is
            return "no" if present == "no" else "undecided"
        return _ANSWER[intervention_verdict(row, floor=least, part_until=part_until)]

    necessary, carries = effects
    # One interval for both questions: between their floors it is in part, wherever the lower floor lies in it.
    part_until = ANOTHER_PATH if necessary is carries else 0.0
    return Answers(
        present, answer(necessary, effect_floor, part_until), answer(carries, ANOTHER_PATH)
    )


def chain_table(links: Sequence[Link] = LINKS) -> pd.DataFrame:
    rows = [
        (order, link.name, link.source, link.target, link.sentence, link.question)
        for order, link in enumerate(links)
    ]
    return pd.DataFrame(rows, columns=column_names("trace", "chain"))


def link_statistic_values(evidence: Evidence, *, links: Sequence[Link] = LINKS) -> pd.DataFrame:
    """Compute the value of every statistic of every link, without intervals."""
    # the intervals are not looked at, and fewer draws are refused
    evidence, rng = replace(evidence, n_resamples=2), np.random.default_rng(evidence.config.seed)
    rows = [
        (link.name, statistic.name, statistic.interval.estimate)
        for link in links
        for statistic in link.statistics(evidence, rng)
    ]
    return pd.DataFrame(rows, columns=["link", "statistic", "value"])


def link_table(
    evidence: Evidence,
    *,
    random_init: pd.DataFrame | None,
    effects: pd.DataFrame | None = None,
    length: int,
    links: Sequence[Link] = LINKS,
) -> pd.DataFrame:
    """Judge every link: one row per (link, statistic, null).

    Rows of their own have the random-init baseline's value of a statistic (``link_statistic_values``), and the share of
    the sink that the link's intervention moves (``intervention_share``). Without ``effects`` no interventions were
    made.
    """
    made: list[dict[Hashable, Any]] = [] if effects is None else effects.to_dict("records")
    necessary = {row["link"]: row for row in made if row["is_primary"]}
    carrying = {row["link"]: row for row in made if row.get("carries", False)}
    by_edit = {row["edit"]: row for row in made}
    of_baseline = {}
    if random_init is not None:
        of_baseline = random_init.set_index(["link", "statistic"])["value"].to_dict()
    config = evidence.config
    own = config.floors_by_link
    effect_floor = own.get(EVERY_INTERVENTION, INTERVENTION_FLOOR)
    rng = np.random.default_rng(config.seed)
    has_sink, told = not evidence.panel.lacks_sink, evidence.panel.can_tell_sinks
    rows, starts = [], True
    for link in links:
        floor = own.get(
            link.name, link.floor(config, length, evidence.panel.location.sink_position)
        )
        found = link.statistics(evidence, rng)
        primary = found[0]
        by_statistic = statistic_verdict(primary, floor=floor)
        measured = _MEASURED.get(by_statistic, by_statistic) if primary.asked else "not asked"
        effect = necessary.get(link.name)
        answers = link_answers(
            primary,
            floor=floor,
            effects=(effect, carrying.get(link.name)) if made else None,
            has_sink=has_sink,
            starts=has_sink or starts or (link.can_start and measured == "present"),
            can_tell_sinks=told,
            effect_floor=effect_floor,
        )
        starts = answers.present == "yes"
        asked = made or not has_sink or answers.present == "not applicable"
        decided = (
            derive_verdict(answers) if asked else UNTESTED.get(answers.present, answers.present)
        )
        turned = next((one for one in found if one.name == OWN_RATIO), None)
        if made and has_sink and turned is not None and decided in ("fails", "not applicable"):
            necessary_edit, carrying_edit = (by_edit.get(name) for name in link.own_direction)
            by_direction = link_answers(
                turned,
                floor=config.growth_factor,
                effects=(necessary_edit, carrying_edit),
                has_sink=True,
                can_tell_sinks=told,
                effect_floor=effect_floor,
            )
            if derive_verdict(by_direction) in ("holds", "in part"):
                decided = NOT_IN_BASIS
        effect_says = None if effect is None else intervention_verdict(effect, floor=effect_floor)
        criterion = f"{'present' if effect is None else 'holds'} if the interval of {primary.name} is above {floor:.3g}"
        criterion += f" and above {', '.join(primary.nulls)}" if primary.nulls else ""
        criterion += f" (here: {primary.note})" if primary.note else ""
        if effect is not None:
            criterion += f", and that of the intervention's share above {effect_floor:.0%} and "
            criterion += "above its largest control"
        if config.changed_thresholds:
            criterion += f"; floors not calibrated: {', '.join(config.changed_thresholds)} moved"
        common = {
            "criterion": criterion,
            "verdict": decided,
            "measured": measured,
            "intervened": effect_says or "no intervention",
            "floors": "not calibrated" if config.changed_thresholds else "calibrated",
            **dict(zip(QUESTIONS, answers, strict=True)),
        }
        shown = [(statistic, as_ranges(statistic.layers)) for statistic in found]
        if effect is not None:
            share, low, high, n = (effect[name] for name in ("share", "ci_low", "ci_high", "n"))
            moved = Statistic(
                name="intervention_share",
                interval=Interval(estimate=share, low=low, high=high, n=n),
                nulls={"largest_control": effect.get("control_largest", math.nan)},
            )
            shown.insert(0, (moved, str(effect.get("read_layers", ""))))
        for statistic, layers in shown:
            nulls = {**statistic.nulls, **statistic.references}
            if (link.name, statistic.name) in of_baseline:
                nulls["random_init"] = of_baseline[link.name, statistic.name]
            for null_name, null_value in (nulls or {"none": math.nan}).items():
                rows.append(
                    {
                        "link": link.name,
                        "statistic": statistic.name,
                        "layers": layers,
                        "value": statistic.interval.estimate,
                        "ci_low": statistic.interval.low,
                        "ci_high": statistic.interval.high,
                        "null_name": null_name,
                        "null_value": null_value,
                        "is_primary": statistic is primary,
                        "n": statistic.interval.n,
                    }
                    | common
                )
    return pd.DataFrame(rows, columns=column_names("trace", "links"))

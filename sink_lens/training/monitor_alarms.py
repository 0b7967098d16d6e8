"""Alarms of the monitor: change-point rules on its readings, with error rates known from toy trainings.

Each rule is a one-sided cumulative sum (Page 1954): what a number has in excess of the median of earlier readings and
an allowance is added up, never under 0; the alarm is where the sum passes a limit, and it comes again only after the
sum has been 0. Allowances and limits were chosen on toy trainings with and without a birth, and judged on others:
``benchmarks/monitor_births.py`` has the readings and says how often the alarms err.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ..text import listed
from .monitor_keys import PREFIX

__all__ = ["RULES", "Alarm", "Alarms", "Rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A change-point rule for one key."""

    name: str
    key: str
    """Without the prefix."""
    logarithm: bool
    """Whether the rule reads the value's logarithm, so that factors count instead of differences."""
    window: int | None
    """Number of earlier readings that the median is taken over; None takes all."""
    fewest: int
    """Number of earlier readings that the rule needs."""
    allowance: float
    """Taken from each reading's excess over the median of the earlier ones."""
    limit: float
    """The alarm is where the sum passes it."""
    sentence: str
    """With ``{step}``, ``{layers}``, ``{value}`` and ``{before}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A rule that has passed its limit."""

    rule: str
    step: int
    layers: tuple[int, ...]
    """The layers whose own number is over its earlier median by more than the allowance."""
    sentence: str


RULES = (
    Rule(
        name="sink_born",
        key="rate_strongest",
        logarithm=False,
        window=None,
        fewest=1,
        allowance=0.02,
        limit=0.05,
        sentence="sink born by step {step} in {layers}: sink rate {value:.3f}, before it {before:.3f}",
    ),
    Rule(
        name="outlier_grows",
        key="max_activation",
        logarithm=True,
        window=5,
        fewest=3,
        allowance=math.log(1.5),
        limit=1.4,
        sentence="outlier grows at step {step} in {layers}: largest activation {value:.3g}, before it {before:.3g}",
    ),
    Rule(
        name="logits_explode",
        key="max_logit",
        logarithm=True,
        window=5,
        fewest=3,
        allowance=math.log(1.5),
        limit=6.0,
        sentence="attention logits grow at step {step} in {layers}: largest {value:.3g}, before it {before:.3g}",
    ),
)


@dataclass(slots=True)
class Alarms:
    """The rules with what they have seen so far."""

    rules: tuple[Rule, ...] = RULES
    _seen: dict[str, list[float]] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)
    _on: set[str] = field(default_factory=set)

    def see(self, reading: Mapping[str, float], *, step: int) -> list[Alarm]:
        """The alarms of the next reading; none while a rule has too few before it."""
        found = []
        for rule in self.rules:
            excess = {key: self._excess(key, value, rule=rule) for key, value in _of(rule, reading).items()}
            whole = excess.get(rule.key)
            if whole is None:
                continue
            total = max(0.0, self._sums.get(rule.name, 0.0) + whole)
            self._sums[rule.name] = total
            if total == 0:
                self._on.discard(rule.name)
            elif total > rule.limit and rule.name not in self._on:
                self._on.add(rule.name)
                layers = tuple(
                    int(key.rpartition("_")[2]) for key, over in excess.items() if "/" in key and (over or 0) > 0
                )
                found.append(self._alarm(rule, reading, step=step, layers=layers))
        for rule in self.rules:
            for key, value in _of(rule, reading).items():
                self._seen.setdefault(key, []).append(value)
        return found

    def _excess(self, key: str, value: float, *, rule: Rule) -> float | None:
        if len(self._seen.get(key, ())) < rule.fewest:
            return None
        before = median(self._earlier(key, rule=rule))
        if rule.logarithm:
            return math.log(value / before) - rule.allowance if value > 0 and before > 0 else None
        return value - before - rule.allowance

    def _earlier(self, key: str, *, rule: Rule) -> list[float]:
        seen = self._seen[key]
        return seen if rule.window is None else seen[-rule.window :]

    def _alarm(self, rule: Rule, reading: Mapping[str, float], *, step: int, layers: tuple[int, ...]) -> Alarm:
        where = f"layer{'s' * (len(layers) > 1)} {listed(map(str, layers))}" if layers else "no layer alone"
        before = median(self._earlier(rule.key, rule=rule))
        sentence = rule.sentence.format(step=step, layers=where, value=reading[PREFIX + rule.key], before=before)
        return Alarm(rule=rule.name, step=step, layers=layers, sentence=sentence)


def _of(rule: Rule, reading: Mapping[str, float]) -> dict[str, float]:
    """The rule's key for the whole model and each layer, without the prefix."""
    names = (name.removeprefix(PREFIX) for name in reading)
    return {name: reading[PREFIX + name] for name in names if name.partition("/")[0] == rule.key and "-" not in name}

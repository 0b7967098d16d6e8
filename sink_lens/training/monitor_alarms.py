"""Alarms of the monitor: change-point rules on its readings.

Each rule is a one-sided cumulative sum (Page 1954): what a number has in excess of the median of earlier readings and
an allowance is added up, never under 0; the alarm is where the sum passes a limit, and it comes again only after the
sum has been 0. A birth is of one position: the sum begins again where the strongest position changes, and it takes two
readings in a row, each of 16 sequences and with a sink rate of at least 5%. ``benchmarks/monitor_births.py`` has the
toy trainings that allowances and limits were chosen and judged on, and says how often the alarms err.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ..schema import MIN_SINK_RATE
from ..text import join_and
from .monitor_keys import COUNTED_SEQUENCES, Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A change-point rule for one key."""

    name: str
    key: str
    """Without the prefix."""
    logarithm: bool
    """The rule reads the value's logarithm: factors count, not differences."""
    window: int | None
    """Earlier readings that the median is taken over; None takes all."""
    fewest: int
    """Earlier readings that the rule needs."""
    allowance: float
    """Taken from each reading's excess over the median of the earlier ones."""
    relative: float = 0.0
    """This share of the median is taken from the excess too."""
    of_position: bool = False
    """The number is the strongest position's, which must be the same in two readings in a row."""
    least: float = 0.0
    """The least number, in both readings of a position."""
    limit: float
    """The alarm is where the sum passes it."""
    sentence: str
    """With ``{step}``, ``{layers}``, ``{position}``, ``{value}``, ``{before}``; ``{threshold}`` is the sink score's."""

    def median(self, earlier: Sequence[float]) -> float:
        return median(earlier if self.window is None else earlier[-self.window :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A rule that has passed its limit."""

    rule: str
    step: int
    layers: tuple[int, ...]
    """The layers whose own number is over its earlier median by more than the allowance."""
    position: int | None = None
    """The position that became a sink; None for other rules."""
    sentence: str


RULES = (
    Rule(
        name="sink_born",
        key="rate_strongest",
        logarithm=False,
        window=None,
        fewest=1,
        allowance=0.02,
        relative=0.5,
        of_position=True,
        least=MIN_SINK_RATE,
        limit=0.05,
        sentence="sink born by step {step} at position {position} in {layers}: sink rate {value:.3f} (sink score "
        "above {threshold:g}), before it {before:.3f}",
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


@dataclass(slots=True, kw_only=True)
class Alarms:
    """All rules of a training, with the readings and sums that each has so far."""

    threshold: float
    rules: tuple[Rule, ...] = RULES
    fewest_sequences: int = COUNTED_SEQUENCES
    """A position's number of fewer sequences raises no alarm."""
    _earlier: dict[tuple[str, int | None], list[float]] = field(default_factory=dict)
    """(Rule, layer) -> its number in all earlier readings."""
    _sums: dict[str, float] = field(default_factory=dict)
    _on: set[str] = field(default_factory=set)
    _position: int | None = None
    """The strongest position, if the last reading's number exceeded there what a rule allows."""

    def add_reading(self, reading: Reading, *, step: int) -> list[Alarm]:
        found = []
        at = reading.get(("strongest_position", None), math.nan)
        position = None if math.isnan(at) else int(at)
        enough = reading.get(("strongest_sequences", None), 0) >= self.fewest_sequences
        for rule in self.rules:
            values = {
                layer: value
                for (key, layer), value in reading.items()
                if key == rule.key and layer != -1
            }
            before = {layer: self._earlier.setdefault((rule.name, layer), []) for layer in values}
            excess = {
                layer: _excess_over_median(value, before[layer], rule=rule)
                for layer, value in values.items()
            }
            if (whole := excess.get(None)) is not None:
                again = True
                if rule.of_position:
                    whole = whole if enough and values[None] >= rule.least else min(whole, 0.0)
                    again = whole > 0 and position == self._position
                    self._position = position if whole > 0 else None
                earlier = self._sums.get(rule.name, 0.0) if again or whole <= 0 else 0.0
                total = self._sums[rule.name] = max(0.0, earlier + whole)
                if total == 0:
                    self._on.discard(rule.name)
                elif total > rule.limit and again and rule.name not in self._on:
                    self._on.add(rule.name)
                    layers = tuple(
                        layer
                        for layer, over in excess.items()
                        if layer is not None and (over or 0) > 0
                    )
                    where = (
                        f"layer{'s' * (len(layers) > 1)} {join_and(map(str, layers))}"
                        if layers
                        else "no layer alone"
                    )
                    sentence = rule.sentence.format(
                        step=step,
                        layers=where,
                        position=position,
                        value=values[None],
                        before=rule.median(before[None]),
                        threshold=self.threshold,
                    )
                    found.append(
                        Alarm(
                            rule=rule.name,
                            step=step,
                            layers=layers,
                            position=position if rule.of_position else None,
                            sentence=sentence,
                        )
                    )
            for layer, value in values.items():
                before[layer].append(value)
        return found


def _excess_over_median(value: float, before: Sequence[float], *, rule: Rule) -> float | None:
    """Return ``value`` minus the median of the earlier values and what the rule allows.

    None if there are too few earlier values, or if a logarithm is undefined.
    """
    if len(before) < rule.fewest:
        return None
    usual = rule.median(before)
    if rule.logarithm:
        return math.log(value / usual) - rule.allowance if value > 0 and usual > 0 else None
    return value - usual - rule.allowance - rule.relative * usual

"""What the page says: numbers, text from elsewhere made visible and cut, the headline, the links' names."""

import math
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

NODES = (
    "value aggregation",
    "variance discrepancy",
    "variance after W_O",
    "super neurons",
    "outlier dimension",
    "the sink's key",
    "attention sink",
)
"""What the chain's links join, in order."""
LINKS = {
    "aggregation_variance": "Averaging over more tokens lowers the variance of what attention reads, so the "
    "first token keeps the most.",
    "variance_preserved": "The attention output projection W_O passes that difference on.",
    "variance_neurons": "The difference makes super neurons fire at the sink token only.",
    "neurons_dimension": "Super neurons write the outlier dimension of the sink token.",
    "dimension_key": "After the norm, the outlier dimension alone fixes the sink's key.",
    "key_sink": "Queries meet that key, so attention goes to it.",
}
"""Name of a link -> what it claims; one more node of NODES each."""
VERDICTS = {"holds": "✓", "fails": "✗", "undecided": "?", "mixed": "±", "not measured": "–"}
"""Verdict -> its sign."""

_NAMED = {"\n": "↵", "\r": "↵", "\t": "⇥"}


def visible(text: object, *, limit: int = 120, counted: bool = True) -> str:
    """Text from elsewhere as one line that can be read: nothing invisible, nothing that reorders, and cut.

    Control, format (right-to-left marks, zero-width), private and unpaired characters are written as
    ⟨U+202E⟩; cut text ends with its full length where that is counted. Markup is left as it is: whoever
    writes HTML escapes it.
    """
    text = str(text)
    shown, length = [], 0
    for character in text:
        piece = _NAMED.get(character, character)
        if unicodedata.category(piece) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            piece = f"⟨U+{ord(piece):04X}⟩"
        length += len(piece)
        if length > limit:
            return f"{''.join(shown)}…" + f" ({len(text):,} characters)" * counted
        shown.append(piece)
    return "".join(shown)


def token(text: object, *, limit: int = 24, counted: bool = True) -> str:
    """A token as it is shown: its spaces as dots, short, never empty."""
    return visible(str(text).replace(" ", "·"), limit=limit, counted=counted) or "∅"


def number(value: Any) -> str:
    """A number to three digits, or text; what has no value is 'undefined'."""
    if isinstance(value, str):
        return visible(value, limit=400)
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return "undefined"
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return str(int(value))
    if not isinstance(value, Real):
        return visible(value, limit=400)
    value = float(value)
    size = abs(value)
    if math.isinf(size):
        return "∞" if value > 0 else "−∞"
    if size >= 1e6 or 0 < size < 1e-3:
        text = f"{value:.1e}"
    elif size >= 1000 or value.is_integer():
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−")


def percent(share: float) -> str:
    """A share in percent, whole; 'undefined' where it has no value."""
    return "undefined" if math.isnan(share) else f"{share:.0%}".replace("-0%", "0%").replace("-", "−")


def interval(low: Any, high: Any, *, shown: Callable[[Any], str] = number) -> str:
    """An interval in brackets; nothing where there is none."""
    if any(end is None or (isinstance(end, Real) and math.isnan(end)) for end in (low, high)):
        return ""
    return f"[{shown(low)}, {shown(high)}]"


def short(count: float | int) -> str:
    """A large count as people say it: 950, 16.4k, 2.46M, 1.2B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def listed(names: Iterable[object], *, most: int = 6) -> str:
    """Names in a sentence: 'a, b and c', the rest counted."""
    shown = [str(name) for name in names]
    rest = len(shown) - most
    if rest > 0:
        return f"{', '.join(shown[:most])} and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def plural(count: int, noun: str) -> str:
    """A count and its noun: '1 layer', '2 layers'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(first: int, last: int) -> str:
    """Layers in words: 'layer 11', 'layers 1 to 2'."""
    return f"layer {first}" if first == last else f"layers {first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a run found, as far as its tables say; None is what they do not say."""

    model: str
    position: int | None
    """The studied position."""
    others: tuple[int, ...]
    """Further sink positions."""
    sink_rate: float | None
    sink_interval: tuple[float, float] | None
    threshold: float | None
    """Of the sink score."""
    min_sink_rate: float
    """The sink rate from which a position is a sink."""
    dimensions: list[int] | None
    """Outlier dimensions, those of most layers first."""
    steps: list[tuple[int, int, float]] | None
    """Growth steps: first and last layer, and by how much the norm ratio grew."""
    super_neurons: list[str] | None
    """As layer.neuron, the strongest first."""

    @property
    def is_sink(self) -> bool | None:
        """Whether the studied position is a sink; None where it was not measured."""
        return None if self.sink_rate is None else self.sink_rate >= self.min_sink_rate


def title(story: Story) -> str:
    """The headline: which position is the sink."""
    if story.is_sink is None:
        return "The sink was not measured"
    if not story.is_sink:
        return "No position is an attention sink"
    return f"The attention sink is position {story.position}"


def headline(story: Story) -> list[str]:
    """The run in plain words, a sentence for each thing that was found."""
    said = []
    if story.sink_rate is not None:
        over = "the threshold (not recorded)" if story.threshold is None else f"the threshold {story.threshold:g}"
        rate = f"{story.sink_rate:.1%} of all heads give position {story.position} a sink score over {over}"
        bounds = story.sink_interval
        if bounds is not None and not any(math.isnan(end) for end in bounds):
            rate += f" (interval over sequences: {bounds[0]:.1%} to {bounds[1]:.1%})"
        said.append(f"{rate}.")
    if story.others:
        said.append(f"Further sink positions: {listed(story.others)}.")
    if story.dimensions is not None:
        names = listed(story.dimensions, most=4)
        many = len(story.dimensions) > 1
        said.append(
            f"Outlier dimension{'s' * many} of that token: {names}."
            if story.dimensions
            else "That token has no outlier dimension."
        )
    if story.steps is not None:
        grown = [f"{span(first, last)} (×{number(factor)})" for first, last, factor in story.steps]
        said.append(
            f"Its norm, over that of other tokens, grows in {plural(len(grown), 'step')}: {listed(grown)}."
            if grown
            else "Its norm, over that of other tokens, has no growth step."
        )
    if story.super_neurons is not None:
        found = story.super_neurons
        said.append(
            f"{plural(len(found), 'super neuron')} (layer.neuron): {listed(found)}."
            if found
            else "No super neuron was found."
        )
    return said


def traced(verdicts: dict[str, str]) -> str:
    """The sentence that says how much of the chain is traced on this model."""
    counts = {name: sum(verdict == name for verdict in verdicts.values()) for name in VERDICTS}
    parts = [f"{count} {_COUNTED[name][count > 1]}" for name, count in counts.items() if count]
    return (
        "This model's chain is traced, not assumed: no position, layer, neuron or dimension was typed in, "
        f"and each link has its own verdict. Of {len(verdicts)} links, {listed(parts)}."
    )


_COUNTED = {
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "undecided": ("is undecided", "are undecided"),
    "mixed": ("has mixed statistics", "have mixed statistics"),
    "not measured": ("was not measured", "were not measured"),
}
"""Verdict -> what one link does, and what several do."""

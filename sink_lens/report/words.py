"""What the page says of a trace: the headline, in plain sentences."""

import math
from dataclasses import dataclass

from sink_lens.schema import LINKS, NODES, VERDICTS
from sink_lens.text import interval, layers_in_words, listed, number, percent, plural, short, token, visible

__all__ = [
    "LINKS",
    "NODES",
    "VERDICTS",
    "Story",
    "headline",
    "interval",
    "listed",
    "number",
    "percent",
    "plural",
    "short",
    "title",
    "token",
    "traced",
    "visible",
]


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
        grown = [f"{layers_in_words(first, last)} (×{number(factor)})" for first, last, factor in story.steps]
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

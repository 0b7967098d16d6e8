"""The methods that score edges: a row each.

A row says where gradients are taken, as shares of the way of the embedding from its replacement to its clean value; or
that every edge is really patched (``patches``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError

Method = Literal["eap-ig", "eap", "gim", "eap-corrupted", "eap-ig-left", "exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """One row of ``METHODS``: how a method scores edges."""

    patches: bool = False
    """Every edge is really patched; no gradient is taken."""
    points: Callable[[int], list[float]] = lambda steps: []
    """Number of steps -> shares of the way at which the gradient is taken."""
    integrates: bool = False
    """The points are those of an integral: their number is asked for."""
    doubles: bool = False
    """The points of a pair are doubled until its sum is complete."""
    rules: bool = False
    """The backward pass has rules (``rules``)."""


def _midpoints(steps: int) -> list[float]:
    return [(step + 0.5) / steps for step in range(steps)]


METHODS: Mapping[str, Scoring] = {
    "eap-ig": Scoring(points=_midpoints, integrates=True, doubles=True),
    "eap": Scoring(points=lambda steps: [1.0]),
    "gim": Scoring(points=lambda steps: [1.0], rules=True),
    "eap-corrupted": Scoring(points=lambda steps: [0.0]),
    "eap-ig-left": Scoring(
        points=lambda steps: [step / steps for step in range(steps)], integrates=True
    ),
    "exact": Scoring(patches=True),
}


def check_method(method: str, ablation: str) -> None:
    """Raise InputError if a method is unknown, or with this ablation takes a gradient where the stream is zero."""
    if method not in METHODS:
        raise InputError(f"method is {method!r}; need one of {', '.join(METHODS)}")
    if ablation == "zero" and 0.0 in METHODS[method].points(1):
        raise InputError(
            f"{method} takes a gradient where everything is replaced, and with ablation zero the stream is zero there: "
            "a norm then divides by next to nothing, and scores have 1e10 and more. Need the method gim, eap-ig, eap "
            "or exact, or another ablation"
        )

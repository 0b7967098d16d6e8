"""The two tiers: what `make test` leaves to `make test-all` carries the mark `exhaustive`.

Most of it is one thing, a family that is no representative, and is marked here for all tests at once: a test with the
parameter `family` is asked of the representatives alone. If none is among its families, it is asked of the first. A
test marked `every_family` is asked of all of them in the first tier too.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

REPRESENTATIVES = {
    "llama": "heads in groups, rotary positions, a gated MLP",
    "gpt2": "learned positions, LayerNorm, weights stored the other way round",
    "gemma2": "soft caps, a sliding window, norms before and after",
    "qwen3": "norms of queries and keys, heads wider than the stream over their number",
    "gpt_neox": "queries, keys and values in one matrix, MLP beside the attention, a part of a head rotated",
    "bloom": "ALiBi, an attention of its own",
    "gpt_oss": "experts, sink logits",
    "headnorm_gate": "values with a norm, a gate",
    "deepseek_v3": "latent attention, with widths of their own for keys and values",
    "qwen3_5": "a hybrid: a mixer in place of attention, a gate beside the queries",
}
"""A family for each mechanism, and the mechanism."""


def mark(items: list[pytest.Item]) -> None:
    """Mark as `exhaustive` every family that is no representative."""
    families: dict[tuple[str, str], list[str]] = {}
    asked: list[tuple[pytest.Item, tuple[str, str], str]] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        family = callspec and callspec.params.get("family")
        if not isinstance(family, str) or item.get_closest_marker("every_family"):
            continue
        rest = repr(
            sorted(
                (name, repr(value)) for name, value in callspec.params.items() if name != "family"
            )
        )
        test = item.nodeid.partition("[")[0], rest
        families.setdefault(test, []).append(family)
        asked.append((item, test, family))
    for item, test, family in asked:
        stay = REPRESENTATIVES.keys() & families[test] or families[test][:1]
        if family not in stay:
            item.add_marker(pytest.mark.exhaustive)


def first(values: Iterable[Any], *, stay: Callable[[Any], bool] | int = 1) -> list[Any]:
    """The values of a parameter, of which the first tier has the first few, or those that the function says.

    A tuple is one value of several parameters.
    """
    chosen = list(values)
    kept = (lambda value: chosen.index(value) < stay) if isinstance(stay, int) else stay
    rest = pytest.mark.exhaustive
    return [
        value
        if kept(value)
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=rest)
        for value in chosen
    ]

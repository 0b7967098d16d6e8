"""At which positions and layers the residual stream carries a metric, by the effects of patches of each of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..edits.effect_table import shown_rows
from ..text import as_ranges, join_and, percent, token_text

AXES = ("layer", "position", "head", "key", "unit")
"""Columns of what may be swept."""
UNLIKE = "(mixed)"
"""Label of a position that is not the same place in all pairs."""
_CARRIES = 0.5
"""A position carries the decision where patching it makes up this share of the difference, in two layers or more."""
_SAME_EFFECT = 0.8
"""Neighbouring layers belong together if the weaker effect has this share of the stronger one."""


def position_name(position: int, labels: Mapping[int, str]) -> str:
    """Return a position with its token: ``position 4 ·Spain/·Italy``."""
    label = labels.get(position, "")
    return f"position {position} {token_text(label)}" if label else f"position {position}"


def comparable_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out places that differ between pairs, since their means are over different words."""
    return table.loc[table["alike"].eq(True)] if "alike" in table.columns else table


def unlike_places(table: pd.DataFrame, *, chosen: Iterable[int] | None) -> list[int]:
    """Return the positions and keys in ``table`` that are not one place in all pairs; ``chosen`` if none is swept."""
    if "alike" not in table.columns:
        return []
    rows = table.loc[~table["alike"].eq(True)]
    swept = [name for name in ("position", "key") if name in rows.columns]
    return [int(one) for name in swept for one in rows[name]] if swept else [*(chosen or ())]


def unlike_text(places: Iterable[int], *, ends: bool = True) -> str:
    """Say that ``places`` are not one place in all pairs, and what to do; "" if there is none.

    ``ends``: positions may count back from the end of each prompt.
    """
    numbers = sorted(set(places))
    if not numbers:
        return ""
    named = as_ranges(numbers) if numbers[0] >= 0 else join_and(map(str, numbers))
    one = len(numbers) == 1
    return (
        f"Position{'s' * (not one)} {named} {'is' if one else 'are'} not the same place in all pairs of prompts: the "
        "mean over pairs is one over different words, and no sentence is made of it. "
        + ("Positions from -1 down count from each prompt's end; or give" if ends else "Give")
        + " pairs that differ at the same positions"
    )


def carrying_positions_text(
    table: pd.DataFrame, *, site: str, put: str, labels: Mapping[int, str]
) -> str:
    """Say at which positions and layers the stream carries the metric; "" if patches of ``site`` cannot tell."""
    table = comparable_rows(table)
    swept = [name for name in AXES if name in table.columns]
    if swept != ["layer", "position"] or not site.startswith("resid") or put != "source":
        return ""
    if (
        "normalised_effect" not in table
        or not np.isfinite(table["normalised_effect"].to_numpy(float)).all()
    ):
        return ""
    ranges = _layer_ranges(shown_rows(table))
    ranges = [
        one for one in ranges if one["value"] >= _CARRIES and one["layers"][1] > one["layers"][0]
    ]
    ranges.sort(key=lambda one: one["layers"])
    if not ranges or len({one["position"] for one in ranges}) != len(ranges):
        return ""
    first, *others = ranges
    names = [position_name(int(one["position"]), labels) for one in ranges]
    sentence = (
        f"is carried at {names[0]} up to layer {first['layers'][1]} ({percent(first['value'])})"
    )
    for name, one in zip(names[1:], others, strict=True):
        sentence += f", at {name} from layer {one['layers'][0]} ({percent(one['value'])})"
    return sentence


def _layer_ranges(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return position, layers and value of each range of layers in which a position has nearly the same effect."""
    ranges: list[dict[str, Any]] = []
    for position, part in table.groupby("position", sort=False):
        last: dict[str, Any] = {"layers": (-2, -2), "value": 0.0}
        for row in part.sort_values("layer").to_dict("records"):
            layer, value = int(row["layer"]), float(row["normalised_effect"])
            before = last["value"] if layer == last["layers"][1] + 1 else 0.0
            weaker, stronger = sorted((abs(before), abs(value)))
            if before * value > 0 and weaker >= _SAME_EFFECT * stronger:
                last |= {"layers": (last["layers"][0], layer), "value": max(before, value, key=abs)}
            else:
                last = {"position": position, "layers": (layer, layer), "value": value}
                ranges.append(last)
    return ranges

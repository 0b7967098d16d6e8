"""What a run found, as far as its tables say: the story in a few numbers, and the verdict on every link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report.columns import at, by_size, flags, floats, named, need, numbers, select
from sink_lens.report.words import LINKS, Story, interval, number, percent, visible

_NOT = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """One statistic of a link, as it is shown."""

    link: str
    claim: str
    """What the link says; on its primary statistic only."""
    verdict: str
    """Of the link."""
    own: str
    """Verdict of the statistic; empty where it is the link's again."""
    primary: bool = True
    statistic: str = ""
    value: str = ""
    interval: str = ""
    nulls: tuple[tuple[str, str], ...] = ()
    """Name and value."""
    criterion: str = ""
    """Empty where it is the link's again."""
    cut: str = ""
    """What was cut, on the primary statistic, where the link was cut; the next three too."""
    cut_share: str = ""
    """Share of the sink that the cut makes or removes."""
    cut_interval: str = ""
    control_share: str = ""
    """The same of the matched controls' mean."""


def setting(run: Run, name: str) -> Any:
    """A threshold or option of the run, from its configuration or its provenance; None where not recorded."""
    thresholds = run.provenance.get("thresholds")
    for held in (run.config, thresholds, run.provenance):
        if isinstance(held, Mapping) and held.get(name) is not None:
            return held[name]
    return None


def real(value: Any) -> float | None:
    """A number, or None where it is none."""
    return float(value) if isinstance(value, (int, float)) else None


def optional(run: Run, name: str, columns: Sequence[str]) -> pd.DataFrame | None:
    """A table where it is there and whole: its own section says what is wrong otherwise."""
    try:
        return need(run, name, columns=columns)
    except RunError:
        return None


def find_story(run: Run) -> Story:
    """What the tables of a run say, as far as they are there."""
    model = run.provenance.get("model") or run.config.get("model") or "a model without a name"
    if isinstance(model, Mapping):
        model = model.get("name") or next(iter(model.values()), "a model without a name")
    minimum = real(setting(run, "min_sink_rate")) or 0.05
    position, others, rate = _sink(run, minimum)
    summary = optional(run, "summary", ["quantity", "value", "ci_low", "ci_high"])
    bounds = None
    if summary is not None and rate is not None:
        for value, low, high in numbers(named(summary, "quantity", "sink_rate"), ["value", "ci_low", "ci_high"]):
            rate, bounds = value, (low, high)
    step_columns = ["first_layer", "last_layer", "ratio_before", "ratio_after"]
    steps = optional(run, "growth_steps", step_columns)
    dimensions = optional(run, "dimensions", ["layer", "position", "dimension", "is_outlier"])
    neurons = optional(run, "neurons", ["layer", "neuron", "position", "contribution", "is_super"])
    found = None
    if steps is not None:
        rows = numbers(steps, step_columns)
        found = [(int(first), int(last), after / before) for first, last, before, after in rows]
    return Story(
        model=str(model),
        position=position,
        others=others,
        sink_rate=rate,
        sink_interval=bounds,
        threshold=real(setting(run, "threshold")),
        min_sink_rate=minimum,
        dimensions=None if dimensions is None else outliers(dimensions, position),
        steps=found,
        super_neurons=None if neurons is None else _supers(neurons, position),
    )


def _sink(run: Run, minimum: float) -> tuple[int | None, tuple[int, ...], float | None]:
    """The position with the highest sink rate, the other sink positions, and the rate."""
    heads = optional(run, "heads", ["layer", "head", "position", "sink_rate"])
    rates = {}
    if heads is not None:
        for place in sorted({int(place) for place in floats(heads, "position")}):
            of_heads = floats(at(heads, place), "sink_rate")
            if np.isfinite(of_heads).any():
                rates[place] = float(np.nanmean(of_heads))
    if not rates:
        return None, (), None
    position = max(rates, key=lambda place: rates[place])
    others = tuple(place for place in rates if place != position and rates[place] >= minimum)
    return position, others, rates[position]


def outliers(dimensions: pd.DataFrame, position: int | None) -> list[int]:
    """Outlier dimensions of a position, or of all, those of most layers first."""
    table = dimensions if position is None else at(dimensions, position)
    found = floats(select(table, flags(table, "is_outlier")), "dimension").astype(int)
    names, counts = np.unique(found, return_counts=True)
    return [int(name) for name in names[np.argsort(-counts, kind="stable")]]


def _supers(neurons: pd.DataFrame, position: int | None) -> list[str]:
    table = neurons if position is None else at(neurons, position)
    table = by_size(select(table, flags(table, "is_super")), "contribution")
    names = numbers(table, ["layer", "neuron"])
    return list(dict.fromkeys(f"{layer:.0f}.{neuron:.0f}" for layer, neuron in names))


def links(run: Run) -> list[LinkRow]:
    """The verdict on every link, in the order of the chain, a row for each statistic.

    Raises:
        RunError: There is no such table, or it is damaged.
    """
    columns = (
        "link",
        "statistic",
        "value",
        "ci_low",
        "ci_high",
        "null_name",
        "null_value",
        "criterion",
        "verdict",
    )
    table = need(run, "links", columns=columns)
    wanted = [*columns, *(("is_primary",) if "is_primary" in table.columns else ())]
    rows: list[dict[str, Any]] = [dict(zip(wanted, row, strict=True)) for row in table[wanted].itertuples(index=False)]
    names = [*LINKS, *(name for name in dict.fromkeys(row["link"] for row in rows) if name not in LINKS)]
    cuts = _cuts(run)
    return [
        shown for name in names for shown in _link(str(name), [row for row in rows if row["link"] == name], cuts=cuts)
    ]


def _cuts(run: Run) -> dict[str, dict[str, str]]:
    """Link -> what its cut did, as it is shown; empty where nothing was cut."""
    table = optional(run, "effects", ["link", "edit", "share", "ci_low", "ci_high", "control_share", "is_primary"])
    if table is None:
        return {}
    table = select(table, flags(table, "is_primary"))
    shares = numbers(table, ["share", "ci_low", "ci_high", "control_share"])
    return {
        str(link): {
            "cut": visible(edit),
            "cut_share": percent(share),
            "cut_interval": interval(low, high, shown=percent),
            "control_share": percent(control),
        }
        for link, edit, (share, low, high, control) in zip(table["link"], table["edit"], shares, strict=True)
    }


def _link(name: str, rows: list[dict[str, Any]], *, cuts: Mapping[str, dict[str, str]]) -> list[LinkRow]:
    """The rows of a link, its primary statistic first; what the others share with it is not repeated."""
    if not rows:
        return [LinkRow(link=name, claim=LINKS[name], verdict=_NOT, own=_NOT)]
    rows = sorted(rows, key=lambda row: not row.get("is_primary", True))
    own = {row["verdict"] for row in rows if _text(row["verdict"])}
    verdict = "mixed" if len(own) > 1 else visible(next(iter(own), _NOT))
    shown: list[LinkRow] = []
    for statistic in dict.fromkeys(row["statistic"] for row in rows):
        of = [row for row in rows if row["statistic"] == statistic]
        first, primary = of[0], not shown
        nulls = [(_text(row["null_name"]), number(row["null_value"])) for row in of]
        criterion, decided = _text(first["criterion"]), _text(first["verdict"])
        shown.append(
            LinkRow(
                link=visible(name),
                claim=LINKS.get(name, "") if primary else "",
                verdict=verdict,
                primary=primary,
                statistic=_text(statistic),
                value=number(first["value"]),
                interval=interval(first["ci_low"], first["ci_high"]),
                nulls=tuple(null for null in nulls if null[0] not in ("", "none")),
                criterion=criterion if primary or criterion != _text(rows[0]["criterion"]) else "",
                own=decided if primary or decided != _text(rows[0]["verdict"]) else "",
                **(cuts.get(name, {}) if primary else {}),
            )
        )
    return shown


def _text(value: Any) -> str:
    return visible(value, limit=400) if isinstance(value, str) else ""


def studied(story: Story) -> int:
    """The studied position.

    Raises:
        RunError: The run does not say which.
    """
    if story.position is None:
        raise RunError("the sink position is not known without the table 'heads'. Run again to see it.")
    return story.position

"""Texts of the pages on each link beyond its sentence; this needs no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ...schema import (
    ALL_BUT,
    DIRECTION,
    DISTANCE,
    INTERVENTION_FLOOR,
    LEAST_SHARE,
    NOT_IN_BASIS,
    OWN,
    OWN_IN_KEY,
    OWN_RATIO,
    RESCALED,
    SIZE,
    SPAN,
    WRITTEN,
)
from ...text import interval_text, join_and, parse_ranges, percent

CANCELS = 0.5
"""Keys' bias is cancelled if the cosine with minus it is above this, and the sink's key shorter than this share of
others."""

Tables = Mapping[str, pd.DataFrame]

MEANINGS = {
    "attention sink": "a position to which many heads pay much of their attention, whatever the text says",
    "heads": "all attention heads of all layers",
    "BOS": "the token that a tokenizer puts before a text",
    "averaging": "attention averages the values of the tokens that a token sees; the first token sees only itself, so "
    "its average varies most",
    "super neurons": "neurons that make at least 5% of their layer's change of the outlier dimension at the sink token",
    "dimensions?": "an entry of the residual stream; here one that is far larger at the sink token than at others",
    "direction": "a combination of many dimensions, none of which has to be large",
    "key": "what a query is compared with; every head makes one of each token",
    "sink logits": "learned scores, one a head, that take attention and belong to no token",
    "carry|carries": "without it, at the sink token alone, most of the sink is gone",
    "parts?": "a neuron, a head, an embedding or a bias of the keys",
    "switching off": "setting to its mean over ordinary tokens, at the sink token (a bias of the keys: to 0)",
}
"""Word of a headline, as a pattern -> its meaning."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """A part of a headline, with the rows of tables on which it stands."""

    key: str
    """Such as `no sink`, `sink`, `bound`, `by LINK`, `cancels bias`, `direction` and `no variance`."""
    text: str
    rows: tuple[str, ...]
    """As `table: condition`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWords:
    """The texts about a link that a page shows besides its sentence; those here are said of a link without a row."""

    carries_as: Callable[[Tables], str] = lambda _: ""
    """Makes the headline's name of the part that carries the sink; "" if nothing was found to name."""
    asks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Link -> the questions that must be answered yes before."""
    last_resort: bool = False
    """It is named only where no other link is."""
    named_with: Callable[[Tables], Phrase | None] = lambda _: None
    """Added to the headline if it names the link."""
    named_without: Callable[[Tables], Phrase | None] = lambda _: None
    """Added if it does not, and the link was shown not to carry the sink."""
    no_part: Phrase | None = None
    """Said if the link plays no part."""
    no_part_asks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Link -> the questions that must be answered no before."""
    breaking: str = "breaking it"
    """The subject of a sentence."""
    does: str = "remove"
    does_not: str = "the sink does not hang on it"
    stands_out: str = "it stands out"
    """Said if the link is present."""
    broken: str = "breaking it {}"
    """Around ``change_text``."""
    remarks: Callable[[Tables, Mapping[str, Any]], list[str]] = lambda *_: []
    """Sentences from the tables and the row of the link's own intervention."""
    gentler: tuple[str, str] | None = None
    """Ends of the path that could decide the link where its own edit damages the model."""


def change_text(share: float, *, does: str = "remove") -> str:
    """Write "removes 22%"; "adds 22%" if the share removed is below 0."""
    shown = percent(share)
    if shown.startswith("−") and does != "make":
        return f"{'gains' if does == 'lose' else 'adds'} {shown[1:]}"
    return f"{does}s {shown}"


def change_texts(share: float, low: float, high: float, *, does: str) -> tuple[str, str]:
    """Write ``change_text`` and its interval, which has the sign of the text."""
    text = change_text(share, does=does)
    ends = (-high, -low) if text.startswith("adds") else (low, high)
    return text, interval_text(*ends, shown=percent)


def answers_by_link(tables: Tables) -> dict[str, dict[str, str]]:
    """Read link -> question -> answer; empty if the run has none."""
    table, names = tables.get("links"), ("present", "necessary_or_sufficient", "carries")
    if table is None or not set(names) <= set(table.columns):
        return {}
    rows = table.drop_duplicates("link").to_dict("records")
    return {str(row["link"]): {name: str(row[name]) for name in names} for row in rows}


def statistics_by_name(tables: Tables, link: str) -> dict[str, dict[str, Any]]:
    table = tables.get("links")
    return {} if table is None else _index_rows(table.loc[table["link"].eq(link)], "statistic")


def interventions_by_name(tables: Tables) -> dict[str, dict[str, Any]]:
    table = tables.get("effects")
    return {} if table is None else _index_rows(table, "edit")


def summary_values(tables: Tables) -> dict[str, Any]:
    table = tables.get("summary")
    return {} if table is None else dict(zip(table["quantity"], table["value"], strict=True))


def _index_rows(table: pd.DataFrame, column: str) -> dict[str, dict[str, Any]]:
    rows = table.drop_duplicates(column).set_index(column, drop=False)
    return {str(name): dict(row) for name, row in rows.to_dict("index").items()}


def _dimensions_text(tables: Tables) -> str:
    """Name the outlier dimensions that keys read in the sink's layers: "dimension 7" or "3 outlier dimensions"."""
    table, effects = tables.get("dimensions"), tables.get("effects")
    if table is None or effects is None:
        return ""
    own = effects.loc[effects["link"].eq("dimension_key")]
    if not len(own):
        return ""
    layers = parse_ranges(str(own["read_layers"].iloc[0]), name="read_layers")
    here = (
        table["is_outlier"].eq(True)
        & (table["layer"] + 1).isin(layers)
        & table["sink_position"].eq(own["position"].iloc[0])
    )
    names = sorted({int(one) for one in table.loc[here, "dimension"]})
    if len(names) > 1:
        return f"{len(names)} outlier dimensions"
    return f"dimension {names[0]}" if names else ""


def dimensions_cancel_bias(tables: Tables) -> bool:
    rows = statistics_by_name(tables, "dimension_key")
    against, norm = rows.get("bias_cancelled"), rows.get("key_norm_ratio")
    if against is None or norm is None:
        return False
    return against["ci_low"] > CANCELS and norm["ci_high"] < CANCELS


def _cancelled_bias_phrase(tables: Tables) -> Phrase | None:
    if not dimensions_cancel_bias(tables):
        return None
    rows = ("links: dimension_key, bias_cancelled and key_norm_ratio",)
    return Phrase("cancels bias", "The dimensions cancel the keys' bias", rows)


def _direction_phrase(tables: Tables) -> Phrase | None:
    """Say what ablating makers' directions removes, if more than random ones and the smaller norm alone.

    Only outlier dimensions were tried one by one, so nothing is said of a single dimension.
    """
    made = interventions_by_name(tables)
    span, norm = made.get(SPAN), made.get(RESCALED)
    if span is None or norm is None or not _dimensions_text(tables):
        return None
    beyond = INTERVENTION_FLOOR, span["control_largest"], norm["ci_high"]
    if not all(span["ci_low"] > one for one in beyond):
        return None
    rows = (
        f"effects: {SPAN}, its controls, and {RESCALED}",
        "dimensions: is_outlier; links: dimension_key, necessary_or_sufficient or carries is no",
    )
    text = f"Without the directions that its makers write, {percent(span['share'])} of it is gone; without their norm "
    return Phrase("direction", f"{text}alone, {percent(norm['share'])}", rows)


def _own_direction_sentences(tables: Tables, link: str) -> list[str]:
    rows = statistics_by_name(tables, link)
    if not rows or next(iter(rows.values()))["verdict"] != NOT_IN_BASIS:
        return []
    made = interventions_by_name(tables)
    edits = (WRITTEN, OWN) if link == "neurons_dimension" else (OWN_IN_KEY,)
    removed = join_and(f"{percent(made[edit]['share'])} ({edit})" for edit in edits)
    return [
        f"no single dimension dominates, but the token has directions of its own, {rows[OWN_RATIO]['value']:.2g} times "
        f"as long as other tokens are, that carry the sink: it loses {removed}"
    ]


def _key_sentences(tables: Tables, own: Mapping[str, Any]) -> list[str]:
    said, effects = _own_direction_sentences(tables, "dimension_key"), interventions_by_name(tables)
    if own and ALL_BUT in effects and effects[ALL_BUT]["ci_low"] > own["ci_high"]:
        said.append(
            f"the dimensions' part of the key makes {percent(own['share'])} of the sink, everything else in it "
            f"{percent(effects[ALL_BUT]['share'])} (each by itself, so the two need not add up to all)"
        )
    if dimensions_cancel_bias(tables):
        of = statistics_by_name(tables, "dimension_key")
        said.append(
            f"the dimensions cancel the keys' bias (cosine {of['bias_cancelled']['value']:.2f}): the sink's key is the "
            f"short one ({of['key_norm_ratio']['value']:.2f} of the others' norm)"
        )
    return said


def _span_sentences(tables: Tables, _: Mapping[str, Any]) -> list[str]:
    if own := _own_direction_sentences(tables, "neurons_dimension"):
        return own
    span = interventions_by_name(tables).get(SPAN)
    if (
        span
        and span["ci_low"] > INTERVENTION_FLOOR
        and not span["ci_low"] > span["control_largest"]
    ):
        return [
            f"random spans remove up to {percent(span['control_largest'])}, as the makers' span does: beside so "
            "large a dimension any change of direction disturbs the key"
        ]
    return []


def value_average_by(tables: Tables) -> str:
    """Tell by what the value average makes the sink: size, direction, both; empty if that is not shown."""
    made = interventions_by_name(tables)
    if not {SIZE, DIRECTION, DISTANCE} <= set(made):
        return ""
    size, direction = made[SIZE], made[DIRECTION]
    by_size, by_direction = map(_moves_more_than_controls, (size, direction))
    if by_size and by_direction:
        return "both"
    if by_direction and size["ci_high"] < direction["ci_low"]:
        return "direction"
    return "size" if by_size and direction["ci_high"] < size["ci_low"] else ""


def _moves_more_than_controls(row: Mapping[str, Any]) -> bool:
    return row["ci_low"] > max(LEAST_SHARE, row["control_largest"])


_BY = {
    "size": "by its size, not its direction",
    "direction": "by its direction, not its size",
    "both": "by both its size and its direction",
    "": "and whether by its size or its direction is not clear",
}


def _value_average_name(tables: Tables) -> str:
    by = value_average_by(tables)
    if by == "direction":
        return "the direction of its value average"
    return "averaging" if by else "its value average"


def _value_average_sentences(tables: Tables) -> list[str]:
    made = interventions_by_name(tables)
    if not {SIZE, DIRECTION, DISTANCE} <= set(made):
        return []
    edits = {
        SIZE: "at an ordinary size",
        DIRECTION: "in an ordinary direction",
        DISTANCE: "at an ordinary distance from the text's mean",
    }
    lost = []
    for name, how in edits.items():
        random = made[name]["control_largest"]
        beside = "" if math.isnan(random) else f" (random directions at most {percent(random)})"
        lost.append(f"{change_text(made[name]['share'], does='lose')} {how}{beside}")
    whole = [
        one for one in made.values() if one["link"] == "variance_preserved" and one["is_primary"]
    ]
    acts = "it is not clear if the value average of the sink token makes the sink"
    if whole and all(one["ci_high"] < LEAST_SHARE for one in (made[DISTANCE], *whole)):
        acts = "the value average of the sink token does not make the sink"
    if _moves_more_than_controls(made[DISTANCE]):
        acts = f"the value average of the sink token makes the sink {_BY[value_average_by(tables)]}"
    return [f"{acts}: the sink {join_and(lost)}"]


def _mixer_sentences(tables: Tables) -> list[str]:
    layers = summary_values(tables).get("mixer_layers")
    if layers is None:
        return []
    return [
        f"isolation takes earlier tokens from the attention alone: the mixers of layers {layers} bring them still"
    ]


BOTH = ("necessary_or_sufficient", "carries")
WORDS: Mapping[str, LinkWords] = {
    "aggregation_variance": LinkWords(
        carries_as=_value_average_name,
        asks={"aggregation_variance": ("present", *BOTH)},
        no_part=Phrase(
            "no variance",
            "Averaging plays no part",
            (
                "links: aggregation_variance, necessary_or_sufficient and carries; "
                "variance_preserved, necessary_or_sufficient",
            ),
        ),
        # what attention writes is linear in the averages: where it matters, so do they, if not by their variance
        no_part_asks={"aggregation_variance": BOTH, "variance_preserved": BOTH[:1]},
        breaking="isolating a position",
        does="make",
        does_not="it makes no sink",
        broken="isolating another position {} of one",
        remarks=lambda tables, _: [*_value_average_sentences(tables), *_mixer_sentences(tables)],
    ),
    "variance_preserved": LinkWords(
        carries_as=lambda _: "what attention writes",
        asks={"variance_preserved": ("present", *BOTH)},
        gentler=("attention", "super neurons"),
    ),
    "variance_neurons": LinkWords(
        carries_as=lambda _: "super neurons",
        asks={"variance_neurons": ("present", *BOTH)},
        gentler=("super neurons", "key"),
    ),
    "neurons_dimension": LinkWords(
        breaking="taking it from the key",
        stands_out="the neurons write it",
        broken="taking it from the key {}",
        remarks=_span_sentences,
        gentler=("everything", "key"),
    ),
    "dimension_key": LinkWords(
        carries_as=_dimensions_text,
        asks={"neurons_dimension": ("carries",), "dimension_key": BOTH},
        named_with=_cancelled_bias_phrase,
        named_without=_direction_phrase,
        remarks=_key_sentences,
    ),
    "key_sink": LinkWords(
        carries_as=lambda _: "its key", asks={"key_sink": BOTH}, last_resort=True
    ),
}
"""In the order of the chain."""
PLAIN = LinkWords()

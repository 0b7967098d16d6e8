"""Findings of a trace, as far as its tables say."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...records import Run
from ...report.patterns import sink_rate_by_position
from ...schema import ALL_STEPS, NOT_IN_BASIS, QUESTIONS, VERDICTS
from ...stats import sort_by_magnitude
from ...text import (
    as_text,
    capitalise,
    interval_text,
    join_and,
    label_parts,
    layers_in_words,
    name_in_words,
    neuron_name,
    percent,
    plural,
    safe_line,
    signed_change,
)
from . import words as findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The findings of a run; None for what its tables do not say."""

    model: str
    position: int | None
    others: tuple[int, ...]
    """Further sink positions."""
    sink_rate: float | None
    sink_interval: tuple[float, float] | None
    having: tuple[int, int] | None
    """Sequences that have the sink, and all, if they differ."""
    threshold: float | None
    min_sink_rate: float
    lasting: list[int] | None
    """The outlier dimensions of two layers or more; all of them if none lasts that long."""
    steps: list[tuple[int, int, float]] | None
    """First and last layer, and by how much the norm ratio grew."""
    super_neurons: list[str] | None
    """As L11.N1229, the strongest first."""
    to_no_key: float | None = None
    """Share of attention that goes to no key, where rows sum to less than 1."""
    cut: bool = False
    """Sequences were cut so that what is studied stands at ``position``, which says nothing of them whole."""

    @property
    def studied(self) -> str:
        known = "the sink token" if self.position is None else f"position {self.position}"
        return "the studied token" if self.cut else known

    @property
    def is_sink(self) -> bool | None:
        return None if self.sink_rate is None else self.sink_rate >= self.min_sink_rate


def title(run: Run) -> str:
    """Return what the sink is and what makes it, in at most 45 words."""
    story = find_story(run)
    if story.is_sink is None or story.sink_rate is None or story.position is None:
        return "The sink was not measured"
    return findings.join_phrases(
        findings.headline_phrases(
            evidence_tables(run),
            is_sink=story.is_sink,
            rate=story.sink_rate,
            position=story.position,
        )
    )


def evidence_tables(run: Run) -> dict[str, pd.DataFrame]:
    known = {name: run.optional(name, columns=columns) for name, columns in _NEEDED.items()}
    return {name: table for name, table in known.items() if table is not None}


_NEEDED = {
    "summary": ["quantity", "value"],
    "links": ["link", "statistic", "ci_low", "ci_high"],
    "effects": [
        "link",
        "edit",
        "position",
        "read_layers",
        "is_primary",
        "share",
        "ci_low",
        "ci_high",
        "control_largest",
    ],
    "dimensions": ["layer", "sink_position", "dimension", "is_outlier"],
    "maker_sets": ["set", "control_of", "target", "ci_low"],
    "paths": ["source", "target", "through", "read_step", "share", "ci_low", "ci_high"],
}
"""Table -> the columns without which it supports no sentence."""


def has_interventions(run: Run) -> bool:
    """Check whether interventions were switched on, and there is a sink to remove."""
    links = run.optional("links", columns=["verdict"])
    without = links is not None and set(links["verdict"]) == {"not applicable"}
    return bool(run.config.get("interventions")) and not without


def headline(story: Story) -> list[str]:
    sentences, at = [], story.studied
    if story.to_no_key is not None:
        said = f"{percent(story.to_no_key)} of attention goes to no key: with this attention function no sink is "
        sentences.append(f"{said}needed to attend to nothing.")
    if story.others:
        several = len(story.others) > 1
        are = "Other sinks are at positions" if several else "Another sink is at position"
        sentences.append(f"{are} {join_and(story.others)}.")
    if story.lasting:
        s = "s" * (len(story.lasting) > 1)
        sentences.append(f"Outlier dimension{s} at {at}: {join_and(story.lasting, most=4)}.")
    elif story.lasting is not None:
        sentences.append(f"No outlier dimension at {at}.")
    if story.steps is not None:
        grown = [
            f"{layers_in_words(first, last)} (×{as_text(factor)})"
            for first, last, factor in story.steps
        ]
        grows = f"grows in {plural(len(grown), 'step')}: {join_and(grown)}"
        grows = grows if grown else "has no growth step"
        sentences.append(f"The norm at {at}, over that of other tokens, {grows}.")
    if found := story.super_neurons:
        sentences.append(f"{plural(len(found), 'super neuron')}: {join_and(found)}.")
    elif found is not None:
        sentences.append("No super neuron was found.")
    return sentences


def ablation_sample_text(run: Run) -> str:
    tested = int(run.config.get("intervention_sequences") or 0)
    if (_sequences_studied(run) or 0) > tested:
        return "sequences that were not used to choose them"
    return "the sequences that were used to choose them"


def _sequences_studied(run: Run) -> int | None:
    tokens = run.optional("tokens", columns=["sequence"])
    return None if tokens is None else len(set(tokens["sequence"]))


_TARGETS = {
    "outlier dimensions": "the outlier dimensions' size",
    "sink logit": "what sink logits take",
}


def headline_numbers(run: Run) -> list[tuple[str, str]]:
    story, found = find_story(run), []
    if story.sink_rate is not None:
        n, has = _sequences_studied(run), f"have the sink at {story.studied}, at "
        if story.threshold is None:
            has += "a threshold (not recorded)"
        elif story.is_sink:
            has += f"threshold {story.threshold:g}"
        else:
            has = f"have a sink score above {story.threshold:g} at {story.studied}"
        where = "" if n is None else f", in {plural(n, 'sequence')}"
        where = where if story.having is None else ", in {} of {} sequences".format(*story.having)
        bounds = interval_text(*(story.sink_interval or (np.nan, np.nan)), shown=percent)
        found.append((f"{story.sink_rate:.0%}", f"of heads {has}{where} {bounds}".rstrip()))
    columns = [
        "set",
        "control_of",
        "size",
        "parts",
        "removed",
        "target",
        "ci_low",
        "ci_high",
        "control_largest",
        "n",
    ]
    makers = run.optional("maker_sets", columns=columns)
    if makers is not None:
        half = makers.loc[makers["set"].eq("half") & makers["control_of"].eq("")]
        for row in half.to_dict("records"):
            parts = join_and(label_parts(row["parts"]).split(", "), most=3)
            are, largest = "is" if row["size"] == 1 else "are", row["control_largest"]
            bounds = interval_text(row["ci_low"], row["ci_high"], shown=percent)
            random = "" if np.isnan(largest) else f"; random parts: at most {percent(largest)}"
            lost = _TARGETS.get(row["target"], f"the {row['target']}")
            what = f"of {lost} is lost if {parts} {are} ablated"
            what += f" ({bounds}, {plural(row['n'], 'sequence')}{random})"
            found.append((percent(row["removed"]), what))
    elif story.super_neurons:
        number, _, noun = plural(len(story.super_neurons), "super neuron").partition(" ")
        found.append((number, f"{noun}, {join_and(story.super_neurons, most=3)}"))
    losses = ["baseline_loss_nats", "masked_loss_nats"]
    effects = run.optional("effects", columns=losses)
    if effects is not None and len(effects):
        before, masked = effects[losses].to_numpy(float)[0]
        if np.isfinite(masked):
            what = "nats of loss when later tokens cannot attend to it"
            found.append((signed_change(masked - before, 2), what))
    return found


def verdict_counts_text(verdicts: dict[str, str]) -> str:
    counts = {name: sum(verdict == name for verdict in verdicts.values()) for name in VERDICTS}
    if counts["not applicable"] == len(verdicts) > 0:
        return "There is no sink for the chain to lead to, so no link is judged; what was measured is shown."
    parts = [f"{count} {_COUNTED[name][count > 1]}" for name, count in counts.items() if count]
    if parts:
        first, _, rest = parts[0].partition(" ")
        parts[0] = f"{first} of {len(verdicts)} links {rest}"
    said = f"{join_and(parts)}."
    if counts["present, not tested"] + counts["absent"]:
        said += " No link was tested: without interventions nothing says that one causes the next."
    return said


_COUNTED = {
    "holds": ("holds", "hold"),
    "in part": ("holds in part", "hold in part"),
    "fails": ("fails", "fail"),
    NOT_IN_BASIS: ("is not in this basis", "are not in this basis"),
    "present, not tested": ("is present", "are present"),
    "absent": ("is absent", "are absent"),
    "undecided": ("is undecided", "are undecided"),
    "not applicable": ("is not applicable", "are not applicable"),
    "not asked": ("was not asked", "were not asked"),
    "mixed": ("has mixed statistics", "have mixed statistics"),
    "not measured": ("was not measured", "were not measured"),
}
"""What one link does, and what several do."""


_NOT = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLink:
    """A link of a run's chain, with the names of its nodes."""

    name: str
    source: str
    target: str
    sentence: str

    @property
    def in_words(self) -> str:
        """Such as "super neurons → outlier dimension"."""
        return f"{self.source} → {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """A link, its primary statistic and its intervention, as texts of the page's table."""

    link: str
    title: str
    claim: str
    verdict: str
    measured: str = ""
    """Verdict of what was measured, if the link's own is not applicable."""
    statistic: str = ""
    value: str = ""
    interval: str = ""
    nulls: tuple[tuple[str, str], ...] = ()
    criterion: str = ""
    intervention: str = ""
    intervention_share: str = ""
    intervention_interval: str = ""
    control_share: str = ""
    control_largest: str = ""
    loss: str = ""
    answers: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()


def recorded_number(run: Run, name: str) -> float | None:
    for held in (run.config, run.provenance.get("thresholds"), run.provenance):
        if isinstance(held, Mapping) and held.get(name) is not None:
            return float(held[name]) if isinstance(held[name], (int, float)) else None
    return None


def find_story(run: Run) -> Story:
    """Collect the findings; a field is None if the run lacks its table."""
    model = run.provenance.get("model") or run.config.get("model") or "a model without a name"
    minimum = recorded_number(run, "min_sink_rate") or 0.05
    rates = sink_rate_by_position(run)
    position, rate = next(iter(rates.items()), (None, None))
    others = tuple(place for place in rates if place != position and rates[place] >= minimum)
    summary = run.optional("summary", columns=["quantity", "value", "ci_low", "ci_high"])
    bounds = having = to_no_key = found = lasting = supers = None
    cut = False
    if summary is not None:
        values = dict(zip(summary["quantity"], summary["value"], strict=True))
        cut = not {"aligned_position", "at_token"}.isdisjoint(values)
        others = () if cut else others  # there they are positions of cut sequences
        if "attention_to_no_key" in values:
            to_no_key = float(values["attention_to_no_key"])
        if "sequences_with_sink" in values:
            with_sink, asked = values["sequences_with_sink"], values["sequences_asked"]
            having = int(float(with_sink)), int(float(asked))
        own = summary.loc[summary["quantity"] == "sink_rate", ["value", "ci_low", "ci_high"]]
        if rate is not None and len(own):
            rate, low, high = map(float, own.iloc[-1])
            bounds = low, high
    step_columns = ["first_layer", "last_layer", "ratio_before", "ratio_after"]
    steps = run.optional("growth_steps", columns=step_columns)
    dimensions = run.optional("dimensions", columns=_NEEDED["dimensions"])
    neurons = run.optional(
        "neurons", columns=["layer", "neuron", "sink_position", "contribution", "is_super"]
    )
    if steps is not None:
        rows = steps[step_columns].itertuples(index=False)
        found = [(int(first), int(last), after / before) for first, last, before, after in rows]
    if dimensions is not None:
        marked = _marked_rows(dimensions, "is_outlier", position)
        counts = Counter(marked["dimension"].to_numpy(float).astype(int).tolist())
        dims = sorted(counts, key=lambda one: (-counts[one], one))
        lasting = [one for one in dims if counts[one] > 1] or dims
    if neurons is not None:
        marked = _marked_rows(neurons, "is_super", position)
        marked = sort_by_magnitude(marked, "contribution")
        names = marked[["layer", "neuron"]].itertuples(index=False)
        supers = list(dict.fromkeys(neuron_name(layer, neuron) for layer, neuron in names))
    return Story(
        model=str(model),
        position=position,
        others=others,
        sink_rate=rate,
        sink_interval=bounds,
        having=having,
        threshold=recorded_number(run, "threshold"),
        min_sink_rate=minimum,
        lasting=lasting,
        steps=found,
        super_neurons=supers,
        to_no_key=to_no_key,
        cut=cut,
    )


def _marked_rows(table: pd.DataFrame, column: str, position: int | None) -> pd.DataFrame:
    marked = table.loc[table[column].eq(True)]
    return marked if position is None else marked.loc[marked["sink_position"] == position]


def named_links(run: Run) -> list[NamedLink]:
    """Return the links of the table ``chain``; [] without it."""
    table = run.optional("chain", columns=["order", "link", "source", "target", "sentence"])
    if table is None:
        return []
    rows = table.sort_values("order")[["link", "source", "target", "sentence"]]
    return [
        NamedLink(name=name, source=source, target=target, sentence=sentence)
        for name, source, target, sentence in rows.itertuples(index=False)
    ]


PATH_COLUMNS = [
    "source",
    "source_step",
    "target",
    "target_step",
    "through",
    "read_step",
    "share",
    "ci_low",
    "ci_high",
    "control_share",
    "control_largest",
]


def paths_after_their_step(table: pd.DataFrame) -> pd.DataFrame:
    """Keep paths as read after their target's growth step (``step``), or in all layers."""
    step = table["target_step"].where(table["target"] != "sink", table["source_step"])
    read = step.where(step.isin(list({*table["read_step"]} - {ALL_STEPS})), ALL_STEPS)
    return table.assign(step=step).loc[table["read_step"] == read]


def link_rows(run: Run) -> list[LinkRow]:
    columns = [
        "link",
        "statistic",
        "value",
        "ci_low",
        "ci_high",
        "null_name",
        "null_value",
        "criterion",
        "verdict",
    ]
    rows: list[Any] = run.need("links", columns=columns).to_dict("records")
    known = {link.name: link for link in named_links(run)}
    effects, frames = _intervention_texts(run), evidence_tables(run)
    shown = []
    for name in dict.fromkeys([*known, *(str(row["link"]) for row in rows)]):
        own = [row for row in rows if row["link"] == name]
        texts = effects.get(name, {})
        remarks = tuple(f"{capitalise(one)}." for one in findings.link_remarks(frames, name))
        shown.append(_row_of_link(name, own, link=known.get(name), texts=texts, remarks=remarks))
    return shown


def _intervention_texts(run: Run) -> dict[str, dict[str, str]]:
    columns = ["link", "edit", "share", "ci_low", "ci_high", "control_share", "is_primary"]
    table = run.optional("effects", columns=columns)
    if table is None:
        return {}
    table = table.loc[table["is_primary"].eq(True)]
    return {
        str(row["link"]): {
            "intervention": format_edit_name(row["edit"]),
            "intervention_share": percent(row["share"]),
            "intervention_interval": interval_text(row["ci_low"], row["ci_high"], shown=percent),
            "control_share": _percent_or_empty(row["control_share"]),
            "control_largest": _percent_or_empty(row.get("control_largest", math.nan)),
            "loss": _loss_text(row),
        }
        for row in table.to_dict("records")
    }


def format_edit_name(edit: object) -> str:
    return re.sub(r" x (?=[\d.])", "\u00a0×\u00a0", safe_line(edit))


def _percent_or_empty(share: float) -> str:
    return "" if math.isnan(share) else percent(share)


def _loss_text(row: Mapping[Any, Any]) -> str:
    before, after = row.get("baseline_loss_nats", math.nan), row.get("loss_nats", math.nan)
    known = not (math.isnan(before) or math.isnan(after))
    return f"{before:.2f} → {after:.2f} ({signed_change(after - before, 2)})" if known else ""


def _row_of_link(
    name: str,
    rows: list[dict[str, Any]],
    *,
    link: NamedLink | None,
    texts: Mapping[str, str],
    remarks: tuple[str, ...],
) -> LinkRow:
    claim, title = (
        ("", name_in_words(safe_line(name))) if link is None else (link.sentence, link.in_words)
    )
    if not rows:
        return LinkRow(link=safe_line(name), title=title, claim=claim, verdict=_NOT)
    rows = sorted(rows, key=lambda row: not row.get("is_primary", True))
    own = {row["verdict"] for row in rows if _safe_text(row["verdict"])}
    first, statistic = rows[0], rows[0]["statistic"]
    is_share = str(statistic).endswith("_share")
    nulls = [
        (name_in_words(_safe_text(row["null_name"])), as_text(row["null_value"]))
        for row in rows
        if row["statistic"] == statistic
        and not (is_share and abs(row["null_value"]) > 1)  # no null of a share is over 1
    ]
    measured = _safe_text(first.get("measured"))
    return LinkRow(
        link=safe_line(name),
        title=title,
        claim=claim,
        verdict="mixed" if len(own) > 1 else safe_line(next(iter(own), _NOT)),
        measured=measured if _safe_text(first["verdict"]) == "not applicable" else "",
        statistic=name_in_words(_safe_text(statistic)),
        value=as_text(first["value"]),
        interval=interval_text(first["ci_low"], first["ci_high"]),
        nulls=tuple(null for null in nulls if null[0] not in ("", "none")),
        criterion=re.sub(
            r"\b\w+_\w+\b", lambda found: name_in_words(found[0]), _safe_text(first["criterion"])
        ),
        answers=tuple(
            (name_in_words(one), said) for one in QUESTIONS if (said := _safe_text(first.get(one)))
        ),
        remarks=remarks,
        **texts,
    )


def _safe_text(value: Any) -> str:
    return safe_line(value, limit=400) if isinstance(value, str) else ""

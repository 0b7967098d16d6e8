"""What a trace found, in words: every phrase stands on rows of the run's tables, and is not said without them.

The headline is made from a small grammar: where the sink is, what it is bound to, what carries it, and what plays no
part, in at most 25 words. Each phrase has a key, by which a table of permitted headlines names it, and the rows that
support it. `remarks` says of one link what keeps it undecided, where a statistic and an intervention disagree, or a
control does as much.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .schema import ALL_BUT, COSTLY, INTERVENTION_FLOOR, LEAST_SINK, RESCALED, SPAN, TELLING_LOSS
from .text import listed, percent, plural

MOST_WORDS = 25
"""Most words of a headline."""
CANCELS = 0.5
"""A bias of the keys is cancelled if the cosine with minus the bias is above this, and the sink's key shorter than this
share of other keys."""
_BOUND = {
    "positional": "for any first token",
    "positional, not BOS": "for any first token but BOS",
    "token": "wherever BOS stands",
    "position or token": "for any first token, and wherever BOS stands",
    "position and token": "only for BOS at the start",
}
"""What the sink is bound to, as the table of placements gives it -> in words; other kinds say nothing."""

Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """A part of a headline."""

    key: str
    """What it says: `no sink`, `sink`, `bound`, `by LINK`, `cancels bias`, `direction`, `no variance`, and so on."""
    text: str
    rows: tuple[str, ...]
    """The rows that it stands on, as `table: condition`."""


def headline(tables: Tables, *, is_sink: bool, rate: float, position: int) -> list[Phrase]:
    """The phrases of a run's headline, in their order; together they have at most ``MOST_WORDS`` words."""
    phrases = _with_sink(tables, rate, position) if is_sink else _without_sink(tables)
    said: list[Phrase] = []
    for phrase in phrases:
        if len(sentence([*said, phrase]).split()) <= MOST_WORDS:
            said.append(phrase)
    return said


def sentence(phrases: list[Phrase]) -> str:
    """The phrases as one line."""
    return "; ".join(phrase.text for phrase in phrases)


def _without_sink(tables: Tables) -> list[Phrase]:
    """Phrases on a model without a sink."""
    found = [Phrase(key="no sink", text="No position is an attention sink", rows=("heads: sink_rate",))]
    values = _summary(tables)
    if "strongest_position" in values:
        share = percent(float(values["strongest_rate"]))
        text = f"position {_whole(values['strongest_position'])} comes nearest, with one in {share} of heads"
        found.append(Phrase(key="strongest", text=text, rows=("summary: strongest_position, strongest_rate",)))
    sets = tables.get("maker_sets")
    if sets is not None and "sink logit" in sets["target"].tolist():
        text = "learned sink logits take the attention"
        found.append(Phrase(key="sink logit", text=text, rows=("maker_sets: target == sink logit",)))
    return found


def _with_sink(tables: Tables, rate: float, position: int) -> list[Phrase]:
    """Phrases on where the sink is."""
    values, text = _summary(tables), f"Position {position} is the attention sink"
    rows = ("heads: sink_rate at the position",)
    if "aligned_position" in values:
        text = "Each sequence has its own attention sink"
        rows = ("summary: aligned_position",)
    found = [Phrase(key="sink", text=f"{text} ({percent(rate)} of heads)", rows=rows)]
    if "sequences_elsewhere" in values:
        count = plural(_whole(values["sequences_elsewhere"]), "sequence")
        rows = ("summary: sequences_elsewhere",)
        found.append(Phrase(key="elsewhere", text=f"{count} have it elsewhere", rows=rows))
    kind = str(values.get("sink_bound_to", ""))
    if kind in _BOUND:
        found.append(Phrase(key=f"bound: {kind}", text=_BOUND[kind], rows=("placement: is_sink, not isolated",)))
    return [*found, *_name_carriers(tables), *_no_part(tables)]


def _name_carriers(tables: Tables) -> list[Phrase]:
    """Find the parts that carry the sink: both link and ablation say so, above their largest controls."""
    answers = _answers(tables)
    if not answers or not len(tables.get("effects", ())):
        return []

    def yes(link: str, *questions: str) -> bool:
        """True if every question on the link has the answer yes."""
        return link in answers and all(answers[link][name] == "yes" for name in questions)

    both = ("necessary_or_sufficient", "carries")
    parts = [
        ("aggregation_variance", "averaging", yes("aggregation_variance", "present", *both)),
        ("variance_preserved", "what attention writes", yes("variance_preserved", "present", *both)),
        ("variance_neurons", "super neurons", yes("variance_neurons", "present", *both)),
        ("dimension_key", _dimensions(tables), yes("neurons_dimension", "carries") and yes("dimension_key", *both)),
    ]
    names = [(link, name) for link, name, shown in parts if shown and name]
    whole = len(names) == len(parts)
    if not names and yes("key_sink", *both):
        names = [("key_sink", "its key")]
    found = []
    if names:
        keys = " + ".join(f"by {link}" for link, _ in names)
        rows = tuple(f"links: {link}, present, necessary_or_sufficient and carries" for link, _ in names)
        what = listed(name for _, name in names)
        if whole:
            what = f"the whole chain, averaging to {names[-1][1]}"
        found.append(Phrase(key=keys, text=f"carried by {what}", rows=rows))
    else:
        found.append(Phrase(key="nothing shown", text="nothing was shown to carry it", rows=("links: carries",)))
    if any(link == "dimension_key" for link, _ in names):
        if cancels_bias(tables):
            rows = ("links: dimension_key, bias_cancelled and key_norm_ratio",)
            found.append(Phrase(key="cancels bias", text="which cancels the keys' bias", rows=rows))
    elif is_direction(tables) and "no" in _answers_on_sink(answers, "dimension_key") and _dimensions(tables):
        # where no dimension stands out, or where it is undecided, none was shown not to carry the sink
        rows = (
            f"effects: {SPAN}, its controls, and {RESCALED}",
            "dimensions: is_outlier; links: dimension_key, necessary_or_sufficient or carries is no",
        )
        found.append(Phrase(key="direction", text="along a direction, no single dimension", rows=rows))
    return found


def _no_part(tables: Tables) -> list[Phrase]:
    """Say that averaging plays no part, if both answers are no."""
    answers = _answers(tables).get("aggregation_variance", {})
    if answers.get("necessary_or_sufficient") == answers.get("carries") == "no":
        rows = ("links: aggregation_variance, necessary_or_sufficient and carries",)
        return [Phrase(key="no variance", text="averaging plays no part", rows=rows)]
    return []


def _answers_on_sink(answers: Mapping[str, Mapping[str, str]], link: str) -> tuple[str, ...]:
    """Return what the two questions that speak of the sink answer about a link."""
    return tuple(answers[link][name] for name in ("necessary_or_sufficient", "carries")) if link in answers else ()


def _dimensions(tables: Tables) -> str:
    """The outlier dimensions that the keys read in the layers where the sink is; by number if there is one."""
    table, effects = tables.get("dimensions"), tables.get("effects")
    if table is None or effects is None:
        return ""
    read = effects.loc[effects["link"].eq("dimension_key"), "read_layers"]
    layers = [layer - 1 for layer in _layers(str(read.iloc[0]))] if len(read) else []
    position = effects["position"].loc[read.index[0]] if len(read) and "position" in effects.columns else None
    here = table["is_outlier"].eq(True) & table["layer"].isin(layers) & table["sink_position"].eq(position)
    names = sorted({int(one) for one in table.loc[here, "dimension"]})
    if not names:
        return ""
    return f"dimension {names[0]}" if len(names) == 1 else f"{len(names)} outlier dimensions"


def _layers(text: str) -> list[int]:
    """``1-2,11`` as numbers."""
    ends = [part.split("-") for part in text.split(",") if part]
    return [layer for part in ends for layer in range(int(part[0]), int(part[-1]) + 1)]


def cancels_bias(tables: Tables) -> bool:
    """Check whether the outlier dimensions point against the keys' bias, and leave the sink's key short."""
    rows = _statistics(tables, "dimension_key")
    if not {"bias_cancelled", "key_norm_ratio"} <= set(rows):
        return False
    return rows["bias_cancelled"]["ci_low"] > CANCELS and rows["key_norm_ratio"]["ci_high"] < CANCELS


def is_direction(tables: Tables) -> bool:
    """Check that the span of what the makers write carries the sink beyond random spans and beyond its norm alone."""
    rows = _effects(tables)
    if not {SPAN, RESCALED} <= set(rows):
        return False
    span, norm = rows[SPAN], rows[RESCALED]
    least = float(span["ci_low"])
    return least > INTERVENTION_FLOOR and least > float(span["control_largest"]) and least > float(norm["ci_high"])


def remarks(tables: Tables, link: str) -> list[str]:
    """Sentences on what keeps a link undecided, where statistic and intervention disagree, and on its controls."""
    answers, effects = _answers(tables).get(link), tables.get("effects")
    if not answers or effects is None or not len(effects):
        return []
    why = why_undecided(tables, link)
    said = [f"undecided: {why}"] if why else []
    own = effects.loc[effects["link"].eq(link) & effects["is_primary"].eq(True)].to_dict("records")
    moved = percent(own[0]["share"]) if own else ""
    not_so, broken = "the sink does not hang on it", f"breaking it removes {moved}"
    if link == "aggregation_variance":
        not_so, broken = "it makes no sink", f"isolating another position makes {moved} of one"
    if own and own[0]["ci_low"] > INTERVENTION_FLOOR and own[0]["control_largest"] >= own[0]["ci_low"]:
        said.append(f"a control moves as much ({percent(own[0]['control_largest'])}), so that this shows nothing")
    elif answers["present"] == "yes" and answers["necessary_or_sufficient"] == "no" and own:
        said.append(f"it stands out, but {not_so}: {broken}")
    elif answers["present"] == "no" and answers["necessary_or_sufficient"] == "yes":
        said.append(f"it does not stand out by this statistic, yet {broken}")
    rows = _effects(tables)
    if link == "dimension_key" and own and ALL_BUT in rows:
        rest = rows[ALL_BUT]
        if rest["ci_low"] > own[0]["ci_high"]:
            said.append(
                f"the dimensions' part of the key makes {moved} of the sink, everything else in it "
                f"{percent(rest['share'])}"
            )
    if link == "dimension_key" and cancels_bias(tables):
        of = _statistics(tables, link)
        said.append(
            f"the dimensions cancel the keys' bias (cosine {of['bias_cancelled']['value']:.2f}): the sink's key is the "
            f"short one ({of['key_norm_ratio']['value']:.2f} of the others' norm)"
        )
    if link == "neurons_dimension" and SPAN in rows:
        span = rows[SPAN]
        if span["ci_low"] > INTERVENTION_FLOOR and not span["ci_low"] > span["control_largest"]:
            said.append(
                f"random spans remove up to {percent(span['control_largest'])}, as the makers' span does: beside so "
                "large a dimension any change of direction disturbs the key"
            )
    return said


def why_undecided(tables: Tables, link: str) -> str:
    """Say what keeps an undecided link from a verdict; empty where it has one, or no interventions were made."""
    answers, effects = _answers(tables).get(link), tables.get("effects")
    if not answers or effects is None or not len(effects):
        return ""
    of = tables["links"].loc[tables["links"]["link"].eq(link)]
    if of["verdict"].iloc[0] != "undecided":
        return ""
    if answers["present"] == "no":
        return "it does not stand out by its statistic, yet the sink hangs on it by its interventions"
    if answers["present"] == "undecided":
        return "its statistic cannot be told from the value that it must exceed"
    own = effects.loc[effects["link"].eq(link) & effects["is_primary"].eq(True)].to_dict("records")
    if answers["necessary_or_sufficient"] == "yes":
        return "what it leads to carries less than half of the sink: another path exists"
    if not own:
        return "nothing was there to intervene on"
    row, breaking = own[0], "isolating a position" if link == "aggregation_variance" else "breaking it"
    if math.isnan(row["ci_low"]):
        return "one sequence gives no interval"
    if not row.get("baseline_sink_mass", 1.0) - row.get("uniform_sink_mass", 0.0) >= LEAST_SINK:
        return "the sink has hardly more attention than chance, and a share of that says nothing"
    if off_distribution(row):
        cost = row["loss_nats"] - row["baseline_loss_nats"]
        beyond = f"at least {row['beyond_masking_nats']:.1f} more than masking the sink"
        return f"{breaking} costs {cost:.1f} nats, {beyond}: it may break more than the sink"
    does = "makes" if link == "aggregation_variance" else "removes"
    if "not calibrated" in set(of.get("floors", ())):
        return f"what {breaking} {does} may lie below the floor that was asked for, or below a control"
    bars = {
        percent(INTERVENTION_FLOOR): INTERVENTION_FLOOR,
        "what a control does": row.get("control_largest", math.nan),
    }
    reached = [name for name, bar in bars.items() if row["ci_low"] <= bar]
    if not reached:  # its intervention is clear, and what it is measured on does not tell sinks
        return "the sequences are too short to tell of a sink"
    return f"what {breaking} {does} may lie below {' and below '.join(reached)}"


def off_distribution(row: Mapping[Hashable, Any]) -> bool:
    """Check whether an intervention, a row of ``effects``, costs clearly more than masking the sink itself.

    It is asked only where the unchanged model predicts clearly better than uniform guessing. Removing a sink may be
    costly because the sink matters, so a high loss alone says nothing.
    """
    baseline, uniform = row.get("baseline_loss_nats", math.nan), row.get("uniform_loss_nats", math.nan)
    asked = baseline < TELLING_LOSS * uniform
    return bool(asked and row.get("beyond_masking_nats", math.nan) > COSTLY)


def shown_set(row: Mapping[Any, Any]) -> str:
    """A set of parts by its size and the least that it was shown to remove where it was not chosen."""
    size = plural(int(row["size"]), "part")
    shown = f"at least {percent(float(row['ci_low']))}" if beyond_chance(row) else "no more than chance"
    return f"{_SETS.get(str(row['set']), '')}{size}: {shown}"


def beyond_chance(row: Mapping[Any, Any]) -> bool:
    """Check whether a set of parts was shown to remove more than nothing, and than any random set beside it."""
    control = row.get("control_largest")
    most = float(control) if control is not None and control == control else 0.0
    return float(row["ci_low"]) > max(0.0, most)


_SETS = {"all makers": "all makers, ", "super neurons": "super neurons, ", "upstream of them": "upstream of them, "}
"""Set -> how its name begins; those that were chosen by a goal are named by what they remove alone."""


def _whole(value: object) -> int:
    """The value as a whole number."""
    return int(float(str(value)))


def _summary(tables: Tables) -> dict[str, Any]:
    """The values of the table ``summary`` by quantity."""
    table = tables.get("summary")
    return {} if table is None else dict(zip(table["quantity"], table["value"], strict=True))


def _answers(tables: Tables) -> dict[str, dict[str, str]]:
    """Link -> its three answers; empty in runs that have none."""
    table, names = tables.get("links"), ("present", "necessary_or_sufficient", "carries")
    if table is None or not set(names) <= set(table.columns):
        return {}
    rows = table.drop_duplicates("link").to_dict("records")
    return {str(row["link"]): {name: str(row[name]) for name in names} for row in rows}


def _statistics(tables: Tables, link: str) -> dict[str, dict[str, Any]]:
    """A link's statistics by name."""
    table = tables.get("links")
    if table is None:
        return {}
    rows = table.loc[table["link"].eq(link)].drop_duplicates("statistic").to_dict("records")
    return {str(row["statistic"]): {str(name): value for name, value in row.items()} for row in rows}


def _effects(tables: Tables) -> dict[str, dict[str, Any]]:
    """The interventions by name."""
    table = tables.get("effects")
    if table is None or not len(table):
        return {}
    rows = table.drop_duplicates("edit").to_dict("records")
    return {str(row["edit"]): {str(name): value for name, value in row.items()} for row in rows}

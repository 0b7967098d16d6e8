"""Findings of a trace in words: every phrase stands on rows of the run's tables, and is not said without them.

The headline says where the sink is, what it is bound to, what carries it, and what plays no part;
``tests/headlines.md`` lists its phrases with what must hold for each.
"""

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import pandas as pd

from ...schema import (
    ALL_STEPS,
    ANOTHER_PATH,
    COSTLY,
    INTERVENTION_FLOOR,
    LEAST_SHARE,
    LEAST_SINK,
    TELLING_LOSS,
)
from ...text import (
    capitalise,
    interval_text,
    join_and,
    label_parts,
    percent,
    plural,
    signed_change,
)
from ..links.words import (
    BOTH,
    PLAIN,
    WORDS,
    Phrase,
    Tables,
    answers_by_link,
    change_text,
    summary_values,
)

MOST_WORDS = 45
BOUND = {
    "positional": "It does not matter which token comes first",
    "positional, not BOS": "Any first token makes it but BOS",
    "token": "BOS makes it wherever it stands",
    "position or token": "Any first token makes it, and BOS wherever it stands",
    "position and token": "Only BOS at the start makes it",
    "own position": "It does not matter which token stands there",
    "own token": "The token makes it wherever it stands",
    "own position or token": "Any token there makes it, and its own token elsewhere",
    "own position and token": "Only its own token there makes it",
    "some tokens": "Some tokens there make it, and others do not",
}
"""Kind of a placement -> what the sink is bound to; other kinds say nothing."""
ANY_TOKEN = (
    "positional",
    "positional, not BOS",
    "position or token",
    "own position",
    "own position or token",
)
"""Kinds that speak of any token: a sink that only some sequences have is of none of them."""
FEWEST = 4
"""A sink of fewer sequences is not tested."""

_VIEWS_DIFFER = 0.2
"""The makers and the super neurons disagree if their shares differ by more than this."""
_UNBOUND = {
    "no sink": "Neither position 0 nor BOS brings one on these sequences",
    "undecided": "The sequences are too short to tell",
}


def headline_phrases(tables: Tables, *, is_sink: bool, rate: float, position: int) -> list[Phrase]:
    phrases = (
        _phrases_with_sink(tables, rate, position) if is_sink else _phrases_without_sink(tables)
    )
    said: list[Phrase] = []
    for phrase in phrases:
        if len(join_phrases([*said, phrase]).split()) <= MOST_WORDS:
            said.append(phrase)
    return said


def join_phrases(phrases: list[Phrase]) -> str:
    return ". ".join(phrase.text for phrase in phrases)


def _phrases_without_sink(tables: Tables) -> list[Phrase]:
    values, text = summary_values(tables), "No position is an attention sink"
    if "at_token" in values:  # no other was asked about
        text = f"The token {values['at_token']} is no attention sink"
    found = [Phrase("no sink", text, ("heads: sink_rate",))]
    if "strongest_position" in values:
        share = percent(float(values["strongest_rate"]))
        text = f"Position {_int_from_text(values['strongest_position'])} comes nearest, with one in {share} of heads"
        found.append(Phrase("strongest", text, ("summary: strongest_position, strongest_rate",)))
    if "marked_tokens" in values:
        count = _int_from_text(values["marked_sequences"])
        share = percent(float(values["marked_attention"]))
        text = f"Tokens such as {values['marked_tokens']} are sinks in {plural(count, 'sequence')}, see at=: "
        text += f"behind them {share} of attention goes to them"
        found.append(Phrase("marked", text, ("summary: marked_tokens, marked_sequences",)))
    if "mixer_layers" in values:
        text = f"What mixers keep of a token, in layers {values['mixer_layers']}, has no key and was not asked"
        found.append(Phrase("state", text, ("summary: mixer_layers",)))
    sets = tables.get("maker_sets")
    if sets is not None and "sink logit" in sets["target"].tolist():
        text = "Learned sink logits take the attention"
        found.append(Phrase("sink logit", text, ("maker_sets: target == sink logit",)))
    return found


def _phrases_with_sink(tables: Tables, rate: float, position: int) -> list[Phrase]:
    values, text = summary_values(tables), f"Position {position} is the attention sink"
    rows = ("heads: sink_rate at the position",)
    if "at_token" in values:
        text = f"The token {values['at_token']} is an attention sink"
    aligned, some = "aligned_position" in values, "sequences_with_sink" in values
    if aligned:
        left = values.get("sequences_uncut")
        but = "" if left is None else f" but the {_int_from_text(left)} left out"
        text = f"Each sequence{but} has its own attention sink"
        rows = ("summary: aligned_position, sequences_uncut",)
    share = "" if some else f" ({percent(rate)} of heads)"
    found = [Phrase("sink", f"{text}{share}", rows)]
    if some:
        count, whole = (
            _int_from_text(values[name]) for name in ("sequences_with_sink", "sequences_asked")
        )
        few = ", too few to test" if count < FEWEST else ""
        text = f"It is in {count} of {whole} sequences, in {percent(rate)} of their heads{few}"
        found.append(Phrase("some", text, ("summary: sequences_with_sink, sink_rate",)))
    if "other_sink_positions" in values and not aligned:  # else they are of cut sequences
        rest = [_int_from_text(one) for one in str(values["other_sink_positions"]).split(",")]
        are, most = ("are positions", "at most ") if len(rest) > 1 else ("is position", "")
        text = f"So {are} {join_and(rest, most=4)} ({most}{percent(float(values['other_sink_rate']))} of heads), "
        text += "not studied here"
        found.append(Phrase("others", text, ("summary: other_sink_positions, other_sink_rate",)))
    if "marked_tokens" in values and not aligned:  # else they are of cut sequences
        count = plural(_int_from_text(values["marked_sequences"]), "sequence")
        there, here = (
            percent(float(values[name])) for name in ("marked_attention", "attention_behind_marked")
        )
        at = "the studied token" if "at_token" in values else f"position {position}"
        text = f"In {count} {values['marked_tokens']} is a sink too: behind it {there} of attention goes there, "
        text += f"{here} to {at}"
        found.append(Phrase("marked", text, ("summary: marked_tokens, marked_attention",)))
    if "sink_logit_rate" in values:
        text = f"In {percent(float(values['sink_logit_rate']))} of heads learned sink logits take the attention"
        found.append(Phrase("sink logit", text, ("summary: sink_logit_rate",)))
    if "sequences_elsewhere" in values:
        count = plural(_int_from_text(values["sequences_elsewhere"]), "sequence")
        rows = ("summary: sequences_elsewhere",)
        have = "has" if count.startswith("1 ") else "have"
        found.append(Phrase("elsewhere", f"{capitalise(count)} {have} it elsewhere", rows))
    kind = str(values.get("sink_bound_to", ""))
    if kind in BOUND:
        found.append(Phrase(f"bound: {kind}", BOUND[kind], ("placement: is_sink, not isolated",)))
    if "links" in tables and not len(tables.get("effects", ())):
        return [*found, Phrase("untested", "What makes it was not tested", ("effects: no rows",))]
    answers = answers_by_link(tables)
    idle = [
        words.no_part
        for words in WORDS.values()
        if words.no_part is not None and _all_answered(answers, words.no_part_asks, ("no",))
    ]
    return [*found, *_carrier_phrases(tables), *_maker_phrases(tables), *idle]


def _all_answered(
    answers: Mapping[str, Mapping[str, str]],
    asks: Mapping[str, tuple[str, ...]],
    told: Collection[str],
) -> bool:
    return all(
        answers.get(link, {}).get(name) in told for link, asked in asks.items() for name in asked
    )


def _maker_phrases(tables: Tables) -> list[Phrase]:
    sets = tables.get("maker_sets")
    if sets is None:
        return []
    for row in sets.loc[sets["set"].eq("half") & sets["control_of"].eq("")].to_dict("records"):
        if row["target"] == "sink" and is_beyond_chance(row):
            parts = "one part" if row["size"] == 1 else plural(int(row["size"]), "part")
            named = [label_parts(one) for one in str(row.get("parts") or "").split(", ") if one]
            parts += f" ({join_and(named, most=4)})" if named else ""
            text = f"Switching off {parts} removes {percent(float(row['removed']))} of it"
            rows = ("maker_sets: set == half, ci_low above 0 and control_largest",)
            if damage := _damage_clause(row, tables):
                text += f" and damages the model itself ({damage})"
                return [Phrase("makers, costly", text, (*rows, "effects: masked_loss_nats"))]
            return [Phrase("makers", text, rows)]
    return []


def _damage_clause(row: Mapping[Hashable, Any], tables: Tables) -> str:
    effects = tables.get("effects")
    if effects is None or not len(effects):
        return ""
    masked, uniform = effects[["masked_loss_nats", "uniform_loss_nats"]].iloc[0]
    beside = {"uniform_loss_nats": uniform, "beyond_masking_nats": row["loss_nats"] - masked}
    return _cost_text(row) if is_off_distribution({**row, **beside}) else ""


def _cost_text(row: Mapping[Any, Any]) -> str:
    return f"loss {signed_change(row['loss_nats'] - row['baseline_loss_nats'], 1)} nats"


def _carrier_phrases(tables: Tables) -> list[Phrase]:
    answers = answers_by_link(tables)
    if not answers or not len(tables.get("effects", ())):
        return []

    def named(*, last_resort: bool, told: Collection[str] = ("yes",)) -> list[tuple[str, str]]:
        return [
            (link, carrier)
            for link, words in WORDS.items()
            if words.last_resort == last_resort
            and words.asks
            and (carrier := words.carries_as(tables))
            if _all_answered(answers, words.asks, told)
        ]

    names = named(last_resort=False)
    partly = [one for one in named(last_resort=False, told=("yes", "in part")) if one not in names]
    whole = len(names) == sum(
        bool(words.asks) and not words.last_resort for words in WORDS.values()
    )
    names = names or named(last_resort=True)
    found = []
    if names:
        keys = " + ".join(f"by {link}" for link, _ in names)
        rows = tuple(
            f"links: {link}, present, necessary_or_sufficient and carries" for link, _ in names
        )
        text = f"{_carry_text(names)} it"
        if whole:
            text = f"The whole chain carries it, from {names[0][1]} to {names[-1][1]}"
        found.append(Phrase(keys, text, rows))
    if partly:
        keys = " + ".join(f"part by {link}" for link, _ in partly)
        rows = ("links: necessary_or_sufficient or carries is in part",)
        found.append(Phrase(keys, f"{_carry_text(partly)} part of it", rows))
    elif not names:
        found.append(Phrase("nothing shown", "Nothing was shown to carry it", ("links: carries",)))
    for link, words in WORDS.items():
        more = None
        if link in dict(names):
            more = words.named_with(tables)
        elif "no" in (answers.get(link, {}).get(name) for name in BOTH):  # undecided shows nothing
            more = words.named_without(tables)
        found += [] if more is None else [more]
    return found


def _carry_text(named: list[tuple[str, str]]) -> str:
    what = join_and(name for _, name in named)
    several = len(named) > 1 or what.endswith(("neurons", "dimensions"))
    return f"{capitalise(what)} {'carry' if several else 'carries'}"


def link_remarks(tables: Tables, link: str) -> list[str]:
    answers, effects = answers_by_link(tables).get(link), tables.get("effects")
    if answers and answers["present"] == "not asked":
        return ["the token grows before any layer with attention, so there is nothing to ask"]
    if not answers or effects is None or not len(effects):
        return []
    why = why_undecided(tables, link)
    said = [f"undecided: {why}"] if why else []
    own = effects.loc[effects["link"].eq(link) & effects["is_primary"].eq(True)].to_dict("records")
    words, row = WORDS.get(link, PLAIN), own[0] if own else {}
    moved = change_text(row["share"], does=words.does) if own else ""
    if own and row["ci_low"] > INTERVENTION_FLOOR and row["control_largest"] >= row["ci_low"]:
        said.append(
            f"a control moves as much ({percent(row['control_largest'])}), so that this shows nothing"
        )
    elif answers["present"] == "yes" and answers[BOTH[0]] == "no" and own:
        said.append(f"{words.stands_out}, but {words.does_not}: {words.broken.format(moved)}")
    elif answers["present"] == "no" and answers[BOTH[0]] in ("yes", "in part") and not why:
        said.append(f"it does not stand out by this statistic, yet {words.broken.format(moved)}")
    return [*said, *words.remarks(tables, {str(name): value for name, value in row.items()})]


def why_undecided(tables: Tables, link: str) -> str:
    """Say why a link is undecided; empty if it is not, or if no interventions were made."""
    answers, effects = answers_by_link(tables).get(link), tables.get("effects")
    if not answers or effects is None or not len(effects):
        return ""
    of = tables["links"].loc[tables["links"]["link"].eq(link)]
    if of["verdict"].iloc[0] != "undecided":
        return ""
    necessary, carries = (answers[name] for name in BOTH)
    words = WORDS.get(link, PLAIN)
    if answers["present"] == "no" and "undecided" not in (necessary, carries):
        share = _row_that_answers(effects, link, BOTH[0]).get("share", math.nan)
        moved = change_text(share, does=words.does)
        return f"it does not stand out when it is measured, yet {words.broken.format(moved)}"
    rows = [_row_that_answers(effects, link, name) for name in BOTH]
    damages = next((said for row in rows if (said := _damage_sentence(tables, link, row))), "")
    if answers["present"] == "undecided":
        own = of.loc[of["is_primary"].eq(True)] if "is_primary" in of else of
        close, first = "what was measured is too close to its floor to tell", own.iloc[0]
        if first.get("measured", "undecided") != "undecided":  # of a sink it says nothing
            close = "the sequences are too short to tell of a sink"
        elif math.isnan(first.get("ci_low", 0.0)):
            close = "what was measured has no interval"
        return f"{close}, and {damages}" if damages else close
    if "undecided" not in (necessary, carries):
        return "breaking it removes the sink, yet ablating what it leads to does not, so there is another path"
    row, floor, breaking, do = rows[1], ANOTHER_PATH, "ablating what it leads to", "remove"
    if necessary == "undecided":
        row, floor, breaking, do = rows[0], INTERVENTION_FLOOR, words.breaking, words.does
    if not row:
        return "there was nothing to intervene on"
    if math.isnan(row["ci_low"]):
        return "one sequence gives no interval"
    if not row.get("baseline_sink_mass", 1.0) - row.get("uniform_sink_mass", 0.0) >= LEAST_SINK:
        return "the sink has hardly more attention than chance"
    if damages:
        return damages
    if "not calibrated" in set(of.get("floors", ())):
        return f"{breaking} may {do} less than the floor that was asked for, or than a random control does"
    control = row.get("control_largest", math.nan)
    bars = {f"{percent(one)} of the sink": one for one in (LEAST_SHARE, floor)}
    bars["a random control does"] = control
    within = [name for name, bar in bars.items() if row["ci_low"] <= bar <= row["ci_high"]]
    if not within:  # its intervention is clear, and what it is measured on does not tell sinks
        return "the sequences are too short to tell of a sink"
    return f"{breaking} may {do} more or less than {join_and(within)}"


def _row_that_answers(effects: pd.DataFrame, link: str, question: str) -> dict[str, Any]:
    column = "is_primary" if question == BOTH[0] else "carries"
    rows = effects.loc[effects["link"].eq(link) & effects[column].eq(True)].to_dict("records")
    return {str(name): value for name, value in rows[0].items()} if rows else {}


def _damage_sentence(tables: Tables, link: str, row: Mapping[str, Any]) -> str:
    if not row or not is_off_distribution(row):
        return ""
    said = f"this edit damages the model itself ({_cost_text(row)})"
    ends, paths = WORDS.get(link, PLAIN).gentler, tables.get("paths")
    if ends is None or paths is None:
        return said
    source, target = ends
    found = paths.loc[
        paths["source"].eq(source) & paths["target"].eq(target) & paths["through"].eq("")
    ]
    if found["read_step"].nunique() > 1:
        found = found.loc[found["read_step"].ne(ALL_STEPS)]
    shares = [
        f"{percent(one['share'])} {interval_text(one['ci_low'], one['ci_high'], shown=percent)}"
        for one in found.to_dict("records")
    ]
    if shares:
        said += f"; the path {source} → {target} could decide ({join_and(shares)} of the sink)"
    return said


def is_off_distribution(row: Mapping[Any, Any]) -> bool:
    """Check whether a row of ``effects`` costs clearly more loss than masking the sink does.

    A model may need its sink, so a high loss alone says nothing; nor does one of a model that predicts hardly better
    than uniform guessing.
    """
    baseline = row.get("baseline_loss_nats", math.nan)
    uniform = row.get("uniform_loss_nats", math.nan)
    asked = baseline < TELLING_LOSS * uniform
    return bool(asked and row.get("beyond_masking_nats", math.nan) > COSTLY)


def is_beyond_chance(row: Mapping[Any, Any]) -> bool:
    """Check whether a row of ``maker_sets`` surely removes some of the sink, and more than chance."""
    control = row.get("control_largest")
    most = float(control) if control is not None and control == control else 0.0
    return float(row["ci_low"]) > max(0.0, most)


def _int_from_text(value: object) -> int:
    return int(float(str(value)))


def binding_sentence(kind: str, *, bos: bool) -> str:
    said = BOUND.get(kind) or _UNBOUND[kind]
    return said if bos else f"{said}; there is no BOS token to try"


def makers_comparison(frames: Mapping[str, pd.DataFrame]) -> str:
    table = frames["maker_sets"]
    sets = table.loc[table["control_of"] == ""].set_index("set").to_dict("index")
    own, theirs = sets.get("all makers"), sets.get("super neurons")
    if own is None:
        return "no set of parts that write to this position removes half of it: what makes it was not found"
    removed = f"the makers remove {percent(own['removed'])} of the {own['target']}"
    if theirs is None:
        return f"there are no super neurons by contribution; {removed}"
    made, supers = (set(one["parts"].split(", ")) for one in (own, theirs))
    text = f"{len(made & supers)} of {len(made)} makers are among the {plural(len(supers), 'super neuron')} by "
    text += f"contribution; {removed}, the super neurons {percent(theirs['removed'])}"
    if abs(own["removed"] - theirs["removed"]) > _VIEWS_DIFFER:
        text += ": the two methods disagree; believe the ablation"
    return text

"""``verify``: which published facts about a model agree with what is measured, which do not, and which cannot be told.

Each fact names a quantity and the conditions of its number. What the conditions ask for is measured: BOS or none,
random or repeated tokens, the length. Where they ask for what is not at hand (another text, another type, longer
sequences), the fact is not comparable, and the reason says what to give.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.inputs import tokens_of
from ..models.lens import LensModel
from ..models.load import ModelLike
from ..records import check_free
from ..text import interval as bounds
from ..text import listed, number, plural
from .config import VerifyConfig
from .facts import Fact, is_about, read_facts
from .model_card import shown_name
from .observed import AbsentError, Observed, UnmeasuredError
from .quantities import QUANTITIES, Value, measure
from .study import Study, inputs, write_study

_MOST_NAMED = 3


def verify(
    model: ModelLike | VerifyConfig,
    *,
    config: VerifyConfig | None = None,
    tokens: TokenBatch | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Study:
    """Compare published facts about a model with what is measured on it.

    Args:
        model: what ``load`` takes, a ``LensModel``, or a configuration, which names one and its tokens.
        config: the configuration; the default one if None.
        tokens: the sequences, instead of those of the configuration; facts under another BOS condition, or on random
            tokens, are then not comparable.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        **fields: fields of ``VerifyConfig``, such as ``facts=("mine.json",)``; they win over those of ``config``.

    Raises:
        InputError: a value that cannot be used, or a file of facts that cannot be read.
        RunError: the folder is in use, or holds another run.
    """
    check_free(out, overwrite=overwrite)
    config, lens, batch = inputs(VerifyConfig, model, config=config, tokens=tokens, fields=fields)
    own, known = facts_about(lens, config)
    batches = _Batches(lens, batch, config, fixed=isinstance(tokens, TokenBatch))
    rows = []
    for fact in tqdm(own, desc="facts", unit="fact", disable=not progress, leave=False):
        rows.append(_row(fact, *_judge(fact, batches, config)))
    table = pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)
    decision = _decision(table, name=shown_name(lens.name), known=known, published_as=config.published_as)
    frames = {"facts": table, "summary": pd.DataFrame([{name: decision[name] for name in _SUMMARY}])}
    return write_study(
        "verify",
        lens,
        batch,
        config,
        frames,
        kernel="fused, eager under edits",
        decision=decision | {"facts": table.to_dict("records")},
        headline=decision["sentence"],
        out=out,
        overwrite=overwrite,
    )


def facts_about(lens: LensModel, config: VerifyConfig) -> tuple[list[Fact], int]:
    """The facts about this model, and how many there are about all models."""
    facts = read_facts(config.facts)
    names = _names(lens, config)
    return [fact for fact in facts if is_about(fact, names)], len(facts)


_COLUMNS = {
    "id": "str",
    "quantity": "str",
    "meaning": "str",
    "verdict": "str",
    "published": "str",
    "measured": "str",
    "value": "float64",
    "low": "float64",
    "high": "float64",
    "condition": "str",
    "reason": "str",
    "source": "str",
}
_SUMMARY = ("sentence", "agree", "disagree", "not_comparable", "known")


def _names(lens: LensModel, config: VerifyConfig) -> list[str]:
    """The names under which the model may be published."""
    return [one for one in (lens.name, getattr(lens.config, "_name_or_path", ""), config.published_as) if one]


class _Batches:
    """The model on the sequences that conditions ask for, each read once."""

    def __init__(self, lens: LensModel, batch: TokenBatch, config: VerifyConfig, *, fixed: bool) -> None:
        """Keep what is measured for each text, type and length."""
        self.lens, self.batch, self.config, self.fixed = lens, batch, config, fixed
        self._seen: dict[tuple[str, str, int], Observed] = {}

    def seen(self, condition: Mapping[str, Any]) -> Observed:
        """Return the measurements of the model on the sequences that a fact is about (tokens, length, BOS).

        Raises:
            UnmeasuredError: such sequences are not at hand.
        """
        config, bos = self.config, condition.get("bos")
        kind, length = str(condition.get("tokens", config.tokens)), int(condition.get("length", config.length))
        if bos is not None and bos == ("with" if self.batch.bos else "without"):
            bos = config.bos
        if self.fixed and (bos not in (None, config.bos) or kind != config.tokens):
            raise UnmeasuredError("the number is about other sequences than those given")
        given, own = self.fixed or (config.prompts and kind == "text"), self.batch.n_positions
        if given and condition.get("length", own) != own:
            raise UnmeasuredError(f"the number is about {length} tokens and the sequences given have {own}")
        if not given and length > config.length:
            raise UnmeasuredError(f"the number is about {length} tokens; give --length {length}")
        place = (bos or config.bos, kind, length)
        if place not in self._seen:
            batch = self.batch
            if not self.fixed and place != (config.bos, config.tokens, config.length):
                try:
                    other = replace(config, tokens=kind, length=length, **_of_kind(config, kind))
                    batch = tokens_of(self.lens, config=other, bos=place[0])
                except InputError as error:
                    raise UnmeasuredError(str(error)) from error
            self._seen[place] = Observed(self.lens, batch, seed=config.seed, batch_size=config.batch_size)
        return self._seen[place]


def _of_kind(config: VerifyConfig, kind: str) -> dict[str, Any]:
    """The settings of a kind of tokens; others than text give up the text."""
    return {} if kind == "text" else {"text": None, "prompts": ()}


def _judge(fact: Fact, batches: _Batches, config: VerifyConfig) -> tuple[str, str, Value | None]:
    """Verdict, reason and what was measured."""
    if fact.quantity is None:
        return "not comparable", fact.not_comparable, None
    depends, condition = QUANTITIES[fact.quantity].depends, fact.condition
    text = condition.get("text")
    if "text" in depends and text is not None and text != config.text_name:
        return "not comparable", f"the number is about {text}; give it with --text FILE --text-name {text}", None
    dtype, own = condition.get("dtype"), str(batches.lens.dtype).removeprefix("torch.")
    if "dtype" in depends and dtype is not None and dtype != own:
        return "not comparable", f"the number is about {dtype} and the model is in {own}; give --dtype {dtype}", None
    try:
        found = measure(fact.quantity, batches.seen(condition), fact.terms)
    except AbsentError as error:
        return "disagree", str(error), None
    except UnmeasuredError as error:
        return "not comparable", str(error), None
    return "agree" if fact.agrees(found) else "disagree", "", found


def _row(fact: Fact, verdict: str, reason: str, found: Value | None) -> dict[str, Any]:
    """One fact with its verdict as a row."""
    kind = "number" if fact.quantity is None else QUANTITIES[fact.quantity].kind
    return {
        "id": fact.id,
        "quantity": fact.quantity or "",
        "meaning": "" if fact.quantity is None else QUANTITIES[fact.quantity].meaning,
        "verdict": verdict,
        "published": _published_text(fact, kind),
        "measured": "" if found is None else _measured_text(found, kind),
        "value": float("nan") if found is None else found.number,
        "low": float("nan") if found is None else found.low,
        "high": float("nan") if found is None else found.high,
        "condition": ", ".join(f"{name} {_as_text(value)}" for name, value in fact.condition.items()),
        "reason": reason,
        "source": fact.source,
    }


def _as_text(value: Any) -> str:
    """A number or indices as text."""
    if isinstance(value, list | tuple):
        parts = [f"[{', '.join(map(str, one))}]" if isinstance(one, list | tuple) else str(one) for one in value]
        return ", ".join(parts) or "none"
    return number(value)


def _published_text(fact: Fact, kind: str) -> str:
    """The value, with its tolerance where it is a number that can be measured."""
    said = _as_text(fact.value)
    return f"{said} ± {number(fact.room)}" if kind == "number" and fact.quantity else said


def _measured_text(found: Value, kind: str) -> str:
    """Return what was measured, as text."""
    if kind != "number":
        return _as_text(found.indices)
    return f"{number(found.number)} {bounds(found.low, found.high)}".strip()


def _decision(table: pd.DataFrame, *, name: str, known: int, published_as: str | None) -> dict[str, Any]:
    """The verdict with its numbers."""
    verdicts = table["verdict"].tolist()
    counts = {verdict: verdicts.count(verdict) for verdict in ("agree", "disagree", "not comparable")}
    agree, disagree, unknown = counts.values()
    compared = agree + disagree
    if not len(table):
        what = f"No published fact about {published_as or name} is known ({known} about other models)"
        text = f"{what}; {'give facts' if published_as else 'name it with --as, or give facts'} with --facts"
    elif not compared:
        why = listed(dict.fromkeys(table["reason"].tolist()), most=2)
        text = f"None of {plural(unknown, 'published fact')} about {name} can be compared: {why}"
    elif disagree:
        wrong = table.loc[table["verdict"] == "disagree"].to_dict("records")
        parts = [
            f"{row['quantity']} {row['published']}, measured {row['measured'] or row['reason']} ({row['id']})"
            for row in wrong[:_MOST_NAMED]
        ]
        text = (
            f"Check {name} against its source: {disagree} of {plural(compared, 'comparable fact')} "
            f"{'disagrees' if disagree == 1 else 'disagree'}: {'; '.join(parts)}"
        )
        if disagree > _MOST_NAMED:
            text += f"; and {disagree - _MOST_NAMED} more"
    else:
        nearest = table.loc[table["verdict"] == "agree"].iloc[0]
        all_agree = "it agrees: " if agree == 1 else "all agree, such as "
        text = (
            f"{agree} of {plural(agree + unknown, 'published fact')} about {name} can be compared, and {all_agree}"
            f"{nearest['quantity']} {nearest['published']}, measured {nearest['measured']}"
        )
    if unknown and disagree:
        text += f"; {unknown} cannot be compared"
    return {
        "sentence": f"{text}.",
        "agree": agree,
        "disagree": disagree,
        "not_comparable": unknown,
        "known": known,
    }

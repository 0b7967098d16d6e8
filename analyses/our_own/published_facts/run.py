"""Published facts about any model, each held against what is measured on it; see claim.md.

    python -m analyses.our_own.published_facts.run --model ./Llama-2-7b --as meta-llama/Llama-2-7b-hf --bos with
    python -m analyses.our_own.published_facts.run --model gpt2 --text wiki.txt --text-name wikitext --length 1024
    python -m analyses.our_own.published_facts.run --model ./mine --facts mine.json --csv verdicts.csv

Each fact names a quantity and the conditions of its number. What the conditions ask for is measured: BOS or none,
random or repeated tokens, the length. Where they ask for what is not at hand (another text, another type, longer
sequences), the fact is not comparable, and the reason says what to give.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analyses.claims import Measured, Work, certain
from analyses.our_own.published_facts.facts import Fact, is_about, read_facts
from analyses.our_own.published_facts.quantities import (
    QUANTITIES,
    AbsentError,
    UnmeasuredError,
    Value,
    measure_quantity,
)
from sink_lens.chain.config import ReadConfig
from sink_lens.data.tokens import TokenBatch
from sink_lens.errors import InputError, SinkLensError
from sink_lens.models.inputs import load_model, make_tokens
from sink_lens.models.lens import LensModel
from sink_lens.report.style import BLUE, ORANGE, QUIET, new_figure, panel, without_formulas
from sink_lens.schema import DEFAULT_MODEL
from sink_lens.studies.observed import ObservedModel
from sink_lens.text import as_text, join_and, plural
from sink_lens.text import interval_text as bounds

VERDICTS = ("agree", "disagree", "not comparable")
_COLOURS = dict(zip(VERDICTS, (BLUE, ORANGE, QUIET), strict=True))
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsConfig(ReadConfig):
    """Which facts are held against which model, and what it and the text are called in the publications."""

    facts: tuple[str, ...] = ()
    """JSON files with facts of your own, used beside those of ``references``."""
    published_as: str | None = None
    """Name under which the model is published, such as meta-llama/Llama-2-7b-hf; its own name if None."""
    text_name: str | None = None
    """Name of the text, as facts call it (wikitext, c4, lambada)."""


def verdicts(lens: LensModel, config: FactsConfig, *, tokens: TokenBatch | None = None) -> pd.DataFrame:
    """The published facts about a model, one row per fact, with the verdict and what was measured.

    Args:
        lens: the model.
        config: the facts, the names and the sequences.
        tokens: the sequences, instead of those of the configuration; facts under another BOS condition, or on random
            tokens, are then not comparable.

    Raises:
        InputError: a file of facts that cannot be read.
    """
    names = [one for one in (lens.name, getattr(lens.config, "_name_or_path", ""), config.published_as) if one]
    own = [fact for fact in read_facts(config.facts) if is_about(fact, names)]
    batches = _Batches(lens, config, tokens)
    rows = [_row(fact, *_judge(fact, batches, config)) for fact in own]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


_COLUMNS = {
    **dict.fromkeys(("id", "quantity", "verdict", "published", "measured"), "str"),
    **dict.fromkeys(("value", "low", "high"), "float64"),
    **dict.fromkeys(("condition", "reason", "source", "meaning"), "str"),
}


class _Batches:
    """The model on the sequences that conditions ask for, each read once."""

    def __init__(self, lens: LensModel, config: FactsConfig, tokens: TokenBatch | None) -> None:
        """Keep what is measured for each text, type and length."""
        self.lens, self.config, self.fixed = lens, config, tokens is not None
        self.batch = make_tokens(lens, config=config, bos=config.bos) if tokens is None else tokens
        self._seen: dict[tuple[str, str, int], ObservedModel] = {}

    def seen(self, condition: Mapping[str, Any]) -> ObservedModel:
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
                    batch = make_tokens(self.lens, config=other, bos=place[0])
                except InputError as error:
                    raise UnmeasuredError(str(error)) from error
            self._seen[place] = ObservedModel(self.lens, batch, seed=config.seed, batch_size=config.batch_size)
        return self._seen[place]


def _of_kind(config: FactsConfig, kind: str) -> dict[str, Any]:
    """The settings of a kind of tokens; others than text give up the text."""
    return {} if kind == "text" else {"text": None, "prompts": ()}


def _judge(fact: Fact, batches: _Batches, config: FactsConfig) -> tuple[str, str, Value | None]:
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
        found = measure_quantity(fact.quantity, batches.seen(condition), fact.terms)
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
        "verdict": verdict,
        "published": _published_text(fact, kind),
        "measured": "" if found is None else _measured_text(found, kind),
        "value": float("nan") if found is None else found.number,
        "low": float("nan") if found is None else found.low,
        "high": float("nan") if found is None else found.high,
        "condition": ", ".join(f"{name} {_as_text(value)}" for name, value in fact.condition.items()),
        "reason": reason,
        "source": fact.source,
        "meaning": "" if fact.quantity is None else QUANTITIES[fact.quantity].meaning,
    }


def _as_text(value: Any) -> str:
    """A number or indices as text."""
    if isinstance(value, list | tuple):
        parts = [f"[{', '.join(map(str, one))}]" if isinstance(one, list | tuple) else str(one) for one in value]
        return ", ".join(parts) or "none"
    return as_text(value)


def _published_text(fact: Fact, kind: str) -> str:
    """The value, with its tolerance where it is a number that can be measured."""
    said = _as_text(fact.value)
    return f"{said} ± {as_text(fact.room)}" if kind == "number" and fact.quantity else said


def _measured_text(found: Value, kind: str) -> str:
    """Return what was measured, as text."""
    if kind != "number":
        return _as_text(found.indices)
    return f"{as_text(found.number)} {bounds(found.low, found.high)}".strip()


def sentence(table: pd.DataFrame, *, name: str) -> str:
    """The verdicts in a sentence."""
    agree, disagree, unknown = (int((table["verdict"] == verdict).sum()) for verdict in VERDICTS)
    if not len(table):
        return f"No published fact about {name} is known; name it with --as, or give facts with --facts."
    if not agree + disagree:
        why = join_and(dict.fromkeys(table["reason"].tolist()), most=2)
        return f"None of {plural(unknown, 'published fact')} about {name} can be compared: {why}."
    said = (
        f"{agree} of {plural(agree + disagree, 'comparable fact')} about {name} {'agrees' if agree == 1 else 'agree'}"
    )
    wrong = table.loc[table["verdict"] == "disagree"].to_dict("records")
    parts = [
        f"{row['quantity']} {row['published']}, measured {row['measured'] or row['reason']} ({row['id']})"
        for row in wrong[:_MOST_NAMED]
    ]
    if parts:
        said += f"; not {'; '.join(parts)}" + (f"; and {disagree - _MOST_NAMED} more" * (disagree > _MOST_NAMED))
    return said + (f"; {unknown} cannot be compared." if unknown else ".")


def measure(work: Work) -> Measured:
    """The facts about the model; in tiny mode those about the planted model in ``planted.json``."""
    own = (str(work.folder / "planted.json"),) if work.tiny else ()
    config = FactsConfig(
        model=work.lens.name,
        facts=own,
        published_as="planted" if work.tiny else None,
        sequences=work.size(64, 4),
        length=work.size(64, 24),
        seed=work.seed,
    )
    table = work.once("facts", lambda: verdicts(work.lens, config))
    counts = [int((table["verdict"] == verdict).sum()) for verdict in VERDICTS]
    compared = counts[0] + counts[1]
    numbers = {"agree": certain(counts[0] / compared if compared else float("nan"))}
    numbers |= {"compared": certain(compared), "not_comparable": certain(counts[2])}
    figure = new_figure(width=5.6, height=1.6)
    axes = panel(figure, xlabel="published facts", ylabel="")
    axes.barh(VERDICTS, counts, color=[_COLOURS[verdict] for verdict in VERDICTS])
    return Measured(numbers=numbers, figure=without_formulas(figure))


def _shown(table: pd.DataFrame) -> Iterator[str]:
    """The facts as lines, those that disagree first."""
    order = table["verdict"].map(dict(zip(VERDICTS, (1, 0, 2), strict=True)))
    for row in table.iloc[order.argsort(kind="stable")].to_dict("records"):
        said = f"published {row['published']}" + (f", measured {row['measured']}" if row["measured"] else "")
        yield f"{row['verdict']}: {row['quantity'] or row['id']} {said} ({row['reason'] or row['source']})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the verdicts on a model; the exit code is 1 if a fact disagrees and 2 if something cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m analyses.our_own.published_facts.run", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a folder, .gguf file or hub name (%(default)s)")
    parser.add_argument("--as", dest="published_as", help="name under which the model is published")
    parser.add_argument("--facts", action="append", default=[], help="JSON file with facts of your own; repeat")
    parser.add_argument("--text", help="text file to cut the sequences from; bundled prose if not given")
    parser.add_argument("--text-name", help="name of that text, as facts call it (wikitext, c4, lambada)")
    parser.add_argument("--bos", default="auto", help="auto, with or without")
    parser.add_argument("--dtype", help="type of the weights; float32 if not given")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--csv", type=Path, help="file for the table of facts")
    asked = vars(parser.parse_args(arguments))
    path = asked.pop("csv")
    try:
        config = FactsConfig(**(asked | {"facts": tuple(asked["facts"])}))
        lens = load_model(config)
        table = verdicts(lens, config)
    except SinkLensError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*_shown(table), sentence(table, name=config.published_as or Path(lens.name).name)]))
    if path is not None:
        table.to_csv(path, index=False)
    return int((table["verdict"] == "disagree").any())


if __name__ == "__main__":
    sys.exit(main())

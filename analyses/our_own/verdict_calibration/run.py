"""What ``trace`` says of models whose mechanism is known, beside the truth; see claim.md.

``answers.csv`` counts what was said, a row for each model, architecture, question, truth and answer; ``table.md`` is
the documentation's table of it. ``--retrain`` traces all again, one process for each core that it may run on: some ten
to forty seconds of processor time a model; a stopped one goes on.
"""

import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.stats import binomtest

from analyses.claims import Measured, Work, main
from analyses.rates import share as of_all
from sink_lens import LensModel, TokenBatch, TraceConfig, read_run, trace, wrap
from sink_lens.chain.at_token import cut_at_token
from sink_lens.chain.links.words import Phrase
from sink_lens.chain.page.story import evidence_tables, find_story
from sink_lens.chain.page.words import headline_phrases
from sink_lens.chain.trace import Trace
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.records import Run, write_atomically
from sink_lens.report.style import (
    BLUE,
    INK,
    OCHRE,
    ORANGE,
    legend,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.schema import NOT_IN_BASIS, QUESTIONS
from sink_lens.stats import Interval
from tests.zoo import LINKS, ZOO, Answers, build
from tests.zoo.headlines import untrue

SEEDS = range(44_002, 44_003)
"""Every model in each of its architectures on each. One rule was changed on it, see claim.md."""
SEQUENCES, LENGTH = 32, 48
TINY = ("bos_neuron", "sigmoid")
COUNTED = ["model", "family", "subject", "question", "truth", "said"]
"""What a count is of: a link's three answers and verdict, the sink's position, or the makers, where what is said is F1
to two digits."""
TOLD = ("yes", "in part", "no")
TRUTHS = ("holds", "in part", "fails", NOT_IN_BASIS)
VERDICTS = {
    truth: (right, *(one for one in TRUTHS if one != right))
    for truth, right in zip(("intact", "in part", "broken", "turned"), TRUTHS, strict=True)
}
"""Truth about a link -> the right verdict on it, and the wrong ones."""
OF_BASIS = ("neurons_dimension", "dimension_key")
"""Links about dimensions. They are *turned* where a direction of many dimensions stands for one."""
UNASKED = ("not applicable", "not asked")
COLOURS = {"right": BLUE, "wrong": ORANGE, "undecided": OCHRE}


def measure(work: Work) -> Measured:
    """Count wrong and undecided answers over all models and seeds, link by link, and the makers found."""
    committed = work.folder / "answers.csv"
    if work.retrain or work.tiny:
        if work.tiny:
            found = [traced(name, ZOO[name].families[0], SEEDS[0], quick=True) for name in TINY]
        else:
            asked = [(*each, seed) for each in combinations() for seed in SEEDS]
            found = answers(asked, folder=work.shared / "verdict_calibration")
        counts = counted(pd.concat(found, ignore_index=True))
        if not work.tiny:
            counts.to_csv(committed, index=False, lineterminator="\n")
            (work.folder / "table.md").write_text(markdown(counts), encoding="utf-8")
    else:
        counts = pd.read_csv(committed, dtype={"said": str}, keep_default_na=False)
    return Measured(numbers=numbers_of(counts), figure=draw(counts))


def combinations() -> list[tuple[str, str]]:
    """Every model of the zoo with each of its architectures, each model's first architecture before all others."""
    pairs = [
        (at, name, family) for name, kind in ZOO.items() for at, family in enumerate(kind.families)
    ]
    return [(name, family) for _, name, family in sorted(pairs, key=lambda one: one[0])]


def unseen() -> set[tuple[str, str]]:
    """The combinations on which no rule on growth, erasure, biases and headlines was chosen: every other one.

    The kinds from ``known_by_dimension`` on came later, and rules were changed on some of them.
    """
    later = [name for name, kind in ZOO.items() if kind.letter >= "at" and len(kind.letter) == 2]
    return set([one for one in combinations() if one[0] not in ("untrained", *later)][1::2])


def answers(asked: list[tuple[str, str, int]], *, folder: Path) -> Iterator[pd.DataFrame]:
    """The answers about each model, in a process for each core; those that the folder has are read."""
    here = importlib.import_module(
        "analyses.our_own.verdict_calibration.run"
    )  # workers do not know __main__
    folder.mkdir(parents=True, exist_ok=True)
    files = {each: folder / f"{'-'.join(map(str, each))}.csv" for each in asked}
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        todo = {
            pool.submit(here.traced, *each): file
            for each, file in files.items()
            if not file.exists()
        }
        for one in as_completed(todo):
            write_atomically(
                todo[one], one.result().to_csv(index=False, lineterminator="\n").encode()
            )
    for file in files.values():
        yield pd.read_csv(file, dtype={"said": str}, keep_default_na=False)


def traced(name: str, family: str, seed: int, *, quick: bool = False) -> pd.DataFrame:
    """One model: the truth and what the trace says of it."""
    torch.set_num_threads(1)
    zoo = build(name, seed=seed, family=family)
    tokens = zoo.draw(SEQUENCES, length=LENGTH, generator=torch.Generator().manual_seed(seed))
    lens = replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=name)
    config = TraceConfig(model=name, random_init=False, seed=seed, quick=quick)
    batch = TokenBatch.from_tensor(tokens)
    found, phrases = _trace(lens, batch, config)
    said = untrue(zoo, tokens, phrases)
    if (
        zoo.at is not None
    ):  # traced again at the token, where each sequence has it; this answers all but the headline
        batch, config = (
            TokenBatch.from_tensor(tokens, tokenizer=lens.tokenizer),
            replace(config, at=str(zoo.at)),
        )
        found, phrases = _trace(lens, batch, config)
        tokens = cut_at_token(lens, batch, config=config).tokens.tokens
        said += untrue(zoo, tokens, phrases)
    rows = [("sink", "position", *sink_of(zoo, tokens, found))]
    rows.append(("headline", "phrases", "true", ", ".join(said) or "true"))
    rows += makers_of(zoo, found)
    said = found.links.drop_duplicates("link").set_index("link")
    for link in LINKS:
        truth = zoo.truth.links[link]
        rows += [
            (link, question, getattr(truth, question), said.loc[link, question])
            for question in QUESTIONS
        ]
        direction = zoo.truth.direction is not None and not zoo.truth.outliers
        of = "turned" if direction and link in OF_BASIS else truth_of(truth)
        rows.append((link, "verdict", of, said.loc[link, "verdict"]))
    table = pd.DataFrame(rows, columns=["subject", "question", "truth", "said"])
    return table.assign(model=name, family=zoo.family, seed=seed)


def _trace(
    lens: LensModel, batch: TokenBatch, config: TraceConfig
) -> tuple[Trace, tuple[Phrase, ...]]:
    """Trace, and return the phrases of the headline too."""
    with tempfile.TemporaryDirectory() as folder:
        found = trace(
            lens,
            config=config,
            tokens=batch,
            out=Path(folder) / "run",
            progress=False,
            report=False,
        )
        return found, headline_of(read_run(Path(folder) / "run"))


def headline_of(run: Run) -> tuple[Phrase, ...]:
    """The phrases of the headline of a trace's page."""
    story = find_story(run)
    return headline_phrases(
        evidence_tables(run),
        is_sink=bool(story.is_sink),
        rate=story.sink_rate or 0.0,
        position=story.position or 0,
    )


def sink_of(zoo: Any, tokens: torch.Tensor, found: Any) -> tuple[str, str]:
    """Return whether there is a sink, and what is said of it: right, misplaced, or nothing found."""
    places, position = zoo.sinks(tokens), found.location.sink_position
    truth = "yes" if bool(places.any()) else "no"
    if not found.location.sink_found:
        return truth, "none"
    if (
        found.tables["summary"]["quantity"] == "aligned_position"
    ).any():  # each sequence at its own
        return truth, "right" if float(places.any(1).double().mean()) > 0.5 else "misplaced"
    return truth, "right" if bool(places[:, position].any()) else "misplaced"


def makers_of(zoo: Any, found: Any) -> list[tuple[str, str, str, str]]:
    """F1 of the makers, where they are known."""
    true = {
        (one.kind, -1 if one.layer is None else one.layer, one.index) for one in zoo.truth.makers
    }
    if not true:
        return []
    makers = found.tables["makers"]
    chosen = makers[makers["is_maker"].astype(bool)] if len(makers) else makers
    named = set(
        zip(chosen.get("kind", []), chosen.get("layer", []), chosen.get("unit", []), strict=True)
    )
    return [("makers", "F1", "known", f"{2 * len(named & true) / (len(named) + len(true)):.2f}")]


def truth_of(truth: Answers) -> str:
    """A verdict is one word for three questions: whether a link is seen, and how much of a sink hangs on it."""
    asked = (truth.present, truth.necessary_or_sufficient)
    for word in ("not applicable", "not asked"):
        if word in asked:
            return word
    if "no" in asked:
        return "broken"
    return "in part" if "in part" in (*asked, truth.carries) else "intact"


def counted(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each different answer, with the number of models."""
    return rows.groupby(COUNTED, sort=True).size().rename("n").reset_index()


def right_of(row: Any) -> str:
    """Right, wrong or undecided."""
    if row.question == "verdict":
        right, *wrong = VERDICTS.get(row.truth, ("", *TRUTHS))
        if row.truth not in VERDICTS:
            return "wrong" if row.said in wrong else "right"
        return "right" if row.said == right else "wrong" if row.said in wrong else "undecided"
    if row.question == "position":
        right = "right" if row.truth == "yes" else "none"
        return "right" if row.said == right else "wrong"
    if row.question == "phrases":
        return "right" if row.said == "true" else "wrong"
    if row.question == "F1":
        return "right" if float(row.said) >= 0.95 else "wrong"
    if row.truth in ("not applicable", "not asked"):
        return "wrong" if row.said in TOLD else "right"
    if row.truth == "in part" and row.question == "necessary_or_sufficient":
        return (
            "wrong" if row.said == "no" else "right" if row.said in TOLD else "undecided"
        )  # its floor is lower
    return "right" if row.said == row.truth else "wrong" if row.said in TOLD else "undecided"


def judge(counts: pd.DataFrame) -> pd.DataFrame:
    """The counts, with what each answer is worth."""
    return counts.assign(answer=[right_of(row) for row in counts.itertuples()])


def share(part: pd.DataFrame, whole: pd.DataFrame) -> Interval:
    """A share of pairs of model and architecture, whose seeds are not independent, with its exact 95% interval."""
    found, n = (len(of[["model", "family"]].drop_duplicates()) for of in (part, whole))
    return of_all(found, n)


def bound(found: int, n: int) -> float:
    """The upper bound of a rate at 95% confidence: 4.9% for 0 of 60, half a percent for 0 of 600."""
    return (
        float(binomtest(found, n, alternative="less").proportion_ci().high) if n else float("nan")
    )


def numbers_of(counts: pd.DataFrame) -> dict[str, Interval]:
    """Every rate that claim.md has a rule for."""
    table = judge(counts)
    position = table[table["question"] == "position"]
    free = position[position["truth"] == "no"]
    numbers = {
        "sink_wrong": share(position[position["answer"] == "wrong"], position),
        "false_sink": share(free[free["answer"] == "wrong"], free),
    }
    for question in (*QUESTIONS, "verdict"):
        yes, no = ("intact", "broken") if question == "verdict" else ("yes", "no")
        for truth, answer, name in (
            (yes, "wrong", f"{question}_yes_answered_no"),
            (no, "wrong", f"{question}_no_answered_yes"),
            (yes, "undecided", f"{question}_yes_undecided"),
        ):
            of = table[(table["question"] == question) & (table["truth"] == truth)]
            numbers[name] = share(of[of["answer"] == answer], of)
            for link in LINKS:
                at = of[of["subject"] == link]
                if len(at):
                    numbers[f"{name} @ {link}"] = share(at[at["answer"] == answer], at)
    titles = table[table["question"] == "phrases"]
    verdicts = table[(table["question"] == "verdict") & table["truth"].isin(["intact", "broken"])]
    fresh = [each in unseen() for each in zip(table["model"], table["family"], strict=True)]
    for name, of in (("headline_untrue", titles), ("verdict_wrong", verdicts)):
        numbers[name] = share(of[of["answer"] == "wrong"], of)
        part = of[pd.Series(fresh, index=table.index)[of.index]]
        numbers[f"{name} @ unseen"] = share(part[part["answer"] == "wrong"], part)
    makers = table[table["question"] == "F1"]
    numbers["makers_missed"] = share(makers[makers["answer"] == "wrong"], makers)
    for model, of in makers.groupby("model", sort=False):
        numbers[f"makers_missed @ {model}"] = share(of[of["answer"] == "wrong"], of)
    return numbers


def markdown(counts: pd.DataFrame) -> str:
    """Two tables: each question about each link, and each model."""
    table = judge(counts)
    lines = [
        "Wrong answers for each link and question. *At most* is the upper bound of the rate, at 95% confidence.",
        "*Undecided* is not wrong.",
        "",
        "| link | question | truth *yes*, said *no* | truth *yes*, *undecided* | truth *no*, said *yes* |",
        "| --- | --- | --- | --- | --- |",
    ]
    for link in LINKS:
        for question in (*QUESTIONS, "verdict"):
            of = table[(table["subject"] == link) & (table["question"] == question)]
            yes, no = ("intact", "broken") if question == "verdict" else ("yes", "no")
            there, absent = of[(of["truth"] == yes)], of[(of["truth"] == no)]
            cells = [_rate(there, "wrong"), _rate(there, "undecided"), _rate(absent, "wrong")]
            lines.append(
                f"| {link.replace('_', ' ')} | {question.replace('_', ' ')} | {' | '.join(cells)} |"
            )
    lines += [
        "",
        "The number of right answers and of all answers, for each model. *Makers* is right with an F1 of .95 or more.",
        "For each link, the truth stands before the numbers. `!` counts wrong answers, `?` counts undecided answers.",
        "",
        f"| | model | sink | headline | makers | {' | '.join(link.replace('_', ' ') for link in LINKS)} |",
        f"| {' | '.join(['---'] * (5 + len(LINKS)))} |",
    ]
    for model in ZOO:
        of = table[table["model"] == model]
        if not len(of):
            continue
        cells = [
            _cell(of[of["question"] == question]) for question in ("position", "phrases", "F1")
        ]
        for link in LINKS:
            verdicts = of[(of["subject"] == link) & (of["question"] == "verdict")]
            cells.append(f"{' or '.join(sorted(set(verdicts['truth'])))}: {_cell(verdicts)}")
        lines.append(f"| {ZOO[model].letter} | `{model}` | {' | '.join(cells)} |")
    lines += ["", "Verdicts by the truth about the link:", "", *_confusion(table)]
    free = table[(table["question"] == "position") & (table["truth"] == "no")]
    lines += ["", f"Models without a sink, for which `trace` sees a sink: {_rate(free, 'wrong')}."]
    return "\n".join(lines) + "\n"


def _confusion(table: pd.DataFrame) -> list[str]:
    """The lines of the table of verdicts: a row for each truth, a column for each verdict."""
    said = [*TRUTHS, "undecided", "cannot be asked"]
    lines = [
        f"| truth | {' | '.join(f'*{one}*' for one in said)} |",
        f"|{' --- |' * (1 + len(said))}",
    ]
    verdicts = table[table["question"] == "verdict"].replace(
        {"said": dict.fromkeys(UNASKED, said[-1])}
    )
    names = {truth: right for truth, (right, *_) in VERDICTS.items()} | dict.fromkeys(
        UNASKED, said[-1]
    )
    verdicts = verdicts.assign(truth=verdicts["truth"].map(names))
    for truth in dict.fromkeys(names.values()):
        of = verdicts[verdicts["truth"] == truth]
        lines.append(
            f"| {truth} | {' | '.join(str(of.loc[of['said'] == one, 'n'].sum()) for one in said)} |"
        )
    return lines


def _rate(of: pd.DataFrame, answer: str) -> str:
    found, n = int(of.loc[of["answer"] == answer, "n"].sum()), int(of["n"].sum())
    return f"{found} of {n} (at most {bound(found, n):.1%})" if n else "none has one"


def _cell(of: pd.DataFrame) -> str:
    if not len(of):
        return ""
    counts = {name: int(of.loc[of["answer"] == name, "n"].sum()) for name in COLOURS}
    marks = [f"**{counts['wrong']}!**"] * (counts["wrong"] > 0) + [f"{counts['undecided']}?"] * (
        counts["undecided"] > 0
    )
    return " ".join([f"{counts['right']}/{sum(counts.values())}", *marks])


def draw(counts: pd.DataFrame):
    """Return how many verdicts on a link are right, wrong and undecided, where there is something to answer."""
    table = judge(counts)
    asked = table[(table["question"] == "verdict") & table["truth"].isin(["intact", "broken"])]
    figure = new_figure(width=7.4, height=3.2)
    axes = panel(figure, place=(1, 1, 1), xlabel="verdicts on intact and broken links")
    for place, link in enumerate(LINKS):
        left = 0
        for name, colour in COLOURS.items():
            size = int(asked.loc[(asked["subject"] == link) & (asked["answer"] == name), "n"].sum())
            label = name if place == 0 else None
            axes.barh(
                place,
                size,
                left=left,
                color=colour,
                edgecolor=INK,
                linewidth=0.3,
                height=0.6,
                label=label,
            )
            left += size
    axes.set_yticks(range(len(LINKS)), [link.replace("_", " ") for link in LINKS])
    axes.invert_yaxis()
    legend(axes, columns=3)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

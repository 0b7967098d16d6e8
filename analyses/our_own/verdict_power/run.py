"""How many sequences a verdict needs, and how strong a sink; see claim.md.

``answers.csv`` has what was said of each link, a row for each model and number of sequences. ``--retrain`` traces all
again, one process a core: some 20 minutes on two.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from analyses.claims import Measured, Work, main
from sink_lens import TokenBatch, TraceConfig, trace, wrap
from sink_lens.models.tiny import tiny_tokenizer
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
from sink_lens.stats import Interval
from tests.zoo import LINKS, ZOO, ZooModel, build

SEEDS = range(31_000, 31_004)
SEQUENCES = (8, 20, 50)
"""Sequences of the interventions; each number is asked on the same model and tokens."""
DRAWN, LENGTH = 62, 48
WEAKENED = ("dimension_key", "key_sink")
STRENGTHS = (0.05, 0.1, 0.15, 0.2, 0.3)
"""A weakened link's weights lie at this share of the way from those of the broken model to those of the intact one."""
RIGHT = {"intact": "holds", "broken": "fails"}
WRONG = {"intact": "fails", "broken": "holds"}
COLOURS = {"right": BLUE, "wrong": ORANGE, "undecided": OCHRE}


def measure(work: Work) -> Measured:
    """Return how often verdicts are wrong or undecided, by the number of sequences and by the mass of the sink."""
    committed = work.folder / "answers.csv"
    if work.tiny:
        rows = work.once(
            "answers", lambda: asked_of("bos_neuron", 1.0, SEEDS[0], sequences=(4, 8), quick=True)
        )
    elif work.retrain:
        rows = work.once("answers", lambda: pd.concat(answers(), ignore_index=True))
        rows = rows.sort_values(["model", "strength", "seed", "sequences"], kind="stable")
        rows.to_csv(committed, index=False, float_format="%.4g", lineterminator="\n")
    else:
        rows = pd.read_csv(committed, keep_default_na=False)
    return Measured(numbers=numbers_of(rows), figure=draw(rows))


def answers() -> Iterator[pd.DataFrame]:
    """The answers about each model, in a process for each core, as they come: the zoo, and each link weakened."""
    models = [(name, 1.0) for name in ZOO] + [
        (link, strength) for link in WEAKENED for strength in STRENGTHS
    ]
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        jobs = [pool.submit(asked_of, *model, seed) for seed in SEEDS for model in models]
        for one in as_completed(jobs):
            yield one.result()


def asked_of(
    name: str,
    strength: float,
    seed: int,
    *,
    sequences: tuple[int, ...] = SEQUENCES,
    quick: bool = False,
) -> pd.DataFrame:
    """Read what is said of each link of a model, or of a chain with one link weakened, by number of sequences."""
    torch.set_num_threads(1)
    if strength < 1.0:
        zoo = weakened(name, strength=strength, seed=seed)
    else:
        families = ZOO[name].families
        zoo = build(name, seed=seed, family=families[seed % len(families)])
    tokens = zoo.draw(DRAWN, length=LENGTH, generator=torch.Generator().manual_seed(seed))
    lens = replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=name)
    tables = []
    for n in sequences:
        config = TraceConfig(
            model=name, random_init=False, seed=seed, quick=quick, intervention_sequences=n
        )
        with tempfile.TemporaryDirectory() as folder:
            batch = TokenBatch.from_tensor(tokens)
            found = trace(
                lens,
                config=config,
                tokens=batch,
                out=Path(folder) / "run",
                progress=False,
                report=False,
            )
        said = found.links.drop_duplicates("link").set_index("link")["verdict"]
        mass = float(found.tables["heads"]["sink_mass"].mean())
        tables.append(
            said.loc[list(LINKS)].rename("said").reset_index().assign(sequences=n, sink_mass=mass)
        )
    table = pd.concat(tables, ignore_index=True)
    truth = {
        link: "not applicable"
        if "not applicable" in (of.present, of.necessary_or_sufficient)
        else "broken"
        if "no" in (of.present, of.necessary_or_sufficient)
        else "intact"
        for link, of in zoo.truth.links.items()
    }
    table["truth"] = table["link"].map(truth)
    return table.assign(model=name, strength=strength, family=zoo.family, seed=seed)


@torch.no_grad()
def weakened(link: str, *, strength: float, seed: int) -> ZooModel:
    """The whole chain with one link's weights moved towards those of the model whose link is broken."""
    zoo, broken = (
        build(name, seed=seed, family="llama") for name in ("variance", f"broken_{link}")
    )
    weak = broken.model.state_dict()
    for name, weight in zoo.model.state_dict().items():
        weight.copy_(torch.lerp(weak[name], weight, strength))
    return zoo


def numbers_of(rows: pd.DataFrame) -> dict[str, Any]:
    """Every share that claim.md has a rule for."""
    numbers = {}
    for n, of in judge(rows).groupby("sequences"):
        for name, truth, weak in (
            ("intact", "intact", False),
            ("broken", "broken", False),
            ("weak", "intact", True),
        ):
            asked = of[(of["truth"] == truth) & ((of["strength"] < 1.0) == weak)]
            numbers[f"{name}_wrong @ {n} sequences"] = share(
                asked[asked["answer"] == "wrong"], asked
            )
            if name == "intact":
                undecided = share(asked[asked["answer"] == "undecided"], asked)
                numbers[f"intact_undecided @ {n} sequences"] = undecided
    return numbers


def judge(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of links that are intact or broken, with what each verdict is worth."""
    rows = rows[rows["truth"].isin(list(RIGHT))]
    right, wrong = (rows["said"] == rows["truth"].map(said) for said in (RIGHT, WRONG))
    return rows.assign(answer=np.select([right, wrong], ["right", "wrong"], default="undecided"))


def share(part: pd.DataFrame, whole: pd.DataFrame) -> Interval:
    """A share of links with its exact 95% interval."""
    if not len(whole):
        return Interval(estimate=float("nan"), low=float("nan"), high=float("nan"), n=0)
    test = binomtest(len(part), len(whole))
    bounds = test.proportion_ci()
    return Interval(estimate=test.statistic, low=bounds.low, high=bounds.high, n=len(whole))


def draw(rows: pd.DataFrame):
    """Verdicts on intact links by the number of sequences, and on the chain of a weak sink by its mass."""
    rows = judge(rows)
    intact = rows[rows["truth"] == "intact"]
    weak = intact[(intact["strength"] < 1.0) & (intact["sequences"] == 20)]
    figure = new_figure(width=9.0, height=3.0)
    axes = panel(
        figure, place=(1, 2, 1), xlabel="sequences in interventions", ylabel="share of intact links"
    )
    _bars(axes, list(intact[intact["strength"] == 1.0].groupby("sequences")))
    axes = panel(
        figure,
        place=(1, 2, 2),
        xlabel="mass of a weak sink, 20 sequences",
        ylabel="share of intact links",
    )
    bins = pd.cut(weak["sink_mass"], [0.0, 0.1, 0.2, 0.4, 0.6, 1.0])
    _bars(
        axes, [(f"{at.left:g} to {at.right:g}", of) for at, of in weak.groupby(bins, observed=True)]
    )
    return without_formulas(figure)


def _bars(axes: Any, groups: Any) -> None:
    """A stacked bar of each group, with its size."""
    for place, (_, of) in enumerate(groups):
        bottom = 0.0
        for name, colour in COLOURS.items():
            height, label = float((of["answer"] == name).mean()), name if place == 0 else None
            axes.bar(
                place,
                height,
                bottom=bottom,
                color=colour,
                edgecolor=INK,
                linewidth=0.3,
                width=0.6,
                label=label,
            )
            bottom += height
    axes.set_xticks(range(len(groups)), [f"{label}\nn = {len(of)}" for label, of in groups])
    legend(axes, columns=3)


if __name__ == "__main__":
    main(measure)

"""Circuits of the sinks of the zoo, beside the edges that carry them; see claim.md.

``answers.csv`` holds a row for each mechanism, architecture and method; ``table.md`` is the documentation's table of
them. ``--retrain`` finds all again, some twenty seconds of processor time a model; a stopped run goes on.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.claims import Measured, Work, main
from analyses.rates import auroc_of, share
from sink_lens import wrap
from sink_lens.circuits.exact import exact_scores
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.circuits.scores import score_by_gradients
from sink_lens.edits import metrics
from sink_lens.records import write_atomically
from sink_lens.report.style import (
    BLUE,
    INK,
    ORANGE,
    QUIET,
    legend,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval
from tests.zoo import ZOO, build
from tests.zoo.edges import sink_edges

SEED = 4_100
SEQUENCES, PATCHED, LENGTH, MOST_STEPS = 10, 3, 16, 10
SMALL, LOW = 0.03, 0.95
METHODS = {"exact": "", "eap-ig": "", "eap": "_eap"}
"""Method -> how the names of its numbers end."""


def measure(work: Work) -> Measured:
    """Compare the largest edges of each method with those that the construction needs."""
    file = work.folder / "answers.csv"
    if work.tiny:
        rows = judge("embedding", "llama")
        return Measured(numbers=numbers_of(rows, work=work), figure=draw(rows))
    if work.retrain:
        rows = judge_all(work.shared / "circuit_of_known_sinks")
        rows.to_csv(file, index=False, float_format="%.4g", lineterminator="\n")
        (work.folder / "table.md").write_text(markdown(rows), encoding="utf-8")
    rows = pd.read_csv(file)
    return Measured(numbers=numbers_of(rows, work=work), figure=draw(rows))


def judge_all(folder: Path) -> pd.DataFrame:
    """The rows of all combinations; what the folder has is read."""
    tables = []
    for name, family in combinations():
        file = folder / f"{name}-{family}.csv"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, judge(name, family).to_csv(index=False).encode())
        tables.append(pd.read_csv(file))
    return pd.concat(tables, ignore_index=True)


def combinations() -> list[tuple[str, str]]:
    """The mechanisms with edges that are needed alone, each in two architectures on which none was derived."""
    named = [(name, family) for name, kind in ZOO.items() for family in kind.families[1:3]]
    return [
        each for each in named if sink_edges(build(each[0], seed=SEED, family=each[1])) is not None
    ]


def judge(name: str, family: str) -> pd.DataFrame:
    """Rank the edges of one model by each method."""
    torch.set_num_threads(1)
    zoo = build(name, seed=SEED, family=family)
    truth, lens = sink_edges(zoo), wrap(zoo.model)
    assert truth is not None
    graph = Graph.of(lens)
    tokens = zoo.draw(SEQUENCES, length=LENGTH, generator=torch.Generator().manual_seed(SEED))
    metric = metrics.sink_mass(0, layers=zoo.truth.locked)
    runs = Runs.make(lens, tokens, None, graph=graph, metric=metric, ablation="mean_ordinary")
    needed = np.isin(graph.names, list(truth.needed))
    others = ~needed & ~np.isin(graph.names, list(truth.spare))
    real = np.abs(
        exact_scores(runs.select_pairs(range(PATCHED)), range(graph.n_edges)).mean(0)
    ) / float(runs.gap.mean())
    confirmed = bool(real[needed].min() >= SMALL and real[others].max() < SMALL)
    rows = []
    for method in METHODS:
        size = (
            real
            if method == "exact"
            else np.abs(score_by_gradients(runs, method=method, most_steps=MOST_STEPS).mean)
        )
        order = np.argsort(-np.where(needed | others, size, -1), kind="stable")
        row = {
            "mechanism": name,
            "family": family,
            "method": method,
            "edges": graph.n_edges,
            "needed": needed.sum(),
        }
        row |= {
            "auroc": auroc_of(size, needed, others),
            "found": needed[order[: needed.sum()]].mean(),
        }
        rows.append(row | {"confirmed": int(confirmed)})
    return pd.DataFrame(rows)


def numbers_of(rows: pd.DataFrame, *, work: Work) -> dict[str, Interval]:
    """Every number that claim.md has a rule for; intervals are over combinations."""
    exact = rows[rows["method"] == "exact"]
    numbers = {"confirmed": share(int(exact["confirmed"].sum()), len(exact))}
    for method, end in METHODS.items():
        of = rows[rows["method"] == method]
        if method != "exact":
            numbers[f"short{end} @ {method}"] = share(int((of["auroc"] < LOW).sum()), len(of))
        for name in ("auroc", "found"):
            numbers[f"{name}{end} @ {method}"] = work.interval(of[name].to_numpy(float))
    return numbers


def markdown(rows: pd.DataFrame) -> str:
    """A sentence, and each mechanism with its edges and what each method found."""
    exact, default = (rows[rows["method"] == one] for one in ("exact", "eap-ig"))
    lines = [
        f"Real patches of every edge confirm the list for {exact['confirmed'].sum()} of {len(exact)} models. `eap-ig`",
        f"has an AUROC below .95 for {(default['auroc'] < LOW).sum()} model. On average,",
        f"{default['found'].mean():.0%} of the n needed edges are among its n largest scores.",
        "",
        "AUROC of the needed edges; in brackets, the share of the n needed edges that are among the n largest scores.",
        "A row has two families and one seed.",
        "",
        f"| model | edges, needed | confirmed | {' | '.join(METHODS)} |",
        f"| --- | --- | --- | {' | '.join('---' for _ in METHODS)} |",
    ]
    for name, of in rows.groupby("mechanism", sort=False):
        one = of[of["method"] == "exact"]
        cells = [
            f"{each['auroc'].mean():.3f} ({each['found'].mean():.2f})"
            for _, each in of.groupby("method", sort=False)
        ]
        counts = f"{one['edges'].mean():.0f}, {one['needed'].mean():.0f}"
        lines.append(
            f"| `{name}` | {counts} | {one['confirmed'].sum()} of {len(one)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: pd.DataFrame):
    """AUROC of every combination, by method."""
    figure = new_figure(width=6.4, height=4.4)
    axes = panel(figure, place=(1, 1, 1), xlabel="AUROC of the needed edges")
    names = list(dict.fromkeys(rows["mechanism"]))
    for at, (method, colour) in enumerate(zip(METHODS, (QUIET, BLUE, ORANGE), strict=True)):
        of = rows[rows["method"] == method]
        places = np.array([names.index(name) for name in of["mechanism"]]) + 0.2 * (at - 1)
        axes.scatter(
            of["auroc"], places, s=14, color=colour, edgecolor=INK, linewidth=0.3, label=method
        )
    axes.axvline(LOW, color=INK, linewidth=0.5, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    legend(axes, columns=3)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

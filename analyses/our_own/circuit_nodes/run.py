"""How often a run says where its circuit is wrong, on models whose mechanism is known edge by edge; see claim.md.

``answers.csv`` holds counts over the seeds for each mechanism, architecture, ablation and method; ``table.md`` is the
documentation's table of them. ``--retrain`` counts again, about two seconds a model; a stopped run goes on.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.claims import Measured, Work, main
from analyses.rates import auroc_of, share
from sink_lens import wrap
from sink_lens.circuits.circuit import Circuit, find_in_runs
from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.records import write_atomically
from sink_lens.report.style import BLUE, INK, ORANGE, legend, new_figure, panel, without_formulas
from sink_lens.stats import Interval
from tests.zoo.mechanisms import LATER, MECHANISMS, Mechanism, wire
from tests.zoo.wiring import WIRED

SEEDS = range(2_100, 2_103)
"""Fresh ones: the limits of the check were set on seed 3, and the methods judged on seeds 1,000 to 1,009."""
PAIRS, MOST_STEPS = 10, 10
ASKED = (
    ("eap-ig", "resample"),
    ("eap-ig", "mean_ordinary"),
    ("eap-ig", "zero"),
    ("eap", "resample"),
    ("eap", "mean_ordinary"),
)
LOW = 0.95
"""AUROC of the needed edges below which a ranking is wrong; it is right at 1."""
TINY = (("hidden", "qwen3", 2_000), ("copy", "gpt2", 2_000))
KEY = ["mechanism", "family", "ablation", "method"]


def measure(work: Work) -> Measured:
    """Count warnings where the ranking of the edges is wrong, and where it is right."""
    file = work.folder / "answers.csv"
    if work.tiny:
        rows = count_all(list(TINY), folder=None)
        return Measured(numbers=numbers_of(rows, work=work), figure=draw(rows))
    if work.retrain:
        names = [name for name in MECHANISMS if name not in LATER]
        asked = [(name, family, seed) for seed in SEEDS for name in names for family in WIRED]
        rows = count_all(asked, folder=work.shared / "circuit_nodes")
        rows.to_csv(file, index=False, lineterminator="\n")
        (work.folder / "table.md").write_text(markdown(rows), encoding="utf-8")
    rows = pd.read_csv(file)
    return Measured(numbers=numbers_of(rows, work=work), figure=draw(rows))


def count_all(asked: list[tuple[str, str, int]], *, folder: Path | None) -> pd.DataFrame:
    """The counts of all models, summed over seeds; what the folder has is read."""
    tables = []
    for each in asked:
        file = folder / f"{'-'.join(map(str, each))}.csv" if folder else None
        if file is None or not file.exists():
            table = count(*each)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, table.to_csv(index=False).encode())
        else:
            table = pd.read_csv(file)
        tables.append(table)
    return pd.concat(tables, ignore_index=True).groupby(KEY, sort=False).sum().reset_index()


def count(name: str, family: str, seed: int) -> pd.DataFrame:
    """Compare the warnings of one model with the truth about its edges and nodes."""
    torch.set_num_threads(1)
    mechanism = wire(name, seed=seed, family=family)
    lens = wrap(mechanism.model)
    graph = Graph.of(lens)
    clean, corrupted, metric = mechanism.pairs(PAIRS, generator=torch.Generator().manual_seed(seed))
    rows = []
    for method, ablation in ASKED:
        runs = Runs.make(lens, clean, corrupted, graph=graph, metric=metric, ablation=ablation)
        size = int(np.isin(graph.names, list(mechanism.carrying(ablation))).sum())
        circuit = find_in_runs(
            runs, config=CircuitConfig(method=method, edges=size, most_steps=MOST_STEPS, seed=seed)
        )
        key = {"mechanism": name, "family": family, "ablation": ablation, "method": method}
        rows.append(key | judge(circuit, mechanism, ablation))
    return pd.DataFrame(rows)


def judge(circuit: Circuit, mechanism: Mechanism, ablation: str) -> dict[str, int]:
    """Count one circuit: is its ranking wrong or right, is there a warning, and at which nodes."""
    names = circuit.graph.names
    needed = np.isin(names, list(mechanism.needed(ablation)))
    others = ~needed & ~np.isin(names, list(mechanism.unjudged(ablation, names)))
    nodes = circuit.check_nodes().set_index("node")
    warned = bool(nodes["unseen"].any())
    auroc = auroc_of(np.abs(circuit.scores.mean), needed, others)
    counts: dict[str, Any] = {"models": 1}
    for kind, holds in (
        ("wrong", auroc < LOW),
        ("between", LOW <= auroc < 1),
        ("right", auroc == 1),
    ):
        counts |= {kind: int(holds), f"{kind}_warned": int(holds and warned)}
    writers = pd.Series(names).str.partition("->")[0].to_numpy()
    edges = pd.DataFrame({"needed": needed, "held": needed & circuit.chosen}).groupby(writers).sum()
    edges = edges.reindex(nodes.index, fill_value=0)
    lost = (edges["needed"] > 0) & (edges["held"] == 0)
    named, whole = nodes["unseen"], edges["held"] == edges["needed"]
    counts |= {"lost": int(lost.sum()), "lost_named": int((lost & named).sum())}
    return counts | {"named": int(named.sum()), "named_whole": int((named & whole).sum())}


def ratio(table: pd.DataFrame, above: str, below: str, *, work: Work) -> Interval:
    """A sum over another, with its interval over combinations; where it is 0 or 1 in all, that of their share."""
    of = table[table[below] > 0]
    same = of[above] == of[below]
    if of.empty or same.all() or not of[above].any():
        return share(int(same.sum()), len(of))
    return work.ratio(of[above].to_numpy(float), of[below].to_numpy(float))


def numbers_of(rows: pd.DataFrame, *, work: Work) -> dict[str, Interval]:
    """Every number that claim.md has a rule for."""
    numbers = {}
    for (method, ablation), of in rows.groupby(["method", "ablation"], sort=False):
        end, at = (
            "_zero" * (ablation == "zero") or "_eap" * (method == "eap"),
            f"{method}, {ablation}",
        )
        numbers[f"detected{end} @ {at}"] = ratio(of, "wrong_warned", "wrong", work=work)
        numbers[f"alarm{end} @ {at}"] = ratio(of, "right_warned", "right", work=work)
        right = of[of["right"] > 0]
        numbers[f"alarmed{end} @ {at}"] = share(int((right["right_warned"] > 0).sum()), len(right))
        numbers[f"lost_named{end} @ {at}"] = ratio(of, "lost_named", "lost", work=work)
        numbers[f"named_whole{end} @ {at}"] = ratio(of, "named_whole", "named", work=work)
    return numbers


def sentence_of(rows: pd.DataFrame) -> str:
    """Say in a sentence how often the default run warns where it is wrong, and where it is right."""
    of = rows[(rows["method"] == "eap-ig") & (rows["ablation"] != "zero")]
    total = of.sum(numeric_only=True)
    return (
        f"Under resampling and means the check of nodes warns at {total['wrong_warned']:,.0f} of {total['wrong']:,.0f} "
        f"circuits of `eap-ig` with an AUROC below .95, and at {total['right_warned']:,.0f} of {total['right']:,.0f} "
        "with one of 1."
    )


def cell(table: pd.DataFrame, above: str, below: str) -> str:
    """A count beside its total, and in how many combinations; a dash where there is none."""
    n = int(table[below].sum())
    if not n:
        return "-"
    return f"{table[above].sum():.0f} of {n} ({(table[above] > 0).sum()} of {(table[below] > 0).sum()})"


def markdown(rows: pd.DataFrame) -> str:
    """A sentence and two tables: each method and ablation, and each mechanism with the default method."""
    models, seeds = (
        int(rows.groupby(["method", "ablation"])["models"].sum().max()),
        int(rows["models"].max()),
    )
    heads = (
        "warned where wrong | between | where right | lost that are named | named that are whole"
    )
    lines = [
        sentence_of(rows),
        "",
        f"Warnings on {models} models ({seeds} fresh seeds of 84 combinations of task and architecture; in brackets:",
        "combinations). *Wrong*: AUROC of the needed edges below .95; *right*: 1. *Lost*: nodes of which the circuit",
        "holds no needed edge. *Whole*: nodes that are named though the circuit holds all their needed edges, or they",
        "have none.",
        "",
        f"| method | ablation | {heads} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    asked = (("wrong_warned", "wrong"), ("between_warned", "between"), ("right_warned", "right"))
    asked += (("lost_named", "lost"), ("named_whole", "named"))
    for (method, ablation), of in rows.groupby(["method", "ablation"], sort=False):
        lines.append(f"| {' | '.join([method, ablation, *(cell(of, *each) for each in asked)])} |")
    lines += [
        "",
        "The tasks with a warning or a wrong circuit, under resampling and means:",
        "",
        f"| task | method | {heads} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, method), of in rows[rows["ablation"] != "zero"].groupby(
        ["mechanism", "method"], sort=False
    ):
        if of[["wrong", "named"]].to_numpy().any():
            of = of.groupby("family", sort=False).sum(numeric_only=True)
            lines.append(
                f"| {' | '.join([f'`{name}`', method, *(cell(of, *each) for each in asked)])} |"
            )
    return "\n".join(lines) + "\n"


def draw(rows: pd.DataFrame):
    """Share of the wrong and of the right circuits with a warning, for each method and ablation."""
    figure = new_figure(width=6.4, height=2.6)
    axes = panel(figure, place=(1, 1, 1), xlabel="circuits with a warning, %")
    groups = rows.groupby(["method", "ablation"], sort=False).sum(numeric_only=True)
    places = np.arange(len(groups))
    for at, (kind, colour) in enumerate((("wrong", ORANGE), ("right", BLUE))):
        n = groups[kind].to_numpy(float)
        part = 100 * np.divide(
            groups[f"{kind}_warned"], n, out=np.full(len(n), np.nan), where=n > 0
        )
        axes.barh(
            places + 0.36 * (at - 0.5),
            part,
            height=0.34,
            color=colour,
            edgecolor=INK,
            linewidth=0.3,
            label=kind,
        )
    axes.set_yticks(
        places,
        [f"{method}, {ablation.replace('_ordinary', '')}" for method, ablation in groups.index],
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    legend(axes, columns=2)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

"""How often a circuit is wrong, on models whose mechanism is known edge by edge; see claim.md.

``answers.csv`` holds a row for each mechanism, architecture, ablation and method, ``circuits.csv`` one for each
circuit, both over all seeds; ``table.md`` is the documentation's table of them. ``--retrain`` scores all again, a
second or two a model; a stopped run goes on.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformer_lens.tools.analysis import attribution_patching as theirs

from analyses.claims import Measured, Work, main
from analyses.rates import auroc_of, share
from sink_lens import wrap
from sink_lens.circuits.checks import CONFIRMED, make_check
from sink_lens.circuits.circuit import Circuit, find_in_runs
from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.core import edge_verdicts, inclusion_by_setting
from sink_lens.circuits.exact import exact_scores
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.models.lens import LensModel
from sink_lens.records import write_atomically
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
from tests.zoo.mechanisms import LATER, MECHANISMS, Mechanism, wire
from tests.zoo.wiring import WIRED, vocabulary

SEEDS = range(1_000, 1_010)
"""Each mechanism in each architecture on each. What the weights are was settled on seeds below 10."""
WHOLE = SEEDS[:5]
"""Seeds that real patches of every edge, zero, the other methods and fresh pairs are run on too."""
PAIRS, PATCHED, MOST_STEPS = 10, 3, 10
"""Pairs that edges are scored on; of these, the first that have every edge really patched; points of a pair."""
ABLATIONS = ("resample", "mean_ordinary", "zero")
METHODS = ("eap-ig", "eap", "gim", "eap-corrupted", "eap-ig-left")
"""Under resampling; means and zero have the first three, and seeds that are not whole the first two."""
RULES = "gim"
"""The method whose rules were chosen on some mechanisms and seeds below 1,000, and is judged on the others."""
CHOSEN_ON = ("copy", "two_step", "ioi", "redundant", "hidden", "gate", "sink_neuron")
EXACT, THEIRS, RANDOM = "exact", "TransformerLens", "random"
CHECKED = ("eap-ig", "eap")
"""Methods whose circuits have a sample of real patches beside them."""
SMALL = 0.03
"""Part of the difference between the prompts from which on an edge changes the answer."""
LOW, WORSE = 0.95, 0.02
TINY = (("copy", "gpt2"), ("gate", "llama"))
BY = ["mechanism", "family"]


def measure(work: Work) -> Measured:
    """Measure how well methods rank the edges, and what core edges, bootstraps and samples of patches are worth."""
    files = [work.folder / f"{name}.csv" for name in ("answers", "circuits")]
    if work.tiny:
        rows, circuits = score_all([(*each, SEEDS[0]) for each in TINY], folder=None)
        return Measured(numbers=numbers_of(rows, circuits, work=work), figure=draw(rows))
    if work.retrain:
        asked = [(*each, seed) for seed in SEEDS for each in combinations()]
        for file, table in zip(
            files, score_all(asked, folder=work.shared / "circuit_truth"), strict=True
        ):
            table.to_csv(file, index=False, float_format="%.4g", lineterminator="\n")
    rows, circuits = (pd.read_csv(file) for file in files)
    if work.retrain:
        (work.folder / "table.md").write_text(markdown(rows, circuits), encoding="utf-8")
    return Measured(numbers=numbers_of(rows, circuits, work=work), figure=draw(rows))


def combinations() -> list[tuple[str, str]]:
    """Every mechanism in every architecture."""
    return [(name, family) for name in MECHANISMS if name not in LATER for family in WIRED]


def score_all(
    asked: list[tuple[str, str, int]], *, folder: Path | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables of all models, as means over seeds; what the folder has is read."""
    tables: tuple[list[pd.DataFrame], list[pd.DataFrame]] = [], []
    for each in asked:
        files = (
            [folder / f"{'-'.join(map(str, each))}-{name}.csv" for name in ("a", "c")]
            if folder
            else []
        )
        if not files or not all(file.exists() for file in files):
            found = judge(*each)
            for file, table in zip(files, found, strict=False):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, table.to_csv(index=False).encode())
        else:
            found = [pd.read_csv(file) for file in files]
        for rows, table in zip(tables, found, strict=True):
            rows.append(table)
    key = [*BY, "ablation", "method"]
    together = [pd.concat(rows, ignore_index=True) for rows in tables]
    together[0]["over_exact"], together[0]["over_default"] = (
        over(together[0], one) for one in (EXACT, METHODS[0])
    )
    for table in together:
        table["seeds"] = 1
    sums = dict.fromkeys(
        ("seeds", "core", "core_false", "sure", "sure_lost", "real", "real_false"), "sum"
    )
    sums |= {"auroc_least": "min", "confirmed": "min"}
    first, second = (
        table.groupby(key, sort=False)
        .agg({name: sums.get(name, "mean") for name in table.columns if name not in [*key, "seed"]})
        .reset_index()
        for table in together
    )
    return first, second


def over(rows: pd.DataFrame, method: str) -> pd.Series:
    """AUROC of every row minus that of a method on the same model; nan where it was not run."""
    key = [*BY, "seed", "ablation"]
    of = rows.loc[rows["method"] == method, [*key, "auroc"]].rename(columns={"auroc": "of"})
    return rows["auroc"] - rows[key].merge(of, on=key, how="left")["of"]


def judge(name: str, family: str, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rank the edges of one model by each method, and compare what is said of its circuits with the truth."""
    torch.set_num_threads(1)
    mechanism = wire(name, seed=seed, family=family)
    lens = wrap(mechanism.model)
    graph, generator = Graph.of(lens), torch.Generator().manual_seed(seed)
    rows, circuits, whole = [], [], 1.0
    kept: dict[str, Circuit] = {}
    effects: np.ndarray | None = None
    drawn = mechanism.rows(PAIRS, generator=generator)
    for ablation in ABLATIONS if seed in WHOLE else ABLATIONS[:2]:

        def runs_of(pairs: list[Any], ablation: Any = ablation) -> Runs:
            clean, corrupted, metric = mechanism.prompts(pairs)
            return Runs.make(lens, clean, corrupted, graph=graph, metric=metric, ablation=ablation)

        runs, of, real = runs_of(drawn), Edges(mechanism, graph, ablation), None
        whole = float(runs.gap.mean()) if ablation == "resample" else whole
        rows.append(
            of.row(
                RANDOM,
                np.random.default_rng([seed, *f"{name} {family}".encode()]).normal(
                    size=graph.n_edges
                ),
            )
        )
        if seed in WHOLE:
            real = exact_scores(runs.select_pairs(range(PATCHED)), range(graph.n_edges)).mean(0)
            rows.append(
                of.row(EXACT, real) | {"confirmed": float(of.confirmed(np.abs(real) / whole))}
            )
        for method in (
            (METHODS if ablation == "resample" else METHODS[:3]) if seed in WHOLE else CHECKED
        ):
            circuit = find_in_runs(
                runs,
                config=CircuitConfig(
                    method=method, edges=of.size, most_steps=MOST_STEPS, seed=seed
                ),
            )
            rows.append(of.row(method, circuit.scores.mean))
            if method == "eap-ig":
                kept[ablation] = circuit
            if method in CHECKED and real is not None:
                circuits.append(of.sampled(circuit, real) | {"method": method})
        if ablation == "resample" and real is not None:
            effects = np.abs(real) / whole
            config = CircuitConfig(edges=of.size, most_steps=MOST_STEPS)
            again = find_in_runs(runs_of(mechanism.rows(PAIRS, generator=generator)), config=config)
            circuits.append(
                {"ablation": "repeated", "method": "eap-ig"} | of.repeated(kept["resample"], again)
            )
            if family == "gpt2" and mechanism.sink_layer is None:
                answers = [(vocabulary(right), vocabulary(wrong)) for _, right, _, wrong in drawn]
                rows.append(of.row(THEIRS, of_transformer_lens(lens, runs, answers)))
    others = {"mean_ordinary": kept["mean_ordinary"]}
    core = Edges(mechanism, graph, "resample").core(kept["resample"], others, effects=effects)
    circuits.append({"ablation": "core", "method": "eap-ig"} | core)
    key = {"mechanism": name, "family": family, "seed": seed}
    return tuple(pd.DataFrame([key | row for row in table]) for table in (rows, circuits))


class Edges:
    """The truth about the edges of one model under one ablation."""

    def __init__(self, mechanism: Mechanism, graph: Graph, ablation: str) -> None:
        self.ablation = ablation
        self.needed = np.isin(graph.names, list(mechanism.needed(ablation)))
        self.carrying = np.isin(graph.names, list(mechanism.carrying(ablation)))
        self.others = ~self.needed & ~np.isin(
            graph.names, list(mechanism.unjudged(ablation, graph.names))
        )
        self.size = int(self.carrying.sum())

    def row(self, method: str, values: np.ndarray) -> dict[str, Any]:
        """Measure how well a method ranks the edges that are needed before the others."""
        size = np.abs(values)
        auroc = auroc_of(size, self.needed, self.others)
        order = np.argsort(-np.where(self.needed | self.others, size, -1), kind="stable")
        share = float(self.needed[order[: self.needed.sum()]].mean())
        return {
            "ablation": self.ablation,
            "method": method,
            "auroc": auroc,
            "auroc_least": auroc,
            "found": share,
        }

    def confirmed(self, effects: np.ndarray) -> bool:
        """Return True where exact patches agree with the construction."""
        return bool(effects[self.needed].min() >= SMALL and effects[self.others].max() < SMALL)

    def sampled(self, circuit: Circuit, real: np.ndarray) -> dict[str, Any]:
        """Compare 20 real patches, drawn as `Circuit.check` draws them, with real patches of all edges."""
        generator = np.random.default_rng(circuit.seed)
        inside, outside = np.flatnonzero(circuit.chosen), np.flatnonzero(~circuit.chosen)
        some = [
            generator.choice(part, min(len(part), 10), replace=False) for part in (inside, outside)
        ]
        numbers, scores = np.concatenate(some), circuit.scores.values[:PATCHED].mean(0)
        frame = pd.DataFrame({"edge": numbers, "score": scores[numbers], "exact": real[numbers]})
        frame["error"] = frame["score"] - frame["exact"]
        frame["drawn"] = ["circuit"] * len(some[0]) + ["other"] * len(some[1])
        check = make_check(circuit.scores, circuit.chosen, frame)
        order = np.argsort(-np.abs(circuit.scores.mean), kind="stable")[: self.size]
        return {
            "ablation": self.ablation,
            "missed_sampled": check.missed,
            "missed_true": float(np.abs(scores - real).sum() / np.abs(real).sum()),
            "lost": 1 - float(self.needed[order].sum() / self.needed.sum()),
            "bound": check.most_outside / check.n_outside,
            "bound_holds": float(
                (np.abs(real[outside]) > check.weakest).sum() <= check.most_outside
            ),
        }

    def repeated(self, circuit: Circuit, again: Circuit) -> dict[str, float]:
        """Edges that at least 95% of the bootstraps have, and those of them that other pairs do not choose."""
        sure = circuit.inclusion >= 0.95
        chosen = np.zeros(len(sure), dtype=bool)
        chosen[np.argsort(-np.abs(again.scores.mean))[: self.size]] = True
        return {"sure": float(sure.sum()), "sure_lost": float((sure & ~chosen).sum())}

    def core(
        self, circuit: Circuit, others: dict[str, Circuit], *, effects: np.ndarray | None
    ) -> dict[str, float]:
        """Edges in the core, those of them that the mechanism does not have, and what the core lacks.

        With the real effects of all edges, the same of the core edges that their own real patch confirms.
        """
        core = (
            edge_verdicts(*inclusion_by_setting(circuit, others), within=circuit.chosen) == "core"
        )
        found = self._counted("core", core)
        return found | (
            {} if effects is None else self._counted("real", core & (effects >= CONFIRMED))
        )

    def _counted(self, name: str, core: np.ndarray) -> dict[str, float]:
        lacks = float((self.needed & ~core).sum() / self.needed.sum())
        return {
            name: float(core.sum()),
            f"{name}_false": float((core & ~self.carrying).sum()),
            f"{name}_lacks": lacks,
        }


def of_transformer_lens(lens: LensModel, runs: Runs, answers: list[tuple[int, int]]) -> np.ndarray:
    """The scores of TransformerLens's own edge attribution, as means over pairs."""
    total = np.zeros(runs.graph.n_edges)
    for row, (right, wrong) in enumerate(answers):
        found = theirs.attribution_patch(
            lens.bridge,
            runs.clean.tokens[row : row + 1],
            runs.pair_tokens(slice(row, row + 1), corrupted=True).tokens,
            lambda logits, right=right, wrong=wrong: logits[0, -1, right] - logits[0, -1, wrong],
            theirs.EdgeAttributionConfig(granularity="edge"),
        )
        for (writer, reader), value in found.edge_scores.items():
            total[runs.graph.index[f"{name_of(writer)}->{name_of(reader)}"]] += value / runs.n_pairs
    return total


def name_of(node: theirs.Node) -> str:
    """Our name of a node of theirs."""
    letter = {"q_input": "<q>", "k_input": "<k>", "v_input": "<v>"}.get(node.kind, "")
    if node.head is not None:
        return f"a{node.layer}.h{node.head}{letter}"
    return {"embed": "input", "logits": "logits"}.get(node.kind, f"m{node.layer}")


def ratio(table: pd.DataFrame, above: str, below: str, *, work: Work) -> Interval:
    """A sum over another, with its bootstrap interval over combinations; where all are 0, that of their share."""
    if not table[above].any():
        return share(0, len(table))
    return work.ratio(table[above].to_numpy(float), table[below].to_numpy(float))


def correlation(table: pd.DataFrame, *, work: Work) -> Interval:
    """Rank correlation of two columns over circuits; without an interval for a few."""
    values = table.rank().to_numpy()
    if len(values) < 50:
        return Interval(
            estimate=np.corrcoef(values.T)[0, 1], low=np.nan, high=np.nan, n=len(values)
        )
    return work.interval(values, statistic=lambda drawn: np.corrcoef(drawn.T)[0, 1])


def numbers_of(rows: pd.DataFrame, circuits: pd.DataFrame, *, work: Work) -> dict[str, Interval]:
    """Every number that claim.md has a rule for."""
    exact = rows[rows["method"] == EXACT]
    core, fresh, sampled = (
        circuits[circuits["ablation"].isin(names)] for names in (["core"], ["repeated"], ABLATIONS)
    )
    numbers = {"core_false": ratio(core, "core_false", "core", work=work)}
    numbers["core_lacks"] = work.interval(core["core_lacks"].to_numpy(float))
    numbers["core_confirmed_false"] = ratio(core, "real_false", "real", work=work)
    numbers["core_confirmed_lacks"] = work.interval(core["real_lacks"].to_numpy(float))
    for ablation, of in exact.groupby("ablation", sort=False):
        numbers[f"confirmed @ {ablation}"] = share(int((of["confirmed"] == 1).sum()), len(of))
    for (method, ablation), of in rows.groupby(["method", "ablation"], sort=False):
        auroc, at = of["auroc"].to_numpy(float), f"{method}, {ablation}"
        kind = (
            "_rules"
            if method == RULES
            else "_zero"
            if ablation == "zero"
            else "_others" * (method != "eap-ig")
        )
        if method == RULES:
            fresh_ones = of[~of["mechanism"].isin(CHOSEN_ON)]
            over_default = fresh_ones["over_default"].to_numpy(float)
            numbers[f"rules_over{'_zero' * (ablation == 'zero')} @ {ablation}"] = work.interval(
                over_default
            )
        if method not in (EXACT, RANDOM):
            numbers[f"short{kind} @ {at}"] = share(int((auroc < LOW).sum()), len(of))
            numbers[f"worse @ {at}"] = share(int((of["over_exact"] < -WORSE).sum()), len(of))
        numbers[f"auroc @ {at}"] = work.interval(auroc)
        numbers[f"found @ {at}"] = work.interval(of["found"].to_numpy(float))
    of = rows[rows["method"] == THEIRS]
    numbers["below_theirs"] = share(int((of["over_default"] > 1e-9).sum()), len(of))
    numbers["sure_lost"] = ratio(fresh, "sure_lost", "sure", work=work)
    numbers["bound_holds"] = work.interval(sampled["bound_holds"].to_numpy(float))
    numbers["bound"] = work.interval(sampled["bound"].to_numpy(float))
    off = (sampled["missed_sampled"] - sampled["missed_true"]).abs()
    numbers["sample_off"] = work.interval(off.to_numpy(float), statistic=np.median)
    numbers["foretold"] = correlation(sampled[["missed_sampled", "lost"]], work=work)
    return numbers


def worst(rows: pd.DataFrame, method: str, ablation: str) -> str:
    """The mechanisms on which a method falls short, with the number of architectures."""
    of = rows[(rows["method"] == method) & (rows["ablation"] == ablation) & (rows["auroc"] < LOW)]
    counts = of["mechanism"].value_counts(sort=False)
    return ", ".join(f"`{name}` ({n})" for name, n in counts.items())


def sentence_of(circuits: pd.DataFrame) -> str:
    """Say in a sentence how often a core edge is wrong."""
    core = circuits[circuits["ablation"] == "core"]
    n, edges, false = (int(core[name].sum()) for name in ("seeds", "core", "core_false"))
    wrong = len(core[core["core_false"] > 0])
    tasks, families, lacks = (
        core["mechanism"].nunique(),
        core["family"].nunique(),
        core["core_lacks"].mean(),
    )
    return (
        f"On {n:,} models ({tasks} tasks in {families} families), {false:,} of {edges:,} core edges are *false*: they "
        f"are no part of the mechanism. The false edges are in {wrong} of {len(core)} combinations of task and family. "
        f"The core lacks {lacks:.0%} of the needed edges. On {len(WHOLE)} seeds, we also patched core edges for "
        f"real: of {core['real'].sum():,.0f} confirmed edges, {core['real_false'].sum():,.0f} are false."
    )


def markdown(rows: pd.DataFrame, circuits: pd.DataFrame) -> str:
    """A sentence and two tables: each method, and each mechanism with the default method."""
    lines = [
        sentence_of(circuits),
        "",
        "A method gives each edge a score. The columns of the table:",
        "",
        "- *AUROC*: the probability that a needed edge has a larger score than another edge; mean over all models.",
        "- *Lowest*: the lowest AUROC of a combination of task and family.",
        "- *Found*: the share of the n needed edges that are among the n largest scores.",
        "- *Worse*: combinations with an AUROC more than .02 below exact patches.",
        "- *Short*: combinations with an AUROC below .95, by task (number of families).",
        "",
        "| method | ablation | seeds | AUROC | lowest | found | worse | short |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (method, ablation), of in rows.groupby(["method", "ablation"], sort=False):
        short, less = int((of["auroc"] < LOW).sum()), int((of["over_exact"] < -WORSE).sum())
        where = f": {worst(rows, method, ablation)}" if short and method != RANDOM else ""
        cells = [
            method,
            ablation,
            f"{of['seeds'].max():.0f}",
            f"{of['auroc'].mean():.3f}",
            f"{of['auroc'].min():.3f}",
        ]
        cells += [
            f"{of['found'].mean():.0%}",
            f"{less} of {len(of)}",
            f"{short} of {len(of)}{where}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Each cell has the AUROC of the default method, `eap-ig`, and in brackets that of exact patches. One",
        "column has the method `gim`.",
        "The last three columns count core edges, false core edges, and the share of needed edges that",
        "the core lacks.",
        "",
        "| mechanism | resample | mean | zero | zero, gim | core edges | false | lacks |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    core = circuits[circuits["ablation"] == "core"]
    for name in rows["mechanism"].unique():
        cells = []
        for ablation in ABLATIONS:
            of = (
                rows[(rows["mechanism"] == name) & (rows["ablation"] == ablation)]
                .groupby("method")["auroc"]
                .mean()
            )
            cells.append(f"{of['eap-ig']:.3f} ({of[EXACT]:.3f})")
        cells.append(f"{of[RULES]:.3f}")
        own = core[core["mechanism"] == name]
        cells += [
            f"{own['core'].sum():.0f}",
            f"{own['core_false'].sum():.0f}",
            f"{own['core_lacks'].mean():.0%}",
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: pd.DataFrame):
    """AUROC of the default method beside exact patches, mechanism by mechanism, a mark for each architecture."""
    figure = new_figure(width=7.4, height=3.4)
    axes = panel(
        figure, place=(1, 1, 1), xlabel="AUROC of the needed edges, a mark for each architecture"
    )
    names = list(rows["mechanism"].unique())
    styles = (("resample", BLUE), ("mean_ordinary", OCHRE), ("zero", ORANGE))
    for at, (ablation, colour) in enumerate(styles):
        of = rows[(rows["method"] == "eap-ig") & (rows["ablation"] == ablation)]
        places = [names.index(name) + 0.22 * (at - 1) for name in of["mechanism"]]
        label = ablation.replace("_ordinary", "")
        axes.scatter(
            of["auroc"], places, s=12, color=colour, edgecolors=INK, linewidths=0.3, label=label
        )
    axes.axvline(LOW, color=INK, linewidth=0.6, linestyle="--")
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.invert_yaxis()
    legend(axes, columns=3)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

"""How many unrelated pairs SeedPrint calls related, by inputs, size, state and null; see claim.md."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analyses.claims import Measured, Work, main
from analyses.lineages import p_of
from sink_lens import LensModel, load, wrap
from sink_lens.identity import FingerprintConfig, UntrainedConfig, fingerprint, untrained
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    OCHRE,
    ORANGE,
    legend,
    new_figure,
    panel,
    without_formulas,
)

NULLS = ("analytical", "matrices", "pipeline", "shuffled", "relabelled")
KINDS = ("tokens", "embeddings")
SMALL = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_mlp": 176}
TOY = {
    "style": "llama",
    "n_layers": 6,
    "d_model": 192,
    "n_heads": 6,
    "d_mlp": 512,
    "vocab_size": 4096,
}
TINY = {"style": "llama", "n_layers": 2, "d_model": 48, "n_heads": 4, "vocab_size": 300}
ARMS = {
    "softmax": {"value_norm": "none"},
    "headnorm": {"value_norm": "shared"},
    "headnorm-per-head": {"value_norm": "per_head"},
    "sigmoid": {"attention": "sigmoid"},
}
"""Variants of the size toy; three seeds of each."""
CELLS = {
    "0.3M, initial": ORANGE,
    "0.3M, trained": OCHRE,
    "3.4M, initial": BLUE,
    "3.4M, trained": GREEN,
}
RULES = (
    "tokens_relabelled",
    "tokens_pipeline_initial",
    "tokens_pipeline_trained",
    "embeddings_relabelled",
    "embeddings_pipeline",
)


def measure(work: Work) -> Measured:
    """The share of unrelated pairs with p over 0.01, with its interval over models."""
    trains = work.tiny or work.retrain
    table = (
        work.once("pairs", lambda: compared(work))
        if trains
        else pd.read_csv(work.folder / "pairs.csv")
    )
    if work.retrain and not work.tiny:
        table.to_csv(
            work.folder / "pairs.csv", index=False, float_format="%.4g", lineterminator="\n"
        )
    shares = {
        (kind, null, cell): work.share_of_pairs(rows, rows["p"] > 0.01)
        for (kind, null, cell), rows in table.groupby(["inputs", "null", "cell"])
    }
    numbers = {}
    for cell in CELLS:
        numbers[f"tokens_relabelled @ {cell}"] = shares["tokens", "relabelled", cell]
        numbers[f"tokens_pipeline_{cell.split()[-1]} @ {cell}"] = shares["tokens", "pipeline", cell]
        numbers[f"embeddings_relabelled @ {cell}"] = shares["embeddings", "relabelled", cell]
        numbers[f"embeddings_pipeline @ {cell}"] = shares["embeddings", "pipeline", cell]
    figure = new_figure(width=9.6, height=3.4)
    for place, kind in enumerate(KINDS):
        axes = panel(
            figure,
            place=(1, 2, place + 1),
            ylabel="unrelated pairs with p > .01" if not place else "",
        )
        axes.set_title(f"random {kind}", fontsize=9.5, loc="left", color=INK)
        for side, (cell, colour) in enumerate(CELLS.items()):
            found = [shares[kind, null, cell] for null in NULLS]
            at = [one + 0.16 * (side - 1.5) for one in range(len(NULLS))]
            axes.vlines(
                at, [one.low for one in found], [one.high for one in found], color=colour, alpha=0.5
            )
            axes.plot(
                at, [one.estimate for one in found], "o", color=colour, markersize=4, label=cell
            )
        axes.set_xticks(range(len(NULLS)), NULLS)
        axes.set_ylim(-0.03, 1.03)
        axes.axhline(0.99, color=INK, linestyle=":", linewidth=1)
    legend(axes, columns=4, over=figure)
    ordered = sorted(numbers.items(), key=lambda one: RULES.index(one[0].partition(" @ ")[0]))
    return Measured(numbers=dict(ordered), figure=without_formulas(figure))


def compared(work: Work) -> pd.DataFrame:
    """inputs, cell, null, a, b (numbers of models), p: of every pair of models of two seeds."""
    seeds = work.size(range(10), range(2))
    small = [(seed, work.trained("small", seed=seed, **work.size(SMALL, {}))) for seed in seeds]
    arms = [
        (seed, arm)
        for arm in work.size(tuple(ARMS), ("softmax",))
        for seed in work.size(range(3), range(2))
    ]
    toys = [(seed, work.trained(arm, seed=seed, **ARMS[arm])) for seed, arm in arms]
    made = UntrainedConfig(**work.size(TOY, TINY))
    models = {
        "0.3M, initial": [(seed, checkpoint(folder, first=True)) for seed, folder in small],
        "0.3M, trained": [(seed, checkpoint(folder)) for seed, folder in small],
        "3.4M, initial": [(seed, untrained(made, seed=seed)) for seed in seeds],
        "3.4M, trained": [(seed, checkpoint(folder)) for seed, folder in toys],
    }
    tables = [
        pairs_of(work, kind, in_cell).assign(inputs=kind, cell=cell)
        for kind in KINDS
        for cell, in_cell in models.items()
    ]
    return pd.concat(tables, ignore_index=True)[["inputs", "cell", "null", "a", "b", "p"]]


def checkpoint(folder: Path, *, first: bool = False) -> LensModel:
    """A training's model before its first step, or after its last one."""
    steps = sorted(int(one.name.rpartition("-")[2]) for one in (folder / "checkpoints").iterdir())
    found = load(folder / "checkpoints" / f"checkpoint-{steps[0 if first else -1]}")
    return wrap(found.plain, name=f"{folder.name} step {steps[0 if first else -1]}")


def pairs_of(work: Work, kind: str, models: Sequence[tuple[int, LensModel]]) -> pd.DataFrame:
    """One row for each null and each pair of models of two seeds."""
    few = {"sequences": 60, "length": 4, "coordinates": 28, "draws": 100, "relabellings": 100}
    config = FingerprintConfig(inputs=kind, **work.size({}, few))
    names = {lens.name: place for place, (_, lens) in enumerate(models)}
    found = fingerprint(
        [lens for _, lens in models], config=config, cache=False, progress=work.progress
    ).tables["nulls"]
    rows = found.assign(a=found["a"].map(names), b=found["b"].map(names), p=p_of(found))
    of_seed = [seed for seed, _ in models]
    return rows[[of_seed[a] != of_seed[b] for a, b in zip(rows["a"], rows["b"], strict=True)]]


if __name__ == "__main__":
    main(measure)

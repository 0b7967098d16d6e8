"""SeedPrint's p of untrained pairs of two seeds on embedding inputs, by width and style; see claim.md."""

import numpy as np
import pandas as pd

from analyses.claims import Measured, Work, certain, main
from analyses.lineages import p_of
from sink_lens.identity import FingerprintConfig, UntrainedConfig, fingerprint, untrained
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

CELLS = {
    "Llama, width 64, 6 layers": {"style": "llama", "d_model": 64, "n_heads": 4, "n_layers": 6},
    "Llama, width 192, 6 layers": {"style": "llama", "d_model": 192, "n_heads": 6, "n_layers": 6},
    "Llama, width 384, 6 layers": {"style": "llama", "d_model": 384, "n_heads": 6, "n_layers": 6},
    "Llama, width 768, 12 layers": {"style": "llama"},
    "Qwen, width 768, 12 layers": {"style": "qwen"},
}
NULLS = {"relabelled": ORANGE, "analytical": BLUE}
FIRST_SEED = 20


def measure(work: Work) -> Measured:
    """The share of pairs over .01 by cell and null, with its interval over models."""
    tables = {
        cell: work.once(f"pairs-{at}", lambda cell=cell: pairs_of(work, cell))
        for at, cell in enumerate(CELLS)
    }
    numbers = {}
    for cell, table in tables.items():
        width = int(cell.split("width ")[1].split(",")[0])
        number = "wide" if width == 768 else "between" if width == 384 else "narrow"
        for null in NULLS:
            rows = table[table["null"] == null]
            numbers[f"{number} @ {cell}, {null}"] = work.share_of_pairs(rows, rows["p"] > 0.01)
        if number == "wide":
            numbers[f"least_p @ {cell}"] = certain(
                table.loc[table["null"] == "analytical", "p"].min()
            )
    order = ("wide", "between", "narrow", "least_p")
    ordered = dict(sorted(numbers.items(), key=lambda one: order.index(one[0].partition(" @ ")[0])))

    figure = new_figure(width=8.4, height=3.4)
    axes = panel(figure, ylabel="p of unrelated pairs (log10)")
    for at, table in enumerate(tables.values()):
        for place, (null, colour) in enumerate(NULLS.items()):
            p = np.log10(table.loc[table["null"] == null, "p"].clip(lower=1e-12))
            axes.plot(
                [at + 0.2 * (place - 1)] * len(p),
                p,
                "o",
                color=colour,
                markersize=3,
                label="" if at else null,
            )
    axes.axhline(-2, color=INK, linestyle=":", linewidth=1)
    axes.axhline(
        np.log10(0.116), color=OCHRE, linestyle="--", linewidth=1, label="lowest of table 1"
    )
    axes.set_xticks(range(len(CELLS)), [cell.replace(", ", "\n") for cell in CELLS], fontsize=7)
    legend(axes, columns=4)
    return Measured(numbers=ordered, figure=without_formulas(figure))


def pairs_of(work: Work, cell: str) -> pd.DataFrame:
    """One row for each null and each pair of two seeds: a, b (numbers of models) and p."""
    shape = work.size(
        CELLS[cell] | {"vocab_size": 4096},
        {"n_layers": 2, "d_model": 48, "n_heads": 4, "vocab_size": 300},
    )
    n = work.size(4 if "768" in cell else 5, 3)
    made = UntrainedConfig(**({"style": CELLS[cell]["style"]} | shape))
    models = [untrained(made, seed=FIRST_SEED + seed) for seed in range(n)]
    few = {"sequences": 60, "length": 4, "coordinates": 28, "draws": 100, "relabellings": 100}
    size = work.size(
        {"sequences": 1000, "length": 4, "alpha": 0.05, "draws": 19, "relabellings": 199}, few
    )
    config = FingerprintConfig(inputs="released_embeddings", seed=1, **size)
    found = fingerprint(models, config=config, cache=False, progress=work.progress).tables["nulls"]
    names = {lens.name: place for place, lens in enumerate(models)}
    rows = found.assign(a=found["a"].map(names), b=found["b"].map(names), p=p_of(found))
    return rows.loc[rows["null"].isin(list(NULLS)), ["null", "a", "b", "p"]]


if __name__ == "__main__":
    main(measure)

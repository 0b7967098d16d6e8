"""Token preference with enough inputs: three numbers beside their ceilings, by style and size; see claim.md."""

import numpy as np
import pandas as pd

from analyses.claims import Measured, Work, certain, main
from sink_lens.identity import UntrainedConfig, preference, untrained
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    OCHRE,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval, summarise_differences

ARMS = {
    "GPT-2, ReLU": {"style": "gpt2", "activation": "relu"},
    "GPT-2, GELU": {"style": "gpt2"},
    "Llama": {"style": "llama"},
    "Qwen": {"style": "qwen"},
}
SMALL = {"n_layers": 6, "d_model": 384, "n_heads": 6}
SIZES = {
    "small": (SMALL, 2000, 8, tuple(ARMS)),
    "small, 256 tokens": (SMALL, 500, 256, ("GPT-2, ReLU", "Llama", "Qwen")),
    "GPT-2 small's size": ({}, 2000, 8, ("GPT-2, ReLU",)),
}
"""Size -> shape of the models, sequences, tokens of each, and the arms that are asked."""
SEEDS = (10, 11, 12)
FEW = 200
NUMBERS = {
    "factor": ("argmax_top_share", "argmax_top_share"),
    "uniform": ("argmax_top_ratio", None),
    "probability": ("mean_probability_ratio", "mean_probability_ratio"),
}
"""Number -> the measure, and the one whose null it is divided by."""


def measure(work: Work) -> Measured:
    """Every number with its 95% t interval over seeds, averaged as logarithms."""
    cells = {}
    for size, (*_, arms) in SIZES.items():
        for arm in arms:
            name = f"{arm}-{size}".replace(" ", "-").replace(",", "").replace("'", "")
            cells[f"{arm}, {size}"] = work.once(
                name, lambda size=size, arm=arm: votes(work, size=size, arm=arm)
            )
    numbers = {}
    for number, (name, null) in NUMBERS.items():
        for cell, table in cells.items():
            rows = table[(table["measure"] == name) & (table["n"] > FEW)]
            values = rows["value"] / (rows["null"] if null else 1.0)
            numbers[f"{number} @ {cell}"] = over_seeds(work, values.to_numpy())
    small = {
        cell: share_over_null(table) for cell, table in cells.items() if table["n"].nunique() > 1
    }
    numbers |= {
        f"few @ {cell}": over_seeds(work, found[FEW].to_numpy()) for cell, found in small.items()
    }
    numbers |= {
        f"growth @ {cell}": over_seeds(work, (found.iloc[:, -1] / found[FEW]).to_numpy())
        for cell, found in small.items()
    }
    top = (
        pd.concat(cells.values()).query("measure == 'argmax_top_share'").groupby("n")["null"].mean()
    )
    numbers |= {f"ceiling @ N {n:,}": certain(1 / null) for n, null in top.items()}
    return Measured(numbers=numbers, figure=draw(numbers, cells))


def share_over_null(table: pd.DataFrame) -> pd.DataFrame:
    """The factor by seed (rows) and number of sequences (columns)."""
    rows = table[table["measure"] == "argmax_top_share"]
    return rows.assign(factor=rows["value"] / rows["null"]).pivot(
        index="seed", columns="n", values="factor"
    )


def over_seeds(work: Work, values: np.ndarray) -> Interval:
    """The geometric mean over seeds with its t interval."""
    found = summarise_differences(np.log(values), generator=work.rng())
    mean, low, high = np.exp([found.mean, found.low, found.high]).tolist()
    return Interval(estimate=mean, low=low, high=high, n=found.n)


def votes(work: Work, *, size: str, arm: str) -> pd.DataFrame:
    """The measure, value, null, n and seed of untrained models of one cell."""
    shape, sequences, length, _ = SIZES[size]
    shape = work.size(shape, {"n_layers": 2, "d_model": 48, "n_heads": 4, "vocab_size": 300})
    counts = work.size(
        [FEW, sequences] if size == "small" else [sequences],
        [FEW, 400] if size == "small" else [400],
    )
    frames = []
    for seed in SEEDS[: work.size(3, 2)]:
        lens = untrained(UntrainedConfig(**ARMS[arm], **shape), seed=seed)
        for n in counts:
            found = preference(lens, sequences=n, length=length, seed=1, progress=work.progress)
            frames.append(found.frame.assign(n=n, seed=seed))
    return pd.concat(frames, ignore_index=True)[["measure", "value", "null", "n", "seed"]]


def draw(numbers, cells):
    """The three numbers of each cell on one logarithmic axis."""
    figure = new_figure(width=8.4, height=3.4)
    axes = panel(figure, ylabel="times chance, or times uniform")
    for place, (number, colour) in enumerate(zip(NUMBERS, (ORANGE, BLUE, GREEN), strict=True)):
        found = [numbers[f"{number} @ {cell}"] for cell in cells]
        at = [one + 0.2 * (place - 1) for one in range(len(cells))]
        axes.vlines(
            at, [one.low for one in found], [one.high for one in found], color=colour, alpha=0.5
        )
        axes.plot(at, [one.estimate for one in found], "o", color=colour, label=number)
    axes.axhline(1, color=INK, linewidth=1)
    axes.axhline(100, color=OCHRE, linestyle="--", linewidth=1, label="two orders of magnitude")
    axes.set_xticks(range(len(cells)), [cell.replace(", ", "\n") for cell in cells], fontsize=7)
    log_scale(axes, axis="y")
    legend(axes, columns=4)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

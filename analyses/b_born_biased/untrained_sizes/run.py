"""How token preference and contraction of untrained models grow with depth, width, gate and scale; see claim.md."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analyses.claims import Measured, Work, certain, main
from sink_lens.identity import UntrainedConfig, contraction, preference, untrained
from sink_lens.report.style import (
    BLUE,
    INK,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval, summarise_differences

ARMS: dict[str, dict[str, Any]] = {
    "ReLU": {"style": "gpt2", "activation": "relu"},
    "GELU": {"style": "gpt2"},
    "Llama": {"style": "llama"},
}
COLOURS = {"ReLU": ORANGE, "GELU": BLUE, "Llama": INK}
DEPTHS, WIDTHS = (6, 12, 24, 48), (256, 512, 1024, 2048)
DEPTH, WIDTH = 12, 1024
"""Depth of the models of other widths, and width of those of other depths."""
XL = (48, 1600)
SCALES = (0.01, 0.04)
SEEDS = (0, 1, 2)


def measure(work: Work) -> Measured:
    """Differences between sizes, paired by seed, with 95% t intervals over seeds; factors as logarithms."""
    table = pd.concat(
        [of_model(work, name, **fields) for name, fields in models().items()], ignore_index=True
    )
    gain, factor = (
        table.pivot(index="model", columns="seed", values=name) for name in ("gain", "factor")
    )

    def over_seeds(values: np.ndarray, *, factors: bool = False) -> Interval:
        found = summarise_differences(np.log(values) if factors else values, generator=work.rng())
        ends = np.array([found.mean, found.low, found.high])
        mean, low, high = (np.exp(ends) if factors else ends).tolist()
        return Interval(estimate=mean, low=low, high=high, n=found.n)

    def between(rows: pd.DataFrame, above: str, below: str) -> np.ndarray:
        return rows.loc[above].to_numpy() - rows.loc[below].to_numpy()

    logs = np.log(factor)
    wide = {arm: (named(arm, DEPTH, WIDTHS[-1]), named(arm, DEPTH, WIDTHS[0])) for arm in ARMS}
    deep = {arm: (named(arm, DEPTHS[-1], WIDTH), named(arm, DEPTHS[0], WIDTH)) for arm in ARMS}
    llamas = [
        name for name in gain.index if name in {named("Llama", *shape) for shape in shapes("Llama")}
    ]
    numbers = {
        **{f"width @ {arm}": over_seeds(between(gain, *pair)) for arm, pair in wide.items()},
        **{f"depth @ {arm}": over_seeds(between(gain, *pair)) for arm, pair in deep.items()},
        "scale": over_seeds(between(gain, *(f"deviation {one}" for one in reversed(SCALES)))),
        "gate": over_seeds(between(gain, "no gate", named("Llama", DEPTH, WIDTH))),
        **{
            f"xl @ {arm}": over_seeds(gain.loc[named(arm, *XL)].to_numpy())
            for arm in ("ReLU", "Llama")
        },
        "llama": certain(gain.loc[llamas].mean(axis=1).max()),
        **{
            f"{number} @ {arm}": over_seeds(np.exp(between(logs, *pairs[arm])), factors=True)
            for number, pairs in (("preference_width", wide), ("preference_depth", deep))
            for arm in ("ReLU", "GELU")
        },
        **{
            f"preference_xl @ {arm}": over_seeds(
                factor.loc[named(arm, *XL)].to_numpy(), factors=True
            )
            for arm in ("ReLU", "Llama")
        },
        "preference_llama": certain(np.exp(logs.loc[llamas].mean(axis=1)).max()),
    }
    return Measured(numbers=numbers, figure=draw(gain, factor))


def named(arm: str, n_layers: int, d_model: int) -> str:
    """Return what a model is called."""
    return f"{arm}, {n_layers} layers of {d_model}"


def shapes(arm: str) -> list[tuple[int, int]]:
    """(layers, width) of an arm's models, the largest last."""
    found = {(depth, WIDTH) for depth in DEPTHS} | {(DEPTH, width) for width in WIDTHS}
    return sorted(found) + [XL] * (arm != "GELU")


def models() -> dict[str, dict[str, Any]]:
    """Name -> fields of every model."""
    shape = {"n_layers": DEPTH, "d_model": WIDTH}
    found = {
        named(arm, n_layers, d_model): fields | {"n_layers": n_layers, "d_model": d_model}
        for arm, fields in ARMS.items()
        for n_layers, d_model in shapes(arm)
    }
    found |= {f"deviation {scale}": ARMS["ReLU"] | shape | {"init_std": scale} for scale in SCALES}
    return found | {"no gate": {"style": "llama", "activation": "relu", "gated": False} | shape}


def of_model(work: Work, name: str, **fields: Any) -> pd.DataFrame:
    """model, parameters, seed, gain in cosine between sequences, and the most frequent prediction over its null."""
    made = work.size(lambda one: one, smaller)(fields)
    place = name.replace(", ", "-").replace(" ", "-").lower()
    return work.once(
        place,
        lambda: pd.DataFrame(
            [measured(work, name, made, seed) for seed in SEEDS[: work.size(3, 2)]]
        ),
    )


def smaller(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same shape at a sixth of the depth and a sixteenth of the width, 16 dimensions at least."""
    width = fields["d_model"] // 256 * 16
    return {**fields, "n_layers": fields["n_layers"] // 6, "d_model": width, "vocab_size": 300}


def measured(work: Work, name: str, fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """One model with the weights of one seed."""
    heads = max(1, fields["d_model"] // work.size(64, 16))
    lens = untrained(UntrainedConfig(**{**fields, "n_heads": heads}), seed=seed)
    few, many = work.size((64, 200), (50, 50))
    options = {"length": 16, "progress": work.progress}
    contracted = contraction(lens, sequences=few, sinks=False, **options).frame.set_index(
        "measure"
    )["value"]
    preferred = (
        preference(lens, sequences=many, **options)
        .frame.set_index("measure")
        .loc["argmax_top_share"]
    )
    parameters = sum(one.numel() for one in lens.plain.parameters())
    factor = preferred["value"] / preferred["null"]
    return {
        "model": name,
        "parameters": parameters,
        "seed": seed,
        "gain": contracted["inter_excess"],
        "factor": factor,
    }


def draw(gain: pd.DataFrame, factor: pd.DataFrame):
    """Both by depth and by width, a line an arm, each seed a point."""
    figure = new_figure(width=9.6, height=5.8)
    for at, (rows, says) in enumerate(
        ((gain, "gain in cosine"), (factor, "top prediction ÷ null"))
    ):
        for side, (sizes, xlabel) in enumerate(
            ((DEPTHS, "layers of width 1,024"), (WIDTHS, "width of 12 layers"))
        ):
            axes = panel(
                figure,
                place=(2, 2, 2 * at + side + 1),
                xlabel=xlabel,
                ylabel=says if not side else "",
            )
            for arm, colour in COLOURS.items():
                names = [
                    named(arm, DEPTH, size) if side else named(arm, size, WIDTH) for size in sizes
                ]
                values = rows.loc[names].to_numpy()
                axes.plot(
                    sizes,
                    np.exp(np.log(values).mean(1)) if at else values.mean(1),
                    color=colour,
                    label=arm,
                )
                axes.plot(sizes, values, color=colour, marker="o", markersize=3, linestyle="none")
            log_scale(axes, axis="x")
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.axhline(1 if at else 0, color=INK, linestyle=":", linewidth=1)
            if at:
                log_scale(axes, axis="y")
    legend(axes, columns=3, over=figure)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

"""How alike untrained models make sequences and positions, and which part does it; see claim.md."""

import pandas as pd

from analyses.claims import Measured, Work, main
from sink_lens.identity import UntrainedConfig, contraction, untrained
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
from sink_lens.stats import Interval, summarise_differences

ARMS = {
    "ReLU": {"style": "gpt2", "activation": "relu"},
    "GELU": {"style": "gpt2", "activation": "gelu"},
    "tanh": {"style": "gpt2", "activation": "tanh"},
    "ReLU, no attention": {"style": "gpt2", "activation": "relu", "attention": False},
    "ReLU, no MLP": {"style": "gpt2", "activation": "relu", "mlp": False},
    "Llama": {"style": "llama"},
    "Llama, no attention": {"style": "llama", "attention": False},
    "Llama, no MLP": {"style": "llama", "mlp": False},
}
"""The first five are GPT-2; arms of one style and seed begin with the same weights."""
SEEDS = (0, 1, 2)


def measure(work: Work) -> Measured:
    """The gains in cosine, and differences of arms paired by seed, with 95% t intervals over seeds."""
    tables = [
        work.once(f"arm-{place}", lambda arm=arm: measured(work, arm))
        for place, arm in enumerate(ARMS)
    ]
    table = pd.concat(tables, ignore_index=True)
    wide = table[table["place"] < 0].pivot(index=["measure", "arm"], columns="seed", values="value")

    def of(arm, name="inter_excess"):
        return wide.loc[(name, arm)].to_numpy()

    def over_seeds(values):
        found = summarise_differences(values, generator=work.rng())
        return Interval(estimate=found.mean, low=found.low, high=found.high, n=found.n)

    def left(style):
        return of(f"{style}, no attention", "intra_excess") / of(style, "intra_excess")

    numbers = {
        "relu_over_gelu": over_seeds(of("ReLU") - of("GELU")),
        "gelu_over_tanh": over_seeds(of("GELU") - of("tanh")),
        "relu": over_seeds(of("ReLU")),
        "relu_without_mlp": over_seeds(of("ReLU, no MLP")),
        "llama": over_seeds(of("Llama")),
        "intra_without_attention @ GPT-2 with ReLU": over_seeds(left("ReLU")),
        "intra_without_attention @ Llama": over_seeds(left("Llama")),
        "discrepancy": over_seeds(of("ReLU", "discrepancy")),
        "agreement": over_seeds(of("ReLU", "agreement")),
    }
    return Measured(numbers=numbers, figure=draw(table))


def measured(work: Work, arm: str) -> pd.DataFrame:
    """arm, seed, measure, place, value: of the whole model (place -1), and after each sublayer."""
    seeds = SEEDS[: work.size(3, 2)]
    small = work.size(
        {"vocab_size": 8192}, {"n_layers": 1, "d_model": 48, "n_heads": 4, "vocab_size": 300}
    )
    options = {
        "sequences": work.size(64, 50),
        "length": work.size(32, 10),
        "sinks": False,
        "progress": work.progress,
    }
    config = UntrainedConfig(**ARMS[arm], **small)
    found = {seed: contraction(untrained(config, seed=seed), **options) for seed in seeds}
    rows = []
    for seed, one in found.items():
        other = found[seeds[(seeds.index(seed) + 1) % len(seeds)]]
        directions = [list(given.directions.values())[-1] for given in (one, other)]
        whole = zip(one.frame["measure"], one.frame["value"], strict=True)
        values = [*whole, ("agreement", abs(float(directions[0] @ directions[1])))]
        rows += [(arm, seed, name, -1, value) for name, value in values]
        for name, of_name in one.tables["layers"].groupby("measure"):
            rows += [
                (arm, seed, f"{name} after", place, value)
                for place, value in enumerate(of_name["excess"])
            ]
    return pd.DataFrame(rows, columns=["arm", "seed", "measure", "place", "value"])


def draw(table: pd.DataFrame):
    """The gain after every sublayer, mean over seeds: between sequences, and between positions."""
    figure = new_figure(width=9.6, height=3.4)
    colours = dict(zip(ARMS, (ORANGE, GREEN, BLUE, ORANGE, ORANGE, INK, INK, INK), strict=True))
    for place, (name, says) in enumerate((("inter", "sequences"), ("intra", "positions"))):
        axes = panel(
            figure,
            place=(1, 2, place + 1),
            xlabel="sublayer",
            ylabel=f"gain in cosine between {says}",
        )
        for arm, of_arm in table[table["measure"] == f"{name} after"].groupby("arm", sort=False):
            mean = of_arm.groupby("place")["value"].mean()[
                :-1
            ]  # the last one is after the final norm
            style = "--" if arm.endswith("no attention") else ":" if arm.endswith("no MLP") else "-"
            axes.plot(mean, color=colours[arm], linestyle=style, label=arm)
        axes.axhline(0, color=OCHRE, linewidth=0.7)
    legend(axes, columns=4, over=figure)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

"""Which token untrained models predict, against chance, and whether training keeps it; see claim.md."""

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from analyses.claims import Measured, Work, main
from sink_lens import load
from sink_lens.identity import UntrainedConfig, preference, untrained
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    QUIET,
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
    "GPT-2, tanh": {"style": "gpt2", "activation": "tanh"},
    "Llama": {"style": "llama"},
}
SEEDS = (0, 1, 2)
STEPS = (0, 16, 64, 256, 600)
TRAINED, FEW = {"sequences": 1000, "length": 16}, {"sequences": 50, "length": 16}


def measure(work: Work) -> Measured:
    """Every number with its 95% t interval over seeds; factors are averaged as logarithms."""
    arms = {
        name: work.once(f"arm-{place}", lambda name=name: asked(work, name))
        for place, name in enumerate(ARMS)
    }
    trains = work.tiny or work.retrain
    course = (
        work.once("course", lambda: trained(work))
        if trains
        else pd.read_csv(work.folder / "course.csv")
    )

    def over_seeds(values, *, factor=False):
        found = summarise_differences(np.log(values) if factor else values, generator=work.rng())
        ends = np.array([found.mean, found.low, found.high])
        mean, low, high = (np.exp(ends) if factor else ends).tolist()
        return Interval(estimate=mean, low=low, high=high, n=found.n)

    numbers = {}
    for number, kind, name in (
        ("argmax", "summary", "argmax_top_share"),
        ("argmin", "summary", "argmin_top_share"),
        ("probability", "summary", "mean_probability_ratio"),
    ):
        for arm, table in arms.items():
            rows = table[(table["kind"] == kind) & (table["name"] == name)]
            values = rows["value"] / rows["null"]
            numbers[f"{number} @ {arm}"] = over_seeds(values.to_numpy(), factor=True)
    last = course[course["step"] == course["step"].max()]
    own, other = (
        last[last["own"] == is_own].groupby("seed")["spearman"].mean() for is_own in (True, False)
    )
    numbers["persists"] = over_seeds((own - other).to_numpy())
    return Measured(numbers=numbers, figure=draw(arms, course))


def asked(work: Work, arm: str) -> pd.DataFrame:
    """The kind (summary, coverage), name, seed, value, null, low and high of the null, of untrained models."""
    seeds = SEEDS[: work.size(3, 2)]
    small = work.size({}, {"n_layers": 2, "d_model": 48, "n_heads": 4, "vocab_size": 300})
    options = {"sequences": work.size(200, 50), "length": 16, "progress": work.progress}
    frames = []
    for seed in seeds:
        found = preference(untrained(UntrainedConfig(**ARMS[arm], **small), seed=seed), **options)
        summary = found.frame.rename(columns={"measure": "name"}).assign(kind="summary")
        curve = (
            found.tables["coverage"]
            .query("kind == 'argmax'")
            .rename(columns={"tokens": "name", "share": "value"})
        )
        frames += [one.assign(seed=seed) for one in (summary, curve.assign(kind="coverage"))]
    columns = ["kind", "name", "seed", "value", "null", "null_low", "null_high"]
    return pd.concat(frames, ignore_index=True)[columns].astype({"name": str})


def trained(work: Work) -> pd.DataFrame:
    """seed, step, initial, own, spearman: of mean probabilities at a step with those of a seed's initialisation."""
    found = {}
    for seed in SEEDS:
        folder = work.trained("softmax", seed=seed)
        for step in work.size(STEPS, (0, 1, 4)):
            lens = load(folder / "checkpoints" / f"checkpoint-{step}")
            found[seed, step] = preference(
                lens, progress=work.progress, **work.size(TRAINED, FEW)
            ).probability
    rows = [
        (seed, step, initial, seed == initial, spearmanr(probability, found[initial, 0]).statistic)
        for (seed, step), probability in found.items()
        for initial in SEEDS
    ]
    return pd.DataFrame(rows, columns=["seed", "step", "initial", "own", "spearman"])


def draw(arms, course):
    """Return how many tokens cover which share of the predictions; and how long the initial preference lasts."""
    figure = new_figure(width=9.6, height=3.3)
    axes = panel(
        figure,
        place=(1, 2, 1),
        xlabel="tokens, the most frequent first",
        ylabel="share of predictions",
    )
    for (arm, table), colour in zip(arms.items(), (ORANGE, GREEN, BLUE, INK), strict=True):
        curve = table[table["kind"] == "coverage"].astype({"name": int}).groupby("name")
        axes.plot(curve["value"].mean(), color=colour, label=arm)
        if arm == list(arms)[-1]:
            axes.plot(curve["null"].mean(), color=QUIET, linestyle=":", label="chance")
    log_scale(axes, axis="x")
    legend(axes, columns=3)
    axes = panel(
        figure,
        place=(1, 2, 2),
        xlabel="step of training",
        ylabel="correlation of preferences (Spearman)",
    )
    for own, colour in ((True, ORANGE), (False, QUIET)):
        for seed, of_seed in course[course["own"] == own].groupby("seed"):
            mean = of_seed.groupby("step")["spearman"].mean()
            label = (
                ("own initialisation" if own else "another seed's") if seed == SEEDS[0] else None
            )
            axes.plot(
                np.arange(len(mean)), mean, marker="o", markersize=3, color=colour, label=label
            )
    axes.set_xticks(range(course["step"].nunique()), sorted(course["step"].unique()))
    legend(axes, columns=2)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

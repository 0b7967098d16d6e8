"""Three arms of a small model, at the initialisation and after training, paired by seed; see claim.md."""

import numpy as np
import pandas as pd

from analyses.claims import Measured, Work, main
from sink_lens import load, read_run
from sink_lens.identity import contraction, preference
from sink_lens.report.style import BLUE, INK, ORANGE, new_figure, panel, without_formulas
from sink_lens.stats import Interval, summarise_differences
from sink_lens.training import compare

ARMS = {"softmax": "none", "headnorm": "shared", "position": "position"}
SEEDS = (0, 1, 2)
RANDOM, FEW = {"sequences": 256, "length": 64}, {"sequences": 50, "length": 16}
FACTORS = ("preference_init", "preference_end")
"""Numbers that are compared as factors, not as differences."""


def measure(work: Work) -> Measured:
    """Every number of ``arms.csv`` against softmax's of the same seed, or of models that are trained here."""
    trains = work.tiny or work.retrain
    table = (
        work.once("arms", lambda: trained(work))
        if trains
        else pd.read_csv(work.folder / "arms.csv")
    )
    wide = table.pivot(index=["number", "arm"], columns="seed", values="value")
    numbers = {}
    for name in dict.fromkeys(table["number"]):
        for arm in list(ARMS)[1:]:
            pair = np.stack([wide.loc[(name, one)].to_numpy() for one in (arm, "softmax")])
            if name in FACTORS:
                pair = np.log(pair)
            found = summarise_differences(pair[0] - pair[1], generator=work.rng())
            ends = np.array([found.mean, found.low, found.high])
            mean, low, high = (np.exp(ends) if name in FACTORS else ends).tolist()
            numbers[f"{name} @ {arm}"] = Interval(estimate=mean, low=low, high=high, n=found.n)
    return Measured(numbers=numbers, figure=draw(wide))


def trained(work: Work) -> pd.DataFrame:
    """arm, seed, number, value, of models that are trained beside the run folder where they are not yet."""
    runs, rows = {}, []
    for seed in SEEDS:
        for arm, norm in ARMS.items():
            runs[arm, seed] = work.trained(arm, seed=seed, value_norm=norm)
    every = compare(list(runs.values()), generator=work.rng())
    measures = every.tables["finals"].query("curve == 'evaluation'")
    for (arm, seed), folder in runs.items():
        mine = (measures["variant"] == ARMS[arm]) & (measures["seed"] == seed)
        found = {"loss": float(measures.loc[mine, "loss"].iloc[0])} | watched(
            read_run(folder).tables["watch"]
        )
        steps = {"init": 0, "end": read_run(folder).config["steps"]}
        for when, step in steps.items():
            found |= {
                f"{name}_{when}": value
                for name, value in biased(folder, step=step, random=work.size(RANDOM, FEW)).items()
            }
        del found[
            "discrepancy_end"
        ]  # of no rule: training makes the first position special in any case
        rows += [
            {"arm": arm, "seed": seed, "number": name, "value": value}
            for name, value in found.items()
        ]
    return pd.DataFrame(rows)


def watched(frame: pd.DataFrame) -> dict[str, float]:
    """Attention to position 0 in the layer with most, and the dominance ratio, at the last checkpoint."""
    last = frame[frame["step"] == frame["step"].max()]
    mass = last[(last["measure"] == "sink_mass") & last["layer"].notna()]["value"].max()
    dominance = last[(last["measure"] == "dominance_ratio") & last["layer"].isna()]["value"].iloc[0]
    return {"mass": float(mass), "dominance": float(dominance)}


def biased(folder, *, step: int, random: dict) -> dict[str, float]:
    """Contraction and preference of a checkpoint."""
    lens = load(folder / "checkpoints" / f"checkpoint-{step}")
    contracted = contraction(lens, sinks=False, **random).frame.set_index("measure")["value"]
    preferred = preference(lens, **random).frame.set_index("measure")["value"]
    return {
        "inter": float(contracted["inter_excess"]),
        "intra": float(contracted["intra_excess"]),
        "discrepancy": float(contracted["discrepancy"]),
        "preference": float(preferred["mean_probability_ratio"]),
    }


def draw(wide: pd.DataFrame):
    """A panel a number: a dot a seed, an arm a place."""
    names = list(dict.fromkeys(wide.index.get_level_values("number")))
    figure = new_figure(width=11.0, height=4.6)
    for place, name in enumerate(names):
        axes = panel(
            figure, place=(2, -(-len(names) // 2), place + 1), ylabel=name.replace("_", ", ")
        )
        for spot, (arm, colour) in enumerate(zip(ARMS, (INK, ORANGE, BLUE), strict=True)):
            values = wide.loc[(name, arm)].to_numpy()
            axes.scatter(np.full(len(values), spot), values, color=colour, s=18)
            axes.plot([spot - 0.2, spot + 0.2], [values.mean()] * 2, color=colour)
        axes.set_xticks(range(len(ARMS)), list(ARMS), rotation=30)
        axes.set_xlim(-0.5, len(ARMS) - 0.5)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

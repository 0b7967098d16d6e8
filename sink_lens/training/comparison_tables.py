"""Sink and disparity of arms side by side: the last checkpoints' measures, their course, and the births."""

import warnings

import numpy as np
import pandas as pd

from ..records import Run
from ..stats import paired_differences
from .birth import Birth, births, whole
from .variants import Arms

SIDES = (
    "sink_rate",
    "sink_mass",
    "top_mass",
    "dominance_ratio",
    "effective_rank",
    "effective_rank_without",
    "s2_ratio",
    "norm_ratio",
    "growth_steps",
    "super_neurons",
)
"""What is compared of the whole model; ``top_mass`` is the mean mass in the layer that has most."""
KEYS = ["measure", "threshold"]


def sides(arms: Arms) -> tuple[pd.DataFrame, str]:
    """The whole model's measures at every checkpoint of every run, and why there are none where there are none.

    Columns: arm, seed, step, tokens, measure, threshold, value, unit. The runs must have been watched on the same
    sequences.
    """
    todo = "sink and disparity are not compared: "
    frames, hashes = [], set()
    for arm, runs in arms.runs.items():
        for seed, run in runs.items():
            frame = watched(run)
            if frame is None:
                return pd.DataFrame(), f"{todo}{run.folder} was not watched. Run sink-lens watch on every run."
            hashes |= set(frame["tokens_sha256"].tolist())
            frames.append(_whole(frame).assign(arm=arm, seed=seed))
    if len(hashes) > 1:
        return pd.DataFrame(), f"{todo}the runs were watched on different sequences. Watch all with the same options."
    return pd.concat(frames, ignore_index=True), ""


def watched(run: Run) -> pd.DataFrame | None:
    """What was measured on a run's checkpoints; None where nothing was."""
    if "watch" not in run.tables:
        return None
    frame = run.tables["watch"]
    frame = frame.loc[frame["error"].isna()]
    return frame if len(frame) else None


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    rows = [whole(frame, measure) for measure in SIDES if measure != "top_mass"]
    mass = frame.loc[(frame["measure"] == "sink_mass") & frame["layer"].notna()]
    top = mass.sort_values("value").drop_duplicates("step", keep="last").assign(measure="top_mass")
    every = pd.concat([*rows, top], ignore_index=True)
    return every.reindex(columns=["step", "tokens", "measure", "threshold", "value", "unit"])


def last(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last checkpoint that every run has.

    A run whose last checkpoint is damaged does not have its earlier one compared with the others' last.
    """
    shared = set.intersection(*(set(rows["step"].tolist()) for _, rows in table.groupby(["arm", "seed"])))
    final = max(shared, default=None)
    if final is not None and final != table["step"].max():
        warnings.warn(f"sinks are compared at step {final}: not every run was measured at a later one", stacklevel=2)
    return table.loc[table["step"] == final]


def measure_table(arms: Arms, table: pd.DataFrame, *, generator: np.random.Generator) -> pd.DataFrame:
    """The last checkpoints side by side: arm, measure, threshold, unit, step, mean, low, high, n.

    Intervals are over seeds; ``difference``, ``difference_low`` and ``difference_high`` are to the baseline, paired.
    """
    final = last(table)
    frames = []
    for arm in arms.runs:
        rows = final.loc[final["arm"] == arm]
        pivot = rows.pivot(index=KEYS, columns="seed", values="value")
        base = final.loc[final["arm"] == arms.baseline].pivot(index=KEYS, columns="seed", values="value")
        values = pivot.to_numpy(dtype=float)
        means = paired_differences(values, np.zeros((1, values.shape[1])), generator=generator)
        gaps = paired_differences(values, base.reindex(pivot.index).to_numpy(dtype=float), generator=generator)
        one = pivot.index.to_frame(index=False).assign(arm=arm, step=int(final["step"].iloc[0]))
        for name, found in (("", means), ("difference", gaps)):
            one[name or "mean"] = [each.estimate for each in found]
            one[f"{name}_low".strip("_")] = [each.low for each in found]
            one[f"{name}_high".strip("_")] = [each.high for each in found]
        units = dict(zip(rows["measure"].tolist(), rows["unit"].tolist(), strict=True))
        one["unit"] = [units[name] for name in one["measure"].tolist()]
        one["n"] = [each.n for each in means]
        frames.append(one)
    every = pd.concat(frames, ignore_index=True)
    order = [SIDES.index(name) for name in every["measure"].tolist()]
    every = every.assign(order=order).sort_values(["order", "threshold"], kind="stable", ignore_index=True)
    return every.drop(columns="order")


def course_table(arms: Arms, table: pd.DataFrame, *, generator: np.random.Generator) -> pd.DataFrame:
    """The same along training, where all seeds have one: arm, measure, threshold, tokens, mean, low, high, n."""
    frames = []
    for key, rows in table.groupby(KEYS, dropna=False):
        measure, threshold = key if isinstance(key, tuple) else (key, np.nan)
        for arm in arms.runs:
            pivot = rows.loc[rows["arm"] == arm].pivot(index="tokens", columns="seed", values="value").dropna()
            values = pivot.to_numpy(dtype=float)
            if not len(values):
                continue
            found = paired_differences(values, np.zeros((1, values.shape[1])), generator=generator)
            frames.append(
                pd.DataFrame(
                    {
                        "arm": arm,
                        "measure": measure,
                        "threshold": threshold,
                        "tokens": pivot.index.to_numpy(dtype=float),
                        "mean": [one.estimate for one in found],
                        "low": [one.low for one in found],
                        "high": [one.high for one in found],
                        "n": [one.n for one in found],
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def birth_table(arms: Arms, *, threshold: float) -> tuple[pd.DataFrame, dict[str, list[Birth]]]:
    """When the sink of each run was born: arm, seed, threshold, step, tokens, rate, mass, sentence; and by arm."""
    found: dict[str, list[Birth]] = {}
    rows = []
    for arm, runs in arms.runs.items():
        for seed, run in runs.items():
            frame = watched(run)
            assert frame is not None  # sides() has looked
            born = births(frame, threshold=threshold)
            found.setdefault(arm, []).append(born)
            rows.append(
                {
                    "arm": arm,
                    "seed": seed,
                    "threshold": threshold,
                    "step": born.step,
                    "tokens": born.tokens,
                    "rate": born.rate,
                    "mass": born.mass,
                    "layer": born.layer,
                    "sentence": born.sentence,
                }
            )
    return pd.DataFrame(rows).astype({"step": "Int64", "tokens": "Int64"}), found


def thresholds(table: pd.DataFrame) -> list[float]:
    """The thresholds at which the sink rate was measured in every run."""
    rates = table.loc[table["measure"] == "sink_rate"]
    each = [set(rows["threshold"].tolist()) for _, rows in rates.groupby(["arm", "seed"])]
    return sorted(set.intersection(*each))

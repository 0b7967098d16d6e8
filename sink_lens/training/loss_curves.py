"""Loss curves of variants, seed by seed, beside the baseline's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..errors import RunError
from ..records import Run
from ..stats import t_intervals
from .variants import Variants

CURVES = {"evaluation": "eval_loss", "training": "loss"}
"""Curve -> column of ``log.parquet``."""
_MOST_POINTS = 400


def running_mean(loss: np.ndarray, *, window: int) -> np.ndarray:
    """Average each value with the ``window - 1`` before it (fewer at the start)."""
    window = max(1, min(window, len(loss)))
    total = np.concatenate([[0.0], np.cumsum(loss, dtype=np.float64)])
    ends = np.arange(1, len(loss) + 1)
    starts = np.maximum(0, ends - window)
    return (total[ends] - total[starts]) / (ends - starts)


def tokens_to_reach(tokens: np.ndarray, loss: np.ndarray, *, target: float) -> float:
    """Return the number of tokens from which a loss stays at or under a target; nan if it never does.

    ``loss`` is interpolated linearly between ``tokens``. A first touch does not count, since noise makes it early.
    """
    over = np.flatnonzero(loss > target)
    if len(over) == 0:
        return float(tokens[0])
    last = over[-1]
    if last == len(loss) - 1:
        return float("nan")
    share = (loss[last] - target) / (loss[last] - loss[last + 1])
    return float(tokens[last] + share * (tokens[last + 1] - tokens[last]))


def _read_losses(run: Run, curve: str) -> tuple[np.ndarray, np.ndarray]:
    """Read (tokens, losses) of a run's curve; both are empty if the run has no such losses."""
    log = run.need("log", columns=["tokens", *CURVES.values()])
    log = log.dropna(subset=CURVES[curve]).sort_values("tokens", kind="stable")
    tokens, loss = (log[name].to_numpy(dtype=float) for name in ("tokens", CURVES[curve]))
    if not np.isfinite(loss).all():
        raise RunError(
            f"{run.folder}/log.parquet has a loss that is not finite; need a run that did not diverge."
        )
    if curve == "training":
        loss = running_mean(loss, window=round(0.02 * len(loss)))  # over 2% of the steps
    return tokens, loss


def curve_table(variants: Variants) -> pd.DataFrame:
    """Return the losses of every run at the same numbers of tokens, and their difference to the baseline by seed.

    The baseline's first run gives the numbers of tokens, as far as all runs have logged.
    """
    frames = []
    for curve in CURVES:
        found = {
            variant: {seed: _read_losses(run, curve) for seed, run in runs.items()}
            for variant, runs in variants.runs.items()
        }
        every = [rows for runs in found.values() for rows in runs.values()]
        if any(len(tokens) == 0 for tokens, _ in every):
            continue
        grid = every[0][0]
        grid = grid[grid >= max(tokens[0] for tokens, _ in every)]
        grid = grid[grid <= min(tokens[-1] for tokens, _ in every)]
        if len(grid) > _MOST_POINTS:
            grid = grid[np.unique(np.linspace(0, len(grid) - 1, _MOST_POINTS).round().astype(int))]
        for variant, runs in found.items():
            for seed, (tokens, loss) in runs.items():
                here = np.interp(grid, tokens, loss)
                rows = {
                    "variant": variant,
                    "seed": seed,
                    "curve": curve,
                    "tokens": grid,
                    "loss": here,
                    "difference": here - np.interp(grid, *found[variants.baseline][seed]),
                }
                frames.append(pd.DataFrame(rows))
    if not frames:
        raise RunError(
            "no loss is logged in every run; need the training or the evaluation loss in log.parquet"
        )
    return pd.concat(frames, ignore_index=True)


def mean_curve_table(curves: pd.DataFrame) -> pd.DataFrame:
    frames = []
    by_curve: Any = curves.groupby(["variant", "curve"], sort=False)
    for (variant, curve), rows in by_curve:
        for quantity in ("loss", "difference"):
            table = rows.pivot(index="tokens", columns="seed", values=quantity)
            known = {"variant": variant, "curve": curve, "quantity": quantity}
            frames.append(seed_means(table, known))
    return pd.concat(frames, ignore_index=True)


def seed_means(table: pd.DataFrame, constants: Mapping[str, Any]) -> pd.DataFrame:
    """Return the mean over seeds, with a 95% t interval, of a table with a row per tokens and a column per seed."""
    tokens = table.index.to_numpy(dtype=float)
    found = pd.DataFrame(t_intervals(table.to_numpy(dtype=float)))
    return pd.DataFrame({**constants, "tokens": tokens}).join(
        found.rename(columns={"estimate": "mean"})
    )


def final_table(variants: Variants) -> pd.DataFrame:
    rows: list[Mapping[str, object]] = []
    for curve in CURVES:
        for variant, runs in variants.runs.items():
            for seed, run in runs.items():
                tokens, loss = _read_losses(run, curve)
                base_tokens, base = _read_losses(variants.runs[variants.baseline][seed], curve)
                if len(loss) == 0 or len(base) == 0:
                    continue
                own = tokens_to_reach(tokens, loss, target=base[-1])
                baseline = tokens_to_reach(base_tokens, base, target=base[-1])
                rows.append(
                    {
                        "variant": variant,
                        "seed": seed,
                        "curve": curve,
                        "tokens": float(tokens[-1]),
                        "loss": float(loss[-1]),
                        "difference": float(loss[-1] - base[-1]),
                        "target": float(base[-1]),
                        "reached": own,
                        "baseline_reached": baseline,
                        "acceleration": baseline / own if own > 0 else float("nan"),
                    }
                )
    return pd.DataFrame(rows)

"""The numbers of an effect, as sweeps and patches have them: the baseline, the value, both beside random controls.

The unit is the sequence (or the pair of prompts).
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..stats import SURE, Interval, corrected_p, paired_differences

_ROUNDING = 1e-6
"""A difference of less than this share of the baseline is the rounding of float32.

It is smaller than ``stats.ROUNDING``, and not of 1 at least: here the same passes compute both runs, and an edit of one
neuron may change a small metric by far less than 1e-5.
"""


def effect_table(
    values: np.ndarray,
    before: np.ndarray,
    *,
    controls: Sequence[np.ndarray],
    generator: np.random.Generator,
) -> pd.DataFrame:
    """Make the table of a sweep's effects: one row for each cell, with means over sequences and 95% intervals.

    The ``corrected_p`` is that of the effect, or the larger of it and that of the effect above the controls. ``values``
    is the metric with a row for each cell and a column for each sequence. It is nan if the sequence lacks the cell's
    position; the cell's baseline and controls leave this sequence out too. ``before`` is the metric of the baseline
    run. ``controls`` has an array for each cell, with a row for each of its random controls (none if the cell has
    none).
    """
    values = np.where(np.isnan(before), np.nan, values)  # no effect without a baseline
    beside, spreads, counts = [], [], []
    ran = ~np.isnan(values).all(axis=1, keepdims=True)
    early = np.where(np.isnan(values) & ran, np.nan, before)
    with np.errstate(invalid="ignore"):
        for given, at in zip(controls, early, strict=True):
            drawn = given[~np.isnan(given).all(axis=1)] if len(given) else given
            beside.append(drawn.mean(axis=0) if len(drawn) else np.full(len(before), np.nan))
            effects = _row_means(drawn - at) if len(drawn) else []
            spreads.append(float(np.std(effects, ddof=1)) if len(effects) > 1 else np.nan)
            counts.append(len(drawn))
    control = np.stack(beside) if beside else values
    effect = paired_differences(values, before[None], generator=generator) if len(values) else []
    above = paired_differences(values, control, generator=generator) if len(values) else []
    frame = pd.DataFrame(index=range(len(values)))
    frame["baseline"] = _row_means(early)
    frame["value"] = _row_means(values)
    _add_interval_columns(frame, effect, names=("effect", "ci_low", "ci_high"))
    frame["control_effect"] = _row_means(control - early)
    frame["control_sd"] = np.array(spreads, dtype=np.float64)
    frame["n_controls"] = np.array(counts, dtype=np.int64)
    _add_interval_columns(frame, above, names=("over_control", "over_low", "over_high"))
    with np.errstate(invalid="ignore"):
        frame["corrected_p"] = np.fmax(corrected_p(values - before), corrected_p(values - control))
    frame["n"] = np.array([one.n for one in effect], dtype=np.int64)
    return frame


def share_of_difference(values: np.ndarray, before: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return each row's mean effect as a share of the mean difference between the source run and the baseline run.

    Both means are over the sequences on which all three are defined; the share is nan if the two runs differ by no more
    than rounding.
    """
    known = ~np.isnan(values + before + source)
    of_run, *both = (
        _row_means(np.where(known, one, np.nan))
        for one in (before, values - before, source - before)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.abs(both[1]) <= _ROUNDING * np.abs(of_run), np.nan, both[0] / both[1])


def _add_interval_columns(
    frame: pd.DataFrame, intervals: Sequence[Interval], *, names: tuple[str, str, str]
) -> None:
    for name, part in zip(names, ("estimate", "low", "high"), strict=True):
        frame[name] = np.array([getattr(one, part) for one in intervals], dtype=np.float64)


def _row_means(rows: np.ndarray) -> np.ndarray:
    defined = ~np.isnan(rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(defined, rows, 0.0).sum(axis=1) / defined.sum(axis=1)


def are_shown(rows: pd.DataFrame) -> np.ndarray:
    """Return True for each row whose effect is shown: beyond chance, random edits and rounding.

    An effect that is above its random edits by less than one of their standard deviations is theirs. Chance must make
    the largest of all effects as large in at most ``SURE`` of tables; an effect that is the only one is judged at its
    interval.
    """
    shown = rows_beyond_chance(rows)
    if "baseline" in rows.columns:
        shown &= ~(rows["effect"].abs() <= _ROUNDING * rows["baseline"].abs()).to_numpy(bool)
    if {"over_control", "control_sd"} <= set(rows.columns):
        shown &= ~(rows["over_control"].abs() < rows["control_sd"]).to_numpy(bool)
    return shown & ~may_be_largest_by_chance(rows)


def may_be_largest_by_chance(rows: pd.DataFrame) -> np.ndarray:
    """Return True for each row that is no larger than what chance makes the largest of all; one alone has no others.

    A row that a screen chose has: those that it was chosen from.
    """
    p = (
        rows["corrected_p"].to_numpy(float)
        if "corrected_p" in rows.columns
        else np.zeros(len(rows))
    )
    alone = np.isfinite(p).sum() == 1 and "approximation" not in rows.columns  # of a screen
    return ~(p <= SURE) & (not alone)


def least_t(n_rows: int, n_units: int) -> float:
    """Return the mean, in standard errors, that one of ``n_rows`` effects over ``n_units`` needs to be shown."""
    from scipy.stats import t

    return float(t.isf(SURE / (2 * n_rows), n_units - 1))


def shown_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose effect is shown; all rows if none has an interval."""
    if "ci_low" not in table.columns or bool(table["ci_low"].isna().all()):
        return table
    return table.loc[are_shown(table)]


def rows_beyond_chance(rows: pd.DataFrame) -> np.ndarray:
    """Return True for each row whose interval excludes 0; if any row has controls, that above them must too."""
    told = _excludes_zero(rows, "ci_low", "ci_high")
    if {"over_low", "over_high"} <= set(rows.columns):
        told &= _excludes_zero(rows, "over_low", "over_high") | lacks_controls(rows).all()
    return told


def _excludes_zero(rows: pd.DataFrame, low: str, high: str) -> np.ndarray:
    return (rows[low].to_numpy(float) > 0) | (rows[high].to_numpy(float) < 0)


def lacks_controls(rows: pd.DataFrame) -> np.ndarray:
    """Return True for each row without controls; one sequence alone has no interval above those that it has."""
    controls = rows.reindex(columns=["over_low", "n_controls"]).to_numpy(float)
    return ~np.isfinite(controls[:, 0]) & ~(controls[:, 1] > 0)

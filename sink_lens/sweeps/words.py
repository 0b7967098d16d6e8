"""A sweep in words: one text for the terminal, ``--json`` and the page."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import pandas as pd

from ..edits.effect_table import (
    are_shown,
    lacks_controls,
    least_t,
    may_be_largest_by_chance,
    rows_beyond_chance,
)
from ..schema import FEW
from ..stats import SURE, sort_by_magnitude
from ..text import (
    as_text,
    by_chance_text,
    capitalise,
    edit_strength,
    interval_text,
    plural,
    safe_line,
    site_label,
)

MARK = "†"
"""Behind an interval of few sequences."""
_MOST_SDS = 2.0
"""A sweep that shows only means above these standard deviations over sequences has too few sequences for its edits."""


def sweep_title(frame: pd.DataFrame, *, least: float = 0.0) -> str:
    metrics = metric_names(frame)
    if not metrics:
        return f"A sweep of {plural(len(set(frame['cell'])), 'edit')}"
    return _changes_text(frame, metrics[0], least=least)


def _changes_text(frame: pd.DataFrame, metric: str, *, least: float) -> str:
    """Say how many edits are shown to change a metric, and the largest change, shown or not."""
    rows, found = _rows_of_metric(frame, metric), changed_rows(frame, metric, least=least)
    best, name = rows.iloc[0].to_dict(), safe_line(metric)
    if np.isnan(float(best["effect"])):  # nan comes last
        return f"None of {plural(len(rows), 'edit')} has a defined effect on {name}"
    largest = _change_text(best)
    if len(rows) == 1:
        how = "changes" if len(found) else "is not shown to change"
        return f"{capitalise(cell_name(best))} {how} {name}: {effect_text(best)}"
    if len(found):
        counted, one = f"{len(found)} of {plural(len(rows), 'edit')}", len(found) == 1
        if found.index[0] == rows.index[0]:
            return f"{counted} change{'s' * one} {name}. The largest change is {largest}"
        return (
            f"{counted} {'is' if one else 'are'} shown to change {name}; the largest of these changes is "
            f"{_change_text(found.iloc[0].to_dict())}. The largest of all, {largest}, is not shown: "
            f"{_doubt(rows, least=least)}"
        )
    beyond = bool(rows_beyond_chance(rows).any()) and bool(may_be_largest_by_chance(rows).any())
    if beyond and _too_few_sentence(rows):
        said = f"{rows['n'].max():.0f} sequences are too few to show which of {len(rows)} edits change {name}"
    else:
        by_chance = f" beyond what chance makes the largest of {len(rows)}" * beyond
        said = f"None of {plural(len(rows), 'edit')} is shown to change {name}{by_chance}"
    return f"{said}. The largest change is {largest}"


def _doubt(rows: pd.DataFrame, *, least: float) -> str:
    best = rows.iloc[0]
    if not np.isfinite(best["ci_low"]):
        return f"{'it' if best['n'] > 1 else 'one sequence'} has no interval"
    if not (best["ci_low"] > 0 or best["ci_high"] < 0):
        return "its interval includes 0"
    if not rows_beyond_chance(rows)[0] or abs(best.get("over_control", np.nan)) < best.get(
        "control_sd", np.nan
    ):
        alone = not best.get("n_controls", 0)
        return "it has no random edits" if alone else "it is not told from random edits"
    if may_be_largest_by_chance(rows)[0]:
        return f"chance makes the largest of {len(rows)} as large"
    return f"it is less than {least:g} standard deviations"


def _too_few_sentence(rows: pd.DataFrame) -> str:
    """Say what few sequences need to show a change among many edits; "" for at most ``_MOST_SDS`` of its deviations."""
    judged = rows.loc[rows["corrected_p"].notna()]
    n = int(judged["n"].fillna(0).max()) if len(judged) > 1 else 0
    if n < 2 or (least := least_t(len(judged), n)) <= _MOST_SDS * n**0.5:
        return ""
    enough = next(more for more in count(n) if least_t(len(judged), more) <= more**0.5)
    return (
        f"With {plural(n, 'sequence')} the mean of one of {len(rows)} changes must be {as_text(least / n**0.5)} "
        f"standard deviations over sequences (|t| {as_text(least)}) to be shown: use more sequences ({enough}: one "
        "standard deviation) or fewer edits."
    )


def sweep_sentences(
    frame: pd.DataFrame, *, least: float = 0.0, means: Sequence[object] = ()
) -> list[str]:
    """Return the sentences below the title; a change of at least ``least`` standard deviations counts."""
    said = []
    for at, metric in enumerate(metric_names(frame)):
        rows, found = _rows_of_metric(frame, metric), changed_rows(frame, metric, least=least)
        if at == 0:
            said += _first_metric_sentences(rows, found)
        else:  # one entry of the page's list for each metric
            control = float((found if len(found) else rows)["control_effect"].iloc[0])
            beside = f"; random edits of the same size: {as_text(control)}"
            beside *= bool(np.isfinite(control))
            said.append(f"{_changes_text(frame, metric, least=least)}{beside}.")
        if small := len(changed_rows(frame, metric, least=0.0)) - len(found):
            change = f"change{'s' * (small == 1)} {safe_line(metric)}"
            said.append(
                f"{plural(small, 'more edit')} {change} by less than {_sds_text(frame, least)}."
            )
        if at == 0:
            apart = rows_beyond_chance(rows) & may_be_largest_by_chance(rows)
            if told := int(apart.sum()):
                which = plural(told, f"{'more ' * bool(len(found))}interval")
                said.append(f"{which} exclude{'s' * (told == 1)} 0.")
            said.append(_too_few_sentence(rows))
            said.append(_change_criterion_sentence(frame, least=least))
            said.append(_without_controls_sentence(rows))
            said.append(by_chance_text(int(np.isfinite(rows["ci_low"].to_numpy(float)).sum())))
    idle = frame["error"].isna() & ~frame["changed"].astype(bool)
    if still := len(set(frame.loc[idle, "cell"])):
        said.append(f"{plural(still, 'edit')} changed nothing that the metrics read.")
    said.append(few_sequences_note(frame))
    said += [f"{safe_line(str(one))}." for one in means]
    if failed := n_failed_cells(frame):
        said.append(f"{plural(failed, 'edit')} failed; the table has the reasons.")
    return [*filter(None, said)]


def _first_metric_sentences(rows: pd.DataFrame, found: pd.DataFrame) -> list[str]:
    said = []
    if np.isfinite(before := float(rows["baseline"].iloc[0])):
        said.append(f"Without an edit it is {as_text(before)}.")
    if np.isfinite(control := float((found if len(found) else rows)["control_effect"].iloc[0])):
        said.append(f"Random edits of the same size change it by {as_text(control)} on average.")
    if len(found) > 1:
        said.append(f"The next largest that is shown is {_change_text(found.iloc[1].to_dict())}.")
    return said


def _change_text(row: Mapping[Any, Any]) -> str:
    return f"{effect_text(row)}, by {cell_name(row)}"


def _change_criterion_sentence(frame: pd.DataFrame, *, least: float) -> str:
    over = ""
    if bool(frame["control_effect"].notna().any()):
        over = ", and if that of the change above random edits does too"
        if bool((frame["n_controls"].fillna(0) > 1).any()):
            over += " and is at least one of their standard deviations"
    size = f", and the change is {_sds_text(frame, least)} or more" if least else ""
    n = int(frame["n"].fillna(0).to_numpy(int).max(initial=0))
    of = f" over {plural(n, 'sequence')}" * (n > 0)
    sure = (
        f", and if chance makes the largest of all edits as large in at most {SURE:.0%} of sweeps"
    )
    sure *= frame["cell"].nunique() > 1
    return f"A change counts if its 95% interval{of} excludes 0{over}{size}{sure}."


def _without_controls_sentence(rows: pd.DataFrame) -> str:
    without = rows.loc[lacks_controls(rows)]
    if not len(without):
        return ""
    if len(without) == len(rows):
        named = without["where"].astype(str).str.contains("head|unit|position").any()
        why = (
            ": they edit other heads, units or positions of the same layer, and no edit names some"
        )
        return f"No edit has random edits to compare with{why * (not named)}."
    low, high = (without[name].to_numpy(float) for name in ("ci_low", "ci_high"))
    told = int(((low > 0) | (high < 0)).sum())
    return (
        f"{plural(len(without), 'edit')} without random edits {'is' if len(without) == 1 else 'are'} not counted; "
        f"{told} of their intervals exclude 0."
    )


def _sds_text(frame: pd.DataFrame, least: float) -> str:
    has_controls = frame["n_controls"].fillna(0).to_numpy(float) > 1
    of = ["the effects of random edits"] * bool(has_controls.any())
    if not has_controls.all():
        of.append("the baseline over sequences" + " for edits without these" * len(of))
    return f"{least:g} standard deviations of {', or of '.join(of)}"


def few_sequences_note(frame: pd.DataFrame) -> str:
    counts = frame.loc[frame["n"].gt(0) & frame["n"].lt(FEW), "n"]
    if counts.empty:
        return ""
    return f"Intervals marked {MARK} are of fewer than {FEW} sequences ({counts.min():.0f})."


def metric_names(frame: pd.DataFrame) -> list[str]:
    return list(
        dict.fromkeys(one for one in frame["metric"].tolist() if isinstance(one, str) and one)
    )


def n_failed_cells(frame: pd.DataFrame) -> int:
    return len(set(frame["cell"].loc[frame["error"].notna()]))


def _rows_of_metric(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    return sort_by_magnitude(frame.loc[frame["metric"].eq(metric)], "effect")


def changed_rows(frame: pd.DataFrame, metric: str, *, least: float) -> pd.DataFrame:
    """Return a metric's rows with effects that are shown, of at least ``least`` standard deviations, largest first."""
    rows = _rows_of_metric(frame, metric)
    return rows.loc[are_shown(rows) & (rows["effect_in_sds"].abs().to_numpy(float) >= least)]


def effect_text(row: Mapping[Any, Any]) -> str:
    said, marked = as_text(float(row["effect"])), MARK if 0 < row.get("n", FEW) < FEW else ""
    interval = interval_text(row["ci_low"], row["ci_high"])
    return f"{said} {interval}{marked}" if interval else said


def cell_name(row: Mapping[Any, Any]) -> str:
    """Return the name of a cell: the user's own, else its edit, site, strength and place in words."""
    own, kind, site, where = (
        one if isinstance(one := row.get(name), str) else ""
        for name in ("name", "kind", "site", "where")
    )
    if own:
        return safe_line(own)
    edit = [*filter(None, (safe_line(kind), site_label(site)))]
    named = " ".join(edit) + edit_strength(row) if edit else ""
    return ", ".join(filter(None, (named, safe_line(where))))

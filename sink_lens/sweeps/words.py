"""A sweep in words: one text for the terminal, ``--json`` and the page."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..edits.effect_table import are_shown, lacks_controls, rows_beyond_chance
from ..schema import FEW
from ..stats import SURE
from ..text import (
    as_text,
    by_chance_text,
    edit_strength,
    interval_text,
    plural,
    safe_line,
    site_label,
)

MARK = "†"
"""Behind an interval of few sequences."""


def sweep_title(frame: pd.DataFrame, *, least: float = 0.0) -> str:
    metrics = metric_names(frame)
    if not metrics:
        return f"A sweep of {plural(len(set(frame['cell'])), 'edit')}"
    rows, found = _rows_of_metric(frame, metrics[0]), changed_rows(frame, metrics[0], least=least)
    if not len(found):
        beyond = (
            f" beyond what chance makes the largest of {len(rows)}"
            if rows_beyond_chance(rows).any()
            else ""
        )
        return f"None of {plural(len(rows), 'edit')} is shown to change {safe_line(metrics[0])}{beyond}"
    largest = _change_text(found.iloc[0].to_dict())
    return f"{_changed_count_text(found, rows)} {safe_line(metrics[0])}. The largest change is {largest}"


def sweep_sentences(
    frame: pd.DataFrame, *, least: float = 0.0, means: Sequence[object] = ()
) -> list[str]:
    """Return the sentences below the title, on the baseline, the second largest change, further metrics and failures.

    ``frame`` is the table of cells, ``least`` the smallest effect that counts as a change, in standard deviations.
    """
    said = []
    for at, metric in enumerate(metric_names(frame)):
        found = changed_rows(frame, metric, least=least)
        sentences = _first_metric_sentences if at == 0 else _further_metric_sentences
        said += sentences(frame, metric, found)
        if small := len(changed_rows(frame, metric, least=0.0)) - len(found):
            word = "changes" if small == 1 else "change"
            said.append(
                f"{plural(small, 'more edit')} {word} {safe_line(metric)} by less than {_sds_text(frame, least)}."
            )
        if at == 0:
            rows = _rows_of_metric(frame, metric)
            unsure = rows["corrected_p"].gt(SURE).to_numpy(bool)
            if more := int((rows_beyond_chance(rows) & unsure).sum()):
                said.append(
                    f"{plural(more, 'more interval')} {'excludes' if more == 1 else 'exclude'} 0."
                )
            said += [
                _change_criterion_sentence(frame, least=least),
                *_without_controls_sentences(rows),
            ]
            chance = by_chance_text(int(np.isfinite(rows["ci_low"].to_numpy(float)).sum()))
            said += [chance] if chance else []
    idle = frame["error"].isna() & ~frame["changed"].astype(bool)
    if still := len(set(frame.loc[idle, "cell"])):
        said.append(f"{plural(still, 'edit')} changed nothing that the metrics read.")
    said += [few] if (few := few_sequences_note(frame)) else []
    said += [f"{safe_line(str(one))}." for one in means]
    if failed := n_failed_cells(frame):
        said.append(f"{plural(failed, 'edit')} failed; the table has the reasons.")
    return said


def _first_metric_sentences(frame: pd.DataFrame, metric: str, found: pd.DataFrame) -> list[str]:
    best, said = _rows_of_metric(frame, metric).iloc[0].to_dict(), []
    if np.isfinite(before := float(best.get("baseline", np.nan))):
        said.append(f"Without an edit it is {as_text(before)}.")
    if not len(found):
        return [*said, *_largest_difference_sentences(best, metric)]
    if np.isfinite(control := float(found.iloc[0].get("control_effect", np.nan))):
        said.append(f"Random edits of the same size change it by {as_text(control)} on average.")
    return (
        [*said, f"The next largest change is {_change_text(found.iloc[1].to_dict())}."]
        if len(found) > 1
        else said
    )


def _further_metric_sentences(frame: pd.DataFrame, metric: str, found: pd.DataFrame) -> list[str]:
    rows = _rows_of_metric(frame, metric)
    if not len(found):
        largest = _largest_difference_sentences(rows.iloc[0].to_dict(), metric)
        return [f"No edit is shown to change {safe_line(metric)}.", *largest]
    best = found.iloc[0].to_dict()
    return [
        f"{_changed_count_text(found, rows)} {safe_line(metric)}. "
        f"The largest change is {_change_text(best)}{_control_text(best)}."
    ]  # one entry of the page's list for each metric


def _largest_difference_sentences(best: Mapping[Any, Any], metric: str) -> list[str]:
    if not np.isfinite(float(best["effect"])):
        return []
    return [
        f"The largest difference in {safe_line(metric)} is {_change_text(best)}{_control_text(best)}."
    ]


def _control_text(row: Mapping[Any, Any]) -> str:
    control = float(row.get("control_effect", np.nan))
    return f"; random edits of the same size: {as_text(control)}" if np.isfinite(control) else ""


def _changed_count_text(found: pd.DataFrame, rows: pd.DataFrame) -> str:
    return (
        f"{len(found)} of {plural(len(rows), 'edit')} {'changes' if len(found) == 1 else 'change'}"
    )


def _change_text(row: Mapping[Any, Any]) -> str:
    return f"{effect_text(row)}, by {cell_name(row)}"


def _change_criterion_sentence(frame: pd.DataFrame, *, least: float) -> str:
    controls = bool(frame["control_effect"].notna().any())
    over = ", and if that of the change above random edits does too" if controls else ""
    if controls and bool((frame["n_controls"].fillna(0) > 1).any()):
        over += " and is at least one of their standard deviations"
    size = f", and the change is {_sds_text(frame, least)} or more" if least else ""
    n = int(frame["n"].fillna(0).to_numpy(int).max(initial=0))
    of = f" over {plural(n, 'sequence')}" if n else ""
    return (
        f"A change counts if its 95% interval{of} excludes 0{over}{size}, and if chance makes the largest of all edits "
        f"as large in at most {SURE:.0%} of sweeps."
    )


def _without_controls_sentences(rows: pd.DataFrame) -> list[str]:
    without = rows.loc[lacks_controls(rows)]
    if not len(without):
        return []
    if len(without) == len(rows):
        return ["No edit has random edits to compare with."]
    low, high = (without[name].to_numpy(float) for name in ("ci_low", "ci_high"))
    told = int(((low > 0) | (high < 0)).sum())
    return [
        f"{plural(len(without), 'edit')} without random edits {'is' if len(without) == 1 else 'are'} not counted; "
        f"{told} of their intervals exclude 0."
    ]


def _sds_text(frame: pd.DataFrame, least: float) -> str:
    """Return the least effect in words, with what its standard deviation is of in ``frame``."""
    counts = frame["n_controls"].fillna(0).to_numpy(float)
    of = ["the effects of random edits"] * bool((counts > 1).any())
    of += ["the baseline over sequences" + " for edits without these" * len(of)] * (
        not (counts > 1).all()
    )
    return f"{least:g} standard deviations of {', or of '.join(of)}"


def few_sequences_note(frame: pd.DataFrame) -> str:
    """Return a sentence that warns of intervals over too few sequences; "" if the table ``frame`` has none."""
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
    rows = frame.loc[frame["metric"].eq(metric)]
    return rows.sort_values("effect", key=abs, ascending=False, kind="stable")


def changed_rows(frame: pd.DataFrame, metric: str, *, least: float) -> pd.DataFrame:
    """Return a metric's rows with effects that are shown, of at least ``least`` standard deviations, largest first."""
    rows = _rows_of_metric(frame, metric)
    return rows.loc[are_shown(rows) & (rows["effect_in_sds"].abs().to_numpy(float) >= least)]


def effect_text(row: Mapping[Any, Any]) -> str:
    """Return an effect and its interval as text; † marks an interval over few sequences."""
    marked = MARK if 0 < row.get("n", FEW) < FEW else ""
    return f"{as_text(float(row['effect']))} {interval_text(row['ci_low'], row['ci_high'])}{marked}"


def cell_name(row: Mapping[Any, Any]) -> str:
    """Return the name of a cell: the user's own, else its edit, site, strength and place in words."""
    if named := _name_texts(row, {"name": safe_line}):
        return named[0]
    edit = _name_texts(row, {"kind": safe_line, "site": site_label})
    return ", ".join(
        [
            *([" ".join(edit) + edit_strength(row)] if edit else []),
            *_name_texts(row, {"where": safe_line}),
        ]
    )


def _name_texts(row: Mapping[Any, Any], shown: Mapping[str, Callable[[str], str]]) -> list[str]:
    return [
        show(row[name])
        for name, show in shown.items()
        if isinstance(row.get(name), str) and row[name]
    ]

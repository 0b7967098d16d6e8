"""The page of a sweep of edits over a grid of cells."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.records import Run
from sink_lens.report.columns import by_size, floats, named, need, select
from sink_lens.report.findings import optional
from sink_lens.report.pages import Drawn, Listed, Page
from sink_lens.report.sweeps import effect_figure
from sink_lens.report.tables import Table, shown_table
from sink_lens.report.words import interval, number, plural, visible

_CELLS = ["cell", "kind", "site", "place", "metric", "effect", "ci_low", "ci_high", "error"]
_EACH = 15


def _cells(run: Run) -> pd.DataFrame:
    return need(run, "cells", columns=_CELLS)


def _metrics(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(one for one in table["metric"].tolist() if isinstance(one, str) and one))


def _failed(table: pd.DataFrame) -> int:
    return len(set(table["cell"][table["error"].notna()]))


def _title(run: Run) -> str:
    table = optional(run, "cells", _CELLS)
    return "A sweep of edits" if table is None else f"A sweep of {plural(len(set(table['cell'])), 'cell')}"


def _headline(run: Run) -> list[str]:
    table = _cells(run)
    said = []
    for metric in _metrics(table):
        rows = by_size(named(table, "metric", metric), "effect")
        best = rows.iloc[0].to_dict()
        if np.isfinite(float(best["effect"])):
            control = float(best.get("control_effect", np.nan))
            beside = f", its controls {number(control)}" if np.isfinite(control) else ""
            bounds = interval(best["ci_low"], best["ci_high"])
            said.append(
                f"{visible(metric)}: most by {visible(best['kind'])} of {visible(best['site'])} at "
                f"{visible(best['place'])}, {number(float(best['effect']))} {bounds}{beside}."
            )
    if failed := _failed(table):
        said.append(f"{plural(failed, 'cell')} failed; the table says why.")
    return said


def _effects(which: int) -> Drawn:
    """The figure of the metric of that number."""

    def of(run: Run) -> pd.DataFrame:
        table = _cells(run)
        return named(table, "metric", _metrics(table)[which])

    def make(run: Run) -> tuple[str, Figure]:
        rows = of(run)
        see = (
            f"Effect of each cell on {visible(rows['metric'].iloc[0])}: edited − unedited. Red and points above the "
            "line raise it, blue lowers it. An effect counts where it is larger than that of its controls (below)."
        )
        return see, effect_figure(rows)

    return Drawn(
        key=f"effects-{which}",
        title="Effects" if which == 0 else f"Effects on the metric of number {which + 1}",
        make=make,
        data=of,
        when=lambda run: "cells" not in run.tables or len(_metrics(run.tables["cells"])) > which,
    )


def _cell_table(run: Run) -> tuple[str, Table]:
    table = _cells(run)
    rows = pd.concat(
        [by_size(named(table, "metric", metric), "effect").head(_EACH) for metric in _metrics(table)] or [table]
    )
    for name, low, high in (("interval", "ci_low", "ci_high"), ("over", "over_low", "over_high")):
        if {low, high} <= set(rows.columns):
            bounds = zip(floats(rows, low), floats(rows, high), strict=True)
            rows = rows.assign(**{name: [interval(one, other) for one, other in bounds]})
    heads = {"metric": "metric", "kind": "edit", "site": "site", "place": "where", "factor": "factor"}
    heads |= {"centre": "centre", "effect": "effect", "interval": "95%", "control_effect": "controls"}
    heads |= {"over": "effect over controls, 95%"}
    heads = {name: head for name, head in heads.items() if name in rows.columns and bool(rows[name].notna().any())}
    see = f"The {_EACH} strongest cells of each metric; all {len(table)} rows are in cells.parquet."
    return see, shown_table(rows, heads, most=_EACH * 6)


def _failed_table(run: Run) -> tuple[str, Table]:
    table = _cells(run)
    rows = select(table, table["error"].notna().to_numpy(dtype=bool))
    return "Cells that could not be computed, and why.", shown_table(
        rows, {"kind": "edit", "site": "site", "place": "where", "error": "why"}
    )


SWEEP = Page(
    title=_title,
    headline=_headline,
    figures=tuple(_effects(which) for which in range(4)),
    tables=(
        Listed(key="cell-table", title="Strongest cells", make=_cell_table),
        Listed(
            key="failed-table",
            title="Failed cells",
            make=_failed_table,
            when=lambda run: "cells" in run.tables and _failed(run.tables["cells"]) > 0,
        ),
    ),
)

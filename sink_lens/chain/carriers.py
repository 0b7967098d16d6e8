"""What the cuts say in words: where the sink is bound to, what carries it, and whether another path exists."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .mediation import HOLDS
from .placement import kind_of

ANOTHER_PATH = 0.5
"""A link does not carry the sink where more than this share survives while it is held."""
NORM_ALONE = 2.0
"""Where the norm-only control brings this many times the attention, it is said."""
_CENTRES = {"values": "from the mean of values", "aggregated": "of aggregated values", "none": "norm only"}
_KINDS = {
    "positional": "it comes at position 0 whatever token stands there, and BOS inside brings none",
    "token": "it comes where BOS stands, and an ordinary token at position 0 brings none",
    "position or token": "it comes at position 0 whatever token stands there, and where BOS stands too",
    "position and token": "it needs BOS at position 0",
    "no sink": "neither position 0 nor BOS brings one on these sequences",
    "undecided": "the sequences are too short to tell",
}
_OF_HOLD = {
    "z": "its aggregated values",
    "neurons": "the super neurons",
    "dimensions": "the outlier dimensions",
    "key": "its key",
}


def cause_rows(frames: Mapping[str, pd.DataFrame]) -> list[dict[str, object]]:
    """Rows of ``summary.csv`` (quantity, value, unit, note); none where nothing was cut."""
    if not len(frames.get("effects", ())):
        return []
    kind, effects = kind_of(frames["placement"]), frames["effects"]
    rows: list[dict[str, object]] = [{"quantity": "sink_bound_to", "value": kind, "unit": "", "note": _KINDS[kind]}]
    for row in effects.query("edit == 'isolation'").to_dict("records"):
        note = f"attention to position {row['position']} in layers {row['read_layers']} when it is isolated in all"
        rows.append({"quantity": "isolated_mass", "value": row["sink_mass_new"], "unit": "mass", "note": note})
        note = f"old sink {row['baseline_mass_old']:.3f} -> {row['sink_mass_old']:.3f}"
        rows.append({"quantity": "isolation_outcome", "value": row["outcome"], "unit": "", "note": note})
    curve = frames["amplification"]
    for centre in dict.fromkeys(curve["centre"]):
        top = curve.query("centre == @centre").nlargest(1, "times").iloc[0]
        note = f"largest over factors, at {top['factor']:g}, in layers {top['read_layers']}"
        if centre == "none":
            note += "; the norm-only control"
        rows.append({"quantity": f"amplified_times_{centre}", "value": top["times"], "unit": "ratio", "note": note})
    for row in frames["mediation"].to_dict("records"):
        note = f"of {row['intervention']}, layers {row['layers_from']} to {row['layers_to']}, {row['hold']} held"
        name = f"survives_{row['intervention']}_{row['hold']}_step_{row['step']}"
        rows.append({"quantity": name, "value": row["surviving_share"], "unit": "share", "note": note})
    return rows


def cause_parts(frames: Mapping[str, pd.DataFrame]) -> list[RenderableType]:
    """The causal half of the terminal's result; nothing where nothing was cut."""
    if not len(frames.get("effects", ())):
        return []
    kind = kind_of(frames["placement"])
    return [
        Text(f"Position or token? {kind}: {_KINDS[kind]}"),
        Text(curve_text(frames["amplification"])),
        _matrix(frames["mediation"]),
        Text(_paths(frames)),
    ]


def curve_text(curve: pd.DataFrame) -> str:
    """The most that each centre brings, over no edit, and whether the norm alone brings attention too."""
    tops: dict[str, float] = {}
    for centre, times in zip(curve["centre"].tolist(), curve["times"].tolist(), strict=True):
        tops[centre] = max(times, tops.get(centre, times))
    listed = ", ".join(f"{_CENTRES[centre]} {times:.1f} times" for centre, times in tops.items())
    text = f"Amplification, at most: {listed} (layers {curve['read_layers'].iloc[0]})"
    if tops.get("none", 0.0) >= NORM_ALONE:
        text += f"; the norm alone brings {NORM_ALONE:g} times or more here, which arXiv 2605.06611 does not expect"
    return text


def cut_text(row: Mapping[Any, Any]) -> str:
    """One cut as a line: what it made or removed of the sink, its interval, its controls."""
    did = "makes" if row["sink_mass_new"] - row["baseline_mass_new"] > 0 and row["link"] == _FIRST else "removes"
    control = "" if np.isnan(row["control_share"]) else f", controls {row['control_share']:.2g}"
    low, high = row["ci_low"], row["ci_high"]
    return f"cut: {row['edit']} {did} {row['share']:.0%} of the sink ({low:.0%} to {high:.0%}){control}"


_FIRST = "aggregation_variance"


def _matrix(table: pd.DataFrame) -> Table:
    shown = Table(title="Share of the sink that survives while a link is held (random holds)", title_justify="left")
    shown.add_column("sink by")
    shown.add_column("layers")
    for hold in HOLDS:
        shown.add_column(hold, justify="right")
    for _, part in table.groupby(["intervention", "step"], sort=False):
        of_hold = {row["hold"]: row for row in part.to_dict("records")}
        cells = [_cell(of_hold[hold]) if hold in of_hold else "-" for hold in HOLDS]
        first = part.iloc[0]
        after = "" if first["step"] == -1 else f" (step {first['step']})"
        shown.add_row(str(first["intervention"]), f"{first['layers_from']}-{first['layers_to']}{after}", *cells)
    return shown


def _cell(row: Mapping[Any, Any]) -> str:
    if np.isnan(row["surviving_share"]):
        return "-"
    control = row["control_surviving_share"]
    return f"{row['surviving_share']:.2f}" + ("" if np.isnan(control) else f" ({control:.2f})")


def _paths(frames: Mapping[str, pd.DataFrame]) -> str:
    """Which holds leave most of the sink, so that another path carries it."""
    table = frames["mediation"]
    lines = []
    for hold in ("neurons", "dimensions", "key"):
        leaving = table.query("hold == @hold and surviving_share > @ANOTHER_PATH")
        if len(leaving):
            where = ", ".join(f"{row['intervention']} step {row['step']}" for row in leaving.to_dict("records"))
            lines.append(f"another path exists beside {_OF_HOLD[hold]}: most of the sink survives ({where})")
    return "\n".join(lines) or "no other path: every hold takes most of the sink away"

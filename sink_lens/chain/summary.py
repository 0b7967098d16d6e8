"""What a person reads first: the headline numbers as a table of the run, and a short table for the terminal."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..measures.dimensions import massive_ratio, stable_range
from ..stats import Interval, interval
from .carriers import cause_parts, cause_rows, cut_text
from .config import TraceConfig
from .locate import Finding, onset_layer, slow_growth
from .panel import Panel

_STYLES = {"holds": "green", "fails": "red", "undecided": "yellow"}
_MARKS = {"holds": "+", "fails": "x", "undecided": "?"}


def summary_table(panel: Panel, frames: Mapping[str, pd.DataFrame], *, config: TraceConfig) -> pd.DataFrame:
    """``summary.csv``: quantity, value, ci_low, ci_high, unit, note."""
    finding, rng = panel.finding, np.random.default_rng(config.seed)
    layers = {str(name): column.to_numpy(dtype=float) for name, column in frames["layers"].items()}
    neurons = frames["neurons"]
    rows: list[dict[str, object]] = []

    def add(quantity: str, value: float | int | str | Interval | None, unit: str = "", note: str = "") -> None:
        low = high = np.nan
        if isinstance(value, Interval):
            value, low, high = value.estimate, value.low, value.high
        rows.append({"quantity": quantity, "value": value, "ci_low": low, "ci_high": high, "unit": unit, "note": note})

    found = (
        "" if finding.sink_found else f"no position has a sink rate of {config.min_sink_rate:g}; this one is studied"
    )
    add("sink_position", finding.position, "position", found)
    if len(finding.positions) > 1:
        others = ", ".join(str(position) for position in finding.positions[1:])
        add("other_sink_positions", others, "position")
    rate = interval(panel.sink_rate(config.threshold).numpy(), generator=rng)
    add("sink_rate", rate, "share of layers and heads", f"sink score over {config.threshold:g}, mean over sequences")
    add(
        "sink_mass",
        interval(panel.at_key("sink_mass", finding.position).nanmean(dim=(0, 2)).numpy(), generator=rng),
        "mass",
    )
    mass = torch.tensor(layers["sink_score"])
    for threshold in sorted({config.threshold, 0.5, 0.8}):
        add(
            f"onset_layer_{threshold:g}",
            onset_layer(mass, threshold=threshold),
            "layer",
            "first layer whose mean sink score is over it",
        )
    add("growth_steps", ", ".join(_span(step.first_layer, step.last_layer) for step in finding.steps), "layers")
    slow = slow_growth(panel.norm_ratio().nanmean(1), factor=2 * config.growth_factor)
    if not finding.steps and slow is not None:
        add("slow_growth", slow[2], "ratio", f"over layers {slow[0]} to {slow[1]}, no layer of which is a growth step")
    dimensions = sorted({d for dims in finding.outliers.values() for d in dims})
    add("outlier_dimensions", ", ".join(map(str, dimensions)), "dimension", f"{len(finding.outliers)} layers have them")
    supers = neurons[neurons["is_super"]]
    add("super_neurons", int(supers.groupby(["layer", "neuron"]).ngroups) if len(supers) else 0, "neurons")
    peak = int(layers["dominance_ratio"].argmax())
    add("dominance_ratio", float(layers["dominance_ratio"][peak]), "ratio", f"largest, after layer {peak}")
    middle = len(frames["layers"]) // 2
    add(
        "effective_rank",
        float(layers["effective_rank"][middle]),
        "directions",
        f"after layer {middle}, with the sink token",
    )
    add(
        "effective_rank_without",
        float(layers["effective_rank_without"][middle]),
        "directions",
        f"after layer {middle}, without it",
    )
    ratios = torch.stack([massive_ratio(state).mean() for state in panel.states()[1:]])
    stable = stable_range(ratios, threshold=1000.0)
    add(
        "massive_layers",
        int((ratios >= 1000.0).sum()),
        "layers",
        f"magnitude over 1000 medians; the same layers at any threshold from {stable[0]:.3g} to {stable[1]:.3g}",
    )
    add("loss", interval(panel["loss"][0].numpy(), generator=rng), "nats")
    nothing = {"ci_low": np.nan, "ci_high": np.nan}
    return pd.DataFrame([*rows, *(nothing | row for row in cause_rows(frames))])


def short_table(frames: Mapping[str, pd.DataFrame], *, config: TraceConfig, finding: Finding) -> RenderableType:
    """The result for a terminal: where the sink is, what makes it, and which links hold."""
    values = frames["summary"].set_index("quantity")
    parts: list[RenderableType] = [_headline(values, frames, config=config, finding=finding)]
    if len(frames["growth_steps"]):
        parts.append(_steps(frames))
    parts.append(_links(frames["links"], effects=frames.get("effects")))
    parts += cause_parts(frames)
    if len(frames["arms"]) > 1:
        parts.append(_arms(frames["arms"]))
    return Group(*parts)


def _headline(
    values: pd.DataFrame, frames: Mapping[str, pd.DataFrame], *, config: TraceConfig, finding: Finding
) -> Text:
    rate = values.loc["sink_rate"]
    text = Text()
    text.append(f"{config.model}", style="bold")
    if finding.sink_found:
        text.append(f": attention sink at position {finding.position}\n")
    elif np.isnan(float(rate["value"])):
        text.append(": the sequences are too short to tell of an attention sink (8 tokens are needed)\n")
    else:
        text.append(f": no attention sink was found; position {finding.position} is studied\n")
    text.append(
        f"  sink rate at {config.threshold:g}: {float(rate['value']):.1%} of layers and heads"
        f" ({float(rate['ci_low']):.1%} to {float(rate['ci_high']):.1%})\n"
    )
    # An empty text is nan once it was written to a file and read again.
    dimensions, steps = (
        "none" if pd.isna(value) or value == "" else value
        for value in values.loc[["outlier_dimensions", "growth_steps"], "value"]
    )
    text.append(f"  outlier dimensions: {dimensions}; growth steps: {steps}")
    if "slow_growth" in values.index:
        text.append(
            f"; slow growth: {float(values.loc['slow_growth', 'value']):.1f} times {values.loc['slow_growth', 'note']}"
        )
    text.append(
        f"\n  effective rank in the middle: {float(values.loc['effective_rank', 'value']):.1f} with the token, "
    )
    text.append(f"{float(values.loc['effective_rank_without', 'value']):.1f} without it\n")
    return text


def _steps(frames: Mapping[str, pd.DataFrame]) -> Table:
    table = Table(title="Growth steps and their super neurons", title_justify="left")
    for name in ("layers", "norm ratio", "dimension", "super neurons: layer.neuron (share of the layer's change)"):
        table.add_column(name)
    supers = [row for row in _rows(frames["neurons"]) if row["is_super"]]
    supers.sort(key=lambda row: row["contribution_share"], reverse=True)
    for step in _rows(frames["growth_steps"]):
        first, last = step["first_layer"], step["last_layer"]
        of_step = [r for r in supers if first <= r["layer"] <= last and r["position"] == step["position"]]
        named = [f"{row['layer']}.{row['neuron']} ({row['contribution_share']:.0%})" for row in of_step[:8]]
        more = f", {len(of_step) - 8} more" if len(of_step) > 8 else ""
        table.add_row(
            _span(first, last),
            f"{step['ratio_before']:.1f} -> {step['ratio_after']:.1f}",
            str(step["outlier_dimension"]),
            ", ".join(named) + more or "none",
        )
    return table


def _links(links: pd.DataFrame, *, effects: pd.DataFrame | None) -> Table:
    cuts = {} if effects is None else {row["link"]: row for row in _rows(effects) if row["is_primary"]}
    table = Table(title="Links of the chain, each with a 95% interval over sequences", title_justify="left")
    table.add_column("link", no_wrap=True)
    table.add_column("measured, its nulls, and what it must pass")
    table.add_column("verdict", no_wrap=True)
    for link in dict.fromkeys(links["link"]):
        rows = [row for row in _rows(links) if row["link"] == link and row["is_primary"]]
        first = rows[0]
        value = (
            "-"
            if np.isnan(first["value"])
            else f"{first['value']:.3g} ({first['ci_low']:.3g} to {first['ci_high']:.3g})"
        )
        nulls = [f"{row['null_name']} {row['null_value']:.3g}" for row in rows if row["null_name"] != "none"]
        verdict = str(first["verdict"])
        evidence = Text(f"{first['statistic']} {value}\n")
        evidence.append("".join(f"{null}\n" for null in [", ".join(nulls)] if null))
        if link in cuts:
            evidence.append(f"{cut_text(cuts[link])}\n")
        evidence.append(str(first["criterion"]), style="dim")
        mark = Text(f"{_MARKS[verdict]} {verdict}", style=_STYLES[verdict])
        table.add_row(str(link), evidence, mark, end_section=True)
    return table


def _arms(arms: pd.DataFrame) -> Table:
    table = Table(title="With and without BOS", title_justify="left")
    for name in ("arm", "sink rate", "S2 ratio", "outlier dimensions", "growth steps", "loss (nats)"):
        table.add_column(name)
    for row in _rows(arms):
        table.add_row(
            f"{row['arm']}{' (traced)' if row['chosen'] else ''}",
            f"{row['sink_rate']:.1%}",
            f"{row['s2_ratio']:.2f}",
            row["outlier_dimensions"] or "none",
            row["growth_steps"] or "none",
            f"{row['loss_nats']:.3f}",
        )
    return table


def _rows(frame: pd.DataFrame) -> list[dict[Hashable, Any]]:
    return frame.to_dict("records")


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"

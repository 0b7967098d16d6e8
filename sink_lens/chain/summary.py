"""The headline numbers of a trace: as a table of the run, and as a short table for the terminal.

They say where the sink is, which links hold, what the sink is bound to, what carries it, and whether another path
exists.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..measures.dimensions import massive_ratio, stable_range
from ..schema import ANOTHER_PATH, NORM_ALONE, QUESTIONS
from ..stats import Interval, interval, studentised
from ..text import interval as interval_text
from ..text import number, percent, plural, words
from .at_token import Occurrences
from .config import TraceConfig
from .links import LINKS
from .links.neurons_dimension import RESCALED, SPAN
from .locate import Location, onset_layer, slow_growth
from .measure import Panel
from .placement import kind_of

_STYLES = {"holds": "green", "fails": "red", "undecided": "yellow", "not applicable": "dim"}
_MARKS = {"holds": "+", "fails": "x", "undecided": "?", "not applicable": "-"}
_WIDTHS = (22, 17, 15, 15, 15)
"""Columns of the lines of the links: 69 and the last word fit into 80."""
_VIEWS_DIFFER = 0.2
"""The makers and the super neurons differ where they remove shares that differ by more than this."""
_CENTRES = {"values": "from the mean of values", "aggregated": "of aggregated values", "none": "norm only"}
_KINDS = {
    "positional": "it comes at position 0 whatever token stands there, and BOS inside brings none",
    "token": "it comes where BOS stands, and an ordinary token at position 0 brings none",
    "position or token": "it comes at position 0 whatever token stands there, and where BOS stands too",
    "position and token": "it needs BOS at position 0",
    "no sink": "neither position 0 nor BOS brings one on these sequences",
    "undecided": "the sequences are too short to tell",
}


def summary_table(
    panel: Panel,
    frames: Mapping[str, pd.DataFrame],
    *,
    config: TraceConfig,
    aligned: bool = False,
    there: Occurrences | None = None,
) -> pd.DataFrame:
    """``summary.csv``: quantity, value, ci_low, ci_high, unit, note."""
    location, rng = panel.location, np.random.default_rng(config.seed)
    layers = {str(name): column.to_numpy(dtype=float) for name, column in frames["layers"].items()}
    neurons = frames["neurons"]
    rows: list[dict[str, object]] = []

    def add(quantity: str, value: float | int | str | Interval | None, unit: str = "", note: str = "") -> None:
        low = high = np.nan
        if isinstance(value, Interval):
            value, low, high = value.estimate, value.low, value.high
        rows.append({"quantity": quantity, "value": value, "ci_low": low, "ci_high": high, "unit": unit, "note": note})

    found = (
        "" if location.sink_found else f"no position has a sink rate of {config.min_sink_rate:g}; this one is studied"
    )
    add("sink_position", location.sink_position, "position", found)
    if aligned:
        note = "sinks stand at another position in each sequence; each was cut so that one stands here"
        add("aligned_position", location.sink_position, "position", note)
    if there is not None:
        note = f"each row is one occurrence of the token; it stands {there.found} times in the sequences"
        add("at_token", there.text, "token", note)
    if len(location.sink_positions) > 1:
        others = ", ".join(str(position) for position in location.sink_positions[1:])
        add("other_sink_positions", others, "position")
    rate = interval(panel.sink_rate(config.threshold).numpy(), generator=rng)
    add("sink_rate", rate, "share of layers and heads", f"sink score over {config.threshold:g}, mean over sequences")
    add(
        "sink_mass",
        interval(panel.at_sink("sink_mass", location.sink_position).nanmean(dim=(0, 2)).numpy(), generator=rng),
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
    add("growth_steps", ", ".join(_span(step.first_layer, step.last_layer) for step in location.steps), "layers")
    slow = slow_growth(panel.norm_ratio().nanmean(1), factor=2 * config.growth_factor)
    if not location.steps and slow is not None:
        add("slow_growth", slow[2], "ratio", f"over layers {slow[0]} to {slow[1]}, no layer of which is a growth step")
    dimensions = sorted({d for dims in location.outliers.values() for d in dims})
    add(
        "outlier_dimensions", ", ".join(map(str, dimensions)), "dimension", f"{len(location.outliers)} layers have them"
    )
    supers = neurons[neurons["is_super"]]
    add("super_neurons", int(supers.groupby(["layer", "neuron"]).ngroups) if len(supers) else 0, "neurons")
    if "experts" in frames:
        experts = frames["experts"]
        named = sorted(set(map(tuple, experts.loc[experts["is_super"], ["layer", "expert"]].to_numpy().tolist())))
        add("super_experts", ", ".join(f"layer {layer} expert {expert}" for layer, expert in named), "experts")
    peak = int(layers["dominance_ratio"].argmax())
    add("dominance_ratio", float(layers["dominance_ratio"][peak]), "ratio", f"largest, after layer {peak}")
    middle = len(frames["layers"]) // 2
    ranks = panel["effective_rank"][middle].numpy()
    for place, (name, said) in enumerate(
        (("effective_rank", "with the sink token"), ("effective_rank_without", "without it"))
    ):
        note = f"after layer {middle}, {said}; every sequence"
        add(name, studentised(ranks[:, place], generator=rng), "directions", note)
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
    return pd.DataFrame([*rows, *(nothing | row for row in [*maker_rows(frames), *causal_rows(frames)])])


def short_table(frames: Mapping[str, pd.DataFrame], *, config: TraceConfig, location: Location) -> RenderableType:
    """The result for a terminal: where the sink is, what makes it, and which links hold."""
    values = frames["summary"].set_index("quantity")
    parts: list[RenderableType] = [_headline(values, frames, config=config, location=location)]
    if len(frames["growth_steps"]):
        parts.append(_steps(frames))
    if len(frames.get("maker_sets", ())):
        parts.append(Group(makers_table(frames["maker_sets"]), Text(views_text(frames).capitalize())))
    parts.append(_links(frames, sink_position=location.sink_position))
    parts += causal_parts(frames)
    if len(frames["arms"]) > 1:
        parts.append(_conditions(frames["arms"]))
    return Group(parts[0], *(Padding(part, (0, 0, 1, 0)) for part in parts[1:-1]), *parts[1:][-1:])


def _headline(
    values: pd.DataFrame, frames: Mapping[str, pd.DataFrame], *, config: TraceConfig, location: Location
) -> Text:
    rate = values.loc["sink_rate"]
    text = Text()
    text.append(f"{config.model}", style="bold")
    if location.sink_found:
        text.append(f": attention sink at position {location.sink_position}\n")
    elif np.isnan(float(rate["value"])):
        text.append(
            ": the sequences, or the attention's windows, are too short to tell of a sink (8 tokens are needed)\n"
        )
    else:
        text.append(
            f": no attention sink was found, so no link is judged; position {location.sink_position} is studied\n"
        )
    if not np.isnan(float(rate["value"])):
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
    table = _table("Growth steps and their super neurons: layer.neuron (share of the layer's change)")
    for name in ("layers", "norm ratio", "dimension", "super neurons"):
        table.add_column(name, no_wrap=name != "super neurons")
    supers = [row for row in _rows(frames["neurons"]) if row["is_super"]]
    supers.sort(key=lambda row: row["contribution_share"], reverse=True)
    for step in _rows(frames["growth_steps"]):
        first, last = step["first_layer"], step["last_layer"]
        of_step = [r for r in supers if first <= r["layer"] <= last and r["sink_position"] == step["sink_position"]]
        named = [
            f"{row['layer']}.{row['neuron']} ({_of_expert(row)}{row['contribution_share']:.0%})" for row in of_step[:8]
        ]
        more = f", {len(of_step) - 8} more" if len(of_step) > 8 else ""
        table.add_row(
            _span(first, last),
            f"{step['ratio_before']:.1f} -> {step['ratio_after']:.1f}",
            str(step["outlier_dimension"]),
            ", ".join(named) + more or "none",
        )
    return table


def _of_expert(row: Mapping[Any, Any]) -> str:
    return f"expert {row['expert']}, " if "expert" in row else ""


def _links(frames: Mapping[str, pd.DataFrame], *, sink_position: int) -> RenderableType:
    """A line a link: its verdict and its answers; under it what was measured, and what its intervention does."""
    links, effects = frames["links"], frames.get("effects")
    intervened = {} if effects is None else {row["link"]: row for row in _rows(effects) if row["is_primary"]}
    targets = {row["link"]: row["target"] for row in _rows(frames["chain"])} if "chain" in frames else {}
    asked = "present" in links.columns
    moved = "; floors not calibrated" if "not calibrated" in set(links["floors"]) else ""
    heads = ["link to", "verdict", *(name.partition("_")[0] for name in QUESTIONS if asked)]
    parts: list[RenderableType] = [
        Text(f"Links of the chain; under each what it measures, and the sink that its intervention moves{moved}"),
        Text(_line(heads), style="bold"),
    ]
    for link in dict.fromkeys(links["link"]):
        rows = [row for row in _rows(links) if row["link"] == link and row["is_primary"]]
        first = rows[0]
        verdict = str(first["verdict"])
        line = [targets.get(link, words(str(link))), f"{_MARKS[verdict]} {verdict}"]
        parts.append(Text(_line([*line, *(str(first[name]) for name in QUESTIONS if asked)]), style=_STYLES[verdict]))
        nulls = [f"{words(row['null_name'])} {number(row['null_value'])}" for row in rows if row["null_name"] != "none"]
        bounds = interval_text(first["ci_low"], first["ci_high"])
        measured = f"{words(str(first['statistic']))} {number(first['value'])} {bounds}".rstrip()
        said = [", ".join([measured, *nulls])]
        if verdict == "not applicable":
            said.append(f"measured: {first['measured']}")
        if link in intervened:
            said.append(intervention_text(intervened[link], sink_position=sink_position))
        parts += [Padding(Text(one), (0, 0, 0, 2)) for one in said]
    return Group(*parts)


def _line(cells: Sequence[str]) -> str:
    """Cells of a line of the links."""
    return "".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)).rstrip()


def _conditions(conditions: pd.DataFrame) -> Table:
    table = _table("With and without BOS (* traced): where the sink is, and the loss in nats")
    for name in ("BOS", "position", "rate", "S2 ratio", "dimensions", "growth steps", "loss"):
        table.add_column(name)
    for row in _rows(conditions):
        table.add_row(
            f"{row['condition']}{'*' * bool(row['chosen'])}",
            str(row["sink_position"]),
            f"{row['sink_rate']:.1%}",
            f"{row['s2_ratio']:.2f}",
            row["outlier_dimensions"] or "none",
            row["growth_steps"] or "none",
            f"{row['loss_nats']:.3f}",
        )
    return table


def causal_rows(frames: Mapping[str, pd.DataFrame]) -> list[dict[str, object]]:
    """Rows of ``summary.csv`` (quantity, value, unit, note); none without interventions."""
    if not len(frames.get("effects", ())):
        return []
    kind, effects = kind_of(frames["placement"]), frames["effects"]
    rows: list[dict[str, object]] = [{"quantity": "sink_bound_to", "value": kind, "unit": "", "note": _KINDS[kind]}]
    if "sinks_left_out" in effects:
        left_out, note = int(effects["sinks_left_out"].iloc[0]), "sinks that the mean of a mean ablation leaves out"
        rows.append({"quantity": "mean_ordinary", "value": left_out, "unit": "tokens", "note": note})
    for row in effects.query("edit == 'isolation'").to_dict("records"):
        note = f"attention to position {row['position']} in layers {row['read_layers']} when it is isolated in all"
        rows.append({"quantity": "isolated_mass", "value": row["target_mass"], "unit": "mass", "note": note})
        note = f"sink position {row['baseline_sink_mass']:.3f} -> {row['sink_mass']:.3f}"
        rows.append({"quantity": "isolation_outcome", "value": row["outcome"], "unit": "", "note": note})
    curve = frames["amplification"]
    for centre in dict.fromkeys(curve["centre"]):
        top = curve.query("centre == @centre").nlargest(1, "times").iloc[0]
        note = f"largest over factors, at {top['factor']:g}, in layers {top['read_layers']}"
        if centre == "none":
            note += "; the norm-only control"
        rows.append({"quantity": f"amplified_times_{centre}", "value": top["times"], "unit": "ratio", "note": note})
        ends = {"ci_low": top["change_low"], "ci_high": top["change_high"]}
        added = {"quantity": f"amplified_change_{centre}", "value": top["change"], "unit": "attention", "note": note}
        rows.append(added | ends)
    for row in frames["mediation"].to_dict("records"):
        note = f"of {row['intervention']}, layers {row['layers_from']} to {row['layers_to']}, {row['frozen']} frozen"
        name = f"survives_{row['intervention']}_{row['frozen']}_step_{row['step']}"
        rows.append({"quantity": name, "value": row["surviving_share"], "unit": "share", "note": note})
    return rows


def causal_parts(frames: Mapping[str, pd.DataFrame]) -> list[RenderableType]:
    """The causal half of the terminal's result; nothing without interventions."""
    if not len(frames.get("effects", ())):
        return []
    kind = kind_of(frames["placement"])
    return [
        Text(f"Position or token? {kind}: {_KINDS[kind]}"),
        *([Text(said)] if (said := direction_text(frames["effects"])) else []),
        *([Text(said)] if (said := mean_text(frames["effects"])) else []),
        Text(curve_text(frames["amplification"])),
        _matrix(frames["mediation"]),
        Text(_paths(frames)),
    ]


def mean_text(effects: pd.DataFrame) -> str:
    """What mean ablation sets a part to, and how many sinks that leaves out; empty for a run of an earlier version."""
    if "sinks_left_out" not in effects:
        return ""
    n = int(effects["sinks_left_out"].iloc[0])
    left = f"{plural(n, 'sink')} left out" if n else "no sink found to leave out"
    return f"Mean ablation: mean_ordinary, the mean over tokens that are no sink ({left})"


def maker_rows(frames: Mapping[str, pd.DataFrame]) -> list[dict[str, object]]:
    """Rows of ``summary.csv`` about the makers of the sink; none where none were looked for."""
    table = frames.get("maker_sets")
    if table is None or not len(table):
        return []
    rows: list[dict[str, object]] = []
    for row in table.loc[table["control_of"] == ""].to_dict("records"):
        control = "" if np.isnan(row["control_largest"]) else f", random sets at most {row['control_largest']:.0%}"
        note = f"of the {row['target']}, by ablating {row['size']}: {_first(row['parts'])}; loss "
        note += f"{row['baseline_loss_nats']:.2f} to {row['loss_nats']:.2f} nats{control}"
        name = f"makers_{row['set'].replace(' ', '_')}"
        ends = {"ci_low": row["ci_low"], "ci_high": row["ci_high"]}
        rows.append({"quantity": name, "value": row["removed"], "unit": "share", "note": note} | ends)
    rows.append({"quantity": "makers_beside_super_neurons", "value": views_text(frames), "unit": "", "note": ""})
    return rows


def _first(parts: str, most: int = 8) -> str:
    names = parts.split(", ")
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def views_text(frames: Mapping[str, pd.DataFrame]) -> str:
    """Whether the parts that remove the sink and the super neurons by contribution are the same, in words."""
    sets = frames["maker_sets"].loc[lambda table: table["control_of"] == ""].set_index("set")
    if "all makers" not in sets.index:
        return "no set of parts that write to this position removes half of it: what makes it was not found"
    made = set(sets.loc["all makers", "parts"].split(", "))
    supers = set(sets.loc["super neurons", "parts"].split(", ")) if "super neurons" in sets.index else set()
    own, target = float(sets.loc["all makers", "removed"]), sets.loc["all makers", "target"]
    if not supers:
        return f"there are no super neurons by contribution; the makers remove {own:.0%} of the {target}"
    theirs = float(sets.loc["super neurons", "removed"])
    both = len(made & supers)
    text = f"{both} of {len(made)} makers are among the {len(supers)} super neurons by contribution; the makers remove"
    text += f" {own:.0%} of the {target}, the super neurons {theirs:.0%}"
    if abs(own - theirs) > _VIEWS_DIFFER:
        text += ": the two views differ, and ablating is the one to believe"
    return text


def makers_table(sets: pd.DataFrame) -> Table:
    """The sets of makers for the terminal."""
    target = sets["target"].iloc[0]
    shown = sets.loc[sets["control_of"] == ""]
    n_controls = int(shown["n_controls"].max()) if len(shown) else 0
    table = _table(f"Makers of the {target}: what ablating a set removes, and {n_controls} random sets at most")
    for name in ("set", "removes", "95%", "random", "loss, nats", "parts"):
        table.add_column(name, no_wrap=name != "parts")
    for row in _rows(shown):
        table.add_row(
            f"{row['set']} ({row['size']})",
            percent(row["removed"]),
            _percent_bounds(row),
            "-" if np.isnan(row["control_largest"]) else percent(row["control_largest"]),
            f"{row['baseline_loss_nats']:.2f} -> {row['loss_nats']:.2f}",
            _first(str(row["parts"]), most=4),
        )
    return table


def _table(title: str) -> Table:
    """A table without rules, which leaves 80 columns to its cells."""
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def curve_text(curve: pd.DataFrame) -> str:
    """Sentences on amplification: the largest rise of attention by centre, and whether the norm alone does it too."""
    tops: dict[str, float] = {}
    said: dict[str, str] = {}
    for row in _rows(curve):
        centre = str(row["centre"])
        if centre not in tops or row["times"] > tops[centre]:
            tops[centre] = float(row["times"])
            said[centre] = f"{row['change']:+.3f} ({row['change_low']:+.3f} to {row['change_high']:+.3f})"
    listed = ", ".join(f"{_CENTRES[centre]} {change}" for centre, change in said.items())
    text = f"Attention that amplification adds, at most: {listed} (layers {curve['read_layers'].iloc[0]})"
    if tops.get("none", 0.0) >= NORM_ALONE:
        text += f"; the norm alone brings {NORM_ALONE:g} times or more here, which arXiv 2605.06611 does not expect"
    return text


def direction_text(effects: pd.DataFrame) -> str:
    """Sentence on the makers' direction: sink removed by ablating it, and by the loss of norm alone; else empty."""
    asked = effects.loc[effects["edit"].isin([SPAN, RESCALED])].set_index("edit")
    if set(asked.index) != {SPAN, RESCALED}:
        return ""
    shares = {name: f"{percent(row['share'])} {_percent_bounds(row)}" for name, row in asked.iterrows()}
    random = asked.loc[SPAN, "control_largest"]
    control = "" if np.isnan(random) else f", random spans at most {percent(random)}"
    return (
        f"Direction: mean ablating the span of what the makers write removes {shares[SPAN]} of the sink{control}; the "
        f"same loss of norm without it removes {shares[RESCALED]}"
    )


def _percent_bounds(row: Mapping[Any, Any]) -> str:
    return interval_text(row["ci_low"], row["ci_high"], shown=percent)


def intervention_text(row: Mapping[Any, Any], *, sink_position: int) -> str:
    """One intervention as a line: what it made or removed of the sink, its interval, its controls, its cost."""
    inside = row["position"] != sink_position
    did = "makes" if inside and row["target_mass"] > row["baseline_target_mass"] else "removes"
    largest = row.get("control_largest", np.nan)
    control = "" if np.isnan(largest) else f", controls at most {percent(largest)}"
    cost = row.get("loss_nats", np.nan) - row.get("baseline_loss_nats", np.nan)
    loss = "" if np.isnan(cost) else f"; loss {cost:+.2f}"
    return f"{row['edit']} {did} {percent(row['share'])} {_percent_bounds(row)}{control}{loss}"


def _matrix(table: pd.DataFrame) -> Table:
    shown = _table("Share of the sink that survives while a link is frozen (random controls)")
    for name in ("sink by", "layers"):
        shown.add_column(name, no_wrap=True)
    names = dict.fromkeys([*(link.freeze.name for link in LINKS if link.freeze is not None), *table["frozen"]])
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for _, part in table.groupby(["intervention", "step"], sort=False):
        by_name = {row["frozen"]: row for row in part.to_dict("records")}
        cells = [_cell(by_name[name]) if name in by_name else "-" for name in names]
        first = part.iloc[0]
        shown.add_row(str(first["intervention"]), f"{first['layers_from']}-{first['layers_to']}", *cells)
    return shown


def _cell(row: Mapping[Any, Any]) -> str:
    if np.isnan(row["surviving_share"]):
        return "-"
    control = row["control_surviving_share"]
    return f"{row['surviving_share']:z.2f}" + ("" if np.isnan(control) else f" ({control:z.2f})")


def _paths(frames: Mapping[str, pd.DataFrame]) -> str:
    """Which links leave most of the sink when they are frozen, so that another path carries it."""
    table = frames["mediation"]
    words = {one.name: one.words for one in (link.freeze for link in LINKS) if one is not None}
    checks = {one.name for one in (link.freeze for link in LINKS) if one is not None and one.is_check}
    lines = []
    for name in dict.fromkeys([*words, *table["frozen"]]):
        leaving = table.loc[(table["frozen"] == name) & (table["surviving_share"] > ANOTHER_PATH)]
        if name not in checks and len(leaving):
            found = leaving.groupby("intervention", sort=False)["step"].agg(list)
            where = "; ".join(f"{name}, step {' and '.join(map(str, steps))}" for name, steps in found.items())
            beside = words.get(name, name)
            lines.append(f"another path exists beside {beside}: most of the sink survives ({where})")
    return "\n".join(lines) or "no other path: every freeze takes most of the sink away"


def _rows(frame: pd.DataFrame) -> list[dict[Hashable, Any]]:
    return frame.to_dict("records")


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"

"""The page of a training that ``SinkMonitor`` watched: its alarms, and the course of what it read."""

import pandas as pd
from matplotlib.figure import Figure

from ...records import Run
from ...report.page import (
    Drawn,
    Listed,
    Page,
    PageTable,
    page_table,
    rest_note,
    table_maker,
    table_reader,
)
from ...report.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    QUIET,
    add_layer_scale,
    draw_layer_lines,
    legend,
    log_scale,
    new_figure,
    panel,
    set_integer_ticks,
    without_formulas,
)
from ...schema import COUNTED_QUERIES, MIN_SINK_RATE
from ...text import as_text, capitalise, plural, safe_line

_COLUMNS = ["step", "key", "layer", "value", "unit"]
_RULES = {
    "sink_born": ("a sink is born", ORANGE),
    "outlier_grows": ("an outlier grows", PURPLE),
    "logits_explode": ("attention logits grow", GREEN),
}
"""Rule -> what its alarms say in the figure, and their colour."""
_PANELS = (
    ("mass_first", "attention to position 0", False),
    ("norm_ratio", "norm ÷ others' median", True),
    ("dominance", "dominance ratio", True),
    ("max_activation", "largest activation", True),
    ("kurtosis", "excess kurtosis", False),
    ("entropy", "entropy of attention, nats", False),
    ("max_logit", "largest attention logit", False),
    ("loss", "loss, nats", False),
)
"""Key, axis label, and whether the axis is logarithmic."""
_MOST_SENTENCES = 6
_TOO_SHORT = (
    f"the texts are too short to tell of a sink (at least {COUNTED_QUERIES + 1} tokens are needed)"
)


def _draw_course(
    readings: pd.DataFrame, *, alarms: pd.DataFrame | None, threshold: float
) -> Figure:
    """Draw the monitor's keys by step: a panel for each key, layers by colour, alarms as lines."""
    panels = [one for one in _PANELS if one[0] != "loss" or bool((readings["key"] == "loss").any())]
    lines = 1 + len(panels) // 2
    figure = new_figure(width=9.4, height=2.4 * lines)
    rate = panel(figure, place=(lines, 2, 1), ylabel=f"share of heads above {threshold:g}")
    for key, label, colour, marker, line in (
        ("rate_first", "at position 0", BLUE, "o", "-"),
        ("rate_strongest", "at the strongest position", QUIET, "s", ":"),
    ):
        rows = readings.loc[(readings["key"] == key) & readings["layer"].isna()].sort_values("step")
        rate.plot(
            rows["step"],
            rows["value"],
            color=colour,
            marker=marker,
            linestyle=line,
            linewidth=1.5,
            markersize=3.5,
            label=label,
        )
    rate.set_ylim(-0.02, max(0.1, rate.get_ylim()[1]))
    by_layer, images = [], []
    for place, (key, ylabel, is_logarithmic) in enumerate(panels, start=2):
        xlabel = "step" if place > len(panels) - 1 else ""
        axes = panel(figure, place=(lines, 2, place), xlabel=xlabel, ylabel=ylabel)
        rows = readings.loc[readings["key"] == key].sort_values("step")
        if key == "loss":
            axes.plot(
                rows["step"], rows["value"], color=BLUE, marker="o", markersize=3.5, linewidth=1.5
            )
        else:
            images.append(draw_layer_lines(axes, rows, x=lambda own: own["step"]))
        if is_logarithmic:
            log_scale(axes, axis="y")
        by_layer.append(axes)
    for axes in figure.axes:
        set_integer_ticks(axes, y=False)
        if len(readings):
            steps = readings["step"].to_numpy(float)
            first, last = steps.min(), steps.max()
            margin = 0.02 * max(last - first, 1)
            axes.set_xlim(first - margin, last + margin)
        for rule, step in (
            () if alarms is None else zip(alarms["rule"], alarms["step"], strict=True)
        ):
            name, colour = _RULES.get(str(rule), (str(rule), QUIET))
            known = {line.get_label() for line in axes.get_lines()}
            label = "_" if name in known or axes is not rate else name
            axes.axvline(step, color=colour, linestyle="--", linewidth=1.2, label=label)
    legend(rate, columns=2)
    add_layer_scale(figure, images, by_layer)
    return without_formulas(figure)


def _alarm_table(run: Run) -> pd.DataFrame | None:
    return run.optional("alarms", columns=["step", "rule", "position", "sentence"])


def _title(run: Run) -> str:
    alarms, readings = _alarm_table(run), run.optional("monitor", columns=_COLUMNS)
    if alarms is None:  # or of a run that does not say at which position
        return "Training watched"
    born = alarms.loc[alarms["rule"] == "sink_born"].sort_values("step")
    said, key, place = "no sink is born", "rate_first", "position 0"
    if len(born):
        step, position = born[["step", "position"]].iloc[0]
        said = f"a sink is born at position {position} by step {step:,}"
        if position:
            key, place = "rate_strongest", "the strongest position"
    rate = [] if readings is None else _whole_model(readings, key)
    if not len(rate):
        short = readings is not None and len(_whole_model(readings, "mass_first")) > 0
        said = _TOO_SHORT if short and not len(born) else said
        return f"Training watched: {said}"
    first, last = rate[0], rate[-1]
    if not len(born):
        if min(rate) >= MIN_SINK_RATE:
            said = "a sink from the first reading on"
        elif last >= MIN_SINK_RATE:
            said = "a sink at the end, and no alarm"
        elif first >= MIN_SINK_RATE:
            said = "a sink at first, and none at the end"
    return f"Training watched: {said} ({first:.1%} of heads have it at {place} at first, {last:.1%} at the end)"


def _whole_model(readings: pd.DataFrame, key: str) -> list[float]:
    rows = readings.loc[(readings["key"] == key) & readings["layer"].isna()]
    return rows.sort_values("step")["value"].dropna().tolist()


def _sentences(run: Run) -> list[str]:
    alarms, sentences = _alarm_table(run), []
    if alarms is not None:
        told = [safe_line(one, limit=300) for one in alarms["sentence"].tolist()]
        sentences += [f"{capitalise(one)}." for one in told[:_MOST_SENTENCES]]
        if (rest := len(told) - _MOST_SENTENCES) > 0:
            sentences.append(f"{plural(rest, 'more alarm')}; all are in the table below.")
        if not told:
            sentences.append("No alarm.")
    readings = run.optional("monitor", columns=_COLUMNS)
    if readings is None or not len(readings):
        return sentences
    step = readings["step"].max()
    last = readings.loc[(readings["step"] == step) & readings["layer"].isna()]
    value = {str(key): float(one) for key, one in zip(last["key"], last["value"], strict=True)}
    if "mass_first" in value:
        n_steps = len(set(readings["step"].tolist()))
        shortened = run.tables.shortened.get("monitor")
        total = n_steps if shortened is None else shortened.steps or n_steps
        rate = (
            f"{value['rate_first']:.1%} of layers and heads have a sink at position 0 (sink score above "
            f"{_sink_threshold(run):g} and twice what uniform attention gives)"
            if "rate_first" in value
            else f"{_TOO_SHORT} at position 0"
        )
        sentences.append(
            f"At step {step:,}, the last of {plural(total, 'reading')}: {rate}; it receives "
            f"{as_text(value['mass_first'])} of the attention on average."
        )
    return sentences


def _sink_threshold(run: Run) -> float:
    found = run.config.get("threshold")
    return float(found) if isinstance(found, int | float) else 0.3


def _course_figure(run: Run) -> tuple[str, Figure]:
    readings = run.need("monitor", columns=_COLUMNS)
    see = (
        "Each panel shows one measure of the monitor by step; several lines are several layers. A dashed line is an "
        "alarm. Check whether the sink comes with the norm and the outlier, or before them."
    )
    return see, _draw_course(readings, alarms=_alarm_table(run), threshold=_sink_threshold(run))


def _reading_table(run: Run) -> tuple[str, PageTable]:
    readings = run.need("monitor", columns=_COLUMNS)
    rows = readings.loc[readings["layer"].isna()]
    wide = rows.pivot_table(index="step", columns="key", values="value", sort=False).reset_index()
    see = "The whole model at each reading, newest first; monitor.parquet has the single layers."
    return see + rest_note(len(wide), "monitor"), page_table(wide.iloc[::-1], wide.columns)


_MEANINGS = {
    "rate_first": "Share of sequences and heads whose sink score at position 0 passes the threshold and twice what "
    "uniform attention gives there.",
    "rate_strongest": "The same at the strongest position.",
    "mass_first": "Mean attention to position 0 of the later queries that see it.",
    "mass_strongest": "The same attention, to the strongest position.",
    "strongest_sequences": "Sequences that the numbers of the strongest position are of.",
    "loss": "Mean loss of a token in the training batch, in nats.",
    "norm_ratio": "Norm of the stream at position 0 relative to the median of ordinary tokens.",
    "entropy": "Mean entropy of an attention row over its keys, in nats.",
}
MONITOR = Page(
    title=_title,
    headline=_sentences,
    figures=(
        Drawn(
            key="course",
            title="What the monitor read",
            make=_course_figure,
            data=table_reader("monitor"),
        ),
    ),
    tables=(
        Listed(
            key="alarm-table",
            title="Alarms",
            make=table_maker(
                "alarms",
                "What the change-point rules found, in the order of the steps.",
                {"step": "step", "rule": "rule", "sentence": "what it says"},
            ),
            # where the table is missing, it says why
            when=lambda run: "alarms" not in run.tables or len(run.tables["alarms"]) > 0,
        ),
        Listed(key="reading-table", title="Readings", make=_reading_table, meanings=_MEANINGS),
    ),
)

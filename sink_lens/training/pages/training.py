"""Training: the course of a run's measures, and variants beside each other, as figures and as pages."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...errors import InputError, RunError
from ...records import Run
from ...report.page import (
    Drawn,
    Listed,
    Page,
    PageTable,
    has_table,
    page_table,
    rest_note,
    table_maker,
    table_reader,
)
from ...report.style import (
    BLUE,
    COLOURS,
    FONT,
    GREEN,
    INK,
    MARKS,
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
from ...schema import SINK_THRESHOLD
from ...stats import ROUNDING
from ...text import (
    as_text,
    interval_text,
    join_and,
    name_in_words,
    percent,
    plural,
    safe_line,
    short_count,
    signed_change,
)
from ..sink_birth import Birth, find_birth, whole_model_rows
from ..variants import FEWEST_SEEDS, fields_in_words


def draw_training(
    watched: pd.DataFrame, *, log: pd.DataFrame | None = None, born: float | int | None = None
) -> Figure:
    """Draw the table ``watch`` by tokens, one panel per measure, the losses of ``log``, and a line at the birth."""
    unit = "tokens"
    if bool(watched["tokens"].isna().to_numpy().any()):
        watched, unit = watched.assign(tokens=watched["step"]), "steps"
    figure = new_figure(width=9.4, height=9.6)
    scale = _TokenScale(watched["tokens"].to_numpy(float))
    places = iter(range(1, 9))

    def add_panel(ylabel: str) -> Axes:
        place = next(places)
        return panel(figure, place=(4, 2, place), xlabel=unit if place > 6 else "", ylabel=ylabel)

    loss = add_panel("loss, nats")
    if log is not None:
        _draw_losses(loss, log, scale)
    own_loss = whole_model_rows(watched, "loss")
    _draw_line(
        loss, own_loss, scale, color=INK, marker="x", linestyle=":", label="watched sequences"
    )
    legend(loss, columns=3)
    rate = add_panel("share of heads with a sink")
    rows = whole_model_rows(watched, "sink_rate").dropna(subset="value")
    by_level: Any = rows.groupby("threshold")
    for (level, of_level), colour, mark in zip(by_level, cycle(COLOURS), cycle(MARKS)):
        width = 2.4 if np.isclose(level, SINK_THRESHOLD) else 1.2
        _draw_line(
            rate,
            of_level,
            scale,
            linewidth=width,
            color=colour,
            marker=mark,
            label=f"above {level:g}",
        )
    rate.set_ylim(-0.02, max(0.1, 1.05 * rows["value"].to_numpy(float).max(initial=0.0)))
    legend(rate, columns=4)
    by_layer, images = [], []
    for measure, ylabel, level in _BY_LAYER:
        axes = add_panel(ylabel)
        rows = watched.loc[watched["measure"] == measure].sort_values("tokens")
        images.append(draw_layer_lines(axes, rows, x=lambda own: scale.positions(own["tokens"])))
        by_layer.append(axes)
        if measure == "sink_mass":
            for value in whole_model_rows(watched, "uniform_mass")["value"].head(1):
                axes.axhline(
                    value, color=QUIET, linestyle=":", linewidth=1.4, label="uniform attention"
                )
            axes.set_ylim(0, max(0.1, axes.get_ylim()[1]))
            legend(axes, columns=1)
            continue
        log_scale(axes, axis="y")
        if level is not None:
            axes.axhline(level, color=QUIET, linewidth=0.8)
    ranks, counts = add_panel("effective rank, layer mean"), add_panel("how many")
    for axes, measures in ((ranks, _RANKS), (counts, _COUNTS)):
        for measure, label, colour, mark in measures:
            rows = whole_model_rows(watched, measure)
            _draw_line(axes, rows, scale, color=colour, marker=mark, label=label)
        legend(axes, columns=2)
    ranks.set_ylim(bottom=0)
    counts.set_ylim(bottom=-0.1, top=max(1.5, counts.get_ylim()[1]))
    set_integer_ticks(counts)
    for axes in figure.axes:
        scale.apply_to(axes)
        if born is not None:
            axes.axvline(float(scale.positions(born)), color=ORANGE, linestyle="--", linewidth=1.2)
    add_layer_scale(figure, images, by_layer)
    return without_formulas(figure)


_BY_LAYER = (
    ("sink_mass", "attention to position 0", None),
    ("s2_ratio", "S2: first token ÷ others", 1.0),
    ("norm_ratio", "norm ÷ others' median", 1.0),
    ("dominance_ratio", "dominance ratio", None),
)
"""Measure, axis label, and the level that is marked."""
_RANKS = (
    ("effective_rank", "with token 0", BLUE, "o"),
    ("effective_rank_without", "without", ORANGE, "s"),
)
_COUNTS = (
    ("growth_steps", "growth steps", GREEN, "^"),
    ("super_neurons", "super neurons", PURPLE, "D"),
)
"""Measure of the whole model, label, colour and mark."""


def draw_comparison(
    tables: Mapping[str, pd.DataFrame], *, variants: Sequence[str], group_by: str = ""
) -> Figure:
    """Draw the tables of a ``Comparison``; the baseline is the first of ``variants``."""
    curve = "evaluation" if "evaluation" in set(tables["bands"]["curve"].tolist()) else "training"
    bands, finals, curves, differences = (
        tables[name].loc[tables[name]["curve"] == curve]
        for name in ("bands", "finals", "curves", "differences")
    )
    figure = new_figure(width=9.4, height=6.6)
    top = panel(figure, place=(2, 2, 1), xlabel="tokens", ylabel=f"{curve} loss, nats")
    gap = panel(figure, place=(2, 2, 2), xlabel="tokens", ylabel=f"{curve} loss − baseline, nats")
    ends = panel(figure, place=(2, 2, 3), ylabel=f"final {curve} loss − baseline")
    low = panel(
        figure, place=(2, 2, 4), xlabel="tokens", ylabel="attention to position 0, top layer"
    )
    scale = _TokenScale(tables["bands"]["tokens"].to_numpy(float))
    scales = [(top, scale), (gap, scale)]
    styles = list(zip(variants, cycle(COLOURS), cycle(MARKS)))
    for index, (variant, colour, mark) in enumerate(styles):
        of_variant = bands.loc[bands["variant"] == variant]
        look: dict[str, Any] = {"color": colour, "marker": mark}
        of_loss = of_variant.query("quantity == 'loss'")
        _draw_band(top, of_loss, scale, label=f"{group_by} {variant}".lstrip(), **look)
        if not index:
            continue
        _draw_band(gap, of_variant.query("quantity == 'difference'"), scale, label=variant, **look)
        for _, own in curves.loc[curves["variant"] == variant].groupby("seed"):
            x = scale.positions(own["tokens"])
            gap.plot(x, own["difference"], color=colour, linewidth=0.6, alpha=0.7)
        dots = finals.loc[finals["variant"] == variant, "difference"].to_numpy(float)
        ends.scatter(np.full(len(dots), index - 1.12), dots, s=22, label="one seed", **look)
        row = differences.loc[differences["variant"] == variant, ["mean", "low", "high"]]
        mean, lowest, highest = row.to_numpy(float)[0]
        if np.isfinite([lowest, highest]).all():
            ends.vlines(index - 0.88, lowest, highest, color=colour, linewidth=2)
        ends.plot(
            [index - 0.88], [mean], color=colour, marker="_", markersize=14, markeredgewidth=2
        )
    base_end = finals.loc[finals["variant"] == variants[0], "loss"].mean()
    top.axhline(base_end, color=QUIET, linestyle=":", linewidth=1.2)
    gap.axhline(0, color=COLOURS[0], linewidth=1.4)
    ends.axhline(0, color=COLOURS[0], linewidth=1.4)
    ends.set_xlim(-0.6, len(variants) - 1.4)
    ends.set_xticks(range(len(variants) - 1), list(variants[1:]))
    ends.grid(visible=False, axis="x")
    if "course" in tables:
        rows = tables["course"].query("measure == 'top_mass'")
        own_scale = _TokenScale(rows["tokens"].to_numpy(float))
        for variant, colour, mark in styles:
            own = rows.loc[rows["variant"] == variant]
            _draw_band(low, own, own_scale, label=variant, marks=True, color=colour, marker=mark)
        low.set_ylim(0, max(0.1, low.get_ylim()[1]))
        scales.append((low, own_scale))
    else:
        _say_empty(low, "not watched")
        low.set_xticks([])
        low.set_yticks([])
    for axes, one in scales:
        one.apply_to(axes)
    legend(top, columns=min(len(variants), 6), over=figure)
    return without_formulas(figure)


def draw_logged(logged: pd.DataFrame) -> Figure:
    figure = new_figure(width=9.4, height=6.6)
    losses = panel(figure, place=(2, 1, 1), ylabel="loss, nats")
    rate = panel(figure, place=(2, 1, 2), xlabel="step", ylabel="share of heads with a sink")
    drawn: tuple[tuple[str, Axes, str, dict[str, Any]], ...] = (
        ("training loss", losses, "", {"linewidth": 1.0}),
        ("evaluation loss", losses, ", evaluation", {"marker": "o", "linestyle": "--"}),
        ("sink rate", rate, "", {"marker": "o"}),
    )
    for name, colour in zip(logged["run"].unique(), cycle(COLOURS), strict=False):
        for quantity, axes, what, style in drawn:
            rows = logged.loc[(logged["run"] == name) & (logged["quantity"] == quantity)]
            if len(rows):
                rows = rows.sort_values("step")
                style |= {"color": colour, "markersize": 3.5, "label": f"{name}{what}"}
                axes.plot(rows["step"], rows["value"], **style)
    rate.set_ylim(-0.02, max(0.1, rate.get_ylim()[1]))
    first, last = (float(of(logged["step"].to_numpy(float))) for of in (np.min, np.max))
    margin = 0.02 * (last - first + 1)
    for axes in (losses, rate):
        axes.set_xlim(first - margin, last + margin)
        set_integer_ticks(axes, y=False)
        legend(axes, columns=4)
        if not axes.lines:
            _say_empty(axes, "not logged")
    return without_formulas(figure)


def _say_empty(axes: Axes, why: str) -> None:
    axes.text(
        0.5,
        0.5,
        why,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=QUIET,
        fontsize=FONT,
    )


def _finite_column(log: pd.DataFrame, column: str) -> pd.Series:
    values = log[column].to_numpy(float) if column in log.columns else np.full(len(log), np.nan)
    there = np.isfinite(values)
    return pd.Series(values[there], index=log["tokens"].to_numpy(float)[there])


class _TokenScale:
    """Logarithmic axis of numbers of tokens, which shows 0 left of the smallest positive number."""

    def __init__(self, tokens: np.ndarray) -> None:
        known = np.unique(tokens[np.isfinite(tokens)])
        positive = known[known > 0]
        self._least = float(positive[0]) if len(positive) else 1.0
        ratio = float(positive[1] / positive[0]) if len(positive) > 1 else 2.0
        self._zero = self._least / min(max(ratio, 1.5), 4.0)
        self._has_zero = bool(len(known) and known[0] <= 0)
        self._low = self._zero if self._has_zero else self._least
        self._high = float(positive[-1]) if len(positive) else 2.0

    def positions(self, tokens: Any) -> np.ndarray:
        tokens = np.asarray(tokens, dtype=float)
        return np.where(tokens > 0, tokens, self._zero)

    def apply_to(self, axes: Axes) -> None:
        margin = (self._high / self._low) ** 0.03 if self._high > self._low else 2.0
        low, high = self._low / margin, self._high * margin
        axes.set_xlim(low, high)
        log_scale(axes, axis="x")
        ticks = [tick for tick in axes.get_xticks() if max(low, self._least * 0.99) <= tick <= high]
        names = [short_count(tick) for tick in ticks]
        if self._has_zero:
            ticks, names = [self._zero, *ticks], ["0", *names]
        axes.set_xticks(ticks, names)
        axes.set_xticks([], minor=True)


def _draw_line(axes: Axes, rows: pd.DataFrame, scale: _TokenScale, **style: Any) -> None:
    if len(rows):
        rows = rows.sort_values("tokens")
        style = {"markersize": 3.5, "linewidth": 1.5} | style
        axes.plot(scale.positions(rows["tokens"]), rows["value"], **style)


def _draw_losses(axes: Axes, log: pd.DataFrame, scale: _TokenScale) -> None:
    loss, held_out = _finite_column(log, "loss"), _finite_column(log, "eval_loss")
    axes.plot(scale.positions(loss.index), loss, color=QUIET, linewidth=0.8, label="training")
    if len(held_out):
        x = scale.positions(held_out.index)
        axes.plot(x, held_out, color=BLUE, marker="o", markersize=3, label="evaluation")


def _draw_band(
    axes: Axes,
    rows: pd.DataFrame,
    scale: _TokenScale,
    *,
    label: str,
    color: str,
    marker: str,
    marks: bool = False,
) -> None:
    rows = rows.sort_values("tokens")
    x = scale.positions(rows["tokens"])
    mean, low, high = rows[["mean", "low", "high"]].to_numpy(float).T
    if np.isfinite(low).any():
        axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    style: dict[str, Any] = {"marker": marker, "markersize": 3.5} if marks or len(x) <= 30 else {}
    axes.plot(x, mean, color=color, linewidth=1.6, label=label, **style)


_LOG = ["step", "tokens", "loss"]
_WATCH = ["step", "tokens", "measure", "layer", "position", "threshold", "value"]


def _training_title(run: Run) -> str:
    title = f"Training with {safe_line(run.config.get('attention', 'attention'))} attention"
    if (norm := run.config.get("value_norm", "none")) != "none":
        title += f" and value norm {safe_line(norm)}"
    last = _last_values_text(run)
    return f"{title}: {last}" if last else title


def _watch_title(run: Run) -> str:
    watched = run.config.get("checkpoints")
    name = plural(len(watched), "model") if isinstance(watched, list) else Path(str(watched)).name
    return f"{safe_line(name)}: {_last_values_text(run) or 'checkpoints watched'}"


def _last_values_text(run: Run) -> str:
    log, watch = run.optional("log", columns=_LOG), run.optional("watch", columns=_WATCH)
    parts = []
    for column, name in (("eval_loss", "held-out loss"), ("loss", "loss")):
        if log is not None and not parts and len(values := _finite_column(log, column)):
            parts.append(f"{name} {values.iloc[-1]:.3f} nats")
    if watch is not None and (born := _find_birth(watch)) is not None:
        sink = "no sink at position 0" if born.tokens is None else "a sink at position 0"
        parts.append(f"{sink} at the end ({percent(born.rate)} of heads)")
    return ", ".join(parts)


def _training_sentences(run: Run) -> list[str]:
    sentences = []
    log = run.optional("log", columns=_LOG)
    if log is not None and len(log):
        parts = [
            f"{name} loss {values.iloc[-1]:.4f} nats"
            for column, name in (("loss", "training"), ("eval_loss", "held-out"))
            if len(values := _finite_column(log, column))
        ]
        at = f"{log['step'].max():,.0f} steps, {short_count(log['tokens'].to_numpy(float).max())} tokens"
        sentences.append(f"After {at}: {join_and(parts) or 'no loss was logged'}.")
    watch = run.optional("watch", columns=_WATCH)
    return sentences if watch is None else [*sentences, _sink_sentence(watch)]


def _find_birth(watch: pd.DataFrame) -> Birth | None:
    try:
        return find_birth(watch)
    except InputError:
        return None


def _sink_sentence(watch: pd.DataFrame) -> str:
    born = _find_birth(watch)
    if born is None:
        return f"The share of heads with a sink score above {SINK_THRESHOLD:g} was not measured."
    end = f"at the last checkpoint {born.rate:.1%} of layers and heads have a sink score above {born.threshold:g}"
    if born.tokens is None:
        return f"No attention sink at position 0: {end}."
    if born.before is None:
        return f"Position 0 is a sink from the first checkpoint on: {end}."
    between = f"{short_count(born.before)} and {short_count(born.tokens)} {born.unit}"
    return f"Position 0 became a sink between {between}: {end}."


def _check_watched(run: Run) -> None:
    if "watch" not in run.tables:
        raise RunError(
            "the checkpoints of this run were not watched. Run sink-lens watch on its folder to see it."
        )


def _course_figure(run: Run) -> tuple[str, Figure]:
    _check_watched(run)
    watch = run.need("watch", columns=_WATCH)
    watch = watch.loc[watch["measure"] != "error"]
    see = (
        "Each panel is a measure of the chain at the checkpoints, by tokens (logarithmic); a line is a layer where the "
        "scale says so. Check whether the sink comes with the norm and the outlier dimension, or before them."
    )
    born = _find_birth(watch)
    at = None if born is None or born.before is None else born.tokens
    return see, draw_training(watch, log=run.optional("log", columns=_LOG), born=at)


def _loss_figure(run: Run) -> tuple[str, Figure]:
    log = run.need("log", columns=_LOG)
    figure = new_figure(width=7.4, height=3.2)
    axes = panel(figure, xlabel="tokens", ylabel="loss, nats")
    scale = _TokenScale(log["tokens"].to_numpy(float))
    _draw_losses(axes, log, scale)
    legend(axes, columns=3)
    scale.apply_to(axes)
    see = "Loss by tokens (logarithmic): each logged step"
    if len(_finite_column(log, "eval_loss")):
        see += ", and on held-out text."
    return see, without_formulas(figure)


def _whole_model_measures(watch: pd.DataFrame) -> pd.DataFrame:
    whole = watch.loc[watch["layer"].isna() & watch["position"].isna()]
    return whole.filter(items=["step", "tokens", "measure", "threshold", "value", "unit"])


BRIEF = {
    "step": "step",
    "tokens": "tokens",
    "sink_rate": "sinks",
    "sink_mass": "mass",
    "s2_ratio": "S2",
    "norm_ratio": "norm",
    "dominance_ratio": "dominance",
    "effective_rank": "rank",
    "effective_rank_without": "w/o 0",
    "growth_steps": "growth",
    "super_neurons": "neurons",
}
"""Column of the table of checkpoints -> its head where there is little room."""


def checkpoint_table(
    watch: pd.DataFrame, *, threshold: float, heads: Mapping[str, str] | None = None
) -> PageTable:
    """Return a row per checkpoint of the table ``watch``, with a column per measure of the whole model.

    Of the sink rates, that at this threshold is shown.
    """
    rows = _whole_model_measures(watch)
    level = rows["threshold"].to_numpy(float)
    rows = rows.loc[np.isnan(level) | np.isclose(level, threshold)]
    index = ["step"] if rows["tokens"].isna().any() else ["step", "tokens"]
    wide = rows.pivot_table(
        index=index, columns="measure", values="value", sort=False
    ).reset_index()
    return page_table(wide, wide.columns if heads is None else heads, most=60)


def _checkpoint_table(run: Run) -> tuple[str, PageTable]:
    _check_watched(run)
    see = f"The whole model at each checkpoint; a head has a sink if its sink score is above {SINK_THRESHOLD:g}."
    return see, checkpoint_table(run.tables["watch"], threshold=SINK_THRESHOLD)


def _log_table(run: Run) -> tuple[str, PageTable]:
    log = run.need("log", columns=_LOG)
    see = "What was logged, newest first." + rest_note(len(log), "log")
    return see, page_table(log.iloc[::-1], log.columns)


_COURSE = Drawn(
    key="course",
    title="How the sink grows",
    make=_course_figure,
    data=lambda run: _whole_model_measures(run.tables["watch"]),
)
_CHECKPOINTS = Listed(
    key="checkpoint-table",
    title="Checkpoints",
    make=_checkpoint_table,
    meanings={
        "sink_rate": "Share of layers and heads whose sink score at position 0 passes the threshold.",
        "uniform_mass": "Attention to position 0 if every query attended evenly to all its keys.",
        "norm_ratio": "Norm of the stream at position 0 relative to the median of ordinary tokens.",
    },
)
TRAIN = Page(
    title=_training_title,
    headline=_training_sentences,
    figures=(Drawn(key="loss", title="Loss", make=_loss_figure, data=table_reader("log")), _COURSE),
    tables=(_CHECKPOINTS, Listed(key="log-table", title="Log", make=_log_table)),
)
WATCH = Page(
    title=_watch_title, headline=_training_sentences, figures=(_COURSE,), tables=(_CHECKPOINTS,)
)


def _variant_names(run: Run) -> list[str]:
    variants = list(run.config.get("runs") or {})
    return sorted(variants, key=lambda variant: variant != run.config.get("baseline"))


def _compare_title(run: Run) -> str:
    logged = run.optional("logged", columns=["run"])
    if logged is not None:
        return f"Logs of {safe_line(join_and(logged['run'].unique()))}"
    compared = fields_in_words(run.config.get("group_by") or ["variants"])
    title = f"{safe_line(compared).capitalize()} {safe_line(' against '.join(reversed(_variant_names(run))))}"
    table = run.optional("differences", columns=_DRAWN["differences"])
    if table is None or not len(table):
        return title
    rows = table.to_dict("records")
    last = next((row for row in reversed(rows) if row["curve"] == "evaluation"), rows[-1])
    bounds = interval_text(last["low"], last["high"])
    bounds = bounds or "(with one seed each, it cannot be told from chance)"
    change = signed_change(last["mean"], 3)
    told = f"{safe_line(last['variant'])} is {'behind' if last['mean'] > 0 else 'ahead'}"
    finals = run.optional("finals", columns=["variant", "curve", "target"])
    same = [] if finals is None else finals.loc[finals["curve"] == last["curve"], "target"].tolist()
    rounding = ROUNDING * float(np.mean(same)) if same else 0.0  # of the baseline's final loss
    if last["low"] <= 0 <= last["high"] or abs(last["mean"]) <= rounding:
        told = "no difference can be told"
    elif last.get("n", FEWEST_SEEDS) < FEWEST_SEEDS:
        told = f"{FEWEST_SEEDS} seeds are needed to tell a difference"
    return f"{title}: {safe_line(last['curve'])} loss {change} nats {bounds}; {told}"


def _read_findings(run: Run) -> list[str]:
    path = run.folder / "findings.txt"
    if not path.is_file():
        return ["findings.txt is not in this folder."]
    text = path.read_text(encoding="utf-8", errors="replace")
    return [safe_line(line, limit=600) for line in text.splitlines()[:40] if line.strip()]


_DRAWN = {
    "curves": ["variant", "seed", "curve", "tokens", "difference"],
    "bands": ["variant", "curve", "quantity", "tokens", "mean", "low", "high"],
    "finals": ["variant", "seed", "curve", "loss", "difference"],
    "differences": ["variant", "curve", "mean", "low", "high"],
}
"""Table of a comparison -> the columns that its page reads."""


def _comparison_figure(run: Run) -> tuple[str, Figure]:
    tables = {name: run.need(name, columns=columns) for name, columns in _DRAWN.items()}
    if empty := [name for name, table in tables.items() if not len(table)]:
        raise RunError(f"the table {empty[0]!r} has no rows. Compare again to see it.")
    course = run.optional("course", columns=["variant", "measure", "tokens", "mean", "low", "high"])
    see = (
        "Means over seeds with 95% intervals. Top right: each variant minus the baseline of the same seed; where the "
        f"interval of {FEWEST_SEEDS} seeds or more leaves out zero, the difference can be told from chance. Bottom "
        "right: attention to position 0."
    )
    if course is not None:
        tables["course"] = course
    variants = _variant_names(run) or tables["bands"]["variant"].unique().tolist()
    group_by = "/".join(name_in_words(str(name)) for name in run.config.get("group_by") or [])
    return see, draw_comparison(tables, variants=variants, group_by=group_by)


_LOGGED = ("step", "quantity", "value", "unit")


def _logged_figure(run: Run) -> tuple[str, Figure]:
    see = "One run each: one seed has no interval, so no difference can be told from chance."
    return see, draw_logged(run.need("logged", columns=["run", *_LOGGED]))


def _final_table(run: Run) -> tuple[str, PageTable]:
    see = "The final loss of every run. Undefined: it did not reach the baseline's final loss, or began there."
    return see, final_loss_table(run.need("finals", columns=_DRAWN["finals"]))


def final_loss_table(table: pd.DataFrame) -> PageTable:
    heads = {
        "curve": "curve",
        "variant": "variant",
        "seed": "seed",
        "loss": "loss, nats",
        "difference": "− baseline",
        "reached": "reaches the baseline's end at",
        "acceleration": "times as fast",
    }
    return page_table(table, heads, most=60)


_MEASURES = {
    "sink_mass": "mass on position 0",
    "top_mass": "the same, top layer",
    "effective_rank_without": "the same, without token 0",
    "norm_ratio": "norm ratio, largest",
}
"""Measure -> what a table calls it; others have their name in words."""


def variant_measure_table(table: pd.DataFrame) -> PageTable:
    cells: dict[str, dict[str, str]] = {}
    for row in table.to_dict("records"):
        name = _MEASURES.get(row["measure"], name_in_words(row["measure"]))
        if pd.notna(row["threshold"]):
            name += f" above {row['threshold']:g}"
        cell = f"{as_text(row['mean'])} {interval_text(row['low'], row['high'])}".strip()
        cells.setdefault(name, {})[str(row["variant"])] = cell
    variants = table["variant"].unique().tolist()
    rows = [
        (safe_line(name), *(own.get(variant, "") for variant in variants))
        for name, own in cells.items()
    ]
    heads = ("measure", *map(safe_line, variants))
    return PageTable(heads=heads, numeric=(False,) * len(heads), rows=rows, frame=table)


def _measure_table(run: Run) -> tuple[str, PageTable]:
    table = run.need("measures", columns=["measure", "threshold", "variant", "mean", "low", "high"])
    see = "The last checkpoints side by side: means over seeds with 95% intervals."
    return see, variant_measure_table(table)


COMPARE = Page(
    title=_compare_title,
    headline=_read_findings,
    figures=(
        Drawn(
            key="comparison",
            title="The variants",
            make=_comparison_figure,
            data=table_reader("bands"),
            when=has_table("bands"),
        ),
        Drawn(
            key="logged",
            title="The logs",
            make=_logged_figure,
            data=table_reader("logged"),
            when=has_table("logged"),
        ),
    ),
    tables=(
        Listed(
            key="final-table", title="Final losses", make=_final_table, when=has_table("finals")
        ),
        Listed(
            key="logged-table",
            title="What was logged",
            make=table_maker(
                "logged", "Every logged number.", {name: name for name in ("run", *_LOGGED)}
            ),
            when=has_table("logged"),
        ),
        Listed(
            key="measure-table",
            title="The chain at the end",
            make=_measure_table,
            when=has_table("measures"),
        ),
    ),
)

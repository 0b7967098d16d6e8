"""The pages of training: the course of one run, and arms beside each other."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report import training
from sink_lens.report.columns import floats, named, need, select
from sink_lens.report.findings import optional
from sink_lens.report.pages import Drawn, Listed, Page
from sink_lens.report.tables import Table, more, shown_table
from sink_lens.report.words import interval, listed, number, short, visible

_THRESHOLD, _MIN_RATE = 0.3, 0.05
_LOG = ["step", "tokens", "loss"]
_WATCH = ["step", "tokens", "measure", "layer", "position", "threshold", "value"]


def _title(run: Run) -> str:
    kind = run.config.get("attention", "attention")
    norm = run.config.get("value_norm", "none")
    return f"Training with {visible(kind)} attention" + f" and value norm {visible(norm)}" * (norm != "none")


def _said(run: Run) -> list[str]:
    """How far it came, what the loss is, and whether there is a sink."""
    said = []
    log = optional(run, "log", _LOG)
    if log is not None and len(log):
        parts = []
        for column, name in (("loss", "training"), ("eval_loss", "held-out")):
            values = floats(log, column) if column in log.columns else np.array([])
            if np.isfinite(values).any():
                parts.append(f"{name} loss {values[np.isfinite(values)][-1]:.4f} nats")
        at = f"{floats(log, 'step').max():,.0f} steps, {short(float(floats(log, 'tokens').max()))} tokens"
        said.append(f"After {at}: {listed(parts) or 'no loss was logged'}.")
    watch = optional(run, "watch", _WATCH)
    return said if watch is None else [*said, _sink(watch)]


def _sink(watch: pd.DataFrame) -> str:
    """Since when position 0 is a sink, as ``sink-lens watch`` tells it, at the usual threshold."""
    rates = named(watch, "measure", "sink_rate")
    rates = select(rates, np.isnan(floats(rates, "layer")) & np.isclose(floats(rates, "threshold"), _THRESHOLD))
    rates = select(rates, np.argsort(floats(rates, "step"), kind="stable"))
    if not len(rates):
        return f"Whether there is a sink over {_THRESHOLD:g} was not measured."
    tokens, rate = floats(rates, "tokens"), floats(rates, "value")
    under = np.flatnonzero(~(rate >= _MIN_RATE))
    end = f"at the last checkpoint {rate[-1]:.1%} of layers and heads have a sink score over {_THRESHOLD:g}"
    if len(under) and under[-1] == len(rate) - 1:
        return f"No attention sink at position 0: {end}."
    if not len(under):
        return f"Position 0 is a sink from the first checkpoint on: {end}."
    before, after = (short(float(tokens[at])) for at in (under[-1], under[-1] + 1))
    return f"Position 0 became a sink between {before} and {after} tokens: {end}."


def _course(run: Run) -> tuple[str, Figure]:
    if "watch" not in run.tables:
        raise RunError("the checkpoints of this run were not watched. Run sink-lens watch on its folder to see it.")
    watch = need(run, "watch", columns=_WATCH)
    if "error" in watch.columns:
        watch = select(watch, watch["error"].isna().to_numpy(dtype=bool))
    see = (
        "Each panel is a measure of the chain at the checkpoints, by tokens (logarithmic); a line is a layer where the "
        "scale says so. Look whether the sink comes with the norm and the outlier dimension, or before them."
    )
    return see, training.course(watch, log=optional(run, "log", _LOG))


def _loss(run: Run) -> tuple[str, Figure]:
    log = need(run, "log", columns=_LOG)
    held_out = "eval_loss" in log.columns and bool(np.isfinite(floats(log, "eval_loss")).any())
    see = "Loss by tokens (logarithmic): each logged step" + ", and on held-out text." * held_out
    return see, training.losses(log)


def _watched_rows(run: Run) -> pd.DataFrame:
    watch = run.tables["watch"]
    whole = select(watch, np.isnan(floats(watch, "layer")) & np.isnan(floats(watch, "position")))
    return whole.filter(items=["step", "tokens", "measure", "threshold", "value", "unit"])


def _checkpoint_table(run: Run) -> tuple[str, Table]:
    if "watch" not in run.tables:
        raise RunError("the checkpoints of this run were not watched. Run sink-lens watch on its folder to see it.")
    rows = _watched_rows(run)
    level = floats(rows, "threshold")
    rows = select(rows, np.isnan(level) | np.isclose(level, _THRESHOLD))
    wide = rows.pivot_table(index=["step", "tokens"], columns="measure", values="value", sort=False).reset_index()
    heads = {str(name): str(name).replace("_", " ") for name in wide.columns}
    return f"The whole model at each checkpoint; sinks are over {_THRESHOLD:g}.", shown_table(wide, heads, most=60)


def _log_table(run: Run) -> tuple[str, Table]:
    log = need(run, "log", columns=_LOG)
    heads = {str(name): str(name).replace("_", " ") for name in log.columns}
    see = "What was logged, the last first." + more(len(log), "log")
    return see, shown_table(log.iloc[::-1], heads)


TRAIN = Page(
    title=_title,
    headline=_said,
    figures=(
        Drawn(key="loss", title="Loss", make=_loss, data=lambda run: run.tables["log"]),
        Drawn(key="course", title="When the sink is born", make=_course, data=_watched_rows),
    ),
    tables=(
        Listed(key="checkpoint-table", title="Checkpoints", make=_checkpoint_table),
        Listed(key="log-table", title="Log", make=_log_table),
    ),
)


def _arms(run: Run) -> list[str]:
    arms = list(run.config.get("runs") or {})
    base = run.config.get("baseline")
    return sorted(arms, key=lambda arm: arm != base)


def _compare_title(run: Run) -> str:
    by = listed([str(name).replace("_", " ") for name in run.config.get("by") or ["arms"]])
    return f"{visible(by)}: {visible(' against '.join(reversed(_arms(run))))}"


def _findings(run: Run) -> list[str]:
    path = run.folder / "findings.txt"
    if not path.is_file():
        return ["findings.txt is not in this folder."]
    text = path.read_text(encoding="utf-8", errors="replace")
    return [visible(line, limit=600) for line in text.splitlines()[:40] if line.strip()]


def _comparison(run: Run) -> tuple[str, Figure]:
    tables = {
        "curves": need(run, "curves", columns=["arm", "seed", "curve", "tokens", "difference"]),
        "bands": need(run, "bands", columns=["arm", "curve", "quantity", "tokens", "mean", "low", "high"]),
        "finals": need(run, "finals", columns=["arm", "seed", "curve", "loss", "difference"]),
        "differences": need(run, "differences", columns=["arm", "curve", "mean", "low", "high"]),
    }
    if empty := [name for name, table in tables.items() if not len(table)]:
        raise RunError(f"the table {empty[0]!r} has no rows. Compare again to see it.")
    course = optional(run, "course", ["arm", "measure", "tokens", "mean", "low", "high"])
    see = (
        "Means over seeds with 95% intervals. Right of the losses, each arm minus the baseline of the same seed: a "
        "difference can be told where the interval leaves zero. Below right, whether attention goes to position 0."
    )
    arms = _arms(run) or list(dict.fromkeys(tables["bands"]["arm"].tolist()))
    by = "/".join(str(name) for name in run.config.get("by") or [])
    return see, training.comparison(tables | ({} if course is None else {"course": course}), arms=arms, by=by)


def _final_table(run: Run) -> tuple[str, Table]:
    table = need(run, "finals", columns=["arm", "seed", "curve", "loss", "difference"])
    heads = {"curve": "curve", "arm": "arm", "seed": "seed", "loss": "loss, nats", "difference": "− baseline"}
    heads |= {"reached": "reaches the baseline's end at", "acceleration": "times as fast"}
    see = "Where every run ended. Undefined: it did not come to where the baseline ended."
    return see, shown_table(table, heads, most=60)


def _measure_table(run: Run) -> tuple[str, Table]:
    table = need(run, "measures", columns=["measure", "threshold", "arm", "mean", "low", "high"])
    lines: dict[str, dict[str, str]] = {}
    for row in table.to_dict("records"):
        level = row["threshold"]
        name = str(row["measure"]).replace("_", " ") + f" over {level:g}" * (level == level)
        lines.setdefault(name, {})[str(row["arm"])] = (
            f"{number(row['mean'])} {interval(row['low'], row['high'])}".strip()
        )
    arms = list(dict.fromkeys(table["arm"].tolist()))
    rows = [(visible(name), *(by_arm.get(arm, "") for arm in arms)) for name, by_arm in lines.items()]
    heads = ("measure", *(visible(arm) for arm in arms))
    see = "The last checkpoints side by side: means over seeds with 95% intervals."
    return see, Table(heads=heads, numeric=(False,) * len(heads), rows=rows, frame=table)


COMPARE = Page(
    title=_compare_title,
    headline=_findings,
    figures=(Drawn(key="comparison", title="The arms", make=_comparison, data=lambda run: run.tables["bands"]),),
    tables=(
        Listed(key="final-table", title="Final losses", make=_final_table),
        Listed(key="measure-table", title="The chain at the end", make=_measure_table),
    ),
)

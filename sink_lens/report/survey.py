"""Surveys of models, trained and not: token preference, contraction and variance calibration, figures and pages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report.page import Drawn, Listed, Page, PageTable, more, shown_table, whole
from sink_lens.report.style import COLOURS, GRID, INK, MARKS, QUIET, canvas, finished, legend, logarithmic, panel
from sink_lens.text import number, plural, token, visible, words

MOST_VARIANTS = 10
"""More variants than these are not drawn."""
_DASHES = ("-", "--", ":")
_WORDS = {"attention=False": "no attention", "mlp=False": "no MLP", "gated=False": "no gate"}
"""Field of an untrained model -> what a legend says."""


def variants_of(table: pd.DataFrame) -> list[str]:
    """The variants in their order, as many as a figure holds."""
    return [str(variant) for variant in dict.fromkeys(table["variant"].tolist())][:MOST_VARIANTS]


def name_of(variant: str, *, among: Sequence[str]) -> str:
    """A variant's name as a legend has it: what it does not share with all others, in words where there are some."""
    shared = set.intersection(*(set(other.split(",")) for other in among)) if len(among) > 1 else set()
    own = [
        _WORDS.get(part.strip(), part.strip().removeprefix("activation="))
        for part in variant.split(",")
        if part not in shared
    ]
    return visible(", ".join(part for part in own if part) or "as it is", limit=44, counted=False)


def styles(variants: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Variant -> its colour, mark and dash."""
    return {
        variant: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKS[index % len(MARKS)],
            "linestyle": _DASHES[index // len(COLOURS) % len(_DASHES)],
        }
        for index, variant in enumerate(variants)
    }


def coverage(table: pd.DataFrame) -> Figure:
    """The share of the predictions that the most frequent tokens cover, and chance: argmax left, argmin right."""
    variants = variants_of(table)
    figure = canvas(width=9.0, height=3.6)
    for place, kind in enumerate(("argmax", "argmin"), start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="most frequent tokens", ylabel=f"share of the {kind}")
        rows = table.loc[table["kind"] == kind]
        chance: Any = rows.groupby("tokens")[["null", "null_low", "null_high"]].mean()
        chance = chance.reset_index()
        x = chance["tokens"].to_numpy(float)
        axes.fill_between(
            x,
            chance["null_low"].to_numpy(float),
            chance["null_high"].to_numpy(float),
            color=QUIET,
            alpha=0.3,
            linewidth=0,
        )
        axes.plot(x, chance["null"], color=INK, linestyle=":", linewidth=1.4, label="chance")
        for variant, style in styles(variants).items():
            lines = list(rows.loc[rows["variant"] == variant].groupby("model", sort=False))
            for index, (_, one) in enumerate(lines):
                label = name_of(variant, among=variants) if index == len(lines) - 1 else None
                fade = (index + 1) / len(lines) if bool(one["step"].notna().any()) else 1 / len(lines) ** 0.5
                axes.plot(one["tokens"], one["share"], label=label, alpha=fade, linewidth=1.4,
                          color=style["color"], linestyle=style["linestyle"])  # fmt: skip
        axes.axhline(0.8, color=GRID, linewidth=1)
        logarithmic(axes, axis="x")
        axes.set_ylim(0, 1.02)
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def dots(
    variants: pd.DataFrame, summary: pd.DataFrame, measures: Sequence[tuple[str, str, bool]], *, zero: bool = True
) -> Figure:
    """Each variant a line, a panel a measure: every seed a dot, the mean and its interval over seeds a bar.

    Args:
        variants: measure, variant, mean, low, high.
        summary: measure, variant, value and, where there is one, null_low and null_high.
        measures: of the panels: name, label, whether the scale is logarithmic.
        zero: draw a line at 0 where the scale is not logarithmic.

    Raises:
        RunError: there is nothing to draw.
    """
    names = variants_of(variants)
    if not names:
        raise RunError("this figure needs models that are no checkpoints; there is none.")
    figure = canvas(width=9.2, height=1.1 + 0.3 * len(names))
    for place, (measure, label, log) in enumerate(measures, start=1):
        axes = panel(figure, place=(1, len(measures), place), xlabel=label)
        of_models, of_variants = (
            summary.loc[summary["measure"] == measure],
            variants.loc[variants["measure"] == measure],
        )
        for line, (variant, style) in enumerate(styles(names).items()):
            values = of_models.loc[of_models["variant"] == variant, "value"].to_numpy(float)
            axes.scatter(values, np.full(len(values), line + 0.16), color=style["color"], s=12, alpha=0.6)
            for row in of_variants.loc[of_variants["variant"] == variant].to_dict("records"):
                axes.plot([row["low"], row["high"]], [line, line], color=INK, linewidth=1.6)
                axes.plot([row["mean"]], [line], color=style["color"], marker=style["marker"], markersize=6)
        if "null_high" in of_models.columns and len(of_models):
            low, high = of_models["null_low"].to_numpy(float).min(), of_models["null_high"].to_numpy(float).max()
            axes.axvspan(low, high, color=QUIET, alpha=0.25, linewidth=0)
        if log:
            logarithmic(axes, axis="x")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=max(2, 9 // len(measures))))
        if zero and not log:
            axes.axvline(0, color=QUIET, linewidth=0.9)
        shown = [name_of(variant, among=names) for variant in names] if place == 1 else [""] * len(names)
        axes.set_yticks(range(len(names)), shown)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
    return finished(figure)


def along(summary: pd.DataFrame, measures: Sequence[tuple[str, str, bool]]) -> Figure:
    """Checkpoints: a panel a measure, a line a training, against its steps."""
    rows = summary.loc[summary["step"].notna()]
    if not len(rows):
        raise RunError("this figure needs the checkpoints of a training; there is none.")
    figure = canvas(width=9.2, height=2.9 * -(-len(measures) // 3))
    variants = variants_of(rows)
    for place, (measure, label, log) in enumerate(measures, start=1):
        axes = panel(figure, place=(-(-len(measures) // 3), min(3, len(measures)), place), xlabel="step", ylabel=label)
        of_measure = rows.loc[rows["measure"] == measure]
        for variant, style in styles(variants).items():
            one = of_measure.loc[of_measure["variant"] == variant].sort_values("step")
            axes.plot(
                steps(one),
                one["value"].to_numpy(float),
                markersize=4,
                linewidth=1.4,
                label=name_of(variant, among=variants),
                **style,
            )
        step_axis(axes)
        if log:
            logarithmic(axes, axis="y")
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def steps(rows: pd.DataFrame) -> np.ndarray:
    """Steps on a logarithmic axis, the first one at a half."""
    return np.maximum(rows["step"].to_numpy(float), 0.5)


def step_axis(axes: Axes) -> None:
    """Steps from 0 on a logarithmic scale."""
    logarithmic(axes, axis="x")
    high = axes.get_xlim()[1]
    ticks = [0.5, *(10**power for power in range(8) if 10**power <= high)]
    axes.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
    axes.set_xticks([], minor=True)


def by_layer(layers: pd.DataFrame) -> Figure:
    """The excess of both cosines after each sublayer: the mean over seeds, and from the smallest to the largest."""
    layers = _ends(layers)
    variants = variants_of(layers)
    figure = canvas(width=9.2, height=3.7)
    for place, (measure, label) in enumerate((("inter", "between sequences"), ("intra", "between positions")), start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="layer", ylabel=f"excess cosine {label}")
        rows = layers.loc[layers["measure"] == measure]
        for variant, style in styles(variants).items():
            one = rows.loc[rows["variant"] == variant]
            one = one.assign(depth=depth(one))
            found = one.groupby("depth")["excess"].agg(["mean", "min", "max"]).reset_index()
            x = found["depth"].to_numpy(float)
            axes.fill_between(
                x,
                found["min"].to_numpy(float),
                found["max"].to_numpy(float),
                color=style["color"],
                alpha=0.2,
                linewidth=0,
            )
            axes.plot(x, found["mean"], color=style["color"], linestyle=style["linestyle"], linewidth=1.5,
                      marker=".", markersize=4, label=name_of(variant, among=variants))  # fmt: skip
        axes.axhline(0, color=QUIET, linewidth=0.9)
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def _ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep the first and last checkpoint of each training as separate variants, and all other models."""
    step = rows["step"].to_numpy(float)
    if np.isnan(step).all():
        return rows
    by_variant = rows.assign(step=step).groupby("variant")["step"]
    low, high = (by_variant.transform(name).to_numpy(dtype=float) for name in ("min", "max"))
    kept = np.isnan(step) | (step == low) | (step == high)
    names = [
        variant if np.isnan(one) else f"{variant} step {one:.0f}"
        for variant, one in zip(rows["variant"], step, strict=True)
    ]
    return rows.assign(variant=names).loc[kept]


def depth(rows: pd.DataFrame) -> np.ndarray:
    """Where a place stands: layer + 0.5 after its attention, + 1 after its MLP; 0 before the first layer."""
    after = {"embedding": 1.0, "attention": 0.5, "mlp": 1.0, "final": 0.5}
    return rows["layer"].to_numpy(float) + np.array([after[str(place)] for place in rows["stage"].tolist()])


def by_position(positions: pd.DataFrame) -> Figure:
    """The excess between sequences by position after the last layer, and the norm there over that of position 0."""
    positions = _ends(positions)
    variants = variants_of(positions)
    figure = canvas(width=9.2, height=3.5)
    quantities = (("excess", "excess cosine between sequences"), ("norm", "norm ÷ that of position 0"))
    for place, (quantity, label) in enumerate(quantities, start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="position", ylabel=label)
        for variant, style in styles(variants).items():
            rows = positions.loc[(positions["variant"] == variant) & (positions["stage"] == "mlp")]
            rows = rows.loc[rows["layer"] == rows["layer"].to_numpy(float).max()]
            means: Any = rows.groupby("position")[quantity].mean()
            found = means.reset_index()
            values = found[quantity].to_numpy(float) / (
                found[quantity].to_numpy(float)[0] if quantity == "norm" else 1.0
            )
            axes.plot(found["position"].to_numpy(float) + 1, values, markersize=4, linewidth=1.4,
                      label=name_of(variant, among=variants), **style)  # fmt: skip
        logarithmic(axes, axis="x")
        last = int(positions["position"].to_numpy(float).max())
        ticks = [0, *(4**power for power in range(9) if 4**power < last / 1.5), last]
        axes.set_xticks([tick + 1 for tick in ticks], [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.axhline(1.0 if quantity == "norm" else 0.0, color=QUIET, linewidth=0.9)
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def agreement(pairs: pd.DataFrame, models: pd.DataFrame) -> Figure:
    """The cosine of the directions of two models: the same seed in two variants, two seeds of one variant, neither."""
    facts = {row["model"]: row for row in models.to_dict("records")}
    groups: dict[str, list[float]] = {}
    for row in pairs.loc[pairs["stage"] == "last"].to_dict("records"):
        if not {row["a"], row["b"]} <= set(facts):
            continue
        groups.setdefault(relation(facts[row["a"]], facts[row["b"]]), []).append(float(row["cosine"]))
    if not groups:
        raise RunError("this figure needs two models of one width; there are none.")
    figure = canvas(width=7.6, height=1.2 + 0.45 * len(groups))
    axes = panel(figure, xlabel="cosine of the contraction directions after the last layer")
    chance = pairs["chance"].to_numpy(float).max()
    axes.axvspan(-2 * chance, 2 * chance, color=QUIET, alpha=0.25, linewidth=0)
    for line, values in enumerate(groups.values()):
        offsets = np.linspace(-0.22, 0.22, len(values)) if len(values) > 1 else np.zeros(1)
        axes.scatter(values, line + offsets, color=COLOURS[line % len(COLOURS)], s=14, alpha=0.7)
        axes.plot([np.mean(values)], [line], color=INK, marker="|", markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(groups)), [f"{group} ({len(values)})" for group, values in groups.items()])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return finished(figure)


def direction_course(pairs: pd.DataFrame, models: pd.DataFrame) -> Figure:
    """The cosine of each checkpoint's direction with that of the training's first one, after the last layer."""
    steps_of = {row["model"]: (row["variant"], row["step"]) for row in models.to_dict("records")}
    first = {
        model
        for model, (variant, step) in steps_of.items()
        if step == min(s for a, s in steps_of.values() if a == variant)
    }
    rows = [
        {"variant": steps_of[row["b"]][0], "step": steps_of[row["b"]][1], "cosine": row["cosine"]}
        for row in pairs.loc[pairs["stage"] == "last"].to_dict("records")
        if row["a"] in first and steps_of[row["a"]][0] == steps_of[row["b"]][0]
    ]
    if not rows:
        raise RunError("this figure needs two checkpoints of one training; there are none.")
    frame = pd.DataFrame(rows)
    variants = variants_of(frame)
    figure = canvas(width=6.4, height=3.2)
    axes = panel(figure, xlabel="step", ylabel="cosine with the first checkpoint's")
    chance = pairs["chance"].to_numpy(float).max()
    axes.axhspan(-2 * chance, 2 * chance, color=QUIET, alpha=0.25, linewidth=0)
    for variant, style in styles(variants).items():
        one = frame.loc[frame["variant"] == variant].sort_values("step")
        label = name_of(variant, among=variants)
        axes.plot(steps(one), one["cosine"], markersize=4, linewidth=1.4, label=label, **style)
    step_axis(axes)
    axes.set_ylim(top=1.03)
    legend(axes, columns=3)
    return finished(figure)


def relation(a: dict[Any, Any], b: dict[Any, Any]) -> str:
    """Say what two models have in common."""
    same_seed = a["seed"] == b["seed"]
    if a["variant"] == b["variant"]:
        return "one training, two steps" if same_seed else "one variant, two seeds"
    if same_seed:
        return "two variants, one seed"
    return "two variants, two seeds"


def interval_text(mean: float, low: float, high: float) -> str:
    """A mean and its interval, as a table has it."""
    if np.isnan(low) or np.isnan(high):
        return number(mean)
    return f"{number(mean)} ({number(low)} to {number(high)})"


_SUMMARY = ("model", "variant", "seed", "step", "measure", "value")
_VARIANTS = ("measure", "variant", "n", "mean", "low", "high")
_MOST_SAID = 8
_MOST_VARIANTS = 4


def variant_rows(
    variants: pd.DataFrame, summary: pd.DataFrame, *, measures: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """A line a variant (the mean, and half of its interval over seeds) or a checkpoint: its name, a text a measure."""
    among = list(dict.fromkeys(variants["variant"].tolist()))
    label = "calibration" if "calibration" in variants.columns else "variant"
    grouped: Any = variants.groupby(["variant", label], sort=False) if len(variants) else ()
    for (variant, kind), rows in grouped:
        found = {row["measure"]: _plus_minus(row) for row in rows.to_dict("records")}
        name = name_of(str(variant), among=among)
        name = str(kind) if len(among) == 1 and kind != variant else name if kind == variant else f"{name}, {kind}"
        yield name, [found.get(one, "") for one in measures]
    for model, rows in summary.loc[summary["step"].notna()].groupby("model", sort=False):
        values = dict(zip(rows["measure"].tolist(), rows["value"].to_numpy(float).tolist(), strict=True))
        yield str(model), [number(values[one]) if one in values else "" for one in measures]


def _plus_minus(row: dict) -> str:
    """A mean, and half of its interval, which is as wide on either side; with decimals below 10."""
    mean, half = float(row["mean"]), (float(row["high"]) - float(row["low"])) / 2
    places = 3 if abs(mean) < 10 else 0
    text = f"{mean:,.{places}f}".replace("-", "−")
    return text if np.isnan(half) else f"{text} ±{half:,.{max(places - 1, 0)}f}".replace("±0.", "±.")


def _unsaid(variants: Sequence[str]) -> list[str]:
    """That there are more variants than are said in words."""
    rest = len(variants) - _MOST_VARIANTS
    return [f"{plural(rest, 'more variant')}: see the figures and tables below."] if rest > 0 else []


def _sets(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    return run.need("arms", columns=_VARIANTS), run.need("summary", columns=_SUMMARY)


def _variant_table(run: Run) -> tuple[str, PageTable]:
    variants = run.need("arms", columns=_VARIANTS)
    among = list(dict.fromkeys(variants["variant"].tolist()))
    heads = {"variant": "model", "calibration": "calibration", "measure": "measure", "n": "seeds", "mean": "mean"}
    heads |= {"low": "95% from", "high": "to", "difference": "− first", "difference_low": "95% from"}
    heads |= {"difference_high": "to "}
    see = "Means and 95% t intervals over seeds, and the difference to the first line of its kind, paired by seed."
    shown = variants.assign(
        variant=[name_of(variant, among=among) for variant in variants["variant"].tolist()],
        measure=[words(str(name)) for name in variants["measure"]],
    )
    return see + more(len(variants), "variants", most=200), shown_table(shown, heads, most=200)


def _mean(variants: pd.DataFrame, variant: str, measure: str) -> dict[str, float]:
    rows = variants.loc[(variants["variant"] == variant) & (variants["measure"] == measure)].to_dict("records")
    return {str(name): value for name, value in rows[0].items()} if rows else {}


def _words(row: dict[str, float]) -> str:
    return interval_text(float(row["mean"]), float(row["low"]), float(row["high"])) if row else "not measured"


def _short(frame: pd.DataFrame) -> pd.DataFrame:
    """The models under their short names."""
    among = list(dict.fromkeys(frame["variant"].tolist()))
    pairs = zip(frame["model"].tolist(), frame["variant"].tolist(), strict=True)
    return frame.assign(model=[model.replace(variant, name_of(variant, among=among), 1) for model, variant in pairs])


def shared(variants: Sequence[str]) -> list[str]:
    """Say what all variants have in common, which their short names leave out."""
    parts = [variant.split(",") for variant in dict.fromkeys(variants)]
    shared = [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 1 else []
    return [f"All models: {', '.join(shared)}."] if shared else []


def _seeds(measures: Sequence[tuple[str, str, bool]]) -> Callable[[Run], pd.DataFrame]:
    """Every model's value of some measures: the dots of a figure."""
    return lambda run: _of(run, measures)


def _steps(measures: Sequence[tuple[str, str, bool]]) -> Callable[[Run], pd.DataFrame]:
    """The same of the checkpoints."""
    return lambda run: _of(run, measures).dropna(subset=["step"])


def _of(run: Run, measures: Sequence[tuple[str, str, bool]]) -> pd.DataFrame:
    summary = run.need("summary", columns=_SUMMARY)
    return summary.loc[summary["measure"].isin([name for name, *_ in measures])]


# --- preference

_PREFERRED = (
    ("argmax_top_ratio", "top argmax, times chance", True),
    ("argmin_top_ratio", "top argmin, times chance", True),
    ("mean_probability_ratio", "top mean probability × vocabulary", True),
)


def _preference_title(run: Run) -> str:
    summary = run.need("summary", columns=[*_SUMMARY, "null_high"])
    rows = summary.loc[summary["measure"] == "argmax_top_ratio"]
    over = int((rows["value"].to_numpy(float) > rows["null_high"].to_numpy(float)).sum())
    if len(rows) == 1:
        ratio, most = (number(float(rows[name].iloc[0])) for name in ("value", "null_high"))
        how = "more often than" if over else "no more often than"
        return (
            f"The model predicts one token {how} chance would: {ratio} times as often as the average token (chance: up "
            f"to {most})"
        )
    strongest = rows.loc[[rows["value"].idxmax()]]
    ratio, most = (number(float(strongest[name].iloc[0])) for name in ("value", "null_high"))
    return (
        f"{over} of {len(rows)} models predict one token more often than chance would: up to {ratio} times as often "
        f"as the average token (chance: up to {most})"
    )


def _preference_headline(run: Run) -> list[str]:
    summary = run.need("summary", columns=[*_SUMMARY, "null", "null_high"])
    variants = list(dict.fromkeys(summary["variant"].tolist()))
    said = shared(variants)
    for variant in variants[:_MOST_VARIANTS]:
        rows = summary.loc[summary["variant"] == variant]
        models = list(dict.fromkeys(rows["model"].tolist()))
        if bool(rows["step"].notna().any()):
            said += [_preferred(rows.loc[rows["model"] == model], str(model)) for model in (models[0], models[-1])]
        else:
            said.append(_preferred(rows, name_of(str(variant), among=variants)))
    return [*said, *_unsaid(variants)]


def _preferred(rows: pd.DataFrame, name: str) -> str:
    """The sentence of a variant, or of a checkpoint."""

    def mean(measure: str, column: str = "value") -> str:
        return number(round(float(rows.loc[rows["measure"] == measure][column].to_numpy(float).mean()), 1))

    return (
        f"{name}: the most frequent prediction comes {mean('argmax_top_ratio')} times as often as the average token "
        f"(by chance {mean('argmax_top_ratio', 'null')}, at most {mean('argmax_top_ratio', 'null_high')} in 95%); "
        f"{mean('argmax_covering')} tokens cover 80% of the predictions (by chance {mean('argmax_covering', 'null')}); "
        f"the token most often ranked last comes last {mean('argmin_top_ratio')} times as often as the average token."
    )


def _coverage(run: Run) -> tuple[str, Figure]:
    table = run.need("coverage", columns=["model", "variant", "step", "kind", "tokens", "share", "null"])
    see = (
        "How much of the predictions the most frequent tokens take; dotted is chance (as many draws from all tokens "
        "alike), grey its 95% band. A line above the band is a preference. Later checkpoints are darker."
    )
    return see, coverage(table)


def _preference_dots(run: Run) -> tuple[str, Figure]:
    variants, summary = _sets(run)
    see = (
        "Every dot is a seed, the bar the mean over seeds with its 95% interval; the grey band is chance: the "
        "multinomial for the counts, shifted vocabularies for the probability."
    )
    return see, dots(variants, summary, _PREFERRED)


def _preference_course(run: Run) -> tuple[str, Figure]:
    return "Preference along training.", along(run.need("summary", columns=_SUMMARY), _PREFERRED)


def _tokens(run: Run) -> tuple[str, PageTable]:
    table = run.need(
        "tokens", columns=["model", "variant", "kind", "token", "text", "count", "share", "probability_ratio"]
    )
    first = table.groupby(["model", "kind"], sort=False).head(3)
    first = _short(first).assign(text=[token(text) for text in first["text"].tolist()])
    heads = {"model": "model", "kind": "kind", "token": "id", "text": "token", "count": "times", "share": "share"}
    heads |= {"probability_ratio": "mean probability × vocabulary"}
    see = "The three most frequent tokens of each model; twenty are in tokens.parquet."
    return see + more(len(first), "tokens", most=60), shown_table(first, heads, most=60)


def _has_steps(run: Run) -> bool:
    return "summary" in run.tables and bool(run.tables["summary"]["step"].notna().any())


def _has_variants(run: Run) -> bool:
    return "arms" in run.tables and len(run.tables["arms"]) > 0


# --- contraction

_EXCESS = (
    ("inter_excess", "excess between sequences", False),
    ("inter_by_attention", "… gained at attention", False),
    ("inter_by_mlp", "… gained at MLPs", False),
)
_INTRA = (
    ("intra_excess", "excess between positions", False),
    ("intra_by_attention", "… gained at attention", False),
    ("intra_by_mlp", "… gained at MLPs", False),
)
_BESIDE = (
    ("inter_excess", "excess between sequences", False),
    ("intra_excess", "excess between positions", False),
    ("discrepancy", "last position − first", False),
    ("sink_mass", "attention to position 0", False),
    ("s2_ratio", "S2: first token ÷ others", True),
    ("dominance_ratio", "dominance ratio", True),
)


def _contraction_title(run: Run) -> str:
    variants, summary = _sets(run)
    if not len(variants):
        rows = summary.loc[summary["measure"] == "inter_excess"].drop_duplicates("variant")
        return f"The contraction of {plural(len(rows), 'training')}, checkpoint by checkpoint"
    rows = variants.loc[variants["measure"] == "inter_excess"].sort_values("mean", ascending=False)
    names = variants_of(variants)
    best = rows.to_dict("records")[0]
    name = visible(name_of(str(best["variant"]), among=names) if len(names) > 1 else names[0].split(",")[0])
    found = _words({str(key): value for key, value in best.items()})
    cosine = f"the cosine between two sequences' states rises by {found} through the layers"
    if float(best["low"]) > 0:
        return f"{name} makes different sequences {'most' if len(rows) > 1 else 'more'} alike: {cosine}"
    if len(rows) > 1:
        return f"No model is shown to make different sequences alike: {cosine} at most, in {name}"
    return f"{name} is not shown to make different sequences alike: {cosine}"


def _contraction_headline(run: Run) -> list[str]:
    variants, summary = _sets(run)
    names = variants_of(variants)
    said = shared(names) if names else []
    for variant in names[:_MOST_VARIANTS]:
        found = {
            name: _mean(variants, variant, name)
            for name in ("inter_floor", "inter_excess", "intra_excess", "discrepancy")
        }
        said.append(
            f"{name_of(variant, among=names)}: the cosine between sequences changes by {_words(found['inter_excess'])} "
            f"from {number(float(found['inter_floor']['mean']))}, that between positions by "
            f"{_words(found['intra_excess'])}; at the last position by {_words(found['discrepancy'])} more than at "
            "position 0."
        )
    said += _unsaid(names)
    courses = summary.loc[summary["step"].notna()]
    for variant, rows in list(courses.loc[courses["measure"] == "inter_excess"].groupby("variant", sort=False))[
        :_MOST_SAID
    ]:
        value, step = rows["value"].to_numpy(float), rows["step"].to_numpy(float)
        most = int(np.argmax(value))
        said.append(
            f"{variant}: between sequences {number(value[0])} above the floor at step {step[0]:.0f}, at most "
            f"{number(value[most])} (step {step[most]:.0f}), {number(value[-1])} at step {step[-1]:.0f}."
        )
    pairs = run.need("agreement", columns=["a", "b", "stage", "cosine", "chance"])
    models = {row["model"]: row for row in run.need("models", columns=["model", "variant", "seed"]).to_dict("records")}
    apart = [
        abs(row["cosine"])
        for row in pairs.loc[pairs["stage"] == "last"].to_dict("records")
        if models[row["a"]]["seed"] != models[row["b"]]["seed"]
    ]
    if apart:
        said.append(
            f"The directions of {plural(len(apart), 'pair')} of models of different seeds have a cosine of at most "
            f"{number(max(apart))} (two random directions: {number(2 * pairs['chance'].to_numpy(float).max())} in 95%)."
        )
    return said


def _by_layer(run: Run) -> tuple[str, Figure]:
    layers = run.need("layers", columns=["variant", "layer", "stage", "measure", "excess"])
    see = (
        "Left: the mean cosine of the last positions of two sequences, over its value before the first layer. Right: "
        "that of two positions of one sequence. Two points a layer: after its attention and after its MLP; the last "
        "point is after the final norm."
    )
    return see, by_layer(layers)


def _contraction_dots(run: Run) -> tuple[str, Figure]:
    see = (
        "Every dot is a seed, the bar the mean with its 95% interval. Attention's and MLPs' gains add up to the excess."
    )
    return see, dots(*_sets(run), _EXCESS)


def _intra_dots(run: Run) -> tuple[str, Figure]:
    return "The same between the positions of one sequence.", dots(*_sets(run), _INTRA)


def _positions(run: Run) -> tuple[str, Figure]:
    table = run.need("positions", columns=["variant", "step", "layer", "stage", "position", "excess", "norm"])
    see = (
        "Left: how alike sequences are at each position after the last layer. Position 0 averages "
        "nothing; its difference to the last position is the positional discrepancy. Right: the norm of the states."
    )
    return see, by_position(table)


def _agreement(run: Run) -> tuple[str, Figure]:
    pairs = run.need("agreement", columns=["a", "b", "stage", "cosine", "chance"])
    see = "The grey band is what two random directions have (twice the standard deviation); bars are means."
    return see, agreement(pairs, run.need("models", columns=["model", "variant", "seed"]))


def _direction_course(run: Run) -> tuple[str, Figure]:
    pairs = run.need("agreement", columns=["a", "b", "stage", "cosine", "chance"])
    see = "How much of the first checkpoint's contraction direction is left; grey is what random directions share."
    return see, direction_course(pairs, run.need("models", columns=["model", "variant", "step"]))


def _contraction_course(run: Run) -> tuple[str, Figure]:
    see = "The contraction and its difference between positions, beside the sink measures of the same checkpoints."
    return see, along(run.need("summary", columns=_SUMMARY), _BESIDE)


def _beside(run: Run) -> tuple[str, PageTable]:
    summary = run.need("summary", columns=_SUMMARY)
    wide = _short(summary).pivot_table(index="model", columns="measure", values="value", sort=False).reset_index()
    heads = {"model": "model", "discrepancy": "last − first", "inter_excess": "inter", "intra_excess": "intra"}
    heads |= {"sink_mass": "sink mass", "uniform_mass": "uniform", "sink_rate": "sink rate", "s2_ratio": "S2 ratio"}
    heads |= {"norm_ratio": "norm ratio", "dominance_ratio": "dominance"}
    see = "The positional discrepancy beside the sink measures at position 0; uniform: the mass under equal attention."
    return see + more(len(wide), "summary", most=60), shown_table(wide, heads, most=60)


def _alignment(run: Run) -> tuple[str, PageTable]:
    table = run.need("alignment", columns=["model", "variant", "what", "which", "cosine", "rank", "of", "event_frac"])
    heads = {"model": "model", "what": "the direction beside", "which": "which", "cosine": "cosine", "rank": "rank"}
    heads |= {"of": "of", "event_frac": "share of predictions"}
    see = (
        "The contraction direction beside the unembedding of the preferred tokens, and beside the first token's "
        "largest dimension. Rank 1: none is more aligned."
    )
    return see + more(len(table), "alignment", most=60), shown_table(_short(table), heads, most=60)


# --- calibration

_CALIBRATED = (
    ("inter_excess", "excess between sequences", False),
    ("discrepancy", "last position − first", False),
    ("argmax_top_share", "top argmax", False),
    ("sink_mass", "attention to position 0", False),
    ("loss", "loss, nats", False),
)


def _calibration_title(run: Run) -> str:
    title = "What variance calibration does to contraction, preference, sink and loss"
    said = _calibration_headline(run)
    return said[0].rstrip(".") if said else title


def _calibration_headline(run: Run) -> list[str]:
    variants = run.need("arms", columns=[*_VARIANTS, "calibration", "difference"])
    said = []
    grouped: Any = variants.groupby(["variant", "calibration"], sort=False)
    for (variant, name), rows in grouped:
        found = {row["measure"]: row for row in rows.to_dict("records")}
        if name == "none":
            continue
        parts = [
            f"{label} {_change(found[measure])}"
            for measure, label in (("inter_excess", "contraction"), ("sink_mass", "sink mass"), ("loss", "loss"))
            if measure in found
        ]
        among = list(dict.fromkeys(variants["variant"].tolist()))
        said.append(f"{name_of(str(variant), among=among)}: {name} against none: {'; '.join(parts)}.")
    return said[:_MOST_SAID]


def _change(row: dict) -> str:
    return interval_text(*(float(row[f"difference{end}"]) for end in ("", "_low", "_high")))


def _calibration_dots(run: Run) -> tuple[str, Figure]:
    variants, summary = _sets(run)
    both = [frame.assign(variant=frame["variant"] + ", " + frame["calibration"]) for frame in (variants, summary)]
    see = "Every dot is a seed. The first line is the model as it is."
    return see, dots(both[0], both[1], _CALIBRATED, zero=False)


_VARIANTS_LISTED = Listed(key="arms", title="Over seeds", make=_variant_table, when=_has_variants)

PREFERENCE = Page(
    title=_preference_title,
    headline=_preference_headline,
    figures=(
        Drawn(key="coverage", title="Do few tokens take most predictions?", make=_coverage, data=whole("coverage")),
        Drawn(
            key="preference-variants",
            title="How strongly?",
            make=_preference_dots,
            data=_seeds(_PREFERRED),
            when=_has_variants,
        ),
        Drawn(
            key="preference-course",
            title="Along training",
            make=_preference_course,
            data=_steps(_PREFERRED),
            when=_has_steps,
        ),
    ),
    tables=(Listed(key="tokens", title="Preferred tokens", make=_tokens), _VARIANTS_LISTED),
)
"""The page of a run of kind "preference"."""

CONTRACTION = Page(
    title=_contraction_title,
    headline=_contraction_headline,
    figures=(
        Drawn(key="by-layer", title="Where do states become alike?", make=_by_layer, data=whole("layers")),
        Drawn(
            key="contraction-variants",
            title="What makes sequences alike?",
            make=_contraction_dots,
            data=_seeds(_EXCESS),
            when=_has_variants,
        ),
        Drawn(
            key="intra-variants",
            title="What makes positions alike?",
            make=_intra_dots,
            data=_seeds(_INTRA),
            when=_has_variants,
        ),
        Drawn(key="positions", title="Does it depend on the position?", make=_positions, data=whole("positions")),
        Drawn(key="agreement", title="Does the seed set the direction?", make=_agreement, data=whole("agreement")),
        Drawn(
            key="direction-course",
            title="Does the direction last?",
            make=_direction_course,
            data=whole("agreement"),
            when=_has_steps,
        ),
        Drawn(
            key="contraction-course",
            title="Along training",
            make=_contraction_course,
            data=_steps(_BESIDE),
            when=_has_steps,
        ),
    ),
    tables=(
        Listed(key="beside", title="Contraction beside the sink", make=_beside),
        Listed(key="alignment", title="What the direction points at", make=_alignment),
        _VARIANTS_LISTED,
    ),
)
"""The page of a run of kind "contraction"."""

CALIBRATION = Page(
    title=_calibration_title,
    headline=_calibration_headline,
    figures=(
        Drawn(key="calibrations", title="What each calibration does", make=_calibration_dots, data=_seeds(_CALIBRATED)),
    ),
    tables=(_VARIANTS_LISTED,),
)
"""The page of a run of kind "calibration"."""

"""The pages of surveys: token preference, contraction, and variance calibration at initialisation."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.records import Run
from sink_lens.report import identity_figures as figures
from sink_lens.report.columns import floats, named, need, select
from sink_lens.report.identity_figures import interval_text, name_of
from sink_lens.report.pages import Drawn, Listed, Page
from sink_lens.report.tables import Table, more, shown_table
from sink_lens.report.words import number, plural, token

_SUMMARY = ("model", "arm", "seed", "step", "measure", "value")
_ARMS = ("measure", "arm", "n", "mean", "low", "high")
_MOST_SAID = 8


def arm_rows(arms: pd.DataFrame, summary: pd.DataFrame, *, measures: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """A line an arm (the mean, and half of its interval over seeds) or a checkpoint: its name, and a text a measure."""
    among = list(dict.fromkeys(arms["arm"].tolist()))
    label = "calibration" if "calibration" in arms.columns else "arm"
    grouped: Any = arms.groupby(["arm", label], sort=False) if len(arms) else ()
    for (arm, kind), rows in grouped:
        found = {row["measure"]: _plus_minus(row) for row in rows.to_dict("records")}
        name = name_of(str(arm), among=among)
        name = str(kind) if len(among) == 1 and kind != arm else name if kind == arm else f"{name}, {kind}"
        yield name, [found.get(one, "") for one in measures]
    for model, rows in select(summary, summary["step"].notna().to_numpy(dtype=bool)).groupby("model", sort=False):
        values = dict(zip(rows["measure"].tolist(), floats(rows, "value").tolist(), strict=True))
        yield str(model), [number(values[one]) if one in values else "" for one in measures]


def _plus_minus(row: dict) -> str:
    """A mean, and half of its interval, which is as wide on either side; with decimals below 10."""
    mean, half = float(row["mean"]), (float(row["high"]) - float(row["low"])) / 2
    places = 3 if abs(mean) < 10 else 0
    text = f"{mean:,.{places}f}".replace("-", "−")
    return text if np.isnan(half) else f"{text} ±{half:,.{max(places - 1, 0)}f}".replace("±0.", "±.")


def _sets(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    return need(run, "arms", columns=_ARMS), need(run, "summary", columns=_SUMMARY)


def _arm_table(run: Run) -> tuple[str, Table]:
    arms = need(run, "arms", columns=_ARMS)
    among = list(dict.fromkeys(arms["arm"].tolist()))
    heads = {"arm": "model", "calibration": "calibration", "measure": "measure", "n": "seeds", "mean": "mean"}
    heads |= {"low": "95% from", "high": "to", "difference": "− first", "difference_low": "95% from"}
    heads |= {"difference_high": "to "}
    see = "Means and 95% t intervals over seeds, and the difference to the first line of its kind, paired by seed."
    shown = arms.assign(arm=[name_of(arm, among=among) for arm in arms["arm"].tolist()])
    return see + more(len(arms), "arms", most=200), shown_table(shown, heads, most=200)


def _mean(arms: pd.DataFrame, arm: str, measure: str) -> dict[str, float]:
    rows = named(named(arms, "arm", arm), "measure", measure).to_dict("records")
    return {str(name): value for name, value in rows[0].items()} if rows else {}


def _said(row: dict[str, float]) -> str:
    return interval_text(float(row["mean"]), float(row["low"]), float(row["high"])) if row else "not measured"


def _short(frame: pd.DataFrame) -> pd.DataFrame:
    """The models under their short names."""
    among = list(dict.fromkeys(frame["arm"].tolist()))
    pairs = zip(frame["model"].tolist(), frame["arm"].tolist(), strict=True)
    return frame.assign(model=[model.replace(arm, name_of(arm, among=among), 1) for model, arm in pairs])


def shared(arms: Sequence[str]) -> list[str]:
    """What all arms have in common, which their short names leave out."""
    parts = [arm.split(",") for arm in dict.fromkeys(arms)]
    shared = [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 1 else []
    return [f"All models: {', '.join(shared)}."] if shared else []


# --- preference

_PREFERRED = (
    ("argmax_top_ratio", "top argmax, times chance", True),
    ("argmin_top_ratio", "top argmin, times chance", True),
    ("mean_probability_ratio", "top mean probability × vocabulary", True),
)


def _preference_title(run: Run) -> str:
    summary = need(run, "summary", columns=[*_SUMMARY, "null_high"])
    rows = named(summary, "measure", "argmax_top_ratio")
    over = int((floats(rows, "value") > floats(rows, "null_high")).sum())
    return f"{over} of {plural(len(rows), 'model')} predict a token more often than chance would"


def _preference_headline(run: Run) -> list[str]:
    summary = need(run, "summary", columns=[*_SUMMARY, "null", "null_high"])
    arms = list(dict.fromkeys(summary["arm"].tolist()))
    said = shared(arms)
    for arm in arms[:_MOST_SAID]:
        rows = named(summary, "arm", arm)
        models = list(dict.fromkeys(rows["model"].tolist()))
        if bool(rows["step"].notna().any()):
            said += [_preferred(named(rows, "model", model), str(model)) for model in (models[0], models[-1])]
        else:
            said.append(_preferred(rows, name_of(str(arm), among=arms)))
    return said


def _preferred(rows: pd.DataFrame, name: str) -> str:
    """The sentence of an arm, or of a checkpoint."""

    def mean(measure: str, column: str = "value") -> str:
        return number(round(float(floats(named(rows, "measure", measure), column).mean()), 1))

    return (
        f"{name}: the most frequent prediction comes {mean('argmax_top_ratio')} times as often as one of all tokens "
        f"alike would (by chance the most frequent comes {mean('argmax_top_ratio', 'null')} times as often, at most "
        f"{mean('argmax_top_ratio', 'null_high')} in 95%), and {mean('argmax_covering')} tokens cover 80% of the "
        f"predictions (by chance {mean('argmax_covering', 'null')}). The most frequent least probable token: "
        f"{mean('argmin_top_ratio')} times."
    )


def _coverage(run: Run) -> tuple[str, Figure]:
    table = need(run, "coverage", columns=["model", "arm", "step", "kind", "tokens", "share", "null"])
    see = (
        "How much of the predictions the most frequent tokens take; grey is chance (as many draws from all tokens "
        "alike, with its 95% band). A line above the grey one is a preference. Later checkpoints are darker."
    )
    return see, figures.coverage(table)


def _preference_dots(run: Run) -> tuple[str, Figure]:
    arms, summary = _sets(run)
    see = (
        "Every dot is a seed, the bar the mean over seeds with its 95% interval; the grey band is chance: the "
        "multinomial for the counts, shifted vocabularies for the probability."
    )
    return see, figures.dots(arms, summary, _PREFERRED)


def _preference_course(run: Run) -> tuple[str, Figure]:
    return "Preference along training.", figures.along(need(run, "summary", columns=_SUMMARY), _PREFERRED)


def _tokens(run: Run) -> tuple[str, Table]:
    table = need(
        run, "tokens", columns=["model", "arm", "kind", "token", "text", "count", "share", "probability_ratio"]
    )
    first = table.groupby(["model", "kind"], sort=False).head(3)
    first = _short(first).assign(text=[token(text) for text in first["text"].tolist()])
    heads = {"model": "model", "kind": "kind", "token": "id", "text": "token", "count": "times", "share": "share"}
    heads |= {"probability_ratio": "mean probability × vocabulary"}
    see = "The three most frequent tokens of each model; twenty are in tokens.parquet."
    return see + more(len(first), "tokens", most=60), shown_table(first, heads, most=60)


def _has_steps(run: Run) -> bool:
    return "summary" in run.tables and bool(run.tables["summary"]["step"].notna().any())


def _has_arms(run: Run) -> bool:
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
    arms, summary = _sets(run)
    if not len(arms):
        rows = named(summary, "measure", "inter_excess").drop_duplicates("arm")
        return f"The contraction of {plural(len(rows), 'training')}, checkpoint by checkpoint"
    rows = named(arms, "measure", "inter_excess").sort_values("mean", ascending=False)
    names = figures.arms_of(arms)
    best = rows.to_dict("records")[0]
    most = " most" if len(rows) > 1 else ""
    name = name_of(str(best["arm"]), among=names)
    found = _said({str(key): value for key, value in best.items()})
    return f"{name} contracts{most}: cosine {found} over the floor"


def _contraction_headline(run: Run) -> list[str]:
    arms, summary = _sets(run)
    names = figures.arms_of(arms)
    said = shared(names) if names else []
    for arm in names[:_MOST_SAID]:
        found = {
            name: _mean(arms, arm, name) for name in ("inter_floor", "inter_excess", "intra_excess", "discrepancy")
        }
        said.append(
            f"{name_of(arm, among=names)}: between sequences {_said(found['inter_excess'])} over a floor of "
            f"{number(float(found['inter_floor']['mean']))}; between positions {_said(found['intra_excess'])}; the "
            f"last position's excess less that of position 0: {_said(found['discrepancy'])}."
        )
    courses = select(summary, summary["step"].notna().to_numpy(dtype=bool))
    for arm, rows in list(named(courses, "measure", "inter_excess").groupby("arm", sort=False))[:_MOST_SAID]:
        value, step = floats(rows, "value"), floats(rows, "step")
        most = int(np.argmax(value))
        said.append(
            f"{arm}: between sequences {number(value[0])} over the floor at step {step[0]:.0f}, at most "
            f"{number(value[most])} (step {step[most]:.0f}), {number(value[-1])} at step {step[-1]:.0f}."
        )
    pairs = need(run, "agreement", columns=["a", "b", "place", "cosine", "chance"])
    models = {row["model"]: row for row in need(run, "models", columns=["model", "arm", "seed"]).to_dict("records")}
    apart = [
        abs(row["cosine"])
        for row in named(pairs, "place", "last").to_dict("records")
        if models[row["a"]]["seed"] != models[row["b"]]["seed"]
    ]
    if apart:
        said.append(
            f"The directions of {plural(len(apart), 'pair')} of models of different seeds have a cosine of at most "
            f"{number(max(apart))} (two random directions: {number(2 * float(floats(pairs, 'chance').max()))} in 95%)."
        )
    return said


def _by_layer(run: Run) -> tuple[str, Figure]:
    layers = need(run, "layers", columns=["arm", "layer", "place", "measure", "excess"])
    see = (
        "Left: the mean cosine of the last positions of two sequences, over its value before the first layer. Right: "
        "that of two positions of one sequence. Two points a layer: after its attention and after its MLP; the last "
        "point is after the final norm."
    )
    return see, figures.by_layer(layers)


def _contraction_dots(run: Run) -> tuple[str, Figure]:
    see = (
        "Every dot is a seed, the bar the mean with its 95% interval. Attention's and MLPs' gains add up to the excess."
    )
    return see, figures.dots(*_sets(run), _EXCESS)


def _intra_dots(run: Run) -> tuple[str, Figure]:
    return "The same between the positions of one sequence.", figures.dots(*_sets(run), _INTRA)


def _positions(run: Run) -> tuple[str, Figure]:
    table = need(run, "positions", columns=["arm", "step", "layer", "place", "position", "excess", "norm"])
    see = (
        "Left: how alike sequences are at each position after the last layer. Position 0 averages "
        "nothing; its difference to the last position is the positional discrepancy. Right: the norm of the states."
    )
    return see, figures.by_position(table)


def _agreement(run: Run) -> tuple[str, Figure]:
    pairs = need(run, "agreement", columns=["a", "b", "place", "cosine", "chance"])
    see = "The grey band is what two random directions have (twice the standard deviation); bars are means."
    return see, figures.agreement(pairs, need(run, "models", columns=["model", "arm", "seed"]))


def _direction_course(run: Run) -> tuple[str, Figure]:
    pairs = need(run, "agreement", columns=["a", "b", "place", "cosine", "chance"])
    see = "How much of the first checkpoint's contraction direction is left; grey is what random directions share."
    return see, figures.direction_course(pairs, need(run, "models", columns=["model", "arm", "step"]))


def _contraction_course(run: Run) -> tuple[str, Figure]:
    see = "The contraction and its difference between positions, beside the sink measures of the same checkpoints."
    return see, figures.along(need(run, "summary", columns=_SUMMARY), _BESIDE)


def _beside(run: Run) -> tuple[str, Table]:
    summary = need(run, "summary", columns=_SUMMARY)
    wide = _short(summary).pivot_table(index="model", columns="measure", values="value", sort=False).reset_index()
    heads = {"model": "model", "discrepancy": "last − first", "inter_excess": "inter", "intra_excess": "intra"}
    heads |= {"sink_mass": "sink mass", "uniform_mass": "uniform", "sink_rate": "sink rate", "s2_ratio": "S2 ratio"}
    heads |= {"norm_ratio": "norm ratio", "dominance_ratio": "dominance"}
    see = "The positional discrepancy beside the sink measures at position 0; uniform: the mass under equal attention."
    return see + more(len(wide), "summary", most=60), shown_table(wide, heads, most=60)


def _alignment(run: Run) -> tuple[str, Table]:
    table = need(run, "alignment", columns=["model", "arm", "what", "which", "cosine", "rank", "of", "event_frac"])
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
    return "What variance calibration does to contraction, preference, sink and loss"


def _calibration_headline(run: Run) -> list[str]:
    arms = need(run, "arms", columns=[*_ARMS, "calibration", "difference"])
    said = []
    grouped: Any = arms.groupby(["arm", "calibration"], sort=False)
    for (arm, name), rows in grouped:
        found = {row["measure"]: row for row in rows.to_dict("records")}
        if name == "none":
            continue
        parts = [
            f"{label} {_change(found[measure])}"
            for measure, label in (("inter_excess", "contraction"), ("sink_mass", "sink mass"), ("loss", "loss"))
            if measure in found
        ]
        among = list(dict.fromkeys(arms["arm"].tolist()))
        said.append(f"{name_of(str(arm), among=among)}: {name} against none: {'; '.join(parts)}.")
    return said[:_MOST_SAID]


def _change(row: dict) -> str:
    return interval_text(*(float(row[f"difference{end}"]) for end in ("", "_low", "_high")))


def _calibration_dots(run: Run) -> tuple[str, Figure]:
    arms, summary = _sets(run)
    both = [frame.assign(arm=frame["arm"] + ", " + frame["calibration"]) for frame in (arms, summary)]
    see = "Every dot is a seed. The first line is the model as it is."
    return see, figures.dots(both[0], both[1], _CALIBRATED, zero=False)


_ARMS_LISTED = Listed(key="arms", title="Over seeds", make=_arm_table, when=_has_arms)

PREFERENCE = Page(
    title=_preference_title,
    headline=_preference_headline,
    figures=(
        Drawn(key="coverage", title="Do few tokens take most predictions?", make=_coverage),
        Drawn(key="preference-arms", title="How strongly?", make=_preference_dots, when=_has_arms),
        Drawn(key="preference-course", title="Along training", make=_preference_course, when=_has_steps),
    ),
    tables=(Listed(key="tokens", title="Preferred tokens", make=_tokens), _ARMS_LISTED),
)
"""The page of a run of kind "preference"."""

CONTRACTION = Page(
    title=_contraction_title,
    headline=_contraction_headline,
    figures=(
        Drawn(key="by-layer", title="Where do states become alike?", make=_by_layer),
        Drawn(key="contraction-arms", title="What makes sequences alike?", make=_contraction_dots, when=_has_arms),
        Drawn(key="intra-arms", title="What makes positions alike?", make=_intra_dots, when=_has_arms),
        Drawn(key="positions", title="Does it depend on the position?", make=_positions),
        Drawn(key="agreement", title="Does the seed set the direction?", make=_agreement),
        Drawn(key="direction-course", title="Does the direction last?", make=_direction_course, when=_has_steps),
        Drawn(key="contraction-course", title="Along training", make=_contraction_course, when=_has_steps),
    ),
    tables=(
        Listed(key="beside", title="Contraction beside the sink", make=_beside),
        Listed(key="alignment", title="What the direction points at", make=_alignment),
        _ARMS_LISTED,
    ),
)
"""The page of a run of kind "contraction"."""

CALIBRATION = Page(
    title=_calibration_title,
    headline=_calibration_headline,
    figures=(Drawn(key="calibrations", title="What each calibration does", make=_calibration_dots),),
    tables=(_ARMS_LISTED,),
)
"""The page of a run of kind "calibration"."""

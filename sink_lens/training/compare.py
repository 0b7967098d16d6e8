"""``compare``: variants of training runs, seed by seed: who is ahead, by how much, how sure, and its sink."""

import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..configuration import make_config
from ..errors import InputError, RunError
from ..records import (
    Result,
    check_folder_free,
    create_run,
    default_run_folder,
    package_versions,
    place_of_run,
)
from ..schema import MIN_SINK_RATE
from ..signatures import takes
from ..stats import ROUNDING, Difference, summarise_differences, t_intervals
from ..text import (
    as_text,
    interval_text,
    join_and,
    plural,
    short_count,
    signed_change,
)
from .config import CompareConfig
from .logged import LogComparison, are_logged, compare_logged
from .loss_curves import curve_table, final_table, mean_curve_table, seed_means
from .sink_birth import Birth, find_birth, whole_model_rows
from .variants import DATA, FEWEST_SEEDS, Variants, fields_in_words, group_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from ..report.page import PageTable


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Result):
    """Result of a comparison of training runs.

    Its tables are ``curves`` (every run's losses), ``bands`` (their means over seeds with intervals), ``finals`` (where
    every run ended and when it reached the baseline's end), ``differences`` (final losses paired by seed); where the
    runs were watched also ``measures`` (the last checkpoints side by side) and ``course`` (along training).
    """

    main = "differences"
    config: CompareConfig
    variants: Variants

    def notebook_parts(self) -> tuple[object, ...]:
        """Return what a notebook shows below the headline: the figure and the table ``differences``."""
        return self.figure(), self.frame.filter(
            items=("variant", "curve", "mean", "low", "high", "n")
        )

    def figure(self) -> "Figure":
        """Draw loss curves, differences to the baseline and the course of the sink, with one colour per variant."""
        from .pages.training import draw_comparison

        return draw_comparison(self.tables, variants=tuple(self.variants.runs))


@takes(CompareConfig, loads=True)
def compare(
    runs: Sequence[str | os.PathLike[str]],
    *,
    config: CompareConfig | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    generator: np.random.Generator | None = None,
    **fields: Any,
) -> Comparison | LogComparison:
    """Compare finished training runs that differ in one thing and in the seed, or the logs of your own Trainer.

    Args:
        runs: folders of training runs, which win over the configuration's; or of your own Trainer's (folders with a
            ``trainer_state.json``, or runs of the monitor), of which the logs are put beside each other.
        config: the defaults if None.
        out: the run folder; nothing is written if None.
        overwrite: replace the run that ``out`` holds.
        generator: random generator of the bootstrap; None makes one from the configuration's seed.
        **fields: of ``CompareConfig``; they win over ``config``.

    Raises:
        InputError, RunError: runs that cannot be compared, and why (see ``variants.group_runs``); a threshold that
            was not measured.
    """
    config = make_config(CompareConfig, config, {"runs": runs} | fields, where="compare")
    check_folder_free(out, overwrite=overwrite)
    if are_logged(config.runs):
        logged = compare_logged(config)
        with place_of_run(out, name="compare") as place:
            logged.write(place.folder, overwrite=overwrite)
        return replace(logged, folder=place.named, place=place)
    generator = np.random.default_rng(config.seed) if generator is None else generator
    variants = group_runs(config.runs, group_by=config.group_by, baseline=config.baseline)
    curves, finals = curve_table(variants), final_table(variants)
    notes, differences = list(variants.notes), []
    sentences, of_training = [_opening_sentence(variants, finals)], []
    for variant, curve in itertools.product(variants.others, finals["curve"].unique()):
        rows = _rows_of_curve(finals, variant, curve)
        one = summarise_differences(rows["difference"], generator=generator)
        differences.append({"variant": variant, "curve": curve} | asdict(one))
        own = float(rows["loss"].to_numpy().mean())
        base = float(_rows_of_curve(finals, variants.baseline, curve)["loss"].to_numpy().mean())
        differs = one.excludes_zero and abs(one.mean) > ROUNDING * base
        said = of_training if curve == "training" else sentences
        said.append(
            f"The {curve} loss ends at {own:.4f} nats for {_quote(variant)} and at {base:.4f} for "
            f"{_quote(variants.baseline)}. {_difference_sentence(variant, one, differs=differs)}"
        )
        decided = differs and one.n >= FEWEST_SEEDS
        said.append(_speed_up_sentence(variant, curve, rows, decided=decided))
    tables = {
        "curves": curves,
        "bands": mean_curve_table(curves),
        "finals": finals,
        "differences": pd.DataFrame(differences),
    }
    watched, why_not = _read_watch_tables(variants)
    if why_not:
        notes.append(why_not)
    else:
        side = pd.concat([_rows_to_compare(frame) for frame in watched], ignore_index=True)
        rates = side.loc[side["measure"] == "sink_rate"].groupby(["variant", "seed"])
        known = sorted(set.intersection(*(set(rows["threshold"].tolist()) for _, rows in rates)))
        if not np.isclose(known, config.threshold).any():
            raise InputError(
                f"the runs were not watched at threshold {config.threshold:g}; need one of {', '.join(map(str, known))}"
            )
        if any("sigmoid" in variant.split("/") for variant in variants.runs):
            notes.append(
                "weights of sigmoid attention do not sum to 1: its mass is a mean weight, not a share of a row"
            )
        tables["measures"] = _final_measure_table(variants, side)
        tables["course"] = _course_table(variants, side)
        born: dict[str, list[Birth]] = {}
        for frame in watched:
            birth = find_birth(frame, threshold=config.threshold)
            born.setdefault(frame["variant"].iloc[0], []).append(birth)
        sentences += [_sink_sentences(variant, one) for variant, one in born.items()]
        sentences += _dominance_and_rank_sentences(variants, tables["measures"])
    sentences += of_training  # which say the same as those of the evaluation, less well
    with place_of_run(out, name="compare") as place:
        found = Comparison(
            folder=place.named,
            place=place,
            config=config,
            variants=variants,
            tables=tables,
            headline="\n".join(sentences),
            notes=tuple(notes),
        )
        write_comparison(found, place.folder, overwrite=overwrite)
    return found


def _rows_of_curve(finals: pd.DataFrame, variant: str, curve: str) -> pd.DataFrame:
    return finals.loc[(finals["variant"] == variant) & (finals["curve"] == curve)]


def _opening_sentence(variants: Variants, finals: pd.DataFrame) -> str:
    tokens: Any = finals.groupby(["variant", "seed"])["tokens"].max()
    amount = " to ".join(dict.fromkeys(map(short_count, (tokens.min(), tokens.max()))))
    others = join_and(map(_quote, variants.others))
    same = "" if "data_seed" in variants.group_by else ", on the same data in the same order"
    return (
        f"The runs differ in {fields_in_words(variants.group_by)}: {others} against "
        f"{_quote(variants.baseline)}, {plural(len(variants.seeds), 'seed')} each "
        f"({', '.join(map(str, variants.seeds))}), {amount} tokens per run{same}."
    )


def _quote(variant: str) -> str:
    return f"“{variant}”"  # the variant “none” would read as the word


def _difference_sentence(variant: str, gap: Difference, *, differs: bool) -> str:
    change = signed_change(gap.mean, 4)
    if gap.n < 2:
        return f"The difference, {change}, is of one seed, so it has no interval."
    sure = f"{gap.n} seeds; "
    if not np.isnan(gap.t_p):
        sure += f"paired t test: p = {as_text(gap.t_p)}; "
    sure += f"sign flips: p = {as_text(gap.flip_p)}, at least {as_text(gap.flip_smallest)} with so many seeds"
    if gap.n < FEWEST_SEEDS:
        told = f"{FEWEST_SEEDS} seeds are needed to tell a difference"
    elif not differs:
        told = "No difference can be told"
    else:
        told = f"{_quote(variant)} is {'behind' if gap.mean > 0 else 'ahead of'} the baseline"
    return f"{told}: {change} {interval_text(gap.low, gap.high)} ({sure})."


def _speed_up_sentence(variant: str, curve: str, rows: pd.DataFrame, *, decided: bool) -> str:
    at, ratio = rows["reached"].to_numpy(), rows["acceleration"].to_numpy()
    end = f"the baseline's final {curve} loss"
    target = f"{_quote(variant)} {{}} {end}"
    if untrained := int((at == 0).sum()):
        begins = target.format("begins at or under")
        return f"{begins} in {untrained} of {plural(len(at), 'seed')}, so no speed is compared."
    if not decided and np.isnan(ratio).all():
        several = len(ratio) > 1
        none = "No seed of {} reaches" if several else "{} does not reach"
        return f"{none.format(_quote(variant))} {end}."
    if not decided:
        each = ("never" if np.isnan(one) else f"{one:.2f}x as fast" for one in ratio)
        return (
            f"It cannot be told either if {_quote(variant)} reaches {end} sooner (seed by seed: "
            f"{join_and(each, most=8)})."
        )
    there, n = ~np.isnan(at), len(at)
    if not there.any():
        return f"{target.format('does not reach')} in any of {plural(n, 'seed')}."
    each = join_and((f"{one:.2f}" for one in ratio[there]), most=8)
    own, base = (
        short_count(float(one[there].mean())) for one in (at, rows["baseline_reached"].to_numpy())
    )
    when = f"after {own} tokens, the baseline after {base}"
    reaches = target.format("reaches")
    if not there.all():
        return (
            f"{reaches} in {there.sum()} of {plural(n, 'seed')}, {when} ({each} times as fast); "
            "in the others it never does."
        )
    mean = float(np.exp(np.log(ratio).mean()))
    told = f"{mean:.2f}"
    word = "at the same time" if told == "1.00" else "sooner" if mean > 1 else "later"
    return f"{reaches} {word}: {when}, {told} times as fast (by seed {each})."


def _sink_sentences(variant: str, born: Sequence[Birth]) -> str:
    rate, mass = (np.mean([getattr(one, name) for one in born]) for name in ("rate", "mass"))
    now = (
        f"At the end {rate:.1%} of heads have a sink score above {born[0].threshold:g}; in the layer with the most, "
        f"position 0 gets {as_text(mass)} of the attention (uniform attention: {as_text(born[0].uniform)})."
    )
    there = [(one.tokens, one.before) for one in born if one.tokens is not None]
    seeds = plural(len(born), "seed")
    if not there:
        return f"{_quote(variant)} has no sink in any of {seeds} (fewer than {MIN_SINK_RATE:.0%} of heads). {now}"
    whens = [short_count(tokens) for tokens, before in there if before is not None]
    first = len(there) - len(whens)
    told = [f"born by {join_and(whens, most=8)} {born[0].unit}"] * bool(whens)
    told += [f"there at the first checkpoint already in {first}"] * bool(first)
    return f"{_quote(variant)} has a sink in {len(there)} of {seeds}, {', and '.join(told)}. {now}"


def _dominance_and_rank_sentences(variants: Variants, measures: pd.DataFrame) -> list[str]:
    sentences = []
    for measure in ("dominance_ratio", "effective_rank"):
        rows = measures.loc[measures["measure"] == measure].drop_duplicates("variant")
        means = rows.set_index("variant")["mean"]
        parts = [f"{as_text(float(means[one]))} for {_quote(one)}" for one in variants.runs]
        sentences.append(
            f"The {measure.replace('_', ' ')}, averaged over layers, is {join_and(parts)}."
        )
    return sentences


def write_comparison(
    comparison: Comparison, folder: str | Path, *, overwrite: bool = False
) -> Path:
    variants = comparison.variants
    config = asdict(comparison.config) | {
        "group_by": list(variants.group_by),
        "baseline": variants.baseline,
        "runs": {
            variant: {str(seed): str(run.folder) for seed, run in runs.items()}
            for variant, runs in variants.runs.items()
        },
    }
    of_first = variants.runs[variants.baseline][variants.seeds[0]].provenance
    provenance = {name: of_first.get(name) for name in DATA} | {"versions": package_versions()}
    with create_run(
        folder,
        kind="compare",
        config=config,
        provenance=provenance,
        expects=("curves", "bands", "finals", "differences"),
        overwrite=overwrite,
    ) as writer:
        for name, table in comparison.tables.items():
            writer.write_table(name, table)
        writer.write_findings(comparison.sentences, notes=comparison.notes)
    return Path(folder)


SIDES = (
    "sink_rate",
    "sink_mass",
    "top_mass",
    "dominance_ratio",
    "effective_rank",
    "effective_rank_without",
    "s2_ratio",
    "norm_ratio",
    "growth_steps",
    "super_neurons",
)
"""What is compared of the whole model; ``top_mass`` is the mean mass in the layer that has most."""
KEYS = ["measure", "threshold"]


def _read_watch_tables(variants: Variants) -> tuple[list[pd.DataFrame], str]:
    """Return (each run's table ``watch`` with its variant and seed, ""), or ([], the reason why there is none).

    Checkpoints that could not be measured are left out.
    """
    todo = "sink and disparity are not compared: "
    frames = []
    for variant, runs in variants.runs.items():
        for seed, run in runs.items():
            frame = run.tables["watch"] if "watch" in run.tables else pd.DataFrame({"measure": []})
            frame = frame.loc[frame["measure"] != "error"]
            if frame.empty:
                return [], f"{todo}{run.folder} was not watched. Run sink-lens watch on every run."
            frames.append(frame.assign(variant=variant, seed=seed))
    if len(set(pd.concat(frames)["tokens_sha256"])) > 1:
        why = "the runs were watched on different sequences. Watch all with the same options."
        return [], todo + why
    return frames, ""


def _rows_to_compare(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a table ``watch`` to compare: the whole model's, and at each step the top layer's mass.

    A threshold for which the sequences were too short, whose rates are nan, has no rows.
    """
    rows = [whole_model_rows(frame, measure) for measure in SIDES if measure != "top_mass"]
    rows = [one.loc[one["value"].notna() | one["threshold"].isna()] for one in rows]
    mass = frame.loc[(frame["measure"] == "sink_mass") & frame["layer"].notna()]
    top = mass.sort_values("value").drop_duplicates("step", keep="last").assign(measure="top_mass")
    every = pd.concat([*rows, top], ignore_index=True)
    return every.reindex(
        columns=["variant", "seed", "step", "tokens", "measure", "threshold", "value", "unit"]
    )


def _final_measure_table(variants: Variants, table: pd.DataFrame) -> pd.DataFrame:
    """Return the variants' measures at the last number of tokens with a checkpoint of every run.

    Differences are to the baseline, paired by seed.
    """
    shared = set.intersection(
        *(set(rows["tokens"].tolist()) for _, rows in table.groupby(["variant", "seed"]))
    )
    if not shared:
        raise RunError(
            "no checkpoint was measured in every run; need one at least. Run sink-lens watch on each again."
        )
    tokens = max(shared)
    if tokens != table["tokens"].max():
        warnings.warn(
            f"sinks are compared after {short_count(tokens)} tokens: not every run was measured after more",
            stacklevel=2,
        )
    final = table.loc[table["tokens"] == tokens]
    steps = dict(zip(final["variant"].tolist(), final["step"].tolist(), strict=True))
    units = dict(zip(final["measure"].tolist(), final["unit"].tolist(), strict=True))
    by_variant = {
        variant: rows.pivot(index=KEYS, columns="seed", values="value")
        for variant, rows in final.groupby("variant")
    }
    frames = []
    for variant in variants.runs:
        pivot = by_variant[variant]
        values = pivot.to_numpy(dtype=float)
        base = by_variant[variants.baseline].reindex(pivot.index).to_numpy(dtype=float)
        one = pivot.index.to_frame(index=False).assign(variant=variant, step=steps[variant])
        ends = ["estimate", "low", "high"]
        own = pd.DataFrame(t_intervals(values))
        one[["mean", "low", "high"]] = own[ends]
        gap = pd.DataFrame(t_intervals(values - base))
        one[["difference", "difference_low", "difference_high"]] = gap[ends]
        frames.append(one.assign(unit=one["measure"].map(units), n=own["n"]))
    every = pd.concat(frames, ignore_index=True)
    every["order"] = every["measure"].map(SIDES.index)
    return every.sort_values(["order", "threshold"], ignore_index=True).drop(columns="order")


def _course_table(variants: Variants, table: pd.DataFrame) -> pd.DataFrame:
    frames = []
    for key, rows in table.groupby(KEYS, dropna=False):
        measure, threshold = key if isinstance(key, tuple) else (key, np.nan)
        for variant in variants.runs:
            own = rows.loc[rows["variant"] == variant]
            pivot = own.pivot(index="tokens", columns="seed", values="value").dropna()
            if len(pivot):
                known = {"variant": variant, "measure": measure, "threshold": threshold}
                frames.append(seed_means(pivot, known))
    return pd.concat(frames, ignore_index=True)


def run_comparison(
    config: CompareConfig, *, out: str | Path | None, overwrite: bool, **_: Any
) -> Comparison | LogComparison:
    out = default_run_folder("compare") if out is None else out
    return compare(config.runs, config=config, out=out, overwrite=overwrite)


def show_comparison(found: Comparison | LogComparison) -> "Iterator[RenderableType | PageTable]":
    from rich.text import Text

    from ..report.html import page_title
    from .pages.training import final_loss_table, variant_measure_table

    if found.folder is not None:
        yield Text(f"{page_title(found.folder)}.", style="bold")
    yield from found.sentences
    if isinstance(found, LogComparison):
        return
    yield "\nfinal losses, nats"
    finals = found.tables["finals"]
    yield final_loss_table(finals.assign(loss=finals["loss"].map("{:.4f}".format)))
    if "measures" in found.tables:
        measures = found.tables["measures"]
        steps = " or ".join(dict.fromkeys(map(str, measures["step"])))
        yield f"\nstep {steps}, mean over seeds [95%]"
        yield variant_measure_table(measures)


def answer_of_comparison(found: Comparison | LogComparison) -> dict[str, Any]:
    names = ("finals", "measures", "logged")
    tables = {name: found.tables[name] for name in names if name in found.tables}
    return {"sentences": found.sentences, "notes": found.notes, **tables}

"""From seed to sink in words, a figure and a page: what training chose for position 0, and who foretold it."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sink_lens.records import Run
from sink_lens.report.columns import flags, floats, named, select
from sink_lens.report.page import Drawn, Listed, Page, Table, shown_table, whole
from sink_lens.report.style import COLOURS, GRID, INK, MARKS, QUIET, canvas, finished, legend, logarithmic, panel
from sink_lens.text import listed, number, plural, short

LEVEL = 0.05
"""A statistic foretells where its corrected p is under it."""
_NEEDED = {
    "course": (
        "seed",
        "step",
        "tokens",
        "dimension",
        "layer",
        "dominance_ratio",
        "is_outlier",
        "are_super",
        "sink_rate",
    ),
    "writers": ("seed", "step", "layer", "neuron", "share"),
    "ranks": ("of", "statistic", "seed", "rank", "n"),
    "tests": ("of", "statistic", "place", "p", "p_holm", "lowest"),
}


def told(course: pd.DataFrame, writers: pd.DataFrame, ranks: pd.DataFrame, tests: pd.DataFrame) -> tuple[str, ...]:
    """The result in sentences: what was chosen, whether it is an outlier at all, and whether it was foretold."""
    ends = _ends(course)
    seeds = ends["seed"].tolist()
    said = [
        f"{plural(len(seeds), 'seed')} ({', '.join(map(str, seeds))}), {short(float(floats(ends, 'tokens').max()))} "
        "tokens a run; what follows is of the last checkpoints",
        _whether(flags(ends, "is_outlier"), ends),
    ]
    said += [_one(row, course=course, writers=writers) for row in ends.to_dict("records")]
    if len(seeds) > 1:
        distinct = len(set(ends["dimension"].tolist()))
        same = "every seed has another one" if distinct == len(seeds) else f"{distinct} different ones among the seeds"
        said.append(f"the dimension: {same}")
    for of, word in (("dimension", "dimension"), ("neuron", "neurons")):
        if len(rows := named(tests, "of", of)):
            said.append(_foretold(rows, ranks=named(ranks, "of", of), word=word, tried=len(tests.dropna(subset=["p"]))))
    return tuple(said)


def _ends(course: pd.DataFrame) -> pd.DataFrame:
    """The last checkpoint of each seed."""
    return course.sort_values("step").drop_duplicates("seed", keep="last").sort_values("seed")


def _whether(outlier: np.ndarray, ends: pd.DataFrame) -> str:
    """Whether there is an outlier dimension, and what stands in for it."""
    rates = listed(f"{rate:.1%}" for rate in floats(ends, "sink_rate"))
    ratios = listed(number(float(ratio)) for ratio in floats(ends, "dominance_ratio"))
    facts = f"(max over mean magnitude {ratios}; sink rate {rates})"
    if outlier.all():
        return f"position 0 has an outlier dimension in every seed {facts}"
    stands = "the largest dimension stands in for it, and a largest one there always is"
    if not outlier.any():
        return f"position 0 has no outlier dimension in the chain's sense in any seed {facts}: {stands}"
    return f"position 0 has an outlier dimension in {outlier.sum()} of {plural(len(outlier), 'seed')} {facts}: " + (
        f"elsewhere {stands}"
    )


def _one(row: dict, *, course: pd.DataFrame, writers: pd.DataFrame) -> str:
    """What one seed chose, and since when."""
    rows = select(course, floats(course, "seed") == row["seed"]).sort_values("step")
    same = floats(rows, "dimension") == row["dimension"]
    first = len(same)
    while first and same[first - 1]:
        first -= 1
    since = f", the same since step {int(floats(rows, 'step')[first])}" if len(same) > 1 else ""
    here = (floats(writers, "seed") == row["seed"]) & (floats(writers, "step") == row["step"])
    names = [f"{layer:.0f}.{neuron:.0f}" for layer, neuron in select(writers, here)[["layer", "neuron"]].to_numpy()]
    which = "outlier dimension" if row["is_outlier"] else "largest dimension"
    what = f"seed {row['seed']}: {which} {row['dimension']}, most of all after layer {row['layer']}{since}"
    if not names:
        return what
    if row["are_super"]:
        return f"{what}; {plural(len(names), 'super neuron')} (layer.neuron): {listed(names)}"
    return f"{what}; no super neuron, {names[0]} writes most of it"


def _foretold(tests: pd.DataFrame, *, ranks: pd.DataFrame, word: str, tried: int) -> str:
    """Whether any statistic foretold it; else which came nearest, and what could have been seen."""
    known = tests.dropna(subset=["p"]).sort_values("p")
    if not len(known):
        return f"no statistic of the initialisation tells one {word.removesuffix('s')} from another"
    best = [_named(row, ranks) for row in known.to_dict("records")]
    certain = floats(known, "p_holm") < LEVEL
    corrected = f"corrected for {plural(tried, 'statistic')}"
    if certain.any():
        which = "; ".join(
            f"{name}, p {number(p)} {corrected}"
            for name, p, one in zip(best, floats(known, "p_holm"), certain, strict=True)
            if one
        )
        return f"the initialisation foretells the {word}: by {which}"
    lowest = float(floats(known, "lowest").max())
    return (
        f"no statistic of the initialisation foretells the {word}: the nearest is {best[0]}, "
        f"p {number(float(floats(known, 'p')[0]))}, {number(float(floats(known, 'p_holm')[0]))} {corrected} (so few "
        f"seeds would show a mean place under {number(lowest)} or over {number(1 - lowest)}; chance is 0.5)"
    )


def _named(row: dict, ranks: pd.DataFrame) -> str:
    return f"{row['statistic']} ({rank_by_seed(ranks, row['statistic'])}; mean place {number(row['place'])})"


def rank_by_seed(ranks: pd.DataFrame, statistic: str) -> str:
    """The rank of what each seed chose, the mean of several, as ``rank 2, 24 and 15 of 192``."""
    of = named(ranks, "statistic", statistic)
    seeds, found = floats(of, "seed"), floats(of, "rank")
    means = [found[seeds == seed].mean() for seed in np.unique(seeds)]
    return f"rank {listed(number(float(mean)) for mean in means)} of {int(floats(of, 'n').max())}"


def draw(*, course: pd.DataFrame, ranks: pd.DataFrame, tests: pd.DataFrame) -> Figure:
    """Where what was chosen stood at the initialisation, and the final dimension's rank along training."""
    rows = len(tests)
    along = len(set(course["step"].tolist())) > 1
    figure = canvas(width=9.0 if along else 5.6, height=1.3 + 0.24 * rows)
    axes = panel(figure, place=(1, 2 if along else 1, 1), xlabel="place at the initialisation (0 top, 1 bottom)")
    _places(axes, ranks=ranks, tests=tests)
    if along:
        axes = panel(figure, place=(1, 2, 2), xlabel="step", ylabel="rank in position 0's state")
        _course(axes, course)
    return finished(figure)


def _places(axes: Axes, *, ranks: pd.DataFrame, tests: pd.DataFrame) -> None:
    """A statistic a line, a seed a mark, the mean of all a bar."""
    seeds = sorted(set(ranks["seed"].tolist()))
    marks = dict(
        zip(seeds, [(COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]) for i in range(len(seeds))], strict=True)
    )
    records = tests.to_dict("records")
    for line, row in enumerate(records):
        of = named(named(ranks, "of", row["of"]), "statistic", row["statistic"])
        axes.axhline(line, color=GRID, linewidth=0.6, zorder=0)
        for seed, (colour, mark) in marks.items():
            one = select(of, floats(of, "seed") == seed)
            place = (floats(one, "rank") - 0.5) / floats(one, "n")
            label = f"seed {seed}" if line == 0 else None
            axes.scatter(place, np.full(len(place), line), color=colour, marker=mark, s=18, label=label)
        axes.plot([row["place"]], [line], color=INK, marker="|", markersize=13, markeredgewidth=2)
    axes.axvline(0.5, color=QUIET, linewidth=1, linestyle=":")
    axes.set_xlim(-0.03, 1.03)
    axes.set_yticks(range(len(records)), [f"{row['of']}: {_spoken(row['statistic'])}" for row in records])
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    legend(axes, columns=4)


def _spoken(statistic: str) -> str:
    return statistic.replace("_", " ").replace("w o", "W_O")


def _course(axes: Axes, course: pd.DataFrame) -> None:
    """The rank that the dimension of the end has at each checkpoint, a line a seed."""
    steps = sorted(set(course["step"].tolist()))
    least = next((step for step in steps if step > 0), 1) / 2
    for index, (seed, rows) in enumerate(course.groupby("seed")):
        at = np.where(floats(rows, "step") > 0, floats(rows, "step"), least)
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKS[index % len(MARKS)], "markersize": 4}
        axes.plot(at, floats(rows, "final_rank"), linewidth=1.4, label=f"seed {seed}", **style)
    axes.axhline((floats(course, "d_model").max() + 1) / 2, color=QUIET, linewidth=1, linestyle=":")
    logarithmic(axes, axis="x")
    logarithmic(axes, axis="y")
    ticks = [least, *(step for step in steps if step > 0)]
    names = ["0", *(short(step) for step in steps if step > 0)]
    axes.set_xticks(ticks[:: max(1, len(ticks) // 6)], names[:: max(1, len(ticks) // 6)])
    axes.set_xticks([], minor=True)
    axes.set_ylim(1.3 * float(floats(course, "d_model").max()), 0.8)
    legend(axes, columns=4)


# --- the page


def _tables(run: Run) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    course, writers, ranks, tests = (run.need(name, columns=columns) for name, columns in _NEEDED.items())
    return course, writers, ranks, tests


def _title(run: Run) -> str:
    if "tests" not in run.tables:
        return "From seed to sink"
    certain = floats(run.tables["tests"], "p_holm") < LEVEL
    return "The initialisation foretells part of it" if certain.any() else "Nothing that was tried foretells it"


def _headline(run: Run) -> list[str]:
    if any(name not in run.tables for name in _NEEDED):
        return []
    return [f"{one[0].upper()}{one[1:]}." for one in told(*_tables(run))]


def _figure(run: Run) -> tuple[str, Figure]:
    course, _, ranks, tests = _tables(run)
    see = (
        "Left: where what a seed chose stood at the initialisation, among all dimensions or neurons of its layer; a "
        "bar is the mean, dotted is chance. Right: the rank of the dimension of the end in the state of position 0 at "
        "each checkpoint."
    )
    return see, draw(course=course, ranks=ranks, tests=tests)


def _tests(run: Run) -> tuple[str, Table]:
    tests = run.need("tests", columns=_NEEDED["tests"])
    heads = {"of": "of", "statistic": "statistic", "meaning": "what it is", "place": "mean place", "p": "p"}
    heads |= {"p_holm": "p, corrected", "lowest": "could be seen under"}
    see = (
        "Place 0 is the largest of all, 0.5 is chance. The p are two-sided, against random choices; Holm's correction."
    )
    return see, shown_table(tests, heads)


def _chosen(run: Run) -> tuple[str, Table]:
    course = run.need("course", columns=_NEEDED["course"])
    heads = {"seed": "seed", "step": "step", "dimension": "dimension", "layer": "after layer"}
    heads |= {"dominance_ratio": "max ÷ mean", "is_outlier": "outlier", "sink_rate": "sink rate"}
    return "The last checkpoint of each seed; all are in course.parquet.", shown_table(_ends(course), heads)


ORIGIN = Page(
    title=_title,
    headline=_headline,
    figures=(Drawn(key="origin-places", title="Who foretold it?", make=_figure, data=whole("ranks")),),
    tables=(
        Listed(key="origin-tests", title="Every statistic that was tried", make=_tests),
        Listed(key="origin-chosen", title="What training chose", make=_chosen),
    ),
)
"""The page of a run of kind "origin"."""

"""Head-wise RMSNorm that begins at the size z has without it, beside the authors' first gain and softmax; see claim.md.

``run.py`` judges ``runs.csv``; ``run.py train`` trains what is missing there, in as many processes as are started.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.claims import Measured, Work, certain, main
from analyses.prose_and_trigger import (
    JUDGED_AT,
    SEEDS,
    TRIAL_SEED,
    Asked,
    against_softmax,
    best_rate,
    curve,
    draw_bands,
    draw_trials,
    ends_of,
    hold_parity,
    judged_seeds,
    minus,
    of_softmax,
    over_seeds,
    ratio_over_seeds,
    styles_of,
    training,
)
from analyses.shared_table import append, work_off
from sink_lens.report.style import legend, new_figure, panel, without_formulas
from sink_lens.stats import Interval

DRAWN: dict[str, Any] = {
    "value_norm": "per_head",
    "value_norm_init": "dummy_pass",
    "decay_unshared_gain": True,
}
"""The norm as the authors' code has it."""
MATCHED = DRAWN | {"value_norm_init": "matched"}
SOFTMAX, DRAW, FAIR = "softmax", "authors' draw", "matched"
ARMS: dict[str, dict[str, Any]] = {SOFTMAX: {}, DRAW: DRAWN, FAIR: MATCHED}
"""Arm -> the fields of ``TrainConfig`` that it changes."""
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
TASK, ALONE = "prose and task", "prose alone"
DATA = (TASK, ALONE)
RUN = ["budget", "data", "kind", "arm", "rate", "seed"]
HERE = Path(__file__).parent
FILE, COST = "runs.csv", "cost.csv"
KEPT = Path("build/headnorm_first_gain")
"""Checkpoints and locks."""
CONTROL_RATE = 2e-3
"""Rate of the middle budget: the best of both of the earlier claim's norms there, and the best of no arm by choice."""


def shrunk(model: Any, another: Any) -> None:
    """Make W_O as much smaller as the matched gain is than the drawn one, layer by layer."""
    for layer, ratio in zip(model.model.layers, sizes_of(another)[1], strict=True):
        with torch.no_grad():
            layer.self_attn.o_proj.weight.mul_(ratio)


def enlarged(model: Any, another: Any) -> None:
    """Make what each head gives as much larger as the drawn gain is than the matched one: a constant factor."""

    def larger(ratio: float, module: Any, inputs: Any, z: torch.Tensor) -> torch.Tensor:
        return z / ratio

    for layer, ratio in zip(model.model.layers, sizes_of(another)[1], strict=True):
        layer.self_attn.head_out.register_forward_hook(partial(larger, ratio))


def by_hand_small(model: Any, another: Any) -> None:
    """Hold every head's output at the matched size, by a constant."""
    hold_parity(model, sizes=sizes_of(another)[0])


def by_hand_large(model: Any, another: Any) -> None:
    """Hold every head's output at the drawn size, by a constant."""
    hold_parity(
        model, sizes=[small / ratio for small, ratio in zip(*sizes_of(another), strict=True)]
    )


def sizes_of(another: Any) -> tuple[list[float], list[float]]:
    """The matched gain in each layer, and its share of the drawn one."""
    small, large = another(**MATCHED).mean_gains(), another(**DRAWN).mean_gains()
    return small, [one / other for one, other in zip(small, large, strict=True)]


CONTROLS: dict[str, tuple[dict[str, Any], Any]] = {
    SOFTMAX: ({}, None),
    DRAW: (DRAWN, None),
    FAIR: (MATCHED, None),
    "parity by hand, matched size": ({}, by_hand_small),
    "parity by hand, drawn size": ({}, by_hand_large),
    "softmax, drawn size": ({}, enlarged),
    "softmax, smaller W_O": ({}, shrunk),
    "authors' draw, smaller W_O": (DRAWN, shrunk),
}
"""Arms of the middle budget: fields of ``TrainConfig``, and what is done to the model."""
STYLES = styles_of(list(CONTROLS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of an arm."""

    budget: str = "extended"
    data: str
    kind: str
    """trial, final or control."""
    arm: str
    rate: float
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what tells it from the others in the table."""
        return tuple(getattr(self, name) for name in RUN)

    @property
    def asked(self) -> Asked:
        """Return what is trained."""
        fields, change = CONTROLS[self.arm]
        return Asked(
            budget=self.budget,
            rate=self.rate,
            seed=self.seed,
            is_trial=self.kind == "trial",
            with_task=self.data == TASK,
            fields=fields,
            change=change,
            by_layer=self.kind != "trial",
        )

    @property
    def name(self) -> str:
        """Return the name of its checkpoint and lock."""
        return "-".join(
            str(one).replace(" ", "_").replace("'", "").replace(",", "") for one in self.key
        )


def measure(work: Work) -> Measured:
    """The committed trainings, judged; with ``--retrain`` those that are missing are trained first, one by one."""
    if work.tiny:
        table = in_memory(work)
        cost = pd.DataFrame(
            [{"arm": arm, "turn": turn, "seconds": 1.0} for arm in ARMS for turn in range(3)]
        )
    else:
        if work.retrain:
            train_what_is_missing(
                work, SimpleNamespace(device="cpu", until=math.inf, data=list(DATA), trials=False)
            )
        table = pd.read_csv(HERE / FILE)
        cost = (
            pd.read_csv(HERE / COST)
            if (HERE / COST).exists()
            else pd.DataFrame(columns=["arm", "turn", "seconds"])
        )
    numbers: dict[str, Interval] = {}
    for data in DATA:
        numbers |= numbers_of(table, data, cost)
    numbers |= controls_of(table)
    return Measured(numbers=numbers, figure=draw(table))


def in_memory(work: Work) -> pd.DataFrame:
    """Every training in miniature, of fewer rates and seeds."""
    rows: list[pd.DataFrame] = []
    while True:
        table = (
            pd.concat(rows, ignore_index=True)
            if rows
            else pd.DataFrame(columns=[*RUN, "step", "prose"])
        )
        missing = next(not_there(table, rates=RATES[1:3], seeds=SEEDS[:3]), None)
        if missing is None:
            return table
        rows.append(labelled(list(training(work, missing.asked)), missing))


def labelled(rows: list[dict[str, Any]], of: Training) -> pd.DataFrame:
    """A training's rows as the table has them; its machine stands in each."""
    frame = pd.DataFrame(rows).assign(**{name: getattr(of, name) for name in RUN})
    return frame.assign(machine=rows[-1]["machine"])


def not_there(
    table: pd.DataFrame,
    *,
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = SEEDS,
    trials: bool = False,
) -> Iterator[Training]:
    """The trainings that the table lacks and that can be made now, in the order in which they decide."""
    done = {tuple(row) for row in table[RUN].drop_duplicates().itertuples(index=False)}
    first, later = seeds[: min(JUDGED_AT)], seeds[min(JUDGED_AT) :]

    def of(data: str, of_seeds: Sequence[int]) -> Iterator[Training]:
        of_rates = [
            Training(data=data, kind="trial", arm=arm, rate=r, seed=TRIAL_SEED)
            for r in rates
            for arm in ARMS
        ]
        yield from of_rates
        for seed in () if trials else of_seeds:
            for arm in ARMS:
                if all(one.key in done for one in of_rates if one.arm == arm):
                    rate = best_rate(table, data=data, arm=arm)
                    yield Training(data=data, kind="final", arm=arm, rate=rate, seed=seed)

    def controls() -> Iterator[Training]:
        for seed in () if trials else SEEDS[: min(JUDGED_AT)]:
            for arm in CONTROLS:
                yield Training(
                    budget="middle",
                    data=TASK,
                    kind="control",
                    arm=arm,
                    rate=CONTROL_RATE,
                    seed=seed,
                )

    for part in (of(TASK, first), of(ALONE, first), controls(), of(TASK, later), of(ALONE, later)):
        yield from (one for one in part if one.key not in done)


def take(other: Path) -> None:
    """Add the trainings of another machine's table, and say how many are new."""
    before = len(pd.read_csv(HERE / FILE)[RUN].drop_duplicates())
    append(pd.read_csv(other), HERE / FILE, by=RUN, locks=KEPT)
    print(f"{len(pd.read_csv(HERE / FILE)[RUN].drop_duplicates()) - before} new trainings")


def train_what_is_missing(work: Any, asked: Any) -> None:
    """Train what the table lacks and no other process has taken, until nothing is left or the time is up."""
    path = HERE / FILE

    def missing() -> list[Training]:
        return [
            one
            for one in not_there(pd.read_csv(path), trials=asked.trials)
            if one.data in asked.data
        ]

    def make(one: Training) -> None:
        began = time.time()
        rows = list(training(work, one.asked, keep=KEPT / one.name, device=asked.device))
        append(labelled(rows, one), path, by=RUN, locks=KEPT)
        print(f"{one.key}: prose {rows[-1]['prose']:.4f}, {time.time() - began:.0f} s", flush=True)

    work_off(missing, make, locks=KEPT, until=asked.until)


def train_missing(arguments: Sequence[str]) -> None:
    """The command line of ``run.py train``."""
    parser = argparse.ArgumentParser(prog="run.py train", description="Train what runs.csv lacks.")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--trials", action="store_true", help="the trials alone")
    parser.add_argument("--data", action="append", choices=DATA, help="one of the two alone")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no training after as many"
    )
    parser.add_argument(
        "--take",
        type=Path,
        metavar="FILE",
        help="add what another machine's runs.csv has, train nothing",
    )
    parser.add_argument(
        "--cost", action="store_true", help="time the arms' steps instead, for cost.csv"
    )
    asked = parser.parse_args(arguments)
    asked.until, asked.data = time.time() + 60 * asked.minutes, asked.data or list(DATA)
    work: Any = SimpleNamespace(tiny=False, progress=False, size=lambda real, tiny: real)
    torch.set_num_threads(1)
    if asked.take:
        take(asked.take)
    elif asked.cost:
        pd.DataFrame(timed(work)).to_csv(
            HERE / COST, index=False, float_format="%.6g", lineterminator="\n"
        )
    elif asked.workers == 1:
        train_what_is_missing(work, asked)
    else:
        said = [
            f"--device={asked.device}",
            *(f"--data={one}" for one in asked.data),
            *["--trials"] * asked.trials,
        ]
        said += [] if math.isinf(asked.minutes) else [f"--minutes={asked.minutes}"]
        command = [
            sys.executable,
            "-m",
            "analyses.a_structural_origin.headnorm_first_gain.run",
            "train",
            *said,
        ]
        started = [
            subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
            for _ in range(asked.workers)
        ]
        for one in started:
            one.wait()


def timed(work: Any) -> Iterator[dict[str, Any]]:
    """Processor time of 100 steps of each arm, in turn."""
    for turn in range(5):
        for arm, fields in ARMS.items():
            asked = Asked(
                budget="short", rate=CONTROL_RATE, seed=turn, is_trial=True, fields=fields
            )
            end = list(training(work, asked))[-1]
            yield {"arm": arm, "turn": turn, "seconds": end["seconds"], "machine": end["machine"]}


def numbers_of(table: pd.DataFrame, data: str, cost: pd.DataFrame) -> dict[str, Interval]:
    """Every number of one kind of data, over seeds, paired with softmax of the same seed; 95% t intervals."""
    finals = finals_of(table, data)
    tried = (
        trials_of(table, data).groupby("arm")["rate"].nunique().reindex(list(ARMS), fill_value=0)
    )
    seeds = judged_seeds(finals, list(ARMS)) if tried.nunique() == 1 else ()
    finals = finals[finals["seed"].isin(seeds)]
    by_turn = cost.pivot(index="turn", columns="arm", values="seconds")
    numbers: dict[str, Interval] = {}
    for arm, before in ((FAIR, ""), (DRAW, "drawn_")):
        found = against_softmax(finals, arm, seeds)
        found["cost"] = (
            ratio_over_seeds(by_turn[arm] / by_turn[SOFTMAX]) if len(by_turn) else over_seeds([])
        )
        pairs = [(curve(finals, SOFTMAX, seed), curve(finals, arm, seed)) for seed in seeds]
        found["time"] = over_seeds([in_time(*pair, cost=found["cost"].estimate) for pair in pairs])
        if data == ALONE:
            del found["task"]
        numbers |= {f"{before}{name} @ {data}": one for name, one in found.items()}
    numbers |= {f"by_tokens @ {at}, {data}": one for at, one in by_tokens(finals).items()}
    by_rate = trials_of(table, data).sort_values("step").groupby(["arm", "rate"])["prose"].last()
    numbers[f"trials_ahead @ {data}"] = certain((by_rate[FAIR] < by_rate[SOFTMAX]).sum())
    numbers[f"trials_best @ {data}"] = certain(by_rate[FAIR].min() - by_rate[SOFTMAX].min())
    ends = finals.groupby(["arm", "seed"])["prose"].last()
    differences = [
        ends.get((FAIR, seed), math.nan) - ends.get((DRAW, seed), math.nan) for seed in seeds
    ]
    numbers[f"start @ {data}"] = over_seeds(differences)
    return numbers | {f"{name} @ {data}": one for name, one in of_softmax(finals).items()}


def by_tokens(finals: pd.DataFrame) -> dict[str, Interval]:
    """The matched arm's loss on prose minus softmax's along the training, without its first and last reading."""
    losses = finals.pivot(index="tokens", columns=["arm", "seed"], values="prose")
    paired = (losses[FAIR] - losses[SOFTMAX]).iloc[1:-1]
    return {f"{tokens / 1e6:.2f}M tokens": over_seeds(row) for tokens, row in paired.iterrows()}


def in_time(base: pd.DataFrame, own: pd.DataFrame, *, cost: float) -> float:
    """Loss on prose minus softmax's after as much processor time, from the losses by tokens and the cost of a token."""
    if math.isnan(cost):
        return math.nan
    end, other = base["tokens"].iloc[-1] / max(1.0, cost), base["tokens"].iloc[-1] * min(1.0, cost)
    return float(
        np.interp(end, own["tokens"], own["prose"])
        - np.interp(other, base["tokens"], base["prose"])
    )


def controls_of(table: pd.DataFrame) -> dict[str, Interval]:
    """Return what explains the arms' losses on prose, and where the gain of layer 0 goes; three seeds, paired."""
    controls = table[table["kind"] == "control"].sort_values("step")
    ends = ends_of(controls)
    pairs = {
        "small": ("parity by hand, matched size", SOFTMAX),
        "large": ("parity by hand, drawn size", SOFTMAX),
        "size": ("softmax, drawn size", SOFTMAX),
        "size_with_parity": ("parity by hand, drawn size", "parity by hand, matched size"),
        "smaller_output": ("softmax, smaller W_O", SOFTMAX),
        "same_first_function": ("authors' draw, smaller W_O", FAIR),
        "start_middle": (FAIR, DRAW),
        "gradient": (FAIR, "parity by hand, matched size"),
    }
    numbers = {
        name: minus(ends, ("control", one), ("control", other))
        for name, (one, other) in pairs.items()
    }
    for arm in (FAIR, DRAW):
        gains = controls[controls["arm"] == arm].groupby("seed")["gain_0"]
        numbers[f"layer_0 @ {arm}"] = ratio_over_seeds(gains.last() / gains.first())
    return numbers


def finals_of(table: pd.DataFrame, data: str) -> pd.DataFrame:
    """The rows of the trainings on some data that are no trials, at the best of each arm's rates so far, by step."""
    arms = set(trials_of(table, data)["arm"])
    best = {arm: best_rate(table, data=data, arm=arm) for arm in arms}
    finals = table[(table["data"] == data) & (table["kind"] == "final")]
    return finals[finals["rate"] == finals["arm"].map(best)].sort_values("step")


def trials_of(table: pd.DataFrame, data: str) -> pd.DataFrame:
    """The rows of the trials on some data."""
    return table[(table["data"] == data) & (table["kind"] == "trial")]


def draw(table: pd.DataFrame):
    """Losses by tokens with bands, and trials, for each kind of data, and the controls, as far as they are there."""
    controls = table[table["kind"] == "control"]
    finals = {data: finals_of(table, data) for data in DATA}
    shown: list[tuple[str, str, pd.DataFrame, str, bool]] = []
    for data in DATA:
        shown.append((data, "loss on prose", finals[data], "prose", False))
        shown.append((data, "loss minus softmax's", finals[data], "prose", True))
    shown += [(data, "heads with a sink", finals[data], "rate_first_prose", False) for data in DATA]
    shown += [(data, "loss, trials", trials_of(table, data), "", False) for data in DATA]
    for says, name, paired in (
        ("loss minus softmax's", "prose", True),
        ("gain of layer 0", "gain_0", False),
        ("attention 0 writes", "wrote_0", False),
        ("heads with a sink", "rate_first_prose", False),
    ):
        shown.append(("controls", says, controls, name, paired))
    there = [
        one for one in shown if len(one[2]) and not (one[4] and SOFTMAX not in set(one[2]["arm"]))
    ]
    rows = math.ceil(len(there) / 4)
    figure = new_figure(width=12, height=2.9 * rows + 0.5)
    for place, (data, says, frame, name, paired) in enumerate(there, start=1):
        xlabel = "tokens, millions" if name else "learning rate"
        axes = panel(figure, place=(rows, 4, place), xlabel=xlabel, ylabel=says)
        axes.set_title(data, fontsize=9)
        if name:
            draw_bands(axes, frame, STYLES, name=name, paired=paired, unit=1e6)
        else:
            draw_trials(axes, frame, STYLES)
        if place == 1:
            drawn = set(axes.get_legend_handles_labels()[1])
            shown_arms = set().union(*(one[2]["arm"] for one in there))
            for arm in [arm for arm in CONTROLS if arm in shown_arms - drawn]:
                axes.plot([], [], label=arm, **STYLES[arm])
            legend(axes, columns=4, over=figure)
    return without_formulas(figure)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train_missing(sys.argv[2:])
    else:
        main(measure)

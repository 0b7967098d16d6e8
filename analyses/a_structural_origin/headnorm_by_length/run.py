"""Softmax and head-wise RMSNorm on sequences of 64 tokens and on long ones, without BOS; see claim.md.

``run.py`` judges ``runs.csv``; ``run.py train`` trains what is missing there, in as many processes as are started;
``run.py gpu`` trains a larger model for as long as it is told.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.a_structural_origin.headnorm_by_length.crops import (
    Ended,
    Shape,
    corpus_of,
    train_on_crops,
)
from analyses.claims import Measured, Work, certain, main
from analyses.prose_and_trigger import (
    READ,
    SEEDS,
    TRIAL_SEED,
    best_rate,
    curve,
    draw_bands,
    draw_trials,
    judged_seeds,
    over_seeds,
    ratio_over_seeds,
    styles_of,
    tokens_of,
)
from analyses.shared_table import append, work_off
from sink_lens.report.style import legend, log_scale, new_figure, panel, without_formulas
from sink_lens.stats import Interval

SOFTMAX, MATCHED, DRAW = "softmax", "matched", "authors' draw"
DRAWN: dict[str, Any] = {
    "value_norm": "per_head",
    "value_norm_init": "dummy_pass",
    "decay_unshared_gain": True,
}
ARMS: dict[str, dict[str, Any]] = {
    SOFTMAX: {},
    MATCHED: DRAWN | {"value_norm_init": "matched"},
    DRAW: DRAWN,
}
"""Arm -> the fields of ``TrainConfig`` that it changes."""
STYLES = styles_of(list(ARMS))
RATES = (2e-3, 4e-3, 8e-3)
GATE_RATE, PASSES = 2e-3, 1.25
"""Rate of the gate's trainings, and the ratio of S2 from which a length passes."""
RUN = ["length", "bos", "arm", "rate", "seed", "steps"]
HERE = Path(__file__).parent
FILE, POSITIONS = "runs.csv", "positions.csv"
LOCKS = Path("build/headnorm_by_length")
PROSE = "build/prose-five.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The comparison: its lengths, arms, rates and sizes."""

    shape: Shape
    lengths: tuple[int, ...]
    steps: int
    rates: tuple[float, ...] = RATES
    seeds: tuple[int, ...] = SEEDS


REAL = Setup(
    shape=Shape(
        n_layers=4,
        d_model=256,
        d_mlp=688,
        n_heads=4,
        vocab_size=2048,
        data=PROSE,
        step_tokens=4096,
        block=4096,
    ),
    lengths=(64, 256, 1024),
    steps=256,
)
TINY = Setup(
    shape=Shape(
        n_layers=2,
        d_model=48,
        d_mlp=64,
        n_heads=4,
        vocab_size=300,
        data="bundled",
        step_tokens=256,
        block=128,
        half=False,
    ),
    lengths=(16, 64),
    steps=6,
    rates=(4e-3, 8e-3),
    seeds=SEEDS[:3],
)
LARGER = Shape(
    n_layers=12,
    d_model=384,
    d_mlp=1024,
    n_heads=6,
    vocab_size=8192,
    data=PROSE,
    step_tokens=32_768,
    block=4096,
)
"""24 million parameters."""
TENTH = replace(
    LARGER,
    n_layers=5,
    d_model=192,
    d_mlp=512,
    n_heads=3,
    vocab_size=2048,
    data="bundled",
    step_tokens=4096,
)
"""2.6 million parameters, an eighth of the tokens in a step, and one book."""
LARGER_LENGTH, LARGER_RATE, LARGER_SEEDS = 2048, 2e-3, SEEDS[:2]
"""The rate is that of the size ``small`` of ``sink-lens train``, which has as many tokens in a step."""
TIMES_READ = 4
"""How often a training reads its text at most: up to here it is nearly as good as new text (arXiv 2305.16264)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training."""

    length: int
    bos: bool = False
    arm: str = SOFTMAX
    rate: float
    seed: int
    steps: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what tells it from the others in the table."""
        return tuple(getattr(self, name) for name in RUN)

    @property
    def name(self) -> str:
        """Return the name of its lock."""
        return "-".join(str(one).replace(" ", "_").replace("'", "") for one in self.key)

    def train(self, shape: Shape, *, device: str = "cpu") -> Ended:
        """Train it."""
        asked: dict[str, Any] = {name: getattr(self, name) for name in RUN if name != "arm"}
        is_trial = self.seed == TRIAL_SEED
        return train_on_crops(
            shape, fields=ARMS[self.arm], losses_only=is_trial, device=device, **asked
        )

    def label(self, rows: Any) -> pd.DataFrame:
        """Rows with what tells this training from the others."""
        return pd.DataFrame(rows).assign(**{name: getattr(self, name) for name in RUN})


def measure(work: Work) -> Measured:
    """The committed trainings, judged; with ``--retrain`` those that are missing are trained first, one by one."""
    if work.tiny:
        setup, (table, positions) = TINY, in_memory(TINY)
    else:
        if work.retrain:
            train_missing(until=math.inf)
        setup, table, positions = REAL, read(HERE / FILE), read(HERE / POSITIONS)
    return Measured(numbers=numbers_of(table, setup), figure=draw(table, positions, setup))


def in_memory(setup: Setup) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every training, in two tables that are not written."""
    tables = [read(None), read(None)]
    while one := next(not_there(tables[0], setup), None):
        ended = one.train(setup.shape)
        found = (one.label(ended.rows), one.label(ended.positions))
        tables = [
            pd.concat([*([table] if len(table) else []), new])
            for table, new in zip(tables, found, strict=True)
        ]
    return tables[0], tables[1]


def read(path: Path | None) -> pd.DataFrame:
    """A committed table; one without rows where there is none."""
    if path is None or not path.exists():
        of_positions = ["layer", "from", "to", "s2"]
        return pd.DataFrame(
            columns=[*RUN, "step", "tokens", *READ, "prose", "s2_ratio", *of_positions]
        )
    return pd.read_csv(path)


def not_there(table: pd.DataFrame, setup: Setup) -> Iterator[Training]:
    """The trainings that the table lacks and that can be made now, in the order in which they decide."""
    done = {tuple(row) for row in table[RUN].drop_duplicates().itertuples(index=False)}
    yield from (one for one in gate_of(setup) if one.key not in done)
    longest = longest_of(table, setup)
    if longest is None:
        return
    arms = [(setup.lengths[0], arm) for arm in (SOFTMAX, MATCHED)] + [
        (longest, arm) for arm in ARMS
    ]
    tried = {
        (length, arm): [
            Training(length=length, arm=arm, rate=rate, seed=TRIAL_SEED, steps=setup.steps // 3)
            for rate in setup.rates
        ]
        for length, arm in arms
    }
    yield from (one for trials in tried.values() for one in trials if one.key not in done)
    for seed in setup.seeds:
        for length, arm in arms:
            if all(one.key in done for one in tried[length, arm]):
                rate = best_rate(with_kind(table), length=length, arm=arm)
                one = Training(length=length, arm=arm, rate=rate, seed=seed, steps=setup.steps)
                if one.key not in done:
                    yield one


def gate_of(setup: Setup) -> list[Training]:
    """The gate's trainings; those that decide come first, the longest first of all."""
    return [
        Training(length=length, bos=bos, rate=GATE_RATE, seed=0, steps=setup.steps)
        for bos in (False, True)
        for length in reversed(setup.lengths)
    ]


def ratio_in_gate(table: pd.DataFrame, one: Training) -> float:
    """S2 of the first token over the others', at the end of one of the gate's trainings; nan before it has ended."""
    rows = table[(table[RUN] == list(one.key)).all(axis=1)]
    return float(rows.loc[rows["step"] == one.steps, "s2_ratio"].mean()) if len(rows) else math.nan


def longest_of(table: pd.DataFrame, setup: Setup) -> int | None:
    """The longest length that passes the gate, without BOS; None where none does, or it is not known yet."""
    for one in gate_of(setup):
        ratio = ratio_in_gate(table, one)
        if one.bos or math.isnan(ratio):
            return None
        if ratio >= PASSES:
            return one.length
    return None


def with_kind(table: pd.DataFrame) -> pd.DataFrame:
    """The trainings without BOS, each a trial or a final."""
    kind = np.where(table["seed"] == TRIAL_SEED, "trial", "final")
    return table.assign(kind=kind)[~table["bos"].astype(bool)]


def finals_of(table: pd.DataFrame, length: int) -> pd.DataFrame:
    """The rows of the trainings of a length that are no trials, at each arm's best rate, by step."""
    of_length = with_kind(table)
    of_length = of_length[of_length["length"] == length]
    finals = of_length[of_length["kind"] == "final"]
    arms = set(of_length.loc[of_length["kind"] == "trial", "arm"])
    best = {arm: best_rate(of_length, arm=arm) for arm in arms}
    return finals[finals["rate"] == finals["arm"].map(best)].sort_values("step")


def numbers_of(table: pd.DataFrame, setup: Setup) -> dict[str, Interval]:
    """Every number, over seeds, paired with softmax of the same seed; 95% t intervals."""
    longest = longest_of(table, setup) or setup.lengths[-1]
    by_length = {length: finals_of(table, length) for length in (setup.lengths[0], longest)}
    together = pd.concat(
        [rows.assign(arm=rows["arm"] + f" {length}") for length, rows in by_length.items()]
    )
    seeds = judged_seeds(
        together, [f"{arm} {length}" for length in by_length for arm in (SOFTMAX, MATCHED)]
    )
    near, far = (differences(rows, MATCHED, seeds)["loss"] for rows in by_length.values())
    numbers = {"difference": over_seeds(far - near)}
    for length, rows in by_length.items():
        found = against_softmax(rows, MATCHED, seeds) | of_softmax(rows, seeds)
        numbers |= {f"{name} @ {length:,} tokens": one for name, one in found.items()}
    drawn = by_length[longest]
    found = against_softmax(drawn, DRAW, judged_seeds(drawn, [SOFTMAX, DRAW]))
    numbers |= {f"drawn_{name}": found[name] for name in ("loss", "parity", "sink_less")}
    for one in gate_of(setup):
        where = "BOS" if one.bos else "no BOS"
        numbers[f"gate @ {one.length:,} tokens, {where}"] = certain(ratio_in_gate(table, one))
    return numbers


def differences(rows: pd.DataFrame, arm: str, seeds: Sequence[int]) -> pd.DataFrame:
    """By seed: an arm's loss and readings at the end minus softmax's, and the ratios of what is judged by ratio."""
    own, base = (
        rows[rows["arm"] == one].groupby("seed").last().reindex(seeds) for one in (arm, SOFTMAX)
    )
    return pd.DataFrame(
        {
            "loss": own["prose"] - base["prose"],
            "parity": own["s2_ratio"],
            "sink_less": own["rate_first"] - base["rate_first"],
            "outliers_less": own["kurtosis"] - base["kurtosis"],
            "largest": own["max_activation"] / base["max_activation"],
        }
    ).astype(float)


def against_softmax(rows: pd.DataFrame, arm: str, seeds: Sequence[int]) -> dict[str, Interval]:
    """An arm's numbers beside those of softmax at one length, paired by seed."""
    of_seeds = differences(rows, arm, seeds)
    largest = ratio_over_seeds(of_seeds.pop("largest"))
    pairs = [(curve(rows, SOFTMAX, seed), curve(rows, arm, seed)) for seed in seeds]
    return {name: over_seeds(of_seeds[name]) for name in of_seeds} | {
        "largest": largest,
        "half": over_seeds([lead(*pair, share=1 / 2) for pair in pairs]),
        "quarter": over_seeds([lead(*pair, share=1 / 4) for pair in pairs]),
        "tokens": ratio_over_seeds([tokens_of(*pair) for pair in pairs]),
    }


def lead(base: pd.DataFrame, own: pd.DataFrame, *, share: float) -> float:
    """A training's loss minus softmax's after a share of the tokens."""
    at = share * base["tokens"].iloc[-1]
    after, before = (np.interp(at, one["tokens"], one["prose"]) for one in (own, base))
    return float(after - before)


def of_softmax(rows: pd.DataFrame, seeds: Sequence[int]) -> dict[str, Interval]:
    """Discrepancy, sinks and outliers of softmax at one length, which the norm could repair."""
    ends = rows[rows["arm"] == SOFTMAX].groupby("seed").last().reindex(seeds)
    columns = {"discrepancy": "s2_ratio", "sink": "rate_first", "outliers": "kurtosis"}
    return {name: over_seeds(ends[column]) for name, column in columns.items()}


def draw(table: pd.DataFrame, positions: pd.DataFrame, setup: Setup):
    """The gate, S2 by position, losses and sinks by tokens with bands, and trials, as far as they are there."""
    longest = longest_of(table, setup) or setup.lengths[-1]
    shown: list[tuple[int, str, pd.DataFrame, str]] = []
    for length in (setup.lengths[0], longest):
        finals, of_length = finals_of(table, length), with_kind(table).query("length == @length")
        shown.append(
            (
                length,
                "loss minus softmax's",
                finals if finals["arm"].nunique() > 1 else finals[:0],
                "prose",
            )
        )
        shown.append((length, "heads with a sink", finals, "rate_first"))
        shown.append((length, "loss, trials", of_length[of_length["kind"] == "trial"], ""))
    shown = [one for one in shown if len(one[2])]
    rows = math.ceil((2 + len(shown)) / 4)
    figure = new_figure(width=12 if shown else 7, height=2.9 * rows + 0.5)
    columns = 4 if shown else 2
    axes = panel(
        figure,
        place=(rows, columns, 1),
        xlabel="tokens of a sequence",
        ylabel="S2, first over others",
    )
    for bos, marker in ((False, "o"), (True, "s")):
        ratios = {one.length: ratio_in_gate(table, one) for one in gate_of(setup) if one.bos == bos}
        axes.plot(
            list(ratios), list(ratios.values()), marker=marker, label="BOS" if bos else "no BOS"
        )
    axes.axhline(PASSES, color="grey", linestyle=":")
    axes.set_title("gate: softmax, mean over layers", fontsize=9)
    axes = panel(figure, place=(rows, columns, 2), xlabel="position + 1", ylabel="S2")
    of_gate = positions[
        (positions[RUN] == [longest, False, SOFTMAX, GATE_RATE, 0, setup.steps]).all(axis=1)
    ]
    for layer, by_position in of_gate.groupby("layer"):
        middle = np.sqrt((by_position["from"] + 1) * (by_position["to"] + 1))
        axes.plot(middle, by_position["s2"], marker=".", label=f"layer {layer}")
    axes.set_title(f"gate: {longest:,} tokens, no BOS", fontsize=9)
    for one in figure.axes:
        log_scale(one, axis="x")
        one.legend(fontsize=7)
    for place, (length, ylabel, frame, name) in enumerate(shown, start=3):
        xlabel = "tokens, millions" if name else "learning rate"
        axes = panel(figure, place=(rows, columns, place), xlabel=xlabel, ylabel=ylabel)
        axes.set_title(f"{length:,} tokens", fontsize=9)
        if name:
            draw_bands(axes, frame, STYLES, name=name, paired=name == "prose", unit=1e6)
        else:
            draw_trials(axes, frame, STYLES)
    if shown:
        drawn = set(axes.get_legend_handles_labels()[1])
        for arm in [arm for arm in ARMS if arm not in drawn]:
            axes.plot([], [], label=arm, **STYLES[arm])
        legend(axes, columns=3, over=figure)
    return without_formulas(figure)


def train_missing(*, until: float) -> None:
    """Train what the committed table lacks, until nothing is left or the time is up; several processes may do so."""
    torch.set_num_threads(1)

    def make(one: Training) -> None:
        began = time.time()
        ended = one.train(REAL.shape)
        append(one.label(ended.rows), HERE / FILE, by=RUN, locks=LOCKS)
        if len(ended.positions):
            append(one.label(ended.positions), HERE / POSITIONS, by=RUN, locks=LOCKS)
        print(
            f"{one.key}: loss {ended.rows[-1]['prose']:.4f}, {time.time() - began:.0f} s",
            flush=True,
        )

    work_off(lambda: not_there(read(HERE / FILE), REAL), make, locks=LOCKS, until=until)


def train_larger(arguments: Sequence[str]) -> None:
    """The command line of ``run.py gpu``: as many tokens as the time gives, the same number in every training."""
    parser = argparse.ArgumentParser(
        prog="run.py gpu", description="Train 24M parameters: softmax and matched."
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="for all trainings together; 9 if not given"
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=HERE / "gpu.csv",
        help="the table; a row is added when it is made",
    )
    parser.add_argument(
        "--tenth", action="store_true", help="a tenth of the parameters, as a rehearsal"
    )
    asked = parser.parse_args(arguments)
    shape = TENTH if asked.tenth else LARGER
    table = read(asked.into)
    steps = (
        int(table["steps"].iloc[0])
        if len(table)
        else steps_in(60 * asked.minutes, shape, device=asked.device)
    )
    print(f"{steps} steps of {shape.step_tokens:,} tokens for each training", flush=True)
    for seed in LARGER_SEEDS:
        for arm in (SOFTMAX, MATCHED):
            one = Training(length=LARGER_LENGTH, arm=arm, rate=LARGER_RATE, seed=seed, steps=steps)
            if (table[RUN] == list(one.key)).all(axis=1).any():
                continue
            began = time.time()
            rows = one.label(one.train(shape, device=asked.device).rows)
            append(rows, asked.into, by=RUN, locks=LOCKS)
            last = rows.iloc[-1]
            print(
                f"{arm}, seed {seed}: loss {last['prose']:.4f}, S2 of the first token {last['s2_ratio']:.2f}, "
                f"heads with a sink {last['rate_first']:.2f}, {time.time() - began:.0f} s",
                flush=True,
            )


def steps_in(seconds: float, shape: Shape, *, device: str) -> int:
    """Steps of each training so that all end in time, from the time of short ones; see ``TIMES_READ`` for the most."""
    short, long = (3, 9) if device == "cpu" else (20, 120)
    spent = {}
    for steps in (short, short, long):  # the first also packs the text and loads the kernels
        began = time.time()
        one = Training(length=LARGER_LENGTH, arm=MATCHED, rate=LARGER_RATE, seed=0, steps=steps)
        one.train(shape, device=device)
        spent[steps] = time.time() - began
    a_step = max((spent[long] - spent[short]) / (long - short), 1e-6)
    for_steps = seconds / (2 * len(LARGER_SEEDS)) - (spent[short] - short * a_step)
    most = TIMES_READ * len(corpus_of(shape)[1]) // shape.step_tokens
    return max(long, min(most, int(0.95 * for_steps / a_step)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        parser = argparse.ArgumentParser(
            prog="run.py train", description="Train what runs.csv lacks."
        )
        parser.add_argument(
            "--minutes", type=float, default=math.inf, help="begin no training after as many"
        )
        train_missing(until=time.time() + 60 * parser.parse_args(sys.argv[2:]).minutes)
    elif sys.argv[1:2] == ["gpu"]:
        train_larger(sys.argv[2:])
    else:
        main(measure)

"""Births of sinks in toy trainings, and trainings without one: what the monitor's alarms say, and how often they err.

    python -m benchmarks.monitor_births --train --task trigger --seeds 100:120 --out more.parquet  # 10 to 20 s each
    python -m benchmarks.monitor_births              # the alarms on the committed readings
    python -m benchmarks.monitor_births --calibrate  # the choice of the birth rule

Two tasks on a Llama of 2 layers and width 64. *Trigger*: at a trigger token the answer is the mean of the tokens'
vectors before it, everywhere else it is nothing, so that a softmax needs a place to look at (arXiv 2603.11487). *Copy*:
the answer is always the vector of the token before. The truth is the sink rate at position 0 on 64 sequences that are
kept apart: the birth is the first reading from which it stays at or over 0.05, as in ``watch``. The alarms see what the
monitor reads of four sequences of the training batch and gathers from four steps, every 10 steps or every 50.

An alarm of a birth is right where it comes at most two intervals from it (all are readings). The rule
was chosen on seeds 0 to 9, as the largest limit among those with no false alarm and the fewest births missed or late;
the numbers that count are those of seeds from 100 on.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from analyses.trigger import FIRST, trigger_rows
from sink_lens.schema import MIN_SINK_RATE
from sink_lens.training.monitor import SinkMonitor
from sink_lens.training.monitor_alarms import RULES, Alarms, Rule

VOCAB, ANSWER, LENGTH, BATCH, STEPS, EVERY = 64, 16, 32, 32, 300, 10
READINGS = Path(__file__).with_name("monitor_births.parquet")
SEEN = (
    "rate_first",
    "rate_strongest",
    "strongest_position",
    "strongest_sequences",
    "mass_first",
    "norm_ratio",
    "max_activation",
    "max_logit",
)
LAYERS = ("rate_first/layer_0", "rate_first/layer_1")


def rows(
    task: str, vectors: Tensor, generator: torch.Generator, n: int = BATCH
) -> tuple[Tensor, Tensor]:
    """Tokens and the answers to them."""
    if task == "trigger":
        return trigger_rows(vectors, sequences=n, length=LENGTH, generator=generator)
    tokens = torch.randint(2, VOCAB, (n, LENGTH), generator=generator)
    tokens[:, 0] = FIRST
    answers = vectors[tokens].roll(1, dims=1)
    answers[:, 0] = 0
    return tokens, answers


def training(task: str, seed: int) -> Iterator[dict[str, float | int | str]]:
    """The readings of one training, and the truth beside them."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(VOCAB, ANSWER, generator=generator)
    apart, _ = rows(task, vectors, torch.Generator().manual_seed(seed + 10**6), 64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with (
        SinkMonitor(model, every=EVERY) as monitor,
        SinkMonitor(model, every=EVERY, tokens=apart) as truth,
    ):
        for step in range(STEPS):
            tokens, answers = rows(task, vectors, generator)
            loss = (
                (model(input_ids=tokens, use_cache=False).logits[..., :ANSWER] - answers)
                .square()
                .mean()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reading, true = monitor.step(), truth.step()
            if reading is not None and true is not None:
                seen = {name: reading[f"sinks/{name}"] for name in (*SEEN, *LAYERS)}
                yield {
                    "task": task,
                    "seed": seed,
                    "step": step,
                    "loss": loss.item(),
                    "true_rate": true["sinks/rate_first"],
                } | seen


@dataclass(kw_only=True)
class Score:
    """How the alarms of one rule did."""

    trainings: int = 0
    steps: int = 0
    births: int = 0
    found: int = 0
    """Births with an alarm at most two intervals before or after."""
    false: int = 0
    """Alarms with no birth there."""
    delays: list[int] = field(default_factory=list)
    """Steps from the birth to the alarm that found it."""


def birth_of(training: pd.DataFrame) -> int | None:
    """The first reading from which the true rate stays at or over the least rate of a sink."""
    steps, rates = training["step"].tolist(), training["true_rate"].tolist()
    first = len(rates)
    while first > 0 and rates[first - 1] >= MIN_SINK_RATE:
        first -= 1
    return steps[first] if first < len(rates) else None


def score(frame: pd.DataFrame, rule: Rule, *, every: int) -> Score:
    """Score a rule on every training of the frame, with a reading every ``every`` steps."""
    result = Score()
    for _, training in frame.groupby(["task", "seed"]):
        birth = birth_of(training)
        alarms, raised = Alarms(rules=(rule,), threshold=0.3), []
        for row in training[training["step"] % every == 0].to_dict("records"):
            reading = {(name, None): float(row[name]) for name in SEEN}
            raised += [alarm.step for alarm in alarms.add_reading(reading, step=int(row["step"]))]
        right = [
            step
            for step in raised
            if birth is not None and birth - 2 * every <= step <= birth + 2 * every
        ]
        result.trainings += 1
        result.steps += int(training["step"].max()) + EVERY
        result.births += birth is not None
        result.found += bool(right)
        result.false += len(raised) - bool(right)
        result.delays += [right[0] - birth] if right and birth is not None else []
    return result


def judge(frame: pd.DataFrame) -> None:
    """Print what each rule finds and how often it errs, on the seeds that it was not chosen on."""
    apart = frame[frame["seed"] >= 100]
    for rule, every in itertools.product(RULES, (10, 50)):
        for task, part in apart.groupby("task"):
            one = score(part, rule, every=every)
            told = f"{rule.name}, {task}, every {every}: {one.trainings} trainings, {one.steps:,} steps"
            if rule.name == "sink_born":
                told += f"; births found {one.found} of {one.births}"
                told += (
                    f", {min(one.delays)} to {max(one.delays)} steps after" if one.delays else ""
                )
                told += (
                    f"; false alarms {one.false}, {1000 * one.false / one.steps:.2f} in 1,000 steps"
                )
            else:
                alarms = one.false + one.found
                told += f"; alarms {alarms}, {1000 * alarms / one.steps:.2f} in 1,000 steps"
            print(told)


def calibrate(frame: pd.DataFrame) -> None:
    """Print each allowance and limit of the birth rule on the seeds that it is chosen on."""
    ours = frame[frame["seed"] < 100]
    rule = next(rule for rule in RULES if rule.name == "sink_born")
    for allowance, limit in itertools.product(
        (0.0, 0.01, 0.02, 0.05), (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
    ):
        one = replace(rule, allowance=allowance, limit=limit)
        told = []
        for every in (10, 50):
            done = score(ours, one, every=every)
            told.append(f"every {every}: found {done.found} of {done.births}, false {done.false}")
        print(f"allowance {allowance}, limit {limit}: {'; '.join(told)}")


def main() -> None:
    """Train, or judge the alarms on readings that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--task", choices=["trigger", "copy"], default="trigger")
    parser.add_argument("--seeds", default="0:10")
    parser.add_argument("--out", default="births.parquet")
    parser.add_argument("--calibrate", action="store_true")
    asked = parser.parse_args()
    if asked.calibrate:
        calibrate(pd.read_parquet(READINGS))
        return
    if not asked.train:
        judge(pd.read_parquet(READINGS))
        return
    torch.set_num_threads(1)
    frames = []
    for seed in range(*map(int, asked.seeds.split(":"))):
        began = time.perf_counter()
        frames.append(pd.DataFrame(training(asked.task, seed)))
        pd.concat(frames).to_parquet(asked.out, index=False)
        print(f"{asked.task} {seed}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

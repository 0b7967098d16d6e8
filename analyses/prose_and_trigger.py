"""Trainings of 2.9M parameters on prose beside the trigger task, where softmax gets a sink; several analyses use them.

Half of the sequences of a step are prose and half are the trigger task, or all are prose. A training that keeps a
checkpoint goes on from it as if it had not been stopped.
"""

import contextlib
import functools
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from analyses.claims import Work
from analyses.trigger import trigger_rows
from sink_lens import capture, run_with
from sink_lens.edits.quantisation import quantisation
from sink_lens.measures.variance import s2
from sink_lens.models.headnorm import undecayed
from sink_lens.models.load import wrap
from sink_lens.report.style import COLOURS, MARKS, log_scale
from sink_lens.schema import LINEAR_INPUTS
from sink_lens.stats import Interval, t_intervals
from sink_lens.training import SinkMonitor, TrainConfig
from sink_lens.training.batches import TrainingRows, load_training_rows
from sink_lens.training.loss_curves import tokens_to_reach
from sink_lens.training.model import model_of

TRIAL_SEED, SEEDS = 100, (0, 1, 2, 3, 4, 5)
JUDGED_AT = (6, 3)
"""Numbers of seeds at which a claim is judged: at the first that every arm has."""
BUDGETS = {"short": (300, 4), "middle": (1000, 8), "extended": (4000, 8), "long": (4000, 32)}
"""Budget -> steps, and the sequences of prose in each, beside as many of the task; a trial has a third of the steps."""
PROSE, TASK, ANSWER, SYMBOLS = 64, 32, 64, 256
"""Tokens of a sequence of prose and of the task; width of the task's answers, and its ids."""
WEIGHT = 10.0
"""Factor of the task's squared error, which is added to the cross entropy of prose."""
MODEL: dict[str, Any] = {
    "n_layers": 4,
    "d_model": 224,
    "d_mlp": 600,
    "n_heads": 4,
    "vocab_size": 2048,
    "data": "build/prose.parquet",
}
"""2.9 million parameters."""
READ = ("rate_first", "mass_first", "kurtosis", "max_activation", "norm_ratio", "dominance")
SAVE_EVERY = 200
"""Steps between checkpoints."""

Change = Callable[[Any, Callable[..., Any]], object]
"""Changes a model before it is trained; called with the model and a function that makes another of the same seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One training of an arm."""

    budget: str
    rate: float
    seed: int
    is_trial: bool = False
    """A third of the steps, and no readings but the losses at its begin and end."""
    with_task: bool = True
    """Or the prose alone, in the same order."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``TrainConfig`` that the arm changes."""
    change: Change | None = None
    by_layer: bool = False
    """Read the gain, and the size of what attention writes, in each layer with every loss."""


def training(
    work: Work, asked: Asked, *, keep: Path | None = None, device: str = "cpu"
) -> Iterator[dict[str, float | int | str]]:
    """One training's readings on prose and on sequences of the task that are kept apart; one that diverges ends there.

    Args:
        work: says whether it is a tiny one.
        asked: what is trained.
        keep: a folder for a checkpoint, which a stopped training goes on from; it is removed at the end.
        device: where it is trained; a GPU runs the whole step as one graph.
    """
    steps, batch = work.size(BUDGETS[asked.budget], (6, 2))
    if asked.is_trial:
        steps //= 3
    config = TrainConfig(
        length=PROSE,
        batch=batch,
        steps=steps,
        warmup=max(1, steps // 10),
        lr=asked.rate,
        min_lr=asked.rate / 10,
        seed=asked.seed,
        device="cpu",
        eval_sequences=work.size(64, 8),
        **MODEL
        | work.size(
            {}, {"data": "bundled", "n_layers": 2, "d_model": 48, "d_mlp": 64, "vocab_size": 300}
        ),
        **asked.fields,
    )
    corpus = {
        "data": config.data,
        "vocab_size": config.vocab_size,
        "eval_sequences": config.eval_sequences,
    }
    rows = corpus_with(length=PROSE, **corpus)
    drawn, apart = (
        torch.Generator().manual_seed(seed) for seed in (asked.seed, asked.seed + 10**6)
    )
    vectors = torch.randn(work.size(SYMBOLS, 64), work.size(ANSWER, 8), generator=drawn)
    held_out = [
        one.to(device)
        for one in trigger_rows(vectors, sequences=work.size(64, 8), length=TASK, generator=apart)
    ]
    order = torch.randperm(len(rows.train), generator=drawn)
    prose = torch.stack(
        [rows.evaluation[index]["input_ids"] for index in range(len(rows.evaluation))]
    ).to(device)
    model = model_of(config, tokenizer=rows.tokenizer).train()
    if asked.change is not None:
        asked.change(
            model, lambda **fields: model_of(replace(config, **fields), tokenizer=rows.tokenizer)
        )
    model.to(device)  # type: ignore[arg-type]  # transformers' stub takes no name of a device
    optimizer = adamw(model, config)
    per_step = batch * (PROSE + TASK * asked.with_task)

    def prose_loss(text: Tensor) -> Tensor:
        return model(input_ids=text, labels=text, use_cache=False).loss

    def task_loss(tokens: Tensor, answers: Tensor) -> Tensor:
        given = model(input_ids=tokens, use_cache=False).logits[..., : answers.shape[-1]]
        return (given - answers).square().mean()

    def backward(text: Tensor, *of_task: Tensor) -> None:
        prose_loss(text).backward()
        if of_task:
            (WEIGHT * task_loss(*of_task)).backward()

    done = (
        Progress(spent=0.0, rows=[], step=0)
        if keep is None
        else resumed(keep, model, optimizer, drawn)
    )
    yield from done.rows
    make_step = step_on_cpu if device == "cpu" else step_on_gpu
    advance = make_step(model, optimizer, backward=backward, clip=config.clip)
    every = steps if asked.is_trial else max(1, steps // 12)  # a trial is asked for its end alone
    for step in range(done.step, steps + 1):
        is_read = step % every == 0 or step == steps
        if keep is not None and step % SAVE_EVERY == 0 and step not in (0, done.step):
            save(
                keep, model, optimizer, drawn, Progress(spent=done.spent, rows=done.rows, step=step)
            )
        if is_read and not any(row["step"] == step for row in done.rows):
            row: dict[str, Any] = {"step": step, "tokens": step * per_step, "seconds": done.spent}
            with torch.no_grad(), sizes_by_layer(model, asked.by_layer) as sizes:
                row["prose"] = prose_loss(prose).item()
                row["task"] = task_loss(*held_out).item() if asked.with_task else math.nan
            row |= sizes
            diverged = not math.isfinite(row["prose"])
            if diverged or step == steps:
                row["machine"] = machine(device)
            if diverged:
                yield row
                break
            if step % (4 * every) == 0 or step == steps:
                row |= readings(model, prose=prose, task=held_out[0] if asked.with_task else None)
            if step == steps:
                row |= at_the_end(model, prose)
            done.rows.append(row)
            yield row
        if step == steps:
            break
        began = time.process_time()
        chosen = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        text = torch.stack([rows.train[int(index)]["input_ids"] for index in chosen])
        of_task = (
            trigger_rows(vectors, sequences=batch, length=TASK, generator=drawn)
            if asked.with_task
            else ()
        )
        advance(rate_at(step, config), text, *of_task)
        # A tiny training is not timed: every token takes as long.
        done.spent += per_step / 1e3 if work.tiny else time.process_time() - began
    if keep is not None:
        shutil.rmtree(keep, ignore_errors=True)


@functools.cache
def corpus_with(**fields: Any) -> TrainingRows:
    """The prose of a configuration, hashed and read once for all trainings of a process."""
    return load_training_rows(TrainConfig(**fields), progress=False)


Step = Callable[..., None]
"""A step of the optimizer: rate, text, and tokens and answers of the task if there is one."""


def step_on_cpu(
    model: Any, optimizer: torch.optim.Optimizer, *, backward: Callable[..., None], clip: float
) -> Step:
    """A step as it is written."""

    def advance(rate: float, *inputs: Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        backward(*inputs)
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return advance


def step_on_gpu(
    model: Any, optimizer: torch.optim.Optimizer, *, backward: Callable[..., None], clip: float
) -> Step:
    """The same step, captured as one CUDA graph at the first call: a step of this size is all launches of kernels."""
    device = next(model.parameters()).device
    rate_there = torch.zeros((), device=device)
    for group in optimizer.param_groups:
        group |= {"capturable": True, "lr": rate_there}
    begin_state(optimizer)
    given: list[Tensor] = []
    graph: Any = None

    def advance(rate: float, *inputs: Tensor) -> None:
        nonlocal graph
        if graph is None:
            given[:] = [one.to(device) for one in inputs]
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # the libraries take their memory before the capture
                for _ in range(3):
                    backward(*given)
                    optimizer.zero_grad(set_to_none=True)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                backward(*given)
                clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        for there, here in zip(given, inputs, strict=True):
            there.copy_(here)
        rate_there.fill_(rate)
        graph.replay()

    return advance


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state where it has none, so that a captured step finds it: moments and steps of 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).to(
                parameter.device
            )
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(parameter))


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of a training that a checkpoint keeps beside its tensors."""

    spent: float
    """Processor time."""
    rows: list[dict[str, Any]]
    step: int


def save(keep: Path, model: Any, optimizer: Any, drawn: torch.Generator, done: Progress) -> None:
    """Write a checkpoint beside the one before, then put it in its place."""
    part = keep.with_name(keep.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    names = [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    tensors = {f"model.{name}": parameters[name].detach() for name in names}
    for name in names:
        for key, value in optimizer.state[parameters[name]].items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).detach()
    tensors["drawn"] = drawn.get_state()
    safetensors.torch.save_file(
        {name: one.cpu().contiguous() for name, one in tensors.items()}, part / "state.safetensors"
    )
    text = json.dumps({"spent": done.spent, "rows": done.rows, "step": done.step})
    (part / "progress.json").write_text(text, encoding="utf-8")
    shutil.rmtree(keep, ignore_errors=True)
    part.rename(keep)


def resumed(keep: Path, model: Any, optimizer: Any, drawn: torch.Generator) -> Progress:
    """Read a checkpoint into what it was written from; the beginning where there is none."""
    if not (keep / "progress.json").is_file():
        return Progress(spent=0.0, rows=[], step=0)
    tensors = safetensors.torch.load_file(keep / "state.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            state = {
                key: tensors.get(f"optimizer.{key}.{name}")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
            optimizer.state[parameter] = {
                key: value.to(parameter.device) for key, value in state.items() if value is not None
            }
    drawn.set_state(tensors["drawn"])
    return Progress(**json.loads((keep / "progress.json").read_text(encoding="utf-8")))


def machine(device: str) -> str:
    """The processor or GPU, without a host's name."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = {
        line.partition(":")[2].strip()
        for line in text.splitlines()
        if line.startswith("model name")
    }
    return f"{'; '.join(sorted(found)) or platform.machine()}, one thread"


@contextlib.contextmanager
def sizes_by_layer(model: Any, is_asked: bool) -> Iterator[dict[str, float]]:
    """Read the mean gain of the norm and the root mean square of what attention writes, in each layer."""
    sizes: dict[str, float] = {}

    def wrote(layer: int, module: Any, inputs: Any, out: Tensor) -> None:
        sizes.setdefault(
            f"wrote_{layer}", out.square().mean().sqrt().item()
        )  # of the first forward, on prose

    handles = []
    if is_asked:
        sizes |= {f"gain_{layer}": gain for layer, gain in enumerate(model.mean_gains())}
        for layer, one in enumerate(model.model.layers):
            handles.append(one.self_attn.o_proj.register_forward_hook(partial(wrote, layer)))
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def hold_parity(model: Any, *, sizes: Sequence[float]) -> None:
    """Bring what each head gives to its layer's size, as a constant: the norm without its gradient, or a learned gain.

    Args:
        model: with softmax attention.
        sizes: the norm's first gain in each layer.
    """

    def divided(size: float, module: Any, inputs: Any, z: Tensor) -> Tensor:
        by_head = z.unflatten(-1, (MODEL["n_heads"], -1))
        rms = (by_head.square().mean(-1, keepdim=True) + model.config.value_norm_eps).sqrt()
        return (size * by_head / rms.detach()).flatten(-2)

    for layer, size in zip(model.model.layers, sizes, strict=True):
        layer.self_attn.head_out.register_forward_hook(partial(divided, size))


def adamw(model: Any, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays what ``train`` decays."""
    kept = undecayed(model, unshared_gain=not config.decay_unshared_gain)
    split: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in model.named_parameters():
        split[name in kept].append(parameter)
    groups = [
        {"params": split[0], "weight_decay": config.weight_decay},
        {"params": split[1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def rate_at(step: int, config: TrainConfig) -> float:
    """A linear rise, then a cosine down to a tenth, as in ``train``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / (config.steps - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * share)) / 2


def readings(model: Any, *, prose: Tensor, task: Tensor | None) -> dict[str, float]:
    """Return what the monitor reads of 32 held-out sequences, on prose and on the task."""
    row = {}
    for name, tokens in (("prose", prose), ("task", task)):
        if tokens is None:
            continue
        with SinkMonitor(model, every=1, tokens=tokens[:32], sequences=32) as monitor:
            reading = monitor.finish()
        assert reading is not None  # each step is read
        row |= {f"{key}_{name}": reading[f"sinks/{key}"] for key in READ}
    return row


def at_the_end(model: Any, prose: Tensor) -> dict[str, float]:
    """S2 of the first token over the others', mean over layers, and the loss with inputs of linear layers in 4 bit."""
    lens = wrap(model.eval())
    captured = capture(lens, prose, sites=["z"], path="plain")
    ratios = []
    for layer in range(lens.n_layers):
        z = captured["z", layer]
        by_position = s2(z, valid=torch.ones_like(prose, dtype=torch.bool, device=z.device))
        ratios.append(float(by_position[0] / by_position[8:].mean()))
    edits = [quantisation(site, "int4_token") for site in LINEAR_INPUTS]
    rounded = run_with(lens, prose, edits).loss
    assert rounded is not None  # it was asked for
    model.train()
    return {"s2_ratio": float(np.mean(ratios)), "prose_4_bit": float(rounded.mean())}


def best_rate(table: pd.DataFrame, **of: Any) -> float:
    """The rate whose trial has the lowest loss on prose at its end, among the trials with these entries."""
    trials = table[
        (table["kind"] == "trial")
        & np.logical_and.reduce([table[name] == one for name, one in of.items()])
    ]
    ends = trials.sort_values("step").groupby("rate")["prose"].last()
    return float(ends.idxmin())


def judged_seeds(finals: pd.DataFrame, arms: Sequence[str]) -> Sequence[int]:
    """The first six seeds where every arm has them, else the first three; before that, those that every arm has."""
    have = [set(finals.loc[finals["arm"] == arm, "seed"]) for arm in arms]
    common = tuple(seed for seed in SEEDS if all(seed in one for one in have))
    return next(
        (SEEDS[:n] for n in JUDGED_AT if common[:n] == SEEDS[:n]), common[: min(JUDGED_AT) - 1]
    )


def over_seeds(values: Any) -> Interval:
    """Their mean with a 95% t interval, which fewer seeds than are judged have not."""
    found = t_intervals(np.asarray(values, dtype=float)[None])[0]
    return found if found.n >= min(JUDGED_AT) else replace(found, low=math.nan, high=math.nan)


def ratio_over_seeds(values: Any) -> Interval:
    """Their geometric mean, with the interval of the logarithm."""
    found = over_seeds(np.log(values))
    low, estimate, high = (math.exp(one) for one in (found.low, found.estimate, found.high))
    return Interval(estimate=estimate, low=low, high=high, n=found.n)


def against_softmax(finals: pd.DataFrame, arm: str, seeds: Sequence[int]) -> dict[str, Interval]:
    """An arm's numbers beside those of softmax, paired by seed."""
    ends = finals.sort_values("step").groupby(["arm", "seed"]).last()
    ends["rise"] = ends["prose_4_bit"] - ends["prose"]
    own, base = (
        ends[ends.index.get_level_values("arm") == one].droplevel("arm") for one in (arm, "softmax")
    )
    pairs = [(curve(finals, "softmax", seed), curve(finals, arm, seed)) for seed in seeds]
    return {
        "tokens": ratio_over_seeds([tokens_of(*pair) for pair in pairs]),
        "loss": over_seeds(own["prose"] - base["prose"]),
        "time": over_seeds([loss_in_time(*pair) for pair in pairs]),
        "cost": ratio_over_seeds(own["seconds"] / base["seconds"]),
        "task": ratio_over_seeds(own["task"] / base["task"]),
        "parity": over_seeds(own["s2_ratio"]),
        "sink_less": over_seeds(own["rate_first_prose"] - base["rate_first_prose"]),
        "outliers_less": over_seeds(own["kurtosis_prose"] - base["kurtosis_prose"]),
        "largest": ratio_over_seeds(own["max_activation_prose"] / base["max_activation_prose"]),
        "rounded": over_seeds(own["rise"] - base["rise"]),
    }


def ends_of(table: pd.DataFrame) -> pd.Series:
    """The loss on prose at the end, by kind, arm and seed."""
    return table.sort_values("step").groupby(["kind", "arm", "seed"])["prose"].last()


def minus(ends: pd.Series, one: tuple[str, str], other: tuple[str, str]) -> Interval:
    """One kind and arm's loss minus another's, over three seeds, paired; nan where nothing is trained."""
    seeds = SEEDS[: min(JUDGED_AT)]
    own, base = np.array(
        [[ends.get((*arm, seed), math.nan) for seed in seeds] for arm in (one, other)], dtype=float
    )
    return over_seeds(own - base)


def of_softmax(finals: pd.DataFrame) -> dict[str, Interval]:
    """Sinks, outliers and discrepancy of softmax, which the norm could repair."""
    ends = finals[finals["arm"] == "softmax"].sort_values("step").groupby("seed").last()
    columns = {"sink": "rate_first_prose", "outliers": "kurtosis_prose", "discrepancy": "s2_ratio"}
    return {name: over_seeds(ends[column]) for name, column in columns.items()}


def curve(finals: pd.DataFrame, arm: str, seed: int) -> pd.DataFrame:
    """The rows of one training."""
    return finals[(finals["arm"] == arm) & (finals["seed"] == seed)].sort_values("step")


def tokens_of(base: pd.DataFrame, own: pd.DataFrame) -> float:
    """Tokens to the loss that softmax has at half of its tokens, over those of softmax; nan where it is not reached."""
    half = base["tokens"].iloc[-1] / 2
    target = float(np.interp(half, base["tokens"], base["prose"]))
    return (
        tokens_to_reach(own["tokens"].to_numpy(float), own["prose"].to_numpy(float), target=target)
        / half
    )


def loss_in_time(base: pd.DataFrame, own: pd.DataFrame) -> float:
    """Loss on prose minus softmax's, after the processor time of the faster of the two."""
    until = min(base["seconds"].iloc[-1], own["seconds"].iloc[-1])
    after, before = (float(np.interp(until, one["seconds"], one["prose"])) for one in (own, base))
    return after - before


def styles_of(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, mark and line of each arm; from the second round of colours on lines are dashed."""
    return {
        arm: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKS[index % len(MARKS)],
            "markersize": 3,
            "linewidth": 1.3,
            "linestyle": "-" if index < len(COLOURS) else "--",
        }
        for index, arm in enumerate(arms)
    }


def draw_bands(
    axes: Any,
    rows: pd.DataFrame,
    styles: Mapping[str, Mapping[str, Any]],
    *,
    name: str,
    paired: bool,
    unit: float,
) -> None:
    """Draw a column by tokens, or its difference to softmax's of the same seed: the mean with its 95% t interval.

    Args:
        axes: where.
        rows: of trainings of one kind.
        styles: of the arms that may be there.
        name: the column.
        paired: the difference.
        unit: tokens on the axis.
    """
    by_arm = {
        arm: of_arm.pivot(index="tokens", columns="seed", values=name)
        for arm, of_arm in rows.groupby("arm")
    }
    for arm in [arm for arm in styles if arm in by_arm]:
        by_seed = by_arm[arm].dropna(how="all")
        if paired:
            base = by_arm.get("softmax", by_seed[[]])
            by_seed = (by_seed - base).dropna(axis="columns", how="all").dropna(how="all")
        if by_seed.empty:
            continue
        means = t_intervals(by_seed.to_numpy())
        tokens = by_seed.index.to_numpy() / unit
        axes.plot(tokens, [one.estimate for one in means], label=arm, **styles[arm])
        low, high = ([getattr(one, bound) for one in means] for bound in ("low", "high"))
        axes.fill_between(tokens, low, high, color=styles[arm]["color"], alpha=0.15, linewidth=0)


def draw_trials(axes: Any, trials: pd.DataFrame, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the loss on prose of each arm's trials by rate."""
    for arm, rows in trials.sort_values("step").groupby("arm"):
        axes.plot(rows.groupby("rate")["prose"].last(), label=arm, **styles[str(arm)])
    log_scale(axes, axis="x")

"""Softmax and head-wise RMSNorm with two gains, trained where softmax has a sink; see claim.md."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from analyses.claims import Measured, Work, main
from sink_lens import capture, run_with
from sink_lens.data.trigger import trigger_rows
from sink_lens.edits.quantisation import quantisation
from sink_lens.measures.variance import s2
from sink_lens.models.headnorm import undecayed
from sink_lens.models.load import wrap
from sink_lens.report.style import COLOURS, MARKS, canvas, finished, legend, logarithmic, panel
from sink_lens.schema import LINEAR_INPUTS
from sink_lens.stats import Interval, t_intervals
from sink_lens.training import SinkMonitor, TrainConfig
from sink_lens.training.batches import corpus_of
from sink_lens.training.loss_curves import tokens_to_reach
from sink_lens.training.model import model_of

ARMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "shared gain": {"value_norm": "shared"},
    "a gain a head": {"value_norm": "per_head", "value_norm_init": "dummy_pass", "decay_unshared_gain": True},
}
"""What each changes in ``TrainConfig``: the norm of the paper's text, and that of the authors' code."""
BY_HAND, NORM = "parity by hand", "shared gain"
MECHANISM = {BY_HAND: 1.0, NORM: 0.5}
"""Arm that is trained to explain the norm's loss -> its rate over the norm's best."""
RATES = (2e-3, 4e-3, 8e-3)
TRIAL_SEED, SEEDS = 100, (0, 1, 2, 3, 4, 5)
JUDGED_AT = (6, 3)
"""Numbers of seeds at which the claim is judged: at the first that every arm has."""
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
RUN = ["budget", "kind", "arm", "rate", "seed"]
FILE = "runs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of an arm."""

    budget: str
    kind: str
    """trial, final or mechanism."""
    arm: str
    rate: float
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what tells it from the others in the table."""
        return tuple(getattr(self, name) for name in RUN)


def measure(work: Work) -> Measured:
    """The committed trainings, judged; with ``--retrain`` those that are missing are trained first, one by one."""
    table = trained(work)
    numbers: dict[str, Interval] = {}
    for budget in BUDGETS:
        seeds = judged_seeds(table, budget)
        if seeds or not numbers:
            numbers |= numbers_of(table, budget, seeds)
    numbers |= mechanism_of(table, explained(work))
    return Measured(numbers=numbers, figure=draw(table))


def trained(work: Work) -> pd.DataFrame:
    """All rows; each training's are appended to the committed table when it ends, so that any machine can go on."""
    path = work.folder / FILE
    rows = [pd.read_csv(path)] if path.exists() and not work.tiny else []
    while work.tiny or work.retrain:
        table = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=RUN)
        missing = next(not_there(table, work), None)
        if missing is None:
            break
        found = pd.DataFrame(list(training(work, missing))).assign(**{name: getattr(missing, name) for name in RUN})
        rows.append(found)
        if not work.tiny:
            text = pd.concat(rows, ignore_index=True)
            text = text[[*RUN, *(name for name in text if name not in RUN)]]
            text.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
            print(f"{missing.key}: prose {found['prose'].iloc[-1]:.4f}", flush=True)
    return pd.concat(rows, ignore_index=True)


def not_there(table: pd.DataFrame, work: Work) -> Iterator[Training]:
    """The trainings that the table lacks, in the order in which they are made: trials first, then seed by seed."""
    done = {tuple(row) for row in table[RUN].drop_duplicates().itertuples(index=False)}
    for budget in work.size(tuple(BUDGETS), ("short",)):
        trials = [
            Training(budget=budget, kind="trial", arm=arm, rate=rate, seed=TRIAL_SEED)
            for rate in work.size(RATES, RATES[:2])
            for arm in ARMS
        ]
        missing = [one for one in trials if one.key not in done]
        yield from missing
        for seed in [] if missing else work.size(SEEDS, SEEDS[:3]):
            for arm in ARMS:
                one = Training(budget=budget, kind="final", arm=arm, rate=best_rate(table, budget, arm), seed=seed)
                if one.key not in done:
                    yield one
        for seed in SEEDS[: min(JUDGED_AT)] if budget == explained(work) and not missing else ():
            for arm, factor in MECHANISM.items():
                rate = best_rate(table, budget, NORM) * factor
                one = Training(budget=budget, kind="mechanism", arm=arm, rate=rate, seed=seed)
                if one.key not in done:
                    yield one


def explained(work: Work) -> str:
    """The budget whose loss is explained."""
    return work.size("extended", "short")


def best_rate(table: pd.DataFrame, budget: str, arm: str) -> float:
    """The rate whose trial has the lowest loss on prose at its end."""
    trials = table[(table["budget"] == budget) & (table["arm"] == arm) & (table["kind"] == "trial")]
    ends = trials.sort_values("step").groupby("rate")["prose"].last()
    return float(ends.idxmin())


def training(work: Work, asked: Training) -> Iterator[dict[str, float]]:
    """One training's readings on prose and on sequences of the task that are kept apart."""
    steps, batch = work.size(BUDGETS[asked.budget], (6, 2))
    if asked.kind == "trial":
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
        **MODEL | work.size({}, {"data": "bundled", "n_layers": 2, "d_model": 48, "d_mlp": 64, "vocab_size": 300}),
        **ARMS.get(asked.arm, {}),
    )
    rows = corpus_of(config, progress=work.progress)
    drawn, apart = (torch.Generator().manual_seed(seed) for seed in (asked.seed, asked.seed + 10**6))
    vectors = torch.randn(work.size(SYMBOLS, 64), work.size(ANSWER, 8), generator=drawn)
    held_out = trigger_rows(vectors, sequences=work.size(64, 8), length=TASK, generator=apart)
    order = torch.randperm(len(rows.train), generator=drawn)
    prose = torch.stack([rows.evaluation[index]["input_ids"] for index in range(len(rows.evaluation))])
    model = model_of(config, tokenizer=rows.tokenizer).train()
    if asked.arm == BY_HAND:
        normed: Any = model_of(replace(config, **ARMS[NORM]), tokenizer=rows.tokenizer)
        hold_parity(model, sizes=[layer.self_attn.gamma.mean().item() for layer in normed.model.layers])
    optimizer = adamw(model, config)

    def task_loss(tokens: Tensor, answers: Tensor) -> Tensor:
        given = model(input_ids=tokens, use_cache=False).logits[..., : answers.shape[-1]]
        return (given - answers).square().mean()

    spent, every = 0.0, steps if asked.kind == "trial" else max(1, steps // 12)  # a trial is asked for its end alone
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            row = {"step": step, "tokens": step * batch * (PROSE + TASK), "seconds": spent}
            with torch.no_grad():
                row["prose"] = model(input_ids=prose, labels=prose, use_cache=False).loss.item()
                row["task"] = task_loss(*held_out).item()
            if step % (4 * every) == 0 or step == steps:
                row |= readings(model, prose=prose, task=held_out[0])
            if step == steps:
                row |= at_the_end(model, prose)
            yield row
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, config)
        chosen = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        text = torch.stack([rows.train[int(index)]["input_ids"] for index in chosen])
        model(input_ids=text, labels=text, use_cache=False).loss.backward()
        (WEIGHT * task_loss(*trigger_rows(vectors, sequences=batch, length=TASK, generator=drawn))).backward()
        clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        # A tiny training is not timed: every token takes as long.
        spent += batch * (PROSE + TASK) / 1e3 if work.tiny else time.process_time() - began


def hold_parity(model: Any, *, sizes: Sequence[float]) -> None:
    """Bring what each head gives to its layer's size, as a constant: the norm without its gradient, or a learned gain.

    Args:
        model: with softmax attention.
        sizes: the norm's first gain in each layer.
    """

    def divided(size: float, module: Any, inputs: Any, z: Tensor) -> Tensor:
        by_head = z.unflatten(-1, (MODEL["n_heads"], -1))
        rms = (by_head.square().mean(-1, keepdim=True) + module.eps).sqrt()
        return (size * by_head / rms.detach()).flatten(-2)

    for layer, size in zip(model.model.layers, sizes, strict=True):
        layer.self_attn.head_out.register_forward_hook(partial(divided, size))


def adamw(model: Any, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays what ``train`` decays."""
    kept = undecayed(model, unshared_gain=not config.decay_unshared_gain)
    split: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in model.named_parameters():
        split[name in kept].append(parameter)
    groups = [{"params": split[0], "weight_decay": config.weight_decay}, {"params": split[1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def rate_at(step: int, config: TrainConfig) -> float:
    """A linear rise, then a cosine down to a tenth, as in ``train``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / (config.steps - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * share)) / 2


def readings(model: Any, *, prose: Tensor, task: Tensor) -> dict[str, float]:
    """Return what the monitor reads of 32 held-out sequences, on prose and on the task."""
    row = {}
    for name, tokens in (("prose", prose), ("task", task)):
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
        by_position = s2(captured["z", layer], valid=torch.ones_like(prose, dtype=torch.bool))
        ratios.append(float(by_position[0] / by_position[8:].mean()))
    edits = [quantisation(site, "int4_token") for site in LINEAR_INPUTS]
    rounded = run_with(lens, prose, edits).loss
    assert rounded is not None  # it was asked for
    model.train()
    return {"s2_ratio": float(np.mean(ratios)), "prose_4_bit": float(rounded.mean())}


def judged_seeds(table: pd.DataFrame, budget: str) -> Sequence[int]:
    """The first six seeds where every arm has them, else the first three; before that, those that every arm has."""
    finals = of_budget(table, budget)
    have = [set(finals.loc[finals["arm"] == arm, "seed"]) for arm in ARMS]
    common = tuple(seed for seed in SEEDS if all(seed in one for one in have))
    return next((SEEDS[:n] for n in JUDGED_AT if common[:n] == SEEDS[:n]), common[: min(JUDGED_AT) - 1])


def numbers_of(table: pd.DataFrame, budget: str, seeds: Sequence[int]) -> dict[str, Interval]:
    """Every number of one budget, over seeds, paired with softmax of the same seed; 95% t intervals.

    Fewer seeds than are judged have no interval.
    """
    finals = of_budget(table, budget)
    finals = finals[finals["seed"].isin(seeds)]
    ends = finals.groupby(["arm", "seed"]).last()
    ends["rise"] = ends["prose_4_bit"] - ends["prose"]
    by_arm = {arm: ends[ends.index.get_level_values("arm") == arm].droplevel("arm") for arm in ARMS}
    base = by_arm["softmax"]

    def ratio(values: Any) -> Interval:
        found = over_seeds(np.log(values))
        low, estimate, high = (math.exp(one) for one in (found.low, found.estimate, found.high))
        return Interval(estimate=estimate, low=low, high=high, n=found.n)

    numbers = {}
    for arm in list(ARMS)[1:]:
        own = by_arm[arm]
        pairs = [(curve(finals, "softmax", seed), curve(finals, arm, seed)) for seed in seeds]
        found = {
            "tokens": ratio([tokens_of(*pair) for pair in pairs]),
            "loss": over_seeds(own["prose"] - base["prose"]),
            "time": over_seeds([loss_in_time(*pair) for pair in pairs]),
            "cost": ratio(own["seconds"] / base["seconds"]),
            "task": ratio(own["task"] / base["task"]),
            "parity": over_seeds(own["s2_ratio"]),
            "sink_less": over_seeds(own["rate_first_prose"] - base["rate_first_prose"]),
            "outliers_less": over_seeds(own["kurtosis_prose"] - base["kurtosis_prose"]),
            "largest": ratio(own["max_activation_prose"] / base["max_activation_prose"]),
            "rounded": over_seeds(own["rise"] - base["rise"]),
        }
        numbers |= {f"{name} @ {arm}, {budget}": one for name, one in found.items()}
    of_softmax = {"sink": "rate_first_prose", "outliers": "kurtosis_prose", "discrepancy": "s2_ratio"}
    return numbers | {f"{name} @ {budget}": over_seeds(base[column]) for name, column in of_softmax.items()}


def over_seeds(values: Any) -> Interval:
    """Their mean with a 95% t interval, which fewer seeds than are judged have not."""
    found = t_intervals(np.asarray(values, dtype=float)[None])[0]
    return found if found.n >= min(JUDGED_AT) else replace(found, low=math.nan, high=math.nan)


def mechanism_of(table: pd.DataFrame, budget: str) -> dict[str, Interval]:
    """Return what explains the norm's loss on prose, over three seeds, paired; nan where nothing is trained."""
    ends = table[table["budget"] == budget].sort_values("step").groupby(["kind", "arm", "seed"])["prose"].last()
    seeds = list(SEEDS[: min(JUDGED_AT)])

    def minus(one: tuple[str, str], other: tuple[str, str]) -> Interval:
        by_seed = [ends.get((*arm, seed), math.nan) for arm in (one, other) for seed in seeds]
        own, base = np.array(by_seed, dtype=float).reshape(2, -1)
        return over_seeds(own - base)

    softmax, norm, by_hand = ("final", "softmax"), ("final", NORM), ("mechanism", BY_HAND)
    return {
        "by_hand": minus(by_hand, softmax),
        "gradient": minus(norm, by_hand),
        "lower_rate": minus(("mechanism", NORM), softmax),
    }


def of_budget(table: pd.DataFrame, budget: str) -> pd.DataFrame:
    """The rows of the trainings of one budget that are no trials, by step."""
    return table[(table["budget"] == budget) & (table["kind"] == "final")].sort_values("step")


def curve(finals: pd.DataFrame, arm: str, seed: int) -> pd.DataFrame:
    """The rows of one training."""
    return finals[(finals["arm"] == arm) & (finals["seed"] == seed)]


def tokens_of(base: pd.DataFrame, own: pd.DataFrame) -> float:
    """Tokens to the loss that softmax has at half of its tokens, over those of softmax; nan where it is not reached."""
    half = base["tokens"].iloc[-1] / 2
    target = float(np.interp(half, base["tokens"], base["prose"]))
    return tokens_to_reach(own["tokens"].to_numpy(float), own["prose"].to_numpy(float), target=target) / half


def loss_in_time(base: pd.DataFrame, own: pd.DataFrame) -> float:
    """Loss on prose minus softmax's, after the processor time of the faster of the two."""
    until = min(base["seconds"].iloc[-1], own["seconds"].iloc[-1])
    after, before = (float(np.interp(until, one["seconds"], one["prose"])) for one in (own, base))
    return after - before


def draw(table: pd.DataFrame):
    """Loss on prose by tokens, its difference to softmax and the sink on prose, with bands of the mean; the trials."""
    budget = next(name for name in reversed(BUDGETS) if name == "short" or judged_seeds(table, name))
    finals = of_budget(table, budget)
    panels = {
        "loss on prose, nats": ("prose", False),
        "minus softmax's, nats": ("prose", True),
        "heads with a sink, prose": ("rate_first_prose", False),
    }
    shown = panels if len(finals) else {}  # before the first seed is there the trials are drawn alone
    figure = canvas(width=11 if shown else 4.8, height=3.2)
    for place, (ylabel, (name, paired)) in enumerate(shown.items()):
        axes = panel(figure, place=(1, 4, place + 1), xlabel="tokens, thousands", ylabel=ylabel)
        by_arm = {arm: rows.pivot(index="tokens", columns="seed", values=name) for arm, rows in finals.groupby("arm")}
        for arm in [arm for arm in ARMS if arm in by_arm]:
            by_seed = by_arm[arm].dropna()
            if paired:
                by_seed = (by_seed - by_arm["softmax"]).dropna(axis="columns", how="all").dropna()
            means = t_intervals(by_seed.to_numpy())
            tokens, style = by_seed.index.to_numpy() / 1e3, style_of(arm)
            axes.plot(tokens, [one.estimate for one in means], label=arm, **style)
            low, high = ([getattr(one, bound) for one in means] for bound in ("low", "high"))
            axes.fill_between(tokens, low, high, color=style["color"], alpha=0.15, linewidth=0)
    place = (1, len(shown) + 1, len(shown) + 1)
    axes = panel(figure, place=place, xlabel="learning rate", ylabel="loss on prose, trials")
    trials = table[(table["budget"] == budget) & (table["kind"] == "trial")].sort_values("step")
    for arm, rows in trials.groupby("arm"):
        axes.plot(rows.groupby("rate")["prose"].last(), label=arm, **style_of(str(arm)))
    logarithmic(axes, axis="x")
    legend(axes, columns=3, over=figure)
    return finished(figure)


def style_of(arm: str) -> dict[str, Any]:
    """Colour, mark and line of an arm."""
    index = list(ARMS).index(arm)
    return {"color": COLOURS[index], "marker": MARKS[index], "markersize": 3, "linewidth": 1.3}


if __name__ == "__main__":
    main(measure)

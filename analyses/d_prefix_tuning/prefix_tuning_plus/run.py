"""Prefix-tuning, Prefix-Tuning+, LoRA and full fine-tuning on three tasks with right answers; see claim.md."""

import copy
import warnings
from importlib.util import find_spec

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from analyses.claims import Measured, Work, certain, main
from analyses.tasks import agreement, answer_examples, batches, genres, pad_prompts, questions
from analyses.texts import data_folder
from sink_lens.data.corpora import bundled_text
from sink_lens.errors import InputError
from sink_lens.models.private_apis import set_attention
from sink_lens.report.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PURPLE,
    legend,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.schema import DEFAULT_MODEL
from sink_lens.stats import Interval
from sink_lens.training import get_prefix_model

TASKS = {"agreement": agreement, "questions": questions, "genres": genres}
SECTIONS = {"news": "a", "religion": "d", "science": "j", "fiction": "klnp"}
"""Genre -> letters of the Brown corpus' sections: reportage, religion, learned, four kinds of fiction."""
ARMS = ("prefix", "outside", "lora", "full")
SIDE_TASK, SIDE_ARMS = "questions", ("prefix 8", "constant", "lower", "upper")
"""Arms of the construction guide, on one task."""
LIKE = {"prefix 8": "prefix", "constant": "outside", "lower": "outside", "upper": "outside"}
TRIED = {
    "prefix": (0.003, 0.01, 0.03),
    "outside": (0.0001, 0.0003, 0.001),
    "lora": (0.0003, 0.001, 0.003),
    "full": (0.00001, 0.00003, 0.0001),
    "constant": (0.001, 0.003, 0.01),
}
"""Arm -> learning rates to choose from; the others take that of the arm that they are like."""
SINK = 0.3
BATCH, WARMUP, BETTER, PATIENCE = 4, 10, 0.01, 2
COLOURS = {"none": GRID, "prefix": ORANGE, "outside": BLUE, "lora": GREEN, "full": PURPLE}


def measure(work: Work) -> Measured:
    """From the committed table; with --retrain from trainings of now, each of which is kept when it ends."""
    if work.tiny or work.retrain:
        table = work.once("answers", lambda: _trainings(work))
    elif work.lens.name != DEFAULT_MODEL:
        raise InputError(
            f"the table is of {DEFAULT_MODEL}; need one of {work.lens.name}. Train with --retrain."
        )
    else:
        table = pd.read_parquet(work.folder / "answers.parquet")
    tasks = [name for name in TASKS if name in set(table["task"])]

    def of(task, arm, column):
        """[seed, example]."""
        rows = table[(table["task"] == task) & (table["arm"] == arm)]
        return rows.pivot(index="seed", columns="example", values=column).to_numpy(dtype=float)

    def less(task, one, other, column):
        return _interval(work, of(task, one, column) - of(task, other, column))

    def gain(task, arm):
        return _interval(work, of(task, "none", "loss") - of(task, arm, "loss"))

    numbers = {}
    for task in tasks:
        numbers |= {
            f"level @ {task}": less(task, "outside", "lora", "right"),
            f"level_loss @ {task}": less(task, "outside", "lora", "loss"),
            f"better @ {task}": less(task, "outside", "prefix", "right"),
            f"better_loss @ {task}": less(task, "prefix", "outside", "loss"),
            f"ceiling_loss @ {task}": less(task, "outside", "full", "loss"),
            f"outside_first @ {task}": less(task, "outside", "none", "first"),
            f"prefix_alpha @ {task}": _interval(work, of(task, "prefix", "prefix")),
            f"prefix_first @ {task}": _interval(work, of(task, "prefix", "first")),
            f"dilution @ {task}": _interval(
                work, of(task, "prefix", "late") - of(task, "prefix", "early")
            ),
        }
        numbers |= {f"gain @ {task}, {arm}": gain(task, arm) for arm in ARMS}
    numbers["growth"] = less(SIDE_TASK, "prefix", "prefix 8", "prefix")
    numbers["query_matters"] = less(SIDE_TASK, "constant", "outside", "loss")
    numbers |= {
        f"half_of_layers @ {arm}": less(SIDE_TASK, arm, "outside", "loss")
        for arm in ("lower", "upper")
    }
    ends = table[table["arm"] != "none"].drop_duplicates(["task", "arm", "seed"])
    numbers["converged"] = certain(ends["converged"].mean())
    return Measured(numbers=numbers, figure=_figure(table, tasks))


def _interval(work, values):
    """The mean of [seed, example] with an interval from drawing seeds and examples again, both at once."""
    rng, draws = work.rng(), []
    for _ in range(2000):
        seeds, examples = (rng.integers(n, size=n) for n in values.shape)
        draws.append(values[np.ix_(seeds, examples)].mean())
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(estimate=float(values.mean()), low=float(low), high=float(high), n=len(values))


def _trainings(work):
    """A row for each example that is held out, under every task, arm and seed: answers and attention."""
    if find_spec("peft") is None:
        raise InputError(
            "PEFT is not installed, whose prefix-tuning and LoRA are compared; need pip install peft"
        )
    frames = []
    seeds, n_train, n_valid, n_held = work.size((3, 384, 24, 48), (2, 8, 4, 6))
    bar = tqdm(desc="trainings", disable=not work.progress)
    for name in work.size(tuple(TASKS), ("agreement", SIDE_TASK)):
        sizes = {"train": n_train + n_valid, "held_out": n_held, "generator": work.generator()}
        task = genres(texts=_brown(), **sizes) if name == "genres" else TASKS[name](**sizes)
        data = {"train": task.train[:n_train], "valid": task.train[n_train:], "held": task.held_out}
        data["sinks"] = _sinks(work, task.held_out)
        before = _read(work, work.lens.plain, work.lens.plain, data)
        frames += [before.assign(task=name, arm="none", seed=seed) for seed in range(seeds)]
        rates = {}
        for arm in (*ARMS, *(SIDE_ARMS if name == SIDE_TASK else ())):
            if arm in TRIED:
                tried = {}
                for rate in TRIED[arm]:
                    tried[rate] = _train_once(
                        work,
                        data,
                        f"{name} {arm} rate {rate:g}",
                        arm,
                        rate=rate,
                        seed=100,
                        short=True,
                    )
                    bar.update()
                rates[arm] = min(tried, key=lambda one: tried[one]["valid"].iloc[0])
            rate = rates[arm if arm in TRIED else LIKE[arm]]
            for seed in range(seeds):
                made = _train_once(work, data, f"{name} {arm} {seed}", arm, rate=rate, seed=seed)
                frames.append(made.assign(task=name, arm=arm, seed=seed))
                bar.update()
    return pd.concat(frames, ignore_index=True)


def _brown():
    """Genre -> documents of the Brown corpus."""
    path = data_folder() / "brown" / "documents.parquet"
    if not path.is_file():
        raise InputError("the Brown corpus is not fetched; need python -m analyses.texts brown")
    table = pd.read_parquet(path)
    return {
        genre: table[table["name"].str[1].isin([*letters])]["text"]
        for genre, letters in SECTIONS.items()
    }


def _train_once(work, data, key, arm, **options):
    """A training, unless an interrupted run has left what came of it."""
    return work.once(key.replace(" ", "-"), lambda: _train(work, data, arm, **options))


def _train(work, data, arm, *, rate, seed, short=False):
    """Train until the validation loss no longer falls; what is read where it was least, a row an example held out.

    A reading is made every 15 steps. The training ends when two in a row are not 0.01 nats better than the best, or
    after 75 steps; a short one, of 30 steps, is for the choice of the rate.
    """
    every, most = work.size((15, 30 if short else 75), (1, 1 if short else 2))
    draw = torch.Generator().manual_seed(seed)
    order = torch.cat(
        [
            torch.randperm(len(data["train"]), generator=draw)
            for _ in range(1 + most * BATCH // len(data["train"]))
        ]
    )
    examples = [data["train"][int(at)] for at in order[: most * BATCH]]
    model, base, undo = _tuned(work, arm, seed=seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=rate, weight_decay=0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / WARMUP, 1))
    best, misses, found = float("inf"), 0, pd.DataFrame()
    for step, batch in enumerate(batches(examples, work.lens.tokenizer, size=BATCH), start=1):
        model(**batch, use_cache=arm.startswith("prefix")).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        ramp.step()
        if step % every:
            continue
        valid = answer_examples(model, work.lens.tokenizer, data["valid"])["loss"].mean()
        if not valid < best - BETTER and not found.empty:
            misses += 1
        else:
            best, misses = min(best, valid), 0
            about = {
                "valid": valid,
                "steps": step,
                "rate": rate,
                "parameters": sum(one.numel() for one in trained),
            }
            found = (pd.DataFrame(index=[0]) if short else _read(work, model, base, data)).assign(
                **about
            )
        if misses == PATIENCE:
            break
    undo()
    return found.assign(converged=misses == PATIENCE, last_step=step)


def _tuned(work, arm, *, seed):
    """A model to train, the plain model in it, and what takes the tuning off again."""
    plain = work.lens.plain
    plain.requires_grad_(requires_grad=False)
    layers = range(work.lens.n_layers)
    if arm == "full":
        copied = copy.deepcopy(plain).requires_grad_()
        return copied, copied, lambda: None
    if LIKE.get(arm, arm) == "outside":
        half = {
            "lower": tuple(layers)[: len(layers) // 2],
            "upper": tuple(layers)[len(layers) // 2 :],
        }
        model = get_prefix_model(
            plain, phi="constant" if arm == "constant" else "elu", layers=half.get(arm)
        )
        return model, plain, model.unload
    import peft

    numbers = work.lens.n_kv_heads * work.lens.d_head**2  # of the module outside, a layer
    if arm == "lora":
        heads = work.lens.n_heads + work.lens.n_kv_heads
        each = 2 * work.lens.d_model + heads * work.lens.d_head  # of a rank of W_Q and W_V, a layer
        rank, more = divmod(numbers * len(layers), each * len(layers))
        one_more = {rf".*layers\.{layer}\..*": rank + 1 for layer in layers[: more // each]}
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            rank_pattern=one_more,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # PEFT draws LoRA's matrices from it
            model = _of_peft(plain, config)
        return model, plain, model.unload
    n = work.lens.d_head // 2 if arm == "prefix" else 8
    model = _of_peft(plain, peft.PrefixTuningConfig(num_virtual_tokens=n, task_type="CAUSAL_LM"))
    text = {"text": bundled_text()[:4000], "use_chat_template": False, "max_length": n}
    peft.initialize_kv_prefix_from_text(model, work.lens.tokenizer, **text)
    return model, plain, lambda: None


def _of_peft(plain, config):
    """``get_peft_model``, which asks for what transformers will call otherwise."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(plain, config)


def _read(work, model, base, data):
    """Answers on what is held out, and the attention of the sink heads in the same prompts, a row an example."""
    rows = answer_examples(model, work.lens.tokenizer, data["held"])
    shares = []
    for pattern, mask in _patterns(work, model, base, data["held"]):
        sinks = pattern[:, data["sinks"]].mean(1)  # [batch, query, key]
        n = sinks.shape[-1] - sinks.shape[-2]
        for row, length in zip(sinks, mask.sum(1).tolist(), strict=True):
            queries = row[1:length]
            prefix, middle = queries[:, :n].sum(-1), (length - 1) // 2
            parts = {
                "prefix": prefix.mean(),
                "first": queries[:, n].mean(),
                "rest": queries[:, n + 1 :].sum(-1).mean(),
            }
            parts |= {"early": prefix[:middle].mean(), "late": prefix[middle:].mean()}
            shares.append({name: float(value) for name, value in parts.items()})
    return pd.concat([rows, pd.DataFrame(shares)], axis=1)


def _sinks(work, examples):
    """[layer head], true for heads that give position 0 over 0.3 of their attention, before any training."""
    found = []
    for pattern, mask in _patterns(work, work.lens.plain, work.lens.plain, examples):
        found += [
            row[:, :, 1:length, 0].mean(-1)
            for row, length in zip(pattern, mask.sum(1).tolist(), strict=True)
        ]
    mean = torch.stack(found).mean(0)
    return mean > SINK if (mean > SINK).any() else mean >= mean.max()


@torch.no_grad()
def _patterns(work, model, base, examples):
    """Attention patterns, [batch layer head query key] with a prefix's keys first, and masks, a batch at a time."""
    kernel = str(base.config._attn_implementation)
    set_attention(base, "eager")
    try:
        for start in range(0, len(examples), 12):
            pairs = [(one.prompt, "") for one in examples[start : start + 12]]
            batch = pad_prompts(pairs, work.lens.tokenizer)
            batch.pop("labels")
            attentions = model(**batch, output_attentions=True).attentions
            yield torch.stack(attentions, 1).detach(), batch["attention_mask"]
    finally:
        set_attention(base, kernel)


def _figure(table, tasks):
    """Accuracy and loss of each arm and task, and where the sink heads look."""
    arms = ("none", *ARMS)
    names = {
        "none": "untuned",
        "prefix": "prefix",
        "outside": "outside",
        "lora": "LoRA",
        "full": "all weights",
    }
    mean = table.groupby(["task", "arm"]).mean(numeric_only=True)
    seeds = table.groupby(["task", "arm", "seed"]).mean(numeric_only=True)
    figure = new_figure(width=9.6, height=6.4)
    above, under = figure.subfigures(2, 1)
    for place, (column, label) in enumerate(
        (("right", "held-out accuracy"), ("loss", "held-out loss, nats")), start=1
    ):
        axes = panel(above, place=(1, 2, place), ylabel=label)
        for at, arm in enumerate(arms):
            x = np.arange(len(tasks)) + (at - 2) * 0.16
            axes.bar(
                x,
                [mean.loc[(task, arm), column] for task in tasks],
                width=0.15,
                color=COLOURS[arm],
                label=names[arm],
            )
            for left, task in zip(x, tasks, strict=True):
                each = seeds.loc[(task, arm), column]
                axes.plot([left] * len(each), each, ".", color=INK, markersize=3)
        axes.set_xticks(range(len(tasks)), tasks)
        if place == 1:
            legend(axes, columns=3)
    for place, task in enumerate(tasks, start=1):
        axes = panel(under, place=(1, len(tasks), place), ylabel=f"sink heads, {task}")
        left = np.zeros(len(arms))
        parts = (
            ("prefix", ORANGE, "prefix"),
            ("first", BLUE, "position 0"),
            ("rest", GRID, "rest"),
        )
        for column, colour, label in parts:
            values = np.array([mean.loc[(task, arm), column] for arm in arms])
            axes.bar(range(len(arms)), values, bottom=left, color=colour, width=0.8, label=label)
            left += values
        axes.set_xticks(range(len(arms)), [names[arm] for arm in arms], rotation=30)
        axes.set_ylim(0, 1)
        if place == 1:
            legend(axes, columns=3)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

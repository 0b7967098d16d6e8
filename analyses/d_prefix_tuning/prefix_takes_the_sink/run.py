"""A prefix of keys and values inside the attention heads, and the same numbers outside them; see claim.md."""

from functools import partial
from itertools import chain

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import DynamicCache

from analyses.claims import Measured, Work, main
from sink_lens import TokenBatch
from sink_lens.data.corpora import bundled_text
from sink_lens.errors import InputError
from sink_lens.report.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PURPLE,
    QUIET,
    legend,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.schema import DEFAULT_MODEL
from sink_lens.training.prefix import bridge_hooks

LENGTHS, TRAINED = (1, 2, 4, 8, 16), (1, 4, 16)
LAST = LENGTHS[-1]
SINK = 0.3
STEPS, RATES = 50, {"from words": 0.01, "from random": 0.01, "outside": 0.001}
"""Rates: the best of those tried at length 4 on training text that was held back; see claim.md."""


def measure(work: Work) -> Measured:
    """From committed tables; with --retrain from prefixes and modules that are trained now."""
    if work.tiny or work.retrain:
        sequences, means = _tables(work)
    elif work.lens.name != DEFAULT_MODEL:
        raise InputError(
            f"the tables are of {DEFAULT_MODEL}; need ones of {work.lens.name}. Train with --retrain."
        )
    else:
        sequences, means = (
            pd.read_parquet(work.folder / f"{name}.parquet") for name in ("sequences", "means")
        )
    values = sequences.set_index(["arm", "length"]).sort_index(kind="stable")

    def of(arm, length, column):
        return values.loc[(arm, length), column].to_numpy()

    def change(arm, length, column, *, over=("none", 0)):
        return work.interval(of(arm, length, column) - of(*over, column))

    def each(name, rows):
        return {f"{name} @ {at}": number for at, number in rows.items()}

    lengths, inside = {f"length {n}": n for n in (4, 1, 16)}, ("from words", "from random")
    numbers = {}
    for name, column in (("outside_loss", "loss"), ("outside_later", "later")):
        over_prefix = {
            at: change("outside", n, column, over=("from words", n)) for at, n in lengths.items()
        }
        numbers |= each(name, over_prefix)
    for arm in inside:
        numbers |= each(
            "trained_loss", {f"{arm}, {at}": change(arm, n, "loss") for at, n in lengths.items()}
        )
    shown = ("random", *inside)
    numbers |= each("growth", {arm: change(arm, LAST, "prefix", over=(arm, 1)) for arm in shown})
    numbers |= each(
        "dilution",
        {arm: work.ratio(of(arm, LAST, "late"), of(arm, LAST, "early")) for arm in shown},
    )
    numbers |= {
        "random_alpha": work.interval(of("random", 1, "prefix")),
        "random_within": work.interval(
            of("random", LAST, "within") - of("random", LAST, "competition")
        ),
        "words_alpha": work.interval(of("words", 1, "prefix")),
        "words_first": work.interval(of("words", 1, "first")),
        "words_rest": change("words", LAST, "rest"),
    }
    over = ("random", LAST)
    numbers |= each(
        "trained_over_random", {arm: change(arm, LAST, "prefix", over=over) for arm in inside}
    )
    numbers |= each("trained_rank", {arm: work.interval(of(arm, LAST, "rank")) for arm in inside})
    numbers |= each(
        "outside_first", {at: change("outside", n, "first") for at, n in lengths.items()}
    )
    return Measured(numbers=numbers, figure=_figure(sequences, means))


def _tables(work):
    """Attention and loss under every arm: by sequence, over the sink heads, and their means by layer and by query."""
    lens, text = work.lens, bundled_text()
    cut = len(text) * 4 // 5
    n, length = work.size((24, 64), (4, 32))
    steps, short = work.size((STEPS, 32), (3, 16))
    known, held_out, lessons = (
        TokenBatch.from_text(part, lens.tokenizer, sequences=size, length=tokens).tokens
        for part, size, tokens in (
            (text[:cut], n, length),
            (text[cut:], n, length),
            (text[:cut], 2 * steps, short),
        )
    )
    batches = lessons[torch.randperm(len(lessons), generator=work.generator())].split(2)
    own = _own(lens, known)
    noise = _noise(own, n=n, generator=work.generator())
    arms = {("none", 0): None}
    for p in LENGTHS:
        arms |= {("random", p): noise[..., :p, :], ("words", p): own[..., :p, :]}
    for p in TRAINED:
        starts = {"from words": own[:, :, :1, :, :p], "from random": noise[:, :, :1, :, :p]}
        starts["outside"] = _nothing(own, length=p, generator=work.generator())
        for arm, start in starts.items():
            arms[arm, p] = _trained(work, batches, start, arm=arm)
    rows, curves, base, sinks = [], [], None, None
    for (arm, p), numbers in tqdm(arms.items(), desc="reading", disable=not work.progress):
        read = _read(lens, held_out, numbers, outside=arm == "outside")
        if base is None:
            base = read["first"]
            sinks = base.mean((1, 3)) > SINK
        rows.append(_by_sequence(read, base=base, sinks=sinks).assign(arm=arm, length=p))
        curves.append(_means(read, sinks=sinks).assign(arm=arm, length=p))
    return work.once("sequences", lambda: pd.concat(rows)), work.once(
        "means", lambda: pd.concat(curves)
    )


def _forward(lens, tokens, numbers, *, outside=False, hooks=(), **options):
    """The bridge with added keys and values, [layer, 2, batch or 1, kv_head, length, d_head], or with none."""
    if numbers is not None and outside:
        modules = [
            bridge_hooks(layer, keys, values)
            for layer, (keys, values) in enumerate(numbers[:, :, 0])
        ]
        hooks = [*chain.from_iterable(modules), *hooks]
    elif numbers is not None:
        pairs = numbers.expand(-1, -1, len(tokens), -1, -1, -1)
        options["past_key_values"] = DynamicCache([(keys, values) for keys, values in pairs])
    return lens.bridge.run_with_hooks(tokens, fwd_hooks=list(hooks), **options)


def _own(lens, tokens):
    """The model's own keys and values of a text, as its cache holds them."""
    with torch.no_grad():
        _, cache = lens.bridge(tokens, return_type="logits_and_cache", use_cache=True)
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


def _noise(own, *, n, generator):
    """Normal draws with the mean and deviation of the model's own keys and values, without position 0."""
    rest = own[..., 1:, :]
    layers, pair, _, kv_heads, _, d_head = own.shape
    drawn = torch.randn(layers, pair, n, kv_heads, LAST, d_head, generator=generator)
    return rest.mean((2, 4), keepdim=True) + rest.std((2, 4), keepdim=True) * drawn


def _nothing(own, *, length, generator):
    """Random keys with values of zero, so that the module adds nothing before it is trained."""
    layers, _, _, kv_heads, _, d_head = own.shape
    keys = torch.randn(layers, 1, 1, kv_heads, length, d_head, generator=generator) * d_head**-0.5
    return torch.cat([keys, torch.zeros_like(keys)], dim=1)


def _trained(work, batches, start, *, arm):
    """Keys and values after a step of gradient descent a batch on the next-token loss, the model left as it is."""

    def make():
        numbers = start.clone().requires_grad_()
        optimiser = torch.optim.Adam([numbers], lr=RATES[arm])
        ramp = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: min((step + 1) / 10, 1 - step / len(batches))
        )
        for batch in tqdm(
            batches, desc=f"{arm}, length {start.shape[-2]}", disable=not work.progress, leave=False
        ):
            loss = _losses(
                _forward(work.lens, batch, numbers, outside=arm == "outside"), batch
            ).mean()
            (numbers.grad,) = torch.autograd.grad(
                loss, numbers
            )  # of the numbers alone: the model is frozen
            optimiser.step()
            ramp.step()
        return pd.DataFrame({"value": numbers.detach().flatten().numpy()})

    kept = work.once(f"{arm.replace(' ', '-')}-{start.shape[-2]}", make)
    return torch.from_numpy(kept["value"].to_numpy(copy=True)).view(start.shape)


def _losses(logits, tokens):
    """Next-token loss of each sequence at each query, nats."""
    flat = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(len(tokens), -1)


@torch.no_grad()
def _read(lens, tokens, numbers, *, outside):
    """Attention to the added keys and to position 0, [layer, batch, head, query] from query 1 on, and the losses."""
    n = 0 if numbers is None or outside else numbers.shape[-2]
    prefix, first = {}, {}

    def look(pattern, hook, *, layer):
        prefix[layer] = pattern[:, :, 1:, :n].sum(-1)
        first[layer] = pattern[:, :, 1:, n].clone()

    hooks = [
        (f"blocks.{layer}.attn.hook_pattern", partial(look, layer=layer))
        for layer in range(lens.n_layers)
    ]
    losses = _losses(_forward(lens, tokens, numbers, outside=outside, hooks=hooks), tokens)
    stacked = {
        name: torch.stack(list(one.values()))
        for name, one in (("prefix", prefix), ("first", first))
    }
    return stacked | {"losses": losses}


def _of_sinks(x, sinks):
    """The mean over the sink heads, [batch, query]."""
    return rearrange(x, "layer batch head query -> batch query layer head")[..., sinks].mean(-1)


def _by_sequence(read, *, base, sinks):
    """A row a sequence: the attention of the sink heads, and what position 0 lost to the prefix and to the input."""
    prefix, first, losses = (read[name] for name in ("prefix", "first", "losses"))
    eighth = (prefix.shape[-1] + 1) // 8
    given = _of_sinks(prefix, sinks)
    columns = {
        "loss": losses.mean(1),
        "later": losses[:, 8:].mean(1),
        "prefix": given.mean(1),
        "first": _of_sinks(first, sinks).mean(1),
        "rest": _of_sinks(1 - prefix - first, sinks).mean(1),
        "competition": _of_sinks(prefix * base, sinks).mean(1),
        "within": _of_sinks((1 - prefix) * base - first, sinks).mean(1),
        "early": given[:, eighth - 1 : 2 * eighth - 1].mean(1),  # queries 8 to 15 of 64
        "late": given[:, -2 * eighth :].mean(1),
    }
    frame = pd.DataFrame({name: column.numpy() for name, column in columns.items()}).rename_axis(
        "sequence"
    )
    if prefix.any():
        before, now = (
            rearrange(x.mean(-1), "layer batch head -> (layer head) batch").numpy()
            for x in (base, prefix)
        )
        frame["rank"] = pd.DataFrame(before).rank().corrwith(pd.DataFrame(now).rank())
    return frame.reset_index()


def _means(read, *, sinks):
    """Mean attention to the prefix and to position 0: of all heads by layer, of the sink heads by query."""
    parts = {name: read[name] for name in ("prefix", "first")}
    by_layer = pd.DataFrame({name: x.mean((1, 2, 3)).numpy() for name, x in parts.items()})
    by_query = pd.DataFrame(
        {name: _of_sinks(x, sinks).mean(0).numpy() for name, x in parts.items()}
    )
    by_query.index += 1
    return pd.concat({"layer": by_layer, "query": by_query}, names=["over", "at"]).reset_index()


def _figure(sequences, means):
    """Who gets the attention of the sink heads in every arm; by layer; by query; and the loss."""
    mean = sequences.groupby(["arm", "length"]).mean()
    curve = means.set_index(["over", "arm", "length"]).sort_index(kind="stable")
    figure = new_figure(width=9.6, height=6.4)
    above, under = figure.subfigures(2, 1, height_ratios=(0.85, 1))

    axes = panel(above, ylabel="attention of the sink heads")
    groups = {
        "none": "no prefix",
        "outside": "module outside",
        "random": "random prefix",
        "words": "words",
    }
    groups |= {"from random": "trained,\nfrom random", "from words": "trained,\nfrom words"}
    shown = [(group, arm, p) for group, arm in enumerate(groups) for p in mean.loc[arm].index]
    at = np.array([place + group for place, (group, _, _) in enumerate(shown)])
    below = np.zeros(len(shown))
    for column, colour, label in (
        ("prefix", ORANGE, "prefix"),
        ("first", BLUE, "position 0"),
        ("rest", GRID, "rest"),
    ):
        parts = mean.loc[[row[1:] for row in shown], column].to_numpy()
        axes.bar(at, parts, bottom=below, color=colour, width=0.85, label=label)
        below += parts
    axes.set_xticks(at, [str(p or "") for _, _, p in shown])
    for group, name in enumerate(groups.values()):
        middle = at[[row[0] == group for row in shown]].mean()
        axes.text(
            middle,
            -0.13,
            name,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            color=INK,
        )
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set(xlim=(at[0] - 0.8, at[-1] + 0.8), ylim=(0, 1))
    legend(axes, columns=3)

    axes = panel(under, place=(1, 3, 1), xlabel="layer", ylabel="attention, all heads")
    for arm, p, column, colour, style, label in (
        ("none", 0, "first", BLUE, "--", "position 0, no prefix"),
        ("outside", LAST, "first", INK, ":", f"position 0, module {LAST}"),
        ("from words", LAST, "first", BLUE, "-", "position 0 beside prefix"),
        ("from words", LAST, "prefix", ORANGE, "-", f"prefix {LAST}, from words"),
    ):
        rows = curve.loc[("layer", arm, p)]
        axes.plot(rows["at"], rows[column], color=colour, linestyle=style, label=label)
    axes.set_ylim(0, 1)
    axes.set_xticks(rows["at"][::5])
    legend(axes, columns=1)

    colours = {
        "random": QUIET,
        "words": GREEN,
        "from random": PURPLE,
        "from words": ORANGE,
        "outside": INK,
    }
    axes = panel(under, place=(1, 3, 2), xlabel="query", ylabel=f"sink heads to prefix {LAST}")
    for arm in list(colours)[:-1]:
        rows = curve.loc[("query", arm, LAST)]
        axes.plot(rows["at"], rows["prefix"], color=colours[arm], label=arm)
    axes.plot(
        rows["at"],
        LAST / (LAST + rows["at"] + 1),
        color=INK,
        linestyle="--",
        label="uniform attention",
    )
    axes.set_ylim(0, 1)
    legend(axes, columns=2)

    axes = panel(under, place=(1, 3, 3), xlabel="length", ylabel="held-out loss, nats")
    for arm, colour in colours.items():
        axes.plot(
            mean.loc[arm].index,
            mean.loc[arm, "loss"],
            color=colour,
            marker="o",
            markersize=4,
            label=arm,
        )
    axes.axhline(mean.loc[("none", 0), "loss"], color=INK, linestyle="--", label="no prefix")
    axes.set_xticks(LENGTHS)
    legend(axes, columns=2)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

"""``quantise``: which tokens and channels must stay in 16 bit, so that a low-precision format costs little?

Of the runs in which sink tokens, the largest channels of each site, or both are kept, the smallest set whose share of
the loss is at least the goal by the lower end of its interval is chosen on one half of the sequences. It is judged on
the other half, against the goal and against random tokens and channels of the same number.

Rounding is not smooth: an input that differs by a millionth can have another loss. So each run with rounding is made on
three inputs, the embeddings times 1 and 1 +- 1e-6 (in a 16-bit type, what moves the last digit of a quarter of the
numbers), and the spread of the three is in the interval.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..activations.forward import sequences_per_forward
from ..activations.record import Reading, stream_batch
from ..activations.sink_mask import mark_sinks
from ..activations.views import LayerView
from ..data.tokens import TokenBatch
from ..edits.constructors import scale
from ..edits.quantisation import linear_layer_paths, quantisation, quantised_weights
from ..engine.forward import run_with
from ..errors import InputError
from ..models.lens import LensModel
from ..models.sites import sites_of
from ..progress import tqdm
from ..schema import LINEAR_INPUTS, WORTH_KEEPING_NATS, QuantisedFormat, column_names
from ..stats import Interval, mean_interval, paired_difference
from ..text import as_text, join_and, loss_change_text, percent, plural, site_label
from ..text import interval_text as bounds
from .config import QuantiseConfig
from .study import Measured, command_of, study

FEWEST = 4
"""Minimum number of sequences, two to choose on and two to judge on."""
_SETS = ("tokens", "channels", "both")
_LEAST_FACTOR, _LAST_DIGIT = 1e-6, 0.3
"""The inputs' factors differ from 1 by the first, or by the second times the type's epsilon if that is more."""

Channels = Mapping[str, Mapping[int, Sequence[int]]]
"""Site -> layer -> channels."""
Sizes = Mapping[tuple[str, int], Float[Tensor, " value"]]
"""(site, layer) -> the largest magnitude of each channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrecision:
    """The tokens and channels that stay at full precision."""

    tokens: Bool[Tensor, "batch position"] | None = None
    channels: Channels = field(default_factory=dict)


def largest_channels(sizes: Sizes, n: int) -> dict[str, dict[int, list[int]]]:
    found: dict[str, dict[int, list[int]]] = {}
    for (site, layer), values in sizes.items() if n else ():
        found.setdefault(site, {})[layer] = (
            values.sort(descending=True, stable=True).indices[:n].tolist()
        )
    return found


@study(QuantiseConfig, every_layer=True)
def quantise(
    lens: LensModel, batch: TokenBatch, *, config: QuantiseConfig, progress: bool
) -> Measured:
    """Find the tokens and channels that must stay in 16 bit, and measure the loss that keeping them saves.

    Raises:
        InputError: a format, site or number of channels that cannot be used, weights that are quantised already, or too
            few sequences.
        RunError: the folder is in use, or holds another run.
    """
    targets = _formats_by_site(lens, config)
    quantised = getattr(lens.config, "quantization_config", None) is not None
    if config.weights and (quantised or any(".gguf" in note for note in lens.notes)):
        raise InputError(
            f"the weights of {lens.name} come from a quantised file; need weights in 16 or 32 bit to round them. "
            "Leave weights out, or use a checkpoint that is not quantised"
        )
    counted = batch.predicted.any(1).nonzero().flatten()
    if len(counted) < FEWEST:
        raise InputError(
            f"{len(counted)} of {plural(batch.n_sequences, 'sequence')} have a token whose loss counts; need at least "
            f"{FEWEST}, half to choose on and half to judge on"
        )
    half_size = len(counted) // 2
    halves = {"choose": batch[counted[:half_size]], "judge": batch[counted[half_size:]]}
    sinks = {
        name: mark_sinks(lens, part, by="norm", batch_size=config.batch_size)[0].cpu()
        for name, part in halves.items()
    }
    has_sinks = all(bool(one.any()) for one in sinks.values())
    largest = _largest_magnitudes(
        lens,
        halves["choose"],
        sinks=sinks["choose"],
        sites=list(targets),
        batch_size=config.batch_size,
    )
    (site, layer), narrowest = min(largest[False].items(), key=lambda one: len(one[1]))
    most = len(narrowest) // (2 if config.controls else 1)
    if max(config.channels, default=0) > most:
        more = ", so that random sets can have as many others" if config.controls else ""
        raise InputError(
            f"channels are {list(config.channels)}, and {site} of layer {layer} has {len(narrowest)} in all; need at "
            f"most {most} to keep{more}"
        )
    rows: list[dict[str, Any]] = []
    by = max(_LEAST_FACTOR, _LAST_DIGIT * torch.finfo(lens.dtype).eps)
    factors = (1.0, 1 - by, 1 + by)
    chosen, costly = None, True
    with tqdm(desc="quantised runs", unit="run", disable=not progress, leave=False) as bar:
        for name, part in halves.items():
            run = partial(
                _losses_when_rounded,
                lens,
                part,
                inputs=factors,
                targets=targets,
                config=config,
                bar=bar,
            )
            clean = run(None, weights=False, inputs=(1.0,))
            base = run(None, inputs=(1.0,)) if config.weights else clean
            half = _TextHalf(
                part=name, clean=clean, worst=run(FullPrecision()), best=base, seed=config.seed
            )
            rows.append(half.condition_row("clean", clean))
            if config.weights:
                rows.append(half.condition_row("weights", base))
            rows.append(half.condition_row("all", half.worst))
            costly = costly and half.is_costly
            if not costly:
                continue
            sizes = (0, *sorted(set(config.channels)))
            for size, tokens in product(sizes, (False, True)):  # the smallest set first
                if not (tokens or size) or (tokens and not has_sinks):
                    continue
                channels = largest_channels(largest[tokens], size)
                kept = FullPrecision(tokens=sinks[name] if tokens else None, channels=channels)
                what = "channels" if not tokens else "both" if size else "tokens"
                rows.append(half.condition_row(what, run(kept), sink_tokens=tokens, channels=size))
            if name == "choose":
                chosen = _smallest_good_set(rows, goal=config.goal)
            elif chosen is not None:
                # Random sets as large as the chosen one, none of them with its tokens or channels.
                with_sinks, n = chosen["sink_tokens"], chosen["channels"]
                generator = torch.Generator().manual_seed(config.seed)
                taken = largest_channels(largest[with_sinks], n)
                for draw in range(config.controls):
                    tokens, channels = None, {}
                    if with_sinks:
                        valid = part.valid.cpu()
                        tokens = draw_ordinary_tokens(sinks[name], valid=valid, generator=generator)
                    if n:
                        channels = draw_other_channels(
                            largest[False], taken=taken, n=n, generator=generator
                        )
                    losses = run(FullPrecision(tokens=tokens, channels=channels), inputs=(1.0,))
                    rows.append(
                        half.condition_row(
                            "random", losses, sink_tokens=with_sinks, channels=n, draw=draw
                        )
                    )
    if chosen is not None:
        same = ("kept", "sink_tokens", "channels")
        for row in rows:
            row["chosen"] = all(row[name] == chosen[name] for name in same)
    decision = _make_json_answer(lens, config, rows, chosen, largest=largest, sinks=sinks)
    marked = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    marked[counted.cpu()] = torch.cat([*sinks.values()])
    sequence, position = np.nonzero(marked.numpy())
    ids = batch.tokens.cpu().numpy()[sequence, position]
    frames = {
        "conditions": pd.DataFrame(rows).astype({"draw": "Int64", "chosen": bool}),
        "channels": _channel_rows(decision["kept_channels"], modules=decision["kept_modules"]),
        "sinks": pd.DataFrame({"sequence": sequence, "position": position, "token_id": ids}),
        "summary": pd.DataFrame([decision], columns=column_names("quantise", "summary")),
    }
    return Measured(frames=frames, decision=decision, headline=decision["sentence"])


run = command_of(quantise)


def _channel_rows(
    kept: Channels, *, modules: Mapping[str, Mapping[int, Sequence[str]]]
) -> pd.DataFrame:
    rows = [
        (site, layer, one, " ".join(modules[site][layer]))
        for site, layers in kept.items()
        for layer, some in layers.items()
        for one in some
    ]
    types = {"site": "str", "layer": "int64", "channel": "int64", "modules": "str"}
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def _linear_layers(lens: LensModel, site: str, *, layer: int) -> list[str]:
    """Name, as Hugging Face does, the linear layers that read a site; not experts, nor projections of a mixer."""
    there = dict(lens.layers[layer].named_modules())
    paths = linear_layer_paths(lens, site)
    return [f"{lens.family.layers}.{layer}.{path}" for path in paths if path in there]


def _formats_by_site(lens: LensModel, config: QuantiseConfig) -> dict[str, QuantisedFormat]:
    there = sites_of(lens.family)
    if lens.family.experts is not None:  # the router's weights are in it, which no format rounds
        there = tuple(site for site in there if site != "neurons")
    named = config.sites or tuple(site for site in LINEAR_INPUTS if site in there)
    if lacking := [site for site in named if site not in there]:
        raise InputError(
            f"{lens.family.architecture} has no site {lacking[0]!r} to round; need some of {', '.join(there)}"
        )
    targets: dict[str, QuantisedFormat] = dict.fromkeys(named, config.format)
    if config.cache:
        targets |= dict.fromkeys(("k", "v"), config.cache)
    return targets


def _losses_when_rounded(
    lens: LensModel,
    part: TokenBatch,
    kept: FullPrecision | None,
    *,
    inputs: Sequence[float],
    targets: Mapping[str, QuantisedFormat],
    config: QuantiseConfig,
    bar: tqdm,
    weights: bool = True,
) -> Float[Tensor, "... batch"]:
    """Measure each sequence's loss with the sites of ``targets`` rounded, but for the ``kept`` tokens and channels.

    The embeddings are multiplied by each of ``inputs``. With ``kept=None`` no activation is rounded.
    """
    bar.update()
    edits = []
    if kept is not None:
        edits = [
            quantisation(
                one,
                form,
                layers=range(lens.n_layers),
                tokens=kept.tokens,
                channels=kept.channels.get(one, {}),
            )
            for one, form in targets.items()
        ]
    form = config.weights if weights else None
    losses = []
    with contextlib.nullcontext() if form is None else quantised_weights(lens, form):
        for factor in inputs:
            scaled = [] if factor == 1.0 else [scale("resid_pre", factor, layers=[0])]
            found = run_with(
                lens,
                part,
                [*scaled, *edits],
                layers=[0],
                quiet=True,
                batch_size=config.batch_size,
                progress=False,
            ).loss
            assert found is not None  # it was asked for
            losses.append(found)
    return torch.stack(losses)


def _largest_magnitudes(
    lens: LensModel,
    part: TokenBatch,
    *,
    sinks: Bool[Tensor, "batch position"],
    sites: Sequence[str],
    batch_size: int | None = None,
) -> dict[bool, Sizes]:
    """Return each channel's largest magnitude over all tokens (key False), and over all but the ``sinks`` (True)."""
    size = sequences_per_forward(batch_size, part.n_positions)
    found: dict[tuple[str, int], Tensor] = {}
    for start in range(0, part.n_sequences, size):
        chosen = slice(start, start + size)
        read = partial(_channel_magnitudes, sinks=sinks[chosen])
        readings = [
            Reading(name=site, sites=(site,), function=partial(read, site=site)) for site in sites
        ]
        streamed = stream_batch(lens, part[chosen], readings, batch_size=size)
        for place in product(sites, range(lens.n_layers)):
            most = streamed[place].amax(0)
            found[place] = torch.maximum(found.get(place, most), most)
    return {
        without: {place: both[int(without)] for place, both in found.items()}
        for without in (False, True)
    }


def _channel_magnitudes(
    view: LayerView, *, site: str, sinks: Bool[Tensor, "batch position"]
) -> Tensor:
    """Return each channel's largest magnitude, over all tokens and over all but ``sinks``: "batch 2 channel"."""
    x = view[site].flatten(2)
    sizes = x.masked_fill(~view.valid[..., None], 0.0).abs().float()
    ordinary = sizes.masked_fill(sinks.to(x.device)[..., None], 0.0)
    return torch.stack([sizes.amax(1), ordinary.amax(1)], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextHalf:
    """One half of the sequences, with the losses that a set kept in 16 bit is compared with."""

    part: str
    clean: Float[Tensor, "... batch"]
    """Losses without rounding; the first axis of each of these has the inputs."""
    worst: Float[Tensor, "... batch"]
    """Losses with everything rounded: the start of the gap."""
    best: Float[Tensor, "... batch"]
    """Losses with at most the weights rounded: the end of the gap."""
    seed: int

    @property
    def is_costly(self) -> bool:
        found = self._paired_change(self.worst, self.best)
        return found.estimate >= WORTH_KEEPING_NATS and not found.low <= 0

    def _paired_change(self, more: Tensor, less: Tensor) -> Interval:
        rng = np.random.default_rng(self.seed)
        both = (one.double().numpy() for one in (more, less))
        found = paired_difference(*(one.mean(0) for one in both), generator=rng)
        return _widened(found, by_input=(more.double().mean(1) - less.double().mean()).numpy())

    def condition_row(
        self,
        kept: str,
        losses: Float[Tensor, "... batch"],
        *,
        sink_tokens: bool = False,
        channels: int = 0,
        draw: int | None = None,
    ) -> dict[str, Any]:
        change = self._paired_change(losses, self.clean)
        closed = Interval(estimate=math.nan, low=math.nan, high=math.nan, n=0)
        if self.is_costly:
            here, full, low = (one.double().numpy() for one in (losses, self.worst, self.best))
            closed = mean_interval(
                full.mean(0) - here.mean(0),
                over=full.mean(0) - low.mean(0),
                generator=np.random.default_rng(self.seed),
                n_resamples=1000,
            )
            gaps = full.mean(1)[: len(here)]
            closed = _widened(closed, by_input=(gaps - here.mean(1)) / (gaps - low.mean()))
        mean = float(losses.double().numpy().mean())
        return {
            "part": self.part,
            "kept": kept,
            "sink_tokens": sink_tokens,
            "channels": channels,
            "draw": draw,
            "loss_nats": mean,
            "perplexity": float(np.exp(mean)),
            "change_nats": change.estimate,
            "change_low": change.low,
            "change_high": change.high,
            "closed_share": closed.estimate,
            "closed_low": closed.low,
            "closed_high": closed.high,
            "n": losses.shape[1],
            "chosen": False,
        }


def _widened(found: Interval, *, by_input: np.ndarray) -> Interval:
    """Add to an interval over sequences, in quadrature, 1.96 standard deviations of the values on several inputs."""
    if len(by_input) < 2:
        return found
    more = 1.96 * float(by_input.std(ddof=1))
    low, high = found.estimate - found.low, found.high - found.estimate
    return replace(
        found,
        low=found.estimate - math.hypot(low, more),
        high=found.estimate + math.hypot(high, more),
    )


def _smallest_good_set(rows: Sequence[dict[str, Any]], *, goal: float) -> dict[str, Any] | None:
    """Return the row of the smallest set that clearly reaches the goal on the first half, else of the best, if any."""
    sets = [row for row in rows if row["part"] == "choose" and row["kept"] in _SETS]
    enough = (row for row in sets if row["closed_low"] >= goal)
    return next(enough, None) or max(sets, key=lambda row: row["closed_share"], default=None)


def draw_ordinary_tokens(
    sinks: Bool[Tensor, "batch position"],
    *,
    valid: Bool[Tensor, "batch position"],
    generator: torch.Generator,
) -> Bool[Tensor, "batch position"]:
    """Mark random ``valid`` tokens that are no sinks, in each sequence as many as it has sinks."""
    order = torch.rand(sinks.shape, generator=generator, dtype=torch.float32).masked_fill(
        sinks | ~valid, 2.0
    )
    return (order.argsort(1).argsort(1) < sinks.sum(1, keepdim=True)) & ~sinks & valid


def draw_other_channels(
    sizes: Sizes, *, taken: Channels, n: int, generator: torch.Generator
) -> dict[str, dict[int, list[int]]]:
    found: dict[str, dict[int, list[int]]] = {}
    for (site, layer), values in sizes.items():
        gone = set(taken[site][layer])
        order = torch.randperm(len(values), generator=generator).tolist()
        found.setdefault(site, {})[layer] = [one for one in order if one not in gone][:n]
    return found


def _make_json_answer(
    lens: LensModel,
    config: QuantiseConfig,
    rows: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, Any] | None,
    *,
    largest: Mapping[bool, Sizes],
    sinks: Mapping[str, Bool[Tensor, "batch position"]],
) -> dict[str, Any]:
    is_costly = not any(math.isnan(row["closed_share"]) for row in rows if row["kept"] == "all")
    judged = [row for row in rows if row["part"] == "judge"]
    by_set = {(row["kept"], row["channels"]): row for row in judged if row["kept"] != "random"}
    random = [row["closed_share"] for row in judged if row["kept"] == "random"]
    clean, worst = by_set["clean", 0], by_set["all", 0]
    kept = by_set[chosen["kept"], chosen["channels"]] if chosen and is_costly else {}
    marked = torch.cat([*sinks.values()])
    found = {
        "model": lens.name,
        "verdict": "no small set" if is_costly else "nothing to keep",
        "goal": config.goal,
        "format": config.format,
        "cache": config.cache,
        "weights": config.weights,
        "clean_loss_nats": clean["loss_nats"],
        "quantised_loss_nats": worst["loss_nats"],
        **{f"cost_{end}": worst[f"change_{end}"] for end in ("nats", "low", "high")},
        "sink_tokens": 0.0,
        "sink_positions": [],
        "halves_with_sinks": [
            half for half, own in zip(("first", "second"), sinks.values(), strict=True) if own.any()
        ],
        "channels": 0,
        "kept_channels": {},
        "kept_modules": {},
        "kept_loss_nats": kept.get("loss_nats", math.nan),
        **{f"left_{end}": kept.get(f"change_{end}", math.nan) for end in ("nats", "low", "high")},
        **{
            f"closed_{end}": kept.get(f"closed_{end}", math.nan) for end in ("share", "low", "high")
        },
        "channels_alone": [math.nan] * 3,
        "not_chosen": [],
        "random_most": max(random, default=math.nan),
        "controls": len(random),
        "n": clean["n"],
        "notes": list(lens.notes),
    }
    if kept and random and not kept["closed_low"] > max(random):
        found["verdict"] = "no small set"
    elif kept:
        found["verdict"] = "keep" if kept["closed_share"] >= config.goal else "goal missed"
        found["sink_tokens"] = float(marked.sum(1).double().mean()) if kept["sink_tokens"] else 0.0
        if kept["sink_tokens"]:
            found["sink_positions"] = marked.sum(0).nonzero().flatten().tolist()
        if kept["kept"] == "both":
            alone = by_set["channels", kept["channels"]]
            found["channels_alone"] = [alone[f"closed_{end}"] for end in ("share", "low", "high")]
        found["channels"] = kept["channels"]
        found["kept_channels"] = largest_channels(largest[kept["sink_tokens"]], kept["channels"])
        found["kept_modules"] = {
            site: {layer: _linear_layers(lens, site, layer=layer) for layer in layers}
            for site, layers in found["kept_channels"].items()
        }
    if found["verdict"] in ("goal missed", "no small set"):
        names = ("sink_tokens", "channels", "closed_share", "closed_low", "closed_high")
        found["not_chosen"] = [
            {name: row[name] for name in names}
            for row in by_set.values()
            if row["kept"] in _SETS and not row["chosen"] and row["closed_share"] >= config.goal
        ]
    return found | {"sentence": _advice_sentence(found)}


def _sites_text(sites: Iterable[str]) -> str:
    sites = list(sites)
    inputs = LINEAR_INPUTS if set(LINEAR_INPUTS) <= set(sites) else ()
    names = (site_label(one).removesuffix(" after the layer") for one in sites if one not in inputs)
    others = join_and(dict.fromkeys(names))
    return " and ".join(
        ["each linear layer's input"] * bool(inputs) + [f"each layer's {others}"] * bool(others)
    )


def _advice_sentence(found: Mapping[str, Any]) -> str:
    more = {"the KV cache": found["cache"], "the weights": found["weights"]}
    too = join_and(f"{what} in {form}" for what, form in more.items() if form)
    cost = (
        f"{found['format']}{f', with {too},' * bool(too)} "
        f"{loss_change_text(found['cost_nats'], found['cost_low'], found['cost_high'])} on held-out text "
        f"({as_text(found['clean_loss_nats'])} → {as_text(found['quantised_loss_nats'])})"
    )
    halves, apart = found["halves_with_sinks"], ""
    if len(halves) == 1:
        apart = (
            f" Only the {halves[0]} half of the text has sink tokens, so no set with them was tried: "
            "mix the sequences, or give more."
        )
    if found["verdict"] == "nothing to keep":
        return (
            f"Nothing to keep: {cost}. A cost counts if it is at least {WORTH_KEEPING_NATS} nats, its interval "
            f"excludes 0, and the other half of the text shows it too.{apart}"
        )
    if math.isnan(found["closed_share"]):
        return (
            f"No set was tried: {cost}, but no number of channels was given, and not both halves of the text have "
            f"sink tokens.{apart}"
        )
    share = f"{percent(found['closed_share'])} {bounds(found['closed_low'], found['closed_high'], shown=percent)}"
    closed = f"all of the gap ({share})" if found["closed_share"] >= 1 else f"{share} of the gap"
    if found["controls"]:
        random = plural(found["controls"], "random set")
        closed += f", {random} of that size at most {percent(found['random_most'])}"
    else:
        closed += ", no random sets were drawn"
    others = join_and(
        " and ".join(
            ["sink tokens"] * row["sink_tokens"]
            + [plural(row["channels"], "channel")] * (row["channels"] > 0)
        )
        + f" ({percent(row['closed_share'])})"
        for row in found["not_chosen"]
    )
    goal = percent(found["goal"])
    if others:
        others = f" Not chosen, but at {goal} or above on the second half: {others}."
    if found["verdict"] == "no small set":
        return (
            f"The set chosen on the first half of the text helps no more than random sets on the second: {cost}, and "
            f"the set closes {closed}.{others}{apart}"
        )
    parts = []
    if found["sink_tokens"]:
        places = found["sink_positions"]
        at = f", at position{'s' * (len(places) > 1)} {join_and(places)}"
        at *= 0 < len(places) <= 4
        parts.append(f"the sink tokens ({as_text(found['sink_tokens'])} a sequence{at})")
    if n := found["channels"]:
        many = "largest channel" if n == 1 else f"{n} largest channels"
        parts.append(f"the {many} of {_sites_text(found['kept_channels'])}")
    kept = join_and(parts)
    left = f"{as_text(found['left_nats'])} nats {bounds(found['left_low'], found['left_high'])}"
    told = f"{left} are left, which closes {closed}; chosen on one half of the text, judged on the other."
    alone, low, high = found["channels_alone"]
    if alone >= found["closed_low"]:
        told += (
            f" The channels alone close {percent(alone)} {bounds(low, high, shown=percent)}: "
            "that the sink tokens add to this is not clear."
        )
    if found["verdict"] == "goal missed":
        return (
            f"The set chosen on the first half of the text misses {goal} of the gap on the second: "
            f"{cost}; with {kept} kept in 16 bit, {told}{others}{apart}"
        )
    return f"Keep {kept} in 16 bit: {cost}; with them kept, {told}{apart}"

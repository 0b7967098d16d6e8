"""``quantise``: which tokens and channels must stay in 16 bit, so that a low-precision format costs little?

Everything is measured as a loss on text: of the baseline run, of the run in which all chosen sites are rounded to the
format, and of runs in which sink tokens, the largest channels of each site, or both are kept as they are. The smallest
set that closes the goal's share of the gap is chosen on one half of the sequences and judged on the other, against
random tokens and channels of the same number. Tools such as llm-compressor keep neither tokens nor channels but whole
linear layers: the sites with the least signal-to-noise ratio of ordinary tokens are tried as their ``ignore`` list.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from ..activations.record import Reading, stream
from ..activations.sink_mask import sink_mask
from ..activations.views import LayerView
from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.quantisation import format_of, linear_paths, quantisation, quantised_weights, round_to
from ..engine.forward import run_with
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike
from ..models.sites import sites_of
from ..records import check_free
from ..schema import LINEAR_INPUTS, WORTH_KEEPING_NATS, QuantisedFormat
from ..text import costs, listed, number, percent, plural
from ..text import interval as bounds
from .config import QuantiseConfig
from .decision import is_cost, loss_row, parts
from .study import Study, inputs, write_study

CACHE = ("k", "v")
"""Sites of the cache."""
_PART_TOKENS = 2048
_NORMS = {"attn_in": "attn_norm", "mlp_in": "mlp_norm"}
"""Site -> the norm whose gain takes over a smoothing of its channels."""

Channels = Mapping[str, Mapping[int, Sequence[int]]]
"""Site -> layer -> channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The tokens, channels and inputs that stay at full precision."""

    tokens: Bool[Tensor, "batch position"] | None = None
    channels: Channels = field(default_factory=dict)
    inputs: frozenset[tuple[str, int]] = frozenset()
    """(site, layer) that are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Magnitudes and signal-to-noise ratios of the baseline run, by (site, layer)."""

    largest: Mapping[tuple[str, int], Float[Tensor, " value"]]
    """Largest magnitude of each channel over all tokens."""
    largest_ordinary: Mapping[tuple[str, int], Float[Tensor, " value"]]
    """Largest magnitude of each channel over the tokens that are no sinks."""
    sqnr: pd.DataFrame
    """Signal-to-noise ratios; see ``sqnr`` in the schema."""


def quantise(
    model: ModelLike | QuantiseConfig,
    *,
    config: QuantiseConfig | None = None,
    tokens: TokenBatch | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Study:
    """Find the tokens and channels that a low-precision format must not touch, and what keeping them is worth.

    Args:
        model: what ``load`` takes, a ``LensModel``, or a configuration, which names one and its tokens.
        config: the study's configuration; the default one if None.
        tokens: the sequences, instead of those of the configuration.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        **fields: fields of ``QuantiseConfig``, such as ``format="int8_token"``; they win over those of ``config``.

    Raises:
        InputError: a format or site that cannot be used, weights that are quantised already, or too few sequences.
        RunError: the folder is in use, or holds another run.
    """
    check_free(out, overwrite=overwrite)
    config, lens, batch = inputs(QuantiseConfig, model, config=config, tokens=tokens, fields=fields)
    targets = _targets(lens, config)
    check_weights(lens, config)
    halves = parts(batch)
    sinks = {name: sink_mask(lens, part, by="norm").cpu() for name, part in halves.items()}
    measured = _measure_channels(lens, halves["choose"], sinks=sinks["choose"], targets=targets)
    sizes = [size for size in sorted({*config.channels}) if size > 0]
    rows: list[dict[str, Any]] = []
    costs, judged = True, None
    with tqdm(desc="quantised runs", unit="run", disable=not progress, leave=False) as bar:
        for name, part in halves.items():
            run = _Runs(lens, part, targets=targets, config=config, bar=bar)
            baseline, base = run.baseline(), run.rounded_weights()
            worst = run.loss(Kept())
            known = {"baseline": baseline, "worst": worst, "best": base, "seed": config.seed}
            rows.append(_row(name, "clean", baseline, **known))
            if config.weights:
                rows.append(_row(name, "weights", base, **known))
            rows.append(_row(name, "all", worst, **known))
            costs = costs and is_cost(worst, base, seed=config.seed)
            judged = (run, part, known)
            if costs:
                for what, kept in _conditions(measured, sinks[name], sizes=sizes):
                    loss = run.loss(kept)
                    rows.append(_row(name, what[0], loss, tokens=what[1], channels=what[2], inputs=what[3], **known))
        chosen = _rows_to_decide(pd.DataFrame(rows), goal=config.goal) if costs else {}
        if "set" in chosen and judged is not None:
            run, part, known = judged
            drawn = _draw_random(
                chosen["set"], measured=measured, sinks=sinks["judge"], valid=part.valid, config=config
            )
            rows += [
                _row("judge", "random", run.loss(kept), tokens=what[0], channels=what[1], draw=draw, **known)
                for draw, (what, kept) in enumerate(drawn)
            ]
    conditions = pd.DataFrame(rows).astype({"draw": "Int64"})
    whole = torch.cat([sinks["choose"], sinks["judge"]])
    decision = _decision(lens, config, conditions, chosen, measured=measured, sinks=whole)
    fragment = compressor_fragment(lens, left=decision["ignored_inputs"], smooth=decision["channels"] > 0)
    frames = {
        "conditions": conditions,
        "channels": _channel_table(measured, most=max(sizes, default=1)),
        "sqnr": measured.sqnr,
        "sinks": _sink_table(batch, whole),
        "summary": pd.DataFrame([{name: decision[name] for name in _SUMMARY}]),
    }
    return write_study(
        "quantise",
        lens,
        batch,
        config,
        frames,
        kernel="eager",
        decision=decision | {"llm_compressor": fragment},
        headline=decision["sentence"],
        files={"llm_compressor.json": fragment},
        out=out,
        overwrite=overwrite,
    )


_SUMMARY = (
    "verdict",
    "sentence",
    "format",
    "clean_loss_nats",
    "quantised_loss_nats",
    "cost_nats",
    "cost_low",
    "cost_high",
    "sink_tokens",
    "channels",
    "kept_loss_nats",
    "closed_share",
    "closed_low",
    "closed_high",
    "random_most",
    "rival_sink_tokens",
    "rival_channels",
    "rival_closed_share",
    "controls",
    "ignored",
    "ignored_closed_share",
    "ignored_closed_low",
    "ignored_closed_high",
    "n",
)


def check_weights(lens: LensModel, config: QuantiseConfig) -> None:
    """Refuse to round weights that were read from a quantised file.

    Raises:
        InputError: they were.
    """
    quantised = getattr(lens.config, "quantization_config", None) is not None
    if config.weights and (quantised or any(".gguf" in note for note in lens.notes)):
        raise InputError(
            f"the weights of {lens.name} come from a quantised file; need weights in 16 or 32 bit to round them. "
            "Leave --weights out, or use a checkpoint that is not quantised"
        )


def _targets(lens: LensModel, config: QuantiseConfig) -> dict[str, QuantisedFormat]:
    """Site -> format; sites that the family lacks are left out where they were not asked for."""
    there = sites_of(lens.family)
    if lens.family.experts is not None:  # there the site has the router's weights in it, which no format rounds
        there = tuple(site for site in there if site != "neurons")
    named = config.sites or tuple(site for site in LINEAR_INPUTS if site in there)
    lacking = [site for site in named if site not in there]
    if lacking:
        raise InputError(
            f"{lens.family.architecture} has no site {lacking[0]!r} to round; need some of {', '.join(there)}"
        )
    targets: dict[str, QuantisedFormat] = dict.fromkeys(named, config.format)
    if config.cache:
        targets |= dict.fromkeys(CACHE, config.cache)
    return targets


class _Runs:
    """Losses of one part of the text under rounding."""

    def __init__(
        self,
        lens: LensModel,
        part: TokenBatch,
        *,
        targets: Mapping[str, QuantisedFormat],
        config: QuantiseConfig,
        bar: Any,
    ) -> None:
        """Round these targets of a model on one part of the text."""
        self.lens, self.part, self.targets, self.bar = lens, part, targets, bar
        self.weights: QuantisedFormat | None = config.weights
        self.batch_size = config.batch_size

    def baseline(self) -> Float[Tensor, " batch"]:
        """Nothing is rounded."""
        return self._loss(())

    def rounded_weights(self) -> Float[Tensor, " batch"]:
        """Only the weights are rounded, where they were asked for."""
        return self.loss(None) if self.weights else self.baseline()

    def loss(self, kept: Kept | None) -> Float[Tensor, " batch"]:
        """Loss by sequence with everything rounded except what is kept; None rounds no activation."""
        edits = () if kept is None else rounding(self.lens, self.targets, kept)
        with quantised_weights(self.lens, self.weights) if self.weights else contextlib.nullcontext():
            return self._loss(edits)

    def _loss(self, edits: Sequence[Edit]) -> Float[Tensor, " batch"]:
        """Loss of each sequence under the edits."""
        found = run_with(self.lens, self.part, edits, layers=[0], quiet=True, batch_size=self.batch_size).loss
        assert found is not None  # it was asked for
        self.bar.update()
        return found


def rounding(lens: LensModel, targets: Mapping[str, QuantisedFormat], kept: Kept) -> list[Edit]:
    """The edits that round every target, except what is kept."""
    edits = []
    for site, form in targets.items():
        layers = [layer for layer in range(lens.n_layers) if (site, layer) not in kept.inputs]
        if layers:
            edits.append(
                quantisation(site, form, layers=layers, tokens=kept.tokens, channels=kept.channels.get(site, {}))
            )
    return edits


def _measure_channels(
    lens: LensModel, part: TokenBatch, *, sinks: Bool[Tensor, "batch position"], targets: Mapping[str, QuantisedFormat]
) -> Measured:
    """Largest channels and signal-to-noise ratios of the baseline run."""
    size = max(1, _PART_TOKENS // part.n_positions)
    found: dict[tuple[str, int], list[Tensor]] = {}
    for start in range(0, part.n_sequences, size):
        chosen = slice(start, start + size)
        readings = [_reading(site, form, sinks=sinks[chosen]) for site, form in targets.items()]
        streamed = stream(lens, part[chosen], readings, batch_size=size)
        for site in targets:
            for layer in range(lens.n_layers):
                found.setdefault((site, layer), []).append(streamed[site, layer])
    rows, largest, ordinary = [], {}, {}
    for (site, layer), tensors in found.items():
        together = torch.cat(tensors)
        width = (together.shape[1] - 5) // 2
        largest[site, layer], ordinary[site, layer] = together[:, : 2 * width].amax(0).float().split(width)
        signal, noise, signal_ordinary, noise_ordinary, noise_kept = together[:, 2 * width :].sum(0).tolist()
        rows.append(
            {
                "site": site,
                "layer": layer,
                "format": targets[site],
                "sqnr_db": _decibels(signal, noise),
                "ordinary_sqnr_db": _decibels(signal_ordinary, noise_ordinary),
                "kept_sqnr_db": _decibels(signal_ordinary, noise_kept),
            }
        )
    return Measured(largest=largest, largest_ordinary=ordinary, sqnr=pd.DataFrame(rows))


def _reading(site: str, form: QuantisedFormat, *, sinks: Bool[Tensor, "batch position"]) -> Reading:
    """A reading of a site's energy and of what rounding adds to it."""
    chosen = format_of(form)

    def read(view: LayerView) -> Tensor:
        """Sums of squares by sequence: all tokens, their noise, ordinary tokens, their noise, noise with sinks kept."""
        x = view[site].flatten(2)
        kept, real = sinks.to(x.device)[..., None], view.valid[..., None]
        x = x.masked_fill(~real, 0.0)
        sizes = x.abs().double()
        after, after_kept = round_to(x, chosen), round_to(x, chosen, keep=kept)
        squares = [x, x - after, x.masked_fill(kept, 0), (x - after).masked_fill(kept, 0), x - after_kept]
        energies = [one.double().square().sum((1, 2)) for one in squares]
        return torch.cat([sizes.amax(1), sizes.masked_fill(kept, 0).amax(1), torch.stack(energies, dim=1)], dim=1)

    return Reading(name=site, sites=(site,), function=read)


def _decibels(signal: float, noise: float) -> float:
    """Signal-to-noise ratio; infinite without noise, nan without a signal."""
    if not signal > 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _largest(sizes: Mapping[tuple[str, int], Tensor], n: int) -> dict[str, dict[int, list[int]]]:
    """The n largest channels of every site and layer."""
    found: dict[str, dict[int, list[int]]] = {}
    for (site, layer), values in sizes.items():
        order = values.sort(descending=True, stable=True).indices
        found.setdefault(site, {})[layer] = order[:n].tolist()
    return found


def worst_inputs(sqnr: pd.DataFrame, n: int) -> list[tuple[str, int]]:
    """The n (site, layer) with the least signal-to-noise ratio of ordinary tokens, among inputs of linear layers."""
    linear = [row for row in _records(sqnr) if row["site"] in LINEAR_INPUTS]
    return [(row["site"], row["layer"]) for row in sorted(linear, key=lambda row: row["ordinary_sqnr_db"])][:n]


def _conditions(
    measured: Measured, sinks: Bool[Tensor, "batch position"], *, sizes: Sequence[int]
) -> Iterable[tuple[tuple[str, bool, int, int], Kept]]:
    """Sets to keep, smallest first: ((name, sink tokens?, channels, inputs of linear layers), what is kept)."""
    any_sink = bool(sinks.any())
    for size in (0, *sizes):
        for tokens in (False, True):
            if (not tokens and not size) or (tokens and not any_sink):
                continue
            channels = _largest(measured.largest_ordinary if tokens else measured.largest, size) if size else {}
            what = "channels" if not tokens else "both" if size else "tokens"
            yield (what, tokens, size, 0), Kept(tokens=sinks if tokens else None, channels=channels)
    n_linear = sum(site in LINEAR_INPUTS for site, _ in measured.largest)
    for n in (1, 2, 4, 8, 16, 32):
        if n < n_linear:
            yield ("inputs", False, 0, n), Kept(inputs=frozenset(worst_inputs(measured.sqnr, n)))


def _row(
    part: str,
    kept: str,
    losses: Tensor,
    *,
    tokens: bool = False,
    channels: int = 0,
    inputs: int = 0,
    draw: int | None = None,
    **known: Any,
) -> dict[str, Any]:
    """One condition as a row."""
    what = {"part": part, "kept": kept, "sink_tokens": tokens, "channels": channels, "inputs": inputs, "draw": draw}
    return what | loss_row(losses, **known)


def _rows_to_decide(conditions: pd.DataFrame, *, goal: float) -> dict[str, dict[str, Any]]:
    """The rows that are decided for: ``set`` (of tokens and channels) and ``inputs`` (of whole linear layers).

    Each is the smallest that reaches the goal on the first part of the sequences, or the best if none does.
    """
    rows: list[dict[str, Any]] = _records(conditions[conditions["part"] == "choose"])
    found = {}
    for name, kinds in (("set", ("tokens", "channels", "both")), ("inputs", ("inputs",))):
        some = [row for row in rows if row["kept"] in kinds]
        if some:
            enough = (row for row in some if row["closed_share"] >= goal)
            found[name] = next(enough, None) or max(some, key=lambda row: row["closed_share"])
    return found


def _records(rows: Any) -> list[dict[str, Any]]:
    """The rows as dictionaries."""
    return rows.to_dict("records")


def _draw_random(
    chosen: Mapping[str, Any],
    *,
    measured: Measured,
    sinks: Bool[Tensor, "batch position"],
    valid: Bool[Tensor, "batch position"],
    config: QuantiseConfig,
) -> Iterable[tuple[tuple[bool, int], Kept]]:
    """Random tokens and channels of the same number as the chosen set."""
    generator = torch.Generator().manual_seed(config.seed)
    keeps_tokens, size = bool(chosen["sink_tokens"]), int(chosen["channels"])
    taken = _largest(measured.largest_ordinary if keeps_tokens else measured.largest, size)
    for _ in range(config.controls):
        tokens = random_tokens(sinks, valid=valid.cpu(), generator=generator) if keeps_tokens else None
        channels = random_channels(measured.largest, taken=taken, n=size, generator=generator) if size else {}
        yield (keeps_tokens, size), Kept(tokens=tokens, channels=channels)


def random_tokens(
    sinks: Bool[Tensor, "batch position"], *, valid: Bool[Tensor, "batch position"], generator: torch.Generator
) -> Bool[Tensor, "batch position"]:
    """As many other tokens of each sequence, drawn without replacement; all others where there are not as many."""
    order = torch.rand(sinks.shape, generator=generator).masked_fill(sinks | ~valid, 2.0)
    rank = order.argsort(1).argsort(1)
    return (rank < sinks.sum(1, keepdim=True)) & ~sinks & valid


def random_channels(
    sizes: Mapping[tuple[str, int], Tensor],
    *,
    taken: Channels,
    n: int,
    generator: torch.Generator,
) -> dict[str, dict[int, list[int]]]:
    """As many other channels of every site and layer, drawn without replacement."""
    found: dict[str, dict[int, list[int]]] = {}
    for (site, layer), values in sizes.items():
        gone = set(taken[site][layer])
        order = torch.randperm(len(values), generator=generator).tolist()
        found.setdefault(site, {})[layer] = [one for one in order if one not in gone][:n]
    return found


def _decision(
    lens: LensModel,
    config: QuantiseConfig,
    conditions: pd.DataFrame,
    chosen: Mapping[str, Mapping[str, Any]],
    *,
    measured: Measured,
    sinks: Bool[Tensor, "batch position"],
) -> dict[str, Any]:
    """The decision and its numbers, all measured on the sequences that judge."""
    judged = _records(conditions[conditions["part"] == "judge"])
    baseline, worst = (next(row for row in judged if row["kept"] == name) for name in ("clean", "all"))
    random = [row["closed_share"] for row in judged if row["kept"] == "random"]
    row, inputs_row = (_row_keeping_same(judged, chosen.get(name)) for name in ("set", "inputs"))
    most = max(random, default=math.nan)
    rival = None if row is None else _rival(judged, row, goal=config.goal)
    verdict = "nothing to keep"
    if row is not None:
        beats = not random or row["closed_low"] > most
        verdict = "keep" if row["closed_share"] >= config.goal else "keep a part"
        verdict = "no small set" if not beats else "halves disagree" if rival is not None else verdict
    keeps = verdict in ("keep", "keep a part")
    left = worst_inputs(measured.sqnr, int(inputs_row["inputs"])) if inputs_row is not None else []
    nothing = {"loss_nats": math.nan, "closed_share": math.nan, "closed_low": math.nan, "closed_high": math.nan}
    kept = nothing if row is None else row
    found = {
        "model": lens.name,
        "verdict": verdict,
        "goal": config.goal,
        "format": config.format,
        "cache": config.cache,
        "weights": config.weights,
        "clean_loss_nats": float(baseline["loss_nats"]),
        "quantised_loss_nats": float(worst["loss_nats"]),
        "cost_nats": float(worst["change_nats"]),
        "cost_low": float(worst["change_low"]),
        "cost_high": float(worst["change_high"]),
        "sink_tokens": float(sinks.sum(1).double().mean()) if keeps and bool(kept["sink_tokens"]) else 0.0,
        "channels": int(kept["channels"]) if keeps else 0,
        "kept_loss_nats": float(kept["loss_nats"]),
        "closed_share": float(kept["closed_share"]),
        "closed_low": float(kept["closed_low"]),
        "closed_high": float(kept["closed_high"]),
        "random_most": most,
        "rival_sink_tokens": rival is not None and bool(rival["sink_tokens"]),
        "rival_channels": 0 if rival is None else int(rival["channels"]),
        "rival_closed_share": math.nan if rival is None else float(rival["closed_share"]),
        "controls": len(random),
        "ignored": len(left),
        "ignored_closed_share": float(inputs_row["closed_share"]) if left and inputs_row is not None else math.nan,
        "ignored_closed_low": float(inputs_row["closed_low"]) if left and inputs_row is not None else math.nan,
        "ignored_closed_high": float(inputs_row["closed_high"]) if left and inputs_row is not None else math.nan,
        "ignored_inputs": left,
        "n": int(baseline["n"]),
        "notes": list(lens.notes),
    }
    return found | {"sentence": _sentence(found, n_linear=sum(site in LINEAR_INPUTS for site, _ in measured.largest))}


def _row_keeping_same(judged: Sequence[dict[str, Any]], chosen: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The row of the second part that keeps the same."""
    if chosen is None:
        return None
    names = ("kept", "sink_tokens", "channels", "inputs")
    return next(row for row in judged if all(row[name] == chosen[name] for name in names))


def _rival(judged: Sequence[dict[str, Any]], row: Mapping[str, Any], *, goal: float) -> dict[str, Any] | None:
    """The set that contradicts the chosen one on the sequences that judge; None if none does.

    It closes at least as much, and is no larger or reaches the goal that the chosen one misses.
    """

    def contradicts(other: Mapping[str, Any]) -> bool:
        """True if another set is at least as good, and smaller or the one that reaches the goal."""
        same = bool(other["sink_tokens"]) == bool(row["sink_tokens"]) and other["channels"] == row["channels"]
        smaller = bool(other["sink_tokens"]) <= bool(row["sink_tokens"]) and other["channels"] <= row["channels"]
        reaches = other["closed_share"] >= goal > row["closed_share"]
        return not same and other["closed_share"] >= row["closed_share"] and (smaller or reaches)

    sets = [other for other in judged if other["kept"] in ("tokens", "channels", "both") and contradicts(other)]
    return max(sets, key=lambda other: other["closed_share"], default=None)


def _named_set(*, tokens: str | None, channels: int) -> str:
    """The set in words: the sink tokens, if any, and the channels of each linear layer's input."""
    many = "largest channel" if channels == 1 else f"{channels} largest channels"
    return listed([*([tokens] if tokens else []), *([f"the {many} of each linear layer's input"] if channels else [])])


def _sentence(found: Mapping[str, Any], *, n_linear: int) -> str:
    """The decision in a sentence."""
    cost = (
        f"{found['format']} {costs(found['cost_nats'], found['cost_low'], found['cost_high'])} on held-out text "
        f"({number(found['clean_loss_nats'])} → {number(found['quantised_loss_nats'])})"
    )
    if found["verdict"] == "nothing to keep":
        return (
            f"Nothing to keep: {cost}. A cost counts if it is at least {WORTH_KEEPING_NATS} nats, its interval "
            "excludes 0, and the other half of the text shows it too."
        )
    random = (
        f"{plural(found['controls'], 'random set')} of that size at most {percent(found['random_most'])}"
        if found["controls"]
        else "no random sets were drawn"
    )
    closed = (
        f"{percent(found['closed_share'])} {bounds(found['closed_low'], found['closed_high'], shown=percent)} "
        f"of the gap, {random}"
    )
    if found["verdict"] == "no small set":
        begin = f"No small set of tokens and channels helps: {cost}, and the best of those tried closes {closed}."
    elif found["verdict"] == "halves disagree":
        rival = _named_set(
            tokens="the sink tokens" if found["rival_sink_tokens"] else None, channels=found["rival_channels"]
        )
        begin = (
            f"The two halves of the text disagree: {cost}. On the other half, the set that one half chose closes "
            f"{closed}, and keeping {rival} alone closes {percent(found['rival_closed_share'])}. More sequences can "
            "decide."
        )
    else:
        sinks = f"the sink tokens ({number(found['sink_tokens'])} a sequence)" if found["sink_tokens"] else None
        kept = _named_set(tokens=sinks, channels=found["channels"])
        begin = (
            f"Keep {kept} in 16 bit: {cost}, and {number(found['kept_loss_nats'])} with them kept, which "
            f"closes {closed}; chosen on one half of the text, judged on the other."
        )
        if found["verdict"] == "keep a part":
            begin += f" It misses the goal of {percent(found['goal'])}."
    if not found["ignored"]:
        return begin
    interval = bounds(found["ignored_closed_low"], found["ignored_closed_high"], shown=percent)
    return (
        f"{begin} If your tool can keep only whole layers, leave {found['ignored']} of {n_linear} inputs of linear "
        f"layers unrounded, which closes {percent(found['ignored_closed_share'])} {interval}."
    )


def compressor_fragment(lens: LensModel, *, left: Sequence[tuple[str, int]], smooth: bool) -> dict[str, Any]:
    """Lists for llm-compressor: linear layers to ignore, and the norms and linear layers to smooth between.

    Args:
        lens: the model.
        left: (site, layer) whose linear layers are not quantised.
        smooth: whether to list pairs for smoothing, which moves large channels into the weights. It helps where
            channels are what stands out, not where tokens are.
    """
    family = lens.family
    ignored = [
        f"{family.layers}.{layer}.{path}"
        for site, layer in sorted(left, key=lambda one: (one[1], LINEAR_INPUTS.index(one[0])))
        for path in linear_paths(lens, site)
    ]
    mappings = [
        [[f"re:.*{path.rpartition('.')[2]}$" for path in linear_paths(lens, site)], f"re:.*{getattr(family, norm)}$"]
        for site, norm in _NORMS.items()
        if smooth and getattr(family, norm) is not None and linear_paths(lens, site)
    ]
    return {"QuantizationModifier": {"ignore": ["lm_head", *ignored]}, "SmoothQuantModifier": {"mappings": mappings}}


def _channel_table(measured: Measured, *, most: int) -> pd.DataFrame:
    """The largest channels of each site and layer, by their magnitude without the sink tokens and with them."""
    rows = []
    for tokens, sizes in (("all", measured.largest), ("ordinary", measured.largest_ordinary)):
        for (site, layer), values in sizes.items():
            middle = float(values.median())
            found = values.sort(descending=True, stable=True)
            for rank, (size, channel) in enumerate(zip(found.values.tolist(), found.indices.tolist(), strict=True), 1):
                if rank > most:
                    break
                ratio = size / middle if middle > 0 else math.nan
                row = {"site": site, "layer": layer, "tokens": tokens, "rank": rank, "channel": channel}
                rows.append(row | {"largest": size, "over_median": ratio})
    return pd.DataFrame(rows)


def _sink_table(batch: TokenBatch, sinks: Bool[Tensor, "batch position"]) -> pd.DataFrame:
    """The tokens that are sinks, one row each."""
    sequence, position = np.nonzero(sinks.numpy())
    ids = batch.tokens.cpu().numpy()[sequence, position]
    return pd.DataFrame({"sequence": sequence, "position": position, "token_id": ids})

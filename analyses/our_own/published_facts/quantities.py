"""Quantities of a model that published facts are about, each a definition with a name.

A quantity gives one number per sequence, which has an interval, one number of the weights, or a set of indices. What it
needs to know beside the model and the tokens (a layer, a dimension, a threshold) is in its *terms*; what of the
circumstances its value depends on is in ``depends``, so that a published number is only compared with one that was
measured alike.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sink_lens.activations.record import Reading, capture, stream
from sink_lens.edits.constructors import Edit, zero
from sink_lens.edits.quantisation import look_up_format, round_to_format
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.measures.dimensions import dominance_ratio_fixed
from sink_lens.measures.reductions import mean_where, queries_from
from sink_lens.measures.variance import output_preservation
from sink_lens.models.packed import is_packed
from sink_lens.models.weights import attention_weights
from sink_lens.schema import SINK_THRESHOLD
from sink_lens.stats import Interval, interval
from sink_lens.studies import quantities as of_cards
from sink_lens.studies.observed import ObservedModel

Terms = Mapping[str, Any]
"""Arguments of a quantity beside the model and the tokens."""
Kind = Literal["number", "set", "range"]


class UnmeasuredError(InputError):
    """A quantity that this model, or these sequences, do not have."""


class AbsentError(UnmeasuredError):
    """The quantity is absent from a model that could have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Measured value of a quantity: a number with its interval, or indices."""

    number: float = math.nan
    low: float = math.nan
    high: float = math.nan
    indices: tuple[Any, ...] = ()
    """Sorted indices, or tuples of them (layer, row, column), or the first and last layer of a range."""
    samples: tuple[float, ...] = ()
    """One number per sequence, where the quantity has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A definition."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    measure: Callable[[ObservedModel, Terms], Any]
    join: str = "mean"
    """Rule that combines values by sequence: mean, exp (of the mean) or max; ``value`` if there is only one."""
    depends: tuple[str, ...] = ("bos",)
    """The circumstances that a published number must share: bos, text, length, dtype."""
    terms: tuple[str, ...] = ()
    """The terms that it cannot do without."""


QUANTITIES: dict[str, Quantity] = {}
"""Name -> definition."""
_JOINS: dict[str, Callable[..., Any]] = {
    "mean": np.mean,
    "exp": lambda rows, axis=None: np.exp(np.mean(rows, axis=axis)),
    "max": np.max,
}


def _is(
    kind: Kind,
    unit: str,
    *,
    join: str = "mean",
    depends: Sequence[str] = ("bos",),
    terms: Sequence[str] = (),
) -> Callable[[Callable[[ObservedModel, Terms], Any]], Callable[[ObservedModel, Terms], Any]]:
    """Register a function as a quantity under its own name; its docstring up to the reference is the meaning."""

    def listed(function: Callable[[ObservedModel, Terms], Any]) -> Callable[[ObservedModel, Terms], Any]:
        """List the function as a quantity."""
        meaning = " ".join((function.__doc__ or "").partition("Reference:")[0].split())
        QUANTITIES[function.__name__] = Quantity(
            name=function.__name__,
            kind=kind,
            unit=unit,
            meaning=meaning,
            measure=function,
            join=join,
            depends=tuple(depends),
            terms=tuple(terms),
        )
        return function

    return listed


def measure_quantity(name: str, seen: ObservedModel, terms: Terms | None = None) -> Value:
    """Measure a quantity.

    Raises:
        InputError: there is no such quantity, a term is missing, or a layer or dimension does not exist.
        UnmeasuredError: this model, or these sequences, do not have it.
    """
    if name not in QUANTITIES:
        raise InputError(f"there is no quantity {name!r}; need one of {', '.join(sorted(QUANTITIES))}")
    quantity, terms = QUANTITIES[name], terms or {}
    lacking = [term for term in quantity.terms if terms.get(term) is None]
    if lacking:
        raise InputError(f"the quantity {name!r} needs {', '.join(lacking)}; name it in the condition")
    _check_terms(seen, terms)
    found = quantity.measure(seen, terms)
    if quantity.kind != "number":
        return Value(indices=tuple(tuple(one) if isinstance(one, list | tuple) else one for one in found))
    if quantity.join == "value":
        number = float(found)
        return Value(number=number, low=number, high=number)
    rows = np.asarray(found.double() if isinstance(found, Tensor) else found, dtype=np.float64)
    rows = rows[~np.isnan(rows)]
    if not len(rows):
        raise UnmeasuredError("it is undefined on these sequences")
    bounds = with_interval(rows, quantity, seed=seen.seed)
    return Value(number=bounds.estimate, low=bounds.low, high=bounds.high, samples=tuple(rows.tolist()))


def with_interval(rows: np.ndarray, quantity: Quantity, *, seed: int) -> Interval:
    """The number over sequences with its 95% interval."""
    return interval(rows, generator=np.random.default_rng(seed), statistic=_JOINS[quantity.join], n_resamples=1000)


def _check_terms(seen: ObservedModel, terms: Terms) -> None:
    """Refuse a layer or dimension that the model does not have."""
    for name, size in (("layer", seen.lens.n_layers), ("dimension", seen.lens.d_model)):
        value = terms.get(name)
        if value is not None and not 0 <= value < size:
            raise AbsentError(f"the model has no {name} {value}; it has 0 to {size - 1}")


def _middle(seen: ObservedModel, terms: Terms) -> list[int]:
    """The layers of the terms, first to last, else from a quarter to five sixths of the depth."""
    n = seen.lens.n_layers
    first, last = terms.get("layers") or (n // 4, max(n // 4, 5 * n // 6))
    if last >= n:
        raise AbsentError(f"the model has no layer {last}; it has 0 to {n - 1}")
    return list(range(first, last + 1))


# --- attention -----------------------------------------------------------------------------------------------------


@_is("number", "share", depends=("bos", "length", "tokens"))
def sink_rate(seen: ObservedModel, terms: Terms) -> Tensor:
    """Share of (layer, head, sequence) whose sink score at the first token is above the threshold.

    The score is the mean attention to it, its own query included; the threshold is 0.3 if none is named.

    Reference: arXiv 2410.10781, Sink_1.
    """
    return of_cards.sink_rate(seen, threshold=terms.get("threshold") or SINK_THRESHOLD)


@_is("number", "attention", depends=("bos", "length"))
def bos_attention(seen: ObservedModel, terms: Terms) -> Tensor:
    """Attention to the first token from the second half of the queries, mean over the heads of the middle layers.

    Those are a quarter to five sixths of the depth if none are named.
    """
    reading = Reading(name="late_mass", sites=("mass",), function=_late_mass)
    found = stream(seen.lens, seen.tokens, [reading], keys=(0,), batch_size=seen.batch_size)
    return found.stacked("late_mass")[_middle(seen, terms)].nanmean(dim=(0, 2))


def _late_mass(view: Any) -> Tensor:
    """Attention to the first token from the second half of the queries."""
    column = view["mass"][..., 0]
    late = queries_from(view.valid, start=view.valid.shape[1] // 2, end=view.reach)
    return mean_where(column, where=late[:, None], dim=-1)


@_is("number", "attention", depends=("bos", "length"))
def first_token_share(seen: ObservedModel, terms: Terms) -> Tensor:
    """Attention to the first token from all later queries, mean over layers and heads."""
    return of_cards.first_token_share(seen)


@_is("number", "index", join="value", depends=("bos", "length"))
def sink_onset_layer(seen: ObservedModel, terms: Terms) -> float:
    """First layer whose mean attention to the first token is above the threshold (0.3 if none is named)."""
    layer = of_cards.sink_onset_layer(seen, threshold=terms.get("threshold") or SINK_THRESHOLD)
    if layer is None:
        raise AbsentError("no layer's mean attention to the first token passes the threshold")
    return float(layer)


@_is("set", "index")
def sink_positions(seen: ObservedModel, terms: Terms) -> list[int]:
    """Positions at which at least 5% of (layer, head, sequence) have their sink, at most four."""
    return sorted(of_cards.sink_positions(seen))


@_is("number", "attention")
def null_mass(seen: ObservedModel, terms: Terms) -> Tensor:
    """Attention that goes to no key (a learned sink logit takes it), mean over rows, heads and layers."""
    return of_cards.null_mass(seen)


def attention_under(seen: ObservedModel, edits: Sequence[Edit], *, layers: Sequence[int]) -> Tensor:
    """Attention of the later tokens to the first one under edits by sequence, mean over heads of some layers."""
    options: dict[str, Any] = {"layers": layers, "loss": False, "quiet": True, "batch_size": seen.batch_size}
    return run_with(seen.lens, seen.tokens, edits, **options).mass_at(0, layers=layers)


def _attention_left(seen: ObservedModel, terms: Terms, edit: Edit) -> Tensor:
    """Attention under an edit over the attention without it, by sequence."""
    layers = _middle(seen, terms)
    return attention_under(seen, [edit], layers=layers) / attention_under(seen, [], layers=layers)


@_is("number", "share")
def attention_without_mlp(seen: ObservedModel, terms: Terms) -> Tensor:
    """Share of the middle layers' attention to the first token that is left when no MLP writes to the stream."""
    return _attention_left(seen, terms, zero("mlp_out"))


@_is("number", "share")
def attention_without_query_bias(seen: ObservedModel, terms: Terms) -> Tensor:
    """Share of the middle layers' attention to the first token that is left without the biases of the queries."""
    biases = [attention_weights(seen.lens, layer=layer).b_q for layer in range(seen.lens.n_layers)]
    if not any(bool(bias.any()) for bias in biases):
        raise UnmeasuredError("the model's queries have no bias")
    change = Edit(site="q", change=lambda x, at: x - biases[at.layer].to(x.device, x.dtype), label="no query bias")
    return _attention_left(seen, terms, change)


@_is("number", "share")
def attention_without_key_columns(seen: ObservedModel, terms: Terms) -> Tensor:
    """Share of the middle layers' attention to the first token that is left when no key reads the outlier dimensions.

    The dimensions are those named, else those found.
    """
    dims = list(terms.get("dimensions") or seen.outlier_dimensions)
    if not dims:
        raise AbsentError("the model has no outlier dimension at the studied position")
    if max(dims) >= seen.lens.d_model:
        raise AbsentError(f"the model has no dimension {max(dims)}; it has 0 to {seen.lens.d_model - 1}")
    weights = [attention_weights(seen.lens, layer=layer) for layer in range(seen.lens.n_layers)]

    def change(x: Tensor, at: Any) -> Tensor:
        """Take the dimensions' part out of the key."""
        assert at.read is not None
        return x - weights[at.layer].keys(at.read, dimensions=dims)

    edit = Edit(site="k", change=change, reads="attn_in", label="no outlier dimension in the keys")
    return _attention_left(seen, terms, edit)


# --- dimensions and activations ------------------------------------------------------------------------------------


@_is("set", "index")
def outlier_dimensions(seen: ObservedModel, terms: Terms) -> list[int]:
    """Dimensions that hold 80% of the studied token's energy after some layer in which it is dominated by them."""
    return sorted(seen.outlier_dimensions)


@_is("set", "index")
def largest_dimensions(seen: ObservedModel, terms: Terms) -> list[int]:
    """The dimensions of the first token with the largest magnitude in any layer; 4, or as many as ``count`` says."""
    sizes = seen.states_at(0)[1:].abs().mean(1).amax(0)
    return sorted(sizes.topk(min(int(terms.get("count") or 4), len(sizes))).indices.tolist())


@_is("range", "index")
def outlier_layers(seen: ObservedModel, terms: Terms) -> list[int]:
    """First and last layer after which the studied token has outlier dimensions."""
    _check_outliers(seen)
    layers = [layer for layer in seen.location.outliers if layer >= 0]
    return [min(layers), max(layers)]


def _check_outliers(seen: ObservedModel) -> None:
    if not seen.outlier_dimensions:
        raise AbsentError("the model has no outlier dimension at the studied position")


@_is("number", "stream", terms=("dimension",))
def dimension_value(seen: ObservedModel, terms: Terms) -> Tensor:
    """Magnitude of a dimension of the first token after a layer, the one where it is largest where none is named."""
    states = seen.states_at(0)[1:, :, terms["dimension"]].abs()
    layer = terms.get("layer")
    return states[layer] if layer is not None else states[int(states.mean(1).argmax())]


@_is("number", "1")
def norm_ratio(seen: ObservedModel, terms: Terms) -> Tensor:
    """Norm of the first token over the median norm of those from position 8 on, after the layer where it is largest."""
    return of_cards.norm_ratio(seen)


def _read_by_attention(seen: ObservedModel, terms: Terms) -> Tensor:
    """Return what the layer's attention reads at the first token."""
    layer = terms["layer"]
    kept = capture(seen.lens, seen.tokens, sites=["attn_in"], layers=[layer], positions=[0])
    return kept["attn_in", layer][:, 0].float()


@_is("number", "1", join="value", terms=("layer", "dimension"))
def dominance_after_norm(seen: ObservedModel, terms: Terms) -> float:
    """Magnitude of a dimension of the first token as attention reads it, over the mean magnitude of the others.

    It is read after the norm of the named layer, and is a ratio of means over sequences.

    Reference: arXiv 2605.06611, Table 1.
    """
    return dominance_ratio_fixed(_read_by_attention(seen, terms), dimension=terms["dimension"])


@_is("number", "stream", terms=("layer", "dimension"))
def value_after_norm(seen: ObservedModel, terms: Terms) -> Tensor:
    """Magnitude of a dimension of the first token as a layer's attention reads it, after the norm."""
    return _read_by_attention(seen, terms)[:, terms["dimension"]].abs()


@_is("number", "stream", join="max")
def max_activation(seen: ObservedModel, terms: Terms) -> Tensor:
    """Largest magnitude in the residual stream over layers, tokens and dimensions."""
    return of_cards.max_activation(seen)


@_is("number", "stream", join="max", terms=("site",))
def site_max_activation(seen: ObservedModel, terms: Terms) -> Tensor:
    """Largest magnitude at a site over layers, tokens and channels."""
    name = f"largest:{terms['site']}"
    if name not in seen.main_pass.values:
        raise UnmeasuredError(f"the site {terms['site']} cannot be read in this model")
    return seen.main_pass.stacked(name)[..., 0].abs().amax(0)


@_is("number", "index", join="value")
def max_activation_layer(seen: ObservedModel, terms: Terms) -> float:
    """The layer after which the residual stream has its largest magnitude."""
    return float(seen.main_pass.stacked("largest:resid_post")[..., 0].abs().amax(1).argmax())


@_is("number", "index", join="value")
def massive_layer(seen: ObservedModel, terms: Terms) -> float:
    """First layer after which some token has an entry above 100 and at least 1000 times its median magnitude.

    Reference: arXiv 2402.17762.
    """
    tokens = _magnitudes(seen)
    absolute, relative = terms.get("absolute") or 100.0, terms.get("relative") or 1000.0
    passes = (tokens[..., 0] > absolute) & (tokens[..., 1] >= relative)
    layers = passes.flatten(1).any(1).nonzero().flatten()
    if not len(layers):
        raise AbsentError("no entry passes the criterion of arXiv 2402.17762")
    return float(layers[0])


@_is("number", "1")
def massive_ratio(seen: ObservedModel, terms: Terms) -> Tensor:
    """Largest magnitude of a token over its median magnitude, in the layer and token where this is largest."""
    return _magnitudes(seen)[..., 1].nan_to_num(0.0).amax(dim=(0, 2))


def _magnitudes(seen: ObservedModel) -> Tensor:
    """Largest magnitude of each token after each layer, and over the token's median magnitude."""

    def read(view: Any) -> Tensor:
        """The two numbers of each token; nan at padding."""
        magnitude = view["resid_post"].float().abs()
        largest = magnitude.amax(-1)
        found = torch.stack([largest, largest / magnitude.median(-1).values], dim=-1)
        return found.masked_fill(~view.valid[..., None], math.nan)

    reading = Reading(name="magnitudes", sites=("resid_post",), function=read)
    return stream(seen.lens, seen.tokens, [reading], batch_size=seen.batch_size).stacked("magnitudes")


@_is("number", "1")
def kurtosis(seen: ObservedModel, terms: Terms) -> Tensor:
    """Excess kurtosis of a token's dimensions in the residual stream, mean over tokens and layers."""
    return of_cards.kurtosis(seen)


@_is("set", "index")
def residual_sinks(seen: ObservedModel, terms: Terms) -> list[int]:
    """Dimensions over 20 times the median magnitude on at least half of the tokens after the first, in some layer.

    Reference: arXiv 2601.22966.
    """
    return sorted(seen.residual_sinks)


@_is("number", "tau", join="value", depends=("bos", "text"))
def w_o_tau(seen: ObservedModel, terms: Terms) -> float:
    """Kendall tau between the magnitudes of W_O's weights and the first token's standard deviation over sequences.

    It is the mean over output dimensions and the first quarter of the layers; undefined with BOS, where the first token
    is the same in every sequence.

    Reference: arXiv 2605.06611.
    """
    layers = range(max(1, seen.lens.n_layers // 4))
    kept = capture(seen.lens, seen.tokens, sites=["z"], layers=layers, positions=[0])
    found = []
    for layer in layers:
        z = kept["z", layer][:, 0].flatten(1).float()
        std = z.std(dim=0)
        if not std.max() > 1e-4 * z.abs().max():
            raise UnmeasuredError("the first token is the same in every sequence")
        weight = attention_weights(seen.lens, layer=layer).w_o.flatten(0, 1).T.float().cpu()
        found.append(output_preservation(weight, first_std=std).nanmean())
    return float(torch.stack(found).mean())


# --- weights that write --------------------------------------------------------------------------------------------


@_is("set", "index")
def super_weights(seen: ObservedModel, terms: Terms) -> list[tuple[int, int, int]]:
    """Entries (layer, row, column) of the down-projections that write most of a spike of their layer's output.

    Reference: arXiv 2411.07191.
    """
    return sorted((row["layer"], row["row"], row["column"]) for row in seen.super_weights)


@_is("set", "index")
def writing_neurons(seen: ObservedModel, terms: Terms) -> list[tuple[int, int]]:
    """Neurons (layer, neuron) that make at least 5% of a growth layer's change of the outlier dimension."""
    if seen.lens.family.down is None or seen.lens.family.mlp_post_norm is not None:
        raise UnmeasuredError(
            "the model's neurons cannot be split here (a mixture of experts, or a norm after the MLP)"
        )
    return of_cards.writing_neurons(seen)


# --- loss ----------------------------------------------------------------------------------------------------------

_LOSS = ("bos", "text", "length", "dtype")


@_is("number", "1", join="exp", depends=_LOSS)
def perplexity(seen: ObservedModel, terms: Terms) -> Tensor:
    """Exponential of the mean next-token loss."""
    return seen.losses


@_is("number", "1", join="exp", depends=_LOSS)
def perplexity_zeroed(seen: ObservedModel, terms: Terms) -> Tensor:
    """Perplexity with the outlier dimensions of the studied position set to 0 after every layer that has them."""
    _check_outliers(seen)
    return seen.loss_with_outliers_ablated(to_mean=False)


@_is("number", "1", join="exp", depends=_LOSS)
def perplexity_mean_aligned(seen: ObservedModel, terms: Terms) -> Tensor:
    """Perplexity with the outlier dimensions of the studied position at ``mean_aligned``."""
    _check_outliers(seen)
    return seen.loss_with_outliers_ablated(to_mean=True)


@_is("number", "1", join="exp", terms=("entries",))
def super_weight_factor(seen: ObservedModel, terms: Terms) -> Tensor:
    """Factor by which setting entries (layer, row, column) of the down-projections to 0 multiplies the perplexity."""
    with _without_entries(seen, terms["entries"]):
        return seen.loss_with_edits([]) - seen.losses


@contextmanager
def _without_entries(seen: ObservedModel, entries: Sequence[Sequence[int]]) -> Iterator[None]:
    """Zero entries of down-projections inside the block."""
    family = seen.lens.family
    if family.down is None:
        raise UnmeasuredError("the model is a mixture of experts, whose down-projections are not read")
    path = f"{family.mlp}.{family.down}" if family.mlp else family.down
    kept: list[tuple[Tensor, tuple[int, int], Tensor]] = []
    try:
        for layer, row, column in entries:
            if not 0 <= layer < seen.lens.n_layers:
                raise AbsentError(f"the model has no layer {layer}")
            down = seen.lens.layer(layer).get_submodule(path)
            if is_packed(down):
                raise UnmeasuredError("its down-projections are packed, so that no entry of them can be set to 0")
            weight: Any = down.weight
            place = (column, row) if family.transposed else (row, column)
            if place[0] >= weight.shape[0] or place[1] >= weight.shape[1]:
                raise AbsentError(f"the down-projection of layer {layer} has no entry [{row}, {column}]")
            kept.append((weight, place, weight.data[place].clone()))
            weight.data[place] = 0
        yield
    finally:
        for weight, place, value in reversed(kept):
            weight.data[place] = value


@_is("number", "1", join="exp", depends=("length",))
def no_bos_factor(seen: ObservedModel, terms: Terms) -> Tensor:
    """Factor by which leaving out BOS multiplies the perplexity of the same tokens, the first of them left out."""
    if not seen.tokens.bos:
        raise UnmeasuredError("the sequences do not begin with BOS")
    without = ObservedModel(seen.lens, seen.tokens.without_bos(), batch_size=seen.batch_size)
    return without.losses - seen.token_losses[:, 1:].nanmean(1)


@_is("number", "nats", depends=_LOSS)
def loss(seen: ObservedModel, terms: Terms) -> Tensor:
    """Mean next-token loss."""
    return seen.losses


@_is("number", "dB", join="value", terms=("format", "layer", "site"), depends=("bos", "text"))
def sqnr(seen: ObservedModel, terms: Terms) -> float:
    """Signal-to-noise ratio (dB) when one site of one layer is rounded to a format, over all tokens."""
    site, layer, form = terms["site"], terms["layer"], look_up_format(terms["format"])

    def read(view: Any) -> Tensor:
        """Sums of squares of the site and of the rounding, by sequence."""
        x = view[site].flatten(2).masked_fill(~view.valid[..., None], 0.0)
        energies = [one.double().square().sum((1, 2)) for one in (x, x - round_to_format(x, form))]
        return torch.stack(energies, dim=1)

    reading = Reading(name="sqnr", sites=(site,), function=read, layers=frozenset({layer}))
    signal, noise = stream(seen.lens, seen.tokens, [reading])["sqnr", layer].sum(0).tolist()
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf

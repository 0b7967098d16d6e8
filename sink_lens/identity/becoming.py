"""What a checkpoint has made of position 0: its outlier dimension and the neurons that write it.

By the definitions of the chain where they apply. Where position 0 has no outlier dimension, the largest dimension
stands in, and where there is no super neuron, the one that writes most of that dimension; both are marked, since a
largest one there always is.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..chain.config import TraceConfig
from ..chain.locate import Plan
from ..chain.measure import Panel, measure
from ..chain.neurons import output_terms
from ..data.tokens import TokenBatch
from ..measures.dimensions import dominance_ratio
from ..measures.neurons import contribution_share, super_neurons
from ..models.lens import LensModel
from ..models.weights import mlp_weights

_READ = frozenset(
    {
        "sink_score",
        "norm:resid_pre",
        "norm:resid_post",
        "state_pre",
        "state",
        "neurons_at_keys",
        "attn_out_at_keys",
        "mlp_out_at_keys",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A neuron that writes the outlier dimension at position 0."""

    layer: int
    neuron: int
    share: float
    """Of its layer's change of the dimension, attention included; mean over sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Became:
    """Position 0 of one checkpoint."""

    dimension: int
    """Its outlier dimension, or where there is none its largest one."""
    layer: int
    """The layer after which that dimension holds the largest share of its energy."""
    dominance: float
    """max|h| / mean|h| after that layer, mean over sequences."""
    is_outlier: bool
    """Whether the chain's criterion calls it one."""
    writers: tuple[Writer, ...]
    """Its super neurons, or where there is none the neuron that writes most of the dimension; none in a mixture."""
    are_super: bool
    """Whether the chain's criterion calls them so."""
    sink_rate: float
    """Share of (layer, head, sequence) whose sink score at position 0 passes the threshold."""
    states: Float[Tensor, "layer d_model"]
    """The stream at position 0 after each layer, mean magnitude over sequences."""


def became(lens: LensModel, tokens: TokenBatch, *, config: TraceConfig) -> Became:
    """The outlier dimension of position 0 and its writers, by one pass over the tokens.

    Of several outlier dimensions the one that is an outlier after most layers; of as many, the one with the larger
    share of energy. The definitions for where there is none are ours.

    Args:
        lens: the model.
        tokens: the sequences, of at least 10 tokens.
        config: thresholds of sink, growth, dominance and share (its model and tokens are not used).
    """
    everywhere = Plan(positions=(0,), layers=tuple(range(lens.n_layers)))
    panel = measure(lens, tokens, plan=everywhere, config=config, only=_READ)
    states = panel.states()[1:].double()
    energy = states.square().mean(1)
    share = energy / energy.sum(1, keepdim=True)
    dominance = torch.stack([dominance_ratio(state).mean() for state in states])
    counts = Counter(one for layer, found in panel.location.outliers.items() if layer >= 0 for one in found)
    if counts:
        dimension = max(counts, key=lambda one: (counts[one], float(share[:, one].max())))
        layers = [layer for layer, found in panel.location.outliers.items() if layer >= 0 and dimension in found]
        layer = max(layers, key=lambda one: float(share[one, dimension]))
    else:
        layer = int(dominance.argmax())
        dimension = int(energy[layer].argmax())
    writers = _super(lens, panel, share=config.super_share)
    return Became(
        dimension=dimension,
        layer=layer,
        dominance=float(dominance[layer]),
        is_outlier=bool(counts),
        writers=writers or _largest(lens, panel, dimension=dimension, state=states[layer, :, dimension]),
        are_super=bool(writers),
        sink_rate=float(panel.sink_rate(config.threshold).nanmean()),
        states=states.abs().mean(1).float(),
    )


def terms_at(
    lens: LensModel, panel: Panel, *, layer: int, dimension: int
) -> tuple[Float[Tensor, "batch neuron"], Float[Tensor, " batch"]] | None:
    """What each neuron of a layer adds to a dimension at position 0, and the layer's whole change of it."""
    weights = mlp_weights(lens, layer=layer)
    if weights is None:
        return None
    activations = panel.at("neurons_at_keys", layer)[:, 0].to(weights.w_down.device)
    terms, _ = output_terms(lens, weights, layer=layer, activations=activations, dimension=dimension)
    added = [panel.at(name, layer)[:, 0, dimension] for name in ("attn_out_at_keys", "mlp_out_at_keys")]
    return terms.cpu(), added[0] + added[1]


def _super(lens: LensModel, panel: Panel, *, share: float) -> tuple[Writer, ...]:
    """The super neurons of every growth step, those with the largest share first."""
    found = []
    for step in panel.location.steps:
        for layer in step.layers:
            split = terms_at(lens, panel, layer=layer, dimension=step.dimension)
            if split is None:
                continue
            shares = contribution_share(split[0], change=split[1])
            chosen = super_neurons(shares, share=share).nonzero().flatten().tolist()
            found += [Writer(layer=layer, neuron=neuron, share=float(shares[neuron])) for neuron in chosen]
    return tuple(sorted(found, key=lambda one: -one.share))


def _largest(lens: LensModel, panel: Panel, *, dimension: int, state: Float[Tensor, " batch"]) -> tuple[Writer, ...]:
    """The neuron of all layers that adds most to a dimension, in the direction in which position 0 has it."""
    best: tuple[float, Writer] | None = None
    sign = float(state.mean().sign()) or 1.0
    for layer in range(lens.n_layers):
        split = terms_at(lens, panel, layer=layer, dimension=dimension)
        if split is None:
            return ()
        added = split[0].mean(0) * sign
        neuron = int(added.argmax())
        if best is None or float(added[neuron]) > best[0]:
            share = float(contribution_share(split[0], change=split[1])[neuron])
            best = float(added[neuron]), Writer(layer=layer, neuron=neuron, share=share)
    return () if best is None else (best[1],)

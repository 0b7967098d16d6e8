"""Variance amplification: move a token's aggregated value away from a centre, or towards it.

The edit is ``z_p <- mu + factor (z_p - mu)`` at the input of W_O (arXiv 2605.06611). The centre mu is the mean of the
*value* vectors over random tokens (as in the paper's code), the mean of the aggregated values, or none: the norm-only
control, which keeps the vector's direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.record import Reading, stream
from ..activations.views import LayerView
from ..data.tokens import random_tokens
from ..errors import InputError
from ..measures.heads import expand_kv
from ..measures.reductions import widen
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..schema import CENTRES, FACTORS, Centre
from .constructors import At, Edit, EditError, edit

__all__ = ["CENTRES", "FACTORS", "Centre", "CentringMeans", "amplify", "centring_means"]

_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CentringMeans:
    """Each head's mean value and mean aggregated value over random tokens, for each layer with attention."""

    values: Mapping[int, Float[Tensor, "head d_head"]] = field(repr=False)
    """Those that a layer attends to; each key-value head is repeated for the query heads that share it."""
    aggregated: Mapping[int, Float[Tensor, "head d_head"]] = field(repr=False)
    """At the family's site of them (``Family.aggregated_site``)."""
    n_tokens: int
    seed: int

    def of_centre(self, centre: Centre) -> Mapping[int, Tensor]:
        """Return the means of a centre by layer; refuse one without means."""
        if centre not in ("values", "aggregated"):
            raise InputError(f"the centre {centre!r} has no means; need values or aggregated")
        return self.values if centre == "values" else self.aggregated

    def tensors(self) -> dict[str, Tensor]:
        """Return the means under names such as ``values.3``."""
        named = {f"values.{layer}": tensor for layer, tensor in self.values.items()}
        return named | {f"aggregated.{layer}": tensor for layer, tensor in self.aggregated.items()}


def usable_centres(lens: LensModel) -> tuple[Centre, ...]:
    """Return the centres that ``amplify`` can use: not ``values`` if a gate multiplies value averages."""
    return tuple(
        centre for centre in CENTRES if centre != "values" or lens.family.aggregated_site == "z_raw"
    )


def centring_means(
    model: ModelLike,
    *,
    n_tokens: int = 4096,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> CentringMeans:
    """Compute each head's mean value and mean aggregated value over random tokens, in sequences of 64 without BOS.

    This takes one pass of the plain model over ``n_tokens`` tokens, at least 64, which are drawn with ``seed``. It ends
    with the last of ``layers``; None is all that have attention.
    """
    lens = as_lens(model)
    site = lens.family.aggregated_site
    length = min(_LENGTH, lens.n_context or _LENGTH)
    if n_tokens < length:
        raise InputError(
            f"n_tokens is {n_tokens}; need at least {length}, one sequence of random tokens"
        )
    tokens = random_tokens(
        lens.tokenizer,
        generator=torch.Generator().manual_seed(seed),
        vocab_size=lens.d_vocab,
        sequences=n_tokens // length,
        length=length,
        bos="without",
    )

    def values(view: LayerView) -> Tensor:
        return expand_kv(view["v"].float().mean(1), n_heads=lens.n_heads)

    read = None if layers is None else frozenset(layers)
    having = None if layers is None else frozenset(lens.key_layers(layers))
    readings = [
        Reading(name="values", sites=("v",), function=values, layers=having),
        Reading(
            name="aggregated",
            sites=(site,),
            function=lambda view: view[site].float().mean(1),
            layers=read,
        ),
    ]
    streamed = stream(lens, tokens, readings, progress=progress, label="centring means").values
    means = {
        name: {layer: one.mean(0) for layer, one in by_layer.items()}
        for name, by_layer in streamed.items()
    }
    means["values"] = {
        layer: means["values"][lens.key_layers([layer])[0]] for layer in means["aggregated"]
    }
    return CentringMeans(**means, n_tokens=tokens.n_sequences * tokens.n_positions, seed=seed)


def amplify(
    factor: float,
    *,
    positions: Sequence[int],
    layers: Sequence[int],
    centre: Centre = "values",
    means: CentringMeans | None = None,
    heads: Sequence[int] | None = None,
    site: str = "z_raw",
    label: str = "",
) -> Edit:
    """Make an edit that amplifies (factor above 1) or attenuates the variance of some tokens' aggregated values.

    The factor is that of the deviation from the centre; 1 changes nothing. The layers should come before those that are
    observed. ``means`` are the result of ``centring_means``; the centre ``none``, the norm-only control, needs none.
    ``site`` is that of the aggregated values: ``lens.family.aggregated_site``. ``heads`` are query heads (None: all).

    Raises:
        InputError: the factor is not finite, or means are missing.
        EditError: when run, if the means are of another model or lack the layer.
    """
    if not torch.isfinite(torch.tensor(factor)):
        raise InputError(f"the factor is {factor}; need a finite number")
    if centre != "none" and means is None:
        raise InputError(
            f"the centre {centre!r} needs means; compute them once with centring_means(lens)"
        )

    def change(z: Tensor, at: At) -> Tensor:
        if means is None or centre == "none":
            return z * factor
        own = means.of_centre(centre).get(at.layer, torch.empty(0))
        mu = own if at.part.heads is None else own[[one for one in at.part.heads if one < len(own)]]
        if mu.shape != z.shape[2:]:
            raise EditError(
                f"the means have the shape {tuple(own.shape)} for layer {at.layer}, where the chosen heads have "
                f"{tuple(z.shape[2:])}; need means of this model and layer: centring_means(model)"
            )
        return (
            z
            if factor == 1
            else (mu.to(z.device) + factor * (widen(z) - mu.to(z.device))).to(z.dtype)
        )

    label = label or (
        f"norm x {factor:g}" if centre == "none" else f"amplification x {factor:g} from {centre}"
    )
    return edit(site, change, label=label, positions=positions, layers=layers, heads=heads)

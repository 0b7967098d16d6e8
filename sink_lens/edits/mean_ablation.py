"""Mean ablation: a part of a site is set to the site's mean over other positions of the clean run."""

from collections.abc import Sequence
from typing import Unpack

from jaxtyping import Int
from torch import Tensor

from ..activations.record import capture
from ..data.tokens import TokenBatch, from_tensor
from ..errors import InputError
from ..models.load import ModelLike, as_lens
from ..models.sites import SITES
from .constructors import Edit, Where, freeze

_FIRST = 8
"""Positions from here on are ordinary, unless they are chosen otherwise."""


def mean(
    lens: ModelLike,
    tokens: TokenBatch | Int[Tensor, "batch position"],
    site: str,
    *,
    over: Sequence[int] | None = None,
    **where: Unpack[Where],
) -> Edit:
    """Mean ablate a part of a site: set it to the mean over sequences and other positions of the clean run.

    Cost: one pass of the bridge, for which the site's tensors of the chosen layers are kept.

    Args:
        lens: the model.
        tokens: the sequences that the mean is taken over; padding is left out.
        site: the site; it needs an axis of token positions.
        over: the positions that the mean is taken over; by default those from 8 on that are not edited.
        **where: the part that is set: ``layers``, ``positions``, ``heads`` and ``units``, as for ``freeze``.

    Raises:
        SiteError: the family lacks the site.
        InputError: the site has no positions, or no position is left for the mean.
    """
    lens = as_lens(lens)
    batch = tokens if isinstance(tokens, TokenBatch) else from_tensor(tokens)
    axes = SITES[site].axes.split() if site in SITES else ["batch", "position"]
    if "position" not in axes:
        raise InputError(f"{site!r} has the axes {' '.join(axes)!r}; need a site with positions, such as resid_post")
    edited, heads, units = (where.get(name) for name in ("positions", "heads", "units"))
    chosen = [p for p in range(_FIRST, batch.n_positions) if p not in (edited or ())] if over is None else list(over)
    if not chosen:
        raise InputError(
            f"no position is left for the mean of {site!r} in sequences of {batch.n_positions} tokens; need longer "
            "ones, or positions given by over"
        )
    layers = where.get("layers")
    layers = list(range(lens.n_layers) if layers is None else layers)
    found = capture(lens, batch, sites=[site], layers=layers, path="bridge")
    real = batch.valid[:, chosen]
    values = {}
    for layer in layers:
        one = found[site, layer][:, chosen][real].mean(0)[None, None]
        one = one if heads is None else one[:, :, list(heads)]
        values[layer] = one if units is None else one[..., list(units)]
    where.setdefault("label", f"mean ablate {site}")
    return freeze(site, values, **where)

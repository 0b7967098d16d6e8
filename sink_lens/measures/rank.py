"""The number of directions that the hidden states of one sequence use."""

import math
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .reductions import check_position


def effective_rank(
    x: Float[Tensor, "*batch position d_model"],
    *,
    valid: Bool[Tensor, "*batch position"] | None = None,
    without: int | None = None,
) -> Float[Tensor, "*batch"]:
    """Number of directions that a sequence's states use: exp(-sum p log p), p the normalised singular values.

    From 1 (all states parallel) to min(positions, d_model); nan if all states are 0 or any is not finite. Report it
    with and ``without`` the sink's position: one token with a huge norm gives a low rank whatever the others do.
    Padding, positions that are not ``valid``, is left out.

    Cost: one eigenvalue problem of size min(positions, d_model) per sequence, in float64. Singular values have an error
    of at most about 2e-8 of the largest one, less than those of a float32 SVD.

    Raises:
        InputError: `without` is outside the sequence.

    Reference: arXiv 2605.06611; Roy and Vetterli 2007.
    """
    return effective_ranks(x, valid=valid, without=(() if without is None else (without,),))[..., 0]


def effective_ranks(
    x: Float[Tensor, "*batch position d_model"],
    *,
    valid: Bool[Tensor, "*batch position"] | None = None,
    without: Sequence[Collection[int]],
) -> Float[Tensor, "*batch sample"]:
    """Return ``effective_rank`` for several sets of positions to leave out (``without``), along a new last axis."""
    n_positions, d_model = x.shape[-2:]
    for position in {position for some in without for position in some}:
        check_position(position, n_positions=n_positions)
    x = x.double() if valid is None else torch.where(valid[..., None], x, 0.0).double()
    grams, whole = [], x @ x.mT if n_positions <= d_model else None
    for some in without:
        # A row of zeros adds a singular value of 0, and 0 log 0 = 0, so the row has no effect.
        kept = torch.tensor(
            [position not in some for position in range(n_positions)], device=x.device
        )
        if whole is None:
            own = torch.where(kept[:, None], x, 0.0)
            grams.append(own.mT @ own)
        else:
            grams.append(whole if not some else torch.where(kept[:, None] & kept, whole, 0.0))
    gram = torch.stack(grams, dim=-3)
    finite = gram.isfinite().all(-1).all(-1)  # if the states are
    gram = torch.where(finite[..., None, None], gram, 0.0)
    # On the CPU: a GPU takes many times a forward pass for small problems in float64.
    singular = torch.linalg.eigvalsh(gram.cpu()).clamp(min=0).sqrt().to(gram.device)
    total = singular.sum(-1, keepdim=True)
    p = singular / total
    rank = torch.xlogy(p, p).sum(-1).neg().exp()
    return torch.where(total.squeeze(-1) > 0, rank, math.nan).float()

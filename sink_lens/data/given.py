"""Where the tokens of a batch were given, and results that lie there.

A text is computed in a row of its own, from position 0 on and padded on the right. It may have been given padded on the
left, or packed into a row with other texts. ``as_given`` lays the results that a user indexes where the tokens were
given; ``by_text`` is its inverse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """Where each token of a batch was given, and the size of the tensor in which it was given."""

    index: Int[Tensor, "batch position"]
    """Row times the number of columns, plus column; -1 at padding."""
    shape: tuple[int, int]

    def __getitem__(self, chosen: slice | Tensor | tuple[slice, slice]) -> "Given":
        return Given(index=self.index[chosen], shape=self.shape)

    @property
    def late(self) -> tuple[int, int] | None:
        """The first text that does not begin in column 0 of its row, and its column; None if all do."""
        columns = (self.index[:, 0] % self.shape[1]).tolist()
        return next(((text, column) for text, column in enumerate(columns) if column), None)


def as_given(
    values: Shaped[Tensor, "batch ..."],
    given: Given | None,
    *,
    axes: Sequence[str] = ("position",),
    first: int = 0,
) -> Shaped[Tensor, "row ..."]:
    """Lay values of a batch's tokens where the tokens were given; nan elsewhere, False in a mask.

    Args:
        values: their first axis is the texts.
        given: where the tokens were given; None says that they lie there already.
        axes: names of the other axes; ``position`` and ``key`` are laid, and without ``position`` the texts stay.
        first: the position of the first value, as 1 for the losses of all tokens but the first.
    """
    if given is None:
        return values
    rows, columns = given.shape
    empty = False if values.dtype == torch.bool else math.nan
    index = given.index.to(values.device)
    if "key" in axes:
        at = 1 + axes.index("key")
        values = values.movedim(at, 1)
        laid = values.new_full(
            (len(values), columns + 1, *values.shape[2:]), empty
        )  # the last column is for padding
        laid[
            torch.arange(len(values))[:, None], torch.where(index < 0, columns, index % columns)
        ] = values
        values = laid[:, :columns].movedim(1, at)
    if "position" not in axes:
        return values
    at = 1 + axes.index("position")
    values, index = values.movedim(at, 1), index[:, first:]
    laid = values.new_full((rows * columns, *values.shape[2:]), empty)
    laid[index[index >= 0]] = values[index >= 0]
    return laid.view(rows, columns, *values.shape[2:])[:, first:].movedim(1, at)


def by_text(
    values: Shaped[Tensor, "row ..."],
    given: Given | None,
    *,
    axes: Sequence[str] = ("position",),
    first: int = 0,
) -> Shaped[Tensor, "batch ..."]:
    """Return values that lie where their tokens were given, with a row per text; the inverse of ``as_given``.

    At padding stand values of other tokens.
    """
    if given is None:
        return values
    index, columns = given.index.to(values.device), given.shape[1]
    row, column = (index // columns).clamp(min=0), index % columns
    at = 1 + axes.index("position")
    values = values.movedim(at, 1)[row[:, first:], column[:, first:] - first].movedim(1, at)
    if "key" in axes:
        at = 1 + axes.index("key")
        values = values.movedim(at, 1)[torch.arange(len(column))[:, None], column].movedim(1, at)
    return values


def laid_by_text(
    values: Shaped[Tensor, "row ..."], given: Given, *, axes: Sequence[str] = ("position",)
) -> Shaped[Tensor, "batch ..."]:
    """Return values, or marks, that lie where their tokens were given with a row per text; others as they are.

    They lie so if they have that shape, and values are nan where no token was given.
    """
    marks, at = values.dtype == torch.bool, 1 + axes.index("position")
    real = (given.index >= 0).to(values.device)
    if (len(values), values.shape[at]) != given.shape or not (
        marks or bool(values.movedim(at, 1)[~as_given(real, given)].isnan().all())
    ):
        return values
    found = by_text(values, given, axes=axes)
    for name in {"position", "key"} & {*axes}:
        shape = [len(real), *(real.shape[1] if one == name else 1 for one in axes)]
        found = found.masked_fill(~real.view(shape), False if marks else math.nan)
    return found

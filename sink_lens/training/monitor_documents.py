"""Documents that are packed into the rows of a training batch, or stand behind padding, and their tensors.

Most trainers pack several documents into one row, and say where each begins by ``position_ids`` that begin again, by
``cu_seq_lens_q``, or by a block mask. What a monitor reads is laid out again with one document a row, padded on the
right. A row that begins with padding holds one document, which begins at its first real token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents that are read, the first ones of a batch."""

    row: Int[Tensor, " document"]
    """The batch's row that each stands in."""
    position: Int[Tensor, "document position"]
    """Where its tokens stand in that row; at padding any place that the row has."""
    valid: Bool[Tensor, "document position"]
    segment: Int[Tensor, "batch packed"]
    """Number of the document of each token of these rows; -1 where it is of none that is read."""
    packed: bool
    """Some row of the batch has several documents; if not, rows only begin with padding."""

    @property
    def n_rows(self) -> int:
        """Rows of the batch up to the last one that holds one of these documents."""
        return self.segment.shape[0]

    def to(self, device: torch.device) -> "Documents":
        names = ("row", "position", "valid", "segment")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)

    def split_states(
        self, h: Float[Tensor, "batch packed ..."]
    ) -> Float[Tensor, "document position ..."]:
        return h[self.row[:, None], self.position]

    def split_heads(
        self, by_head: Float[Tensor, "batch head packed ..."]
    ) -> Float[Tensor, "document head position ..."]:
        return self.split_states(by_head.transpose(1, 2)).transpose(1, 2)

    def split_mask(self, additive: Float[Tensor, "#batch #head packed packed"]) -> Tensor:
        """Split as ``split_pattern``; padding sees only itself."""
        found = self.split_pattern(additive.expand(len(self.segment), -1, -1, -1))
        own = torch.eye(self.position.shape[1], dtype=torch.bool, device=found.device)
        return found.masked_fill(~(self.valid[:, None, None, :] | own), -torch.inf)

    def split_pattern(
        self, pattern: Float[Tensor, "batch head packed packed"]
    ) -> Float[Tensor, "document head position position"]:
        return pattern.movedim(1, -1)[
            self.row[:, None, None], self.position[:, :, None], self.position[:, None, :]
        ].movedim(-1, 1)

    def are_kept_apart(self, visible: Bool[Tensor, "#batch #head packed packed"]) -> bool:
        """Check that ``visible`` (True where a query sees a key) lets no token see outside its own document."""
        known = self.segment >= 0
        other = known[:, None, :, None] & (
            self.segment[:, None, :, None] != self.segment[:, None, None, :]
        )
        return not bool((visible & other).any())


def find_documents(
    inputs: Mapping[str, Any], *, batch: int, length: int, most: int
) -> Documents | None:
    """Find the first ``most`` documents of a batch of ``batch`` rows and ``length`` tokens.

    None if every row is one document that begins at its first token. The model's ``inputs`` tell where documents begin:
    a block mask, else ``cu_seq_lens_q``, else ``position_ids``; and the attention mask, where rows begin with padding.
    Documents of a single token are left out: no later token attends to them, and some trainers pad with them.
    """
    starts, real = _document_starts(inputs, batch=batch, length=length)
    if starts is None or real is None or not starts.any():
        return None
    number = starts.flatten().long().cumsum(0).view_as(starts) - 1
    counts = torch.bincount(number[real], minlength=int(number.max()) + 1)
    chosen = (counts > 1).nonzero().flatten()[:most]
    places = [((number == one) & real).nonzero() for one in chosen]
    row = starts.flatten().nonzero().flatten()[chosen] // length
    steps = torch.arange(max(map(len, places), default=0), device=row.device)
    position = steps.new_zeros(len(places), len(steps))
    for at, own in zip(position, places, strict=True):
        at[: len(own)] = own[:, 1]
    renumbered = torch.full((int(number.max()) + 2,), -1, device=row.device)
    renumbered[chosen] = torch.arange(len(chosen), device=row.device)
    n_rows = int(row.max()) + 1 if len(chosen) else 0
    return Documents(
        row=row,
        position=position,
        valid=steps < counts[chosen, None],
        segment=torch.where(real, renumbered[number], -1)[:n_rows],
        packed=bool((starts.sum(1) > 1).any()),
    )


def _document_starts(
    inputs: Mapping[str, Any], *, batch: int, length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return two masks, "batch position": the first tokens of documents, and the tokens that are not padding.

    Both are None if no document begins within a row.
    """
    mask = mask_without_window(inputs.get("attention_mask"))
    real = mask[:, -length:].bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    visible = keys_of_mask(mask)
    if visible is not None and visible.shape[-2:] == (length, length):
        seen = visible.any(1).expand(batch, -1, -1)
        own = seen.diagonal(dim1=-2, dim2=-1)
        starts = own & ~seen.tril(-1).any(-1)
        return (starts, own) if bool(starts[:, 1:].any()) else (None, None)
    ends, ids = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if isinstance(ends, Tensor) and ends.dim() == 1:
        starts = torch.zeros(batch * length, dtype=torch.bool, device=ends.device)
        starts[ends[(ends >= 0) & (ends < batch * length)].long()] = True
        starts = starts.view(batch, length)
    elif isinstance(ids, Tensor) and ids.dim() in (2, 3):
        ids = ids[0] if ids.dim() == 3 else ids  # axes of image and text: text counts alike on all
        if ids.shape[-1] != length:
            return None, None
        starts = (ids.diff(dim=-1, prepend=ids[:, :1] - 1) != 1).expand(batch, -1).clone()
    elif real is not None:
        starts = torch.zeros_like(real)
    else:
        return None, None
    real = torch.ones_like(starts) if real is None else real.to(starts.device)
    starts = starts & real | real & (real.cumsum(1) == 1)
    return (starts, real) if bool(starts[:, 1:].any()) else (None, None)


def keys_of_mask(mask: Any) -> Bool[Tensor, "#row #head query key"] | None:
    """Return the keys that each query sees, from a block mask or a mask with four axes; None for others."""
    if isinstance(mask, BlockMask):
        rows, heads, queries, keys = mask.shape
        return create_mask(
            mask.mask_mod, rows, heads, queries, keys, device=str(mask.kv_num_blocks.device)
        )
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def mask_without_window(mask: Any) -> Any:
    """If ``mask`` is a dict of masks, return the one for layers without a sliding window."""
    if isinstance(mask, Mapping):
        return mask.get("full_attention", next(iter(mask.values()), None))
    return mask

"""Layout of several cells in one forward pass: a row for each computed position; only attention sees sequences.

A pass over cells that begin at different positions is one sequence of rows: of each cell its sequences, of each
sequence the positions from the cell's first on. Attention takes the rows apart: queries are padded to the longest cell,
keys and values are completed by those of the baseline run.

For a single layer, one position may be computed alone: the other keys, values and queries are then the baseline run's.
Later queries meet one other key, so that their attention to it follows from the sums of the baseline run's rows
(``attention_to_first``), and no whole pattern is made.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AttentionInterface

from ..errors import ModelError
from ..measures.attention import row_shares
from ..models.attention import (
    add_alibi,
    add_sink_logits,
    repeat_kv_heads,
    softcap_scores,
    weights_from_scores,
)
from ..models.delegation import Masks, attention_component, inner_model
from ..models.lens import LensModel
from ..models.own_attention import no_pattern_error, own_pattern, weighted_values
from ..models.private_apis import use_kernel

_NAME = "sink_lens_cells"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The rows of a pass: for each cell, the positions that it computes of every sequence."""

    n_sequences: int
    n_positions: int
    begins: tuple[int, ...]
    """The first position of each cell."""
    alone: bool = False
    """True if only ``first_position`` is computed, the same in every cell."""
    _moved: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def first_position(self) -> int:
        return min(self.begins)

    @property
    def is_whole(self) -> bool:
        """True if every cell computes every position."""
        return not self.alone and not any(self.begins)

    @cached_property
    def rows_by_cell(self) -> tuple[slice, ...]:
        sizes = [self.n_sequences * len(self.computed_positions(begin)) for begin in self.begins]
        ends = accumulate(sizes)
        return tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))

    def computed_positions(self, begin: int) -> range:
        return range(begin, begin + 1 if self.alone else self.n_positions)

    def row_places(
        self, device: torch.device
    ) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"], Int[Tensor, " row"]]:
        """Return each row's sequence (numbered on from cell to cell), position, and position minus the first one."""
        if device not in self._moved:
            sequences, positions = [], []
            for cell, begin in enumerate(self.begins):
                computed = torch.tensor(self.computed_positions(begin))
                own = torch.arange(cell * self.n_sequences, (cell + 1) * self.n_sequences)
                sequences.append(own.repeat_interleave(len(computed)))
                positions.append(computed.repeat(self.n_sequences))
            of_rows, places = torch.cat(sequences).to(device), torch.cat(positions).to(device)
            self._moved[device] = (of_rows, places, places - self.first_position)
        return self._moved[device]

    def view_cell(
        self, tensor: Shaped[Tensor, "1 row *value"], cell: int
    ) -> Shaped[Tensor, "batch position *value"]:
        """Return a view of a cell's rows, by sequence and position."""
        return tensor[0, self.rows_by_cell[cell]].unflatten(0, (self.n_sequences, -1))

    def view_cell_queries(
        self, tensor: Float[Tensor, "sequence head row key"], cell: int
    ) -> Float[Tensor, "batch head query key"]:
        """Return a view of a cell's scores or pattern, with the queries that it computes."""
        own = slice(cell * self.n_sequences, (cell + 1) * self.n_sequences)
        return tensor[own, :, self.begins[cell] - self.first_position :]

    def values_by_row(
        self, tensor: Shaped[Tensor, "batch position *value"]
    ) -> Shaped[Tensor, "1 row *value"]:
        """Lay out a tensor in rows: every cell gets the values of its positions."""
        if self.is_whole:
            return tensor.flatten(0, 1).repeat(len(self.begins), *[1] * (tensor.dim() - 2))[None]
        parts = [self.computed_positions(begin) for begin in self.begins]
        return torch.cat([tensor[:, part.start : part.stop].flatten(0, 1) for part in parts])[None]

    def to_sequences(
        self, tensor: Float[Tensor, "1 head row d_head"]
    ) -> Float[Tensor, "sequence head query d_head"]:
        """Turn rows into sequences, from ``first_position`` on; positions without a row are 0."""
        rows = tensor[0].transpose(0, 1)
        length = 1 if self.alone else self.n_positions - self.first_position
        shape = (len(self.begins) * self.n_sequences, length)
        if shape[0] * shape[1] == len(rows):
            return rows.unflatten(0, shape).transpose(1, 2)
        found = rows.new_zeros(*shape, *rows.shape[1:])
        sequences, _, late = self.row_places(rows.device)
        found[sequences, late] = rows
        return found.transpose(1, 2)

    def to_rows(
        self, tensor: Float[Tensor, "sequence head query d_head"]
    ) -> Float[Tensor, "1 row head d_head"]:
        """Turn sequences into rows, the inverse of ``to_sequences``."""
        by_position = tensor.transpose(1, 2)
        if by_position.shape[0] * by_position.shape[1] == self.rows_by_cell[-1].stop:
            return by_position.flatten(0, 1)[None]
        sequences, _, late = self.row_places(by_position.device)
        return by_position[sequences, late][None]

    def complete_with_baseline(
        self,
        tensor: Float[Tensor, "1 head row d_head"],
        baseline: Float[Tensor, "batch head key d_head"] | None,
    ) -> Float[Tensor, "sequence head key d_head"]:
        """Turn rows of keys or values into whole sequences; positions without a row are the baseline's."""
        if self.is_whole:
            return self.to_sequences(tensor)
        assert baseline is not None
        rows = tensor[0].transpose(0, 1)
        found = baseline.transpose(1, 2).repeat(len(self.begins), 1, 1, 1)
        sequences, positions, _ = self.row_places(rows.device)
        found[sequences, positions] = rows
        return found.transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    """The attention of a pass over cells."""

    lens: LensModel
    layout: Layout
    held: Mapping[Any, tuple[Tensor, ...]]
    """Layer -> keys and values of the baseline run; needed where a cell begins later than the first position."""
    keep: dict[Any, tuple[Tensor, ...]] | None = None
    """Takes those of every layer."""
    queries: dict[int, Tensor] | None = None
    """Layer -> queries of the baseline run: read where a position is computed alone, else kept like the keys."""
    columns: dict[int, Tensor] | None = None
    """Takes the attention of later queries to a position that is computed alone."""
    own_masks: Masks = field(default_factory=dict)
    """Layer -> the mask of an attention function of the user's own, over whole sequences."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, layer: int, *, like: Tensor) -> Float[Tensor, "1 1 query key"]:
        """Make a layer's additive mask: 0 for keys that a query sees, else the least number."""
        reach, n = self.lens.reach(layer), self.layout.n_positions
        if reach not in self.masks:
            key = torch.arange(n, device=like.device)
            query = key[self.layout.first_position :, None]
            seen = (key <= query) & (key > query - (n if reach is None else reach))
            mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
            self.masks[reach] = mask.masked_fill(~seen, torch.finfo(like.dtype).min)
        return self.masks[reach][None, None]


_ATTENDING: ContextVar[Attending | None] = ContextVar("sink_lens_attending", default=None)


@contextlib.contextmanager
def attend_by_cell(how: Attending) -> Iterator[None]:
    """Within the block, the bridge's attention computes the rows of each cell separately.

    Raises:
        ModelError: the model's attention function is the user's own, which needs whole sequences.
    """
    if how.lens.own_attention is not None and not how.own_masks:
        raise ModelError(
            f"attention of {how.lens.name} is computed by {how.lens.own_attention}, and this runs passes over parts of "
            "sequences; need run_with, capture, stream, patch or sweep, which run whole ones"
        )
    AttentionInterface.register(_NAME, _cell_attention)
    token = _ATTENDING.set(how)
    try:
        with use_kernel(inner_model(how.lens).config, _NAME):
            yield
    finally:
        _ATTENDING.reset(token)


def _cell_attention(
    module: nn.Module,
    query: Float[Tensor, "1 head row d_head"],
    key: Float[Tensor, "1 kv_head row d_head"],
    value: Float[Tensor, "1 kv_head row d_value"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Float[Tensor, "1 row head d_value"], Float[Tensor, "sequence head query key"]]:
    """Compute eager attention as the bridge does, with the rows of each cell apart; fire the hook points."""
    how = _ATTENDING.get()
    assert how is not None, "the attention of cells runs inside attend_by_cell() only"
    layout, layer = how.layout, int(module.layer_idx)  # type: ignore[arg-type]  # set by every attention of transformers
    baseline, component = how.held.get(layer, (None, None)), attention_component(how.lens, layer)
    s_aux: Tensor | None = given.get("s_aux")
    by_query = s_aux is not None and s_aux.dim() == 3
    if s_aux is not None and by_query:  # a logit of each query goes where the query goes
        query = torch.cat([query, s_aux[..., None]], dim=-1)
    query = layout.to_sequences(query)
    key, value = (
        layout.complete_with_baseline(one, before)
        for one, before in zip((key, value), baseline, strict=True)
    )
    if how.keep is not None:
        how.keep[layer] = (key, value)
        if how.queries is not None and not layout.alone:
            how.queries[layer] = query
    if by_query:
        query, s_aux = query[..., :-1], query[..., -1]
    given["scaling"] = scaling
    if how.lens.own_attention is not None:
        pattern = component.hook_pattern(_own_pattern(how, module, query, key, value, given))
        if how.columns is not None:
            shares = row_shares(pattern) if how.lens.family.sigmoid else pattern
            how.columns[layer] = shares[:, :, 1:, layout.first_position]
        return layout.to_rows(weighted_values(pattern, value).transpose(1, 2)), pattern
    if scaling is None:
        given["scaling"] = 1 / math.sqrt(query.shape[-1])
    form: dict[str, Any] = {name: given.get(name) for name in ("scaling", "softcap", "alibi")}
    sigmoid = given.get("weighting") == "sigmoid"
    if layout.alone:
        if how.columns is not None:
            sink = None if by_query else s_aux
            how.columns[layer] = attention_to_first(
                how, layer, key, sink=sink, sigmoid=sigmoid, **form
            )
        key, value = (one[:, :, : layout.first_position + 1] for one in (key, value))
    value = repeat_kv_heads(value, n_heads=query.shape[1])
    scores = _scores(query, key, **form)
    scores = scores + how.mask(layer, like=scores)[..., : scores.shape[2], : scores.shape[3]]
    pattern = weights_from_scores(component.hook_attn_scores(scores), sink=s_aux, sigmoid=sigmoid)
    pattern = component.hook_pattern(pattern.to(query.dtype))
    return layout.to_rows(torch.matmul(pattern, value)), pattern


def _scores(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    alibi: Tensor | None = None,
) -> Float[Tensor, "sequence head query key"]:
    key = repeat_kv_heads(key, n_heads=query.shape[1])
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    return add_alibi(softcap_scores(scores, softcap), alibi)


def attention_to_first(
    how: Attending,
    layer: int,
    key: Float[Tensor, "sequence kv_head key d_head"],
    *,
    scaling: float,
    softcap: float | None = None,
    alibi: Float[Tensor, " head"] | None = None,
    sink: Tensor | None = None,
    sigmoid: bool = False,
) -> Float[Tensor, "sequence head query"]:
    """Compute the attention of each query after ``first_position`` to this position, which is computed alone.

    ``key`` are the keys of all cells; the other keys and all queries are the baseline run's. The attention is
    e^s / (e^s + r) = sigmoid(s - log r), where s is the score and r the baseline's sum over the other keys, and the
    sink logit's. Of sigmoid attention it is the share of the row's sum, with sigmoid(s) for e^s.
    """
    assert how.queries is not None
    first, cells = how.layout.first_position, len(how.layout.begins)
    query, before = how.queries[layer][:, :, first + 1 :], how.held[layer][0]
    if query.shape[-1] > before.shape[-1]:  # with a sink logit of each query
        query, sink = query[..., :-1], query[..., -1]
    form: dict[str, Any] = {"scaling": scaling, "softcap": softcap}

    def log_weights(scores: Tensor) -> Tensor:
        return logsigmoid(scores.float()) if sigmoid else scores.float()

    with torch.no_grad():
        scores = _scores(query, before, alibi=alibi, **form)
        mask = how.mask(layer, like=scores)[:, :, 1:]
        index = torch.tensor(first, device=scores.device)
        others = log_weights(scores + mask).index_fill(-1, index, -math.inf)
        rest = add_sink_logits(others.logsumexp(-1), sink)
    # a cell's key is one of several
    own = key[:, :, first].unflatten(0, (cells, -1)).transpose(0, 1).transpose(1, 2)
    scores = _scores(query, own, **form)
    if alibi is not None:
        scores = scores + (alibi[:, None, None] * first).to(scores.dtype)
    own_weights = log_weights(scores + mask[..., first, None])
    return (own_weights - rest[..., None]).sigmoid().permute(3, 0, 1, 2).flatten(0, 1)


def _own_pattern(
    how: Attending,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: dict[str, Any],
) -> Float[Tensor, "sequence head query key"]:
    """Return the pattern of the own function over whole sequences: other queries are the baseline run's."""
    own, layer, first = how.lens.own_attention, int(module.layer_idx), how.layout.first_position  # type: ignore[arg-type]
    assert own is not None
    if query.shape[2] < how.layout.n_positions:
        assert how.queries is not None
        whole = how.queries[layer].repeat(len(how.layout.begins), 1, 1, 1)
        query = torch.cat(
            [whole[:, :, :first], query, whole[:, :, first + query.shape[2] :]], dim=2
        )
    attend = own.of_values(module, query, key, how.own_masks[layer], **given)
    pattern = own_pattern(attend, value, attend(value))
    if pattern is None:
        raise no_pattern_error(own)
    return pattern[:, :, first:]

"""Attention mass, scores and sampled rows without the pattern.

The mass that query i puts on key j is ``exp(s q_i.k_j - lse_i)``, where ``lse`` is the log-sum-exp of the row, which
fused kernels return. The column of a key costs one small product, and the T x T matrix is never built. While a pass is
observed, a function registered through the Hugging Face attention interface replaces the model's own and gives the same
output.

Two kernels give a log-sum-exp: ``fused`` (the flash kernel on CPU, the memory-efficient one on CUDA), and ``eager``,
which goes over blocks of query rows and is exact for every family. A learned sink logit enters the log-sum-exp, and
scales the output. Sigmoid attention has none: its weights are ``sigmoid(s q_i.k_j)``, a key's mass is its weight over
the sum of the row, and only the eager kernel does it.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ..errors import KernelError, first_line_of_error
from ..models.attention import (
    add_sink_logits,
    append_alibi_dimension,
    softcap_scores,
    weights_from_scores,
)
from ..models.family import Family
from ..models.interfaced import use_attention
from ..models.own_attention import AttentionFunction, no_pattern_error, own_pattern
from ..models.private_apis import fused_attention_on_cpu, fused_attention_on_gpu
from ..schema import KernelChoice

OBSERVED = ("mass", "key_scores", "rows", "rotated_q", "rotated_k", "scores", "pattern")
"""Names, beside the sites, that an observed pass can read from a layer's attention.

``mass`` and ``key_scores`` "batch head query key" (the chosen keys only; sigmoid mass as a share of the row's sum),
``rows`` "batch head row key" (of the pattern), ``rotated_q`` "batch head query d_head" and ``rotated_k`` "batch kv_head
key d_head" (as they enter the product, the scale in the query), ``scores`` and ``pattern`` "batch head query key" (the
whole matrix). What is masked is -inf in ``key_scores``, and the least number of the model's type in ``scores``.
"""

_NAME = "sink_lens"
_BLOCK = 128
_INSTEAD = "kernel='eager', which processes blocks of rows"

Kernel = Literal["fused", "eager"]
Put = Callable[[int, str, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The attention tensors that an observed pass reads, and the kernel that it uses."""

    kernel: Kernel
    names: Callable[[int], frozenset[str]]
    """Layer -> the names of ``OBSERVED`` to read in it."""
    keys: tuple[int, ...]
    """Positions of ``mass`` and ``key_scores``."""
    rows: Int[Tensor, " row"] | None
    """Positions of ``rows``."""
    put: Put
    own: AttentionFunction | None = None
    """The model's own attention function, whose pattern is then read."""


_WATCH: ContextVar[Watch | None] = ContextVar("sink_lens_watch", default=None)


def choose_kernel(family: Family, *, device: torch.device, asked: KernelChoice = "auto") -> Kernel:
    """Return the kernel ``asked`` for; for ``auto`` the fused one if it is exact and gives a log-sum-exp, else eager.

    Raises:
        KernelError: ``fused`` was asked for, and is not exact or gives no log-sum-exp.
    """
    reason = does = ""
    if family.soft_capped:
        does = "caps its attention scores with a tanh"
    elif family.sigmoid:
        does = "takes the sigmoid of its attention scores"
    elif family.alibi:
        does = "adds the position of the key to its scores (ALiBi)"
    if does:
        reason = f"{family.architecture} {does}, which no fused kernel does"
    elif device.type not in ("cpu", "cuda"):
        reason = f"the fused kernel of {device.type!r} gives no log-sum-exp"
    elif asked != "eager":
        return "fused"
    if asked == "fused":
        raise KernelError(f"{reason}; need an exact kernel with a log-sum-exp. Use {_INSTEAD}")
    return "eager"


@contextlib.contextmanager
def observe_attention(model: PreTrainedModel, *, watch: Watch) -> Iterator[None]:
    """Within the block, the model's attention is computed here, and ``watch.put`` gets what ``watch`` names."""
    name, mask = _NAME, sdpa_mask
    if watch.own is not None:  # transformers makes no mask for a name without a mask function
        mask = watch.own.mask
        name += f"_{watch.own.name}" + ("" if mask is None else "_masked")
    AttentionInterface.register(name, _observed_attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    token = _WATCH.set(watch)
    try:
        with use_attention(model, name):
            yield
    finally:
        _WATCH.reset(token)


def _observed_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_value"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Float[Tensor, "batch query head d_value"], None]:
    """Compute attention as transformers does; the ``Watch`` gets the observed quantities."""
    watch = _WATCH.get()
    assert watch is not None, "the observed attention function runs inside observe_attention() only"
    if watch.own is not None:
        return _own_attention(
            module, query, key, value, attention_mask, scaling=scaling, watch=watch, given=given
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    s_aux, alibi = given.get("s_aux"), given.get("alibi")
    if alibi is not None:
        query, key = append_alibi_dimension(query, key, slopes=alibi / scale)
        value = nn.functional.pad(value, (0, 1))
    mask = None if attention_mask is None else _additive_mask(attention_mask, query.dtype)
    score = AttentionScores(
        query=query, key=key, mask=mask, scale=scale, softcap=given.get("softcap")
    )
    total = None
    if given.get("weighting") == "sigmoid":
        (output, total), lse = _attention_by_rows(score, value, sigmoid=True), None
    elif watch.kernel == "fused":
        _check_fused_kernel(query.device.type, query.dtype, max(query.shape[-1], value.shape[-1]))
        output, lse = _fused_attention(query, key, value, mask=mask, scale=scale)
    else:
        output, lse = _attention_by_rows(score, value)
    if s_aux is not None:
        assert lse is not None  # a sink logit is in the denominator of a softmax
        with_sink = add_sink_logits(lse, s_aux)
        output = output * (lse - with_sink).exp()[..., None].to(output.dtype)
        lse = with_sink
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # set by every attention of transformers
    for name in watch.names(layer):
        watch.put(layer, name, _observed_quantity(name, score, lse, total, watch))
    if alibi is not None:
        output = output[..., :-1]
    return output.transpose(1, 2).contiguous(), None


def _own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    watch: Watch,
    given: dict[str, Any],
) -> tuple[Tensor, None]:
    own, layer = watch.own, int(module.layer_idx)  # type: ignore[arg-type]  # as above
    assert own is not None
    attend = own.of_values(module, query, key, mask, scaling=scaling, **given)
    output, names = attend(value), watch.names(layer)
    pattern = own_pattern(attend, value, output) if names & {"mass", "rows", "pattern"} else None
    if "scores" in names or (names & {"mass", "rows", "pattern"} and pattern is None):
        raise no_pattern_error(own)
    added = None
    if isinstance(mask, Tensor) and mask.dim() == 4:
        added = _additive_mask(mask, query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    score = AttentionScores(
        query=query, key=key, mask=added, scale=scale, softcap=given.get("softcap")
    )
    for name in names:
        if pattern is None or name not in ("mass", "rows", "pattern"):
            watch.put(layer, name, _observed_quantity(name, score, None, None, watch))
            continue
        if name == "mass":
            found = pattern[..., list(watch.keys)]
        else:
            found = pattern[..., watch.rows, :] if name == "rows" else pattern
        watch.put(layer, name, found.float())
    return output, None


def _observed_quantity(
    name: str, score: "AttentionScores", lse: Tensor | None, total: Tensor | None, watch: Watch
) -> Tensor:
    """Compute ``name`` of ``OBSERVED``; of sigmoid attention ``lse`` is None, ``total`` the sum of each row."""
    match name:
        case "mass":
            weights = _attention_weights(score.key_columns(watch.keys), lse)
            return weights if total is None else weights / total[..., None]
        case "key_scores":
            return score.key_columns(watch.keys)
        case "rows":
            assert watch.rows is not None
            rows = watch.rows.to(score.query.device)
            of_rows = None if lse is None else lse[:, :, rows]
            return _attention_weights(score.query_rows(rows), of_rows)
        case "rotated_q":
            return score.query * score.scale
        case "rotated_k":
            return score.key
        case "scores" | "pattern":
            scores = score.query_rows(torch.arange(score.query.shape[2], device=score.query.device))
            if name == "scores":
                return scores.clamp(min=torch.finfo(score.query.dtype).min)
            return _attention_weights(scores, lse)
    raise KeyError(name)


def _attention_weights(
    scores: Float[Tensor, "batch head query key"], lse: Float[Tensor, "batch head query"] | None
) -> Float[Tensor, "batch head query key"]:
    if lse is None:
        return weights_from_scores(scores, sigmoid=True)
    return (scores - lse[..., None]).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionScores:
    """Attention scores of one layer, computed on demand in float32."""

    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch kv_head key d_head"]
    mask: Float[Tensor, "#batch 1 query key"] | None
    """Additive mask; None means causal."""
    scale: float
    softcap: float | None

    def key_columns(self, keys: tuple[int, ...]) -> Float[Tensor, "batch head query key"]:
        """Compute the scores of every query for the keys at positions ``keys``; -inf where masked."""
        index = torch.tensor(keys, device=self.key.device)
        scores = self.unmasked_scores(self.query, self.key[:, :, index])
        if self.mask is not None:
            return scores.add_(self.mask[..., index].float())
        queries = torch.arange(self.query.shape[2], device=self.key.device)
        return scores.masked_fill_(queries[:, None] < index, -math.inf)

    def query_rows(self, rows: Int[Tensor, " row"]) -> Float[Tensor, "batch head row key"]:
        """Compute the scores of the queries at positions ``rows`` for every key; -inf where masked."""
        scores = self.unmasked_scores(self.query[:, :, rows], self.key)
        if self.mask is not None:
            return scores.add_(self.mask[:, :, rows].float())
        keys = torch.arange(self.key.shape[2], device=rows.device)
        return scores.masked_fill_(rows[:, None] < keys, -math.inf)

    def unmasked_scores(self, query: Tensor, key: Tensor) -> Tensor:
        # group query heads by the kv head that they share
        grouped = query.float().unflatten(1, (key.shape[1], -1))
        scores = (grouped @ key.float().transpose(-1, -2)[:, :, None]).mul_(self.scale)
        return softcap_scores(scores.flatten(1, 2), self.softcap)


def _attention_by_rows(
    score: AttentionScores, value: Tensor, *, sigmoid: bool = False
) -> tuple[Tensor, Float[Tensor, "batch head query"]]:
    """Compute the attention output and each row's log-sum-exp, one block of query rows after the other.

    With ``sigmoid`` the weights are the sigmoids of the scores, and the second result is each row's sum.
    """
    outputs, sums = [], []
    for rows in torch.arange(score.query.shape[2], device=value.device).split(_BLOCK):
        block = score.query_rows(rows)
        lse = None if sigmoid else block.logsumexp(dim=-1)
        weights = _attention_weights(block, lse)
        pattern = weights.unflatten(1, (value.shape[1], -1))
        outputs.append((pattern @ value.float()[:, :, None]).flatten(1, 2).to(value.dtype))
        tiny = torch.finfo(weights.dtype).tiny
        sums.append(weights.sum(-1).clamp(min=tiny) if lse is None else lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def log_sum_exp(
    score: AttentionScores, *, kernel: Kernel, sink: Float[Tensor, "..."] | None = None
) -> Tensor:
    """Compute the log-sum-exp of every row of a layer's scores, "batch head query", without the pattern.

    The ``fused`` kernel needs scores without a soft cap. ``sink`` logits count as one more score of each row.
    """
    if kernel == "fused":
        _check_fused_kernel(score.query.device.type, score.query.dtype, score.query.shape[-1])
        _, lse = _fused_attention(
            score.query, score.key, score.key, mask=score.mask, scale=score.scale
        )
    else:
        blocks = torch.arange(score.query.shape[2], device=score.key.device).split(_BLOCK)
        lse = torch.cat([score.query_rows(rows).logsumexp(dim=-1) for rows in blocks], dim=2)
    return add_sink_logits(lse, sink)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float
) -> tuple[Tensor, Float[Tensor, "batch head query"]]:
    """Compute the output and each row's log-sum-exp; without a ``mask`` it is causal."""
    groups, d_value = query.shape[1] // key.shape[1], value.shape[-1]
    if query.shape[-1] != d_value:  # latent attention; the kernels take one width
        widest = max(query.shape[-1], d_value)
        query, key, value = (
            nn.functional.pad(one, (0, widest - one.shape[-1])) for one in (query, key, value)
        )
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if query.device.type == "cpu":
        output, lse = fused_attention_on_cpu(query, key, value, mask=mask, scale=scale)
        return output[..., :d_value], lse
    bias = None
    if mask is not None:
        bias = _align_rows(mask).expand(query.shape[0], query.shape[1], -1, -1)
    output, lse, *_ = fused_attention_on_gpu(
        query, key, value, bias=bias, causal=mask is None, scale=scale
    )
    # the kernel pads the rows of its log-sum-exp
    return output[..., :d_value], lse[..., : query.shape[2]]


def _align_rows(mask: Float[Tensor, "#batch 1 query key"]) -> Float[Tensor, "#batch 1 query key"]:
    """Let rows begin at multiples of 16 numbers, as the CUDA kernel requires."""
    length = mask.shape[-1]
    return nn.functional.pad(mask, (0, -length % 16))[..., :length]


@functools.cache
def _check_fused_kernel(device: str, dtype: torch.dtype, d_head: int) -> None:
    """Refuse a fused kernel that differs from explicit attention; once per device, type and width."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 19, d_head, generator=generator).to(device, dtype)
        for heads in (4, 2, 2)
    )
    scale = d_head**-0.5
    window = torch.ones(1, 1, 19, 19, dtype=torch.bool, device=device).tril().triu(-7)
    for mask in (None, _additive_mask(window, dtype)):
        explicit = _attention_by_rows(
            AttentionScores(query=query, key=key, mask=mask, scale=scale, softcap=None), value
        )
        try:
            fused = _fused_attention(query, key, value, mask=mask, scale=scale)
        except RuntimeError as error:
            raise KernelError(
                f"the fused kernel on {device} does not take {dtype} with heads of {d_head} "
                f"({first_line_of_error(error)}); use {_INSTEAD}"
            ) from error
        errors = [(a.float() - b.float()).abs().max() for a, b in zip(fused, explicit, strict=True)]
        off = torch.stack(errors).max().item()  # nan if there is one
        if not off <= (1e-5 if dtype in (torch.float32, torch.float64) else 5e-2):
            raise KernelError(
                f"the fused kernel on {device} in {dtype} with heads of {d_head} is off by {off:.1e}; "
                f"need a correct kernel. Use {_INSTEAD}"
            )


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)

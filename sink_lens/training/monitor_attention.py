"""Queries and keys of an attention module, from a second call of it on the same input.

During this call the module alone has a copy of the configuration, which names an attention function of ours that ends
the call at query and key. The model's configuration and transformers' functions stay as they are, so that other models
and other threads notice nothing.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, Cache

from ..activations.attention import AttentionScores
from ..errors import ModelError
from ..models.attention import append_alibi_dimension
from ..models.interfaced import interfaced_class
from ..models.own_attention import no_pattern_error, own_function, own_pattern
from ..models.private_apis import INNER_KERNEL, kernel_of
from ..models.running import switch_to_eval_mode
from .monitor_documents import Documents, keys_of_mask

Seen = tuple[AttentionScores, Tensor | None, bool, Tensor | None]
"""The scores, learned sink logits, whether the weights are sigmoids, and the pattern of a user's own attention."""
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of a flash kernel, which say how long the documents of a row are."""
_NAME = "sink_lens_monitor"


def read_queries_and_keys(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    n: int,
    batch: int,
    config: Any,
    documents: Documents | None = None,
) -> Seen:
    """Read the queries and keys of the first ``n`` sequences by calling an attention module a second time.

    If the module's class computes attention without transformers' attention interface, a subclass that uses the
    interface takes its place during the call. ``args`` and ``kwargs`` are those of its first call, of ``batch``
    sequences. Each of ``documents`` gets a row of its own; None reads rows as they are.

    Raises:
        ModelError: the module does not compute its attention through the attention interface.
    """
    own: Any = vars(module).get("config")
    ours = copy.copy(config if own is None else own)
    function = own_function(module, name=kernel_of(ours))
    if function is not None and documents is not None and documents.packed:
        raise ModelError(
            f"attention is computed by {function}, and SinkMonitor reads its pattern in batches that are not packed; "
            "need packing off, or model.set_attn_implementation('eager' or 'sdpa')"
        )
    AttentionInterface.register(_NAME, _stop_at_query_and_key)
    vars(ours)[INNER_KERNEL] = _NAME
    device = next(module.parameters()).device
    given = {name: take_sequences(one, n, batch) for name, one in kwargs.items()}
    given |= {"use_cache": False} if "use_cache" in given else {}
    few = (take_sequences(one, n, batch) for one in args)
    kind = type(module)
    try:
        module.config = ours
        module.__class__ = interfaced_class(kind)
        with torch.no_grad(), uncached_autocast(device), switch_to_eval_mode(module):
            module.forward(*few, **given)
    except _SeenError as found:
        query, key, value, mask, more, called = found.args
        scores = _build_scores(query, key, mask, more, documents=documents)
        if function is None:
            return (*scores, None)
        with torch.no_grad():
            attend = function.of_values(called, query, key, mask, **more)
            pattern = own_pattern(attend, value, attend(value))
        if pattern is None:
            raise no_pattern_error(function) from None
        if documents is not None:
            pattern = documents.to(pattern.device).split_pattern(pattern)
        return (*scores, pattern)
    finally:
        module.__class__ = kind
        if own is None:
            del module.config
        else:
            module.config = own
    raise ModelError(
        f"{type(module).__name__} does not compute its attention through transformers' attention interface; need one "
        "that does, as those of transformers 5. SinkMonitor cannot read this model."
    )


@contextlib.contextmanager
def uncached_autocast(device: torch.device) -> Iterator[None]:
    """Switch off the cache of autocast, so that training never reuses weights without gradients."""
    on = torch.is_autocast_enabled(device.type)
    with torch.autocast(
        device.type, dtype=torch.get_autocast_dtype(device.type), enabled=on, cache_enabled=False
    ):
        yield


def take_sequences(value: Any, n: int, batch: int) -> Any:
    """Keep the first ``n`` sequences of each tensor of ``batch`` sequences in ``value``, and no cache."""
    if isinstance(value, Cache):
        return None
    if isinstance(value, Tensor):
        return value.detach()[:n] if value.dim() > 0 and value.shape[0] == batch else value
    if isinstance(value, tuple | list) and not isinstance(value, BlockMask):
        return type(value)(take_sequences(one, n, batch) for one in value)
    if type(value) is dict:  # a mask for each kind of layer
        return {name: take_sequences(one, n, batch) for name, one in value.items()}
    return value


def keeps_documents_apart(
    documents: Documents,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    kernel: str,
    batch: int,
) -> bool:
    """Check whether tokens attend within their own document alone, in a call of attention.

    The mask tells it. Without a mask, a flash ``kernel`` keeps documents apart if it is given their lengths, or if it
    is given positions and the ``batch`` has one row; any other kernel attends over the whole row.
    """
    if not documents.packed:
        return True
    given = [kwargs.get("attention_mask"), *args]
    visible = next((found for one in given if (found := keys_of_mask(one)) is not None), None)
    if visible is not None:
        visible = take_sequences(visible, documents.n_rows, batch)
        length = documents.segment.shape[1]
        return visible.shape[-2:] == (length, length) and documents.to(
            visible.device
        ).are_kept_apart(visible)
    if "flash" not in kernel or kwargs.get("attention_mask") is not None:
        return False
    return all(kwargs.get(name) is not None for name in LENGTHS) or (
        batch == 1 and kwargs.get("position_ids") is not None
    )


class _SeenError(Exception):
    """Exception that ends the second call of an attention module; its arguments are those of attention."""


def _stop_at_query_and_key(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> Any:
    raise _SeenError(query, key, value, attention_mask, given, module)


def _build_scores(
    query: Tensor, key: Tensor, mask: Any, given: Mapping[str, Any], *, documents: Documents | None
) -> tuple[AttentionScores, Tensor | None, bool]:
    """Return the first three parts of ``Seen`` from the arguments of attention."""
    if isinstance(mask, BlockMask):
        mask = keys_of_mask(mask)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = mask[..., : query.shape[2]]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(
                ~mask, -math.inf
            )
    else:
        mask = None
    scale = query.shape[-1] ** -0.5 if given.get("scaling") is None else given["scaling"]
    sink, window, alibi = (given.get(name) for name in ("s_aux", "sliding_window", "alibi"))
    if documents is not None:
        documents = documents.to(query.device)
        query, key = documents.split_heads(query), documents.split_heads(key)
        mask = None if mask is None else documents.split_mask(mask)
        sink = documents.split_heads(sink) if sink is not None and sink.dim() == 3 else sink
    length = query.shape[2]
    if mask is None and window is not None and window < length:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position
        hidden = (distance < 0) | (distance >= window)
        mask = query.new_zeros(1, 1, length, length).masked_fill_(hidden, -math.inf)
    if alibi is not None:
        query, key = append_alibi_dimension(query, key, slopes=alibi / scale)
    scores = AttentionScores(
        query=query, key=key, mask=mask, scale=scale, softcap=given.get("softcap")
    )
    return scores, sink, given.get("weighting") == "sigmoid"

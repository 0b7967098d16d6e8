"""Queries and keys of an attention module, from a second call of it on the same input.

The module is called once more without gradients and without dropout, on a few sequences, and looks up an attention
function of ours, which ends the call at query and key. The name of that function stands in a copy of the configuration
that the module alone has during this call: neither the model's configuration nor a function of transformers is
changed, so that other models, and other threads, notice nothing.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from ..activations.attention import Scores, with_positions
from ..activations.forward import evaluating
from ..errors import ModelError
from ..models.interfaced import interfaced_class

__all__ = ["Seen", "first", "query_and_key", "uncached_autocast"]

Seen = tuple[Scores, Tensor | None, bool]
"""The scores, the learned sink logits where there are any, and whether the weights are sigmoids."""
_NAME = "sink_lens_monitor"


def query_and_key(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, n: int, batch: int, config: Any
) -> Seen:
    """Queries and keys from a second call of the module on the first ``n`` sequences, stopped once they are known.

    Where its class writes its attention out, it has a subclass that calls the interface during this call.

    Args:
        module: the attention.
        args: what it was given.
        kwargs: the same by name.
        n: number of sequences that are read.
        batch: number of sequences that it was given.
        config: the model's configuration.

    Raises:
        ModelError: the module does not compute its attention through the attention interface.
    """
    AttentionInterface.register(_NAME, _end_with_query_and_key)
    own: Any = vars(module).get("config")
    ours = copy.copy(config if own is None else own)
    vars(ours)["_attn_implementation_internal"] = _NAME  # the setter would change the configurations within it too
    device = next(module.parameters()).device
    given = {name: None if isinstance(one, Cache) else first(one, n, batch) for name, one in kwargs.items()}
    given |= {"use_cache": False} if "use_cache" in given else {}
    few = (None if isinstance(one, Cache) else first(one, n, batch) for one in args)
    kind = type(module)
    try:
        module.config = ours
        module.__class__ = interfaced_class(kind)
        with torch.no_grad(), uncached_autocast(device), evaluating(module):
            module.forward(*few, **given)
    except _SeenError as found:
        return found.seen
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
    """The autocast that is on, without its cache: a weight cast without gradients must not serve the training."""
    on = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, dtype=torch.get_autocast_dtype(device.type), enabled=on, cache_enabled=False):
        yield


def first(value: Any, n: int, batch: int) -> Any:
    """The first sequences of a tensor that has the batch in front, or of those in a tuple; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach()[:n] if value.dim() > 0 and value.shape[0] == batch else value
    if isinstance(value, tuple | list) and not isinstance(value, Cache):
        return type(value)(first(one, n, batch) for one in value)
    return value


class _SeenError(Exception):
    """Ends the second call of an attention module where its query and key are known."""

    def __init__(self, seen: Seen) -> None:
        """Carry what was seen out of the attention."""
        super().__init__()
        self.seen = seen


def _end_with_query_and_key(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> Any:
    """End the attention at once, with its queries and keys."""
    raise _SeenError(_attend_and_read(query, key, attention_mask, **given))


def _attend_and_read(
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    weighting: str = "softmax",
    sliding_window: int | None = None,
    alibi: Tensor | None = None,
    **given: Any,
) -> Seen:
    """Queries, keys and mask as the scores use them; the rest that attention functions take is ignored or kept."""
    length, mask = query.shape[2], None
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        mask = attention_mask[..., :length]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    elif sliding_window is not None and sliding_window < length:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position
        hidden = (distance < 0) | (distance >= sliding_window)
        mask = query.new_zeros(1, 1, length, length).masked_fill_(hidden, -math.inf)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if alibi is not None:
        query, key = with_positions(query, key, slopes=alibi / scale)
    return Scores(query=query, key=key, mask=mask, scale=scale, softcap=softcap), s_aux, weighting == "sigmoid"

"""Queries and keys of an attention module, caught while the model's own forward runs.

The model's attention function is looked up by name in transformers' attention interface. For one call of the module,
another function stands under that name, which keeps query and key and calls the model's own function. Where the module
does not look its function up there (eager attention, a class with functions of its own), the module is called
once more on the same input without gradients, with a function that ends the call at query and key.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..activations.attention import Scores, with_positions
from ..errors import ModelError

__all__ = ["Look", "Seen", "first", "query_and_key", "uncached_autocast"]

Seen = tuple[Scores, Tensor | None, bool]
"""The scores, the learned sink logits where there are any, and whether the weights are sigmoids."""
_NAME = "sink_lens_monitor"


class Look:
    """Sees query and key of a module's next call, where its function comes from the attention interface."""

    def __init__(self, module: nn.Module, take: Callable[[Seen], None], *, n: int) -> None:
        """Replace the module's attention function until the module calls it once.

        Args:
            module: the attention module.
            take: is given what was seen of the first ``n`` sequences.
            n: how many.
        """
        self._module, self._take, self._n = module, take, n
        self._implementation = str(module.config._attn_implementation)  # type: ignore[union-attr]
        self._own = ALL_ATTENTION_FUNCTIONS.get(self._implementation)
        self.seen = False
        """Whether the module has called its function."""
        self._there = self._own is not None
        if self._there:
            ALL_ATTENTION_FUNCTIONS[self._implementation] = self._function

    def remove(self) -> None:
        """Put the model's own function back."""
        if self._there:
            self._there = False
            del ALL_ATTENTION_FUNCTIONS[self._implementation]
            if ALL_ATTENTION_FUNCTIONS.get(self._implementation) is not self._own:  # it was an override itself
                ALL_ATTENTION_FUNCTIONS[self._implementation] = self._own

    def _function(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> Any:
        assert self._own is not None  # or this function stood nowhere
        if module is self._module:
            self.remove()
            self.seen = True
            batch = query.shape[0]
            parts = (first(one, self._n, batch) for one in (query, key, attention_mask))
            self._take(_seen(*parts, **given))
        return self._own(module, query, key, value, attention_mask, **given)


def query_and_key(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, n: int, batch: int) -> Seen:
    """Queries and keys from a second call of the module on the first ``n`` sequences, stopped once they are known.

    Raises:
        ModelError: the module does not compute its attention through the attention interface.
    """
    AttentionInterface.register(_NAME, _end_with_query_and_key)
    config: Any = module.config
    before = config._attn_implementation
    device = next(module.parameters()).device
    given = {name: None if isinstance(one, Cache) else first(one, n, batch) for name, one in kwargs.items()}
    given |= {"use_cache": False} if "use_cache" in given else {}
    few = (None if isinstance(one, Cache) else first(one, n, batch) for one in args)
    try:
        config._attn_implementation = _NAME
        with torch.no_grad(), uncached_autocast(device):
            module.forward(*few, **given)
    except _SeenError as found:
        return found.seen
    finally:
        config._attn_implementation = before
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
        super().__init__()
        self.seen = seen


def _end_with_query_and_key(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> Any:
    raise _SeenError(_seen(query, key, attention_mask, **given))


def _seen(
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

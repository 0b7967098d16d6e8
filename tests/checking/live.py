"""Counts the bytes of tensors that are alive: a peak of memory that is the same in every run."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within the block, counts the storages that operations return, each once, and remembers the most at a time.

    What an operation needs inside and what was there before the block are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        """Address of a storage -> its bytes."""
        self.now, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                if storage._cdata not in self.held:
                    self._begin(storage)
        return out

    def _begin(self, storage: Any) -> None:
        self.held[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, storage._cdata)

    def _end(self, address: int) -> None:
        self.now -= self.held.pop(address)

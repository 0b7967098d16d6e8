"""Modes of torch that a caller may be in and that change numbers: they are off while something is measured.

``torch.autocast`` around a pass makes its products half-precision numbers, and tensors that are made in
``torch.inference_mode`` have no gradient, whoever asks for one. Both belong to the thread.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """Within the block, switch autocast and inference mode off for this thread; gradients stay off where they were off.

    The default dtype belongs to the whole process, so code in the block names the dtype of each tensor that it makes.
    """
    if (torch := sys.modules.get("torch")) is None:  # nothing is measured yet
        yield
        return
    casting = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    inference = torch.is_inference_mode_enabled()
    with contextlib.ExitStack() as stack:
        for device in casting:
            stack.enter_context(torch.autocast(device, enabled=False))
        if inference:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        yield


@contextlib.contextmanager
def disable_settings(settings: list[dict[str, Any]], *names: str) -> Iterator[None]:
    """Within the block, switch off the attributes with these names: True becomes False, and other values None.

    ``settings`` are modules' ``vars``.
    """
    changed = [(own, name, own[name]) for name in names for own in settings if own.get(name)]
    for own, name, before in changed:
        own[name] = False if before is True else None
    try:
        yield
    finally:
        for own, name, before in changed:
            own[name] = before

"""A CPU that sums every matrix product in another order: what two code paths must not rely on.

Under ``HOSTILE_CPU=1 pytest ...`` each matrix product and each attention is moved by one unit in the last place, up,
down or not at all, entry by entry, as a function of the shapes of its operands and the entry's place. One code path
that runs twice with the same shapes gives the same bits; two code paths do not. Numbers that are 0 stay 0, so that
what is masked stays masked. The mode is entered in every thread, and through ``sitecustomize.py`` beside this file in
every Python process that a test starts.
"""

import functools
import sys
import threading
import zlib
from importlib.abc import MetaPathFinder

NAME = "HOSTILE_CPU"
"""The environment variable that turns the mode on."""
_PRODUCTS = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "convolution"),
        *("_addmm_activation", "_grouped_mm", "mkldnn_linear", "_scaled_dot_product_attention_math"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    )
)
_PERIOD = 1 << 18


@functools.cache
def _made():
    """The mode, a subclass of a class of torch: made where torch is loaded."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    signs = torch.randint(-1, 2, (_PERIOD,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}

    @functools.lru_cache(maxsize=4096)
    def start(key):
        return zlib.crc32(repr(key).encode()) % (_PERIOD - 1)

    def moved(out, key):
        if type(out) not in (torch.Tensor, torch.nn.Parameter) or out.device.type != "cpu":
            return
        if not out.is_floating_point() or out.element_size() not in integers or not out.numel():
            return
        whole = integers[out.element_size()]
        begin, n = start(key), out.numel()
        fits = begin + n <= _PERIOD
        drawn = signs[begin : begin + n] if fits else signs.roll(-begin).repeat(-(-n // _PERIOD))[:n]
        bits = out.view(whole)
        fixed = (out == 0) | ~out.isfinite()
        bits.add_(drawn.view(out.shape).to(whole).masked_fill(fixed, 0))

    @functools.cache
    def product(func):
        """The name of a product or attention; None for anything else."""
        name = func.overloadpacket.__name__.rstrip("_")
        return name if name in _PRODUCTS else None

    class HostileCPU(TorchDispatchMode):
        """Moves what products and attention give, in this thread."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs) if kwargs else func(*args)
            name = product(func)
            if name is not None:
                given = tuple(tuple(one.shape) for one in args if isinstance(one, torch.Tensor))
                for place, one in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
                    if isinstance(one, torch.Tensor):
                        moved(one, (name, given, place))
            return out

    return HostileCPU


_ENTERED = threading.local()
_MODE = []


def hostile_cpu():
    """The mode, to enter with ``with``, in this thread."""
    return _made()()


def _enter():
    if not getattr(_ENTERED, "mode", None):
        _ENTERED.mode = _MODE[0]()
        _ENTERED.mode.__enter__()


def start() -> None:
    """Enter the mode in this thread, and in every thread that begins later."""
    if _MODE:
        return
    _MODE.append(_made())
    run = threading.Thread.run

    @functools.wraps(run)
    def hostile(self):
        _enter()
        run(self)

    threading.Thread.run = hostile
    _enter()


class _AfterTorch(MetaPathFinder):
    """Starts the mode as soon as torch has been imported, and no earlier: most processes need no torch."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            start()

        spec.loader.exec_module = exec_module
        return spec


def wait_for_torch() -> None:
    """Start the mode when the process has imported torch."""
    if "torch" in sys.modules:
        start()
    else:
        sys.meta_path.insert(0, _AfterTorch())

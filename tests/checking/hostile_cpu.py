"""A CPU that sums every matrix product in another order: what two code paths must not rely on.

Under ``HOSTILE_CPU=1 pytest ...`` each matrix product and each attention is moved by one unit in the last place, up,
down or not at all, entry by entry, as a function of the shapes of its operands and the entry's place. One code path
that runs twice with the same shapes gives the same bits; two code paths do not. Numbers that are 0 stay 0, so that
what is masked stays masked. The mode is entered in every thread of the test run.
"""

import functools
import threading
import zlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset(
    (
        *(
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "addbmm",
            "mv",
            "addmv",
            "dot",
            "vdot",
            "linear",
            "convolution",
        ),
        *(
            "_addmm_activation",
            "_grouped_mm",
            "mkldnn_linear",
            "_scaled_dot_product_attention_math",
        ),
        *(
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
    )
)
_PERIOD = 1 << 18


_SIGNS = torch.randint(
    -1, 2, (_PERIOD,), generator=torch.Generator().manual_seed(0), dtype=torch.int8
)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.lru_cache(maxsize=4096)
def _begin(key):
    return zlib.crc32(repr(key).encode()) % (_PERIOD - 1)


def _move(out, key):
    if type(out) not in (torch.Tensor, torch.nn.Parameter) or out.device.type != "cpu":
        return
    if not out.is_floating_point() or out.element_size() not in _INTEGERS or not out.numel():
        return
    whole, begin, n = _INTEGERS[out.element_size()], _begin(key), out.numel()
    fits = begin + n <= _PERIOD
    drawn = _SIGNS[begin : begin + n] if fits else _SIGNS.roll(-begin).repeat(-(-n // _PERIOD))[:n]
    fixed = (out == 0) | ~out.isfinite()
    out.view(whole).add_(drawn.view(out.shape).to(whole).masked_fill(fixed, 0))


class HostileCPU(TorchDispatchMode):
    """Moves what products and attention give, in this thread."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs) if kwargs else func(*args)
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _PRODUCTS:
            given = tuple(tuple(one.shape) for one in args if isinstance(one, torch.Tensor))
            for place, one in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
                if isinstance(one, torch.Tensor):
                    _move(one, (name, given, place))
        return out


_ENTERED = threading.local()


def _enter():
    if not getattr(_ENTERED, "mode", None):
        _ENTERED.mode = HostileCPU()
        _ENTERED.mode.__enter__()


def start() -> None:
    """Enter the mode in this thread, and in every thread that begins later."""
    run = threading.Thread.run

    @functools.wraps(run)
    def hostile(self):
        _enter()
        run(self)

    threading.Thread.run = hostile
    _enter()

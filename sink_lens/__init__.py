"""sink_lens traces where a language model's attention sinks come from, and which links of the chain hold.

The names below are read from their modules when they are first used, so `import sink_lens` loads neither
torch nor numpy.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sink_lens.capture.record import Reading, capture, stream
    from sink_lens.chain.config import TraceConfig
    from sink_lens.chain.trace import Trace, trace
    from sink_lens.data.tokens import (
        TokenBatch,
        from_dataset,
        from_prompts,
        from_tensor,
        from_text,
        random_tokens,
        repeated_tokens,
    )
    from sink_lens.errors import SinkLensError
    from sink_lens.measures.table import MEASURES
    from sink_lens.models.load import LensModel, load, wrap
    from sink_lens.models.sites import SITES, Site
    from sink_lens.records import read_run
    from sink_lens.report.page import render

    __version__: str

_MODULES = {
    "load": "models.load",
    "wrap": "models.load",
    "LensModel": "models.load",
    "TokenBatch": "data.tokens",
    "from_text": "data.tokens",
    "from_prompts": "data.tokens",
    "from_dataset": "data.tokens",
    "from_tensor": "data.tokens",
    "random_tokens": "data.tokens",
    "repeated_tokens": "data.tokens",
    "capture": "capture.record",
    "Reading": "capture.record",
    "stream": "capture.record",
    "SITES": "models.sites",
    "Site": "models.sites",
    "MEASURES": "measures.table",
    "trace": "chain.trace",
    "Trace": "chain.trace",
    "TraceConfig": "chain.config",
    "read_run": "records",
    "render": "report.page",
    "SinkLensError": "errors",
}
"""Public name -> the module of this package that defines it."""

__all__ = [
    "MEASURES",
    "SITES",
    "LensModel",
    "Reading",
    "SinkLensError",
    "Site",
    "TokenBatch",
    "Trace",
    "TraceConfig",
    "__version__",
    "capture",
    "from_dataset",
    "from_prompts",
    "from_tensor",
    "from_text",
    "load",
    "random_tokens",
    "read_run",
    "render",
    "repeated_tokens",
    "stream",
    "trace",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("sink-lens")
    if name in _MODULES:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        # setdefault: importing the subpackage `capture` has just bound that name to it (see its docstring).
        return globals().setdefault(name, value)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

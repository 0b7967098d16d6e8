"""Measures: plain functions of one layer's tensors, grouped by link of the chain; `table.py` lists them all.

The functions take and return tensors, on any device, and use no model and no hooks. They compute in float32 or
better even for half-precision inputs, because the norm of a sink token overflows float16. An undefined result is
`nan`, never 0.
"""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

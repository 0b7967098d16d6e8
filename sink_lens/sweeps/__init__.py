"""Sweeps: thousands of cells, each an edit and what it does to some metrics, with what they share computed once."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

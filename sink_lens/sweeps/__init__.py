"""Sweeps: thousands of cells, each an edit and what it does to some metrics, with what they share computed once."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

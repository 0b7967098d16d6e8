"""Activation, path and attribution patching: put activations of one run into another run."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

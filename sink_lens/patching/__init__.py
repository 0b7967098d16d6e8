"""Activation, path and attribution patching: put activations of one run into another run."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

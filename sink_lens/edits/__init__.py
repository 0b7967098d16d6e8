"""Edits change a site in a forward pass: zero, means, scale, freeze, isolate, amplify, normalise, quantise, window."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

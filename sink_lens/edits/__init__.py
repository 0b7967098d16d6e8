"""Edits change a site in a forward pass: zero, means, scale, freeze, isolate, amplify, normalise, quantise, window."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

"""Circuits: the edges between heads and MLPs that carry what a metric measures, with scores and real patches."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

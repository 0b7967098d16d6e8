"""Circuits: the edges between heads and MLPs that carry what a metric measures, with scores and real patches."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

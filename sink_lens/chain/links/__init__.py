"""The chain: its links in order, one file each; what is said of them in ``words``, which needs no torch."""

from ...lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

"""The chain: its links in order, one file each; what is said of them in ``words``, which needs no torch."""

from ...lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

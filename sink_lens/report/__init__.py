"""Run folders in, figures and one self-contained page out; ``sink_lens.views`` is this package."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

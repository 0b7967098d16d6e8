"""Run folders in, figures and one self-contained page out; ``sink_lens.views`` is this package."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

"""Properties of models before training: token preference, contraction, and the seed that a model keeps."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

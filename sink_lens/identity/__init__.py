"""Properties of models before training: token preference, contraction, and the seed that a model keeps."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

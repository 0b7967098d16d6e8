"""Training a model, watching what its checkpoints become, and comparing variants."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

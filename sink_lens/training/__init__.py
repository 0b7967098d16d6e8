"""Training a model, watching what its checkpoints become, and comparing variants."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""One question, one run folder: sink_tokens, card, quantise; cards has many models."""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

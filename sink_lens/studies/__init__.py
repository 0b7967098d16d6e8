"""One question, one run folder: isolate, amplify, ablate, sink_tokens, card, quantise; cards has many models."""

from ..lazy import exported

__getattr__, __dir__, __all__ = exported(__name__, __file__)

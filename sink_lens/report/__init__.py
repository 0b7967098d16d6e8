"""Run folders in, figures and one self-contained page out; ``sink_lens.views`` is this package."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .circuit import ChainCircuit as ChainCircuit
    from .circuit import circuit_of as circuit_of
    from .html import render as render
    from .views import attention_heads as attention_heads
    from .views import attention_patterns as attention_patterns
    from .views import colored_tokens as colored_tokens
    from .views import neuron_activations as neuron_activations

_NAMES = {
    "ChainCircuit": "circuit",
    "attention_heads": "views",
    "attention_patterns": "views",
    "circuit_of": "circuit",
    "colored_tokens": "views",
    "neuron_activations": "views",
    "render": "html",
}
"""Public name -> the module that defines it."""

__all__ = [
    "ChainCircuit",
    "attention_heads",
    "attention_patterns",
    "circuit_of",
    "colored_tokens",
    "neuron_activations",
    "render",
]
__getattr__, __dir__ = exported(__name__, _NAMES)

"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from ..chain.page.circuit import ChainCircuit as ChainCircuit
from .html import render as render
from .pages import circuit_of as circuit_of
from .views import attention_heads as attention_heads
from .views import attention_patterns as attention_patterns
from .views import colored_tokens as colored_tokens
from .views import neuron_activations as neuron_activations

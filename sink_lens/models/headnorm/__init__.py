"""A Llama for pre-training, with variants that affect sinks: sigmoid attention, gates, a sink logit, a value norm.

Importing this package registers the class with ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration import ATTENTIONS, NORMS, VALUE_NORM_INITS, VALUE_NORMS, HeadNormConfig
from .conversion import convert, undecayed
from .modeling import HeadNormForCausalLM, HeadNormModel

__all__ = [
    "ATTENTIONS",
    "NORMS",
    "VALUE_NORMS",
    "VALUE_NORM_INITS",
    "HeadNormConfig",
    "HeadNormForCausalLM",
    "convert",
    "undecayed",
]

AutoConfig.register(HeadNormConfig.model_type, HeadNormConfig, exist_ok=True)
AutoModel.register(HeadNormConfig, HeadNormModel, exist_ok=True)
AutoModelForCausalLM.register(HeadNormConfig, HeadNormForCausalLM, exist_ok=True)

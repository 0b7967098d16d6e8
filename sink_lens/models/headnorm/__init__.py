"""A Llama for pre-training that varies what makes sinks: the attention's weights, gates, and a norm of the values.

Importing this package makes the class known to ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration import ATTENTIONS, VALUE_NORM_INITS, VALUE_NORMS, HeadNormConfig
from .conversion import convert, undecayed
from .modeling import HeadNormForCausalLM, HeadNormModel

__all__ = [
    "ATTENTIONS",
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

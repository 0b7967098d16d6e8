"""Head-wise RMSNorm for any model, and a Llama for pre-training with variants that affect sinks, this norm among them.

Importing this package registers the class with ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration import ATTENTIONS, NORMS, VALUE_NORM_INITS, VALUE_NORMS, HeadNormConfig
from .conversion import convert, undecayed
from .modeling import HeadNormForCausalLM, HeadNormModel
from .norm import HeadNorm, match_gains

__all__ = [
    "ATTENTIONS",
    "NORMS",
    "VALUE_NORMS",
    "VALUE_NORM_INITS",
    "HeadNorm",
    "HeadNormConfig",
    "HeadNormForCausalLM",
    "convert",
    "match_gains",
    "undecayed",
]

AutoConfig.register(HeadNormConfig.model_type, HeadNormConfig, exist_ok=True)
AutoModel.register(HeadNormConfig, HeadNormModel, exist_ok=True)
AutoModelForCausalLM.register(HeadNormConfig, HeadNormForCausalLM, exist_ok=True)

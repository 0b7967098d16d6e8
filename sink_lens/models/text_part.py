"""The language model within a model that reads images too."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Take the language model out of one that reads images too, with the same parameters; any other as it is.

    For a text without images it gives the same logits.
    """
    if type(model) is not Gemma3ForConditionalGeneration:
        return model
    config: Any = model.config
    inner: Any = model.model
    with torch.device("meta"):
        text = Gemma3ForCausalLM(config.text_config)
    text.model, text.lm_head = inner.language_model, model.lm_head
    text.generation_config = model.generation_config
    text.config._name_or_path = config._name_or_path
    return text.train(model.training)

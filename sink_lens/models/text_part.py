"""The language model within a model that reads images too."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .families import TEXT_PART
from .private_apis import NAME_OF_CONFIG, config_name_of


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Take the language model out of one that reads images too, with the same parameters; any other as it is.

    For a text without images it gives the same logits.
    """
    whole = type(model).__name__
    if whole not in TEXT_PART or type(model) is not getattr(transformers, whole):
        return model
    config: Any = model.config
    inner: Any = model.model
    with torch.device("meta"):
        text: Any = getattr(transformers, TEXT_PART[whole])(config.text_config)
    text.model, text.lm_head = inner.language_model, model.lm_head
    text.generation_config = model.generation_config
    setattr(text.config, NAME_OF_CONFIG, config_name_of(config))
    return text.train(model.training)

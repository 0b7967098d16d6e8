"""The model that a configuration describes."""

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from ..models.headnorm import HeadNormConfig, HeadNormForCausalLM
from ..models.wrapping import keep_random_state
from .config import TrainConfig


def model_of(
    config: TrainConfig, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> HeadNormForCausalLM:
    """Build the model that a configuration describes, with weights drawn from its seed, on the CPU in float32.

    Variants with the same seed start from the same weights, but for the parameters that plain softmax attention lacks.
    ``tokenizer`` gives the ids of BOS and EOS.

    Raises:
        InputError: the tokenizer has more ids than the model.
    """
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocab_size=config.vocab_size)
    model = _build_variant(
        config, tokenizer, attention=config.attention, value_norm=config.value_norm
    )
    if (config.attention, config.value_norm) == ("softmax", "none"):
        return model
    alike = dict(
        _build_variant(config, tokenizer, attention="softmax", value_norm="none").named_parameters()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in alike:
                parameter.copy_(alike[name])
    with keep_random_state():
        torch.default_generator.manual_seed(config.seed)
        model.initialise_gains()  # of the other weights
    return model


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
    highest = max(len(tokenizer), *(number + 1 for number in tokenizer.get_vocab().values()))
    if highest > vocab_size:
        raise InputError(
            f"the tokenizer has {highest:,} ids and the model {vocab_size:,}; need at least as many in the model: "
            f"vocab_size = {highest}, or a smaller tokenizer"
        )


def _build_variant(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    attention: str,
    value_norm: str,
) -> HeadNormForCausalLM:
    with keep_random_state(), torch.device("cpu"):
        # torch.manual_seed would reseed the caller's GPUs too.
        torch.default_generator.manual_seed(config.seed)
        described = HeadNormConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_mlp,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.length,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied,
            initializer_range=config.init_std,
            norm=config.norm,
            attention=attention,
            value_norm=value_norm,
            value_norm_init=config.value_norm_init,
            value_norm_length=config.length if config.value_norm_init == "matched" else None,
            bos_token_id=None if tokenizer is None else tokenizer.bos_token_id,
            eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
            pad_token_id=None,
        )
        model = HeadNormForCausalLM(described)
    model.set_attn_implementation("sdpa")
    return model

"""From the configuration of a trace to its model, its sequences, and the other BOS arm of them."""

import logging
from pathlib import Path

import torch

from ..data.corpora import bundled_text, read_text
from ..data.tokens import TokenBatch, from_prompts, from_text, random_tokens, repeated_tokens
from ..data.tokens import bos_id as bos_id_of
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import load
from .config import TraceConfig

log = logging.getLogger(__name__)


def model_of(config: TraceConfig) -> LensModel:
    """The model that a configuration names, loaded."""
    return load(config.model, device=config.device, dtype=config.dtype, announce=log.info)


def tokens_of(lens: LensModel, *, config: TraceConfig, bos: str) -> TokenBatch:
    """The sequences that a configuration describes, in one BOS arm.

    Raises:
        InputError: no tokenizer for text, too little text, no BOS where it was asked for, or a length over the
            model's context.
    """
    if lens.n_context is not None and config.length > lens.n_context and not config.prompts:
        raise InputError(
            f"the length is {config.length} tokens; {lens.name} takes at most {lens.n_context}: use a shorter length"
        )
    size = {"sequences": config.sequences, "length": config.length, "bos": bos}
    if lens.tokenizer is None and config.tokens == "text":
        raise InputError(
            f"{lens.name} has no tokenizer; need one for text: put it beside the weights, or use random tokens"
        )
    if config.tokens != "text":
        draw = random_tokens if config.tokens == "random" else repeated_tokens
        generator = torch.Generator().manual_seed(config.seed)
        size_of_vocabulary = lens.d_vocab if lens.tokenizer is None else min(lens.d_vocab, len(lens.tokenizer))
        return draw(lens.tokenizer, generator=generator, vocab_size=size_of_vocabulary, **size)
    assert lens.tokenizer is not None
    if config.prompts:
        return from_prompts(config.prompts, lens.tokenizer, bos=bos)
    if config.text is not None:
        return from_text(read_text(config.text), lens.tokenizer, name=Path(config.text).name, **size)
    return from_text(bundled_text(), lens.tokenizer, name="moby_dick", **size)


def other_arm(lens: LensModel, batch: TokenBatch, *, config: TraceConfig) -> TokenBatch | None:
    """The same sequences with BOS where they have none, without it where they have it; None where there is no BOS."""
    if lens.tokenizer is None or bos_id_of(lens.tokenizer) is None:
        return None
    try:
        return tokens_of(lens, config=config, bos="without" if batch.bos else "with")
    except InputError as error:
        log.warning("the other BOS arm is left out: %s", error)
        return None

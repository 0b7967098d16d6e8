"""Load the model and the sequences that a configuration such as ``TraceConfig`` describes; write their provenance."""

import dataclasses
import logging
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import torch

from ..data.corpora import bundled_text, read_text
from ..data.described import SEQUENCE_OPTIONS, BosCondition, InputConfig, check_sequences_fit
from ..data.tokens import TokenBatch, from_prompts, from_text, random_tokens, repeated_tokens
from ..errors import InputError
from ..records import package_versions
from .bundled import find_header
from .header import Header
from .lens import LensModel
from .load import config_hash, load, weights_hash

log = logging.getLogger(__name__)
C = TypeVar("C")


def load_model(config: InputConfig) -> LensModel:
    more = {name: getattr(config, name, None) for name in ("revision", "device_map", "max_memory")}
    return load(config.model, device=config.device, dtype=config.dtype, announce=log.info, **more)


def check_sequences(config: InputConfig) -> Header | None:
    """Check a configuration's sequences against the headers of the model's files, before the weights are read.

    Return the model's sizes from these headers; None if they do not give all sizes.

    Raises:
        InputError: the sequences are too long for the model, or the text is too short for them.
    """
    readable = config.text is None or Path(config.text).is_file()
    if config.tokens == "text" and not config.prompts and readable:
        size = Path(config.text).stat().st_size if config.text else len(bundled_text().encode())
        needed = config.sequences * (config.length - 1)
        if needed > size:
            raise InputError(
                f"the text has {size:,} bytes, and so at most as many tokens; need {needed:,} for {config.sequences:,} "
                f"sequences of {config.length:,}. Give more text, fewer sequences or a shorter length"
            )
    header = find_header(config.model)
    if header is not None:
        check_sequences_fit(config, n_context=header.n_context, has_tokenizer=header.has_tokenizer)
    return header


def refuse_beside_tokens(asked: Collection[str]) -> None:
    if unread := [name for name in SEQUENCE_OPTIONS if name in asked]:
        raise InputError(
            f"{', '.join(unread)} given beside tokens, which are the sequences already; need one of them. Leave out "
            f"{', '.join(unread)}, or the tokens"
        )


def config_of_given(config: C, batch: TokenBatch, *, asked: Collection[str]) -> C:
    """Return a configuration whose options of sequences are those of ``batch``, which was given in their place.

    Raises:
        InputError: one of these options is among the names that the user ``asked`` for.
    """
    refuse_beside_tokens(asked)
    size = {"sequences": batch.n_sequences, "length": batch.n_positions, "bos": batch.bos_condition}
    kind = batch.source if batch.source in ("random", "repeated") else "text"
    return dataclasses.replace(config, tokens=kind, text=None, prompts=(), **size)  # type: ignore[type-var]


def make_tokens(lens: LensModel, *, config: InputConfig, bos: BosCondition) -> TokenBatch:
    """Make the token sequences that a configuration describes, with or without BOS as ``bos`` says.

    Raises:
        InputError: text without a tokenizer, too little text, no BOS token although BOS was requested, or a length
            above the model's context.
    """
    check_sequences_fit(
        config, n_context=lens.n_context, has_tokenizer=lens.tokenizer is not None, name=lens.name
    )
    size = {"sequences": config.sequences, "length": config.length, "bos": bos}
    if config.tokens != "text":
        draw = random_tokens if config.tokens == "random" else repeated_tokens
        generator = torch.Generator().manual_seed(config.seed)
        return draw(lens.tokenizer, generator=generator, vocab_size=lens.d_vocab, **size)
    assert lens.tokenizer is not None  # check_sequences_fit refused it
    if config.prompts:
        return from_prompts(config.prompts, lens.tokenizer, bos=bos)
    if config.text is not None:
        text, name = read_text(config.text), Path(config.text).name
        return from_text(text, lens.tokenizer, name=name, **size)
    return from_text(bundled_text(), lens.tokenizer, name="moby_dick", **size)


def describe_provenance(lens: LensModel, batch: TokenBatch, *, kernel: str) -> dict[str, object]:
    return {
        "model": lens.name,
        "family": lens.family.architecture,
        "weights_sha256": weights_hash(lens),
        "config_sha256": config_hash(lens),
        "notes": list(lens.notes),
        "n_layers": lens.n_layers,
        "n_heads": lens.n_heads,
        "n_kv_heads": lens.n_kv_heads,
        "d_model": lens.d_model,
        "token_source": batch.source,
        "tokens_sha256": batch.hash,
        "sequences": batch.n_sequences,
        "length": batch.n_positions,
        "bos": batch.bos,
        "bos_condition": batch.bos_condition,
        "dtype": str(lens.dtype).removeprefix("torch."),
        "device": str(lens.device),
        "kernel": kernel,
        "versions": package_versions(),
    }

"""The tokens that a configuration is trained on, packed once into the cache."""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.cache import cache_folder, lock_folder, write_manifest, write_new_folder
from ..data.corpora import open_texts, text_hash
from ..data.packing import pack
from ..data.vocabulary import train_vocabulary
from ..errors import InputError, first_line_of_error
from ..models.bundled import bundled_gguf, converted_folder
from ..schema import DEFAULT_MODEL
from .config import TrainConfig
from .model import check_vocabulary


class Rows(Protocol):
    """Rows of input_ids and labels: a data set, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Tokens to train on and tokens held out, as rows of input_ids and labels of one length."""

    train: Rows
    evaluation: Rows
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    sha256: str
    """Hash of the training tokens; of given rows, of all tokens and labels."""


def load_training_rows(config: TrainConfig, *, progress: bool) -> TrainingRows:
    """Load the rows of a configuration, packed from the text that it names or read from the cache.

    Raises:
        InputError: no such data or tokenizer, more ids than the model has, or too little text.
    """
    source = text_hash(open_texts(config.data))
    tokenizer = _load_tokenizer(config, source=source)
    check_vocabulary(tokenizer, vocab_size=config.vocab_size)
    asked = f"{source} {tokenizer_hash(tokenizer)} {config.length} {config.bos == 'with'} {config.eval_frac}"
    train, evaluation = pack(
        open_texts(config.data),
        tokenizer,
        length=config.length,
        folder=cache_folder() / "packed" / hashlib.sha256(asked.encode()).hexdigest()[:24],
        bos=config.bos == "with",
        eval_frac=config.eval_frac,
        progress=progress,
    )
    return TrainingRows(
        train=train,
        evaluation=_first_rows(evaluation, config.eval_sequences),
        tokenizer=tokenizer,
        source=config.data,
        sha256=train.hash,
    )


def check_given_rows(
    config: TrainConfig, data: tuple[Rows, Rows], *, tokenizer: PreTrainedTokenizerBase | None
) -> TrainingRows:
    """Check rows that were given to ``train`` (to train on, held out), and return them with their hash.

    Without a ``tokenizer``, it is the one that the configuration names, if it names one.

    Raises:
        InputError: there are no rows, a row has not the configuration's length, an id is too large for the model, or
            the tokenizer cannot be read.
    """
    train, evaluation = data
    if tokenizer is None and config.tokenizer != "bpe":
        tokenizer = _load_tokenizer(config, source="")
    digest = hashlib.sha256()
    for name, rows in (("train", train), ("evaluation", evaluation)):
        if not len(rows):
            raise InputError(f"the {name} data has no sequence; need at least one")
        digest.update(f"{name} {len(rows)}".encode())
        for number in range(len(rows)):
            row = rows[number]
            ids = row["input_ids"]
            if len(ids) != config.length:
                raise InputError(
                    f"a sequence of the {name} data has {len(ids)} tokens; need length = {config.length}"
                )
            if int(ids.max()) >= config.vocab_size:
                raise InputError(
                    f"the {name} data has the id {int(ids.max())} and the model {config.vocab_size:,} ids; need "
                    "a larger vocab_size, or other data"
                )
            digest.update(ids.numpy().tobytes())
            labels = row["labels"]
            if labels.shape != ids.shape or bool((labels != ids).any()):
                digest.update(labels.numpy().tobytes())
    return TrainingRows(
        train=train,
        evaluation=_first_rows(evaluation, config.eval_sequences),
        tokenizer=tokenizer,
        source="given",
        sha256=digest.hexdigest(),
    )


def _load_tokenizer(config: TrainConfig, *, source: str) -> PreTrainedTokenizerBase:
    """Load a training's tokenizer; ``bpe`` is trained on its text once and cached under the text's hash, ``source``."""
    if config.tokenizer == "bpe":
        folder = cache_folder() / "vocabularies" / f"{source[:24]}-{config.vocab_size}"
        with lock_folder(folder):
            if not folder.is_dir():
                trained = train_vocabulary(open_texts(config.data), vocab_size=config.vocab_size)
                with write_new_folder(folder) as part:
                    trained.save_pretrained(part)
                    write_manifest(part, {"text_sha256": source, "vocab_size": config.vocab_size})
        return PreTrainedTokenizerFast.from_pretrained(folder)
    name = config.tokenizer
    if name == DEFAULT_MODEL:
        name = str(converted_folder(bundled_gguf()))
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # tokenizers raises a bare Exception
        raise InputError(
            f"the tokenizer {config.tokenizer} cannot be read ({first_line_of_error(error)}); need bpe, a folder that "
            f"save_pretrained wrote, {DEFAULT_MODEL}, or a hub name and a network"
        ) from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    if tokenizer is None:
        return None
    whole: Any = getattr(tokenizer, "backend_tokenizer", None)
    text = str(sorted(tokenizer.get_vocab().items())) if whole is None else whole.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


def training_order(*, n_sequences: int, drawn: int, seed: int) -> np.ndarray:
    """Return the indices of the sequences in the order of the training: one random permutation of all after another."""
    generator = torch.Generator().manual_seed(seed)
    passes = [
        torch.randperm(n_sequences, generator=generator) for _ in range(-(-drawn // n_sequences))
    ]
    return torch.cat(passes)[:drawn].numpy()


def stack_batch(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def _first_rows(rows: Rows, n: int) -> Rows:
    return Subset(cast("Any", rows), range(min(n, len(rows))))

"""What the checkpoints of a run are measured on: its own evaluation data, else the bundled prose."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..data.corpora import bundled_text
from ..data.tokens import TokenBatch, from_tensor, from_text
from ..errors import RunError, SinkLensError
from ..records import Run
from .batches import corpus_of
from .config import train_config


def run_tokenizer(run: Run) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies in a training run's folder; None where there is none.

    Raises:
        RunError: its files cannot be read.
    """
    folder = run.folder / "tokenizer"
    if not folder.is_dir():
        return None
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # tokenizers raises a bare Exception
        raise RunError(f"{folder} cannot be read ({error}); need the tokenizer's files as they were saved") from error


def evaluation_tokens(
    run: Run, tokenizer: PreTrainedTokenizerBase | None, *, sequences: int, length: int
) -> TokenBatch:
    """The beginnings of a run's evaluation sequences, or pieces of the bundled prose where those cannot be had.

    The data is packed again where the cache has lost it. Where it is not what the run was trained on, or was given
    to ``train`` as rows, a warning says that the bundled prose stands in. Of fewer sequences than asked for, all.

    Raises:
        RunError: there is neither evaluation data nor a tokenizer.
        InputError: the prose is too short for so many sequences.
    """
    context = run.config.get("length")
    length = min(length, context) if isinstance(context, int) else length
    why = "it was given as rows" if run.provenance.get("data_source") == "given" else ""
    if not why:
        try:
            corpus = corpus_of(train_config(run.config, where=str(run.folder)), progress=False)
        except SinkLensError as error:
            why = str(error)
        else:
            if corpus.sha256 == run.provenance.get("data_sha256"):
                rows: Any = corpus.evaluation
                ids = torch.stack([rows[index]["input_ids"][:length] for index in range(min(sequences, len(rows)))])
                return replace(from_tensor(ids, tokenizer=tokenizer), source=f"evaluation:{corpus.source}")
            why = f"{corpus.source} has changed since"
    if tokenizer is None:
        raise RunError(
            f"the data of {run.folder} cannot be had ({why}) and it has no tokenizer for other text; need one of them. "
            "Pass tokens=..."
        )
    warnings.warn(f"{run.folder} is measured on the bundled prose: its own data cannot be had ({why})", stacklevel=3)
    return from_text(bundled_text(), tokenizer, sequences=sequences, length=length, name="moby_dick")

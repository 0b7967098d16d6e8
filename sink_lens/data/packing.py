"""Pack documents into token sequences of equal length, once, in a folder from which they are then read.

All documents form one stream of tokens, each document closed by EOS. The stream is cut into sequences, with BOS in
front of each; BOS counts as one of the ``length`` tokens. The sequences held out for evaluation are spread evenly over
the stream, so they come from the same documents as the training sequences.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sink_lens.data.cache import (
    describe_damage,
    lock_folder,
    read_manifest,
    write_manifest,
    write_new_folder,
)
from sink_lens.data.token_ids import bos_id
from sink_lens.errors import InputError

from ..progress import tqdm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = 1
_SPLITS = ("train", "evaluation")
_CHARACTERS_AT_ONCE, _SEQUENCES_AT_ONCE = 2_000_000, 1 << 14
"""Characters tokenised and sequences written at once; the pack does not depend on them."""


class PackedSplit(Dataset[dict[str, Tensor]]):
    """Sequences of one split, read from disk: ``data[i]`` has ``input_ids`` and ``labels``, both int64."""

    def __init__(self, folder: Path, split: str, *, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.split = split
        self.length = int(manifest["length"])
        """Tokens of each sequence, BOS included."""
        self.hash = str(manifest[split]["hash"])
        """SHA-256 over the ids, the length and the tokenizer."""
        self._ids = np.load(folder / f"{split}.npy", mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._ids[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the folder's name to another process, not the tokens."""
        return _open_split, (self.folder, self.split)

    @property
    def n_tokens(self) -> int:
        return len(self) * self.length


def pack(
    texts: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    length: int,
    folder: Path,
    bos: bool = True,
    eval_frac: float = 0.02,
    progress: bool = True,
) -> tuple[PackedSplit, PackedSplit]:
    """Tokenise documents and pack them into ``folder``, or reuse the pack there; return both splits.

    A special token that is spelled out in a text is read as text. A share of ``eval_frac`` of the sequences, at least
    one, is held out. The tokenizer is a fast one.

    Raises:
        InputError: an argument is out of range, the tokenizer lacks BOS or EOS, there is too little text, or the folder
            is damaged or cannot be written.
    """
    settings = _pack_settings(tokenizer, length=length, bos=bos, eval_frac=eval_frac)
    folder = Path(folder)
    try:
        with lock_folder(folder):
            if not folder.exists():
                with write_new_folder(folder) as fresh:
                    _write_pack(fresh, texts, tokenizer, settings=settings, progress=progress)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror or error}); need room and permission there. "
            "Free space, or choose another folder"
        ) from error
    return read_pack(folder)


def read_pack(folder: Path) -> tuple[PackedSplit, PackedSplit]:
    """Check and open an existing pack; return the training and the evaluation data.

    Raises:
        InputError: the folder holds no pack, or the pack is damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    needed = {"length", *_SPLITS}
    if manifest is None or manifest.get("format") != _FORMAT or not needed <= manifest.keys():
        raise InputError(
            f"{folder} is no pack of this version: it has no whole manifest. Remove it, and pack again."
        )
    if wrong := describe_damage(folder, manifest):
        raise InputError(f"{folder} is damaged: {wrong}. Remove it, and pack again.")
    train, evaluation = (PackedSplit(folder, split, manifest=manifest) for split in _SPLITS)
    return train, evaluation


def _open_split(folder: Path, split: str) -> PackedSplit:
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder} has no whole manifest any more; need the pack. Pack again.")
    return PackedSplit(folder, split, manifest=manifest)


def _pack_settings(
    tokenizer: "PreTrainedTokenizerBase", *, length: int, bos: bool, eval_frac: float
) -> dict[str, Any]:
    """Check the arguments of `pack`; return what its manifest says of them."""
    if length < 2:
        raise InputError(
            f"the length is {length}; need at least 2 tokens, so that there is one to predict."
        )
    if not 0 < eval_frac <= 0.5:
        raise InputError(
            f"eval_frac is {eval_frac}; need a share above 0 and up to 0.5. 0.02 is the default."
        )
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(
            f"the tokenizer is a {type(tokenizer).__name__}; need a fast one. Load with use_fast=True."
        )
    eos, first = tokenizer.eos_token_id, bos_id(tokenizer)
    if not isinstance(eos, int):
        raise InputError(
            "the tokenizer has no EOS token; need one to close documents. Set tokenizer.eos_token."
        )
    if bos and first is None:
        raise InputError(
            "bos is asked for and the tokenizer has no BOS token; set tokenizer.bos_token, or bos=False."
        )
    return {
        "length": length,
        "bos": first if bos else None,
        "eos": eos,
        "eval_frac": eval_frac,
        "vocab_size": len(tokenizer),
        "tokenizer_sha256": hashlib.sha256(
            _tokenizer_for_packing(tokenizer).to_str().encode()
        ).hexdigest(),
    }


def _tokenizer_for_packing(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Copy a fast tokenizer; the copy never truncates or pads, and reads spelled-out special tokens as text."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True
    return copy


def _write_pack(
    folder: Path,
    texts: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    settings: dict[str, Any],
    progress: bool,
) -> None:
    dtype = np.dtype("<u2" if settings["vocab_size"] <= 1 << 16 else "<u4")
    n_documents = n_ids = 0
    stream = folder / "stream"
    backend = _tokenizer_for_packing(tokenizer)
    bar = tqdm(unit="B", unit_scale=True, desc="packing", disable=not progress)
    with stream.open("wb") as file, bar:
        for batch in _document_batches(texts):
            encodings = backend.encode_batch_fast(batch, add_special_tokens=False)
            for encoding, text in zip(encodings, batch, strict=True):
                ids = np.asarray([*encoding.ids, settings["eos"]], dtype=dtype)
                file.write(ids.tobytes())
                n_ids += len(ids)
                n_documents += 1
                bar.update(len(text))
    body = settings["length"] - (settings["bos"] is not None)
    n_sequences = n_ids // body
    held_out = _evaluation_indices(n_sequences, settings["eval_frac"])
    if n_sequences < 2:
        raise InputError(
            f"the text has {n_ids:,} tokens; need {2 * body:,} for one sequence of {settings['length']} to train on "
            "and one to evaluate. Give more text, or a shorter length."
        )
    rows = np.memmap(stream, dtype=dtype, mode="r", shape=(n_sequences, body))
    trained_on = np.setdiff1d(np.arange(n_sequences), held_out)
    splits = {
        split: {
            "sequences": len(indices),
            "hash": _write_split(folder, split, rows, indices, settings=settings),
        }
        for split, indices in zip(_SPLITS, (trained_on, held_out), strict=True)
    }
    del rows
    stream.unlink()
    content = {
        "format": _FORMAT,
        **settings,
        "documents": n_documents,
        "left_out": n_ids - n_sequences * body,
        **splits,
    }
    write_manifest(folder, content)


def _write_split(
    folder: Path, split: str, rows: np.ndarray, indices: np.ndarray, *, settings: dict[str, Any]
) -> str:
    """Write the rows with these ``indices`` to ``SPLIT.npy``, after BOS if there is one; return their hash."""
    shape = (len(indices), settings["length"])
    digest = hashlib.sha256(json.dumps([settings["length"], settings["tokenizer_sha256"]]).encode())
    path = folder / f"{split}.npy"
    written = np.lib.format.open_memmap(path, mode="w+", dtype=rows.dtype, shape=shape)
    for start in range(0, len(indices), _SEQUENCES_AT_ONCE):
        part = rows[indices[start : start + _SEQUENCES_AT_ONCE]]
        if settings["bos"] is not None:
            part = np.pad(part, [(0, 0), (1, 0)], constant_values=settings["bos"])
        written[start : start + _SEQUENCES_AT_ONCE] = part
        digest.update(part.astype("<u4").tobytes())
    written.flush()
    return digest.hexdigest()


def _evaluation_indices(n_sequences: int, share: float) -> np.ndarray:
    count = max(1, round(n_sequences * share))
    return ((np.arange(count) * 2 + 1) * n_sequences // (2 * count)).astype(np.int64)


def _document_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"a document is a {type(text).__name__}; need text.")
        if text:
            batch.append(text)
            size += len(text)
        if size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

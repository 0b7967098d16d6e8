"""What a tokenizer, a collator or a trainer gives, as one text a row: every key is read, or refused by name.

- ``input_ids`` in rows of one length.
- ``attention_mask``: 0 at padding, which may stand on either side of a text, and 1 elsewhere.
- ``position_ids``, ``cu_seq_lens_*`` and ``seq_idx``: where texts begin that are packed into rows. A text of a single
  token beside others is left out, since trainers pad with such texts.
- ``labels``: the ids, and -100 at tokens whose loss does not count.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import InputError
from .given import Given

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ENDS = "cu_seq_lens"
"""Start of the names of running totals of lengths."""
_READ = ("input_ids", "attention_mask", "position_ids", "seq_idx", "labels")
_UNLABELLED = -100
_NO_TYPES = ": tokenizer(..., return_token_type_ids=False). GPT-2 and its kin add an embedding even for zeros"

Texts = tuple[Int[Tensor, "document position"], Int[Tensor, " document"], Given | None]
"""Tokens, a text a row and padded on the right; their lengths; where they were given, None if every token lies
there."""


def collated_texts(
    given: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None, Given | None, Tensor | None]:
    """Read a mapping of tensors, arrays or lists: the `Texts` in it, and where its tokens, as given, are labelled.

    Lengths are None where all rows are whole, and labels where the mapping has none.

    Raises:
        InputError: a key that is not read, or one that contradicts another.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "inputs_embeds" in given:
        raise InputError("inputs_embeds were given, which no text stands for; need input_ids alone")
    try:
        found = {
            name: torch.as_tensor(value)
            for name, value in given.items()
            if name in _READ or name.startswith(_ENDS)
        }
        for name in found.keys() & _READ:
            if found[name].ndim == 1:
                found[name] = found[name][None]
        tokens = found["input_ids"]
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(
            f"a mapping with {', '.join(map(str, given)) or 'nothing'} was given as tokens; need input_ids in rows of "
            'one length. Call the tokenizer with return_tensors="pt", padding=True'
        ) from error
    for name, value in given.items():
        if name not in found and _holds_numbers(value):
            raise InputError(
                f"the key {name!r} was given beside the token ids, and nothing here reads it; need some of "
                f"{', '.join(_READ)}, {_ENDS}_q. Leave it out{_NO_TYPES if name == 'token_type_ids' else ''}"
            )
    if "labels" in found:
        _check_shape(tokens, "labels", found["labels"])
    places = {
        name: one
        for name, one in found.items()
        if name in ("position_ids", "seq_idx") or name.startswith(_ENDS)
    }
    if not places and "attention_mask" not in found:
        return tokens, None, None, _read_labels(found, None)
    tokens, lengths, index = texts_of_rows(tokens, mask=found.get("attention_mask"), places=places)
    longest = slice(max(1, int(lengths.max())))  # columns that are padding in all rows are not run
    index = None if index is None else index[:, longest]
    return tokens[:, longest], lengths, index, _read_labels(found, index)


def texts_of_rows(
    tokens: Tensor, *, mask: Tensor | None, places: Mapping[str, Tensor | None]
) -> Texts:
    """Move every text of rows of tokens to the beginning of a row of its own.

    ``mask`` is 1 at real tokens; ``places`` are what says where texts begin (see the module's docstring).

    Raises:
        InputError: a mask that is not 0 and 1, or has a gap; or a name that fits neither tokens nor another name.
    """
    if tokens.ndim != 2:
        raise InputError(
            f"tokens are {type_and_shape(tokens)}; need two axes, sequence and position"
        )
    real = torch.ones_like(tokens, dtype=torch.bool)
    if mask is not None:
        packed = "For texts that are packed into rows give position_ids"
        _check_shape(tokens, "attention_mask", mask, way_out=packed)
        real = mask_of_tokens(mask)
    known = {name: one for name, one in places.items() if one is not None}
    rows, starts, lengths = (
        _packed_texts(known, tokens=tokens, real=real) if known else _padded_texts(real)
    )
    n_columns = tokens.shape[1]
    order = torch.arange(int(lengths.max()) if known else n_columns, device=tokens.device)
    index = rows[:, None] * n_columns + (starts[:, None] + order) % n_columns
    padding = order >= lengths[:, None]
    moved = tokens.flatten()[index]
    moved, index = moved.masked_fill(padding, 0) if known else moved, index.masked_fill(padding, -1)
    as_it_lies = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
    given = Given(index=index, shape=(len(tokens), n_columns))
    return moved, lengths, None if torch.equal(index, as_it_lies) else given


def _padded_texts(real: Bool[Tensor, "batch packed"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, first column and length of the text in each row."""
    starts, lengths = real.int().argmax(1), real.sum(1)
    order = torch.arange(real.shape[1], device=real.device)
    whole = (order >= starts[:, None]) & (order < (starts + lengths)[:, None])
    if not torch.equal(whole, real):
        row = int((whole != real).any(1).int().argmax())
        raise InputError(
            f"the mask of sequence {row} has a gap; need padding on the left or on the right only."
        )
    return torch.arange(len(real), device=real.device), starts, lengths


def _packed_texts(
    places: Mapping[str, Tensor], *, tokens: Tensor, real: Bool[Tensor, "batch packed"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, first column and length of each text that ``places`` tell apart."""
    begins = {
        name: _beginnings(name, one, tokens=tokens, real=real) for name, one in places.items()
    }
    (first, wanted), *others = begins.items()
    for name, one in others:
        if (wrong := (one != wanted) & real).any():
            row, column = wrong.nonzero()[0].tolist()
            raise InputError(
                f"{first} and {name} do not agree whether a text begins in row {row}, column {column}; need those of "
                "the same texts. Leave one of them out"
            )
    starting = wanted & real
    number = (starting.flatten().cumsum(0) - 1).view_as(tokens)
    lengths = torch.bincount(number[real], minlength=int(starting.sum()))
    rows, starts = starting.nonzero().unbind(1)
    kept = (lengths > 1) | (starting.sum(1)[rows] == 1)
    if not kept.any():
        raise InputError(
            f"no text has two tokens by {', '.join(begins)}; need those that count within a text"
        )
    rows, starts, lengths = rows[kept], starts[kept], lengths[kept]
    firsts = places["position_ids"][rows, starts].tolist() if "position_ids" in places else []
    if late := [one for one in firsts if one]:
        raise InputError(
            f"a document begins at position {late[0]} by these position_ids; need documents that begin at position 0, "
            "as a sequence does. Leave out what continues another row"
        )
    return rows, starts, lengths


def mask_of_tokens(mask: Tensor) -> Bool[Tensor, "batch packed"]:
    known = (mask == 0) | (mask == 1)
    if mask.is_complex() or not known.all():
        row, column = (0, 0) if known.all() else (~known).nonzero()[0].tolist()
        raise InputError(
            f"the attention_mask is {mask[row, column].item()} in row {row}, column {column}; need 0 at padding and 1 "
            "elsewhere. Numbers of the texts that are packed into a row are seq_idx"
        )
    return mask.bool()


def _beginnings(
    name: str, places: Tensor, *, tokens: Tensor, real: Tensor
) -> Bool[Tensor, "batch packed"]:
    """Return True at the first token of each text, as ``places``, called ``name``, says."""
    if places.dtype not in INTEGER_DTYPES:
        raise InputError(f"{name} are {type_and_shape(places)}; need integers")
    if name.startswith(_ENDS):
        ends = places.long()
        if (
            ends.ndim != 1
            or len(ends) < 2
            or int(ends[0])
            or int(ends[-1]) != tokens.numel()
            or (ends.diff() < 0).any()
        ):
            raise InputError(
                f"{name} is {ends.tolist()[:9]}; need running totals of lengths, from 0 to {tokens.numel()}, the tokens"
            )
        begins = torch.zeros(tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
        begins[ends] = True
        begins = begins[:-1].view_as(tokens)
        if not begins[:, 0].all():
            raise InputError(
                f"a text goes on from a row of the tokens to the next by {name}; need texts that end in their row, or "
                "all tokens in one row"
            )
    else:
        _check_shape(tokens, name, places)
        step = 1 if name == "position_ids" else 0
        begins = places.diff(dim=1, prepend=places[:, :1]) != step
    begins[:, 0] = True
    begins[:, 1:] |= real[:, 1:] & ~real[:, :-1]
    return begins


def _read_labels(
    found: Mapping[str, Tensor], index: Given | None
) -> Bool[Tensor, "batch packed"] | None:
    """Return True where the labels say that a token's loss counts; None without labels.

    Labels of real tokens, those of ``index``, must be the token ids where they count.
    """
    if "labels" not in found:
        return None
    tokens, labels = found["input_ids"], found["labels"]
    labelled = labels != _UNLABELLED
    real = torch.ones_like(labelled)
    if index is not None:
        real = torch.zeros_like(labelled).flatten()
        real[index.index[index.index >= 0]] = True
        real = real.view_as(labelled)
    if (wrong := labelled & real & (labels != tokens)).any():
        row, column = wrong.nonzero()[0].tolist()
        raise InputError(
            f"labels have {labels[row, column].item()} in row {row}, column {column}, where input_ids have "
            f"{tokens[row, column].item()}; need the ids themselves, and {_UNLABELLED} where the loss does not count"
        )
    return labelled


def _check_shape(
    tokens: Tensor, name: str, given: Tensor, *, way_out: str = "Give one number a token"
) -> None:
    if tokens.ndim != 2 or given.shape != tokens.shape:
        raise InputError(
            f"tokens are {type_and_shape(tokens)}, {name} {type_and_shape(given)}; need (sequences, positions) twice. "
            f"{way_out}"
        )


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "USO"
    if isinstance(value, list | tuple):
        return any(isinstance(one, int | float) or _holds_numbers(one) for one in value)
    return isinstance(value, Tensor)


def type_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"

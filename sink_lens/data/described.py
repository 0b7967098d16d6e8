"""What a configuration says of its model and its sequences, and what it cannot say; torch is not needed to read it."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import InputError, check_name

TOKEN_KINDS = ("text", "random", "repeated")
BOS_ARMS = ("auto", "with", "without")


@runtime_checkable
class Described(Protocol):
    """The fields that ``TraceConfig`` and ``SweepConfig`` share."""

    @property
    def model(self) -> str:
        """Default model's name, folder, GGUF file or hub name."""
        ...

    @property
    def tokens(self) -> str:
        """text, random (uniform ids) or repeated (one id a sequence)."""
        ...

    @property
    def text(self) -> str | None:
        """A text file to cut sequences from; None is the bundled prose."""
        ...

    @property
    def prompts(self) -> Sequence[str]:
        """Prompts, one sequence each, instead of ``tokens``."""
        ...

    @property
    def bos(self) -> str:
        """Auto (what the tokenizer does), with, or without."""
        ...

    @property
    def sequences(self) -> int:
        """How many sequences."""
        ...

    @property
    def length(self) -> int:
        """Tokens a sequence, BOS included."""
        ...

    @property
    def device(self) -> str | None:
        """Where the model goes; None picks."""
        ...

    @property
    def dtype(self) -> str | None:
        """Type of the weights; None is float32."""
        ...

    @property
    def seed(self) -> int:
        """Seed of every generator of the run."""
        ...


def check_described(config: Described) -> None:
    """Refuse what cannot be run.

    Raises:
        InputError: which value, and what is needed.
    """
    if config.tokens not in TOKEN_KINDS:
        raise InputError(f"tokens is {config.tokens!r}; need one of {', '.join(TOKEN_KINDS)}")
    if config.bos not in BOS_ARMS:
        raise InputError(f"bos is {config.bos!r}; need one of {', '.join(BOS_ARMS)}")
    if config.length < 2:
        raise InputError(f"length is {config.length}; need at least 2, since the first token attends only to itself")
    if config.sequences < 1:
        raise InputError(f"sequences is {config.sequences}; need at least 1")
    if not 0 <= config.seed < 2**63:
        raise InputError(f"seed is {config.seed}; need a whole number from 0 on, below 2**63")
    if config.text is not None and config.prompts:
        raise InputError("both a text file and prompts were given; need one of them")
    if (config.text is not None or config.prompts) and config.tokens != "text":
        raise InputError(f"a text or prompts were given together with tokens {config.tokens!r}; need one of them")
    if config.text is not None and not Path(config.text).exists():
        raise InputError(f"there is no file {config.text}; need a text file in UTF-8")


def read_settings(path: str | Path, *, what: str) -> dict[str, Any]:
    """The table in a TOML or JSON file.

    Args:
        path: the file.
        what: what the file describes, for errors: "a sweep".

    Raises:
        InputError: the file is missing, cannot be read, or holds no table.
    """
    check_name(path, what="the name of the file")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as {what}: {error}. Need a TOML or JSON file") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} cannot be read as {what}: it holds no table. Need one at the top of the file")
    return found

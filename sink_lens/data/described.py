"""The model and sequence fields of a configuration, and their checks. Reading them does not need torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from ..errors import InputError
from ..files import check_file_name, check_regular_file

TokenKind = Literal["text", "random", "repeated"]
BosCondition = Literal["auto", "with", "without"]
"""First token of a sequence: what the tokenizer does with plain text, BOS, or no BOS."""
SEQUENCE_OPTIONS = ("text", "prompts", "bos", "sequences", "length")
"""Options that say which sequences are made."""
TOKENS_TABLE = {"kind": "tokens"} | {name: name for name in SEQUENCE_OPTIONS}
"""Keys of the table ``[tokens]`` in a configuration file -> field of the configuration."""


class InputConfig(Protocol):
    """Fields for the model and the sequences that ``TraceConfig`` and ``SweepConfig`` share."""

    @property
    def model(self) -> str: ...

    @property
    def tokens(self) -> TokenKind: ...

    @property
    def text(self) -> str | None: ...

    @property
    def prompts(self) -> Sequence[str]: ...

    @property
    def bos(self) -> BosCondition: ...

    @property
    def sequences(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def device(self) -> str | None: ...

    @property
    def dtype(self) -> str | None: ...

    @property
    def seed(self) -> int: ...


def check_input_config(config: InputConfig) -> None:
    if config.length < 2:
        raise InputError(
            f"length is {config.length}; need at least 2, since the first token attends only to itself"
        )
    if config.sequences < 1:
        raise InputError(f"sequences is {config.sequences}; need at least 1")
    if config.text is not None and config.prompts:
        raise InputError("both a text file and prompts were given; need one of them")
    if (config.text is not None or config.prompts) and config.tokens != "text":
        raise InputError(
            f"a text or prompts were given together with tokens {config.tokens!r}; need one of them"
        )
    if config.text is not None:
        check_file_name(config.text, what="the text file")
        check_regular_file(config.text, what="the text file")
        if not Path(config.text).exists():
            raise InputError(f"there is no file {config.text}; need a text file in UTF-8")


def check_sequences_fit(
    config: InputConfig, *, n_context: int | None, has_tokenizer: bool, name: str | None = None
) -> None:
    """Raise InputError if a run's sequences are too long for the model, or are text and the model has no tokenizer.

    ``n_context`` is the model's longest input in tokens (None: any), and ``name`` the model's in the error.
    """
    name = name or config.model
    if n_context is not None and config.length > n_context and not config.prompts:
        raise InputError(
            f"the length is {config.length} tokens; {name} takes at most {n_context}: use a shorter length"
        )
    if not has_tokenizer and config.tokens == "text":
        raise InputError(
            f"{name} has no tokenizer, so no text can be read; need one: load(..., tokenizer=...), or its "
            "files beside the weights. Or give token ids in tokens, or draw them (tokens='random')"
        )

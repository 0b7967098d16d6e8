"""The tokenizer of a saved model or a GGUF file, without the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILE = "tokenizer.json"


def tokenizer_of(path: Path) -> "PreTrainedTokenizerBase | None":
    """The tokenizer in a GGUF file or in a folder's ``tokenizer.json``; None if there is none that can be read so."""
    if path.suffix == ".gguf":
        from .gguf_conversion import gguf_tokenizer

        return gguf_tokenizer(path)
    if not (path / _FILE).is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def token_bound(texts: Sequence[str]) -> int:
    """An upper bound on the number of tokens of each text, for any tokenizer, special tokens included."""
    return 8 + 2 * max((len(text.encode()) for text in texts), default=0)

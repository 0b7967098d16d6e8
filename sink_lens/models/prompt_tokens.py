"""The tokenizer of a saved model or a GGUF file, without the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILE = "tokenizer.json"


def tokenizer_of(path: Path) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a folder, from its file alone, or of a GGUF file; None where there is none, or another form."""
    if path.suffix == ".gguf":
        from .gguf_conversion import gguf_tokenizer

        return gguf_tokenizer(path)
    if not (path / _FILE).is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def most_tokens(texts: Sequence[str]) -> int:
    """More tokens than the longest of some texts has, whatever the tokenizer, which may add some."""
    return 8 + 2 * max((len(text.encode()) for text in texts), default=0)

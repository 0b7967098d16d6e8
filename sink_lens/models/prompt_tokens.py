"""Token ids of prompts from the files of a saved tokenizer, without the model's libraries."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.described import BosCondition

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILE = "tokenizer.json"


def tokenizer_of(path: Path) -> "PreTrainedTokenizerFast | None":
    """The tokenizer of a folder, from its file alone; None where there is none, or it has another form."""
    if not (path / _FILE).is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def prompt_tokens(path: Path, prompts: Sequence[str], *, bos: BosCondition) -> list[list[int]] | None:
    """Ids of each prompt; None for a file that is not converted, and a tokenizer of another form.

    Raises:
        InputError: BOS was asked for, and the tokenizer has none.
    """
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        return None
    from ..data.bos import prompt_ids

    return prompt_ids(prompts, tokenizer, bos=bos)

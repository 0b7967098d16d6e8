"""Number of BOS tokens that a tokenizer puts in front of a text and of a chat.

It is found by using the tokenizer, not by reading its files.
"""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from ..data.token_ids import bos_id, text_ids


def count_bos_in_front(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Count the BOS tokens that a tokenizer puts in front of a text, of a chat, and of a chat tokenised a second time.

    The keys are ``text``, ``chat`` and ``chat_tokenised_again``. The counts of the chat are None if the tokenizer has
    no chat template that works.
    """
    token = bos_id(tokenizer)
    found: dict[str, int | None] = {"text": _count_in_front(tokenizer("a", verbose=False)["input_ids"], token)}
    try:
        chat = str(tokenizer.apply_chat_template([{"role": "user", "content": "Hello there"}], tokenize=False))
    except Exception:  # noqa: BLE001  # there is no template, or it raises what it likes
        return found | {"chat": None, "chat_tokenised_again": None}
    again = tokenizer(chat, verbose=False)["input_ids"]
    return found | {
        "chat": _count_in_front(text_ids(chat, tokenizer), token),
        "chat_tokenised_again": _count_in_front(again, token),
    }


def bos_counts_text(found: Mapping[str, int | None]) -> str:
    """Say in words how many BOS tokens ``count_bos_in_front`` found."""
    said = f"the tokenizer puts {found['text'] or 'none'} in front of a text"
    if found["chat"] is not None:
        said += f", a chat begins with {found['chat'] or 'none'}"
        if found["chat_tokenised_again"] != found["chat"]:
            said += f" ({found['chat_tokenised_again']} if its text is tokenised again)"
    return said


def _count_in_front(ids: Sequence[int], token: int | None) -> int:
    """Count how often ``token`` is repeated in front of ``ids``; 0 if there is no such token."""
    count = 0
    while token is not None and count < len(ids) and ids[count] == token:
        count += 1
    return count

"""How many BOS tokens a tokenizer puts in front of a text and of a chat, and what of this changed between two models.

It is found by using the tokenizer, not by reading its files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..data.bos import bos_id, text_ids
from ..text import plural

_SAMPLE = "The whale's 2 eyes saw: nothing.\n\tWhy? naïve 東京 x = [1, 2]"
"""Text that tokenizers are compared on."""
_CHAT = [{"role": "user", "content": "Hello there"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check: an alarm, or that nothing is wrong."""

    check: str
    alarm: bool
    said: str
    line: str = ""
    """What to change, and where; empty if nothing is wrong."""


def bos_in_front(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Number of BOS tokens in front of a plain text, of a chat, and of a chat whose text is tokenised again.

    The chat's numbers are None without a chat template, or with one that ends with an error.
    """
    token = bos_id(tokenizer)
    found: dict[str, int | None] = {"text": _leading(tokenizer("a", verbose=False)["input_ids"], token)}
    chat = _chat(tokenizer)
    if chat is None:
        return found | {"chat": None, "chat_tokenised_again": None}
    again = tokenizer(chat, verbose=False)["input_ids"]
    return found | {"chat": _leading(text_ids(chat, tokenizer), token), "chat_tokenised_again": _leading(again, token)}


def said_in_front(found: Mapping[str, int | None]) -> str:
    """The numbers of ``bos_in_front`` in words."""
    said = f"the tokenizer puts {found['text'] or 'none'} in front of a text"
    if found["chat"] is not None:
        said += f", a chat begins with {found['chat'] or 'none'}"
        if found["chat_tokenised_again"] != found["chat"]:
            said += f" ({found['chat_tokenised_again']} if its text is tokenised again)"
    return said


def check_bos(base: PreTrainedTokenizerBase | None, tuned: PreTrainedTokenizerBase | None) -> list[Finding]:
    """Compare what two tokenizers make of a text and of a chat: the same tokens, behind as many BOS tokens."""
    if base is None or tuned is None:
        return []
    if bos_id(base) != bos_id(tuned):
        return [
            Finding(
                check="bos_token",
                alarm=True,
                said=f"BOS is {tuned.bos_token!r} ({bos_id(tuned)}) instead of {base.bos_token!r} ({bos_id(base)})",
                line=f'tokenizer_config.json: "bos_token": "{base.bos_token}"',
            )
        ]
    before, now = bos_in_front(base), bos_in_front(tuned)
    return [_vocabulary(base, tuned), _text(before["text"], now["text"]), *_template(before["chat"], now["chat"])]


def _vocabulary(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> Finding:
    """Check that both make the same tokens of a text."""
    if text_ids(_SAMPLE, base) == text_ids(_SAMPLE, tuned):
        return Finding(check="vocabulary", alarm=False, said="the same text becomes the same tokens")
    return Finding(
        check="vocabulary",
        alarm=True,
        said="the same text becomes other tokens",
        line="tokenizer.json: take the file of the first model; the embeddings belong to its ids",
    )


def _text(before: int | None, now: int | None) -> Finding:
    """Check that a plain text begins with as many BOS tokens as in the first model."""
    if before == now:
        return Finding(check="bos", alarm=False, said=f"both put {now or 'no'} BOS in front of a text")
    return Finding(
        check="bos",
        alarm=True,
        said=f"the tokenizer puts {now or 'no'} BOS in front of a text, the first model's {before or 'none'}",
        line='tokenizer_config.json: "add_bos_token", or tokenizer.json: "post_processor"',
    )


def _template(before: int | None, now: int | None) -> list[Finding]:
    """Check that a chat begins with as many BOS tokens as in the first model, if both have a template."""
    if before is None or now is None:
        return []
    if before == now:
        return [Finding(check="template", alarm=False, said=f"a chat begins with {now or 'no'} BOS in both")]
    return [
        Finding(
            check="template",
            alarm=True,
            said=f"a chat begins with {plural(now, 'BOS token')}; with the first model's template, with {before}",
            line="chat_template.jinja: write {{ bos_token }} once, in front of the loop over messages",
        )
    ]


def _leading(ids: Sequence[int], token: int | None) -> int:
    """Count the BOS tokens that a sequence begins with."""
    count = 0
    while token is not None and count < len(ids) and ids[count] == token:
        count += 1
    return count


def _chat(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A chat of one turn as text; None without a template, or with one that ends with an error."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return str(tokenizer.apply_chat_template(_CHAT, tokenize=False))
    except Exception:  # noqa: BLE001  # a template raises what it likes
        return None

"""Number of BOS tokens that a tokenizer puts in front of a text and of a chat, found by using it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase

from ..data.token_ids import bos_id, text_ids


def count_bos_in_front(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Count the BOS tokens that a tokenizer puts in front of a text, of a chat, and of a chat tokenised a second time.

    The counts of the chat are None if the tokenizer has no chat template that works, and if the template is not
    rendered; ``chat_not_rendered`` then says why.
    """
    token = bos_id(tokenizer)
    in_text = _count_in_front(tokenizer("a", verbose=False)["input_ids"], token)
    found: dict[str, Any] = {"text": in_text, "chat": None, "chat_tokenised_again": None}
    if why := _unrendered_reason(tokenizer):
        return found | {"chat_not_rendered": why}
    messages = [{"role": "user", "content": "Hello there"}]
    try:
        chat = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # noqa: BLE001  # there is no template, or it raises what it likes
        return found
    again = tokenizer(chat, verbose=False)["input_ids"]
    return found | {
        "chat": _count_in_front(text_ids(chat, tokenizer), token),
        "chat_tokenised_again": _count_in_front(again, token),
    }


_MOST = 20_000
"""Characters of a chat template that is rendered."""
_MARKS = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
_LOOPS = (nodes.For, nodes.Macro, nodes.CallBlock)


def _unrendered_reason(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why a chat template is not rendered: it may be anybody's program, and never end. "" if it is.

    One is rendered that has at most one level of loops, no ``range`` or multiplication, and nothing that is joined to
    itself.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return "" if template is None else "the tokenizer has several chat templates"
    if len(template) > _MOST:
        return f"the chat template, of {len(template):,} characters, is long"
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _MARKS.sub("", template)
        )
    except (jinja2.TemplateError, RecursionError):
        return "the chat template cannot be read"
    loops = list(tree.find_all(_LOOPS))
    if any(any(loop.find_all(_LOOPS)) or getattr(loop, "recursive", False) for loop in loops):
        return "the chat template has loops within loops"
    if any(tree.find_all((nodes.Mul, nodes.Pow))) or any(
        name.name == "range" for name in tree.find_all(nodes.Name)
    ):
        return "the chat template repeats something a number of times"
    for joined in tree.find_all((nodes.Add, nodes.Concat, nodes.List, nodes.Tuple)):
        names = [name.name for name in joined.find_all(nodes.Name)]
        if len(set(names)) < len(names) and any(_is_assigned(tree, name) for name in names):
            return "the chat template joins something to itself"
    return ""


def _is_assigned(tree: nodes.Template, name: str) -> bool:
    targets = (one.target for one in tree.find_all((nodes.Assign, nodes.AssignBlock)))
    return any(getattr(one, "name", None) == name for one in targets)


def bos_counts_text(found: Mapping[str, Any]) -> str:
    said = f"the tokenizer puts {found['text'] or 'none'} in front of a text"
    if found["chat"] is not None:
        said += f", a chat begins with {found['chat'] or 'none'}"
        if found["chat_tokenised_again"] != found["chat"]:
            said += f" ({found['chat_tokenised_again']} if its text is tokenised again)"
    if "chat_not_rendered" in found:
        said += f"; {found['chat_not_rendered']} and was not rendered"
    return said


def _count_in_front(ids: Sequence[int], token: int | None) -> int:
    count = 0
    while token is not None and count < len(ids) and ids[count] == token:
        count += 1
    return count

"""Token ids of texts, prompts and answers; the number of BOS tokens at the start of a sequence is always known.

A tokenizer that is given a string may add BOS silently. Text is therefore tokenised without special tokens, and BOS
added under one of three conditions: "auto" does what the tokenizer does with plain text, "with" puts BOS first,
"without" adds none. A text that begins with BOS itself is refused.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from sink_lens.data.described import BosCondition
from sink_lens.errors import InputError
from sink_lens.text import plural


def bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    bos = tokenizer.bos_token_id
    return bos if isinstance(bos, int) else None


def bos_ids(tokenizer: PreTrainedTokenizerBase | None, condition: BosCondition) -> list[int]:
    """Return the ids that a BOS condition puts in front of a text: [BOS] or []. Without a tokenizer "auto" gives [].

    Raises:
        InputError: the condition is "with" and there is no BOS token, or is "auto" and the tokenizer puts something
            other than BOS in front.
    """
    bos = None if tokenizer is None else bos_id(tokenizer)
    if condition == "with":
        if bos is None:
            raise InputError(
                "bos is 'with', but there is no BOS token; need a tokenizer that has one. Choose 'auto' or 'without'."
            )
        return [bos]
    if condition == "without" or tokenizer is None:
        return []
    alone, whole = text_ids("a", tokenizer), list(tokenizer("a", verbose=False)["input_ids"])
    if alone:
        starts = (at for at in range(len(whole)) if whole[at : at + len(alone)] == alone)
        prefix = whole[: next(starts, 0)]
    else:  # it knows no such text
        prefix = whole[:1] if whole[:1] == [bos] else []
    if prefix not in ([], [bos]):
        raise InputError(
            f"this tokenizer puts ids {prefix} in front of a text, and its BOS token is {bos}; need nothing "
            f"or exactly BOS. Choose bos 'with' or 'without', or give the ids that the tokenizer returns."
        )
    return prefix


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the text alone, without special tokens; never truncated.

    Raises:
        InputError: the text holds a lone surrogate, which Python makes of bytes on a command line that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text {text[:60]!r} is no UTF-8 ({error.reason}); need text. Write it anew."
        ) from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def continuation_ids(
    before: str, text: str, tokenizer: PreTrainedTokenizerBase
) -> list[int] | None:
    """Token ids that ``text`` has directly after the text ``before``; None if it changes the tokens of ``before``.

    The ids of ``text`` alone may be others: Llama 2's tokenizer puts a space in front of any text.
    """
    first, whole = text_ids(before, tokenizer), text_ids(before + text, tokenizer)
    return whole[len(first) :] if whole[: len(first)] == first else None


def prompt_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a text that the tokenizer turns into exactly these token ids; BOS in front of them is left out.

    A sequence may begin within a word, and then no text gives all its ids. The text is in that case one of its last 32,
    8 or 2 ids, the most that works; None if not even 2 work.
    """
    own = list(ids[1:] if ids and ids[0] == bos_id(tokenizer) else ids)
    for n in (len(own), 32, 8, 2):
        text = str(tokenizer.decode(own[-n:], clean_up_tokenization_spaces=False)) if own else ""
        if n <= len(own) and text_ids(text, tokenizer) == own[-n:]:
            return text
    return None


def answer_id(
    answer: str | int,
    prompt: str | Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    what: str = "the token",
) -> int:
    """Token id of an answer that continues a prompt, a text or token ids.

    Args:
        answer: the text of one token as it goes on from the prompt, mostly with a space first; or an id.
        prompt: the prompt's text, or its token ids.
        tokenizer: reads the texts; an id needs none.
        what: name of the answer in errors.

    Raises:
        InputError: the answer is not one token there, or the prompt's own tokens change with it.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise InputError(f"{what} is {answer!r}; need an id, or the text of one token")
    if isinstance(answer, int):
        return answer
    if tokenizer is None:
        raise InputError(f"{what} is the text {answer!r}; need a tokenizer to read it, or its id")
    text = prompt if isinstance(prompt, str) else prompt_text(prompt, tokenizer)
    if text is None:
        raise InputError(
            f"the prompt's tokens are not those of its text, behind which {what} {answer!r} is; give its id"
        )
    ids = continuation_ids(text, answer, tokenizer)
    if ids is None:
        raise InputError(
            f"{what} {answer!r} changes the tokens of the prompt that it goes on from ({text[-40:]!r}); need a text "
            "that leaves them, mostly with a space first and none at the prompt's end, or the token's id"
        )
    if len(ids) != 1:
        raise InputError(
            f"{what} {answer!r} is {len(ids)} tokens behind {text[-40:]!r}; need one. A word mostly begins with a space"
        )
    return ids[0]


def warn_of_forgotten_space(
    answers: Iterable[tuple[str | int, str | Sequence[int]]],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Warn of those among (answer, prompt) whose space in front may be forgotten, naming the first.

    The answer begins with a letter behind a prompt that ends in a word or a mark, and is another single token with a
    space in front.
    """
    forgotten = list[tuple[str, str]]()
    for answer, prompt in answers:
        if tokenizer is None or not isinstance(answer, str) or not answer[:1].isalpha():
            continue
        text = prompt if isinstance(prompt, str) else str(tokenizer.decode(list(prompt[-8:])))
        end = text[-1:]
        if not end.isalnum() and end not in tuple(".,:;!?)]}"):
            continue
        with contextlib.suppress(InputError):  # one of both is not one token
            spaced = f" {answer}"
            if answer_id(spaced, prompt, tokenizer) != answer_id(answer, prompt, tokenizer):
                forgotten.append((text[-60:], answer))
    if not forgotten:
        return
    (text, answer), level, frame = forgotten[0], 1, inspect.currentframe()
    while frame and (name := frame.f_globals["__name__"]).startswith("sink_lens."):
        if name.startswith("sink_lens.cli."):  # which shows the package's own warnings alone
            break
        level, frame = level + 1, frame.f_back  # to the line of the user
    more = f" (likewise {plural(len(forgotten) - 1, 'other')})" * (len(forgotten) > 1)
    warnings.warn(
        f"the answer {answer!r} behind {text!r} has no space in front, and its logit is read as it stands{more}; as a "
        f"word of its own it is the token {' ' + answer!r}. Write the space if the word is meant",
        stacklevel=level,
    )


def refuse_own_bos(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, what: str) -> None:
    """Refuse a text that itself begins with BOS, even after white space."""
    bos = bos_id(tokenizer)
    if bos is None or bos not in ids:
        return
    before = list(ids[: ids.index(bos)])
    if not before or not str(tokenizer.decode(before)).strip():
        raise InputError(
            f"{what} itself begins with the BOS token {str(tokenizer.bos_token)!r}; need text without it, "
            f"or BOS would be doubled or uncounted. Remove it from the text; bos 'with' puts it there once."
        )


def prompt_ids(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, bos: BosCondition = "auto"
) -> list[list[int]]:
    """Token ids of each prompt, with BOS in front if ``bos`` says so; raise as ``TokenBatch.from_prompts`` does."""
    if not prompts:
        raise InputError("there is no prompt; need at least one.")
    first = bos_ids(tokenizer, bos)
    rows = []
    for index, prompt in enumerate(prompts):
        ids = text_ids(prompt, tokenizer)
        if not ids:
            raise InputError(
                f"prompt {index} ({prompt!r}) has no tokens; need text. Leave it out or fill it."
            )
        refuse_own_bos(ids, tokenizer, what=f"prompt {index}")
        rows.append(first + ids)
        if len(rows[-1]) < 2:
            raise InputError(
                f"prompt {index} ({prompt!r}) is a single token; need at least 2, as no later token could "
                f"attend to it. Make it longer."
            )
    return rows


def ordinary_ids(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None) -> list[int]:
    """Return the ids below ``vocab_size`` that plain text can have, ascending: all but special tokens.

    Without a tokenizer they are all below ``vocab_size``.
    """
    if vocab_size is not None and vocab_size < 1:
        raise InputError(f"vocab_size is {vocab_size}; need at least 1. Give the model's.")
    if tokenizer is None:
        if vocab_size is None:
            raise InputError(
                "there is no tokenizer and no vocab_size; need one of them to draw from."
            )
        return list(range(vocab_size))
    special = set(tokenizer.all_special_ids)
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ordinary = sorted(set(tokenizer.get_vocab().values()) - special)
    ids = [token for token in ordinary if vocab_size is None or token < vocab_size]
    if not ids:
        raise InputError(
            "the tokenizer has no ordinary token below vocab_size; need at least one. Check both."
        )
    return ids

"""BOS, and text to token ids: how many BOS tokens a sequence begins with is known, never left to a tokenizer.

A tokenizer's own string path hides BOS. Here text is tokenised without special tokens, and BOS is put in
front by the caller. Three arms: "auto" does what the tokenizer does with plain text, "with" puts BOS first,
"without" does not. A text that brings its own BOS is refused in every arm.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sink_lens.errors import InputError

BOS_ARMS = ("auto", "with", "without")
"""What can be asked about BOS."""


def bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the tokenizer's BOS token, or None where it has none."""
    bos = tokenizer.bos_token_id
    return bos if isinstance(bos, int) else None


def tokenizer_adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts exactly its BOS token in front of a plain text; False without a BOS."""
    bos = bos_id(tokenizer)
    return bos is not None and _added_prefix(tokenizer) == [bos]


def check_arm(arm: str) -> None:
    """Refuses a BOS arm that does not exist.

    Raises:
        InputError: the arm is not one of `BOS_ARMS`.
    """
    if arm not in BOS_ARMS:
        raise InputError(f"bos is {arm!r}; need 'auto', 'with' or 'without'. Choose one of them.")


def first_ids(tokenizer: PreTrainedTokenizerBase | None, arm: str) -> list[int]:
    """What stands before the text: [BOS] or [], as the arm asks; without a tokenizer "auto" is [].

    Raises:
        InputError: the arm is unknown, is "with" where there is no BOS, or is "auto" where the tokenizer puts
            something else than BOS in front.
    """
    check_arm(arm)
    bos = None if tokenizer is None else bos_id(tokenizer)
    if arm == "with":
        if bos is None:
            raise InputError(
                "bos is 'with', but there is no BOS token; need a tokenizer that has one. Choose 'auto' or 'without'."
            )
        return [bos]
    if arm == "without" or tokenizer is None:
        return []
    prefix = _added_prefix(tokenizer)
    if prefix not in ([], [bos]):
        raise InputError(
            f"this tokenizer puts ids {prefix} in front of a text, and its BOS token is {bos}; need nothing "
            f"or exactly BOS. Choose bos 'with' or 'without'."
        )
    return prefix


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the text alone, without special tokens and however long (it is cut later)."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def refuse_own_bos(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, what: str) -> None:
    """Refuses text ids that begin with BOS, also after white space.

    Raises:
        InputError: they do, so that BOS would be doubled, or counted as absent.
    """
    bos = bos_id(tokenizer)
    if bos is None or bos not in ids:
        return
    before = list(ids[: ids.index(bos)])
    if not before or not str(tokenizer.decode(before)).strip():
        raise InputError(
            f"{what} itself begins with the BOS token {str(tokenizer.bos_token)!r}; need text without it, "
            f"or BOS would be doubled or uncounted. Remove it from the text; bos 'with' puts it there once."
        )


def _added_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts in front of a plain text by itself."""
    alone = text_ids("a", tokenizer)
    whole = list(tokenizer("a", verbose=False)["input_ids"])
    if not alone:
        return whole[:1] if whole[:1] == [bos_id(tokenizer)] else []
    starts = (start for start in range(len(whole)) if whole[start : start + len(alone)] == alone)
    return whole[: next(starts, 0)]


def single_id(text: str, tokenizer: PreTrainedTokenizerBase, *, what: str) -> int:
    """The id of a text that is one token.

    Raises:
        InputError: it is none, or several.
    """
    ids = text_ids(text, tokenizer)
    if len(ids) != 1:
        raise InputError(f"{what} {text!r} is {len(ids)} tokens; need one. A word mostly begins with a space")
    return ids[0]

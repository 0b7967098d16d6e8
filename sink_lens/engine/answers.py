"""``answers``: the tokens that a model takes to be likeliest behind a prompt."""

from collections.abc import Sequence

import pandas as pd
import torch

from ..activations.forward import resolve
from ..data.described import BosCondition
from ..data.token_ids import answer_id, continuation_ids, prompt_text
from ..data.tokens import Prompts, from_tensor, token_texts
from ..edits.constructors import Edit
from ..edits.hooks import edits_in_texts
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike
from ..models.unembedding import logits_from_states
from .forward import run_with


def answers(
    model: ModelLike,
    prompt: Prompts,
    answer: str | int | Sequence[str | int] | None = None,
    *,
    edits: Sequence[Edit] | Edit = (),
    top: int = 10,
    bos: BosCondition = "auto",
) -> pd.DataFrame:
    """Make a table of the likeliest next tokens after a prompt, and the rank and probability of an answer.

    Each token of an answer has rows of its own, predicted from all tokens before it. Cost: one forward pass.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        prompt: a text or several, or tokens.
        answer: the right answer as it goes on from the prompt, mostly with a space first, or a token id; one for all
            prompts, or one for each.
        edits: their positions count from the first token of the prompt.
        top: how many tokens to list; the answer's row follows them if it is not among them.
        bos: BOS condition of a text.

    Returns:
        One row per token: ``sequence``, ``step`` (which token of the answer), ``rank`` (0 is the likeliest),
        ``token``, ``token_id``, ``logit``, ``probability``, ``is_answer``.

    Raises:
        InputError: ``top`` is below 1, or an answer is not made of tokens of its own behind its prompt.
    """
    if top < 1:
        raise InputError(f"the {top} likeliest tokens were asked for; need at least 1")
    lens, batch = resolve(model, prompt, bos=bos)
    edits = edits_in_texts(edits, batch)
    prompts = [
        row[:length].tolist()
        for row, length in zip(batch.tokens.cpu(), batch.lengths.tolist(), strict=True)
    ]
    given = (
        [answer] * len(prompts) if answer is None or isinstance(answer, str | int) else list(answer)
    )
    if len(given) != len(prompts):
        raise InputError(
            f"there are {len(given)} answers for {len(prompts)} prompts; need one, or one for each"
        )
    wanted = [
        [] if one is None else _answer_ids(one, ids, lens)
        for one, ids in zip(given, prompts, strict=True)
    ]
    rows = [ids + own[:-1] for ids, own in zip(prompts, wanted, strict=True)]
    width = max(map(len, rows))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    whole = from_tensor(padded, lengths=torch.tensor([len(row) for row in rows]))
    if torch.equal(whole.tokens, batch.tokens.cpu()):
        whole = batch  # which says where its tokens come from
    states = run_with(lens, whole, edits, sites=("final",), progress=False).tensors["final", 0]
    found = []
    for sequence, (ids, own) in enumerate(zip(prompts, wanted, strict=True)):
        for step in range(max(1, len(own))):
            state = states[sequence, len(ids) - 1 + step].to(lens.device, lens.dtype)
            logits = logits_from_states(lens, state).detach()
            rows_here = _top_token_rows(logits.cpu(), own[step] if own else None, lens, top=top)
            found += [{"sequence": sequence, "step": step, **row} for row in rows_here]
    return pd.DataFrame(found)


def _answer_ids(answer: str | int, prompt: list[int], lens: LensModel) -> list[int]:
    if isinstance(answer, str) and lens.tokenizer is not None:
        text = prompt_text(prompt, lens.tokenizer)
        several = None if text is None else continuation_ids(text, answer, lens.tokenizer)
        if several is not None and len(several) > 1:
            return several
    found = answer_id(answer, prompt, lens.tokenizer, what="the answer")
    if not 0 <= found < lens.d_vocab:
        raise InputError(f"the answer is the id {found}; need 0 to {lens.d_vocab - 1}")
    return [found]


def _top_token_rows(
    logits: torch.Tensor, right: int | None, lens: LensModel, *, top: int
) -> list[dict[str, object]]:
    shares = logits.double().softmax(-1)
    shown = logits.topk(min(top, len(logits))).indices.tolist()
    if right is not None and right not in shown:
        shown.append(right)
    texts = token_texts(shown, lens.tokenizer)
    return [
        {
            "rank": int((logits > logits[token]).sum()),
            "token": texts[token],
            "token_id": token,
            "logit": float(logits[token]),
            "probability": float(shares[token]),
            "is_answer": token == right,
        }
        for token in shown
    ]

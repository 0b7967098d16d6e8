"""Metrics of a run: one number per sequence, used to judge patches and edits.

A metric declares the parts of an ``Outcome`` that it reads, and a sweep computes only those: a metric of attention at
layer 3 ends every run at that layer. Every built-in metric is differentiable, as attribution patching requires.
Negative positions count back from the last real token of each sequence.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..arguments import check_calls
from ..data.given import by_text
from ..data.token_ids import answer_id, warn_of_forgotten_space
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..measures.dimensions import dominance_ratio
from ..models.sites import SITES
from ..text import as_ranges, token_text
from .evaluation import (
    Metric,
    as_metric,
    check_per_sequence,
    evaluate,
    on_batch,
    on_logits,
    on_outcome,
)
from .outcome import Outcome

Token = int | str
"""A token by its id, or by its text."""
Answers = Token | Sequence[Token | Sequence[Token]]
"""One for all sequences, or one for each, or several for each."""
_Sides = tuple[list[tuple[Token, ...]], list[tuple[Token, ...]]]
"""The right and the wrong tokens of each sequence; a list of one entry is of all sequences."""

__all__ = [
    "Metric",
    "as_metric",
    "check_per_sequence",
    "dominance",
    "evaluate",
    "kl_to",
    "logit_difference",
    "loss",
    "norm",
    "on_batch",
    "on_logits",
    "on_outcome",
    "sink_mass",
]


@check_calls
def sink_mass(sink_position: int = 0, *, layers: Sequence[int] | None = None) -> Metric:
    """Mean attention to ``sink_position`` over the queries after it, the heads and ``layers`` (None: all); in [0, 1].

    In a layer with a sliding window only the queries whose window reaches the position count.
    """
    if layers is not None and len(layers) == 0:
        raise InputError(
            "sink mass was requested for no layers; need at least one, or None for all"
        )
    if sink_position == -1:
        raise InputError(
            "sink mass was requested of the last token, to which no later one attends; need one before it"
        )
    chosen = None if layers is None else tuple(sorted({int(layer) for layer in layers}))
    return Metric(
        name=f"sink mass at position {sink_position}"
        + ("" if chosen is None else f", layers {as_ranges(chosen)}"),
        function=lambda run: run.mass_or_nan(sink_position, layers=chosen),
        positions=(sink_position,),
        layers=chosen,
        state=False,
        padded=True,
    )


@check_calls
def logit_difference(
    correct: Answers,
    incorrect: Answers,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    position: int = -1,
    prompt: str | Sequence[str] | None = None,
) -> Metric:
    """Logit of one token minus that of another at a position: ``logit_difference(" Paris", " Madrid")``.

    Args:
        correct: the token whose logit counts positively, an id or the text of one token, or one for each sequence. If a
            sequence has a list of several, the mean of their logits counts, as in auto-circuit.
        incorrect: the token whose logit is subtracted, likewise.
        tokenizer: reads the texts; None is the model's own. A text is the token that it is behind the sequence's own
            tokens.
        position: the position at which the next token is predicted.
        prompt: the text behind which texts are read, or one for each sequence; None takes the sequences of the sweep,
            patch or circuit. ``evaluate`` on an outcome needs it, and the tokenizer.

    Raises:
        InputError: a text is not one token behind the prompt, or there is no tokenizer to read it.
    """
    sides = _tokens_by_sequence(correct), _tokens_by_sequence(incorrect)
    if all(isinstance(token, int) for side in sides for own in side for token in own):
        return _difference_of_ids(sides, position=position)

    def behind(prompts: Sequence[Sequence[str | list[int]]], reads: Any) -> Metric:
        first, *others = (_read_answers(sides, some, reads) for some in prompts)
        answers = (
            (one, prompts[0][row % len(prompts[0])])
            for side in sides
            for row, own in enumerate(side)
            for one in own
        )
        warn_of_forgotten_space(answers, reads)
        if any(other != first for other in others):
            raise InputError(
                "the text of an answer is one token behind clean prompts, another behind corrupted ones; give ids"
            )
        made = _difference_of_ids(first, position=position)
        if not all(len(side) == 1 and len(side[0]) == 1 for side in first):
            return made
        texts = [str(reads.decode([side[0][0]])) for side in first]
        names = [text.strip() for text in texts]
        for number, side in enumerate(sides):
            one = side[0][0]
            if isinstance(one, str) and one[0].isalpha():  # not the token with a space in front
                names[number] = repr(one)
        if not all(names) or names[0] == names[1]:  # only a space tells them apart
            names = [token_text(text) for text in texts]
        return replace(made, name=f"{made.name} ({names[0]} − {names[1]})")

    def on(batches: Sequence[TokenBatch], own: PreTrainedTokenizerBase | None) -> Metric:
        return behind([_prompts_up_to(batch, position) for batch in batches], tokenizer or own)

    def unread(run: Outcome) -> Tensor:
        raise InputError(
            "a logit difference of texts was read of an outcome, which has no prompt; need "
            "logit_difference(..., tokenizer, prompt=TEXT), or token ids"
        )

    if prompt is not None:
        return behind([[prompt] if isinstance(prompt, str) else prompt], tokenizer)
    name = f"logit difference ({correct!r} − {incorrect!r})"
    return replace(
        _difference_of_ids(([(0,)], [(0,)]), position=position), name=name, function=unread, on=on
    )


def _tokens_by_sequence(given: Answers) -> list[tuple[Token, ...]]:
    every = [given] if isinstance(given, str | int) else given
    found = [(own,) if isinstance(own, str | int) else tuple(own) for own in every]
    for token in itertools.chain.from_iterable(found):
        if not isinstance(token, str):
            answer_id(token, (), None)
    if not found or not all(found):
        raise InputError("a sequence has no right, or no wrong, answer; need at least one of each")
    return found


def _prompts_up_to(batch: TokenBatch, position: int) -> list[list[int]]:
    end = position + 1 or None
    return [
        row[:n][:end].tolist() for row, n in zip(batch.tokens, batch.lengths.tolist(), strict=True)
    ]


def _read_answers(
    sides: _Sides, prompts: Sequence[str | list[int]], tokenizer: PreTrainedTokenizerBase | None
) -> _Sides:
    """Read texts as the tokens that they are behind each prompt; one prompt is of all sequences."""
    n, found = max(map(len, (prompts, *sides))), []
    for one in (prompts, *sides):
        if len(one) not in (1, n):
            raise InputError(
                f"{len(one)} answers or prompts were given for {n} sequences; need one, or one for each"
            )
    for side in sides:
        read = [
            tuple(
                answer_id(token, prompts[row % len(prompts)], tokenizer)
                for token in side[row % len(side)]
            )
            for row in range(n)
        ]
        found.append(read[:1] if len(set(read)) == 1 else read)
    return found[0], found[1]


def _difference_of_ids(sides: _Sides, *, position: int) -> Metric:
    def function(run: Outcome) -> Tensor:
        found = run.logits_at(positions_from_start(run.lengths, position)).float()
        right, wrong = (_answer_logits(found, side, run) for side in sides)
        return right - wrong

    counts = {len(side) for side in sides if len(side) > 1}
    if len(counts) > 1:
        raise InputError(
            f"there are {len(sides[0])} right and {len(sides[1])} wrong answers; need one for each sequence"
        )
    return Metric(
        name="logit difference",
        function=function,
        unit="logits",
        layers=(),
        logits=True,
        scored=position,
        padded=True,
        n_sequences=max(counts, default=None),
    )


@check_calls
def loss() -> Metric:
    """Mean next-token loss of each sequence, in nats.

    Its targets are the run's own tokens. Clean and corrupted tokens differ, so their targets differ too: patching
    everything reproduces the predictions of the other run, but not its loss.
    """

    def function(run: Outcome) -> Tensor:
        assert run.loss is not None
        return run.loss

    return Metric(name="loss", function=function, unit="nats", layers=(), loss=True, padded=True)


@check_calls
def kl_to(logits: Float[Tensor, "batch position vocab"]) -> Metric:
    """KL divergence between the given predictions and those of the run, KL(given || run), mean over tokens, in nats.

    ``logits`` are those of another run on the same sequences: ``run_with(..., logits=True).logits``.
    """
    own = _log_probabilities(logits.detach().float().cpu())

    def function(run: Outcome) -> Tensor:
        assert run.logits is not None
        found = _log_probabilities(run.logits.float())
        wanted, width = own[run.indices], found.shape[1]
        if bool(wanted[:, width:].isnan().all()):  # columns that no row has a token in
            wanted = wanted[:, :width]
        if found.shape != wanted.shape:
            raise InputError(
                f"the logits to compare with have the shape {tuple(wanted.shape)}, those of the run "
                f"{tuple(found.shape)}; need logits of the same sequences"
            )
        nowhere = wanted.isnan().any(-1)
        if bool((nowhere & run.valid).any()):
            sequence, position = (nowhere & run.valid).nonzero()[0].tolist()
            raise InputError(
                f"the logits to compare with are nan at token {position} of sequence {sequence}; need logits of the "
                "same sequences in the same rows. Make both from one TokenBatch"
            )
        wanted = wanted.masked_fill(nowhere[..., None], 0.0)
        divergence = (wanted.exp() * (wanted - found)).sum(-1)
        return torch.where(run.valid, divergence, 0.0).sum(1) / run.valid.sum(1)

    def on(batches: Sequence[TokenBatch], tokenizer: PreTrainedTokenizerBase | None) -> Metric:
        return kl_to(by_text(logits, batches[0].given))

    return Metric(
        name="KL divergence",
        function=function,
        unit="nats",
        layers=(),
        logits=True,
        padded=True,
        n_sequences=len(own),
        on=on,
    )


@check_calls
def norm(sink_position: int = 0, *, layer: int, site: str = "resid_post") -> Metric:
    """Euclidean norm of a site at ``sink_position`` in ``layer``; if the site has heads, over all heads together.

    Raises:
        InputError: the site has no axis of token positions, such as ``pattern``, or comes after the layers.
    """
    fit = [name for name, one in SITES.items() if one.by_token and one.per_layer]
    if site not in fit:
        raise InputError(
            f"there is no norm of a position at {site!r}; need one of {', '.join(fit)}"
        )

    def function(run: Outcome) -> Tensor:
        _refuse_padding(run, sink_position)
        values = run.tensors[site, layer]
        at = positions_from_start(run.lengths, sink_position).to(values.device)
        rows = torch.arange(len(at), device=values.device)
        return values[rows, at].flatten(1).float().norm(dim=-1)

    return Metric(
        name=f"norm of {site} at position {sink_position}, layer {layer}",
        function=function,
        positions=(sink_position,),
        layers=(layer,),
        sites=(site,),
        padded=True,
    )


@check_calls
def dominance(sink_position: int = 0, *, layer: int) -> Metric:
    """Dominance ratio of the residual stream at ``sink_position`` after ``layer``: largest over mean magnitude."""

    def function(run: Outcome) -> Tensor:
        _refuse_padding(run, sink_position)
        return dominance_ratio(run.state_at(sink_position)[run.layers.index(layer)])

    return Metric(
        name=f"dominance at position {sink_position}, layer {layer}",
        function=function,
        positions=(sink_position,),
        layers=(layer,),
        padded=True,
    )


def _refuse_padding(run: Outcome, position: int) -> None:
    if position >= 0 and not bool(run.valid[:, position].all()):
        raise InputError(
            f"position {position} is padding in some sequences; need a position that all of them have"
        )


def _log_probabilities(logits: Tensor) -> Tensor:
    # log_softmax is 5e-5 off on a CPU with 262,144 tokens
    return logits - logits.logsumexp(-1, keepdim=True)


def positions_from_start(lengths: Int[Tensor, " batch"], position: int) -> Int[Tensor, " batch"]:
    """Return the index of ``position`` in each sequence, from its end if negative; refuse one that a sequence lacks."""
    at = lengths + position if position < 0 else torch.full_like(lengths, position)
    if bool(((at < 0) | (at >= lengths)).any()):
        shortest = int(lengths.min())
        raise InputError(
            f"position {position} is outside a sequence of {shortest} tokens; need {-shortest} to {shortest - 1}"
        )
    return at


def _answer_logits(
    logits: Float[Tensor, "batch vocab"], side: Sequence[Sequence[Any]], run: Outcome
) -> Float[Tensor, " batch"]:
    n, d_vocab = logits.shape
    answers = [side[0] if len(side) == 1 else side[row] for row in run.indices]
    ids = list(itertools.chain.from_iterable(answers))
    if min(ids) < 0 or max(ids) >= d_vocab:
        raise InputError(f"token ids {ids} are not all in the vocabulary; need 0 to {d_vocab - 1}")
    if len(ids) == n:
        return logits[torch.arange(n), torch.tensor(ids)]
    return torch.stack([logits[row, list(own)].mean() for row, own in enumerate(answers)])

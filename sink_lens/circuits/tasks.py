"""Tasks with a known answer as batches of tokens, without the pairs that the model gets wrong; see ``pairs``.

The metric is the logit of the right answer minus that of the wrong one, at the last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ..data.described import BosCondition
from ..data.tokens import TokenBatch, from_tensor
from ..errors import InputError
from .config import ReadyTask
from .pairs import pairs_that_fit

if TYPE_CHECKING:
    from ..edits.metrics import Metric
    from ..models.lens import LensModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Pairs as tokens, and how well the model does them."""

    name: str
    clean: TokenBatch
    corrupted: TokenBatch
    correct: tuple[int, ...]
    incorrect: tuple[int, ...]
    templates: tuple[str, ...]
    """Template of each pair."""
    n_tried: int
    """Pairs whose tokens fit."""
    n_answered: int
    """Pairs among them whose right answer has the larger logit."""

    @property
    def metric(self) -> "Metric":
        """The logit of the right answer minus that of the wrong one, at the last token."""
        from ..edits.metrics import logit_difference

        return logit_difference(self.correct, self.incorrect)

    @property
    def sentence(self) -> str:
        """Return how well the model does the task."""
        share = self.n_answered / self.n_tried if self.n_tried else float("nan")
        return (
            f"{self.name}: the model prefers the right answer in {self.n_answered} of {self.n_tried} prompts "
            f"({share:.0%}); {self.clean.n_sequences} of these are used"
        )


def task_of(
    lens: "LensModel",
    name: Literal[ReadyTask, "file"],
    *,
    pairs: int = 128,
    generator: np.random.Generator,
    file: str | Path | None = None,
    bos: BosCondition = "auto",
    least: float = 0.5,
) -> Task:
    """Make the pairs of a task, and keep those that the model gets right.

    Args:
        lens: the model.
        name: one that is ready, or ``file``.
        pairs: number of pairs.
        generator: draws names, nouns and tokens.
        file: JSON lines with clean, corrupted, correct, incorrect and, if you like, template.
        bos: BOS condition for texts.
        least: smallest share of prompts that the model must get right.

    Raises:
        InputError: no pair whose tokens fit, or a task that the model does not do.
    """
    from ..edits.metrics import evaluate
    from ..engine.forward import run_with

    if lens.tokenizer is None:
        raise InputError(f"{lens.name} has no tokenizer; need one for the task {name!r}; circuits.find takes token ids")
    kept = pairs_that_fit(
        name, lens.tokenizer, d_vocab=lens.d_vocab, pairs=pairs, generator=generator, file=file, bos=bos
    )
    if not kept:
        raise InputError(
            f"with the tokenizer of {lens.name}, no pair of {name!r} has prompts of equal length and answers of "
            "one token; need another task, or a file of pairs"
        )
    whole = _batched(name, kept)
    values = evaluate(whole.metric, run_with(lens, whole.clean, layers=(0,), loss=False, logits=True))
    right = (values > 0).nonzero()[:, 0].tolist()
    if len(right) < max(1, least * len(kept)):
        raise InputError(
            f"{lens.name} prefers the right answer in {len(right)} of {len(kept)} prompts of {name!r}; need at "
            f"least {least:.0%}, because a circuit cannot explain what a model does not do. Choose another task or "
            "model"
        )
    chosen = [kept[row] for row in right[:pairs]]
    return replace(_batched(name, chosen), n_tried=len(kept), n_answered=len(right))


def _batched(name: str, kept: Sequence[tuple[list[int], list[int], int, int, str]]) -> Task:
    """The task with its prompts as batches."""
    lengths = torch.tensor([len(one[0]) for one in kept])

    def batch(which: int) -> TokenBatch:
        """All clean, or all corrupted, prompts."""
        tokens: Tensor = torch.zeros(len(kept), int(lengths.max()), dtype=torch.int64)
        for row, one in enumerate(kept):
            ids = one[which]
            assert isinstance(ids, list)
            tokens[row, : len(ids)] = torch.tensor(ids)
        return from_tensor(tokens, lengths=lengths)

    return Task(
        name=name,
        clean=batch(0),
        corrupted=batch(1),
        correct=tuple(one[2] for one in kept),
        incorrect=tuple(one[3] for one in kept),
        templates=tuple(one[4] for one in kept),
        n_tried=len(kept),
        n_answered=0,
    )

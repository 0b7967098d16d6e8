"""Tasks with a known answer as batches of tokens, without the pairs that the model gets wrong; see ``pairs``.

If there are several right or wrong answers, the mean of their logits counts, as in auto-circuit.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import binom
from torch.nn.utils.rnn import pad_sequence

from ..configuration import make_config
from ..data.corpora import bundled_text
from ..data.described import BosCondition
from ..data.tokens import TokenBatch, from_tensor, from_text
from ..edits.metrics import Metric, evaluate, logit_difference
from ..engine.forward import run_with
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..signatures import takes
from ..stats import SURE
from .config import OF_A_CHOICE, OF_A_RUN, CircuitConfig, ReadyTask
from .pairs import TokenPair, make_token_pairs

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 20
_A_PASS = 32
"""Prompts whose logits are kept at once."""
_UNREAD = {*OF_A_RUN, *OF_A_CHOICE, "sink_position", "ablation", "freeze", "neurons"} - {
    "pairs_file",
    "answers_as",
    "pairs",
}
"""Fields that the making of pairs does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The pairs of a task as token batches with answers."""

    name: str
    clean: TokenBatch
    corrupted: TokenBatch
    correct: tuple[tuple[int, ...], ...]
    incorrect: tuple[tuple[int, ...], ...]
    templates: tuple[str, ...]
    spans: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Span -> its positions in each pair."""
    n_tried: int
    """Pairs whose tokens fit."""
    n_answered: int
    """Those of them whose right answer has the larger logit."""

    @property
    def sha256(self) -> str:
        """Hash of the answers, templates and spans."""
        held = self.correct, self.incorrect, self.templates, sorted(self.spans.items())
        return sha256(repr(held).encode()).hexdigest()

    @property
    def metric(self) -> Metric:
        """The mean logit of the right answers minus that of the wrong ones, at the last token."""
        return logit_difference(self.correct, self.incorrect)

    @property
    def sentence(self) -> str:
        """A sentence on the prompts in which the model prefers the right answer."""
        share = self.n_answered / self.n_tried if self.n_tried else np.nan
        return (
            f"{self.name}: the model prefers the right answer in {self.n_answered} of {self.n_tried} prompts "
            f"({share:.0%}); {self.clean.n_sequences} of these are used"
        )


@dataclass(frozen=True, slots=True)
class MetricOfTask:
    """A function of a task that returns its metric, for ``--metric MODULE:FUNCTION``; written above it as decorator."""

    function: Callable[[Task], Metric | Callable[..., Any]]


def make_task(lens: LensModel, config: CircuitConfig) -> Task:
    if config.task != "text":
        return task_of(lens, config=config)
    if lens.tokenizer is None:
        raise InputError(
            f"{lens.name} has no tokenizer; need one to read text, or a task 'file' of token ids"
        )
    tokens = from_text(
        bundled_text(),
        lens.tokenizer,
        name="moby_dick",
        sequences=config.pairs,
        length=config.length,
        bos=config.bos,
    )
    return Task(
        name="text",
        clean=tokens,
        corrupted=tokens,
        correct=(),
        incorrect=(),
        templates=("",) * tokens.n_sequences,
        n_tried=tokens.n_sequences,
        n_answered=tokens.n_sequences,
    )


@takes(CircuitConfig, leave_out=_UNREAD)
def task_of(
    model: ModelLike,
    task: Literal[ReadyTask, "file"] | None = None,
    *,
    generator: np.random.Generator | None = None,
    least: float = 0.5,
    config: CircuitConfig | None = None,
    **fields: Any,
) -> Task:
    """Make the pairs of a task, and keep those that the model gets right.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        task: one that is ready, or ``file``; the configuration's if None.
        generator: draws names, nouns and tokens; one of the configuration's seed if None.
        least: smallest share of prompts that the model must get right. If it gets some wrong, chance must give as many
            right ones in at most 1% of draws; 0 drops both limits.
        config: the number of pairs, a file of them, spans of its columns, BOS; the default one if None.
        **fields: fields of ``CircuitConfig``, such as ``pairs=64``; they win over those of ``config``.

    Raises:
        InputError: no pair whose tokens fit, or a task that the model does not do, or not better than chance.
    """
    named = {} if task is None else {"task": task}
    config = make_config(CircuitConfig, config, fields | named, where="circuits.task")
    name, lens = config.task, as_lens(model)
    if lens.tokenizer is None:
        raise InputError(
            f"{lens.name} has no tokenizer; need one for the task {name!r}; circuits.find takes token ids"
        )
    generator = np.random.default_rng([config.seed, 0]) if generator is None else generator
    kept = make_token_pairs(config, lens.tokenizer, d_vocab=lens.d_vocab, generator=generator)
    if not kept:
        raise InputError(
            f"with the tokenizer of {lens.name}, no pair of {name!r} has prompts of equal length and answers of "
            "one token; need another task, or a file of pairs"
        )
    whole, right = _task_of_pairs(name, kept, lens=lens, bos=config.bos), list[int]()
    for start in range(0, len(kept), step := config.batch_size or _A_PASS):
        rows = slice(start, min(start + step, len(kept)))
        outcome = run_with(
            lens, whole.clean[rows], layers=(0,), loss=False, logits=True, progress=False
        )
        values = evaluate(whole.metric, replace(outcome, sequences=rows))
        right += (start + (values > 0).nonzero()[:, 0]).tolist()
    if name == "file" and (wrong := sorted(set(range(len(kept))) - set(right))):
        named = ", ".join(str(kept[row].number) for row in wrong[:_MOST_NAMED])
        more = f" and {len(wrong) - _MOST_NAMED} more" * (len(wrong) > _MOST_NAMED)
        _LOG.warning(
            "%s prefers the wrong answer in %d of %d pairs of %s, which are left out: pairs %s%s",
            lens.name,
            len(wrong),
            len(kept),
            config.pairs_file,
            named,
            more,
        )
    said = (
        f"{lens.name} prefers the right answer in {len(right)} of {len(kept)} prompts of {name!r}"
    )
    if len(right) < max(1, least * len(kept)):
        raise InputError(
            f"{said}; need at least {least:.0%}, because a circuit cannot explain what a model does not do. Choose "
            "another task or model"
        )
    chance = binom.sf(len(right) - 1, len(kept), 0.5)
    if least and len(right) < len(kept) and chance > SURE:
        raise InputError(
            f"{said}, and chance gives as many in {chance:.1%} of draws; need at most {SURE:.0%}, because pairs that a "
            "model gets right by chance have no circuit. Give more pairs, or other ones"
        )
    chosen = [kept[row] for row in right[: config.pairs]]
    found = _task_of_pairs(name, chosen, lens=lens, bos=config.bos)
    return replace(found, n_tried=len(kept), n_answered=len(right))


def _task_of_pairs(
    name: str, kept: Sequence[TokenPair], *, lens: LensModel, bos: BosCondition
) -> Task:
    lengths = torch.tensor([len(one.clean) for one in kept])

    def make_batch(prompts: Sequence[list[int]]) -> TokenBatch:
        tokens = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)
        return replace(
            from_tensor(tokens, lengths=lengths, tokenizer=lens.tokenizer), bos_condition=bos
        )

    return Task(
        name=name,
        clean=make_batch([one.clean for one in kept]),
        corrupted=make_batch([one.corrupted for one in kept]),
        correct=tuple(one.correct for one in kept),
        incorrect=tuple(one.incorrect for one in kept),
        templates=tuple(one.template for one in kept),
        spans={name: tuple(one.spans[name] for one in kept) for name in kept[0].spans},
        n_tried=len(kept),
        n_answered=0,
    )

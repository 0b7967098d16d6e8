"""Metrics of a run: one number per sequence, used to judge patches and edits.

A metric declares the parts of an ``Outcome`` that it reads, and a sweep computes only those. A metric of attention at
layer 3 ends every run at that layer; a metric of logits runs all layers. Every built-in metric is differentiable, as
attribution patching requires. Negative positions count back from the last real token of each sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..arguments import check_calls, value_in_words
from ..data.token_ids import answer_id
from ..data.tokens import TokenBatch
from ..edits.outcome import Outcome
from ..errors import InputError, note_whose_function_failed
from ..measures.dimensions import dominance_ratio
from ..models.lens import LensModel
from ..models.sites import SITES, site_of
from ..text import as_ranges

Token = int | str
"""A token by its id, or by its text."""
Answers = Token | Sequence[Token | Sequence[Token]]
"""A token, or one for each sequence, or several for each."""

__all__ = ["Metric", "as_metric", "dominance", "evaluate", "kl_to", "logit_difference", "loss", "norm", "sink_mass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of a run, and the parts of the run that it reads."""

    name: str
    function: Callable[[Outcome], Any]
    """Function from an Outcome to one number per sequence, or to a single number for all sequences."""
    unit: str = ""
    positions: tuple[int, ...] = (0,)
    """Positions whose attention and residual stream the metric reads."""
    layers: tuple[int, ...] | None = None
    """Layers at which the metric reads attention, stream and sites; None means all, () means none."""
    sites: tuple[str, ...] = ()
    """Sites whose tensors the metric reads."""
    loss: bool = False
    """True if the metric reads the loss."""
    logits: bool = False
    """True if the metric reads the logits."""
    state: bool = True
    """True if the metric reads the stream at the positions; its last layer must then be run to the end."""
    scored: int | None = None
    """The single position at which the metric reads logits; None means every position."""
    on: "Callable[[TokenBatch], Metric] | None" = None
    """Makes the metric for some sequences, if it hangs on their tokens, as the token of an answer does."""
    answers: tuple[tuple[int | tuple[int, ...], ...], ...] = ()
    """The tokens that texts of answers are behind these sequences."""

    def read_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the layers that the metric reads in a model with ``n_layers``."""
        return tuple(range(n_layers)) if self.layers is None else self.layers

    @property
    def reads_past_layers(self) -> bool:
        """True if the metric reads anything after the last layer, so that every pass must go to the end."""
        return self.loss or self.logits or any(not SITES[site].per_layer for site in self.sites)


@check_calls
def sink_mass(sink_position: int = 0, *, layers: Sequence[int] | None = None) -> Metric:
    """Mean attention to ``sink_position`` over the queries after it, the heads and ``layers`` (None: all); in [0, 1].

    In a layer with a sliding window only the queries whose window reaches the position count.
    """
    if layers is not None and len(layers) == 0:
        raise InputError("sink mass was requested for no layers; need at least one, or None for all")
    chosen = None if layers is None else tuple(sorted({int(layer) for layer in layers}))
    return Metric(
        name=f"sink mass at position {sink_position}" + ("" if chosen is None else f", layers {as_ranges(chosen)}"),
        function=lambda run: run.mass_at(sink_position, layers=chosen),
        positions=(sink_position,),
        layers=chosen,
        state=False,
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
    """Logit of one token minus that of another at a position: ``logit_difference(" Paris", " Madrid", tokenizer)``.

    Args:
        correct: the token whose logit counts positively, an id or the text of one token, or one for each sequence. If
            a sequence has a list of several, the mean of their logits counts, as in auto-circuit.
        incorrect: the token whose logit is subtracted, likewise.
        tokenizer: reads the texts; ids need none. A text is the token that it is behind the sequence's own tokens.
        position: the position at which the next token is predicted.
        prompt: the text behind which texts are read, or one for each sequence; None takes the sequences of the sweep,
            patch or circuit. ``evaluate`` on an outcome needs it.

    Raises:
        InputError: a text is not one token behind the prompt, or there is no tokenizer to read it.
    """
    both = correct, incorrect
    every = [answer for one in both for answers in _as_list(one) for answer in _as_list(answers)]
    for answer in every:
        if isinstance(answer, int) or tokenizer is None:
            answer_id(answer, (), tokenizer)
    if any(not _as_list(answers) for one in both for answers in _as_list(one)):
        raise InputError("a sequence has no right, or no wrong, answer; need at least one of each")
    if any(isinstance(answer, str) for answer in every):
        if prompt is None:
            return _logit_difference_of_texts(both, tokenizer, position=position)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        return _logit_difference_after_prompts(both, prompts, tokenizer, position=position)
    plus, minus = (one if isinstance(one, int) else [[*map(int, _as_list(each))] for each in one] for one in both)

    def function(run: Outcome) -> Tensor:
        found = run.logits_at(positions_from_start(run.valid.sum(1), position)).float()
        return _answer_logits(found, plus, run) - _answer_logits(found, minus, run)

    return Metric(name="logit difference", function=function, unit="logits", layers=(), logits=True, scored=position)


def _as_list(given: Any) -> list[Any]:
    """Return a single id or text as a list of one, and several as a list."""
    return [given] if isinstance(given, str | int) else list(given)


def _logit_difference_of_texts(both: Sequence[Answers], tokenizer: Any, *, position: int) -> Metric:
    """Make the logit difference at ``position`` of answers that are texts; ``both`` are the right and wrong ones.

    The tokens of a text depend on the text before it. ``tokenizer`` reads the texts when the sequences are known.
    """

    def unread(run: Outcome) -> Tensor:
        raise InputError(
            "a logit difference of texts was read of an outcome, which has no prompt; need "
            "logit_difference(..., prompt=TEXT), or token ids"
        )

    def on(tokens: TokenBatch) -> Metric:
        ends = [n + position + 1 if position < 0 else min(n, position + 1) for n in tokens.lengths.tolist()]
        prompts = [row[: max(0, end)].tolist() for row, end in zip(tokens.tokens, ends, strict=True)]
        return _logit_difference_after_prompts(both, prompts, tokenizer, position=position)

    found = {"unit": "logits", "layers": (), "logits": True, "scored": position}
    return Metric(name="logit difference", function=unread, on=on, **found)


def _logit_difference_after_prompts(
    both: Sequence[Answers], prompts: Sequence[str | list[int]], tokenizer: Any, *, position: int
) -> Metric:
    """Make the logit difference of the answers ``both`` at ``position``; texts are read as they continue a prompt."""
    n = max([len(prompts), *(len(one) for one in both if not isinstance(one, str | int))])
    known: dict[tuple[Any, ...], int] = {}
    answers = []
    for one in both:
        given = [one] * n if isinstance(one, str | int) else list(one)
        behind = list(prompts) * n if len(prompts) == 1 else list(prompts)
        if len(given) != n or len(behind) < n:
            raise InputError(f"{len(given)} answers were given for {len(prompts)} prompts; need one, or one for each")
        ids = []
        for several, prompt in zip(given, behind, strict=False):
            own = []
            for answer in _as_list(several):
                key = (answer, prompt if isinstance(prompt, str) else tuple(prompt))
                known[key] = known[key] if key in known else answer_id(answer, prompt, tokenizer)
                own.append(known[key])
            ids.append(own[0] if isinstance(several, str | int) else tuple(own))
        answers.append(tuple(ids))
    ids = [found[0] if len(set(found)) == 1 and isinstance(found[0], int) else found for found in answers]
    made = logit_difference(*ids, position=position)
    if all(isinstance(one, int) for one in ids):
        names = [str(tokenizer.convert_ids_to_tokens(one)) for one in ids]
        made = replace(made, name=f"{made.name} ({names[0]} − {names[1]})")
    return replace(made, answers=tuple(answers))


def metric_for_tokens(metric: Any, *batches: TokenBatch) -> Any:
    """Return the metric with texts of answers read as tokens behind ``batches``; refuse texts whose tokens differ."""
    if not isinstance(metric, Metric) or metric.on is None:
        return metric
    first, *others = (metric.on(batch) for batch in batches)
    if any(one.answers != first.answers for one in others):
        raise InputError(
            "the text of an answer is one token behind clean prompts, another behind corrupted ones; give ids"
        )
    return first


@check_calls
def loss() -> Metric:
    """Mean next-token loss of each sequence, in nats.

    Its targets are the run's own tokens. Clean and corrupted tokens differ, so their targets differ too: patching
    everything reproduces the predictions of the other run, but not its loss. ``kl_to`` and ``logit_difference`` do not
    have this problem.
    """

    def function(run: Outcome) -> Tensor:
        assert run.loss is not None
        return run.loss

    return Metric(name="loss", function=function, unit="nats", layers=(), loss=True)


@check_calls
def kl_to(logits: Float[Tensor, "batch position vocab"]) -> Metric:
    """KL divergence between the given predictions and those of the run, KL(given || run), mean over tokens, in nats.

    Args:
        logits: logits of the run to compare with, on the same sequences: ``run_with(..., logits=True).logits``.
    """
    given = _log_probabilities(logits.detach().float().cpu())

    def function(run: Outcome) -> Tensor:
        assert run.logits is not None
        found = _log_probabilities(run.logits.float())
        wanted = given[run.sequences]
        if found.shape != wanted.shape:
            raise InputError(
                f"the logits to compare with have the shape {tuple(wanted.shape)}, those of the run "
                f"{tuple(found.shape)}; need logits of the same sequences"
            )
        divergence = (wanted.exp() * (wanted - found)).sum(-1)
        return torch.where(run.valid, divergence, 0.0).sum(1) / run.valid.sum(1)

    return Metric(name="KL divergence", function=function, unit="nats", layers=(), logits=True)


@check_calls
def norm(sink_position: int = 0, *, layer: int, site: str = "resid_post") -> Metric:
    """Euclidean norm of a site at ``sink_position`` in ``layer``; if the site has heads, over all heads together.

    Raises:
        InputError: the site has no axis of token positions, such as ``pattern``, or comes after the layers.
    """
    fit = [name for name, one in SITES.items() if one.axes.startswith("batch position") and one.per_layer]
    if site not in fit:
        raise InputError(f"there is no norm of a position at {site!r}; need one of {', '.join(fit)}")

    def function(run: Outcome) -> Tensor:
        _refuse_padding(run, sink_position)
        return run.tensors[site, layer][:, sink_position].flatten(1).float().norm(dim=-1)

    return Metric(
        name=f"norm of {site} at position {sink_position}, layer {layer}",
        function=function,
        positions=(sink_position,),
        layers=(layer,),
        sites=(site,),
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
    )


def as_metric(metric: Any, *, lens: LensModel, n_positions: int) -> Metric:
    """Check a metric and return it; a plain function becomes a metric that gets the run's logits or its ``Outcome``.

    A function whose parameter is called ``logits``, or annotated as a tensor, gets the logits as in TransformerLens,
    ``batch position vocab``; any other gets an ``Outcome`` with position 0 of all layers, the loss and the logits.

    Raises:
        InputError: ``metric`` is neither a metric nor a function, or it reads layers or positions that do not exist.
        SiteError: the metric reads a site that the family lacks.
    """
    if not isinstance(metric, Metric):
        if not callable(metric):
            raise InputError(
                f"the metric is {type(metric).__name__}; need a Metric, as sink_mass(0), or a function of an Outcome"
            )
        name = getattr(metric, "__name__", "metric")
        if takes_logits(metric):
            return Metric(name=name, function=wraps(metric)(lambda run: metric(run.logits)), layers=(), logits=True)
        return Metric(name=name, function=_add_note_on_logits(metric, name), loss=True, logits=True)
    for layer in metric.layers or ():
        if not 0 <= layer < lens.n_layers:
            raise InputError(f"{metric.name} reads layer {layer}; need 0 to {lens.n_layers - 1}")
    for position in metric.positions:
        if not 0 <= position < n_positions:
            raise InputError(f"{metric.name} reads position {position}; need 0 to {n_positions - 1}")
    if not metric.positions:
        raise InputError(f"{metric.name} names no position; need at least one, such as positions=(0,)")
    for site in metric.sites:
        site_of(site, family=lens.family)
    if metric.layers == () and not metric.reads_past_layers:
        raise InputError(
            f"{metric.name} reads no layers, no loss and no logits; need something that a patch can change"
        )
    return metric


def _add_note_on_logits(function: Callable[..., Any], name: str) -> Callable[[Outcome], Any]:
    """Wrap a user's metric ``name``: an error on an ``Outcome`` gets a note on functions of logits.

    The note says that such a function needs a parameter called ``logits``.
    """

    @wraps(function)
    def told(run: Outcome) -> Any:
        try:
            return function(run)
        except (TypeError, AttributeError) as error:
            if "Outcome" in str(error):
                error.add_note(
                    f"the metric {name} was given an Outcome; a function of logits needs a parameter called logits: "
                    f"def {name}(logits). An Outcome has .logits, .loss and .mass_at(position)"
                )
            raise

    return told


def takes_logits(function: Callable[..., Any]) -> bool:
    """Check whether a function's first parameter is named after logits or annotated as a tensor."""
    try:
        first = next(iter(signature(function).parameters.values()), None)
    except ValueError:  # a built-in function without a signature
        return False
    return first is not None and ("logits" in first.name or "Tensor" in str(first.annotation))


def evaluate(metric: Metric, run: Outcome) -> Float[Tensor, " sample"]:
    """Compute a metric of a run: one number per sequence, or a single number for all sequences.

    Raises:
        InputError: the metric returned something else, or read padding.
    """
    if not isinstance(metric, Metric) or not isinstance(run, Outcome):
        raise InputError(
            f"evaluate was given {value_in_words(metric)} and {value_in_words(run)}; need a Metric and an Outcome of "
            "run_with"
        )
    held = (run.valid, run.mass, run.state, run.loss, run.logits, run.token_loss, *run.tensors.values())
    with note_whose_function_failed(f"the metric {metric.name!r}", given=(one for one in held if one is not None)):
        found = metric.function(run)
    n = run.valid.shape[0]
    if isinstance(found, float | int):
        found = torch.tensor(float(found), dtype=torch.float32)
    if not isinstance(found, Tensor) or tuple(found.shape) not in ((), (n,)) or found.is_complex():
        gave = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InputError(
            f"the metric {metric.name!r} gave {gave} for {n} sequences; need one number per sequence, shape "
            f"({n},), or a single number. Take the mean over the other axes"
        )
    if _reads_padding(metric, run, found=found):
        shortest, longest = int(run.valid.sum(1).min()), run.valid.shape[1]  # of a single row, the longest of others
        raise InputError(
            f"the metric {metric.name!r} reads padding: its sequences have {shortest} to {longest} tokens, and behind "
            "the end of a shorter one logits and activations mean nothing. Need real tokens alone: "
            "logit_difference(..., position=-1), or in a function of an Outcome run.logits_at(run.valid.sum(1) - 1) "
            "for the last token of each, or sequences of one length"
        )
    return found.float().reshape(-1)


def _reads_padding(metric: Metric, run: Outcome, *, found: Tensor) -> bool:
    """Check whether a user's metric differs from ``found`` if logits and activations at padding are negated."""
    if str(getattr(metric.function, "__module__", "")).startswith("sink_lens.") or bool(run.valid.all()):
        return False

    def negated(values: Tensor, real: Tensor) -> Tensor:
        values = values.detach()
        return torch.where(real.reshape(*real.shape, *[1] * (values.ndim - 2)), values, -values)

    logits, scored = run.logits, slice(None) if run.scored is None else list(run.scored)
    other = replace(
        run,
        logits=None if logits is None else negated(logits, run.valid[:, scored]),
        tensors={
            (site, layer): negated(one, run.valid) if SITES[site].axes.startswith("batch position") else one
            for (site, layer), one in run.tensors.items()
        },
    )
    with torch.no_grad():
        again = torch.as_tensor(metric.function(other), dtype=found.dtype)
    return not torch.equal(again.nan_to_num(), found.detach().nan_to_num())


def _refuse_padding(run: Outcome, position: int) -> None:
    """Raise an error if the position is padding in a sequence of the run."""
    if not bool(run.valid[:, position].all()):
        raise InputError(f"position {position} is padding in some sequences; need a position that all of them have")


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits - logits.logsumexp(-1, keepdim=True)  # log_softmax is 5e-5 off on a CPU with 262,144 tokens


def positions_from_start(lengths: Int[Tensor, " batch"], position: int) -> Int[Tensor, " batch"]:
    """Return the index of ``position`` in each sequence, from its end if negative; refuse a sequence that lacks it."""
    at = lengths + position if position < 0 else torch.full_like(lengths, position)
    if bool((at < 0).any()) or bool((at >= lengths).any()):
        shortest = int(lengths.min())
        raise InputError(
            f"position {position} is outside a sequence of {shortest} tokens; need {-shortest} to {shortest - 1}"
        )
    return at


def _answer_logits(
    logits: Float[Tensor, "batch vocab"], given: int | Sequence[Sequence[int]], run: Outcome
) -> Float[Tensor, " batch"]:
    """Return the logit of each sequence's answer: ``given`` is one id, or for each several, averaged."""
    n, d_vocab = logits.shape
    answers = [[given]] * n if isinstance(given, int) else list(given)[run.sequences]
    ids = [one for own in answers for one in own]
    if len(answers) != n:
        raise InputError(f"{len(answers)} token ids were given for {n} sequences; need one, or one for each")
    if min(ids) < 0 or max(ids) >= d_vocab:
        raise InputError(f"token ids {ids} are not all in the vocabulary; need 0 to {d_vocab - 1}")
    if len(ids) == n:
        return logits[torch.arange(n), torch.tensor(ids)]
    return torch.stack([logits[row, list(own)].mean() for row, own in enumerate(answers)])

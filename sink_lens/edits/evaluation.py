"""A metric of a run: what it reads, and how its numbers are computed, one per sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..arguments import check_calls, value_in_words
from ..data.tokens import TokenBatch, positions_in_all, refuse_integer_positions
from ..errors import InputError, first_line_of_error, note_whose_function_failed
from ..models.lens import LensModel
from ..models.sites import SITES, site_of
from .outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Metric:
    """A metric of a run, and the parts of the run that it reads."""

    name: str
    function: Callable[[Outcome], Any]
    """Gives one number per sequence; with ``whole_batch``, one for all of them."""
    unit: str = ""
    positions: tuple[int, ...] = (0,)
    """Those whose attention and residual stream the metric reads."""
    layers: tuple[int, ...] | None = None
    """Those of attention, stream and sites; None means all, () means none."""
    sites: tuple[str, ...] = ()
    """Those whose tensors the metric reads."""
    loss: bool = False
    logits: bool = False
    state: bool = True
    """True if the stream is read at the positions; the last layer must then be run to the end."""
    scored: int | None = None
    """The single position at which logits are read; None means every position."""
    padded: bool = False
    """True if the function reads sequences of several lengths, by ``run.valid``; else it gets those of one length."""
    whole_batch: bool = False
    """The function reads all sequences at once."""
    n_sequences: int | None = None
    """That of the sequences of which the metric has data of their own, such as answers."""
    version: str = ""
    """A text to change when the function computes something else and its source does not say so: a run folder is
    continued only under the same one.
    """
    on: "Callable[[Sequence[TokenBatch], PreTrainedTokenizerBase | None], Metric] | None" = None
    """Makes the metric for the sequences of a run, or of two, if it hangs on their tokens, as texts of answers do."""

    def __repr__(self) -> str:
        return f"Metric({self.name!r}" + f", in {self.unit}" * bool(self.unit) + ")"

    def read_layers(self, n_layers: int) -> tuple[int, ...]:
        return tuple(range(n_layers)) if self.layers is None else self.layers

    @property
    def reads_past_layers(self) -> bool:
        """True if every pass must go to the end."""
        return self.loss or self.logits or any(not SITES[site].per_layer for site in self.sites)


@check_calls
def on_logits(function: Callable[..., Any], /, **by_sequence: Any) -> Metric:
    """Make a metric of a function of the logits, ``batch position vocab``, of sequences of one length.

    The function gives one number per sequence. What hangs on the sequence is given beside it, with an entry for each,
    and is cut as the sequences are: ``on_logits(f, answers=ids)`` calls ``f(logits, answers=...)``. A plain function
    that is given as a metric is ``on_logits(function)``.

    Raises:
        InputError: the data have different numbers of entries.
    """
    held = {name: _as_rows(value) for name, value in by_sequence.items()}
    counts = {len(value) for value in held.values()}
    if len(counts) > 1:
        raise InputError(
            f"{', '.join(held)} have {sorted(counts)} entries; need one for each sequence"
        )

    def of_run(run: Outcome) -> Any:
        rows = run.indices
        return function(
            run.logits,
            **{
                name: value[rows] if isinstance(value, Tensor) else [value[row] for row in rows]
                for name, value in held.items()
            },
        )

    name = getattr(function, "__name__", "metric")
    return Metric(
        name=name, function=of_run, layers=(), logits=True, n_sequences=max(counts, default=None)
    )


def _as_rows(value: Any) -> Any:
    """Return a tensor, or the value itself if its entries are no numbers."""
    try:
        return torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError):
        return value


@check_calls
def on_outcome(
    function: Callable[[Outcome], Any],
    *,
    name: str = "",
    unit: str = "",
    positions: Sequence[int] = (0,),
    layers: Sequence[int] | None = None,
    sites: Sequence[str] = (),
) -> Metric:
    """Make a metric of a function of an ``Outcome`` with sequences of one length, to one number per sequence.

    The outcome has the loss, the logits, and of ``layers`` (None: all) the attention and the stream at ``positions``
    and the tensors of ``sites``. ``name`` is that of the function by default.
    """
    return Metric(
        name=name or getattr(function, "__name__", "metric"),
        function=function,
        unit=unit,
        positions=tuple(positions),
        layers=None if layers is None else tuple(layers),
        sites=tuple(sites),
        loss=True,
        logits=True,
    )


@check_calls
def on_batch(function: Callable[..., Any] | Metric) -> Metric:
    """Make a metric of all sequences of a run at once, which gives one number for them, without an interval.

    The function is of the logits, or ``on_outcome(function)``. If lengths differ, logits and tensors are nan at
    padding.
    """
    metric = function if isinstance(function, Metric) else on_logits(function)
    return replace(metric, whole_batch=True)


def as_metric(metric: Any, model: LensModel, *batches: TokenBatch) -> Metric:
    """Check a metric for the sequences of a run, or of a clean and a corrupted one, and return it.

    A plain function becomes a metric of the logits, and texts of answers the tokens that they are in these sequences.
    """
    if not isinstance(metric, Metric):
        if not callable(metric):
            raise InputError(
                f"the metric is {type(metric).__name__}; need a Metric, as sink_mass(0), or a function of the logits"
            )
        metric = on_logits(metric)
    if metric.on is not None:
        metric = metric.on(batches, model.tokenizer)
    for batch in batches:
        if metric.scored is not None:
            refuse_integer_positions(batch, [metric.scored], of=metric.name)
        # 0, the default, is each text's first token
        if metric.layers != () and metric.positions != (0,):
            positions = positions_in_all(metric.positions, batch, of=metric.name)
            metric = replace(metric, positions=positions)
    n_sequences, n_positions = batches[0].tokens.shape
    _check_n_sequences(metric, n_sequences, whole=True)
    for layer in metric.layers or ():
        if not 0 <= layer < model.n_layers:
            raise InputError(f"{metric.name} reads layer {layer}; need 0 to {model.n_layers - 1}")
    for position in metric.positions:
        if not 0 <= position < n_positions:
            raise InputError(
                f"{metric.name} reads position {position}; need 0 to {n_positions - 1}"
            )
    if not metric.positions:
        raise InputError(
            f"{metric.name} names no position; need at least one, such as positions=(0,)"
        )
    for site in metric.sites:
        site_of(site, family=model.family)
    if metric.layers == () and not metric.reads_past_layers:
        raise InputError(
            f"{metric.name} reads no layers, no loss and no logits; need something that a patch can change"
        )
    return metric


def _check_n_sequences(metric: Metric, n: int, *, whole: bool) -> None:
    own = metric.n_sequences
    if own is not None and (own < n or (whole and own != n)):
        raise InputError(
            f"{metric.name} was given data of {own} sequences and is read of {n}; need one entry for each"
        )


def evaluate(metric: Metric, run: Outcome) -> Float[Tensor, " sample"]:
    """Compute a metric of a run, in float64: one number per sequence, or one for all of a metric of the whole batch.

    A number that is undefined or infinite is nan.

    Raises:
        InputError: the metric returned something else, or has data for another number of sequences.
    """
    if not isinstance(metric, Metric) or not isinstance(run, Outcome):
        raise InputError(
            f"evaluate was given {value_in_words(metric)} and {value_in_words(run)}; need a Metric and an Outcome of "
            "run_with"
        )
    run = run.by_text()
    _check_n_sequences(metric, max(run.indices, default=-1) + 1, whole=run.sequences == slice(None))
    held = (
        run.valid,
        run.mass,
        run.state,
        run.loss,
        run.logits,
        run.token_loss,
        *run.tensors.values(),
    )
    if metric.whole_batch:
        parts = [(slice(None), run.with_nan_at_padding())]
    else:
        parts = [(slice(None), run)] if metric.padded else run.parts_of_one_length()
    with note_whose_function_failed(
        f"the metric {metric.name!r}", given=(one for one in held if one is not None)
    ):
        try:
            given = [metric.function(part) for _, part in parts]
        except Exception as error:
            if not metric.padded:
                error.add_note(
                    f"it got {len(run.valid)} sequences: what belongs to each is given with metrics.on_logits(f, "
                    "answers=ids); a function of an Outcome is metrics.on_outcome(f)"
                )
            raise
    found = [
        _checked_values(one, metric, n=len(part.valid))
        for one, (_, part) in zip(given, parts, strict=True)
    ]
    if len(parts) == 1:
        return found[0]
    order = torch.cat([torch.tensor(rows) for rows, _ in parts])
    return torch.cat(found)[order.argsort()]


def _checked_values(found: Any, metric: Metric, *, n: int) -> Float[Tensor, " sample"]:
    shape = (n,)
    need = f"one number per sequence, shape ({n},). A function of all sequences at once is metrics.on_batch(f)"
    if metric.whole_batch:
        shape, need = (), "one number for all of them"
        if isinstance(found, float | int):
            found = torch.tensor(found, dtype=torch.float64)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or found.is_complex():
        gave = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else type(found).__name__
        )
        raise InputError(f"the metric {metric.name!r} gave {gave} for {n} sequences; need {need}")
    found = found.double().reshape(-1)
    return found.where(found.isfinite(), torch.nan)


@torch.no_grad()  # a metric may have weights of its own
def check_per_sequence(metric: Metric, run: Outcome) -> None:
    """Refuse a metric that gives a sequence of ``run`` another number alone than beside the others, such as a rank."""
    n = len(run.valid)
    if n < 2 or metric.whole_batch:
        return
    together, why = evaluate(metric, run), ""
    try:
        alone = torch.cat([evaluate(metric, run.select([row])) for row in range(n)])
    except Exception as error:  # noqa: BLE001  # a function that needs all sequences may fail in any way
        why = f"alone it fails ({type(error).__name__}: {first_line_of_error(error)})"
    else:
        dtype = torch.float32 if run.logits is None else run.logits.dtype
        largest = 1.0 if run.logits is None else float(run.logits.abs().nan_to_num().amax())
        eps = torch.finfo(dtype).eps
        sizes = torch.stack([together, alone]).nan_to_num().abs().amax(1)
        allowed = max(1e-4, 4 * eps) * float(sizes.amax()) + 8 * eps * max(1.0, largest)
        unlike = (together.isnan() != alone.isnan()) | ((together - alone).abs() > allowed)
        if bool(unlike.any()):
            row = int(unlike.nonzero()[0])
            why = f"sequence {row} has {float(together[row]):.6g} beside the others and {float(alone[row]):.6g} alone"
    if why:
        raise InputError(
            f"the metric {metric.name!r} looks at several sequences at once: {why}; need one number per sequence that "
            "hangs on it alone. Give what belongs to each sequence with metrics.on_logits(f, answers=ids), or one "
            "number for all with metrics.on_batch(f)"
        )

"""``SinkMonitor``: sinks and outliers watched in anybody's training, from the training batch's own forward.

Every ``every`` steps hooks are put on the decoder layers and their attention modules for one forward. The stream is
read as it passes. Each attention module is called once more on the same input without gradients, for a few sequences,
with an attention function that takes query and key and ends the call there. So the model's own forward runs its own
kernels, and nothing that it computes is changed. Where the hooks are not called, as in a compiled model, the model is
called once more on the few sequences instead.
"""

import contextlib
import inspect
import itertools
import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..activations.attention import choose_kernel, log_sum_exp
from ..arguments import check_arguments, check_calls
from ..data.collated import mask_of_tokens
from ..errors import InputError, KernelError, ModelError
from ..measures.attention import row_shares
from ..measures.sink_tokens import sampled_queries
from ..models.families import FAMILIES, family_of_model, sliding_window_of
from ..models.family import Family
from ..models.private_apis import COMPILED, UNCOMPILED, WRAPPED, kernel_of, store_of_processes
from ..models.running import switch_to_eval_mode
from .monitor_alarms import Alarm, Alarms
from .monitor_attention import (
    LENGTHS,
    Seen,
    keeps_documents_apart,
    read_queries_and_keys,
    take_sequences,
    uncached_autocast,
)
from .monitor_documents import Documents, find_documents, mask_without_window
from .monitor_keys import COUNTED_SEQUENCES, PREFIX, KeySums, Reading, Totals
from .monitor_readings import ReadingLog, Readings

_LOGGER = logging.getLogger(__name__)
_UNCOMPILED: Any = torch.compiler.disable  # its type takes no bound method
_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    *LENGTHS,
    "use_cache",
)
"""What the monitor gives the model where it calls it once more."""
_ROWS_A_BLOCK = 256
_PATIENCE = 120.0
"""Seconds to wait for the monitors of other processes before the first reading."""
_READY, _NOTHING, _STOPPED = 1, 0, -1
"""How a process comes to a reading; the lowest of all processes counts for all."""


class SinkMonitor:
    """Watches sinks and outliers in a training loop.

    Use it as a context manager and call ``step()`` after each step of the optimizer::

        with SinkMonitor(model, every=50) as monitor:
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if reading := monitor.step():
                    wandb.log(reading)

    The keys are ``sink_lens.training.monitor_keys.KEYS`` under ``sinks/``. Where documents are packed into rows
    (``position_ids`` that begin again, ``cu_seq_lens_q``, or a block mask), each is read as a sequence of its own;
    if attention crosses them, the keys of first tokens are left out, with a warning. A row that begins with padding is
    read from its first real token. A forward without gradients is passed over. A reading is of the weights before the
    step. If the last step was not read, the end of the ``with`` block reads the last weights on the sequences read
    before, in one process. With several processes, each reads its own share and all must call ``step()``; they get the
    same numbers. From its first hook on the monitor raises nothing: an error of its own is one warning, and the
    training goes on.
    """

    @check_calls
    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        tokens: Int[Tensor, "batch position"] | None = None,
        sequences: int = 4,
        threshold: float = 0.3,
        folder: str | Path | None = None,
        first_step: int = 0,
    ) -> None:
        """Prepare to watch a model; no hook is put on it before the ``with`` block.

        Args:
            model: a Hugging Face decoder of a known family, as it is: wrapped by DDP or FSDP, compiled, or bare.
            every: steps between readings.
            tokens: a small fixed batch without padding to read instead of the training batch.
            sequences: how many of the training batch (of its first forward in a step, on each process) are read;
                documents of two tokens or more in a packed batch. The strongest position needs 16, which are gathered
                over the steps up to a reading.
            threshold: of the sink score, in (0, 1).
            folder: run folder for the readings and alarms, which the first process writes. A training that goes on
                continues it. Where it holds something else, the readings go into a folder beside it, with a warning.
            first_step: the number of the first step, for a training that goes on.

        Raises:
            ModelError: no known family.
            InputError: an option out of its range.
        """
        check_monitor_options(every=every, sequences=sequences, threshold=threshold)
        self.alarms: list[Alarm] = []
        """Alarms of the rules in ``monitor_alarms``; each is a Python warning too."""
        self.stopped = False
        """An error of the monitor's own has ended it."""
        self.compiled = False
        """The model is compiled, though what was given does not show it; saves a graph that is compiled with hooks."""
        # Fixed tokens do not differ from one reading to the next: as many as there are suffice.
        self._rules = Alarms(
            threshold=threshold, fewest_sequences=1 if tokens is not None else COUNTED_SEQUENCES
        )
        self._outer, self._model = model, _unwrap_model(model)
        self._family = _find_family(self._model)
        layers = self._model.get_submodule(self._family.layers)._modules  # a shared one comes twice
        self._layers = [_unwrap_module(one) for one in layers.values() if one is not None]
        top = self._family.attention.partition(".")[0]
        self._attending = [
            at for at, one in enumerate(self._layers) if getattr(one, top, None) is not None
        ]
        self._every, self._tokens, self._sequences = every, tokens, sequences
        self._folder, self._step = None if folder is None else Path(folder), first_step
        self._handles: list[Any] = []
        self._end: Any = None
        self._readings: Readings | ReadingLog = Readings()
        self._sums: KeySums | None = None
        self._inputs: dict[str, Any] | None = None
        self._last_inputs: dict[str, Any] | None = None if tokens is None else {"input_ids": tokens}
        self._labels: tuple[Tensor | None, Any] = None, None
        self._due = self._unread = False
        self._gathered: deque[tuple[int, Totals]] = deque(maxlen=COUNTED_SEQUENCES)
        """(Step, its sums by key) of the latest steps."""
        self._n_gathered = 1
        """Steps whose sequences make a reading's strongest position, its own among them."""
        self._valid: Tensor | None = None
        self._documents: Documents | None = None
        self._apart: bool | None = None
        self._warned: set[str] = set()
        self._all_stopped = False
        self._met = False

    def __enter__(self) -> "SinkMonitor":
        self.open()
        self.attach_hooks()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._unread and self._last_inputs is not None and _n_processes() == 1:
            self.detach_hooks()
            with self._stop_on_error():
                self._due, self._sums = True, KeySums(threshold=self._rules.threshold)
                self._read_again(self._last_inputs)
                self._collect_reading()
        self.close(error)

    def open(self) -> None:
        """Open the run folder, if one was given, and read earlier readings."""
        if self._folder is None or _process_number() > 0:
            return
        parameter = next(self._model.parameters())
        try:
            log = ReadingLog.open(
                self._folder,
                first_step=self._step,
                config={
                    "every": self._every,
                    "sequences": self._sequences,
                    "threshold": self._rules.threshold,
                    "fixed_tokens": self._tokens is not None,
                },
                provenance={
                    "model": self._family.architecture,
                    "dtype": str(parameter.dtype).removeprefix("torch."),
                    "device": parameter.device.type,
                    "processes": _n_processes(),
                    "kernel": kernel_of(self._model.config),
                },
            )
            for step, reading in log.read_before(self._step):
                self.alarms.extend(self._rules.add_reading(reading, step=step))
            self._readings = log
        except Exception as error:  # noqa: BLE001  # the training goes on, and its readings are kept in memory
            self._warn("the readings are kept in memory alone", str(error))

    def close(self, error: BaseException | None = None, *, finished: bool = True) -> None:
        """Take the hooks off, and write the tables.

        ``error`` is what ended the training, if anything did. If it has not ``finished``, the folder stays open for a
        training that goes on.
        """
        self.detach_hooks()
        with self._warn_on_error("the readings are not all written"):
            self._readings.close(error, finished=finished)

    @property
    def steps(self) -> int:
        """Number of steps since the start of the training."""
        return self._step

    def attach_hooks(self, *, last: bool = False) -> None:
        """If a reading is due, or the step is the training's ``last``, put hooks on, or read the fixed ``tokens``."""
        self.detach_hooks()
        self._due, self._sums = last or self._step % self._every == 0, None
        ahead = -self._step % self._every
        if self.stopped or not (self._due or (self._tokens is None and ahead < self._n_gathered)):
            return
        with self._stop_on_error():
            self._sums = KeySums(threshold=self._rules.threshold)
            if self._tokens is not None:  # then they are run through the model now
                self._read_again({"input_ids": self._tokens})
                return
            before = self._guard_hook(self._keep_inputs)
            self._handles.append(
                self._model.register_forward_pre_hook(_UNCOMPILED(before), with_kwargs=True)
            )
            self._end = self._model.register_forward_hook(
                _UNCOMPILED(self._end_forward), always_call=True
            )
            parts = self._outer.modules()
            if not (
                self.compiled
                or any(UNCOMPILED in one._modules or getattr(one, COMPILED) for one in parts)
            ):
                self._hook_layers()

    def step(self) -> dict[str, float] | None:
        """End a training step, after the optimizer's step; return its reading, ``sinks/KEY`` -> number.

        An alarm of the reading is in it as ``sinks/alarm_RULE``: 1. The reading is None at steps between two readings,
        and once the monitor has stopped after an error of its own.
        """
        reading = self.finish()
        self.attach_hooks()
        return reading

    def finish(self) -> dict[str, float] | None:
        """End a step as ``step`` does, but put no hooks on for the next one."""
        self.detach_hooks()
        reading, before = None, len(self.alarms)
        if (self._due or self._step % self._every == 0) and not self._all_stopped:
            with self._stop_on_error():
                reading = self._collect_reading()
        elif self._sums is not None and not self.stopped:
            with self._stop_on_error():
                if not self._sums.without_first and self._is_complete(self._sums):
                    self._sums.sum_values()
                    self._gathered.append((self._step, self._sums.sums_by_key()))
        self._step += 1
        self._unread = reading is None
        if reading is None:
            return None
        named = {
            PREFIX + name + ("" if layer is None else f"/layer_{layer}"): value
            for (name, layer), value in reading.items()
        }
        return named | {f"{PREFIX}alarm_{one.rule}": 1.0 for one in self.alarms[before:]}

    def frame(self) -> pd.DataFrame:
        """Return all readings as a table: step, key, layer (missing for the whole model), value, unit."""
        return self._readings.frame()

    def _collect_reading(self) -> Reading | None:
        state, sums = _STOPPED, self._sums
        self._sums = None
        if not self.stopped:
            with self._stop_on_error():
                if sums is not None and self._is_complete(sums):
                    sums.sum_values()
                    if self._tokens is None and not sums.without_first:
                        own = sums.sums_by_key()
                        for step, one in self._gathered:
                            if step > self._step - self._n_gathered:
                                sums.gather(one)
                        self._gathered.append((self._step, own))
                    state = _READY
                else:
                    found = (
                        "the monitor was not listening"
                        if sums is None
                        else "the model was not called in it"
                    )
                    self._warn(
                        "a reading is left out",
                        f"step {self._step} should have been read, but {found}; need a forward of the given model "
                        "with gradients between two calls of step(), within `with SinkMonitor(model) as monitor:`",
                    )
                    state = _NOTHING
        device = torch.device("cpu")
        if _n_processes() > 1:
            if not (self._met or self._meet_other_processes()):
                return None
            # All act on the lowest of their states, so that none waits for another's numbers.
            if torch.distributed.get_backend() == "nccl":
                device = next(self._model.parameters()).device
            shared = torch.tensor([state], device=device)
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN)
            state = int(shared)
        if state == _STOPPED:
            self.stopped = self._all_stopped = True
        if state != _READY or sums is None:
            return None
        if _n_processes() > 1:
            sums = sums.sum_over_processes(device=device)
        reading = sums.compute_reading(n_layers=len(self._layers))
        raised = self._rules.add_reading(reading, step=self._step)
        self.alarms.extend(raised)
        if sequences := reading.get(("strongest_sequences", None)):
            steps = sum(step > self._step - self._n_gathered for step, _ in self._gathered)
            self._n_gathered = min(
                COUNTED_SEQUENCES, math.ceil(COUNTED_SEQUENCES * steps / sequences)
            )
        for alarm in raised if _process_number() == 0 else ():
            try:
                warnings.warn(alarm.sentence, stacklevel=4)
            except UserWarning:  # where warnings are errors, the training goes on too
                _LOGGER.warning(alarm.sentence)
        with self._warn_on_error("readings wait in memory until they can be written"):
            self._readings.add(self._step, reading, raised)
        return reading

    def _is_complete(self, sums: KeySums) -> bool:
        return sums.is_complete(len(self._layers), attention=self._attending)

    # --- the training goes on

    def _meet_other_processes(self) -> bool:
        """Wait until every process has a monitor at this step; if one has none, stop, and return False.

        A reduction in which a process takes no part would wait for ever. Processes meet in their store, since a
        ``monitored_barrier`` that fails leaves connections that the training cannot use.
        """
        store, about = store_of_processes(), f"sink_lens/monitor/{self._step}/"
        own = f"{about}{_process_number()}"
        try:
            store.set(own, "here")
            store.wait(
                [f"{about}{number}" for number in range(_n_processes())],
                timedelta(seconds=_PATIENCE),
            )
            self._met = True
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                store.delete_key(own)
            self.stopped = self._all_stopped = True
            self._warn(
                "it stops and the training goes on",
                f"after {_PATIENCE:g} seconds not every process had one at step {self._step}; need a monitor in each, "
                "with the same every",
            )
        return self._met

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.stopped = True
            self._warn(
                "it stops and the training goes on",
                f"step {self._step}, {type(error).__name__}: {error}",
            )
            _LOGGER.debug("where the monitor stopped", exc_info=True)

    @contextlib.contextmanager
    def _warn_on_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._warn(what, str(error))

    def _guard_hook(self, hook: Callable[..., None]) -> Callable[..., None]:
        def run_guarded(*given: Any) -> None:
            if not self.stopped:
                with self._stop_on_error():
                    hook(*given)

        return run_guarded

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _LOGGER.warning("the sink monitor: %s (%s)", what, " ".join(why.split()))

    # --- hooks ---

    def detach_hooks(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._end is not None:
            self._end.remove()
            self._end = None
        self._inputs = self._valid = self._documents = self._apart = None
        self._labels = None, None

    def _hook_layers(self) -> None:
        once = iter([-1])

        def add_first_stream(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            if torch.compiler.is_compiling() or self._valid is None:
                return
            if (layer := next(once, None)) is not None:
                self._add_stream(args[0] if args else kwargs["hidden_states"], layer=layer)

        self._handles.append(
            self._layers[0].register_forward_pre_hook(
                self._guard_hook(add_first_stream), with_kwargs=True
            )
        )
        for layer, numbers in _layers_by_module(self._layers, layers=range(len(self._layers))):

            def add_layer_stream(
                module: nn.Module, args: Any, output: Any, numbers: Iterator[int] = numbers
            ) -> None:
                if not torch.compiler.is_compiling():
                    self._add_stream(
                        output[0] if isinstance(output, tuple) else output, layer=next(numbers)
                    )

            self._handles.append(layer.register_forward_hook(self._guard_hook(add_layer_stream)))
        modules = [
            _unwrap_module(self._layers[at].get_submodule(self._family.attention))
            for at in self._attending
        ]
        for module, numbers in _layers_by_module(modules, layers=self._attending):
            after = self._guard_hook(self._make_attention_hook(numbers))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _keep_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.is_grad_enabled():  # an evaluation or a generation
            return
        named = (
            dict(zip(inspect.signature(self._model.forward).parameters, args, strict=False))
            | kwargs
        )
        tokens = named.get("input_ids")
        tokens = named.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise InputError(
                "the forward was given no input_ids and no inputs_embeds; need one of them by name"
            )
        batch = tokens.shape[0]
        found = {name: named[name] for name in _INPUTS if named.get(name) is not None}
        self._set_documents(found, batch=batch, length=tokens.shape[1])
        n = self._sequences if self._documents is None else self._documents.n_rows
        self._inputs = {name: take_sequences(one, n, batch) for name, one in found.items()}
        self._valid = _token_mask(self._inputs, length=tokens.shape[1])
        self._labels = named.get("labels"), named.get("num_items_in_batch")
        if "input_ids" in self._inputs:
            self._last_inputs = self._inputs

    def _set_documents(self, inputs: Mapping[str, Any], *, batch: int, length: int) -> None:
        self._documents = find_documents(inputs, batch=batch, length=length, most=self._sequences)
        if self._documents is not None and not self._documents.n_rows:
            self._documents = None
            self._leave_out_first_tokens("none of them has two tokens")

    def _leave_out_first_tokens(self, why: str) -> None:
        assert self._sums is not None  # the hooks are on while there is a reading
        self._sums.without_first = True
        self._warn(
            "the readings of first tokens, norms and outliers are left out",
            f"documents are packed into the rows of the batch, and {why}; need attention that keeps them apart: a "
            "block mask, a flash kernel, or position_ids that begin again with use_cache=False and no attention_mask",
        )

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        inputs, kept = self._inputs, None
        if inputs is None and not self.stopped:  # no forward of the training
            return
        if self._sums is not None and isinstance(loss := getattr(output, "loss", None), Tensor):
            self._sums.add_loss(loss, *self._labels)
        if (
            output is None
            and self._end is not None
            and next(reversed(self._model._forward_hooks)) != self._end.id
        ):
            # After an error torch goes on over these hooks, and one before the last must not be removed.
            kept, self._end = self._end, None
        self.detach_hooks()
        self._end = kept
        if inputs is not None and output is not None and not self.stopped:
            with self._stop_on_error():
                if self._sums is not None and not self._is_complete(self._sums):
                    self._rerun_forward(inputs, call=self._model.forward)

    def _make_attention_hook(self, numbers: Iterator[int]) -> Callable[..., None]:
        def read_attention(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if not torch.compiler.is_compiling() and self._valid is not None:
                batch = (args[0] if args else kwargs["hidden_states"]).shape[0]
                config = self._model.config
                if self._documents is not None and self._apart is None:
                    kernel = kernel_of(config)
                    self._apart = keeps_documents_apart(
                        self._documents, args, kwargs, kernel=kernel, batch=batch
                    )
                    if not self._apart:
                        self._leave_out_first_tokens("attention crosses them")
                documents = self._documents if self._apart else None
                n, valid = len(self._valid), self._valid if documents is None else documents.valid
                seen = read_queries_and_keys(
                    module, args, kwargs, n=n, batch=batch, config=config, documents=documents
                )
                self._add_attention(seen, layer=next(numbers), valid=valid)

        return read_attention

    def _add_stream(self, h: Tensor, *, layer: int) -> None:
        if self._sums is None or self._valid is None:  # a part of the model was called
            return
        with _without_gradients_or_autocast(h.device):
            h, valid = h.detach()[: len(self._valid)], self._valid
            if self._documents is not None:
                documents = self._documents.to(h.device)
                h, valid = documents.split_states(h), documents.valid
            self._sums.add_state(h, layer=layer, valid=valid.to(h.device, non_blocking=True))

    def _add_attention(
        self, seen: Seen, *, layer: int, valid: Bool[Tensor, "batch position"]
    ) -> None:
        sums = self._sums
        assert sums is not None  # the hooks are on while there is a reading
        score, sink, sigmoid, pattern = seen
        device = score.query.device
        with _without_gradients_or_autocast(device):
            valid = valid.to(device, non_blocking=True)
            length = score.query.shape[2]
            rows = sampled_queries(length).to(device)
            scores = score.query_rows(rows)
            column = score.key_columns((0,))[..., 0]
            if pattern is not None:
                column, logs = pattern[..., 0].float(), pattern[:, :, rows].float().log()
            elif sigmoid:  # the share of what the row sums to
                blocks = torch.arange(length, device=device).split(_ROWS_A_BLOCK)
                total = torch.cat(
                    [score.query_rows(some).float().sigmoid().sum(-1) for some in blocks], dim=2
                )
                column, logs = column.sigmoid() / total, row_shares(scores.sigmoid()).log()
            else:
                try:
                    lse = log_sum_exp(
                        score, kernel=choose_kernel(self._family, device=device), sink=sink
                    )
                except (
                    KernelError
                ):  # the fused kernel does not take this type: the other one is exact too
                    lse = log_sum_exp(score, kernel="eager", sink=sink)
                column, logs = (column - lse).exp_(), scores - lse[:, :, rows, None]
            sums.add_attention(
                layer=layer,
                column=column,
                logs=logs,
                highest=scores.amax(-1),
                row_positions=rows,
                valid=valid,
                reach=sliding_window_of(self._model.config, layer=layer),
            )

    def _read_again(self, inputs: Mapping[str, Any]) -> None:
        inner = self._outer  # not DDP, which would synchronise its buffers
        while name := next((one for one in (UNCOMPILED, "module") if one in inner._modules), None):
            inner = inner.get_submodule(name)
        device = next(self._model.parameters()).device
        given = {
            name: one.to(device) if isinstance(one, Tensor) else one for name, one in inputs.items()
        }
        self._rerun_forward(given, call=inner)

    def _rerun_forward(self, inputs: Mapping[str, Any], *, call: Callable[..., Any]) -> None:
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        assert tokens is not None
        self._set_documents(inputs, batch=tokens.shape[0], length=tokens.shape[1])
        self._valid = _token_mask(inputs, length=tokens.shape[1])
        self._hook_layers()
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                switch_to_eval_mode(self._model),
                torch.no_grad(),
                uncached_autocast(tokens.device),
            ):
                # With a cache, models of transformers take no notice of positions that begin again.
                call(**{**inputs, **({"use_cache": False} if self._documents is None else {})})
        finally:
            self.detach_hooks()


@contextlib.contextmanager
def _without_gradients_or_autocast(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _token_mask(inputs: Mapping[str, Any], *, length: int) -> Bool[Tensor, "batch position"]:
    first = next(iter(inputs.values()))
    mask = mask_without_window(inputs.get("attention_mask"))
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return torch.ones(first.shape[0], length, dtype=torch.bool, device=first.device)
    return mask_of_tokens(mask[:, -length:])


def check_monitor_options(**options: Any) -> None:
    known = list(inspect.signature(SinkMonitor).parameters)[1:]
    if others := sorted(set(options) - set(known)):
        raise InputError(
            f"SinkMonitor has no option {', '.join(others)}; need some of {', '.join(known)}"
        )
    check_arguments(SinkMonitor.__init__, options)
    for name in ("every", "sequences"):
        if options.get(name, 1) < 1:
            raise InputError(f"{name} is {options[name]}; need at least 1")
    if not 0 < options.get("threshold", 0.3) < 1:
        raise InputError(f"threshold is {options['threshold']}; need a number between 0 and 1")


def _layers_by_module(
    modules: Sequence[nn.Module], *, layers: Sequence[int]
) -> Iterator[tuple[nn.Module, Iterator[int]]]:
    """Yield each distinct module with an endless cycle of its layers; ``layers`` is parallel to ``modules``."""
    by_module: dict[nn.Module, list[int]] = {}
    for layer, module in zip(layers, modules, strict=True):
        by_module.setdefault(module, []).append(layer)
    for module, numbers in by_module.items():
        yield module, itertools.cycle(numbers)


def _unwrap_module(module: nn.Module) -> nn.Module:
    while name := next((one for one in WRAPPED if one in module._modules), None):
        module = module.get_submodule(name)
    return module


def _unwrap_model(model: nn.Module) -> PreTrainedModel:
    while not isinstance(model, PreTrainedModel):
        inner = _unwrap_module(model)
        if inner is model:
            inner = model._modules.get("module")  # DDP
        if inner is None and callable(getattr(model, "get_base_model", None)):
            inner = model.get_base_model()  # type: ignore[operator]  # of peft
        if not isinstance(inner, nn.Module) or inner is model:
            raise ModelError(
                f"SinkMonitor was given a {type(model).__name__}; need a Hugging Face model, bare, compiled, or "
                "wrapped by DistributedDataParallel or FSDP"
            )
        model = inner
    return model


def _find_family(model: PreTrainedModel) -> Family:
    names = [one.__name__ for one in type(model).__mro__]
    known = next((name for name in names if name in FAMILIES), names[0])
    if known.startswith("FSDP"):  # fully_shard makes a class of that name
        known = names[1]
    family = family_of_model(known, config=model.config)
    if family.shared_keys:
        raise ModelError(
            f"some layers of {known} attend to keys that another one hands on, and an attention that is called once "
            "more would hand them on again; need a model whose layers have keys of their own"
        )
    return family


def _n_processes() -> int:
    distributed = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if joined else 1


def _process_number() -> int:
    return torch.distributed.get_rank() if _n_processes() > 1 else 0

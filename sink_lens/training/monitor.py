"""``SinkMonitor``: sinks and outliers watched in anybody's training, from the training batch's own forward.

Every ``every`` steps hooks are put on the decoder layers and their attention modules for one forward, and taken off
when it has ended. The stream is read as it passes. For attention, each attention module is called once more on the
same input without gradients, for a few sequences, with an attention function that takes query and key and ends the
call there. So the model's own forward runs its own kernels, and nothing that it computes is changed. Where the hooks
are not called, as in a compiled model, the model is called once more on the few sequences instead.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..activations.attention import Scores, choose_kernel, log_sum_exp
from ..activations.forward import evaluating
from ..errors import InputError, KernelError, ModelError
from ..measures.attention import row_shares
from ..measures.sink_tokens import sampled_queries
from ..models.families import FAMILIES, Family, family_of_model, reach_of
from ..records import RunWriter, create_run, versions
from .monitor_alarms import Alarm, Alarms
from .monitor_attention import Look, Seen, first, query_and_key, uncached_autocast
from .monitor_keys import KEYS, ON_REQUEST, PREFIX, KeySums

__all__ = ["SinkMonitor"]

_LOGGER = logging.getLogger(__name__)
_UNCOMPILED: Any = torch.compiler.disable  # its type takes no bound method
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_SAVED_EVERY = 10
_ROWS_A_BLOCK = 256


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

    The keys are ``sink_lens.training.monitor_keys.KEYS`` under ``sinks/``. A reading is of the weights before the
    step. With several processes, each reads its own share and all must call ``step()``; they get the same numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        tokens: Int[Tensor, "batch position"] | None = None,
        sequences: int = 4,
        threshold: float = 0.3,
        extras: Sequence[str] = (),
        folder: str | Path | None = None,
        first_step: int = 0,
    ) -> None:
        """Attach to a model; nothing is put on it before the ``with``.

        Args:
            model: a Hugging Face decoder of a known family, as it is: wrapped by DDP or FSDP, compiled, or bare.
            every: steps between readings.
            tokens: a small fixed batch without padding to read instead of the training batch.
            sequences: how many sequences of the training batch (of its first forward in a step, on each process) are
                read.
            threshold: of the sink score, in (0, 1).
            extras: keys that are read on request.
            folder: run folder for ``monitor.parquet`` and ``alarms.parquet``, which the first process writes.
            first_step: the number of the first step, for a training that goes on.

        Raises:
            ModelError: no known family.
            InputError: an option out of its range.
        """
        if every < 1 or sequences < 1 or not 0 < threshold < 1:
            raise InputError(
                f"every is {every}, sequences {sequences}, threshold {threshold}; need at least 1, at least 1, and a "
                "number between 0 and 1"
            )
        if unknown := sorted(set(extras) - set(ON_REQUEST)):
            raise InputError(f"extras has {', '.join(unknown)}; need some of {', '.join(ON_REQUEST)}")
        self.readings: list[dict[str, float]] = []
        """Every reading so far, with its ``step``."""
        self.alarms: list[Alarm] = []
        """What the rules of ``monitor_alarms`` have found; each is logged as a warning too."""
        self._rules = Alarms()
        self.compiled = False
        """The model is compiled, though what was given does not show it; saves a graph that is compiled with hooks."""
        self._outer, self._model = model, _unwrapped(model)
        self._family = _family(self._model)
        self._layers = [_bare(one) for one in self._model.get_submodule(self._family.layers).children()]
        self._every, self._tokens, self._sequences = every, tokens, sequences
        self._threshold, self._extras = threshold, frozenset(extras)
        self._folder, self._step = None if folder is None else Path(folder), first_step
        self._handles: list[Any] = []
        self._end: Any = None
        self._stack = contextlib.ExitStack()
        self._writer: RunWriter | None = None
        self._sums: KeySums | None = None
        self._inputs: dict[str, Any] | None = None
        self._valid: Tensor | None = None

    def __enter__(self) -> "SinkMonitor":
        self.open()
        self.arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disarm()
        try:
            self._save()
        finally:
            self._stack.__exit__(kind, error, trace)
            self._stack, self._writer = contextlib.ExitStack(), None

    def open(self) -> None:
        """Open the run folder, where there is to be one; ``with`` does it for a plain loop."""
        if self._folder is not None and _rank() == 0:
            self._writer = self._stack.enter_context(self._run_folder(self._folder))

    @property
    def due(self) -> bool:
        """Whether the step that comes is read."""
        return self._step % self._every == 0

    def arm(self) -> None:
        """Put the hooks on for the next forward, if its step is read; ``step`` does it for a plain loop."""
        self.disarm()
        if not self.due:
            return
        self._sums = KeySums(threshold=self._threshold, extras=self._extras)
        if self._tokens is not None:
            device = next(self._model.parameters()).device
            self._replay({"input_ids": self._tokens.to(device)}, call=_callable(self._outer))
            return
        self._hook(self._model.register_forward_pre_hook(_UNCOMPILED(self._before), with_kwargs=True))
        self._end = self._model.register_forward_hook(_UNCOMPILED(self._after), always_call=True)
        if not (self.compiled or _compiled(self._outer)):
            self._listen()

    def step(self) -> dict[str, float] | None:
        """Say that a step of the optimizer has ended; gives the reading of this step, or None where there is none.

        Raises:
            InputError: the step was to be read and the model was not called in it.
        """
        reading = self.finish()
        self.arm()
        return reading

    def finish(self) -> dict[str, float] | None:
        """End the last step: as ``step``, but no hooks are set for a next one."""
        self.disarm()
        reading = self._collect() if self.due else None
        self._step += 1
        return reading

    def frame(self) -> pd.DataFrame:
        """All readings: step, key, layer (missing for the whole model), value, unit."""
        rows = []
        for reading in self.readings:
            for name, value in reading.items():
                key, _, layer = name.removeprefix(PREFIX).partition("/layer_")
                if key in KEYS:
                    rows.append((int(reading["step"]), key, int(layer) if layer else None, value, KEYS[key].unit))
        types = {"step": "int64", "key": "str", "layer": "Int64", "value": "float64", "unit": "str"}
        return pd.DataFrame(rows, columns=list(types)).astype(types)

    def _collect(self) -> dict[str, float]:
        sums, self._sums = self._sums, None
        n_layers = len(self._layers)
        if sums is None:
            raise InputError(
                f"step {self._step} was to be read and the monitor was not listening; need the loop within "
                "`with SinkMonitor(model) as monitor:`, or monitor.arm() before the step"
            )
        if not sums.complete(range(n_layers)):
            raise InputError(
                f"step {self._step} was to be read and the model was not called in it; need a forward of the model "
                "that was given, between one step() and the next. Give SinkMonitor the model that the loop trains."
            )
        sums = sums.settled()
        if _world() > 1:
            device = torch.device("cpu")
            if torch.distributed.get_backend() == "nccl":
                device = next(self._model.parameters()).device
            sums = sums.reduced(device=device)
        reading = sums.numbers(n_layers=n_layers)
        self.readings.append({"step": float(self._step), **reading})
        raised = self._rules.see(reading, step=self._step)
        self.alarms.extend(raised)
        for alarm in raised if _rank() == 0 else ():
            _LOGGER.warning(alarm.sentence)
        if len(self.readings) % _SAVED_EVERY == 0:
            self._save()
        return reading

    def _save(self) -> None:
        if self._writer is not None:
            self._writer.write_table("monitor", self.frame())
            columns = ["step", "rule", "sentence"]
            rows = [(alarm.step, alarm.rule, alarm.sentence) for alarm in self.alarms]
            types = {"step": "int64", "rule": "str", "sentence": "str"}
            self._writer.write_table("alarms", pd.DataFrame(rows, columns=columns).astype(types))

    def _run_folder(self, folder: Path) -> RunWriter:
        config = {
            "every": self._every,
            "sequences": self._sequences,
            "threshold": self._threshold,
            "extras": sorted(self._extras),
            "fixed_tokens": self._tokens is not None,
        }
        parameter = next(self._model.parameters())
        provenance = {
            "model": self._family.architecture,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
            "processes": _world(),
            "kernel": str(self._model.config._attn_implementation),
            "versions": versions(),
        }
        return create_run(folder, kind="monitor", config=config, provenance=provenance, expects=("monitor", "alarms"))

    # --- hooks ---

    def _hook(self, handle: Any) -> None:
        self._handles.append(handle)

    def disarm(self) -> None:
        """Take the hooks off; ``step`` and the end of a forward do it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._end is not None:
            self._end.remove()
            self._end = None
        self._inputs = self._valid = None

    def _listen(self) -> None:
        """Hooks on the layers and their attention modules."""
        self._hook(self._layers[0].register_forward_pre_hook(self._stream_before(), with_kwargs=True))
        for index, layer in enumerate(self._layers):
            attention = _bare(layer.get_submodule(self._family.attention))
            before, after = self._attention_hooks(index)
            self._hook(attention.register_forward_pre_hook(before, with_kwargs=True))
            # In the reverse order, so that of two monitors the second puts back what it found.
            self._hook(attention.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True))
            self._hook(layer.register_forward_hook(self._stream_after(index)))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the whole model runs: keep its inputs for the few sequences, and see which tokens are real."""
        named = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        tokens = named.get("input_ids")
        tokens = named.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise InputError("the forward was given no input_ids and no inputs_embeds; need one of them by name")
        batch = tokens.shape[0]
        wanted = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
        found = {name: first(named[name], self._sequences, batch) for name in wanted if named.get(name) is not None}
        self._inputs = found
        self._valid = _valid(found, length=tokens.shape[1])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take the hooks off after the whole model ran; call it once more if those of the layers were not called."""
        inputs, seen = self._inputs, self._sums is not None and self._sums.complete(range(len(self._layers)))
        kept = None
        if output is None and next(reversed(self._model._forward_hooks)) != self._end.id:
            # After an error torch goes on over these hooks, and one before the last must not be removed.
            kept, self._end = self._end, None
        self.disarm()
        self._end = kept
        if not seen and inputs is not None and output is not None:
            self._replay(inputs, call=self._model.forward)

    def _stream_before(self) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                self._take_state(args[0] if args else kwargs["hidden_states"], layer=-1)

        return hook

    def _stream_after(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._take_state(output[0] if isinstance(output, tuple) else output, layer=layer)

        return hook

    def _attention_hooks(self, layer: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """To be called before and after an attention module."""
        looks: list[Look] = []

        def take(seen: Seen) -> None:
            self._take_attention(seen, layer=layer)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling() and self._valid is not None:
                looks.append(Look(module, take, n=len(self._valid)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for look in looks:
                look.remove()
                if not look.seen and output is not None and self._valid is not None:
                    batch = (args[0] if args else kwargs["hidden_states"]).shape[0]
                    take(query_and_key(module, args, kwargs, n=len(self._valid), batch=batch))
            looks.clear()

        return before, after

    def _take_state(self, h: Tensor, *, layer: int) -> None:
        assert self._sums is not None  # the hooks are on while there is a reading
        assert self._valid is not None
        with _aside(h.device):
            self._sums.take_state(
                h.detach()[: len(self._valid)], layer=layer, valid=self._valid.to(h.device, non_blocking=True)
            )

    def _take_attention(self, seen: Seen, *, layer: int) -> None:
        sums, valid = self._sums, self._valid
        assert sums is not None  # as above
        assert valid is not None
        score, sink, sigmoid = seen
        device = score.query.device
        with _aside(device):
            valid = valid.to(device, non_blocking=True)
            length = score.query.shape[2]
            lse = None if sigmoid else self._sums_of_rows(score, sink)
            rows = sampled_queries(length).to(device)
            scores = score.block(rows)
            column = score.columns((0,))[..., 0]
            if lse is None:  # the share of what the row sums to
                blocks = torch.arange(length, device=device).split(_ROWS_A_BLOCK)
                total = torch.cat([score.block(some).float().sigmoid().sum(-1) for some in blocks], dim=2)
                column, logs = column.sigmoid() / total, row_shares(scores.sigmoid()).log()
            else:
                column, logs = (column - lse).exp_(), scores - lse[:, :, rows, None]
            sums.take_attention(
                layer=layer,
                column=column,
                logs=logs,
                highest=scores.amax(-1),
                row_positions=rows,
                valid=valid,
                reach=reach_of(self._model.config, layer=layer),
            )

    def _sums_of_rows(self, score: Scores, sink: Tensor | None) -> Tensor:
        kernel = choose_kernel(self._family, device=score.query.device)
        if kernel == "fused":
            with contextlib.suppress(KernelError):  # a kernel that does not take this type: the other one is exact too
                return log_sum_exp(score, kernel="fused", sink=sink)
        return log_sum_exp(score, kernel="eager", sink=sink)

    def _replay(self, inputs: Mapping[str, Any], *, call: Callable[..., Any]) -> None:
        """The reading from one more forward, without gradients, of the few sequences."""
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        assert tokens is not None
        self._valid = _valid(inputs, length=tokens.shape[1])
        self._listen()
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                evaluating(self._model),
                torch.no_grad(),
                uncached_autocast(tokens.device),
            ):
                call(**inputs, use_cache=False)
        finally:
            self.disarm()


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Within it nothing is recorded for gradients, and nothing is computed in a lower precision than it is asked."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _valid(inputs: Mapping[str, Any], *, length: int) -> Bool[Tensor, "batch position"]:
    """Which tokens are real: those of a padding mask; sequences that begin with padding are left out."""
    first = next(iter(inputs.values()))
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return torch.ones(first.shape[0], length, dtype=torch.bool, device=first.device)
    valid = mask[:, -length:].bool()
    return valid & valid[:, :1]


def _bare(module: nn.Module) -> nn.Module:
    """A module without the wrappers of FSDP, checkpointing and compiling."""
    while name := next((one for one in _WRAPPERS if one in module._modules), None):
        module = module.get_submodule(name)
    return module


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model within the wrappers of parallel training, compiling and adapters.

    Raises:
        ModelError: there is none.
    """
    while not isinstance(model, PreTrainedModel):
        inner = _bare(model)
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


def _family(model: PreTrainedModel) -> Family:
    """The row of a model, by its class or one that it derives from."""
    names = [one.__name__ for one in type(model).__mro__]
    known = next((name for name in names if name in FAMILIES), names[0])
    if known.startswith("FSDP"):  # fully_shard makes a class of that name
        known = names[1]
    family = family_of_model(known, config=model.config)
    if family.mixer is not None:
        raise ModelError(f"{known} has layers without attention; need a model that has it in every layer to be watched")
    return family


def _compiled(model: nn.Module) -> bool:
    """Whether some part of the model is compiled, so that hooks within it are not called."""
    return any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in model.modules())


def _callable(model: nn.Module) -> Callable[..., Any]:
    """What to call for a forward of its own: not DDP, which would synchronise its buffers."""
    while name := next((one for one in ("_orig_mod", "module") if one in model._modules), None):
        model = model.get_submodule(name)
    return model


def _world() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if _world() > 1 else 0

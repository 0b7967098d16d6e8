"""Compute the blocks of a sweep on a Ray cluster; the numbers are those of this process, and only ``sweep`` writes."""

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..data.tokens import TokenBatch
from ..engine.cells import Cell
from ..engine.engine import Block, Engine
from ..engine.measured import Measured, resolve_metrics
from ..engine.plan import Plan
from ..errors import InputError, ModelError, first_line_of_error
from ..models.lens import LensModel
from ..models.load import config_hash, load, weights_hash
from .cells import OwnCell, cells_of
from .grid import Grid

_RETRIES = 3
"""Times that Ray restarts a dead worker and repeats its block."""
_ROOM = 1e-4
"""Difference of a metric, relative to its magnitude if that is above 1, that another machine's rounding may make."""

Blocks = Generator[tuple[Block, pd.DataFrame], None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The data that a worker needs to compute any block (some cells on some sequences) of a sweep."""

    model: str
    provenance: Mapping[str, Any]
    """That of the sweep's own model: its hashes and dtype."""
    baseline: Sequence[float] = ()
    """The metrics of its baseline run."""
    tokens: TokenBatch
    what: Grid | tuple[OwnCell, ...]
    metrics: tuple[Measured, ...]
    plan: Plan
    controls: int
    seed: int

    def make_engine(self, lens: LensModel, cells: Sequence[Cell] | None = None) -> Engine:
        if cells is None:
            cells = cells_of(
                self.what, lens, self.tokens, controls=self.controls, seed=self.seed
            ).every
        return Engine(
            lens,
            self.tokens,
            cells,
            resolve_metrics(self.metrics, lens, tokens=self.tokens),
            plan=replace(self.plan, lanes=min(self.plan.lanes, torch.get_num_threads())),
        )

    def other_model_error(self, what: str) -> ModelError:
        return ModelError(
            f"{self.model!r} has other {what} on a worker than in the sweep; need the same. Save the model "
            "(model.plain.save_pretrained, and its tokenizer) where every worker can read it, and load that folder; or "
            "leave engine 'ray' out"
        )


def check_engine(engine: str, *, workers: int | None) -> None:
    """Refuse an engine that cannot compute the sweep, before anything is written; Ray itself would wait minutes."""
    if engine != "ray":
        if workers is not None:
            raise InputError(
                f"engine {engine!r} with workers {workers}; need engine 'ray', or leave workers out"
            )
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise InputError(
            "engine 'ray' needs Ray; install it with pip install 'sink-lens[ray]'"
        ) from error
    address = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    # of no address, "auto" and "local", Ray says at once what it finds
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except (OSError, OverflowError) as error:
            raise _unreachable_error(address, error) from error


def _unreachable_error(address: str, error: Exception) -> InputError:
    where, first = f" at RAY_ADDRESS={address}" * bool(address), first_line_of_error(error)[:200]
    return InputError(
        f"no Ray cluster answers{where} ({first}); need a running one. "
        "Start it, unset RAY_ADDRESS for one on this machine, or leave engine 'ray' out"
    )


def run_on_ray(
    job: Job,
    blocks: Sequence[Block],
    *,
    workers: int | None,
    on_gpu: bool,
    advance: Callable[[int], object],
) -> Blocks:
    """Compute blocks on a Ray cluster, with a worker per GPU (or per two CPUs), and yield each block with its table.

    Only the job is sent there. Ray restarts a worker that died and repeats its block; one that waits for resources does
    not block the others. If Ray is not running here, the cluster at ``RAY_ADDRESS`` is joined, or a local one started.
    """
    import ray
    import ray.exceptions

    started = not ray.is_initialized()
    if started:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _unreachable_error(os.environ.get("RAY_ADDRESS", ""), error) from error
    try:
        resources = ray.cluster_resources()
        fit = int(resources.get("GPU", 0)) if on_gpu else int(resources.get("CPU", 1)) // 2
        if on_gpu and fit == 0:
            raise InputError(
                "the Ray cluster has no GPU and the model is on one; add a GPU, or load it on the CPU"
            )
        count = max(1, min(workers or max(1, fit), len(blocks)))
        options: Any = {"max_restarts": _RETRIES, "max_task_retries": _RETRIES}
        options |= {"num_gpus": 1, "num_cpus": 1} if on_gpu else {"num_cpus": 1}
        actor: Any = ray.remote(**options)(Worker)
        shared = _send_job(ray, job)
        begun = [actor.remote(shared, "cuda" if on_gpu else "cpu") for _ in range(count)]
        starting: dict[Any, Any] = {worker.ready.remote(): worker for worker in begun}
        idle: list[Any] = []
        waiting, running = deque(blocks), dict[Any, tuple[Any, Block]]()
        while waiting or running:
            while idle and waiting:
                worker, block = idle.pop(), waiting.popleft()
                running[worker.run.remote(block)] = (worker, block)
            (done, *_), _ = ray.wait([*running, *(starting if waiting else ())], num_returns=1)
            if done in starting:
                idle.append(starting.pop(done))
                continue
            worker, block = running.pop(done)
            try:
                frame = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            idle.append(worker)
            advance(len(block.cells))
            yield block, frame
    finally:
        if started:
            ray.shutdown()


def _send_job(ray: Any, job: Job) -> Any:
    try:
        return ray.put(job)
    except TypeError as error:
        found = first_line_of_error(error.__cause__ or error)
        raise InputError(
            f"a cell or a metric holds something that cannot be sent to another process ({found}); need functions "
            "of plain values and tensors, or engine='local'"
        ) from error


class Worker:
    """A Ray actor that loads the model once and computes blocks."""

    def __init__(self, job: Job, device: str) -> None:
        self._engine: Engine | None = None
        self._error: Exception | None = None
        try:
            lens = load(job.model, device=device, dtype=job.provenance["dtype"])
            if weights_hash(lens) != job.provenance["weights_sha256"]:
                raise job.other_model_error("weights")
            if config_hash(lens) != job.provenance["config_sha256"]:
                raise job.other_model_error("configuration")
            engine = job.make_engine(lens)
            # a tokenizer, an attention function or a module of the user's own is in no hash
            room = max(_ROOM, 100 * torch.finfo(lens.dtype).eps)
            values = engine.baseline_metrics()["value"]
            if not np.allclose(values, job.baseline, rtol=room, atol=room, equal_nan=True):
                raise job.other_model_error("metrics of the baseline run")
            self._engine = engine
        except Exception as error:  # noqa: BLE001  # raised with its first block: else all that is known is a dead worker
            self._error = error

    def ready(self) -> None:
        """Do nothing: Ray answers this call once the worker has started."""

    def run(self, block: Block) -> pd.DataFrame:
        if self._engine is None:
            assert self._error is not None
            raise self._error
        return self._engine.run(block)

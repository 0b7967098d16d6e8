"""One measurement of many models, into a run folder: each model is opened, measured, written and closed.

What a model gave is on disk before the next one is opened, so that a stopped survey can be continued. A model
that cannot be opened or measured becomes a row whose ``error`` says why, unless none can.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors
import safetensors.numpy

from ..errors import SinkLensError, UndrawnError
from ..models.lens import LensModel
from ..models.load import usable, weights_hash
from ..progress import tqdm
from ..records import Result, RunWriter, create_run, display, read_run, versions
from .models_to_measure import ModelToMeasure, RandomSequences
from .switches import variant_table

_PARTIAL = "partial.safetensors"
_COLUMNS = ("model", "variant", "seed", "step", "n_layers", "d_model", "d_vocab", "weights_sha256", "seconds", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """Measurements of one model."""

    frames: Mapping[str, pd.DataFrame]
    """Table -> rows; ``summary`` has measure and value."""
    tensors: Mapping[str, np.ndarray]
    """Name -> tensor, kept in ``directions``."""


Measure = Callable[[LensModel, "Partial"], MeasuredModel]


class Partial:
    """The sums of the model that is being measured, kept beside the run so that a stop does not lose them."""

    def __init__(self, folder: Path, *, model: str, begin: Callable[[], None], every: float) -> None:
        self._path, self._model, self._kept = folder / _PARTIAL, model, time.monotonic()
        self._begin, self._every = begin, every

    def load(self) -> dict[str, np.ndarray] | None:
        """Read the model's finished measurements from the run folder; None if there are none."""
        if not self._path.is_file():
            return None
        with safetensors.safe_open(self._path, framework="np") as file:
            if (file.metadata() or {}).get("model") != self._model:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping

    def keep(self, state: dict[str, np.ndarray]) -> None:
        """Keep the sums, unless they were kept a moment ago."""
        if time.monotonic() - self._kept < self._every:
            return
        self._begin()
        part = self._path.with_name(f"{_PARTIAL}.part")
        part.write_bytes(safetensors.numpy.save(state, metadata={"model": self._model}))
        part.replace(self._path)
        self._kept = time.monotonic()

    def drop(self) -> None:
        """Remove the file, since the model is finished."""
        self._path.unlink(missing_ok=True)


def variants_of(tables: Mapping[str, pd.DataFrame], tensors: Mapping[str, np.ndarray]) -> dict[str, pd.DataFrame]:
    """The variants over their seeds; the checkpoints of a training are no repetitions, and are left out."""
    summary = tables["summary"]
    return {"variants": variant_table(summary.loc[summary["step"].isna()])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The models of a survey, and the measure that is taken of each."""

    kind: str
    """Kind of run."""
    found: Sequence[ModelToMeasure]
    measure: Measure
    """Gives the tables of an open model."""
    draws: RandomSequences
    """The sequences, for the record."""
    asked: Mapping[str, Any]
    """The configuration, for the record."""
    tables: Sequence[str]
    """Names of the tables that ``measure`` gives, ``summary`` among them."""
    finish: Callable[[Mapping[str, pd.DataFrame], Mapping[str, np.ndarray]], Mapping[str, pd.DataFrame]] = variants_of
    """Gives what is computed from the tables and tensors of all models, written as CSV."""
    device: str | None = None
    """Where the models go."""
    dtype: str | None = None
    """Type of the weights of those that are loaded."""


def write_survey(
    survey: Survey,
    *,
    out: str | os.PathLike[str],
    overwrite: bool = False,
    progress: bool = False,
    keep_every: float = 30.0,
) -> Result:
    """Measure every model and write what it gives; an unfinished run of the same question is continued."""
    device, kind, found, draws = str(usable(survey.device)), survey.kind, survey.found, survey.draws
    provenance = {
        "models": [one.name for one in found],
        "token_source": "random, of each model's own ordinary tokens",
        "sequences": draws.sequences,
        "length": draws.length,
        "token_seed": draws.seed,
        "bos_condition": draws.bos,
        "dtype": survey.dtype or "float32",
        "device": device,
        "versions": versions(),
    }
    how = {"expects": ["models", *survey.tables, "variants"], "overwrite": overwrite}
    try:
        writer = create_run(out, kind=kind, config=survey.asked, provenance=provenance, **how)
    except UndrawnError as error:
        return _draw_figures(error.folder)
    with writer:
        done = _Done(writer, tables=survey.tables)
        failed: SinkLensError | None = None
        for one in tqdm(found, desc=kind, unit="model", disable=not progress or len(found) < 2, leave=False):
            if one.name in done.names:
                continue
            partial = Partial(writer.folder, model=one.name, begin=done.begin, every=keep_every)
            begun = time.perf_counter()
            try:
                lens = one.open(device=device, dtype=survey.dtype)
                given = survey.measure(lens, partial)
            except SinkLensError as error:
                if len(found) > 1:
                    warnings.warn(f"{one.name} is left out: {error}", stacklevel=1)
                failed = failed or error
                done.add(one, error=str(error))
                continue
            done.add(one, lens=lens, given=given, seconds=time.perf_counter() - begun)
            partial.drop()
        if not done.names and failed is not None:
            raise failed
        for name, frame in survey.finish(done.whole, done.tensors).items():
            writer.write_csv(name, frame)
    return _draw_figures(writer.folder)


def _draw_figures(folder: Path) -> Result:
    run = read_run(folder)
    display.page(folder)
    errors = run.tables["models"]["error"].tolist()
    failed = sum(isinstance(one, str) for one in errors)
    said = f"{run.kind} of {len(errors) - failed} models" + (f"; {failed} could not be measured" if failed else "")
    return Result(folder=folder, tables=run.tables, headline=said)


class _Done:
    """The tables of a survey while they grow, on disk after each model."""

    def __init__(self, writer: RunWriter, *, tables: Sequence[str]) -> None:
        """Read what earlier starts have finished."""
        self._writer, self._tables = writer, tables
        earlier = read_run(writer.folder).tables
        models = earlier.get("models", pd.DataFrame(columns=list(_COLUMNS)))
        self.names = set(models.loc[models["error"].isna(), "model"].tolist())
        # A stop may have come between two tables of one model: its rows are left out.
        self.frames = {
            name: [frame.loc[frame["model"].isin(sorted(self.names))]]
            for name, frame in {"models": models, **{name: earlier[name] for name in tables if name in earlier}}.items()
        }
        self.tensors: dict[str, np.ndarray] = {}
        if writer.has("directions"):
            self.tensors = read_run(writer.folder).tensors("directions")

    def begin(self) -> None:
        """Write that the survey has begun, so that it can be continued."""
        self._write("models")

    def add(
        self,
        one: ModelToMeasure,
        *,
        lens: LensModel | None = None,
        given: MeasuredModel | None = None,
        seconds: float = float("nan"),
        error: str | None = None,
    ) -> None:
        """Write what one model gave, or why it gave nothing."""
        row: dict[str, Any] = {
            "model": one.name,
            "variant": one.variant,
            "seed": one.seed,
            "step": one.step,
            "error": error,
        }
        if lens is not None and given is not None:
            row |= {"n_layers": lens.n_layers, "d_model": lens.d_model, "d_vocab": lens.d_vocab, "seconds": seconds}
            row["weights_sha256"] = weights_hash(lens)
            key = {"model": one.name, "variant": one.variant, "seed": one.seed, "step": one.step}
            for name in self._tables:
                self.frames.setdefault(name, []).append(given.frames[name].assign(**key))
                self._write(name)
            if given.tensors:
                self.tensors |= {f"{one.name}|{name}": tensor for name, tensor in given.tensors.items()}
                self._writer.write_tensors("directions", self.tensors)
            self.names.add(one.name)
        self.frames["models"].append(pd.DataFrame([row], columns=list(_COLUMNS)))
        if self.names:  # where no model can be measured, nothing is written
            self._write("models")

    @property
    def whole(self) -> dict[str, pd.DataFrame]:
        """The tables of all models."""
        return {name: self._whole(name) for name in self.frames}

    def _whole(self, name: str) -> pd.DataFrame:
        """Join a table's rows from all starts of the survey, those that name the model in front."""
        frames = [frame for frame in self.frames[name] if len(frame)] or self.frames[name][:1]
        whole = pd.concat(frames, ignore_index=True)
        front = [column for column in ("model", "variant", "seed", "step") if column in whole.columns]
        whole = whole.reindex(columns=[*front, *(column for column in whole.columns if column not in front)])
        for column in ("seed", "step"):
            whole[column] = whole[column].astype("Int64")
        return whole

    def _write(self, name: str) -> None:
        write = self._writer.write_csv if name in ("models", "summary") else self._writer.write_table
        write(name, self._whole(name))

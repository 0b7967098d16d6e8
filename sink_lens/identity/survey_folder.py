"""The tables of a survey while they grow: what a model gave is on disk before the next one is opened."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..errors import RunError
from ..files import parse_json
from ..models.lens import LensModel
from ..models.load import weights_hash
from ..records import RunWriter, read_run
from .models_to_measure import ModelToMeasure

_COLUMNS = (
    "model",
    "variant",
    "seed",
    "step",
    "n_layers",
    "d_model",
    "d_vocab",
    "weights_sha256",
    "seconds",
    "error",
)
_IDENTITIES = "identities.json"
"""File of a survey with name -> identity of each model that it has measured."""


class SurveyTables:
    """Tables of a survey, which are written to its run folder again after each measured model."""

    def __init__(
        self, writer: RunWriter, *, tables: Sequence[str], found: Sequence[ModelToMeasure]
    ) -> None:
        self._writer, self._tables = writer, tables
        earlier = read_run(writer.folder).tables
        models = earlier.get("models", pd.DataFrame(columns=list(_COLUMNS)))
        self._identities = (
            _identities_of_same(writer.folder, found) if writer.has(_IDENTITIES) else {}
        )
        self.names = set(models.loc[models["error"].isna(), "model"].tolist()) & set(
            self._identities
        )
        # A stop may have come between two tables of one model: its rows are left out.
        kept = {"models": models} | {name: earlier[name] for name in tables if name in earlier}
        self.frames = {
            name: [frame.loc[frame["model"].isin(sorted(self.names))]]
            for name, frame in kept.items()
        }
        tensors = read_run(writer.folder).tensors("directions") if writer.has("directions") else {}
        self.tensors = {
            key: tensor for key, tensor in tensors.items() if key.rpartition("|")[0] in self.names
        }

    def add_model(
        self,
        one: ModelToMeasure,
        *,
        identity: str = "",
        lens: LensModel | None = None,
        frames: Mapping[str, pd.DataFrame] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        seconds: float = float("nan"),
        error: str | None = None,
    ) -> None:
        key: dict[str, Any] = {
            "model": one.name,
            "variant": one.variant,
            "seed": one.seed,
            "step": one.step,
        }
        row = key | {"error": error}
        if lens is not None and frames is not None:
            row |= {
                "n_layers": lens.n_layers,
                "d_model": lens.d_model,
                "d_vocab": lens.d_vocab,
                "seconds": seconds,
            }
            row["weights_sha256"] = weights_hash(lens)
            self._identities[one.name] = identity
            self._writer.write_text(_IDENTITIES, json.dumps(self._identities) + "\n")
            for name in self._tables:
                self.frames.setdefault(name, []).append(frames[name].assign(**key))
                self._write_table(name)
            if tensors:
                self.tensors |= {f"{one.name}|{name}": tensor for name, tensor in tensors.items()}
                self._writer.write_tensors("directions", self.tensors)
            self.names.add(one.name)
        self.frames["models"].append(pd.DataFrame([row], columns=list(_COLUMNS)))
        if self.names:  # where no model can be measured, nothing is written
            self._write_table("models")

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {name: self._join_rows(name) for name in self.frames}

    def _join_rows(self, name: str) -> pd.DataFrame:
        frames = [frame for frame in self.frames[name] if len(frame)] or self.frames[name][:1]
        whole = pd.concat(frames, ignore_index=True)
        front = [
            column for column in ("model", "variant", "seed", "step") if column in whole.columns
        ]
        whole = whole.reindex(
            columns=[*front, *(column for column in whole.columns if column not in front)]
        )
        for column in ("seed", "step"):
            whole[column] = whole[column].astype("Int64")
        return whole

    def _write_table(self, name: str) -> None:
        write = (
            self._writer.write_csv if name in ("models", "summary") else self._writer.write_table
        )
        write(name, self._join_rows(name))


def refuse_other_models(folder: Path, found: Sequence[ModelToMeasure]) -> None:
    """Refuse the finished survey of a folder if a model of ``found`` is another than was measured.

    Raises:
        RunError: it is, or the folder does not say which model was measured.
    """
    models = read_run(folder).tables["models"]
    measured = set(models.loc[models["error"].isna(), "model"].tolist())
    same = _identities_of_same(folder, found) if (folder / _IDENTITIES).is_file() else {}
    if other := [one.name for one in found if one.name in measured - set(same)]:
        raise RunError(
            f"{folder} holds a finished survey, and {other[0]} is another model than was measured then; need the same. "
            "Choose another folder, or overwrite=True to replace it."
        )


def _identities_of_same(folder: Path, found: Sequence[ModelToMeasure]) -> dict[str, str]:
    known = parse_json((folder / _IDENTITIES).read_text("utf-8"))
    return {one.name: known[one.name] for one in found if known.get(one.name) == one.identity}

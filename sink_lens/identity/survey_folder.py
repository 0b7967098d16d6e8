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
from ..schema import column_names
from .models_to_measure import ModelToMeasure

_IDENTITIES = "identities.json"
"""File of a survey: name -> identity of each model that it has measured."""
_KEY = ["model", "variant", "seed", "step"]


class SurveyTables:
    """Tables of a survey, written to its run folder again after each model."""

    def __init__(
        self, writer: RunWriter, *, tables: Sequence[str], found: Sequence[ModelToMeasure]
    ) -> None:
        self._writer, self._tables = writer, tables
        run = read_run(writer.folder)
        self._columns = column_names("preference", "models")  # as those of contraction
        models = run.tables.get("models", pd.DataFrame(columns=self._columns))
        known = _identities_of_same(writer.folder, found) if writer.has(_IDENTITIES) else {}
        self._identities = known
        self.names = set(models.loc[models["error"].isna(), "model"].tolist()) & set(known)
        # A stop may have come between two tables of one model: its rows are left out.
        kept = {"models": models} | {
            name: run.tables[name] for name in tables if name in run.tables
        }
        self.frames = {
            name: [frame.loc[frame["model"].isin(sorted(self.names))]]
            for name, frame in kept.items()
        }
        tensors = run.tensors("directions") if writer.has("directions") else {}
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
                "weights_sha256": weights_hash(lens),
            }
            self._identities[one.name] = identity
            self._writer.write_text(_IDENTITIES, json.dumps(self._identities) + "\n")
            for name in self._tables:
                self.frames.setdefault(name, []).append(frames[name].assign(**key))
                self._write_table(name)
            if tensors:
                self.tensors |= {f"{one.name}|{name}": tensor for name, tensor in tensors.items()}
                self._writer.write_tensors("directions", self.tensors)
            self.names.add(one.name)
        self.frames["models"].append(pd.DataFrame([row], columns=self._columns))
        if self.names:  # where no model can be measured, nothing is written
            self._write_table("models")

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {name: self._join_rows(name) for name in self.frames}

    def _join_rows(self, name: str) -> pd.DataFrame:
        frames = [frame for frame in self.frames[name] if len(frame)] or self.frames[name][:1]
        whole = pd.concat(frames, ignore_index=True)
        others = [column for column in whole.columns if column not in _KEY]
        whole = whole.reindex(columns=[*_KEY, *others])
        return whole.astype({"seed": "Int64", "step": "Int64"})

    def _write_table(self, name: str) -> None:
        as_csv = name in ("models", "summary")
        write = self._writer.write_csv if as_csv else self._writer.write_table
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

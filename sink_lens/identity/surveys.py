"""``survey``: one measurement of many models; each is opened, measured, written and closed."""

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..configuration import make_config
from ..data.tokens import token_texts
from ..errors import InputError, SinkLensError, UndrawnError
from ..models.lens import LensModel
from ..models.load import find_device
from ..progress import tqdm
from ..records import Result, create_run, default_run_folder, display, package_versions, read_run
from .config import ContractionConfig, PreferenceConfig, SurveyConfig
from .contraction import contraction, direction_cosines
from .models_to_measure import ModelToMeasure, RandomSequences, models_to_measure
from .preference import preference
from .survey_folder import SurveyTables, refuse_other_models
from .switches import switched_configs, variant_table
from .untrained_models import UntrainedConfig, read_untrained

_CONFIGS: dict[str, type[SurveyConfig]] = {
    "preference": PreferenceConfig,
    "contraction": ContractionConfig,
}
_TABLES = {
    "preference": ("summary", "coverage", "tokens"),
    "contraction": ("summary", "layers", "positions", "alignment"),
}


def survey(
    config: SurveyConfig | str,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Result:
    """Measure preference or contraction of several models, and write one run folder; an unfinished run is continued.

    Args:
        config: a ``PreferenceConfig`` or ``ContractionConfig``; or ``"preference"`` or ``"contraction"``, for defaults.
        out: the run folder; ``runs/KIND-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        **fields: fields of the configuration, as ``untrained=["gpt2"], sequences=64``; they win over ``config``.

    Raises:
        InputError: a model, field or value that cannot be used.
        RunError: the folder cannot be used.
        SinkLensError: no model could be measured; it is the error of the first one.
    """
    if isinstance(config, str):
        if config not in _CONFIGS:
            raise InputError(f"there is no survey {config!r}; need one of {', '.join(_CONFIGS)}")
        config = make_config(_CONFIGS[config], None, fields, where=config)
    else:
        config = make_config(type(config), config, fields)
    kind = "contraction" if isinstance(config, ContractionConfig) else "preference"
    draws, found = _random_sequences(config), models_to_survey(config)
    device = str(find_device(config.device))
    asked = {
        "models": list(config.models),
        "untrained": [one.label for one in _untrained_models(config)],
        "seeds": list(config.seeds),
        **asdict(draws),
    }
    if isinstance(config, ContractionConfig):
        asked["sinks"] = config.sinks
    provenance = {
        "models": [one.name for one in found],
        "token_source": "random, of each model's own ordinary tokens",
        "sequences": draws.sequences,
        "length": draws.length,
        "token_seed": draws.seed,
        "bos_condition": draws.bos,
        "dtype": config.dtype or "float32",
        "device": device,
        "versions": package_versions(),
    }
    try:
        writer = create_run(
            default_run_folder(kind) if out is None else out,
            kind=kind,
            config=asked,
            provenance=provenance,
            expects=["models", *_TABLES[kind], "variants"],
            overwrite=overwrite,
        )
    except UndrawnError as error:
        refuse_other_models(error.folder, found)
        return _finish_survey(error.folder)
    with writer:
        grown = SurveyTables(writer, tables=_TABLES[kind], found=found)
        failed: SinkLensError | None = None
        for one in tqdm(
            found, desc=kind, unit="model", disable=not progress or len(found) < 2, leave=False
        ):
            if one.name in grown.names:
                continue
            begun, identity = time.perf_counter(), one.identity
            try:
                lens = one.open(device=device, dtype=config.dtype)
                frames, tensors = _measure_model(lens, config, progress=progress)
            except SinkLensError as error:
                if len(found) > 1:
                    warnings.warn(f"{one.name} is left out: {error}", stacklevel=1)
                failed = failed or error
                grown.add_model(one, error=str(error))
                continue
            grown.add_model(
                one,
                identity=identity,
                lens=lens,
                frames=frames,
                tensors=tensors,
                seconds=time.perf_counter() - begun,
            )
        if not grown.names and failed is not None:
            raise failed
        whole = grown.tables
        no_checkpoints = whole["summary"]["step"].isna()  # those of a training are no repetitions
        writer.write_csv("variants", variant_table(whole["summary"].loc[no_checkpoints]))
        if kind == "contraction":
            names = whole["models"]["model"].tolist()
            writer.write_csv("agreement", _agreement_rows(names, grown.tensors))
    return _finish_survey(writer.folder)


def _finish_survey(folder: Path) -> Result:
    run = read_run(folder)
    display.draw_page(folder)
    errors = run.tables["models"]["error"].tolist()
    failed = sum(isinstance(one, str) for one in errors)
    said = f"{run.kind} of {len(errors) - failed} models"
    if failed:
        said += f"; {failed} could not be measured"
    return Result(folder=folder, tables=run.tables, headline=said)


def _random_sequences(config: SurveyConfig) -> RandomSequences:
    return RandomSequences(
        sequences=config.sequences, length=config.length, seed=config.seed, bos=config.bos
    )


def _untrained_models(config: SurveyConfig) -> list[UntrainedConfig]:
    found: list[UntrainedConfig] = []
    for text in config.untrained:
        found += switched_configs(read_untrained(text), switches=config.switches)
    return list(dict.fromkeys(found))


def models_to_survey(config: SurveyConfig) -> list[ModelToMeasure]:
    return models_to_measure(
        config.models, configs=_untrained_models(config), seeds=config.seeds or (0,)
    )


def _measure_model(
    lens: LensModel, config: SurveyConfig, *, progress: bool
) -> tuple[Mapping[str, pd.DataFrame], dict[str, np.ndarray]]:
    given: dict[str, Any] = asdict(_random_sequences(config)) | {"progress": progress}
    if isinstance(config, ContractionConfig):
        measured = contraction(lens, **given, sinks=config.sinks)
        return measured.tables, {
            name: one.astype(np.float32)
            for name, one in measured.directions.items()
            if ".attention" not in name
        }
    found = preference(lens, **given)
    top = found.top()
    tokens = top["token"].tolist()
    text = token_texts(tokens, lens.tokenizer)
    return {**found.tables, "tokens": top.assign(text=[text[one] for one in tokens])}, {}


def _agreement_rows(models: Sequence[str], directions: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Return the table ``agreement`` from ``MODEL|LAYER.STAGE`` -> direction."""
    by_model: dict[str, dict[str, np.ndarray]] = {model: {} for model in models}
    for name in sorted(directions, key=lambda one: int(one.rpartition("|")[2].partition(".")[0])):
        model, _, place = name.rpartition("|")
        by_model[model][place] = directions[name]
    return direction_cosines({model: places for model, places in by_model.items() if places})

"""``survey``: one measurement of many models, from its configuration; what each kind of survey reads and computes.

Each model is opened, measured, written and closed, so that a stopped survey can be continued. A model that cannot be
opened or measured becomes a row whose ``error`` says why, unless none can.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..activations.record import stream
from ..configuration import make_config
from ..data.tokens import TokenBatch
from ..errors import InputError, SinkLensError, UndrawnError
from ..estimate import synchronised_time, wall_seconds
from ..models.lens import LensModel
from ..models.load import find_device
from ..models.memory import held_bytes
from ..progress import tqdm
from ..records import Result, create_run, default_folder, display, read_run, versions
from ..report.page import PageTable, shown_table
from ..text import duration, short_count
from .config import ContractionConfig, PreferenceConfig, SurveyConfig
from .contraction import agreement, contraction, sums_and_readings
from .models_to_measure import ModelToMeasure, RandomSequences, models_to_measure
from .preference import Votes, last_logits, preference, size_of_forward
from .survey_folder import Grown, MeasuredModel
from .switches import switched_configs, variant_table
from .untrained_models import UntrainedConfig, read_untrained

_FLOPS = 2e11
"""The most that a dry run times."""


def survey(
    config: SurveyConfig | str,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Result:
    """Measure every model and write what it gives; an unfinished run of the same question is continued.

    Args:
        config: a ``PreferenceConfig`` or ``ContractionConfig``, or ``preference`` or ``contraction``.
        out: the run folder; ``runs/KIND-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        **fields: fields of the configuration, as ``untrained=["gpt2"], sequences=64``; they win over ``config``.

    Raises:
        InputError: a model, field or value that cannot be used.
        RunError: the folder cannot be used.
        SinkLensError: no model could be measured: what is wrong with the first.
    """
    config = _survey_config(config, fields)
    kind, draws, found, device = (
        KINDS[config.kind],
        _random_sequences(config),
        _models_to_survey(config),
        str(find_device(config.device)),
    )
    asked = {"models": list(config.models), "untrained": [one.label for one in _untrained_models(config)]}
    asked |= {"seeds": list(config.seeds)} | asdict(draws)
    asked |= {"sinks": config.sinks} if isinstance(config, ContractionConfig) else {}
    provenance = {
        "models": [one.name for one in found],
        "token_source": "random, of each model's own ordinary tokens",
        "sequences": draws.sequences,
        "length": draws.length,
        "token_seed": draws.seed,
        "bos_condition": draws.bos,
        "dtype": config.dtype or "float32",
        "device": device,
        "versions": versions(),
    }
    how: dict[str, Any] = {"expects": ["models", *kind.tables, "variants"], "overwrite": overwrite}
    folder = default_folder(config.kind) if out is None else out
    try:
        writer = create_run(folder, kind=config.kind, config=asked, provenance=provenance, **how)
    except UndrawnError as error:
        return _read_and_draw(error.folder)
    with writer:
        grown = Grown(writer, tables=kind.tables)
        failed: SinkLensError | None = None
        for one in tqdm(found, desc=config.kind, unit="model", disable=not progress or len(found) < 2, leave=False):
            if one.name in grown.names:
                continue
            begun = time.perf_counter()
            try:
                lens = one.open(device=device, dtype=config.dtype)
                given = kind.measure(lens, config=config, draws=draws, progress=progress)
            except SinkLensError as error:
                if len(found) > 1:
                    warnings.warn(f"{one.name} is left out: {error}", stacklevel=1)
                failed = failed or error
                grown.add(one, error=str(error))
                continue
            grown.add(one, lens=lens, given=given, seconds=time.perf_counter() - begun)
        if not grown.names and failed is not None:
            raise failed
        for name, frame in kind.finish(grown.whole, grown.tensors).items():
            writer.write_csv(name, frame)
    return _read_and_draw(writer.folder)


def _read_and_draw(folder: Path) -> Result:
    """The result read from a survey's folder, with its page written."""
    run = read_run(folder)
    display.draw_page(folder)
    errors = run.tables["models"]["error"].tolist()
    failed = sum(isinstance(one, str) for one in errors)
    said = f"{run.kind} of {len(errors) - failed} models" + (f"; {failed} could not be measured" if failed else "")
    return Result(folder=folder, tables=run.tables, headline=said)


def cost(config: SurveyConfig) -> Iterator[str | PageTable]:
    """Give a table with one row per variant: its models and parameters, and the tokens, seconds and bytes of memory.

    A few sequences of each variant's first model are timed. Memory is that of this process after a forward; the sums
    are among it, and no number of sequences changes it.

    Raises:
        SinkLensError: what measuring the first model of a variant would raise.
    """
    draws, found, rows = _random_sequences(config), _models_to_survey(config), []
    for variant in dict.fromkeys(one.variant for one in found):
        of_variant = [one for one in found if one.variant == variant]
        begun = synchronised_time("cpu")
        lens = of_variant[0].open(device=config.device, dtype=config.dtype)
        opened = synchronised_time(lens.device) - begun
        draws.check(lens)
        n_parameters = lens.plain.num_parameters()
        affordable = max(1, int(_FLOPS / (2 * n_parameters * draws.length)))
        size = min(size_of_forward(lens, length=draws.length), affordable, draws.sequences)
        part = next(iter(draws.chunk(lens, 0).batches(size)))
        seconds = wall_seconds(partial(KINDS[config.kind].step(lens, draws), part), device=lens.device, warm_up=1)
        each = opened + seconds / part.n_sequences * draws.sequences
        rows.append(
            {
                "variant": variant,
                "models": len(of_variant),
                "parameters": n_parameters,
                "tokens": len(of_variant) * draws.sequences * draws.length,
                "seconds": len(of_variant) * each,
                "memory": held_bytes(),
            }
        )
    frame = pd.DataFrame(rows)
    shown = frame.assign(
        parameters=frame["parameters"].map(short_count),
        tokens=frame["tokens"].map(short_count),
        seconds=frame["seconds"].map(duration),
        memory=[f"{held / 1e9:.2f} GB" for held in frame["memory"]],
    )
    heads = {"variant": "models", "models": "how many", "seconds": "time"}
    yield replace(shown_table(shown, {name: heads.get(name, name) for name in shown}, most=len(shown)), frame=frame)
    seconds = sum(frame["seconds"].tolist())
    yield f"in all {duration(seconds)}; the memory does not grow with the sequences"


def _survey_config(config: SurveyConfig | str, fields: Mapping[str, Any]) -> SurveyConfig:
    """The configuration of a call: a given one, or one of the named kind with these fields."""
    if not isinstance(config, str):
        return make_config(type(config), config, fields)
    kinds: dict[str, type[SurveyConfig]] = {"preference": PreferenceConfig, "contraction": ContractionConfig}
    if config not in kinds:
        raise InputError(f"there is no survey {config!r}; need one of {', '.join(kinds)}")
    return make_config(kinds[config], None, fields, where=config)


def _random_sequences(config: SurveyConfig) -> RandomSequences:
    """The random sequences that a configuration asks for."""
    return RandomSequences(sequences=config.sequences, length=config.length, seed=config.seed, bos=config.bos)


def _untrained_models(config: SurveyConfig) -> list[UntrainedConfig]:
    """The untrained models that a configuration names, each switch included."""
    bases = [read_untrained(text) for text in config.untrained]
    return list(dict.fromkeys(one for base in bases for one in switched_configs(base, switches=config.switches)))


def _models_to_survey(config: SurveyConfig) -> list[ModelToMeasure]:
    """All models that a configuration asks for."""
    return models_to_measure(config.models, configs=_untrained_models(config), seeds=config.seeds or (0,))


def _measure_preference(
    lens: LensModel, *, config: SurveyConfig, draws: RandomSequences, progress: bool
) -> MeasuredModel:
    """Token preference of a model."""
    found = preference(lens, **asdict(draws), progress=progress)
    top = found.top()
    text = [_token_text(lens, token) for token in top["token"].tolist()]
    frames = {**found.tables, "tokens": top.assign(text=text)}
    return MeasuredModel(frames=frames, tensors={})


def _measure_contraction(
    lens: LensModel, *, config: SurveyConfig, draws: RandomSequences, progress: bool
) -> MeasuredModel:
    """Contraction of a model, and its directions."""
    assert isinstance(config, ContractionConfig)
    found = contraction(lens, **asdict(draws), sinks=config.sinks, progress=progress)
    frames = {name: found.tables[name] for name in KINDS["contraction"].tables}
    kept = {name: one.astype(np.float32) for name, one in found.directions.items() if ".attention" not in name}
    return MeasuredModel(frames=frames, tensors=kept)


def preference_tables(tables: Mapping[str, pd.DataFrame], tensors: Mapping[str, np.ndarray]) -> dict[str, pd.DataFrame]:
    """The table of variants over their seeds, without checkpoints of trainings, which are no repetitions."""
    summary = tables["summary"]
    return {"variants": variant_table(summary.loc[summary["step"].isna()])}


Step = Callable[[TokenBatch], object]


def _preference_step(lens: LensModel, draws: RandomSequences) -> Step:
    """Make the timed step of a preference survey: one pass over a few sequences."""
    votes = Votes.of(lens, seed=draws.seed)
    return lambda part: votes.add(last_logits(lens, part))


def _contraction_step(lens: LensModel, draws: RandomSequences) -> Step:
    """Make the timed step of a contraction survey: one pass over a few sequences."""
    return lambda part: stream(lens, part, sums_and_readings(lens, draws)[2])


def contraction_tables_of(
    tables: Mapping[str, pd.DataFrame], tensors: Mapping[str, np.ndarray]
) -> dict[str, pd.DataFrame]:
    """The table of variants, and that of how far the models' contraction directions agree."""
    by_model: dict[str, dict[str, np.ndarray]] = {model: {} for model in tables["models"]["model"].tolist()}
    for name, tensor in tensors.items():
        model, _, place = name.rpartition("|")
        by_model[model][place] = tensor
    found = {model: _directions_by_layer(places) for model, places in by_model.items() if places}
    return preference_tables(tables, tensors) | {"agreement": agreement(found)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyKind:
    """A kind of survey."""

    tables: tuple[str, ...]
    """The tables that each model adds to."""
    measure: Callable[..., MeasuredModel]
    """Measures one open model."""
    finish: Callable[[Mapping[str, pd.DataFrame], Mapping[str, np.ndarray]], dict[str, pd.DataFrame]]
    """Gives what is computed from the tables and tensors of all models, written as CSV."""
    step: Callable[[LensModel, RandomSequences], Step]
    """Gives one forward step of the measurement on some sequences, for a dry run to time."""


KINDS = {
    "preference": SurveyKind(
        tables=("summary", "coverage", "tokens"),
        measure=_measure_preference,
        finish=preference_tables,
        step=_preference_step,
    ),
    "contraction": SurveyKind(
        tables=("summary", "layers", "positions", "alignment"),
        measure=_measure_contraction,
        finish=contraction_tables_of,
        step=_contraction_step,
    ),
}
"""Kind of run -> what it reads and computes."""


def _directions_by_layer(places: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The directions by layer: a file of tensors is ordered by name."""
    return dict(sorted(places.items(), key=lambda one: int(one[0].partition(".")[0])))


def _token_text(lens: LensModel, token: int) -> str:
    """A token as text; its id if no tokenizer knows it."""
    known = lens.tokenizer is not None and token < len(lens.tokenizer)
    return str(lens.tokenizer.decode([token])) if known and lens.tokenizer is not None else f"<{token}>"

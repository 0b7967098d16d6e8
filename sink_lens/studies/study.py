"""Shared by the studies: the result, the setting that a study is made in, and its run folder.

Each study finds the model's sink and growth steps first, makes its edits on a few sequences, and reports by layer what
became of the attention, the norms and the outlier dimension at the target and the sink position, and of the loss.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from ..activations.forward import check_tokens
from ..chain.config import Question, TraceConfig
from ..chain.inputs import provenance
from ..chain.measure import scout
from ..chain.setting import Setting, setting_of, why_no_interventions
from ..configuration import with_fields
from ..data.tokens import TokenBatch, decode_tokens
from ..edits.effects import change_of
from ..edits.outcome import Outcome
from ..errors import InputError
from ..models.inputs import default_folder, model_of, tokens_of
from ..models.load import ModelLike, as_lens
from ..records import create_run, display
from ..stats import paired_difference
from ..text import span
from .config import StudyConfig

S = TypeVar("S", bound=StudyConfig)
_KERNEL = "eager"
"""Attention kernel of the studies, as provenance records it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A finished intervention; everything in it also lies in its run folder."""

    folder: Path
    kind: str
    tables: dict[str, pd.DataFrame] = dataclasses.field(repr=False)
    """The run's tables by name."""
    headline: str
    """The result in words."""
    decision: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """What ``--json`` prints: the decision and its numbers; empty for studies that decide nothing."""

    @property
    def frame(self) -> pd.DataFrame:
        """The main table: the summary."""
        return self.tables["summary"]

    def _repr_html_(self) -> str:
        return display.html(self.headline, self.tables["summary"], folder=self.folder)


def config_of_study(
    kind: type[S],
    model: ModelLike | Question,
    *,
    config: S | None,
    tokens: TokenBatch | str | None,
    fields: Mapping[str, Any],
) -> S:
    """The configuration of a study, from a model or a configuration, and from fields, which win.

    Raises:
        InputError: two configurations, an unknown field, or a value that cannot be used.
    """
    where = kind.__name__.removesuffix("Config").lower()
    given = dict(fields) | ({"tokens": tokens} if isinstance(tokens, str) else {})
    if not isinstance(model, Question):
        name = str(model) if isinstance(model, str | Path) else as_lens(model).name
        return with_fields(kind, config, given | {"model": name}, where=where)
    if config is not None:
        raise InputError("two configurations were given; need one, and a LensModel or a name before it")
    if isinstance(model, kind):
        return with_fields(kind, model, given, where=where)
    shared = {one.name for one in dataclasses.fields(kind)} - {"target_position"}  # that of a trace was never a study's
    same = {one.name: getattr(model, one.name) for one in dataclasses.fields(model) if one.name in shared}
    return with_fields(kind, None, same | given, where=where)


def prepare(
    model: ModelLike | Question, config: StudyConfig, *, tokens: TokenBatch | str | None, target_position: int | None
) -> tuple[Setting, TraceConfig]:
    """The setting of a study: model, sequences, where the sink is, the baseline run."""
    question = config.question()
    lens = model_of(question) if isinstance(model, Question) else as_lens(model)
    batch = tokens if isinstance(tokens, TokenBatch) else tokens_of(lens, config=question, bos=question.bos)
    check_tokens(lens, batch)
    why_not = why_no_interventions(lens, batch)
    if why_not is not None:
        raise InputError(f"nothing can be edited: {why_not}; use a model from load, and longer sequences")
    location = scout(lens, batch, config=question)
    return setting_of(lens, batch, location=location, config=question, target_position=target_position), question


def summary_row(
    setting: Setting, baseline: Outcome, edited: Outcome, *, target_position: int, reads: Sequence[int]
) -> dict[str, Any]:
    """Attention at both positions, the outcome and the loss, with and without the edits: a row of the summary."""
    assert baseline.loss is not None  # both were asked for it
    assert edited.loss is not None
    loss = paired_difference(edited.loss.numpy(), baseline.loss.numpy(), generator=np.random.default_rng(setting.seed))
    return {
        "read_layers": span(reads),
        "baseline_target_mass": float(baseline.mass_at(target_position, layers=reads).mean()),
        "target_mass": float(edited.mass_at(target_position, layers=reads).mean()),
        "baseline_sink_mass": float(baseline.mass_at(setting.sink_position, layers=reads).mean()),
        "sink_mass": float(edited.mass_at(setting.sink_position, layers=reads).mean()),
        "outcome": change_of(
            baseline, edited, target_position=target_position, sink_position=setting.sink_position, layers=reads
        ),
        "baseline_loss_nats": float(baseline.loss.mean()),
        "loss_nats": float(edited.loss.mean()),
        "loss_change_nats": loss.estimate,
        "loss_change_low": loss.low,
        "loss_change_high": loss.high,
        "n": setting.tokens.n_sequences,
    }


def sentence(row: Mapping[Any, Any], *, sink_position: int) -> str:
    """A row of the summary in words."""
    return (
        f"attention there {row['baseline_target_mass']:.3f} -> {row['target_mass']:.3f}, at position {sink_position} "
        f"{row['baseline_sink_mass']:.3f} -> {row['sink_mass']:.3f} (layers {row['read_layers']}): the sink is "
        f"{row['outcome']}; loss {row['baseline_loss_nats']:.3f} -> {row['loss_nats']:.3f} nats "
        f"(change {row['loss_change_low']:+.3f} to {row['loss_change_high']:+.3f})"
    )


def write_study(
    kind: str,
    setting: Setting,
    config: TraceConfig,
    frames: dict[str, pd.DataFrame],
    *,
    asked: Mapping[str, Any],
    out: str | Path | None,
    overwrite: bool,
    headline: str,
    means: Mapping[str, np.ndarray] | None = None,
) -> Study:
    """Write the run folder and return the study; ``asked`` holds options that the configuration lacks."""
    lens, folder = setting.lens, Path(out) if out is not None else default_folder(setting.lens.name)
    with create_run(
        folder,
        kind=kind,
        config=dataclasses.asdict(config) | {f"{kind}_{name}": value for name, value in asked.items()},
        provenance=provenance(lens, setting.tokens, config=config, kernel=_KERNEL),
        expects=("tokens", *frames),
        overwrite=overwrite,
    ) as writer:
        writer.write_table("tokens", decode_tokens(setting.tokens, lens.tokenizer))
        if means:
            writer.write_tensors("centring_means", means)
        for name, frame in frames.items():
            if name == "summary":
                writer.write_csv(name, frame)
            else:
                writer.write_table(name, frame)
    return Study(folder=folder, kind=kind, tables=frames, headline=headline)

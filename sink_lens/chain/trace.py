"""``trace``: the chain of one model on one token batch, from value aggregation to the sink, with its verdicts.

Scout where the sink is; measure every layer in one pass; measure the other BOS arm and the randomly
initialised twin; give each link a value, an interval, nulls and a verdict; write the run folder.
"""

import dataclasses
import logging
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from ..capture.attention import choose_kernel
from ..capture.record import capture
from ..data.corpora import bundled_text, read_text
from ..data.tokens import TokenBatch, decode_tokens, from_prompts, from_text, random_tokens, repeated_tokens
from ..data.tokens import bos_id as bos_id_of
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import load, random_twin, weights_hash, wrap
from ..records import RunWriter, create_run, versions
from ..report.page import render
from . import summary, tables
from .config import TraceConfig
from .find import Finding
from .links import gather, link_table, link_values
from .neurons import criteria_agreement, neuron_table, selectivity_table, super_neurons
from .panel import ARM_READINGS, Panel, aims, measure, scout, shortened

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger(__name__)

FILES = (
    "tokens",
    "heads",
    "positions",
    "layers",
    "law",
    "dimensions",
    "growth_steps",
    "neurons",
    "selectivity",
    "criteria",
    "patterns",
    "arms",
    "links",
    "summary",
    "report",
)
"""What a finished run holds beside ``run.json``; with the twin also ``twin_heads`` and ``twin_links``."""

_DRAWN_POSITIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A finished trace; everything in it also lies in its run folder."""

    folder: Path
    config: TraceConfig
    finding: Finding
    frames: dict[str, pd.DataFrame] = dataclasses.field(repr=False)
    """The run's tables by name, such as ``links``, ``neurons`` and ``heads``."""

    @property
    def links(self) -> pd.DataFrame:
        """One row per (link, statistic, null)."""
        return self.frames["links"]

    @property
    def super_neurons(self) -> pd.DataFrame:
        """The super neurons, the strongest first."""
        table = self.frames["neurons"]
        return table[table["is_super"]].sort_values("contribution_share", ascending=False, ignore_index=True)

    @property
    def report(self) -> Path:
        """The report: one self-contained HTML file."""
        return self.folder / "report.html"

    def table(self) -> "RenderableType":
        """The result as a person reads it, for ``rich``."""
        return summary.short_table(self.frames, config=self.config, finding=self.finding)


def trace(
    model: TraceConfig | LensModel | str | Path,
    *,
    tokens: TokenBatch | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Trace:
    """Trace the chain on a model and write a run folder.

    Args:
        model: a configuration, or what ``load`` takes with the default configuration, or a ``LensModel``.
        tokens: sequences to use instead of those that the configuration describes.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None. An interrupted run of the same question is continued.
        overwrite: replace the run that the folder holds.
        progress: show bars.

    Raises:
        ModelError, InputError, KernelError, RunError: before anything is written, what was found and needed.
    """
    config = model if isinstance(model, TraceConfig) else _config_of(model)
    lens = model if isinstance(model, LensModel) else _load(config)
    batch = tokens if tokens is not None else tokens_of(lens, config=config, bos=config.bos)
    other = None if tokens is not None else _other_arm(lens, batch, config=config)
    limit = lens.n_context
    if limit is not None and batch.n_positions > limit:
        raise InputError(
            f"the sequences have {batch.n_positions} tokens; {lens.name} takes at most {limit}: use a shorter length"
        )
    kernel = choose_kernel(lens.family, device=lens.device, asked=config.kernel)
    folder = Path(out) if out is not None else default_folder(lens.name)
    with create_run(
        folder,
        kind="trace",
        config=dataclasses.asdict(config),
        provenance=_provenance(lens, batch, config=config, kernel=kernel),
        expects=FILES + (("twin_heads", "twin_links") if config.twin else ()),
        overwrite=overwrite,
    ) as writer:
        frames, panel = _run(lens, batch, config=config, writer=writer, progress=progress, other=other)
    render(folder)
    return Trace(folder=folder, config=config, finding=panel.finding, frames=frames)


def tokens_of(lens: LensModel, *, config: TraceConfig, bos: str) -> TokenBatch:
    """The sequences that a configuration describes, in one BOS arm."""
    size = {"sequences": config.sequences, "length": config.length, "bos": bos}
    if lens.tokenizer is None and config.tokens == "text":
        raise InputError(
            f"{lens.name} has no tokenizer; need one for text: put it beside the weights, or use random tokens"
        )
    if config.tokens != "text":
        draw = random_tokens if config.tokens == "random" else repeated_tokens
        generator = torch.Generator().manual_seed(config.seed)
        size_of_vocabulary = lens.d_vocab if lens.tokenizer is None else min(lens.d_vocab, len(lens.tokenizer))
        return draw(lens.tokenizer, generator=generator, vocab_size=size_of_vocabulary, **size)
    assert lens.tokenizer is not None
    if config.prompts:
        return from_prompts(config.prompts, lens.tokenizer, bos=bos)
    if config.text is not None:
        return from_text(read_text(config.text), lens.tokenizer, name=Path(config.text).name, **size)
    return from_text(bundled_text(), lens.tokenizer, name="moby_dick", **size)


def default_folder(name: str) -> Path:
    """``runs/MODEL-DATE-TIME`` in the working folder."""
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(name).name) or "model"
    return Path("runs") / f"{stem[:60]}-{datetime.now():%Y%m%d-%H%M%S}"


def _config_of(model: LensModel | str | Path) -> TraceConfig:
    return TraceConfig(model=model.name if isinstance(model, LensModel) else str(model))


def _load(config: TraceConfig) -> LensModel:
    return load(config.model, device=config.device, dtype=config.dtype, announce=log.info)


def _provenance(lens: LensModel, batch: TokenBatch, *, config: TraceConfig, kernel: str) -> dict[str, object]:
    thresholds = ("threshold", "min_sink_rate", "growth_factor", "dominance_threshold", "energy_frac", "max_outliers")
    return {
        "model": lens.name,
        "family": lens.family.architecture,
        "weights_sha256": weights_hash(lens),
        "notes": list(lens.notes),
        "n_layers": lens.n_layers,
        "n_heads": lens.n_heads,
        "n_kv_heads": lens.n_kv_heads,
        "d_model": lens.d_model,
        "token_source": batch.source,
        "tokens_sha256": batch.hash,
        "sequences": batch.n_sequences,
        "length": batch.n_positions,
        "bos": batch.bos,
        "bos_arm": batch.bos_arm,
        "dtype": str(lens.dtype).removeprefix("torch."),
        "device": str(lens.device),
        "kernel": kernel,
        "versions": versions(),
        "seeds": {"tokens": batch.seed, "bootstrap": config.seed, "controls": config.seed, "twin": config.seed},
        "thresholds": {name: getattr(config, name) for name in (*thresholds, "super_share")},
    }


def _run(
    lens: LensModel,
    batch: TokenBatch,
    *,
    config: TraceConfig,
    writer: RunWriter,
    progress: bool,
    other: TokenBatch | None,
) -> tuple[dict[str, pd.DataFrame], Panel]:
    frames: dict[str, pd.DataFrame] = {}

    def keep(name: str, frame: pd.DataFrame) -> None:
        frames[name] = frame
        writer.write_table(name, frame)

    keep("tokens", decode_tokens(batch, lens.tokenizer))
    panel = _aimed(lens, batch, config=config, progress=progress, label="measuring")
    evidence = gather(lens, panel, config=config)
    errors = {split.layer: split.error for split in evidence.splits if split.position == panel.finding.position}
    keep("heads", tables.head_table(lens, panel, threshold=config.threshold))
    keep("positions", tables.position_table(panel))
    keep("layers", tables.layer_table(panel))
    keep("law", tables.law_table(panel))
    keep("dimensions", tables.dimension_table(panel))
    keep("growth_steps", tables.step_table(panel, errors))
    keep("neurons", neuron_table(lens, panel, evidence.splits))
    keep("selectivity", selectivity_table(lens, panel, evidence.splits))
    keep("criteria", criteria_agreement(frames["neurons"]))
    writer.write_tensors("patterns", {"pattern": _patterns(lens, batch)})
    keep("arms", _arms(lens, panel, batch, config=config, progress=progress, other=other))
    twin_values = None
    if config.twin:
        if not (writer.has("twin_heads") and writer.has("twin_links")):
            twin, of_twin = _twin(lens, panel, batch, config=config, progress=progress)
            keep("twin_heads", tables.head_table(twin, of_twin, threshold=config.threshold))
            keep("twin_links", link_values(gather(twin, of_twin, config=config)))
        else:
            for name in ("twin_heads", "twin_links"):
                frames[name] = pd.read_parquet(writer.folder / f"{name}.parquet")
        twin_values = frames["twin_links"]
    keep("links", link_table(evidence, twin=twin_values, length=batch.n_positions))
    frames["summary"] = summary.summary_table(panel, frames, config=config)
    writer.write_csv("summary", frames["summary"])
    return frames, panel


def _aimed(
    lens: LensModel,
    batch: TokenBatch,
    *,
    config: TraceConfig,
    progress: bool,
    label: str,
    only: frozenset[str] | None = None,
) -> Panel:
    """Scout and measure; measure again where the pass found that it was aimed elsewhere."""
    aim = scout(lens, batch, config=config)
    panel = measure(lens, batch, finding=aim, config=config, progress=progress, label=label, only=only)
    if only is None and not aims(aim, at=panel.finding, n_layers=lens.n_layers):
        panel = measure(
            lens, batch, finding=panel.finding, config=config, progress=progress, label=f"{label} again", only=only
        )
    return panel


def _other_arm(lens: LensModel, batch: TokenBatch, *, config: TraceConfig) -> TokenBatch | None:
    """The same sequences with BOS where they have none, without it where they have it; None where there is no BOS."""
    if lens.tokenizer is None or bos_id_of(lens.tokenizer) is None:
        return None
    try:
        return tokens_of(lens, config=config, bos="without" if batch.bos else "with")
    except InputError as error:
        log.warning("the other BOS arm is left out: %s", error)
        return None


def _arms(
    lens: LensModel, panel: Panel, batch: TokenBatch, *, config: TraceConfig, progress: bool, other: TokenBatch | None
) -> pd.DataFrame:
    """The chosen BOS arm, and the other one where there is one."""

    def name(arm: TokenBatch) -> str:
        return "with" if arm.bos else "without"

    rows = [tables.arm_row(panel, arm=name(batch), chosen=True, config=config)]
    if other is not None:
        label = f"{name(other)} BOS"
        of_other = _aimed(lens, other, config=config, progress=progress, label=label, only=ARM_READINGS)
        rows.append(tables.arm_row(of_other, arm=name(other), chosen=False, config=config))
    return pd.DataFrame(rows)


def _twin(
    lens: LensModel, panel: Panel, batch: TokenBatch, *, config: TraceConfig, progress: bool
) -> tuple[LensModel, Panel]:
    """The random twin, looked at in the same place: same position and growth layers, its own strongest dimensions."""
    twin = random_twin(lens, seed=config.seed)
    spans = tuple((step.first_layer, step.last_layer) for step in panel.finding.steps)
    aim = scout(twin, batch, config=config, position=panel.finding.position, forced=spans)
    measured = measure(twin, batch, finding=aim, config=config, progress=progress, label="random twin", forced=spans)
    return twin, measured


def _patterns(lens: LensModel, batch: TokenBatch) -> np.ndarray:
    """The pattern of the first sequence's first 64 positions: uint8, layer x head x query x key, 255 is all the mass."""
    one = shortened(batch, sequences=1, length=min(_DRAWN_POSITIONS, int(batch.lengths[0])))
    found = capture(lens, one, sites=["pattern"], path="plain")
    stacked = torch.cat([found["pattern", layer] for layer in range(lens.n_layers)])
    return (stacked * 255).round().clamp(0, 255).to(torch.uint8).numpy()

"""The causal half of a trace: every link is intervened on, and the sink is made elsewhere, mediated and moved."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.sink_mask import Rule
from ..data.tokens import TokenBatch
from ..edits.amplification import FACTORS, CentringMeans, centring_means
from ..edits.constructors import edit
from ..edits.effects import classify_change, gained_share, removed_share
from ..edits.hooks import layers_of_edit
from ..edits.outcome import Outcome
from ..engine.baseline_run import BaselineRun
from ..models.lens import LensModel
from ..models.memory import collect_garbage, return_freed_memory
from ..records import RunWriter
from ..records.recomputed import refuse_other_numbers
from ..schema import LEAST_SHARE, column_names
from ..stats import Interval, studentised_interval
from ..text import as_ranges
from . import amplification, makers, mediate, paths, placement
from .config import CONTROL_MARGIN, EVERY_INTERVENTION, FEW_CONTROLS, TraceConfig
from .links import LINKS
from .links.link import Intervention, Link, Trial
from .locate import Location
from .readings import OTHERS_FROM
from .setting import (
    Run,
    Setting,
    add_makers,
    hangs_on_controls,
    make_setting,
    mean_mass,
    sequences_to_choose_by,
    why_no_interventions,
)

CENTRING_TOKENS = 4096


def intervention_table(
    setting: Setting,
    *,
    means: CentringMeans,
    curve: pd.DataFrame,
    links: Sequence[Link] = LINKS,
    progress: bool = False,
) -> pd.DataFrame:
    """Run every intervention of every link: a table with one row per intervention.

    Cost: one pass with the loss an intervention, and a shorter one for each control, in one queue. An intervention that
    answers no question of its link has ``FEW_CONTROLS`` in it, and the others after it where its interval may lie above
    them. Where a verdict may hang on the largest control, those near an end of the interval are then run on all
    positions.
    """
    trial = Trial(setting=setting, generator=setting.make_generator(), means=means, curve=curve)
    links_and_own = [(link.name, one) for link in links for one in link.interventions(trial)]
    own = [one for _, one in links_and_own]
    few = [setting.control_run(one.position) for one in own]
    wanted = [_run_with_sink_masked(setting), *(Run(edits=one.edits, loss=True) for one in own)]
    first = [None if one.is_primary or one.carries else FEW_CONTROLS for one in own]
    of_controls = [_control_runs(one, of=run) for one, run in zip(own, few, strict=True)]
    groups = [wanted, *(runs[:n] for runs, n in zip(of_controls, first, strict=True))]
    (masked, *made), *controls = setting.run_groups(
        groups, label="testing the links" if progress else None
    )
    assert masked.loss is not None  # it was asked for
    rng = np.random.default_rng(setting.config.seed)
    uniform = setting.uniform_mass()
    rows, drawn = list[dict[str, Any]](), list[list[_Control]]()
    for (link, one), run, some, its in zip(links_and_own, made, controls, few, strict=True):
        row = _intervention_row(
            setting, link, one, run, uniform=uniform, masked=masked.loss, rng=rng
        )
        drawn.append(_controls(setting, one, some, of=its, rng=rng))
        rows.append(row | _control_columns(setting, one, drawn[-1]))
    least = min(LEAST_SHARE, setting.config.floors_by_link.get(EVERY_INTERVENTION, LEAST_SHARE))
    above = [  # what is said of it could hang on a control that was not run
        at
        for at, row in enumerate(rows)
        if row["n_controls"] < len(own[at].controls)
        and row["ci_low"] > max(least, row["control_largest"] - CONTROL_MARGIN)
    ]
    others = setting.run_groups([of_controls[at][FEW_CONTROLS:] for at in above])
    for at, rest in zip(above, others, strict=True):
        drawn[at] += _controls(setting, own[at], rest, of=few[at], rng=rng)
        rows[at] |= _control_columns(setting, own[at], drawn[at])

    def is_near(row: dict[str, Any], share: float) -> bool:
        return hangs_on_controls(share, ends=(row["ci_low"], row["ci_high"]), least=least)

    near = [at for at, row in enumerate(rows) if is_near(row, row["control_largest"])]
    which = [[n for n, one in enumerate(drawn[at]) if is_near(rows[at], one.share)] for at in near]
    whole = [setting.control_run(own[at].position, whole=True) for at in near]
    longer = setting.run_groups(
        [
            [_control_runs(own[at], of=run)[n] for n in some]
            for at, run, some in zip(near, whole, which, strict=True)
        ]
    )
    for at, run, some, outcomes in zip(near, whole, which, longer, strict=True):
        again = _controls(setting, own[at], outcomes, of=run, rng=rng)
        for n, control in zip(some, again, strict=True):
            drawn[at][n] = control
        rows[at] |= _control_columns(setting, own[at], drawn[at])
    return pd.DataFrame(rows, columns=column_names("trace", "effects"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Studied:
    """The model and the sequences that interventions are made on."""

    lens: LensModel
    batch: TokenBatch
    location: Location
    supers: Mapping[int, Tensor]
    """Layer -> mask of its super neurons."""
    scores: Mapping[Rule, Tensor] | None = None
    """The scores of the batch's tokens by which sinks are marked (``scores_by_rule``); None computes them."""
    lacks_sink: bool = False
    """The model has no sink to remove, make elsewhere or mediate, so tables but ``makers`` have no rows."""
    too_few_sequences: bool = False
    """No table has rows."""


_COMPARED = ("heads", "layers")
"""Tables that a run that goes on measures again: they must be the same."""


class RunTables:
    """Each table is written when it is made, and read if an earlier start has written it."""

    def __init__(self, writer: RunWriter, *, begin: Callable[[str], None]) -> None:
        self.frames: dict[str, pd.DataFrame] = {}
        self.writer, self._begin = writer, begin

    def write(self, name: str, frame: pd.DataFrame) -> None:
        """Write and keep a table.

        Raises:
            RunError: an earlier start of the run measured something else (``heads`` and ``layers`` are compared).
        """
        if name in _COMPARED and self.writer.has(name):
            numbers = frame.select_dtypes("float")
            there = self.writer.read(name).reindex(columns=numbers.columns)
            what = f"a number of the table {name}"
            refuse_other_numbers(self.writer.folder, there, numbers, what=what)
        self.frames[name] = frame
        self.writer.write_table(name, frame)

    def read_or_make(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        self._begin(name)
        self.frames[name] = self.writer.read_or_make(name, make)
        return_freed_memory()
        return self.frames[name]


@dataclass(frozen=True, kw_only=True)
class _Experiments:
    """Settings and runs that tables share: each is made when a table first needs it."""

    studied: Studied
    tables: RunTables
    config: TraceConfig
    links: Sequence[Link]
    progress: bool

    def _make_setting(self, **chosen: Any) -> Setting:
        one = self.studied
        return make_setting(
            one.lens,
            one.batch,
            config=self.config,
            location=one.location,
            target_position=self.config.target_position,
            super_neurons=one.supers,
            scores=one.scores,
            **chosen,
        )

    @cached_property
    def without_makers(self) -> Setting:
        found = self._make_setting()
        self.tables.writer.write_text("plan.json", found.baseline_run.plan.as_json())
        return found

    @cached_property
    def maker_tables(self) -> dict[str, pd.DataFrame]:
        """They are searched on the sequences that are set aside for it."""
        found, one = None, self.studied
        target = makers.choose_makers_target(self.without_makers, lacks_sink=one.lacks_sink)
        if target is not None:
            chosen = sequences_to_choose_by(one.batch.n_sequences, config=self.config)
            choosing = self._make_setting(chosen=chosen)
            found = makers.find_makers(choosing, target=target, progress=self.progress)
            del choosing  # it holds activations of every layer
            collect_garbage()
        return makers.maker_tables(found, self.without_makers, progress=self.progress)

    @cached_property
    def setting(self) -> Setting:
        return add_makers(self.without_makers, makers.read_makers(self.tables.frames["makers"]))

    @cached_property
    def means(self) -> CentringMeans:
        found = centring_means(
            self.studied.lens,
            n_tokens=CENTRING_TOKENS,
            layers=self.setting.layers_until_growth or None,
            seed=self.config.seed,
            progress=self.progress,
        )
        tensors = {key: one.cpu().numpy() for key, one in found.tensors().items()}
        self.tables.writer.write_tensors("centring_means", tensors)
        return found

    @property
    def amplified(self) -> dict[str, Any]:
        return {"means": self.means, "curve": self.tables.frames["amplification"]}


_TABLES: Mapping[str, Callable[[_Experiments], pd.DataFrame]] = {
    "makers": lambda to: to.maker_tables["makers"],
    "maker_sets": lambda to: to.maker_tables["maker_sets"],
    "amplification": lambda to: amplification.amplification_curve(
        to.setting, means=to.means, factors=FACTORS, progress=to.progress
    ),
    "effects": lambda to: intervention_table(
        to.setting, **to.amplified, links=to.links, progress=to.progress
    ),
    "mediation": lambda to: mediate.mediation_table(
        to.setting,
        amplified=amplification.strongest_amplification_edit(to.setting, **to.amplified),
        links=to.links,
        progress=to.progress,
    ),
    "paths": lambda to: paths.path_table(to.setting, progress=to.progress),
    "placement": lambda to: placement.placement_table(to.setting, progress=to.progress),
}
TABLES = tuple(_TABLES)
"""Names of the tables, which are empty if nothing can be changed."""
_OF_MAKERS = ("makers", "maker_sets")


def write_causal_tables(
    studied: Studied,
    tables: RunTables,
    *,
    config: TraceConfig,
    links: Sequence[Link] = LINKS,
    progress: bool = False,
) -> None:
    """Write all tables of interventions; empty if the ``studied`` model cannot be changed."""
    made = _Experiments(
        studied=studied, tables=tables, config=config, links=links, progress=progress
    )
    able: Sequence[str] = _OF_MAKERS if studied.lacks_sink else TABLES
    if studied.too_few_sequences or why_no_interventions(studied.lens, studied.batch) is not None:
        able = ()
    for name, make in _TABLES.items():
        empty = partial(pd.DataFrame, columns=column_names("trace", name))
        tables.read_or_make(name, partial(make, made) if name in able else empty)


def _run_with_sink_masked(setting: Setting) -> Run:
    """Make the run, with the loss, in which queries cannot attend to the sink position.

    The first queries (8, or a quarter of a short sequence) still can: else the second token sees only itself and
    becomes the next sink.
    """
    position, length = setting.sink_position, setting.tokens.n_positions
    first = max(position + 1, min(OTHERS_FROM, length // 4))

    masked = edit(
        "scores",
        lambda x, _: torch.full_like(x, torch.finfo(x.dtype).min),
        positions=range(first, length),
        keys=[position],
        label="sink masked",
    )
    return Run(edits=[dataclasses.replace(masked, hides=True)], loss=True)


def _control_runs(one: Intervention, *, of: BaselineRun) -> list[Run]:
    return [
        Run(edits=edits, of=of, layers=one.reads, loss=at < FEW_CONTROLS)
        for at, edits in enumerate(one.controls)
    ]


def _moved_share(
    setting: Setting, one: Intervention, run: Outcome, *, before: Outcome, rng: np.random.Generator
) -> Interval:
    at = {"sink_position": setting.sink_position, "layers": list(one.reads), "generator": rng}
    if one.position == setting.target_position:
        return gained_share(before, run, target_position=setting.target_position, **at)
    return removed_share(before, run, **at)


def _intervention_row(
    setting: Setting,
    link: str,
    one: Intervention,
    run: Outcome,
    *,
    uniform: Tensor,
    masked: Float[Tensor, " batch"],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Make a row without its controls.

    ``uniform`` is what the sink has in each layer if attention is spread evenly; ``masked`` is each sequence's loss if
    no query can attend to the sink.
    """
    reads, target, sink = list(one.reads), setting.target_position, setting.sink_position
    baseline = setting.baseline
    found = _moved_share(setting, one, run, before=baseline, rng=rng)
    assert run.loss is not None  # it was asked for, and so was the baseline's
    assert baseline.loss is not None
    beyond = studentised_interval((run.loss - masked).numpy(), generator=rng)
    edited = [layer for edit in one.edits for layer in layers_of_edit(edit, setting.lens)]
    return {
        "link": link,
        "edit": one.name,
        "layers": as_ranges(edited),
        "position": one.position,
        "read_layers": as_ranges(reads),
        "baseline_target_mass": mean_mass(baseline, target, reads),
        "target_mass": mean_mass(run, target, reads),
        "baseline_sink_mass": mean_mass(baseline, sink, reads),
        "sink_mass": mean_mass(run, sink, reads),
        "uniform_sink_mass": float(uniform[reads].mean()),
        "baseline_loss_nats": float(baseline.loss.nanmean()),
        "loss_nats": float(run.loss.nanmean()),
        "control_of": one.control_of,
        "share": found.estimate,
        "ci_low": found.low,
        "ci_high": found.high,
        "outcome": classify_change(
            baseline, run, target_position=target, sink_position=sink, layers=reads
        ),
        "is_primary": one.is_primary,
        "carries": one.carries,
        "masked_loss_nats": float(masked.nanmean()),
        "beyond_masking_nats": beyond.low,
        "uniform_loss_nats": math.log(setting.lens.d_vocab),
        "n": setting.tokens.n_sequences,
        "length": setting.tokens.n_positions,
        "sinks_left_out": setting.averaged.n_sinks,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control:
    """A control of an intervention, beside the run without edits on the same sequences and positions."""

    of: BaselineRun
    share: float
    """Share of the sink that the control removes or makes."""
    mass: float
    """Attention to the position, less that without edits."""
    loss: float
    """In nats, less that without edits; nan if it was not asked for."""


def _controls(
    setting: Setting,
    one: Intervention,
    runs: Sequence[Outcome],
    *,
    of: BaselineRun,
    rng: np.random.Generator,
) -> list[_Control]:
    reads, before = list(one.reads), of.outcome
    assert before.loss is not None  # the baseline run has it
    return [
        _Control(
            of=of,
            share=_moved_share(setting, one, run, before=before, rng=rng).estimate,
            mass=mean_mass(run, one.position, reads) - mean_mass(before, one.position, reads),
            loss=math.nan
            if run.loss is None
            else float(run.loss.nanmean()) - float(before.loss.nanmean()),
        )
        for run in runs
    ]


def _control_columns(
    setting: Setting, one: Intervention, drawn: Sequence[_Control]
) -> dict[str, Any]:
    """Add what controls change, on fewer sequences and positions, to the baseline run of all."""
    baseline = setting.baseline
    assert baseline.loss is not None
    before = mean_mass(baseline, one.position, list(one.reads))
    masses = torch.tensor([before + control.mass for control in drawn], dtype=torch.float32)
    shares = [control.share for control in drawn]
    losses = [control.loss for control in drawn[:FEW_CONTROLS] if not math.isnan(control.loss)]
    return {
        "control_mean": float(masses.mean()),  # nan without controls
        "control_sd": float(masses.std()) if len(masses) > 1 else math.nan,
        "n_controls": len(masses),
        "control_share": float(np.mean(shares)) if shares else math.nan,
        "control_largest": max(shares) if shares else math.nan,
        "control_loss_nats": float(baseline.loss.nanmean()) + float(np.mean(losses))
        if losses
        else math.nan,
        "control_n": drawn[0].of.n_sequences if drawn else 0,
        "control_length": max((control.of.tokens.n_positions for control in drawn), default=0),
    }

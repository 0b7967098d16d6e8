"""The causal half of a trace: every link is intervened on, and the sink is made elsewhere, mediated and moved.

Each link says in its file what makes or breaks it, with matched controls. Here the interventions are made, in the
order of the chain: how much of the sink comes or goes, and what the loss does.
"""

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

from ..data.tokens import TokenBatch
from ..edits.amplification import FACTORS, CentringMeans, centring_means
from ..edits.constructors import edit
from ..edits.effects import classify_change, gained_share, removed_share
from ..edits.hooks import layers_of_edit
from ..edits.outcome import Outcome
from ..models.lens import LensModel
from ..models.memory import collect_garbage
from ..progress import BAR, tqdm
from ..records import RunWriter
from ..records.recomputed import refuse_other_numbers
from ..schema import column_names
from ..stats import Interval, studentised_interval
from ..text import as_ranges
from . import amplification, makers, mediate, paths, placement
from .config import FEW_CONTROLS, TraceConfig
from .links import LINKS
from .links.link import Intervention, Link, Trial
from .locate import Location
from .readings import OTHERS_FROM
from .setting import Setting, add_makers, make_setting, mean_mass, sequences_to_choose_by, why_no_interventions

CENTRING_TOKENS = 4096
"""Random tokens over which the means that amplification moves values away from are taken."""


def intervention_table(
    setting: Setting,
    *,
    means: CentringMeans,
    curve: pd.DataFrame,
    links: Sequence[Link] = LINKS,
    progress: bool = False,
) -> pd.DataFrame:
    """Run every intervention of every link in ``links``: a table with one row per intervention.

    ``share`` is the attention that the target position gained, or that the sink position lost, over the attention that
    the sink has in the baseline run; its 95% interval is over sequences. ``control_share`` is the mean of that share
    over the controls; ``control_mean`` and ``control_sd`` are of the attention to that position under the controls.
    Amplification uses ``means`` and the factors that are best in ``curve``. Cost: one pass of the bridge with the loss
    an intervention, and a shorter one for each control.
    """
    trial = Trial(setting=setting, generator=setting.make_generator(), means=means, curve=curve)
    found = [(link.name, one) for link in links for one in link.interventions(trial)]
    asked = {"uniform": setting.uniform_mass(), "masked": _loss_with_sink_masked(setting)}
    rng = np.random.default_rng(setting.config.seed)
    tested = [link for link in links if link.name in {name for name, _ in found}]
    says = {link.name: f"testing link {at} of {len(tested)}: {link.target}" for at, link in enumerate(tested, start=1)}
    rows = []
    with tqdm(total=len(found), bar_format=BAR, disable=not progress, leave=False) as shown:
        for name, one in found:
            shown.set_description_str(says[name])
            rows.append(_intervention_row(setting, name, one, rng=rng, **asked))
            shown.update()
    return pd.DataFrame(rows, columns=column_names("trace", "effects"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Studied:
    """The model, tokens and location that interventions are made in."""

    lens: LensModel
    batch: TokenBatch
    """The sequences of the trace, of which the first few are used."""
    location: Location
    """Where the sink is."""
    supers: Mapping[int, Tensor]
    """Layer -> mask of its super neurons."""
    lacks_sink: bool = False
    """The model has no sink to remove, make at another position or mediate, so the tables have no rows."""
    too_few_sequences: bool = False
    """Too few sequences have the sink, so no table has rows."""


_COMPARED = ("heads", "layers")
"""Tables of what is measured without an intervention: a run that goes on measures the same, or is refused."""


class RunTables:
    """The tables of a run folder: each is written when it is made, and read if an earlier start has written it."""

    def __init__(self, writer: RunWriter, *, begin: Callable[[str], None]) -> None:
        """Take the folder's writer, and ``begin``, which is called with the name of each table before it is made."""
        self.frames: dict[str, pd.DataFrame] = {}
        self.writer, self._begin = writer, begin

    def write(self, name: str, frame: pd.DataFrame) -> None:
        """Write the table ``frame`` into the run folder, and keep it under ``name``.

        Raises:
            RunError: an earlier start of the run measured something else (``heads`` and ``layers`` are compared).
        """
        if name in _COMPARED and self.writer.has(name):
            held, numbers = self.writer.read(name), frame.select_dtypes("float")
            there = held.reindex(columns=numbers.columns)
            refuse_other_numbers(self.writer.folder, there, numbers, what=f"a number of the table {name}")
        self.frames[name] = frame
        self.writer.write_table(name, frame)

    def read_or_make(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """Return the table ``name``: read it if an earlier start has written it, else call ``make`` and write it."""
        self._begin(name)
        self.frames[name] = self.writer.read_or_make(name, make)
        collect_garbage()
        return self.frames[name]


@dataclass(frozen=True, kw_only=True)
class _Experiments:
    """Settings and runs that several tables of interventions share: each is made once, when a table first needs it."""

    studied: Studied
    tables: RunTables
    config: TraceConfig
    links: Sequence[Link]
    progress: bool

    def _make_setting(self, **chosen: Any) -> Setting:
        one = self.studied
        at = {"location": one.location, "target_position": self.config.target_position, "super_neurons": one.supers}
        return make_setting(one.lens, one.batch, config=self.config, **at, **chosen)

    @cached_property
    def without_makers(self) -> Setting:
        found = self._make_setting()
        self.tables.writer.write_text("plan.json", found.baseline_run.plan.as_json())
        return found

    @cached_property
    def maker_tables(self) -> dict[str, pd.DataFrame]:
        """The tables of makers; they are searched on the sequences that are set aside for it."""
        target, found = makers.choose_makers_target(self.without_makers, lacks_sink=self.studied.lacks_sink), None
        if target is not None:
            chosen = sequences_to_choose_by(self.studied.batch.n_sequences, config=self.config)
            choosing = self._make_setting(chosen=chosen)
            found = makers.find_makers(choosing, target=target, progress=self.progress)
            del choosing  # it holds activations of every layer
            collect_garbage()
        return makers.maker_tables(found, self.without_makers, progress=self.progress)

    @cached_property
    def setting(self) -> Setting:
        """The setting with the makers that were found."""
        return add_makers(self.without_makers, makers.read_makers(self.tables.frames["makers"]))

    @cached_property
    def means(self) -> CentringMeans:
        found = centring_means(
            self.studied.lens, n_tokens=CENTRING_TOKENS, seed=self.config.seed, progress=self.progress
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
    "effects": lambda to: intervention_table(to.setting, **to.amplified, links=to.links, progress=to.progress),
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
"""The tables of a run, in their order. Where nothing can be changed, they are empty."""
_OF_MAKERS = ("makers", "maker_sets")


def write_causal_tables(
    studied: Studied, tables: RunTables, *, config: TraceConfig, links: Sequence[Link] = LINKS, progress: bool = False
) -> None:
    """Write all tables of interventions (``TABLES``) on ``links``; empty if the ``studied`` model cannot be changed."""
    made = _Experiments(studied=studied, tables=tables, config=config, links=links, progress=progress)
    able: Sequence[str] = _OF_MAKERS if studied.lacks_sink else TABLES
    if studied.too_few_sequences or why_no_interventions(studied.lens, studied.batch) is not None:
        able = ()
    for name, make in _TABLES.items():
        empty = partial(pd.DataFrame, columns=column_names("trace", name))
        tables.read_or_make(name, partial(make, made) if name in able else empty)


def _loss_with_sink_masked(setting: Setting) -> Float[Tensor, " batch"]:
    """Return the loss of each sequence, in nats, if queries cannot attend to the sink position.

    The first queries (8, or a quarter of a short sequence) still can: the second token would otherwise see only itself
    and become the next sink.
    """
    position, length = setting.sink_position, setting.tokens.n_positions
    first = max(position + 1, min(OTHERS_FROM, length // 4))

    at = {"positions": range(first, length), "keys": [position], "label": "sink masked"}
    masked = edit("scores", lambda x, _: torch.full_like(x, torch.finfo(x.dtype).min), **at)
    loss = setting.run([dataclasses.replace(masked, hides=True)], loss=True, quiet=True).loss
    assert loss is not None  # it was asked for
    return loss


def _intervention_row(
    setting: Setting, link: str, one: Intervention, *, uniform: Tensor, masked: Tensor, rng: np.random.Generator
) -> dict[str, object]:
    """Run the intervention ``one`` of ``link`` and its controls, and return its row of the table ``effects``.

    ``uniform`` is the attention to the sink, by layer, if all attention were spread evenly; ``masked`` is the loss of
    each sequence if no query can attend to the sink.
    """
    reads, target, sink = list(one.reads), setting.target_position, setting.sink_position
    # Quiet: an edit of a later layer may find its work done by that of an earlier one. ``outcome`` says what changed.
    baseline, whole = setting.baseline, setting.run(one.edits, loss=True, quiet=True)
    at = {"target_position": target, "sink_position": sink}

    def share(run: Outcome, before: Outcome) -> Interval:
        if one.position == target:
            return gained_share(before, run, **at, layers=reads, generator=rng)
        return removed_share(before, run, sink_position=sink, layers=reads, generator=rng)

    decides = one.is_primary or one.carries  # an answer hangs on the largest control
    with_loss, without = one.controls[:FEW_CONTROLS], one.controls[FEW_CONTROLS:] if decides else ()
    few = setting.control_baseline
    controls = setting.run_each(with_loss, layers=reads, loss=True, of=few, quiet=True)
    controls += setting.run_each(without, layers=reads, of=few, quiet=True)
    # With fewer sequences, what the controls change there is added to the baseline run of all.
    baseline_of_few = few.outcome
    over = mean_mass(baseline, one.position, reads) - mean_mass(baseline_of_few, one.position, reads)
    masses = torch.tensor([mean_mass(run, one.position, reads) + over for run in controls], dtype=torch.float32)
    found = share(whole, baseline)
    assert whole.loss is not None  # it was asked for, and so was the baseline's
    assert baseline.loss is not None
    beyond = studentised_interval((whole.loss - masked).numpy(), generator=rng)
    shares = [share(run, baseline_of_few).estimate for run in controls]
    assert baseline_of_few.loss is not None  # as the baseline's
    more = float(baseline.loss.mean()) - float(baseline_of_few.loss.mean())
    losses = [float(run.loss.mean()) + more for run in controls if run.loss is not None]
    return {
        "link": link,
        "edit": one.name,
        "layers": as_ranges([layer for edit in one.edits for layer in layers_of_edit(edit, setting.lens)]),
        "position": one.position,
        "read_layers": as_ranges(reads),
        "baseline_target_mass": mean_mass(baseline, target, reads),
        "target_mass": mean_mass(whole, target, reads),
        "baseline_sink_mass": mean_mass(baseline, sink, reads),
        "sink_mass": mean_mass(whole, sink, reads),
        "uniform_sink_mass": float(uniform[reads].mean()),
        "baseline_loss_nats": float(baseline.loss.mean()),
        "loss_nats": float(whole.loss.mean()),
        "control_of": one.control_of,
        "control_mean": float(masses.mean()),  # nan without controls
        "control_sd": float(masses.std()) if len(masses) > 1 else math.nan,
        "n_controls": len(masses),
        "share": found.estimate,
        "ci_low": found.low,
        "ci_high": found.high,
        "control_share": float(np.mean(shares)) if shares else math.nan,
        "outcome": classify_change(baseline, whole, **at, layers=reads),
        "is_primary": one.is_primary,
        "carries": one.carries,
        "control_largest": max(shares) if shares else math.nan,
        "control_loss_nats": float(np.mean(losses)) if losses else math.nan,
        "masked_loss_nats": float(masked.mean()),
        "beyond_masking_nats": beyond.low,
        "uniform_loss_nats": math.log(setting.lens.d_vocab),
        "n": setting.tokens.n_sequences,
        "control_n": few.n_sequences if controls else 0,
        "sinks_left_out": setting.averaged.n_sinks,
    }

"""``trace``: the chain of one model on one token batch, from value aggregation to the sink, with its verdicts.

Scout where the sink is; measure every layer in one pass; measure the other BOS condition and the
random-init baseline; give each link a value, an interval, nulls and a verdict; write the run folder.
"""

import contextlib
import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ..activations.attention import Kernel, choose_kernel
from ..activations.forward import resolve
from ..activations.precision import measure_rounding
from ..activations.record import capture_batch
from ..activations.sink_mask import LEAST, scores_by_rule
from ..configuration import make_config, refuse_unknown_names
from ..data.tokens import TokenBatch, Tokens, as_batch, decode_tokens, refuse_integer_positions
from ..errors import InputError, UndrawnError
from ..models.inputs import check_sequences, config_of_given
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens, random_init
from ..models.memory import collect_garbage, free_bytes, store_parameters_on_disk, weight_bytes
from ..models.running import exclusive_use
from ..models.sites import site_of
from ..progress import tqdm
from ..records import Result, RunWriter, create_run, default_run_folder, place_of_run, read_run
from ..signatures import takes
from ..text import plural, size_text
from . import summary, tables
from .at_token import Occurrences, cut_at_token
from .config import EVERY_INTERVENTION, TraceConfig
from .evidence import Evidence, gather_evidence
from .inputs import (
    align_sinks,
    batch_in_other_bos_condition,
    find_marked_sink,
    find_marked_tokens,
    find_sinks_elsewhere,
    mask_sequences_with_sink,
    trace_provenance,
)
from .interventions import TABLES, RunTables, Studied, write_causal_tables
from .judge import chain_table, link_statistic_values, link_table
from .links import LINKS
from .links.link import Link
from .locate import Location, parse_location
from .measure import CONDITION_READINGS, Panel, measure, scout, scout_and_measure
from .neurons import expert_table, neuron_table, selectivity_table, super_neurons_of_layer
from .passes import bytes_beside_model, check_trace_fits_memory
from .setting import check_interior_position, why_no_interventions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOG = logging.getLogger(__name__)
__all__ = ["FILES", "Trace", "TraceConfig", "trace"]

FILES = (
    "tokens",
    "chain",
    "heads",
    "positions",
    "layers",
    "dimensions",
    "growth_steps",
    "neurons",
    "selectivity",
    "key_split",
    "patterns",
    "conditions",
    "links",
    "summary",
)
"""What every finished run holds beside ``run.json``, ``location.json`` and ``report.html``; ``trace`` adds those of
experts, of the random-init baseline and of interventions, whose ``plan.json`` says how their forwards were made."""

_DRAWN_POSITIONS = 64
_LOCATION_FILE = "location.json"


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace(Result):
    """A finished trace."""

    main = "links"
    config: TraceConfig
    location: Location

    @property
    def links(self) -> pd.DataFrame:
        """The table ``links``: one row per (link, statistic, null)."""
        return self.tables["links"]

    @property
    def super_neurons(self) -> pd.DataFrame:
        """The rows of the table ``neurons`` that are super neurons, the largest contribution first."""
        supers = self.tables["neurons"].query("is_super")
        return supers.sort_values(by="contribution_share", ascending=False, ignore_index=True)

    def draw(
        self, style: Literal["page", "paper"] = "page", *, width: float | None = None
    ) -> "Figure":
        """Draw the chain: each link with its verdict and what its intervention removes.

        Args:
            style: ``page`` as in a report, ``paper`` for a column or two.
            width: in inches; a single column is 3.25.

        Raises:
            InputError: another style, or more than fits into the width.
        """
        from .page.circuit import chain_circuit

        return chain_circuit(self.run).draw(style, width=width)

    def notebook_parts(self) -> tuple[object, ...]:
        """The picture of the chain and the verdict on every link, below the headline."""
        primary = self.links.loc[self.links["is_primary"]].drop_duplicates("link")
        return self.draw(), primary.filter(
            items=["link", "verdict", "statistic", "value", "ci_low", "ci_high"]
        )


@takes(TraceConfig)
def trace(
    model: ModelLike,
    tokens: Tokens | str | None = None,
    *,
    config: TraceConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    report: bool = True,
    links: Sequence[Link] = LINKS,
    **fields: Any,
) -> Trace:
    """Trace the chain on a model.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        tokens: sequences to use instead of those that the configuration describes; no other BOS condition is read then.
            Token ids, a row per sequence, are a batch. A text is the configuration's field: "random".
        config: what to ask; the default one if None. Beside a model in memory, its device and type are only recorded.
        out: the run folder; nothing is written if None. An interrupted run of the same question is continued: what is
            finished of the other condition and the baseline is not measured again. If only the page is missing, it is
            drawn.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        report: draw the page in ``out`` at the end.
        links: the chain.
        **fields: fields of ``TraceConfig``, such as ``sequences=8``; they win over those of ``config``.

    Raises:
        ModelError, InputError, KernelError, RunError: before anything is written, what was found and needed.
    """
    asked = _make_inputs(
        model, tokens, config=config, links=links, progress=progress, fields=fields
    )
    lens, batch, there, config = asked.lens, asked.batch, asked.there, asked.config
    why_not = why_no_interventions(lens, batch) if config.interventions else None
    if why_not is not None:
        warnings.warn(
            f"no intervention is made: {why_not}; links are judged by what is measured alone",
            stacklevel=2,
        )
    provenance = trace_provenance(lens, batch, config=config, kernel=asked.kernel)
    provenance["links"] = [link.name for link in links]
    if there is not None:
        provenance["at"] = {"ids": list(there.ids), "token": there.text, "found": there.found}
    expects = (
        *FILES,
        *(() if lens.d_expert is None else ("experts",)),
        *(("random_init_heads", "random_init_links") if config.random_init else ()),
        *(TABLES if config.interventions else ()),
    )
    with place_of_run(out, name=lens.name) as place:
        try:
            writer = create_run(
                place.folder,
                kind="trace",
                config=dataclasses.asdict(config),
                provenance=provenance,
                expects=expects,
                overwrite=overwrite,
                recomputes=True,
            )
        except UndrawnError:
            location = parse_location((place.folder / _LOCATION_FILE).read_text("utf-8"))
            frames = dict(read_run(place.folder).tables)
        else:
            with writer, _StageBar(config, progress=progress) as stages:
                frames, location = _measure_and_judge(asked, writer=writer, stages=stages)
                writer.write_text(_LOCATION_FILE, location.as_json())
        from .page.story import find_story, headline, title

        run = read_run(place.folder)
        said = "\n".join([f"{title(run)}.", *headline(find_story(run))])
        result = Trace(
            folder=place.named,
            place=place,
            headline=said,
            config=config,
            location=location,
            tables=frames,
        )
        if report and out is not None:
            result.report()
        return result


def run_trace(
    config: TraceConfig, *, out: str | Path | None, overwrite: bool, progress: bool
) -> Trace:
    folder = default_run_folder(config.model) if out is None else out
    return trace(
        config.model,
        config=config,
        out=folder,
        overwrite=overwrite,
        progress=progress,
        report=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """The model, the sequences and the configuration of a trace."""

    lens: LensModel
    batch: TokenBatch
    other: TokenBatch | None
    """In the other BOS condition, if that is read."""
    there: Occurrences | None
    """Where the token stands that the configuration names, if it names one."""
    config: TraceConfig
    kernel: Kernel
    links: Sequence[Link]
    progress: bool
    repeats: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """Name and reason of each measuring pass after the first."""

    def measure(
        self, batch: TokenBatch, *, label: str = "measuring", reason: str = "", **how: Any
    ) -> Panel:
        """Measure a batch; a repeat of an earlier pass has a ``reason``, which is kept in ``repeats``."""
        own, shown = [link.readings for link in self.links], label if self.progress else None
        if reason:
            self.repeats.append({"name": label, "reason": reason})

        def tell_repeat(reason: str) -> None:
            self.repeats.append({"name": f"{label} again", "reason": reason})

        given = {"config": self.config, "own": own, "label": shown, "tell_repeat": tell_repeat}
        return scout_and_measure(self.lens, batch, **given | how)


def _make_inputs(
    model: ModelLike,
    tokens: Tokens | str | None,
    *,
    config: TraceConfig | None,
    links: Sequence[Link],
    progress: bool,
    fields: Mapping[str, Any],
) -> _Inputs:
    if isinstance(model, nn.Module):
        model = as_lens(model)
    if isinstance(tokens, str):
        fields, tokens = {**fields, "tokens": tokens}, None
    sequences = None if tokens is None else as_batch(tokens)
    name = model.name if isinstance(model, LensModel) else str(model)
    if config is not None and fields.get("quick") is True and not config.quick:
        config = config.quickly()
    config = make_config(TraceConfig, config, {**fields, "model": name}, where="trace")
    if sequences is not None:
        config = config_of_given(config, sequences, asked=fields)
    if not isinstance(model, LensModel) and sequences is None:
        check_sequences(config)
        if config.target_position is not None and not config.prompts:
            check_interior_position(config.target_position, shortest=config.length)
    refuse_unknown_names(
        config.floors_by_link, [*(link.name for link in links), EVERY_INTERVENTION], where="floors"
    )
    lens, batch = resolve(model, tokens, config=config)
    if batch.n_positions > (switch := lens.rotation_switch or batch.n_positions):
        raise InputError(
            f"the sequences have {batch.n_positions} tokens, and {lens.name} rotates those over {switch} otherwise "
            "(longrope), also the parts that a trace cuts from them; need shorter sequences"
        )
    kernel = choose_kernel(lens.family, device=lens.device, asked=config.kernel)
    reads_other = sequences is None and config.at is None
    other = batch_in_other_bos_condition(lens, batch, config=config) if reads_other else None
    there = None if config.at is None else cut_at_token(lens, batch, config=config)
    batch = batch if there is None else there.tokens
    if config.target_position is not None:
        refuse_integer_positions(batch, [config.target_position], of="target_position")
        check_interior_position(config.target_position, shortest=int(batch.lengths.min()))
    batch = as_batch(batch)
    site_of("neurons", family=lens.family)  # refused where there are none
    if lens.offloaded and config.random_init:
        raise InputError(
            f"{lens.name} does not fit into memory, and neither does its random-init baseline; trace without the "
            "baseline: random_init=False"
        )
    if lens.device.type == "cpu" and not lens.offloaded:
        check_trace_fits_memory(lens, config)
    return _Inputs(
        lens=lens,
        batch=batch,
        other=other,
        there=there,
        config=config,
        kernel=kernel,
        links=links,
        progress=progress,
    )


def _measure_and_judge(
    asked: _Inputs, *, writer: RunWriter, stages: "_StageBar"
) -> tuple[dict[str, pd.DataFrame], Location]:
    lens, config, links = asked.lens, asked.config, asked.links
    kept = RunTables(writer, begin=stages.begin)
    kept.write("chain", chain_table(links))
    located = _locate_and_measure(asked)
    writer.add_provenance(repeats=asked.repeats)
    batch, panel = located.batch, located.panel
    kept.write("tokens", decode_tokens(batch, lens.tokenizer))
    rounded = measure_rounding(lens, batch, position=panel.location.sink_position)
    evidence = gather_evidence(lens, panel, config=config)
    scores = scores_by_rule(lens, batch, tuple(LEAST), batch_size=config.batch_size)
    for name, frame in _measured_tables(evidence, links=links):
        kept.write(name, frame)
    writer.write_tensors("patterns", {"pattern": _first_patterns(lens, batch)})
    kept.read_or_make("conditions", lambda: _condition_table(asked, located))
    if config.random_init:
        baseline = functools.cache(lambda: _measure_untrained(asked, located))
        with _make_room_for_baseline(lens, config=config, folder=writer.folder):
            kept.read_or_make(
                "random_init_heads",
                lambda: tables.head_table(*baseline(), threshold=config.threshold),
            )
            values = functools.partial(link_statistic_values, links=links)
            kept.read_or_make(
                "random_init_links", lambda: values(gather_evidence(*baseline(), config=config))
            )
            baseline.cache_clear()  # a second model, and its panel
            collect_garbage()
    if config.interventions:
        supers = {
            layer: super_neurons_of_layer(evidence.splits, layer=layer)
            for layer in panel.layers("neurons_at_sinks")
        }
        studied = Studied(
            lens=lens,
            batch=batch,
            supers=supers,
            scores=scores,
            too_few_sequences=located.too_few_sequences,
            location=panel.location,
            lacks_sink=panel.lacks_sink,
        )
        write_causal_tables(studied, kept, config=config, links=links, progress=asked.progress)
    kept.write(
        "links",
        link_table(
            evidence,
            length=round(float(batch.lengths.double().mean())),
            links=links,
            random_init=kept.frames.get("random_init_links"),
            effects=kept.frames.get("effects"),
        ),
    )
    marked = find_marked_tokens(
        lens,
        batch,
        scores=scores,
        studied=panel.location.sink_positions,
        batch_size=config.batch_size,
    )
    kept.frames["summary"] = summary.summary_table(
        located,
        kept.frames,
        config=config,
        rounded=rounded,
        marked=marked,
        own_attention=lens.own_attention is not None,
    )
    writer.write_csv("summary", kept.frames["summary"])
    return kept.frames, panel.location


def _locate_and_measure(asked: _Inputs) -> summary.Located:
    """Measure again with aligned sequences, or without those that lack the sink."""
    batch, config, there = asked.batch, asked.config, asked.there
    given = None if there is None else there.position
    answered: list[int | None] = []  # the position of each first answer

    def answer(rates: Tensor) -> None:
        place, said = summary.first_sink_answer(rates, config=config, tokens=batch, position=given)
        if [place] != answered[-1:]:
            _LOG.info("%s", said)
            answered.append(place)

    panel = asked.measure(batch, position=given, tell=answer)
    rates, position, moved = panel["rate_by_key"], panel.location.sink_position, None
    if there is None:
        moved = align_sinks(batch, rates, position=position, min_sink_rate=config.min_sink_rate)
    if moved is not None:
        batch = moved
        reason = (
            "sequences have their sink at different positions: each is cut so that it is at one"
        )
        panel = asked.measure(batch, label="measuring, aligned", reason=reason)
    answer(panel["rate_by_key"][..., : panel.shortest])
    others: dict[int, int] = {}
    if panel.location.sink_found and moved is None and there is None:
        others = find_sinks_elsewhere(rates, position=position)
    n_asked = batch.n_sequences
    kept = torch.tensor([number for number in range(n_asked) if number not in others])
    if others:  # what makes a sink at the studied position is asked where it is one
        batch = batch[kept]
        reason = f"{plural(len(others), 'sequence')} left out: their sink is at another position"
        panel = asked.measure(batch, label="measuring where the sink is", reason=reason)
    having, panel = _keep_sequences_with_sink(asked, batch, panel)
    return summary.Located(
        batch=batch[having],
        panel=panel,
        aligned=moved is not None,
        uncut=asked.batch.n_sequences - n_asked,
        there=there,
        elsewhere=tuple(others.values()),
        lacking=int((~having).sum()),
        n_asked=n_asked,
        kept=kept[having],
    )


def _keep_sequences_with_sink(
    asked: _Inputs, batch: TokenBatch, panel: Panel
) -> tuple[Tensor, Panel]:
    """Mark and measure the sequences that have the sink; all if all have it, or none."""
    config, position = asked.config, panel.location.sink_position
    every = torch.ones(batch.n_sequences, dtype=torch.bool)
    given = None if asked.there is None else asked.there.position
    if panel.location.sink_found:
        n_heads = int((~panel.at_sink("sink_score", position).isnan()).any(1).sum())
        having = mask_sequences_with_sink(
            panel.sink_rate(config.threshold), n_heads=n_heads, min_sink_rate=config.min_sink_rate
        )
    elif panel.lacks_sink and given is None:  # it may be in so few that their mean does not show it
        position, having = find_marked_sink(asked.lens, batch, batch_size=config.batch_size)
    else:
        return every, panel
    if bool(having.all()) or not bool(having.any()):
        return every, panel
    some = batch[having]
    label = "measuring where there is a sink"
    reason = f"{plural(batch.n_sequences - some.n_sequences, 'sequence')} left out: no sink"
    found = asked.measure(some, label=label, reason=reason, position=given)
    if (place := found.location.sink_position) != position:
        reason = f"the rest has its sink at {place}: position {position}, which they were chosen by"
        found = asked.measure(some, label=label, reason=reason, position=position)
    return (having, found) if found.location.sink_found else (every, panel)


def _measured_tables(
    evidence: Evidence, *, links: Sequence[Link]
) -> Iterator[tuple[str, pd.DataFrame]]:
    lens, panel, splits, config = evidence.lens, evidence.panel, evidence.splits, evidence.config
    at = panel.location.sink_position
    errors = {split.layer: split.error for split in splits if split.position == at}
    yield "heads", tables.head_table(lens, panel, threshold=config.threshold)
    yield "positions", tables.position_table(panel)
    yield "layers", tables.layer_table(panel)
    yield "dimensions", tables.dimension_table(panel, config=config)
    yield "growth_steps", tables.growth_step_table(panel, errors)
    yield "neurons", neuron_table(lens, panel, splits)
    if lens.d_expert is not None:
        yield "experts", expert_table(lens, panel, splits, super_share=config.super_share)
    yield "selectivity", selectivity_table(lens, panel, splits)
    yield "key_split", tables.key_table(panel, links=links)


_STAGES = {
    "measuring": ("measuring", 7),
    "conditions": ("measuring with the other BOS condition", 10),
    "random_init_heads": ("measuring a model with random weights", 20),
    "makers": ("finding what makes the sink", 48),
    "amplification": ("amplifying values", 3),
    "effects": ("testing the links", 22),
    "mediation": ("freezing links, one at a time", 35),
    "placement": ("position or token?", 4),
}
"""First table of a stage -> what the bar says, and seconds of the default model on two cores."""


class _StageBar:
    """A progress bar of the stages, with about how long the rest takes."""

    def __init__(self, config: TraceConfig, *, progress: bool) -> None:
        asked = {"random_init_heads": config.random_init} | dict.fromkeys(
            TABLES, config.interventions
        )
        self._left = [name for name in _STAGES if asked.get(name, True)]
        total = sum(_STAGES[name][1] for name in self._left)
        first, form = _STAGES[self._left[0]][0], "trace: {desc}"
        self._bar = tqdm(
            total=total, desc=first, bar_format=form, smoothing=0, disable=not progress, leave=False
        )
        self._now, self._begun = "", time.monotonic()

    def __enter__(self) -> "_StageBar":
        self.begin("measuring")
        return self

    def __exit__(self, *error: object) -> None:
        self._say_finished()
        self._bar.set_description_str("trace", refresh=False)
        self._bar.close()

    def begin(self, name: str) -> None:
        if name in self._left:
            self._say_finished()
            done = self._left.index(name)
            self._bar.update(
                sum(_STAGES[one][1] for one in [self._now, *self._left[:done]] if one in _STAGES)
            )
            self._now, self._left, self._begun = name, self._left[done + 1 :], time.monotonic()
            if self._bar.n:
                self._bar.bar_format = "trace: {desc}, about {remaining} left"
            self._bar.set_description_str(_STAGES[name][0])

    def _say_finished(self) -> None:
        """Leave a line where the output is kept, as in a log."""
        seconds = time.monotonic() - self._begun
        if self._now:
            self._bar.leave_line(
                f"{_STAGES[self._now][0]}: {self._bar.format_interval(seconds)}", seconds=seconds
            )


def _condition_table(asked: _Inputs, located: summary.Located) -> pd.DataFrame:
    config, names = asked.config, {True: "with", False: "without"}
    other = None if located.aligned or asked.other is None else asked.other[located.kept]
    name = names[located.batch.bos]
    rows = [tables.condition_row(located.panel, condition=name, chosen=True, config=config)]
    if other is not None:
        name = names[other.bos]
        of_other = asked.measure(other, label=f"{name} BOS", own=(), only=CONDITION_READINGS)
        rows.append(tables.condition_row(of_other, condition=name, chosen=False, config=config))
    return pd.DataFrame(rows)


def _measure_untrained(asked: _Inputs, located: summary.Located) -> tuple[LensModel, Panel]:
    config, batch, found = asked.config, located.batch, located.panel.location
    untrained = random_init(asked.lens, seed=config.seed)
    spans = tuple((step.first_layer, step.last_layer) for step in found.steps)
    aim = scout(untrained, batch, config=config, position=found.sink_position, forced=spans)
    aim = dataclasses.replace(
        aim, outliers={layer: aim.outliers[layer] for layer in found.outliers}
    )
    panel = measure(
        untrained,
        batch,
        config=config,
        plan=aim.measuring_plan(untrained.layers_with("k")),
        forced=spans,
        own=[link.readings for link in asked.links],
        label="random-init baseline" if asked.progress else None,
    )
    return untrained, panel


@contextlib.contextmanager
def _make_room_for_baseline(
    lens: LensModel, *, config: TraceConfig, folder: Path
) -> Iterator[None]:
    """If both models do not fit in memory, keep the weights of the first in a file in ``folder``."""
    needed, free = bytes_beside_model(lens, config, twin=weight_bytes(lens.plain)), free_bytes()
    too_large = lens.device.type == "cpu" and needed > free
    if too_large:
        said = "only %s of memory are free: the weights wait in a file while the random-init baseline is measured"
        _LOG.warning(said, size_text(free))
    # views that are shared would keep the memory
    if not too_large or any(one.has_shared_views() for one in lens.state.turns.noted):
        yield
        return
    with exclusive_use(lens), store_parameters_on_disk(lens.plain, folder=folder):
        yield


def _first_patterns(lens: LensModel, batch: TokenBatch) -> np.ndarray:
    """Return the first sequence's pattern: uint8, layer x head x query x key, 255 is mass 1; 0 without attention."""
    first = batch[:1].cut(min(_DRAWN_POSITIONS, int(batch.lengths[0])))
    found = capture_batch(lens, first, sites=["pattern"])
    nothing = torch.zeros_like(found["pattern", lens.attention_layers[0]])
    patterns = [found.tensors.get(("pattern", layer), nothing) for layer in range(lens.n_layers)]
    return (torch.cat(patterns) * 255).round().clamp(0, 255).to(torch.uint8).numpy()

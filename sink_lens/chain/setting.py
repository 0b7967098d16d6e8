"""The setting of interventions: a few sequences, their sink position, a target position, and the baseline run.

A quantity at a position is *frozen* at its baseline value while something upstream is changed. In the model's own sink
it is *mean ablated* instead: set to ``mean_ordinary``, the mean over the tokens that are no sink.
"""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.record import Reading, stream_batch
from ..activations.sink_mask import Rule, mark_sinks
from ..data.tokens import TokenBatch
from ..edits.constructors import Edit, freeze
from ..edits.hooks import warn_of_edits_without_effect
from ..edits.isolation import isolate
from ..edits.mean_ablation import Averaged, tokens_to_average
from ..edits.metrics import loss as loss_of
from ..edits.metrics import sink_mass
from ..edits.outcome import Outcome
from ..engine.baseline_run import BaselineRun
from ..engine.cells import cell_of_edits
from ..engine.engine import outcomes_in_one_queue
from ..engine.needs import Needs
from ..engine.trust import make_checked_run
from ..errors import InputError
from ..measures.attention import uniform_mass
from ..models.lens import LensModel
from ..models.sites import sites_of
from ..progress import tqdm
from ..schema import ALL_STEPS, LEAST_SINK
from .config import CONTROL_LENGTH, CONTROL_MARGIN, TraceConfig
from .locate import GrowthStep, Location
from .readings import OTHERS_FROM, evenly_spaced

Edits = tuple[Edit, ...]
Units = Mapping[int, list[int]]
"""Layer -> neurons, or dimensions."""
Kind = Literal[
    "neuron",
    "head",
    "mixer",
    "layer input",
    "embedding",
    "position embedding",
    "key bias",
    "sink logit",
]
WHOLE: Mapping[Kind, str] = {"mixer": "mixer_out", "layer input": "per_layer_out"}
"""Kind of a part that a layer has once -> the site of what it adds."""
_SHORTEST = OTHERS_FROM + 4
_AFTER_POSITION = 32
"""Positions that follow the target position, where the sequences have them."""
_LAYERS_AFTER = 5
_EVERY_LAYER = ("attn_in", "k", "z_raw", "attn_out", "mixer_out", "per_layer_out", "resid_post")
"""Sites of which the links' interventions read every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The layers after a growth step and before the next, or after all steps, in which the sink is read."""

    number: int
    """Index of the growth step; -1 in a model without one, ``ALL_STEPS`` for all of them together."""
    steps: tuple[GrowthStep, ...]
    layers: tuple[int, ...]
    """Those with attention."""
    every: tuple[int, ...] = ()
    """All of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenQuantity:
    """Edits that freeze or mean ablate one quantity, and controls of the same size."""

    edits: Edits
    controls: tuple[Edits, ...]
    size: int
    """Number of values that are kept per token."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Maker:
    """A part of the model that writes to the sink position, or gives its key or its queries a bias."""

    kind: Kind
    layer: int
    """-1 for an embedding."""
    unit: int
    """Neuron, head, key-value head (key bias), token id (embedding) or position (position embedding); else 0."""

    def __str__(self) -> str:
        """Write the part as in tables: ``11.1229`` for a neuron, else with its kind."""
        if self.layer < 0:
            return f"{self.kind} {self.unit}"
        if self.kind in WHOLE:
            return f"{self.kind} {self.layer}"
        place = f"{self.layer}.{self.unit}"
        return place if self.kind == "neuron" else f"{self.kind} {place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run to make: edits, the run that they continue, and what is read of it."""

    edits: Sequence[Edit]
    of: BaselineRun | None = None
    """The run that it continues, with its edits; None is the setting's baseline run."""
    layers: Sequence[int] | None = None
    """Those in which attention is read; None is all. A run that was made before may have more."""
    loss: bool = False
    sites: Sequence[str] = ()
    state: bool = False
    """Keep the stream, too."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model, a few sequences, their baseline run, and the edits that freeze or mean ablate."""

    lens: LensModel
    tokens: TokenBatch
    location: Location
    target_position: int
    """The interior position at which a sink is made."""
    baseline_run: BaselineRun = field(repr=False)
    """With its loss and the stream after every layer, as interventions continue it."""
    segments: tuple[Segment, ...]
    config: TraceConfig
    averaged: Averaged = field(repr=False)
    super_neurons: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    """Layer -> mask of its super neurons, and of the neurons among the makers."""
    makers: tuple[Maker, ...] = ()
    n_added: int = 0
    """Neurons of the masks that are makers and no super neurons."""
    read_layers: tuple[int, ...] | None = None
    """Layers in which the sink is read (``sink_layers``); None takes those in which it is."""
    _tensors: dict[tuple[str, int], Tensor] = field(init=False, default_factory=dict, repr=False)
    _edits: dict[tuple[Any, ...], Edit] = field(init=False, default_factory=dict, repr=False)
    _runs: dict[tuple[BaselineRun, Edits], tuple[Needs, Outcome, set[int]]] = field(
        init=False, default_factory=dict, repr=False
    )
    """What they read, their outcomes, and which of their edits acted."""

    @cached_property
    def baseline(self) -> Outcome:
        return self.baseline_run.outcome

    @property
    def sink_position(self) -> int:
        return self.location.sink_position

    @property
    def all_steps_segment(self) -> Segment | None:
        """All growth steps as one segment; None with fewer than two."""
        steps = self.location.steps
        if len(steps) < 2:
            return None
        layers = tuple(layer for layer in self.sink_layers if layer > steps[-1].last_layer)
        return Segment(number=ALL_STEPS, steps=steps, layers=layers) if layers else None

    @property
    def layers_after_growth(self) -> tuple[int, ...]:
        """All layers with attention after the first growth step and in no other."""
        return tuple(layer for segment in self.segments for layer in segment.layers)

    @cached_property
    def sink_layers(self) -> tuple[int, ...]:
        """The layers in which the sink has clearly more attention than uniform attention gives it.

        If there are none, all layers after the first growth step.
        """
        if self.read_layers is not None:
            return self.read_layers
        mass = self.baseline.mass[..., self.baseline.positions.index(self.sink_position)].nanmean(
            dim=(1, 2)
        )
        with_sink = (mass - self.uniform_mass() >= LEAST_SINK).nonzero().flatten().tolist()
        return tuple(with_sink) or self.layers_after_growth

    def sink_layers_with_keys_of(self, layers: Collection[int]) -> tuple[int, ...]:
        """Return the layers of the sink that attend with keys of ``layers``; in Gemma 4, some use those of others."""
        return tuple(one for one in self.sink_layers if self.lens.key_layers([one])[0] in layers)

    @cached_property
    def null_mass(self) -> Float[Tensor, "layer head"]:
        """Attention that goes to no key, mean over queries and sequences."""
        read = Reading(
            name="null", sites=("rows",), function=lambda view: 1 - view["rows"].sum(-1).mean(-1)
        )
        rows = torch.arange(1, self.tokens.n_positions)
        return stream_batch(self.lens, self.tokens, [read], rows=rows).stacked("null").mean(1)

    @property
    def feeding_layers(self) -> tuple[int, ...]:
        return self.location.feeding_layers(self.lens.attention_layers)

    @property
    def layers_until_growth(self) -> tuple[int, ...]:
        """All layers with attention up to the end of the first growth step; some hybrids have none."""
        attention, first = self.lens.attention_layers, self.segments[0].layers[0]
        early = tuple(layer for layer in attention if layer < first)
        return early if early or self.location.steps else attention[:1]

    def layers_having(self, site: str, layers: Iterable[int]) -> list[int]:
        return [layer for layer in layers if layer in self.lens.layers_with(site)]

    def layers_until_sink(self, site: str) -> list[int]:
        """Return the layers before those with the sink, and up to the end of the first growth step."""
        ends = [step.last_layer + 1 for step in self.location.steps[:1]]
        return self.layers_having(site, range(max(1, min(self.sink_layers), *ends))) or list(
            self.feeding_layers
        )

    @property
    def layers_right_after_growth(self) -> tuple[int, ...]:
        return self.segments[0].layers[:_LAYERS_AFTER]

    def uniform_mass(self) -> Float[Tensor, " layer"]:
        """Compute the attention to the sink position if every query spread its row sum evenly."""
        lens, sums = self.lens, None
        if lens.family.sink_logit or lens.own_attention is not None:
            read = Reading(
                name="row_sum", sites=("rows",), function=lambda view: view["rows"].sum(-1).mean(1)
            )
            rows = torch.arange(self.tokens.n_positions)
            sums = stream_batch(lens, self.tokens, [read], rows=rows).stacked("row_sum")
        found = [
            uniform_mass(
                self.tokens.valid,
                key=self.sink_position,
                reach=lens.reach(layer),
                row_sum=None if sums is None else sums[layer],
            )
            for layer in range(lens.n_layers)
        ]
        return torch.stack(found).nanmean(1)

    def make_generator(self) -> torch.Generator:
        """Each call gives the same draws."""
        return torch.Generator().manual_seed(self.config.seed)

    def control_positions(self, position: int) -> list[int]:
        """Pick at most ``config.controls`` positions, no sinks or target, if possible all after ``position``.

        They are among those of ``control_run``.
        """
        end = min(self.tokens.n_positions, position + CONTROL_LENGTH) - 1
        taken, controls = (
            {*self.location.sink_positions, self.target_position},
            self.config.controls,
        )
        free = [p for p in range(1, end) if p not in taken]
        later = [p for p in free if p > position]
        return evenly_spaced(later if len(later) >= controls else free, controls)

    def run(self, edits: Sequence[Edit], *, quiet: bool = False, **read: Any) -> Outcome:
        """Make one run; ``read`` are fields of ``Run``."""
        return self.run_each([Run(edits=edits, **read)], quiet=quiet)[0]

    def run_each(
        self, several: Sequence[Run], *, quiet: bool = True, label: str | None = None
    ) -> list[Outcome]:
        """Make runs, all in one queue, and return their outcomes.

        Only the layers and positions that an edit can change are computed. Equal runs are made once, and kept unless
        they continue an edited run. Without ``quiet``, an edit that changed nothing causes a warning.
        """
        wanted: dict[tuple[BaselineRun, Edits], Needs] = {}
        keys = list[tuple[BaselineRun, Edits]]()
        for one in several:
            every = range(self.lens.n_layers) if one.layers is None else one.layers
            layers = tuple(sorted(set(every)))
            of = one.of or self.baseline_run
            keys.append((of.with_sites(one.sites, layers=layers, loss=one.loss), tuple(one.edits)))
            key = keys[-1]
            needs = dataclasses.replace(
                key[0].needs,
                layers=layers,
                sites=tuple(one.sites),
                state=one.state,
                loss=one.loss,
                whole=one.loss,
            )
            wanted[key] = _join_needs(needs, wanted.get(key, needs))
        missing = {
            key: needs
            for key, needs in wanted.items()
            if key not in self._runs or _join_needs(needs, self._runs[key][0]) != self._runs[key][0]
        }
        total = sum(len(run.prompt_batches) for run, _ in missing)
        with tqdm(total=total, desc=label, unit="run", disable=label is None, leave=False) as shown:
            asked = [(*key, needs) for key, needs in missing.items()]
            found = outcomes_in_one_queue(asked, advance=shown.update)
            made = dict(zip(missing, found, strict=True))
        for key, (outcome, changed) in made.items():
            if not (key[0].edits or missing[key].sites or missing[key].state):
                self._runs[key] = missing[key], outcome, changed
        outcomes = []
        for key in keys:
            outcome, changed = made[key] if key in made else self._runs[key][1:]
            outcomes.append(outcome)
            if not quiet:
                warn_of_edits_without_effect(key[1], changed)
        return outcomes

    def run_groups(
        self, groups: Sequence[Sequence[Run]], *, label: str | None = None
    ) -> list[list[Outcome]]:
        found = iter(self.run_each(list(chain.from_iterable(groups)), label=label))
        return [[next(found) for _ in group] for group in groups]

    def control_run(
        self, position: int, *, of: BaselineRun | None = None, whole: bool = False
    ) -> BaselineRun:
        """Return the run that controls of an edit at ``position`` continue.

        It has fewer sequences and, unless ``whole``, ends ``CONTROL_LENGTH`` positions after ``position``, or after a
        later sink.
        """
        end = max(position, self.sink_position) + CONTROL_LENGTH
        length = None if whole else max(end, self.target_position + 2)
        return (of or self.baseline_run).with_fewer_sequences(
            self.config.most_control_sequences, length=length
        )

    def edited_baseline_run(self, edits: Sequence[Edit]) -> BaselineRun:
        needs = dataclasses.replace(self.baseline_run.needs, loss=False, whole=False)
        return self.baseline_run.with_edits(edits, needs=needs) if edits else self.baseline_run

    def baseline_tensors(self, site: str, *, layers: Sequence[int]) -> dict[int, Tensor]:
        """Return a site's tensors at all positions; missing ones are read in one pass."""
        self.read_baseline({site: layers})
        return {layer: self._tensors[site, layer] for layer in layers}

    def read_baseline(self, places: Mapping[str, Iterable[int]]) -> None:
        """Read, in one pass, what is missing of sites and their layers, so that ``baseline_tensors`` has it."""
        missing: dict[str, set[int]] = {}
        for site, layers in places.items():
            some = {layer for layer in layers if (site, layer) not in self._tensors}
            alike = (site,)
            if some and site in _EVERY_LAYER:
                known, some = sites_of(self.lens.family), set(range(self.lens.n_layers))
                alike = tuple(one for one in _EVERY_LAYER if one in known)
            if some:
                missing |= dict.fromkeys(alike, some)
        if missing:
            needs = dataclasses.replace(
                self.baseline_run.needs,
                sites=tuple(missing),
                layers=tuple(sorted(set().union(*missing.values()))),
                loss=False,
                whole=False,
            )
            self._tensors.update(
                self.baseline_run.with_edits((), needs=needs).read_outcome(needs).tensors
            )

    def mean_ordinary(self, baseline: Tensor) -> Tensor:
        """Average over ordinary tokens; batch and position get size 1."""
        return self.averaged.mean_of(baseline)

    def freeze_site_edit(
        self,
        site: str,
        *,
        layers: Sequence[int],
        position: int,
        mean: bool,
        units: Sequence[int] | None = None,
    ) -> Edit:
        """Set a site at ``position`` to its baseline value, or (``mean``) to ``mean_ordinary``."""
        key = site, tuple(layers), position, mean, None if units is None else tuple(units)
        if key not in self._edits:
            values = {
                layer: self.mean_ordinary(x) if mean else x[:, [position]]
                for layer, x in self.baseline_tensors(site, layers=layers).items()
            }
            what = site
            if units is not None:
                values = {layer: value[..., units] for layer, value in values.items()}
                what = f"{len(units)} {site}"
            label = f"{'mean_ordinary of' if mean else 'freeze'} {what} at {position}"
            self._edits[key] = freeze(site, values, positions=[position], units=units, label=label)
        return self._edits[key]

    def freeze_unit_edits(self, site: str, chosen: Units, *, position: int, mean: bool) -> Edits:
        self.baseline_tensors(site, layers=list(chosen))  # all are read in one pass
        return tuple(
            self.freeze_site_edit(site, layers=[layer], position=position, mean=mean, units=units)
            for layer, units in chosen.items()
        )

    def freeze_site(self, site: str, *, layers: Sequence[int], position: int) -> FrozenQuantity:
        """Mean ablate a site if ``position`` is the sink's, else freeze it; the controls do so at other positions."""
        at = {"layers": layers, "mean": position == self.sink_position}
        return FrozenQuantity(
            edits=(self.freeze_site_edit(site, position=position, **at),),
            controls=tuple(
                (self.freeze_site_edit(site, position=other, **at),)
                for other in self.control_positions(position)
            ),
            size=sum(x[0, 0].numel() for x in self.baseline_tensors(site, layers=layers).values()),
        )

    def freeze_units(
        self, site: str, chosen: Units, *, position: int, generator: torch.Generator
    ) -> FrozenQuantity:
        """Make the same edits of ``chosen`` units; the controls are of random others."""
        at = {"position": position, "mean": position == self.sink_position}
        controls = self.draw_other_units(site, chosen, generator=generator)
        return FrozenQuantity(
            edits=self.freeze_unit_edits(site, chosen, **at),
            controls=tuple(self.freeze_unit_edits(site, units, **at) for units in controls),
            size=sum(map(len, chosen.values())),
        )

    def draw_other_units(
        self,
        site: str,
        chosen: Mapping[int, Sequence[int]],
        *,
        generator: torch.Generator,
        most: int | None = None,
    ) -> list[dict[int, list[int]]]:
        """Draw as many random other units, once per control, at most ``most`` times."""
        drawn = []
        for layer, units in chosen.items():
            n = self.lens.n_neurons(layer) if site == "neurons" else self.lens.d_model
            drawn.append(
                [
                    draw_other_indices(units, n=n, generator=generator)
                    for _ in range(self.config.controls)[:most]
                ]
            )
        return [dict(zip(chosen, sets, strict=True)) for sets in zip(*drawn, strict=True)]


def make_setting(
    lens: LensModel,
    tokens: TokenBatch,
    *,
    location: Location,
    config: TraceConfig,
    target_position: int | None = None,
    super_neurons: Mapping[int, Tensor] | None = None,
    makers: Sequence[Maker] = (),
    chosen: Sequence[int] | None = None,
    scores: Mapping[Rule, Tensor] | None = None,
) -> Setting:
    """Take a few sequences of a batch, cut them short, and make their baseline run (one pass).

    The sequences are spread evenly over the batch, unless they are ``chosen``. ``scores`` of the batch's tokens
    (``scores_by_rule``) are used if the sequences are not cut.

    Raises:
        InputError: the target position is no position of the sequences, or a sink position; or the sequences are too
            short to have one.
    """
    length = location.sink_position + config.intervention_length
    if target_position is not None:
        length = max(length, target_position + _AFTER_POSITION)
    test = sequences_to_test(tokens.n_sequences, config=config) if chosen is None else chosen
    few = tokens[test].cut(length)
    shortest, longest = int(few.lengths.min()), int(few.lengths.max())
    if shortest < longest and chosen is None:
        warnings.warn(
            f"the sequences have {shortest} tokens or more, and interventions read the first {shortest} of each, and "
            f"not up to {longest}; give sequences of one length to have all read",
            stacklevel=2,
        )
    few = few.cut(shortest)  # every sequence reaches every position
    target = target_position
    if target is None:
        target = choose_target_position(few, location=location)
    check_interior_position(target, shortest=shortest)
    if target == location.sink_position:
        raise InputError(f"position {target} is the sink already; need another one")
    # the engine's paths are compared on an isolation, which touches every layer
    keys = target, location.sink_position
    needs = Needs(
        keys=keys,
        layers=tuple(range(lens.n_layers)),
        sites=("resid_post",),
        positions=None,
        loss=True,
        logits=False,
        state=True,
        whole=True,
    )
    metrics, cells = [*map(sink_mass, keys), loss_of()], [cell_of_edits(isolate([target]))]
    known: dict[Rule, Tensor] | None = None
    if scores is not None and few.n_positions == tokens.n_positions:
        known = {rule: one[test] for rule, one in scores.items()}
    sinks, _ = mark_sinks(lens, few, by="either", batch_size=config.batch_size, scores=known)
    sinks[:, location.sink_position] |= location.sink_found
    return Setting(
        lens=lens,
        tokens=few,
        location=location,
        target_position=target,
        baseline_run=make_checked_run(lens, few, cells, metrics, needs=needs),
        segments=find_segments(location, n_layers=lens.n_layers, attention=lens.attention_layers),
        config=config,
        averaged=tokens_to_average(lens, few, "mean_ordinary", sinks=sinks),
        super_neurons=super_neurons or {},
        makers=tuple(makers),
    )


def shorten_setting(setting: Setting, *, most: int) -> Setting:
    """End the sequences ``most`` positions after the sink, or after a later target."""
    length = max(setting.sink_position + most, setting.target_position + 2)
    if setting.tokens.n_positions <= length:
        return setting
    tokens, mask = setting.tokens.cut(length), setting.averaged.mask[:, :length]
    needs = dataclasses.replace(setting.baseline_run.needs, loss=False, whole=False, logits=False)
    return dataclasses.replace(
        setting,
        tokens=tokens,
        baseline_run=setting.baseline_run.with_edits((), needs=needs, length=length),
        averaged=dataclasses.replace(
            setting.averaged, mask=mask, n_sinks=int(tokens.valid.sum()) - int(mask.sum())
        ),
    )


def add_makers(setting: Setting, parts: Sequence[Maker]) -> Setting:
    """Copy the setting with the makers ``parts``, whose neurons are added to the super neurons."""
    masks, n_added = {layer: mask.clone() for layer, mask in setting.super_neurons.items()}, 0
    for part in parts:
        if part.kind == "neuron":
            none = torch.zeros(setting.lens.n_neurons(part.layer), dtype=torch.bool)
            mask = masks.setdefault(part.layer, none)
            n_added += not mask[part.unit]
            mask[part.unit] = True
    found = dataclasses.replace(setting, super_neurons=masks, makers=tuple(parts), n_added=n_added)
    for name in ("_tensors", "_edits", "_runs"):
        getattr(found, name).update(getattr(setting, name))
    return found


def sequences_to_test(n_sequences: int, *, config: TraceConfig) -> list[int]:
    return evenly_spaced(range(n_sequences), config.intervention_sequences)


def sequences_to_choose_by(n_sequences: int, *, config: TraceConfig) -> list[int]:
    """Return the indices of those not tested, or of all if none is left."""
    test = set(sequences_to_test(n_sequences, config=config))
    rest = [index for index in range(n_sequences) if index not in test]
    return evenly_spaced(rest or range(n_sequences), config.most_choosing_sequences)


def why_no_interventions(lens: LensModel, tokens: TokenBatch) -> str | None:
    if lens.why_measured_only is not None:
        return lens.why_measured_only
    needed = ("pattern", "mask") if lens.own_attention else ("scores",)
    for site in lens.uneditable.intersection(needed):
        return str(lens.uneditable_error(site)).partition(";")[0]
    if lens.own_attention is not None and lens.family.shared_keys:
        return f"layers of {lens.name} share keys, and its attention is computed by {lens.own_attention}"
    shortest = int(tokens.lengths.min())
    if shortest < _SHORTEST:
        return f"the shortest sequence has {shortest} tokens, and interventions need {_SHORTEST}"
    return None


def check_interior_position(position: int, *, shortest: int) -> None:
    """Raise an InputError unless a position has tokens before and after it in every sequence."""
    if not 1 <= position < shortest - 1:
        raise InputError(
            f"the target position is {position}; need one from 1 to {shortest - 2}: tokens must come before and "
            "after it"
        )


def choose_target_position(tokens: TokenBatch, *, location: Location) -> int:
    """Return a third of the shortest sequence's length, or the next position that is no sink."""
    target = max(1, int(tokens.lengths.min()) // 3)
    while target in location.sink_positions:
        target += 1
    return target


def find_segments(
    location: Location, *, n_layers: int, attention: Sequence[int]
) -> tuple[Segment, ...]:
    """Return a segment, if it has ``attention``, per growth step; without a step, the last three quarters."""

    def segment(number: int, steps: tuple[GrowthStep, ...], every: range) -> Segment:
        layers = tuple(layer for layer in every if layer in attention)
        return Segment(number=number, steps=steps, layers=layers, every=tuple(every))

    ends = [*(step.first_layer for step in location.steps[1:]), n_layers]
    found = [
        segment(number, (step,), range(step.last_layer + 1, end))
        for number, (step, end) in enumerate(zip(location.steps, ends, strict=False))
    ]
    late = segment(-1, (), range(min(n_layers // 4, attention[-1]), n_layers))
    return tuple(one for one in found if one.layers) or (late,)


def draw_other_indices(
    units: Sequence[int], *, n: int, generator: torch.Generator, without: Sequence[int] = ()
) -> list[int]:
    """Draw ``len(units)`` indices below ``n``, not units and not in ``without``; all of these if fewer."""
    taken = {*units, *without}
    pool = torch.tensor([unit for unit in range(n) if unit not in taken], dtype=torch.long)
    return pool[torch.randperm(len(pool), generator=generator)[: len(units)]].tolist()


def marked_units(masks: Mapping[int, Tensor]) -> dict[int, list[int]]:
    """Return layer -> the marked neurons; a layer without any is left out."""
    return {layer: mask.nonzero().flatten().tolist() for layer, mask in masks.items() if mask.any()}


def hangs_on_controls(largest: float, *, ends: Iterable[float], least: float) -> bool:
    """Check whether one of ``ends`` may lie on the other side of the ``largest`` control: within ``CONTROL_MARGIN``.

    A control under ``least`` decides nothing.
    """
    low, high = (max(least, largest + by) for by in (-CONTROL_MARGIN, CONTROL_MARGIN))
    return any(low < end < high for end in ends)


def mean_mass(run: Outcome, position: int, layers: Sequence[int]) -> float:
    return float(run.mass_at(position, layers=layers).nanmean())


def _join_needs(one: Needs, other: Needs) -> Needs:
    either = {
        name: getattr(one, name) or getattr(other, name) for name in ("loss", "whole", "state")
    }
    return dataclasses.replace(one, layers=tuple(sorted({*one.layers, *other.layers})), **either)

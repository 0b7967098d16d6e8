"""Paths that carry the sink: what one group of parts writes is taken from another group alone, and attention is read.

At the sink position a part adds c to the stream, and a on the mean over ordinary tokens (``mean_ordinary``). The path
from a source to a target is cut by letting the target alone read the stream of the baseline run less the sum of c - a
over the source's parts before it; everything else reads the stream as it is, and everything after the target is
computed. That is path patching (Goldowsky-Dill et al., arXiv 2304.05969) of the direct path: what goes through other
parts in between is a path of its own.

- *Sources*: the embedding, the attention, a hybrid's mixers, the MLPs and Gemma 4's layer inputs before the target,
  without the super neurons of each growth step, which are a source of their own; ``everything`` is all of them. Shares
  need not sum to that: targets are not linear, and what two paths both bring is lost with neither.
- *Targets*: the super neurons of a growth step; and in the layers after a growth step and before the next, the keys
  that make the sink and the other MLPs. From super neurons to keys there is a second path, *through* the outlier
  dimensions of the stream alone. To ``everything`` after them, super neurons are themselves set to their mean.
- From the keys to the sink, the key itself is set to its mean over ordinary tokens.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..circuits.stream import apply_norm, mlp_read_edits, post_norm_factor
from ..edits.constructors import Edit, freeze
from ..edits.effects import removed_share
from ..edits.outcome import Outcome
from ..engine.baseline_run import BaselineRun
from ..models.lens import is_parallel
from ..models.sites import sites_of
from ..models.weights import keys_at_position, mlp_weights, norm_weights
from ..schema import ALL_STEPS, LEAST_PATH, column_names
from ..text import as_ranges
from .config import PATH_CONTROLS, PATH_LENGTH
from .setting import (
    Edits,
    Run,
    Setting,
    draw_other_indices,
    marked_units,
    mean_mass,
    shorten_setting,
)

NO_STEP = -1
EMBEDDING = "embedding"
ATTENTION = "attention"
MIXERS = "mixers"
MLPS = "MLPs"
INPUTS = "layer inputs"
SUPER, MAKERS, EVERYTHING, KEY, SINK = "super neurons", "makers", "everything", "key", "sink"
SUBLAYERS = {ATTENTION: "attn_out", MIXERS: "mixer_out", MLPS: "mlp_out", INPUTS: "per_layer_out"}
DIMENSIONS = "outlier dimensions"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Parts that write to the stream (source), or that read it (target)."""

    name: str
    step: int = NO_STEP
    layers: tuple[int, ...] = ()
    """Layers of neurons, keys or MLPs; if none, all before the target or after the source."""
    units: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """From a source to a target, at one position."""

    source: End
    target: End
    through: Mapping[int, Sequence[int]] | None = None
    """Layer of the target -> the dimensions that it goes through; None is all."""
    position: int


@dataclass(frozen=True, kw_only=True)
class Writings:
    """Edits made from what all parts of the baseline run write, less its mean over ordinary tokens."""

    setting: Setting
    units: Mapping[int, Sequence[int]]
    """Neurons that are apart from their MLP, by layer."""

    @cached_property
    def added_by_kind(self) -> dict[str, Tensor]:
        """Kind of part -> its output less the mean over ordinary tokens; the first axis is layers, if any.

        All are in the unit of the last layer's stream (``LensModel.remaining_scales``).
        """
        setting, lasting = self.setting, self.setting.lens.remaining_scales
        embedding = lasting[0] * self._subtract_ordinary_mean(
            setting.baseline_tensors("resid_pre", layers=[0])[0]
        )
        found = {EMBEDDING: embedding}
        for name, site in SUBLAYERS.items():
            by_layer = [torch.zeros_like(embedding)] * setting.lens.n_layers
            for layer, added in setting.baseline_tensors(
                site, layers=setting.lens.layers_with(site)
            ).items():
                by_layer[layer] = lasting[layer] * self._subtract_ordinary_mean(added)
            found[name] = torch.stack(by_layer)
        for layer, units in self.units.items():
            found[MLPS][layer] -= self.added_by_neurons(layer, units)
        return found

    def added_by_neurons(
        self, layer: int, units: Sequence[int]
    ) -> Float[Tensor, "batch position d_model"]:
        """Compute what neurons write less its ordinary mean, scaled as in ``added_by_kind``."""
        setting, chosen = self.setting, list(units)
        columns = mlp_weights(setting.lens, layer=layer).w_down[:, chosen].detach().float().cpu()
        part = (
            setting.baseline_tensors("neurons", layers=[layer])[layer][..., chosen].float().cpu()
            @ columns.T
        )
        after = norm_weights(setting.lens, layer=layer, which="mlp_post_norm")
        if after is not None:
            output = setting.baseline_tensors("down_out", layers=[layer])[layer].float()
            part = part * post_norm_factor(output, after).cpu()
        return setting.lens.remaining_scales[layer] * self._subtract_ordinary_mean(part)

    def _subtract_ordinary_mean(self, x: Tensor) -> Tensor:
        x = x.float().cpu()
        return x - self.setting.mean_ordinary(x)

    def stream_read_by(self, layer: int, *, mlp: bool) -> Float[Tensor, "batch position d_model"]:
        setting = self.setting
        site, at = ("resid_pre", 0) if layer == 0 else ("resid_post", layer - 1)
        x = setting.baseline_tensors(site, layers=[at])[at].float().cpu()
        for mixed in ("attn_out", "mixer_out") if mlp and not is_parallel(setting.lens) else ():
            if layer in setting.lens.layers_with(mixed):
                x = x + setting.baseline_tensors(mixed, layers=[layer])[layer].float().cpu()
        return x

    def input_change(
        self, source: End, layer: int, *, mlp: bool, position: int
    ) -> Float[Tensor, "batch d_model"]:
        """Compute what ``source`` adds, beyond its ordinary mean, to what a layer reads."""
        attended = layer + (mlp and not is_parallel(self.setting.lens))
        by = self.setting.lens.remaining_scales[layer]
        if source.name in (SUPER, MAKERS):
            parts = [
                self.added_by_neurons(at, units)[:, position]
                for at, units in source.units.items()
                if at < layer
            ]
            nothing = torch.zeros(
                self.setting.tokens.n_sequences, self.setting.lens.d_model, dtype=torch.float32
            )
            return sum(parts, nothing) / by
        if source.name == EVERYTHING:
            return self._subtract_ordinary_mean(self.stream_read_by(layer, mlp=mlp))[:, position]
        added = self.added_by_kind
        if source.name == EMBEDDING:
            return added[EMBEDDING][:, position] / by
        end = attended if source.name in (ATTENTION, MIXERS) else layer
        return added[source.name][:end, :, position].sum(0) / by

    def cut_edits(self, path: Path) -> Edits:
        setting, source, target = self.setting, path.source, path.target
        if target.name == SINK:
            return (
                setting.freeze_site_edit(
                    "k", layers=source.layers, position=path.position, mean=True
                ),
            )
        if target.name == EVERYTHING:
            units = {layer: list(some) for layer, some in source.units.items()}
            return setting.freeze_unit_edits("neurons", units, position=path.position, mean=True)
        if target.name == KEY:
            return tuple(self._make_key_edit(path, layer) for layer in target.layers)
        return tuple(edit for layer in target.layers for edit in self._make_mlp_edits(path, layer))

    def _make_key_edit(self, path: Path, layer: int) -> Edit:
        lens, position = self.setting.lens, path.position
        change = self.input_change(path.source, layer, mlp=False, position=position)
        if path.through is not None:
            others = torch.ones(change.shape[-1], dtype=torch.bool)
            others[list(path.through.get(layer, ()))] = False
            change = change.masked_fill(others, 0.0)
        x = (self.stream_read_by(layer, mlp=False)[:, position] - change).to(lens.device)
        norm = norm_weights(lens, layer=layer, which="attn_norm")
        key = keys_at_position(lens, apply_norm(x, norm), layer=layer, position=position)
        return freeze("k", {layer: key[:, None]}, positions=[position], label=_path_label(path))

    def _make_mlp_edits(self, path: Path, layer: int) -> list[Edit]:
        """Edit the target's neurons, or an MLP without its super neurons, which are another target."""
        setting, lens, place = self.setting, self.setting.lens, [path.position]
        units, projections = list((path.target.units or self.units).get(layer, ())), {}
        weights = mlp_weights(lens, layer=layer) if units else None
        for site, weight in (("gate", weights.w_gate), ("up", weights.w_up)) if weights else ():
            if weight is not None:
                values = setting.baseline_tensors(site, layers=[layer])[layer]
                projections[site] = weight[units], values[:, place][..., units]
        return mlp_read_edits(
            self.stream_read_by(layer, mlp=True)[:, place].to(lens.device),
            self.input_change(path.source, layer, mlp=True, position=path.position)[:, None].to(
                lens.device
            ),
            layer=layer,
            norm=norm_weights(lens, layer=layer, which="mlp_norm"),
            whole=not path.target.units,
            units=units,
            projections=projections,
            positions=place,
            label=_path_label(path),
        )


def path_table(setting: Setting, *, progress: bool = False) -> pd.DataFrame:
    """Cut every path and measure the sink that is lost: one row per (path, growth step whose layers are read).

    Cost: a pass over the first ``PATH_LENGTH`` positions for each path; a growth step has some 18 paths. A path that
    moves more than ``LEAST_PATH`` costs ``PATH_CONTROLS`` passes more, over fewer sequences.
    """
    short = shorten_setting(setting, most=PATH_LENGTH)
    groups = neuron_groups(setting)
    writings = Writings(
        setting=short,
        units={layer: found for group in groups for layer, found in group.units.items()},
    )
    lens, everything = setting.lens, setting.sink_layers
    sites = [one for one in ("resid_pre", *SUBLAYERS.values()) if one in sites_of(lens.family)]
    short.read_baseline({site: lens.layers_with(site) for site in sites})
    sites = [one for one in ("neurons", "gate", "up") if one in sites_of(lens.family)]
    short.read_baseline(dict.fromkeys(sites, writings.units))
    lanes = {
        one.number: [layer for layer in one.layers if layer in everything]
        for one in setting.segments
    }
    reads = {ALL_STEPS: list(everything)}
    reads |= {number: layers for number, layers in lanes.items() if layers and len(lanes) > 1}
    paths = list(list_paths(setting, groups=groups, lanes=lanes))
    rng, generator = np.random.default_rng(setting.config.seed), setting.make_generator()
    whole, few = short.baseline, short.control_run(setting.sink_position)

    def runs_of(paths: Iterable[Path], *, of: BaselineRun | None = None) -> list[Run]:
        return [Run(edits=writings.cut_edits(path), of=of, layers=everything) for path in paths]

    def lost(run: Outcome, before: Outcome, layers: Sequence[int]) -> float:
        had, has = (mean_mass(one, setting.sink_position, layers) for one in (before, run))
        return (had - has) / had

    found = short.run_each(runs_of(paths), label="paths" if progress else None)
    drawn = [
        _control_paths(short, path, generator=generator)
        if max(abs(lost(run, whole, layers)) for layers in reads.values()) > LEAST_PATH
        else ("", [])
        for path, run in zip(paths, found, strict=True)
    ]
    beside = short.run_groups(
        [runs_of(some, of=few) for _, some in drawn],
        label="controls of paths" if progress else None,
    )
    rows = []
    for path, run, (kind, _), controls in zip(paths, found, drawn, beside, strict=True):
        for number, layers in reads.items():
            if path.target.layers and max(layers) < min(path.target.layers):
                continue  # it comes after what is read
            interval = removed_share(
                whole, run, sink_position=setting.sink_position, layers=layers, generator=rng
            )
            shares = [lost(one, few.outcome, layers) for one in controls]
            rows.append(
                {
                    "source": path.source.name,
                    "source_step": path.source.step,
                    "source_layers": as_ranges(path.source.layers),
                    "target": path.target.name,
                    "target_step": path.target.step,
                    "target_layers": as_ranges(path.target.layers),
                    "through": "" if path.through is None else DIMENSIONS,
                    "read_step": number,
                    "read_layers": as_ranges(layers),
                    "baseline_mass": mean_mass(whole, setting.sink_position, layers),
                    "mass": mean_mass(run, setting.sink_position, layers),
                    "share": interval.estimate,
                    "ci_low": interval.low,
                    "ci_high": interval.high,
                    "control": kind,
                    "control_share": float(np.mean(shares)) if shares else math.nan,
                    "control_largest": max(shares) if shares else math.nan,
                    "n_controls": len(shares),
                    "n": short.tokens.n_sequences,
                    "control_n": few.n_sequences if shares else 0,
                }
            )
    return pd.DataFrame(rows, columns=column_names("trace", "paths"))


def neuron_groups(setting: Setting) -> list[End]:
    """Group the super neurons by growth step; without any, take the makers that are neurons."""
    if setting.lens.family.experts is not None:
        return []
    groups = []
    for number, step in enumerate(setting.location.steps):
        units = marked_units(
            {
                layer: mask
                for layer in step.layers
                if (mask := setting.super_neurons.get(layer)) is not None
            }
        )
        if units:
            groups.append(End(name=SUPER, step=number, layers=tuple(units), units=units))
    if groups:
        return groups
    others = [part for part in sorted(setting.makers) if part.kind == "neuron"]
    by_layer = itertools.groupby(others, key=lambda part: part.layer)
    units = {layer: [part.unit for part in parts] for layer, parts in by_layer}
    return [End(name=MAKERS, layers=tuple(units), units=units)] if units else []


def list_paths(
    setting: Setting, *, groups: Sequence[End], lanes: Mapping[int, Sequence[int]]
) -> Iterator[Path]:
    at = setting.sink_position
    own = setting.lens.key_layers
    keys = [
        End(name=KEY, step=number, layers=own(layers)) for number, layers in lanes.items() if layers
    ]
    mlps = [
        End(name=MLPS, step=segment.number, layers=segment.every) for segment in setting.segments
    ]
    for target in (*groups, *mlps, *keys):
        last = max(target.layers)
        attended = last + (target.name != KEY and not is_parallel(setting.lens))
        sources = [End(name=EMBEDDING)]
        sources += [End(name=ATTENTION)] * any(
            layer < attended for layer in setting.lens.attention_layers
        )
        sources += [End(name=MIXERS)] * any(layer < attended for layer in setting.lens.mixer_layers)
        sources += [End(name=MLPS)] * (last > 0)
        sources += [End(name=INPUTS)] * (last > 0 and setting.lens.family.per_layer is not None)
        sources += [one for one in groups if min(one.layers) < last]
        for source in (*sources, End(name=EVERYTHING)):
            yield Path(source=source, target=target, position=at)
            through = {
                layer: setting.location.entering_dimensions(layer) for layer in target.layers
            }
            its = source.name == EVERYTHING or (source.units and source.step == target.step)
            if target.name == KEY and its and any(through.values()):
                yield Path(source=source, target=target, through=through, position=at)
    for source in groups:
        yield Path(source=source, target=End(name=EVERYTHING), position=at)
    for key in keys:
        yield Path(source=key, target=End(name=SINK), position=at)


def _control_paths(
    setting: Setting, path: Path, *, generator: torch.Generator
) -> tuple[str, list[Path]]:
    draws = range(min(setting.config.controls, PATH_CONTROLS))
    if path.through is not None:
        drawn = setting.draw_other_units(
            "resid_post", path.through, generator=generator, most=PATH_CONTROLS
        )
        return "other dimensions", [replace(path, through=some) for some in drawn]
    end = "source" if path.source.units else "target"
    own: End = getattr(path, end)
    if own.units:
        found = []
        for _ in draws:
            others = {
                layer: draw_other_indices(
                    some, n=setting.lens.n_neurons(layer), generator=generator
                )
                for layer, some in own.units.items()
            }
            found.append(replace(path, **{end: replace(own, units=others)}))
        return "other neurons", found
    places = setting.control_positions(path.position)
    places = places[:: max(1, len(places) // len(draws))][: len(draws)]
    return "other positions", [replace(path, position=place) for place in places]


def _path_label(path: Path) -> str:
    return f"{path.source.name} to {path.target.name}"

"""Holds: edits that keep one link at a position as it is without the sink, and random holds of the same size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..activations.record import capture
from ..edits.constructors import Edit, hold
from .bench import Bench, Segment
from .locate import matched_random
from .readings import OTHERS_FROM, RANDOM_SETS

Edits = tuple[Edit, ...]
Units = Mapping[int, list[int]]
"""Layer -> neurons, or dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Edits that hold one quantity, and the same of random ones."""

    name: str
    edits: Edits
    controls: tuple[Edits, ...]
    size: int
    """How many numbers a token are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Makes the holds of one bench. Values come from the clean run, each site captured once."""

    bench: Bench
    _clean: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    def clean(self, site: str, *, layers: Sequence[int]) -> dict[int, Tensor]:
        """The clean run's tensors of a site by layer, all positions; all that are missing in one pass."""
        missing = [layer for layer in layers if (site, layer) not in self._clean]
        if missing:
            found = capture(self.bench.lens, self.bench.tokens, sites=[site], layers=missing, path="bridge")
            self._clean.update({(site, layer): found[site, layer] for layer in missing})
        return {layer: self._clean[site, layer] for layer in layers}

    def at(self, site: str, *, layers: Sequence[int], place: int, natural: bool) -> Edit:
        """Hold a site at a place: at its clean value there, or, of a natural sink, at the mean over other positions."""
        clean = self.clean(site, layers=layers)
        values = {layer: self._value(clean[layer], place=place, natural=natural) for layer in layers}
        return hold(site, values, positions=[place], label=f"hold {site} at {place}")

    def units(self, site: str, chosen: Units, *, place: int, natural: bool, label: str = "") -> Edits:
        """The same of chosen units of each layer."""
        clean, edits = self.clean(site, layers=list(chosen)), []
        for layer, units in chosen.items():
            value = self._value(clean[layer], place=place, natural=natural)
            text = label or f"hold {len(units)} {site} at {place}"
            edits.append(hold(site, {layer: value[..., units]}, positions=[place], units=units, label=text))
        return tuple(edits)

    def z(self, segment: Segment, *, place: int, natural: bool) -> Hold:
        """All aggregated values up to the last layer that is read."""
        return self._elsewhere("z", "z_raw", range(segment.layers[-1] + 1), place=place, natural=natural)

    def key(self, segment: Segment, *, place: int, natural: bool) -> Hold:
        """The keys of the layers that are read."""
        return self._elsewhere("key", "k", segment.layers, place=place, natural=natural)

    def attn_out(self, layers: Sequence[int], *, place: int, natural: bool) -> Hold:
        """What the attention writes."""
        return self._elsewhere("attn_out", "attn_out", layers, place=place, natural=natural)

    def neurons(
        self, masks: Mapping[int, Tensor], *, place: int, natural: bool, generator: torch.Generator
    ) -> Hold | None:
        """The neurons of a mask by layer, against others of the same layers; None where there are none."""
        chosen = {layer: mask.nonzero().flatten().tolist() for layer, mask in masks.items() if bool(mask.any())}
        if not chosen:
            return None
        drawn = {layer: matched_random(masks[layer], draws=RANDOM_SETS, generator=generator) for layer in chosen}
        controls = [
            {layer: sets[i].nonzero().flatten().tolist() for layer, sets in drawn.items()} for i in range(RANDOM_SETS)
        ]
        return Hold(
            name="neurons",
            edits=self.units("neurons", chosen, place=place, natural=natural, label="hold super neurons"),
            controls=tuple(self.units("neurons", units, place=place, natural=natural) for units in controls),
            size=sum(len(units) for units in chosen.values()),
        )

    def dimensions(self, segment: Segment, *, place: int, natural: bool, generator: torch.Generator) -> Hold | None:
        """The outlier dimensions after a growth step, against others; None without a growth step."""
        if segment.step is None:
            return None
        layer = segment.step.last_layer
        dims = list(self.bench.finding.outliers.get(layer, ())) or [segment.step.dimension]
        controls = random_dimensions(dims, d_model=self.bench.lens.d_model, generator=generator)
        return Hold(
            name="dimensions",
            edits=self.units(
                "resid_post", {layer: dims}, place=place, natural=natural, label="hold outlier dimensions"
            ),
            controls=tuple(
                self.units("resid_post", {layer: drawn}, place=place, natural=natural) for drawn in controls
            ),
            size=len(dims),
        )

    def _elsewhere(self, name: str, site: str, layers: Sequence[int], *, place: int, natural: bool) -> Hold:
        """A site at a place, against the same site at other places."""
        others = self.bench.controls(place)
        edit = self.at(site, layers=layers, place=place, natural=natural)
        width = self.clean(site, layers=layers[:1])[layers[0]].flatten(2).shape[-1]
        return Hold(
            name=name,
            edits=(edit,),
            controls=tuple((self.at(site, layers=layers, place=other, natural=natural),) for other in others),
            size=len(layers) * width,
        )

    def _value(self, clean: Tensor, *, place: int, natural: bool) -> Tensor:
        return self.others_mean(clean) if natural else clean[:, [place]]

    def others_mean(self, clean: Tensor) -> Tensor:
        """Mean over sequences and over positions from 8 on, sink positions left out; both axes of size 1."""
        sinks = self.bench.finding.positions
        others = [p for p in range(OTHERS_FROM, clean.shape[1]) if p not in sinks]
        return clean[:, others].mean(dim=(0, 1))[None, None]


def random_dimensions(dims: Sequence[int], *, d_model: int, generator: torch.Generator) -> list[list[int]]:
    """Random sets of as many other dimensions."""
    pool = torch.tensor([dimension for dimension in range(d_model) if dimension not in dims])
    return [pool[torch.randperm(len(pool), generator=generator)[: len(dims)]].tolist() for _ in range(RANDOM_SETS)]

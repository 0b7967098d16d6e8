"""Readings, with the view of one layer that they are given, and the results of a pass."""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..data.tokens import TokenBatch
from ..errors import InputError, ModelError, SiteError, note_whose_function_failed
from ..measures.attention import row_shares
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.running import check_unchanged
from ..models.sites import SITES, bridge_hook_name, site_of
from ..records import display
from ..text import as_ranges

_SEEN_AT = {"mass": "pattern", "rows": "pattern", "key_scores": "scores"}
"""Names of ``attention.OBSERVED`` -> the site to compute them from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """The tensors of one layer for the sequences of one forward pass."""

    layer: int
    tensors: Mapping[str, Tensor]
    """Site or observed name -> the model's own tensor: a reading must not change it in place."""
    valid: Bool[Tensor, "batch position"]
    """True at real tokens, false at padding."""
    tokens: Int[Tensor, "batch position"]
    rows: Int[Tensor, " row"] | None
    """The query positions of ``rows``."""
    reach: int | None = None
    """Number of positions that a query sees, itself included; None without a sliding window."""
    labelled: Bool[Tensor, "batch position"] | None = None
    """True at tokens whose loss counts (``TokenBatch.labelled``); None counts all."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; refuse a site that is not among the reading's sites."""
        if name not in self.tensors:
            raise InputError(
                f"the reading asked for {', '.join(self.tensors)}, and reads {name!r}; need every site that is read in "
                "its sites"
            )
        return self.tensors[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A function of one layer's tensors, for ``stream``."""

    name: str
    sites: tuple[str, ...]
    """Sites of ``sink_lens.models.sites``, or names of ``capture.attention.OBSERVED``."""
    function: Callable[[LayerView], Tensor | None]
    """Returns a tensor with the sequence as first axis, or None if it keeps sums itself."""
    layers: frozenset[int] | None = None
    """None means every layer."""

    def reads_layer(self, layer: int) -> bool:
        """Check whether the reading reads this layer."""
        return self.layers is None or layer in self.layers

    def read(self, view: LayerView) -> Tensor | None:
        """Call the reading's function on a layer; refuse one that changes a tensor in place."""
        with note_whose_function_failed(
            f"the reading {self.name!r}, layer {view.layer}", given=view.tensors.values()
        ):
            return self.function(view)

    def fwd_hooks(
        self,
        model: ModelLike,
        *,
        keys: Sequence[int] = (0,),
        rows: Int[Tensor, " row"] | None = None,
        tokens: TokenBatch | None = None,
        into: MutableMapping[int, Tensor] | None = None,
    ) -> list[tuple[str, Callable[..., None]]]:
        """Make hooks of the bridge from the reading, for ``lens.bridge.run_with_hooks(..., fwd_hooks=...)``.

        They read the run as the hooks before them in the list have edited it. ``mass``, ``rows`` and ``key_scores``
        are taken from the hook points of the pattern and the scores.

        Args:
            model: what ``load`` takes, or a ``LensModel``.
            keys: key positions for ``mass`` and ``key_scores``.
            rows: query positions for ``rows``.
            tokens: the sequences of the run, which tell where padding is; None takes every token for a real one.
            into: a mapping that gets layer -> result; a later run overwrites it.

        Raises:
            ModelError: the model can only be measured.
            SiteError: the family lacks a site, or this bridge has no hook point for it.
        """
        lens = as_lens(model)
        check_unchanged(lens)
        if lens.why_measured_only is not None:
            raise ModelError(lens.why_measured_only)
        sites = {name: _SEEN_AT.get(name, name) for name in self.sites}
        for name, site in sites.items():
            if site not in SITES or site in lens.uneditable:
                raise SiteError(
                    f"this bridge has no hook point for {name!r}; stream reads it with its own kernel"
                )
            site_of(site, family=lens.family)
        if "rows" in sites and rows is None:
            raise InputError(
                "the reading needs 'rows' and no query positions were given; pass rows=torch.tensor([...])"
            )
        layers = [lens.n_layers]
        if all(SITES[site].per_layer for site in sites.values()):
            layers = [
                layer for layer in lens.layers_with(*sites.values()) if self.reads_layer(layer)
            ]
        seen: dict[str, Tensor] = {}
        labelled = None if tokens is None else tokens.labelled
        hooks: list[tuple[str, Callable[..., None]]] = []
        if tokens is None:

            def note(tokens: Tensor, hook: object) -> None:
                seen.update(tokens=tokens, valid=torch.ones_like(tokens, dtype=torch.bool))

            hooks.append(("embed.hook_in", note))
        else:
            seen |= {"tokens": tokens.tokens, "valid": tokens.valid}

        def take(
            tensor: Tensor, hook: object, *, name: str, layer: int, held: dict[str, Tensor]
        ) -> None:
            held[name] = _quantity_at_hook(name, tensor, lens=lens, keys=keys, rows=rows)
            if len(held) < len(self.sites):
                return
            view = LayerView(
                layer=layer,
                tensors=dict(held),
                valid=seen["valid"].to(tensor.device),
                tokens=seen["tokens"].to(tensor.device),
                rows=None if rows is None else rows.to(tensor.device),
                reach=lens.reach(layer) if layer < lens.n_layers else None,
                labelled=None if labelled is None else labelled.to(tensor.device),
            )
            held.clear()
            result = self.read(view)
            if into is not None and result is not None:
                into[layer] = result.detach().clone()

        for layer in layers:
            held: dict[str, Tensor] = {}
            for name, site in sites.items():
                hook = partial(take, name=name, layer=layer, held=held)
                hooks.append((bridge_hook_name(SITES[site], family=lens.family, layer=layer), hook))
        return hooks


def _quantity_at_hook(
    name: str, tensor: Tensor, *, lens: LensModel, keys: Sequence[int], rows: Tensor | None
) -> Tensor:
    """Return the quantity ``name`` of ``OBSERVED``, from the scores or the pattern ``tensor``."""
    match name:
        case "mass":
            return (row_shares(tensor) if lens.family.sigmoid else tensor)[..., list(keys)]
        case "rows":
            assert rows is not None
            return tensor[:, :, rows.to(tensor.device)]
        case "key_scores":
            found = tensor[..., list(keys)]
            return found.masked_fill(found <= torch.finfo(found.dtype).min / 2, -math.inf)
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Results of the readings over all sequences."""

    values: Mapping[str, Mapping[int, Tensor]]
    """Reading -> layer -> tensor, whose first axis is the sequences."""
    kernel: str
    """The attention kernel of the pass; the model's own if no attention was read."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reading of the attention -> the layers that it skipped for lack of a site, in words."""
    n_layers: int = 0
    notes: tuple[str, ...] = field(default=(), repr=False)

    def _repr_html_(self) -> str:
        rows = []
        for name, by_layer in self.values.items():
            shape = next((tuple(one.shape) for one in by_layer.values()), "")
            rows.append((name, len(by_layer), str(shape)))
        frame = pd.DataFrame(rows, columns=["reading", "layers", "shape in a layer"])
        return display.result_html(
            f"Read with the {self.kernel} attention kernel.", frame, notes=self.notes
        )

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        """Return the tensor of a reading at a layer: ``streamed[name, layer]``.

        Raises:
            ModelError: the model is a hybrid, and the reading skipped this layer.
            InputError: there is no such reading, or it gave nothing there.
        """
        name, layer = key
        if layer not in self.values.get(name, ()) and name in self.skipped:
            raise ModelError(
                f"{self.skipped[name]}; need one of the layers {as_ranges([*self.values[name]])}"
            )
        by_layer = self._results_of(name)
        if layer not in by_layer:
            raise InputError(
                f"the reading {name!r} gave nothing at layer {layer}; need one of {as_ranges([*by_layer])}"
            )
        return by_layer[layer]

    def stacked(self, name: str) -> Tensor:
        """Stack the tensors of a reading at all its layers along a new first axis.

        Layers that the reading skipped, since they have no attention or no keys of their own, are nan.
        """
        by_layer = self._results_of(name)
        if name not in self.skipped:
            return torch.stack([by_layer[layer] for layer in sorted(by_layer)])
        some = next(iter(by_layer.values()))
        dtype = None if some.is_floating_point() else torch.float32
        nothing = torch.full_like(some, torch.nan, dtype=dtype)
        return torch.stack([by_layer.get(layer, nothing) for layer in range(self.n_layers)])

    def frame(self, name: str, *, axes: Sequence[str] = ()) -> pd.DataFrame:
        """Make a tidy table of a reading: layer, sequence, one column of indices per further axis, value.

        The number of ``axes`` names must be that of the axes after the sequence.
        """
        frames = []
        for layer, tensor in sorted(self._results_of(name).items()):
            if tensor.dim() != 1 + len(axes):
                raise InputError(
                    f"{name!r} has {tensor.dim() - 1} axes after the sequence and {len(axes)} names were "
                    f"given: {list(axes)}; need one name an axis"
                )
            index = pd.MultiIndex.from_product(
                [*map(range, tensor.shape)], names=["sequence", *axes]
            )
            if tensor.dtype == torch.bfloat16:  # numpy has none
                tensor = tensor.float()
            rows = pd.DataFrame({"value": tensor.flatten().numpy()}, index=index).reset_index()
            rows.insert(0, "layer", layer)
            frames.append(rows)
        return pd.concat(frames, ignore_index=True)

    def _results_of(self, name: str) -> Mapping[int, Tensor]:
        if name not in self.values:
            raise InputError(f"there is no reading {name!r}; need one of {', '.join(self.values)}")
        if not self.values[name]:
            raise InputError(
                f"the reading {name!r} gave None in every layer, so that nothing of it was kept; need a function that "
                "returns a tensor with the sequences as its first axis. Write return"
            )
        return self.values[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Captured tensors, on the CPU, indexed as ``captured["resid_post", 3]`` or ``captured["final"]``."""

    tensors: dict[tuple[str, int], Tensor] = field(repr=False)
    positions: tuple[int, ...] | None
    """None means all."""
    path: str
    """``plain`` or ``bridge``."""
    notes: tuple[str, ...] = field(default=(), repr=False)

    def _repr_html_(self) -> str:
        rows = [
            (site, layer, str(tuple(one.shape)), str(one.dtype))
            for (site, layer), one in self.tensors.items()
        ]
        size = sum(one.numel() * one.element_size() for one in self.tensors.values())
        frame = pd.DataFrame(rows, columns=["site", "layer", "shape", "dtype"])
        said = f"{len(rows)} tensors, {size / 1e6:,.1f} MB, {self.path} path."
        return display.result_html(said, frame, notes=self.notes)

    def __getitem__(self, key: tuple[str, int] | str) -> Tensor:
        """Return the tensor of a site at a layer; a site without layers has its name alone."""
        place = (key, 0) if isinstance(key, str) else key
        if place not in self.tensors:
            kept = ", ".join(f"{site!r}, {layer}" for site, layer in self.tensors)
            raise InputError(
                f"{key!r} was not captured; need one of {kept}. Layers are counted from 0 on here"
            )
        return self.tensors[place]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

"""What a pass over a model gives: a layer's view for a reading, streamed numbers, kept tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import InputError
from ..records import display


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """What a reading sees: the tensors of one layer for the sequences of one forward pass."""

    layer: int
    tensors: Mapping[str, Tensor]
    """Site or observed name -> tensor. They are the model's own: a reading never changes one in place."""
    valid: Bool[Tensor, "batch position"]
    """True at real tokens, false at padding."""
    tokens: Int[Tensor, "batch position"]
    rows: Int[Tensor, " row"] | None
    """The query positions of ``rows``."""
    reach: int | None = None
    """How many positions a query of the layer sees, itself included; None where it has no sliding window."""

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of a site."""
        return self.tensors[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A function of one layer's tensors, to be streamed."""

    name: str
    sites: tuple[str, ...]
    """Sites of ``sink_lens.models.sites``, or names of ``capture.attention.OBSERVED``."""
    function: Callable[[LayerView], Tensor | None]
    """Gives a tensor whose first axis is the sequence, or None if it keeps its own sums."""
    layers: frozenset[int] | None = None
    """Where to read; None is every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What the readings gave, over all sequences."""

    values: Mapping[str, Mapping[int, Tensor]]
    """Reading -> layer -> tensor, its first axis the sequences in their order."""
    kernel: str
    """The attention kernel of the pass: fused, eager, or the model's own where no attention was read."""

    def _repr_html_(self) -> str:
        rows = [
            (name, len(by_layer), str(tuple(next(iter(by_layer.values())).shape)) if by_layer else "")
            for name, by_layer in self.values.items()
        ]
        frame = pd.DataFrame(rows, columns=["reading", "layers", "shape in a layer"])
        return display.html(f"Read with the {self.kernel} attention kernel.", frame)

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        """The tensor of a reading at a layer."""
        name, layer = key
        return self.values[name][layer]

    def stacked(self, name: str) -> Tensor:
        """A reading at all its layers, the layer in front of the sequence."""
        by_layer = self.values[name]
        return torch.stack([by_layer[layer] for layer in sorted(by_layer)])

    def frame(self, name: str, *, axes: Sequence[str] = ()) -> pd.DataFrame:
        """A tidy table: layer, sequence, one column an axis (indices), value.

        Raises:
            InputError: as many names of axes are needed as the tensor has after the sequence.
        """
        by_layer = self.values[name]
        frames = []
        for layer in sorted(by_layer):
            tensor = by_layer[layer]
            if tensor.dim() != 1 + len(axes):
                raise InputError(
                    f"{name!r} has {tensor.dim() - 1} axes after the sequence and {len(axes)} names were "
                    f"given: {list(axes)}; need one name an axis"
                )
            sizes = [range(size) for size in tensor.shape]
            index = pd.MultiIndex.from_product(sizes, names=["sequence", *axes])
            numbers = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # numpy has no bfloat16
            rows = pd.DataFrame({"value": numbers.flatten().numpy()}, index=index).reset_index()
            rows.insert(0, "layer", layer)
            frames.append(rows)
        return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Tensors that were kept, on the CPU. ``captured["resid_post", 3]``; ``captured["final"]``."""

    tensors: Mapping[tuple[str, int], Tensor] = field(repr=False)
    positions: tuple[int, ...] | None
    """The positions that were kept (of the queries in scores and pattern); None is all."""
    path: str
    """``plain`` or ``bridge``."""

    def _repr_html_(self) -> str:
        rows = [(site, layer, str(tuple(one.shape)), str(one.dtype)) for (site, layer), one in self.tensors.items()]
        size = sum(one.numel() * one.element_size() for one in self.tensors.values())
        frame = pd.DataFrame(rows, columns=["site", "layer", "shape", "dtype"])
        return display.html(f"{len(rows)} tensors, {size / 1e6:,.1f} MB, {self.path} path.", frame)

    def __getitem__(self, key: tuple[str, int] | str) -> Tensor:
        """The tensor of a site at a layer."""
        return self.tensors[(key, 0) if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """The (site, layer) pairs."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.tensors)

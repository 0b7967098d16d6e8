"""Sums of unit states over sequences, from which contraction is computed.

The mean cosine of all pairs of n unit vectors u is ``(|sum u|^2 - n) / (n (n - 1))``. The sums are kept in ``BLOCKS``
blocks of sequences, so that leaving out one block at a time gives an interval (the delete-a-group jackknife).
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import t as student
from torch import Tensor

from ..activations.views import LayerView, Reading
from ..errors import InputError
from ..measures.reductions import widen
from ..models.lens import LensModel

BLOCKS = 20
_T = float(student.ppf(0.975, BLOCKS - 1))
Place = tuple[int, str]
"""(-1, "embedding"), (layer, "attention"), (layer, "mlp") or (n_layers, "final")."""


class CosineSums:
    """Sums over sequences of states scaled to norm 1; filled by ``stream``."""

    def __init__(self, n_layers: int, *, sequences: int, length: int) -> None:
        self.places: list[Place] = [(-1, "embedding")]
        self.places += [(layer, name) for layer in range(n_layers) for name in ("attention", "mlp")]
        self.places.append((n_layers, "final"))
        self.positions = sorted(
            {0, *(2**power for power in range(30) if 2**power < length), length - 1}
        )
        self.length, self.sequences = length, sequences
        self.sizes = torch.bincount(self._jackknife_blocks(0, sequences), minlength=BLOCKS).double()
        self.ends: dict[Place, Tensor] = {}
        """Place -> sums of unit states at the first and the last position [block, 2, d_model]."""
        self.units: dict[Place, Tensor] = {}
        """Place -> sums of unit states [position, d_model]."""
        self.norms: dict[Place, Tensor] = {}
        """Place -> sums of norms [position]."""
        self.energy: dict[Place, Tensor] = {}
        """Place -> summed squares of the first token's state [d_model]."""
        self.within: dict[Place, Tensor] = {}
        """Place -> sums of each sequence's mean cosine between two positions [block]."""
        self._seen: dict[Place, int] = {}

    def _jackknife_blocks(self, start: int, n: int) -> Tensor:
        return (start + torch.arange(n)) * BLOCKS // self.sequences

    def readings(self) -> list[Reading]:
        def of(name: str, *sites: str, layer: int | None = None) -> Reading:
            def add(view: LayerView) -> None:
                first, *others = (view[site] for site in sites)
                self.add((-1 if name == "embedding" else view.layer, name), sum(others, first))

            layers = None if layer is None else frozenset({layer})
            return Reading(name=name, sites=sites, function=add, layers=layers)

        return [
            of("embedding", "resid_pre", layer=0),
            of("attention", "resid_pre", "attn_out"),
            of("mlp", "resid_post"),
            of("final", "final"),
        ]

    def add(self, place: Place, states: Float[Tensor, "batch position d_model"]) -> None:
        """Add the states of the next sequences at a place.

        Raises:
            InputError: states are not finite, as where a half-precision type overflows.
        """
        wide = widen(states)
        norm = wide.norm(dim=-1)
        if not bool(norm.isfinite().all()):
            raise InputError(
                f"states in {str(states.dtype).removeprefix('torch.')} are not finite (layer {place[0]}, {place[1]}); "
                "need a type that holds them: load the model in float32 or bfloat16"
            )
        unit = wide / norm.clamp(min=torch.finfo(wide.dtype).tiny)[..., None]
        cosine = (unit.sum(1).square().sum(-1) - self.length) / (self.length * (self.length - 1))
        seen = self._seen.get(place, 0)
        if not seen:
            d_model = wide.shape[-1]
            self.ends[place] = torch.zeros(BLOCKS, 2, d_model, dtype=torch.float32)
            self.units[place] = torch.zeros(len(self.positions), d_model, dtype=torch.float32)
            self.norms[place] = torch.zeros(len(self.positions), dtype=torch.float32)
            self.energy[place] = torch.zeros(d_model, dtype=torch.float32)
            self.within[place] = torch.zeros(BLOCKS, dtype=torch.float32)
        blocks = self._jackknife_blocks(seen, len(wide))
        self.ends[place].index_add_(0, blocks, unit[:, [0, -1]].cpu().float())
        self.units[place] += unit[:, self.positions].sum(0).cpu()
        self.norms[place] += norm[:, self.positions].sum(0).cpu()
        self.energy[place] += wide[:, 0].square().sum(0).cpu()
        self.within[place].index_add_(0, blocks, cosine.cpu().float())
        self._seen[place] = seen + len(wide)

    def inter_cosines(self, *, end: int = -1) -> np.ndarray:
        """Return the mean cosine between the states of two sequences at their last position (``end=0``: their first).

        The array is [1 + block, place]: row 0 has all sequences, row 1 + g all but the sequences of block g.
        """
        n, found = _all_and_without_each(self.sizes), []
        for place in self.places:
            sums = _all_and_without_each(self.ends[place][:, end].double())
            found.append(((sums.square().sum(-1) - n) / (n * (n - 1))).numpy())
        return np.stack(found, axis=1)

    def intra_cosines(self) -> np.ndarray:
        """Return the mean cosine between the states at two positions of one sequence; rows as in ``inter_cosines``."""
        sums = torch.stack([self.within[place] for place in self.places], dim=1).double()
        return (_all_and_without_each(sums) / _all_and_without_each(self.sizes)[:, None]).numpy()

    def direction(self, place: Place) -> np.ndarray:
        """Return the mean of the sequences' last unit states, scaled to norm 1 [d_model]."""
        mean = self.units[place][-1].double()
        return (mean / mean.norm()).numpy()


class PredictionCounts:
    """Counts of the most and the least probable next tokens, and of the smallest dimensions."""

    def __init__(self, n_vocab: int, d_model: int) -> None:
        self.argmax = torch.zeros(n_vocab, dtype=torch.int64)
        self.argmin = torch.zeros(n_vocab, dtype=torch.int64)
        self.smallest = torch.zeros(d_model, dtype=torch.int64)

    def add(self, last: Float[Tensor, "batch d_model"], *, lens: LensModel) -> None:
        with torch.no_grad():
            unembed: Any = lens.plain.get_output_embeddings()
            logits = unembed(last)
        for counts, which in (
            (self.argmax, logits.argmax(1)),
            (self.argmin, logits.argmin(1)),
            (self.smallest, last.argmin(1)),
        ):
            counts += torch.bincount(which.cpu(), minlength=len(counts))


def _all_and_without_each(blocks: Tensor) -> Tensor:
    """Return the sum of all blocks, then the sums without each of them."""
    return torch.cat([blocks.sum(0)[None], blocks.sum(0) - blocks])


def jackknife_interval(found: np.ndarray) -> tuple[Any, Any, Any]:
    """Return an estimate and the bounds of its 95% jackknife interval, from rows as in ``inter_cosines``."""
    left = found[1:]
    half = _T * np.sqrt((BLOCKS - 1) / BLOCKS * ((left - left.mean(0)) ** 2).sum(0))
    return found[0], found[0] - half, found[0] + half

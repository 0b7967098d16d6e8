"""Values that edits put in the place of others, measured on demand in the baseline run."""

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from ..activations.record import capture
from ..data.tokens import TokenBatch
from ..models.lens import LensModel
from ..schema import Mean
from .amplification import CentringMeans, centring_means
from .mean_ablation import Averaged, tokens_to_average


class References:
    """Replacement values for edits, measured on demand in the baseline run on the cells' own sequences.

    ``known`` holds values by site and layer that need no run.
    """

    def __init__(
        self, lens: LensModel, tokens: TokenBatch, *, known: Mapping[tuple[str, int], Tensor] | None = None
    ) -> None:
        self.lens = lens
        self.tokens = tokens
        self._known = known or {}
        self.values = lru_cache(maxsize=2)(self._values_at)
        self.mean = lru_cache(maxsize=64)(self._mean)
        self.averaged = lru_cache(maxsize=3)(self._average)
        self.means = lru_cache(maxsize=1)(self._centring)

    def _values_at(self, site: str, layer: int) -> Tensor:
        if (site, layer) in self._known:
            return self._known[site, layer]
        return capture(self.lens, self.tokens, sites=[site], layers=[layer])[site, layer]

    def _average(self, mean: Mean) -> Averaged:
        """Find the tokens that a mean is taken over."""
        return tokens_to_average(self.lens, self.tokens, mean)

    def _mean(self, site: str, layer: int, mean: Mean) -> Tensor:
        """The mean of a site at a layer over the mean's tokens; averaged axes stay, with size 1."""
        return self.averaged(mean).of(self.values(site, layer))

    def _centring(self) -> CentringMeans:
        """The centring means: of values on random tokens."""
        return centring_means(self.lens, seed=0)

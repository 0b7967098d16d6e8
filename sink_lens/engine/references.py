"""Values that edits put in the place of others, measured on demand in the clean run."""

from functools import lru_cache

from torch import Tensor

from ..activations.record import capture
from ..data.tokens import TokenBatch
from ..edits.amplification import CentringMeans, centring_means
from ..models.lens import LensModel


class References:
    """Replacement values for edits, measured on demand in the unedited run on the cells' own sequences."""

    def __init__(self, lens: LensModel, tokens: TokenBatch) -> None:
        self.lens = lens
        self.tokens = tokens
        self.values = lru_cache(maxsize=2)(self._values)
        self.mean = lru_cache(maxsize=64)(self._mean)
        self.means = lru_cache(maxsize=1)(self._centring)

    def _values(self, site: str, layer: int) -> Tensor:
        """The site at a layer, every sequence."""
        return capture(self.lens, self.tokens, sites=[site], layers=[layer])[site, layer]

    def _mean(self, site: str, layer: int) -> Tensor:
        """Mean of a site over real positions and sequences; the reduced axes stay, with size 1."""
        values = self.values(site, layer)
        real = self.tokens.valid.cpu()
        mean = values[real].double().mean(0).to(values.dtype)
        return mean[None, None]

    def _centring(self) -> CentringMeans:
        return centring_means(self.lens, seed=0)

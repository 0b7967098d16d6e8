"""Values that edits put in the place of others, measured on demand in the baseline run."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from torch import Tensor

from ..activations.record import capture_batch
from ..data.tokens import TokenBatch
from ..models.lens import LensModel
from ..schema import Mean
from .amplification import CentringMeans, centring_means
from .mean_ablation import Averaged, tokens_to_average


class References:
    """Values that edits put in, measured in the baseline run when asked for; ``known`` ones need no run."""

    def __init__(
        self,
        lens: LensModel,
        tokens: TokenBatch,
        *,
        known: Mapping[tuple[str, int], Tensor] | None = None,
    ) -> None:
        self.lens, self.tokens, stored = lens, tokens, known or {}
        self.values: Callable[[str, int], Tensor] = lru_cache(maxsize=2)(
            lambda site, layer: (
                stored
                if (site, layer) in stored
                else capture_batch(lens, tokens, sites=[site], layers=[layer])
            )[site, layer]
        )
        """Returns the values of a site at a layer."""
        self.mean: Callable[[str, int, Mean], Tensor] = lru_cache(maxsize=64)(
            lambda site, layer, mean: self.averaged(mean).mean_of(self.values(site, layer))
        )
        """Returns the mean of a site at a layer; averaged axes stay, with size 1."""
        self.averaged: Callable[[Mean], Averaged] = lru_cache(maxsize=3)(
            partial(tokens_to_average, lens, tokens)
        )
        self.means: Callable[[], CentringMeans] = lru_cache(maxsize=1)(
            partial(centring_means, lens, seed=0)
        )

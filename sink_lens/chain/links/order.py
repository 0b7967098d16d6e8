"""The links of the chain, in their order."""

from .aggregation_variance import AGGREGATION_VARIANCE
from .dimension_key import DIMENSION_KEY
from .key_sink import KEY_SINK
from .link import Link
from .neurons_dimension import NEURONS_DIMENSION
from .variance_neurons import VARIANCE_NEURONS
from .variance_preserved import VARIANCE_PRESERVED

LINKS: tuple[Link, ...] = (
    AGGREGATION_VARIANCE,
    VARIANCE_PRESERVED,
    VARIANCE_NEURONS,
    NEURONS_DIMENSION,
    DIMENSION_KEY,
    KEY_SINK,
)
"""The chain, in its order."""

"""Every measure with its unit, range and reference; the report prints them and the tests check them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sink_lens.measures import attention, dimensions, heads, locking, neurons, outputs, rank, variance

CHAIN = "arXiv 2605.06611"
SINKS = "arXiv 2410.10781"
MASSIVE = "arXiv 2402.17762"
NO_OP = "arXiv 2606.08105"
FRAMEWORK = "Elhage et al. 2021"
INDUCTION = "arXiv 2209.11895"
OURS = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Description of a measure: enough to label an axis and to detect an impossible value."""

    name: str
    """Name of the measure in code, tables and figures."""
    function: Callable[..., Any]
    """The function that computes the measure."""
    unit: str
    """Unit in words; "1" for a pure number, "of x" for the unit of the input."""
    low: float
    """Smallest possible value."""
    high: float
    """Largest possible value; infinite if it depends on a size, which the function's docstring then states."""
    reference: str
    """Source of the definition; "ours" for our own definitions."""
    meaning: str
    """One sentence for a reader of the report."""


def _describe(
    function: Callable[..., Any], unit: str, low: float, high: float, reference: str, meaning: str
) -> Measure:
    """Make the table's row of a measure from its function."""
    name = function.__name__
    return Measure(name=name, function=function, unit=unit, low=low, high=high, reference=reference, meaning=meaning)


_INF = math.inf
_ROWS = (
    _describe(attention.sink_score, "attention", 0.0, 1.0, SINKS, "mean attention to the key, its own query included"),
    _describe(attention.sink_rate, "share of sequences", 0.0, 1.0, SINKS, "how often the score passes a threshold"),
    _describe(attention.sink_mass, "attention", 0.0, 1.0, CHAIN, "mean attention of later queries that see the key"),
    _describe(attention.entropy, "nats", 0.0, _INF, OURS, "entropy of a row over its keys"),
    _describe(attention.effective_tokens, "tokens", 1.0, _INF, OURS, "how many tokens a row averages"),
    _describe(attention.key_rank, "keys", 0.0, _INF, OURS, "keys that get more attention; 0 = the top"),
    _describe(attention.gini, "1", 0.0, 1.0, OURS, "inequality of a row over its visible keys; 0 = uniform"),
    _describe(attention.null_mass, "attention", 0.0, 1.0, OURS, "attention that goes to no key"),
    _describe(heads.previous_token, "attention", 0.0, 1.0, FRAMEWORK, "mean attention to the token before"),
    _describe(heads.induction, "attention", 0.0, 1.0, INDUCTION, "attention to what followed the same token earlier"),
    _describe(variance.token_std, "of x", 0.0, _INF, CHAIN, "standard deviation within one token"),
    _describe(variance.s1, "of x", 0.0, _INF, CHAIN, "standard deviation over samples, by position"),
    _describe(variance.s2, "of x", 0.0, _INF, CHAIN, "standard deviation within a token, by position"),
    _describe(variance.uniform_law, "of sigma", 0.0, _INF, CHAIN, "standard deviation under uniform attention"),
    _describe(variance.weighted_law, "of sigma", 0.0, _INF, OURS, "standard deviation from the real attention"),
    _describe(variance.decay_exponent, "1", -_INF, _INF, OURS, "power of position; -1/2 = uniform attention"),
    _describe(variance.variance_ratio, "1", 0.0, _INF, OURS, "first position's variance over later ones'"),
    _describe(variance.output_preservation, "Kendall tau-b", -1.0, 1.0, CHAIN, "do W_O's weights follow the variance?"),
    _describe(neurons.contributions, "of the residual", -_INF, _INF, OURS, "amount that a neuron adds to a dimension"),
    _describe(neurons.contribution_share, "share", -_INF, _INF, OURS, "a neuron's share of a layer's change"),
    _describe(neurons.spike_ratio, "1", 0.0, _INF, OURS, "activation at the sink over elsewhere"),
    _describe(neurons.row_norms, "of the weights", 0.0, _INF, CHAIN, "norm of a neuron's input row"),
    _describe(neurons.norm_rank, "rank", 1.0, _INF, CHAIN, "rank by norm in the layer; 1 = the largest"),
    _describe(neurons.column_kurtosis, "1", -2.0, _INF, CHAIN, "sparsity of a neuron's output; 0 = Gaussian"),
    _describe(neurons.selectivity, "of x", -_INF, _INF, CHAIN, "cosine of a token with a neuron's input rows"),
    _describe(dimensions.dominance_ratio, "1", 1.0, _INF, CHAIN, "largest over mean magnitude of a token"),
    _describe(dimensions.dominance_ratio_fixed, "1", 0.0, _INF, CHAIN, "one dimension over the others"),
    _describe(dimensions.massive_ratio, "1", 1.0, _INF, MASSIVE, "largest over median magnitude of a token"),
    _describe(dimensions.growth_ratio, "1", 0.0, _INF, OURS, "norm of the sink token over the others'"),
    _describe(locking.qk_alignment, "|cosine|", 0.0, 1.0, CHAIN, "shared query direction against the sink's key"),
    _describe(locking.positive_share, "share of queries", 0.0, 1.0, CHAIN, "queries on the key's positive side"),
    _describe(locking.logit_split, "logits", -_INF, _INF, OURS, "amount that each part of the key adds to the logit"),
    _describe(rank.effective_rank, "directions", 1.0, _INF, CHAIN, "directions that a sequence's states use"),
    _describe(
        outputs.value_norm_ratio, "1", 0.0, _INF, NO_OP, "norm of what the sink's value writes, over the others'"
    ),
    _describe(outputs.stable_rank, "directions", 1.0, _INF, NO_OP, "directions that a head's update uses"),
)

MEASURES: Mapping[str, Measure] = MappingProxyType({row.name: row for row in _ROWS})
"""Name -> measure."""

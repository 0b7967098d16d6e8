"""Every measure with its unit, range and reference; the report prints them and the tests check them."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from . import (
    attention,
    dimensions,
    heads,
    locking,
    neurons,
    outputs,
    rank,
    variance,
)

CHAIN = "arXiv 2605.06611"
SINKS = "arXiv 2410.10781"
MASSIVE = "arXiv 2402.17762"
NO_OP = "arXiv 2606.08105"
INDUCTION = "arXiv 2209.11895"
OURS = "ours"


class Measure(NamedTuple):
    """Description of a measure: enough to label an axis and to detect an impossible value."""

    function: Callable[..., Any]
    """Its name is that of the measure in code, tables and figures."""
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


_INF = math.inf
_ROWS = (
    Measure(
        attention.sink_score,
        "attention",
        0.0,
        1.0,
        SINKS,
        "mean attention to the key, its own query included",
    ),
    Measure(
        attention.sink_rate,
        "share of sequences",
        0.0,
        1.0,
        SINKS,
        "how often the score passes a threshold",
    ),
    Measure(
        attention.sink_mass,
        "attention",
        0.0,
        1.0,
        CHAIN,
        "mean attention of later queries that see the key",
    ),
    Measure(attention.entropy, "nats", 0.0, _INF, OURS, "entropy of a row over its keys"),
    Measure(attention.null_mass, "attention", 0.0, 1.0, OURS, "attention that goes to no key"),
    Measure(
        heads.induction,
        "attention",
        0.0,
        1.0,
        INDUCTION,
        "attention to what followed the same token earlier",
    ),
    Measure(variance.token_std, "of x", 0.0, _INF, CHAIN, "standard deviation within one token"),
    Measure(variance.s1, "of x", 0.0, _INF, CHAIN, "standard deviation over samples, by position"),
    Measure(
        variance.s2, "of x", 0.0, _INF, CHAIN, "standard deviation within a token, by position"
    ),
    Measure(
        variance.decay_exponent,
        "1",
        -_INF,
        _INF,
        OURS,
        "power of position; -1/2 = uniform attention",
    ),
    Measure(
        variance.variance_ratio, "1", 0.0, _INF, OURS, "first position's deviation over later ones'"
    ),
    Measure(
        variance.output_preservation,
        "Kendall tau-b",
        -1.0,
        1.0,
        CHAIN,
        "do W_O's weights follow the variance?",
    ),
    Measure(
        neurons.contributions,
        "of the residual",
        -_INF,
        _INF,
        OURS,
        "amount that a neuron adds to a dimension",
    ),
    Measure(
        neurons.contribution_share,
        "share",
        -_INF,
        _INF,
        OURS,
        "a neuron's share of a layer's change",
    ),
    Measure(neurons.spike_ratio, "1", 0.0, _INF, OURS, "activation at the sink over elsewhere"),
    Measure(neurons.row_norms, "of the weights", 0.0, _INF, CHAIN, "norm of a neuron's input row"),
    Measure(
        neurons.norm_rank, "rank", 1.0, _INF, CHAIN, "rank by norm in the layer; 1 = the largest"
    ),
    Measure(
        neurons.column_kurtosis,
        "1",
        -2.0,
        _INF,
        CHAIN,
        "sparsity of a neuron's output; 0 = Gaussian",
    ),
    Measure(
        neurons.selectivity,
        "of x",
        -_INF,
        _INF,
        CHAIN,
        "cosine of a token with a neuron's input rows",
    ),
    Measure(
        dimensions.dominance_ratio, "1", 1.0, _INF, CHAIN, "largest over mean magnitude of a token"
    ),
    Measure(
        dimensions.dominance_ratio_fixed, "1", 0.0, _INF, CHAIN, "one dimension over the others"
    ),
    Measure(
        dimensions.massive_ratio,
        "1",
        1.0,
        _INF,
        MASSIVE,
        "largest over median magnitude of a token",
    ),
    Measure(
        dimensions.growth_ratio, "1", 0.0, _INF, OURS, "norm of the sink token over the others'"
    ),
    Measure(
        locking.qk_alignment,
        "|cosine|",
        0.0,
        1.0,
        CHAIN,
        "shared query direction against the sink's key",
    ),
    Measure(
        locking.positive_share,
        "share of queries",
        0.0,
        1.0,
        CHAIN,
        "queries on the key's positive side",
    ),
    Measure(
        locking.logit_split,
        "logits",
        -_INF,
        _INF,
        OURS,
        "amount that each part of the key adds to the logit",
    ),
    Measure(
        rank.effective_rank,
        "directions",
        1.0,
        _INF,
        CHAIN,
        "directions that a sequence's states use",
    ),
    Measure(
        outputs.value_norm_ratio,
        "1",
        0.0,
        _INF,
        NO_OP,
        "norm of what the sink's value writes, over the others'",
    ),
)

MEASURES: Mapping[str, Measure] = MappingProxyType({row.function.__name__: row for row in _ROWS})
"""Name -> measure."""

"""Measures: plain functions of one layer's tensors, grouped by link of the chain; `table.py` lists them all.

The functions take and return tensors, on any device, and use no model and no hooks. They compute in float32 or
better even for half-precision inputs, because the norm of a sink token overflows float16. An undefined result is
`nan`, never 0.
"""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .attention import effective_tokens as effective_tokens
    from .attention import entropy as entropy
    from .attention import gini as gini
    from .attention import key_rank as key_rank
    from .attention import null_mass as null_mass
    from .attention import sink_mass as sink_mass
    from .attention import sink_rate as sink_rate
    from .attention import sink_score as sink_score
    from .dimensions import dominance_ratio as dominance_ratio
    from .dimensions import dominance_ratio_fixed as dominance_ratio_fixed
    from .dimensions import growth_ratio as growth_ratio
    from .dimensions import massive_ratio as massive_ratio
    from .locking import logit_split as logit_split
    from .locking import positive_share as positive_share
    from .locking import qk_alignment as qk_alignment
    from .neurons import agreement as agreement
    from .neurons import column_kurtosis as column_kurtosis
    from .neurons import contribution_share as contribution_share
    from .neurons import contributions as contributions
    from .neurons import norm_rank as norm_rank
    from .neurons import row_norms as row_norms
    from .neurons import selectivity as selectivity
    from .neurons import spike_ratio as spike_ratio
    from .outputs import stable_rank as stable_rank
    from .outputs import value_norm_ratio as value_norm_ratio
    from .rank import effective_rank as effective_rank
    from .table import MEASURES as MEASURES
    from .table import Measure as Measure
    from .variance import decay_exponent as decay_exponent
    from .variance import output_preservation as output_preservation
    from .variance import s1 as s1
    from .variance import s2 as s2
    from .variance import token_std as token_std
    from .variance import uniform_law as uniform_law
    from .variance import variance_ratio as variance_ratio
    from .variance import weighted_law as weighted_law

_NAMES = {
    "MEASURES": "table",
    "Measure": "table",
    "agreement": "neurons",
    "column_kurtosis": "neurons",
    "contribution_share": "neurons",
    "contributions": "neurons",
    "decay_exponent": "variance",
    "dominance_ratio": "dimensions",
    "dominance_ratio_fixed": "dimensions",
    "effective_rank": "rank",
    "effective_tokens": "attention",
    "entropy": "attention",
    "gini": "attention",
    "growth_ratio": "dimensions",
    "key_rank": "attention",
    "logit_split": "locking",
    "massive_ratio": "dimensions",
    "norm_rank": "neurons",
    "null_mass": "attention",
    "output_preservation": "variance",
    "positive_share": "locking",
    "qk_alignment": "locking",
    "row_norms": "neurons",
    "s1": "variance",
    "s2": "variance",
    "selectivity": "neurons",
    "sink_mass": "attention",
    "sink_rate": "attention",
    "sink_score": "attention",
    "spike_ratio": "neurons",
    "stable_rank": "outputs",
    "token_std": "variance",
    "uniform_law": "variance",
    "value_norm_ratio": "outputs",
    "variance_ratio": "variance",
    "weighted_law": "variance",
}
"""Public name -> the module that defines it."""

__all__ = [
    "MEASURES",
    "Measure",
    "agreement",
    "column_kurtosis",
    "contribution_share",
    "contributions",
    "decay_exponent",
    "dominance_ratio",
    "dominance_ratio_fixed",
    "effective_rank",
    "effective_tokens",
    "entropy",
    "gini",
    "growth_ratio",
    "key_rank",
    "logit_split",
    "massive_ratio",
    "norm_rank",
    "null_mass",
    "output_preservation",
    "positive_share",
    "qk_alignment",
    "row_norms",
    "s1",
    "s2",
    "selectivity",
    "sink_mass",
    "sink_rate",
    "sink_score",
    "spike_ratio",
    "stable_rank",
    "token_std",
    "uniform_law",
    "value_norm_ratio",
    "variance_ratio",
    "weighted_law",
]
__getattr__, __dir__ = exported(__name__, _NAMES)

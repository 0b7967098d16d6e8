"""The figures of this package to hover over and zoom: the same names and arguments, plotly figures.

A figure is drawn as always and translated, so that both show the same numbers; ``interactive_of`` takes any other one.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import pandas as pd
from matplotlib.figure import Figure

from sink_lens.report import causal, figures, heatmap, identity_figures, mechanism, studies, sweeps, training
from sink_lens.report.columns import at, flags, numbers, select
from sink_lens.report.translation import Interactive, interactive_of

__all__ = ["Interactive", "interactive_of"]
_P = ParamSpec("_P")


def _translated(draw: Callable[_P, Figure]) -> Callable[_P, Interactive]:
    """The function whose figure is interactive."""

    @wraps(draw)
    def twin(*arguments: _P.args, **named: _P.kwargs) -> Interactive:
        return interactive_of(draw(*arguments, **named))

    return twin


sink_scores = _translated(figures.sink_scores)
sink_mass = _translated(figures.sink_mass)
norm_by_layer = _translated(figures.norm_by_layer)
variance_by_position = _translated(figures.variance_by_position)
top_dimensions = _translated(figures.top_dimensions)
attention_patterns = _translated(figures.attention_patterns)
written_columns = _translated(mechanism.written_columns)
qk_split = _translated(mechanism.qk_split)
loss_changes = _translated(mechanism.loss_changes)
amplification_curve = _translated(causal.amplification_curve)
mediation_matrix = _translated(causal.mediation_matrix)
mass_by_layer = _translated(studies.mass_by_layer)
loss_by_factor = _translated(studies.loss_by_factor)
removed_shares = _translated(studies.removed_shares)
patch_map = _translated(heatmap.patch_map)
effect_figure = _translated(sweeps.effect_figure)
course = _translated(training.course)
comparison = _translated(training.comparison)
losses = _translated(training.losses)
coverage = _translated(identity_figures.coverage)
dots = _translated(identity_figures.dots)
along = _translated(identity_figures.along)
by_layer = _translated(identity_figures.by_layer)
by_position = _translated(identity_figures.by_position)
agreement = _translated(identity_figures.agreement)
direction_course = _translated(identity_figures.direction_course)


def super_neurons(neurons: pd.DataFrame, *, position: int, share: float | None = None) -> Interactive:
    """``figures.super_neurons``, each neuron with its name."""
    found = interactive_of(figures.super_neurons(neurons, position=position, share=share))
    table = at(neurons, position)
    traces: Any = found.data
    for trace in traces:
        kept = select(table, flags(table, "is_super") == (trace.name == "super neurons"))
        names = [f"{layer:.0f}.{neuron:.0f}" for layer, neuron in numbers(kept, ["layer", "neuron"])]
        if trace.mode == "markers" and len(names) == len(trace.x):  # all of them are drawn
            trace.update(text=names, hovertemplate="%{text}<br>" + str(trace.hovertemplate))
    return found

"""Quantities that sweeps and patches read: metrics by name, metrics, or your own functions."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric, as_metric
from ..edits.named_metrics import MetricSpec
from ..errors import InputError
from ..models.lens import LensModel
from .forward import baseline_logits
from .function_identity import function_hash

Measured = MetricSpec | Metric | Callable[..., Any]


def resolve_metrics(
    given: Sequence[Measured], lens: LensModel, *, tokens: TokenBatch
) -> list[Metric]:
    """Build the requested metrics for a model and its tokens, in the order given; refuse two of the same name.

    Metrics by name that would share a name get their options behind it: ``NAME (OPTION VALUE, ...)``.
    """
    made = [
        one.make_metric(lens, partial(baseline_logits, lens, tokens))
        if isinstance(one, MetricSpec)
        else one
        for one in given
    ]
    found = [as_metric(one, lens, tokens) for one in made]
    names = [one.name for one in found]
    for index, one in enumerate(given):
        if isinstance(one, MetricSpec) and one.options and names.count(names[index]) > 1:
            options = ", ".join(f"{name} {value}" for name, value in one.options.items())
            found[index] = replace(found[index], name=f"{names[index]} ({options})")
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise InputError(f"two metrics have one name: {', '.join(names)}; need different ones")
    return found


def metric_config(metric: Measured) -> dict[str, Any]:
    """Return a metric as plain values for ``run.json``; a function is there as ``function_hash``."""
    if isinstance(metric, MetricSpec):
        return {"name": metric.name, **metric.options}
    if not isinstance(metric, Metric):
        return {"name": getattr(metric, "__name__", "metric"), "code": function_hash(metric)}
    found = {
        part.name: getattr(metric, part.name)
        for part in fields(metric)
        if part.name not in ("function", "on")
    }
    return found | {"code": function_hash((metric.function, metric.on))}

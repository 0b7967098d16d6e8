"""Birth of a sink in the table of ``watch``: the first checkpoint from which it stays."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..errors import InputError
from ..schema import MIN_SINK_RATE, SINK_THRESHOLD
from ..text import as_text, join_and, short_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """The birth of a training run's sink, at one threshold of the sink score."""

    threshold: float
    step: int | None
    """The first checkpoint from which the rate stays at or over ``MIN_SINK_RATE``; None if it does not at the last."""
    tokens: int | None
    """Tokens of that checkpoint."""
    before: int | None
    """Tokens of the checkpoint before; None where the sink was there from the first on."""
    rate: float
    """Sink rate of the last checkpoint."""
    mass: float
    """Mean attention to position 0 in the layer of the last checkpoint that has most."""
    layer: int
    uniform: float
    """The same mass under uniform attention, for comparison."""
    last: int
    """Tokens of the last checkpoint."""
    unit: str = "tokens"
    """``steps`` where tokens are not known: all numbers of tokens are then steps."""
    others: tuple[tuple[float, float], ...]
    """(threshold, sink rate) of the last checkpoint at the other thresholds that were measured."""

    @property
    def sentence(self) -> str:
        """When the sink was born, if at all, and its rate and largest mass at the end."""
        if self.tokens is None:
            born = f"no sink at threshold {self.threshold:g}"
        elif self.before is None:
            at = f"{short_count(self.tokens)} {self.unit}"
            born = f"the sink was there at the first checkpoint already ({at}), so its birth is not known"
        else:
            between = f"{short_count(self.before)} and {short_count(self.tokens)} {self.unit}"
            born = f"the sink was born between {between} (step {self.step})"
        at_others = join_and(f"{rate:.1%} at {threshold:g}" for threshold, rate in self.others)
        rates = f"{self.rate:.1%} of layers and heads above {self.threshold:g}"
        if at_others:
            rates += f" ({at_others})"
        mass = f"layer {self.layer} has most: mean mass {as_text(self.mass)}, uniform attention {as_text(self.uniform)}"
        return (
            f"{born}; at the last checkpoint ({short_count(self.last)} {self.unit}) {rates}; {mass}"
        )


def find_birth(frame: pd.DataFrame, *, threshold: float = SINK_THRESHOLD) -> Birth:
    """Find the birth of the sink. A rate that passes and falls back is no birth.

    Checkpoints that could not be measured are left out.

    Raises:
        InputError: nothing was measured, or not at this threshold; a rate of nan is not measured.
    """
    rates = whole_model_rows(frame, "sink_rate").dropna(subset="value")
    known = sorted(set(rates["threshold"].tolist()))
    if not known:
        raise InputError(
            "no checkpoint was measured, or its attention windows are too short to tell of a sink, so no birth can be "
            "told. Run sink-lens watch."
        )
    if not any(np.isclose(one, threshold) for one in known):
        raise InputError(
            f"the sink rate was not measured at threshold {threshold:g}; need one of "
            f"{', '.join(f'{one:g}' for one in known)}, or measure again with it"
        )
    here = rates.loc[np.isclose(rates["threshold"], threshold)].sort_values("step")
    step, tokens, rate = (
        here[name].to_numpy(dtype=float, na_value=np.nan) for name in ("step", "tokens", "value")
    )
    without = np.flatnonzero(~(rate >= MIN_SINK_RATE))
    first = int(without[-1]) + 1 if len(without) else 0
    born = first < len(rate)
    is_counted = not np.isnan(tokens).any()
    tokens = tokens if is_counted else step
    last = frame.loc[frame["step"] == step[-1]]
    masses = last.loc[(last["measure"] == "sink_mass") & last["layer"].notna()]
    mass = masses["value"].fillna(-1.0).to_numpy(dtype=float)
    layer = int(masses["layer"].iloc[mass.argmax()])
    uniform = last.loc[last["measure"] == "uniform_mass"]
    of_layer = uniform.loc[uniform["layer"] == layer]  # older tables have one number for all layers
    at_last = rates.loc[rates["step"] == step[-1]]
    pairs = zip(at_last["threshold"].tolist(), at_last["value"].tolist(), strict=True)
    return Birth(
        threshold=threshold,
        step=int(step[first]) if born else None,
        tokens=int(tokens[first]) if born else None,
        before=int(tokens[first - 1]) if born and first else None,
        rate=float(rate[-1]),
        mass=float(mass.max()),
        layer=layer,
        uniform=float((of_layer if len(of_layer) else uniform)["value"].iloc[0]),
        last=int(tokens[-1]),
        unit="tokens" if is_counted else "steps",
        others=tuple(
            (one, value) for one, value in sorted(pairs) if not np.isclose(one, threshold)
        ),
    )


def whole_model_rows(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return the rows of a measure of the whole model, not of a single layer or position."""
    return frame.loc[
        (frame["measure"] == measure) & frame["layer"].isna() & frame["position"].isna()
    ]

"""Contrasts: one setting of an untrained model is switched at a time; the table of these variants, paired by seed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ..errors import InputError
from ..schema import column_names
from ..stats import summarise_differences
from .untrained_models import ACTIVATIONS, UntrainedConfig

SWITCHES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "activation": ("activation", ACTIVATIONS),
    "gating": ("gated", (True, False)),
    "attention": ("attention", (True, False)),
    "mlp": ("mlp", (True, False)),
    "norm": ("norm", ("rms", "layer")),
    "positions": ("positions", ("learned", "none")),
    "init": ("init_std", (0.01, 0.02, 0.04)),
    "writers": ("scaled_writers", (True, False)),
    "tied": ("tied", (True, False)),
}
"""Name of a switch -> the field of ``UntrainedConfig``, and the values that are tried."""


def switched_configs(base: UntrainedConfig, *, switches: Sequence[str]) -> list[UntrainedConfig]:
    """Return the base configuration, and for each other value of each switch (a field) a copy with that value.

    Raises:
        InputError: an unknown switch, or one that the style cannot have (a gate in GPT-2).
    """
    if unknown := [name for name in switches if name not in SWITCHES]:
        raise InputError(
            f"there is no switch {', '.join(unknown)}; need some of {', '.join(SWITCHES)}"
        )
    variants = [base]
    for name in switches:
        field, values = SWITCHES[name]
        change: dict[str, Any] = {}
        if field == "gated":  # as many weights, beside a given width as beside the style's own
            own, given = replace(base, d_mlp=None).d_mlp, base.d_mlp
            assert given is not None
            factor = 3 / 2 if base.gated else 2 / 3
            change["d_mlp"] = None if given == own else round(given * factor)
        variants += [
            replace(base, **change | {field: value})
            for value in values
            if value != getattr(base, field)
        ]
    return list(dict.fromkeys(variants))


def variant_table(summary: pd.DataFrame) -> pd.DataFrame:
    """Return for each measure and variant of ``summary`` the mean over seeds, and the difference from the first one."""
    generator = np.random.default_rng(0)
    rows = []
    for measure, of_measure in summary.groupby("measure", sort=False):
        base: Any = None
        for variant, of_variant in of_measure.groupby("variant", sort=False):
            values: Any = of_variant.set_index("seed")["value"]
            base = values if base is None else base
            found = summarise_differences(values.to_numpy(), generator=generator)
            row = {
                "measure": measure,
                "variant": variant,
                "n": found.n,
                "mean": found.mean,
                "low": found.low,
                "high": found.high,
            }
            if values is not base and values.index.is_unique and base.index.is_unique:
                shared = values.index.intersection(base.index)
                apart = summarise_differences(
                    (values[shared] - base[shared]).to_numpy(), generator=generator
                )
                row |= {
                    "difference": apart.mean,
                    "difference_low": apart.low,
                    "difference_high": apart.high,
                    "p": apart.t_p,
                }
            rows.append(row)
    return pd.DataFrame(rows).reindex(columns=column_names("preference", "variants"))

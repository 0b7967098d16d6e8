"""SeedPrint: do two models come from one initialisation? A test of their states on the same random inputs.

    coordinates of a model  = those whose mean over the inputs is smallest           (m of d)
    S                       = the coordinates that both models have
    x_j                     = log softmax over S, at temperature 10, of coordinate j: one number an input
    tau_bar                 = mean over S of Kendall's tau-b of x_j of the one with x_j of the other

tau_bar is the effect size; p, from the nulls of ``nulls``, says how sure we are. The null that decides is
``relabelled``; the others are reported beside it.

Reference: Tong et al., arXiv 2509.26404 (the statistic, ``analytical``, ``matrices`` and ``pipeline``); ``shuffled``,
``relabelled`` and the test of a common factor are ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from ..measures.kendall import tau_b_matrix
from . import nulls
from .config import FEWEST_SHARED, NO_ANSWER, NOT_SHOWN, SAME, FingerprintConfig
from .nulls import (
    NULLS,
    Null,
    identity_coordinates,
    log10_p,
    log_softmax_states,
    tau_by_column,
    tau_deviation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """Result of comparing two models."""

    a: str
    b: str
    verdict: str
    why: str
    """The number that decided, or the reason why there is no answer."""
    shared: int = 0
    """|S|."""
    expected: float = math.nan
    """Coordinates that two unrelated models share on average: m m' / d."""
    tau_bar: float = math.nan
    """The effect size: 1 for equal models, about 0 for unrelated ones."""
    across: float = math.nan
    """Mean Kendall tau between different coordinates."""
    too_narrow: float = math.nan
    """Standard deviation of tau_bar were no coordinate matched, from tau between different ones, over the formula's."""
    scale_tau: float = math.nan
    """tau of the size of a row over S (norm, centred) between the models: a factor common to all coordinates."""
    scale_log10_p: float = math.nan
    nulls: Mapping[str, Null] = field(repr=False, default_factory=dict)

    @property
    def shares_scale(self) -> bool:
        """True if the two models agree only in how much each input scales all coordinates together.

        The published nulls may then call unrelated models related.
        """
        if not self.nulls:
            return False
        by_chance = not self.nulls["relabelled"].p_by_draws(self.tau_bar) < 0.01
        return by_chance and self.scale_log10_p < -4 and self.too_narrow > 1.5

    def null_rows(self) -> list[dict[str, object]]:
        return [
            {
                "a": self.a,
                "b": self.b,
                "null": name,
                "mean": null.mean,
                "sd": null.sd,
                "z": null.z(self.tau_bar),
                "log10_p_paper": null.log10_p(self.tau_bar, convention="paper"),
                "log10_p_code": null.log10_p(self.tau_bar, convention="code"),
                "p_draws": null.p_by_draws(self.tau_bar),
            }
            for name, null in self.nulls.items()
        ]

    def pair_row(self) -> dict[str, object]:
        row: dict[str, object] = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name != "nulls"
        }
        row["shares_scale"] = self.shares_scale
        for name in NULLS:
            null = self.nulls.get(name)
            row[f"z_{name}"] = math.nan if null is None else null.z(self.tau_bar)
            row[f"log10_p_{name}"] = math.nan if null is None else null.log10_p(self.tau_bar)
        return row


def compare_states(
    a: tuple[str, np.ndarray],
    b: tuple[str, np.ndarray],
    *,
    config: FingerprintConfig,
    generator: np.random.Generator,
) -> ModelPair:
    """Test by two models' states [n, d] on the same inputs whether both come from one initialisation.

    Models of different widths, or with too few coordinates in common, get the verdict ``no answer`` with a reason.

    Raises:
        InputError: the models have states on different numbers of inputs, or states that are not finite.
    """
    (name_a, x), (name_b, y) = a, b
    if len(x) != len(y):
        raise InputError(
            f"{name_a} read {len(x)} inputs and {name_b} {len(y)}; need the same ones. Read them again"
        )
    for name, one in (a, b):
        if not np.isfinite(one).all():
            raise InputError(
                f"the states of {name} are not finite; need numbers. Load it with dtype='float32'"
            )
    if x.shape[1] != y.shape[1]:
        why = f"widths {x.shape[1]} and {y.shape[1]}: no initialisation has both, and coordinates cannot be matched"
        return ModelPair(a=name_a, b=name_b, verdict=NO_ANSWER, why=why)
    n, width = x.shape
    count = config.n_coordinates(width)
    shared = np.intersect1d(
        identity_coordinates(x, count=count), identity_coordinates(y, count=count)
    )
    expected = count * count / width
    pair: dict[str, Any] = {"a": name_a, "b": name_b, "shared": len(shared), "expected": expected}
    if len(shared) < FEWEST_SHARED:
        why = (
            f"{len(shared)} of {count} coordinates in common ({expected:.3g} by chance), where {FEWEST_SHARED} "
            "are needed; more coordinates=... would have more"
        )
        return ModelPair(**pair, verdict=NO_ANSWER, why=why)
    soft = [
        log_softmax_states(one, coordinates=shared, temperature=config.temperature)
        for one in (x, y)
    ]
    matrix = tau_b_matrix(*(torch.from_numpy(one.T) for one in soft)).numpy()
    if not np.isfinite(matrix).all():
        why = (
            "a coordinate is the same on every input in one of the models, so that tau is undefined"
        )
        return ModelPair(**pair, verdict=NO_ANSWER, why=why)
    tau_bar = float(np.diag(matrix).mean())
    across = float((matrix.sum() - np.trace(matrix)) / (matrix.size - len(matrix)))
    drawn: dict[str, Any] = {"n": n} | {
        name: getattr(config, name) for name in ("temperature", "draws", "seed")
    }
    every = (
        nulls.analytical_null(n, shared=len(shared)),
        nulls.simulate_null("matrices", width=len(shared), count=len(shared), **drawn),
        nulls.simulate_null("pipeline", width=width, count=count, **drawn),
        nulls.shuffled_null(*soft, draws=config.draws, generator=generator),
        nulls.relabelled_null(matrix, draws=config.relabellings, generator=generator),
    )
    by_name = {one.name: one for one in every}
    null = by_name[config.decides]  # the analytical one is a formula, which has no draws
    p = 10 ** null.log10_p(tau_bar) if null.draws is None else null.p_by_draws(tau_bar)
    verdict = SAME if p < config.alpha else NOT_SHOWN
    why = f"p {p:.3g} under the {config.decides} null"
    if math.isnan(p):
        verdict, why = NO_ANSWER, f"the {config.decides} null has no draws"
    if verdict == SAME and config.inputs != "tokens":
        why += ", which does not hold on embedding inputs of narrow or untrained models"
    sizes = [np.linalg.norm(one - one.mean(1, keepdims=True), axis=1)[:, None] for one in soft]
    scale = float(tau_by_column(*sizes)[0])
    unmatched = np.where(np.eye(len(matrix), dtype=bool), across, matrix)
    return ModelPair(
        **pair,
        verdict=verdict,
        why=why,
        tau_bar=tau_bar,
        across=across,
        too_narrow=nulls.spread_over_permutations(unmatched) / by_name["analytical"].sd,
        scale_tau=scale,
        scale_log10_p=log10_p(abs(scale) / tau_deviation(n), convention="code"),
        nulls=by_name,
    )

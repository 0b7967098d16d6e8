"""How well fingerprints tell known lineages apart, and how often a null calls unrelated models related.

A pair is a case; models are in many pairs, so pairs are not independent: intervals draw models, not pairs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from ..errors import InputError
from .nulls import NULLS

FALSE_POSITIVES = 0.01
"""The share of unrelated pairs that may be called related, at which the share of related ones that are is given."""
_RESAMPLES = 500


def auc(related: np.ndarray, unrelated: np.ndarray) -> float:
    """Chance that a related pair scores over an unrelated one, ties half (area under the ROC curve); else nan."""
    if not len(related) or not len(unrelated):
        return float("nan")
    ranks = rankdata(np.concatenate([related, unrelated]))[: len(related)]
    return float((ranks.sum() - len(related) * (len(related) + 1) / 2) / (len(related) * len(unrelated)))


def true_positives(related: np.ndarray, unrelated: np.ndarray, *, at: float = FALSE_POSITIVES) -> float:
    """Share of related pairs over the lowest threshold that at most a share ``at`` of unrelated ones pass.

    With fewer than 1 / at unrelated pairs none of them may pass. nan without both kinds.
    """
    if not len(related) or not len(unrelated):
        return float("nan")
    allowed = int(np.floor(at * len(unrelated) + 1e-9))
    return float((related > np.sort(unrelated)[::-1][allowed]).mean())


def score_table(pairs: pd.DataFrame, *, generator: np.random.Generator) -> pd.DataFrame:
    """AUC and TPR at 1% FPR of tau_bar and of z under each null, with 95% intervals over models.

    Args:
        pairs: a, b, ``related`` (True, False, or missing where it is not known), tau_bar and ``z_NULL``; pairs without
            an answer have nan, and are left out (their number is in ``unanswered``).
        generator: of the bootstrap.

    Raises:
        InputError: no pair is known to be related, or none to be unrelated.
    """
    answered = pairs.dropna(subset=["related", "tau_bar"])
    related = answered["related"].to_numpy(dtype=bool)
    if not related.any() or related.all():
        raise InputError(
            f"{related.sum()} pairs are known to be related and {(~related).sum()} not to be; need both for a score. "
            "Say with --lineages which models belong together"
        )
    names = sorted({*answered["a"], *answered["b"]})
    left, right = ([names.index(name) for name in answered[side]] for side in ("a", "b"))
    # A model that is drawn twice counts twice: a pair has the product of its models' weights.
    drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=_RESAMPLES)
    weights = drawn[:, left] * drawn[:, right]
    rows = []
    for score in ("tau_bar", *(f"z_{name}" for name in NULLS)):
        values = answered[score].to_numpy(dtype=float)
        for measure, of in (("auc", auc), ("tpr", true_positives)):
            resampled = [of(*(np.repeat(values[k], w[k]) for k in (related, ~related))) for w in weights]
            defined = np.array(resampled)[~np.isnan(resampled)]
            low, high = np.quantile(defined, [0.025, 0.975]) if len(defined) else (np.nan, np.nan)
            rows.append(
                {
                    "score": score,
                    "measure": measure,
                    "value": of(values[related], values[~related]),
                    "low": float(low),
                    "high": float(high),
                    "related": int(related.sum()),
                    "unrelated": int((~related).sum()),
                    "unanswered": len(pairs.dropna(subset=["related"])) - len(answered),
                }
            )
    return pd.DataFrame(rows)


def calibration_table(nulls: pd.DataFrame, *, unrelated: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Judge each null on pairs that are known to be unrelated: its p should be uniform, its z standard normal.

    ``too_narrow`` is the root mean square of z: by how much the null's standard deviation is too small. ``p_over_NN``
    is the share of pairs with p > 0.NN (one-sided; by the draws where there are any, else by the normal).

    Args:
        nulls: a, b, null, z, log10_p_paper, p_draws.
        unrelated: the pairs.
    """
    wanted = set(unrelated)
    known = nulls.loc[[pair in wanted for pair in zip(nulls["a"], nulls["b"], strict=True)]]
    rows = []
    for name in NULLS:
        mine = known.loc[known["null"] == name]
        if mine.empty:
            continue
        p, z = p_of(mine), mine["z"].to_numpy(dtype=float)
        rows.append(
            {
                "null": name,
                "pairs": len(mine),
                "p_over_01": float((p > 0.01).mean()),
                "p_over_05": float((p > 0.05).mean()),
                "p_over_50": float((p > 0.5).mean()),
                "too_narrow": float(np.sqrt((z**2).mean())),
                "largest_z": float(np.abs(z).max()),
            }
        )
    return pd.DataFrame(rows)


def p_of(nulls: pd.DataFrame) -> np.ndarray:
    """One-sided p of some rows: the share of draws, else the normal's."""
    drawn, normal = nulls["p_draws"].to_numpy(float), 10.0 ** nulls["log10_p_paper"].to_numpy(float)
    return np.where(np.isnan(drawn), normal, drawn)


def are_related(a: tuple[str | None, int | None], b: tuple[str | None, int | None]) -> bool | None:
    """Check whether two models have one initialisation, as far as (what they share, seed) tells; None if it does not.

    Checkpoints of one training, or models with one label, are related. Another seed is another initialisation. One seed
    in two kinds of model may or may not draw the same weights, and of a model without a label nothing is known.
    """
    (group_a, seed_a), (group_b, seed_b) = a, b
    if group_a is None or group_b is None:
        return None
    if seed_a is None or seed_b is None:
        return None if (seed_a is None) != (seed_b is None) else group_a == group_b
    if seed_a != seed_b:
        return False
    return True if group_a == group_b else None


def matrix(pairs: pd.DataFrame, *, names: Sequence[str], value: str) -> np.ndarray:
    """A column of the pairs as a symmetric table of models; nan on the diagonal."""
    place: Mapping[str, int] = {name: index for index, name in enumerate(names)}
    table = np.full((len(names), len(names)), np.nan)
    for a, b, one in zip(pairs["a"], pairs["b"], pairs[value].to_numpy(float), strict=True):
        table[place[a], place[b]] = table[place[b], place[a]] = one
    return table

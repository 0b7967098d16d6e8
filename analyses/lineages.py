"""Scores of fingerprints where it is known which models are related."""

import numpy as np
import pandas as pd
from scipy.stats import rankdata


def auc(related: np.ndarray, unrelated: np.ndarray) -> float:
    """Chance that a related pair scores above an unrelated one, ties half (area under the ROC curve); else nan."""
    if not len(related) or not len(unrelated):
        return float("nan")
    ranks = rankdata(np.concatenate([related, unrelated]))[: len(related)]
    return float(
        (ranks.sum() - len(related) * (len(related) + 1) / 2) / (len(related) * len(unrelated))
    )


def p_of(nulls: pd.DataFrame) -> np.ndarray:
    """One-sided p of some rows of a fingerprint's nulls: the share of draws, else the normal's."""
    drawn, normal = nulls["p_draws"].to_numpy(float), 10.0 ** nulls["log10_p_paper"].to_numpy(float)
    return np.where(np.isnan(drawn), normal, drawn)

import numpy as np
import pandas as pd
import pytest

from analyses.lineages import auc, p_of


def test_auc_and_p_by_hand():
    # 3 beats 1 and 2; 2 beats 1 and ties with 2.
    assert auc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == 3.5 / 4
    assert np.isnan(auc(np.array([]), np.array([1.0])))
    nulls = pd.DataFrame({"p_draws": [0.25, np.nan], "log10_p_paper": [-9.0, -2.0]})
    assert p_of(nulls).tolist() == pytest.approx([0.25, 0.01])

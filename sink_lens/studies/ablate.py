"""``ablate``: which neurons must go together so that the sink goes?"""

from typing import Any

import numpy as np
import pandas as pd

from ..chain.setting import Setting
from ..text import span
from .config import AblateConfig
from .neuron_sets import Found, find_sets, names
from .study import Measured, study


@study(AblateConfig)
def ablate(setting: Setting, *, config: AblateConfig, progress: bool) -> Measured:
    """For each growth step, the smallest set of neurons whose joint ablation removes the sink (``sets``).

    The table ``ablations`` has every ablation: the set in every way, its neurons alone, each left out, random sets.

    Raises:
        InputError: a mixture of experts, a model without a growth step, or sequences too short.
        RunError: the folder is in use, or holds another run.
    """
    from .pages.interventions import removed

    found, table = find_sets(setting, progress=progress)
    summary = pd.DataFrame([_set_row(one, table) for one in found])
    headline = "\n".join([*removed(summary), setting.averaged.words])
    return Measured(frames={"ablations": table, "summary": summary}, headline=headline)


def _set_row(found: Found, table: pd.DataFrame) -> dict[str, Any]:
    """Row of ``summary`` of a growth step: its set's share removed, beside single neurons and random sets."""
    of_step = f"step == {found.segment.number}"
    usual = table.query(f"{of_step} and method == 'mean_ordinary' and what == 'column' and where == 'sink'")

    def removed(*kinds: str) -> np.ndarray:
        return usual.query("kind in @kinds")["removed_share"].to_numpy(dtype=float)

    random, single = removed("random, same layers", "random, same ranks outside"), removed("single")
    return {
        "step": found.segment.number,
        "neurons": names(found.neurons),
        "size": len(found.neurons),
        "removes": found.removes,
        "removed_share": float(removed("set")[0]),
        "best_single": float(single.max()) if len(single) else float("nan"),
        "random_mean": float(random.mean()),
        "random_max": float(random.max()),
        "read_layers": span(found.segment.layers),
    }

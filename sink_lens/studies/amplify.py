"""``amplify``: does a sink come where the variance of aggregated values is amplified?"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..chain.setting import Setting
from ..edits.amplification import Centre, CentringMeans, centres_of, centring_means
from ..edits.amplification import amplify as amplifying
from ..edits.constructors import Edit
from ..edits.outcome import Outcome
from ..errors import InputError
from ..models.lens import check_attention
from ..stats import studentised_interval
from ..text import span
from .config import AmplifyConfig
from .study import Measured, study, summary_row


@study(AmplifyConfig)
def amplify(setting: Setting, *, config: AmplifyConfig, progress: bool) -> Measured:
    """Amplify the variance of a position's aggregated values, by factor and centre, and see whether a sink comes there.

    Raises:
        InputError: a position, layer, factor or centre that cannot be used, or sequences too short.
        RunError: the folder is in use, or holds another run.
    """
    from .pages.interventions import amplified

    lens, factors, layers = setting.lens, config.factors, config.layers
    centres: list[Centre] = [centre for centre in centres_of(lens) if centre in config.centres]
    if not centres:
        raise InputError(f"values of {lens.name} are gated, so they have no such centre; need aggregated or none")
    chosen = list(setting.early_layers) if layers is None else list(layers)
    check_attention(lens, chosen, what="values to amplify")
    if not chosen:
        raise InputError("the token grows before any layer with attention, so nothing can be amplified; name layers")
    after = [layer for layer in lens.attention_layers if layer > max(chosen, default=-1)]
    reads = setting.next_layers if layers is None else after[:5]
    if not reads:
        raise InputError(f"layers {span(chosen)} leave no layer to read; need layers below the last one")
    means = None
    if any(centre != "none" for centre in centres):
        means = centring_means(setting.lens, seed=config.seed, progress=progress)
    baseline, summary = setting.baseline, []
    cells: list[tuple[Centre, float]] = [(centre, float(factor)) for centre in centres for factor in factors]
    at = {"position": setting.target_position, "layers": chosen, "means": means, "site": lens.family.aggregated}
    edits = [_amplified(factor, centre=centre, **at) for centre, factor in cells]
    runs = setting.runs(edits, loss=True, label="amplification" if progress else None)
    for (centre, factor), some, run in zip(cells, edits, runs, strict=True):
        edited = run if some else baseline
        row = summary_row(setting, baseline, edited, target_position=setting.target_position, reads=reads)
        before, mass = row["baseline_target_mass"], row["target_mass"]
        times = mass / before if before else np.nan
        change = _change(baseline, edited, position=setting.target_position, reads=reads, seed=config.seed)
        summary.append({"centre": centre, "factor": factor, "layers": span(chosen), "times": times} | change | row)
    frames = {"summary": pd.DataFrame(summary)}
    where = f"Position {setting.target_position} amplified in layers {span(chosen)}, at most:"
    headline = "\n".join([where, *amplified(frames["summary"])])
    options = {
        "target_position": setting.target_position,
        "layers": chosen,
        "factors": list(factors),
        "centres": list(centres),
    }
    tensors = {} if means is None else {name: tensor.cpu().numpy() for name, tensor in means.tensors().items()}
    return Measured(frames=frames, headline=headline, asked=options, means=tensors)


def _change(baseline: Outcome, edited: Outcome, *, position: int, reads: Sequence[int], seed: int) -> dict[str, float]:
    """The attention that the amplification adds at the position, with its interval over sequences."""
    if edited is baseline:  # the factor 1
        return {"change": 0.0, "change_low": 0.0, "change_high": 0.0}
    after, before = (run.mass_at(position, layers=reads) for run in (edited, baseline))
    found = studentised_interval((after - before).numpy(), generator=np.random.default_rng(seed))
    return {"change": found.estimate, "change_low": found.low, "change_high": found.high}


def _amplified(
    factor: float, *, position: int, layers: list[int], centre: Centre, means: CentringMeans | None, site: str
) -> list[Edit]:
    """The edit of one cell; none where the factor is 1, which is the baseline run."""
    if factor == 1:
        return []
    return [amplifying(factor, positions=[position], layers=layers, centre=centre, means=means, site=site)]

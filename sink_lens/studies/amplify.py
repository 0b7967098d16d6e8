"""``amplify``: does a sink come where the variance of aggregated values is amplified?"""

import numpy as np
import pandas as pd

from ..chain.amplification import added, edits_of
from ..chain.setting import Setting
from ..edits.amplification import Centre, centres_of, centring_means
from ..errors import InputError
from ..models.lens import check_attention
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
    cells: list[tuple[Centre, float]] = [(centre, float(factor)) for centre in centres for factor in factors]
    edits, summary = edits_of(setting, cells, layers=chosen, means=means), []
    runs = setting.runs(edits, loss=True, label="amplification" if progress else None)
    for (centre, factor), run in zip(cells, runs, strict=True):
        edited = setting.baseline if factor == 1 else run
        rng = np.random.default_rng(config.seed)
        change = added(setting, edited, factor=factor, reads=reads, generator=rng)
        del change["mass"]  # the row has it
        row = summary_row(setting, setting.baseline, edited, target_position=setting.target_position, reads=reads)
        summary.append({"centre": centre, "factor": factor, "layers": span(chosen)} | change | row)
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

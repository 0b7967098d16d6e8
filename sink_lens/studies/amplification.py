"""``amplify``: does a sink come where the variance of aggregated values is amplified?"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..chain.config import TraceConfig
from ..chain.setting import bar
from ..chain.summary import curve_text
from ..data.tokens import TokenBatch
from ..edits.amplification import CENTRES, FACTORS, Centre, CentringMeans, amplification, centring_means
from ..edits.constructors import Edit
from ..edits.effects import layer_table
from ..errors import InputError
from ..models.load import ModelLike
from ..text import span
from .study import Study, prepared, sentence, summary_row, written


def amplify(
    model: ModelLike | TraceConfig,
    *,
    position: int | None = None,
    layers: Sequence[int] | None = None,
    factors: Sequence[float] = FACTORS,
    centres: Sequence[Centre] = CENTRES,
    tokens: TokenBatch | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Study:
    """Amplify the variance of a position's aggregated values, by factor and centre, and see whether a sink comes there.

    Args:
        model: what ``load`` takes, a ``LensModel``, or a configuration, which names one and its tokens.
        position: the position; a third of the length if None.
        layers: in which layers; from layer 0 to the end of the first growth step if None.
        factors: under 1 attenuates.
        centres: what is amplified away from; ``none`` is the norm-only control.
        tokens: the sequences, instead of those of the configuration.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.

    Raises:
        InputError: a position, layer, factor or centre that cannot be used, or sequences too short.
        RunError: the folder is in use, or holds another run.
    """
    if not factors or not centres:
        raise InputError("amplify was given no factor or no centre; need at least one of each")
    setting, config = prepared(model, tokens=tokens, position=position)
    chosen = list(setting.early_layers) if layers is None else list(layers)
    after = [layer for layer in range(setting.lens.n_layers) if layer > max(chosen, default=-1)]
    reads = setting.next_layers if layers is None else after[:5]
    if not reads:
        raise InputError(f"layers {span(chosen)} leave no layer to read; need layers below the last one")
    means = None
    if any(centre != "none" for centre in centres):
        means = centring_means(setting.lens, seed=config.seed, progress=progress)
    baseline, by_layer, summary = setting.baseline, [], []
    cells: list[tuple[Centre, float]] = [(centre, float(factor)) for centre in centres for factor in factors]
    for centre, factor in bar(cells, label="amplification", progress=progress):
        edits = _amplified(factor, position=setting.target_position, layers=chosen, centre=centre, means=means)
        edited = setting.run(edits, loss=True) if edits else baseline
        table = layer_table(baseline, edited, new=setting.target_position, old=setting.sink_position)
        by_layer.append(table.assign(centre=centre, factor=factor))
        row = summary_row(setting, baseline, edited, new=setting.target_position, reads=reads)
        before, mass = row["baseline_mass_new"], row["mass_new"]
        times = mass / before if before else np.nan
        summary.append({"centre": centre, "factor": factor, "layers": span(chosen), "times": times} | row)
    frames = {"layers": pd.concat(by_layer, ignore_index=True), "summary": pd.DataFrame(summary)}
    best = max(summary, key=lambda row: row["mass_new"])
    headline = (
        f"amplifying position {setting.target_position} in layers {span(chosen)}, strongest at {best['factor']:g} from "
        f"{best['centre']} ({best['times']:.1f} times): {sentence(best, old=setting.sink_position)}\n"
        f"{curve_text(frames['summary'])}"
    )
    asked = {"position": setting.target_position, "layers": chosen, "factors": list(factors), "centres": list(centres)}
    tensors = {} if means is None else {name: tensor.cpu().numpy() for name, tensor in means.tensors().items()}
    return written(
        "amplify", setting, config, frames, asked=asked, out=out, overwrite=overwrite, headline=headline, means=tensors
    )


def _amplified(
    factor: float, *, position: int, layers: list[int], centre: Centre, means: CentringMeans | None
) -> list[Edit]:
    """The edit of one cell; none where the factor is 1, which is the clean run."""
    if factor == 1:
        return []
    return [amplification(factor, positions=[position], layers=layers, centre=centre, means=means)]

"""``isolate`` and ``amplify``: one edit, or several, beside the baseline run of one setting.

``isolate``: does a sink come where tokens see only themselves, and what becomes of the model's own? ``amplify``: does
one come where the variance of aggregated values is amplified?
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..chain.amplification import amplification_edits, compute_mass_added
from ..chain.setting import Setting
from ..edits.amplification import Centre, centring_means, usable_centres
from ..edits.effects import attention_by_layer, classify_change
from ..edits.isolation import isolate as isolating
from ..edits.outcome import Outcome
from ..errors import InputError
from ..models.lens import check_layers_have_attention
from ..stats import paired_difference
from ..text import as_ranges
from .config import AmplifyConfig, IsolateConfig
from .pages.interventions import amplification_sentences, isolation_sentences
from .study import Measured, study


@study(IsolateConfig)
def isolate(setting: Setting, *, config: IsolateConfig, progress: bool) -> Measured:
    """Mask attention so that the chosen positions, all at once, see only themselves; measure if sinks form there.

    Raises:
        InputError: a position or layer that does not exist, or sequences too short.
        SiteError: a model whose attention cannot be edited.
        RunError: the folder is in use, or holds another run.
    """
    chosen = list(config.target_positions) or [setting.target_position]
    layers, sink = config.layers, setting.sink_position
    baseline_run = setting.baseline_run_at(tuple(dict.fromkeys([*chosen, sink])))
    baseline, edit = baseline_run.outcome, isolating(chosen, layers=layers)
    edited = setting.run([edit], loss=True, of=baseline_run, label="isolation" if progress else None)
    by_layer, summary = [], []
    for target in chosen:
        table = attention_by_layer(baseline, edited, target_position=target, sink_position=sink)
        by_layer.append(table.assign(target_position=target))
        row = {"target_position": target, "layers": "all" if layers is None else as_ranges(layers)}
        row |= _edit_row(setting, baseline, edited, target_position=target, reads=setting.layers_after_growth)
        summary.append(row)
    frames = {"layers": pd.concat(by_layer, ignore_index=True), "summary": pd.DataFrame(summary)}
    headline = "\n".join(isolation_sentences(frames["summary"]))
    if mixing := setting.lens.mixer_layers:
        headline += (
            f"\nisolation masks attention alone: the mixers of layers {as_ranges(mixing)} still bring earlier tokens"
        )
    options = {"target_positions": chosen, "layers": None if layers is None else list(layers)}
    return Measured(frames=frames, headline=headline, asked=options)


@study(AmplifyConfig)
def amplify(setting: Setting, *, config: AmplifyConfig, progress: bool) -> Measured:
    """Amplify the variance of a position's value averages, by factor and centre, and measure if a sink forms there.

    Raises:
        InputError: a position, layer, factor or centre that cannot be used, or sequences too short.
        RunError: the folder is in use, or holds another run.
    """
    lens, layers, target = setting.lens, config.layers, setting.target_position
    centres: list[Centre] = [centre for centre in usable_centres(lens) if centre in config.centres]
    if not centres:
        raise InputError(f"values of {lens.name} are gated, so they have no such centre; need aggregated or none")
    chosen = list(setting.layers_until_growth) if layers is None else list(layers)
    check_layers_have_attention(lens, chosen, what="values to amplify")
    if not chosen:
        raise InputError("the token grows before any layer with attention, so nothing can be amplified; name layers")
    after = [layer for layer in lens.attention_layers if layer > max(chosen)]
    reads = setting.layers_right_after_growth if layers is None else after[:5]
    if not reads:
        raise InputError(f"layers {as_ranges(chosen)} leave no layer to read; need layers below the last one")
    means = None
    if any(centre != "none" for centre in centres):
        means = centring_means(lens, seed=config.seed, progress=progress)
    cells: list[tuple[Centre, float]] = [(centre, float(factor)) for centre in centres for factor in config.factors]
    edits, summary = amplification_edits(setting, cells, layers=chosen, means=means), []
    runs = setting.run_each(edits, loss=True, label="amplification" if progress else None)
    for (centre, factor), run in zip(cells, runs, strict=True):
        edited = setting.baseline if factor == 1 else run
        rng = np.random.default_rng(config.seed)
        change = compute_mass_added(setting, edited, factor=factor, reads=reads, generator=rng)
        del change["mass"]  # the row has it
        row = _edit_row(setting, setting.baseline, edited, target_position=target, reads=reads)
        summary.append({"centre": centre, "factor": factor, "layers": as_ranges(chosen)} | change | row)
    frames = {"summary": pd.DataFrame(summary)}
    where = f"Position {target} amplified in layers {as_ranges(chosen)}, at most:"
    options = {"target_position": target, "layers": chosen, "factors": list(config.factors), "centres": list(centres)}
    tensors = {} if means is None else {name: tensor.cpu().numpy() for name, tensor in means.tensors().items()}
    headline = "\n".join([where, *amplification_sentences(frames["summary"])])
    return Measured(frames=frames, headline=headline, asked=options, means=tensors)


def _edit_row(
    setting: Setting, baseline: Outcome, edited: Outcome, *, target_position: int, reads: Sequence[int]
) -> dict[str, Any]:
    """Compare two runs in a row of ``summary``: the loss, and attention to target and sink in the layers ``reads``."""
    assert baseline.loss is not None  # both were asked for it
    assert edited.loss is not None
    rng = np.random.default_rng(setting.config.seed)
    loss = paired_difference(edited.loss.numpy(), baseline.loss.numpy(), generator=rng)
    at = {"target_position": target_position, "sink_position": setting.sink_position}
    return {
        "read_layers": as_ranges(reads),
        "baseline_target_mass": float(baseline.mass_at(target_position, layers=reads).mean()),
        "target_mass": float(edited.mass_at(target_position, layers=reads).mean()),
        "baseline_sink_mass": float(baseline.mass_at(setting.sink_position, layers=reads).mean()),
        "sink_mass": float(edited.mass_at(setting.sink_position, layers=reads).mean()),
        "outcome": classify_change(baseline, edited, layers=reads, **at),
        "baseline_loss_nats": float(baseline.loss.mean()),
        "loss_nats": float(edited.loss.mean()),
        "loss_change_nats": loss.estimate,
        "loss_change_low": loss.low,
        "loss_change_high": loss.high,
        "n": setting.tokens.n_sequences,
    }

"""``isolate``, ``amplify`` and ``ablate``: one intervention on a model, with a run folder of its own.

Each finds the model's sink and growth steps first, makes its edits on a few sequences, and reports by layer what
became of the attention, the norms and the outlier dimension at the new and the old position, and of the loss.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..activations.forward import check_tokens
from ..chain.bench import Bench, bar, bench, cannot_cut
from ..chain.carriers import curve_text
from ..chain.config import TraceConfig
from ..chain.cuts import amplified_layers, just_after
from ..chain.inputs import provenance
from ..chain.panel import scout
from ..data.tokens import TokenBatch, decode_tokens
from ..edits.amplification import CENTRES, FACTORS, Centre, amplification, centring_means
from ..edits.constructors import Edit
from ..edits.effects import change_of, layer_table
from ..edits.isolation import isolation
from ..edits.outcome import Outcome
from ..engine.forward import run_with
from ..errors import InputError
from ..models.inputs import default_folder, model_of, tokens_of
from ..models.lens import LensModel
from ..records import create_run, display
from ..schema import LOST_FRAC
from ..stats import paired_difference
from ..text import percent, span
from .neuron_sets import Found, find_sets, names

_KERNEL = "eager"
"""What the bridge runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A finished intervention; everything in it also lies in its run folder."""

    folder: Path
    kind: str
    frames: dict[str, pd.DataFrame] = dataclasses.field(repr=False)
    """The run's tables by name."""
    headline: str
    """The result in words."""

    def _repr_html_(self) -> str:
        return display.html(self.headline, self.frames["summary"], folder=self.folder)


def isolate(
    model: LensModel | TraceConfig,
    *,
    positions: Sequence[int] = (),
    layers: Sequence[int] | None = None,
    tokens: TokenBatch | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Study:
    """Isolate positions by the attention mask, all at once, and see whether a sink comes there.

    Args:
        model: a loaded model, or a configuration, which names one and its tokens.
        positions: the positions, each from 1 on; a third of the length if none is given.
        layers: in which layers; None is all.
        tokens: the sequences, instead of those of the configuration.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.

    Raises:
        InputError: a position or layer that does not exist, or sequences too short.
        SiteError: a model whose attention cannot be edited.
        RunError: the folder is in use, or holds another run.
    """
    place, config = _prepared(model, tokens=tokens, position=positions[0] if positions else None)
    chosen = list(positions) or [place.new]
    keys = tuple(dict.fromkeys([*chosen, place.old]))
    edit = isolation(chosen, layers=layers)
    baseline = place.baseline if keys == place.baseline.keys else run_with(place.lens, place.tokens, keys=keys)
    edited = run_with(place.lens, place.tokens, edit, keys=keys, progress=progress)
    by_layer, summary = [], []
    for position in chosen:
        by_layer.append(layer_table(baseline, edited, new=position, old=place.old).assign(position=position))
        row = {"position": position, "layers": "all" if layers is None else span(layers)}
        summary.append(row | _summary_row(place, baseline, edited, new=position, reads=place.late))
    frames = {"layers": pd.concat(by_layer, ignore_index=True), "summary": pd.DataFrame(summary)}
    headline = "\n".join(f"isolating position {row['position']}: {_sentence(row, old=place.old)}" for row in summary)
    asked = {"positions": chosen, "layers": None if layers is None else list(layers)}
    return _written("isolate", place, config, frames, asked=asked, out=out, overwrite=overwrite, headline=headline)


def amplify(
    model: LensModel | TraceConfig,
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
        model: a loaded model, or a configuration, which names one and its tokens.
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
    place, config = _prepared(model, tokens=tokens, position=position)
    chosen = amplified_layers(place) if layers is None else list(layers)
    after = [layer for layer in range(place.lens.n_layers) if layer > max(chosen, default=-1)]
    reads = just_after(place) if layers is None else after[:5]
    if not reads:
        raise InputError(f"layers {span(chosen)} leave no layer to read; need layers below the last one")
    means = None
    if any(centre != "none" for centre in centres):
        means = centring_means(place.lens, seed=config.seed, progress=progress)
    baseline, by_layer, summary = place.baseline, [], []
    cells: list[tuple[Centre, float]] = [(centre, factor) for centre in centres for factor in factors]
    for centre, factor in bar(cells, label="amplification", progress=progress):
        edits = _amplified(factor, position=place.new, layers=chosen, centre=centre, means=means)
        edited = place.run(edits, loss=True) if edits else baseline
        table = layer_table(baseline, edited, new=place.new, old=place.old)
        by_layer.append(table.assign(centre=centre, factor=factor))
        row = _summary_row(place, baseline, edited, new=place.new, reads=reads)
        before, mass = row["baseline_mass_new"], row["mass_new"]
        times = mass / before if before else np.nan
        summary.append({"centre": centre, "factor": factor, "layers": span(chosen), "times": times} | row)
    frames = {"layers": pd.concat(by_layer, ignore_index=True), "summary": pd.DataFrame(summary)}
    best = max(summary, key=lambda row: row["mass_new"])
    headline = (
        f"amplifying position {place.new} in layers {span(chosen)}, strongest at {best['factor']:g} from "
        f"{best['centre']} ({best['times']:.1f} times): {_sentence(best, old=place.old)}\n"
        f"{curve_text(frames['summary'])}"
    )
    asked = {"position": place.new, "layers": chosen, "factors": list(factors), "centres": list(centres)}
    tensors = {} if means is None else {name: tensor.cpu().numpy() for name, tensor in means.tensors().items()}
    return _written(
        "amplify", place, config, frames, asked=asked, out=out, overwrite=overwrite, headline=headline, means=tensors
    )


def ablate(
    model: LensModel | TraceConfig,
    *,
    tokens: TokenBatch | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Study:
    """For each growth step, the smallest set of neurons whose joint ablation removes the sink (``sets``).

    The table ``ablations`` has every ablation: the set in every way, its neurons alone, each left out, random sets.

    Raises:
        InputError: a mixture of experts, a model without a growth step, or sequences too short.
        RunError: the folder is in use, or holds another run.
    """
    place, config = _prepared(model, tokens=tokens, position=None)
    found, table = find_sets(place, progress=progress)
    summary = pd.DataFrame([_set_row(one, table) for one in found])
    headline = "\n".join(_set_sentence(row) for row in summary.to_dict("records"))
    frames = {"ablations": table, "summary": summary}
    return _written("ablate", place, config, frames, asked={}, out=out, overwrite=overwrite, headline=headline)


def _prepared(
    model: LensModel | TraceConfig, *, tokens: TokenBatch | None, position: int | None
) -> tuple[Bench, TraceConfig]:
    """The bench of a study: model, sequences, where the sink is, the clean run."""
    if isinstance(model, TraceConfig):
        config, lens = model, model_of(model)
    else:
        config, lens = TraceConfig(model=model.name), model
    batch = tokens_of(lens, config=config, bos=config.bos) if tokens is None else tokens
    check_tokens(lens, batch)
    why_not = cannot_cut(lens, batch)
    if why_not is not None:
        raise InputError(f"nothing can be edited: {why_not}; use a model from load, and longer sequences")
    finding = scout(lens, batch, config=config)
    return bench(lens, batch, finding=finding, config=config, position=position), config


def _amplified(factor: float, *, position: int, layers: list[int], centre: Centre, means: Any) -> list[Edit]:
    """The edit of one cell; none where the factor is 1, which is the clean run."""
    if factor == 1:
        return []
    return [amplification(factor, positions=[position], layers=layers, centre=centre, means=means)]


def _summary_row(place: Bench, baseline: Outcome, edited: Outcome, *, new: int, reads: Sequence[int]) -> dict[str, Any]:
    assert baseline.loss is not None  # both were asked for it
    assert edited.loss is not None
    loss = paired_difference(edited.loss.numpy(), baseline.loss.numpy(), generator=np.random.default_rng(place.seed))
    return {
        "read_layers": span(reads),
        "baseline_mass_new": float(baseline.mass_at(new, layers=reads).mean()),
        "mass_new": float(edited.mass_at(new, layers=reads).mean()),
        "baseline_mass_old": float(baseline.mass_at(place.old, layers=reads).mean()),
        "mass_old": float(edited.mass_at(place.old, layers=reads).mean()),
        "outcome": change_of(baseline, edited, new=new, old=place.old, layers=reads),
        "baseline_loss_nats": float(baseline.loss.mean()),
        "loss_nats": float(edited.loss.mean()),
        "loss_change_nats": loss.estimate,
        "loss_change_low": loss.low,
        "loss_change_high": loss.high,
        "n": place.tokens.n_sequences,
    }


def _sentence(row: Mapping[Any, Any], *, old: int) -> str:
    return (
        f"attention there {row['baseline_mass_new']:.3f} -> {row['mass_new']:.3f}, at position {old} "
        f"{row['baseline_mass_old']:.3f} -> {row['mass_old']:.3f} (layers {row['read_layers']}): the sink is "
        f"{row['outcome']}; loss {row['baseline_loss_nats']:.3f} -> {row['loss_nats']:.3f} nats "
        f"(change {row['loss_change_low']:+.3f} to {row['loss_change_high']:+.3f})"
    )


def _set_row(found: Found, table: pd.DataFrame) -> dict[str, Any]:
    of_step = f"step == {found.segment.number}"
    usual = table.query(f"{of_step} and method == 'mean' and what == 'column' and where == 'sink'")

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


def _set_sentence(row: Mapping[Any, Any]) -> str:
    random = f"random sets of the same size {percent(row['random_mean'])} (at most {percent(row['random_max'])})"
    layers, removed = row["read_layers"], percent(row["removed_share"])
    if not row["removes"]:
        return (
            f"growth step {row['step']}: no set of up to {row['size']} neurons removes {LOST_FRAC:.0%} of the sink "
            f"in layers {layers}; the {row['size']} strongest remove {removed}, {random}"
        )
    alone = "" if np.isnan(row["best_single"]) else f", the best of them alone {percent(row['best_single'])}"
    return (
        f"growth step {row['step']}: {row['neurons']} together remove {removed} of the sink in layers {layers}{alone}, "
        f"{random}"
    )


def _written(
    kind: str,
    place: Bench,
    config: TraceConfig,
    frames: dict[str, pd.DataFrame],
    *,
    asked: Mapping[str, Any],
    out: str | Path | None,
    overwrite: bool,
    headline: str,
    means: Mapping[str, np.ndarray] | None = None,
) -> Study:
    lens, folder = place.lens, Path(out) if out is not None else default_folder(place.lens.name)
    with create_run(
        folder,
        kind=kind,
        config=dataclasses.asdict(config) | {f"{kind}_{name}": value for name, value in asked.items()},
        provenance=provenance(lens, place.tokens, config=config, kernel=_KERNEL),
        expects=("tokens", *frames),
        overwrite=overwrite,
    ) as writer:
        writer.write_table("tokens", decode_tokens(place.tokens, lens.tokenizer))
        if means:
            writer.write_tensors("centring_means", means)
        for name, frame in frames.items():
            if name == "summary":
                writer.write_csv(name, frame)
            else:
                writer.write_table(name, frame)
    return Study(folder=folder, kind=kind, frames=frames, headline=headline)

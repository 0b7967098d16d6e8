"""Every link of the chain cut: the edit, its matched controls, and how much of the sink it makes or removes.

The first link is cut upwards: isolation and variance amplification put a sink at an interior position. The others are
cut at the model's own sink: what the attention writes, the super neurons, the entries of the down-projection from them
to the outlier dimensions, what those dimensions give the key, and the key itself, are each set to what they are at
other positions (from 8 on), or for the entries to zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..edits.amplification import CENTRES, FACTORS, Centre, CentringMeans, amplification
from ..edits.constructors import At, Edit, edit, scalar
from ..edits.effects import change_of, made_share, removed_share
from ..edits.isolation import isolation
from ..edits.outcome import Outcome
from ..models.weights import attention_weights
from ..stats import Interval
from ..text import span
from .bench import Bench, bar, generator_of
from .holds import Edits, Holder, random_dimensions
from .readings import RANDOM_SETS

EFFECT_COLUMNS = (
    "link",
    "edit",
    "layers",
    "position",
    "read_layers",
    "baseline_mass_new",
    "sink_mass_new",
    "baseline_mass_old",
    "sink_mass_old",
    "baseline_loss_nats",
    "loss_nats",
    "control_of",
    "control_mean",
    "control_sd",
    "n_controls",
    "share",
    "ci_low",
    "ci_high",
    "control_share",
    "outcome",
    "is_primary",
    "n",
)
CURVE_COLUMNS = ("centre", "factor", "layers", "position", "read_layers", "baseline_mass", "mass", "times", "n")
_LAYERS_AFTER = 5
"""The curve of the amplification is read in the five layers after the first growth step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One cut of one link."""

    link: str
    name: str
    edits: Edits
    position: int
    """Where the edit is made."""
    makes: bool
    """It is to make a sink at the new position; else to remove the old one."""
    reads: tuple[int, ...]
    """The layers in which the sink is read."""
    controls: tuple[Edits, ...] = ()
    """The same edits at matched random places."""
    control_of: str = ""
    """The cut that this one is a control of."""
    is_primary: bool = True
    """The link's verdict hangs on it."""


def amplification_curve(bench: Bench, *, means: CentringMeans, progress: bool = False) -> pd.DataFrame:
    """Attention to the new position in the five layers after the first growth step, by centre and factor.

    ``times`` is the mass over that without an edit. The centre ``none`` is the norm-only control. Monotone or not,
    the curve is what it is.
    """
    layers, reads = amplified_layers(bench), just_after(bench)
    before = float(bench.baseline.mass_at(bench.new, layers=reads).mean())
    rows = []
    cells: list[tuple[Centre, float]] = [(centre, factor) for centre in CENTRES for factor in FACTORS]
    for centre, factor in bar(cells, label="amplification", progress=progress):
        mass = before
        if factor != 1:
            one = amplification(factor, positions=[bench.new], layers=layers, centre=centre, means=means)
            mass = float(bench.run([one], layers=reads).mass_at(bench.new, layers=reads).mean())
        times = mass / before if before else math.nan
        row = (centre, factor, span(layers), bench.new, span(reads), before, mass, times, bench.tokens.n_sequences)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(CURVE_COLUMNS))


def best_factor(curve: pd.DataFrame, *, centre: Centre) -> float:
    """The factor of a centre at which the new position gets the most attention."""
    return float(curve.query("centre == @centre").nlargest(1, "mass").iloc[0]["factor"])


def effect_table(
    bench: Bench,
    *,
    supers: Mapping[int, Tensor],
    means: CentringMeans,
    curve: pd.DataFrame,
    progress: bool = False,
) -> pd.DataFrame:
    """One row a cut; the columns are ``EFFECT_COLUMNS``.

    ``share`` is the attention that came to the new position (cuts that make a sink) or left the old one, over what
    the old one has without a cut, with its 95% interval over sequences; ``control_share`` is the same of the
    controls' mean. ``control_mean`` and ``control_sd`` are of the attention at that position under the controls.
    Cost: one pass of the bridge with the loss for every cut, and a shorter one for each of its five controls.
    """
    holder, rng = Holder(bench=bench), np.random.default_rng(bench.seed)
    found = [*_making(bench, means=means, curve=curve), *_removing(holder, supers=supers)]
    rows = [_row(bench, cut, rng=rng) for cut in bar(found, label="cutting", progress=progress)]
    return pd.DataFrame(rows, columns=list(EFFECT_COLUMNS))


def amplified_layers(bench: Bench) -> list[int]:
    """The layers from the first to the end of the first growth step."""
    return list(range(bench.segments[0].layers[0])) or [0]


def _making(bench: Bench, *, means: CentringMeans, curve: pd.DataFrame) -> list[Cut]:
    """The cuts that make a sink at the new position."""
    link, layers, near = "aggregation_variance", amplified_layers(bench), just_after(bench)
    common = {"link": link, "position": bench.new, "makes": True}
    found = [
        Cut(
            name="isolation",
            edits=(isolation([bench.new]),),
            controls=tuple((isolation([other]),) for other in bench.controls(bench.new)),
            reads=bench.late,
            **common,
        )
    ]
    for centre in CENTRES:
        factor = best_factor(curve, centre=centre)
        if centre == "none" or factor == 1:
            continue
        at = {"positions": [bench.new], "layers": layers, "means": means}
        one, norm = amplification(factor, centre=centre, **at), amplification(factor, centre="none", **at)
        beside = {"reads": near, "is_primary": False, **common}
        found.append(Cut(name=one.label, edits=(one,), **beside))
        found.append(Cut(name=norm.label, edits=(norm,), control_of=one.label, **beside))
    return found


def _removing(holder: Holder, *, supers: Mapping[int, Tensor]) -> list[Cut]:
    """The cuts of the model's own sink, in the order of the chain."""
    bench, generator = holder.bench, generator_of(holder.bench)
    at = {"place": bench.old, "natural": True}
    common = {"position": bench.old, "makes": False, "reads": bench.late}
    written = holder.attn_out(amplified_layers(bench), **at)
    found = [
        Cut(
            link="variance_preserved",
            name="attn_out as elsewhere",
            edits=written.edits,
            controls=written.controls,
            **common,
        )
    ]
    neurons = holder.neurons(supers, generator=generator, **at)
    if neurons is not None:
        name = f"{neurons.size} super neurons as elsewhere"
        found.append(Cut(link="variance_neurons", name=name, edits=neurons.edits, controls=neurons.controls, **common))
        found.append(_entries(bench, supers=supers, generator=generator))
    if any(bench.finding.entering(layer) for layer in bench.late):
        found.append(_to_key(holder, generator=generator))
    edits = (holder.at("k", layers=bench.late, **at),)
    controls = tuple(
        (holder.at("k", layers=bench.late, place=other, natural=True),) for other in bench.controls(bench.old)
    )
    found.append(Cut(link="key_sink", name="key as elsewhere", edits=edits, controls=controls, **common))
    return found


def _entries(bench: Bench, *, supers: Mapping[int, Tensor], generator: torch.Generator) -> Cut:
    """The entries of the down-projection from the super neurons to the outlier dimensions, set to zero."""

    def edits(dimensions: Mapping[int, Sequence[int]]) -> Edits:
        return tuple(
            scalar(
                bench.lens,
                layer=layer,
                neurons=mask.nonzero().flatten().tolist(),
                dimensions=dimensions[layer],
                positions=[bench.old],
            )
            for layer, mask in supers.items()
            if bool(mask.any())
        )

    chosen: dict[int, list[int]] = {}
    for step in bench.finding.steps:
        for layer in step.layers:
            chosen[layer] = list(bench.finding.outliers.get(step.last_layer, ())) or [step.dimension]
    drawn = {
        layer: random_dimensions(dims, d_model=bench.lens.d_model, generator=generator)
        for layer, dims in chosen.items()
    }
    controls = tuple(edits({layer: sets[i] for layer, sets in drawn.items()}) for i in range(RANDOM_SETS))
    return Cut(
        link="neurons_dimension",
        name="entries of down_proj to the outlier dimensions x 0",
        edits=edits(chosen),
        controls=controls,
        position=bench.old,
        makes=False,
        reads=bench.late,
    )


def _to_key(holder: Holder, *, generator: torch.Generator) -> Cut:
    """What the outlier dimensions give the sink's key, set to what they give other keys."""
    bench = holder.bench
    entering = {layer: list(bench.finding.entering(layer)) for layer in bench.late if bench.finding.entering(layer)}
    layers = tuple(entering)
    means = {layer: holder.others_mean(x)[0, 0] for layer, x in holder.clean("attn_in", layers=layers).items()}
    weights = {layer: attention_weights(bench.lens, layer=layer).w_k for layer in layers}

    def edit_of(dimensions: Mapping[int, Sequence[int]], label: str) -> Edit:
        def change(k: Tensor, at: At) -> Tensor:
            assert at.read is not None
            dims = list(dimensions[at.layer])
            x = at.read[:, at.positions.to(at.read.device)][..., dims]
            given = x - means[at.layer][dims].to(x.device, x.dtype)
            return k - torch.einsum("bpd,khd->bpkh", given, weights[at.layer][..., dims].to(x.dtype))

        return edit("k", change, reads="attn_in", layers=layers, positions=[bench.old], label=label)

    drawn = {
        layer: random_dimensions(dims, d_model=bench.lens.d_model, generator=generator)
        for layer, dims in entering.items()
    }
    return Cut(
        link="dimension_key",
        name="outlier dimensions in the key as elsewhere",
        edits=(edit_of(entering, "outlier dimensions in the key"),),
        controls=tuple(
            (edit_of({layer: sets[i] for layer, sets in drawn.items()}, "random dimensions in the key"),)
            for i in range(RANDOM_SETS)
        ),
        position=bench.old,
        makes=False,
        reads=bench.late,
    )


def _row(bench: Bench, cut: Cut, *, rng: np.random.Generator) -> dict[str, object]:
    reads, read_at = list(cut.reads), bench.new if cut.makes else bench.old
    whole = bench.run(cut.edits, loss=True)

    def share(run: Outcome) -> Interval:
        if cut.makes:
            return made_share(bench.baseline, run, new=bench.new, old=bench.old, layers=reads, generator=rng)
        return removed_share(bench.baseline, run, old=bench.old, layers=reads, generator=rng)

    controls = [bench.run(control, layers=reads, quiet=True) for control in cut.controls]
    masses = torch.tensor([_mass(run, read_at, reads) for run in controls])
    found = share(whole)
    assert whole.loss is not None  # it was asked for, and so was the baseline's
    assert bench.baseline.loss is not None
    return {
        "link": cut.link,
        "edit": cut.name,
        "layers": span([layer for one in cut.edits for layer in one.over(bench.lens.n_layers)]),
        "position": cut.position,
        "read_layers": span(reads),
        "baseline_mass_new": _mass(bench.baseline, bench.new, reads),
        "sink_mass_new": _mass(whole, bench.new, reads),
        "baseline_mass_old": _mass(bench.baseline, bench.old, reads),
        "sink_mass_old": _mass(whole, bench.old, reads),
        "baseline_loss_nats": float(bench.baseline.loss.mean()),
        "loss_nats": float(whole.loss.mean()),
        "control_of": cut.control_of,
        "control_mean": float(masses.mean()) if len(masses) else math.nan,
        "control_sd": float(masses.std()) if len(masses) > 1 else math.nan,
        "n_controls": len(masses),
        "share": found.estimate,
        "ci_low": found.low,
        "ci_high": found.high,
        "control_share": float(np.mean([share(run).estimate for run in controls])) if controls else math.nan,
        "outcome": change_of(bench.baseline, whole, new=bench.new, old=bench.old, layers=reads),
        "is_primary": cut.is_primary,
        "n": bench.tokens.n_sequences,
    }


def _mass(run: Outcome, position: int, layers: list[int]) -> float:
    return float(run.mass_at(position, layers=layers).nanmean())


def just_after(bench: Bench) -> tuple[int, ...]:
    """The five layers after the first growth step."""
    return bench.segments[0].layers[:_LAYERS_AFTER]

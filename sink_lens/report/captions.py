"""The figures of the page: from a run's tables to each figure, and the sentence that says what to see."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report import figures
from sink_lens.report.columns import at, by_size, flags, floats, named, need, numbers, select
from sink_lens.report.findings import optional, real, setting, studied
from sink_lens.report.words import Story, number, plural, token

_OTHERS_FROM = 8
"""Other tokens are those at positions from this one on."""
_STRONGEST, _WEAKEST = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure of the page."""

    key: str
    title: str
    make: Callable[[Run, Story], tuple[str, Figure]]
    """What to see in it, and the figure; RunError where the run lacks what it needs."""


def _sink_scores(run: Run, story: Story) -> tuple[str, Figure]:
    heads = need(run, "heads", columns=["layer", "head", "position", "sink_score"])
    position = studied(story)
    best = by_size(at(heads, position), "sink_score").head(1)
    layer, head, score = (floats(best, name)[0] for name in ("layer", "head", "sink_score"))
    see = (
        f"Each cell is a head; bright heads attend to position {position}. Look for the layer from which "
        f"most cells are bright; the threshold is marked on the scale. Strongest: "
        f"layer {layer:.0f}, head {head:.0f}: {number(score)}."
    )
    return see, figures.sink_scores(heads, position=position, threshold=story.threshold)


def _sink_mass(run: Run, story: Story) -> tuple[str, Figure]:
    heads = need(run, "heads", columns=["layer", "head", "position", "sink_score", "sink_mass"])
    position, threshold = studied(story), story.threshold or 0.3
    onset = figures.onset_layer(heads, position=position, threshold=threshold)
    found = (
        f"The mean sink score passes {threshold:g} first at layer {onset}, the onset."
        if onset is not None
        else f"The mean sink score passes {threshold:g} at no layer, so there is no onset."
    )
    see = f"The share of their attention that later tokens give to position {position}. {found}"
    return see, figures.sink_mass(heads, position=position, threshold=threshold)


def _norms(run: Run, story: Story) -> tuple[str, Figure]:
    steps = optional(run, "growth_steps", ["first_layer", "last_layer", "ratio_before", "ratio_after"])
    curve = _curve(run, studied(story))
    see = (
        f"Norm of the token at position {story.position} after each layer over the median norm of other "
        "tokens (logarithmic), and the value of its strongest dimension. "
    )
    if steps is None:
        see += "The growth steps are not known."
    elif len(steps):
        see += "The norm jumps at the shaded growth steps; see whether the dimension jumps with it."
    else:
        see += "There is no growth step."
    return see, figures.norm_by_layer(curve, growth_steps=steps)


def _curve(run: Run, position: int) -> pd.DataFrame:
    """Norm ratio and strongest dimension by layer: from layers, else from positions and dimensions."""
    layers = optional(run, "layers", ["layer", "position", "norm_ratio"])
    if layers is not None and len(at(layers, position)):
        return at(layers, position)
    table = need(run, "positions", columns=["layer", "site", "position", "norm"])
    table = named(table, "site", "resid_post")
    rows = []
    for layer in sorted(set(floats(table, "layer"))):
        one = select(table, floats(table, "layer") == layer)
        place, norm = floats(one, "position"), floats(one, "norm")
        others = norm[(place >= _OTHERS_FROM) & (place != position)]
        if len(others) and (place == position).any():
            rows.append((layer, float(norm[place == position][0] / np.median(others))))
    if not rows:
        raise RunError("the table 'positions' has no norm of the sink token after the layers. Run again to see it.")
    curve = pd.DataFrame(rows, columns=["layer", "norm_ratio"])
    dimensions = optional(run, "dimensions", ["layer", "position", "value"])
    if dimensions is not None:
        largest = by_size(at(dimensions, position), "value").drop_duplicates("layer")
        value_of = dict(zip(floats(largest, "layer"), floats(largest, "value"), strict=True))
        curve["outlier_value"] = [value_of.get(layer, np.nan) for layer in curve["layer"]]
    return curve


def _variance(run: Run, story: Story) -> tuple[str, Figure]:
    table = need(run, "positions", columns=["layer", "site", "position", "s1", "s2"])
    z = named(table, "site", "z")
    layers = sorted({int(layer) for layer in floats(z, "layer")})
    if not layers:
        raise RunError("the table 'positions' has no rows of the site z. Run again to see it.")
    spread = [layers[round(part * (len(layers) - 1))] for part in (0.0, 0.5, 1.0)]
    growing = [first for first, _, _ in story.steps or () if first in layers][:3]
    see = (
        "Spread of z, what attention hands to its output projection, by position (both axes logarithmic). "
        "Evenly averaged independent values would follow the dashed σ/√t: the first token keeps the most, "
        "later ones less. Layers: the first of each growth step, and the first, middle and last."
    )
    start = select(z, floats(z, "position") == 0)
    if len(start) and (floats(start, "s1") == 0).all():
        see += " S1 is zero at position 0, where every sequence has the same token: it starts at the next."
    return see, figures.variance_by_position(table, layers=sorted({*growing, *spread}))


def _neurons(run: Run, story: Story) -> tuple[str, Figure]:
    columns = [
        "layer",
        "neuron",
        "position",
        "contribution",
        "spike_ratio",
        "gate_norm_rank",
        "up_norm_rank",
        "is_super",
    ]
    table = at(need(run, "neurons", columns=columns), studied(story))
    if not len(table):
        raise RunError("no growth step was found, so there are no neurons to show.")
    share = real(setting(run, "super_share"))
    chosen = select(table, flags(table, "is_super"))
    ranks = np.fmin(floats(chosen, "gate_norm_rank"), floats(chosen, "up_norm_rank"))
    see = "Every neuron of the growth layers at the sink token; super neurons are triangles, named layer.neuron"
    see += f", above the dotted {share:.0%} of their layer's change." if share else "."
    if len(chosen):
        outside = int((ranks > 5).sum())
        see += (
            f" Right: by weight norm alone, {outside} of {plural(len(chosen), 'super neuron')} would be "
            "missed (not among the five largest rows of its layer)."
        )
    return see, figures.super_neurons(table, position=studied(story), share=share)


def _dimensions(run: Run, story: Story) -> tuple[str, Figure]:
    columns = ["layer", "position", "dimension", "value", "dominance_ratio", "is_outlier"]
    table = need(run, "dimensions", columns=columns)
    here = at(table, studied(story))
    if not len(here):
        raise RunError("the table 'dimensions' has no row of the sink position. Run again to see it.")
    layer, dominance = (floats(by_size(here, "dominance_ratio"), name)[0] for name in ("layer", "dominance_ratio"))
    see = (
        f"The largest of the sink token's residual values after layer {layer:.0f}, where one dimension "
        f"dominates most: it is {number(dominance)} times the mean. Few long bars: dimension disparity."
    )
    return see, figures.top_dimensions(table, position=studied(story), layer=int(layer))


def _patterns(run: Run, story: Story) -> tuple[str, Figure]:
    tensors = [tensor for tensor in run.tensors("patterns").values() if tensor.ndim == 4]
    if not tensors:
        raise RunError("patterns.safetensors holds no array of layer, head, query and key. Run again to see it.")
    patterns = tensors[0]
    heads = need(run, "heads", columns=["layer", "head", "position", "sink_score"])
    ranked = by_size(at(heads, studied(story)), "sink_score")
    places = [
        (int(layer), int(head), score)
        for layer, head, score in numbers(ranked, ["layer", "head", "sink_score"])
        if layer < patterns.shape[0] and head < patterns.shape[1] and np.isfinite(score)
    ]
    chosen = places[:_STRONGEST] + places[_STRONGEST:][-_WEAKEST:]
    if not chosen:
        raise RunError("no head of patterns.safetensors has a sink score. Run again to see it.")
    see = (
        f"Attention of one sequence in the {min(_STRONGEST, len(places))} heads with the highest sink score, "
        f"and last the lowest: a sink is a bright column at key {story.position}."
    )
    return see, figures.attention_patterns(
        np.stack([patterns[layer, head] for layer, head, _ in chosen]),
        titles=[f"layer {layer}, head {head}: {score:.2f}" for layer, head, score in chosen],
        tokens=[text for _, text in drawn_tokens(run)],
    )


def drawn_tokens(run: Run, *, most: int = 64) -> list[tuple[int, str]]:
    """Position and text of the first sequence's first tokens; none where the table is not there."""
    table = optional(run, "tokens", ["sequence", "position", "text"])
    if table is None or not len(table):
        return []
    sequence = floats(table, "sequence")
    table = select(table, sequence == sequence.min())
    table = select(table, np.argsort(floats(table, "position"))).head(most)
    return [(int(place), token(text)) for place, text in zip(floats(table, "position"), table["text"], strict=True)]


FIGURES = (
    Drawn(key="scores", title="Where the sink is", make=_sink_scores),
    Drawn(key="mass", title="From which layer on", make=_sink_mass),
    Drawn(key="variance", title="Variance by position", make=_variance),
    Drawn(key="norms", title="The sink token grows", make=_norms),
    Drawn(key="dims", title="Into few dimensions", make=_dimensions),
    Drawn(key="neurons", title="Super neurons write them", make=_neurons),
    Drawn(key="patterns", title="What the heads do", make=_patterns),
)

"""The figures of the page: from a run's tables to each figure, and the sentence that says what to see."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report import circuit, figures, mechanism
from sink_lens.report.columns import at, by_size, flags, floats, named, need, numbers, select
from sink_lens.report.findings import find_story, optional, real, setting, studied
from sink_lens.report.pages import Drawn
from sink_lens.report.words import Story, listed, number, plural, token

_OTHERS_FROM = 8
"""Other tokens are those at positions from this one on."""
_STRONGEST, _WEAKEST = 4, 2
_MOST_POSITIONS = 200


def _sink_scores(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
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


def _sink_mass(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
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


def _norms(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
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


def _variance(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    table = need(run, "positions", columns=["layer", "site", "position", "s1", "s2"])
    z = named(table, "site", "z")
    layers = _drawn_layers(z, story)
    if not layers:
        raise RunError("the table 'positions' has no rows of the site z. Run again to see it.")
    see = (
        "Spread of z, what attention hands to its output projection, by position (both axes logarithmic). "
        "Evenly averaged independent values would follow the dashed σ/√t: the first token keeps the most, "
        "later ones less. Layers: the first of each growth step, and the first, middle and last."
    )
    start = select(z, floats(z, "position") == 0)
    if len(start) and (floats(start, "s1") == 0).all():
        see += " S1 is zero at position 0, where every sequence has the same token: it starts at the next."
    return see, figures.variance_by_position(_thinned(table), layers=layers)


def _drawn_layers(z: pd.DataFrame, story: Story) -> list[int]:
    """The first, middle and last layer, and the first of each growth step."""
    layers = sorted({int(layer) for layer in floats(z, "layer")})
    if not layers:
        return []
    spread = [layers[round(part * (len(layers) - 1))] for part in (0.0, 0.5, 1.0)]
    growing = [first for first, _, _ in story.steps or () if first in layers][:3]
    return sorted({*growing, *spread})


def _thinned(table: pd.DataFrame) -> pd.DataFrame:
    """Positions as far apart as the eye can tell on a logarithmic axis."""
    known = np.unique(floats(table, "position"))
    if len(known) <= _MOST_POSITIONS:
        return table
    wanted = np.geomspace(known[0] + 1, known[-1] + 1, _MOST_POSITIONS) - 1
    return select(table, np.isin(floats(table, "position"), known[np.searchsorted(known, wanted.clip(max=known[-1]))]))


def _neurons(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
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


def _dimensions(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
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


def _patterns(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
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


def _columns(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    table = need(run, "columns", columns=["layer", "neuron", "dimension", "weight"])
    if not len(table):
        raise RunError("no super neuron was found, so there is no column to show.")
    outliers = tuple(story.dimensions or ())
    largest = by_size(table, "weight").drop_duplicates(["layer", "neuron"])
    into = int(np.isin(floats(largest, "dimension"), outliers).sum())
    see = (
        "The largest entries of each super neuron's column of the down-projection: where it writes when it fires. "
        f"The largest entry is named; in {into} of {plural(len(largest), 'super neuron')} it is an outlier dimension "
        f"of the sink token ({listed(outliers, most=4) or 'none'})."
    )
    return see, mechanism.written_columns(_strongest_first(run, table), outliers=outliers)


def _strongest_first(run: Run, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of each super neuron, in the order of what the neurons contribute where that is known."""
    order = find_story(run).super_neurons or []
    names = [f"{layer:.0f}.{neuron:.0f}" for layer, neuron in numbers(table, ["layer", "neuron"])]
    rank = {name: place for place, name in enumerate(order)}
    return select(table, np.argsort([rank.get(name, len(rank)) for name in names], kind="stable"))


def _qk(run: Run) -> tuple[str, Figure]:
    table = need(run, "key_split", columns=["layer", "key_cosine_sink", "logit_advantage_sink"])
    if not len(table):
        raise RunError("no outlier dimension enters any layer, so there is no key to split.")
    see = (
        "Left: how far the outlier dimensions alone make the sink's key (1: nothing else is needed), beside other keys "
        "and random dimensions. Right: the logit that later queries give it, split; the link from dimension to key "
        "holds where the outlier dimensions carry most of it."
    )
    if "dimension" not in table.columns or not np.isfinite(floats(table, "dimension")).any():
        see += " Here the key is turned by its position, so only its advantage over other keys is shown."
    return see, mechanism.qk_split(table)


def _circuit(run: Run) -> tuple[str, Figure]:
    see = (
        "The chain as it is in this model: token, aggregated values, neurons, outlier dimensions, key and heads. "
        "Arrows are as wide as the share of the sink that their cut makes or takes away, and dashed where a link fails."
    )
    return see, circuit.draw(circuit.circuit_of(run))


def _rows(name: str, columns: list[str]) -> Callable[[Run], pd.DataFrame]:
    """The numbers behind a figure: some columns of a table, of the studied position."""

    def rows(run: Run) -> pd.DataFrame:
        return at(need(run, name, columns=["position"]), studied(find_story(run))).filter(items=columns)

    return rows


def _variance_rows(run: Run) -> pd.DataFrame:
    table = need(run, "positions", columns=["layer", "site", "position", "s1", "s2"])
    z = named(table, "site", "z")
    return select(z, np.isin(floats(z, "layer"), _drawn_layers(z, find_story(run))))


FIGURES = (
    Drawn(key="circuit", title="The circuit", make=_circuit, data=lambda run: circuit.circuit_of(run).edges),
    Drawn(
        key="scores",
        title="Where the sink is",
        make=_sink_scores,
        data=_rows("heads", ["layer", "head", "sink_score", "sink_rate", "sink_mass"]),
    ),
    Drawn(
        key="mass",
        title="From which layer on",
        make=_sink_mass,
        data=_rows("layers", ["layer", "sink_score", "sink_mass"]),
    ),
    Drawn(
        key="norms",
        title="The sink token grows",
        make=_norms,
        data=lambda run: _curve(run, studied(find_story(run))),
    ),
    Drawn(key="variance", title="Variance by position", make=_variance, data=_variance_rows),
    Drawn(
        key="dims",
        title="Into few dimensions",
        make=_dimensions,
        data=_rows("dimensions", ["layer", "dimension", "value", "dominance_ratio", "is_outlier"]),
    ),
    Drawn(key="columns", title="The columns they come from", make=_columns, data=lambda run: run.tables["columns"]),
    Drawn(
        key="neurons",
        title="Super neurons write them",
        make=_neurons,
        data=lambda run: by_size(at(run.tables["neurons"], studied(find_story(run))), "contribution").head(500),
    ),
    Drawn(key="qk", title="What makes the key", make=_qk, data=lambda run: run.tables["key_split"]),
    Drawn(key="patterns", title="What the heads do", make=_patterns),
)

"""The page of a trace: what was found, each figure with what to see in it, and tables; patterns to click through."""

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report import circuit, figures
from sink_lens.report.diagram import Style
from sink_lens.report.page import Drawn, Listed, Page, PageTable, more, shown_table, whole
from sink_lens.report.story import (
    Story,
    chain,
    consequences,
    edit_name,
    find_story,
    headline,
    largest_first,
    link_rows,
    outliers,
    real,
    setting,
    studied,
    title,
)
from sink_lens.schema import ALL_STEPS
from sink_lens.text import head_name, interval, listed, named_parts, neuron_name, number, percent, plural, token, words

_OTHERS_FROM = 8
"""Other tokens are those at positions from this one on."""
_STRONGEST, _WEAKEST = 4, 2
_MOST_POSITIONS = 200


def _sink_scores(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score"])
    position = studied(story)
    best = largest_first(heads.loc[heads["sink_position"] == position], "sink_score").iloc[0]
    layer, head, score = (float(best[name]) for name in ("layer", "head", "sink_score"))
    see = (
        f"Each cell is a head; bright heads attend to position {position}. Look for the layer from which "
        f"most cells are bright; the threshold is marked on the scale. Strongest: "
        f"{head_name(layer, head)}: {number(score)}."
    )
    return see, figures.sink_scores(heads, position=position, threshold=story.threshold)


def _sink_mass(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score", "sink_mass"])
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
    steps = run.optional("growth_steps", columns=["first_layer", "last_layer", "ratio_before", "ratio_after"])
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
    layers = run.optional("layers", columns=["layer", "sink_position", "norm_ratio"])
    if layers is not None and len(layers.loc[layers["sink_position"] == position]):
        return layers.loc[layers["sink_position"] == position]
    table = run.need("positions", columns=["layer", "site", "position", "norm"])
    table = table.loc[table["site"] == "resid_post"]
    rows = []
    for layer, one in table.groupby("layer"):
        place, norm = one["position"].to_numpy(float), one["norm"].to_numpy(float)
        others = norm[(place >= _OTHERS_FROM) & (place != position)]
        if len(others) and (place == position).any():
            rows.append((layer, float(norm[place == position][0] / np.median(others))))
    if not rows:
        raise RunError("the table 'positions' has no norm of the sink token after the layers. Run again to see it.")
    curve = pd.DataFrame(rows, columns=["layer", "norm_ratio"])
    dimensions = run.optional("dimensions", columns=["layer", "sink_position", "value"])
    if dimensions is not None:
        largest = largest_first(dimensions.loc[dimensions["sink_position"] == position], "value").drop_duplicates(
            "layer"
        )
        value_of = dict(zip(largest["layer"], largest["value"], strict=True))
        curve["outlier_value"] = [value_of.get(layer, np.nan) for layer in curve["layer"]]
    return curve


def _variance(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    table = run.need("positions", columns=["layer", "site", "position", "s1", "s2"])
    z = table.loc[table["site"] == "z"]
    layers = _drawn_layers(z, story)
    if not layers:
        raise RunError("the table 'positions' has no rows of the site z. Run again to see it.")
    see = (
        "Standard deviation of z, what attention hands to its output projection, by position (both axes logarithmic), "
        "in the layers before the sink. Evenly averaged independent values would follow the dashed σ/√t: the first "
        "token keeps the most, later ones less. Later layers are left out: once the sink is there, position 0 has its "
        "own small value, and everything else is large beside it."
    )
    start = z.loc[z["position"] == 0]
    if len(start) and (start["s1"] == 0).all():
        see += " S1 is zero at position 0, where every sequence has the same token: it starts at the next."
    return see, figures.variance_by_position(_thinned(table), layers=layers)


def _drawn_layers(z: pd.DataFrame, story: Story) -> list[int]:
    """The layers before the sink, at most four: up to the end of the first growth step, else the first three."""
    layers = sorted({int(layer) for layer in z["layer"]})
    ends = [last for _, last, _ in story.steps or ()][:1] or [2]
    before = [layer for layer in layers if layer <= ends[0]] or layers[:1]
    return sorted({before[round(part * (len(before) - 1))] for part in (0, 1 / 3, 2 / 3, 1)}) if before else []


def _thinned(table: pd.DataFrame) -> pd.DataFrame:
    """Positions as far apart as the eye can tell on a logarithmic axis."""
    known = np.unique(table["position"].to_numpy(float))
    if len(known) <= _MOST_POSITIONS:
        return table
    wanted = np.geomspace(known[0] + 1, known[-1] + 1, _MOST_POSITIONS) - 1
    return table.loc[np.isin(table["position"], known[np.searchsorted(known, wanted.clip(max=known[-1]))])]


def _neurons(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    columns = [
        "layer",
        "neuron",
        "sink_position",
        "contribution",
        "spike_ratio",
        "gate_norm_rank",
        "up_norm_rank",
        "is_super",
    ]
    position = studied(story)
    table = run.need("neurons", columns=columns).query("sink_position == @position")
    if not len(table):
        raise RunError("no growth step was found, so there are no neurons to show.")
    share = real(setting(run, "super_share"))
    chosen = table.loc[table["is_super"].eq(True)]
    ranks = np.fmin(chosen["gate_norm_rank"].to_numpy(float), chosen["up_norm_rank"].to_numpy(float))
    see = "Every neuron of the growth layers at the sink token; super neurons are triangles"
    see += f", above the dotted {share:.0%} of their layer's change." if share else "."
    if len(chosen):
        outside = int((ranks > 5).sum())
        see += (
            f" Right: by weight norm alone, {outside} of {plural(len(chosen), 'super neuron')} would be "
            "missed (not among the five largest rows of its layer)."
        )
    return see, figures.super_neurons(table, position=position, share=share)


def _dimensions(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    columns = ["layer", "sink_position", "dimension", "value", "dominance_ratio", "is_outlier"]
    table = run.need("dimensions", columns=columns)
    here = table.loc[table["sink_position"] == studied(story)]
    if not len(here):
        raise RunError("the table 'dimensions' has no row of the sink position. Run again to see it.")
    layer, dominance = (largest_first(here, "dominance_ratio")[name].iloc[0] for name in ("layer", "dominance_ratio"))
    see = (
        f"The largest of the sink token's residual values after layer {layer:.0f}, where one dimension "
        f"dominates most: it is {number(dominance)} times the mean. Few long bars: dimension disparity."
    )
    return see, figures.top_dimensions(table, position=studied(story), layer=int(layer))


def _shown_heads(run: Run) -> tuple[np.ndarray, list[tuple[int, int, float]]]:
    """The patterns that the run keeps, and which are drawn: layer, head and sink score."""
    tensors = [tensor for tensor in run.tensors("patterns").values() if tensor.ndim == 4]
    if not tensors:
        raise RunError("patterns.safetensors holds no array of layer, head, query and key. Run again to see it.")
    patterns = tensors[0]
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score"])
    ranked = largest_first(heads.loc[heads["sink_position"] == studied(find_story(run))], "sink_score")
    places = [
        (int(layer), int(head), score)
        for layer, head, score in ranked[["layer", "head", "sink_score"]].itertuples(index=False)
        if layer < patterns.shape[0] and head < patterns.shape[1] and np.isfinite(score)
    ]
    if not places:
        raise RunError("no head of patterns.safetensors has a sink score. Run again to see it.")
    return patterns, places[:_STRONGEST] + places[_STRONGEST:][-_WEAKEST:]


def _patterns(run: Run) -> tuple[str, Figure]:
    patterns, chosen = _shown_heads(run)
    see = (
        f"Attention of one sequence in the {min(_STRONGEST, len(chosen))} heads with the highest sink score, "
        f"and last the lowest: a sink is a bright column at key {studied(find_story(run))}."
    )
    return see, figures.attention_patterns(
        np.stack([patterns[layer, head] for layer, head, _ in chosen]),
        titles=[f"{head_name(layer, head)}: {score:.2f}" for layer, head, score in chosen],
        tokens=[text for _, text in drawn_tokens(run)],
    )


def drawn_tokens(run: Run, *, most: int = 64) -> list[tuple[int, str]]:
    """Position and text of the first sequence's first tokens; none where the table is not there."""
    table = run.optional("tokens", columns=["sequence", "position", "text"])
    if table is None:
        return []
    table = table.dropna(subset=["position", "text"])  # a table from elsewhere may lack some
    table = table.loc[table["sequence"] == table["sequence"].min()].sort_values("position").head(most)
    return [(int(place), token(text)) for place, text in zip(table["position"], table["text"], strict=True)]


def _columns(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    table = run.need("columns", columns=["layer", "neuron", "dimension", "weight"])
    if not len(table):
        raise RunError("no super neuron was found, so there is no column to show.")
    outliers = tuple(story.dimensions or ())
    largest = largest_first(table, "weight").drop_duplicates(["layer", "neuron"])
    into = int(np.isin(largest["dimension"], outliers).sum())
    see = (
        "The largest entries of each super neuron's column of the down-projection: where it writes when it fires. "
        f"The largest entry is named; in {into} of {plural(len(largest), 'super neuron')} it is an outlier dimension "
        f"of the sink token ({listed(outliers, most=4) or 'none'})."
    )
    return see, figures.written_columns(_strongest_first(run, table), outliers=outliers)


def _strongest_first(run: Run, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of each super neuron, in the order of what the neurons contribute where that is known."""
    order = find_story(run).super_neurons or []
    names = [neuron_name(layer, neuron) for layer, neuron in zip(table["layer"], table["neuron"], strict=True)]
    rank = {name: place for place, name in enumerate(order)}
    return table.iloc[np.argsort([rank.get(name, len(rank)) for name in names], kind="stable")]


def _qk(run: Run) -> tuple[str, Figure]:
    table = run.need("key_split", columns=["layer", "key_cosine_sink", "logit_advantage_sink"])
    if not len(table):
        raise RunError("no outlier dimension enters any layer, so there is no key to split.")
    see = (
        "Left: how far the outlier dimensions alone make the sink's key (1: nothing else is needed), beside other keys "
        "and random dimensions. Right: the logit that later queries give it, split; the link from dimension to key "
        "holds where the outlier dimensions carry most of it."
    )
    if "dimension" not in table.columns or bool(table["dimension"].isna().all()):
        see += " Here the key is turned by its position, so only its advantage over other keys is shown."
    return see, figures.qk_split(table)


def _circuit(run: Run) -> tuple[str, Figure]:
    see = (
        "The chain as it is in this model: token, aggregated values, neurons, outlier dimensions, key and heads. "
        "Arrows are measured paths, as wide as the share of the sink that is lost without them; dashed ones lower it."
    )
    return see, circuit.chain_circuit(run).draw()


def _rows(name: str, columns: list[str]) -> Callable[[Run], pd.DataFrame]:
    """The numbers behind a figure: some columns of a table, of the studied position."""

    def rows(run: Run) -> pd.DataFrame:
        table = run.need(name, columns=["sink_position"])
        return table.loc[table["sink_position"] == studied(find_story(run))].filter(items=columns)

    return rows


def _mass_rows(run: Run) -> pd.DataFrame:
    """By layer from the table of layers, else the mean over heads."""
    if run.optional("layers", columns=["sink_position", "sink_mass"]) is not None:
        return _rows("layers", ["layer", "sink_score", "sink_mass"])(run)
    heads = _rows("heads", ["layer", "sink_score", "sink_mass"])(run)
    return pd.DataFrame(heads.groupby("layer", as_index=False).mean())


def _neuron_rows(run: Run) -> pd.DataFrame:
    table = run.need("neurons", columns=["sink_position", "contribution"])
    return largest_first(table.loc[table["sink_position"] == studied(find_story(run))], "contribution").head(500)


def _pattern_rows(run: Run) -> pd.DataFrame:
    patterns, chosen = _shown_heads(run)
    rows = []
    for layer, head, _ in chosen:
        query, key = np.tril_indices(patterns.shape[-1])
        share = patterns[layer, head][query, key] / 255
        rows.append(pd.DataFrame({"layer": layer, "head": head, "query": query, "key": key, "attention": share}))
    return pd.concat(rows)


def _variance_rows(run: Run) -> pd.DataFrame:
    table = run.need("positions", columns=["layer", "site", "position", "s1", "s2"])
    z = table.loc[table["site"] == "z"]
    return z.loc[z["layer"].isin(_drawn_layers(z, find_story(run)))]


def _sketched(style: Style) -> Callable[[Run], tuple[str, Figure]]:
    return lambda run: ("The circuit, a number an arrow.", circuit.chain_circuit(run).draw(style))


def _edges(run: Run) -> pd.DataFrame:
    return circuit.chain_circuit(run).edges


_FIGURES = (
    Drawn(key="circuit", title="The circuit", make=_circuit, data=_edges),
    Drawn(key="circuit-talk", title="The circuit for a talk", make=_sketched("talk"), data=_edges, on_page=False),
    Drawn(key="circuit-paper", title="The circuit for a paper", make=_sketched("paper"), data=_edges, on_page=False),
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
        data=_mass_rows,
    ),
    Drawn(
        key="norms",
        title="Does the sink token grow?",
        make=_norms,
        data=lambda run: _curve(run, studied(find_story(run))),
    ),
    Drawn(key="variance", title="Variance by position", make=_variance, data=_variance_rows),
    Drawn(
        key="dims",
        title="Do few dimensions hold it?",
        make=_dimensions,
        data=_rows("dimensions", ["layer", "dimension", "value", "dominance_ratio", "is_outlier"]),
    ),
    Drawn(key="columns", title="The columns they come from", make=_columns, data=whole("columns")),
    Drawn(key="neurons", title="Do super neurons write them?", make=_neurons, data=_neuron_rows),
    Drawn(key="qk", title="What makes the key", make=_qk, data=whole("key_split")),
    Drawn(key="patterns", title="What the heads do", make=_patterns, data=_pattern_rows, on_page=False),
)


_ANOTHER_PATH = 0.5


def _causal(run: Run, name: str, columns: list[str]) -> pd.DataFrame:
    table = run.need(name, columns=columns)
    if len(table):
        return table
    effects = run.optional("effects", columns=["link"])
    if effects is not None and len(effects):
        raise RunError("this was not measured: the sink is there before the layers in which it would be read.")
    if find_story(run).is_sink is False:
        raise RunError("no intervention was made: there is no sink to break.")
    raise RunError("no intervention was made: the sequences are too short, or the attention cannot be edited.")


def _amplification(run: Run) -> tuple[str, Figure]:
    table = _causal(
        run, "amplification", ["centre", "factor", "mass", "baseline_mass", "target_position", "read_layers", "times"]
    )
    table = figures.with_changes(table)
    first = table.iloc[0]
    best = largest_first(table.loc[table["centre"] != "none"], "change").iloc[0]
    see = (
        f"Position {first['target_position']}: its aggregated values are moved away from a mean by a factor, up to the "
        f"end of the first growth step, and its attention is read in layers {first['read_layers']}. "
        f"Most at {best['factor']:g} from the mean of {figures.NAMES[best['centre']]}: {number(best['change'])} "
        f"{interval(best['change_low'], best['change_high'])}. Zero: what no edit gives. The norm-only line is the "
        "control: scaling alone should bring no sink."
    )
    return see, figures.amplification_curve(table)


def _matrix(run: Run) -> tuple[str, Figure]:
    columns = [
        "intervention",
        "frozen",
        "step",
        "layers_from",
        "layers_to",
        "surviving_share",
        "control_surviving_share",
    ]
    table = _causal(run, "mediation", columns)
    most = table.loc[table["frozen"] != "z"].groupby("frozen", sort=False)["surviving_share"].max()
    leaving = [str(name) for name, share in most.items() if share > _ANOTHER_PATH]
    see = (
        "A sink is put at a position (or the model's own is taken), and one quantity there is frozen at its value "
        "without a sink. 0: freezing it takes the whole sink away, so the sink goes through it. 1: it changes nothing. "
        "In brackets, random controls of the same size. z is the check: it must undo what was done. "
    )
    if leaving:
        see += f"Another path exists beside {' and '.join(leaving)}: most of a sink survives there."
    return see, figures.mediation_matrix(table)


def _costs(run: Run) -> tuple[str, Figure]:
    table = _causal(run, "effects", ["link", "edit", "baseline_loss_nats", "loss_nats"])
    before = table["baseline_loss_nats"].iloc[0]
    see = (
        f"What each intervention costs beside the sink that it removes or makes: the loss without one is "
        f"{number(float(before))} nats. A long bar is an intervention that broke the model, not only its sink."
    )
    return see, figures.loss_changes(table)


def _path_table(run: Run) -> tuple[str, PageTable]:
    columns = ["source", "source_step", "target", "target_step", "through", "read_step", "share", "ci_low", "ci_high"]
    table = _causal(run, "paths", columns)
    steps = {*table["read_step"]} - {ALL_STEPS}
    step = table["target_step"].where(table["target"] != "sink", table["source_step"])
    read = step.where(step.isin([*steps]), ALL_STEPS)
    table = largest_first(table.loc[table["read_step"] == read], "share")
    bounds = zip(table["ci_low"], table["ci_high"], strict=True)

    def end(name: str, step: float) -> str:
        return name if step < 0 else f"{name}, step {step:.0f}"

    shown = table.assign(
        source=[end(*one) for one in zip(table["source"], table["source_step"], strict=True)],
        target=[end(*one) for one in zip(table["target"], table["target_step"], strict=True)],
        share=[percent(share) for share in table["share"]],
        interval=[interval(low, high, shown=percent) for low, high in bounds],
    )
    if "control_largest" in table.columns:
        shown["control_largest"] = [percent(one) if np.isfinite(one) else "" for one in table["control_largest"]]
    heads = {
        "source": "what was written by",
        "target": "is taken from",
        "through": "through",
        "share": "lost of the sink",
        "interval": "interval",
        "control_largest": "controls, at most",
    }
    see = (
        "Path patching: at the sink position the target alone reads the stream without what the source wrote beyond an "
        "ordinary token. How much of the sink is lost, after the target's growth step where it has one (of MLPs in all "
        "layers with a sink); a negative share is a larger sink. Everything is all sources at once."
    )
    return see + more(len(shown), "paths"), shown_table(shown, heads)


def _effect_table(run: Run) -> tuple[str, PageTable]:
    table = _causal(run, "effects", ["link", "edit", "share", "ci_low", "ci_high", "control_share", "outcome"])
    bounds = zip(table["ci_low"], table["ci_high"], strict=True)
    shown = table.assign(
        link=_in_words(run, pd.Series(table["link"])),
        interval=[interval(low, high, shown=percent) for low, high in bounds],
        share=[percent(share) for share in table["share"]],
        edit=[edit_name(edit) for edit in table["edit"]],
    )
    if "control_largest" in table.columns:
        shown["control_largest"] = [percent(share) for share in table["control_largest"]]
    if {"loss_nats", "baseline_loss_nats"} <= set(table.columns):
        shown["cost"] = [f"{cost:+.2f}" for cost in table["loss_nats"] - table["baseline_loss_nats"]]
    heads = {
        "link": "link",
        "edit": "intervention",
        "layers": "in layers",
        "position": "at",
        "share": "moves of the sink",
        "interval": "interval",
        "control_largest": "controls, at most",
        "outcome": "the sink is",
        "cost": "loss, nats",
    }
    see = (
        "Every intervention: the share of the sink that it makes at the target position, or removes from the sink "
        "position, beside the same edit at matched random places, and what it adds to the loss. Attention at both "
        "positions is in the copied numbers."
    )
    return see, replace(shown_table(shown, heads), frame=table)


def _in_words(run: Run, links: pd.Series) -> list[str]:
    """Names of links as people read them."""
    known = {link.name: link.words for link in chain(run)}
    return [known.get(name, words(str(name))) for name in links]


def _maker_table(run: Run) -> tuple[str, PageTable]:
    """The sets of parts that were ablated at the sink position, beside random sets."""
    table = run.need("maker_sets", columns=["set", "control_of", "size", "parts", "removed", "ci_low", "ci_high"])
    table = table.loc[table["control_of"].eq("")]
    ends = zip(table["ci_low"], table["ci_high"], strict=True)
    table = table.assign(
        interval=[interval(low, high, shown=percent) for low, high in ends],
        removed=[percent(value) for value in table["removed"]],
        parts=[named_parts(one) for one in table["parts"]],
        control_largest=[percent(value) for value in table["control_largest"]],
    )
    heads = {
        "set": "set",
        "size": "parts",
        "parts": "which",
        "removed": "removes",
        "interval": "interval",
        "control_largest": "random sets, most",
        "n_controls": "draws",
        "baseline_loss_nats": "loss before",
        "loss_nats": "loss after",
        "control_loss_nats": "loss, random sets",
        "n": "sequences",
    }
    if not len(table):
        return "No set of parts that write to the sink position removes half of it.", shown_table(table, heads)
    see = (
        "Everything that writes to the sink position in any layer was ranked by its effect on the "
        f"{table['target'].iloc[0]}, and sets were ablated together on other sequences: small sets that remove half "
        "and four fifths, all makers, and the super neurons by contribution. The ranking is in makers.parquet."
    )
    summary = run.optional("summary", columns=["quantity", "value"])
    if summary is not None:
        said = summary.loc[summary["quantity"] == "makers_beside_super_neurons", "value"].tolist()
        see += "".join(f" {text[:1].upper()}{text[1:]}." for text in map(str, said))
    see += _with_makers(run, table)
    return see, shown_table(table, heads)


def _with_makers(run: Run, sets: pd.DataFrame) -> str:
    """Why the chain's intervention on the super neurons removes another share than their set: it takes more neurons."""
    effects = run.optional("effects", columns=["link", "edit", "share", "is_primary"])
    size = sets.loc[sets["set"] == "super neurons", "size"].tolist()
    if effects is None or not size:
        return ""
    effects = effects.loc[effects["is_primary"].eq(True)]
    for edit, share in zip(effects["edit"], effects["share"], strict=True):
        found = re.fullmatch(r"mean ablation of (\d+) super neurons?(?: and (\d+) other makers?)?", str(edit))
        n = int(found[1]) + int(found[2] or 0) if found else 0
        if n > int(size[0]):
            return (
                f" The {percent(share)} in the chain above is of {n} neurons: these {size[0]} and the neurons among "
                "the makers."
            )
    return ""


def _placement_table(run: Run) -> tuple[str, PageTable]:
    table = _causal(run, "placement", ["position", "token", "isolated", "sink_mass", "is_sink"])
    table = table.assign(
        isolated=np.where(table["isolated"].eq(True), "yes", "no"),
        is_sink=np.where(table["is_sink"].eq(True), "yes", "no"),
    )
    heads = {
        "position": "position",
        "token": "token",
        "isolated": "isolated",
        "sink_mass": "attention",
        "ordinary_mass": "of ordinary positions",
        "norm_ratio": "norm ÷ others",
        "loss_nats": "loss, nats",
        "is_sink": "a sink",
    }
    see = "Is the sink bound to position 0, or to BOS? Attention to each position and token, isolated and not."
    return see, shown_table(table, heads)


def _looked_for_makers(run: Run) -> bool:
    """Check whether makers were looked for, and there is something that they make."""
    table = run.optional("maker_sets", columns=["set"])
    return table is not None and len(table) > 0


def _has_paths(run: Run) -> bool:
    return "paths" in run.tables and _has_interventions(run)


def _has_interventions(run: Run) -> bool:
    """Check whether interventions were asked for, and there is a sink to remove."""
    links = run.optional("links", columns=["verdict"])
    without = links is not None and bool(links["verdict"].eq("not applicable").all()) and len(links) > 0
    return bool(run.config.get("interventions")) and not without


_CAUSAL_FIGURES = (
    Drawn(
        key="mediation",
        title="Which link carries the sink",
        make=_matrix,
        data=whole("mediation"),
        when=_has_interventions,
    ),
    Drawn(
        key="amplification",
        title="Does variance make a sink?",
        make=_amplification,
        data=whole("amplification"),
        when=_has_interventions,
    ),
    Drawn(
        key="loss",
        title="What the interventions cost",
        make=_costs,
        data=whole("effects", columns=["link", "edit", "baseline_loss_nats", "loss_nats"]),
        when=_has_interventions,
        on_page=False,
    ),
)
_CAUSAL_TABLES = (
    Listed(key="maker-table", title="The makers of the sink", make=_maker_table, when=_looked_for_makers),
    Listed(key="effect-table", title="Interventions on the links", make=_effect_table, when=_has_interventions),
    Listed(key="path-table", title="Paths of the sink", make=_path_table, when=_has_paths),
    Listed(key="placement-table", title="Position or token?", make=_placement_table, when=_has_interventions),
)


MOST_BYTES = 2_000_000
"""Most bytes of patterns in a page, as encoded in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The patterns of a run's heads, packed for a page."""

    data: dict[str, Any]
    """For the page's script: JSON."""
    said: str
    """Which heads are there, in a sentence."""


def embedded(run: Run, *, most_bytes: int = MOST_BYTES) -> Embedded:
    """The patterns of a run's first sequence, strongest heads first, up to a number of bytes.

    A pattern is the lower triangle of query by key, row by row, a byte each (255 is all of a query's attention);
    all of them after each other, in base64.

    Raises:
        RunError: The run has no patterns, or no sink scores to rank them by.
    """
    position = studied(find_story(run))
    stacks = [tensor for tensor in run.tensors("patterns").values() if tensor.ndim == 4]
    if not stacks:
        raise RunError("patterns.safetensors holds no array of layer, head, query and key. Run again to see it.")
    patterns = stacks[0]
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score"])
    scores = figures.by_layer_and_head(heads, "sink_score", position=position)
    length = patterns.shape[-1]
    past = np.tril_indices(length)
    fit = int(most_bytes * 3 / 4) // len(past[0])
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=None, kind="stable")
    ranked = [divmod(int(flat), scores.shape[1]) for flat in order]
    there = [(layer, head) for layer, head in ranked if layer < patterns.shape[0] and head < patterns.shape[1]]
    chosen = there[:fit]
    packed = b"".join(patterns[layer, head][past].astype(np.uint8).tobytes() for layer, head in chosen)
    said = f"Patterns of all {len(chosen):,} heads are in this page"
    if len(chosen) < len(there):
        weakest = number(float(scores[chosen[-1]])) if chosen else "none"
        said = (
            f"Patterns of {len(chosen):,} of {len(there):,} heads are in this page, those with the highest sink score "
            f"({weakest} and above): more would make it too large"
        )
    texts = [token(text, counted=False) for _, text in drawn_tokens(run, most=length)]
    return Embedded(
        data={
            "length": length,
            "layers": scores.shape[0],
            "heads": scores.shape[1],
            "position": position,
            "scores": [[None if np.isnan(one) else round(float(one), 3) for one in row] for row in scores],
            "chosen": [layer * scores.shape[1] + head for layer, head in chosen],
            "tokens": texts if len(texts) == length else [""] * length,
            "patterns": base64.b64encode(packed).decode(),
        },
        said=f"{said}; each is of one sequence, its first {length} positions.",
    )


def _step_table(run: Run) -> tuple[str, PageTable]:
    heads = {
        "step": "step",
        "first_layer": "first layer",
        "last_layer": "last layer",
        "ratio_before": "ratio before",
        "ratio_after": "ratio after",
        "sink_position": "sink position",
        "outlier_dimension": "outlier dimension",
    }
    table = run.need("growth_steps", columns=["first_layer", "last_layer", "ratio_before", "ratio_after"])
    factor = real(setting(run, "growth_factor"))
    see = "Runs of layers in each of which the norm of the sink token, over the median of other tokens, "
    see += f"grows at least {factor:g}-fold." if factor else "grows at once."
    return (see if len(table) else f"{see} There are none."), shown_table(table, heads)


def _super_table(run: Run) -> tuple[str, PageTable]:
    heads = {
        "layer": "layer",
        "neuron": "neuron",
        "outlier_dimension": "dimension",
        "contribution": "contribution",
        "contribution_share": "share of change",
        "activation": "activation",
        "spike_ratio": "÷ other positions",
        "gate_norm_rank": "gate rank",
        "up_norm_rank": "up rank",
        "column_kurtosis": "column kurtosis",
    }
    table = run.need("neurons", columns=["layer", "neuron", "sink_position", "contribution", "is_super"])
    chosen = table.loc[table["is_super"].eq(True) & (table["sink_position"] == studied(find_story(run)))]
    chosen = largest_first(chosen, "contribution")
    see = "Neurons that write the outlier dimension at the sink token, the largest contribution first."
    see += more(len(chosen), "neurons") if len(chosen) else " There are none."
    return see, shown_table(chosen, heads)


def _outlier_table(run: Run) -> tuple[str, PageTable]:
    columns = ["layer", "sink_position", "dimension", "value", "dominance_ratio", "is_outlier"]
    table = run.need("dimensions", columns=columns)
    table = table.loc[table["is_outlier"].eq(True) & (table["sink_position"] == studied(find_story(run)))]
    table = largest_first(table, "value")
    rows = []
    for dimension in outliers(table, None):
        one = table.loc[table["dimension"] == dimension]
        layer = one["layer"]
        rows.append(
            (
                dimension,
                len(one),
                int(layer.min()),
                int(layer.max()),
                one["value"].iloc[0],
                int(layer.iloc[0]),
                one["dominance_ratio"].iloc[0],
            )
        )
    heads = {
        name: name
        for name in (
            "dimension",
            "layers",
            "first layer",
            "last layer",
            "largest value",
            "at layer",
            "÷ mean |value|",
        )
    }
    see = "Dimensions that hold most of the sink token's energy, and after how many layers they do."
    see += more(len(rows), "dimensions") if rows else " There are none."
    return see, shown_table(pd.DataFrame(rows, columns=list(heads)), heads)


def _condition_table(run: Run) -> tuple[str, PageTable]:
    heads = {
        "condition": "BOS",
        "chosen": "studied",
        "sink_position": "sink position",
        "sink_rate": "sink rate",
        "s2_ratio": "S2 ratio",
        "outlier_dimensions": "outlier dimensions",
        "growth_steps": "growth layers",
        "loss_nats": "loss, nats",
    }
    table = run.need("arms", columns=["condition", "sink_rate"])
    see = (
        "The same text with and without a first BOS token. S2 ratio: standard deviation of z at the sink over that at "
        "other positions."
    )
    return see, shown_table(table, heads)


def _summary_table(run: Run) -> tuple[str, PageTable]:
    table = run.need("summary", columns=["quantity", "value"])
    if {"ci_low", "ci_high"} <= set(table.columns):
        bounds = zip(table["ci_low"], table["ci_high"], strict=True)
        table = table.assign(interval=[interval(low, high) for low, high in bounds])
    numbers = pd.Series(pd.to_numeric(table["value"], errors="coerce"))
    values = zip(table["value"].tolist(), numbers.tolist(), strict=True)
    table = table.assign(
        value=[number(value) if value == value else text for text, value in values],
        quantity=[words(str(name)) for name in table["quantity"]],
    )
    heads = {"quantity": "quantity", "value": "value", "interval": "interval", "unit": "unit", "note": "note"}
    return "The run in numbers, as in summary.csv.", shown_table(table, heads, most=100)


def _criteria_table(run: Run) -> tuple[str, PageTable]:
    heads = {
        "layer": "layer",
        "criterion": "criterion",
        "n_super": "super neurons",
        "found": "found",
        "missed": "missed",
        "invented": "invented",
    }
    table = run.need("criteria", columns=["layer", "criterion", "found"])
    see = "How many super neurons of a layer are found by taking as many top neurons by another criterion."
    return see, shown_table(table, heads)


def _beside_table(run: Run) -> tuple[str, PageTable]:
    rows = [
        (
            row.title,
            row.statistic,
            row.value,
            row.interval,
            "; ".join(" ".join(null) for null in row.nulls),
            row.own,
        )
        for row in link_rows(run)
        if not row.primary
    ]
    heads = ("link", "statistic", "value", "interval", "compare", "verdict")
    see = "What else was measured of each link, beside the statistic that its verdict rests on."
    numeric = (False, False, True, False, False, False)
    width = 6 if any(row[-1] for row in rows) else 5
    table = PageTable(heads=heads[:width], numeric=numeric[:width], rows=[row[:width] for row in rows])
    return (see if rows else f"{see} Nothing."), table


_TABLES = (
    Listed(key="beside-table", title="Further statistics of the links", make=_beside_table),
    Listed(key="growth-table", title="Growth steps", make=_step_table),
    Listed(key="outlier-table", title="Outlier dimensions", make=_outlier_table),
    Listed(key="super-table", title="Super neurons", make=_super_table),
    Listed(key="criteria-table", title="Do other criteria agree?", make=_criteria_table),
    Listed(key="condition-table", title="With and without BOS", make=_condition_table),
    Listed(key="summary-table", title="Summary", make=_summary_table),
)

TRACE = Page(
    title=title,
    headline=lambda run: [*headline(find_story(run)), *consequences(run)],
    figures=(*_FIGURES, *_CAUSAL_FIGURES),
    tables=(*_CAUSAL_TABLES, *_TABLES),
    chained=True,
)

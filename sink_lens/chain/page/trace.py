"""The page of a trace: what was found, and each figure with what to see in it."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ...errors import RunError
from ...records import Run
from ...report.page import Drawn, Page, has_table, paper_figure, table_reader
from ...report.patterns import embed_patterns, studied_position
from ...schema import ANOTHER_PATH
from ...stats import sort_by_magnitude
from ...text import as_text, head_name, interval_text, plural
from . import circuit, figures
from .first_screen import first_screen
from .story import (
    Story,
    find_story,
    has_interventions,
    headline,
    recorded_number,
    title,
)
from .tables import TABLES, read_intervention_table

_MOST_POSITIONS = 200
_LEAST_ADDED = 0.01
"""An amplification that adds less attention than this adds none that a reader would see."""


def _sink_score_figure(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score"])
    position = studied_position(run)
    best = sort_by_magnitude(heads.loc[heads["sink_position"] == position], "sink_score").iloc[0]
    layer, head, score = (float(best[name]) for name in ("layer", "head", "sink_score"))
    most = f"most of all {head_name(layer, head)} (score {as_text(score)})"
    bright = f"bright ones attend to position {position}, {most}"
    if story.threshold is not None and score <= story.threshold:
        bright = f"none attends to position {position} above the threshold, {most}"
    see = f"Each cell is a head; {bright}. The threshold is marked on the scale."
    return see, figures.draw_sink_scores(heads, position=position, threshold=story.threshold)


def _sink_mass_figure(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score", "sink_mass"])
    position, threshold = studied_position(run), story.threshold or 0.3
    onset = figures.onset_of_heads(heads, position=position, threshold=threshold)
    where = f"first at layer {onset}, the onset"
    where = "at no layer, so there is no onset" if onset is None else where
    see = f"The share of their attention that later tokens give to position {position}. "
    see += f"The mean sink score passes {threshold:g} {where}."
    return see, figures.draw_sink_mass(heads, position=position, threshold=threshold)


def _norm_figure(run: Run) -> tuple[str, Figure]:
    position = studied_position(run)
    steps = run.optional(
        "growth_steps", columns=["first_layer", "last_layer", "ratio_before", "ratio_after"]
    )
    curve = _norm_rows(run)
    see = (
        f"Norm of the token at position {position} after each layer relative to the median of "
        "other tokens (logarithmic), and the value of its strongest dimension. "
    )
    if steps is None:
        see += "The growth steps are not known."
    elif len(steps):
        see += "The norm jumps at the shaded growth steps; see whether the dimension jumps with it."
    else:
        see += "There is no growth step."
    return see, figures.draw_norm_by_layer(curve, growth_steps=steps)


def _studied_token(run: Run) -> str:
    if find_story(run).is_sink:
        return "the sink token"
    return f"the token at position {studied_position(run)}"


def _norm_rows(run: Run) -> pd.DataFrame:
    columns = ["layer", "sink_position", "norm_ratio", "outlier_value"]
    return _studied_rows(run, "layers", columns=columns)


def _studied_rows(run: Run, name: str, *, columns: list[str]) -> pd.DataFrame:
    table = run.need(name, columns=columns)
    rows = table.loc[table["sink_position"] == studied_position(run)]
    if not len(rows):
        raise RunError(f"the table {name!r} has no row of the sink position. Run again to see it.")
    return rows


def _variance_figure(run: Run) -> tuple[str, Figure]:
    story = find_story(run)
    table = run.need("positions", columns=["layer", "site", "position", "s1", "s2"])
    z = table.loc[table["site"] == "z"]
    layers = _layers_to_draw(z, story)
    if not layers:
        raise RunError("the table 'positions' has no rows of the site z. Run again to see it.")
    see = (
        "Standard deviation of z, what attention hands to its output projection, by position (both axes logarithmic), "
        f"in the {'layers before the sink' if story.is_sink else 'first layers'}. Evenly averaged independent values "
        "would follow the dashed σ/√t: the first token keeps the most, later ones less."
    )
    start = z.loc[z["position"] == 0]
    if len(start) and (start["s1"] == 0).all():
        see += " S1 is zero at position 0, where every sequence has the same token: it starts at the next."
    known = np.unique(table["position"].to_numpy(float))
    if len(known) > _MOST_POSITIONS:  # evenly spaced on a logarithmic axis
        wanted = np.geomspace(known[0] + 1, known[-1] + 1, _MOST_POSITIONS) - 1
        table = table.loc[
            np.isin(table["position"], known[np.searchsorted(known, wanted.clip(max=known[-1]))])
        ]
    return see, figures.draw_variance_by_position(table, layers=layers)


def _layers_to_draw(z: pd.DataFrame, story: Story) -> list[int]:
    """Return at most four layers up to the end of the first growth step (else up to layer 2)."""
    layers = sorted({int(layer) for layer in z["layer"]})
    end = next((last for _, last, _ in story.steps or ()), 2)
    before = [layer for layer in layers if layer <= end] or layers[:1]
    places = {round(part * (len(before) - 1)) for part in (0, 1 / 3, 2 / 3, 1)}
    return [before[place] for place in sorted(places)] if before else []


def _neuron_figure(run: Run) -> tuple[str, Figure]:
    columns = ["layer", "neuron", "sink_position", "contribution_share", "spike_ratio", "is_super"]
    columns += ["gate_norm_rank", "up_norm_rank"]
    position = studied_position(run)
    table = run.need("neurons", columns=columns).query("sink_position == @position")
    if not len(table):
        raise RunError("no growth step was found, so there are no neurons to show.")
    share = recorded_number(run, "super_share")
    chosen = table.loc[table["is_super"].eq(True)]
    ranks = np.fmin(*(chosen[name].to_numpy(float) for name in columns[-2:]))
    see = f"Every neuron of the growth layers at {_studied_token(run)}; super neurons are triangles"
    see += f", above the dotted {share:.0%} of their layer's change." if share else "."
    if len(chosen):
        outside, whole = int((ranks > 5).sum()), plural(len(chosen), "super neuron")
        told = f"{whole} would be found:"
        told = f"{outside} of {whole} would be missed: not" if outside else told
        see += f" Right: by weight norm alone, {told} among the five largest rows of the layer."
    return see, figures.draw_super_neurons(table, position=position, share=share)


def _dimension_figure(run: Run) -> tuple[str, Figure]:
    columns = ["layer", "sink_position", "dimension", "value", "dominance_ratio", "is_outlier"]
    table = _studied_rows(run, "dimensions", columns=columns)
    first = sort_by_magnitude(table, "dominance_ratio").iloc[0]
    layer, dominance, position = first["layer"], first["dominance_ratio"], studied_position(run)
    see = (
        f"The largest residual values of {_studied_token(run)} after layer {layer:.0f}, where one dimension dominates "
        f"most: it is {as_text(dominance)} times the mean. A few long bars are dimension disparity."
    )
    return see, figures.draw_top_dimensions(table, position=position, layer=int(layer))


def _key_split_figure(run: Run) -> tuple[str, Figure]:
    table = run.need("key_split", columns=["layer", "key_cosine_sink", "logit_advantage_sink"])
    if not len(table):
        raise RunError("no outlier dimension enters any layer, so there is no key to split.")
    see = (
        "Left: cosine of the sink's key with the key that the outlier dimensions alone would make (1: nothing "
        "else is needed), beside other keys and random dimensions. Right: the logit that later queries give the "
        "sink's key, in parts."
    )
    if "dimension" not in table.columns or bool(table["dimension"].isna().all()):
        see += " Here the key is turned by its position, so only its advantage over other keys is shown."
    return see, figures.draw_key_split(table)


def _circuit_figure(run: Run) -> tuple[str, Figure]:
    drawn = circuit.chain_circuit(run)
    if not drawn.about["is_sink"]:
        see = f"What was measured at {drawn.about['studied']}. It is no attention sink, so no link was intervened on."
    elif not drawn.is_causal:
        see = "What was measured at the sink. No link was intervened on: no arrow says that one thing causes another."
    else:
        see = (
            "An arrow's line and sign are the link's verdict. Heads are counted in the layers after a growth step if "
            "their mean score over sequences passes the threshold; the headline has the mean of each sequence's share."
        )
    return see, drawn.draw()


def _path_figure(run: Run) -> tuple[str, Figure]:
    see = (
        "Arrows are measured paths, as wide as the share of the sink that is lost without them; dashed ones lower it. "
        "A link's own intervention edits the key itself, behind the norm, so the shares of one arrow differ."
    )
    return see, circuit.chain_circuit(run).draw_paths()


def _sink_rows(name: str, columns: list[str], run: Run) -> pd.DataFrame:
    table = run.need(name, columns=["sink_position"])
    return table.loc[table["sink_position"] == studied_position(run)].filter(items=columns)


def _neuron_rows(run: Run) -> pd.DataFrame:
    table = run.need("neurons", columns=["sink_position", "contribution"])
    here = table.loc[table["sink_position"] == studied_position(run)]
    return sort_by_magnitude(here, "contribution").head(500)


def _variance_rows(run: Run) -> pd.DataFrame:
    table = run.need("positions", columns=["layer", "site", "position", "s1", "s2"])
    z = table.loc[table["site"] == "z"]
    return z.loc[z["layer"].isin(_layers_to_draw(z, find_story(run)))]


def _circuit_edges(quantity: str, run: Run) -> pd.DataFrame:
    edges = circuit.chain_circuit(run).edges
    return edges.loc[edges["quantity"] == quantity]


_FIGURES = (
    Drawn(
        key="circuit",
        title="The chain",
        make=_circuit_figure,
        data=partial(_circuit_edges, "intervention_share"),
    ),
    paper_figure(circuit.chain_circuit, data=partial(_circuit_edges, "intervention_share")),
    Drawn(
        key="paths",
        title="Measured paths",
        make=_path_figure,
        data=partial(_circuit_edges, "path_share"),
        when=has_table("paths"),
    ),
    Drawn(
        key="scores",
        title="Where heads attend",
        make=_sink_score_figure,
        data=partial(
            _sink_rows, "heads", ["layer", "head", "sink_score", "sink_rate", "sink_mass"]
        ),
    ),
    Drawn(
        key="mass",
        title="From which layer on",
        make=_sink_mass_figure,
        data=partial(_sink_rows, "layers", ["layer", "sink_score", "sink_mass"]),
        on_page=False,
    ),
    Drawn(
        key="norms",
        title="Does the token grow?",
        make=_norm_figure,
        data=_norm_rows,
    ),
    Drawn(key="variance", title="Variance by position", make=_variance_figure, data=_variance_rows),
    Drawn(
        key="dims",
        title="Do few dimensions hold it?",
        make=_dimension_figure,
        data=partial(
            _sink_rows,
            "dimensions",
            ["layer", "dimension", "value", "dominance_ratio", "is_outlier"],
        ),
        on_page=False,
    ),
    Drawn(
        key="neurons", title="Do super neurons write them?", make=_neuron_figure, data=_neuron_rows
    ),
    Drawn(
        key="qk", title="What makes the key", make=_key_split_figure, data=table_reader("key_split")
    ),
)


def _amplification_figure(run: Run) -> tuple[str, Figure]:
    columns = ["centre", "factor", "target_position", "read_layers"]
    columns += ["change", "change_low", "change_high"]
    table = read_intervention_table(run, "amplification", columns)
    first, moved = table.iloc[0], table.loc[table["centre"] != "none"]
    best = moved.sort_values("change", ascending=False, kind="stable").iloc[0]
    layers = str(first["read_layers"])
    most = f"No factor adds as much as {_LEAST_ADDED:g}"
    if best["change"] >= _LEAST_ADDED:
        most = (
            f"The most is added at factor {best['factor']:g} from the mean of {figures.NAMES[best['centre']]}: "
            f"{as_text(best['change'])} {interval_text(best['change_low'], best['change_high'])}".rstrip()
        )
    see = (
        f"Position {first['target_position']}: its aggregated values are moved away from a mean by a factor, up to "
        f"the end of the first growth step, and its attention is read in layer{'s' * (not layers.isdecimal())} "
        f"{layers}. {most}. Zero: the attention without an edit. The norm-only line is the control: scaling alone "
        "should bring no sink."
    )
    return see, figures.draw_amplification(table)


def _mediation_figure(run: Run) -> tuple[str, Figure]:
    columns = ["intervention", "frozen", "step", "layers_from", "layers_to"]
    columns += ["surviving_share", "control_surviving_share"]
    table = read_intervention_table(run, "mediation", columns)
    most = table.loc[table["frozen"] != "z"].groupby("frozen", sort=False)["surviving_share"].max()
    leaving = [str(name) for name, share in most.items() if share > ANOTHER_PATH]
    see = (
        "A sink is put at a position (or the model's own is taken), and one quantity there is frozen at its value "
        "without a sink. 0: freezing it takes the whole sink away, so the sink goes through it. 1: it changes "
        "nothing. In brackets: random controls of the same size. Freezing z is the check: it must undo the "
        "intervention. "
    )
    if leaving:
        see += (
            f"Another path exists beside {' and '.join(leaving)}: most of a sink survives there. "
        )
    if bool(table["surviving_share"].isna().any()):
        see += "Where the row is empty, the intervention made no sink."
    return see.rstrip(), figures.draw_mediation(table)


_CAUSAL_FIGURES = (
    Drawn(
        key="mediation",
        title="Which link carries the sink",
        make=_mediation_figure,
        data=table_reader("mediation"),
        when=has_interventions,
    ),
    Drawn(
        key="amplification",
        title="Does variance make a sink?",
        make=_amplification_figure,
        data=table_reader("amplification"),
        when=has_interventions,
    ),
)
TRACE = Page(
    title=title,
    headline=lambda run: headline(find_story(run)),
    figures=(*_FIGURES, *_CAUSAL_FIGURES),
    tables=TABLES,
    first_screen=first_screen,
    patterns=embed_patterns,
    circuit=circuit.chain_circuit,
)

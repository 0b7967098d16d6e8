"""The tables of a trace's page."""

from dataclasses import replace

import numpy as np
import pandas as pd

from ...errors import RunError
from ...records import Run
from ...report.page import (
    INTERVALS,
    Listed,
    PageTable,
    ci_texts,
    page_table,
    rest_note,
    table_maker,
)
from ...report.patterns import studied_position
from ...stats import sort_by_magnitude
from ...text import capitalise, label_parts, name_in_words, percent, signed_change
from .story import (
    PATH_COLUMNS,
    ablation_sample_text,
    find_story,
    format_edit_name,
    has_interventions,
    named_links,
    paths_after_their_step,
)

_MOST_NEURONS = 8


def read_intervention_table(run: Run, name: str, columns: list[str]) -> pd.DataFrame:
    """Read a table of interventions; if it has no row, a RunError says why."""
    table = run.need(name, columns=columns)
    if len(table):
        return table
    effects = run.optional("effects", columns=["link"])
    why = (
        "no intervention was made: the sequences are too short, or the attention cannot be edited."
    )
    if effects is not None and len(effects):
        why = (
            "this was not measured: the sink is there before the layers in which it would be read."
        )
    elif find_story(run).is_sink is False:
        why = "no intervention was made: there is no sink to break."
    raise RunError(why)


def _in_percent(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    shares = {name: [percent(share) for share in table[name]] for name in columns}
    return table.assign(interval=ci_texts(table, shown=percent), **shares)


def _path_table(run: Run) -> tuple[str, PageTable]:
    table = read_intervention_table(run, "paths", PATH_COLUMNS)
    table = sort_by_magnitude(paths_after_their_step(table), "share")

    def end(name: str, step: float) -> str:
        return name if step < 0 else f"{name}, step {step:.0f}"

    shown = _in_percent(table, "share").assign(
        source=[*map(end, table["source"], table["source_step"])],
        target=[*map(end, table["target"], table["target_step"])],
        control_largest=[
            percent(share) if np.isfinite(share) else "" for share in table["control_largest"]
        ],
    )
    heads = {
        "source": "what was written by",
        "target": "is taken from",
        "through": "through",
        "share": "lost of the sink",
        "interval": "interval",
        "control_largest": "controls, at most",
    }
    see = (
        "Path patching at the sink position: the target, and nothing else, reads the stream without what the "
        "source writes there beyond an ordinary token. The number is the share of the sink that is lost after the "
        "target's growth step (for MLPs, and for a target without a step, in all layers with a sink); a negative "
        "share is a larger sink: the norm before the target enlarges what is left. A link's own intervention edits the "
        "target itself, behind that norm, so the two shares of one arrow differ. Everything: all sources at once."
    )
    return see + rest_note(len(shown), "paths"), page_table(shown, heads)


def _effect_table(run: Run) -> tuple[str, PageTable]:
    columns = ["link", "edit", "share", "ci_low", "ci_high", "control_largest", "outcome"]
    columns += ["baseline_loss_nats", "loss_nats"]
    table = read_intervention_table(run, "effects", columns)
    titles = {link.name: link.in_words for link in named_links(run)}
    shown = _in_percent(table, "share", "control_largest").assign(
        link=[titles.get(name, name_in_words(str(name))) for name in table["link"]],
        edit=[format_edit_name(edit) for edit in table["edit"]],
        cost=[signed_change(cost, 2) for cost in table["loss_nats"] - table["baseline_loss_nats"]],
    )
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
        "position, beside the same edit at matched random places, and what it adds to the loss."
    )
    if "length" in table:
        see += f" Only the first {int(table['length'].iloc[0])} positions of a sequence are read."
    return see, replace(page_table(shown, heads), frame=table)


def _maker_table(run: Run) -> tuple[str, PageTable]:
    table = run.need(
        "maker_sets", columns=["set", "control_of", "size", "parts", "removed", "ci_low", "ci_high"]
    )
    table = table.loc[table["control_of"].eq("")]
    shown = _in_percent(table, "removed", "control_largest")
    shown = shown.assign(parts=[label_parts(parts) for parts in table["parts"]])
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
        see = "No set of parts that write to the sink position removes half of it."
        return see, page_table(shown, heads)
    see = (
        "Everything that writes to the sink position in any layer was ranked by its effect on the "
        f"{table['target'].iloc[0]}, and sets were ablated together on {ablation_sample_text(run)}: small sets that "
        "remove half and four fifths, all makers, and the super neurons by contribution. The ranking is in "
        "makers.parquet."
    )
    summary = run.optional("summary", columns=["quantity", "value"])
    if summary is not None:
        beside = summary.loc[summary["quantity"] == "makers_beside_super_neurons", "value"].tolist()
        see += "".join(f" {capitalise(text)}." for text in map(str, beside))
    return see, page_table(shown, heads)


def _placement_table(run: Run) -> tuple[str, PageTable]:
    table = read_intervention_table(
        run, "placement", ["position", "token", "isolated", "sink_mass", "is_sink"]
    )
    table = table.assign(
        isolated=np.where(table["isolated"].eq(True), "yes", "no"),
        is_sink=np.where(table["is_sink"].eq(True), "yes", "no"),
    )
    heads = {
        "position": "position",
        "token": "token",
        "isolated": "isolated",
        "sink_mass": "attention",
        "ordinary_mass": "attention to ordinary positions",
        "norm_ratio": "norm ÷ others",
        "loss_nats": "loss, nats",
        "is_sink": "a sink",
    }
    see = (
        "Is the sink bound to position 0, or to BOS? Attention to each kind of token at each position, with and "
        "without isolation."
    )
    return see, page_table(table, heads)


def _super_neuron_table(run: Run) -> tuple[str, PageTable]:
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
    table = run.need(
        "neurons", columns=["layer", "neuron", "sink_position", "contribution", "is_super"]
    )
    position = studied_position(run)
    chosen = table.loc[table["is_super"].eq(True) & (table["sink_position"] == position)]
    chosen = sort_by_magnitude(chosen, "contribution")
    at = "the sink token" if find_story(run).is_sink else f"position {position}"
    note = (
        rest_note(len(chosen), "neurons", most=_MOST_NEURONS) if len(chosen) else " There are none."
    )
    see = f"Neurons that write the outlier dimension at {at}, the largest contribution first.{note}"
    return see, page_table(chosen, heads, most=_MOST_NEURONS)


TABLES = (
    Listed(
        key="maker-table",
        title="The makers of the sink",
        make=_maker_table,
        when=lambda run: "maker_sets" in run.tables and len(run.tables["maker_sets"]) > 0,
    ),
    Listed(
        key="effect-table",
        title="Interventions on the links",
        make=_effect_table,
        meanings={**INTERVALS, "cost": "Loss with the intervention minus the loss without."},
        when=has_interventions,
    ),
    Listed(
        key="path-table",
        title="Paths of the sink",
        make=_path_table,
        when=lambda run: "paths" in run.tables and has_interventions(run),
    ),
    Listed(
        key="placement-table",
        title="Position or token?",
        make=_placement_table,
        when=has_interventions,
    ),
    Listed(key="super-table", title="Super neurons", make=_super_neuron_table),
    Listed(
        key="condition-table",
        title="With and without BOS",
        make=table_maker(
            "conditions",
            "The same text with and without a first BOS token. S2 ratio: standard deviation of z at the sink relative "
            "to that at other positions.",
            {
                "condition": "BOS",
                "chosen": "studied",
                "sink_position": "sink position",
                "sink_rate": "sink rate",
                "s2_ratio": "S2 ratio",
                "outlier_dimensions": "outlier dimensions",
                "growth_steps": "growth layers",
                "loss_nats": "loss, nats",
            },
            need=("condition", "sink_rate"),
        ),
    ),
)

"""The circuit of a traced run: the nodes of its chain, joined by measured paths, as two tables and as a drawing.

An arrow is a path: the share of the sink, read after the target's growth step, that is lost when the target alone reads
the stream without what the source wrote. From super neurons to the outlier dimension, and from there to the key, the
path goes through that dimension alone. What a run did not measure is nan.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ...files import parse_json
from ...records import Run
from ...report import diagram, sketches
from ...report.diagram import Style
from ...report.drawable import Drawable
from ...report.patterns import studied_position
from ...schema import DIRECTION, DISTANCE, SIZE
from ...text import safe_line
from . import picture
from .story import (
    PATH_COLUMNS,
    NamedLink,
    find_story,
    named_links,
    paths_after_their_step,
)

NODE_COLUMNS = ("id", "kind", "step", "layers", "label", "detail", "quantity", "value")
EDGE_COLUMNS = (
    "source",
    "target",
    "link",
    "step",
    "quantity",
    "value",
    "ci_low",
    "ci_high",
    "control",
    "control_largest",
    "verdict",
    "statistic",
    "statistic_value",
)
_NUMBERS = ("step", "value", "ci_low", "ci_high", "control", "control_largest", "statistic_value")
_KINDS = {
    "value aggregation": "position",
    "variance discrepancy": "z",
    "variance after W_O": "attn_out",
    "super neurons": "neurons",
    "outlier dimension": "dimension",
    "the sink's key": "key",
    "attention sink": "heads",
}
"""Node of the chain -> its kind; any other is a plain box."""
_BY_STEP = ("neurons", "dimension", "key", "heads")
"""Kinds that have a node for each growth step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainCircuit(Drawable):
    """The nodes and arrows of a trace's chain."""

    about: dict[str, Any]
    """Model, hashes of weights and tokens, the studied position, whether it is a sink, and ``value_average``: size,
    direction, distance -> the share that the ordinary one removes, and the largest that a random direction does.
    """
    nodes: pd.DataFrame = field(repr=False)
    edges: pd.DataFrame = field(repr=False)
    """``quantity`` says what ``value`` is: path_share, or intervention_share (of a link)."""

    @property
    def is_causal(self) -> bool:
        """Check whether a share of the sink was measured on an edge."""
        return bool(self.edges["value"].notna().any())

    def to_json(self) -> str:
        """Return JSON text for other tools; undefined numbers are null."""
        frames = {
            name: parse_json(getattr(self, name).to_json(orient="records"))
            for name in ("nodes", "edges")
        }
        told = {"format": "sink_lens circuit 1", "about": self.about, **frames}
        return json.dumps(told, ensure_ascii=False, indent=1)

    def draw(self, style: Style = "page", *, width: float | None = None) -> Figure:
        """Draw the chain, in a style and width as ``Trace.draw`` takes them."""
        return picture.draw_chain(self, style=style, width=width)

    def draw_paths(self) -> Figure:
        """Draw the measured paths.

        Raises:
            RunError: no path was measured.
        """
        return diagram.draw_diagram(sketches.sketch_paths(self), style="page")


def chain_circuit(run: Run) -> ChainCircuit:
    """Make the circuit.

    Raises:
        RunError: the run has no links, or does not say which position is the sink.
    """
    story, joined = find_story(run), named_links(run)
    position = studied_position(run)
    links = run.need("links", columns=["link", "statistic", "value", "is_primary", "verdict"])
    effects = run.optional(
        "effects", columns=["link", "share", "ci_low", "ci_high", "control_share", "is_primary"]
    )
    primary: list[Any] = []
    if effects is not None:
        primary = effects.loc[effects["is_primary"].eq(True)].to_dict("records")
    effect_of = {row["link"]: row for row in primary}
    growth_steps = _read_growth_steps(run)
    kinds = [_node_kind(node) for link in joined for node in (link.source, link.target)]
    nodes = [
        *_shared_nodes(position, joined=joined, links=links),
        *_step_nodes(run, position, growth_steps=growth_steps, threshold=story.threshold or 0.3),
    ]
    nodes = [node for node in nodes if node["kind"] in kinds]
    nodes.sort(key=lambda node: kinds.index(node["kind"]))
    known = {node["id"] for node in nodes}
    paths = _path_edges(run, growth_steps=growth_steps)
    edges = [
        *_link_edges(joined, links, effect_of=effect_of, growth_steps=growth_steps),
        *(edge for edge in paths if {edge["source"], edge["target"]} <= known),
    ]
    return ChainCircuit(
        about={
            "model": story.model,
            **{
                name: run.provenance.get(name)
                for name in ("weights_sha256", "tokens_sha256", "n_layers", "n_heads")
            },
            "sink_position": position,
            "studied": story.studied if story.cut else f"position {position}",
            "is_sink": story.is_sink is not False,
            "value_average": _value_average_shares(effects),
        },
        nodes=_frame_of_rows(nodes, NODE_COLUMNS),
        edges=_frame_of_rows(edges, EDGE_COLUMNS),
    )


def _value_average_shares(effects: pd.DataFrame | None) -> dict[str, list[float]]:
    if effects is None or "edit" not in effects:
        return {}
    numbers = effects.reindex(columns=["share", "control_largest"]).astype(float)
    shares = dict(zip(effects["edit"], numbers.to_numpy().tolist(), strict=True))
    parts = {"size": SIZE, "direction": DIRECTION, "distance": DISTANCE}
    return {
        word: shares[edit]
        for word, edit in parts.items()
        if edit in shares and not math.isnan(shares[edit][0])
    }


def _node_kind(node: str) -> str:
    """A user's own link has nodes whose kind is made of the name."""
    return _KINDS.get(node) or "node_" + re.sub(r"\W+", "_", node)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrowthStep:
    """A growth step, and the later layers in which heads read its sink."""

    step: int
    layers: tuple[int, int]
    reads: tuple[int, int]
    dimension: int | None


def _read_growth_steps(run: Run) -> list[_GrowthStep]:
    """Without any, make a single step 0 whose sink is read in all layers."""
    last = int(run.provenance.get("n_layers") or 1) - 1
    columns = ["step", "first_layer", "last_layer", "outlier_dimension"]
    table = run.optional("growth_steps", columns=columns)
    if table is None or table.empty:
        return [_GrowthStep(step=0, layers=(0, -1), reads=(0, last), dimension=None)]
    growth_steps = []
    following = [*table["first_layer"].iloc[1:], last + 1]
    rows = table[columns].astype(float).to_numpy()
    for (step, first, end, dimension), next_first in zip(rows, following, strict=True):
        begins = min(int(end) + 1, last)
        growth_steps.append(
            _GrowthStep(
                step=int(step),
                layers=(int(first), int(end)),
                reads=(begins, max(begins, int(next_first) - 1)),
                dimension=None if math.isnan(dimension) else int(dimension),
            )
        )
    return growth_steps


def _shared_nodes(
    position: int, *, joined: Sequence[NamedLink], links: pd.DataFrame
) -> Iterator[dict[str, Any]]:
    deviations = {
        "z": ("aggregated\nvalues z", "s2_ratio"),
        "attn_out": ("after W_O", "s2_ratio_after_w_o"),
    }
    yield {"id": "position", "kind": "position", "label": f"position {position}"}
    into = {_node_kind(link.target): link.name for link in reversed(joined)}
    for kind, (label, statistic) in deviations.items():
        own = links.loc[(links["link"] == into.get(kind)) & (links["statistic"] == statistic)]
        value = next(iter(own["value"]), math.nan)
        yield {"id": kind, "kind": kind, "label": label, "quantity": statistic, "value": value}
    for node in dict.fromkeys(node for link in joined for node in (link.source, link.target)):
        if node not in _KINDS:
            kind = _node_kind(node)
            yield {"id": kind, "kind": kind, "label": safe_line(node)}


def _step_nodes(
    run: Run, position: int, *, growth_steps: list[_GrowthStep], threshold: float
) -> Iterator[dict[str, Any]]:
    neurons = run.optional(
        "neurons", columns=["layer", "neuron", "sink_position", "contribution_share", "is_super"]
    )
    layers = run.optional("layers", columns=["layer", "sink_position", "dominance_ratio"])
    heads = run.optional("heads", columns=["layer", "head", "sink_position", "sink_score"])
    for growth in growth_steps:
        end, dimension = growth.layers[1], growth.dimension
        own = _values_in_layers(neurons, "is_super", position, growth.layers)
        dominance = _values_in_layers(layers, "dominance_ratio", position, (end, end))
        scores = _values_in_layers(heads, "sink_score", position, growth.reads)
        over = sum(score > threshold for score in scores)
        values: dict[str, dict[str, Any]] = {
            "neurons": {
                "label": "super neurons",
                "quantity": "count",
                "value": math.nan if neurons is None else own.count(True),
            },
            "dimension": {
                "label": "outlier dimension" if dimension is None else f"dimension {dimension}",
                "quantity": "dominance_ratio",
                "value": math.nan if dimension is None else next(iter(dominance), math.nan),
            },
            "key": {"label": "the sink's key"},
            "heads": {
                "label": "heads",
                "detail": f"{over} of {len(scores)}\nabove {threshold:g}" if scores else "",
                "quantity": "heads_over_threshold",
                "value": over if scores else math.nan,
            },
        }
        for kind, told in values.items():
            first, last = growth.layers if kind in ("neurons", "dimension") else growth.reads
            span = f"layer {first}" if first == last else f"layers {first}–{last}"
            span = span if first <= last else "no growth step"
            place = {"id": f"{kind}:{growth.step}", "kind": kind, "step": growth.step}
            yield place | {"layers": span} | told


def _link_edges(
    joined: Sequence[NamedLink],
    links: pd.DataFrame,
    *,
    effect_of: Mapping[str, Any],
    growth_steps: list[_GrowthStep],
) -> Iterator[dict[str, Any]]:
    """A link with a node of a growth step has an edge for every step."""
    for link in joined:
        rows = links.loc[(links["link"] == link.name) & links["is_primary"].eq(True)]
        first: Any = next(iter(rows.to_dict("records")), {})
        moved = effect_of.get(link.name, {})
        row = {
            "link": link.name,
            "quantity": "intervention_share",
            "value": moved.get("share"),
            "ci_low": moved.get("ci_low"),
            "ci_high": moved.get("ci_high"),
            "control": moved.get("control_share"),
            "control_largest": moved.get("control_largest"),
            "verdict": first.get("verdict", "not measured"),
            "statistic": first.get("statistic", ""),
            "statistic_value": first.get("value"),
        }
        ends = {"source": _node_kind(link.source), "target": _node_kind(link.target)}
        by_step = not {*ends.values()}.isdisjoint(_BY_STEP)
        for step in [growth.step for growth in growth_steps] if by_step else [None]:
            at = {end: f"{kind}:{step}" if kind in _BY_STEP else kind for end, kind in ends.items()}
            yield row | at | {"step": step}


def _path_edges(run: Run, *, growth_steps: list[_GrowthStep]) -> Iterator[dict[str, Any]]:
    table, first = run.optional("paths", columns=PATH_COLUMNS), growth_steps[0].step
    for row in [] if table is None else paths_after_their_step(table).to_dict("records"):
        step = max(int(row["step"]), first)
        ends = _path_ends(row, step=step, first=first)
        if ends is None:
            continue
        largest = row["control_largest"]
        bound = max(0.0, largest)  # 0 if there is no control
        untold = "lowers" if row["ci_high"] < 0 else "not told from 0"
        yield {
            "source": ends[0],
            "target": ends[1],
            "step": step,
            "quantity": "path_share",
            "value": row["share"],
            "ci_low": row["ci_low"],
            "ci_high": row["ci_high"],
            "control": row["control_share"],
            "control_largest": largest,
            "verdict": "raises" if row["ci_low"] > bound else untold,
        }


def _path_ends(row: Mapping[Any, Any], *, step: int, first: int) -> tuple[str, str] | None:
    """Return the ids of a path's nodes, source first; None if it is not drawn.

    ``first`` is the run's first growth step, to which makers of no step belong.
    """
    source, target = str(row["source"]), str(row["target"])
    kinds = {"super neurons": "neurons", "makers": "neurons", "key": "key"}
    if target == "sink":
        return f"key:{step}", f"heads:{step}"
    if target not in kinds:
        return None
    end = f"{kinds[target]}:{step}"
    if row["through"]:
        dimension = f"dimension:{step}"
        return (dimension, end) if source == "everything" else (f"neurons:{step}", dimension)
    starts = {"embedding": "position", "attention": "attn_out"}
    if kinds.get(source) == "neurons":
        starts[source] = f"neurons:{max(int(row['source_step']), first)}"
    return (starts[source], end) if source in starts and starts[source] != end else None


def _values_in_layers(
    table: pd.DataFrame | None, column: str, position: int, layers: tuple[int, int]
) -> list[Any]:
    if table is None:
        return []
    here = table["layer"].between(*layers) & (table["sink_position"] == position)
    return table.loc[here, column].tolist()


def _frame_of_rows(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(columns))
    for name in columns:
        if name in _NUMBERS:
            frame[name] = pd.Series(pd.to_numeric(frame[name], errors="coerce"), dtype=float)
        else:
            frame[name] = frame[name].fillna("").astype(str)
    return frame

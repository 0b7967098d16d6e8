"""The circuit of a traced run: token, values, neurons, dimensions, keys and heads, joined by measured arrows.

An arrow stands for a link of the chain. Its number is the share of the sink that cutting the link makes (the first) or
removes (the others), with its interval over sequences and that of the controls (``effects.parquet``, primary cuts, all
growth steps cut together); beside it stands the statistic that the link was measured by. Nodes of a growth step say
which share of the sink goes when the node is held at what it is at other positions (``mediation.parquet``, the natural
sink, one step at a time). Where more than half of the sink survives such a hold, an arrow leads past the node: another
path. Nothing here is inferred; what a run did not measure is nan, and the arrow says so.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.errors import InputError
from sink_lens.records import Run
from sink_lens.report.columns import at, by_size, flags, floats, named, need, numbers, select
from sink_lens.report.findings import find_story, optional, studied
from sink_lens.report.words import LINKS, token

NODE_COLUMNS = ("id", "kind", "group", "step", "layers", "label", "detail", "quantity", "value", "held_share")
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
    "verdict",
    "measured",
    "cut",
    "statistic",
    "statistic_value",
)
KINDS = ("position", "z", "attn_out", "neurons", "dimension", "key", "heads")
"""Kinds of nodes in the order of the chain; each of its links joins one to the next. Parts are "neuron" and "head"."""
ANOTHER_PATH = 0.5
"""A node is passed by where more than this share of the sink survives its being held."""
_FORMAT = "sink_lens circuit 1"
_NUMBERS = ("step", "value", "held_share", "ci_low", "ci_high", "control", "statistic_value")
_HOLDS = {"neurons": "neurons", "dimensions": "dimension", "key": "key"}
"""What a mediation holds -> the kind of its node."""
_MOST_HEADS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Circuit:
    """The nodes and arrows of a run's chain."""

    about: dict[str, Any]
    """Model, hashes of weights and tokens, the sink position, where the first cut makes a sink, and in which layers
    the sink is read."""
    nodes: pd.DataFrame = field(repr=False)
    """One row a node (``NODE_COLUMNS``). ``group`` is the node that it is a part of; ``held_share`` the share of the
    sink that goes when the node is held."""
    edges: pd.DataFrame = field(repr=False)
    """One row an arrow (``EDGE_COLUMNS``). ``quantity`` says what ``value`` is: cut_share, contribution_share (of a
    neuron, of its layer's change of the dimension), sink_score (of a head) or surviving_share (of another path)."""

    def to_json(self) -> str:
        """The circuit as JSON for other tools; undefined numbers are null."""
        frames = {name: json.loads(getattr(self, name).to_json(orient="records")) for name in ("nodes", "edges")}
        return json.dumps({"format": _FORMAT, "about": self.about, **frames}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Circuit":
        """The circuit that `to_json` wrote.

        Raises:
            InputError: it is no such JSON.
        """
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or found.get("format") != _FORMAT:
                raise ValueError("it does not say that it is one")
            nodes, edges = _frame(found["nodes"], NODE_COLUMNS), _frame(found["edges"], EDGE_COLUMNS)
            return cls(about=dict(found["about"]), nodes=nodes, edges=edges)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"this is no {_FORMAT!r} ({error}); need what Circuit.to_json() wrote") from error

    def _repr_png_(self) -> bytes:
        from sink_lens.report.heatmap import png

        return png(draw(self))


def circuit_of(run: Run) -> Circuit:
    """The circuit of a trace; what a partial run did not measure is nan.

    Raises:
        RunError: the run has no links, or does not say which position is the sink.
    """
    story = find_story(run)
    position, links = (
        studied(story),
        need(run, "links", columns=["link", "statistic", "value", "is_primary", "verdict"]),
    )
    effects = optional(run, "effects", ["link", "share", "ci_low", "ci_high", "control_share", "is_primary"])
    cuts = {} if effects is None else {row["link"]: row for row in _rows(select(effects, flags(effects, "is_primary")))}
    lanes = _lanes(run)
    nodes = [*_upstream(run, position, links=links, cuts=cuts)]
    nodes += [*_downstream(run, position, lanes=lanes, threshold=story.threshold or 0.3)]
    edges = [*_chain(links, cuts=cuts, lanes=lanes), *_parts(nodes), *_past(lanes)]
    about = {
        "model": story.model,
        **{name: run.provenance.get(name) for name in ("weights_sha256", "tokens_sha256", "n_layers", "n_heads")},
        "sink_position": position,
        "made_at": cuts.get("aggregation_variance", {}).get("position"),
        "read_layers": cuts.get("key_sink", {}).get("read_layers"),
    }
    return Circuit(about=about, nodes=_frame(nodes, NODE_COLUMNS), edges=_frame(edges, EDGE_COLUMNS))


def draw(circuit: Circuit) -> Figure:
    """The circuit as a figure: an arrow as wide as its share of the sink, dashed where its link fails."""
    from sink_lens.report.circuit_drawing import drawn

    return drawn(circuit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """A growth step, the layers in which its sink is read, and what survives of it when something is held."""

    step: int
    layers: tuple[int, int]
    reads: tuple[int, int]
    dimension: int | None
    surviving: Mapping[str, tuple[float, float]]
    """Kind of the node held -> share that survives, and under the controls."""


def _lanes(run: Run) -> list[_Lane]:
    """One lane a growth step; one over all layers where there is none."""
    last = int(run.provenance.get("n_layers") or 1) - 1
    columns = ["step", "first_layer", "last_layer", "outlier_dimension"]
    table = optional(run, "growth_steps", columns)
    rows = [] if table is None else numbers(table, columns)
    held = optional(run, "mediation", ["intervention", "hold", "step", "surviving_share", "control_surviving_share"])
    natural = [] if held is None else _rows(named(held, "intervention", "natural"))
    surviving: dict[int, dict[str, tuple[float, float]]] = {}
    for row in natural:
        if row["hold"] in _HOLDS and not math.isnan(row["surviving_share"]):
            shares = (row["surviving_share"], row["control_surviving_share"])
            surviving.setdefault(int(row["step"]), {})[_HOLDS[row["hold"]]] = shares
    found = []
    for index, (step, first, end, dimension) in enumerate(rows):
        following = rows[index + 1][1] if index + 1 < len(rows) else last + 1
        begins = min(int(end) + 1, last)
        found.append(
            _Lane(
                step=int(step),
                layers=(int(first), int(end)),
                reads=(begins, max(begins, int(following) - 1)),
                dimension=None if math.isnan(dimension) else int(dimension),
                surviving=surviving.get(int(step), {}),
            )
        )
    return found or [_Lane(step=0, layers=(0, -1), reads=(0, last), dimension=None, surviving=surviving.get(0, {}))]


def _node(kind: str, *, step: int | None = None, **values: Any) -> dict[str, Any]:
    row = dict.fromkeys(NODE_COLUMNS, "") | {"value": math.nan, "held_share": math.nan}
    return row | {"id": kind if step is None else f"{kind}:{step}", "kind": kind, "step": step} | values


def _upstream(run: Run, position: int, *, links: pd.DataFrame, cuts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The token, its aggregated values, and what attention writes."""
    tokens = optional(run, "tokens", ["position", "text"])
    texts = [] if tokens is None else list(dict.fromkeys(at(tokens, position)["text"].tolist()))
    detail = f"{len(texts)} different\ntokens" if len(texts) > 1 else "".join(map(token, texts))
    yield _node("position", label=f"position {position}", detail=detail)
    layers = _named_layers(str(cuts.get("variance_preserved", {}).get("layers", "")))
    for kind, label, link, statistic in (
        ("z", "aggregated\nvalues z", "aggregation_variance", "s2_ratio"),
        ("attn_out", "after W_O", "variance_preserved", "s2_ratio_after_w_o"),
    ):
        rows = named(named(links, "link", link), "statistic", statistic)
        value = floats(rows, "value")[0] if len(rows) else math.nan
        yield _node(kind, label=label, layers=layers, quantity=statistic, value=value)


def _downstream(run: Run, position: int, *, lanes: list[_Lane], threshold: float) -> Iterator[dict[str, Any]]:
    """Of every growth step: its super neurons, the dimension, the keys, the heads."""
    neurons = optional(run, "neurons", ["layer", "neuron", "position", "contribution_share", "is_super"])
    layers = optional(run, "layers", ["layer", "position", "dominance_ratio"])
    heads = optional(run, "heads", ["layer", "head", "position", "sink_score"])
    for lane in lanes:
        step, where = lane.step, _layers(*lane.layers)
        held = {kind: 1 - share for kind, (share, _) in lane.surviving.items()}
        table = _of_layers(neurons, position, lane.layers)
        table = table if table is None else by_size(select(table, flags(table, "is_super")), "contribution_share")
        yield _node(
            "neurons",
            step=step,
            layers=where,
            label="super neurons",
            quantity="count",
            value=math.nan if table is None else len(table),
            held_share=held.get("neurons", math.nan),
        )
        yield from _named_parts("neuron", table, lane, unit="neuron", quantity="contribution_share")
        after = _of_layers(layers, position, (lane.layers[1], lane.layers[1]))
        known = lane.dimension is not None and after is not None and len(after)
        yield _node(
            "dimension",
            step=step,
            layers=where,
            label="outlier dimension" if lane.dimension is None else f"dimension {lane.dimension}",
            quantity="dominance_ratio",
            value=floats(after, "dominance_ratio")[0] if known and after is not None else math.nan,
            held_share=held.get("dimension", math.nan),
        )
        yield _node(
            "key", step=step, layers=_layers(*lane.reads), label="the sink's key", held_share=held.get("key", math.nan)
        )
        table = _of_layers(heads, position, lane.reads)
        score = np.array([]) if table is None else floats(table, "sink_score")
        over = int((score > threshold).sum())
        detail = f"{over} of {len(score)}\nover {threshold:g}" if len(score) else ""
        value = over if len(score) else math.nan
        yield _node(
            "heads",
            step=step,
            layers=_layers(*lane.reads),
            label="heads",
            detail=detail,
            quantity="heads_over_threshold",
            value=value,
        )
        table = table if table is None else by_size(table, "sink_score").head(_MOST_HEADS)
        yield from _named_parts("head", table, lane, unit="head", quantity="sink_score")


def _named_parts(
    kind: str, table: pd.DataFrame | None, lane: _Lane, *, unit: str, quantity: str
) -> Iterator[dict[str, Any]]:
    """The parts of a step's node, named layer.unit."""
    for layer, number, value in [] if table is None else numbers(table, ["layer", unit, quantity]):
        name = f"{layer:.0f}.{number:.0f}"
        yield _node(kind, step=lane.step, layers=_layers(int(layer), int(layer))) | {
            "id": f"{kind}:{name}",
            "group": f"{kind}s:{lane.step}",
            "label": name,
            "quantity": quantity,
            "value": value,
        }


def _chain(links: pd.DataFrame, *, cuts: Mapping[str, Any], lanes: list[_Lane]) -> Iterator[dict[str, Any]]:
    """The six links; those of a growth step once for each step."""
    for index, link in enumerate(LINKS):
        rows = named(links, "link", link)
        first = _rows(select(rows, flags(rows, "is_primary")))[:1] or [{}]
        cut = cuts.get(link, {})
        row = {
            "link": link,
            "quantity": "cut_share",
            "value": cut.get("share"),
            "ci_low": cut.get("ci_low"),
            "ci_high": cut.get("ci_high"),
            "control": cut.get("control_share"),
            "verdict": first[0].get("verdict", "not measured"),
            "measured": first[0].get("measured", ""),
            "cut": first[0].get("cut", ""),
            "statistic": first[0].get("statistic", ""),
            "statistic_value": first[0].get("value"),
        }
        for step in [None] if index < 2 else [lane.step for lane in lanes]:
            ends = (kind if kind in KINDS[:3] else f"{kind}:{step}" for kind in KINDS[index : index + 2])
            yield row | dict(zip(("source", "target"), ends, strict=True)) | {"step": step}


def _parts(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each neuron's arrow to its step's dimension, and the key's to each of the strongest heads."""
    for node in nodes:
        if node["kind"] == "neuron":
            ends = {"source": node["id"], "target": f"dimension:{node['step']}", "link": "neurons_dimension"}
        elif node["kind"] == "head":
            ends = {"source": f"key:{node['step']}", "target": node["id"], "link": "key_sink"}
        else:
            continue
        yield ends | {name: node[name] for name in ("step", "quantity", "value")} | {"verdict": "part"}


def _past(lanes: list[_Lane]) -> Iterator[dict[str, Any]]:
    """Arrows past what was held and left most of the sink."""
    for lane in lanes:
        for kind, (share, control) in lane.surviving.items():
            if share > ANOTHER_PATH:
                place = KINDS.index(kind)
                before, after = KINDS[place - 1], KINDS[place + 1]
                yield {
                    "source": before if before in KINDS[:3] else f"{before}:{lane.step}",
                    "target": f"{after}:{lane.step}",
                    "link": f"past {kind}",
                    "step": lane.step,
                    "quantity": "surviving_share",
                    "value": share,
                    "control": control,
                    "verdict": "another path",
                }


def _of_layers(table: pd.DataFrame | None, position: int, layers: tuple[int, int]) -> pd.DataFrame | None:
    """The rows of a position, from one layer to another."""
    if table is None:
        return None
    layer = floats(table, "layer")
    return at(select(table, (layer >= layers[0]) & (layer <= layers[1])), position)


def _layers(first: int, last: int) -> str:
    """Layers as a node says them."""
    if last < first:
        return "no growth step"
    return _named_layers(f"{first}-{last}" if last > first else f"{first}")


def _named_layers(listed: str) -> str:
    """Layers as they are listed in a table, as a node says them."""
    many = "-" in listed or "," in listed
    return f"layer{'s' * many} {listed}".replace("-", "–") if listed else ""


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _frame(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    """Rows as a frame of these columns: texts, or numbers with nan.

    Raises:
        ValueError: a row has another column.
    """
    if other := {name for row in rows for name in row} - set(columns):
        raise ValueError(f"a row has {', '.join(sorted(other))}")
    frame = pd.DataFrame(rows, columns=list(columns))
    for name in columns:
        frame[name] = floats(frame, name) if name in _NUMBERS else frame[name].fillna("").astype(str)
    return frame

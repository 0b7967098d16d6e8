"""The circuit of a traced run: the nodes of its chain, joined by measured paths, as two tables and as a drawing.

Nodes are those of the run's table ``chain``, and the MLPs beside the super neurons. Other tables say more of the nodes
in ``_KINDS``: growth steps, neurons, dimensions, heads; any other node is a plain box. An arrow is a path
(``paths.parquet``): the share of the sink, read after the target's growth step (of MLPs, which feed the next step too,
in all layers with a sink), that is lost when the target alone reads the stream without what the source wrote, with its
interval over sequences and its controls. From super neurons to the outlier dimension, and from there to the key, the
path goes through that dimension alone. Over the gaps stands what each link of the chain was measured by, its
intervention (``effects.parquet``, primary ones, all growth steps together) and its verdict. Nodes of a growth step say
which share of the sink goes when the node itself is frozen at what it is at other positions (``mediation.parquet``, the
natural sink, one step at a time), and when all that it reads is. Nothing here is inferred; what a run did not measure
is nan, and the figure says so.
"""

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

from sink_lens.errors import InputError, RunError
from sink_lens.records import Run, read_run
from sink_lens.report import diagram, sketches
from sink_lens.report.diagram import Style
from sink_lens.report.edges import EdgeCircuit, edge_circuit, saved
from sink_lens.report.explorer import Explorer, bytes_of, chain_graph
from sink_lens.report.page import MAKES, about
from sink_lens.report.patch import PatchCircuit, patch_circuit, patch_circuit_of_result
from sink_lens.report.story import NamedLink, chain, find_story, largest_first, studied
from sink_lens.report.style import BLUE, FONT, GREEN, INK, ORANGE, PAPER, QUIET, canvas, finished, png
from sink_lens.schema import ALL_STEPS, LEAST_PATH, VERDICTS
from sink_lens.text import head_name, interval, neuron_name, number, percent, token, visible, words

NODE_COLUMNS = (
    *("id", "kind", "group", "step", "layers", "label", "detail", "quantity", "value"),
    *("frozen_share", "input_share"),
)
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
    "intervened",
    "statistic",
    "statistic_value",
)
_KINDS = {
    "value aggregation": "position",
    "variance discrepancy": "z",
    "variance after W_O": "attn_out",
    "super neurons": "neurons",
    "outlier dimension": "dimension",
    "the sink's key": "key",
    "attention sink": "heads",
}
"""Node of the chain -> the kind of node whose tables say more of it. Parts of one are "neuron" and "head"."""
_BY_STEP = ("neurons", "dimension", "key", "heads")
"""Kinds of which each growth step has its own node."""
_FORMAT = "sink_lens circuit 1"
_NUMBERS = ("step", "value", "frozen_share", "input_share", "ci_low", "ci_high", "control", "statistic_value")
_FROZEN = {"neurons": "neurons", "dimensions": "dimension", "key": "key"}
"""What a mediation freezes -> the kind of its node."""
_SPLIT = {"dimension": "the outlier dimensions", "rest": "all other dimensions", "bias": "the bias"}
"""Column of a run's table ``key_split`` -> what it is."""
_MOST_HEADS = 8
_BOX, _GAP, _FAN, _EDGE = 0.98, 0.4, 0.22, 0.06
"""Inches: a box, the room between two, what is more where lanes part, the margin."""
_LINE, _BAR, _PAD = 0.165, 0.18, 0.08
"""Inches: a line of text, a bar, the room over and under the lines of a box."""
_BETWEEN = 0.36
"""Inches between two boxes of one column and lane; an arrow leads past them there."""
_THIN, _THICK = 1.2, 9.0
"""Points: an arrow that stands for nothing of the sink, and for all of it."""
_SMALL = FONT - 0.9
_MOST_LANES = 6
_STYLES = {"holds": (GREEN, "solid"), "fails": (ORANGE, "dashed")}
"""Verdict of a link -> colour and line; every other is grey and dotted."""
CARRIES, GROWS, UNTOLD = "raises", "lowers", "not told from 0"
"""Verdicts of paths: the sink is lost without it, it is larger without it, or neither interval nor controls tell."""
_WITH_PATHS = frozenset({"attn_out", "neurons", "dimension", "key", "heads"})
"""Kinds of nodes that paths join, so that their links are no lines."""
_OF_PATHS = {CARRIES: (GREEN, "solid"), GROWS: (ORANGE, "dashed")}
_CLAIMS = {
    ("position", "z"): "averaging lowers\nthe variance",
    ("z", "attn_out"): "that W_O\nkeeps",
    ("attn_out", "neurons"): "that fires\nneurons",
    ("neurons", "dimension"): "that write\na dimension",
    ("dimension", "key"): "that makes\nthe key",
    ("key", "heads"): "that queries\nmeet",
}
"""(kind of the first node, kind of the second) -> the label of the arrow between them. Other arrows have the name of
their link."""
_FROZEN_LINE, _INPUT_LINE = "freeze:", "all inputs:"
"""How the lines begin that say what freezing a node, or all that it reads, takes away."""
_CHARACTERS = 14
"""What fits over a gap; into a box two fewer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainCircuit:
    """The nodes and arrows of a run's chain."""

    about: dict[str, Any]
    """Model, hashes of weights and tokens, the sink position, where the first intervention makes a sink, and in which
    layers the sink is read."""
    nodes: pd.DataFrame = field(repr=False)
    """One row a node (``NODE_COLUMNS``). ``group`` is the node that it is a part of; ``frozen_share`` the share of the
    sink that goes when the node is frozen, ``input_share`` when all that it reads is."""
    run: Run | None = field(default=None, repr=False)
    """Where it comes from; None of a circuit that was read from JSON."""
    edges: pd.DataFrame = field(repr=False)
    """One row an edge (``EDGE_COLUMNS``). ``quantity`` says what ``value`` is: path_share, intervention_share (of a
    link), contribution_share (of a neuron, of its layer's change of the dimension) or sink_score (of a head)."""

    def to_json(self) -> str:
        """The circuit as JSON for other tools; undefined numbers are null."""
        frames = {name: json.loads(getattr(self, name).to_json(orient="records")) for name in ("nodes", "edges")}
        return json.dumps({"format": _FORMAT, "about": self.about, **frames}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ChainCircuit":
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
            raise InputError(f"this is no {_FORMAT!r} ({error}); need what ChainCircuit.to_json() wrote") from error

    @property
    def graph(self) -> dict[str, Any]:
        """The circuit as Neuronpedia's JSON."""
        known = {name: self.about[name] for name in ("sink_position", "n_layers") if name in self.about}
        title = f"The chain of the sink, {visible(self.about.get('model') or 'a model', limit=40)}"
        model = visible(self.about.get("model") or "a model", limit=80)
        meaning = (
            "An edge is the share of the sink that is lost without it; into a head it is the head's sink score, out of "
            "a neuron the neuron's share of its layer's change of the dimension."
        )
        known |= {"title": title, "meaning": meaning}
        if self.run is not None:
            heads = self.nodes.loc[self.nodes["kind"].eq("head"), "id"].tolist()
            known |= {"tokens": _first_tokens(self.run)}
            known |= {"attention": _attention(self.run, heads, position=int(self.about["sink_position"]))}
        return chain_graph(self.nodes, self.edges, model=model, **known)

    def explore(self) -> Explorer:
        """A page to explore the circuit in; ``.save("c.html")`` writes it."""
        return Explorer(graphs=[self.graph])

    def draw(self, style: Style | Literal["page"] = "page", *, width: float | None = None) -> Figure:
        """The circuit as a figure.

        Args:
            style: ``page`` with all numbers; ``talk`` for a slide, ``paper`` for a column or two.
            width: inches, of a talk's or a paper's figure; a single column is 3.25.

        Raises:
            InputError: another style, or more than fits into the width.
        """
        return draw(self) if style == "page" else diagram.draw(sketches.of_chain(self), style=style, width=width)

    def save(self, path: str | Path, *, style: Style | Literal["page"] = "page", width: float | None = None) -> Path:
        """Write the circuit as its ending says: .html to explore, .json, or a figure as .png, .svg or .pdf.

        Raises:
            InputError: another ending, or as for ``draw``.
        """
        return saved(self, path, style=style, width=width)

    def _repr_png_(self) -> bytes:
        return png(draw(self))


def circuit_of(source: Run | str | Path | Any) -> "ChainCircuit | EdgeCircuit | PatchCircuit":
    """The circuit of a run: of a trace, of ``sink-lens circuit``, or of patches.

    Args:
        source: a run, its folder, or a result of ``patch`` in memory.

    Raises:
        InputError: the source is something else.
        RunError: the run is of another kind, or lacks what a circuit needs.
    """
    if hasattr(source, "frame") and hasattr(source, "by"):
        return patch_circuit_of_result(source)
    if not isinstance(source, Run | str | Path):
        raise InputError(f"the source is of type {type(source).__name__}; need a run, its folder, or a result of patch")
    run = source if isinstance(source, Run) else read_run(source)
    if run.kind == "circuit":
        return edge_circuit(run)
    if run.kind == "patch":
        return patch_circuit(run)
    if run.kind != "trace" and "links" not in run.tables:
        raise RunError(
            f"{about(run)}, which has no circuit; need a run of trace, circuit or patch. {MAKES['circuit']}, or with "
            "sink-lens trace"
        )
    return chain_circuit(run)


def chain_circuit(run: Run) -> ChainCircuit:
    """The circuit of a trace; what a partial run did not measure is nan.

    Raises:
        RunError: the run has no links, or does not say which position is the sink.
    """
    story, joined = find_story(run), chain(run)
    position = studied(story)
    links = run.need("links", columns=["link", "statistic", "value", "is_primary", "verdict"])
    effects = run.optional("effects", columns=["link", "share", "ci_low", "ci_high", "control_share", "is_primary"])
    effect_of = (
        {} if effects is None else {row["link"]: row for row in _rows(effects.loc[effects["is_primary"].eq(True)])}
    )
    if effects is not None:  # of a link that it has no row of, the table of links may tell what its intervention did
        shares = links.loc[links["statistic"] == "intervention_share"].rename(columns={"value": "share"})
        told = {row["link"]: row for row in _rows(shares.filter(items=["link", "share", "ci_low", "ci_high"]))}
        effect_of = told | effect_of
    into = {_kind(link.target): link.name for link in reversed(joined)}
    lanes = _lanes(run)
    nodes = [*_upstream(run, position, joined=joined, into=into, links=links, effect_of=effect_of)]
    nodes += [*_downstream(run, position, kinds=_kinds(joined), lanes=lanes, threshold=story.threshold or 0.3)]
    edges = [
        *_arrows(joined, links, effect_of=effect_of, lanes=lanes),
        *_arrows_of_parts(nodes, into=into, joined=joined),
    ]
    nodes, found = _with_paths(run, nodes, lanes=lanes)
    edges += found
    said = {
        "model": story.model,
        **{name: run.provenance.get(name) for name in ("weights_sha256", "tokens_sha256", "n_layers", "n_heads")},
        "sink_position": position,
        "made_at": effect_of.get(joined[0].name if joined else "", {}).get("position"),
        "read_layers": effect_of.get(into.get("heads", ""), {}).get("read_layers"),
    }
    return ChainCircuit(
        about=said,
        nodes=_frame(nodes, NODE_COLUMNS),
        edges=_frame(edges, EDGE_COLUMNS),
        run=run,
    )


def _first_tokens(run: Run) -> tuple[str, ...]:
    table = run.optional("tokens", columns=["sequence", "position", "text"])
    if table is None or not len(table):
        return ()
    own = table.loc[table["sequence"] == table["sequence"].min()].sort_values("position")
    return tuple(str(text) for text in own["text"])


def _attention(run: Run, heads: Sequence[str], *, position: int) -> dict[str, Any]:
    """The patterns of the heads in the first sequence, and what makes the logit of the sink's key in their layers."""
    if not (run.folder / "patterns.safetensors").is_file():
        return {}
    patterns = next((one for one in run.tensors("patterns").values() if one.ndim == 4), np.zeros((0, 0, 0, 0)))
    split = run.optional("key_split", columns=["layer"])
    rows = {} if split is None else {int(row["layer"]): row for row in split.to_dict("records")}
    found = {}
    for name in heads:
        layer, head = (int(one) for one in name.partition(":")[2].split("."))
        if layer >= patterns.shape[0] or head >= patterns.shape[1] or position >= patterns.shape[2]:
            continue
        own = rows.get(layer, {})
        parts = [(part, own.get(column)) for column, part in _SPLIT.items()]
        by = {"side": "key", "by": "dimensions, mean over the heads of the layer"}
        why = [by | {"part": part, "value": value} for part, value in parts if value is not None and not pd.isna(value)]
        pattern = patterns[layer, head] / 255.0
        found[name] = {"query": len(pattern) - 1, "key": position, "pattern": bytes_of(pattern), "why": why}
    return found


def _kind(node: str) -> str:
    """The kind of a node of the chain; a node that has no kind of its own gets its name, as an id."""
    return _KINDS.get(node) or "node_" + re.sub(r"\W+", "_", node)


def _kinds(joined: Sequence[NamedLink]) -> list[str]:
    """The kinds of the chain's nodes, in order."""
    return list(dict.fromkeys(_kind(node) for link in joined for node in (link.source, link.target)))


def _id(kind: str, step: int | None) -> str:
    return f"{kind}:{step}" if kind in _BY_STEP else kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """A growth step, the layers in which its sink is read, and what survives of it when something is frozen."""

    step: int
    layers: tuple[int, int]
    reads: tuple[int, int]
    dimension: int | None
    surviving: Mapping[str, tuple[float, float]]
    """Kind of the frozen node -> share that survives, and under the controls."""


def _lanes(run: Run) -> list[_Lane]:
    """One lane a growth step; one over all layers where there is none."""
    last = int(run.provenance.get("n_layers") or 1) - 1
    columns = ["step", "first_layer", "last_layer", "outlier_dimension"]
    table = run.optional("growth_steps", columns=columns)
    rows = [] if table is None else list(table[columns].astype(float).itertuples(index=False, name=None))
    mediated = run.optional(
        "mediation", columns=["intervention", "frozen", "step", "surviving_share", "control_surviving_share"]
    )
    natural = [] if mediated is None else _rows(mediated.loc[mediated["intervention"] == "natural"])
    surviving: dict[int, dict[str, tuple[float, float]]] = {}
    for row in natural:
        if row["frozen"] in _FROZEN and not math.isnan(row["surviving_share"]):
            shares = (row["surviving_share"], row["control_surviving_share"])
            surviving.setdefault(int(row["step"]), {})[_FROZEN[row["frozen"]]] = shares
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
    row = dict.fromkeys(NODE_COLUMNS, "") | {"value": math.nan, "frozen_share": math.nan}
    row["input_share"] = math.nan
    return row | {"id": kind if step is None else f"{kind}:{step}", "kind": kind, "step": step} | values


def _upstream(
    run: Run,
    position: int,
    *,
    joined: Sequence[NamedLink],
    into: Mapping[str, str],
    links: pd.DataFrame,
    effect_of: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """What all growth steps share: the token, its aggregated values, what attention writes, and plain nodes."""
    layers = _named_layers(str(effect_of.get(into.get("attn_out", ""), {}).get("layers", "")))
    deviations = {"z": ("aggregated\nvalues z", "s2_ratio"), "attn_out": ("after W_O", "s2_ratio_after_w_o")}
    names = {_kind(node): node for link in joined for node in (link.source, link.target)}
    for kind in _kinds(joined):
        if kind == "position":
            tokens = run.optional("tokens", columns=["position", "text"])
            texts = [] if tokens is None else tokens.loc[tokens["position"] == position, "text"].unique().tolist()
            detail = f"{len(texts)} different\ntokens" if len(texts) > 1 else "".join(map(token, texts))
            yield _node(kind, label=f"position {position}", detail=detail)
        elif kind in deviations:
            label, statistic = deviations[kind]
            rows = links.loc[(links["link"] == into.get(kind)) & (links["statistic"] == statistic)]
            value = rows["value"].iloc[0] if len(rows) else math.nan
            yield _node(kind, label=label, layers=layers, quantity=statistic, value=value)
        elif kind not in _BY_STEP:
            yield _node(kind, label=textwrap.fill(visible(names[kind]), _CHARACTERS - 2))


def _downstream(
    run: Run, position: int, *, kinds: Sequence[str], lanes: list[_Lane], threshold: float
) -> Iterator[dict[str, Any]]:
    """Parts of every growth step: its super neurons, the dimension, the keys, the heads."""
    neurons = run.optional("neurons", columns=["layer", "neuron", "sink_position", "contribution_share", "is_super"])
    layers = run.optional("layers", columns=["layer", "sink_position", "dominance_ratio"])
    heads = run.optional("heads", columns=["layer", "head", "sink_position", "sink_score"])
    for lane in lanes:
        removed = {kind: 1 - share for kind, (share, _) in lane.surviving.items()}
        own = _of_layers(neurons, position, lane.layers)
        supers = own if own is None else largest_first(own.loc[own["is_super"].eq(True)], "contribution_share")
        after = _of_layers(layers, position, (lane.layers[1], lane.layers[1]))
        known = lane.dimension is not None and after is not None and len(after)
        read = _of_layers(heads, position, lane.reads)
        score = np.array([]) if read is None else read["sink_score"].to_numpy(float)
        over = int((score > threshold).sum())
        said: dict[str, dict[str, Any]] = {
            "neurons": {
                "layers": _layers(*lane.layers),
                "label": "super neurons",
                "quantity": "count",
                "value": math.nan if supers is None else len(supers),
            },
            "dimension": {
                "layers": _layers(*lane.layers),
                "label": "outlier dimension" if lane.dimension is None else f"dimension {lane.dimension}",
                "quantity": "dominance_ratio",
                "value": after["dominance_ratio"].iloc[0] if known and after is not None else math.nan,
            },
            "key": {"layers": _layers(*lane.reads), "label": "the sink's key"},
            "heads": {
                "layers": _layers(*lane.reads),
                "label": "heads",
                "detail": f"{over} of {len(score)}\nover {threshold:g}" if len(score) else "",
                "quantity": "heads_over_threshold",
                "value": over if len(score) else math.nan,
            },
        }
        for kind in (kind for kind in kinds if kind in said):
            yield _node(kind, step=lane.step, frozen_share=removed.get(kind, math.nan), **said[kind])
            if kind == "neurons":
                yield from _named_parts("neuron", supers, lane, unit="neuron", quantity="contribution_share")
            if kind == "heads" and read is not None:
                strongest = largest_first(read, "sink_score").head(_MOST_HEADS)
                yield from _named_parts("head", strongest, lane, unit="head", quantity="sink_score")


def _named_parts(
    kind: str, table: pd.DataFrame | None, lane: _Lane, *, unit: str, quantity: str
) -> Iterator[dict[str, Any]]:
    """The parts of a step's node."""
    rows = [] if table is None else table[["layer", unit, quantity]].itertuples(index=False)
    for layer, which, value in rows:
        name = f"{layer:.0f}.{which:.0f}"
        label = (head_name if unit == "head" else neuron_name)(layer, which)
        yield _node(kind, step=lane.step, layers=_layers(int(layer), int(layer))) | {
            "id": f"{kind}:{name}",
            "group": f"{kind}s:{lane.step}",
            "label": label,
            "quantity": quantity,
            "value": value,
        }


def _arrows(
    joined: Sequence[NamedLink], links: pd.DataFrame, *, effect_of: Mapping[str, Any], lanes: list[_Lane]
) -> Iterator[dict[str, Any]]:
    """The links; those that join nodes of a growth step once for each step."""
    for link in joined:
        rows = links.loc[links["link"] == link.name]
        first = _rows(rows.loc[rows["is_primary"].eq(True)])[:1] or [{}]
        moved = effect_of.get(link.name, {})
        row = {
            "link": link.name,
            "quantity": "intervention_share",
            "value": moved.get("share"),
            "ci_low": moved.get("ci_low"),
            "ci_high": moved.get("ci_high"),
            "control": moved.get("control_share"),
            "verdict": first[0].get("verdict", "not measured"),
            "measured": first[0].get("measured", ""),
            "intervened": first[0].get("intervened", ""),
            "statistic": first[0].get("statistic", ""),
            "statistic_value": first[0].get("value"),
        }
        source, target = _kind(link.source), _kind(link.target)
        for step in [lane.step for lane in lanes] if {source, target} & {*_BY_STEP} else [None]:
            yield row | {"source": _id(source, step), "target": _id(target, step), "step": step}


def _arrows_of_parts(
    nodes: list[dict[str, Any]], *, into: Mapping[str, str], joined: Sequence[NamedLink]
) -> Iterator[dict[str, Any]]:
    """Each neuron's arrow to where neurons lead, and each of the strongest heads' from what leads there."""
    leads_to = {_kind(link.source): link for link in joined}
    for node in nodes:
        if node["kind"] == "neuron" and "neurons" in leads_to:
            link = leads_to["neurons"]
            ends = {"source": node["id"], "target": _id(_kind(link.target), node["step"]), "link": link.name}
        elif node["kind"] == "head" and "heads" in into:
            (link,) = [link for link in joined if link.name == into["heads"]]
            ends = {"source": _id(_kind(link.source), node["step"]), "target": node["id"], "link": link.name}
        else:
            continue
        yield ends | {name: node[name] for name in ("step", "quantity", "value")} | {"verdict": "part"}


def _with_paths(
    run: Run, nodes: list[dict[str, Any]], *, lanes: list[_Lane]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The nodes, with those of the MLPs and what their inputs carry, and an edge for each path between two of them."""
    columns = ["source", "source_step", "target", "target_step", "through", "read_step", "share", "ci_low", "ci_high"]
    table = run.optional("paths", columns=columns)
    if table is None or not len(table):
        return nodes, []
    first = lanes[0].step
    known = {str(node["id"]): node for node in nodes}
    if not {f"neurons:{first}", f"key:{first}"} <= known.keys():
        return nodes, []
    early = _layers(0, max(0, lanes[0].layers[1]))
    known["mlps"] = _node("early", label="other MLPs", layers=early) | {"id": "mlps"}
    for lane in lanes:
        known[f"mlps:{lane.step}"] = _node("mlps", step=lane.step, label="other MLPs", layers=_layers(*lane.reads))
    order = {kind: place for place, kind in enumerate(("position", "z", "attn_out", "early", "neurons", "mlps"))}
    known = dict(sorted(known.items(), key=lambda item: order.get(item[1]["kind"], len(order))))
    steps = {int(step) for step in table["read_step"]} - {ALL_STEPS}
    edges = []
    for row in _rows(table):
        step = int(row["source_step"] if row["target"] == "sink" else row["target_step"])
        if int(row["read_step"]) != (step if step in steps and row["target"] != "MLPs" else ALL_STEPS):
            continue
        ends = _ends_of(row, step=max(step, first), first=first)
        if ends is None or not {*ends} <= known.keys():
            continue
        source, target = ends
        if source == target:
            known[target]["input_share"] = row["share"]
            continue
        largest = row.get("control_largest", math.nan)
        bound = 0.0 if math.isnan(largest) else max(0.0, largest)
        told = CARRIES if row["ci_low"] > bound else GROWS if row["ci_high"] < 0 else UNTOLD
        edges.append(
            {
                "source": source,
                "target": target,
                "step": max(step, first),
                "quantity": "path_share",
                "value": row["share"],
                "ci_low": row["ci_low"],
                "ci_high": row["ci_high"],
                "control": row.get("control_share", math.nan),
                "verdict": told,
            }
        )
    return list(known.values()), edges


def _ends_of(row: Mapping[str, Any], *, step: int, first: int) -> tuple[str, str] | None:
    """The two nodes of a path; twice the target where everything is taken from it, None where nothing is drawn."""
    source, target = str(row["source"]), str(row["target"])
    kinds = {"super neurons": "neurons", "makers": "neurons", "key": "key", "MLPs": "mlps"}
    if target == "sink":
        return f"key:{step}", f"heads:{step}"
    if target not in kinds:
        return None
    end = f"{kinds[target]}:{step}"
    if row["through"]:
        if source == "everything":
            return f"dimension:{step}", end
        return f"neurons:{step}", f"dimension:{step}"
    if source == "everything":
        return end, end
    if source in ("super neurons", "makers"):
        begin = f"neurons:{max(int(row['source_step']), first)}"
        return None if begin == end else (begin, end)
    if source == "MLPs":
        if target == "MLPs":
            return None
        earlier = "mlps" if step == first else f"mlps:{step - 1}"
        return (f"mlps:{step}" if target == "key" else earlier), end
    return {"embedding": "position", "attention": "attn_out"}[source], end


def _of_layers(table: pd.DataFrame | None, position: int, layers: tuple[int, int]) -> pd.DataFrame | None:
    """The rows of a position, from one layer to another."""
    if table is None:
        return None
    return table.loc[table["layer"].between(*layers) & (table["sink_position"] == position)]


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
        if name in _NUMBERS:
            frame[name] = pd.Series(pd.to_numeric(frame[name], errors="coerce"), dtype=float)
        else:
            frame[name] = frame[name].fillna("").astype(str)
    return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Where a node stands, in inches from the lower left."""

    left: float
    bottom: float
    height: float

    @property
    def right(self) -> float:
        return self.left + _BOX

    @property
    def top(self) -> float:
        return self.bottom + self.height

    @property
    def centre(self) -> tuple[float, float]:
        return self.left + _BOX / 2, self.bottom + self.height / 2


def draw(circuit: ChainCircuit) -> Figure:
    """The circuit as a figure: an arrow as wide as the share of the sink that its path carries.

    At most six growth steps are drawn, the first ones, and the strongest parts of a node; the figure says so, and the
    circuit's tables hold them all.
    """
    nodes, edges = circuit.nodes, circuit.edges
    steps = sorted({int(step) for step in nodes["step"].dropna()})
    lanes = steps[:_MOST_LANES]
    most = 6 if len(lanes) < 3 else 3
    lefts = _lefts(edges)
    lines = {str(node["id"]): _lines(node) for node in nodes.to_dict("records") if node["kind"] in lefts}
    bars = {name: _bars(nodes, name, most=most) for name in lines}
    tall = {name: 2 * _PAD + _LINE * len(lines[name]) + _BAR * len(bars[name]) for name in lines}
    lane_of = {step: max(_stacked(step, tall), *_alone(step, tall)) for step in lanes}
    numbers, foot = _LINE * 8.9, _LINE * 5.6
    left = max([tall[name] for name in lines if ":" not in name], default=0.0)
    left += 2 * (_BETWEEN + tall["mlps"]) if "mlps" in tall else 0.0
    body = max(sum(lane_of.values()) + _BETWEEN * len(lanes), left)
    width, height = max(lefts.values(), default=_EDGE) + _BOX + _EDGE, numbers + body + foot
    figure = canvas(width=width, height=height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height), frame_on=False, xticks=[], yticks=[])
    middles, top = {}, height - numbers - (body - sum(lane_of.values()) - _BETWEEN * len(lanes)) / 2
    for step in lanes:
        middles[step] = top - lane_of[step] / 2
        top -= lane_of[step] + _BETWEEN
    centre = sum(middles.values()) / len(middles) if middles else foot + body / 2
    boxes = {}
    for name in lines:
        kind, _, step = name.partition(":")
        if step and int(step) not in middles:
            continue
        middle = middles[int(step)] if step else centre
        bottom = middle - tall[name] / 2
        if step and f"mlps:{step}" in tall and kind in ("mlps", "dimension"):
            shift = (tall[f"mlps:{step}"] - tall.get(f"dimension:{step}", 0.0)) / 2
            above = middle + shift
            bottom = above + _BETWEEN / 2 if kind == "dimension" else above - _BETWEEN / 2 - tall[name]
        elif name == "mlps":
            bottom = centre - tall.get("attn_out", 0.0) / 2 - _BETWEEN - tall[name]
        boxes[name] = _Box(left=lefts["early" if name == "mlps" else kind], bottom=bottom, height=tall[name])
    paths = edges.loc[edges["quantity"] == "path_share"]
    drawn = paths.loc[paths["value"].abs() >= LEAST_PATH]
    for edge in edges.loc[edges["quantity"] == "intervention_share"].to_dict("records"):
        kinds = {str(edge[end]).partition(":")[0] for end in ("source", "target")}
        if {edge["source"], edge["target"]} <= boxes.keys() and (paths.empty or not kinds <= _WITH_PATHS):
            _join(axes, boxes[edge["source"]], boxes[edge["target"]])
    said: list[tuple[float, float]] = []
    for edge in drawn.sort_values(by="value", key=abs, ascending=False).to_dict("records"):
        if edge["source"] in boxes and edge["target"] in boxes:
            _arrow(axes, edge, boxes=boxes, said=said)
    for name, box in boxes.items():
        _draw_box(axes, box, lines=lines[name], bars=bars[name])
    _numbers(axes, edges, top=height)
    _foot(axes, circuit, left_out=len(steps) - len(lanes), top=foot)
    return finished(figure)


def _stacked(step: int, tall: Mapping[str, float]) -> float:
    """Height of the dimension of a step over its MLPs."""
    both = [tall[name] for name in (f"dimension:{step}", f"mlps:{step}") if name in tall]
    return sum(both) + _BETWEEN * (len(both) - 1) if both else 0.0


def _alone(step: int, tall: Mapping[str, float]) -> list[float]:
    """Heights of a step's other boxes."""
    return [value for name, value in tall.items() if name.endswith(f":{step}")]


def _lefts(edges: pd.DataFrame) -> dict[str, float]:
    """Kind of node -> where its column begins; the columns stand in the order in which the links join them."""
    links = edges.loc[edges["quantity"] == "intervention_share"]
    ends = [name for pair in zip(links["source"], links["target"], strict=True) for name in pair]
    found: dict[str, float] = {}
    fan = 0.0
    for name in ends:
        kind, _, step = name.partition(":")
        fan = _FAN if step else fan
        found.setdefault(kind, _EDGE + len(found) * (_BOX + _GAP) + fan)
    beside = found.get("dimension")
    if beside is not None and "path_share" in set(edges["quantity"]):
        found |= {"mlps": beside, "early": found.get("attn_out", _EDGE)}
    return found


def _of_step(table: pd.DataFrame, step: int) -> pd.DataFrame:
    return table.loc[table["step"] == step]


def _lines(node: Mapping[Any, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a node, each with its style: name, layers, what was measured of it, what freezing it does."""
    kind, value, removed = node["kind"], node["value"], node["frozen_share"]
    label = str(node["label"])
    if kind in ("neurons", "dimension", "key"):
        label = "\n".join(label.rsplit(" ", 1))
    found = [(line, {"fontweight": "bold", "fontsize": FONT}) for line in label.split("\n")]
    if node["layers"]:
        found.append((str(node["layers"]), {"color": QUIET}))
    if kind in ("z", "attn_out", "dimension") and not math.isnan(value):
        found.append((f"std ×{number(value)}" if kind != "dimension" else f"{number(value)} × mean", {}))
    found += [(visible(line), {}) for line in str(node["detail"]).split("\n") if line]
    for begins, share in ((_INPUT_LINE, node["input_share"]), (_FROZEN_LINE, removed)):
        if not math.isnan(share):
            found.append((f"{begins} {percent(share)}", {"color": BLUE}))
    return found


def _bars(nodes: pd.DataFrame, name: str, *, most: int) -> list[tuple[str, float]]:
    """Name and number of the strongest parts of a node, and how many there are besides."""
    parts = nodes.loc[nodes["group"] == name]
    found = list(zip(parts["label"], parts["value"], strict=True))
    more = [(f"and {len(found) - most} more", math.nan)] if len(found) > most and name.startswith("neurons") else []
    return [*found[:most], *more]


def _text(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, **({"fontsize": _SMALL, "color": INK, "ha": "center", "va": "center", "zorder": 5} | style))


def _draw_box(
    axes: Axes, box: _Box, *, lines: Sequence[tuple[str, dict[str, Any]]], bars: Sequence[tuple[str, float]]
) -> None:
    """A node: its lines, and after the first of them its parts, each with its number as a bar."""
    shape = FancyBboxPatch((box.left, box.bottom), _BOX, box.height, boxstyle="round,pad=0,rounding_size=0.07")
    shape.set(facecolor=PAPER, edgecolor=QUIET, linewidth=1.0, zorder=3)
    axes.add_patch(shape)
    y = box.top - _PAD - _LINE / 2
    last = [line for line in lines if bars and line[0].startswith((_FROZEN_LINE, _INPUT_LINE))]
    for text, style in lines[: len(lines) - len(last)]:
        _text(axes, box.centre[0], y, text, **style)
        y -= _LINE
    for name, value in bars:
        if math.isnan(value):
            _text(axes, box.centre[0], y, name, color=QUIET)
        else:
            width = (_BOX - 0.1) * min(max(value, 0.0), 1.0)
            bar = Rectangle((box.left + 0.05, y - _BAR / 2 + 0.015), width, _BAR - 0.03)
            bar.set(facecolor=BLUE, alpha=0.28, linewidth=0, zorder=4)
            axes.add_patch(bar)
            _text(axes, box.left + 0.08, y, name, ha="left", fontsize=_SMALL - 0.6)
            _text(axes, box.right - 0.07, y, f"{value:.2f}", ha="right", fontsize=_SMALL - 0.6)
        y -= _BAR
    for text, style in last:
        _text(axes, box.centre[0], y, text, **style)
        y -= _LINE


def _style(edge: Mapping[Any, Any]) -> tuple[str, Any, float]:
    """Colour, dashes, and width in points of an arrow."""
    colour, line = _OF_PATHS.get(edge["verdict"], (QUIET, "dotted"))
    width = _THIN + (_THICK - _THIN) * min(abs(edge["value"]), 1.0)
    unit = max(width, 2.0)
    dashes = {"solid": "solid", "dashed": (0, (6 / unit, 3.5 / unit)), "dotted": (0, (2.2 / unit, 2.2 / unit))}
    return colour, dashes[line], width


def _join(axes: Axes, source: _Box, target: _Box) -> None:
    """A thin line from a box to the next, which no path was measured for."""
    t = np.linspace(0, 1, 40)
    x = source.right + 0.02 + (target.left - source.right - 0.04) * t
    y = source.centre[1] + (target.centre[1] - source.centre[1]) * t * t * (3 - 2 * t)
    axes.plot(x, y, color=QUIET, linewidth=_THIN)


def _arrow(axes: Axes, edge: Mapping[Any, Any], *, boxes: Mapping[str, _Box], said: list[tuple[float, float]]) -> None:
    """A path from a box to another, with its share where neither a box nor another share is."""
    source, target = boxes[edge["source"]], boxes[edge["target"]]
    colour, dashes, width = _style(edge)
    point, half = _point(width), 0.045 + width / 100
    (begin, first), (end, last) = _ends(str(edge["source"]), str(edge["target"]), source=source, target=target)
    tip = np.array(end)
    back = tip - point * np.array(last)
    reach = max(0.25, 0.5 * float(np.linalg.norm(tip - np.array(begin))))
    controls = np.array([begin, np.array(begin) + reach * np.array(first), back - reach * np.array(last), back])
    t = np.linspace(0, 1, 60)[:, None]
    weights = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    x, y = (weights @ controls).T
    axes.plot(x, y, color=colour, linewidth=width, linestyle=dashes, solid_capstyle="butt", dash_capstyle="butt")
    side = np.array([-last[1], last[0]])
    corners = [tuple(tip), tuple(back + half * side), tuple(back - half * side)]
    axes.add_patch(Polygon(corners, facecolor=colour, linewidth=0))
    tries = sorted(range(4, 50, 2), key=lambda one: abs(one - 27))
    able = [one for one in tries if _free(x[one], y[one], boxes=boxes, said=said)]
    able += [one for one in tries if _free(x[one], y[one], boxes=boxes, said=())]
    middle = able[0] if able else 27
    said.append((x[middle], y[middle]))
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    _text(axes, x[middle], y[middle], percent(edge["value"]), color=colour, bbox=behind, fontsize=_SMALL - 0.4)


def _free(x: float, y: float, *, boxes: Mapping[str, _Box], said: Sequence[tuple[float, float]]) -> bool:
    """Whether a share fits here."""
    wide, tall = 0.1, 0.08
    inside = any(
        box.left - wide < x < box.right + wide and box.bottom - tall < y < box.top + tall for box in boxes.values()
    )
    return not inside and all(abs(x - a) > 3 * wide or abs(y - b) > 2 * tall for a, b in said)


def _ends(
    source_name: str, target_name: str, *, source: _Box, target: _Box
) -> tuple[tuple[tuple[float, float], tuple[float, float]], tuple[tuple[float, float], tuple[float, float]]]:
    """Where an arrow begins and ends, and its directions there."""
    right, up, down = (1.0, 0.0), (0.0, 1.0), (0.0, -1.0)
    begins, ends = source_name.partition(":")[0], target_name.partition(":")[0]
    into = {"position": 0.3, "attn_out": 0.1, "mlps": -0.12, "dimension": 0.14}.get(begins, 0.0)
    end = (target.left - 0.02, target.centre[1] + into * min(1.0, target.height))
    if begins == ends:  # neurons of one step to those of the next
        x = source.left + _BOX / 2
        return ((x, source.bottom - 0.02), down), ((x, target.top + 0.02), down)
    if begins == "position":
        over = target.centre[1] >= source.centre[1]
        edge = source.top + 0.02 if over else source.bottom - 0.02
        return ((source.centre[0], edge), up if over else down), (end, right)
    if begins == "mlps" and target.left < source.left:  # to the neurons of the next step
        x = target.right - 0.15
        return ((source.left + 0.15, source.bottom - 0.02), down), ((x, target.top + 0.02), down)
    outof = {"dimension": 0.14, "mlps": -0.16}.get(ends, 0.0) if begins == "neurons" else 0.0
    return ((source.right + 0.02, source.centre[1] + outof), right), (end, right)


def _point(width: float) -> float:
    """Inches: the length of the head of an arrow."""
    return 0.07 + width / 110


def _numbers(axes: Axes, edges: pd.DataFrame, *, top: float) -> None:
    """Over each gap: what the link says, its verdict, the statistic, the intervention, its interval, the controls."""
    lefts = _lefts(edges)
    links = edges.loc[edges["quantity"] == "intervention_share"].drop_duplicates("link")
    for index, edge in enumerate(links.to_dict("records")):
        source, target = (str(edge[end]).partition(":")[0] for end in ("source", "target"))
        claim = _CLAIMS.get((source, target)) or textwrap.fill(visible(edge["link"]).replace("_", " "), _CHARACTERS)
        x = (lefts[source] + _BOX + lefts[target]) / 2
        colour = _STYLES.get(edge["verdict"], (QUIET, ""))[0]
        verdict = f"{VERDICTS.get(edge['verdict'], '?')} {visible(edge['verdict'])}"
        said = [(line, {}) for line in claim.split("\n")]
        said.append((verdict, {"color": colour, "fontweight": "bold", "fontsize": FONT}))
        if not math.isnan(edge["statistic_value"]):
            name = words(visible(edge["statistic"])).replace(", nats", "")
            said.append((name, {"color": QUIET}))
            said.append((f"{number(edge['statistic_value'])}{_sign(edge['measured'])}", {"color": QUIET}))
        said += _moved(edge, first=index == 0)
        for place, (text, style) in enumerate(said):
            _text(axes, x, top - _LINE * (place + 0.7), text, **style)


def _moved(edge: Mapping[Any, Any], *, first: bool) -> list[tuple[str, dict[str, Any]]]:
    """What a link's intervention makes or removes of the sink, its interval and its controls, each with its style."""
    if math.isnan(edge["value"]):
        return [("no intervention", {"color": QUIET})]
    colour = _STYLES.get(edge["verdict"], (QUIET, ""))[0]
    what = f"{'makes' if first else 'removes'} {percent(edge['value'])}{_sign(edge['intervened'])}"
    said: list[tuple[str, dict[str, Any]]] = [(what, {"color": colour, "fontsize": FONT})]
    if bounds := interval(edge["ci_low"], edge["ci_high"], shown=percent):
        said.append((bounds, {"color": QUIET}))
    if not math.isnan(edge["control"]):
        said.append((f"controls {percent(edge['control'])}", {"color": QUIET}))
    return said


def _sign(verdict: str) -> str:
    """What the measurement, or the intervention, says by itself."""
    return f" {VERDICTS[verdict]}" if verdict in VERDICTS else ""


def _foot(axes: Axes, circuit: ChainCircuit, *, left_out: int, top: float) -> None:
    """What the arrows and numbers are."""
    lines = [
        "Arrow: a path. As wide as the share of the sink that is lost if its end alone reads the stream without what "
        "its beginning wrote.",
        "Green: more than 0 and than the controls. Dotted: not told. Orange, dashed: the sink grows without it. Under "
        f"{percent(LEAST_PATH)}: not drawn.",
        "All inputs: what is lost if all that a node reads is as on ordinary tokens. Freeze: if the node itself is.",
        "Bars: a neuron's share of its layer's change of the dimension; a head's sink score.",
        "On top: each link of the chain, its statistic, and what its intervention makes (the first) or removes.",
    ]
    if "path_share" not in set(circuit.edges["quantity"]):
        lines[:2] = ["No path was measured in this run, so there are lines and no arrows."]
    if "not applicable" in circuit.edges["verdict"].tolist():
        lines[:2] = ["No position is a sink, so no link is judged and there are no paths."]
    if left_out > 0:
        lines[-1] += f" {left_out} more growth steps are not drawn."
    for place, line in enumerate(lines):
        _text(axes, _EDGE, top - _LINE * (place + 0.6), line, ha="left", color=QUIET)

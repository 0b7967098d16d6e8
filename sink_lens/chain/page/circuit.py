"""The circuit of a traced run: the nodes of its chain, joined by measured paths, as two tables and as a drawing.

Nodes are those of the run's table ``chain``, and the MLPs beside the super neurons. Other tables say more of the nodes
in ``_KINDS``: growth steps, neurons, dimensions, heads; any other node is a plain box. An arrow is a path
(``paths.parquet``): the share of the sink, read after the target's growth step (of MLPs, which feed the next step too,
in all layers with a sink), that is lost when the target alone reads the stream without what the source wrote, with its
interval over sequences and its controls. From super neurons to the outlier dimension, and from there to the key, the
path goes through that dimension alone. The table of edges also has what each link of the chain was measured by, its
intervention (``effects.parquet``, primary ones, all growth steps together) and its verdict. Nodes of a growth step say
which share of the sink goes when the node itself is frozen at what it is at other positions (``mediation.parquet``, the
natural sink, one step at a time), and when all that it reads is. Nothing here is inferred; what a run did not measure
is nan.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.chain.page.story import NamedLink, find_story, judged_links, named_links
from sink_lens.records import Run
from sink_lens.report import diagram, sketches
from sink_lens.report.diagram import Style
from sink_lens.report.drawable import Drawable
from sink_lens.report.explorer import Explorer, chain_graph, pattern_base64
from sink_lens.report.page import largest_first
from sink_lens.report.patterns import first_tokens, studied_position
from sink_lens.schema import ALL_STEPS
from sink_lens.text import head_name, json_value, neuron_name, token_text, visible

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
_WHOLE = ("mixers", "layer inputs")
"""Sources of paths that are nodes of their own, by their names."""
_SPLIT = {"dimension": "the outlier dimensions", "rest": "all other dimensions", "bias": "the bias"}
"""Column of a run's table ``key_split`` -> what it is."""
_MOST_HEADS = 8
_CARRIES, _GROWS, _UNTOLD = "raises", "lowers", "not told from 0"
"""Verdicts of paths: the sink is lost without it, it is larger without it, or neither interval nor controls tell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainCircuit(Drawable):
    """The nodes and arrows of a run's chain."""

    about: dict[str, Any]
    """Model, hashes of weights and tokens, the sink position, where the first intervention makes a sink, and in which
    layers the sink is read."""
    nodes: pd.DataFrame = field(repr=False)
    """One row per node (``NODE_COLUMNS``). ``group`` is the node that it is a part of; ``frozen_share`` is the share of
    the sink that is lost if the node is frozen; ``input_share``, if everything that it reads is frozen."""
    run: Run | None = field(default=None, repr=False)
    """The run that it comes from; None if it was made of tables."""
    edges: pd.DataFrame = field(repr=False)
    """One row per edge (``EDGE_COLUMNS``). ``quantity`` says what ``value`` is: path_share, intervention_share (of a
    link), contribution_share (of a neuron, of its layer's change of the dimension) or sink_score (of a head)."""

    @property
    def is_causal(self) -> bool:
        """Check whether an edge has the share of an intervention, of a link or of a path."""
        shares = self.edges.loc[self.edges["quantity"].isin(["path_share", "intervention_share"]), "value"]
        return bool(shares.notna().any())

    def to_json(self) -> str:
        """The circuit as JSON for other tools; undefined numbers are null."""
        frames = {name: json_value(getattr(self, name).to_json(orient="records")) for name in ("nodes", "edges")}
        return json.dumps({"format": _FORMAT, "about": self.about, **frames}, ensure_ascii=False, indent=1)

    @property
    def graph(self) -> dict[str, Any]:
        """The circuit as Neuronpedia's JSON."""
        known = {name: self.about[name] for name in ("sink_position", "n_layers") if name in self.about}
        what = "The chain of the sink" if self.about.get("is_sink", True) else "What was measured; there is no sink"
        title = f"{what}, {visible(self.about.get('model') or 'a model', limit=40)}"
        model = visible(self.about.get("model") or "a model", limit=80)
        if self.is_causal:
            means = "An edge's weight is the share of the sink that is lost without it"
        else:
            means = "No link was intervened on, so no edge says that one thing causes another"
        meaning = (
            f"{means}; an edge into a head has the head's sink score, an edge out of a neuron the neuron's share of "
            "its layer's change of the dimension."
        )
        known |= {"title": title, "meaning": meaning}
        if self.run is not None:
            heads = self.nodes.loc[self.nodes["kind"].eq("head"), "id"].tolist()
            known |= {"tokens": tuple(first_tokens(self.run).values())}
            known |= {"attention": _head_patterns(self.run, heads, position=int(self.about["sink_position"]))}
        return chain_graph(self.nodes, self.edges, model=model, **known)

    def explore(self) -> Explorer:
        """A page to explore the circuit in; ``.save("c.html")`` writes it."""
        return Explorer(graphs=[self.graph])

    def draw(self, style: Style = "page", *, width: float | None = None) -> Figure:
        """The circuit as a figure.

        Args:
            style: ``page`` as in a report, ``paper`` for a column or two.
            width: in inches; a single column is 3.25.

        Raises:
            InputError: another style, or more than fits into the width.
        """
        return diagram.draw(sketches.sketch_chain(self), style=style, width=width)


def chain_circuit(run: Run) -> ChainCircuit:
    """The circuit of a trace; what a partial run did not measure is nan.

    Raises:
        RunError: the run has no links, or does not say which position is the sink.
    """
    story, joined = find_story(run), named_links(run)
    position = studied_position(run)
    links = judged_links(run, columns=["link", "statistic", "value", "is_primary", "verdict"])
    effects = run.optional("effects", columns=["link", "share", "ci_low", "ci_high", "control_share", "is_primary"])
    effect_of = (
        {} if effects is None else {row["link"]: row for row in _row_dicts(effects.loc[effects["is_primary"].eq(True)])}
    )
    if effects is not None:  # of a link that it has no row of, the table of links may tell what its intervention did
        shares = links.loc[links["statistic"] == "intervention_share"].rename(columns={"value": "share"})
        told = {row["link"]: row for row in _row_dicts(shares.filter(items=["link", "share", "ci_low", "ci_high"]))}
        effect_of = told | effect_of
    into = {_node_kind(link.target): link.name for link in reversed(joined)}
    lanes = _lanes(run)
    nodes = [*_shared_nodes(run, position, joined=joined, into=into, links=links, effect_of=effect_of)]
    nodes += [*_step_nodes(run, position, kinds=_node_kinds(joined), lanes=lanes, threshold=story.threshold or 0.3)]
    edges = [
        *_link_edges(joined, links, effect_of=effect_of, lanes=lanes),
        *_part_edges(nodes, into=into, joined=joined),
    ]
    nodes, found = _add_paths(run, nodes, lanes=lanes)
    edges += found
    about_run = {
        "model": story.model,
        **{name: run.provenance.get(name) for name in ("weights_sha256", "tokens_sha256", "n_layers", "n_heads")},
        "sink_position": position,
        "is_sink": story.is_sink is not False,
        "made_at": effect_of.get(joined[0].name if joined else "", {}).get("position"),
        "read_layers": effect_of.get(into.get("heads", ""), {}).get("read_layers"),
    }
    return ChainCircuit(
        about=about_run,
        nodes=_frame_of_rows(nodes, NODE_COLUMNS),
        edges=_frame_of_rows(edges, EDGE_COLUMNS),
        run=run,
    )


def _head_patterns(run: Run, heads: Sequence[str], *, position: int) -> dict[str, Any]:
    """Head node -> its attention in the first sequence, and the parts of the sink key's logit; empty if not kept."""
    if not (run.folder / "patterns.safetensors").is_file():
        return {}
    patterns = next((one for one in run.tensors("patterns").values() if one.ndim == 4), np.zeros((0, 0, 0, 0)))
    split = run.optional("key_split", columns=["layer"])
    rows = {} if split is None else {int(row["layer"]): row for row in split.to_dict("records")}
    by_head = {}
    for name in heads:
        layer, head = (int(one) for one in name.partition(":")[2].split("."))
        if layer >= patterns.shape[0] or head >= patterns.shape[1] or position >= patterns.shape[2]:
            continue
        own = rows.get(layer, {})
        parts = [(part, own.get(column)) for column, part in _SPLIT.items()]
        by = {"side": "key", "by": "dimensions, mean over the heads of the layer"}
        why = [by | {"part": part, "value": value} for part, value in parts if value is not None and not pd.isna(value)]
        pattern = patterns[layer, head] / 255.0
        by_head[name] = {"query": len(pattern) - 1, "key": position, "pattern": pattern_base64(pattern), "why": why}
    return by_head


def _node_kind(node: str) -> str:
    """The kind of a node of the chain, such as ``neurons``; a node that a user's own link adds gets one of its name."""
    return _KINDS.get(node) or "node_" + re.sub(r"\W+", "_", node)


def _node_kinds(joined: Sequence[NamedLink]) -> list[str]:
    """The kinds of all nodes that the links join, each once, in chain order."""
    return list(dict.fromkeys(_node_kind(node) for link in joined for node in (link.source, link.target)))


def _node_id(kind: str, step: int | None) -> str:
    """Id of the node of a kind: the kind, or ``kind:step`` where each growth step has a node of its own."""
    return f"{kind}:{step}" if kind in _BY_STEP else kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """A growth step, the layers in which its sink is read, and what survives of it when something is frozen."""

    step: int
    layers: tuple[int, int]
    reads: tuple[int, int]
    dimension: int | None
    surviving: Mapping[str, tuple[float, float]]
    """Kind of the frozen node -> share of the sink that survives, with the node frozen and with its controls frozen."""


def _lanes(run: Run) -> list[_Lane]:
    """A lane per growth step: its layers and dimension, and the layers that read its sink; else one over all layers."""
    last = int(run.provenance.get("n_layers") or 1) - 1
    columns = ["step", "first_layer", "last_layer", "outlier_dimension"]
    table = run.optional("growth_steps", columns=columns)
    rows = [] if table is None else list(table[columns].astype(float).itertuples(index=False, name=None))
    mediated = run.optional(
        "mediation", columns=["intervention", "frozen", "step", "surviving_share", "control_surviving_share"]
    )
    natural = [] if mediated is None else _row_dicts(mediated.loc[mediated["intervention"] == "natural"])
    surviving: dict[int, dict[str, tuple[float, float]]] = {}
    for row in natural:
        if row["frozen"] in _FROZEN and not math.isnan(row["surviving_share"]):
            shares = (row["surviving_share"], row["control_surviving_share"])
            surviving.setdefault(int(row["step"]), {})[_FROZEN[row["frozen"]]] = shares
    lanes = []
    for index, (step, first, end, dimension) in enumerate(rows):
        following = rows[index + 1][1] if index + 1 < len(rows) else last + 1
        begins = min(int(end) + 1, last)
        lanes.append(
            _Lane(
                step=int(step),
                layers=(int(first), int(end)),
                reads=(begins, max(begins, int(following) - 1)),
                dimension=None if math.isnan(dimension) else int(dimension),
                surviving=surviving.get(int(step), {}),
            )
        )
    return lanes or [_Lane(step=0, layers=(0, -1), reads=(0, last), dimension=None, surviving=surviving.get(0, {}))]


def _node_row(kind: str, *, step: int | None = None, **values: Any) -> dict[str, Any]:
    """One node as a row of the table of nodes; fields that are not given are "" or nan."""
    row = dict.fromkeys(NODE_COLUMNS, "") | {"value": math.nan, "frozen_share": math.nan}
    row["input_share"] = math.nan
    return row | {"id": kind if step is None else f"{kind}:{step}", "kind": kind, "step": step} | values


def _shared_nodes(
    run: Run,
    position: int,
    *,
    joined: Sequence[NamedLink],
    into: Mapping[str, str],
    links: pd.DataFrame,
    effect_of: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Rows of the nodes that all growth steps share: position, aggregated values, attention's output, a user's own."""
    layers = _layer_list_label(str(effect_of.get(into.get("attn_out", ""), {}).get("layers", "")))
    deviations = {"z": ("aggregated\nvalues z", "s2_ratio"), "attn_out": ("after W_O", "s2_ratio_after_w_o")}
    names = {_node_kind(node): node for link in joined for node in (link.source, link.target)}
    for kind in _node_kinds(joined):
        if kind == "position":
            tokens = run.optional("tokens", columns=["position", "text"])
            texts = [] if tokens is None else tokens.loc[tokens["position"] == position, "text"].unique().tolist()
            detail = f"{len(texts)} different\ntokens" if len(texts) > 1 else "".join(map(token_text, texts))
            yield _node_row(kind, label=f"position {position}", detail=detail)
        elif kind in deviations:
            label, statistic = deviations[kind]
            rows = links.loc[(links["link"] == into.get(kind)) & (links["statistic"] == statistic)]
            value = rows["value"].iloc[0] if len(rows) else math.nan
            yield _node_row(kind, label=label, layers=layers, quantity=statistic, value=value)
        elif kind not in _BY_STEP:
            yield _node_row(kind, label=visible(names[kind]))


def _step_nodes(
    run: Run, position: int, *, kinds: Sequence[str], lanes: list[_Lane], threshold: float
) -> Iterator[dict[str, Any]]:
    """Rows of the nodes that each growth step has of its own: super neurons, dimension, the sink's key, and heads."""
    neurons = run.optional("neurons", columns=["layer", "neuron", "sink_position", "contribution_share", "is_super"])
    layers = run.optional("layers", columns=["layer", "sink_position", "dominance_ratio"])
    heads = run.optional("heads", columns=["layer", "head", "sink_position", "sink_score"])
    for lane in lanes:
        removed = {kind: 1 - share for kind, (share, _) in lane.surviving.items()}
        own = _rows_in_layers(neurons, position, lane.layers)
        supers = own if own is None else largest_first(own.loc[own["is_super"].eq(True)], "contribution_share")
        after = _rows_in_layers(layers, position, (lane.layers[1], lane.layers[1]))
        known = lane.dimension is not None and after is not None and len(after)
        read = _rows_in_layers(heads, position, lane.reads)
        score = np.array([]) if read is None else read["sink_score"].to_numpy(float)
        over = int((score > threshold).sum())
        values: dict[str, dict[str, Any]] = {
            "neurons": {
                "layers": _layer_range_label(*lane.layers),
                "label": "super neurons",
                "quantity": "count",
                "value": math.nan if supers is None else len(supers),
            },
            "dimension": {
                "layers": _layer_range_label(*lane.layers),
                "label": "outlier dimension" if lane.dimension is None else f"dimension {lane.dimension}",
                "quantity": "dominance_ratio",
                "value": after["dominance_ratio"].iloc[0] if known and after is not None else math.nan,
            },
            "key": {"layers": _layer_range_label(*lane.reads), "label": "the sink's key"},
            "heads": {
                "layers": _layer_range_label(*lane.reads),
                "label": "heads",
                "detail": f"{over} of {len(score)}\nabove {threshold:g}" if len(score) else "",
                "quantity": "heads_over_threshold",
                "value": over if len(score) else math.nan,
            },
        }
        for kind in (kind for kind in kinds if kind in values):
            yield _node_row(kind, step=lane.step, frozen_share=removed.get(kind, math.nan), **values[kind])
            if kind == "neurons":
                yield from _part_nodes("neuron", supers, lane, unit="neuron", quantity="contribution_share")
            if kind == "heads" and read is not None:
                strongest = largest_first(read, "sink_score").head(_MOST_HEADS)
                yield from _part_nodes("head", strongest, lane, unit="head", quantity="sink_score")


def _part_nodes(
    kind: str, table: pd.DataFrame | None, lane: _Lane, *, unit: str, quantity: str
) -> Iterator[dict[str, Any]]:
    """A node's row for each neuron or head of a table, in the group of its growth step."""
    rows = [] if table is None else table[["layer", unit, quantity]].itertuples(index=False)
    for layer, which, value in rows:
        name = f"{layer:.0f}.{which:.0f}"
        label = (head_name if unit == "head" else neuron_name)(layer, which)
        yield _node_row(kind, step=lane.step, layers=_layer_range_label(int(layer), int(layer))) | {
            "id": f"{kind}:{name}",
            "group": f"{kind}s:{lane.step}",
            "label": label,
            "quantity": quantity,
            "value": value,
        }


def _link_edges(
    joined: Sequence[NamedLink], links: pd.DataFrame, *, effect_of: Mapping[str, Any], lanes: list[_Lane]
) -> Iterator[dict[str, Any]]:
    """One edge per link; a link between nodes of a growth step has an edge in each step."""
    for link in joined:
        rows = links.loc[links["link"] == link.name]
        first = _row_dicts(rows.loc[rows["is_primary"].eq(True)])[:1] or [{}]
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
        source, target = _node_kind(link.source), _node_kind(link.target)
        for step in [lane.step for lane in lanes] if {source, target} & {*_BY_STEP} else [None]:
            yield row | {"source": _node_id(source, step), "target": _node_id(target, step), "step": step}


def _part_edges(
    nodes: list[dict[str, Any]], *, into: Mapping[str, str], joined: Sequence[NamedLink]
) -> Iterator[dict[str, Any]]:
    """Edges from each neuron to what the neurons lead to, and to each head from what leads to the heads."""
    leads_to = {_node_kind(link.source): link for link in joined}
    for node in nodes:
        if node["kind"] == "neuron" and "neurons" in leads_to:
            link = leads_to["neurons"]
            ends = {"source": node["id"], "target": _node_id(_node_kind(link.target), node["step"]), "link": link.name}
        elif node["kind"] == "head" and "heads" in into:
            (link,) = [link for link in joined if link.name == into["heads"]]
            ends = {"source": _node_id(_node_kind(link.source), node["step"]), "target": node["id"], "link": link.name}
        else:
            continue
        yield ends | {name: node[name] for name in ("step", "quantity", "value")} | {"verdict": "part"}


def _add_paths(
    run: Run, nodes: list[dict[str, Any]], *, lanes: list[_Lane]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The given nodes with those of MLPs and embeddings added, and an edge for each measured path."""
    columns = ["source", "source_step", "target", "target_step", "through", "read_step", "share", "ci_low", "ci_high"]
    table = run.optional("paths", columns=columns)
    if table is None or not len(table):
        return nodes, []
    first = lanes[0].step
    known = {str(node["id"]): node for node in nodes}
    if not {f"neurons:{first}", f"key:{first}"} <= known.keys():
        return nodes, []
    early = _layer_range_label(0, max(0, lanes[0].layers[1]))
    known["mlps"] = _node_row("early", label="other MLPs", layers=early) | {"id": "mlps"}
    for name in _WHOLE:
        if name in set(table["source"]):
            known[name] = _node_row("early", label=name) | {"id": name}
    for lane in lanes:
        known[f"mlps:{lane.step}"] = _node_row(
            "mlps", step=lane.step, label="other MLPs", layers=_layer_range_label(*lane.reads)
        )
    order = {kind: place for place, kind in enumerate(("position", "z", "attn_out", "early", "neurons", "mlps"))}
    known = dict(sorted(known.items(), key=lambda item: order.get(item[1]["kind"], len(order))))
    steps = {int(step) for step in table["read_step"]} - {ALL_STEPS}
    edges = []
    for row in _row_dicts(table):
        step = int(row["source_step"] if row["target"] == "sink" else row["target_step"])
        if int(row["read_step"]) != (step if step in steps and row["target"] != "MLPs" else ALL_STEPS):
            continue
        ends = _path_ends(row, step=max(step, first), first=first)
        if ends is None or not {*ends} <= known.keys():
            continue
        source, target = ends
        if source == target:
            known[target]["input_share"] = row["share"]
            continue
        largest = row.get("control_largest", math.nan)
        bound = 0.0 if math.isnan(largest) else max(0.0, largest)
        told = _CARRIES if row["ci_low"] > bound else _GROWS if row["ci_high"] < 0 else _UNTOLD
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


def _path_ends(row: Mapping[str, Any], *, step: int, first: int) -> tuple[str, str] | None:
    """(source, target) node ids of a path of the table ``paths``; None for a path that is not drawn.

    Both are the target where the path takes everything that the target reads.
    """
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
    return {"embedding": "position", "attention": "attn_out"}.get(source, source), end


def _rows_in_layers(table: pd.DataFrame | None, position: int, layers: tuple[int, int]) -> pd.DataFrame | None:
    """Rows of a table from the first to the last of two layers, at the sink position; None without a table."""
    if table is None:
        return None
    return table.loc[table["layer"].between(*layers) & (table["sink_position"] == position)]


def _layer_range_label(first: int, last: int) -> str:
    """Layers as a node's label: "layer 3", "layers 3–5", or "no growth step" for an empty range."""
    if last < first:
        return "no growth step"
    return _layer_list_label(f"{first}-{last}" if last > first else f"{first}")


def _layer_list_label(listed: str) -> str:
    """A text of layers such as ``3-5,8`` as a node's label: "layers 3–5,8"; empty for an empty text."""
    many = "-" in listed or "," in listed
    return f"layer{'s' * many} {listed}".replace("-", "–") if listed else ""


def _row_dicts(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as dicts from column name to value."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _frame_of_rows(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
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

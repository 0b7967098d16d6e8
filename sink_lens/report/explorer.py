"""The explorer: circuits on a page to zoom, search, filter, label, group, compare and save.

A circuit is shown as an attribution graph in Neuronpedia's JSON (``circuit.save("c.graph.json")``); what that format
has no place for stands in ``metadata.sink_lens``, in ``qParams.sink_lens`` (the view) and in further fields of a link.
The page saves and opens the same JSON, so that labels, groups and whatever else a file holds come back unchanged.

A link's ``weight`` is a score, or the share of the sink that a path carries; ``via`` says what reads it (q, k, v, g).
With spans of positions there is one node for each span, whose place among them is ``ctx_idx``.
"""

import base64
import gzip
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from sink_lens.records.provenance import plain_json
from sink_lens.report import views
from sink_lens.text import edge_name, visible

_MOST = 20_000
"""Edges that a page to explore a circuit in holds."""
CURVE = ("by", "share", "n", "faithfulness", "low", "high")
"""What a graph holds of each circuit of the curve."""
_HERE = Path(__file__).parent
_NODE = re.compile(r"(?P<kind>[am])(?P<layer>\d+)(?:\.(?P<part>h|kv|n)(?P<head>\d*))?")
_TYPES = {"h": "attention head", "kv": "key-value head", "n": "neurons"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explorer:
    """A page of one circuit, or of two beside each other; a notebook shows it by itself."""

    graphs: Sequence[Mapping[str, Any]] = field(repr=False)
    """The circuits as Neuronpedia's JSON."""

    @property
    def html(self) -> str:
        """The whole page, which opens with no network."""
        title = " and ".join(title_of(graph) for graph in self.graphs)
        code = script(self.graphs)
        return (
            templates()
            .get_template("explorer_page.html")
            .render(title=title, code=code, hashes=views.hashes(code, bundle()), both=len(self.graphs) > 1)
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to a file that ends with .html, and return its path; folders are made.

        Raises:
            InputError: another ending, or a file that belongs to a run.
        """
        return views.write_page(self.html, path)

    def _repr_html_(self) -> str:
        return views.frame_html(self.html, height=900, title="Circuit explorer", also="allow-downloads allow-modals")


def curve_rows(curve: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a curve as dicts, as the graph in JSON holds them."""
    return [{name: _json_cell(row[name]) for name in CURVE} for row in curve.to_dict("records")]


def pattern_base64(pattern: np.ndarray) -> str:
    """The lower triangle of a pattern as a graph holds it: row by row, a byte for each (255 is all), in base64."""
    past = pattern[np.tril_indices(len(pattern))].astype(float)
    return base64.b64encode((255 * past).round().clip(0, 255).astype(np.uint8).tobytes()).decode()


def title_of(graph: Mapping[str, Any]) -> str:
    """The title of a graph: ours, else its slug."""
    metadata = graph["metadata"]
    return visible(metadata.get("sink_lens", {}).get("title") or metadata.get("slug") or "A graph", limit=120)


def edges_to_explore(edges: pd.DataFrame) -> pd.DataFrame:
    """As many edges as a page holds: those of the circuit, then the largest of the others."""
    order = np.lexsort([-edges["score"].abs(), ~edges["in_circuit"].to_numpy(bool)])
    return edges.iloc[order[:_MOST]]


def edge_graph(edges: pd.DataFrame, *, model: str, tokens: Sequence[str] = (), **about: Any) -> dict[str, Any]:
    """A circuit of edges as Neuronpedia's JSON.

    Its nodes are the input, heads, key-value heads that several heads share, MLPs and the logits. They have no feature
    of a dictionary. A node's influence is the share of the magnitude of all edges that its own carry.

    Args:
        edges: ``writer``, ``reader``, ``span`` and ``score``, and what else is known of an edge.
        model: its name.
        tokens: of the first prompt.
        **about: title, unit, n_layers, group (heads that share a key-value head), the curve, and the like.
    """
    spans = list(dict.fromkeys(map(str, edges["span"])))
    further = [name for name in ("standard_error", "inclusion", "in_circuit", "core") if name in edges.columns]
    last = max(len(tokens) - 1, 0)
    links, sizes = [], dict[tuple[str, str], float]()
    for row in edges.to_dict("records"):
        span, score = str(row["span"]), float(row["score"])
        reader, _, via = str(row["reader"]).partition("<")
        ends = [(str(row["writer"]), span), (reader, span)]
        for end in ends:
            sizes[end] = sizes.get(end, 0.0) + abs(score)
        source, target = (_node_id(*end) for end in ends)
        link = {"source": source, "target": target, "weight": _json_cell(score), "via": via.rstrip(">")}
        links.append(link | {name: _json_cell(row[name]) for name in further})
    total = sum(sizes.values()) or 1.0
    nodes = []
    for (name, span), size in sizes.items():
        layer, kind = _layer_and_type(name, n_layers=int(about["n_layers"]))
        at = spans.index(span) if len(spans) > 1 else last
        nodes.append(
            {
                "node_id": _node_id(name, span),
                "feature": None,
                "layer": layer,
                "ctx_idx": at,
                "feature_type": kind,
                "jsNodeId": f"{_node_id(name, span)}-{at}",
                "clerp": edge_name(_node_id(name, span)),
                "influence": size / total,
                "activation": None,
            }
        )
    named = {"spans": spans} if len(spans) > 1 else {}
    return _neuronpedia_json(nodes, links, model=model, tokens=tokens, **named, **about)


def chain_graph(nodes: pd.DataFrame, edges: pd.DataFrame, *, model: str, most: int = 8, **about: Any) -> dict[str, Any]:
    """A trace's chain as Neuronpedia's JSON: its paths and links, and of each node's parts the largest."""
    parts = nodes.loc[nodes["group"].ne("")].sort_values("value", key=abs, ascending=False, kind="stable")
    kept = [*nodes.loc[nodes["group"].eq(""), "id"], *parts.groupby("group").head(most)["id"]]
    paths = edges.loc[edges["source"].isin(kept) & edges["target"].isin(kept) & edges["value"].notna()]
    joined = {(row["source"], row["target"]) for row in paths.to_dict("records") if row["quantity"] == "path_share"}
    links = []
    for row in paths.to_dict("records"):
        if row["quantity"] == "intervention_share" and (row["source"], row["target"]) in joined:
            continue
        named = {name: _json_cell(row[name]) for name in ("quantity", "verdict", "control")}
        interval = {"low": _json_cell(row["ci_low"]), "high": _json_cell(row["ci_high"])}
        ends = {"source": row["source"], "target": row["target"], "weight": _json_cell(row["value"])}
        links.append(ends | interval | named | {"via": ""})
    shown = nodes.loc[nodes["id"].isin(kept)]
    rows = _depths(shown["id"].tolist(), links)
    for link in links:  # parts stand right below what they lead to
        if link["source"] in {*parts["id"]}:
            rows[link["source"]] = rows[link["target"]] - 1
    position = int(about.get("sink_position") or 0)
    drawn = []
    for row in shown.to_dict("records"):
        label = " ".join(str(row["label"]).split()) or row["id"]
        several = shown["label"].eq(row["label"]).sum() > 1
        layer = re.search(r"\d+", str(row["layers"]))
        detail = " ".join(f"{row['label']} {row['detail']} {row['layers']}".split())
        drawn.append(
            {
                "node_id": row["id"],
                "feature": None,
                "layer": layer[0] if layer else "E",
                "ctx_idx": position,
                "feature_type": row["kind"],
                "jsNodeId": f"{row['id']}-{position}",
                "clerp": f"{label}, {row['layers']}" if several else label,
                "influence": None,
                "activation": _json_cell(row["value"]),
                "detail": detail,
                "row": rows[row["id"]],
            }
        )
    return _neuronpedia_json(drawn, links, model=model, **about)


def _depths(nodes: Sequence[str], links: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Name of each node -> the length of the longest path to it; a circle ends where it began."""
    depth = dict.fromkeys(nodes, 0)
    for _ in nodes:
        moved = {one["target"]: depth[one["source"]] + 1 for one in sorted(links, key=lambda one: depth[one["source"]])}
        changed = {node: at for node, at in moved.items() if at > depth[node] and at < len(nodes)}
        if not changed:
            break
        depth |= changed
    return depth


def _neuronpedia_json(
    nodes: list[dict[str, Any]], links: list[dict[str, Any]], *, model: str, tokens: Sequence[str] = (), **about: Any
) -> dict[str, Any]:
    """Nodes and links as Neuronpedia's JSON, with the data that its pages show."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{about.get('title', 'circuit')}-{model}".lower()).strip("-")
    settings = {name: about[name] for name in ("method", "ablation") if name in about}
    return {
        "metadata": {
            "slug": slug,
            "scan": model,
            "prompt_tokens": list(tokens),
            "prompt": "".join(tokens),
            "info": {"description": about.get("title", ""), "generator": {"name": "sink_lens"}},
            "generation_settings": settings,
            "pruning_settings": {"edges": len(links)},
            "sink_lens": about,
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": nodes,
        "links": links,
    }


def _node_id(name: str, span: str) -> str:
    """A node's id: its name, and the token span at which it stands, if it has one."""
    return f"{name}@{span}" if span else name


def _layer_and_type(name: str, *, n_layers: int) -> tuple[str, str]:
    """Layer and type of a node, as Neuronpedia names them."""
    if name == "input":
        return "E", "embedding"
    match = _NODE.fullmatch(name)
    if match is None:
        return str(n_layers), "logit"
    return match["layer"], _TYPES[match["part"]] if match["part"] else "mlp"


def _json_cell(value: Any) -> Any:
    """A cell as JSON has it: numbers to six digits, undefined ones null."""
    if isinstance(value, bool) or (hasattr(value, "dtype") and value.dtype == bool):
        return bool(value)
    if isinstance(value, str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def script(graphs: Sequence[Mapping[str, Any]]) -> str:
    """The content of the script that shows some graphs; a content policy allows it and ``bundle()`` by their hashes."""
    packed = [
        base64.b64encode(
            gzip.compress(json.dumps(plain_json(graph), separators=(",", ":")).encode(), 6, mtime=0)
        ).decode()
        for graph in graphs
    ]
    return views.unpacking_script(
        bundle(), name="exploreCircuits", then=f"await exploreCircuits({json.dumps(packed)});"
    )


@cache
def bundle() -> str:
    """The JavaScript of the D3 library and of the explorer, which sets the function ``exploreCircuits``."""
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("vendor/d3.min.js", "explorer.js"))


@cache
def templates(folder: Path = _HERE) -> jinja2.Environment:
    """The environment of the Jinja templates in a folder; those of all pages by default."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

"""The explorer: circuits on a page to zoom, search, filter, label, group, compare and save.

A circuit is shown as an attribution graph in Neuronpedia's JSON (``circuit.save("c.graph.json")``); what that format
has no place for stands in ``metadata.sink_lens``, in ``qParams.sink_lens`` (the view) and in further fields of a link.
The page saves and opens the same JSON, so that labels, groups and whatever else a file holds come back unchanged.

A link's ``weight`` is a score; ``via`` says what reads it (q, k, v, g).
With spans of positions there is one node for each span, whose place among them is ``ctx_idx``.
"""

import base64
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..records.provenance import plain_json
from ..text import edge_label, safe_line
from .offline import (
    frame_html,
    gzip_base64,
    script_hashes,
    template_environment,
    unpacking_script,
    write_page,
)

_MOST = 20_000
CURVE = ("by", "share", "n", "faithfulness", "low", "high")
_HERE = Path(__file__).parent
_NODE = re.compile(r"(?P<kind>[am])(?P<layer>\d+)(?:\.(?P<part>h|kv|n)(?P<head>\d*))?")
_TYPES = {"h": "attention head", "kv": "key-value head", "n": "neurons"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explorer:
    """An interactive page of one circuit, or of two beside each other; a notebook shows it by itself."""

    graphs: Sequence[Mapping[str, Any]] = field(repr=False)
    """Neuronpedia's JSON of each."""

    @property
    def html(self) -> str:
        """The whole page, which opens without a network."""
        title = " and ".join(_graph_title(graph) for graph in self.graphs)
        code = explorer_script(self.graphs)
        hashes = script_hashes(code, explorer_javascript())
        template = template_environment().get_template("explorer_page.html")
        return template.render(title=title, code=code, hashes=hashes, both=len(self.graphs) > 1)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file that ends with .html and belongs to no run; return its path."""
        return write_page(self.html, path)

    def _repr_html_(self) -> str:
        return frame_html(
            self.html, height=900, title="Circuit explorer", also="allow-downloads allow-modals"
        )


def curve_rows(curve: pd.DataFrame) -> list[dict[str, Any]]:
    return [{name: _json_cell(row[name]) for name in CURVE} for row in curve.to_dict("records")]


def pattern_base64(pattern: np.ndarray) -> str:
    """Return the lower triangle of a pattern in base64: row by row, one byte per value (255 is 1.0)."""
    past = pattern[np.tril_indices(len(pattern))].astype(float)
    return base64.b64encode((255 * past).round().clip(0, 255).astype(np.uint8).tobytes()).decode()


def _graph_title(graph: Mapping[str, Any]) -> str:
    metadata = graph["metadata"]
    title = metadata.get("sink_lens", {}).get("title") or metadata.get("slug") or "A graph"
    return safe_line(title, limit=120)


def edges_for_page(edges: pd.DataFrame) -> pd.DataFrame:
    """Return as many edges as a page may hold: first those of the circuit, then the others by size of score."""
    order = np.lexsort([-edges["score"].abs(), ~edges["in_circuit"].to_numpy(bool)])
    return edges.iloc[order[:_MOST]]


def edge_graph(
    edges: pd.DataFrame, *, model: str, tokens: Sequence[str] = (), **about: Any
) -> dict[str, Any]:
    """Return a circuit of edges as a graph in Neuronpedia's JSON.

    Its nodes are the input, heads, key-value heads that several heads share, MLPs and the logits. A node's influence is
    the sum of its edges' magnitudes, over that of all edges. ``edges`` has ``writer``, ``reader``, ``span``, ``score``
    and further columns to keep; ``tokens`` are those of the first prompt; ``about`` has title, unit, n_layers, group
    (heads that share a key-value head), curve and further metadata.
    """
    spans = list(dict.fromkeys(map(str, edges["span"])))
    kept = ("standard_error", "inclusion", "in_circuit", "core")
    further = [name for name in kept if name in edges.columns]
    links, sizes = [], defaultdict[tuple[str, str], float](float)
    for row in edges.to_dict("records"):
        span, score = str(row["span"]), float(row["score"])
        reader, _, via = str(row["reader"]).partition("<")
        ends = [(str(row["writer"]), span), (reader, span)]
        for end in ends:
            sizes[end] += abs(score)
        source, target = (_node_id(*end) for end in ends)
        link = {
            "source": source,
            "target": target,
            "weight": _json_cell(score),
            "via": via.rstrip(">"),
        }
        links.append(link | {name: _json_cell(row[name]) for name in further})
    total = sum(sizes.values()) or 1.0
    nodes = []
    for (name, span), size in sizes.items():
        match = _NODE.fullmatch(name)
        if name == "input":
            layer, kind = "E", "embedding"
        elif match:
            layer, kind = match["layer"], _TYPES.get(match["part"], "mlp")
        else:
            layer, kind = str(about["n_layers"]), "logit"
        at = spans.index(span) if len(spans) > 1 else max(len(tokens) - 1, 0)
        node = _node_id(name, span)
        nodes.append(
            {
                "node_id": node,
                "feature": None,
                "layer": layer,
                "ctx_idx": at,
                "feature_type": kind,
                "jsNodeId": f"{node}-{at}",
                "clerp": edge_label(node),
                "influence": size / total,
                "activation": None,
            }
        )
    title = about.get("title", "")
    return {
        "metadata": {
            "slug": re.sub(r"[^a-z0-9]+", "-", f"{title}-{model}".lower()).strip("-"),
            "scan": model,
            "prompt_tokens": list(tokens),
            "prompt": "".join(tokens),
            "info": {"description": title, "generator": {"name": "sink_lens"}},
            "generation_settings": {
                name: about[name] for name in ("method", "ablation") if name in about
            },
            "pruning_settings": {"edges": len(links)},
            "sink_lens": ({"spans": spans} if len(spans) > 1 else {}) | about,
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": nodes,
        "links": links,
    }


def answer_fields(prompt: str, answer: Any, probability: Any) -> dict[str, Any]:
    if not isinstance(answer, str) or not answer:
        return {}
    return {
        "prompt": safe_line(prompt, limit=300),
        "answer": answer,
        "probability": _json_cell(probability),
    }


def _node_id(name: str, span: str) -> str:
    return f"{name}@{span}" if span else name


def _json_cell(value: Any) -> Any:
    """Convert a cell for JSON: numbers to six digits, undefined ones to None."""
    if isinstance(value, bool) or (hasattr(value, "dtype") and value.dtype == bool):
        return bool(value)
    if isinstance(value, str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def explorer_script(graphs: Sequence[Mapping[str, Any]]) -> str:
    texts = [json.dumps(plain_json(graph), separators=(",", ":")) for graph in graphs]
    then = f"await exploreCircuits({json.dumps(list(map(gzip_base64, texts)))});"
    return unpacking_script(explorer_javascript(), name="exploreCircuits", then=then)


@cache
def explorer_javascript() -> str:
    return "\n".join(
        (_HERE / name).read_text(encoding="utf-8") for name in ("vendor/d3.min.js", "explorer.js")
    )

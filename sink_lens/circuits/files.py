"""Formats of circuits that other programs read: EAP-IG's JSON and tensors, MIB's folder, and Graphviz.

EAP-IG's files hold all edges with score and whether they are in the circuit; its tensors are read with
``weights_only=True``. A folder such as ``ioi_gpt2`` is what MIB takes as a submission: ``importances.json`` inside.

EAP-IG has a key and a value for every query head. A key-value head that several heads share is written as one edge for
each of them, with equal parts of the score, and read back as their sum. Spans of positions are summed; a set of neurons
is written as a part of its MLP.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float

from ..errors import InputError, check_regular
from ..text import json_value, visible
from .graph import Graph

_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, EOFError),
    *(struct.error, UnpicklingError),
)

_COLOURS = {"q": "#7b3fa0", "k": "#2e8b57", "v": "#2b6cb0", "g": "#b8860b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCircuit:
    """A circuit as a file holds it: mean scores and the chosen edges."""

    graph: Graph
    scores: Float[np.ndarray, " edge"]
    chosen: Bool[np.ndarray, " edge"]


def write(circuit: SavedCircuit, path: Path) -> None:
    """Write EAP-IG's JSON or tensors, or a MIB folder if the path has no ending."""
    held = (circuit.graph, circuit.scores, circuit.chosen)
    if path.suffix.lower() == ".pt":
        torch.save(eap_ig_tensors(*held), path)
    elif path.suffix:
        path.write_text(eap_ig_json(*held), "utf-8")
    else:
        path.mkdir(exist_ok=True)
        (path / "importances.json").write_text(eap_ig_json(*held), "utf-8")


def read(path: str | Path, *, n_kv_heads: int | None = None) -> SavedCircuit:
    """Read a circuit of EAP-IG's JSON or tensors, or of a MIB folder with one file of importances.

    Args:
        path: the file or the folder.
        n_kv_heads: key-value heads of the model; edges of heads that share one are summed. Default: what a file of ours
            says, else one for each head.

    Raises:
        InputError: the file is none of these, or names edges that its graph lacks.
    """
    path = Path(path)
    if path.is_dir():
        found = [one for one in (path / "importances.json", path / "importances.pt") if one.is_file()]
        if not found:
            raise InputError(f"{path} has neither importances.json nor importances.pt; need a MIB folder of one file")
        path = found[0]
    check_regular(path, what="the file of the circuit")
    try:
        if path.suffix == ".pt":
            return _of_tensors(torch.load(path, weights_only=True, map_location="cpu"), n_kv_heads)
        return _of_json(json_value(path.read_text("utf-8")), n_kv_heads)
    except _UNREADABLE as error:
        raise InputError(
            f"{path} cannot be read as a circuit ({visible(f'{type(error).__name__}: {error}', limit=200)}); need "
            "EAP-IG's JSON or .pt"
        ) from None


def _plain(graph: Graph) -> Graph:
    """The graph that EAP-IG knows: one span, whole MLPs, a key and a value for every head."""
    if graph.gated:
        raise InputError("EAP-IG's format has no reader for the gate of a head's output; save as parquet or dot")
    return replace(graph, n_kv_heads=graph.n_heads, neurons={}, spans=("",))


def _spread(
    graph: Graph, values: Float[np.ndarray, " edge"], chosen: Bool[np.ndarray, " edge"]
) -> tuple[Graph, np.ndarray, np.ndarray]:
    """Scores and choice for EAP-IG's graph."""
    plain = _plain(graph)
    writers = {one.name: index for index, one in enumerate(plain.writers)}
    readers = {one.name: index for index, one in enumerate(plain.readers)}
    to_writer = np.array([writers[one.name.removesuffix(".n")] for one in graph.writers])
    to_readers = []
    for one in graph.readers:
        if one.kind in ("k", "v"):
            own = range(one.head * graph.group, (one.head + 1) * graph.group)
            to_readers.append([readers[f"a{one.layer}.h{head}<{one.kind}>"] for head in own])
        else:
            to_readers.append([readers[one.name.removesuffix(".n")]])
    shape = (len(plain.writers), len(plain.readers))
    scores, kept = np.zeros(shape), np.zeros(shape, dtype=bool)
    _, first, second = graph.ends
    for part in range(graph.group):
        several = np.array([len(some) > part for some in to_readers])[second]
        targets = np.array([some[min(part, len(some) - 1)] for some in to_readers])[second]
        share = np.array([1 / len(some) for some in to_readers])[second]
        np.add.at(scores, (to_writer[first[several]], targets[several]), (values * share)[several])
        np.logical_or.at(kept, (to_writer[first[several]], targets[several]), chosen[several])
    _, first, second = plain.ends
    return plain, scores[first, second], kept[first, second]


def _cfg(graph: Graph) -> dict[str, Any]:
    """The graph's sizes as EAP-IG writes them."""
    sizes = {"n_layers": graph.n_layers, "n_heads": graph.n_heads, "d_model": graph.d_model}
    return sizes | {"parallel_attn_mlp": graph.parallel}


def eap_ig_json(graph: Graph, values: Float[np.ndarray, " edge"], chosen: Bool[np.ndarray, " edge"]) -> str:
    """A circuit in EAP-IG's JSON, with the number of key-value heads beside it."""
    plain, scores, kept = _spread(graph, values, chosen)
    used = _used(plain, kept)
    edges = {
        str(name): {"score": float(score), "in_graph": bool(inside)}
        for name, score, inside in zip(plain.names, scores, kept, strict=True)
    }
    nodes = {name: {"in_graph": bool(inside)} for name, inside in used.items()}
    own = {"n_kv_heads": graph.n_kv_heads, "written_by": "sink_lens"}
    return json.dumps({"cfg": _cfg(graph), "nodes": nodes, "edges": edges, "sink_lens": own})


def _used(plain: Graph, kept: Bool[np.ndarray, " edge"]) -> dict[str, bool]:
    """Every node of EAP-IG's graph, and whether an edge of the circuit begins there, or ends at the logits."""
    _, first, second = plain.ends
    out = np.bincount(first[kept], minlength=len(plain.writers)) > 0
    found = {writer.name: bool(inside) for writer, inside in zip(plain.writers, out, strict=True)}
    return found | {"logits": bool((second[kept] == len(plain.readers) - 1).any())}


def eap_ig_tensors(
    graph: Graph, values: Float[np.ndarray, " edge"], chosen: Bool[np.ndarray, " edge"]
) -> dict[str, Any]:
    """A circuit as EAP-IG's tensors; what is no edge has the score 0 and is not in the circuit."""
    plain, scores, kept = _spread(graph, values, chosen)
    used = _used(plain, kept)
    matrix, mask = plain.matrix(scores)[0], plain.matrix(kept)[0]
    return {
        "cfg": _cfg(graph),
        "src_nodes": [writer.name for writer in plain.writers],
        "dst_nodes": [reader.name for reader in plain.readers],
        "edges_scores": torch.from_numpy(matrix.astype(np.float32)),
        "edges_in_graph": torch.from_numpy(mask.astype(bool)),
        "nodes_in_graph": torch.tensor([used[writer.name] for writer in plain.writers]),
        "n_kv_heads": graph.n_kv_heads,
    }


def _share_key_values(
    cfg: Mapping[str, Any], n_kv_heads: int | None, scores: np.ndarray, kept: np.ndarray
) -> SavedCircuit:
    """A circuit with shared key-value heads from one with a key and a value for every head."""
    n_heads = int(cfg["n_heads"])
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{n_kv_heads} key-value heads for {n_heads} heads")
    sizes: dict[str, Any] = {name: int(cfg[name]) for name in ("n_layers", "n_heads", "d_model")}
    graph = Graph(**sizes, n_kv_heads=n_kv_heads, parallel=bool(cfg.get("parallel_attn_mlp", False)))
    plain = _plain(graph)
    rows = {reader.name: index for index, reader in enumerate(graph.readers)}
    word = "h" if graph.group == 1 else "kv"
    to_reader = np.array(
        [
            rows[f"a{one.layer}.{word}{one.head // graph.group}<{one.kind}>" if one.kind in ("k", "v") else one.name]
            for one in plain.readers
        ]
    )
    shape = (len(graph.writers), len(graph.readers))
    total, inside = np.zeros(shape), np.zeros(shape, dtype=bool)
    _, first, second = plain.ends
    np.add.at(total, (first, to_reader[second]), scores)
    np.logical_or.at(inside, (first, to_reader[second]), kept)
    _, first, second = graph.ends
    return SavedCircuit(graph=graph, scores=total[first, second], chosen=inside[first, second])


def _of_json(held: Mapping[str, Any], n_kv_heads: int | None) -> SavedCircuit:
    """The circuit of EAP-IG's JSON."""
    cfg, edges = held["cfg"], held["edges"]
    sizes: dict[str, Any] = {name: int(cfg[name]) for name in ("n_layers", "n_heads", "d_model")}
    plain = Graph(**sizes, n_kv_heads=sizes["n_heads"], parallel=bool(cfg.get("parallel_attn_mlp", False)))
    unknown = [name for name in edges if name not in plain.index]
    if unknown:
        raise ValueError(f"{len(unknown)} edges are not in its graph, such as {unknown[0]!r}")
    scores, kept = np.zeros(plain.n_edges), np.zeros(plain.n_edges, dtype=bool)
    for name, edge in edges.items():
        at = plain.index[name]
        scores[at], kept[at] = float(edge["score"]), bool(edge["in_graph"])
    own = held.get("sink_lens", {}).get("n_kv_heads")
    return _share_key_values(cfg, own if n_kv_heads is None else n_kv_heads, scores, kept)


def _of_tensors(held: Mapping[str, Any], n_kv_heads: int | None) -> SavedCircuit:
    """The circuit of EAP-IG's .pt file."""
    cfg = held["cfg"]
    sizes: dict[str, Any] = {name: int(cfg[name]) for name in ("n_layers", "n_heads", "d_model")}
    plain = Graph(**sizes, n_kv_heads=sizes["n_heads"], parallel=bool(cfg.get("parallel_attn_mlp", False)))
    scores, kept = held["edges_scores"].double().numpy(), held["edges_in_graph"].bool().numpy()
    if scores.shape != (len(plain.writers), len(plain.readers)) or kept.shape != scores.shape:
        raise ValueError(f"scores of the shape {scores.shape}; its graph has {len(plain.writers)} writers")
    _, first, second = plain.ends
    own = held.get("n_kv_heads")
    return _share_key_values(cfg, own if n_kv_heads is None else n_kv_heads, scores[first, second], kept[first, second])


def dot(edges: pd.DataFrame, *, group: int) -> str:
    """The edges as Graphviz: queries purple, keys green, values blue, all that lower the metric dashed in red.

    A dotted line goes from keys and values that a ``group`` of heads shares to each of those heads.
    """
    lines = ["digraph circuit {", "  rankdir=BT; node [shape=box, style=rounded, fontname=Helvetica];"]
    largest = float(np.abs(edges["score"].to_numpy(float)).max()) if len(edges) else 1.0
    for row in edges.to_dict("records"):
        node, _, kind = str(row["reader"]).partition("<")
        score = float(row["score"])
        colour = "#c0392b" if score < 0 else _COLOURS.get(kind.rstrip(">"), "#555555")
        width = 0.5 + 4.5 * abs(score) / (largest or 1.0)
        style = ", style=dashed" if score < 0 else ""
        tip = f"{row['edge']}: {score:.4g}"
        lines.append(
            f'  "{row["writer"]}" -> "{node}" [color="{colour}", penwidth={width:.2f}{style}, tooltip="{tip}"];'
        )
    readers, writers = (dict.fromkeys(str(one).partition("<")[0] for one in edges[end]) for end in ("reader", "writer"))
    for layer, _, shared in (node.partition(".kv") for node in readers if ".kv" in node):
        heads = (f"{layer}.h{head}" for head in range(int(shared) * group, (int(shared) + 1) * group))
        there = [head for head in heads if head in writers]
        lines += [f'  "{layer}.kv{shared}" -> "{head}" [color="#999999", style=dotted];' for head in there]
    return "\n".join([*lines, "}"]) + "\n"

"""Circuits as files: EAP-IG's JSON and tensors, MIB's folder, our tables, a paper's list of edges or heads.

EAP-IG's tensors are only read, with ``weights_only=True``. A folder is what MIB takes as a submission:
``importances.json`` inside.

EAP-IG has a key and a value for every query head. A key-value head that several heads share is written as one edge for
each of them, with equal parts of the score, and read back as their sum: in the circuit if one of them is, which
``read`` warns of where others are not. Spans of positions are summed; a set of neurons is written as a part of its MLP.
A ``.csv`` lists the edges of a circuit (a column ``edge``, and ``score`` if it is known), or its nodes (``node``, such
as a9.h9 or m5; or ``layer`` and ``head``): then all edges between these are in it. Lists of heads alone, as papers have
them, leave every MLP in.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float

from ..errors import InputError, SinkLensError
from ..files import check_regular_file, parse_json
from ..records import read_run
from ..stats import sort_by_magnitude
from ..text import as_ranges, plural, safe_line
from .choice import edges_between
from .graph import EdgeMask, EdgeValues, Graph, Node

if TYPE_CHECKING:
    from ..models.load import ModelLike

_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    EOFError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCircuit:
    """A circuit as a file holds it."""

    graph: Graph
    scores: EdgeValues = field(repr=False)
    """Mean score of each edge; 0 where the file gives none."""
    chosen: EdgeMask = field(repr=False)
    found_on: str = ""
    """Hash of the sequences whose scores chose it; empty where the file does not say."""

    @property
    def n_edges(self) -> int:
        """Number of chosen edges."""
        return int(self.chosen.sum())

    @property
    def sha256(self) -> str:
        """Hash of the circuit's edges and scores, the same for all file formats."""
        held = self.chosen.tobytes() + self.scores.astype(float).tobytes()
        return hashlib.sha256(held).hexdigest()

    @property
    def edges(self) -> pd.DataFrame:
        """Table of the circuit's edges, the largest score first: ``edge`` and ``score``."""
        found = pd.DataFrame(
            {"edge": self.graph.names[self.chosen], "score": self.scores[self.chosen].astype(float)}
        )
        return sort_by_magnitude(found, "score").reset_index(drop=True)

    def map_to_graph(self, graph: Graph) -> "SavedCircuit":
        """Return the same circuit in a model's graph.

        Edges without a span of positions are put into every span, and those of a whole MLP into each of its neurons.

        Raises:
            InputError: the graph lacks one of the circuit's edges, or its neurons.
        """
        every, own = self.graph.spans == ("",), self.graph.neurons
        if not own.keys() <= graph.neurons.keys():
            raise InputError(
                f"neurons of the layers {as_ranges(sorted(own))} are nodes of the circuit, and not of the model; need "
                "the same neurons=..."
            )
        whole = rf"\bm({'|'.join(str(one) for one in graph.neurons if one not in own)})\.n"
        names = [re.sub(whole, r"m\1", name) for name in graph.names.tolist()]
        names = [name.partition("@")[0] if every else name for name in names]
        at = np.array([self.graph.index.get(name, -1) for name in names])
        if lost := sorted(set(self.graph.names[self.chosen].tolist()) - set(names)):
            raise InputError(
                f"the circuit has {len(lost)} edges that the model lacks, such as {lost[0]}: it is one of "
                f"{_sizes_text(self.graph)}, and the model has {_sizes_text(graph)}. Need a circuit of this model"
            )
        there = at >= 0
        scores, chosen = np.where(there, self.scores[at], 0.0), there & self.chosen[at]
        return replace(self, graph=graph, scores=scores, chosen=chosen)

    def save(self, path: str | Path) -> Path:
        """Write the circuit as EAP-IG's .json, or as a MIB folder if the path has no ending; return the path."""
        path, graph = Path(path), self.graph
        if path.suffix.lower() not in ("", ".json"):
            raise InputError(
                f"{path} ends in {path.suffix}; need .json (EAP-IG), or a folder (MIB)"
            )
        if graph.gated:
            raise InputError(
                "EAP-IG's format has no reader for the gate of a head's output; save as parquet"
            )
        # one span, whole MLPs, a key and value for every head; the score of a shared one is divided among its heads
        plain = replace(graph, n_kv_heads=graph.n_heads, neurons={}, spans=("",))
        writers, readers = _match_nodes(graph, plain)
        shares = readers / readers.sum(1, keepdims=True)
        scores = writers.T @ graph.matrix(self.scores.astype(float)).sum(0) @ shares
        kept = writers.T @ graph.matrix(self.chosen.astype(float)).sum(0) @ readers > 0
        _, *ends = plain.ends
        of_edges = zip(plain.names, scores[*ends].tolist(), kept[*ends].tolist(), strict=True)
        used = [*kept.any(1), kept[:, -1].any()]  # the last reader is the logits
        names = [*(writer.name for writer in plain.writers), "logits"]
        held = {
            "cfg": {
                "n_layers": plain.n_layers,
                "n_heads": plain.n_heads,
                "d_model": plain.d_model,
                "parallel_attn_mlp": plain.parallel,
            },
            "nodes": {
                name: {"in_graph": bool(inside)} for name, inside in zip(names, used, strict=True)
            },
            "edges": {
                name: {"score": score, "in_graph": inside} for name, score, inside in of_edges
            },
            "sink_lens": {"n_kv_heads": graph.n_kv_heads, "written_by": "sink_lens"},
        }
        if not path.suffix:
            path.mkdir(exist_ok=True)
        file = path if path.suffix else path / "importances.json"
        file.write_text(json.dumps(held), "utf-8")
        return path


def _sizes_text(graph: Graph) -> str:
    spans = f", in the spans {', '.join(graph.spans)}" * (graph.spans != ("",))
    heads = f"{graph.n_heads} heads and {graph.n_kv_heads} key-value heads"
    return f"{graph.n_layers} layers with {heads}{spans}"


def read(path: str | Path, *, model: "ModelLike | None" = None) -> SavedCircuit:
    """Read a circuit from a file or folder.

    Args:
        path: EAP-IG's JSON or ``.pt`` (no code in it is run), a MIB folder, a run folder, a ``.parquet`` of every edge,
            or a ``.csv`` with a list of edges or nodes.
        model: the model: the circuit is one of its graph, in which edges of heads that share a key-value head are
            summed. A list needs it; without it, a file of EAP-IG's has a key-value head for each head.

    Raises:
        InputError: the file is none of these, or names edges that its graph lacks.
    """
    path, graph = Path(path), None
    if model is not None:
        from ..models.load import as_lens

        graph = Graph.of(as_lens(model))
    if path.is_dir():
        known = (path / name for name in ("run.json", "importances.json", "importances.pt"))
        found = [file for file in known if file.is_file()]
        if not found:
            raise InputError(
                f"{path} is no run and has neither importances.json nor importances.pt; need one of these"
            )
        path = found[0]
    check_regular_file(path, what="the file of the circuit")
    try:
        if path.suffix == ".csv":
            return _circuit_from_list(pd.read_csv(path, dtype=str, keep_default_na=False), graph)
        if path.suffix == ".pt":
            circuit = _circuit_from_tensors(path, graph)
        elif path.name == "run.json":
            run = read_run(path.parent)
            circuit = _circuit_from_table(
                run.need("edges", columns=_NEEDED), run.provenance.get("d_model")
            )
            if not run.config.get("circuit"):
                circuit = replace(circuit, found_on=str(run.provenance.get("tokens_sha256") or ""))
        elif path.suffix == ".parquet":
            frame = pd.read_parquet(path)
            circuit = _circuit_from_table(frame, frame.attrs.get("d_model"))
        else:
            circuit = _circuit_from_json(parse_json(path.read_text("utf-8")), graph)
    except SinkLensError:
        raise
    except _UNREADABLE as error:
        raise InputError(
            f"{path} cannot be read as a circuit ({safe_line(f'{type(error).__name__}: {error}', limit=200)}); need "
            "EAP-IG's JSON or .pt, a run folder, our .parquet, or a .csv with a column edge, node, or layer and head"
        ) from None
    if graph is None:
        return circuit
    own = circuit.graph  # spans and neurons of its own are compared where the circuit is judged
    return circuit.map_to_graph(replace(graph, spans=own.spans, neurons=own.neurons))


_MOST_UNLISTED = 100
"""A file without its model lists at least one of so many edges."""
_NEEDED = ["edge", "score", "in_circuit"]
_HEAD = re.compile(r"[aAL]?(\d+)(?:\.[hH]?|[hH])(\d+)")
_MLP = re.compile(r"(?:m|mlp|MLP)(\d+)")


def _circuit_from_table(frame: pd.DataFrame, d_model: int | None) -> SavedCircuit:
    names = [str(name) for name in frame["edge"]]
    ends = [tuple(name.partition("@")[0].split("->")) for name in names]
    writers, readers = ({one[at] for one in ends} for at in (0, 1))
    heads = [tuple(map(int, one[1:].split(".h"))) for one in writers if one.startswith("a")]
    shared = [int(one.split(".kv")[1].split("<")[0]) for one in readers if ".kv" in one]
    n_layers, n_heads = (1 + max(one[at] for one in heads) for at in (0, 1))
    if n_heads * n_layers > len(heads):
        raise ValueError(f"its {len(names)} edges are not all edges of a model")
    graph = Graph(
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=1 + max(shared) if shared else n_heads,
        d_model=int(d_model or 0),
        parallel=("a0.h0", "m0") not in ends,
        gated=any(one.endswith("<g>") for one in readers),
        neurons={int(one[1:-2]): () for one in writers if one.endswith(".n")},
        spans=tuple(dict.fromkeys(name.partition("@")[2] for name in names)),
    )
    if names != graph.names.tolist():
        raise ValueError(f"its {len(names)} edges are not all edges of {_sizes_text(graph)}")
    chosen, scores = frame["in_circuit"].to_numpy(bool), frame["score"].to_numpy(float)
    return SavedCircuit(graph=graph, scores=scores, chosen=chosen)


def _circuit_from_list(frame: pd.DataFrame, graph: Graph | None) -> SavedCircuit:
    if graph is None:
        raise InputError(
            "a list of edges or nodes does not say what the model's graph is; need the model: model=..."
        )
    chosen, scores = np.zeros(graph.n_edges, dtype=bool), np.zeros(graph.n_edges)
    if "edge" in frame:
        for number, row in enumerate(frame.to_dict("records"), 2):
            at = graph.index.get(_with_shared_kv_head(str(row["edge"]).strip(), graph))
            if at is None:
                raise ValueError(
                    f"line {number}: {row['edge']!r} is no edge of the model, such as {graph.names[0]}"
                )
            chosen[at] |= str(row.get("in_circuit", "true")).lower() in ("true", "1", "yes")
            scores[at] += float(row.get("score", 0.0))
        return SavedCircuit(graph=graph, scores=scores, chosen=chosen)
    if "node" not in frame and not {"layer", "head"} <= set(frame.columns):
        raise ValueError(f"its columns are {', '.join(map(str, frame.columns))}")
    names = frame["node"] if "node" in frame else frame["layer"] + "." + frame["head"]
    nodes = {_convert_node_name(name.replace(" ", "")) for name in names} - {"input", "logits"}
    if not any(one.startswith("m") for one in nodes):
        nodes |= {f"m{layer}" for layer in range(graph.n_layers)}
    known = [writer.name for writer in graph.writers]
    if unknown := sorted(nodes - set(known)):
        raise ValueError(f"{unknown[0]!r} is no node of the model, which has {_sizes_text(graph)}")
    chosen = edges_between(graph, np.isin(known, sorted(nodes)))
    return SavedCircuit(graph=graph, scores=scores, chosen=chosen)


def _convert_node_name(name: str) -> str:
    """Return the library's name of a node: a9.h9 for 9.9, L9H9 and L9.H9; m5 for MLP5; any other name as it is."""
    if head := _HEAD.fullmatch(name):
        return f"a{head[1]}.h{head[2]}"
    mlp = _MLP.fullmatch(name)
    return f"m{mlp[1]}" if mlp else name


def _with_shared_kv_head(name: str, graph: Graph) -> str:
    """Return an edge's or reader's name in ``graph``: a head's own key or value becomes that of its key-value head."""
    reader = re.fullmatch(r"(.*a\d+)\.h(\d+)<([kv])>", name)
    if reader is None or graph.heads_per_key == 1:
        return name
    return f"{reader[1]}.kv{int(reader[2]) // graph.heads_per_key}<{reader[3]}>"


def _match_nodes(graph: Graph, plain: Graph) -> tuple[np.ndarray, np.ndarray]:
    def match(own: Sequence[Node], others: Sequence[Node]) -> np.ndarray:
        names = np.array([one.name.removesuffix(".n") for one in own])
        return names[:, None] == [_with_shared_kv_head(one.name, graph) for one in others]

    return match(graph.writers, plain.writers), match(graph.readers, plain.readers)


def _convert_from_eap_ig(
    plain: Graph,
    scores: Float[np.ndarray, "writer reader"],
    kept: Bool[np.ndarray, "writer reader"],
    *,
    n_kv_heads: int | None,
) -> SavedCircuit:
    """Convert EAP-IG's circuit, with keys and values for every head in ``plain``, to ``n_kv_heads`` shared ones."""
    n_kv_heads = plain.n_heads if n_kv_heads is None else n_kv_heads
    if n_kv_heads < 1 or plain.n_heads % n_kv_heads:
        raise ValueError(f"{n_kv_heads} key-value heads for {plain.n_heads} heads")
    graph = replace(plain, n_kv_heads=n_kv_heads)
    heads = _match_nodes(graph, plain)[1].T.astype(float)
    inside, lacks = kept @ heads > 0, ~kept @ heads > 0
    if parted := int((inside & lacks).sum()):
        warnings.warn(
            f"the file has {plural(parted, 'edge')} to a key or value for some of the heads that share it and not for "
            "others; a shared key-value head is one here and reads the edge for all, so the circuit is larger than the "
            "file's, and keeps another share of the metric than EAP-IG's own code says",
            stacklevel=4,
        )
    _, *ends = graph.ends
    return SavedCircuit(graph=graph, scores=(scores @ heads)[*ends], chosen=inside[*ends])


def _eap_ig_graph(cfg: Mapping[str, Any], *, model: Graph | None, n_listed: int) -> Graph:
    """Make the graph of EAP-IG's file from its sizes ``cfg``: those of ``model``, or bounded by ``n_listed`` edges."""
    sizes: dict[str, Any] = {name: int(cfg[name]) for name in ("n_layers", "n_heads", "d_model")}
    layers, heads = sizes["n_layers"], sizes["n_heads"]
    said = f"{layers:,} layers with {heads:,} heads"
    if layers < 1 or heads < 1:
        raise ValueError(f"it is of a model with {said}")
    if model is not None and (layers, heads) != (model.n_layers, model.n_heads):
        raise InputError(
            f"the circuit is of {said}, and the model has {_sizes_text(model)}. Need one of this model"
        )
    if model is None and (layers * heads) ** 2 > _MOST_UNLISTED * (n_listed + 1000):
        raise InputError(
            f"the circuit has {n_listed:,} edges and is of {said}; need the model for it: model=..."
        )
    return Graph(**sizes, n_kv_heads=heads, parallel=bool(cfg.get("parallel_attn_mlp", False)))


def _circuit_from_json(held: Mapping[str, Any], graph: Graph | None) -> SavedCircuit:
    edges, n_kv_heads = held["edges"], None if graph is None else graph.n_kv_heads
    plain = _eap_ig_graph(held["cfg"], model=graph, n_listed=len(edges))
    if unknown := [name for name in edges if name not in plain.index]:
        raise ValueError(f"{len(unknown)} edges are not in its graph, such as {unknown[0]!r}")
    scores, kept = np.zeros(plain.n_edges), np.zeros(plain.n_edges, dtype=bool)
    for name, edge in edges.items():
        at = plain.index[name]
        scores[at], kept[at] = float(edge["score"]), bool(edge["in_graph"])
    if n_kv_heads is None:
        n_kv_heads = held.get("sink_lens", {}).get("n_kv_heads")
    return _convert_from_eap_ig(
        plain, plain.matrix(scores)[0], plain.matrix(kept)[0], n_kv_heads=n_kv_heads
    )


def _circuit_from_tensors(path: Path, graph: Graph | None) -> SavedCircuit:
    try:
        held = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001 - the kinds are those of torch and of the pickle format
        raise ValueError(
            f"damaged, or more than tensors, texts and numbers: {str(error).splitlines()[:1]}"
        ) from None
    scores, kept = held["edges_scores"], held["edges_in_graph"].bool()
    plain = _eap_ig_graph(held["cfg"], model=graph, n_listed=scores.numel())
    if scores.shape != (len(plain.writers), len(plain.readers)) or kept.shape != scores.shape:
        raise ValueError(
            f"scores of the shape {tuple(scores.shape)}; its graph has {len(plain.writers)} writers"
        )
    n_kv_heads = None if graph is None else graph.n_kv_heads
    return _convert_from_eap_ig(plain, scores.double().numpy(), kept.numpy(), n_kv_heads=n_kv_heads)

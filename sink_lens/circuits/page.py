"""The page of a run of ``circuit``: its title, sentences, figures and tables."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..lazy import import_object
from ..records import Run
from ..report.explorer import (
    CURVE,
    answer_fields,
    curve_rows,
    edge_graph,
    edges_for_page,
    pattern_base64,
)
from ..report.page import (
    Drawn,
    Listed,
    Page,
    PageTable,
    has_table,
    page_table,
    paper_figure,
    rest_note,
    table_maker,
    table_reader,
)
from ..text import (
    as_text,
    capitalise,
    edge_label,
    name_in_words,
    node_label,
    safe_line,
    token_text,
)
from .config import SIZES
from .picture import EdgeCircuit, draw_curve, place_of_node
from .sentences import (
    are_scores_complete,
    circuit_sentences,
    edge_count_text,
    faithfulness_text,
    is_gap_clear,
)


def read_edge_circuit(run: Run) -> EdgeCircuit:
    heads, kv_heads = (int(run.provenance.get(name) or 1) for name in ("n_heads", "n_kv_heads"))
    group = max(1, heads // kv_heads)
    circuit = run.need("circuit", columns=["writer", "reader", "score"])
    title = f"{_title(run)}, {safe_line(run.provenance.get('model') or 'a model', limit=40)}"
    return EdgeCircuit(
        edges=circuit,
        read_nodes=partial(run.need, "nodes", columns=["node", "score"]),
        metric=name_in_words(_metric_name(run)),
        title=title,
        make_graph=partial(_explorer_json, run, title=title, group=group),
        # late: it imports torch
        read_saved=lambda: import_object("sink_lens.circuits.files:read")(run.folder),
        read_every=partial(_read_every, run),
        n_layers=int(run.provenance.get("n_layers") or 0),
        group=group,
        outputs=_output_readers(run, circuit),
    )


def _metric_name(run: Run) -> str:
    default = "sink_mass" if run.config.get("task") == "text" else "logit_difference"
    return str(run.config.get("metric") or default)


def _output_readers(run: Run, edges: pd.DataFrame) -> list[str]:
    """Return the readers in ``edges`` that the metric depends on."""
    if _metric_name(run) != "sink_mass":
        return ["logits"]
    layers = run.config.get("metric_layers")
    return [
        one
        for one in edges["reader"].drop_duplicates().astype(str)
        if one[-3:] in ("<q>", "<k>") and (layers is None or place_of_node(one)[0] in layers)
    ]


def _read_every(run: Run) -> pd.DataFrame:
    every = run.need("edges", columns=["edge", "score", "in_circuit"])
    every.attrs["d_model"] = run.provenance.get("d_model")
    return every


def _explorer_json(run: Run, others: bool, *, title: str, group: int) -> dict[str, Any]:
    """Return the JSON from which the explorer draws: the circuit's edges, and the largest ``others`` if True."""
    edges = run.need("edges", columns=["edge", "writer", "reader", "span", "score", "in_circuit"])
    core = run.optional("core", columns=["edge", "core"])
    curve = run.optional("curve", columns=CURVE)
    prompt = run.optional("prompt", columns=["position", "text"])
    summary = run.optional("summary", columns=["answer", "answer_probability"])
    told = {} if summary is None or not len(summary) else summary.to_dict("records")[0]
    texts = () if prompt is None else prompt["text"].astype(str).tolist()
    config = run.config
    largest = edges_for_page(edges) if others else edges.loc[edges["in_circuit"].to_numpy(bool)]
    if core is not None:
        largest = largest.merge(
            core[["edge", "core"]].astype({"core": object}), how="left", on="edge"
        )
    return edge_graph(
        largest,
        model=safe_line(run.provenance.get("model") or "a model", limit=80),
        tokens=texts,
        **answer_fields("".join(texts), told.get("answer"), told.get("answer_probability")),
        title=title,
        n_layers=int(run.provenance.get("n_layers") or 0),
        group=group,
        n_edges=len(edges),
        size=config.get("edges") or int(edges["in_circuit"].to_numpy(bool).sum()),
        method=config.get("method"),
        outputs=_output_readers(run, largest),
        curve=[] if curve is None else curve_rows(curve),
        attention=_attention_json(run),
    )


def _attention_json(run: Run) -> dict[str, Any]:
    parts = run.optional(
        "attention", columns=["head", "query", "key", "advantage", "side", "by", "part", "value"]
    )
    if parts is None or not len(parts):
        return {}
    patterns = run.tensors("attention_patterns")
    by_head = {}
    for head, own in parts.groupby("head", sort=False):
        if str(head) in patterns:
            why = own[["side", "by", "value"]].assign(part=own["part"].map(node_label))
            by_head[str(head)] = {
                **own[["query", "key", "advantage"]].iloc[0].astype(float).to_dict(),
                "pattern": pattern_base64(patterns[str(head)]),
                "why": why.to_dict("records"),
            }
    return by_head


def _title(run: Run) -> str:
    task = str(run.config.get("task", ""))
    metric = name_in_words(str(run.config.get("metric") or ""))
    what = {"text": metric or "the sink", "file": "the pairs"}.get(task, safe_line(task))
    table = run.optional(
        "summary",
        columns=["gap_low", "gap_high", "edges", "asked_edges", "all_edges", "metric", "rule"],
    )
    if table is None or not len(table):
        return f"The circuit of {what}"
    row = table.to_dict("records")[0]
    if not is_gap_clear(row):
        return f"The circuit of {what}: what it carries is undefined"
    kept = f"keep {faithfulness_text(row)} of what all edges add to the {name_in_words(str(row['metric']))}"
    if row["rule"] == "none":
        some = f"; {edge_count_text(row)} {kept}" * (row["asked_edges"] < row["all_edges"])
        return f"{capitalise(what)}: no size below all edges is enough{some}"
    return f"The circuit of {what}: {edge_count_text(row)} {kept}"


def _headline(run: Run) -> list[str]:
    summary = run.need("summary", columns=["edges", "cpr", "completeness"])
    sentences = list(circuit_sentences(summary, sizes=run.config.get("sizes") or SIZES))
    nodes = run.optional("nodes", columns=["node", "kind", "score"])
    heads = [] if nodes is None else nodes.loc[nodes["kind"].eq("head")].head(4).to_dict("records")
    if heads:
        named = ", ".join(
            f"{node_label(str(row['node']))} ({as_text(float(row['score']))})" for row in heads
        )
        complete = are_scores_complete(summary.to_dict("records")[0])
        at = 1 if complete else 4  # behind what warns of the scores
        sentences.insert(at, f"Heads with the largest scores: {named}.")
    return sentences


def _curve_figure(run: Run) -> tuple[str, Figure]:
    see = (
        "How much of the metric is left if only that many edges are kept and all others are replaced, on pairs "
        "that were not used to choose the edges. 1 is the whole model; above 1, the dropped edges lowered the "
        "metric. Bands are 95% intervals over pairs. Random circuits hardly ever connect input and output, and keep "
        "nothing; a tenth swapped is this circuit with a random tenth of its edges replaced by random ones between its "
        "own nodes."
    )
    return see, draw_curve(
        run.need("curve", columns=["by", "share", "faithfulness", "low", "high"])
    )


def _listed_table(
    key: str,
    title: str,
    name: str,
    see: str,
    heads: Mapping[str, str] | None = None,
    *,
    first: Sequence[str] = (),
) -> Listed:
    """Make a table of the page from the run's table ``name``, in which nodes and edges are named as in the pictures.

    ``heads``: column -> its heading, or None for all columns. ``first``: columns by whose magnitude rows are sorted.
    """

    def make(run: Run) -> tuple[str, PageTable]:
        table = run.need(name, columns=list(heads or ["edge"]))
        if first:
            table = table.sort_values(
                list(first), key=lambda one: one.abs(), ascending=False, ignore_index=True
            )
        part = "edge" if "edge" in table else "node"
        shown = table.assign(**{part: [edge_label(str(one)) for one in table[part]]})
        return see + rest_note(len(table), name), page_table(
            shown, heads or [str(column) for column in table.columns]
        )

    return Listed(key=key, title=title, make=make, when=has_table(name))


def _pair_table(run: Run) -> tuple[str, PageTable]:
    table = run.need("pairs", columns=["clean", "corrupted", "correct", "incorrect"])
    heads = {
        "clean": "clean",
        "corrupted": "corrupted",
        "correct": "right",
        "incorrect": "wrong",
        "clean_value": "clean metric",
        "corrupted_value": "corrupted metric",
    }
    shown = table.assign(
        **{name: table[name].map(safe_line) for name in ("clean", "corrupted")},
        **{name: table[name].map(token_text) for name in ("correct", "incorrect")},
    )
    return "The prompts (a dot is a space)." + rest_note(len(table), "pairs"), page_table(
        shown, heads, most=8
    )


_SCORE = {"edge": "edge", "score": "score"}
CIRCUIT = Page(
    circuit=read_edge_circuit,
    explore=lambda run: read_edge_circuit(run).graph,
    title=_title,
    headline=_headline,
    figures=(
        Drawn(
            key="circuit",
            title="The circuit",
            make=lambda run: ("", read_edge_circuit(run).draw()),
            data=table_reader("circuit"),
            on_page=False,
        ),
        paper_figure(read_edge_circuit, data=table_reader("circuit")),
        Drawn(
            key="curve", title="How faithful it is", make=_curve_figure, data=table_reader("curve")
        ),
    ),
    tables=(
        _listed_table(
            "edge-table",
            "Edges",
            "circuit",
            "The edges of the circuit, the largest first.",
            _SCORE
            | {
                "low": "from",
                "high": "to",
                "share": "of the difference",
                "inclusion": "in bootstraps",
            },
        ),
        _listed_table(
            "node-table",
            "Nodes",
            "nodes",
            "Nodes by the summed score of the edges that leave them.",
            {"node": "node", "score": "score", "edges_in": "edges in", "edges_out": "edges out"},
        ),
        Listed(
            key="curve-table",
            title="The curve",
            make=table_maker(
                "curve",
                "Every circuit that was run.",
                {
                    "by": "circuit of",
                    "share": "share",
                    "connected": "connected edges",
                    "nodes": "nodes",
                    "value": "metric",
                    "faithfulness": "faithfulness",
                    "low": "from",
                    "high": "to",
                },
                need=("by", "share", "connected", "faithfulness"),
            ),
        ),
        _listed_table(
            "check-table",
            "Scores beside real patches",
            "check",
            "Scores beside real patches of the same edge.",
            _SCORE | {"exact": "real patch", "error": "error", "drawn": "drawn from"},
        ),
        _listed_table(
            "node-check",
            "Real patches of nodes",
            "check_nodes",
            "What a real patch of every node does, beside the sum of its edges' scores.",
            {
                "node": "node",
                "score": "score",
                "exact": "real patch",
                "unseen": "not seen by gradients",
            },
            first=("unseen", "exact"),
        ),
        _listed_table(
            "core-table",
            "Core and contingent edges",
            "core",
            "Core edges first, then undecided ones, then contingent ones.",
        ),
        Listed(key="pair-table", title="The prompts", make=_pair_table),
    ),
)

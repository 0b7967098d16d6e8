"""A circuit that was found, ready to be drawn, saved and explored."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from ..report.explorer import answer_fields, curve_rows, edge_graph, edges_for_page
from ..text import name_in_words
from .curve import Curve
from .files import SavedCircuit
from .picture import EdgeCircuit

if TYPE_CHECKING:
    from .circuit import Circuit


def edge_circuit(circuit: "Circuit", *, most: int, curve: Curve | None) -> EdgeCircuit:
    graph, runs = circuit.graph, circuit.runs
    metric = name_in_words(runs.metric.name)
    title = f"The circuit of {metric}, {runs.lens.name}"
    outputs = [graph.readers[one].name for one in circuit.outputs]
    drawn = graph.names[circuit.strongest_edges(most)].tolist()

    def make_graph(others: bool) -> dict[str, Any]:
        tokens, every = runs.first_prompt_tokens, circuit.every_edge
        about = {} if curve is None else {"curve": curve_rows(curve.frame)}
        return edge_graph(
            edges_for_page(every) if others else every.loc[circuit.chosen],
            model=runs.lens.name,
            tokens=tokens,
            **answer_fields("".join(tokens), *circuit.first_answer),
            n_edges=graph.n_edges,
            ablation=runs.ablation,
            outputs=outputs,
            title=title,
            n_layers=graph.n_layers,
            group=graph.heads_per_key,
            size=circuit.size,
            method=circuit.scores.method,
            **about,
        )

    def read_every() -> pd.DataFrame:
        every = circuit.every_edge.copy()
        every.attrs["d_model"] = graph.d_model
        return every

    return EdgeCircuit(
        edges=circuit.edges.assign(drawn=lambda edges: edges["edge"].isin(drawn)),
        read_nodes=lambda: circuit.nodes,
        make_graph=make_graph,
        read_saved=lambda: SavedCircuit(
            graph=graph, scores=circuit.scores.mean, chosen=circuit.chosen
        ),
        read_every=read_every,
        title=title,
        metric=metric,
        outputs=outputs,
        n_layers=graph.n_layers,
        group=graph.heads_per_key,
    )

"""A circuit that was found, ready to be drawn, saved and explored."""

from collections.abc import Callable
from typing import Any

import pandas as pd

from ..report.explorer import answer_fields, edge_graph, edges_for_page
from ..text import name_in_words
from .files import SavedCircuit
from .picture import EdgeCircuit
from .runs import Runs


def edge_circuit(
    saved: SavedCircuit,
    *,
    runs: Runs,
    edges: pd.DataFrame,
    read_nodes: Callable[[], pd.DataFrame],
    read_every: Callable[[], pd.DataFrame],
    read_answer: Callable[[], tuple[str, float]],
    outputs: tuple[int, ...],
    **about: Any,
) -> EdgeCircuit:
    """Return what draws, saves and explores a circuit.

    ``edges`` are the circuit's, with a mark ``drawn``; ``read_answer`` gives the likeliest token after the first prompt
    and its probability; ``outputs`` are the readers that the metric depends on; ``about`` is for the page to explore.
    """
    graph, metric = saved.graph, name_in_words(runs.metric.name)
    title = f"The circuit of {metric}, {runs.lens.name}"
    shape = {"n_layers": graph.n_layers, "group": graph.heads_per_key}
    ends = [graph.readers[one].name for one in outputs]

    def make_graph(others: bool) -> dict[str, Any]:
        tokens, every = runs.first_prompt_tokens, read_every()
        return edge_graph(
            edges_for_page(every) if others else every.loc[saved.chosen],
            model=runs.lens.name,
            tokens=tokens,
            **answer_fields("".join(tokens), *read_answer()),
            n_edges=graph.n_edges,
            ablation=runs.ablation,
            outputs=ends,
            title=title,
            **shape,
            **about,
        )

    def read_with_width() -> pd.DataFrame:
        every = read_every().copy()
        every.attrs["d_model"] = graph.d_model
        return every

    return EdgeCircuit(
        edges=edges,
        read_nodes=read_nodes,
        make_graph=make_graph,
        read_saved=lambda: saved,
        read_every=read_with_width,
        title=title,
        metric=metric,
        outputs=ends,
        **shape,
    )

"""Exact scores: one edge at a time is really replaced, by the engine.

The run is the clean one, and reader r alone reads x_r - (c_w - a_w): its query, key, value or MLP input is set to what
this stream gives, and everything after it is computed as usual. That is path patching of a single edge (Goldowsky-Dill
et al., arXiv 2304.05969). The score is the clean metric minus the metric of this run. A whole writer is replaced for
all of its readers at once, at the place of the stream that it adds to.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ..edits.constructors import Edit, freeze
from ..edits.outcome import Outcome
from ..edits.references import References
from ..engine.cells import Cell
from ..engine.forward import run_with
from ..engine.trust import make_engine
from ..errors import InputError
from .graph import place_of_reader
from .runs import Progress, Runs
from .stream import Tensors, apply_norm, mlp_read_edits


def exact_scores(
    runs: Runs, edges: Sequence[int], *, advance: Progress = lambda done: None
) -> Float[np.ndarray, "pair edge"]:
    """Really patch each of ``edges`` (indices) alone, and return by how much the metric of each pair falls.

    Cost: two forwards, and for each edge one from its reader on. The outputs of all writers on all pairs are held in
    memory.

    Raises:
        InputError: a reader whose value has no site (a gate of a head's output).
    """
    runs.check_weights()
    lens, graph, every = runs.lens, runs.graph, slice(0, runs.n_pairs)
    begin, difference = runs.output_difference(every)
    sites = ["resid_pre", "attn_out", "resid_post"]
    if graph.neurons:
        sites += ["up"] if lens.family.gate is None else ["gate", "up"]
    streams = _clean_tensors(runs, sites, begin=begin)
    spans, writers, readers = graph.ends
    positions, masks = (
        tuple(range(begin, runs.clean.n_positions)),
        runs.span_masks(every, begin=begin),
    )

    def make_edits(references: References, *, edge: int) -> tuple[Edit, ...]:
        change = difference[:, writers[edge]] * masks[spans[edge]][..., None]
        return _reader_edits(runs, int(readers[edge]), streams, change, positions=positions)

    cells, sites_of_kinds = [], {"mlp": "mlp_in", "neurons": "mlp_in", "logits": "final"}
    for edge in edges:
        reader = graph.readers[int(readers[edge])]
        if reader.kind == "g":
            raise InputError(
                f"{reader.name} is the gate of a head's output, which has no site; need another edge"
            )
        site = sites_of_kinds.get(reader.kind, reader.kind)
        touches = ((site, None if site == "final" else (reader.layer,)),)
        cells.append(Cell(touches=touches, begin=begin, make=partial(make_edits, edge=edge)))
    return _metric_drops(runs, cells, advance=advance)


def exact_node_scores(
    runs: Runs, *, advance: Progress = lambda done: None
) -> Float[np.ndarray, "pair writer"]:
    """Ablate all of each writer, and return by how much the metric of each pair falls.

    Cost: three forwards, and for each writer one from its layer on.
    """
    runs.check_weights()
    every = slice(0, runs.n_pairs)
    begin, difference = runs.output_difference(every)
    difference *= runs.span_masks(every, begin=begin).sum(0)[:, None, :, None]
    sites = {"input": "resid_pre", "head": "attn_out", "mlp": "mlp_out", "neurons": "mlp_out"}
    streams = _clean_tensors(runs, sorted(set(sites.values())), begin=begin)
    positions, cells = tuple(range(begin, runs.clean.n_positions)), []
    for index, writer in enumerate(runs.graph.writers):
        site, layer = sites[writer.kind], max(writer.layer, 0)

        def make(
            references: References,
            key: tuple[str, int] = (site, layer),
            index: int = index,
            label: str = writer.name,
        ) -> tuple[Edit, ...]:
            without = {key[1]: streams[key] - difference[:, index]}
            return (freeze(key[0], without, positions=positions, label=label),)

        cells.append(Cell(touches=((site, (layer,)),), begin=begin, make=make))
    return _metric_drops(runs, cells, advance=advance)


def _clean_tensors(runs: Runs, sites: Sequence[str], *, begin: int) -> Tensors:
    clean = run_with(
        runs.lens, runs.clean, sites=list(sites), loss=False, logits=False, progress=False
    )
    return {key: tensor[:, begin:].to(runs.weights.dtype) for key, tensor in clean.tensors.items()}


def _metric_drops(
    runs: Runs, cells: Sequence[Cell], *, advance: Progress
) -> Float[np.ndarray, "pair sample"]:
    values = np.full((runs.n_pairs, len(cells)), np.nan)
    engine = make_engine(runs.lens, runs.clean, cells, [runs.metric], batch_size=runs.batch_size)

    def store_metric(number: int, outcome: Outcome, changed: list[bool]) -> None:
        values[outcome.indices, number] = runs.metric_values(outcome).numpy()

    for block in engine.blocks:
        engine.map(block, store_metric, advance=advance)
    return runs.clean_values.numpy()[:, None] - values


def _reader_edits(
    runs: Runs,
    reader: int,
    streams: Tensors,
    change: Tensor,
    *,
    positions: tuple[int, ...],
) -> tuple[Edit, ...]:
    """Return edits at ``positions`` under which the reader with this index reads the clean stream minus ``change``.

    ``streams``: the clean run's tensors at these positions.
    """
    own, graph = runs.graph.readers[reader], runs.graph
    layer, name = own.layer, place_of_reader(own.kind)
    where: dict[str, Any] = {"positions": positions, "label": own.name}
    if name == "logits":
        read = apply_norm(streams["resid_post", layer - 1] - change, runs.weights.final_norm)
        return (freeze("final", {0: read}, layers=(0,), **where),)
    node, x = runs.weights.layers[layer], streams["resid_pre", layer]
    if name == "attention":
        weight, bias = (one[own.head] for one in node.by_head[own.kind])
        read = apply_norm(x - change, node.attn_norm) @ weight.T + bias
        return (freeze(own.kind, {layer: read[:, :, None]}, heads=(own.head,), **where),)
    units = list(graph.neurons.get(layer, ()))  # the neurons that are a node of their own
    edits = mlp_read_edits(
        x if graph.parallel else x + streams["attn_out", layer],
        change,
        layer=layer,
        norm=node.mlp_norm,
        whole=own.kind == "mlp",
        units=units,
        projections={
            site: (weight, streams[site, layer][..., units])
            for site, weight in (("gate", node.w_gate), ("up", node.w_up))
            if weight is not None
        },
        **where,
    )
    return tuple(edits)

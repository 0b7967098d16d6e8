"""Run a model with only a circuit's edges: every reader gets its chosen writers as they are, the others replaced.

    x_r = sum of c_w over the chosen edges into r + sum of a_w over all others + biases of W_O before r

Here c_w is what writer w adds in this very run, and a_w what replaces it (``runs``). The readers of a layer read
different streams, so that no run of the plain model has them all:

1. Sum a_w over all writers, and the biases, before each place (attention, MLP or logits of a layer).
2. Run the bridge from the embedding on; keep the input's c - a.
3. At each q, k, v, gate of the attention and MLP input, compute every reader's own stream: the sum of step 1, plus
   c_w - a_w of its chosen writers.
4. Put the reader's norm of it, and for attention the projection of that, in the place of the value at its hook point.
   Neurons that are a node of their own get gate and up from that node's stream.
5. At z and at the MLP's output, keep this layer's writers' c - a for the readers behind.
6. Do 3 for the logits, with the last norm; read the metric.

With every edge chosen this is the clean run; with none, under ``resample`` and with nothing frozen, the corrupted one.
A run with a circuit's edges alone, the others patched, is that of Conmy et al., arXiv 2304.14997.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from .runs import Progress, Runs
from .stream import Tensors, apply_norm, fill_outputs, hook_name_of, output_biases

_TO_HEADS = "batch head position d_model, head d_head d_model -> batch position head d_head"


def compute_circuit_metrics(
    runs: Runs,
    kept: Bool[np.ndarray, "circuit edge"],
    *,
    advance: Progress = lambda done: None,
) -> Float[Tensor, "circuit pair"]:
    """Run the model with only the edges of each circuit in ``kept``, and return the metric of each pair.

    Cost: for each batch of pairs two forwards, and for each circuit about two.
    """
    runs.check_weights()
    values = torch.full((len(kept), runs.n_pairs), torch.nan, dtype=torch.float64)
    matrices = [torch.from_numpy(runs.graph.matrix(one)) for one in kept]
    for rows in runs.batches(copies=2):
        begin = runs.first_difference(rows)
        replaced = runs.replacements(rows, begin=begin)
        base = _fully_ablated_streams(runs, replaced)
        for number, matrix in enumerate(matrices):
            one = _CircuitPass(
                runs, rows, matrix.to(replaced.device), replaced=replaced, base=base, begin=begin
            )
            values[number, rows] = one.compute_metric()
            advance((rows.stop - rows.start) / runs.n_pairs)
    return values


def _fully_ablated_streams(runs: Runs, replaced: Tensor) -> Tensors:
    graph, biases = runs.graph, output_biases(runs.graph, runs.weights)
    found, total, at = {}, torch.zeros_like(replaced[:, 0]), 0
    for (name, layer), index in graph.places.items():
        first = graph.n_writers_before(index[0])
        total = total + replaced[:, at:first].sum(1)
        at = first
        passed = layer + (name == "mlp" and not graph.parallel)
        found[name, layer] = total + biases[:passed].sum(0)
    return found


class _CircuitPass:
    def __init__(
        self,
        runs: Runs,
        rows: slice,
        matrix: Bool[Tensor, "span writer reader"],
        *,
        replaced: Tensor,
        base: Tensors,
        begin: int,
    ) -> None:
        """Prepare a pass of the pairs ``rows``; ``matrix`` is True for each edge of the circuit.

        ``replaced``: what takes the place of each writer's output, from the position ``begin`` on. ``base``: the stream
        at each place if every writer is replaced.
        """
        self.runs, self.rows, self.matrix, self.begin, self.base = runs, rows, matrix, begin, base
        part, graph = runs.pair_tokens(rows), runs.graph
        shape = part.n_sequences, len(graph.writers), part.n_positions - begin, graph.d_model
        self.replaced = replaced
        self.moved = torch.zeros(shape, dtype=runs.weights.dtype, device=replaced.device)  # c - a
        self.masks = None if runs.masks is None else runs.span_masks(rows, begin=begin)
        self.kept: Tensors = {}

    @torch.no_grad()
    def compute_metric(self) -> Float[Tensor, " pair"]:
        runs, graph = self.runs, self.runs.graph
        hooks: list[tuple[str, Any]] = []

        def add_hook(function: Callable[..., Any], site: str, layer: int = 0) -> None:
            own = partial(function, site=site, layer=layer)
            hooks.append((hook_name_of(runs.lens, site, layer), own))

        add_hook(self._store_embedding_change, "resid_pre")
        for layer, weights in enumerate(runs.weights.layers):
            for kind in weights.by_head:
                add_hook(self._replace_projection, kind, layer)
            add_hook(self._store_output_change, "z", layer)
            add_hook(self._replace_mlp_input, "mlp_in", layer)
            if layer in graph.neurons:
                for site in ("up",) if weights.w_gate is None else ("gate", "up"):
                    add_hook(self._replace_neurons, site, layer)
                hooks += [
                    runs.keeping_hook((site, layer), into=self.kept, begin=self.begin)
                    for site in ("neurons", "down_out")
                ]
            add_hook(self._store_output_change, "mlp_out", layer)
        add_hook(self._replace_final_norm, "final")
        return runs.metric_values(runs.run_hooked(self.rows, hooks))

    def _reader_streams(
        self, place: tuple[str, int], kind: str
    ) -> Float[Tensor, "pair reader position d_model"]:
        """Compute the stream that each reader of a ``kind`` (q, k, mlp, ...) at ``place``, (name, layer), reads."""
        graph = self.runs.graph
        index = [one for one in graph.places[place] if graph.readers[one].kind == kind]
        first = graph.n_writers_before(index[0])
        total = self.base[place][:, None]
        for span in range(len(graph.spans)):
            edges = self.matrix[span, :first, index]
            used = edges.any(1).nonzero()[:, 0]
            if not len(used):
                continue
            moved = self.moved[:, :first]
            if len(used) <= first // 2:
                moved, edges = self.moved[:, used], edges[used]
            one = torch.matmul(edges.T.to(moved.dtype), moved.flatten(2)).unflatten(
                2, moved.shape[2:]
            )
            if self.masks is not None:
                one = one * self.masks[span][:, None, :, None]
            total = total + one
        return total.expand(len(self.moved), len(index), *self.moved.shape[2:])

    def _replace_tail(self, x: Tensor, new: Tensor) -> Tensor:
        return torch.cat([x[:, : self.begin], new.to(x.dtype)], dim=1)

    def _store_embedding_change(self, x: Tensor, hook: object, *, site: str, layer: int) -> None:
        self.moved[:, 0] = x[:, self.begin :].to(self.moved.dtype) - self.replaced[:, 0]

    def _replace_projection(self, x: Tensor, hook: object, *, site: str, layer: int) -> Tensor:
        own = self.runs.weights.layers[layer]
        weight, bias = own.by_head[site]
        read = apply_norm(self._reader_streams(("attention", layer), site), own.attn_norm)
        new = einsum(read, weight, _TO_HEADS) + bias
        return self._replace_tail(x, new if x.dim() == 4 else new.flatten(2))

    def _mlp_read(self, layer: int, kind: str) -> Float[Tensor, "pair position d_model"]:
        norm = self.runs.weights.layers[layer].mlp_norm
        return apply_norm(self._reader_streams(("mlp", layer), kind), norm)[:, 0]

    def _replace_mlp_input(self, x: Tensor, hook: object, *, site: str, layer: int) -> Tensor:
        return self._replace_tail(x, self._mlp_read(layer, "mlp"))

    def _replace_neurons(self, x: Tensor, hook: object, *, site: str, layer: int) -> Tensor:
        """Return ``x``, gate or up values, in which each neuron that is a node reads the stream of that node."""
        own, chosen = self.runs.weights.layers[layer], list(self.runs.graph.neurons[layer])
        weight = own.w_gate if site == "gate" else own.w_up
        assert weight is not None
        change = self._mlp_read(layer, "neurons") - self._mlp_read(layer, "mlp")
        x = x.clone()
        x[:, self.begin :, chosen] += (change @ weight.T).to(x.dtype)
        return x

    def _replace_final_norm(self, x: Tensor, hook: object, *, site: str, layer: int) -> Tensor:
        read = self._reader_streams(("logits", self.runs.graph.n_layers), "logits")
        return self._replace_tail(x, apply_norm(read, self.runs.weights.final_norm)[:, 0])

    def _store_output_change(self, x: Tensor, hook: object, *, site: str, layer: int) -> None:
        graph = self.runs.graph
        self.kept[site, layer] = x[:, self.begin :]
        own = graph.writers_of_layer(layer)
        into, instead = self.moved[:, own], self.replaced[:, own]
        fill_outputs(self.kept, into, layer=layer, graph=graph, weights=self.runs.weights)
        part = slice(graph.n_heads) if site == "z" else slice(graph.n_heads, None)
        into[:, part] -= instead[:, part]
        del self.kept[site, layer]

"""Where the heads of a circuit look, and what of query and key makes them.

The query is the last token of one prompt, the key is what a head attends to most there, and the advantage A is that
key's attention score over the mean of the scores of all other keys that the query sees. With the gradients of A for
the projected query and keys, and with the divisor of the norm before the attention held, what a writer adds, w, has
the part

    A_w = sum over positions of  w g / s . W' dA/d(projected)

on the side of the query or of the key, and so has each dimension of the stream. Where scores are products of
projections, the parts of a side and what its biases add sum to A; the row ``rest`` is the difference, of the parts that
are not listed too. A norm of queries and keys makes parts that say what turns them and sum to 0, a cap on the scores
makes parts smaller: ``rest`` shows both.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Float32
from torch import Tensor

from ..engine.gradients import add_zero, keep_tensor
from ..models.packed import check_gradients_pass
from ..models.running import exclusive_use
from .circuit import Circuit
from .stream import NodeWeights, Tensors, gradient_before_norm, hook_name_of

MOST_HEADS, LONGEST, MOST_PARTS = 24, 128, 6
"""Heads, tokens of the prompt, and parts of each kind that are kept."""
COLUMNS = ("head", "query", "key", "share", "advantage", "side", "by", "part", "value")


def explain_attention(
    circuit: Circuit,
) -> tuple[pd.DataFrame, dict[str, Float32[np.ndarray, "query key"]]]:
    """Find which token each of a circuit's 24 largest heads attends to in its first prompt, and what makes it do so.

    Cost: two forward passes of one prompt, and a backward pass through one layer's scores for each head.

    Returns:
        A table of what adds to each head's advantage, and head -> its pattern. Both are empty if the prompt has more
        than 128 tokens, or only one. ``share`` is that of the attention, ``side`` query or key, ``by`` writer or
        dimension, ``part`` its name, or rest.
    """
    runs, graph = circuit.runs.select_pairs([0]), circuit.graph
    length, heads = int(runs.clean.lengths[0]), _largest_heads(circuit)
    if not 1 < length <= LONGEST or not heads:
        return pd.DataFrame(columns=list(COLUMNS)), {}
    runs.check_weights()
    added, _ = runs.writer_outputs(slice(0, 1))
    zeros: Tensors = {}
    seen: Tensors = {}
    reads: list[Any] = [(site, add_zero, zeros) for site in ("q", "k")]
    reads += [(site, keep_tensor, seen) for site in ("resid_pre", "scores", "pattern")]
    hooks = [
        (hook_name_of(runs.lens, site, layer), partial(take, into=into, key=(site, layer)))
        for layer in sorted({layer for layer, _ in heads})
        for site, take, into in reads
    ]
    rows: list[dict[str, object]] = []
    patterns: dict[str, np.ndarray] = {}
    check_gradients_pass(runs.lens.plain)
    with exclusive_use(runs.lens), torch.enable_grad():
        runs.run_hooked(slice(0, 1), hooks)
        for layer, head in heads:
            if ("pattern", layer) not in seen:
                continue  # behind everything that the metric reads
            name = f"a{layer}.h{head}"
            pattern = seen["pattern", layer][0, head, :length, :length].detach().float().cpu()
            patterns[name] = pattern.numpy()
            query, key = length - 1, int(pattern[-1].argmax())
            advantage = _advantage(seen["scores", layer][0, head, query, :length], key)
            if advantage is None:
                continue
            gradients = torch.autograd.grad(
                advantage, [zeros[site, layer] for site in ("q", "k")], retain_graph=True
            )
            about = {"head": name, "query": query, "key": key, "share": float(pattern[-1, key])}
            about["advantage"] = float(advantage.detach())
            n_before = graph.n_writers_before(graph.places["attention", layer][0])
            writers = [writer.name for writer in graph.writers[:n_before]]
            x = seen["resid_pre", layer].detach()[0].to(runs.weights.dtype)
            dimensions = [str(one) for one in range(x.shape[-1])]
            for side, gradient in zip("qk", gradients, strict=True):
                back = _gradient_at_stream(gradient[0], x, side, runs.weights.layers[layer])
                by_writer = einsum(
                    added[0, :n_before], back, "writer position d_model, position d_model -> writer"
                )
                by_dimension = einsum(x, back, "position d_model, position d_model -> d_model")
                named = about | {"side": {"q": "query", "k": "key"}[side]}
                rows += _largest_rows(named, "writer", writers, by_writer.cpu())
                rows += _largest_rows(named, "dimension", dimensions, by_dimension.cpu())
    return pd.DataFrame(rows, columns=list(COLUMNS)), patterns


def _largest_heads(circuit: Circuit) -> list[tuple[int, int]]:
    nodes = circuit.nodes
    used = nodes["kind"].eq("head") & (nodes["edges_in"].gt(0) | nodes["edges_out"].gt(0))
    largest = nodes.loc[used, ["layer", "head"]].head(MOST_HEADS)
    return list(largest.itertuples(index=False, name=None))


def _advantage(scores: Float[Tensor, " key"], key: int) -> Tensor | None:
    """Return the key's score over the mean of the other keys that the query sees; None if it sees no other."""
    others = (torch.arange(len(scores), device=scores.device) != key) & (
        scores > torch.finfo(scores.dtype).min / 2
    )
    return scores[key] - scores[others].mean() if bool(others.any()) else None


def _gradient_at_stream(
    gradient: Tensor, x: Float[Tensor, "position d_model"], side: str, layer: NodeWeights
) -> Float[Tensor, "position d_model"]:
    weight, gradient = layer.by_head[side][0], gradient.to(x.dtype)
    gradient = gradient.unflatten(-1, (weight.shape[0], -1)) if gradient.dim() == 2 else gradient
    back = einsum(gradient, weight, "position head d_head, head d_head d_model -> position d_model")
    return gradient_before_norm(back[None, None], x[None], layer.attn_norm, held=True)[0, 0]


def _largest_rows(
    about: dict[str, Any], by: str, names: list[str], values: Float[Tensor, " sample"]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the 6 largest ``values``, named by ``names``, and a row for what they leave.

    Each row also has the fields in ``about``, and ``by`` (writer or dimension).
    """
    about, order = about | {"by": by}, values.abs().argsort(descending=True)[:MOST_PARTS].tolist()
    for at in order:
        yield about | {"part": names[at], "value": float(values[at])}
    yield about | {"part": "rest", "value": about["advantage"] - float(values[order].sum())}

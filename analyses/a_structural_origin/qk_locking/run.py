"""Alignment of queries with the key of the outlier dimension, and the sign of their products; see claim.md."""

import numpy as np
import torch

from analyses.claims import Measured, Work, certain, main
from sink_lens import Reading, stream
from sink_lens.errors import InputError
from sink_lens.measures.heads import expand_kv
from sink_lens.measures.locking import positive_share, qk_alignment
from sink_lens.models.weights import attention_weights
from sink_lens.report.style import (
    BLUE,
    GREEN,
    ORANGE,
    QUIET,
    legend,
    new_figure,
    panel,
    without_formulas,
)

OTHER = 20
READ = ("positive_share", "positive_elsewhere", "alignment_key", "mean_query")


def measure(work: Work) -> Measured:
    """Signs and cosines by sequence on every text, and alignment from the weights, over the sink heads.

    The real key on every text; the column of W_K that figure 12 takes on the bundled one.
    """
    outliers = (
        work.base()["dimensions"]
        .query("sink_position == 0 and is_outlier")
        .groupby("layer")["dimension"]
    )
    entering = {
        int(layer) + 1: list(dims) for layer, dims in outliers if layer + 1 < work.lens.n_layers
    }
    heads = work.base()["heads"].query("sink_position == 0 and sink_score > 0.3")
    heads = heads[heads["layer"].isin(entering)]
    chosen = [
        (int(layer), int(head)) for layer, head in zip(heads["layer"], heads["head"], strict=True)
    ]
    if not chosen:
        raise InputError(
            f"no head of {work.lens.name} has a sink at position 0 in a layer after an outlier dimension"
        )
    weights = {layer: attention_weights(work.lens, layer=layer) for layer in entering}

    def read(view):
        """The four numbers of ``READ``: sequence, head, number."""
        q, k, w_q = view["q"], view["k"], weights[view.layer].w_q
        signs = [
            positive_share(q, k=k[:, place], valid=view.valid, key=place) for place in (0, OTHER)
        ]
        aligned = torch.stack([qk_alignment(w_q, w_k_column=one) for one in k[:, 0]])
        met = torch.cosine_similarity(
            q[:, 1:].mean(1), expand_kv(k[:, 0], n_heads=q.shape[2]), dim=-1
        )
        return torch.stack([*signs, aligned, met], dim=-1)

    def columns(view):
        """Shares with the column of the strongest outlier dimension, as it is and with the first token's sign there."""
        place = entering[view.layer][0]
        column = weights[view.layer].w_k[..., place].to(view["q"].dtype)
        sign = view["attn_in"][:, 0, place].sign()[:, None, None]
        keys = (column.expand(len(sign), -1, -1), sign * column)
        return torch.stack(
            [positive_share(view["q"], k=key, valid=view.valid, key=0) for key in keys], dim=-1
        )

    reading = Reading(name="read", sites=("q", "k"), function=read, layers=frozenset(entering))
    theirs = Reading(
        name="column", sites=("q", "attn_in"), function=columns, layers=frozenset(entering)
    )
    tokens = work.text(sequences=work.size(32, 8), length=64)
    streamed = stream(work.lens, tokens, [theirs], progress=work.progress).values["column"]
    by_column = torch.stack([streamed[layer][:, head] for layer, head in chosen], dim=1).numpy()
    numbers, found = {}, {}
    for name, tokens in work.texts(sequences=work.size(32, 8), length=64).items():
        streamed = stream(work.lens, tokens, [reading], progress=work.progress).values["read"]
        found[name] = torch.stack(
            [streamed[layer][:, head] for layer, head in chosen], dim=1
        ).numpy()
    for index, number in enumerate(READ):
        numbers |= {
            f"{number} @ {name}": work.interval(rows[..., index].mean(1))
            for name, rows in found.items()
        }

    for index, number in enumerate(("column_share", "column_share_signed")):
        numbers[number] = work.interval(by_column[..., index].mean(1))
    first = next(iter(found.values()))
    for number, rows in (
        ("column_share_worst", by_column[..., 1]),
        ("positive_share_worst", first[..., 0]),
    ):
        numbers[number] = work.interval(rows[:, rows.mean(0).argmin()])

    def alignment(of):
        """Alignment of the sink heads with the key of one dimension in each layer."""
        by_layer = {
            layer: qk_alignment(weights[layer].w_q, w_k_column=weights[layer].w_k[..., of(dims)])
            for layer, dims in entering.items()
        }
        return np.array([float(by_layer[layer][head]) for layer, head in chosen])

    drawn = torch.randperm(work.lens.d_model, generator=work.generator())[:20].tolist()
    null = np.nanmean([alignment(lambda dims, one=one: one) for one in drawn], axis=0)
    here = alignment(lambda dims: dims[0])
    numbers["alignment @ strongest outlier dimension"] = certain(here.mean())
    numbers["alignment @ weakest outlier dimension"] = certain(
        alignment(lambda dims: dims[-1]).mean()
    )
    numbers["over_random"] = certain(here.mean() / null.mean())

    first = first.mean(0)
    layers = [layer for layer, _ in chosen]
    figure = new_figure(width=7.4, height=3.0)
    axes = panel(figure, place=(1, 2, 1), xlabel="layer", ylabel="share of positive products")
    axes.scatter(layers, first[:, 0], s=12, color=ORANGE, label="first token's key")
    axes.scatter(layers, by_column[..., 1].mean(0), s=12, color=BLUE, label="column of W_K")
    axes.scatter(layers, first[:, 1], s=12, color=QUIET, label=f"position {OTHER}'s key")
    legend(axes, columns=2)
    axes = panel(figure, place=(1, 2, 2), xlabel="layer", ylabel="|cosine|")
    axes.scatter(layers, first[:, 3], s=12, color=ORANGE, label="mean query, key")
    axes.scatter(layers, here, s=12, color=BLUE, label="W_Q, dimension")
    axes.scatter(layers, null, s=12, color=GREEN, label="random")
    legend(axes, columns=3)
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

"""Neurons by weight norm against neurons by what they add to the outlier dimension; see claim.md."""

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, stream
from sink_lens.measures.neurons import contributions, norm_rank, row_norms
from sink_lens.models.weights import mlp_weights
from sink_lens.report.style import (
    BLUE,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)

TOP = 5


def measure(work: Work) -> Measured:
    """Rank, recall and share of the neurons that the norm picks, on every text."""
    places = {
        layer: step
        for step in work.steps()
        for layer in range(step.first_layer, step.last_layer + 1)
    }
    weights = {layer: mlp_weights(work.lens, layer=layer) for layer in places}
    ranks = {
        layer: torch.stack(
            [norm_rank(row_norms(w)) for w in (weights[layer].w_gate, weights[layer].w_up)]
        ).amin(0)
        for layer in places
    }

    def terms(view):
        """Return what each neuron adds at the first token, and last the layer's change of the dimension."""
        dimension = places[view.layer].outlier_dimension
        added = contributions(view["neurons"][:, 0], weights=weights[view.layer].w_down[dimension])
        return torch.cat([added, (view["attn_out"] + view["mlp_out"])[:, 0, [dimension]]], dim=1)

    def read(tokens):
        reading = Reading(
            name="terms",
            sites=("neurons", "attn_out", "mlp_out"),
            function=terms,
            layers=frozenset(places),
        )
        found = stream(work.lens, tokens, [reading], progress=work.progress).values["terms"]
        return np.stack(
            [found[layer].numpy() for layer in places], axis=1
        )  # sequence, layer, neuron and change

    by_norm = torch.stack([ranks[layer] <= TOP for layer in places]).numpy()

    def shares(rows):
        mean = rows.mean(0)
        return mean[:, :-1] / mean[:, -1:]

    def rank(rows):
        layer, neuron = np.unravel_index(shares(rows).argmax(), by_norm.shape)
        return float(ranks[list(places)[layer]][neuron])

    def recall(rows):
        strongest = np.argsort(-np.abs(shares(rows)), axis=1)[:, :TOP]
        return np.take_along_axis(by_norm, strongest, axis=1).mean()

    def share(rows):
        return (shares(rows) * by_norm).sum(1).mean()

    numbers = {}
    found = {
        name: read(tokens)
        for name, tokens in work.texts(sequences=work.size(100, 8), length=16).items()
    }
    for key, statistic in (("rank", rank), ("recall", recall), ("share", share)):
        for name, rows in found.items():
            numbers[f"{key} @ {name}"] = work.interval(rows, statistic=statistic, n_resamples=500)

    figure = new_figure(width=7.4, height=3.0)
    first = next(iter(found.values()))
    for place, layer in enumerate(places, start=1):
        axes = panel(figure, place=(1, len(places), place), xlabel="rank by weight norm")
        height = shares(first)[place - 1] * 100
        axes.scatter(ranks[layer], height, s=8, color=BLUE, label="neuron")
        strongest = np.argsort(-np.abs(height))[:TOP]
        axes.scatter(
            ranks[layer][strongest],
            height[strongest],
            s=24,
            color=ORANGE,
            marker="^",
            label="top 5",
        )
        axes.axvline(TOP + 0.5, color=ORANGE, linestyle=":", linewidth=1)
        log_scale(axes, axis="x")
        axes.set_title(f"layer {layer}", fontsize=9)
        if place == 1:
            axes.set_ylabel("share of the layer's change, %")
            legend(axes, columns=2, over=figure)
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

"""Where the super neurons fire; see claim.md."""

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, stream
from sink_lens.chain.setting import draw_other_indices
from sink_lens.measures.neurons import selectivity
from sink_lens.models.weights import mlp_weights
from sink_lens.report.style import (
    GREEN,
    ORANGE,
    QUIET,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)


def measure(work: Work) -> Measured:
    """Spike, place of the largest activation, and alignment, for super neurons and for random ones."""
    table = work.supers(work.base()["neurons"])
    supers = {int(layer): sorted(group["neuron"]) for layer, group in table.groupby("layer")}
    random = {
        layer: sorted(draw_other_indices(units, n=work.lens.d_mlp, generator=work.generator()))
        for layer, units in supers.items()
    }
    rows = {
        layer: mlp_weights(work.lens, layer=layer).w_gate[units] for layer, units in supers.items()
    }

    def cosine(view):
        pairs = [
            selectivity(view["mlp_in"], gate_row=row, up_row=row).cosine for row in rows[view.layer]
        ]
        return torch.stack(pairs, dim=-1)

    layers = frozenset(supers)
    readings = [
        Reading(
            name="super",
            sites=("neurons",),
            function=lambda v: v["neurons"][..., supers[v.layer]],
            layers=layers,
        ),
        Reading(
            name="random",
            sites=("neurons",),
            function=lambda v: v["neurons"][..., random[v.layer]],
            layers=layers,
        ),
        Reading(name="cosine", sites=("mlp_in",), function=cosine, layers=layers),
    ]
    tokens = work.text(sequences=work.size(100, 8), length=64)
    streamed = stream(work.lens, tokens, readings, progress=work.progress)
    joined = {
        name: torch.cat([by_layer[layer] for layer in sorted(supers)], dim=-1).float()
        for name, by_layer in streamed.values.items()
    }  # sequence, position, neuron
    active, drawn = joined["super"].abs(), joined["random"].abs()
    turned = joined["cosine"] * joined["cosine"][:, 0].mean(0).sign()

    def pair(x):
        return torch.stack([x[:, 0], x[:, 1:].mean(1)], dim=1).numpy()

    def ratio(x):
        at_first, elsewhere = x.mean(0)
        return float(np.exp(np.log(at_first / elsewhere).mean()))

    numbers = {
        "spike_ratio": work.interval(pair(active), statistic=ratio),
        "first_only": work.interval((active.argmax(1) == 0).float().mean(1).numpy()),
        "cosine_gap": work.interval((turned[:, 0] - turned[:, 1:].mean(1)).mean(1).numpy()),
        "random_ratio": work.interval(pair(drawn), statistic=ratio),
    }

    figure = new_figure(width=7.4, height=3.0)
    axes = panel(figure, place=(1, 2, 1), xlabel="position + 1", ylabel="mean |activation|")
    for values, colour, label in ((drawn, QUIET, "random"), (active, ORANGE, "super neurons")):
        curves = values.mean(0)
        for index, curve in enumerate(curves.T):
            axes.plot(
                range(1, 65), curve, color=colour, linewidth=1, label=label if index == 0 else None
            )
    log_scale(axes, axis="x")
    log_scale(axes, axis="y")
    legend(axes, columns=2)
    axes = panel(figure, place=(1, 2, 2), xlabel="position + 1", ylabel="cosine with the gate row")
    for curve in turned.mean(0).T:
        axes.plot(range(1, 65), curve, color=GREEN, linewidth=1)
    log_scale(axes, axis="x")
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

"""Kendall's tau of W_O's weights with the first token's spread by input, and its checks; see claim.md."""

import dataclasses

import numpy as np
import torch
from einops import rearrange

from analyses.claims import Measured, Work, certain, main
from sink_lens import capture
from sink_lens.measures.variance import output_preservation
from sink_lens.models.weights import attention_weights
from sink_lens.report.style import BLUE, GREEN, ORANGE, legend, new_figure, panel, without_formulas

FIRST, OTHER = 0, 20


def measure(work: Work) -> Measured:
    """Tau by layer on random tokens and on texts, against another position and a planted W_O."""
    lens = work.lens
    weights = [
        rearrange(
            attention_weights(lens, layer=layer).w_o, "head d_head d_model -> d_model (head d_head)"
        )
        for layer in range(lens.n_layers)
    ]
    some = torch.randperm(lens.d_model, generator=work.generator())[:16]

    def spreads(tokens, position):
        """The aggregated values at a position: sequence, layer, input."""
        found = capture(lens, tokens, sites=["z"], positions=[position], progress=work.progress)
        return torch.stack([found["z", layer].flatten(1) for layer in range(lens.n_layers)], dim=1)

    def taus(z, dimensions=None, planted=False):
        """Mean tau of each layer."""
        std = torch.as_tensor(z).std(dim=0)
        rows = [w * s if planted else w for w, s in zip(weights, std, strict=True)]
        pairs = zip(rows, std, strict=True)
        return torch.stack(
            [output_preservation(w, first_std=s, per_dimension=dimensions).mean() for w, s in pairs]
        )

    def tau(z, statistic=lambda by_layer: by_layer.nanmean()):
        """The statistic over layers, its interval drawn on some output dimensions and moved to the estimate on all."""
        drawn = work.interval(
            z.numpy(), statistic=lambda rows: float(statistic(taus(rows, some))), n_resamples=60
        )
        moved = float(statistic(taus(z))) - drawn.estimate
        return dataclasses.replace(
            drawn, **{k: getattr(drawn, k) + moved for k in ("estimate", "low", "high")}
        )

    random = work.random(sequences=work.size(500, 40), length=24, bos="without")
    first, other = spreads(random, FIRST), spreads(random, OTHER)
    texts = work.texts(sequences=work.size(200, 20), length=24, bos="without")
    numbers = {"tau @ random tokens": tau(first)}
    numbers |= {f"tau @ {name}": tau(spreads(tokens, FIRST)) for name, tokens in texts.items()}
    numbers["tau_best_layer"] = tau(first, lambda by_layer: by_layer.nan_to_num(-1).max())
    both = np.concatenate([first.numpy(), other.numpy()], axis=1)
    n = lens.n_layers
    numbers["over_null"] = work.interval(
        both,
        statistic=lambda z: float((taus(z[:, :n], some) - taus(z[:, n:], some)).nanmean()),
        n_resamples=60,
    )
    numbers["planted"] = certain(taus(first, some, planted=True).nanmean())

    figure = new_figure(width=6.0, height=3.0)
    axes = panel(figure, xlabel="layer", ylabel="Kendall tau, mean over outputs")
    for z, colour, marker, label in (
        (first, BLUE, "o", "position 0"),
        (other, ORANGE, "s", f"position {OTHER}"),
    ):
        axes.plot(taus(z), color=colour, marker=marker, markersize=3, label=label)
    axes.axhline(0.32, color=GREEN, linestyle="--", label="0.32 (paper's mean)")
    legend(axes, columns=3)
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

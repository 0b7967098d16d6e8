"""Spread of the aggregated values by position, layer by layer, before and after W_O; see claim.md."""

import dataclasses

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, capture, stream
from sink_lens.measures.variance import (
    decay_exponent,
    output_preservation,
    s1,
    token_std,
    variance_ratio,
)
from sink_lens.models.weights import attention_weights
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)

BLOCK = 25
SEED = 1


def measure(work: Work) -> Measured:
    """Ratios and exponents of each layer before the first sink, ratios after W_O, and the paper's tau."""
    work = dataclasses.replace(work, seed=SEED)
    layers = range(work.steps()[0].last_layer + 1)
    random = work.random(sequences=work.size(500, 50), length=64, bos="without")
    text = work.text(work.size("brown", "moby-dick"), sequences=work.size(100, 8), length=64)

    def over_samples(view):
        return s1(view["z"], valid=view.valid).expand(len(view.valid), -1)

    def before(view):
        return token_std(view["z"])

    def after(view):
        return token_std(view["attn_out"])

    options = {"layers": frozenset(layers)}
    reading = Reading(name="s1", sites=("z",), function=over_samples, **options)
    found = stream(
        work.lens, random, [reading], batch_size=BLOCK, progress=work.progress, label="S1"
    )
    of_random = found.stacked("s1")[:, ::BLOCK].numpy()  # layer, block, position
    readings = [
        Reading(name="before", sites=("z",), function=before, **options),
        Reading(name="after", sites=("attn_out",), function=after, **options),
    ]
    streamed = stream(work.lens, text, readings, progress=work.progress, label="S2")
    of_text, written = (streamed.stacked(name).numpy() for name in ("before", "after"))
    first = capture(
        work.lens, random, sites=["z"], layers=list(layers), positions=[0], progress=work.progress
    )
    some = torch.randperm(work.lens.d_model, generator=work.generator())[:64]

    numbers = {}
    for place, layer in enumerate(layers):
        at = f"layer {layer}"
        numbers[f"s1_ratio @ {at}"] = work.interval(of_random[place], statistic=_ratio)
        numbers[f"s1_exponent @ {at}"] = work.interval(of_random[place], statistic=_exponent)
        numbers[f"s2_ratio @ {at}"] = work.interval(of_text[place], statistic=_ratio)
        numbers[f"after @ {at}"] = work.interval(written[place], statistic=_ratio)
        weights = attention_weights(work.lens, layer=layer).w_o.flatten(0, 1).T.float().cpu()
        z = first["z", layer].flatten(1)

        def tau(rows, dimensions=some, weights=weights):
            std = torch.as_tensor(rows).std(dim=0)
            return float(
                output_preservation(weights, first_std=std, per_dimension=dimensions).nanmean()
            )

        drawn = work.interval(z.numpy(), statistic=tau, n_resamples=60)
        moved = (
            tau(z, None) - drawn.estimate
        )  # drawn on some output dimensions, moved to the estimate on all
        numbers[f"tau @ {at}"] = dataclasses.replace(
            drawn, **{bound: getattr(drawn, bound) + moved for bound in ("estimate", "low", "high")}
        )
    order = ("s1_ratio", "s2_ratio", "s1_exponent", "after", "tau")
    ordered = sorted(numbers.items(), key=lambda one: order.index(one[0].partition(" @ ")[0]))

    figure = new_figure(width=9.6, height=3.2)
    t = np.arange(1, 65)
    for place, (rows, title) in enumerate(
        ((of_random, "S1, random tokens"), (written, "S2 after W_O, text"))
    ):
        axes = panel(
            figure, place=(1, 2, place + 1), xlabel="position + 1", ylabel=f"{title} ÷ position 0"
        )
        for layer, one, colour, marker in zip(
            layers, rows, (BLUE, ORANGE, GREEN, INK) * 8, "os^v" * 8, strict=False
        ):
            mean = one.mean(0)
            axes.plot(
                t, mean / mean[0], color=colour, marker=marker, markersize=3, label=f"layer {layer}"
            )
        if not place:
            axes.plot(t, t**-0.5, color=INK, linestyle="--", label="1/√t (idealised)")
        log_scale(axes, axis="x")
        log_scale(axes, axis="y")
        legend(axes, columns=2)
    return Measured(numbers=dict(ordered), figure=without_formulas(figure))


def _ratio(rows: np.ndarray) -> float:
    return float(variance_ratio(torch.from_numpy(rows.mean(0))))


def _exponent(rows: np.ndarray) -> float:
    return float(decay_exponent(torch.from_numpy(rows.mean(0))))


if __name__ == "__main__":
    main(measure)

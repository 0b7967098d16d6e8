"""Attention to a token whose aggregated value is amplified, by factor and centre; see claim.md."""

import numpy as np

from analyses.claims import Measured, Work, main
from sink_lens import run_with
from sink_lens.edits import amplify, centring_means
from sink_lens.edits.amplification import FACTORS
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

PLACE = 10


def measure(work: Work) -> Measured:
    """The curve of each centre on each input, in one layer and averaged, and its strongest factor against none."""
    means = centring_means(work.lens, n_tokens=work.size(12_800, 1024), progress=work.progress)
    last = work.steps()[0].last_layer
    ends = [step.first_layer for step in work.steps()[1:]] + [work.lens.n_layers]
    reads = range(last + 1, min(last + 6, ends[0]))
    size = {"sequences": work.size(32, 4), "length": 64}
    inputs = {"random tokens": work.random(**size), "prose": work.text(**size)}
    spans = {f"layer {reads[0]}": reads[:1], f"layers {reads[0]} to {reads[-1]}": reads}

    def mass(tokens, centre, factor, key=PLACE):
        """The attention to a position by span of layers and sequence."""
        edits = [] if factor == 1 else [_edit(factor, centre=centre, last=last, means=means)]
        run = run_with(work.lens, tokens, edits, positions=(key,), layers=reads, loss=False)
        return np.stack([run.mass_at(key, layers=span).numpy() for span in spans.values()])

    found, curves, natural = {}, {}, {}
    for name, tokens in inputs.items():
        clean = mass(tokens, "none", 1)
        by_centre = {
            c: np.stack([clean, *(mass(tokens, c, f) for f in FACTORS if f != 1)])
            for c in ("values", "aggregated", "none")
        }  # factor, span, sequence
        at_first = mass(tokens, "none", 1, key=0)
        for index, span in enumerate(spans):
            where = f"{name}, {span}"
            curves[where] = {centre: curve[:, index] for centre, curve in by_centre.items()}
            natural[where] = at_first[index]
            rises = {
                c: curve[curve.mean(1).argmax()] - curve[0] for c, curve in curves[where].items()
            }
            found[f"centred_on_values @ {where}"] = work.interval(rises["values"])
            found[f"norm_share @ {where}"] = work.ratio(rises["none"], rises["values"], least=0.02)
            found[f"centred_on_z @ {where}"] = work.interval(rises["aggregated"])
            found[f"share_of_natural @ {where}"] = work.ratio(
                curves[where]["values"][0] + rises["values"], natural[where]
            )
    order = ("centred_on_values", "norm_share", "centred_on_z", "share_of_natural")
    numbers = {
        name: found[name]
        for name in sorted(found, key=lambda one: order.index(one.partition(" @ ")[0]))
    }

    figure = new_figure(width=9.6, height=3.2)
    names = {
        "values": "centred on the mean value",
        "aggregated": "centred on the mean of z",
        "none": "scaled only",
    }
    one_layer = [where for where in curves if where.endswith(next(iter(spans)))]
    for place, where in enumerate(one_layer):
        axes = panel(
            figure,
            place=(1, 2, place + 1),
            xlabel=f"factor ({where})",
            ylabel=f"attention to position {PLACE}",
        )
        for (centre, curve), colour, marker in zip(
            curves[where].items(), (BLUE, GREEN, ORANGE), "os^", strict=True
        ):
            axes.plot(
                FACTORS,
                curve.mean(1),
                color=colour,
                marker=marker,
                markersize=4,
                label=names[centre],
            )
        axes.axhline(natural[where].mean(), color=INK, linestyle="--", label="position 0, no edit")
        log_scale(axes, axis="x")
        axes.set_ylim(0, None)
        legend(axes, columns=2)
    return Measured(numbers=numbers, figure=without_formulas(figure))


def _edit(factor, *, centre, last, means):
    return amplify(factor, positions=[PLACE], layers=range(last + 1), centre=centre, means=means)


if __name__ == "__main__":
    main(measure)

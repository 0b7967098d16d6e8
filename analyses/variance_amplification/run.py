"""Attention to a token whose aggregated value is amplified, by factor and centre; see claim.md."""

import numpy as np

from analyses.claims import Measured, Work, main
from sink_lens import amplification, centring_means, run_with
from sink_lens.edits.amplification import FACTORS
from sink_lens.report.style import BLUE, GREEN, INK, ORANGE, canvas, finished, legend, logarithmic, panel

PLACE = 10


def measure(work: Work) -> Measured:
    """The curve of each centre, and its strongest factor against none."""
    tokens = work.text(sequences=work.size(32, 4), length=64)
    means = centring_means(work.lens, n_tokens=work.size(12_800, 1024), progress=work.progress)
    last = work.steps()[0].last_layer
    ends = [step.first_layer for step in work.steps()[1:]] + [work.lens.n_layers]
    reads = range(last + 1, min(last + 6, ends[0]))

    def mass(centre, factor, key=PLACE):
        edits = [] if factor == 1 else [_edit(factor, centre=centre, last=last, means=means)]
        run = run_with(work.lens, tokens, edits, keys=(key,), layers=reads, loss=False)
        return run.mass_at(key).numpy()

    curves = {c: np.stack([mass(c, f) for f in FACTORS]) for c in ("values", "aggregated", "none")}  # factor, sequence
    rises = {centre: (curve[curve.mean(1).argmax()] - curve[0]) for centre, curve in curves.items()}
    natural = mass("none", 1, key=0)

    numbers = {
        "centred_on_values": work.interval(rises["values"]),
        "norm_share": work.ratio(rises["none"], rises["values"], least=0.02),
        "centred_on_z": work.interval(rises["aggregated"]),
        "share_of_natural": work.ratio(curves["values"][0] + rises["values"], natural),
    }

    figure = canvas(width=5.6, height=3.2)
    axes = panel(figure, xlabel="factor", ylabel=f"attention to position {PLACE}, layers {reads[0]}-{reads[-1]}")
    names = {"values": "centred on the mean value", "aggregated": "centred on the mean of z", "none": "scaled only"}
    for (centre, curve), colour, marker in zip(curves.items(), (BLUE, GREEN, ORANGE), "os^", strict=True):
        axes.plot(FACTORS, curve.mean(1), color=colour, marker=marker, markersize=4, label=names[centre])
    axes.axhline(natural.mean(), color=INK, linestyle="--", label="position 0, no edit")
    logarithmic(axes, axis="x")
    axes.set_ylim(0, None)
    legend(axes, columns=2)
    return Measured(numbers=numbers, figure=finished(figure))


def _edit(factor, *, centre, last, means):
    return amplification(factor, positions=[PLACE], layers=range(last + 1), centre=centre, means=means)


if __name__ == "__main__":
    main(measure)

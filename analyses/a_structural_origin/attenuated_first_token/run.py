"""Move the first token's aggregated value to a mean and read what stays of the sink; see claim.md."""

import dataclasses

import numpy as np

from analyses.claims import Measured, Work, main
from sink_lens import capture, run_with
from sink_lens.edits import amplify, centring_means, isolate
from sink_lens.measures.variance import token_std
from sink_lens.report.style import BLUE, GREEN, INK, ORANGE, legend, new_figure, panel, without_formulas

SEED, PLACE, SETTLED = 1, 9, 8
CENTRES = {"values": BLUE, "z": GREEN, "text": ORANGE}


def measure(work: Work) -> Measured:
    """Measure what goes of the natural and of an isolated token's sink, by centre, layers and factor."""
    work = dataclasses.replace(work, seed=SEED)
    lens, steps = work.lens, work.steps()
    ends = [step.last_layer for step in steps]
    spans = {"layer 0": range(1), f"layers 0 to {ends[0]}": range(ends[0] + 1)}
    starts = [end + 1 for end in ends]
    stops = [step.first_layer for step in steps[1:]] + [lens.n_layers]
    bands = {f"read in {a} to {b - 1}": range(a, b) for a, b in zip(starts, stops, strict=True) if a < b}
    if len(ends) > 1:
        spans[f"layers 0 to {ends[-1]}"] = range(ends[-1] + 1)
    n = work.size(32, 8)
    both = work.text(work.size("brown", "moby-dick"), sequences=2 * n, length=64)
    tokens, others = both[::2], both[1::2]
    random = centring_means(lens, n_tokens=work.size(12_800, 1024), seed=SEED, progress=work.progress)
    edited = range(ends[-1] + 1)
    z = capture(lens, others, sites=["z"], layers=list(edited), progress=work.progress)
    of_text = {layer: z["z", layer][:, SETTLED:].float().mean((0, 1)) for layer in edited}
    means = {
        "values": ("values", random),
        "z": ("aggregated", random),
        "text": ("aggregated", dataclasses.replace(random, aggregated=of_text)),
    }

    def moved(centre, layers, *, position=0, factor=0.0):
        kind, found = means[centre]
        return amplify(factor, positions=[position], layers=layers, centre=kind, means=found)

    def run(*edits):
        return run_with(lens, tokens, edits, positions=(0, PLACE), progress=work.progress)

    def gone(outcome, band, *, key=0, of=None):
        """The share of the attention that is lost, sequence by sequence averaged."""
        without, full = (one.mass_at(key, layers=band).numpy() for one in (clean, of or clean))
        floor = without if of is not None else np.zeros_like(full)
        return work.ratio(full - outcome.mass_at(key, layers=band).numpy(), full - floor, least=0.01)

    clean, isolated = run(), run(isolate([PLACE]))
    early = next(reversed([span for span in spans.values() if span[-1] == ends[0]]))
    numbers, curves = {}, {"no edit": clean.mass[..., 0].mean(dim=(1, 2))}
    for centre in CENTRES:
        for name, layers in spans.items():
            found = run(moved(centre, layers))
            for band, read in bands.items():
                numbers[f"removed @ {centre}, {name}, {band}"] = gone(found, read)
            numbers[f"loss @ {centre}, {name}"] = work.interval((found.loss - clean.loss).numpy())
            if layers == early:
                curves[centre] = found.mass[..., 0].mean(dim=(1, 2))
        by_half, made = (
            run(moved(centre, early, factor=0.5)),
            run(isolate([PLACE]), moved(centre, early, position=PLACE)),
        )
        elsewhere = run(moved(centre, early, position=PLACE))
        for band, read in bands.items():
            numbers[f"half @ {centre}, {band}"] = gone(by_half, read)
            numbers[f"isolated @ {centre}, {band}"] = gone(made, read, key=PLACE, of=isolated)
        numbers[f"ordinary @ {centre}"] = gone(elsewhere, range(starts[0], lens.n_layers))
        checked = run_with(lens, tokens, [moved(centre, early)], sites=("z",), layers=list(early), loss=False)
        stds = np.stack([token_std(checked.tensors["z", layer]).numpy() for layer in early])
        numbers[f"left @ {centre}"] = work.ratio(stds[..., 0].mean(0), np.median(stds[..., SETTLED:], axis=-1).mean(0))
    order = ("removed", "half", "isolated", "loss", "ordinary", "left")
    ordered = sorted(numbers.items(), key=lambda one: order.index(one[0].partition(" @ ")[0]))

    figure = new_figure(width=6.4, height=3.2)
    axes = panel(figure, xlabel="layer", ylabel="attention to position 0")
    for name, curve in curves.items():
        axes.plot(
            curve, color=CENTRES.get(name, INK), label=name if name == "no edit" else f"moved to the mean: {name}"
        )
    axes.set_ylim(0, 1)
    legend(axes, columns=2)
    return Measured(numbers=dict(ordered), figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

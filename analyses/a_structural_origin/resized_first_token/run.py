"""Give the first token's aggregated value other directions and sizes, and read what stays of the sink; see claim.md."""

import dataclasses

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import capture, run_with
from sink_lens.edits import centring_means, edit
from sink_lens.report.style import BLUE, GREEN, INK, ORANGE, legend, new_figure, panel, without_formulas

SEED, SETTLED = 2, 8
DIRECTIONS = {"own": INK, "text mean": ORANGE, "value mean": BLUE, "random": GREEN}
SIZES = ("ordinary", "natural")


def measure(work: Work) -> Measured:
    """Measure what goes of the sink, by direction and size."""
    work = dataclasses.replace(work, seed=SEED)
    lens, steps = work.lens, work.steps()
    layers = range(steps[0].last_layer + 1)
    starts = [step.last_layer + 1 for step in steps]
    stops = [step.first_layer for step in steps[1:]] + [lens.n_layers]
    bands = {f"read in {a} to {b - 1}": range(a, b) for a, b in zip(starts, stops, strict=True) if a < b}
    both = work.text(work.size("brown", "moby-dick"), sequences=work.size(64, 16), length=64)
    others, tokens = both[::2], both[1::2]
    z = capture(lens, others, sites=["z"], layers=list(layers), progress=work.progress)
    spread = {layer: z["z", layer].flatten(2).float().std(-1) for layer in layers}
    sizes = {
        "natural": {layer: float(spread[layer][:, 0].mean()) for layer in layers},
        "ordinary": {layer: float(spread[layer][:, SETTLED:].median(dim=1).values.mean()) for layer in layers},
    }
    random = centring_means(lens, n_tokens=work.size(12_800, 1024), seed=SEED, progress=work.progress)
    shape = z["z", 0].shape[-2:]
    drawn = torch.randn(len(layers), *shape, generator=work.generator())
    directions = {
        "text mean": {layer: z["z", layer][:, SETTLED:].float().mean((0, 1)) for layer in layers},
        "value mean": random.values,
        "random": dict(zip(layers, drawn, strict=True)),
    }

    def resized(direction, size):
        def change(values, at):
            found = values if direction == "own" else directions[direction][at.layer].to(values).expand_as(values)
            std = found.flatten(2).std(-1)[..., None, None]
            return found * (sizes[size][at.layer] / std)

        return edit("z_raw", change, positions=[0], layers=list(layers), label=f"{direction}, {size} size")

    clean = run_with(lens, tokens, progress=work.progress)
    numbers, curves = {}, {"no edit": clean.mass[..., 0].mean(dim=(1, 2))}
    for size in SIZES:
        for direction in DIRECTIONS:
            if (direction, size) == ("own", "natural"):
                continue
            found = run_with(lens, tokens, [resized(direction, size)], progress=work.progress)
            for band, read in bands.items():
                full = clean.mass_at(0, layers=read).numpy()
                gone = full - found.mass_at(0, layers=read).numpy()
                numbers[f"{size} @ {direction}, {band}"] = work.ratio(gone, full, least=0.01)
            numbers[f"loss @ {direction}, {size} size"] = work.interval((found.loss - clean.loss).numpy())
            curves[f"{direction}, {size}"] = found.mass[..., 0].mean(dim=(1, 2))
    order = (*SIZES, "loss")
    ordered = dict(sorted(numbers.items(), key=lambda one: order.index(one[0].partition(" @ ")[0])))

    figure = new_figure(width=6.4, height=3.4)
    axes = panel(figure, xlabel="layer", ylabel="attention to position 0")
    for name, curve in curves.items():
        direction, _, size = name.partition(", ")
        style = ":" if size == "natural" else "-" if size else "--"
        axes.plot(np.asarray(curve), color=DIRECTIONS.get(direction, INK), linestyle=style, label=name)
    axes.set_ylim(0, 1)
    legend(axes, columns=3)
    return Measured(numbers=ordered, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

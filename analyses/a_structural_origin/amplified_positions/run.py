"""Attention to an amplified token at several positions, the factor chosen on other sequences; see claim.md."""

import dataclasses

from analyses.claims import Measured, Work, main
from sink_lens import run_with
from sink_lens.edits import amplify, centring_means
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    legend,
    new_figure,
    panel,
    without_formulas,
)

SEED = 1
PLACES = (5, 10, 20, 40)
FACTORS = (2.0, 5.0, 10.0, 30.0)
CENTRES = {"centred_on_values": "values", "centred_on_z": "aggregated", "scaled": "none"}


def measure(work: Work) -> Measured:
    """The rise at each position, on each input, with each centre."""
    work = dataclasses.replace(work, seed=SEED)
    last = work.steps()[0].last_layer
    means = centring_means(
        work.lens, n_tokens=work.size(12_800, 1024), seed=SEED, progress=work.progress
    )
    size = {"sequences": work.size(64, 8), "length": 64}
    inputs = {
        "random tokens": work.random(**size, bos="without"),
        "prose": work.text(work.size("brown", "moby-dick"), **size),
    }
    numbers, natural = {}, {}
    for name, tokens in inputs.items():
        halves = [tokens[half::2] for half in (0, 1)]

        def mass(half, edits, halves=halves):
            """The attention to each position, by sequence."""
            run = run_with(
                work.lens,
                halves[half],
                edits,
                positions=(0, *PLACES),
                layers=[last + 1],
                loss=False,
                quiet=True,
            )
            return {place: run.mass_at(place).numpy() for place in (0, *PLACES)}

        clean = [mass(half, []) for half in (0, 1)]
        natural[name] = float(clean[1][0].mean())
        for number, centre in CENTRES.items():
            for place in PLACES:

                def edit(factor, centre=centre, place=place):
                    return amplify(
                        factor,
                        positions=[place],
                        layers=range(last + 1),
                        centre=centre,
                        means=means,
                    )

                best = max(
                    FACTORS,
                    key=lambda factor, place=place, edit=edit: mass(0, edit(factor))[place].mean(),
                )
                rise = mass(1, edit(best))[place] - clean[1][place]
                numbers[f"{number} @ {name}, position {place}"] = work.interval(rise)

    order = list(CENTRES)
    ordered = dict(sorted(numbers.items(), key=lambda one: order.index(one[0].partition(" @ ")[0])))
    figure = new_figure(width=9.6, height=3.2)
    for side, name in enumerate(inputs):
        axes = panel(
            figure,
            place=(1, 2, side + 1),
            xlabel=f"position ({name})",
            ylabel="rise of the attention to it",
        )
        for number, colour, shift in zip(
            CENTRES, (BLUE, GREEN, ORANGE), (-0.1, 0, 0.1), strict=True
        ):
            found = [ordered[f"{number} @ {name}, position {place}"] for place in PLACES]
            at = [one + shift for one in range(len(PLACES))]
            axes.vlines(
                at, [one.low for one in found], [one.high for one in found], color=colour, alpha=0.5
            )
            axes.plot(
                at,
                [one.estimate for one in found],
                "o",
                color=colour,
                label=number.replace("_", " "),
            )
        axes.axhline(natural[name], color=INK, linestyle="--", label="position 0, no edit")
        axes.set_xticks(range(len(PLACES)), PLACES)
        legend(axes, columns=2)
    return Measured(numbers=ordered, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

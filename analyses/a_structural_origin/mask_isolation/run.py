"""Isolate a token by the attention mask and read the attention to it; see claim.md."""

from analyses.claims import Measured, Work, main
from sink_lens import run_with
from sink_lens.edits import isolate
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

PLACES = (9, 5, 20, 40)


def measure(work: Work) -> Measured:
    """Return what comes to the isolated token, in whole, early and late layers, and what position 0 and the loss do."""
    tokens = work.text(sequences=work.size(32, 4), length=64)
    last_of_first, last = work.steps()[0].last_layer, work.steps()[-1].last_layer
    late = range(last_of_first + 1, work.lens.n_layers)
    keys = (*PLACES, 0)

    def run(edits=(), loss=False):
        return run_with(work.lens, tokens, edits, positions=keys, loss=loss, progress=work.progress)

    baseline = run(loss=True)
    natural = baseline.mass_at(0, layers=late).numpy()

    def share(edited, place):
        came = (edited.mass_at(place, layers=late) - baseline.mass_at(place, layers=late)).numpy()
        return work.ratio(came, natural)

    edited = {place: run(isolate([place]), loss=place == PLACES[0]) for place in PLACES}
    first = edited[PLACES[0]]
    early_only = run(isolate([PLACES[0]], layers=range(last + 1)))
    late_only = run(isolate([PLACES[0]], layers=range(last + 1, work.lens.n_layers)))
    numbers = {f"share @ position {place}": share(edited[place], place) for place in PLACES}
    numbers |= {
        "early_share": share(early_only, PLACES[0]),
        "late_share": share(late_only, PLACES[0]),
        "kept": work.ratio(first.mass_at(0, layers=late).numpy(), natural),
        "loss_change": work.interval((first.loss - baseline.loss).numpy()),
    }

    figure = new_figure(width=6.4, height=3.2)
    axes = panel(figure, xlabel="layer", ylabel="attention from later tokens")
    lines = (
        (baseline, 0, INK, "-", "position 0, no edit"),
        (first, 0, INK, "--", "position 0, 9 isolated"),
        (first, 9, ORANGE, "-", "position 9, isolated"),
        (early_only, 9, GREEN, ":", f"isolated in layers 0-{last}"),
        (baseline, 9, BLUE, "-", "position 9, no edit"),
    )
    for outcome, key, colour, style, label in lines:
        mass = outcome.mass[..., keys.index(key)].mean(dim=(1, 2))
        axes.plot(mass, color=colour, linestyle=style, label=label)
    axes.set_ylim(0, 1)
    legend(axes, columns=2)
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

"""Sets of super neurons against single ones and random ones, columns against entries; see claim.md."""

import tempfile

from analyses.claims import Measured, Work, main
from sink_lens import capture, run_with
from sink_lens.edits.constructors import freeze, scalar
from sink_lens.report.style import BLUE, INK, new_figure, panel, without_formulas
from sink_lens.stats import Interval
from sink_lens.studies import ablate

SAYS = {
    "set_removes": "set",
    "single_removes": "best neuron alone",
    "entries_remove": "set, entries only",
    "random_removes": "random sets",
}


def measure(work: Work) -> Measured:
    """Return what each kind of ablation removes, by growth step, where the sets were found and on the other texts."""
    (_, tokens), *others = work.texts(sequences=work.size(8, 4), length=64).items()

    def ablations():
        with tempfile.TemporaryDirectory() as folder:
            return ablate(work.lens, tokens=tokens, out=folder, progress=work.progress).tables["ablations"]

    table = work.once("ablations", ablations)
    numbers, here = {}, {}
    for step, rows in table.groupby("step"):
        usual = rows.query("method == 'mean_ordinary' and what == 'column' and where == 'sink'")
        chosen = usual.query("kind == 'set'").iloc[0]
        singles = usual.query("kind == 'single'")
        best = singles.loc[singles["removed_share"].idxmax()] if len(singles) else chosen
        entries = rows.query("method == 'zero' and what == 'scalar' and where == 'sink' and kind == 'set'").iloc[0]
        random = usual.query("kind == 'random, same layers'")["removed_share"].to_numpy(float)
        found = {"set_removes": chosen, "single_removes": best, "entries_remove": entries}
        where = f"growth step {step + 1}, {chosen['neurons']}"
        here |= {f"{name} @ {where}": _interval(row) for name, row in found.items()}
        here[f"random_removes @ {where}"] = work.interval(random)
        for text, batch in others:
            shares = _on(work, batch, chosen=chosen, best=best, dimension=work.steps()[step].outlier_dimension)
            numbers |= {f"{name} @ {where}, {text}": share for name, share in shares.items()}
    numbers = here | numbers

    figure = new_figure(width=6.4, height=0.8 + 0.3 * len(here))
    axes = panel(figure, xlabel="share of the sink that goes")
    for place, found in enumerate(here.values()):
        axes.barh(place, found.estimate, color=BLUE, height=0.6)
        axes.plot([found.low, found.high], [place, place], color=INK)
    labels = [name.partition(" @ ") for name in here]
    axes.set_yticks(range(len(here)), [f"{SAYS[kind]}, {where.partition(',')[0]}" for kind, _, where in labels])
    axes.invert_yaxis()
    ordered = sorted(numbers, key=lambda name: tuple(SAYS).index(name.partition(" @ ")[0]))
    return Measured(numbers={name: numbers[name] for name in ordered}, figure=without_formulas(figure))


def _on(work, tokens, *, chosen, best, dimension):
    """Return what a set that was found elsewhere, its best neuron and its entries remove on other sequences."""
    reads = range(chosen["layers_from"], chosen["layers_to"] + 1)
    neurons = _by_layer(chosen["neurons"])
    clean = capture(work.lens, tokens, sites=["neurons"], layers=list(neurons))
    means = {layer: clean["neurons", layer][:, 8:].mean(dim=(0, 1))[None, None] for layer in neurons}

    def columns(units_of):
        return [
            freeze("neurons", {layer: means[layer][..., units]}, units=units, positions=[0])
            for layer, units in units_of.items()
        ]

    def mass(edits):
        run = run_with(work.lens, tokens, edits, layers=reads, loss=False, quiet=True, progress=work.progress)
        return run.mass_at(0, layers=reads).numpy()

    before = mass([])
    edits = {
        "set_removes": columns(neurons),
        "single_removes": columns(_by_layer(best["neurons"])),
        "entries_remove": [
            scalar(work.lens, layer=layer, neurons=units, dimensions=[dimension], positions=[0])
            for layer, units in neurons.items()
        ],
    }
    return {name: work.ratio(before - mass(given), before) for name, given in edits.items()}


def _by_layer(names):
    """``11.1229, 11.1487`` as layer -> neurons."""
    found = {}
    for name in names.split(", "):
        layer, _, neuron = name.partition(".")
        found.setdefault(int(layer), []).append(int(neuron))
    return found


def _interval(row):
    bounds = {"low": float(row["ci_low"]), "high": float(row["ci_high"])}
    return Interval(estimate=float(row["removed_share"]), n=int(row["n"]), **bounds)


if __name__ == "__main__":
    main(measure)

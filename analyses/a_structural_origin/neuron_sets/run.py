"""Sets of super neurons against single ones and random ones, columns against entries; see claim.md."""

import dataclasses

import pandas as pd

from analyses.claims import Measured, Work, main
from sink_lens import capture, run_with
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.makers import Maker, find_makers
from sink_lens.chain.measure import scout
from sink_lens.chain.setting import draw_other_indices, make_setting
from sink_lens.edits.constructors import freeze, scalar
from sink_lens.report.style import BLUE, INK, new_figure, panel, without_formulas

DRAWS = 5
"""Random sets of the same layers and size."""
SAYS = {
    "set_removes": "set",
    "single_removes": "best neuron alone",
    "entries_remove": "set, entries only",
    "random_removes": "random sets",
}


def measure(work: Work) -> Measured:
    """Return what each kind of ablation removes, by growth step, where the sets were found and on the other texts."""
    (first, tokens), *others = work.texts(sequences=work.size(8, 4), length=64).items()
    sets = work.once("sets", lambda: _find_sets(work, tokens))
    numbers, here = {}, {}
    for row in sets.to_dict("records"):
        neurons, where = (
            _by_layer(row["neurons"]),
            f"growth step {row['step'] + 1}, {row['neurons']}",
        )
        given = {
            "reads": range(row["layers_from"], row["layers_to"] + 1),
            "dimension": row["dimension"],
        }
        singles = {
            f"{layer}.{unit}": {layer: [unit]} for layer, units in neurons.items() for unit in units
        }
        alone = _on(work, tokens, neurons, singles, **given)
        best = max(singles, key=lambda name: alone[name].estimate)
        drawn = {
            str(number): _by_layer(draw) for number, draw in enumerate(row["random"].split("; "))
        }
        random = _on(work, tokens, neurons, drawn, **given)
        for text, batch in ((first, tokens), *others):
            columns = {"set_removes": neurons, "single_removes": singles[best]}
            found = _on(work, batch, neurons, columns, entries="entries_remove", **given)
            beside = "" if batch is tokens else f", {text}"
            (here if batch is tokens else numbers).update(
                {f"{name} @ {where}{beside}": one for name, one in found.items()}
            )
        here[f"random_removes @ {where}"] = work.interval([random[name].estimate for name in drawn])
    numbers = here | numbers

    figure = new_figure(width=6.4, height=0.8 + 0.3 * len(here))
    axes = panel(figure, xlabel="share of the sink that goes")
    for place, found in enumerate(here.values()):
        axes.barh(place, found.estimate, color=BLUE, height=0.6)
        axes.plot([found.low, found.high], [place, place], color=INK)
    labels = [name.partition(" @ ") for name in here]
    axes.set_yticks(
        range(len(here)), [f"{SAYS[kind]}, {where.partition(',')[0]}" for kind, _, where in labels]
    )
    axes.invert_yaxis()
    ordered = sorted(numbers, key=lambda name: tuple(SAYS).index(name.partition(" @ ")[0]))
    return Measured(
        numbers={name: numbers[name] for name in ordered}, figure=without_formulas(figure)
    )


def _find_sets(work, tokens):
    """Return for each growth step the fewest neurons of its layers that remove half of the sink behind them."""
    config = TraceConfig(
        sequences=tokens.n_sequences, intervention_sequences=tokens.n_sequences, length=64
    )
    setting = make_setting(
        work.lens, tokens, location=scout(work.lens, tokens, config=config), config=config
    )
    rows, generator = [], work.generator()
    for segment in setting.segments:
        for step in segment.steps:
            behind = dataclasses.replace(setting, read_layers=segment.layers)
            found = find_makers(
                behind, kinds=["neuron"], layers=step.layers, progress=work.progress
            ).sets["half"]
            drawn = [_draw_others(work.lens, found, generator=generator) for _ in range(DRAWS)]
            rows.append(
                {
                    "step": segment.number,
                    "neurons": ", ".join(map(str, found)),
                    "random": "; ".join(", ".join(map(str, some)) for some in drawn),
                    "dimension": step.dimension,
                    "layers_from": segment.layers[0],
                    "layers_to": segment.layers[-1],
                }
            )
    return pd.DataFrame(rows)


def _draw_others(lens, chosen, *, generator):
    """Draw as many other neurons of each layer as the set has."""
    layers = [part.layer for part in chosen]
    return [
        Maker(kind="neuron", layer=layer, unit=unit)
        for layer in dict.fromkeys(layers)
        for unit in draw_other_indices(
            [part.unit for part in chosen if part.layer == layer],
            n=lens.n_neurons(layer),
            generator=generator,
        )
    ]


def _on(work, tokens, neurons, sets, *, reads, dimension, entries=None):
    """Return what setting the columns of each of ``sets`` to their mean removes on the sequences, by its name.

    With ``entries``, what zeroing the entries of ``neurons`` into the outlier dimension removes stands under that name.
    """
    layers = sorted({layer for units_of in sets.values() for layer in units_of})
    clean = capture(work.lens, tokens, sites=["neurons"], layers=layers)
    means = {layer: clean["neurons", layer][:, 8:].mean(dim=(0, 1))[None, None] for layer in layers}

    def mass(edits):
        run = run_with(
            work.lens, tokens, edits, layers=reads, loss=False, quiet=True, progress=work.progress
        )
        return run.mass_at(0, layers=reads).numpy()

    before = mass([])
    edits = {
        name: [
            freeze("neurons", {layer: means[layer][..., units]}, units=units, positions=[0])
            for layer, units in units_of.items()
        ]
        for name, units_of in sets.items()
    }
    if entries is not None:
        edits[entries] = [
            scalar(work.lens, layer=layer, neurons=units, dimensions=[dimension], positions=[0])
            for layer, units in neurons.items()
        ]
    return {name: work.ratio(before - mass(given), before) for name, given in edits.items()}


def _by_layer(names):
    """``11.1229, 11.1487`` as layer -> neurons."""
    found = {}
    for name in names.split(", "):
        layer, _, neuron = name.partition(".")
        found.setdefault(int(layer), []).append(int(neuron))
    return found


if __name__ == "__main__":
    main(measure)

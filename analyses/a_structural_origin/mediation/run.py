"""Which held link takes away the sink that isolation makes; see claim.md."""

import torch

from analyses.claims import Measured, Work, main
from sink_lens import capture, run_with
from sink_lens.edits import isolate
from sink_lens.edits.constructors import freeze
from sink_lens.report.style import BLUE, INK, ORANGE, legend, new_figure, panel, without_formulas

PLACE = 21


def measure(work: Work) -> Measured:
    """The surviving share under each hold and its control, and of the two that matter on every text."""
    base, generator = work.base(), work.generator()
    by_layer = work.supers(base["neurons"]).groupby("layer")["neuron"]
    supers = {int(layer): sorted(neurons) for layer, neurons in by_layer}
    dims = sorted(
        base["dimensions"].query("sink_position == 0 and is_outlier")["dimension"].unique().tolist()
    )

    def others(taken, size):
        pool = [unit for unit in range(size) if unit not in taken]
        return [
            pool[index]
            for index in torch.randperm(len(pool), generator=generator)[: len(taken)].tolist()
        ]

    layers = range(work.lens.n_layers)
    after = layers[work.steps()[0].last_layer + 1 :]
    later = layers[work.steps()[0].last_layer :]
    random_dims = others(dims, work.lens.d_model)
    holds = {
        "dimensions": ("resid_post", dict.fromkeys(later, dims)),
        "neurons": ("neurons", supers),
        "z": ("z_raw", dict.fromkeys(layers)),
        "key": ("k", dict.fromkeys(after)),
        "random_neurons": (
            "neurons",
            {layer: others(units, work.lens.d_mlp) for layer, units in supers.items()},
        ),
        "random_dimensions": ("resid_post", dict.fromkeys(later, random_dims)),
    }
    numbers, curves = {}, {}
    for name, tokens in work.texts(sequences=work.size(16, 4), length=64).items():
        chosen = dict(list(holds.items())[: 2 if curves else None])
        found = _survives(work, tokens, holds=chosen, after=after)
        curves = curves or {link: curve for link, (_, curve) in found.items()}
        numbers |= {
            f"{link} @ {name}": share for link, (share, _) in found.items() if share is not None
        }
    numbers = {
        name: numbers[name] for link in holds for name in numbers if name.startswith(f"{link} @")
    }

    figure = new_figure(width=7.4, height=3.0)
    axes = panel(figure, place=(1, 2, 1), xlabel="share of the sink that survives")
    first = {
        link: next(one for name, one in numbers.items() if name.startswith(f"{link} @"))
        for link in holds
    }
    for place, (link, found) in enumerate(first.items()):
        axes.barh(place, found.estimate, color=ORANGE if "random" in link else BLUE, height=0.6)
        axes.plot([found.low, found.high], [place, place], color=INK)
    axes.set_yticks(range(len(first)), [link.replace("_", " ") for link in first])
    axes.invert_yaxis()
    axes = panel(figure, place=(1, 2, 2), xlabel="layer", ylabel=f"attention to position {PLACE}")
    for name in ("isolated", "neurons", "dimensions", "key"):
        axes.plot(curves[name], label=name if name == "isolated" else f"{name} held")
    legend(axes, columns=2)
    return Measured(numbers=numbers, figure=without_formulas(figure))


def _survives(work, tokens, *, holds, after):
    """Frozen quantity -> (surviving share, attention to the position by layer); isolation alone has no share."""
    sites = sorted({site for site, _ in holds.values()})
    clean = capture(work.lens, tokens, sites=sites, positions=[PLACE], path="bridge")

    def edits(site, units):
        return [
            freeze(
                site,
                {layer: value if some is None else value[..., some]},
                positions=[PLACE],
                units=some,
            )
            for layer, some in units.items()
            for value in [clean[site, layer]]
        ]

    def mass(given):
        run = run_with(
            work.lens,
            tokens,
            given,
            positions=(PLACE,),
            loss=False,
            quiet=True,
            progress=work.progress,
        )
        return run.mass_at(PLACE, layers=after).numpy(), run.mass[..., 0].mean(dim=(1, 2)).numpy()

    isolated = isolate([PLACE])
    before, _ = mass([])
    whole, curve = mass([isolated])
    found = {"isolated": (None, curve)}
    for name, (site, units) in holds.items():
        left, curve = mass([isolated, *edits(site, units)])
        found[name] = (work.ratio(left - before, whole - before, least=0.02), curve)
    return found


if __name__ == "__main__":
    main(measure)

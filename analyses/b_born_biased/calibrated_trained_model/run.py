"""What each variance calibration does to the sink and the loss of a trained model; see claim.md."""

import dataclasses

from analyses.claims import Measured, Work, main
from analyses.variance_calibrations import CALIBRATIONS, calibration
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
from sink_lens.stats import Interval

SEED = 1
COLOURS = dict(zip(CALIBRATIONS, (INK, ORANGE, GREEN, BLUE), strict=True))


def measure(work: Work) -> Measured:
    """Sink and loss under each calibration, against none."""
    work = dataclasses.replace(work, seed=SEED)
    tokens = work.text(work.size("brown", "moby-dick"), sequences=work.size(64, 50), length=64)
    found = work.once(
        "calibration", lambda: calibration(work.lens, tokens, seed=SEED, progress=work.progress)
    )
    rows = found.set_index(["measure", "calibration"])
    clean = rows.loc[("sink_mass", "none"), "value"]
    numbers = {}
    for name in list(CALIBRATIONS)[1:]:
        mass, loss = rows.loc[("sink_mass", name)], rows.loc[("loss", name)]
        effect = [-mass[bound] / clean for bound in ("effect", "effect_high", "effect_low")]
        numbers[f"removed @ {name}"] = Interval(
            **dict(zip(("estimate", "low", "high"), effect, strict=True)), n=len(tokens.tokens)
        )
        bounds = {
            "estimate": loss["effect"],
            "low": loss["effect_low"],
            "high": loss["effect_high"],
        }
        numbers[f"cost @ {name}"] = Interval(**bounds, n=len(tokens.tokens))
    for name in CALIBRATIONS:
        mass = rows.loc[("sink_mass", name)]
        bounds = {"estimate": mass["value"], "low": mass["low"], "high": mass["high"]}
        numbers[f"attention @ {name}"] = Interval(**bounds, n=len(tokens.tokens))
    order = ("removed", "cost", "attention")
    ordered = dict(sorted(numbers.items(), key=lambda one: order.index(one[0].partition(" @ ")[0])))

    figure = new_figure(width=5.4, height=3.2)
    axes = panel(figure, xlabel="change of the loss, nats", ylabel="attention to position 0")
    for name, colour in COLOURS.items():
        at = 0.0 if name == "none" else ordered[f"cost @ {name}"].estimate
        axes.plot(
            at,
            ordered[f"attention @ {name}"].estimate,
            "o",
            color=colour,
            label=name.replace("_", " "),
        )
    axes.set_ylim(0, None)
    legend(axes, columns=2)
    return Measured(numbers=ordered, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

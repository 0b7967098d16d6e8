"""Sparsity of the super neurons' columns of the down-projection; see claim.md."""

import numpy as np

from analyses.claims import Measured, Work, certain, main
from sink_lens.models.weights import mlp_weights
from sink_lens.report.style import BLUE, ORANGE, new_figure, panel, without_formulas


def measure(work: Work) -> Measured:
    """Kurtosis, largest entry and energy of the columns, with the neurons of every text."""
    numbers, strongest = {}, None
    for name, tokens in work.texts(sequences=work.size(32, 8), length=64).items():
        table = work.trace(tokens)["neurons"].query("sink_position == 0")
        table = table.assign(percentile=table.groupby("layer")["column_kurtosis"].rank(pct=True))
        supers = work.supers(table)
        top = supers.loc[supers["contribution_share"].idxmax()]
        column = _column(work, top)
        strongest = strongest or (top, column)
        numbers |= {
            f"kurtosis @ {name}": certain(top["column_kurtosis"]),
            f"percentile @ {name}": certain(supers["percentile"].median()),
            f"top_entry @ {name}": certain(
                (supers["top_dimension"] == supers["outlier_dimension"]).mean()
            ),
            f"energy @ {name}": certain(np.sort(column**2)[-2:].sum() / (column**2).sum()),
        }
    top, column = strongest
    figure = new_figure(width=6.4, height=2.8)
    title = f"entry of neuron {top['layer']}.{top['neuron']}'s column"
    axes = panel(figure, xlabel="residual dimension", ylabel=title)
    axes.vlines(range(len(column)), 0, column, color=BLUE, linewidth=0.8)
    outlier = int(top["outlier_dimension"])
    axes.vlines([outlier], 0, column[outlier], color=ORANGE, linewidth=2)
    axes.annotate(
        f"outlier dimension {outlier}", (outlier, column[outlier]), fontsize=8, color=ORANGE
    )
    return Measured(
        numbers=dict(sorted(numbers.items(), key=_rule)), figure=without_formulas(figure)
    )


def _column(work, neuron):
    return (
        mlp_weights(work.lens, layer=int(neuron["layer"]))
        .w_down[:, int(neuron["neuron"])]
        .float()
        .numpy()
    )


def _rule(entry):
    return ("kurtosis", "percentile", "top_entry", "energy").index(entry[0].partition(" @ ")[0])


if __name__ == "__main__":
    main(measure)

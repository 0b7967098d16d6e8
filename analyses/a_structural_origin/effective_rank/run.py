"""Effective rank of each layer's output with and without the first token; see claim.md."""

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, stream
from sink_lens.measures.rank import effective_rank
from sink_lens.report.style import BLUE, ORANGE, legend, new_figure, panel, without_formulas


def measure(work: Work) -> Measured:
    """Rank by layer on every text, and what is left of it in the middle."""
    middle = slice(work.steps()[-1].last_layer, work.lens.n_layers - 2)

    def ranks(view):
        return torch.stack(
            [effective_rank(view["resid_post"], valid=view.valid, without=w) for w in (0, None)],
            dim=-1,
        )

    reading = Reading(name="rank", sites=("resid_post",), function=ranks)

    def read(tokens):
        """The rank: sequence, layer, without and with."""
        return (
            stream(work.lens, tokens, [reading], progress=work.progress)
            .stacked("rank")
            .transpose(0, 1)
            .numpy()
        )

    texts = work.texts(sequences=work.size(32, 4), length=64)
    found = {name: read(tokens) for name, tokens in texts.items()}
    long = read(work.text(sequences=work.size(8, 3), length=work.size(1024, 128)))

    def left(rows):
        return rows[:, middle].mean() / rows[:, 0].mean()

    numbers = {}
    for key, index in (("left_without", 0), ("left_with", 1)):
        numbers |= {
            f"{key} @ {name}": work.interval(rows[..., index], statistic=left)
            for name, rows in found.items()
        }
    first = next(iter(found.values()))
    numbers["middle_with"] = work.interval(first[:, middle, 1].mean(1))
    numbers["middle_without"] = work.interval(first[:, middle, 0].mean(1))
    numbers["mean_with"], numbers["mean_without"] = (
        work.interval(long[..., index].mean(1)) for index in (1, 0)
    )

    figure = new_figure(width=5.6, height=3.0)
    axes = panel(figure, xlabel="after layer", ylabel="effective rank of 64 tokens")
    for index, colour, label in ((0, ORANGE, "without token 0"), (1, BLUE, "with token 0")):
        for number, rows in enumerate(found.values()):
            mean = np.nanmean(rows[..., index], axis=0)
            axes.plot(
                mean,
                color=colour,
                linewidth=1.2,
                label=f"{label}, each text" if number == 0 else None,
            )
    axes.set_ylim(0, None)
    legend(axes, columns=2)
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

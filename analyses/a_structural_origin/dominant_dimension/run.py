"""How far the outlier dimension dominates the first token, and what setting it to zero or to its mean costs."""

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, run_with, stream
from sink_lens.edits.constructors import freeze, zero
from sink_lens.report.style import BLUE, GREEN, ORANGE, legend, new_figure, panel, without_formulas


def measure(work: Work) -> Measured:
    """The ratio after each growth step, and the edits there."""
    numbers, drawn = {}, []
    tokens = work.text(sequences=work.size(16, 4), length=64)
    outliers = work.base()["dimensions"].query("sink_position == 0 and is_outlier")
    for number, step in enumerate(work.steps()):
        where = f"growth step {number + 1}"
        ratios = _dominance(work, layer=step.last_layer + 1, dimension=step.outlier_dimension)
        for name, rows in zip(("dominance", "dominance_elsewhere"), ratios, strict=True):
            numbers[f"{name} @ {where}"] = work.ratio(*rows.T)
        dims = outliers.query("layer == @step.last_layer")["dimension"].tolist() or [
            step.outlier_dimension
        ]
        costs, gone = _edits(work, tokens, layer=step.last_layer, dims=dims)
        numbers |= {f"{name}_cost @ {where}": work.interval(cost) for name, cost in costs.items()}
        numbers[f"zero_removes @ {where}"] = work.ratio(*gone.T)
        drawn.append((where, {name: numbers[f"{name}_cost @ {where}"] for name in costs}))

    figure = new_figure(width=5.0, height=2.9)
    axes = panel(figure, ylabel="change of the loss, nats")
    for index, (name, colour) in enumerate((("zero", ORANGE), ("mean", BLUE), ("random", GREEN))):
        found = [costs[name] for _, costs in drawn]
        heights = [one.estimate for one in found]
        spread = [
            [one.estimate - one.low for one in found],
            [one.high - one.estimate for one in found],
        ]
        places = np.arange(len(drawn)) + 0.25 * index
        label = {
            "zero": "zero",
            "mean": "mean over sequences",
            "random": "random dimensions, zero",
        }[name]
        axes.bar(places, heights, 0.22, yerr=spread, color=colour, label=label)
    axes.set_xticks(np.arange(len(drawn)) + 0.25, [where for where, _ in drawn])
    legend(axes, columns=3)
    order = (
        "dominance",
        "dominance_elsewhere",
        "zero_cost",
        "mean_cost",
        "random_cost",
        "zero_removes",
    )
    ranked = sorted(numbers, key=lambda name: order.index(name.partition(" @ ")[0]))
    return Measured(
        numbers={name: numbers[name] for name in ranked}, figure=without_formulas(figure)
    )


def _dominance(work, *, layer, dimension):
    """(the dimension, mean of the others), by sequence, of the first token and of the tokens from 8 on."""

    def both(view):
        size = view["attn_in"].abs()
        other = (size.sum(-1) - size[..., dimension]) / (size.shape[-1] - 1)
        pair = torch.stack([size[..., dimension], other], dim=-1)
        return torch.stack([pair[:, 0], pair[:, 8:].mean(1)], dim=1)

    tokens = work.text(sequences=work.size(100, 8), length=64)
    reading = Reading(name="both", sites=("attn_in",), function=both, layers=frozenset({layer}))
    found = stream(work.lens, tokens, [reading], progress=work.progress)["both", layer].numpy()
    return found[:, 0], found[:, 1]


def _edits(work, tokens, *, layer, dims):
    """Change of the loss by sequence under each edit; and (mass that goes under zero, mass before)."""
    late = range(layer + 1, work.lens.n_layers)
    where = {"layers": [layer], "positions": [0]}
    clean = run_with(work.lens, tokens, sites=("resid_post",))
    mean = clean.tensors["resid_post", layer][:, [0]][..., dims].mean(0, keepdim=True)
    pool = [dimension for dimension in range(work.lens.d_model) if dimension not in dims]
    order = [
        torch.randperm(len(pool), generator=work.generator().manual_seed(draw)).tolist()
        for draw in range(5)
    ]
    random = [[pool[index] for index in drawn[: len(dims)]] for drawn in order]
    zeroed = run_with(work.lens, tokens, zero("resid_post", units=dims, **where))
    held = run_with(
        work.lens, tokens, freeze("resid_post", {layer: mean}, units=dims, **where), quiet=True
    )
    controls = [
        run_with(work.lens, tokens, zero("resid_post", units=some, **where)).loss for some in random
    ]
    costs = {"zero": zeroed.loss, "mean": held.loss, "random": torch.stack(controls).mean(0)}
    before = clean.mass_at(0, layers=late)
    gone = torch.stack([before - zeroed.mass_at(0, layers=late), before], dim=1)
    return {name: (loss - clean.loss).numpy() for name, loss in costs.items()}, gone.numpy()


if __name__ == "__main__":
    main(measure)

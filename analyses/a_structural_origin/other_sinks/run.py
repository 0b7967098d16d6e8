"""Attention to delimiters and to other positions than the first, and their norm; see claim.md."""

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, stream
from sink_lens.measures.attention import sink_score
from sink_lens.report.style import BLUE, INK, new_figure, panel, without_formulas

LENGTH, LAST_KEY, LAST_SECOND, AFTER = 64, 48, 40, 4
DELIMITERS, STOPS = set(".,;:\n"), set(".\n")


def measure(work: Work) -> Measured:
    """Norm, attention and second sinks on every text."""
    late = range(work.steps()[0].last_layer + 1, work.lens.n_layers)
    peak = int(work.base()["layers"].set_index("layer")["norm_ratio"].idxmax())
    numbers, drawn = {}, {}
    for name, tokens in work.texts(sequences=work.size(60, 8), length=LENGTH).items():
        kinds = [
            [_kind(work.lens.tokenizer.decode([token])) for token in row]
            for row in tokens.tokens.tolist()
        ]
        streamed = stream(
            work.lens, tokens, _readings(late, peak), keys=range(LENGTH), progress=work.progress
        )
        mass = streamed.stacked("mass").mean(0).numpy()[:, 1:LAST_KEY]  # sequence, key
        marks = np.array([[kind > 0 for kind in row] for row in kinds])[:, 1:LAST_KEY]
        relative = mass / mass.mean(0)
        sums = np.stack(
            [(relative * marks).sum(1), marks.sum(1), (relative * ~marks).sum(1), (~marks).sum(1)],
            axis=1,
        )
        norms = streamed["norm", peak].numpy()
        ratios = [
            row[_first_stop(kind)] / np.median(row[8:])
            for row, kind in zip(norms, kinds, strict=True)
            if 2 in kind[1:]
        ]
        numbers[f"norm @ {name}"] = work.interval(ratios)
        numbers[f"delimiters @ {name}"] = work.interval(sums, statistic=_ratio)
        numbers[f"second @ {name}"] = work.interval(streamed.stacked("second").mean(0).numpy())
        drawn[name] = numbers[f"delimiters @ {name}"]

    figure = new_figure(width=5.4, height=2.6)
    axes = panel(figure, xlabel="attention to delimiters ÷ other tokens, position taken out")
    for place, found in enumerate(drawn.values()):
        axes.barh(place, found.estimate, color=BLUE, height=0.6)
        axes.plot([found.low, found.high], [place, place], color=INK)
    axes.axvline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(drawn)), list(drawn))
    axes.invert_yaxis()
    order = ("norm", "delimiters", "second")
    ranked = sorted(numbers, key=lambda one: order.index(one.partition(" @ ")[0]))
    return Measured(numbers={one: numbers[one] for one in ranked}, figure=without_formulas(figure))


def _readings(late, peak):
    def mass(view):
        columns = view["mass"].mean(1)  # sequence, query, key
        query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        counted = query >= key + AFTER
        return (columns * counted).sum(1) / counted.sum(0)

    def second(view):
        scores = [
            sink_score(view["mass"][..., key], valid=view.valid, key=key)
            for key in range(1, LAST_SECOND + 1)
        ]
        return (torch.stack(scores).amax(0) > 0.3).float().mean(1)

    return [
        Reading(name="mass", sites=("mass",), function=mass, layers=frozenset(late)),
        Reading(name="second", sites=("mass",), function=second),
        Reading(
            name="norm",
            sites=("resid_post",),
            function=lambda view: view["resid_post"].norm(dim=-1),
            layers=frozenset({peak}),
        ),
    ]


def _kind(text):
    """0: no delimiter; 1: one; 2: a full stop or a line break."""
    marks = set(text.replace(" ", ""))
    return 0 if not marks or marks - DELIMITERS else 2 if marks <= STOPS else 1


def _first_stop(kinds):
    return next(place for place, kind in enumerate(kinds) if place and kind == 2)


def _ratio(rows):
    marked, n_marked, other, n_other = rows.sum(0)
    return (marked / n_marked) / (other / n_other) if n_marked else np.nan


if __name__ == "__main__":
    main(measure)

"""Sink rate by kind of token, with BOS and without; see claim.md."""

from analyses.claims import Measured, Work, main
from sink_lens import Reading, TokenBatch, stream
from sink_lens.measures.attention import sink_score
from sink_lens.report.style import BLUE, INK, new_figure, panel, without_formulas

THRESHOLD = 0.3


def measure(work: Work) -> Measured:
    """The sink rate for each kind of tokens, by sequence."""

    def over(view):
        return (
            (sink_score(view["mass"][..., 0], valid=view.valid, key=0) > THRESHOLD).float().mean(1)
        )

    def rate(tokens):
        found = stream(
            work.lens,
            tokens,
            [Reading(name="over", sites=("mass",), function=over)],
            progress=work.progress,
        )
        return work.interval(found.stacked("over").mean(0).numpy())

    size = {"sequences": work.size(100, 8), "length": 64}
    numbers = {}
    for suffix, bos in (("", "without"), ("_bos", "with")):
        numbers[f"random{suffix}"] = rate(work.random(bos=bos, **size))
        repeated = {
            "generator": work.generator(),
            "vocab_size": len(work.lens.tokenizer),
            "bos": bos,
        }
        numbers[f"repeated{suffix}"] = rate(
            TokenBatch.repeated(work.lens.tokenizer, **repeated, **size)
        )
        numbers[f"text{suffix}"] = rate(work.text(bos=bos, **size))

    figure = new_figure(width=5.4, height=2.6)
    axes = panel(figure, xlabel=f"share of layers and heads with a sink score over {THRESHOLD}")
    for place, found in enumerate(numbers.values()):
        axes.barh(place, found.estimate, color=BLUE, height=0.6)
        axes.plot([found.low, found.high], [place, place], color=INK)
    axes.set_yticks(range(len(numbers)), [name.replace("_bos", ", after BOS") for name in numbers])
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)

"""Sets of super neurons against single ones and random ones, columns against entries; see claim.md."""

import tempfile

from sink_lens import ablate
from sink_lens.claims import Measured, Work, main
from sink_lens.report.drawing import BLUE, canvas, finished, panel
from sink_lens.stats import Interval

RANDOM = "random, same layers"


def measure(work: Work) -> Measured:
    """What each kind of ablation removes, by growth step."""
    tokens = work.text(sequences=work.size(8, 4), length=64)

    def ablations():
        with tempfile.TemporaryDirectory() as folder:
            return ablate(work.lens, tokens=tokens, out=folder, progress=work.progress).frames["ablations"]

    table = work.once("ablations", ablations)
    columns = table.query("method == 'mean' and what == 'column' and where == 'sink'")
    entries = table.query("method == 'zero' and what == 'scalar' and where == 'sink' and kind == 'set'")
    numbers = {}
    for step in sorted(table["step"].unique()):
        here = columns.query("step == @step")
        chosen = here.query("kind == 'set'").iloc[0]
        singles = here.query("kind == 'single'")
        best = singles.loc[singles["removed_share"].idxmax()] if len(singles) else chosen
        where = f"growth step {step + 1}, {chosen['size']} neurons"
        numbers[f"set_removes @ {where}"] = _interval(chosen)
        numbers[f"single_removes @ {where}"] = _interval(best)
        numbers[f"entries_remove @ {where}"] = _interval(entries.query("step == @step").iloc[0])
        drawn = here.query("kind == @RANDOM")
        numbers[f"random_removes @ {where}"] = work.interval(drawn["removed_share"].to_numpy(float))

    figure = canvas(width=6.4, height=0.8 + 0.3 * len(numbers))
    axes = panel(figure, xlabel="share of the sink that goes")
    for place, found in enumerate(numbers.values()):
        axes.barh(place, found.estimate, color=BLUE, height=0.6)
        axes.plot([found.low, found.high], [place, place], color="#222222")
    says = {"set": "set", "single": "best neuron alone", "entries": "set, entries only", "random": "random sets"}
    labels = [f"{says[name.partition('_')[0]]}, {name.partition(' @ ')[2]}" for name in numbers]
    axes.set_yticks(range(len(numbers)), labels)
    axes.invert_yaxis()
    ordered = sorted(numbers, key=lambda name: tuple(says).index(name.partition("_")[0]))
    return Measured(numbers={name: numbers[name] for name in ordered}, figure=finished(figure))


def _interval(row):
    return Interval(estimate=row["removed_share"], low=row["ci_low"], high=row["ci_high"], n=int(row["n"]))


if __name__ == "__main__":
    main(measure)

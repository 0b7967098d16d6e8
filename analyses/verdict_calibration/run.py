"""What `trace` says of models whose mechanism is known, beside the truth; see claim.md.

Public names only. One row of ``verdicts.csv`` a (model, seed, link); the confusion is counted from it.
"""

from dataclasses import replace

import pandas as pd

from sink_lens import TraceConfig, from_tensor, trace, wrap
from sink_lens.claims import Measured, Work, certain, main
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.models.zoo import LINKS, ZOO, build
from sink_lens.report.drawing import BLUE, INK, OCHRE, ORANGE, canvas, finished, legend, panel

SEEDS = (0, 1, 2)
"""Every model on each; of several architectures one after another."""
TINY = ("bos_neuron", "sigmoid")
OUTCOMES = ("right", "wrong", "undecided")
COLOURS = {"right": BLUE, "wrong": ORANGE, "undecided": OCHRE}


def measure(work: Work) -> Measured:
    """Shares of the links that are answered rightly, wrongly and not, over all models and seeds."""
    names, seeds = work.size(tuple(ZOO), TINY), work.size(SEEDS, SEEDS[:1])
    committed = work.folder / "verdicts.csv"
    if work.retrain or work.tiny or not committed.exists():
        parts = [traced(work, name, seed) for name in names for seed in seeds]
        table = pd.concat(parts, ignore_index=True)
        if not work.tiny:
            table.to_csv(committed, index=False, lineterminator="\n")
    else:
        table = pd.read_csv(committed, keep_default_na=False)
    asked = table[table["truth"] != "not asked"]
    numbers = {f"sink {outcome}": certain((_per_model(table)["sink_outcome"] == outcome).mean()) for outcome in OUTCOMES[:2]}
    for truth, says in (("intact", "no"), ("broken", "yes")):
        of = asked[asked["truth"] == truth]
        wrong = "fails" if says == "no" else "holds"
        numbers[f"{truth} link answered {says}"] = certain((of["verdict"] == wrong).mean())
        numbers[f"{truth} link undecided"] = certain((of["verdict"] == "undecided").mean())
        for link in LINKS:
            at_link = of[of["link"] == link]
            if len(at_link):
                numbers[f"{truth} link answered {says} @ {link}"] = certain((at_link["verdict"] == wrong).mean())
    return Measured(numbers=numbers, figure=drawn(asked))


def traced(work: Work, name: str, seed: int) -> pd.DataFrame:
    """One model: link, truth, what the trace said, and where it said the sink was."""
    families = ZOO[name].families
    model = build(name, seed=seed, family=families[seed % len(families)])
    return work.once(f"{name}-{seed}", lambda: _traced(work, model))


def _traced(work: Work, zoo) -> pd.DataFrame:
    generator = work.generator()
    tokens = zoo.draw(work.size(16, 8), length=64, generator=generator)
    lens = replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=f"{zoo.name}, {zoo.family}, seed {zoo.seed}")
    folder = work.out / f"trace-{zoo.name}-{zoo.seed}"
    config = TraceConfig(model=lens.name, twin=False)
    found = trace(lens, config=config, tokens=from_tensor(tokens), out=folder, overwrite=True, progress=False)
    said = found.links.drop_duplicates("link").set_index("link")
    summary = found.frames["summary"].set_index("quantity")
    at, note = int(float(summary.loc["sink_position", "value"])), str(summary.loc["sink_position", "note"])
    rows = []
    for link in LINKS:
        answers = zoo.truth.links[link]
        truth = truth_of(answers.present, answers.necessary_or_sufficient)
        rows.append(
            {
                "model": zoo.name,
                "family": zoo.family,
                "seed": zoo.seed,
                "link": link,
                "present": answers.present,
                "necessary_or_sufficient": answers.necessary_or_sufficient,
                "carries": answers.carries,
                "truth": truth,
                "verdict": said.loc[link, "verdict"],
                "measured": said.loc[link, "measured"],
                "cut": said.loc[link, "cut"],
                "outcome": outcome_of(truth, said.loc[link, "verdict"]),
                "sink": zoo.truth.sink,
                "sink_found": not note.startswith("no position"),
                "sink_position": at,
                "sink_outcome": sink_outcome(zoo, tokens, found=not note.startswith("no position"), at=at),
            }
        )
    return pd.DataFrame(rows)


def truth_of(present: str, necessary: str) -> str:
    """Today's verdict is one word for two questions: a link holds if it is seen and its break matters."""
    if "not applicable" in (present, necessary) and "no" not in (present, necessary):
        return "not asked"
    return "intact" if (present, necessary) == ("yes", "yes") else "broken"


def outcome_of(truth: str, verdict: str) -> str:
    """Right, wrong or undecided; of a link of which nothing is to be said, any word but undecided is wrong."""
    if verdict == "undecided":
        return "right" if truth == "not asked" else "undecided"
    return "right" if (truth, verdict) in (("intact", "holds"), ("broken", "fails")) else "wrong"


def sink_outcome(zoo, tokens, *, found: bool, at: int) -> str:
    """Whether a sink was found where there is one, and none where there is none."""
    places = zoo.sinks(tokens)
    if not places.any():
        return "wrong" if found else "right"
    return "right" if found and bool(places[:, at].any()) else "wrong"


def _per_model(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop_duplicates(["model", "seed"])


def drawn(asked: pd.DataFrame):
    """How many of the answers of a link are right, wrong and undecided, where there is something to answer."""
    figure = canvas(width=7.4, height=3.2)
    axes = panel(figure, place=(1, 1, 1), xlabel="answers")
    counted = asked.groupby(["link", "outcome"]).size().unstack(fill_value=0)
    for place, link in enumerate(LINKS):
        left = 0
        for outcome in OUTCOMES:
            size = int(counted.loc[link].get(outcome, 0)) if link in counted.index else 0
            axes.barh(place, size, left=left, color=COLOURS[outcome], edgecolor=INK, linewidth=0.3, height=0.6)
            left += size
    for outcome in OUTCOMES:
        axes.barh(0, 0, color=COLOURS[outcome], label=outcome)
    axes.set_yticks(range(len(LINKS)), [link.replace("_", " ") for link in LINKS])
    axes.invert_yaxis()
    legend(axes, columns=3)
    return finished(figure)


if __name__ == "__main__":
    main(measure)

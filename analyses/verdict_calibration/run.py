"""What ``trace`` says of models whose mechanism is known, beside the truth; see claim.md.

``verdicts.csv`` has one row a (model, seed, link), ``table.md`` one line a model; ``--retrain`` traces all again.
"""

from dataclasses import replace

import pandas as pd
from scipy.stats import binomtest

from analyses.claims import Measured, Work, main
from sink_lens import TokenBatch, TraceConfig, trace, wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.models.zoo import LINKS, ZOO, build
from sink_lens.report.style import BLUE, INK, OCHRE, ORANGE, canvas, finished, legend, panel
from sink_lens.stats import Interval

SEEDS = (0, 1)
"""Every model on each; of several architectures one after another: the first, then from the last on."""
TINY = ("bos_neuron", "sigmoid")
COLOURS = {"right": BLUE, "wrong": ORANGE, "undecided": OCHRE}
WORDS = {"intact": {"holds": "right", "fails": "wrong"}, "broken": {"fails": "right", "holds": "wrong"}}
MARKS = {"right": "right", "wrong": "**wrong**", "undecided": "undecided"}


def measure(work: Work) -> Measured:
    """How often a link is answered wrongly or not at all, over all models and seeds, and link by link."""
    committed = work.folder / "verdicts.csv"
    if work.retrain or work.tiny:
        names, seeds = work.size(tuple(ZOO), TINY), work.size(SEEDS, SEEDS[:1])
        parts = [
            work.once(f"{name}-{seed}", lambda name=name, seed=seed: traced(work, name, seed))
            for seed in seeds
            for name in names
        ]
        table = pd.concat(parts, ignore_index=True)
        if not work.tiny:
            table.to_csv(committed, index=False, lineterminator="\n")
            (work.folder / "table.md").write_text(markdown(table), encoding="utf-8")
    else:
        table = pd.read_csv(committed)
    models = table.drop_duplicates(["model", "seed"])
    numbers = {"sink_wrong": share(models["sink_answer"] == "wrong")}
    for truth, verdict, name in (
        ("intact", "fails", "intact_no"),
        ("intact", "undecided", "intact_undecided"),
        ("broken", "holds", "broken_yes"),
        ("broken", "undecided", "broken_undecided"),
        ("seen", "fails", "seen_no"),
    ):
        of = table[table["truth"] == truth]
        numbers[name] = share(of["verdict"] == verdict)
        for link in LINKS:
            if (of["link"] == link).any():
                numbers[f"{name} @ {link}"] = share(of.loc[of["link"] == link, "verdict"] == verdict)
    not_asked = table.loc[table["truth"] == "not asked", "verdict"]
    numbers["not_asked_answered"] = share(~not_asked.isin(["undecided", "not applicable"]))
    for present, verdict, name in (("yes", "fails", "measured_no"), ("no", "holds", "measured_yes")):
        numbers[name] = share(table.loc[table["present"] == present, "measured"] == verdict)
    return Measured(numbers=numbers, figure=drawn(table))


def share(true: pd.Series) -> Interval:
    """A share with its exact 95% interval."""
    if not len(true):
        return Interval(estimate=float("nan"), low=float("nan"), high=float("nan"), n=0)
    found = binomtest(int(true.sum()), len(true))
    bounds = found.proportion_ci()
    return Interval(estimate=found.statistic, low=bounds.low, high=bounds.high, n=len(true))


def traced(work: Work, name: str, seed: int) -> pd.DataFrame:
    """One model: of every link the truth and what the trace says, and whether the sink was found."""
    families = ZOO[name].families
    zoo = build(name, seed=seed, family=families[-seed % len(families)])
    tokens = zoo.draw(8, length=work.size(48, 32), generator=work.generator())
    lens = replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=f"{name}, {zoo.family}, seed {seed}")
    config, folder = TraceConfig(model=lens.name, random_init=False), work.out / f"trace-{name}-{seed}"
    found = trace(
        lens, config=config, tokens=TokenBatch.from_tensor(tokens), out=folder, overwrite=True, progress=False
    )
    said = found.links.drop_duplicates("link").set_index("link")
    sink = found.tables["summary"].set_index("quantity").loc["sink_position"]
    position, sees_one = int(float(sink["value"])), not str(sink["note"]).startswith("no position")
    places = zoo.sinks(tokens)
    if places.any():
        sink_answer = "right" if sees_one and bool(places[:, position].any()) else "wrong"
    else:
        sink_answer = "wrong" if sees_one else "right"
    rows = []
    for link in LINKS:
        answers, verdict = zoo.truth.links[link], said.loc[link, "verdict"]
        truth = truth_of(answers.present, answers.necessary_or_sufficient)
        rows.append(
            {
                "model": name,
                "letter": ZOO[name].letter,
                "family": zoo.family,
                "seed": seed,
                "link": link,
                "present": answers.present,
                "necessary_or_sufficient": answers.necessary_or_sufficient,
                "carries": answers.carries,
                "truth": truth,
                "verdict": verdict,
                "measured": said.loc[link, "measured"],
                "intervened": said.loc[link, "intervened"],
                "answer": answer_of(truth, verdict),
                "sink": zoo.truth.sink,
                "sink_found": sees_one,
                "sink_position": position,
                "sink_answer": sink_answer,
            }
        )
    return pd.DataFrame(rows)


def truth_of(present: str, necessary: str) -> str:
    """A verdict is one word for two questions: whether a link is seen, and whether its break matters to a sink."""
    if "no" in (present, necessary):
        return "broken"
    if present == "yes":
        return "intact" if necessary == "yes" else "seen"
    return "not asked"


def answer_of(truth: str, verdict: str) -> str:
    """Right, wrong or undecided; without a sink, or a start of the link, a word that decides nothing is right."""
    if truth in ("seen", "not asked"):
        return "right" if verdict in ("undecided", "not applicable") else "wrong"
    return WORDS[truth].get(verdict, "undecided")


def markdown(table: pd.DataFrame) -> str:
    """One line a model: its sink, and each link's answers as right / wrong / undecided over its seeds."""
    names = ["", "model", "sink", *(link.replace("_", " ") for link in LINKS)]
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join(['---'] * len(names))} |"]
    for model, of_model in table.groupby("model", sort=False):
        cells = [
            str(of_model["letter"].iloc[0]),
            f"`{model}`",
            counted(of_model.drop_duplicates("seed")["sink_answer"]),
        ]
        for link in LINKS:
            at = of_model[of_model["link"] == link]
            truth = " or ".join(sorted(set(at["truth"])))
            cells.append(f"{truth}: {counted(at['answer'])}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def counted(answers: pd.Series) -> str:
    """``right``, or ``2 right, 1 **wrong**`` where they differ."""
    counts = {name: int((answers == name).sum()) for name in MARKS if (answers == name).any()}
    if len(counts) == 1:
        return MARKS[next(iter(counts))]
    return ", ".join(f"{count} {MARKS[name]}" for name, count in counts.items())


def drawn(table: pd.DataFrame):
    """How many of the answers of a link are right, wrong and undecided, where there is something to answer."""
    figure, asked = canvas(width=7.4, height=3.2), table[table["truth"].isin(list(WORDS))]
    axes = panel(figure, place=(1, 1, 1), xlabel="answers to intact and broken links")
    for place, link in enumerate(LINKS):
        answers, left = asked.loc[asked["link"] == link, "answer"], 0
        for name, colour in COLOURS.items():
            size = int((answers == name).sum())
            label = name if place == 0 else None
            axes.barh(place, size, left=left, color=colour, edgecolor=INK, linewidth=0.3, height=0.6, label=label)
            left += size
    axes.set_yticks(range(len(LINKS)), [link.replace("_", " ") for link in LINKS])
    axes.invert_yaxis()
    legend(axes, columns=3)
    return finished(figure)


if __name__ == "__main__":
    main(measure)

"""Softmax and head-wise RMSNorm with two gains, trained where softmax has a sink; see claim.md."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analyses.claims import Measured, Work, main
from analyses.prose_and_trigger import (
    BUDGETS,
    JUDGED_AT,
    SEEDS,
    TRIAL_SEED,
    Asked,
    against_softmax,
    best_rate,
    draw_bands,
    draw_trials,
    ends_of,
    hold_parity,
    judged_seeds,
    minus,
    of_softmax,
    styles_of,
    training,
)
from sink_lens.report.style import legend, new_figure, panel, without_formulas
from sink_lens.stats import Interval

ARMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "shared gain": {"value_norm": "shared", "value_norm_init": "first_token"},
    "a gain a head": {
        "value_norm": "per_head",
        "value_norm_init": "dummy_pass",
        "decay_unshared_gain": True,
    },
}
"""What each changes in ``TrainConfig``: the norm of the paper's text, and that of the authors' code."""
STYLES = styles_of(list(ARMS))
BY_HAND, NORM = "parity by hand", "shared gain"
MECHANISM = {BY_HAND: 1.0, NORM: 0.5}
"""Arm that is trained to explain the norm's loss -> its rate over the norm's best."""
RATES = (2e-3, 4e-3, 8e-3)
RUN = ["budget", "kind", "arm", "rate", "seed"]
FILE = "runs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of an arm."""

    budget: str
    kind: str
    """trial, final or mechanism."""
    arm: str
    rate: float
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what tells it from the others in the table."""
        return tuple(getattr(self, name) for name in RUN)

    @property
    def asked(self) -> Asked:
        """Return what is trained."""
        return Asked(
            budget=self.budget,
            rate=self.rate,
            seed=self.seed,
            is_trial=self.kind == "trial",
            fields=ARMS.get(self.arm, {}),
            change=parity_of_the_norm if self.arm == BY_HAND else None,
        )


def measure(work: Work) -> Measured:
    """The committed trainings, judged; with ``--retrain`` those that are missing are trained first, one by one."""
    table = trained(work)
    numbers: dict[str, Interval] = {}
    for budget in BUDGETS:
        seeds = judged_seeds(of_budget(table, budget), list(ARMS))
        if seeds or not numbers:
            numbers |= numbers_of(table, budget, seeds)
    numbers |= mechanism_of(table, explained(work))
    return Measured(numbers=numbers, figure=draw(table))


def trained(work: Work) -> pd.DataFrame:
    """All rows; each training's are appended to the committed table when it ends, so that any machine can go on."""
    path = work.folder / FILE
    rows = [pd.read_csv(path)] if path.exists() and not work.tiny else []
    while work.tiny or work.retrain:
        table = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=RUN)
        missing = next(not_there(table, work), None)
        if missing is None:
            break
        found = pd.DataFrame(list(training(work, missing.asked))).assign(
            **{name: getattr(missing, name) for name in RUN}
        )
        rows.append(found)
        if not work.tiny:
            text = pd.concat(rows, ignore_index=True)
            text = text[[*RUN, *(name for name in text if name not in RUN)]]
            text.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
            print(f"{missing.key}: prose {found['prose'].iloc[-1]:.4f}", flush=True)
    return pd.concat(rows, ignore_index=True)


def not_there(table: pd.DataFrame, work: Work) -> Iterator[Training]:
    """The trainings that the table lacks, in the order in which they are made: trials first, then seed by seed."""
    done = {tuple(row) for row in table[RUN].drop_duplicates().itertuples(index=False)}
    for budget in work.size(tuple(BUDGETS), ("short",)):
        trials = [
            Training(budget=budget, kind="trial", arm=arm, rate=rate, seed=TRIAL_SEED)
            for rate in work.size(RATES, RATES[:2])
            for arm in ARMS
        ]
        missing = [one for one in trials if one.key not in done]
        yield from missing
        for seed in [] if missing else work.size(SEEDS, SEEDS[:3]):
            for arm in ARMS:
                one = Training(
                    budget=budget,
                    kind="final",
                    arm=arm,
                    rate=best_rate(table, budget=budget, arm=arm),
                    seed=seed,
                )
                if one.key not in done:
                    yield one
        for seed in SEEDS[: min(JUDGED_AT)] if budget == explained(work) and not missing else ():
            for arm, factor in MECHANISM.items():
                rate = best_rate(table, budget=budget, arm=NORM) * factor
                one = Training(budget=budget, kind="mechanism", arm=arm, rate=rate, seed=seed)
                if one.key not in done:
                    yield one


def explained(work: Work) -> str:
    """The budget whose loss is explained."""
    return work.size("extended", "short")


def parity_of_the_norm(model: Any, another: Any) -> None:
    """Hold the size that the norm begins at."""
    hold_parity(model, sizes=another(**ARMS[NORM]).mean_gains())


def numbers_of(table: pd.DataFrame, budget: str, seeds: Sequence[int]) -> dict[str, Interval]:
    """Every number of one budget, over seeds, paired with softmax of the same seed; 95% t intervals.

    Fewer seeds than are judged have no interval.
    """
    finals = of_budget(table, budget)
    finals = finals[finals["seed"].isin(seeds)]
    numbers = {}
    for arm in list(ARMS)[1:]:
        numbers |= {
            f"{name} @ {arm}, {budget}": one
            for name, one in against_softmax(finals, arm, seeds).items()
        }
    return numbers | {f"{name} @ {budget}": one for name, one in of_softmax(finals).items()}


def mechanism_of(table: pd.DataFrame, budget: str) -> dict[str, Interval]:
    """Return what explains the norm's loss on prose, over three seeds, paired; nan where nothing is trained."""
    ends = ends_of(table[table["budget"] == budget])
    softmax, norm, by_hand = ("final", "softmax"), ("final", NORM), ("mechanism", BY_HAND)
    return {
        "by_hand": minus(ends, by_hand, softmax),
        "gradient": minus(ends, norm, by_hand),
        "lower_rate": minus(ends, ("mechanism", NORM), softmax),
    }


def of_budget(table: pd.DataFrame, budget: str) -> pd.DataFrame:
    """The rows of the trainings of one budget that are no trials, by step."""
    return table[(table["budget"] == budget) & (table["kind"] == "final")].sort_values("step")


def draw(table: pd.DataFrame):
    """Loss on prose by tokens, its difference to softmax and the sink on prose, with bands of the mean; the trials."""
    budget = next(
        name
        for name in reversed(BUDGETS)
        if name == "short" or judged_seeds(of_budget(table, name), list(ARMS))
    )
    finals = of_budget(table, budget)
    panels = {
        "loss on prose, nats": ("prose", False),
        "minus softmax's, nats": ("prose", True),
        "heads with a sink, prose": ("rate_first_prose", False),
    }
    shown = (
        panels if len(finals) else {}
    )  # before the first seed is there the trials are drawn alone
    figure = new_figure(width=11 if shown else 4.8, height=3.2)
    for place, (ylabel, (name, paired)) in enumerate(shown.items()):
        axes = panel(figure, place=(1, 4, place + 1), xlabel="tokens, thousands", ylabel=ylabel)
        draw_bands(axes, finals, STYLES, name=name, paired=paired, unit=1e3)
    place = (1, len(shown) + 1, len(shown) + 1)
    axes = panel(figure, place=place, xlabel="learning rate", ylabel="loss on prose, trials")
    draw_trials(axes, table[(table["budget"] == budget) & (table["kind"] == "trial")], STYLES)
    legend(axes, columns=3, over=figure)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

"""Where the largest dimension of position 0, and the neuron that writes it, stood at first; see claim.md."""

from itertools import combinations, product

import numpy as np
import pandas as pd

from analyses.claims import Measured, Work, certain, main
from sink_lens import OriginConfig, seed_to_sink, train
from sink_lens.report.origins import draw
from sink_lens.training.config import read_train

ARMS = {"softmax": "none", "headnorm": "shared", "position": "position"}
"""Arms of one seed begin with the same weights and see the same data."""
SEEDS = (0, 1, 2)


def measure(work: Work) -> Measured:
    """The places and the corrected p, of the committed tables or of models that are trained here."""
    if work.retrain:
        course, ranks, tests = asked(work)
    else:
        course, ranks, tests = (pd.read_csv(work.folder / f"{name}.csv") for name in ("course", "ranks", "tests"))
    places = tests.set_index("statistic")["place"]
    smallest = tests.groupby("of")["p_holm"].min()
    ends = course[course["step"] == course["step"].max()].set_index(["arm", "seed"])["dimension"]
    pairs = [
        (a[1] == b[1], ends[a] == ends[b])
        for a, b in combinations(product(ends.index.unique("arm"), SEEDS), 2)
        if a[0] != b[0]
    ]
    numbers = {
        "dimension_p": certain(smallest["dimension"]),
        "neuron_p": certain(smallest["neuron"]),
        "first_state": certain(places["first_state"]),
        "contraction": certain(places["contraction"]),
        "same_seed": certain(np.mean([same for of_one_seed, same in pairs if of_one_seed])),
        "other_seed": certain(np.mean([same for of_one_seed, same in pairs if not of_one_seed])),
    }
    softmax = course[course["arm"] == "softmax"]
    return Measured(numbers=numbers, figure=draw(course=softmax, ranks=ranks, tests=tests))


def asked(work: Work):
    """The same of models that are trained beside the run folder where they are not yet."""
    found = {}
    for arm, norm in ARMS.items():
        runs = [work.shared / f"{arm}-{seed}" for seed in SEEDS]
        for seed, folder in zip(SEEDS, runs, strict=True):
            config = read_train(work.folder / "train.toml", seed=seed, value_norm=norm)
            train(config, out=folder, progress=work.progress)
        found[arm] = seed_to_sink(runs, config=OriginConfig(seed=work.seed), progress=work.progress)
    course = pd.concat([one.course.assign(arm=arm) for arm, one in found.items()], ignore_index=True)
    return course, found["softmax"].ranks, found["softmax"].tests


if __name__ == "__main__":
    main(measure)

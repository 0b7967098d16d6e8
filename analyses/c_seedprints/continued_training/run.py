"""Models that are trained on with other data, three generations of them, and which fingerprints tell; see claim.md."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch

from analyses.claims import Measured, Work, certain, main
from analyses.fingerprint_baselines import (
    cka,
    intrinsic_correlation,
    invariant_cosine,
    parameter_cosine,
)
from analyses.lineages import auc
from analyses.texts import documents
from sink_lens import wrap
from sink_lens.data.corpora import bundled_text
from sink_lens.identity import FingerprintConfig
from sink_lens.identity.features import read_facts, read_features, shared_inputs
from sink_lens.identity.seedprint import compare_states
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    OCHRE,
    ORANGE,
    QUIET,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.training.config import TrainConfig
from sink_lens.training.model import model_of

SEEDS = (0, 1, 2)
TEXTS = ("moby-dick", "king-james-bible", "state-of-the-union")
"""What each generation is trained on."""
KINDS = ("tokens", "embeddings")
BYTES, LENGTH, BATCH = 256, 64, 16
WEIGHTS = {"pcs": parameter_cosine, "ics": lambda a, b: invariant_cosine(a, b, ids=range(BYTES))}
WEIGHTS["intrinsic"] = intrinsic_correlation
SCORES = ("tau_bar", "cka", *WEIGHTS)


def measure(work: Work) -> Measured:
    """The pairs of all generations, and what each fingerprint says of them."""
    pairs = work.once("pairs", lambda: compared(work))
    course = pairs[pairs["step"] < pairs["step"].max()]
    pairs = pairs[pairs["step"] == pairs["step"].max()]
    alike = pairs["seed_a"] == pairs["seed_b"]
    parent = pairs[alike & (pairs["a"] > 0)]
    cross = pairs[~alike & (pairs["a"] == 1)]
    start, others = pairs[alike & (pairs["a"] == 0)], pairs[~alike & (pairs["a"] == 0)]
    numbers = {}
    for kind in KINDS:
        own, apart, first, not_first = (
            rows[rows["inputs"] == kind] for rows in (parent, cross, start, others)
        )
        numbers[f"parent @ {kind}"] = certain(own["relabelled"].max())
        numbers[f"cross @ {kind}"] = certain(apart["relabelled"].min())
        numbers[f"cross_published @ {kind}"] = certain(apart["pipeline"].min())
        numbers[f"start @ {kind}"] = certain(first["relabelled"].max())
        numbers[f"start_other @ {kind}"] = certain(not_first["relabelled"].min())
    for name, own, apart in (("parent_auc", parent, cross), ("start_auc", start, others)):
        for score in SCORES:
            x, y = (rows[rows["inputs"] == "tokens"][score].to_numpy() for rows in (own, apart))
            numbers[f"{name} @ {score}"] = certain(auc(x, y))
    return Measured(
        numbers=dict(sorted(numbers.items(), key=lambda one: _place(one[0]))),
        figure=draw(pairs, course),
    )


def _place(number: str) -> int:
    rules = (
        "parent",
        "cross",
        "cross_published",
        "start",
        "start_other",
        "parent_auc",
        "start_auc",
    )
    return rules.index(number.partition(" @ ")[0])


def compared(work: Work) -> pd.DataFrame:
    """Seed and generation of two models, the step of the later one, the inputs, each null's log10 p, each score."""
    seeds = SEEDS[: work.size(3, 2)]
    models = {(seed, *when): model for seed in seeds for when, model in generations(work, seed)}
    rows = []
    for kind in KINDS:
        size = work.size({"sequences": 2000, "length": 16}, {"sequences": 60, "length": 4})
        known = {str(of): read_facts(lens) for of, lens in models.items()}
        inputs = shared_inputs(known, kind=kind, seed=work.seed, **size)
        draws = work.size({}, {"draws": 100, "relabellings": 100})
        width = next(iter(models.values())).d_model
        config = FingerprintConfig(inputs=kind, coordinates=width, **size, **draws)
        states = {of: read_features(lens, inputs) for of, lens in models.items()}
        for a, b in wanted(list(models)):
            rng = np.random.default_rng([work.seed, len(rows)])
            pair = compare_states(
                (str(a), states[a]), (str(b), states[b]), config=config, generator=rng
            )
            row = {
                "inputs": kind,
                "seed_a": a[0],
                "a": a[1],
                "seed_b": b[0],
                "b": b[1],
                "step": min(a[2], b[2]),
            }
            row |= {"tau_bar": pair.tau_bar, "cka": cka(states[a], states[b])}
            row |= {name: score(models[a], models[b]) for name, score in WEIGHTS.items()}
            rows.append(
                row
                | {
                    name: null.log10_p(pair.tau_bar, convention="paper")
                    for name, null in pair.nulls.items()
                }
            )
    return pd.DataFrame(rows)


def wanted(models: list) -> Iterator[tuple]:
    """Pairs of (seed, generation, step); the step is infinite at the end of a generation."""
    last = max(generation for _, generation, _ in models)
    for a in models:
        for b in models:
            ends = np.isinf(a[2]) and np.isinf(b[2])
            parent = ends and a[0] == b[0] and 0 < a[1] == b[1] - 1
            cross = ends and a[0] != b[0] and a[1] == 1 < b[1]
            start = ends and a[1] == 0 and b[1] == last
            along = not np.isinf(a[2]) and b == (a[0], last, np.inf)
            if parent or cross or start or along:
                yield a, b


def generations(work: Work, seed: int) -> Iterator[tuple]:
    """((generation, step), model): the ends of each generation, and for seed 0 checkpoints of the first."""
    steps = work.size(300, 4)
    size = work.size(
        {"n_layers": 4, "d_model": 128, "d_mlp": 344}, {"n_layers": 3, "d_model": 32, "d_mlp": 32}
    )
    config = TrainConfig(
        **size,
        n_heads=4,
        vocab_size=BYTES,
        tied=False,
        length=LENGTH,
        batch=BATCH,
        steps=steps,
        warmup=1,
        seed=seed,
    )
    model = model_of(config).train()
    yield (0, np.inf), kept(model)
    for generation, name in enumerate(TEXTS, start=1):
        text = bundled_text() if work.tiny or name == "moby-dick" else "\n".join(documents([name]))
        ids = torch.tensor(list(text.encode()[:1_000_000]))
        generator = torch.Generator().manual_seed(generation)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1
        )
        for step in range(1, steps + 1):
            begins = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)
            rows = torch.stack([ids[begin : begin + LENGTH] for begin in begins])
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (seed, generation) == (0, 1) and step in (1, 4, 16, 64, 128):
                yield (1, step), kept(model)
        yield (generation, np.inf), kept(model)


def kept(model):
    """A copy of the model as it is now."""
    config = model.config
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return wrap(other, name="bytes")


def draw(pairs: pd.DataFrame, course: pd.DataFrame):
    """Each fingerprint's scores of four kinds of pairs, and tau_bar of checkpoints with the last model."""
    figure = new_figure(width=10.4, height=3.6)
    rows = pairs[pairs["inputs"] == "tokens"]
    alike = rows["seed_a"] == rows["seed_b"]
    groups = {
        "one seed, trained on": (alike & (rows["a"] > 0), BLUE),
        "two seeds, trained on": (~alike & (rows["a"] > 0), QUIET),
        "its own start": (alike & (rows["a"] == 0), ORANGE),
        "another's start": (~alike & (rows["a"] == 0), OCHRE),
    }
    axes = panel(figure, place=(1, 2, 1), xlabel="score on token inputs (weights: none)")
    for height, (name, (which, colour)) in enumerate(groups.items()):
        for place, score in enumerate(SCORES):
            values = rows.loc[which, score]
            axes.scatter(
                values,
                np.full(len(values), place + 0.15 * (height - 1.5)),
                s=14,
                color=colour,
                label=name * (not place),
            )
    axes.set_yticks(range(len(SCORES)), SCORES)
    axes.axvline(0, color=INK, linestyle=":", linewidth=1)
    legend(axes, columns=2)
    axes = panel(
        figure,
        place=(1, 2, 2),
        xlabel="step of the checkpoint",
        ylabel="tau_bar with the last model",
    )
    for kind, colour in zip(KINDS, (BLUE, GREEN), strict=True):
        of = course[course["inputs"] == kind]
        axes.plot(of["step"], of["tau_bar"], marker="o", markersize=3, color=colour, label=kind)
    log_scale(axes, axis="x")
    legend(axes, columns=2)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

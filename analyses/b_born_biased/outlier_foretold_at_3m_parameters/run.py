"""Where the largest dimension of position 0, and the neuron that writes it, stood at first; see claim.md."""

from collections import Counter
from functools import partial
from itertools import combinations, product

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata

from analyses.claims import Measured, Work, certain, main
from sink_lens import Reading, TokenBatch, load, read_run, stream, wrap
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.locate import find_location
from sink_lens.identity import contraction
from sink_lens.measures.dimensions import dominance_ratio
from sink_lens.measures.neurons import contribution_share, super_neurons
from sink_lens.measures.reductions import median_where
from sink_lens.models.tiny import BOS_ID, planted
from sink_lens.models.weights import attention_weights, mlp_weights
from sink_lens.records.checkpoints import checkpoint_folders
from sink_lens.report.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    QUIET,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.training.watch import load_evaluation_tokens, load_run_tokenizer

ARMS = {"softmax": "none", "headnorm": "shared", "position": "position"}
"""Arms of one seed begin with the same weights and see the same data."""
SEEDS = (0, 1, 2)
CHAIN = TraceConfig(model="")
"""The criteria of the chain."""
DRAWS = 20_000
"""Random choices of the null."""


def measure(work: Work) -> Measured:
    """The places and the corrected p: of the committed tables, of models trained here, or of planted ones."""
    if work.tiny or work.retrain:
        course, ranks, tests = asked(work)
    else:
        course, ranks, tests = (
            pd.read_csv(work.folder / f"{name}.csv") for name in ("course", "ranks", "tests")
        )
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
    return Measured(numbers=numbers, figure=draw(course[course["arm"] == "softmax"], ranks, tests))


def asked(work: Work):
    """The course of every run, and of plain softmax where what it chose stood at first, with the tests over seeds."""
    course, statistics = [], {}
    for arm, seed in product(ARMS, SEEDS):
        checkpoints, tokens = planted_pair(work, seed) if work.tiny else trained(work, arm, seed)
        last = chosen(checkpoints[max(checkpoints)](), tokens)
        for step, opened in checkpoints.items():
            now = last if step == max(checkpoints) else chosen(opened(), tokens)
            row = {"arm": arm, "seed": seed, "step": step, "d_model": now["states"].shape[1]}
            row |= {
                name: now[name]
                for name in ("dimension", "layer", "dominance_ratio", "is_outlier", "are_super")
            }
            course.append(
                row | {"final_rank": rankdata(-now["states"][last["layer"]])[last["dimension"]]}
            )
        if arm == "softmax":
            statistics[seed] = at_first(checkpoints[0](), tokens, last=last, work=work)
    return pd.DataFrame(course), *tested(statistics, generator=work.rng())


def trained(work: Work, arm: str, seed: int):
    """Step -> what opens the checkpoint, of a model that is trained beside the run folder where it is not yet."""
    run = read_run(work.trained(arm, seed=seed, value_norm=ARMS[arm]))
    tokenizer = load_run_tokenizer(run)
    opened = {
        step: partial(load, str(path), tokenizer=tokenizer)
        for step, path in checkpoint_folders(run).items()
    }
    return opened, load_evaluation_tokens(run, tokenizer, sequences=32, length=64)


def planted_pair(work: Work, seed: int):
    """A model before and after a sink is planted in it.

    The planted dimension has a small column in the embedding and small rows in W_O from the beginning, so that these
    two foretell it; the neuron has random weights at first, which foretell nothing.
    """
    tokens = torch.randint(3, 300, (3, 24), generator=work.generator())
    tokens[:, 0] = BOS_ID
    return {
        step: partial(wrap, planted(seed=seed, sink=step > 0).model) for step in (0, 1)
    }, TokenBatch.from_tensor(tokens)


def chosen(lens, tokens) -> dict:
    """The outlier dimension of position 0 and the super neurons that write it, by the criteria of the chain.

    If there are several, it is the one that is an outlier after most layers. If there is none, the largest one stands
    in; where there is no super neuron, the neuron that writes most of the dimension.
    """
    first = frozenset({0})
    readings = [
        Reading(
            name="before",
            sites=("resid_pre",),
            function=lambda v: v["resid_pre"][:, 0],
            layers=first,
        ),
        Reading(
            name="norm before",
            sites=("resid_pre",),
            function=lambda v: v["resid_pre"].norm(dim=-1),
            layers=first,
        ),
        Reading(name="after", sites=("resid_post",), function=lambda v: v["resid_post"][:, 0]),
        Reading(
            name="norm after",
            sites=("resid_post",),
            function=lambda v: v["resid_post"].norm(dim=-1),
        ),
        Reading(name="neurons", sites=("neurons",), function=lambda v: v["neurons"][:, 0]),
    ]
    read = stream(lens, tokens, readings)
    layers = range(lens.n_layers)
    states = torch.stack([read["before", 0], *(read["after", layer] for layer in layers)])
    norms = torch.stack([read["norm before", 0], *(read["norm after", layer] for layer in layers)])
    ratio = norms[..., 0] / median_where(norms, where=torch.arange(norms.shape[-1]) >= 8)
    found = find_location(
        positions=(0,), sink_found=False, ratio=ratio.mean(1), states=states, thresholds=CHAIN
    )
    after = states[1:].double()
    energy = after.square().mean(1)
    share = energy / energy.sum(1, keepdim=True)
    dominance = torch.stack([dominance_ratio(state).mean() for state in after])
    outliers = {layer: dimensions for layer, dimensions in found.outliers.items() if layer >= 0}
    if counts := Counter(one for dimensions in outliers.values() for one in dimensions):
        dimension = max(counts, key=lambda one: (counts[one], float(share[:, one].max())))
        layer = max(
            (at for at, some in outliers.items() if dimension in some),
            key=lambda at: float(share[at, dimension]),
        )
    else:
        layer = int(dominance.argmax())
        dimension = int(energy[layer].argmax())

    def terms(at, of):
        return read["neurons", at] * mlp_weights(lens, layer=at).w_down[of]

    writers = []
    for step in found.steps:
        for at in step.layers:
            change = states[at + 1, :, step.dimension] - states[at, :, step.dimension]
            shares = contribution_share(terms(at, step.dimension), change=change)
            writers += [
                (at, one)
                for one in super_neurons(shares, share=CHAIN.super_share)
                .nonzero()
                .flatten()
                .tolist()
            ]
    are_super = bool(writers)
    if not writers:
        sign = after[layer, :, dimension].mean().sign()
        added = torch.stack([terms(at, dimension).mean(0) * sign for at in layers])
        writers = [divmod(int(added.argmax()), added.shape[1])]
    return {
        "dimension": dimension,
        "layer": layer,
        "dominance_ratio": float(dominance[layer]),
        "is_outlier": bool(counts),
        "are_super": are_super,
        "writers": writers,
        "states": after.abs().mean(1).numpy(),
    }


def at_first(lens, tokens, *, last: dict, work: Work) -> dict:
    """(of, statistic) -> groups of (one number a candidate, which were chosen), of a model at its initialisation.

    The candidates are the residual dimensions, or the neurons of each layer that has a chosen one. States are read
    after the layer after which the outlier dimension will be. Magnitudes are compared: signs are equally likely.
    """
    layer, dimension = last["layer"], last["dimension"]

    def at_0(site):
        return Reading(name=site, sites=(site,), function=lambda view: view[site][:, 0].double())

    own = stream(lens, tokens, [at_0("resid_post"), at_0("neurons")])
    size = min(lens.d_vocab, len(lens.tokenizer or range(lens.d_vocab)))
    every = stream(lens, torch.arange(size)[:, None], [at_0("resid_post")])["resid_post", layer]
    draws = {
        "sequences": work.size(512, 50),
        "length": work.size(32, 10),
        "seed": work.seed,
        "sinks": False,
    }
    mlps = [mlp_weights(lens, layer=one) for one in range(lens.n_layers)]
    w_o = [attention_weights(lens, layer=one).w_o.flatten(0, 1) for one in range(lens.n_layers)]
    dimensions = {
        "contraction": torch.from_numpy(contraction(lens, **draws).directions[f"{layer}.mlp"]),
        "first_state": own["resid_post", layer].mean(0),
        "any_first_mean": every.mean(0),
        "any_first_std": every.std(0),
        "embedding_norm": lens.plain.get_input_embeddings().weight.double().norm(dim=0),
        "w_o_norm": torch.cat(w_o).double().norm(dim=0),
        "down_row_norm": torch.cat([one.w_down.T for one in mlps]).double().norm(dim=0),
    }
    found = {
        ("dimension", name): [(values.abs(), [dimension])] for name, values in dimensions.items()
    }
    for at in sorted({one for one, _ in last["writers"]}):
        mlp, activations = mlps[at], own["neurons", at].mean(0)
        neurons = {
            "gate_norm": (mlp.w_up if mlp.w_gate is None else mlp.w_gate).double().norm(dim=1),
            "up_norm": mlp.w_up.double().norm(dim=1),
            "down_column_norm": mlp.w_down.double().norm(dim=0),
            "first_activation": activations,
            "first_contribution": activations * mlp.w_down[dimension],
        }
        of_layer = [neuron for one, neuron in last["writers"] if one == at]
        for name, values in neurons.items():
            found.setdefault(("neuron", name), []).append((values.abs(), of_layer))
    return {
        key: [(values.detach().numpy(), which) for values, which in groups]
        for key, groups in found.items()
    }


def tested(
    statistics: dict, *, generator: np.random.Generator
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rank of each seed's outlier dimension by every statistic (1 is the largest), with the mean place and its p.

    A place is a rank as a share: near 0 is the top, near 1 the bottom. The null is that training chose any of the
    candidates: as many are chosen at random in each seed and layer. Two-sided; Holm's correction over all statistics.
    """
    ranks, tests = [], []
    keys = list(next(iter(statistics.values())))
    for of, statistic in keys:
        observed, null = 0.0, np.zeros(DRAWS)
        for seed, groups in ((seed, one[of, statistic]) for seed, one in statistics.items()):
            number = sum(len(which) for _, which in groups)
            for values, which in groups:
                rank = rankdata(-values)
                place = (rank - 0.5) / len(rank)
                ranks += [
                    {
                        "of": of,
                        "statistic": statistic,
                        "seed": seed,
                        "index": one,
                        "rank": rank[one],
                        "n": len(rank),
                    }
                    for one in which
                ]
                weight = len(which) / number / len(statistics)
                observed += place[which].mean() * weight
                null += means_of(place, len(which), generator=generator) * weight
        sides = [
            (1 + np.sum(side)) / (1 + DRAWS)
            for side in (null <= observed + 1e-12, null >= observed - 1e-12)
        ]
        row = {"of": of, "statistic": statistic, "place": observed, "p": min(1.0, 2 * min(sides))}
        tests.append(row | {"lowest": np.quantile(null, 0.05 / len(keys) / 2)})
    frame = pd.DataFrame(tests).sort_values("p", kind="stable")
    corrected = np.maximum.accumulate(frame["p"].to_numpy() * np.arange(len(frame), 0, -1))
    return pd.DataFrame(ranks), frame.assign(p_holm=np.minimum(1.0, corrected)).sort_index()


def means_of(place: np.ndarray, k: int, *, generator: np.random.Generator) -> np.ndarray:
    """Mean places of random choices of ``k``, none twice."""
    if k == 1:
        return place[generator.integers(len(place), size=DRAWS)]
    keys = generator.random((DRAWS, len(place)))
    return place[np.argpartition(keys, k - 1, axis=1)[:, :k]].mean(1)


def draw(course: pd.DataFrame, ranks: pd.DataFrame, tests: pd.DataFrame):
    """Where what was chosen stood at the initialisation, and the final dimension's rank along training."""
    colours = dict(zip(SEEDS, (BLUE, ORANGE, GREEN), strict=True))
    figure = new_figure(width=9.0, height=1.3 + 0.24 * len(tests))
    axes = panel(figure, place=(1, 2, 1), xlabel="place at the initialisation (0 top, 1 bottom)")
    lines = {(row.of, row.statistic): line for line, row in enumerate(tests.itertuples())}
    for seed, colour in colours.items():
        rows = ranks[ranks["seed"] == seed]
        at = [lines[key] for key in zip(rows["of"], rows["statistic"], strict=True)]
        axes.scatter((rows["rank"] - 0.5) / rows["n"], at, color=colour, s=18, label=f"seed {seed}")
    axes.plot(
        tests["place"], range(len(tests)), color=INK, linestyle="none", marker="|", markersize=13
    )
    axes.axvline(0.5, color=QUIET, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(tests)), [f"{of}: {name.replace('_', ' ')}" for of, name in lines])
    axes.set(xlim=(-0.03, 1.03), ylim=(len(tests) - 0.5, -0.5))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    legend(axes, columns=4)
    axes = panel(figure, place=(1, 2, 2), xlabel="step", ylabel="rank in position 0's state")
    for seed, colour in colours.items():
        rows = course[course["seed"] == seed]
        axes.plot(
            rows["step"].clip(lower=0.5), rows["final_rank"], color=colour, marker="o", markersize=4
        )
    axes.axhline((course["d_model"].max() + 1) / 2, color=QUIET, linewidth=1, linestyle=":")
    log_scale(axes, axis="x")
    log_scale(axes, axis="y")
    axes.set_ylim(1.3 * course["d_model"].max(), 0.8)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

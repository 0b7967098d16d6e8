"""Which models began alike: at initialisation, along training, and by measures that are simpler; see claim.md."""

import copy

import numpy as np
import pandas as pd
import torch

from analyses.claims import Measured, Work, certain, main
from analyses.fingerprint_baselines import cka
from analyses.lineages import auc, p_of
from sink_lens import load, train, wrap
from sink_lens.identity import FingerprintConfig, UntrainedConfig, fingerprint, untrained
from sink_lens.identity.features import read_facts, read_features, shared_inputs
from sink_lens.identity.nulls import tau_deviation
from sink_lens.identity.seedprint import compare_states
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    OCHRE,
    ORANGE,
    PURPLE,
    QUIET,
    legend,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.training.config import read_train_config

NULLS = ("analytical", "matrices", "pipeline", "shuffled", "relabelled")
ARMS = {"softmax": "none", "headnorm": "shared"}
SEEDS = (0, 1, 2)
STEPS = {"softmax": (0, 16, 64, 256, 600), "headnorm": (600,)}
INPUTS = {"sequences": 4000, "length": 16}
END = 600
SMALL = {"n_layers": 4, "d_model": 192, "n_heads": 6, "vocab_size": 4096}
TINY = {"n_layers": 1, "d_model": 48, "n_heads": 4, "vocab_size": 300}
FEW = {"sequences": 100, "length": 4, "coordinates": 28, "draws": 100, "relabellings": 100}


def measure(work: Work) -> Measured:
    """The tables: other seeds, own noise, own training, same data, and simpler measures."""
    seeds = work.size(range(15), range(4))
    untrained_pairs = work.once("untrained", lambda: at_first(work, seeds))
    noise = work.once("noise", lambda: noisy(work))
    pairs = (
        work.once("pairs", lambda: trained(work))
        if work.retrain
        else pd.read_csv(work.folder / "pairs.csv")
    )

    numbers = {}
    for name in NULLS:
        rows = untrained_pairs[untrained_pairs["null"] == name]
        numbers[f"unrelated @ {name}"] = work.share_of_pairs(rows, rows["p"] > 0.01)
    few = work.size(range(10), range(4))
    embedded = work.once("embedded", lambda: at_first(work, few, inputs="embeddings"))
    for name in NULLS:
        rows = embedded[embedded["null"] == name]
        numbers[f"on_embeddings @ {name}"] = work.share_of_pairs(rows, rows["p"] > 0.01)
    z = untrained_pairs.groupby("null")["z"]
    numbers["too_narrow"] = certain(np.sqrt((z.get_group("analytical") ** 2).mean()))
    for name, p in zip(noise["noise"], noise["log10_p_pipeline"], strict=True):
        numbers[f"noise_{name}"] = certain(p)

    at_start, at_end = pairs["step_a"] == 0, pairs["step_b"] == END
    same_seed, same_arm = pairs["seed_a"] == pairs["seed_b"], pairs["arm_a"] == pairs["arm_b"]
    own = pairs[at_start & at_end & same_seed & same_arm]
    other = pairs[at_start & at_end & ~same_seed & same_arm]
    both = pairs[~at_start & at_end & ~same_seed]
    turned = pairs[~at_start & at_end & same_seed & ~same_arm]
    for name in ("pipeline", "relabelled"):
        numbers[f"own @ {name}"] = certain(own[f"log10_p_{name}"].max())
        numbers[f"other @ {name}"] = certain(other[f"log10_p_{name}"].min())
    numbers["trained_too_narrow"] = certain(rms_z(both))
    numbers["same_data"] = certain(both["log10_p_relabelled"].min())
    for name in ("analytical", "pipeline"):
        numbers[f"same_data_published @ {name}"] = certain(both[f"log10_p_{name}"].min())
    numbers["other_arm"] = certain(turned["log10_p_relabelled"].max())
    for name in ("tau_bar", "weights", "cka"):
        numbers[f"told_apart @ {name}"] = certain(auc(own[name].to_numpy(), other[name].to_numpy()))
    numbers["cka_same_data"] = certain(both["cka"].min() - own["cka"].max())
    return Measured(numbers=numbers, figure=draw(untrained_pairs, pairs))


def rms_z(pairs: pd.DataFrame) -> float:
    """Root mean square of z under the published formula; 1 where it holds."""
    z = pairs["tau_bar"] * np.sqrt(pairs["shared"]) / tau_deviation(INPUTS["sequences"])
    return float(np.sqrt((z**2).mean()))


def at_first(work: Work, seeds, *, inputs="tokens") -> pd.DataFrame:
    """One row for each pair of untrained models of two seeds and each null."""
    small = work.size(SMALL, TINY)
    models = [untrained(UntrainedConfig(**small), seed=seed) for seed in seeds]
    config = FingerprintConfig(inputs=inputs, **work.size({"coordinates": 64}, FEW))
    names = {one.name: seed for one, seed in zip(models, seeds, strict=True)}
    found = fingerprint(models, config=config, progress=work.progress).tables["nulls"]
    return found.assign(a=found["a"].map(names), b=found["b"].map(names), p=p_of(found))


def noisy(work: Work) -> pd.DataFrame:
    """log10 p of an untrained model with copies of it, weights with noise of half a sigma and of two sigma."""
    small = work.size(SMALL, TINY)
    first = untrained(UntrainedConfig(**small), seed=0)
    config = FingerprintConfig(**work.size({}, FEW))
    models = [first]
    for name, size in (("half", 0.5), ("two", 2.0)):
        model, generator = copy.deepcopy(first.plain), work.generator()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.add_(
                        torch.randn(weight.shape, generator=generator) * size * weight.std()
                    )
        models.append(wrap(model, name=name))
    found = fingerprint(models, config=config, cache=False, progress=work.progress).frame
    return found[found["a"] == first.name].rename(columns={"b": "noise"})


def trained(work: Work) -> pd.DataFrame:
    """Pairs of models that are trained beside the run folder where they are not yet."""
    kept = {}
    for arm, norm in ARMS.items():
        for seed in SEEDS:
            folder = work.shared / f"{arm}-{seed}"
            asked = read_train_config(work.folder / "train.toml", seed=seed, value_norm=norm)
            train(config=asked, out=folder, progress=work.progress)
            for step in STEPS[arm]:
                lens = load(folder / "checkpoints" / f"checkpoint-{step}")
                inputs = shared_inputs({lens.name: read_facts(lens)}, seed=work.seed, **INPUTS)
                weights = torch.cat(
                    [one.flatten() for name, one in lens.plain.named_parameters() if one.ndim > 1]
                )
                kept[arm, seed, step] = (
                    read_features(lens, inputs, progress=work.progress),
                    weights.detach(),
                )
    config = FingerprintConfig(**INPUTS, coordinates=lens.d_model)
    rows = []
    for a, b in ((a, b) for a in kept for b in kept if a[2] in (0, END) and wanted(a, b)):
        (x, of_a), (y, of_b) = kept[a], kept[b]
        rng = np.random.default_rng([work.seed, len(rows)])
        pair = compare_states((str(a), x), (str(b), y), config=config, generator=rng)
        row = dict(
            zip(("arm_a", "seed_a", "step_a", "arm_b", "seed_b", "step_b"), (*a, *b), strict=True)
        )
        row |= {
            "tau_bar": pair.tau_bar,
            "shared": pair.shared,
            "too_narrow": pair.too_narrow,
            "cka": cka(x, y),
        }
        row["weights"] = float(torch.nn.functional.cosine_similarity(of_a, of_b, dim=0))
        rows.append(
            row | {f"log10_p_{one['null']}": one["log10_p_paper"] for one in pair.null_rows()}
        )
    return pd.DataFrame(rows)


def wanted(a, b) -> bool:
    """The initialisations against each other and everything later, and the ends against each other."""
    later = a[2] == 0 < b[2] or (a[2] == b[2] and a < b)
    return later and (b[2] == END or a[2] == 0)


def draw(untrained_pairs: pd.DataFrame, pairs: pd.DataFrame):
    """Three panels: p of unrelated untrained pairs, tau_bar along training, p of trained pairs of two seeds."""
    figure = new_figure(width=12.0, height=3.4)
    axes = panel(
        figure, place=(1, 3, 1), xlabel="share of untrained pairs of two seeds", ylabel="p"
    )
    for name, colour in zip(NULLS, (ORANGE, OCHRE, GREEN, PURPLE, BLUE), strict=True):
        p = np.sort(untrained_pairs[untrained_pairs["null"] == name]["p"])
        axes.plot((np.arange(len(p)) + 0.5) / len(p), p, color=colour, label=name)
    axes.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
    legend(axes, columns=3)
    axes = panel(
        figure, place=(1, 3, 2), xlabel="step of training", ylabel="mean tau with an initialisation"
    )
    course = pairs[(pairs["step_a"] == 0) & (pairs["step_b"] > 0) & (pairs["arm_b"] == "softmax")]
    for (of_a, of_b), rows in course.groupby(["seed_a", "seed_b"]):
        own = of_a == of_b
        label = (
            ("its own" if own else "another seed's") if (of_a, of_b) in ((0, 0), (0, 1)) else None
        )
        axes.plot(
            rows["step_b"].astype(str),
            rows["tau_bar"],
            marker="o",
            markersize=3,
            color=ORANGE if own else QUIET,
            label=label,
        )
    axes.set_yscale("symlog", linthresh=0.002)
    ticks = (-0.002, 0, 0.002, 0.005, 0.02, 0.1, 0.3)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    legend(axes, columns=2)
    axes = panel(figure, place=(1, 3, 3), xlabel="log10 p of two seeds, same data")
    both = pairs[(pairs["step_a"] == END) & (pairs["seed_a"] != pairs["seed_b"])]
    for place, name in enumerate(NULLS):
        axes.scatter(both[f"log10_p_{name}"], np.full(len(both), place), s=14, color=BLUE)
    axes.axvline(-2, color=INK, linestyle=":")
    axes.set_yticks(range(len(NULLS)), NULLS)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

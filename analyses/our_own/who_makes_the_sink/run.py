"""Four explanations of the natural sink as rival predictions: what goes under which edit; see claim.md.

Beside them: the first token's aggregated value moved to three means, and given other directions and sizes.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analyses.claims import Measured, Work, main
from sink_lens import capture, run_with
from sink_lens.edits import Edit, amplify, centring_means, edit, isolate
from sink_lens.measures.variance import token_std
from sink_lens.report.style import BLUE, GREEN, INK, ORANGE, new_figure, panel, without_formulas
from sink_lens.stats import Interval

PLACE, SETTLED = 9, 8
DRAWS = 19
COLOURS = {"distance": BLUE, "direction": GREEN, "constant": ORANGE, "one layer": INK}
"""The explanations: the variance as a distance from the mean (2605.06611), a static direction (2603.05498), a constant
vector behind the norm (2606.02288), one layer that makes it (2605.08504)."""
Numbers = dict[str, Interval]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """One half of the texts, which is edited, and what tokens of the other half gather up to the growth's end."""

    work: Work
    tokens: Tensor
    others: Tensor
    layers: range
    """The layers up to the end of the first growth step."""
    bands: Mapping[str, range]
    """The layers between the growth steps, and behind the last one."""
    z: Mapping[int, Tensor]
    """Layer -> (sequence, position, head, d_value) of the other half."""

    def run(self, *edits: Edit):
        """Run the texts with edits."""
        return run_with(
            self.work.lens, self.tokens, edits, positions=(0, PLACE), progress=self.work.progress
        )

    def mean(self, layer: int) -> Tensor:
        """The mean that ordinary tokens gather."""
        return self.z[layer][:, SETTLED:].mean((0, 1))

    def gone(self, outcome, clean, read: Sequence[int]) -> Interval:
        """The share of the attention to position 0 that is lost."""
        full = clean.mass_at(0, layers=read).numpy()
        return self.work.ratio(full - outcome.mass_at(0, layers=read).numpy(), full, least=0.01)

    def of_z(self, change: Callable[[Tensor, int], Tensor]) -> Edit:
        """An edit of what position 0 gathers: (sequence, 1, head, d_value) and a layer to new values."""
        return edit(
            "z_raw",
            lambda values, at: change(values, at.layer),
            positions=[0],
            layers=list(self.layers),
        )


def measure(work: Work) -> Measured:
    """Measure what goes of the sink under the edits that tell the explanations apart, and under the older ones."""
    steps = work.steps()
    both = work.text(work.size("brown", "moby-dick"), sequences=2 * work.size(32, 3), length=64)
    layers = range(steps[0].last_layer + 1)
    starts = [step.last_layer + 1 for step in steps]
    stops = [step.first_layer for step in steps[1:]] + [work.lens.n_layers]
    bands = {
        f"read in {a} to {b - 1}": range(a, b) for a, b in zip(starts, stops, strict=True) if a < b
    }

    def texts(tokens, others, *, seed: int) -> Texts:
        z = capture(
            work.lens, others, sites=["z"], layers=list(range(starts[-1])), progress=work.progress
        )
        by_layer = {layer: z["z", layer].float() for layer in range(starts[-1])}
        seeded = dataclasses.replace(work, seed=seed)
        return Texts(
            work=seeded, tokens=tokens, others=others, layers=layers, bands=bands, z=by_layer
        )

    first, second = texts(both[::2], both[1::2], seed=1), texts(both[1::2], both[::2], seed=2)
    numbers = rivals(first, starts) | moved_to_means(first, starts) | resized(second)
    order = ("distance", "direction", "constant", "one layer", "loss", "check")
    order += ("removed", "half", "isolated", "elsewhere", "left", "ordinary", "natural")
    first_word = {name: name.partition(" @ ")[0] for name in numbers}
    place = {
        name: order.index(word.removesuffix(" goes").removesuffix(" stays"))
        for name, word in first_word.items()
    }
    return Measured(
        numbers={name: numbers[name] for name in sorted(numbers, key=place.__getitem__)},
        figure=draw(numbers),
    )


def rivals(texts: Texts, starts: Sequence[int]) -> Numbers:
    """The share of the sink that goes under each edit, by the explanation that predicts it."""
    work, lens = texts.work, texts.work.lens
    grown, settled = starts[0], starts[-1]
    generator = work.generator()
    clean = texts.run()
    deviation = {layer: texts.z[layer] - texts.mean(layer) for layer in texts.layers}
    far = {layer: one.flatten(2).norm(dim=-1) for layer, one in deviation.items()}
    usual = {layer: far[layer][:, SETTLED:].median() for layer in texts.layers}
    size = {
        layer: texts.z[layer].flatten(2).std(-1)[:, SETTLED:].median() for layer in texts.layers
    }

    def length(values: Tensor) -> Tensor:
        return values.flatten(-2).norm(dim=-1)[..., None, None]

    def away(values: Tensor, layer: int) -> Tensor:
        return values - texts.mean(layer)

    def nearer(values: Tensor, layer: int) -> Tensor:
        moved = away(values, layer)
        return texts.mean(layer) + moved * usual[layer] / length(moved)

    def ordinary_size(values: Tensor, layer: int) -> Tensor:
        return values * size[layer] / values.flatten(-2).std(-1)[..., None, None]

    def mean_direction(values: Tensor, layer: int) -> Tensor:
        return texts.mean(layer) * length(values) / length(texts.mean(layer))

    def another(values: Tensor, layer: int) -> Tensor:
        return texts.z[layer][: len(values), :1]

    def turned() -> Edit:
        drawn = {
            layer: torch.randn(texts.z[layer].shape[-2:], generator=generator)
            for layer in texts.layers
        }

        def change(values: Tensor, layer: int) -> Tensor:
            return texts.mean(layer) + drawn[layer] * length(away(values, layer)) / length(
                drawn[layer]
            )

        return texts.of_z(change)

    read_first = run_with(
        lens, texts.others, sites=("attn_in", "mlp_in", "mlp_out", "resid_post"), loss=False
    ).tensors
    own = run_with(lens, texts.tokens, sites=("mlp_out",), loss=False).tensors
    constant = {
        key: one[:, 0].mean(0) for key, one in read_first.items() if key[0] in ("attn_in", "mlp_in")
    }
    order = torch.randperm(lens.d_model, generator=generator)
    ordinary = {key: one[:, SETTLED:].mean((0, 1)) for key, one in read_first.items()}
    outliers = sorted({int(step.outlier_dimension) for step in work.steps()})

    def put(vectors, *, start: int) -> list[Edit]:
        def change(site: str):
            return lambda values, at: vectors[site, at.layer].expand_as(values)

        behind = list(range(start, lens.n_layers))
        return [
            edit(site, change(site), positions=[0], layers=behind) for site in ("attn_in", "mlp_in")
        ]

    def flattened(values: Tensor, at) -> Tensor:
        return ordinary["resid_post", at.layer][outliers].expand_as(values)

    clamped = edit(
        "resid_post",
        flattened,
        positions=[0],
        units=outliers,
        layers=list(range(grown - 1, lens.n_layers)),
    )
    permuted = {key: one[order] for key, one in constant.items()}
    maker = max(
        range(settled), key=lambda layer: read_first["mlp_out", layer][:, 0].norm(dim=-1).mean()
    )

    def without(layer: int) -> Edit:
        return edit(
            "mlp_out",
            lambda values, at: ordinary["mlp_out", at.layer].expand_as(values),
            positions=[0],
            layers=[layer],
        )

    kept = edit(
        "mlp_out",
        lambda values, at: own["mlp_out", maker][at.sequences, :1],
        positions=[0],
        layers=[maker],
    )
    others = [layer for layer in range(lens.n_layers - 1) if layer != maker]
    text_mean = texts.of_z(lambda values, layer: texts.mean(layer).expand_as(values))
    asked: dict[str, tuple[int, list[list[Edit]]]] = {
        "ordinary distance from the mean": (0, [[texts.of_z(nearer)]]),
        "ordinary size, own direction": (0, [[texts.of_z(ordinary_size)]]),
        "own distance, random direction": (0, [[turned()] for _ in range(work.size(DRAWS, 1))]),
        "direction of the mean, own length": (0, [[texts.of_z(mean_direction)]]),
        "another text's first token": (0, [[texts.of_z(another)]]),
        "constant of other texts": (0, [put(constant, start=grown)]),
        "permuted constant": (0, [put(permuted, start=grown)]),
        "spike clamped": (0, [[clamped]]),
        "spike clamped, constant put back": (0, [[clamped, *put(constant, start=grown)]]),
        "output of the layer": (maker, [[without(maker)]]),
        "mean before it, its output kept": (maker, [[text_mean, kept]]),
    }
    predicted = {
        "distance": "goes stays stays - stays - - - - - -",
        "direction": "- stays goes goes stays - - - - - -",
        "constant": "- - - - - stays goes goes stays - -",
        "one layer": "- - - - - - - - - goes stays",
    }
    numbers: Numbers = {}
    shares: dict[str, dict[str, Interval]] = {}
    for name, (layer, draws) in asked.items():
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # with BOS, all first tokens are one
            outcomes = [texts.run(*edits) for edits in draws]
        mass = torch.stack([one.mass for one in outcomes]).mean(0)
        found = dataclasses.replace(outcomes[0], mass=mass)
        shares[name] = {
            band: texts.gone(found, clean, read)
            for band, read in texts.bands.items()
            if read[0] > layer
        }
        change = torch.stack([one.loss - clean.loss for one in outcomes]).mean(0)
        numbers[f"loss @ {name}"] = work.interval(change.numpy())
    for account, by_edit in predicted.items():
        for name, what in zip(asked, by_edit.split(), strict=True):
            if what != "-":
                numbers |= {
                    f"{account} {what} @ {name}, {band}": one for band, one in shares[name].items()
                }
    for band, read in texts.bands.items():
        below = [layer for layer in others if layer < read[-1]]
        runs = {layer: texts.run(without(layer)) for layer in below}
        after = {layer: [one for one in read if one > layer] for layer in below}
        most = max(below, key=lambda layer: texts.gone(runs[layer], clean, after[layer]).estimate)
        name = f"one layer stays @ largest of any other layer ({most}), {band}"
        numbers[name] = texts.gone(runs[most], clean, after[most])
    ratio = np.mean([(far[layer][:, 0] / usual[layer]).numpy() for layer in texts.layers], axis=0)
    numbers["check @ first token's distance over an ordinary one's"] = work.interval(ratio)
    return numbers


def moved_to_means(texts: Texts, starts: Sequence[int]) -> Numbers:
    """Measure the share of a natural and of an isolated token's sink that goes if its value moves to a mean."""
    work, lens, bands = texts.work, texts.work.lens, texts.bands
    spans = {"layer 0": range(1)} | {f"layers 0 to {start - 1}": range(start) for start in starts}
    early = f"layers 0 to {starts[0] - 1}" if starts[0] > 1 else "layer 0"
    random = centring_means(
        lens, n_tokens=work.size(12_800, 512), seed=work.seed, progress=work.progress
    )
    of_text = {layer: texts.mean(layer) for layer in texts.z}
    means = {
        "values": ("values", random),
        "z": ("aggregated", random),
        "text": ("aggregated", dataclasses.replace(random, aggregated=of_text)),
    }
    clean, isolated = texts.run(), texts.run(isolate([PLACE]))

    def of_made(outcome, read: Sequence[int]) -> Interval:
        floor, full = (one.mass_at(PLACE, layers=read).numpy() for one in (clean, isolated))
        return work.ratio(
            full - outcome.mass_at(PLACE, layers=read).numpy(), full - floor, least=0.01
        )

    numbers: Numbers = {}
    for centre, (kind, found) in means.items():

        def moved(layers, *, position=0, factor=0.0, kind=kind, found=found):
            return amplify(factor, positions=[position], layers=layers, centre=kind, means=found)

        for span, layers in spans.items():
            outcome = texts.run(moved(layers))
            for band, read in bands.items():
                numbers[f"removed @ {centre}, {span}, {band}"] = texts.gone(outcome, clean, read)
            numbers[f"loss @ {centre}, {span}"] = work.interval((outcome.loss - clean.loss).numpy())
        half, made = (
            texts.run(moved(spans[early], factor=0.5)),
            texts.run(isolate([PLACE]), moved(spans[early], position=PLACE)),
        )
        for band, read in bands.items():
            numbers[f"half @ {centre}, {band}"] = texts.gone(half, clean, read)
            numbers[f"isolated @ {centre}, {band}"] = of_made(made, read)
        there = texts.run(moved(spans[early], position=PLACE))
        numbers[f"elsewhere @ {centre}"] = texts.gone(there, clean, range(starts[0], lens.n_layers))
        checked = run_with(
            lens,
            texts.tokens,
            [moved(spans[early])],
            sites=("z",),
            layers=list(spans[early]),
            loss=False,
        )
        stds = np.stack([token_std(checked.tensors["z", layer]).numpy() for layer in spans[early]])
        numbers[f"left @ {centre}"] = work.ratio(
            stds[..., 0].mean(0), np.median(stds[..., SETTLED:], axis=-1).mean(0)
        )
    return numbers


def resized(texts: Texts) -> Numbers:
    """Measure the share of the sink that goes if the first token's aggregated value gets other directions and sizes."""
    work, layers = texts.work, texts.layers
    spread = {layer: texts.z[layer].flatten(2).std(-1) for layer in layers}
    sizes = {
        "natural": {layer: float(spread[layer][:, 0].mean()) for layer in layers},
        "ordinary": {
            layer: float(spread[layer][:, SETTLED:].median(dim=1).values.mean()) for layer in layers
        },
    }
    random = centring_means(
        work.lens, n_tokens=work.size(12_800, 512), seed=work.seed, progress=work.progress
    )
    drawn = torch.randn(len(layers), *texts.z[0].shape[-2:], generator=work.generator())
    directions = {
        "own": None,
        "text mean": {layer: texts.mean(layer) for layer in layers},
        "value mean": random.values,
        "random": dict(zip(layers, drawn, strict=True)),
    }
    clean = texts.run()
    numbers: Numbers = {}
    for size, of_layer in sizes.items():
        for direction, vectors in directions.items():
            if (direction, size) == ("own", "natural"):
                continue

            def change(values: Tensor, layer: int, vectors=vectors, of_layer=of_layer) -> Tensor:
                new = values if vectors is None else vectors[layer].to(values).expand_as(values)
                return new * (of_layer[layer] / new.flatten(2).std(-1)[..., None, None])

            found = texts.run(texts.of_z(change))
            for band, read in texts.bands.items():
                numbers[f"{size} @ {direction}, {band}"] = texts.gone(found, clean, read)
            numbers[f"loss @ {direction}, {size} size"] = work.interval(
                (found.loss - clean.loss).numpy()
            )
    return numbers


def draw(numbers: Numbers) -> Figure:
    """The share that goes under each edit, beside where each explanation puts it."""
    rows = [
        name
        for name in numbers
        if name.partition(" ")[0] in ("distance", "direction", "constant", "one")
    ]
    figure = new_figure(width=6.8, height=0.9 + 0.17 * len(rows))
    axes = panel(figure, xlabel="share of the sink that goes; shaded: predicted")
    labels = []
    for row, name in enumerate(reversed(rows)):
        word, _, what = name.partition(" @ ")
        account, _, goes = word.rpartition(" ")
        low, high = (0.5, 1.15) if goes == "goes" else (-0.3, 0.25)
        axes.barh(row, high - low, left=low, color=COLOURS[account], alpha=0.15, height=0.9)
        one = numbers[name]
        axes.plot([one.low, one.high], [row, row], color=COLOURS[account], linewidth=2)
        axes.plot(one.estimate, row, "o", color=COLOURS[account], markersize=4)
        labels.append(f"{account}: {what}")
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_xlim(-0.3, 1.15)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

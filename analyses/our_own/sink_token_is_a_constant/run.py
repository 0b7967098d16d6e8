"""Put one vector per layer, made on other texts, in the place of the sink token, and read what stays; see claim.md."""

import dataclasses

import torch
from torch import Tensor

from analyses.claims import Measured, Work, main
from sink_lens import TokenBatch, capture, run_with
from sink_lens.edits import Edit, edit, isolate, window
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    legend,
    new_figure,
    panel,
    without_formulas,
)

SEED, PLACE, SETTLED = 3, 9, 8
SITES = {"attention": ("attn_in",), "MLP": ("mlp_in",), "both": ("attn_in", "mlp_in")}
DRAWS = 19
COLOURS = {
    "no edit": INK,
    "constant": BLUE,
    "permuted": ORANGE,
    "ordinary token": GREEN,
    "random": PURPLE,
}
Vectors = dict[tuple[str, int], Tensor]


def measure(work: Work) -> Measured:
    """Measure the sink that is kept and the change of the loss, by place, site, layers and vector."""
    work = dataclasses.replace(work, seed=SEED)
    lens, steps = work.lens, work.steps()
    grown, last = steps[0].last_layer + 1, steps[-1].last_layer + 1
    starts = {"all layers": 0, f"from {grown} on": grown, f"from {last} on": last}
    spans = {
        name: range(start, lens.n_layers) for name, start in starts.items() if start < lens.n_layers
    }
    n = work.size(24, 2)
    text = work.size("brown", "moby-dick")
    plain = work.text(text, sequences=2 * n, length=64, bos="without")
    with_bos = work.text(text, sequences=2 * n, length=64, bos="with")
    made, tokens = plain[::2], plain[1::2]

    def vectors_of(some: TokenBatch, position: int, *edits: Edit) -> dict[tuple[str, int], Tensor]:
        """Return the inputs of attention and MLP at a position: (site, layer) -> (sequence, d_model)."""
        found = run_with(
            lens, some, edits, sites=("attn_in", "mlp_in"), loss=False, progress=work.progress
        ).tensors
        return {key: one[:, position].float() for key, one in found.items()}

    def put(vectors: Vectors, sites: str, layers: range, *, position: int = 0) -> list[Edit]:
        def change(site: str):
            return lambda values, at: vectors[site, at.layer].to(values).expand_as(values)

        return [
            edit(site, change(site), positions=[position], layers=list(layers))
            for site in SITES[sites]
        ]

    def run(some: TokenBatch, *edits: Edit, key: int = 0):
        return run_with(lens, some, edits, positions=[key], progress=work.progress)

    def share_kept(outcome, clean, layers: range, *, key: int = 0):
        read = range(max(layers[0], grown), lens.n_layers)
        return work.ratio(
            *(one.mass_at(key, layers=read).numpy() for one in (outcome, clean)), least=0.01
        )

    constant = mean_of(vectors_of(made, 0))
    clean, numbers, curves = run(tokens), {}, {}
    curves["no edit"] = clean.mass[..., 0].mean(dim=(1, 2))
    for sites in SITES:
        for name, layers in spans.items():
            found = run(tokens, *put(constant, sites, layers))
            numbers[f"kept @ {sites}, {name}"] = share_kept(found, clean, layers)
            numbers[f"loss @ {sites}, {name}"] = work.interval((found.loss - clean.loss).numpy())
            if (sites, name) == ("both", f"from {grown} on"):
                curves["constant"] = found.mass[..., 0].mean(dim=(1, 2))

    captured = capture(lens, made, sites=["attn_in", "mlp_in"], progress=work.progress)
    ordinary = {key: captured[key][:, SETTLED:].float().flatten(0, 1) for key in constant}
    generator = work.generator()

    def draw(kind: str) -> Vectors:
        """One control in the place of the constant; one draw is for all layers."""
        size = len(next(iter(ordinary.values())))
        row, order = (
            int(torch.randint(size, (), generator=generator)),
            torch.randperm(lens.d_model, generator=generator),
        )
        if kind == "permuted":
            return {key: one[order] for key, one in constant.items()}
        if kind == "ordinary token":
            return {key: one[row] for key, one in ordinary.items()}
        drawn = {key: torch.randn(lens.d_model, generator=generator) for key in constant}
        return {key: one * (constant[key].norm() / one.norm()) for key, one in drawn.items()}

    for sites, name in (("attention", "all layers"), ("both", f"from {grown} on")):
        layers, read = spans[name], range(grown, lens.n_layers)
        for kind in ("permuted", "ordinary token", "random"):
            outcomes = [
                run(tokens, *put(draw(kind), sites, layers)) for _ in range(work.size(DRAWS, 1))
            ]
            masses = torch.stack([one.mass_at(0, layers=read) for one in outcomes])
            losses = torch.stack([one.loss - clean.loss for one in outcomes])
            ratio = work.ratio(
                masses.mean(0).numpy(), clean.mass_at(0, layers=read).numpy(), least=0.01
            )
            numbers[f"control_kept @ {kind}, {sites}, {name}"] = ratio
            numbers[f"{kind.replace(' ', '_')}_loss @ {sites}, {name}"] = work.interval(
                losses.mean(0).numpy()
            )
            if sites == "both":
                curves[kind] = torch.stack(
                    [one.mass[..., 0].mean(dim=(1, 2)) for one in outcomes]
                ).mean(0)
        mean = run(tokens, *put({key: one.mean(0) for key, one in ordinary.items()}, sites, layers))
        numbers[f"control_kept @ mean of ordinary tokens, {sites}, {name}"] = share_kept(
            mean, clean, layers
        )
        numbers[f"mean_loss @ {sites}, {name}"] = work.interval((mean.loss - clean.loss).numpy())

    isolated = isolate([PLACE])
    ids = work.text(text, sequences=1, length=work.size(60_000, 4_000), bos="without").tokens[0]
    stop = lens.tokenizer.encode(".", add_special_tokens=False)[-1]
    at = [one for one in (ids == stop).nonzero()[:, 0].tolist() if PLACE <= one < len(ids) - 64]
    chosen = [at[one * len(at) // (2 * n)] for one in range(2 * n)]
    stops = torch.stack([ids[one - PLACE : one - PLACE + 64] for one in chosen])
    places = {
        "BOS": (with_bos[1::2], (), 0, constant),
        "isolated": (tokens, (isolated,), PLACE, constant),
        "isolated, its own": (
            tokens,
            (isolated,),
            PLACE,
            mean_of(vectors_of(made, PLACE, isolated)),
        ),
        "full stop, its own": (stops[1::2], (), PLACE, mean_of(vectors_of(stops[::2], PLACE))),
    }
    for place, (some, edits, key, vectors) in places.items():
        before = run(some, *edits, key=key)
        numbers[f"attention @ {place}"] = work.interval(
            before.mass_at(key, layers=range(grown, lens.n_layers)).numpy()
        )
        for name in ("all layers", f"from {grown} on"):
            found = run(some, *edits, *put(vectors, "both", spans[name], position=key), key=key)
            numbers[f"elsewhere_kept @ {place}, {name}"] = share_kept(
                found, before, spans[name], key=key
            )
            numbers[f"elsewhere_loss @ {place}, {name}"] = work.interval(
                (found.loss - before.loss).numpy()
            )
    alone, at_place = run(tokens, key=PLACE), run(tokens, isolated, key=PLACE)
    put_there = run(
        tokens, *put(constant, "both", spans[f"from {grown} on"], position=PLACE), key=PLACE
    )
    read = range(grown, lens.n_layers)
    rise, most = (
        one.mass_at(PLACE, layers=read) - alone.mass_at(PLACE, layers=read)
        for one in (put_there, at_place)
    )
    numbers["makes @ position 9"] = work.ratio(rise.numpy(), most.numpy(), least=0.01)

    length, size = work.size(256, 48), work.size(64, 16)
    long = work.text(text, sequences=n, length=length, bos="without")

    def beyond(*edits: Edit) -> Tensor:
        token_loss = run_with(lens, long, edits, progress=work.progress).token_loss
        return token_loss[:, size:].nanmean(1)

    whole = beyond()
    kinds = {
        "keep 0": (window(size),),
        "keep 1": (window(size, keep=1),),
        "constant": (window(size, keep=1), *put(constant, "attention", spans["all layers"])),
        "constant, no window": tuple(put(constant, "attention", spans["all layers"])),
    }
    for kind, edits in kinds.items():
        numbers[f"window @ {kind}"] = work.interval((beyond(*edits) - whole).numpy())

    fresh = vectors_of(tokens, 0)
    cosines = {"first token": [], "ordinary token": []}
    for layer in range(lens.n_layers):
        one = constant["attn_in", layer]
        cosines["first token"].append(
            torch.cosine_similarity(fresh["attn_in", layer], one, dim=-1).mean()
        )
        cosines["ordinary token"].append(
            torch.cosine_similarity(ordinary["attn_in", layer], one, dim=-1).mean()
        )
    settled = torch.stack(
        [
            torch.cosine_similarity(fresh["attn_in", at], constant["attn_in", at], dim=-1)
            for at in read
        ]
    )
    numbers["cosine @ attention's input"] = work.interval(settled.mean(0).numpy())

    figure = new_figure(width=7.6, height=3.0)
    left = panel(figure, place=(1, 2, 1), xlabel="layer", ylabel="cosine to the constant")
    for name, values in cosines.items():
        left.plot(
            torch.stack(values).numpy(), color=BLUE if name == "first token" else GREEN, label=name
        )
    legend(left, columns=2)
    right = panel(figure, place=(1, 2, 2), xlabel="layer", ylabel="attention to position 0")
    for name, curve in curves.items():
        wide = {"linewidth": 5, "alpha": 0.25} if name == "no edit" else {}
        right.plot(curve.numpy(), color=COLOURS[name], label=name, **wide)
    right.set_ylim(0, 1)
    legend(right, columns=3)
    return Measured(numbers=numbers, figure=without_formulas(figure))


def mean_of(vectors: Vectors) -> Vectors:
    """The mean over sequences."""
    return {key: one.mean(0) for key, one in vectors.items()}


if __name__ == "__main__":
    main(measure)

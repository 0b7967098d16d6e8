"""Explained variance of a PCA and of a sparse autoencoder, fitted with and without the marked tokens; see claim.md."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from analyses.claims import Measured, Work, certain, main
from sink_lens import TokenBatch, sink_mask
from sink_lens.activations.record import capture
from sink_lens.report.style import (
    BLUE,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval

COMPONENTS = (1, 2, 4, 8, 16, 32, 64, 128)
JUDGED = 32
"""Components of the PCA, and active features of the autoencoder, whose numbers are judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """States of one half of the sequences, in sequences of equal length."""

    states: Tensor
    """"batch position d_model"."""
    marked: Tensor
    """"batch position"."""

    def of(self, *, ordinary: bool) -> Tensor:
        """All states as rows, or only those of tokens that are not marked."""
        return self.states[~self.marked] if ordinary else self.states.flatten(0, 1)


def measure(work: Work) -> Measured:
    """Fit on one half of the sequences, evaluate on the other."""
    layer = work.size(work.lens.n_layers // 2, work.lens.n_layers - 2)
    batch = work.text(sequences=work.size(96, 24), length=work.size(128, 64))
    fitted, held = _halves(work, batch, layer=layer)
    components = [count for count in COMPONENTS if count < work.lens.d_model]
    judged = min(JUDGED, components[-1])
    numbers: dict[str, Interval] = {
        "marked": certain(torch.cat([fitted.marked, held.marked]).double().mean()),
        "marked_variance": _share_of_variance(held, work),
    }
    curves: dict[str, np.ndarray] = {}
    before = np.empty(0)
    for name, ordinary in (("with", False), ("without", True)):
        mean, basis = _pca(fitted.of(ordinary=ordinary), count=components[-1])
        seen = [
            _explained(held, _projected(held.states, mean, basis[:, :count]))
            for count in components
        ]
        curves[name] = np.array([_pooled(rows) for rows in seen])
        rows = seen[components.index(judged)]
        numbers[f"pca_{name}"] = work.interval(rows, statistic=_pooled)
        if name == "with":
            every = _explained(held, _projected(held.states, mean, basis[:, :1]), ordinary=False)
            numbers["pca_one_of_all"] = work.interval(every, statistic=_pooled)
            before = rows
        else:
            numbers["pca_gain"] = work.interval(
                np.concatenate([rows, before], axis=1), statistic=_gained
            )
    for name, ordinary in (("with", False), ("without", True)):
        coder = _Autoencoder(fitted.of(ordinary=ordinary), work=work, active=judged)
        rows = _explained(held, coder(held.states))
        numbers[f"sae_{name}"] = work.interval(rows, statistic=_pooled)
        numbers[f"sae_dead_{name}"] = certain(coder.dead(held.of(ordinary=True)))
        if name == "without":
            numbers["sae_gain"] = work.interval(
                np.concatenate([rows, before], axis=1), statistic=_gained
            )
        before = rows
    order = (
        "pca_gain",
        "sae_gain",
        *(name for name in numbers if name not in ("pca_gain", "sae_gain")),
    )
    return Measured(
        numbers={name: numbers[name] for name in order},
        figure=_drawn(components, curves, numbers, judged),
    )


def _halves(work: Work, batch: TokenBatch, *, layer: int) -> tuple[Tokens, Tokens]:
    """The states after a layer, and the marked tokens: even sequences to fit, odd ones to evaluate."""
    marked = sink_mask(work.lens, batch, by="norm")
    captured = capture(
        work.lens, batch, sites=["resid_post"], layers=[layer], progress=work.progress
    )
    states = captured["resid_post", layer].double()
    return tuple(Tokens(states=states[start::2], marked=marked[start::2]) for start in (0, 1))  # type: ignore[return-value]


def _share_of_variance(held: Tokens, work: Work) -> Interval:
    """The share of all tokens' squared distance from their mean that marked tokens hold."""
    distance = (held.states - held.states.flatten(0, 1).mean(0)).square().sum(-1)
    rows = torch.stack([(distance * held.marked).sum(1), distance.sum(1)], dim=1).numpy()
    return work.interval(rows, statistic=lambda drawn: drawn[:, 0].sum() / drawn[:, 1].sum())


def _pca(rows: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """The mean and the first principal directions as columns."""
    mean = rows.mean(0)
    centred = rows - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    return mean, vectors[:, values.argsort(descending=True)[:count]]


def _projected(states: Tensor, mean: Tensor, basis: Tensor) -> Tensor:
    return mean + (states - mean) @ basis @ basis.T


def _explained(held: Tokens, found: Tensor, *, ordinary: bool = True) -> np.ndarray:
    """For each sequence: squared error and squared distance from the mean, summed over its tokens."""
    counted = ~held.marked if ordinary else torch.ones_like(held.marked)
    mean = held.states[counted].mean(0)
    error = (held.states - found).square().sum(-1) * counted
    whole = (held.states - mean).square().sum(-1) * counted
    return torch.stack([error.sum(1), whole.sum(1)], dim=1).numpy()


def _pooled(rows: np.ndarray) -> float:
    """The share of the variance that is explained."""
    return 1 - rows[:, 0].sum() / rows[:, 1].sum()


def _gained(rows: np.ndarray) -> float:
    """The explained share without the marked tokens in the fit, minus the share with them."""
    return _pooled(rows[:, :2]) - _pooled(rows[:, 2:])


class _Autoencoder:
    """A TopK sparse autoencoder, trained by Adam on states that are scaled to a mean square of 1 per dimension."""

    def __init__(self, rows: Tensor, *, work: Work, active: int) -> None:
        generator = work.generator()
        width, features = rows.shape[1], 2 * rows.shape[1]
        kind = work.size(torch.float32, torch.float64)
        self.active = active
        self.scale = rows.square().mean().sqrt()
        self.centre = (rows.mean(0) / self.scale).to(kind).requires_grad_()
        decoder = torch.randn(features, width, generator=generator, dtype=torch.float64)
        decoder = (decoder / decoder.norm(dim=1, keepdim=True)).to(kind)
        self.decoder = decoder.clone().requires_grad_()
        self.encoder = decoder.T.clone().requires_grad_()
        self.bias = torch.zeros(features, dtype=kind, requires_grad=True)
        parameters = [self.centre, self.decoder, self.encoder, self.bias]
        optimiser = torch.optim.Adam(parameters, lr=1e-3)
        data = (rows / self.scale).to(kind)
        for _ in range(work.size(300, 40)):
            some = data[torch.randint(len(data), (work.size(512, 256),), generator=generator)]
            loss = (self._decoded(self._features(some)) - some).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def _features(self, x: Tensor) -> Tensor:
        activations = (x - self.centre) @ self.encoder + self.bias
        values, index = activations.topk(self.active, dim=-1)
        return torch.zeros_like(activations).scatter(-1, index, values.relu())

    def _decoded(self, features: Tensor) -> Tensor:
        return features @ self.decoder + self.centre

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """Reconstruct states."""
        found = [
            self._decoded(self._features((rows / self.scale).to(self.bias.dtype)))
            for rows in states
        ]
        return torch.stack(found).double() * self.scale

    @torch.no_grad()
    def dead(self, rows: Tensor) -> float:
        """Share of the features that no row activates."""
        alive = torch.zeros(len(self.bias), dtype=torch.bool)
        for some in rows.split(1024):
            alive |= (self._features((some / self.scale).to(self.bias.dtype)) > 0).any(0)
        return float((~alive).double().mean())


def _drawn(
    components: list[int], curves: dict[str, np.ndarray], numbers: dict[str, Interval], judged: int
):
    figure = new_figure(width=8.4, height=3.2)
    left = panel(
        figure,
        place=(1, 2, 1),
        xlabel="principal components",
        ylabel="explained variance, ordinary tokens",
    )
    names = (("with", BLUE, "fitted on all tokens"), ("without", ORANGE, "without marked tokens"))
    for name, colour, label in names:
        left.plot(components, curves[name], color=colour, marker="o", markersize=3.5, label=label)
    log_scale(left, axis="x")
    left.set_ylim(min(0.0, *(float(curve.min()) for curve in curves.values())), 1.02)
    legend(left, columns=2)
    right = panel(figure, place=(1, 2, 2), ylabel="explained variance, ordinary tokens")
    kinds = (("pca", f"PCA, {judged}"), ("sae", f"TopK autoencoder, {judged}"))
    for place, (kind, _) in enumerate(kinds):
        for shift, (name, colour, _) in zip((-0.18, 0.18), names, strict=True):
            one = numbers[f"{kind}_{name}"]
            right.bar(place + shift, one.estimate, width=0.34, color=colour)
            right.vlines(place + shift, one.low, one.high, color="#222222", linewidth=1)
    right.set_xticks(range(len(kinds)), [label for _, label in kinds])
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)

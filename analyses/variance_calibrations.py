"""Variance calibration of a model that is not trained any further: what it does to contraction, preference, sink, loss.

The first token's aggregated value varies most, since the others average. Three edits of z before W_O take that away:

- ``amplify``: ``z_t <- sqrt(t + 1) z_t``. Under uniform attention over independent values, later tokens then vary as
  much as the first.
- ``attenuate``: ``z_t <- sqrt((t + 1) / T) z_t``: the first ones then vary as little as the last.
- ``head_rms``: every token's z is given the same root mean square in each head, the mean of those from position 8 on.

That such a calibration removes sinks at no cost in language modelling is the claim of arXiv 2602.05927; its formula is
not public, and these are ours. The loss of an untrained model says little (it is near the logarithm of the vocabulary).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm

from sink_lens.data.tokens import TokenBatch
from sink_lens.edits.constructors import At, Edit, edit
from sink_lens.edits.normalisation import head_rms_norm, natural_rms
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.identity.config import FEWEST
from sink_lens.identity.cosine_sums import CosineSums, PredictionCounts, jackknife_interval
from sink_lens.measures.reductions import widen
from sink_lens.models.lens import LensModel
from sink_lens.stats import interval, paired_difference

_SITES = ("resid_pre", "attn_out", "resid_post", "final")
_TOKENS_A_FORWARD = 1024


def _by_position(lens: LensModel, tokens: TokenBatch, *, over: float) -> list[Edit]:
    """Multiply z by the root of how many values it averages."""

    def change(z: Tensor, at: At) -> Tensor:
        """Z times its position's factor."""
        factor = ((at.positions.to(z.device) + 1) / over).sqrt()
        return (widen(z) * factor[:, None, None]).to(z.dtype)

    return [edit("z_raw", change, label=f"z times sqrt((t + 1) / {over:g})")]


def _amplify(lens: LensModel, tokens: TokenBatch) -> list[Edit]:
    """Give every position the size of the first one's average."""
    return _by_position(lens, tokens, over=1.0)


def _attenuate(lens: LensModel, tokens: TokenBatch) -> list[Edit]:
    """Give every position the size of the last one's average."""
    return _by_position(lens, tokens, over=float(tokens.n_positions))


def _head_rms(lens: LensModel, tokens: TokenBatch) -> list[Edit]:
    """Give every head one size at all positions."""
    target = {layer: size[:, None] for layer, size in natural_rms(lens, tokens).items()}
    return [head_rms_norm(target, eps=1e-12)]


CALIBRATIONS: Mapping[str, Callable[[LensModel, TokenBatch], list[Edit]]] = {
    "none": lambda lens, tokens: [],
    "amplify": _amplify,
    "attenuate": _attenuate,
    "head_rms": _head_rms,
}
"""Name -> the edits of a model, given the sequences that it is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """Measurements under one calibration."""

    sums: CosineSums
    ends: PredictionCounts
    mass: list[np.ndarray]
    """Mean attention to position 0 by sequence."""
    loss: list[np.ndarray]


def calibration(
    lens: LensModel,
    tokens: TokenBatch,
    *,
    names: Sequence[str] = tuple(CALIBRATIONS),
    seed: int = 0,
    progress: bool = False,
) -> pd.DataFrame:
    """Each calibration's contraction, preference, sink and loss on some sequences, and its effect against none.

    Columns: calibration, measure, value, low, high, effect, effect_low, effect_high, unit. The intervals are 95% over
    sequences: those of the contraction by the jackknife, those of mass and loss by the bootstrap, effects paired.

    Args:
        lens: the model.
        tokens: sequences of one length, 50 at least: random ones for an untrained model, text for a trained one.
        names: of ``CALIBRATIONS``; ``none`` is always there.
        seed: of the bootstrap.
        progress: show a bar.

    Cost: one pass of the bridge for each calibration.

    Raises:
        InputError: an unknown calibration, too few sequences, or padded ones.

    Reference: arXiv 2602.05927 (variance calibration; definitions ours).
    """
    if unknown := [name for name in names if name not in CALIBRATIONS]:
        raise InputError(
            f"there is no calibration {', '.join(unknown)}; need some of {', '.join(CALIBRATIONS)}"
        )
    if tokens.n_sequences < FEWEST or not bool(tokens.valid.all()):
        raise InputError(
            f"{tokens.n_sequences} sequences were given, padded: {not bool(tokens.valid.all())}; "
            f"need at least {FEWEST} of one length"
        )
    chosen = list(dict.fromkeys(["none", *names]))
    variants = {}
    with tqdm(
        total=len(chosen) * tokens.n_sequences,
        desc=lens.name,
        unit="seq",
        disable=not progress,
        leave=False,
    ) as bar:
        for name in chosen:
            variants[name] = _run(lens, tokens, CALIBRATIONS[name](lens, tokens), bar=bar)
    rows = [
        row for name in chosen for row in _rows(name, variants[name], variants["none"], seed=seed)
    ]
    columns = [
        "calibration",
        "measure",
        "value",
        "low",
        "high",
        "effect",
        "effect_low",
        "effect_high",
        "unit",
    ]
    return pd.DataFrame(rows, columns=columns)


def _run(lens: LensModel, tokens: TokenBatch, edits: list[Edit], *, bar: tqdm) -> _Variant:
    """Run the model under a calibration, and take every measure."""
    variant = _Variant(
        sums=CosineSums(lens.n_layers, sequences=tokens.n_sequences, length=tokens.n_positions),
        ends=PredictionCounts(lens.d_vocab, lens.d_model),
        mass=[],
        loss=[],
    )
    size = max(1, _TOKENS_A_FORWARD // tokens.n_positions)
    for part in tokens.batches(size):
        outcome = run_with(lens, part, edits, sites=_SITES, batch_size=size)
        variant.sums.add((-1, "embedding"), outcome.tensors["resid_pre", 0])
        for layer in range(lens.n_layers):
            after = outcome.tensors["resid_pre", layer] + outcome.tensors["attn_out", layer]
            variant.sums.add((layer, "attention"), after)
            variant.sums.add((layer, "mlp"), outcome.tensors["resid_post", layer])
        final = outcome.tensors["final", 0]
        variant.sums.add((lens.n_layers, "final"), final)
        variant.ends.add(final[:, -1].to(lens.device), lens=lens)
        variant.mass.append(outcome.mass_at(0).numpy())
        assert outcome.loss is not None
        variant.loss.append(outcome.loss.numpy())
        bar.update(part.n_sequences)
    return variant


def _rows(name: str, variant: _Variant, none: _Variant, *, seed: int) -> list[tuple[object, ...]]:
    """One row a measure."""
    rows: list[tuple[object, ...]] = []
    for measure, of in _CONTRACTED.items():
        found, base = of(variant.sums), of(none.sums)
        rows.append(
            (name, measure, *jackknife_interval(found), *jackknife_interval(found - base), "cosine")
        )
    for measure, unit in (("mass", "attention"), ("loss", "nats")):
        found, base = (np.concatenate(getattr(one, measure)) for one in (variant, none))
        value = interval(found, generator=np.random.default_rng(seed))
        effect = paired_difference(found, base, generator=np.random.default_rng(seed))
        bounds = (value.estimate, value.low, value.high, effect.estimate, effect.low, effect.high)
        rows.append((name, "sink_mass" if measure == "mass" else measure, *bounds, unit))
    n = variant.sums.sequences
    for measure, counts in (
        ("argmax_top_share", "argmax"),
        ("argmin_top_share", "argmin"),
        ("smallest_dimension_share", "smallest"),
    ):
        share, before = (int(getattr(one.ends, counts).max()) / n for one in (variant, none))
        rows.append(
            (
                name,
                measure,
                share,
                np.nan,
                np.nan,
                share - before,
                np.nan,
                np.nan,
                "share of sequences",
            )
        )
    return rows


def _at_last(found: np.ndarray) -> np.ndarray:
    """After the last layer, above the floor: the last place but the final norm."""
    return found[:, -2] - found[:, 0]


_CONTRACTED: Mapping[str, Callable[[CosineSums], np.ndarray]] = {
    "inter_excess": lambda sums: _at_last(sums.inter_cosines()),
    "intra_excess": lambda sums: _at_last(sums.intra_cosines()),
    "discrepancy": lambda sums: (
        _at_last(sums.inter_cosines()) - _at_last(sums.inter_cosines(end=0))
    ),
}

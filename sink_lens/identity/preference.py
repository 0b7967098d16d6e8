"""Token preference: how often a model predicts which token after random sequences, and what chance would do.

arXiv 2602.05927 claims that untrained transformers predict some tokens orders of magnitude more often than others; the
definitions are ours. Over N random sequences the last position's logits give an argmax, an argmin and probabilities.
Reported: the most frequent token's share of the N events; how many tokens cover 80% of them; the largest mean
probability times the size of the vocabulary.

Nulls: for the counts, N draws from all tokens alike; for the mean probability, each sequence's probabilities shifted
around the vocabulary by an offset of its own, which keeps how peaked they are.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..data.described import BosCondition
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..measures.reductions import widen
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.running import prepare_pass
from ..models.unembedding import logits_from_states
from ..progress import tqdm
from ..records import Finding
from ..stats import wilson_interval
from .models_to_measure import RandomSequences

COVERED = 0.8
_TOKENS_A_FORWARD = 4096
_LOGITS_A_FORWARD = 2**24
_SHIFTS = 20
_SIMULATED = 500
_NORMAL = 1.959964


class Votes:
    """For each token: how often it is the most and the least probable next one, and its summed probability."""

    def __init__(self, n_vocab: int, *, generator: torch.Generator) -> None:
        self.argmax = torch.zeros(n_vocab, dtype=torch.int64)
        self.argmin = torch.zeros(n_vocab, dtype=torch.int64)
        self.probability = torch.zeros(n_vocab, dtype=torch.float64)
        self.square = torch.zeros(n_vocab, dtype=torch.float64)
        self.shifted = torch.zeros(_SHIFTS, n_vocab, dtype=torch.float64)
        self.n = 0
        self._generator = generator

    def add(self, logits: Float[Tensor, "batch vocab"]) -> None:
        """Count the predictions of a batch, from the logits after each sequence's last token.

        Raises:
            InputError: the logits are not finite, as where a half-precision type overflows.
        """
        if not bool(logits.isfinite().all()):
            raise InputError(
                "the logits are not finite; need a type that holds them: load the model in float32 or bfloat16"
            )
        wide = widen(logits)
        n_vocab = wide.shape[1]
        self.argmax += torch.bincount(wide.argmax(1).cpu(), minlength=n_vocab)
        self.argmin += torch.bincount(wide.argmin(1).cpu(), minlength=n_vocab)
        probability = wide.softmax(1).cpu().double()
        self.probability += probability.sum(0)
        self.square += probability.square().sum(0)
        offsets = torch.randint(n_vocab, (len(wide), _SHIFTS), generator=self._generator).tolist()
        for row, of_row in zip(probability, offsets, strict=True):
            for number, offset in enumerate(of_row):
                self.shifted[number, offset:] += row[: n_vocab - offset]
                self.shifted[number, :offset] += row[n_vocab - offset :]
        self.n += len(wide)


@dataclass(frozen=True, kw_only=True)
class Preference(Finding):
    """Result of ``preference``: which tokens a model predicts after random sequences.

    ``summary`` has measure, value, low, high (95%, over sequences), null, null_low, null_high (95% of chance), unit;
    ``coverage`` kind, tokens, share of the events that the so many most frequent tokens cover, and the null's.
    """

    n: int
    argmax: np.ndarray
    """Token -> how often it is the most probable one."""
    argmin: np.ndarray
    """Token -> how often it is the least probable one."""
    probability: np.ndarray
    """Token -> its mean probability."""

    def top(self, most: int = 20) -> pd.DataFrame:
        """Return the tokens that are most often the most probable (argmax) or the least (argmin), up to ``most`` each.

        The columns are kind, token, count, share of the sequences, and mean probability relative to the average token.
        """
        frames = []
        for kind, counts in (("argmax", self.argmax), ("argmin", self.argmin)):
            order = np.argsort(-counts, kind="stable")[:most]
            order = order[counts[order] > 0]
            columns = {
                "kind": kind,
                "token": order,
                "count": counts[order],
                "share": counts[order] / self.n,
                "probability_ratio": self.probability[order] * len(counts),
            }
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)


def preference(
    model: ModelLike,
    *,
    sequences: int = 1000,
    length: int = 64,
    seed: int = 0,
    bos: BosCondition = "without",
    progress: bool = True,
) -> Preference:
    """Count which tokens a model predicts after random sequences of ordinary tokens, and compare with chance.

    One forward pass over the sequences; memory does not grow with their number.

    Args:
        model: the model, trained or not.
        sequences: how many, 50 at least.
        length: tokens of each.
        seed: of the sequences and of the nulls.
        bos: ``without``, ``with`` or ``auto``; see ``random_tokens``.
        progress: show a bar.

    Raises:
        InputError: too few sequences, a length over the context, or logits that are not finite.

    Reference: arXiv 2602.05927 (the claim; definitions ours).
    """
    lens = as_lens(model)
    draws = RandomSequences(sequences=sequences, length=length, seed=seed, bos=bos)
    draws.check_readable_by(lens)
    votes = Votes(lens.d_vocab, generator=torch.Generator().manual_seed(seed))
    size = sequences_that_fit(lens, length=length)
    with tqdm(
        total=sequences, desc=lens.name, unit="seq", disable=not progress, leave=False
    ) as bar:
        for chunk in draws.chunks(lens):
            for part in chunk.batches(size):
                votes.add(last_logits(lens, part))
                bar.update(part.n_sequences)
    return make_preference(votes, length=length, generator=np.random.default_rng(seed))


def sequences_that_fit(lens: LensModel, *, length: int) -> int:
    return max(1, min(_TOKENS_A_FORWARD // length, _LOGITS_A_FORWARD // lens.d_vocab))


def last_logits(lens: LensModel, part: TokenBatch) -> Float[Tensor, "batch vocab"]:
    """Return the logits after each sequence; of a 16-bit model in float32, where the largest do not tie."""
    given = {"input_ids": part.tokens.to(lens.device), "use_cache": False}
    with prepare_pass(lens), torch.no_grad():
        if lens.dtype.itemsize > 2:
            return lens.plain(**given, logits_to_keep=1).logits[:, -1]
        states = lens.plain.base_model(**given).last_hidden_state[:, -1]
        return logits_from_states(lens, states, wide=True)


def make_preference(votes: Votes, *, length: int, generator: np.random.Generator) -> Preference:
    n, n_vocab = votes.n, len(votes.argmax)
    counts = {"argmax": votes.argmax.numpy(), "argmin": votes.argmin.numpy()}
    every_event = (generator.integers(n_vocab, size=n) for _ in range(_SIMULATED))
    ranks = min(n, n_vocab)
    chance = np.stack(
        [_sort_descending(np.bincount(one, minlength=n_vocab))[:ranks] for one in every_event]
    )
    rows: list[tuple[object, ...]] = []
    share, ratio = _mean_and_band(chance[:, 0] / n), _mean_and_band(chance[:, 0] / n * n_vocab)
    covering = _mean_and_band(np.array([_count_tokens_of_80_percent(one, n) for one in chance]))
    for kind, found in counts.items():
        top = int(found.max())
        bounds = np.array(wilson_interval(top, n))
        rows.append((f"{kind}_top_share", top / n, *bounds, *share, "share of sequences"))
        rows.append(
            (f"{kind}_top_ratio", top / n * n_vocab, *(bounds * n_vocab), *ratio, "times chance")
        )
        covered = _count_tokens_of_80_percent(_sort_descending(found), n)
        rows.append((f"{kind}_covering", covered, np.nan, np.nan, *covering, "tokens"))
    mean = votes.probability.numpy() / n
    most = int(mean.argmax())
    variance = max(votes.square.numpy()[most] / n - mean[most] ** 2, 0.0)
    error = _NORMAL * np.sqrt(variance / n) * n_vocab
    value = mean[most] * n_vocab
    null = _mean_and_band(votes.shifted.numpy().max(1) / n * n_vocab)
    bounds = (value - error, value + error)
    rows.append(("mean_probability_ratio", value, *bounds, *null, "times chance"))
    names = ["measure", "value", "low", "high", "null", "null_low", "null_high", "unit"]
    curves = [_coverage_curve(*one, chance, n) for one in counts.items()]
    return Preference(
        n=n,
        headline=f"What follows {n:,} random sequences of {length} tokens.",
        argmax=counts["argmax"],
        argmin=counts["argmin"],
        probability=mean,
        tables={
            "summary": pd.DataFrame(rows, columns=names).astype({"value": float}),
            "coverage": pd.concat(curves, ignore_index=True),
        },
    )


def _sort_descending(counts: np.ndarray) -> np.ndarray:
    return np.sort(counts)[::-1]


def _count_tokens_of_80_percent(ordered: np.ndarray, n: int) -> int:
    return int(np.searchsorted(ordered.cumsum(), COVERED * n) + 1)


def _coverage_curve(kind: str, counts: np.ndarray, chance: np.ndarray, n: int) -> pd.DataFrame:
    """Return the share of ``n`` predictions that the top k tokens make up; ``chance``: sorted counts by simulation."""
    ranks = chance.shape[1]
    places = np.unique(np.geomspace(1, ranks, 60).round().astype(int))
    shares = chance.cumsum(1)[:, places - 1] / n
    low, high = np.quantile(shares, [0.025, 0.975], axis=0)
    columns = {
        "kind": kind,
        "tokens": places,
        "share": _sort_descending(counts)[:ranks].cumsum()[places - 1] / n,
        "null": shares.mean(0),
        "null_low": low,
        "null_high": high,
    }
    return pd.DataFrame(columns)


def _mean_and_band(values: np.ndarray) -> tuple[float, float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)

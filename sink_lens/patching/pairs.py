"""Pairs of clean and corrupted sequences with the same lengths, and the positions at which they differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..activations.forward import resolve
from ..arguments import check_calls
from ..data.described import BosCondition
from ..data.tokens import Prompts as Sequences
from ..data.tokens import TokenBatch, as_batch, decode_tokens, from_tensor
from ..models.lens import LensModel
from .carried import UNLIKE
from .config import Direction, check_pair_lengths
from .pair_file import Prompt

DIFFER = "(differ)"
"""Label of a position at which clean and corrupted tokens differ, and pairs too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """Clean and corrupted sequences of the same lengths, and where their tokens differ."""

    clean: TokenBatch
    corrupted: TokenBatch
    differences: pd.DataFrame
    """One row per position where the tokens differ: sequence, position, clean, corrupted (texts of the tokens)."""
    labels: Mapping[int, str]
    """Position -> label: the token (clean/corrupted) if all pairs share it; else "", ``DIFFER`` if clean and corrupted
    tokens differ, or ``UNLIKE``. Pairs of several lengths have labels from -1, their ends, down too."""

    @check_calls
    def run_and_source(self, direction: Direction) -> tuple[TokenBatch, TokenBatch]:
        return (
            (self.corrupted, self.clean)
            if direction == "denoising"
            else (self.clean, self.corrupted)
        )


def pair_prompts(
    lens: LensModel, clean: Sequences, corrupted: Sequences, *, bos: BosCondition = "auto"
) -> PromptPair:
    """Pair each clean sequence with its corrupted one.

    Raises:
        InputError: the numbers of sequences or the lengths differ, or tokens are not in the model's vocabulary.
    """
    first, second = (
        resolve(lens, one, bos="auto" if isinstance(one, TokenBatch | Tensor | Mapping) else bos)[1]
        for one in (clean, corrupted)
    )
    tables = [decode_tokens(batch, lens.tokenizer) for batch in (first, second)]

    def pair_text(index: int) -> str:
        return "".join(
            f" ({' | '.join(table[table['sequence'] == index]['text'])})" for table in tables
        )

    check_pair_lengths(first.lengths.tolist(), second.lengths.tolist(), pair_text)
    joined = tables[0].merge(
        tables[1], on=["sequence", "position"], suffixes=("_clean", "_corrupted")
    )
    joined = joined.assign(differs=joined["token_id_clean"] != joined["token_id_corrupted"])
    differing = joined.loc[joined["differs"]]
    names = {"text_clean": "clean", "text_corrupted": "corrupted"}
    shown = differing.rename(columns=names).reindex(
        columns=["sequence", "position", *names.values()]
    )
    shown = shown.reset_index(drop=True)
    # where most tokens of a pair differ, it is of two texts, and equal tokens are by chance
    counts = Counter(differing["sequence"].tolist())
    far = [one for one, n in counts.items() if 2 * n > int(first.lengths[one])]
    joined = joined.assign(differs=joined["differs"] | joined["sequence"].isin(far))
    lengths = dict(enumerate(first.lengths.tolist()))
    one_length = len(set(lengths.values())) == 1
    labels = _position_labels(joined, n_pairs=len(lengths), aligned=one_length)
    if not one_length:
        shortest = min(lengths.values())
        of_rows = [lengths[one] for one in joined["sequence"]]
        ends = joined.assign(position=joined["position"] - of_rows)
        ends = ends.loc[ends["position"] >= -shortest]
        labels |= _position_labels(ends, n_pairs=len(lengths), aligned=True)
    return PromptPair(clean=first, corrupted=second, differences=shown, labels=labels)


def _position_labels(joined: pd.DataFrame, *, n_pairs: int, aligned: bool) -> dict[int, str]:
    """Return position -> label, from a row for each token of both runs with its sequence and position.

    A position is one place if all pairs have its tokens, or if all differ there, or none does. The latter two are
    believed up to the first position that is neither, and everywhere if ``aligned``.
    """
    labels, follows = {}, True
    for position, own in joined.groupby("position"):
        pairs = set(zip(own["text_clean"], own["text_corrupted"], strict=True))
        differs, whole = set(own["differs"].tolist()), len(own) == n_pairs
        shared = whole and len(pairs) == 1
        follows = follows and (shared or (whole and differs == {True}))
        if shared:
            text = "/".join(dict.fromkeys(pairs.pop()))
        elif whole and len(differs) == 1 and (aligned or follows):
            text = DIFFER * (True in differs)
        else:
            text = UNLIKE
        labels[int(str(position))] = text
    return labels


def batch_of_prompts(prompts: Sequence[Prompt], lens: LensModel, *, bos: BosCondition) -> Sequences:
    """Return prompts as one batch if some are token ids; texts are returned as they are."""
    if all(isinstance(one, str) for one in prompts):
        return cast("Sequence[str]", prompts)
    rows = [
        as_batch(one, lens.tokenizer, bos=bos).tokens[0]
        if isinstance(one, str)
        else torch.tensor(one)
        for one in prompts
    ]
    return from_tensor(
        pad_sequence(rows, batch_first=True), lengths=torch.tensor([len(row) for row in rows])
    )


def label_table(labels: Mapping[int, str]) -> pd.DataFrame:
    """Make a table of position and text of the tokens that all prompts share."""
    known = [(place, text) for place, text in labels.items() if text not in ("", DIFFER, UNLIKE)]
    frame = pd.DataFrame(known, columns=["position", "text"])
    return frame.astype({"position": int, "text": str})

"""The known answers about a model with hand-written weights; detectors and verdicts are tested against them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from sink_lens.chain.links import LINKS as CHAIN
from sink_lens.errors import InputError
from sink_lens.models.tiny import VOCAB_SIZE

LINKS = tuple(link.name for link in CHAIN)
"""The six links of the chain, in their order."""
FIRST_ORDINARY = 3
"""First ordinary token id; the ids below are special (padding, BOS, end of sequence)."""

Answer = Literal["yes", "in part", "no", "not applicable", "not asked"]
Kind = Literal["neuron", "head", "mixer", "embedding", "key bias", "sink logit"]
Place = Literal["first", "behind", "token", "sink logit", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """One part of a model that helps to make its sink or its massive activation."""

    kind: Kind
    layer: int | None = None
    """The layer of the part; None for an embedding."""
    index: int
    """Index of the part: a neuron of the layer's MLP, a head, a key-value head (key bias) or a token id (embedding); 0
    for a mixer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The truth about one link. Without a sink, `necessary_or_sufficient` and `carries` have no meaning."""

    present: Answer
    """Whether the quantity at the sink position stands out from other positions."""
    necessary_or_sufficient: Answer
    """Whether breaking the link removes the sink; for the first link, whether isolating another position makes one."""
    carries: Answer
    """Whether patching the link's target from a run without the sink into a run with the sink removes the sink. The
    target is the aggregated value, the attention's output, the neurons, the dimension, its part of the key, or the
    key."""


YES = Answers(present="yes", necessary_or_sufficient="yes", carries="yes")
"""The sink is made through this link."""
PARTLY = Answers(present="yes", necessary_or_sufficient="in part", carries="in part")
"""A part of the sink, less than half, is made through this link."""
BESIDE = Answers(present="yes", necessary_or_sufficient="no", carries="no")
"""The quantity stands out, but the sink does not come from it."""
NO = Answers(present="no", necessary_or_sufficient="no", carries="no")
"""There is a sink, but this link is absent."""
SEEN = Answers(present="yes", necessary_or_sufficient="not applicable", carries="not applicable")
"""The quantity stands out, but there is no sink."""
BROKEN = Answers(present="no", necessary_or_sufficient="not applicable", carries="not applicable")
"""The quantity does not stand out, and there is no sink."""
NOT_ASKED = Answers(present="not asked", necessary_or_sufficient="not asked", carries="not asked")
"""The token grows before any layer has attention, so that attention cannot be asked what it has to do with it."""
NOTHING = Answers(
    present="not applicable", necessary_or_sufficient="not applicable", carries="not applicable"
)
"""The source of the link is absent, so the question has no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The mechanism that was written into a model."""

    sink: Place
    """Location of the sink: the `first` position whatever its token, the position `behind` a first token whatever
    stands there, a `token` at any position, a learned `sink logit` (which has no position), or nowhere."""
    tokens: tuple[int, ...] = ()
    """The token ids that are sinks, if the sink is at a token; those that it stands behind, if it is behind one."""
    alone: tuple[int, ...] = ()
    """The token ids that are sinks anywhere, if the sink is behind a token and these need none before them."""
    spares: tuple[int, ...] = ()
    """The token ids that are no sink at the first position, if the sink is there whatever other token it has."""
    only_first: bool = False
    """True if the token is a sink at position 0 only."""
    sink_from: int = 0
    """First position at which the token is a sink."""
    logit_heads: tuple[int, ...] = ()
    """The heads of the locked layers in which a learned sink logit takes the attention; the others have the sink."""
    reach: int | None = None
    """Number of positions that a query sees, itself included; None means all positions up to its own."""
    locked: tuple[int, ...] = ()
    """The layers in which all heads attend to the sink."""
    feeding: tuple[int, ...] = ()
    """The layers whose attention the first two links describe."""
    elsewhere: bool = False
    """True if the makers work at every position but the sink's, from which they take nothing away."""
    cancels_bias: bool = False
    """True if the dimension cancels a bias that every key has."""
    grows: tuple[int, ...] = ()
    """The layers that make the sink token grow, if the construction fixes them."""
    kept: int | None = None
    """The layer whose mixer's state keeps the first token and gives it to every later one."""
    erased: tuple[int, ...] = ()
    """The layers that take most of what was written away from the sink token again."""
    makers: tuple[Maker, ...] = ()
    """All parts that make the sink; in a model without a sink, the parts that make the massive activation."""
    feeds: tuple[Maker, ...] = ()
    """The makers that only make another one fire: ablating one of these silences it."""
    enough: tuple[tuple[Maker, ...], ...] = ()
    """The smallest sets of parts that are each enough to make the sink alone."""
    idle: tuple[Maker, ...] = ()
    """Neurons that write what the makers have written already, so that the sink is there without them."""
    outliers: Mapping[int, tuple[int, ...]]
    """Layer -> the dimensions that dominate the sink token's residual stream after the layer; -1 is the embedding."""
    direction: Tensor | None = None
    """The unit direction that carries the sink if no single dimension does: [d_model]."""
    links: Mapping[str, Answers]
    """Link -> the truth about it."""
    by: Literal["size", "direction", ""] = ""
    """What of the value average makes the sink, if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model of the zoo, the kind of sequences to run it on, and its truth."""

    name: str
    family: str
    """Name of the architecture, as in `TINY_FAMILIES`."""
    seed: int
    model: PreTrainedModel
    """Float32, eval mode, on the CPU."""
    bos_id: int | None
    """The token that the model's sequences begin with; None if they begin with any token."""
    delimiters: tuple[int, ...] = ()
    """Tokens that appear three times in each of the model's sequences, at random positions."""
    late_every: int = 0
    """Every so many sequences begin with an ordinary token, and BOS follows it; 0 is none."""
    firsts: tuple[int, ...] = ()
    """Tokens that stand only at the beginning of sequences."""
    first_every: int = 1
    """Every so many sequences begin with one of them, the first sequence among them."""
    placed: tuple[tuple[int, int], ...] = ()
    """Position and token of what each sequence has."""
    n_ordinary: int | None = None
    """Number of ordinary tokens that the sequences are made of; None is all."""
    at: int | None = None
    """Token that the model is traced at. It stands once in each sequence: from position 16 on in every fifth sequence
    from the first and from the third, at positions 8 to 11 in the others."""
    truth: Truth

    def draw(
        self, sequences: int, *, length: int = 32, generator: torch.Generator
    ) -> Int[Tensor, "batch position"]:
        """Draw sequences for the model: distinct ordinary tokens, with BOS and delimiters as the model needs them.

        Raises:
            InputError: The vocabulary has too few ordinary tokens for this length.
        """
        special = {*self.delimiters, *self.firsts, *(token for _, token in self.placed), self.at}
        ordinary = [i for i in range(FIRST_ORDINARY, VOCAB_SIZE) if i not in special][
            : self.n_ordinary
        ]
        if not 8 <= length <= len(ordinary):
            raise InputError(
                f"length is {length}; need 8 to {len(ordinary)}, so that no token comes twice"
            )
        ids = torch.tensor(ordinary)
        tokens = torch.stack(
            [ids[torch.randperm(len(ids), generator=generator)[:length]] for _ in range(sequences)]
        )
        if self.bos_id is not None:
            first = tokens[:, 0].clone()
            tokens[:, 0] = self.bos_id
            if self.late_every:
                late = slice(self.late_every - 1, None, self.late_every)
                tokens[late, 1], tokens[late, 0] = self.bos_id, first[late]
        if self.firsts:
            having = tokens[:: self.first_every]
            having[:, 0] = torch.tensor(self.firsts)[
                torch.randint(len(self.firsts), (len(having),), generator=generator)
            ]
        for position, token in self.placed:
            tokens[:, position] = token
        if self.at is not None:
            for number, row in enumerate(tokens):
                first, end = (16, max(17, length - 9)) if number % 5 in (0, 2) else (8, 12)
                row[int(torch.randint(first, end, (), generator=generator))] = self.at
        if self.delimiters:
            for row in tokens:
                places = 1 + torch.randperm(length - 1, generator=generator)[:3]
                chosen = torch.randint(len(self.delimiters), (3,), generator=generator)
                row[places] = torch.tensor(self.delimiters)[chosen]
        return tokens

    def sinks(self, tokens: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """Mark the sink positions of these sequences."""
        found = torch.zeros_like(tokens, dtype=torch.bool)
        if self.truth.sink == "first":
            found[:, 0] = ~torch.isin(
                tokens[:, 0], torch.tensor(self.truth.spares, dtype=tokens.dtype)
            )
        elif self.truth.sink == "behind":
            found = torch.isin(tokens, torch.tensor(self.truth.alone, dtype=tokens.dtype))
            found[:, 1] |= torch.isin(tokens[:, 0], torch.tensor(self.truth.tokens))
        elif self.truth.sink == "token":
            found = torch.isin(tokens, torch.tensor(self.truth.tokens))
            found[:, : self.truth.sink_from] = False
            if self.truth.only_first:
                found[:, 1:] = False
        return found

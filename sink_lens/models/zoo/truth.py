"""What is known of a model whose weights were written by hand: the truth that finders and verdicts are held against."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import InputError
from ..tiny import VOCAB_SIZE

LINKS = (
    "aggregation_variance",
    "variance_preserved",
    "variance_neurons",
    "neurons_dimension",
    "dimension_key",
    "key_sink",
)
"""The six links of the chain, in their order."""
FIRST_ORDINARY = 3
"""Ids below are special: padding, BOS, end of sequence."""

Answer = Literal["yes", "no", "not applicable"]
Kind = Literal["neuron", "head", "embedding", "key bias", "sink logit"]
Place = Literal["first", "token", "sink logit", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """One part of a model that makes its sink, or its massive activation."""

    kind: Kind
    layer: int | None = None
    """The layer it stands in; None for an embedding."""
    index: int
    """A neuron of the layer's MLP, a head, a key-value head for a key bias, a token id for an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What is true of one link. `necessary_or_sufficient` and `carries` speak of the sink: without one, of nothing."""

    present: Answer
    """At the sink position the quantity stands out from other positions."""
    necessary_or_sufficient: Answer
    """Breaking the link removes the sink; for the first link, isolating another position makes one there."""
    carries: Answer
    """Of two runs, one with the sink and one without: what the link leads to (the aggregated value, the attention's
    output, the neurons, the dimension, its part of the key, the key), taken from the second and put into the first,
    removes it."""


YES = Answers(present="yes", necessary_or_sufficient="yes", carries="yes")
"""The sink is made through this link."""
BESIDE = Answers(present="yes", necessary_or_sufficient="no", carries="no")
"""The quantity stands out, and the sink does not come from it."""
NO = Answers(present="no", necessary_or_sufficient="no", carries="no")
"""There is a sink, and nothing of this link."""
SEEN = Answers(present="yes", necessary_or_sufficient="not applicable", carries="not applicable")
"""The quantity stands out, and there is no sink."""
BROKEN = Answers(present="no", necessary_or_sufficient="not applicable", carries="not applicable")
"""The quantity does not stand out, and there is no sink."""
NOTHING = Answers(present="not applicable", necessary_or_sufficient="not applicable", carries="not applicable")
"""What the link starts from is not there, so there is nothing to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What was written into a model."""

    sink: Place
    """Where the sink is: at the `first` position whatever stands there, at a `token` wherever it stands, in a learned
    `sink logit`, which has no position, or nowhere."""
    tokens: tuple[int, ...] = ()
    """The token ids that are sinks, where a token is."""
    reach: int | None = None
    """How many positions a query sees, itself included; None is all before it."""
    locked: tuple[int, ...] = ()
    """The layers in which all heads attend to the sink."""
    feeding: tuple[int, ...] = ()
    """The layers whose attention the first two links are about."""
    makers: tuple[Maker, ...] = ()
    """Everything that makes the sink; without a sink, what makes the massive activation."""
    enough: tuple[tuple[Maker, ...], ...] = ()
    """The smallest sets of makers each of which makes the sink without the others."""
    outliers: Mapping[int, tuple[int, ...]]
    """Layer -> the dimensions that dominate the sink token's stream after it; -1 is the embedding."""
    direction: Tensor | None = None
    """The unit direction that carries the sink where no dimension does: [d_model]."""
    links: Mapping[str, Answers]
    """Link -> its three answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model, the sequences that it is meant for, and its truth."""

    name: str
    family: str
    """Name of the architecture, as in `TINY_FAMILIES`."""
    seed: int
    model: PreTrainedModel
    """Float32, eval mode, on the CPU."""
    bos_id: int | None
    """The token that its sequences begin with; None where they begin with any."""
    delimiters: tuple[int, ...] = ()
    """Tokens that its sequences have three of, at random places."""
    truth: Truth

    def draw(self, sequences: int, *, length: int = 32, generator: torch.Generator) -> Int[Tensor, "batch position"]:
        """Sequences of ordinary tokens, none of them twice in a sequence, with BOS and delimiters where they belong.

        Raises:
            InputError: The vocabulary has fewer ordinary tokens than that.
        """
        ordinary = [i for i in range(FIRST_ORDINARY, VOCAB_SIZE) if i not in self.delimiters]
        if not 8 <= length <= len(ordinary):
            raise InputError(f"length is {length}; need 8 to {len(ordinary)}, so that no token comes twice")
        ids = torch.tensor(ordinary)
        tokens = torch.stack([ids[torch.randperm(len(ids), generator=generator)[:length]] for _ in range(sequences)])
        if self.bos_id is not None:
            tokens[:, 0] = self.bos_id
        if self.delimiters:
            for row in tokens:
                places = 1 + torch.randperm(length - 1, generator=generator)[:3]
                chosen = torch.randint(len(self.delimiters), (3,), generator=generator)
                row[places] = torch.tensor(self.delimiters)[chosen]
        return tokens

    def sinks(self, tokens: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """Where these sequences have their sinks."""
        found = torch.zeros_like(tokens, dtype=torch.bool)
        if self.truth.sink == "first":
            found[:, 0] = True
        elif self.truth.sink == "token":
            found = torch.isin(tokens, torch.tensor(self.truth.tokens))
        return found

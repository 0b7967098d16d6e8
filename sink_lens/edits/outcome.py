"""The outcome of a run: the quantities that were read of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..data.given import Given, as_given, by_text
from ..errors import InputError
from ..models.sites import SITES
from ..records import display
from ..text import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The quantities that were read of a run, edited or not.

    What is of each token (``valid``, ``logits``, ``token_loss``, ``tensors``) lies where the token was given, nan
    elsewhere; ``loss`` has a number for each row that was given. ``mass`` and ``state`` are by text, at positions from
    its first token.
    """

    positions: tuple[int, ...]
    """Those whose attention and residual stream were read; below 0 from the end of each text."""
    layers: tuple[int, ...]
    """In the order in which they were asked for."""
    valid: Bool[Tensor, "given position"] = field(repr=False)
    """True at real tokens."""
    mass: Float[Tensor, "layer batch head key"]
    """Mean attention to each of the positions, over the queries after it that can see it."""
    state: Float[Tensor, "layer batch key d_model"] = field(repr=False)
    """The residual stream at each of the positions after each layer; nan where a sequence has ended, and where a sweep
    ended the pass before it."""
    loss: Float[Tensor, " given"] | None
    """Mean next-token loss of each sequence in nats; None if it was not requested."""
    logits: Float[Tensor, "given query vocab"] | None = field(repr=False)
    """At the scored positions, on the CPU; None if they were not requested."""
    tensors: Mapping[tuple[str, int], Tensor] = field(repr=False)
    """(site, layer) -> the tensor after the edits, on the CPU."""
    token_loss: Float[Tensor, "given target"] | None = field(default=None, repr=False)
    """Loss of every token but the first in nats, nan at padding and where labels leave a token out; of ``run_with``
    alone, with the loss.
    """
    scored: tuple[int, ...] | None = None
    """The positions in ``logits``; None means all."""
    sequences: slice | Int[Tensor, " batch"] = field(default_factory=lambda: slice(None))
    """Indices of these sequences among all of the metric, if a sweep runs them in batches."""
    given: Given | None = field(default=None, repr=False)
    """Where each token was given; None if a text a row from position 0 on."""
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def indices(self) -> list[int]:
        """The index of each sequence among all sequences of the metric."""
        if isinstance(self.sequences, Tensor):
            return self.sequences.tolist()
        start, step = self.sequences.start or 0, self.sequences.step or 1
        return list(range(start, start + len(self.valid) * step, step))

    def select(self, rows: Sequence[int], *, length: int | None = None) -> "Outcome":
        """Copy the sequences ``rows``, up to ``length`` positions."""
        at, cut = torch.tensor(rows), slice(length)
        targets = slice(None if length is None else length - 1)
        scored, logits = self.scored, None if self.logits is None else self.logits[at]
        if logits is not None and scored is None:
            logits = logits[:, cut]
        elif logits is not None and scored is not None and length is not None:
            logits = logits[:, [position < length for position in scored]]
            scored = tuple(position for position in scored if position < length)
        return replace(
            self,
            valid=self.valid[at, cut],
            mass=self.mass[:, at],
            state=self.state[:, at],
            loss=None if self.loss is None else self.loss[at],
            token_loss=None if self.token_loss is None else self.token_loss[at, targets],
            logits=logits,
            scored=scored,
            tensors={
                key: _cut_positions(one[at], key[0], cut) for key, one in self.tensors.items()
            },
            sequences=torch.tensor(self.indices)[at],
        )

    def parts_of_one_length(self) -> "list[tuple[list[int], Outcome]]":
        """Return, for each length, the rows that have it and their outcome without padding."""
        lengths = self.valid.sum(1)
        if bool(self.valid.all()):
            return [(list(range(len(lengths))), self)]
        found = []
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0].tolist()
            found.append((rows, self.select(rows, length=length)))
        return found

    def with_nan_at_padding(self) -> "Outcome":
        """Copy the outcome with nan at padding in logits and tensors."""
        if bool(self.valid.all()):
            return self
        scored, real = slice(None) if self.scored is None else list(self.scored), {}
        for key, one in self.tensors.items():
            shape = [1] * one.dim()
            shape[0], shape[SITES[key[0]].position_axis] = self.valid.shape
            real[key] = one.where(self.valid.view(shape), torch.nan)
        logits = self.logits
        if logits is not None:
            logits = logits.where(self.valid[:, scored, None], torch.nan)
        return replace(self, logits=logits, tensors=real)

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {value:.4g}" for name, value in self._means().items())
        read = [] if self.logits is None else ["logits"]
        read = dict.fromkeys([*read, *(name for name, _ in self.tensors)])
        has = f"; with {', '.join(read)}" if read else ""
        return f"Outcome of {plural(self.mass.shape[1], 'sequence')}, {plural(len(self.layers), 'layer')}: {means}{has}"

    def _repr_html_(self) -> str:
        said = (
            f"Means over {len(self.layers)} layers, the heads and {self.mass.shape[1]} sequences."
        )
        return display.result_html(said, self._means(), notes=self.notes)

    def _means(self) -> dict[str, float]:
        means = {
            f"attention to position {one}": float(self.mass_or_nan(one).nanmean())
            for one in self.positions
        }
        return means if self.loss is None else {**means, "loss, nats": float(self.loss.nanmean())}

    def mass_at(
        self, position: int, *, layers: Sequence[int] | None = None
    ) -> Float[Tensor, " batch"]:
        """Return each sequence's mean attention to a position, over heads and ``layers`` (None: all that were read).

        It is nan where the position is a sequence's last token, which no later token attends to.

        Raises:
            InputError: it was not read, or it is the last token of every sequence.
        """
        self._place_of(position)
        if position == -1 or bool((self.lengths == position + 1).all()):
            raise InputError(
                f"position {position} is the last token of every sequence, which no later token attends to; need an "
                "earlier position, or state_at, which reads its residual stream"
            )
        return self.mass_or_nan(position, layers=layers)

    def mass_or_nan(
        self, position: int, *, layers: Sequence[int] | None = None
    ) -> Float[Tensor, " batch"]:
        """Return what ``mass_at`` does, and nan at a last token everywhere."""
        # Make it contiguous: the order of summation must not depend on how many other positions were read.
        rows = [self.layers.index(layer) for layer in (self.layers if layers is None else layers)]
        return self.mass[rows][..., self._place_of(position)].contiguous().nanmean(dim=(0, 2))

    def state_at(self, position: int) -> Float[Tensor, "layer batch d_model"]:
        """Return the residual stream at a position, in every layer that was read."""
        return self.state[:, :, self._place_of(position)]

    def _place_of(self, position: int) -> int:
        if position < 0 and position not in self.positions:
            ends = set(self.lengths.tolist())
            position += ends.pop() if len(ends) == 1 else 0
        if position not in self.positions:
            raise InputError(
                f"position {position} was not read; need one of {', '.join(map(str, self.positions))}"
            )
        return self.positions.index(position)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        return self.valid.sum(1) if self.given is None else (self.given.index >= 0).sum(1)

    def logits_at(self, positions: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
        """Return the logits of each sequence at its own position."""
        if self.logits is None:
            raise InputError("the logits were not kept; need run_with(..., logits=True)")
        if self.given is not None:
            return self.by_text().logits_at(positions)
        index = positions
        if self.scored is not None:
            index = torch.tensor([self.scored.index(position) for position in positions.tolist()])
        return self.logits[torch.arange(len(index)), index]

    def as_given(self, given: Given | None) -> "Outcome":
        """Return the outcome of a run with what is of each token laid where it was given."""
        if given is None:
            return self
        return self._laid(as_given, given, valid=as_given(self.valid, given), laid=given)

    def by_text(self) -> "Outcome":
        """Return the outcome with a text a row, from position 0 on, as a metric reads it; inverse of ``as_given``."""
        if self.given is None:
            return self
        return self._laid(by_text, self.given, valid=self.given.index.cpu() >= 0, laid=None)

    def _laid(
        self,
        lay: Callable[..., Tensor],
        given: Given,
        *,
        valid: Bool[Tensor, "given position"],
        laid: Given | None,
    ) -> "Outcome":
        """Lay what is of each token by ``as_given`` or ``by_text``."""
        losses = None
        if self.token_loss is not None:
            losses = lay(self.token_loss, given, first=1).masked_fill(~valid[:, 1:], nan)
        rows = given.index[:, 0] // given.shape[1]
        packed = rows.tolist() != [*range(given.shape[0])]  # a loss of each text, or of each row
        return replace(
            self,
            valid=valid,
            token_loss=losses,
            loss=losses.nanmean(1) if packed and losses is not None else self.loss,
            logits=None if self.logits is None else lay(self.logits, given),
            tensors={
                place: lay(one, given, axes=SITES[place[0]].axis_names)
                for place, one in self.tensors.items()
            },
            given=laid,
        )


def _cut_positions(tensor: Tensor, site: str, cut: slice) -> Tensor:
    axes = SITES[site].axes.split()
    return tensor[
        tuple(cut if axis in ("position", "query", "key") else slice(None) for axis in axes)
    ]


def fill_in_early_layers(found: Outcome, *, rows: slice, early: Outcome) -> Outcome:
    """Return the sequences ``rows`` of ``found``, with the layers that it lacks from ``early``."""
    own = {layer: index for index, layer in enumerate(found.layers)}

    def by_layer(name: str) -> Tensor:
        late, before = getattr(found, name), getattr(early, name)
        return torch.stack(
            [
                late[own[layer]][rows] if layer in own else before[index]
                for index, layer in enumerate(early.layers)
            ]
        )

    return Outcome(
        positions=early.positions,
        layers=early.layers,
        valid=early.valid,
        mass=by_layer("mass"),
        state=by_layer("state"),
        loss=None if found.loss is None else found.loss[rows],
        logits=None if found.logits is None else found.logits[rows],
        tensors={**early.tensors, **{key: tensor[rows] for key, tensor in found.tensors.items()}},
        scored=found.scored,
    )


def join_outcomes(parts: Sequence[Outcome]) -> Outcome:
    if len(parts) == 1:
        return replace(parts[0], sequences=slice(None))
    first = parts[0]
    if len({part.scored for part in parts}) > 1:  # the ends of texts of other lengths
        scored = tuple(sorted({one for part in parts for one in part.scored or ()}))
        parts = [_with_scored(part, scored) for part in parts]
    losses, by_token, logits = (
        [getattr(part, name) for part in parts] for name in ("loss", "token_loss", "logits")
    )
    return replace(
        first,
        valid=torch.cat([part.valid for part in parts]),
        mass=torch.cat([part.mass for part in parts], dim=1),
        state=torch.cat([part.state for part in parts], dim=1),
        loss=None if first.loss is None else torch.cat(losses),
        token_loss=None if first.token_loss is None else torch.cat(by_token),
        logits=None if first.logits is None else torch.cat(logits),
        tensors={
            place: torch.cat([part.tensors[place] for part in parts]) for place in first.tensors
        },
        scored=parts[0].scored,
        sequences=slice(None),
    )


def _with_scored(part: Outcome, scored: tuple[int, ...]) -> Outcome:
    """Return the outcome with logits at ``scored``: nan where they were not read."""
    assert part.logits is not None  # some positions were read
    assert part.scored is not None
    logits = part.logits.new_full((len(part.valid), len(scored), part.logits.shape[2]), nan)
    logits[:, [scored.index(one) for one in part.scored]] = part.logits
    return replace(part, logits=logits, scored=scored)

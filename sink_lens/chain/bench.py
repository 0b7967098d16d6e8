"""Where the chain is cut: a few sequences, a sink of theirs, an interior position, and what their clean run holds."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from tqdm.auto import tqdm

from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.outcome import Outcome
from ..engine.forward import Start, run_with
from ..errors import InputError
from ..models.lens import LensModel
from .config import TraceConfig
from .locate import Finding, GrowthStep
from .panel import shortened
from .readings import OTHERS_FROM, RANDOM_SETS

_SHORTEST = OTHERS_FROM + 4
_AFTER_POSITION = 32
"""Positions that follow an interior position, where the sequences have them."""
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The layers in which what one growth step made is read: those after it and before the next."""

    number: int
    """The growth step's; -1 where the model has none."""
    step: GrowthStep | None
    layers: tuple[int, ...]

    @property
    def first_layer(self) -> int:
        """Where the step begins."""
        return self.layers[0] if self.step is None else self.step.first_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One model, a few sequences, and their clean run."""

    lens: LensModel
    tokens: TokenBatch
    finding: Finding
    new: int
    """The interior position at which a sink is made."""
    baseline: Outcome = field(repr=False)
    """The clean run of the bridge, with its loss and the stream after every layer."""
    segments: tuple[Segment, ...]
    seed: int

    @property
    def old(self) -> int:
        """The position of the model's own sink."""
        return self.finding.position

    @property
    def late(self) -> tuple[int, ...]:
        """All layers in which the sink is read."""
        return tuple(layer for segment in self.segments for layer in segment.layers)

    def controls(self, position: int) -> list[int]:
        """Five positions that are no sink and not the new one; later ones if there are any, where an edit is seen."""
        length = self.tokens.n_positions
        taken = {*self.finding.positions, self.new}
        places = [p for p in range(position + 1, length - 1) if p not in taken]
        if len(places) < RANDOM_SETS:
            places = [p for p in range(1, length - 1) if p not in taken]
        chosen = torch.linspace(0, len(places) - 1, min(RANDOM_SETS, len(places))).round().long().tolist()
        return [places[index] for index in chosen]

    def run(
        self,
        edits: Sequence[Edit],
        *,
        layers: Sequence[int] | None = None,
        loss: bool = False,
        of: Outcome | None = None,
        quiet: bool = False,
    ) -> Outcome:
        """A run under edits, the new and the old position read.

        Where no loss is asked for, it begins at the first layer that is edited, from the stream of another run
        (``of``) under all edits that come before; the clean one if None. ``quiet`` is for controls, and for
        holds of what may be untouched: that they change nothing is an answer, and no reason to warn.
        """
        source = self.baseline if of is None else of
        read = list(range(self.lens.n_layers)) if layers is None else list(layers)
        start = None
        if not loss:
            first = min([*read, *(layer for edit in edits for layer in edit.over(self.lens.n_layers))])
            if first > 0:
                start = Start(layer=first, stream=source.tensors["resid_post", first - 1])
        keys = (self.new, self.old)
        return run_with(self.lens, self.tokens, edits, keys=keys, layers=read, loss=loss, start=start, quiet=quiet)


def bench(
    lens: LensModel, tokens: TokenBatch, *, finding: Finding, config: TraceConfig, position: int | None = None
) -> Bench:
    """The first few sequences of a batch, cut short, with their clean run (one pass of the bridge).

    Raises:
        InputError: the interior position is no position of the sequences, or a sink position; or the sequences are
            too short to have one.
    """
    length = finding.position + config.cut_length
    if position is not None:
        length = max(length, position + _AFTER_POSITION)
    few = shortened(tokens, sequences=config.cut_sequences, length=length)
    shortest = int(few.lengths.min())
    few = shortened(few, sequences=few.n_sequences, length=shortest)  # every sequence reaches every position
    new = interior_position(few, finding=finding) if position is None else position
    check_interior(new, shortest=shortest)
    if new == finding.position:
        raise InputError(f"position {new} is the sink already; need another one")
    baseline = run_with(lens, few, keys=(new, finding.position), sites=("resid_post",))
    return Bench(
        lens=lens,
        tokens=few,
        finding=finding,
        new=new,
        baseline=baseline,
        segments=segments(finding, n_layers=lens.n_layers),
        seed=config.seed,
    )


def cannot_cut(lens: LensModel, tokens: TokenBatch) -> str | None:
    """Why the chain cannot be cut on this model and these sequences; None where it can."""
    if "scores" in lens.uneditable:
        return "the attention of this bridge is delegated to Hugging Face, so that it cannot be edited"
    shortest = int(tokens.lengths.min())
    if shortest < _SHORTEST:
        return f"the shortest sequence has {shortest} tokens, and cuts need {_SHORTEST}"
    return None


def check_interior(position: int, *, shortest: int) -> None:
    """Refuse a position that some sequence does not have inside.

    Raises:
        InputError: it is the first or the last one, or outside.
    """
    if not 1 <= position < shortest - 1:
        raise InputError(
            f"the interior position is {position}; need one from 1 to {shortest - 2}: tokens must come before and "
            "after it"
        )


def interior_position(tokens: TokenBatch, *, finding: Finding) -> int:
    """A third of the shortest sequence, or the next position that is no sink."""
    place = max(1, int(tokens.lengths.min()) // 3)
    while place in finding.positions:
        place += 1
    return place


def segments(finding: Finding, *, n_layers: int) -> tuple[Segment, ...]:
    """The layers after each growth step and before the next; without growth steps, the last three quarters."""
    found = []
    for number, step in enumerate(finding.steps):
        following = [other.first_layer for other in finding.steps[number + 1 :]]
        layers = tuple(range(step.last_layer + 1, min([*following, n_layers])))
        if layers:
            found.append(Segment(number=number, step=step, layers=layers))
    if not found:
        found.append(Segment(number=-1, step=None, layers=tuple(range(min(n_layers // 4, n_layers - 1), n_layers))))
    return tuple(found)


def from_layer(edits: Iterable[Edit], *, first: int, n_layers: int) -> list[Edit]:
    """What is left of edits from a layer on."""
    kept = []
    for edit in edits:
        layers = tuple(layer for layer in edit.over(n_layers) if layer >= first)
        if layers:
            kept.append(dataclasses.replace(edit, layers=layers))
    return kept


def generator_of(bench: Bench) -> torch.Generator:
    """The generator of the random controls."""
    return torch.Generator().manual_seed(bench.seed)


def bar(items: Sequence[Item], *, label: str, progress: bool) -> Iterable[Item]:
    """The items under a progress bar."""
    return tqdm(items, desc=label, unit="cut", disable=not progress, leave=False)

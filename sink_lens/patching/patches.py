"""Patches of the parts of a site: each is a cell of the engine, and is measured in one of its blocks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..edits.constructors import At, Edit, edit
from ..edits.metrics import evaluate
from ..edits.outcome import Outcome
from ..edits.part import Part, replace_full_axes_by_none
from ..engine.cells import Cell, cell_of_edits, touched_places
from ..engine.engine import Block, Engine
from ..engine.plan import Plan
from ..engine.trust import make_engine
from ..errors import InputError
from ..models.memory import copy_to_device
from ..models.sites import SITES, site_key
from ..progress import tqdm
from .parts import counts_back, part_identity, part_in_text
from .run_pair import MakesEdit, RunPair

Row = tuple[str, int, float, bool]
"""Identity of the part, sequence, value of the metric, and whether the patch changed anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """Patches of some parts of a site, and the engine that runs them."""

    runs: RunPair
    parts: Mapping[str, Part]
    """Identity -> part."""
    able: Sequence[Part]
    """The parts whose patch may change the metric."""
    engine: Engine | None
    """Its cells are ``able``; None if there are none."""
    make: MakesEdit | None

    @classmethod
    def of(
        cls,
        runs: RunPair,
        parts: Iterable[Part],
        *,
        make: MakesEdit | None = None,
        batch_size: int | None = None,
        plan: Plan | None = None,
    ) -> "Patches":
        """Make the cells of ``parts`` and their engine, by ``plan`` or by one that is compared with the bridge.

        ``make`` makes the edit of a part; None puts in the source run's values.
        """
        named = {part_identity(part): part for part in parts}
        if make is None:
            able = [*filter(runs.can_change, named.values())]
            cells = [_source_cell(runs, one) for one in able]
        else:
            able = [*filter(runs.is_before_metric, named.values())]
            cells = [_edit_cell(runs, one, make) for one in able]
        if not cells:
            engine = None
        elif plan is not None:
            engine = Engine(runs.lens, runs.run, cells, [runs.metric], plan=plan)
        else:
            engine = make_engine(runs.lens, runs.run, cells, [runs.metric], batch_size=batch_size)
        return cls(runs=runs, parts=named, able=able, engine=engine, make=make)

    @property
    def blocks(self) -> Sequence[Block]:
        return () if self.engine is None else self.engine.blocks

    def measure(
        self, blocks: Sequence[Block], *, progress: bool = False
    ) -> Iterator[tuple[str, list[Row]]]:
        """Yield the name of each block, and a row for each of its patches and each sequence."""
        n, metric = sum(len(block.cells) for block in blocks), self.runs.metric
        rows: list[Row] = []

        def add_rows(number: int, outcome: Outcome, changed: list[bool]) -> None:
            part, did = part_identity(self.able[number]), self.make is None or changed[-1]
            sequences = [0] if metric.whole_batch else outcome.indices
            values = evaluate(metric, outcome).tolist()
            rows.extend(
                (part, sequence, value, did)
                for sequence, value in zip(sequences, values, strict=True)
            )

        with tqdm(
            total=n,
            desc=f"patching {self.runs.site}",
            unit="patch",
            disable=not progress,
            leave=False,
        ) as bar:
            for block in blocks:
                assert self.engine is not None  # there are blocks
                self.engine.map(block, add_rows, advance=bar.update)
                yield block.name, rows.copy()
                rows.clear()

    def values(self, rows: Iterable[Row]) -> tuple[dict[str, Float[Tensor, " sample"]], set[str]]:
        """Return identity -> metric by sequence under each patch, and the identities of patches that changed anything.

        A patch without rows has the metric of the baseline run; it is nan in a sequence without the part.
        """
        found = {
            name: self.runs.nan_where_short(part, self.runs.baseline)
            for name, part in self.parts.items()
        }
        changed = set[str]()
        for name, sequence, value, did in rows:
            if not found[name][sequence].isnan():
                found[name][sequence] = value
            if did:
                changed.add(name)
        return found, changed


def _source_cell(runs: RunPair, part: Part) -> Cell:
    """Make the cell that puts the source run's values into a part, from the first position at which the runs differ.

    If the part counts back from the end, all texts' positions are edited, and each text keeps its own values at those
    of the others.
    """
    site, begin, run, source = part.site, 0, runs.held, runs.given
    by_text: list[Part] | None = None
    if counts_back(part):
        by_text = [part_in_text(part, length) for length in runs.run.lengths.tolist()]
        part = _join_parts(by_text)
    keys = [site_key(site, layer) for layer in part.layers or ()]
    if SITES[site].by_token and part.positions is not None:
        if part.positions == tuple(sorted(part.positions)):
            differing = torch.stack(
                [
                    (part.select(run[key]) != part.select(source[key]))
                    .transpose(0, 1)
                    .flatten(1)
                    .any(1)
                    for key in keys
                ]
            )
            first = int(differing.any(0).int().argmax())
            part = replace(part, positions=part.positions[first:])
        begin = min(part.positions or (0,))
    own = replace_full_axes_by_none(part, sizes=run[keys[0]].shape[1:])

    def source_values(values: Tensor, at: At) -> Tensor:
        given = source[site, at.layer][at.sequences]
        put = copy_to_device(own.select(given), values.device, values.dtype)
        if by_text is None:
            return put
        chosen = torch.zeros_like(given, dtype=torch.bool)
        for text, one in zip(by_text[at.sequences], chosen.split(1), strict=True):
            one[text.index_mesh(one)] = True
        return torch.where(copy_to_device(own.select(chosen), values.device), put, values)

    patch = edit(site, source_values, **{**own.where, "label": f"patch {site}"})
    touched, first = touched_places(runs.edits)
    return Cell(
        touches=((site, own.layers), *touched),
        begin=min(begin, first) if runs.edits else begin,
        make=lambda references: (*runs.edits, patch),
        whole_batch=any(one.whole_batch for one in runs.edits),
    )


def _join_parts(parts: Sequence[Part]) -> Part:
    """Return the part with the positions and keys of all ``parts``, which differ in these alone."""
    joined = {
        name: getattr(parts[0], name)
        and tuple(sorted({one for part in parts for one in getattr(part, name)}))
        for name in ("positions", "keys")
    }
    return replace(parts[0], **joined)


def _edit_cell(runs: RunPair, part: Part, make: MakesEdit) -> Cell:
    made = make(part.site, **replace_full_axes_by_none(part, sizes=runs.sizes).where)
    if not isinstance(made, Edit) or made.site != part.site:
        kind = f"an edit of {made.site!r}" if isinstance(made, Edit) else type(made).__name__
        raise InputError(
            f"what was to be put into a part of {part.site!r} is {kind}; need an edit of that site"
        )
    return cell_of_edits((*runs.edits, made))

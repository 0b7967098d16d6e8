"""The run folder of a patch: what was asked, every block of patches as soon as it is measured, and the tables."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ..edits.metrics import Metric
from ..engine.engine import Block
from ..engine.plan import Plan, read_plan
from ..models.inputs import describe_provenance
from ..models.lens import LensModel
from ..records import RunWriter, create_run, default_run_folder
from ..records.recomputed import keep_or_compare
from ..records.shards import process_name
from ..records.writing import goes_on_note
from .config import PatchConfig
from .pairs import PromptPair

ROW = ("part", "sequence", "value", "changed")
Row = tuple[str, int, float, bool]
"""One sequence of one patch: identity of the part, sequence, value, and whether it changed anything."""


@dataclass(slots=True, kw_only=True)
class MeasuredPatch:
    """The metric of the run with one patch."""

    values: Float[Tensor, " sample"]
    """By sequence; a single one if the metric gives one number for all sequences."""
    changed: bool
    """True if the patch changed any value."""


def block_name(number: int) -> str:
    """Return the name of the table of the block with this number."""
    return f"block-{number:06d}"


class KeptBlocks:
    """The measured patches in a run folder, kept in blocks, so that an interrupted run measures only the rest."""

    def __init__(self, writer: RunWriter, *, planned: Plan | None = None, only: Collection[str] | None = None) -> None:
        self._writer = writer
        self._planned = planned
        self._only = only
        self.sizes: dict[str, int] = {}
        """Name of every block of the run -> its patches; known once the patches are planned."""

    @property
    def plan(self) -> Plan | None:
        """The plan of forward passes with which the run began; None if it has not begun."""
        held = self._planned is None and self._writer.has("plan")
        return read_plan(self._writer.folder / "plan.json") if held else self._planned

    def blocks_to_measure(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the ``blocks`` that this process measures, all or its shard's; store the size of every block."""
        self.sizes = {block_name(block.number): len(block.cells) for block in blocks}
        return [one for one in blocks if self._only is None or block_name(one.number) in self._only]

    def keep_plan(self, plan: Plan) -> None:
        """Write the plan of forward passes, and delete the blocks in the folder: they belong to another plan."""
        self._writer.clear()  # blocks without a plan were made by a plan that is lost
        self._writer.write_text("plan.json", plan.as_json())

    def compare_baseline(self, **values: Tensor) -> None:
        """Write the metric of both runs into the folder, or compare it with what the folder has."""
        keep_or_compare(self._writer, "baseline.json", {name: one.tolist() for name, one in values.items()})

    def read_block(self, number: int) -> list[Row] | None:
        """Return the rows of the block with this number; None if the folder does not have it."""
        name = block_name(number)
        if not self._writer.has(name):
            return None
        table = self._writer.read(name, columns=ROW)
        return list(zip(*(table[column].tolist() for column in ROW), strict=True))

    def write_block(self, number: int, rows: Sequence[Row]) -> None:
        """Write the rows of the block with this number."""
        self._writer.write_table(block_name(number), pd.DataFrame(rows, columns=list(ROW)))


class BlocksInMemory:
    """The measured patches of a call without a run folder; an error or Ctrl-C writes them into one."""

    plan = None

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._blocks: dict[int, Sequence[Row]] = {}

    def blocks_to_measure(self, blocks: Sequence[Block]) -> list[Block]:
        """Return all ``blocks``."""
        return list(blocks)

    def keep_plan(self, plan: Plan) -> None:
        """Keep the plan of forward passes."""
        self._plan = plan

    def read_block(self, number: int) -> None:
        """Return None: no block was measured before."""

    def write_block(self, number: int, rows: Sequence[Row]) -> None:
        """Keep the rows of the block with this number."""
        self._blocks[number] = list(rows)  # the caller empties its list

    def write_after(
        self, error: BaseException, opens: Callable[[Path], RunWriter], *, name: str, **baseline: Tensor
    ) -> None:
        """Write what is measured into a folder in ``runs``, and say so in a note of the error that ended the call."""
        if self._plan is None or not self._blocks:
            return
        folder = default_run_folder(name)
        with opens(folder) as writer:
            kept = KeptBlocks(writer)
            kept.keep_plan(self._plan)
            kept.compare_baseline(**baseline)
            for number, rows in self._blocks.items():
                kept.write_block(number, rows)
            writer.leave_unfinished()
        error.add_note(goes_on_note(folder))


Kept = KeptBlocks | BlocksInMemory


def open_run(
    out: str | Path,
    *,
    lens: LensModel,
    pair: PromptPair,
    config: PatchConfig,
    metric: Metric,
    code: Mapping[str, Any] | None = None,
    part: Mapping[str, Any] | None = None,
    **how: Any,
) -> RunWriter:
    """Open the run folder of ``patch``: a new one, or one in which the same run was stopped.

    Functions and edits are recorded by name and by ``code``, the hashes of what they do. ``part`` is the number of a
    shard, ``how`` is passed to ``create_run``.
    """
    provenance = describe_provenance(lens, pair.clean, kernel="eager")
    provenance |= {"corrupted_sha256": pair.corrupted.hash, "seeds": {"draws": config.seed}}
    provenance |= {"holder": process_name()} if part else {}
    asked = asdict(replace(config, metric="loss", put="source", edits=())) | {"metric_name": metric.name}
    asked["metric"] = config.metric if isinstance(config.metric, str) else metric.name
    if config.pairs_file is not None:
        asked["pairs_sha256"] = sha256(Path(config.pairs_file).read_bytes()).hexdigest()
    put: Any = config.put
    asked |= {"put": getattr(put, "__qualname__", type(put).__name__) if callable(put) else put}
    asked |= {"edits": [one.label for one in config.edits], "pair": [pair.clean.hash, pair.corrupted.hash]}
    asked |= {"code": dict(code)} if code else {}
    return create_run(
        Path(out),
        kind="patch",
        config=asked | dict(part or {}),
        provenance=provenance,
        expects=() if part else ("patches", "differences", "summary"),
        recomputes=True,
        **how,
    )

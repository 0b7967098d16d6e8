"""The configuration of a sweep, in Python or in a small TOML or JSON file with the same names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..configuration import (
    check_at_least,
    check_field_types,
    flatten_tables,
    make_config,
    read_settings,
    refuse_unknown_names,
    refuse_unread_fields,
)
from ..data.described import TOKENS_TABLE, BosCondition, TokenKind, check_input_config
from ..edits.named_edits import KINDS
from ..errors import InputError
from ..files import check_regular_file
from ..schema import DEFAULT_MODEL
from ..signatures import takes

if TYPE_CHECKING:  # they need torch, and --help does not
    from ..edits.named_metrics import MetricSpec
    from .grid import Grid

EXAMPLE = """\
# A sweep of sink-lens. Everything but the edits has a default.
model = "SmolLM2-135M-Instruct"  # or a folder, a .gguf file, a hub name
controls = 5                     # random draws of as many units (heads, positions) for each cell
seed = 0

[tokens]
kind = "text"                    # text, random, repeated; or text or prompts_file = "mine.txt", or prompts = ["..."]
sequences = 8
length = 64

[[metrics]]                      # sink_mass, loss, logit_difference, kl, norm, dominance, or module:f; several
name = "sink_mass"
sink_position = 0
layers = "12-29"

[[edits]]                    # KINDS
kind = "zero"
site = "neurons"
layers = 11                      # each: one at a time (the default); all: together; "0-3,7": each of these
units = "0-31"                   # a list inside a list is a set that is edited together: [[1229, 1487], 3]

[[edits]]
kind = "zero"
site = "z"
heads = "each"                   # in every layer
""".replace("KINDS", ", ".join(KINDS))
"""A file to begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """The whole configuration of a sweep; a file has ``edits`` and ``metrics`` as lists of tables."""

    grid: "Grid" = field(metadata={"file_only": True})
    """The kinds of edit with their axes: the tables ``[[edits]]`` of a file."""
    metrics: "tuple[MetricSpec, ...]" = field(default=None, metadata={"file_only": True})  # type: ignore[assignment]
    """Metrics of each cell: the tables ``[[metrics]]`` of a file. Default: ``sink_mass``."""
    model: str = field(default=DEFAULT_MODEL, metadata={"metavar": "MODEL"})
    """The default model's name, a folder written by save_pretrained, a .gguf file or a hub name."""
    controls: int | None = None
    """Random controls per cell, each of as many units (heads, positions); 0 for none. Default: 5."""
    least_effect: float = field(default=0.2, metadata={"metavar": "SDS"})
    """Smallest effect, of either sign, that counts as a change: in standard deviations of the effects of the cell's
    random controls, or of the baseline over sequences for a cell with fewer than two (0.2: Cohen's small effect)."""
    tokens: TokenKind = field(
        default="text", metadata={"table": TOKENS_TABLE | {"prompts_file": "prompts_file"}}
    )
    """Text, uniformly random ids, or one id repeated."""
    text: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Text file (UTF-8) to cut the sequences from. Default: bundled prose."""
    prompts: tuple[str, ...] = field(default=(), metadata={"option": "prompt"})
    """A prompt, one sequence; repeat for several. Instead of text."""
    prompts_file: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Text file (UTF-8) with a prompt on each line. Instead of text."""
    bos: BosCondition = "auto"
    """First token of each sequence: as the tokenizer puts it (auto), BOS (with), or no BOS (without)."""
    sequences: int = 8
    """Number of sequences."""
    length: int = field(default=64, metadata={"metavar": "T"})
    """Tokens per sequence, BOS included."""
    device: str | None = field(default=None, metadata={"metavar": "NAME"})
    """cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU."""
    dtype: str | None = field(default=None, metadata={"metavar": "NAME"})
    """float32, bfloat16, float16 or float64. Default: float32."""
    seed: int = 0
    """Seed of every generator: tokens, draws of the controls, bootstrap."""
    engine: Literal["local", "ray"] = "local"
    """Where the blocks are computed; ray sends tokens, cells and metrics to the cluster of RAY_ADDRESS."""
    workers: int | None = None
    """Number of Ray workers. Default: one for each GPU."""
    retry_failed: bool = field(default=False, metadata={"flag": ()})
    """Compute failed cells again, with those of their block."""
    imports: tuple[str, ...] = field(
        default=(), metadata={"metavar": "MODULE:FUNCTION", "option": "import", "imports": True}
    )
    """Import this metric of the file, which runs its module; repeat for several."""

    def __post_init__(self) -> None:
        from ..edits.named_metrics import MetricSpec
        from .grid import Grid

        check_field_types(self)
        if self.prompts_file is not None:
            if self.prompts:
                raise InputError("both prompts and a prompts_file were given; need one of them")
            object.__setattr__(self, "prompts", _read_prompts(self.prompts_file))
            object.__setattr__(self, "prompts_file", None)
        check_input_config(self)
        if self.prompts:
            refuse_unread_fields(self, "sequences", "length", reader="tokens that are no prompts")
        check_at_least(self, 1, "workers")
        if not isinstance(self.grid, Grid):
            raise InputError(f"grid is {self.grid!r:.200}; need a Grid")
        if self.metrics is None:
            object.__setattr__(self, "metrics", (MetricSpec(name="sink_mass"),))
        if not self.least_effect >= 0:
            raise InputError(
                f"least_effect is {self.least_effect}; need 0 or more standard deviations"
            )
        if not self.metrics:
            raise InputError("there is no metric; need at least one")
        own = [one.name for one in self.metrics if ":" in one.name]
        if unasked := [one for one in own if one not in self.imports]:
            raise InputError(
                f"the metric {unasked[0]} is code to import; need imports={unasked[0]!r}, which runs its module"
            )
        if unknown := [one for one in self.imports if one not in own]:
            raise InputError(
                f"{unknown[0]} is to be imported and is no metric of the sweep; need one of its metrics"
            )
        if self.controls is None:
            object.__setattr__(self, "controls", self.grid.controls)
        elif self.controls != self.grid.controls:
            object.__setattr__(self, "grid", replace(self.grid, controls=self.controls))
        if self.seed:  # it draws the controls, too; else the grid's own does
            object.__setattr__(self, "grid", replace(self.grid, seed=self.seed))


def _read_prompts(path: str) -> tuple[str, ...]:
    check_regular_file(path, what="the file of prompts")
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); need a text file in UTF-8 with a prompt on each line"
        ) from None
    found = tuple(line.rstrip("\r") for line in lines if line.strip())
    if not found:
        raise InputError(f"{path} has no prompts; need a prompt on each line")
    return found


@takes(SweepConfig, leave_out=("grid", "metrics"), loads=True)
def read_sweep(path: str | Path, **changes: Any) -> SweepConfig:
    """Read the configuration of a sweep from a TOML or JSON file.

    Args:
        path: the file.
        **changes: fields of ``SweepConfig`` that replace the file's.

    Raises:
        InputError: the file is missing or cannot be read, has a key that is not known, or a value that cannot be used.
    """
    settings = read_settings(path, what="a sweep")
    if "imports" in settings:
        raise InputError(
            f"{path} has imports, which a file cannot ask for; need read_sweep(path, imports=(...,))"
        )
    return sweep_config(settings, where=str(path), **changes)


def config_of_command(settings: Mapping[str, Any], where: str) -> SweepConfig:
    if not where:
        raise InputError(
            "no file was given; need one that says what to sweep: sink-lens sweep --example > sweep.toml"
        )
    return sweep_config(settings, where=where)


def sweep_config(
    given: Mapping[str, Any], *, where: str = "the sweep", **changes: Any
) -> SweepConfig:
    from ..edits.named_metrics import METRICS, MetricSpec
    from .grid import EditGrid, Grid

    options = flatten_tables(SweepConfig, given, where=where)
    known = [*(one.name for one in fields(SweepConfig) if one.name != "grid"), "edits"]
    refuse_unknown_names(
        options, known, where=where, options={"grid": "edits", "prompt": "prompts"}
    )
    edits = _check_tables(options.pop("edits", ()), where=f"[[edits]] of {where}")
    if not edits:
        raise InputError(f"{where} has no edits; need at least one table [[edits]]")
    for table in edits:
        refuse_unknown_names(
            table, [part.name for part in fields(EditGrid)], where=f"[[edits]] of {where}"
        )
        for name in ("kind", "site"):
            if not isinstance(table.get(name, ""), str):
                raise InputError(f"{name} of [[edits]] of {where} is {table[name]!r}; need a text")
    grids = tuple(EditGrid(**table) for table in edits)
    if "metrics" in options:
        rows = _check_tables(options["metrics"], where=f"[[metrics]] of {where}")
        if not all(isinstance(row.get("name"), str) for row in rows):
            raise InputError(f"a metric of {where} has no name; need one of {', '.join(METRICS)}")
        options["metrics"] = tuple(
            MetricSpec(
                name=row["name"],
                options={name: value for name, value in row.items() if name != "name"},
            )
            for row in rows
        )
    if options.get("prompts") == []:
        raise InputError(f"prompts of {where} is []; need a list of texts, one at least")
    options |= changes
    grid = options.pop("grid", None) or Grid(edits=grids, seed=options.get("seed", 0))
    return make_config(SweepConfig, None, {**options, "grid": grid}, where=where)


def _check_tables(given: Any, *, where: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{where} is {given!r}; need a list of tables")
    for one in given:
        if not isinstance(one, Mapping):
            raise InputError(f"{where} is {one!r}; need a table")
    return given

"""The configuration of a sweep, in Python or in a small TOML or JSON file with the same names.

model = "SmolLM2-135M-Instruct"  # all of these have defaults but the edits
controls = 5

[tokens]
kind = "text"
sequences = 8
length = 64

[[metrics]]
name = "sink_mass"
key = 0
layers = "12-29"

[[edits]]
kind = "zero"
site = "neurons"
layers = 11
units = "each"
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from ..data.described import check_described, read_settings
from ..errors import InputError
from ..models.bundled import DEFAULT_MODEL
from .grid import EditGrid, Grid
from .reads import METRICS, MetricSpec, texts, whole

MODES = ("exact", "fast")


def check_mode(mode: str) -> None:
    """Refuse an unknown mode, and warn where it is one that no longer does anything.

    Raises:
        InputError: the mode is unknown.
    """
    if mode not in MODES:
        raise InputError(f"mode is {mode!r}; need one of {', '.join(MODES)}")
    if mode == "fast":
        warnings.warn(
            "the mode 'fast' does nothing: every sweep is exact and as fast as it gets; leave it out",
            FutureWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """The whole configuration of a sweep."""

    grid: Grid
    metrics: tuple[MetricSpec, ...] = (MetricSpec(name="sink_mass"),)
    mode: str = "exact"
    """There is one mode, exact; ``fast`` is accepted with a warning, and does nothing."""
    model: str = DEFAULT_MODEL
    """Default model's name, folder, GGUF file or hub name."""
    tokens: str = "text"
    """text, random (uniform ids) or repeated (one id a sequence)."""
    text: str | None = None
    """A text file to cut sequences from; None is the bundled prose."""
    prompts: tuple[str, ...] = ()
    """Prompts, one sequence each, instead of ``tokens``."""
    bos: str = "auto"
    """auto (what the tokenizer does), with, or without."""
    sequences: int = 8
    """How many sequences."""
    length: int = 64
    """Tokens a sequence, BOS included."""
    device: str | None = None
    """Where the model goes; None picks."""
    dtype: str | None = None
    """Type of the weights; None is float32."""
    seed: int = 0
    """Seed of every generator: tokens, draws of the controls, bootstrap."""

    def __post_init__(self) -> None:
        """Refuse a configuration that cannot be run.

        Raises:
            InputError: a value is not possible.
        """
        check_described(self)
        check_mode(self.mode)
        if not self.metrics:
            raise InputError("there is no metric; need at least one")


def read_sweep(path: str | Path, **changes: Any) -> SweepConfig:
    """The configuration in a TOML or JSON file.

    Args:
        path: the file.
        **changes: fields of ``SweepConfig`` that replace the file's.

    Raises:
        InputError: the file is missing or cannot be read, has a key that is not known, or a value that cannot be used.
    """
    return sweep_config(read_settings(path, what="a sweep"), where=str(path), **changes)


def sweep_config(given: Mapping[str, Any], *, where: str = "the sweep", **changes: Any) -> SweepConfig:
    """The configuration that a mapping describes, with the names of the file.

    Raises:
        InputError: a key that is not known, or a value that cannot be used.
    """
    top = {"model", "mode", "controls", "seed", "device", "dtype", "tokens", "metrics", "edits"}
    _known(given, top, where=where)
    tokens = _table(given.get("tokens", {}), where=f"[tokens] of {where}")
    _known(tokens, {"kind", "text", "prompts", "bos", "sequences", "length"}, where=f"[tokens] of {where}")
    edits = _tables(given.get("edits", ()), where=f"[[edits]] of {where}")
    if not edits:
        raise InputError(f"{where} has no edits; need at least one table [[edits]]")
    blocks = []
    for one in edits:
        _known(one, {part.name for part in fields(EditGrid)}, where=f"[[edits]] of {where}")
        texts(one, ("kind", "site"), where=f"[[edits]] of {where}")
        blocks.append(EditGrid(**one))
    options: dict[str, Any] = {
        name: given[name] for name in ("model", "mode", "seed", "device", "dtype") if name in given
    }
    options |= {{"kind": "tokens"}.get(name, name): value for name, value in tokens.items()}
    texts(options, ("model", "mode", "device", "dtype", "tokens", "text", "bos"), where=where)
    if "prompts" in options:
        prompts = options["prompts"]
        if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts or not _all_texts(prompts):
            raise InputError(f"prompts of {where} is {prompts!r}; need a list of texts, one at least")
        options["prompts"] = tuple(prompts)
    if "metrics" in given:
        rows = _tables(given["metrics"], where=f"[[metrics]] of {where}")
        options["metrics"] = tuple(_spec(row, where=where) for row in rows)
    for name in ("sequences", "length", "seed"):
        whole(options, name, 0, where=where)
    controls = whole(given, "controls", 5, where=where)
    seed = {**options, **changes}.get("seed", 0)
    grid = Grid(edits=tuple(blocks), controls=controls, seed=seed)
    options = {**options, **changes}
    return SweepConfig(grid=grid, **options)


def _spec(row: Mapping[str, Any], *, where: str) -> MetricSpec:
    if not isinstance(row.get("name"), str):
        raise InputError(f"a metric of {where} has no name; need one of {', '.join(METRICS)}")
    return MetricSpec(name=row["name"], options={name: value for name, value in row.items() if name != "name"})


def _known(given: Mapping[str, Any], known: set[str], *, where: str) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise InputError(
            f"{where} has {', '.join(unknown)}, which is not known; need some of {', '.join(sorted(known))}"
        )


def _all_texts(given: Sequence[Any]) -> bool:
    return all(isinstance(one, str) for one in given)


def _table(given: Any, *, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{where} is {given!r}; need a table")
    return cast("Mapping[str, Any]", given)


def _tables(given: Any, *, where: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{where} is {given!r}; need a list of tables")
    return [_table(one, where=where) for one in given]

"""What a sweep is asked, in Python or in a file: a small TOML or JSON with the same names.

model = "SmolLM2-135M-Instruct"  # all of these have defaults but the edits
mode = "exact"
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

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from ..data.bos import single_id
from ..data.described import check_described
from ..errors import InputError
from ..interventions import metrics as of
from ..interventions.metrics import Metric
from ..interventions.run import Outcome
from ..models.bundled import DEFAULT_MODEL
from ..models.lens import LensModel
from .axes import values_of
from .grid import EditGrid, Grid
from .plan import MODES, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric by its name and options, so that it can be written in a file and sent to another machine."""

    name: str
    """A name of ``METRICS``."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def metric(self, lens: LensModel) -> Metric:
        """The metric on a model.

        Raises:
            InputError: there is no such metric, or an option is unknown, missing, or cannot be used.
        """
        if self.name not in METRICS:
            raise InputError(f"there is no metric {self.name!r}; need one of {', '.join(METRICS)}")
        make, known, needed = METRICS[self.name]
        unknown, missing = set(self.options) - set(known), set(needed) - set(self.options)
        if unknown or missing:
            raise InputError(
                f"the metric {self.name} takes {', '.join(known) or 'no options'} and needs "
                f"{', '.join(needed) or 'none'}; found {', '.join(self.options) or 'none'}"
            )
        return make(lens, self.options)


def _layers(lens: LensModel, given: Any) -> list[int] | None:
    values = values_of("all" if given is None else given, name="layers of a metric", size=lens.n_layers)
    found = [layer for value in values if value is not None for layer in value]
    return found or None


def _layer(lens: LensModel, options: Mapping[str, Any]) -> int:
    found = _layers(lens, options["layer"])
    if found is None or len(found) != 1:
        raise InputError(f"the layer of a metric is {options['layer']!r}; need one number")
    return found[0]


def _token(lens: LensModel, given: Any) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if not isinstance(given, str) or lens.tokenizer is None:
        raise InputError(f"a token of logit_difference is {given!r}; need an id, or the text of one token")
    return single_id(given, lens.tokenizer, what="the token")


def _whole(options: Mapping[str, Any], name: str, default: int) -> int:
    found = options.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int):
        raise InputError(f"{name} of a metric is {found!r}; need a whole number")
    return found


_Make = Callable[[LensModel, Mapping[str, Any]], Metric]
METRICS: Mapping[str, tuple[_Make, tuple[str, ...], tuple[str, ...]]] = {
    "sink_mass": (
        lambda lens, options: of.sink_mass(_whole(options, "key", 0), layers=_layers(lens, options.get("layers"))),
        ("key", "layers"),
        (),
    ),
    "loss": (lambda lens, options: of.loss(), (), ()),
    "logit_difference": (
        lambda lens, options: of.logit_difference(
            _token(lens, options["correct"]),
            _token(lens, options["incorrect"]),
            position=_whole(options, "position", -1),
        ),
        ("correct", "incorrect", "position"),
        ("correct", "incorrect"),
    ),
    "norm": (
        lambda lens, options: of.norm(
            _whole(options, "key", 0), layer=_layer(lens, options), site=options.get("site", "resid_post")
        ),
        ("key", "layer", "site"),
        ("layer",),
    ),
    "dominance": (
        lambda lens, options: of.dominance(_whole(options, "key", 0), layer=_layer(lens, options)),
        ("key", "layer"),
        ("layer",),
    ),
}
"""Name -> how it is made, its options, and those that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """The whole question of a sweep."""

    grid: Grid
    metrics: tuple[MetricSpec, ...] = (MetricSpec(name="sink_mass"),)
    mode: Mode = "exact"
    """exact (to the last bit one cell at a time, on the CPU in float32) or fast (within 1e-5)."""
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
        """Refuse what cannot be run.

        Raises:
            InputError: which value, and what is needed.
        """
        check_described(self)
        if self.mode not in MODES:
            raise InputError(f"mode is {self.mode!r}; need one of {', '.join(MODES)}")
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
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a sweep: {error}. Need a TOML or JSON file") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no table; need one with [[edits]]")
    return sweep_config(found, where=str(path), **changes)


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
        blocks.append(EditGrid(**one))
    options: dict[str, Any] = {
        name: given[name] for name in ("model", "mode", "seed", "device", "dtype") if name in given
    }
    options |= {{"kind": "tokens"}.get(name, name): value for name, value in tokens.items()}
    if "prompts" in options:
        options["prompts"] = tuple(options["prompts"])
    if "metrics" in given:
        rows = _tables(given["metrics"], where=f"[[metrics]] of {where}")
        options["metrics"] = tuple(_spec(row, where=where) for row in rows)
    for name in ("sequences", "length", "seed"):
        _whole(options, name, 0)
    controls = _whole(given, "controls", 5)
    seed = {**options, **changes}.get("seed", 0)
    grid = Grid(edits=tuple(blocks), controls=controls, seed=seed)
    return SweepConfig(grid=grid, **{**options, **changes})


Measured = MetricSpec | Metric | Callable[[Outcome], Any]
"""What a sweep can be asked to read: a metric by name, a metric, or a function of an ``Outcome``."""


def measured(given: Sequence[Measured], lens: LensModel, *, n_positions: int) -> list[Metric]:
    """The metrics on a model.

    Raises:
        InputError: one that cannot be used, or two of one name.
    """
    made = [one.metric(lens) if isinstance(one, MetricSpec) else one for one in given]
    found = [of.as_metric(one, lens=lens, n_positions=n_positions) for one in made]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise InputError(f"two metrics have one name: {', '.join(names)}; need different ones")
    return found


def metric_config(metric: Measured) -> dict[str, Any]:
    """A metric as plain values, for ``run.json``."""
    if isinstance(metric, MetricSpec):
        return {"name": metric.name, **metric.options}
    if not isinstance(metric, Metric):
        return {"name": getattr(metric, "__name__", "metric")}
    return {part.name: getattr(metric, part.name) for part in fields(metric) if part.name != "function"}


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


def _table(given: Any, *, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{where} is {given!r}; need a table")
    return cast("Mapping[str, Any]", given)


def _tables(given: Any, *, where: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{where} is {given!r}; need a list of tables")
    return [_table(one, where=where) for one in given]

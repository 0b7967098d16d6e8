"""The edits by name with options, as in a file: what a sweep's grid and a patch can put into a part of a site.

To add one, write its function and add its row to ``KINDS``. What makes edits is imported when one is made: a grid is
counted without the libraries of models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..models.sites import SITES
from ..schema import CENTRES, MEANS
from ..text import edit_strength
from .part import AXES, Part

if TYPE_CHECKING:
    from torch import Tensor

    from .constructors import Edit
    from .references import References


_LARGEST = 1e38
"""Just under the largest float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A setting of some kinds of edit; a grid lists its values under its name in the plural."""

    accepts: Callable[[Any], bool]
    needs: str
    defaults: tuple[Any, ...] = ()
    """Those of a grid that gives none; empty if there must be some."""


def _is_number(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


OPTIONS: Mapping[str, Option] = {
    "factor": Option(
        accepts=lambda value: _is_number(value, int | float) and abs(value) < _LARGEST,
        needs="numbers below 1e38",
    ),
    "seed": Option(
        accepts=lambda value: _is_number(value, int) and value >= 0,
        needs="whole numbers from 0 on",
        defaults=(0,),
    ),
    "centre": Option(
        accepts=lambda value: value in CENTRES,
        needs=f"some of {', '.join(CENTRES)}",
        defaults=CENTRES,
    ),
    "vector": Option(
        accepts=lambda value: isinstance(value, str) and value.endswith(".safetensors"),
        needs="paths of .safetensors files that hold one tensor each",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionLists:
    """The values that a grid goes over, a list for each of ``OPTIONS``, under the option's name in the plural."""

    factors: Sequence[float | int] = ()
    """Factors of scale, amplify and add; for set, the numbers that values are set to."""
    seeds: Sequence[int] = ()
    """Seeds of resample; (0,) by default."""
    centres: Sequence[str] = ()
    """Centres of amplify: values, aggregated, none; by default all three."""
    vectors: Sequence[str] = ()
    """For add: .safetensors files of one tensor each, such as a steering vector of d_model numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSpec:
    """An edit by its kind, part and options, so that it can be written in a file."""

    kind: str
    part: Part
    options: Mapping[str, Any] = field(default_factory=dict)
    """By names of ``OPTIONS``; None for one that the kind does not take."""

    def __post_init__(self) -> None:
        kind = look_up_kind(self.kind, site=self.part.site)
        for name in OPTIONS:
            value = self.options.get(name)
            if value is None and name in kind.takes:
                raise InputError(f"{self.kind} needs a {name}")
            if value is not None and name not in kind.takes:
                raise InputError(f"{self.kind} takes no {name}; leave it out")
        object.__setattr__(self, "options", {name: self.options.get(name) for name in OPTIONS})

    @property
    def fields(self) -> dict[str, Any]:
        """All that determines the edit, with the hash of a vector's file."""
        chosen = {axis: self.part.indices_on(axis) for axis in AXES}
        found: dict[str, Any] = {"kind": self.kind, "site": self.part.site}
        found |= chosen | self._named_options
        if "vector" in found:
            found["vector_hash"] = hash_vector(found["vector"])
        return found

    @property
    def _named_options(self) -> dict[str, Any]:
        # a cell without a vector does not name it, as cells did before there were vectors
        return {
            name: one for name, one in self.options.items() if one is not None or name != "vector"
        }

    @property
    def identity(self) -> tuple[Any, ...]:
        """Edits with equal ones are the same computation."""
        return tuple(self.fields.values())

    @property
    def columns(self) -> dict[str, Any]:
        """Column -> value in a table; an axis has None unless a single index of it is edited."""
        found: dict[str, Any] = {
            "kind": self.kind,
            "site": self.part.site,
            "where": self.part.words,
        }
        for axis in AXES:
            indices = self.part.indices_on(axis) or ()
            found[axis] = indices[0] if len(indices) == 1 else None
        return found | self._named_options

    @property
    def label(self) -> str:
        words = f" ({self.part.words})" if self.part.words else ""
        return f"{self.kind} {self.part.site}{edit_strength(self.options)}{words}"

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.part.where, "label": self.label}

    def make_edit(self, references: "References") -> "Edit":
        return KINDS[self.kind].make(self, references)


Make = Callable[[EditSpec, "References"], "Edit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of edit that a grid can name."""

    meaning: str
    make: Make
    takes: tuple[str, ...] = ()
    """Names of ``OPTIONS``."""
    site: str | None = None
    """The only site that it edits; None is any."""
    by_token: bool = False
    """True if it takes values by position, so that the site must have them."""
    first_position: int | None = None
    """The first that this kind can edit, if positions must be chosen."""


def look_up_kind(name: str, *, site: str) -> Kind:
    if name not in KINDS:
        raise InputError(f"there is no kind of edit {name!r}; need one of {', '.join(KINDS)}")
    kind = KINDS[name]
    if kind.site not in (None, site):
        raise InputError(f"{name} edits {kind.site!r}; found site = {site!r}: leave it out")
    if kind.by_token and not SITES[site].by_token:
        raise InputError(
            f"{name} puts in values by token, and {site!r} has the axes {SITES[site].axes!r}; need a site with "
            "positions"
        )
    return kind


def _function_calling(name: str, *options: str) -> Make:
    def make(spec: EditSpec, refs: "References") -> "Edit":
        from . import constructors

        return getattr(constructors, name)(
            spec.part.site, *map(spec.options.get, options), **spec.arguments
        )

    return make


def _make_addition(spec: EditSpec, refs: "References") -> "Edit":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from .constructors import add

    path = spec.options["vector"]
    try:
        tensors = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"the vector {path} was not read ({error}); need a .safetensors file"
        ) from error
    if len(tensors) != 1:
        raise InputError(
            f"the vector {path} has the tensors {', '.join(tensors) or 'none'}; need one"
        )
    (vector,) = tensors.values()
    return add(spec.part.site, vector, factor=spec.options["factor"], **spec.arguments)


def hash_vector(path: str) -> str:
    """Return the hash of a vector's file: a run is not resumed with another vector under the same name."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(
            f"there is no file {path}; need a .safetensors file with the vector to add"
        )
    return _hash_of_content(file, changed=file.stat().st_mtime_ns, size=file.stat().st_size)


@lru_cache
def _hash_of_content(file: Path, *, changed: int, size: int) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _make_mean_edit(spec: EditSpec, refs: "References") -> "Edit":
    from .constructors import freeze

    mean: Any = spec.kind
    values = _by_layer(spec, refs, lambda site, layer: refs.mean(site, layer, mean))
    return freeze(spec.part.site, values, **spec.arguments)


def _make_resampling(spec: EditSpec, refs: "References") -> "Edit":
    from torch import Generator

    from .constructors import resample

    shortest, asked = int(refs.tokens.lengths.min()), spec.part.positions
    if shortest < refs.tokens.n_positions and (asked is None or max(asked) >= shortest):
        raise InputError(
            f"{spec.label} would put padding under real tokens: the shortest sequence has {shortest} tokens, the "
            f"longest {refs.tokens.n_positions}; need sequences of one length, or positions below {shortest}"
        )
    values = _by_layer(spec, refs, refs.values)
    generator = Generator().manual_seed(spec.options["seed"])
    return resample(spec.part.site, values, generator=generator, **spec.arguments)


def _by_layer(
    spec: EditSpec, refs: "References", values: "Callable[[str, int], Tensor]"
) -> "dict[int, Tensor]":
    return {
        layer: spec.part.select(values(spec.part.site, layer))
        for layer in _layers_to_edit(spec, refs)
    }


def _make_isolation(spec: EditSpec, refs: "References") -> "Edit":
    from .isolation import isolate

    assert spec.part.positions is not None
    return isolate(spec.part.positions, layers=spec.part.layers, label=spec.label)


def _make_amplification(spec: EditSpec, refs: "References") -> "Edit":
    from .amplification import amplify

    assert spec.part.positions is not None
    centre = spec.options["centre"]
    return amplify(
        spec.options["factor"],
        positions=spec.part.positions,
        layers=_layers_to_edit(spec, refs),
        heads=spec.part.heads,
        centre=centre,
        means=None if centre == "none" else refs.means(),
        label=spec.label,
    )


def _layers_to_edit(spec: EditSpec, refs: "References") -> tuple[int, ...]:
    if not SITES[spec.part.site].per_layer:
        return (0,)
    return refs.lens.layers_with(spec.part.site) if spec.part.layers is None else spec.part.layers


KINDS: Mapping[str, Kind] = {
    "zero": Kind(meaning="set to 0", make=_function_calling("zero")),
    **{
        name: Kind(meaning=f"set to {meaning}", make=_make_mean_edit, by_token=True)
        for name, meaning in MEANS.items()
    },
    "resample": Kind(
        meaning="another sequence's values at the same positions",
        make=_make_resampling,
        takes=("seed",),
        by_token=True,
    ),
    "scale": Kind(
        meaning="times a factor", make=_function_calling("scale", "factor"), takes=("factor",)
    ),
    "add": Kind(
        meaning="plus a factor times the vector of a file",
        make=_make_addition,
        takes=("factor", "vector"),
    ),
    "set": Kind(
        meaning="set to a number", make=_function_calling("set_value", "factor"), takes=("factor",)
    ),
    "isolate": Kind(
        meaning="the mask shows the token only itself",
        make=_make_isolation,
        site="scores",
        first_position=1,
    ),
    "amplify": Kind(
        meaning="variance amplification from a centre",
        make=_make_amplification,
        takes=("factor", "centre"),
        site="z_raw",
        first_position=0,
    ),
}

"""Every public function with one argument that it cannot take, from its own signature."""

import dataclasses
import inspect
import math
import random
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sink_lens

NAMESPACES = ("edits", "identity", "measures", "metrics", "patching", "studies", "sweeps", "training", "views")
_SIZES = {
    "batch": 2,
    "query": 6,
    "key": 6,
    "position": 6,
    "head": 4,
    "kv_head": 2,
    "d_model": 48,
    "d_mlp": 80,
    "d_head": 12,
}


@dataclass(frozen=True)
class Made:
    """An argument that is made in the process that uses it."""

    name: str

    def __call__(self) -> Any:
        return _MAKERS[self.name]()

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _lens() -> Any:
    return sink_lens.load("MODEL", device="cpu")


def _tokens() -> Any:
    return sink_lens.TokenBatch.from_tensor(torch.arange(3, 23).reshape(2, 10))


def _grid() -> Any:
    return sink_lens.sweeps.Grid(
        edits=(sink_lens.sweeps.EditGrid(kind="zero", site="z", layers=[0], heads=[0]),), controls=0
    )


_MAKERS: dict[str, Callable[[], Any]] = {
    "lens": _lens,
    "tokens": _tokens,
    "edit": lambda: sink_lens.edits.zero("z", layers=[0]),
    "grid": _grid,
    "pairs": lambda: {"clean": "a b c", "corrupted": "a d c"},
}
_GOOD: dict[str, Any] = {
    "lens": Made("lens"),
    "model": Made("lens"),
    "tokens": Made("tokens"),
    "batch": Made("tokens"),
    "clean": "a b c",
    "corrupted": "a d c",
    "edits": Made("edit"),
    "edit": Made("edit"),
    "what": Made("grid"),
    "site": "z",
    "sites": ("z",),
    "layer": 0,
    "layers": (0,),
    "position": 1,
    "positions": (1,),
    "heads": (0,),
    "head": 0,
    "units": (0,),
    "factor": 2.0,
    "value": 0.0,
    "out": "new",
    "folder": "runs/sweep",
    "run": "runs/sweep",
    "run_folder": "runs/train",
    "name": "MODEL",
    "path": "SWEEP.toml",
    "max_new_tokens": 3,
    "progress": False,
    "device": "cpu",
    "sequences": 3,
    "length": 20,
    "report": False,
}
BAD: tuple[Any, ...] = (
    *(None, "a", "", 3, 0, -1, 1.5, math.nan, math.inf, -math.inf, True, 10**30, -(10**30), b"x", 2j, int, len),
    *([], [1, 2], ["a"], [None], {}, {"a": 1}, (), (0, 99), {1}, object(), Path("missing"), range(3), [[1], [2, 3]]),
    *(
        "\u202e",
        "\udcff",
        "x" * 5000,
        "runs/sweep/run.json",
        np.zeros(3),
        np.array("a"),
        np.float64("nan"),
        np.int64(2),
    ),
    *(torch.zeros(0), torch.zeros(3), torch.zeros(2, 3), torch.zeros(2, 4, 6, 6), torch.zeros(2, 6, 48)),
    *(torch.zeros(2, 4, 6, 6, device="meta"), torch.full((2, 4, 6, 6), math.nan), torch.zeros(2, 3, dtype=torch.int64)),
    *(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.complex64), torch.eye(4).to_sparse()),
)


def functions() -> dict[str, Any]:
    """Every public function and class by its full name."""
    found = {}
    for name in sink_lens.__all__:
        value = getattr(sink_lens, name)
        if name in NAMESPACES:
            names = getattr(value, "__all__", None) or [one for one in vars(value) if not one.startswith("_")]
            found |= {f"{name}.{one}": getattr(value, one) for one in names}
        else:
            found[name] = value
    here = {name: one for name, one in found.items() if callable(one) and not isinstance(one, type)}
    classes = {
        name: one for name, one in found.items() if isinstance(one, type) and hasattr(one, "__dataclass_fields__")
    }
    own = {name: one for name, one in (here | classes).items() if (one.__module__ or "").startswith("sink_lens")}
    tokens = sink_lens.TokenBatch
    return own | {
        f"TokenBatch.{name}": getattr(tokens, name)
        for name in dir(tokens)
        if not name.startswith("_") and inspect.ismethod(getattr(tokens, name))
    }


_FUNCTIONS = functions()


def drawn(rng: random.Random) -> tuple[str, Any, dict[str, Any]]:
    """A function, its name, and arguments of which one or two are bad."""
    name = rng.choice(sorted(_FUNCTIONS))
    function = _FUNCTIONS[name]
    parameters = list(inspect.signature(function).parameters.values())
    hints = _hints(function)
    given: dict[str, Any] = {}
    for one in parameters:
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            if one.name in ("progress", "report", "device"):
                given[one.name] = _GOOD[one.name]
            elif one.default is one.empty:
                given[one.name] = _good(one.name, hints.get(one.name), rng)
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        named += _fields(hints.get("config"))
    for key in rng.sample(named, k=min(len(named), rng.choice([1, 1, 2]))):
        given[key] = rng.choice(BAD)
    if "out" in named and "out" not in given:
        given["out"] = "new"
    return name, function, given


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def _fields(hint: Any) -> list[str]:
    """The fields of the configuration that a function takes as keywords too."""
    kinds = [one for one in typing.get_args(hint) if dataclasses.is_dataclass(one)]
    return [field.name for kind in kinds for field in dataclasses.fields(kind)]


def _good(name: str, hint: Any, rng: random.Random) -> Any:
    """An argument that fits, as far as its name or type says what does; else a bad one."""
    if name in _GOOD:
        return _GOOD[name]
    dims = getattr(hint, "dim_str", None)
    if dims is not None:
        shape = [_SIZES.get(one.lstrip("*#"), 3) for one in dims.split() if one != "..."]
        return torch.rand(shape, generator=torch.Generator().manual_seed(0))
    plain = {int: 1, float: 0.5, str: "zero", bool: True}
    return plain.get(hint, rng.choice(BAD))

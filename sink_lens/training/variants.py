"""Runs in groups: variants differ only in the compared fields, the runs of one variant only in the seed."""

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, RunError
from ..records import CIRCUMSTANCE, Run, read_run
from ..text import join_and, name_in_words

SWITCHES = {"attention": "softmax", "value_norm": "none", "norm": "rms", "optimizer": "adamw"}
"""Fields that change the architecture or the optimizer -> their value in the baseline."""
IGNORED = frozenset({"seed", "watch", "save_every", "checkpoints"})
"""Fields that do not touch what is trained."""
ONLY_WITH = {
    "decay_unshared_gain": ("value_norm", ("per_head",)),
    "value_norm_init": ("value_norm", ("shared", "per_head")),
}
"""Field -> the switch and its values without which the field makes no difference."""
WARNED = ("device", "compile", "fsdp")
"""Fields of the machine: runs that differ in them are compared, with a note."""
DATA = ("data_sha256", "tokenizer_sha256")
"""Provenance that all runs must share."""
FEWEST_SEEDS = 3
"""With fewer seeds for each variant, ``compare`` gives no verdict on their difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Runs in groups: variant -> seed -> run, the baseline first, the seeds ascending."""

    group_by: tuple[str, ...]
    runs: dict[str, dict[int, Run]]
    notes: tuple[str, ...]

    @property
    def baseline(self) -> str:
        return next(iter(self.runs))

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(self.runs)[1:]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.runs[self.baseline])


def group_runs(
    folders: Sequence[str | os.PathLike[str]],
    *,
    group_by: str | Sequence[str] | None = None,
    baseline: str | None = None,
) -> Variants:
    """Group finished training runs into variants by the fields that differ, after checks that they may be compared.

    The ``baseline`` comes first; if None, softmax attention without a value norm, or the first run's variant.

    Raises:
        InputError: fewer than two runs, a field that no run has, or no such baseline.
        RunError: a folder has no finished training; a run differs in something else; variants differ in their seeds.
    """
    if len(folders) < 2:
        raise InputError(f"{len(folders)} runs were given; need two at least, of two variants.")
    runs: list[Run] = []
    for folder in folders:
        run = read_run(folder)
        if run.kind != "train":
            raise RunError(f"{run.folder} holds a {run.kind} run; need runs of sink-lens train.")
        if run.status != "finished":
            raise RunError(
                f"{run.folder} is {run.status}, not finished; need whole runs, or their ends would be compared with "
                "others' middles. Train it to the end, or leave it out."
            )
        runs.append(run)
    configs = [run.config for run in runs]
    names = _find_compared_fields(runs, configs, group_by=group_by)
    variants: dict[str, dict[int, Run]] = {}
    for run, config in zip(runs, configs, strict=True):
        variant = "/".join(_value_text(config.get(name)) for name in names)
        seed = config["seed"]
        if seed in variants.setdefault(variant, {}):
            raise RunError(
                f"{variants[variant][seed].folder} and {run.folder} are both {variant} with seed {seed}; need each "
                "once."
            )
        variants[variant][seed] = run
    first = baseline
    if first is None:
        usual = "/".join(SWITCHES.get(name, "") for name in names)
        first = usual if usual in variants else next(iter(variants))
    if first not in variants:
        raise InputError(f"no variant is {first!r}; need one of {', '.join(variants)}")
    if len(variants) < 2:
        raise RunError(
            f"all runs are {first}; need two variants at least. Give runs that differ in {join_and(names)}."
        )
    _check_same_seeds_and_data(variants, runs)
    notes = _warn_of_differences(runs, configs)
    n = len(variants[first])
    if n < FEWEST_SEEDS:
        few = "one seed has no interval: no difference can be told from chance"
        notes += (few if n == 1 else f"an interval of {('no', 'one', 'two')[n]} seeds says little",)
    if (others := len(variants) - 1) > 1 and n >= FEWEST_SEEDS:
        chance = 1 - 0.95**others
        notes += (
            f"each of {others} variants is compared with the baseline at 95%: where nothing differs, one is called "
            f"ahead or behind in up to {chance:.0%} of comparisons",
        )
    ordered = [first, *(variant for variant in variants if variant != first)]
    return Variants(
        group_by=names,
        runs={variant: dict(sorted(variants[variant].items())) for variant in ordered},
        notes=notes,
    )


def fields_in_words(names: Iterable[object]) -> str:
    return join_and("learning rate" if name == "lr" else name_in_words(str(name)) for name in names)


def _find_compared_fields(
    runs: Sequence[Run], configs: Sequence[dict[str, Any]], *, group_by: str | Sequence[str] | None
) -> tuple[str, ...]:
    """Return the fields that variants differ in; refuse runs that differ in a further field."""
    fields = sorted({name for config in configs for name in config} - IGNORED)
    differing = [name for name in fields if _field_differs(configs, name) and name not in WARNED]
    if group_by is not None:
        named = tuple(group_by.split(",")) if isinstance(group_by, str) else tuple(group_by)
        if unknown := [name for name in named if name not in fields]:
            raise InputError(
                f"no run has {join_and(unknown)}; need a field of the configuration: {', '.join(fields)}"
            )
        if others := [name for name in differing if name not in named]:
            raise RunError(_differences_text(runs, configs, others))
        return named
    if not differing:
        raise RunError("the runs have the same configuration but for the seed; need two variants.")
    switches = [name for name in SWITCHES if name in differing]
    others = [name for name in differing if name not in switches]
    if len(others) == 1 and not switches:
        return (others[0],)
    if others:
        raise RunError(_differences_text(runs, configs, others))
    for run, config in zip(runs, configs, strict=True):
        if sum(config.get(name) != SWITCHES[name] for name in switches) > 1:
            raise RunError(
                f"{run.folder} differs from the baseline in {join_and(switches)} at once; need one thing changed. "
                f"Name both if that is what is compared: group_by={','.join(switches)}"
            )
    return tuple(switches)


def _field_differs(configs: Sequence[dict[str, Any]], name: str) -> bool:
    if name in ONLY_WITH:
        switch, values = ONLY_WITH[name]
        configs = [config for config in configs if config.get(switch) in values]
    return len({json.dumps(config.get(name), sort_keys=True) for config in configs}) > 1


def _differences_text(
    runs: Sequence[Run], configs: Sequence[dict[str, Any]], names: Sequence[str]
) -> str:
    parts = []
    for name in names:
        seen: dict[str, Run] = {}
        for run, config in zip(runs, configs, strict=True):
            seen.setdefault(_value_text(config.get(name)), run)
        parts.append(f"{name}: {_values_of_runs(seen)}")
    return (
        f"the runs also differ in {'; '.join(parts)}; need variants that differ in what is compared and the seed only. "
        "Leave runs out, or name all that is compared: group_by=..."
    )


def _values_of_runs(seen: dict[str, Run]) -> str:
    return ", ".join(f"{value} ({run.folder})" for value, run in seen.items())


def _check_same_seeds_and_data(variants: dict[str, dict[int, Run]], runs: Sequence[Run]) -> None:
    seeds = {variant: ", ".join(map(str, sorted(runs))) for variant, runs in variants.items()}
    if len(set(seeds.values())) > 1:
        listed_seeds = "; ".join(f"{variant}: {one}" for variant, one in seeds.items())
        raise RunError(
            f"the variants have other seeds ({listed_seeds}); need the same in each, since runs are paired by seed. "
            "Train the missing ones, or leave the others out."
        )
    for name in DATA:
        seen = {json.dumps(run.provenance.get(name), sort_keys=True): run for run in runs}
        if len(seen) > 1:
            raise RunError(
                f"the runs have another {name}: {_values_of_runs(seen)}; need the same data in all."
            )


def _warn_of_differences(runs: Sequence[Run], configs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    provenances = [run.provenance for run in runs]
    sentences = []
    for given, names in ((provenances, (*CIRCUMSTANCE, "processes")), (configs, WARNED)):
        for name in names:
            if _field_differs(given, name):
                values = dict.fromkeys(_value_text(one.get(name)) for one in given)
                sentences.append(f"the runs differ in {name}: {' and '.join(values)}")
    notes = tuple(dict.fromkeys(sentences))
    for note in notes:
        warnings.warn(note, stacklevel=4)
    return notes


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

"""Commands and the options that their configurations have: a small run of each, and values that no option takes."""

import random
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, get_args, get_origin

import typer.main
from bad_values import NUMBERS, TEXTS

from sink_lens.cli import app
from sink_lens.cli.options import option_name
from sink_lens.configuration import allowed_texts, split_off_none

COMMANDS: Mapping[str, Any] = typer.main.get_group(app).commands
_SMALL = {"sequences": "3", "length": "20", "device": "cpu"}
_SMALL_GPT2 = "gpt2,n_layers=2,d_model=16,n_heads=2,vocab_size=60,n_context=32"
_UNTRAINED = ("--untrained", _SMALL_GPT2, "--sequences", "64")
_NEEDED: dict[str, tuple[str, ...]] = {
    "trace": ("--no-random-init", "--no-interventions"),
    "patch": ("--clean", "a b c", "--corrupted", "a d c", "--layers", "0"),
    "sweep": ("SWEEP.toml",),
    "train": ("TRAIN.toml",),
    "watch": ("runs/train", "--length", "16"),
    "compare": ("runs/train", "runs/other"),
    "preference": _UNTRAINED,
    "contraction": _UNTRAINED,
    "fingerprint": ("MODEL", "MODEL", "--sequences", "60"),
    "report": ("runs/sweep",),
    "status": ("runs/sweep",),
}
"""Command -> words of a small run besides model and sizes of its configuration; of two values the last counts."""


def fields_of(name: str) -> dict[str, Field[Any]]:
    """The fields of a command's configuration, by name."""
    kind = getattr(COMMANDS[name].callback, "configuration", None)
    return {one.name: one for one in fields(kind) if "file_only" not in one.metadata} if kind else {}


def small(name: str) -> list[str]:
    """Words that make a small run of a command."""
    known = fields_of(name)
    if any(one.name == "file" for one in COMMANDS[name].params):  # its settings lie in a file
        return [*_NEEDED[name]]
    model = ["MODEL"] if "model" in known else []
    sizes = [word for size, value in _SMALL.items() if size in known for word in (option_name(known[size]), value)]
    return [*model, *sizes, *_NEEDED.get(name, ())]


def takes_out(name: str) -> bool:
    """True for a command that writes a run folder."""
    return any("--out" in one.opts for one in COMMANDS[name].params)


def bad_text(option: Any, known: Mapping[str, Field[Any]], rng: random.Random) -> str:
    """A text that an option is unlikely to take: mostly a number for numbers, and nearly a choice for choices."""
    field = known.get(option.name)
    if field is None or rng.random() < 0.3:
        return rng.choice(TEXTS)
    kind, _ = split_off_none(field.type)
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if choices := allowed_texts(field.type):
        return rng.choice([rng.choice(choices).upper(), f"{rng.choice(choices)} ", ",".join(choices)])
    if item not in (int, float):
        return rng.choice(TEXTS)
    joined = {"commas": ",", "ranges": rng.choice("-,")}.get(field.metadata.get("written", ""), "")
    return joined.join(rng.choices(NUMBERS, k=2)) if joined else rng.choice(NUMBERS)


def bad_options(name: str, words: list[str], rng: random.Random) -> list[str]:
    """One to three options of a command with bad values; a bad argument may take the place of a word."""
    known = fields_of(name)
    options = [one for one in COMMANDS[name].params if one.opts and one.name != "help"]
    given: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not options or rng.random() < 0.1:
            given.append(rng.choice(TEXTS))
            continue
        one = rng.choice(options)
        if one.param_type_name != "argument":
            flag = one.is_flag
            given += [rng.choice([*one.opts, *one.secondary_opts])] if flag else [rng.choice(one.opts)]
            given += [] if flag else [bad_text(one, known, rng)]
        elif words and rng.random() < 0.7:
            words[rng.randrange(len(words))] = bad_text(one, known, rng)
        else:
            words.append(bad_text(one, known, rng))
    return given

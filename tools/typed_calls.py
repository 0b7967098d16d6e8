"""Calls with a mistake each, all of which a type checker must find; nothing here is run.

A line whose mistake is not found makes ``make types`` fail: its comment is then unnecessary.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any

import sink_lens
from sink_lens import circuits, edits, identity, patching, studies, training

model: Any = None
tokens: Any = None


def misspelled() -> None:
    """Options that do not exist."""
    sink_lens.trace(model, treshold=0.3)  # pyright: ignore[reportCallIssue]
    sink_lens.trace(model, sequence=8)  # pyright: ignore[reportCallIssue]
    sink_lens.trace(model, n_controls=19)  # pyright: ignore[reportCallIssue]
    sink_lens.sweep(model, tokens=tokens, sede=1)  # pyright: ignore[reportCallIssue]
    sink_lens.sweep(model, tokens=tokens, metric=())  # pyright: ignore[reportCallIssue]
    patching.patch(model, "a", "b", sight="z")  # pyright: ignore[reportCallIssue]
    patching.patch(model, "a", "b", layer=[1])  # pyright: ignore[reportCallIssue]
    patching.patch(model, "a", "b", answer="c")  # pyright: ignore[reportCallIssue]
    patching.patch(model, "a", "b", axes=("layer",))  # pyright: ignore[reportCallIssue]
    patching.attribution_patch(model, "a", "b", step=5)  # pyright: ignore[reportCallIssue]
    patching.path_patch(model, "a", "b", reciever=("q", 1, 0))  # pyright: ignore[reportCallIssue]
    circuits.find(model, "a", "b", edgez=100)  # pyright: ignore[reportCallIssue]
    circuits.find(model, "a", "b", ablations="zero")  # pyright: ignore[reportCallIssue]
    circuits.run(model, tasks="ioi")  # pyright: ignore[reportCallIssue]
    circuits.evaluate(model, tokens, tokens, size=(0.1,))  # pyright: ignore[reportCallIssue]
    circuits.task(model, "ioi", n_pairs=64)  # pyright: ignore[reportCallIssue]
    studies.card(model, lenght=128)  # pyright: ignore[reportCallIssue]
    studies.cards([model, model], sequence=4)  # pyright: ignore[reportCallIssue]
    studies.quantise(model, bit=4)  # pyright: ignore[reportCallIssue]
    studies.sink_tokens(model, n_sequences=4)  # pyright: ignore[reportCallIssue]
    identity.fingerprint([model, model], n=500)  # pyright: ignore[reportCallIssue]
    training.train(out="x", learning_rate=1e-3)  # pyright: ignore[reportCallIssue]
    training.compare(["a", "b"], group="lr")  # pyright: ignore[reportCallIssue]
    training.watch("a", interval=5)  # pyright: ignore[reportCallIssue]
    training.get_prefix_model(model, lenght=5)  # pyright: ignore[reportCallIssue]
    edits.zero("z", layer=[1])  # pyright: ignore[reportCallIssue]
    edits.scale("z", 2.0, head=[0])  # pyright: ignore[reportCallIssue]
    edits.mean_ordinary(model, tokens, "z", position=[1])  # pyright: ignore[reportCallIssue]


def other_words() -> None:
    """Texts that are none of the choices."""
    patching.patch(model, "a", "b", direction="forward")  # pyright: ignore[reportArgumentType]
    patching.patch(model, "a", "b", put="random")  # pyright: ignore[reportArgumentType]
    patching.patch(model, "a", "b", bos="yes")  # pyright: ignore[reportArgumentType]
    sink_lens.trace(model, kernel="flash")  # pyright: ignore[reportArgumentType]
    circuits.find(model, "a", "b", choice="best")  # pyright: ignore[reportArgumentType]
    training.train(out="x", attention="relu")  # pyright: ignore[reportArgumentType]
    sink_lens.sweep(model, tokens=tokens, engine="slurm")  # pyright: ignore[reportArgumentType]


def other_types() -> None:
    """Values of a type that the option does not take."""
    patching.patch(model, "a", "b", layers=1)  # pyright: ignore[reportArgumentType]
    patching.patch(model, "a", "b", controls="many")  # pyright: ignore[reportArgumentType]
    sink_lens.trace(model, sequences=8.5)  # pyright: ignore[reportArgumentType]
    sink_lens.trace(model, quick="yes")  # pyright: ignore[reportArgumentType]
    circuits.find(model, "a", "b", edges="all")  # pyright: ignore[reportArgumentType]
    edits.zero("z", layers=1)  # pyright: ignore[reportArgumentType]
    training.train(out="x", steps="1k")  # pyright: ignore[reportArgumentType]

"""Training runs made by hand, for the tests of watching and comparing: folders whose every number is known."""

import contextlib

import numpy as np
import pandas as pd

from sink_lens.records import create_run

CONFIG = {
    "attention": "softmax", "value_norm": "none", "lr": 0.001, "length": 16, "batch": 4, "steps": 100, "seed": 0,
    "data_seed": 0, "watch": False, "device": "cpu",
}  # fmt: skip
PROVENANCE = {
    "data_source": "given", "data_sha256": "d" * 64, "tokenizer_sha256": "t" * 64, "versions": {"torch": "2.13.0"},
    "device": "cpu", "kernel": "sdpa",
}  # fmt: skip
EACH = 64
"""Tokens a step."""


def log(losses, *, evaluation=True):
    """A log with a loss every 10 steps, the same in training and evaluation."""
    steps = 10 * np.arange(1, len(losses) + 1)
    rows = {"step": steps, "tokens": steps * EACH, "loss": losses, "lr": 0.001, "grad_norm": 1.0}
    rows |= {"seconds": steps * 0.1, "eval_loss": losses if evaluation else np.nan}
    return pd.DataFrame(rows)


def watched(masses, *, tokens_sha256="a" * 64):
    """What watching gives where the sink's mass and rate go through the given values, at steps 0, 10, 20, ...

    Layer 0 has half the mass of the others. The rate over 0.1 is the mass, that over 0.3 half of it.
    """
    rows = []
    for index, mass in enumerate(masses):
        place = {"step": 10 * index, "tokens": 10 * index * EACH}
        whole = {"sink_mass": mass * 0.75, "uniform_mass": 0.25, "dominance_ratio": 5 + 10 * mass}
        whole |= {"effective_rank": 20 - 10 * mass, "effective_rank_without": 20.0, "s2_ratio": 2.0}
        whole |= {
            "norm_ratio": 1 + mass,
            "growth_steps": float(mass > 0.3),
            "super_neurons": 2.0 * (mass > 0.3),
        }
        whole |= {"loss": 5.0 - index}
        rows += [place | {"measure": name, "value": value} for name, value in whole.items()]
        for level, rate in ((0.1, mass), (0.3, mass / 2)):
            rows.append(place | {"measure": "sink_rate", "threshold": level, "value": rate})
        for layer in range(2):
            share = 0.5 if layer == 0 else 1.0
            by_layer = {
                "sink_mass": mass * share,
                "norm_ratio": 1 + mass * layer,
                "dominance_ratio": 5 + mass * layer,
            }
            by_layer |= {"s2_ratio": 2.0}
            rows += [
                place | {"measure": name, "layer": layer, "value": value}
                for name, value in by_layer.items()
            ]
    frame = pd.DataFrame(rows).assign(
        position=pd.NA, unit="1", error=pd.NA, tokens_sha256=tokens_sha256
    )
    return frame.astype({"layer": "Int64", "position": "Int64", "error": "string"})


def write_run(
    folder,
    losses,
    *,
    masses=None,
    provenance=None,
    status=None,
    evaluation=True,
    text="a" * 64,
    **config,
):
    """A run folder of a training; its path."""
    known = PROVENANCE | (provenance or {})
    with (
        contextlib.suppress(ZeroDivisionError),
        create_run(folder, kind="train", config=CONFIG | config, provenance=known) as writer,
    ):
        writer.write_table("log", log(losses, evaluation=evaluation))
        if masses is not None:
            writer.write_table("watch", watched(masses, tokens_sha256=text))
        if status == "failed":
            raise ZeroDivisionError
    return folder

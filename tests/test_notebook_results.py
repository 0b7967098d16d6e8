"""Every class of results shows itself in a notebook, and what it was given is text there."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lenses import lens_of, tokens

from sink_lens import Reading, capture, generate, run_with, stream, sweep
from sink_lens.activations.views import Captured, Streamed
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import zero
from sink_lens.edits.metrics import loss
from sink_lens.edits.outcome import Outcome
from sink_lens.edits.part import Part
from sink_lens.engine.generation import Generated
from sink_lens.identity.contraction import Contraction
from sink_lens.identity.preference import Preference
from sink_lens.models.unchanged import TensorValues
from sink_lens.patching import patch, path_patch
from sink_lens.patching.path import PathResult
from sink_lens.patching.results import AttributionResult, PatchResult
from sink_lens.patching.run_pair import RunPair
from sink_lens.training.config import TrainConfig
from sink_lens.training.train import TrainResult, _headline

HOSTILE = "<img src=x onerror=alert(1)></script>"
SUMMARY = pd.DataFrame({"measure": [HOSTILE], "value": [1.5]})
SWEPT = pd.DataFrame(
    {"layer": [0, 1], "effect": [0.0, 0.5], "method": "gradient", "empty": np.nan, "text": HOSTILE}
)
PATCHED = {
    "metric": HOSTILE,
    "direction": "denoising",
    "baseline": 1.0,
    "source": 2.0,
    "differences": SWEPT,
}
SITE = {"site": "z", "unit": "", "by": ("layer",), "labels": {}}
LOG = pd.DataFrame(
    {"step": [1], "tokens": [64], "loss": [3.0], "seconds": [1.0], "eval_loss": [2.9]}
)


def results():
    yield from_tensor(torch.zeros(2, 3, dtype=torch.int64)), "first token is BOS"
    yield (
        Captured(tensors={(HOSTILE, 3): torch.zeros(2, 3)}, positions=None, path="plain"),
        "(2, 3)",
    )
    yield (
        Streamed(values={HOSTILE: {0: torch.zeros(2, 3)}}, kernel="fused"),
        "fused attention kernel",
    )
    mass = torch.full((1, 2, 3, 1), 0.25)
    state, valid = torch.zeros(1, 2, 1, 4), torch.ones(2, 3, dtype=torch.bool)
    run = {
        "positions": (0,),
        "layers": (4,),
        "valid": valid,
        "mass": mass,
        "state": state,
        "logits": None,
    }
    yield Outcome(loss=torch.tensor([2.0, 3.0]), tensors={}, **run), "2.5"
    patched = {"rows": SWEPT, "values": torch.zeros(2, 1), "baselines": torch.ones(2, 1)}
    yield PatchResult(**patched, **PATCHED, **SITE), "is 1 in the baseline run"
    approximated = {
        "runs": object.__new__(RunPair),
        "values_then": object.__new__(TensorValues),
        "grid": (),
    }
    yield AttributionResult(rows=SWEPT, **approximated, **PATCHED, **SITE), "to first order"
    yield PathResult(frame=SWEPT, receiver=Part(site="z", layers=(3,)), **PATCHED), "through"
    said = {
        "prompt": HOSTILE,
        "text": HOSTILE,
        "plain": "b",
        "prompt_ids": (1,),
        "ids": (1,),
        "plain_ids": (2,),
    }
    yield Generated(**said), "the same for 0 tokens"
    trained = {
        "folder": Path(HOSTILE),
        "config": TrainConfig(),
        "tables": {"log": LOG},
        "checkpoints": {},
    }
    yield TrainResult(headline=_headline(TrainConfig(), LOG, ()), **trained), "held out 2.9"
    counts = np.ones(4)
    found = {
        "n": 10,
        "argmax": counts,
        "argmin": counts,
        "probability": counts,
        "tables": {"summary": SUMMARY},
    }
    yield Preference(headline="After 10 random sequences.", **found), "10 random sequences"
    yield Contraction(tables={"summary": SUMMARY}, directions={}), "1.5"


def test_every_result_has_the_notes_of_its_model():
    lens, ids = replace(lens_of(), notes=("measured on quantised weights",)), tokens(2, 8)
    found = [
        run_with(lens, ids),
        capture(lens, ids, sites=["z"]),
        stream(
            lens,
            ids,
            [Reading(name="z", sites=("z",), function=lambda view: view["z"].flatten(1).sum(1))],
        ),
        generate(lens, ids[:1], max_new_tokens=1),
        patch(lens, ids[:1], ids[1:], site="z", metric="loss", by=(), controls=0, progress=False),
        path_patch(
            lens,
            ids[:1],
            ids[1:],
            sender=("z", 0, 0),
            receiver=("q", 2, 1),
            metric=loss(),
            progress=False,
        ),
        sweep(lens, zero("z"), tokens=ids, metrics=loss(), controls=0, progress=False),
    ]
    assert [
        type(one).__name__
        for one in found
        if "measured on quantised weights" not in one._repr_html_()
    ] == []


@pytest.mark.parametrize(
    ("result", "says"), [pytest.param(*one, id=type(one[0]).__name__) for one in results()]
)
def test_a_result_shows_itself_without_markup_of_its_content_and_has_its_main_table_by_name(
    result, says
):
    shown = result._repr_html_()
    assert says in shown
    assert "<img src=x" not in shown
    assert "<script" not in shown
    assert "http" not in shown
    if isinstance(
        result,
        PatchResult | AttributionResult | PathResult | TrainResult | Preference | Contraction,
    ):
        assert any(table is result.frame for table in result.tables.values())

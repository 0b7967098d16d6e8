"""The configuration of a circuit."""

import re
from typing import get_args

import pytest
from lenses import lens_of

from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.methods import METHODS, Method, check_method
from sink_lens.circuits.scores import score_by_gradients
from sink_lens.errors import InputError

from .tiny_runs import runs_of


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"threshold": 0.1},
            "threshold is 0.1, which nothing reads here: it is for choice threshold",
        ),
        ({"length": 32}, "it is for task text"),
        ({"check": 0, "check_pairs": 4}, "check_pairs is 4, which nothing reads here"),
        ({"metric": "loss", "task": "text", "metric_layers": (1,)}, "it is for metric sink_mass"),
        ({"method": "gim", "steps": 7}, "it is for the methods eap-ig"),
        ({"method": "eap-ig-left", "most_steps": 20}, "most_steps is 20, which nothing reads"),
        (
            {"choice": "threshold", "threshold": 0.1, "edges": 10},
            "edges is 10, which nothing reads",
        ),
        ({"steps": 9, "most_steps": 4}, "steps is 9 and most_steps 4"),
    ],
)
def test_a_field_that_nothing_reads_is_refused(fields, text):
    with pytest.raises(InputError, match=re.escape(text)):
        CircuitConfig(**fields).check_together()
    CircuitConfig(check=0, check_pairs=4, core=True).check_together()  # the core is patched too


@pytest.mark.parametrize("method", ["eap-corrupted", "eap-ig-left"])
def test_a_gradient_at_a_zero_stream_is_refused(method):
    """Its norms divide by next to nothing: scores of 1e10 to 4e20."""
    text = f"{method} takes a gradient where everything is replaced"
    with pytest.raises(InputError, match=text):
        CircuitConfig(method=method, ablation="zero").check_together()
    with pytest.raises(InputError, match=text):
        CircuitConfig(method=method, ablation="zero").check_for_find()
    with pytest.raises(InputError, match=text):
        score_by_gradients(runs_of(lens_of("llama"), ablation="zero"), method=method)
    CircuitConfig(method=method).check_together()


def test_every_method_has_a_row():
    assert tuple(METHODS) == get_args(Method)
    with pytest.raises(InputError, match="method is 'luck'; need one of eap-ig, eap, "):
        check_method("luck", "resample")


def test_spans_and_neurons_are_what_was_given():
    given = CircuitConfig(spans=("last=-2,-1", "sink=0"), neurons=("2:15", "2:8-9"))
    assert given.positions_by_span == {"last": (-2, -1), "sink": (0,)}
    assert given.neurons_by_layer == {2: (15, 8, 9)}
    for spans, said in ((("a=0", "a=1"), "given twice"), (("a=-3--1",), "need numbers such as")):
        with pytest.raises(InputError, match=said):
            CircuitConfig(spans=spans).positions_by_span  # noqa: B018
    with pytest.raises(InputError, match="ending that is not known"):
        CircuitConfig(save=("c.txt",)).check_together()

"""Arguments of public functions: what a signature does not allow is refused with what was found and needed."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import sink_lens
from sink_lens.arguments import check_calls, is_of_type
from sink_lens.edits.metrics import Metric, evaluate
from sink_lens.errors import InputError
from tests.tiny_families import tiny

META = torch.zeros(2, 2, device="meta")
IDS = torch.ones(1, 8, dtype=torch.int64)
BATCH = sink_lens.TokenBatch.from_tensor(IDS)
MEASURES = sink_lens.measures


def rate(score):
    return MEASURES.sink_rate(score, threshold=0.3)


@pytest.mark.parametrize(
    ("value", "hint", "fit"),
    [
        (3, int, True),
        (np.int64(3), int, True),
        (True, int, False),
        ("3", int, False),
        (None, int | None, True),
        (3, float, True),
        (math.nan, float, False),
        ("a", Literal["a", "b"], True),
        (1, Literal[True], False),
        ({1: 2}, Sequence[int], False),
        ({1: 2}, Iterable[int], True),
        (torch.tensor([1, 2]), Sequence[int], True),
        ("12", Sequence[int], False),
        (torch.tensor([1j]), Sequence[float], False),
        (torch.tensor([[1, 2]]), Sequence[Sequence[int]], True),
        (torch.eye(2).to_sparse(), Sequence[Metric], False),
        (np.array("a"), Sequence[int], False),
        (np.array([1.5]), Sequence[float], True),
        ([1, "2"], Sequence[int], False),
        ([1, 2, 3], tuple[int, int], False),
        ({"a": 1}, Mapping[str, int], True),
        (len, Callable[[Any], int], True),
        (torch.zeros(2, 2), Float[Tensor, "a b"], True),
        (torch.zeros(2, 2, dtype=torch.int64), Float[Tensor, "a b"], False),
        (META, Float[Tensor, "a b"], False),
        (object(), Any, True),
    ],
)
def test_what_a_type_allows(value, hint, fit):
    assert is_of_type(value, hint) is fit


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rate(None), r"of sink_rate is None \(NoneType\); need a tensor Float"),
        (lambda: rate(META), "the device meta, which holds no values; need a tensor"),
        (lambda: sink_lens.edits.scale("z", factor=math.nan), r"is nan \(float\); need a number"),
        (lambda: sink_lens.trace("MODEL", sequences=2.5), "sequences is 2.5; need a whole number"),
        (
            lambda: sink_lens.TraceConfig(controls=1_000_000),
            "controls is 1000000; need at most 10,000",
        ),
        (
            lambda: sink_lens.identity.ContractionConfig(models=("MODEL",), seed=-5),
            "seed is -5; need a whole number",
        ),
        (
            lambda: MEASURES.column_kurtosis(torch.ones(2, 3), chunk=-1),
            "chunk is -1; need at least one column",
        ),
        (lambda: MEASURES.variance_ratio(torch.zeros(0)), "s has no position"),
        (
            lambda: MEASURES.positive_share(
                torch.ones(2, 6, 4, 3), k=torch.ones(3, 2, 3), valid=torch.ones(2, 6) > 0, key=0
            ),
            "the axis 'batch' of positive_share has 2 in q and 3 in k; need the same size",
        ),
        (lambda: sink_lens.TraceConfig(text="x" * 5000), "the text file is too long"),
        (
            lambda: sink_lens.capture(tiny("llama"), IDS, sites=["z"], path="fast"),
            "need 'auto' or 'plain' or 'bridge'",
        ),
        (lambda: BATCH[5], r"rows of TokenBatch is 5 \(int\)"),
        (
            lambda: sink_lens.sweep(
                tiny("llama"), sink_lens.sweeps.Grid.of(), tokens=BATCH, metrics="loss"
            ),
            "metrics of sweep is 'loss' .*; need a MetricSpec or a Metric or a function or a list of these$",
        ),
    ],
)
def test_public_names_refuse_what_they_cannot_take(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_a_number_of_numpy_reaches_the_function_as_one_of_python():
    @check_calls
    def kinds(*numbers: float, last: int) -> list[type]:
        return [type(one) for one in (*numbers, last)]

    assert kinds(np.float64(2), 3, last=np.int64(4)) == [float, int, int]


@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_what_a_function_itself_raises_stays_what_it_is(kind):
    @check_calls
    def fails(number: int) -> int:
        raise kind("of the function")

    with pytest.raises(kind) as found:
        fails(3)
    assert type(found.value) is kind


def test_what_a_user_s_function_raises_passes_with_a_note_that_says_whose_it_is():
    lens, tokens = sink_lens.load(tiny("llama")), torch.arange(3, 23).reshape(2, 10)

    def breaks(*given):
        raise KeyError("mine")

    reading = sink_lens.Reading(name="r", sites=("z",), function=breaks, layers=frozenset({1}))
    for call, note in (
        (
            lambda: sink_lens.run_with(
                lens, tokens, sink_lens.edits.edit("z", breaks, layers=[1], positions=[2])
            ),
            r"raised in the edit '.*' of 'z', layer 1, positions 2",
        ),
        (lambda: sink_lens.stream(lens, tokens, [reading]), "raised in the reading 'r', layer 1"),
        (
            lambda: evaluate(Metric(name="m", function=breaks), sink_lens.run_with(lens, tokens)),
            "raised in the metric 'm'",
        ),
    ):
        with pytest.raises(KeyError, match="mine") as found:
            call()
        assert any(re.fullmatch(note, said) for said in found.value.__notes__), (
            found.value.__notes__
        )


def test_an_argument_that_is_missing_is_a_type_error():
    for error in (TypeError, InputError):
        with pytest.raises(error, match=r"missing .*; need sink_rate\(score, \*, threshold"):
            sink_lens.measures.sink_rate()
        with pytest.raises(
            error, match=r"missing .*'tokens'; need mean_ordinary\(model, tokens, site, \*\*where\)"
        ):
            sink_lens.edits.mean_ordinary("z", layers=[1])


def test_a_public_function_is_one_object_and_keeps_its_signature():
    assert sink_lens.measures.sink_rate is sink_lens.measures.sink_rate
    assert sink_lens.measures.sink_rate.__wrapped__.__module__ == "sink_lens.measures.attention"
    assert sink_lens.measures.sink_rate.__doc__

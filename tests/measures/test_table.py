import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.measures.table import MEASURES


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator) * 10 ** (2 * torch.rand(1, generator=generator))


def arguments(seed):
    """Random inputs for every measure: 2 sequences of 20, 4 heads over 2, width 12, 6 neurons."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    pattern = draw(generator, 2, 4, 20, 20).masked_fill(hidden, -torch.inf).softmax(-1)
    valid = torch.arange(20) < torch.tensor([[20], [15]])
    x = draw(generator, 2, 20, 12)
    v, q = draw(generator, 2, 20, 2, 3), draw(generator, 2, 20, 4, 3)
    w_q, w_o = draw(generator, 4, 3, 12), draw(generator, 4, 3, 12)
    w_down, activations = draw(generator, 12, 6), draw(generator, 2, 6)
    key = int(torch.randint(0, 20, (1,), generator=generator))
    return {
        "sink_score": (pattern[..., key], {"valid": valid, "key": key}),
        "sink_rate": (pattern[:, :, -1, key], {"threshold": 0.3}),
        "sink_mass": (pattern[..., key], {"valid": valid, "key": key}),
        "entropy": (pattern, {}),
        "null_mass": (pattern * torch.rand(20, 1, generator=generator), {}),
        "induction": (pattern, {"tokens": x[..., 0].sign().long(), "valid": valid}),
        "token_std": (x, {}),
        "s1": (x, {"valid": valid}),
        "s2": (x, {"valid": valid}),
        "decay_exponent": (x.std((0, 2)), {}),
        "variance_ratio": (x.std((0, 2)), {}),
        "output_preservation": (
            w_o.flatten(0, 1).T,
            {"first_std": torch.rand(12, generator=generator)},
        ),
        "contributions": (activations, {"weights": w_down[0]}),
        "contribution_share": (activations, {"change": x[:, 0, 0]}),
        "spike_ratio": (activations, {"elsewhere": draw(generator, 2, 6).abs()}),
        "row_norms": (w_down.T, {}),
        "norm_rank": (w_down[0], {}),
        "column_kurtosis": (w_down, {}),
        "selectivity": (x, {"gate_row": w_down[:, 0], "up_row": w_down[:, 1]}),
        "dominance_ratio": (x[0], {}),
        "dominance_ratio_fixed": (x[0], {"dimension": 3}),
        "massive_ratio": (x[0], {}),
        "growth_ratio": (x.norm(dim=-1), {"valid": valid, "key": key}),
        "qk_alignment": (w_q, {"w_k_column": v[0, 0]}),
        "positive_share": (q, {"k": v[:, 0], "valid": valid, "key": key}),
        "logit_split": (q.transpose(1, 2), {"parts": v.transpose(1, 2), "scale": 0.5}),
        "effective_rank": (x, {"valid": valid, "without": key}),
        "value_norm_ratio": (v[..., 0].abs().mT, {"valid": valid, "key": key}),
    }


def results(seed, change=lambda value: value):
    """Every measure by name, of arguments whose tensors are changed."""
    return {
        name: MEASURES[name].function(
            change(first), **{key: change(value) for key, value in rest.items()}
        )
        for name, (first, rest) in arguments(seed).items()
    }


def numbers(result):
    parts = result if isinstance(result, tuple) else (result,)
    return torch.cat([torch.as_tensor(part).double().flatten() for part in parts])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100_000))
def test_every_measure_stays_in_its_range(seed):
    found = results(seed)
    assert found.keys() == MEASURES.keys()
    for name, result in found.items():
        measure, values = MEASURES[name], numbers(result)
        defined = values[~values.isnan()]
        # A rounding error past the end, of the size of float32.
        assert (defined >= measure.low - 1e-5).all(), name
        assert (defined <= measure.high + 1e-5).all(), name


def test_every_measure_is_defined_on_an_ordinary_layer():
    assert [name for name, result in results(0).items() if numbers(result).isnan().all()] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_as_the_same_numbers_in_float32(dtype):
    def narrow(value):
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def wide(value):
        value = narrow(value)
        return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    expected = results(0, wide)
    for name, result in results(0, narrow).items():
        torch.testing.assert_close(
            numbers(result), numbers(expected[name]), equal_nan=True, rtol=0, atol=0, msg=name
        )


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_is_labelled_and_cites_what_the_docstring_cites(name):
    measure = MEASURES[name]
    assert measure.low < measure.high
    assert measure.unit
    assert measure.meaning
    if measure.reference != "ours":
        assert measure.reference in (inspect.getdoc(measure.function) or "")

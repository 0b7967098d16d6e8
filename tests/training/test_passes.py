"""What a training would take: its parameters by the configuration, and how its step is timed."""

from typing import get_args

import pytest
import torch

from sink_lens.models.headnorm import HeadNormForCausalLM, undecayed
from sink_lens.models.variants import Attention
from sink_lens.training import passes
from sink_lens.training.config import TrainConfig
from sink_lens.training.model import model_of


@pytest.mark.parametrize("compiled", [False, True])
def test_a_whole_step_is_timed_after_one_that_is_not(monkeypatch, compiled):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model: calls.append("compiled") or model)
    forward = HeadNormForCausalLM.forward
    monkeypatch.setattr(
        HeadNormForCausalLM, "forward", lambda *a, **k: calls.append("step") or forward(*a, **k)
    )
    sizes = {
        "n_layers": 1,
        "d_model": 16,
        "d_mlp": 24,
        "n_heads": 2,
        "vocab_size": 300,
        "length": 16,
        "device": "cpu",
    }
    seconds, peak, device = passes.time_training_step(
        TrainConfig(**sizes, batch=4, accumulation=2, compile=compiled)
    )
    assert (seconds > 0, peak > 0, device) == (True, True, "cpu")
    assert calls == ["compiled"] * compiled + ["step"] * 2 * 2


@pytest.mark.parametrize("attention", get_args(Attention))
@pytest.mark.parametrize(
    "other", [{}, {"value_norm": "shared", "norm": "single_scale"}, {"value_norm": "per_head"}]
)
def test_the_parameters_are_counted_from_the_configuration_as_the_model_has_them(attention, other):
    sizes = {
        "n_layers": 2,
        "d_model": 16,
        "d_mlp": 24,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 300,
    }
    for more in (
        {},
        {"tied": False},
        {"decay_unshared_gain": other.get("value_norm") == "per_head"},
    ):
        config = TrainConfig(**sizes, attention=attention, **other, **more)
        model = model_of(config)
        counted = {name: one.numel() for name, one in model.named_parameters()}
        apart = undecayed(model, unshared_gain=not config.decay_unshared_gain)
        assert passes.count_parameters(config) == (
            sum(counted.values()),
            sum(counted[name] for name in apart),
        )

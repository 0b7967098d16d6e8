"""Muon for the matrices of the layers, AdamW for the rest."""

import functools

import pandas as pd
import pytest
import torch
from rounding import assert_rows_close
from safetensors.torch import load_file

from sink_lens.models.headnorm import undecayed
from sink_lens.models.load import load
from sink_lens.training.model import model_of
from sink_lens.training.muon import MuonWithAdamW

from .tiny_run import config_of, stop_at, trained


def optimizer_of(model, **named):
    return MuonWithAdamW(
        model, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), undecayed=undecayed(model, **named)
    )


def test_every_parameter_is_in_one_of_both_and_moves_as_torchs_own_does():
    ours, theirs = model_of(config_of()), model_of(config_of())
    generator = torch.Generator().manual_seed(0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        other.grad = one.grad.clone()
    optimizer_of(ours).step()
    named = dict(theirs.named_parameters())
    matrices = {name for name, one in named.items() if one.ndim == 2 and ".layers." in name}
    assert len(matrices) == 2 * 7
    muon = torch.optim.Muon(
        [named[name] for name in matrices],
        lr=1e-2,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [
        {
            "params": [one for name, one in named.items() if name not in matrices and one.ndim > 1],
            "weight_decay": 0.1,
        },
        {"params": [one for one in named.values() if one.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95))
    muon.step()
    adamw.step()
    for name, one in ours.named_parameters():
        assert torch.equal(one, named[name]), name


def test_a_gain_a_head_that_decays_is_no_matrix():
    model = model_of(config_of(value_norm="per_head", decay_unshared_gain=True))
    gains = {id(one) for name, one in model.named_parameters() if name.endswith("value_norm.gain")}
    assert gains
    for part in optimizer_of(model, unshared_gain=False)._parts:
        held = gains & {id(one) for group in part.param_groups for one in group["params"]}
        assert held == (set() if isinstance(part, torch.optim.Muon) else gains)


def test_a_schedule_reaches_both():
    optimizer = optimizer_of(model_of(config_of()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3}
    assert [group["lr"] for part in optimizer._parts for group in part.param_groups] == [5e-3] * 3


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """The training with some changes, which is made once for the tests of this file."""
    return functools.cache(
        lambda **changes: trained(
            tmp_path_factory.mktemp("variant") / "run", config=config_of(**changes)
        )
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "muon"},
        {"norm": "single_scale"},
        {"attention": "off_by_one"},
        {"attention": "key_bias"},
    ],
)
def test_a_variant_trains_and_is_another_training(changes, variant):
    plain, varied = variant(), variant(**changes)
    losses = [frame["eval_loss"].dropna() for frame in (plain.frame, varied.frame)]
    assert losses[1].iloc[-1] < losses[1].iloc[0]
    assert not losses[0].equals(losses[1])


def test_a_key_bias_is_learned_without_decay_and_read_from_its_checkpoint_on_both_paths(variant):
    lens = load(variant(attention="key_bias").checkpoints[12])
    bias = lens.layer(1).self_attn.key_bias
    assert (bias != 0).all()
    assert {name for name in undecayed(lens.plain) if "key_bias" in name} == {
        f"model.layers.{layer}.self_attn.key_bias" for layer in range(2)
    }
    tokens = torch.arange(12)[None]
    lens.plain.set_attn_implementation("eager")
    with torch.no_grad():
        expected = lens.plain(tokens, use_cache=False).logits
        assert_rows_close(lens.bridge(tokens, use_cache=False), expected)
        bias.zero_()
        assert not torch.allclose(lens.plain(tokens, use_cache=False).logits, expected)


def test_a_training_that_was_stopped_goes_on_bit_for_bit(variant, tmp_path):
    config, whole = config_of(optimizer="muon"), variant(optimizer="muon")
    parted = trained(stop_at(tmp_path / "parted", 7, config=config), config=config)
    columns = ["step", "loss", "eval_loss", "lr"]
    pd.testing.assert_frame_equal(parted.frame[columns], whole.frame[columns])
    first, second = (
        load_file(str(run.checkpoints[12] / "model.safetensors")) for run in (whole, parted)
    )
    assert all(torch.equal(one, second[name]) for name, one in first.items())

"""Contrasts: one switch at a time, and differences paired by seed."""

import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import InputError
from sink_lens.identity.switches import SWITCHES, switched_configs, variant_table
from sink_lens.identity.untrained_models import UntrainedConfig


def test_each_arm_differs_from_the_base_in_one_switch():
    base = UntrainedConfig(style="llama")
    variants = switched_configs(base, switches=("activation", "gating", "attention"))
    assert [variant.label for variant in variants] == [
        "llama,activation=silu", "llama,activation=relu", "llama,activation=gelu", "llama,activation=tanh",
        "llama,activation=identity", "llama,activation=silu,gated=False", "llama,activation=silu,attention=False",
    ]  # fmt: skip
    assert (variants[0].d_mlp, variants[5].d_mlp) == (
        2048,
        3072,
    )  # as many weights without the gate
    own, without = switched_configs(UntrainedConfig(style="llama", d_mlp=768), switches=("gating",))
    assert (own.d_mlp, without.d_mlp) == (768, 1152)


def test_every_switch_has_another_value_than_the_base():
    assert all(
        len(switched_configs(UntrainedConfig(style="llama"), switches=(one,))) > 1
        for one in SWITCHES
    )


def test_what_cannot_be_switched_is_refused():
    with pytest.raises(InputError, match="there is no switch colour; need some of activation"):
        switched_configs(UntrainedConfig(), switches=("colour",))
    with pytest.raises(InputError, match="GPT-2 has no gate"):
        switched_configs(UntrainedConfig(), switches=("gating",))


def summary(values):
    long = pd.DataFrame(values).rename_axis("seed").reset_index().melt("seed", var_name="variant")
    return long.assign(measure="m")


def test_differences_are_paired_by_seed():
    table = variant_table(summary({"a": [1.0, 5.0, 9.0], "b": [2.0, 6.0, 10.1]})).set_index(
        "variant"
    )
    assert table.loc["a", "mean"] == 5
    # differences 1, 1, 1.1: mean 31 / 30, standard error 1 / 30, t = 4.303 with 2 degrees of freedom
    assert table.loc["b", "difference"] == pytest.approx(31 / 30)
    assert table.loc["b", "difference_low"] == pytest.approx(31 / 30 - 4.303 / 30, abs=1e-3)
    assert table.loc["b", "low"] < 0 < table.loc["b", "difference_low"]
    assert np.isnan(table.loc["a", "difference"])
    # one seed has no interval
    table = variant_table(summary({"a": [1.0], "b": [2.0]})).set_index("variant")
    assert table.loc["b", "difference"] == 1
    assert np.isnan(table.loc["b", "difference_low"])

"""Scores of earlier weights beside passes of later ones: numbers of two models, which are refused."""

import pytest
import torch

from sink_lens import circuits, wrap
from sink_lens.edits.metrics import logit_difference
from sink_lens.errors import ModelError
from sink_lens.patching.attribution import attribution_patch
from tests.tiny_families import tiny


@pytest.mark.parametrize("change", ["step", "data"])
def test_old_scores_are_not_compared_with_patches_of_weights_that_were_changed_in_place(change):
    model = tiny("llama", num_hidden_layers=2)
    first = torch.arange(3, 12) + torch.arange(2)[:, None]
    lens, pair = wrap(model), (first, first + 1)
    metric = logit_difference(5, 6)
    found = circuits.find(lens, *pair, metric=metric, method="eap", edges=20)
    screened = attribution_patch(lens, *pair, site="z", metric=metric)
    later = {
        "check": lambda: found.check(edges=2, pairs=1),
        "check_nodes": lambda: found.check_nodes(pairs=1),
        "evaluate": lambda: found.evaluate([0.5], random=0),
        "sample": lambda: screened.sample(2, generator=torch.Generator().manual_seed(0)),
    }
    for ask in later.values():
        ask()
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        (weight if change == "step" else weight.data).mul_(3)
    for name, ask in later.items():
        with pytest.raises(ModelError, match=r"changed in place after the .* make them again"):
            pytest.fail(f"{name} gave {ask()}")
    assert (
        circuits.find(lens, *pair, metric=metric, method="eap", edges=20)
        .check(edges=2, pairs=1)
        .frame["exact"]
        .notna()
        .all()
    )

"""``scalar`` is a change of single entries of the down-projection, and of nothing else."""

import copy
import itertools

import pytest
import torch
from rounding import assert_moved, assert_rows_close

from sink_lens.edits.constructors import scalar, scale
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.models.families import family_of
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import TINY_FAMILIES

DENSE = tuple(family for family in TINY_FAMILIES if family != "gpt_oss")
"""Families whose down-projection is a module; experts are in tests/models/test_experts.py."""
LAYER, POSITIONS = 1, [5, 0, 11]
ENTRIES = {"layer": LAYER, "neurons": [60, 3], "dimensions": [7, 0, 41]}
TOKENS = torch.randint(3, VOCAB_SIZE, (2, 14), generator=torch.Generator().manual_seed(3))


def logits(lens, edits=()):
    return run_with(lens, TOKENS, edits, logits=True, loss=False).logits


def down(model):
    row = family_of(type(model).__name__)
    path = ".".join(name for name in (row.mlp, row.down) if name)
    return model.get_submodule(row.layers)[LAYER].get_submodule(path), row.transposed


@torch.no_grad()
def weighted(model, factor):
    """A copy of the raw model with entries of one down-projection multiplied, one by one."""
    model = copy.deepcopy(model)
    module, transposed = down(model)
    for neuron, dimension in itertools.product(ENTRIES["neurons"], ENTRIES["dimensions"]):
        module.weight[(neuron, dimension) if transposed else (dimension, neuron)] *= factor
    return model


@pytest.mark.parametrize("factor", [0.0, -1.5])
@pytest.mark.parametrize("family", DENSE)
def test_it_is_the_change_of_the_weights(lens_of, raw_of, raw_run, family, factor):
    lens = lens_of(family)
    found = logits(lens, scalar(lens, **ENTRIES, factor=factor))
    assert_rows_close(found, raw_run(family, TOKENS, model=weighted(raw_of(family), factor)))
    assert_moved(found, logits(lens))


@pytest.mark.parametrize("family", DENSE)
def test_at_positions_it_is_the_change_of_the_weights_there_alone(lens_of, raw_of, raw_run, family):
    changed, _ = down(weighted(raw_of(family), 0.0))
    seen = []

    @torch.no_grad()
    def there(view):
        view[:, POSITIONS] = changed(seen[-1])[:, POSITIONS]

    changes = [
        ("neurons", LAYER, lambda view: seen.append(view.clone())),
        ("down_out", LAYER, there),
    ]
    one = scalar(lens_of(family), **ENTRIES, positions=POSITIONS)
    assert_rows_close(logits(lens_of(family), one), raw_run(family, TOKENS, changes))


def test_it_goes_together_with_edits_of_the_neurons_in_either_order(lens_of, raw_of, raw_run):
    lens = lens_of("llama")
    entries = scalar(lens, **ENTRIES)
    assert entries.label.startswith("6 entries")
    double = scale("neurons", 2.0, layers=[LAYER])
    changes = [("neurons", LAYER, lambda view: view.mul_(2))]
    expected = raw_run("llama", TOKENS, changes, model=weighted(raw_of("llama"), 0.0))
    assert_rows_close(logits(lens, [entries, double]), expected)
    assert_rows_close(logits(lens, [double, entries]), expected)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"layer": 3}, "layer 3 does not exist; need 0 to 2"),
        ({"neurons": [80]}, "neuron 80 does not exist; need 0 to 79"),
        ({"dimensions": [-1]}, "dimension -1 does not exist; need 0 to 47"),
        ({"neurons": [4, 4]}, r"the neurons \[4, 4\]; need at least one, and each once"),
        ({"dimensions": []}, r"the dimensions \[\]; need at least one"),
    ],
)
def test_what_does_not_exist_is_refused(lens_of, changed, text):
    with pytest.raises(InputError, match=text):
        scalar(lens_of("llama"), **({"layer": 0, "neurons": [0], "dimensions": [0]} | changed))

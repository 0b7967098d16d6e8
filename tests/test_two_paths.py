"""Two code paths give one number within rounding, in every family and on a CPU of any order of sums; no mistake does.

On this CPU itself ``engine/test_cone.py``, ``edits/test_constructors.py`` and ``models/test_sites.py`` compare them.
The bound says something only if a mistake breaks it: each edit moves its number by a hundred times the bound, and
nine mistakes are planted.
"""

from dataclasses import replace

import pytest
import torch
from hostile_cpu import HostileCPU
from rounding import CLOSE, MOVED
from tiers import first
from two_paths import PATHS, bridge_and_raw_model, sweep_and_single_runs

from sink_lens.edits.hooks import Applied
from sink_lens.edits.part import Part
from sink_lens.engine.layout import Attending, Layout
from sink_lens.errors import SiteError
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES


def furthest(pairs):
    return max((pair.gap, pair.name) for pair in pairs)


@pytest.mark.parametrize(
    ("paths", "family"),
    [
        (paths, family)
        for paths in PATHS
        for family in (*TINY_FAMILIES, *(MORE_FAMILIES if paths is sweep_and_single_runs else ()))
    ],
)
def test_two_paths_agree_where_every_product_is_summed_in_another_order_and_every_edit_moves_its_number(
    paths, family
):
    with HostileCPU():
        pairs = list(paths(family))
    assert furthest(pairs) <= (CLOSE, "")
    assert min((pair.moved, pair.name) for pair in pairs) >= (
        MOVED,
        "",
    )  # of several numbers of a cell, the best


def test_the_hostile_cpu_gives_one_path_the_same_bits_and_two_paths_others():
    a, b = (
        torch.randn(size, generator=torch.Generator().manual_seed(1))
        for size in ((40, 64), (64, 32))
    )
    with HostileCPU():
        products = [a @ b, a @ b, (a[:20] @ b), torch.zeros(4, 64) @ b]
    assert torch.equal(products[0], products[1])
    assert not torch.equal(products[0][:20], products[2])
    assert not products[3].any()
    assert 0 < (products[0] - a @ b).abs().max() < 1e-5


def steps_with(change):
    """Edits whose steps of a pass are changed."""
    right = Applied.steps

    def steps(self, **options):
        return change(right(self, **options), self.lens.n_layers)

    return Applied, "steps", steps


def index_with(**shifts):
    """Edits of other positions, heads or keys than those that were asked for."""
    right = Part.index_mesh

    def index_mesh(self, tensor, *, begin=0):
        moved = {
            name: tuple(place + shift for place in getattr(self, name))
            for name, shift in shifts.items()
            if getattr(self, name) is not None
        }
        return right(replace(self, **moved), tensor, begin=begin)

    return Part, "index_mesh", index_mesh


def wrong_mask():
    """Every query of a cell also sees the next token."""
    right = Attending.mask

    def mask(self, layer, *, like):
        found = right(self, layer, like=like)
        return torch.cat([found[..., 1:, :], found[..., -1:, :]], dim=-2)

    return Attending, "mask", mask


def positions_counted_from_the_begin():
    """What is rotated, or looked up, begins at 0 in every cell."""
    right = Layout.row_places

    def row_places(self, device):
        sequences, positions, _ = right(self, device)
        moved = (positions - self.first_position).clamp(min=0)
        return sequences, moved, moved - self.first_position

    return Layout, "row_places", row_places


def clean_keys_one_position_off():
    right = Layout.complete_with_baseline

    def complete_with_baseline(self, tensor, clean):
        return right(self, tensor, None if clean is None else clean.roll(1, dims=2))

    return Layout, "complete_with_baseline", complete_with_baseline


def cells_swapped():
    """Cells that share a forward get each other's rows."""
    right = Layout.view_cell

    def view_cell(self, tensor, cell):
        alike = [other for other, begin in enumerate(self.begins) if begin == self.begins[cell]]
        return right(self, tensor, alike[-1 - alike.index(cell)])

    return Layout, "view_cell", view_cell


PLANTED = {
    "dropped edit": (bridge_and_raw_model, lambda: steps_with(lambda steps, n_layers: [])),
    "wrong layer": (
        bridge_and_raw_model,
        lambda: steps_with(
            lambda steps, n: [replace(one, layer=(one.layer + 1) % n) for one in steps]
        ),
    ),
    "edit made twice": (
        bridge_and_raw_model,
        lambda: steps_with(lambda steps, n_layers: [*steps, *steps]),
    ),
    "wrong position": (bridge_and_raw_model, lambda: index_with(positions=-1)),
    "wrong head": (bridge_and_raw_model, lambda: index_with(heads=1)),
    "wrong mask": (sweep_and_single_runs, wrong_mask),
    "positions counted from the begin": (sweep_and_single_runs, positions_counted_from_the_begin),
    "clean keys one position off": (sweep_and_single_runs, clean_keys_one_position_off),
    "cells swapped": (sweep_and_single_runs, cells_swapped),
}


@pytest.mark.filterwarnings("ignore:the edit:UserWarning")  # the numbers alone are to tell
@pytest.mark.parametrize("where", first(["llama", "gpt2", "gemma2"]))
@pytest.mark.parametrize("mistake", PLANTED)
def test_no_planted_mistake_passes_the_bound(mistake, where, monkeypatch, record_property):
    paths, change = PLANTED[mistake]
    monkeypatch.setattr(*change())
    if mistake == "dropped edit":
        with pytest.raises(SiteError, match="was never shown"):
            furthest(paths(where))
        return
    off, name = furthest(paths(where))
    record_property(where, f"{off:.1e} in {name}: {off / CLOSE:,.0f} times the bound")
    assert off >= MOVED, name

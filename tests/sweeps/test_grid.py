"""The cells of a grid: the product of its axes, their controls, and what is refused before anything runs."""

import json

import pytest
import torch
from lenses import lens_of
from safetensors.torch import save_file

from sink_lens.data.tokens import TokenBatch
from sink_lens.edits.constructors import edit, scale, zero
from sink_lens.edits.references import References
from sink_lens.engine.cells import cell_of_edits
from sink_lens.errors import InputError, SiteError
from sink_lens.sweeps.cells import cell_of, cells_of
from sink_lens.sweeps.grid import EditGrid, Grid, control_axis, control_group

LENGTH = 12
TOKENS = TokenBatch.from_tensor(torch.full((1, LENGTH), 5))


def places(lens, **grid):
    return list(EditGrid(**grid).specs(lens, n_positions=LENGTH))


def cells(lens, *grids, **options):
    return Grid.of(*grids, **options).specs(lens, n_positions=LENGTH)


def numbered(lens, *grids, **options):
    return cells_of(Grid.of(*grids, **options), lens, TOKENS)


def drawn_of(spec):
    """The indices on the axis on which controls are drawn."""
    return spec.part.indices_on(control_axis(spec.part))


def test_the_last_axis_runs_fastest_and_options_faster_than_places():
    found = places(
        lens_of("llama"), layers="0-1", positions=[[2, 3]], units=[5, "7-8"], site="neurons"
    )
    assert [(place.part.layers, place.part.positions, place.part.units) for place in found] == [
        ((layer,), (2, 3), units) for layer in (0, 1) for units in ((5,), (7, 8))
    ]
    assert {(one.kind, one.part.heads, one.part.keys, one.options["factor"]) for one in found} == {
        ("zero", *[None] * 3)
    }
    found = places(
        lens_of("llama"),
        kind="amplify",
        layers="0-1",
        positions=[3],
        factors=(2.0, 5.0),
        centres=("values", "none"),
    )
    assert [
        (place.part.layers, place.options["factor"], place.options["centre"]) for place in found
    ] == [
        ((layer,), factor, centre)
        for layer in (0, 1)
        for factor in (2.0, 5.0)
        for centre in ("values", "none")
    ]


def test_negative_places_count_from_the_end():
    found = places(
        lens_of("llama"), site="pattern", layers=-1, positions=[-1, [-3, 2]], keys=[[-2, 0]]
    )
    assert [(one.part.layers, one.part.positions, one.part.keys) for one in found] == [
        ((2,), (LENGTH - 1,), (0, LENGTH - 2)),
        ((2,), (2, LENGTH - 3), (0, LENGTH - 2)),
    ]
    with pytest.raises(InputError, match="-13 does not exist; need 0 to 11"):
        places(lens_of("llama"), positions=-13)
    with pytest.raises(InputError, match="names a value twice"):
        places(lens_of("llama"), positions=[11, -1])


def test_left_out_axes_are_each_layer_and_all_of_the_rest():
    found = places(lens_of("llama"))
    assert [place.part.layers for place in found] == [(0,), (1,), (2,)]
    assert all(
        (place.part.positions, place.part.units, place.options["seed"], place.options["centre"])
        == (None,) * 4
        for place in found
    )
    assert found[0].part.site == "neurons"


@pytest.mark.parametrize(
    ("grid", "size"),
    [
        ({"site": "resid_post", "units": "each", "layers": 1}, 48),
        ({"site": "z", "heads": "each", "positions": "each"}, 3 * 4 * LENGTH),
        ({"site": "k", "heads": "each", "units": "each"}, 3 * 2 * 12),
        (
            {
                "site": "pattern",
                "keys": "each",
                "positions": "4-5",
                "heads": [[0, 1]],
                "layers": "all",
            },
            LENGTH * 2,
        ),
        ({"site": "final", "units": "each"}, 48),
        ({"kind": "scale", "site": "q", "factors": (0.0, 2.0, -1.0)}, 9),
        ({"kind": "resample", "site": "v", "seeds": (0, 1)}, 6),
        ({"kind": "isolate", "positions": "each"}, 3 * (LENGTH - 1)),  # all but the first
        ({"kind": "amplify", "positions": 2, "factors": (2.0,)}, 9),  # three centres
    ],
)
def test_the_size_is_the_number_of_places_and_of_distinct_cells(grid, size):
    lens = lens_of("llama")
    assert EditGrid(**grid).n_edits(lens, n_positions=LENGTH) == size == len(places(lens, **grid))
    found, _ = cells(lens, EditGrid(**grid), controls=0)
    assert len({cell.identity for cell in found}) == size


def test_a_factor_without_a_point_is_the_same_cell():
    whole, point = (
        cells(lens_of("llama"), EditGrid(kind="scale", factors=[given])) for given in (2, 2.0)
    )
    assert [cell.identity for cell in whole[0]] == [cell.identity for cell in point[0]]


def test_the_size_and_the_rest_of_a_grid_are_refused():
    with pytest.raises(InputError, match="controls is -1; need a whole number from 0 on"):
        Grid(edits=(EditGrid(),), controls=-1)
    with pytest.raises(InputError, match="the grid has no edits; need at least one"):
        cells(lens_of("llama"))
    large = EditGrid(
        kind="scale", units="each", positions="each", factors=tuple(torch.arange(1000.0).tolist())
    )
    with pytest.raises(
        InputError, match="the grid has 2,880,000 cells; need at most 1,000,000: split it"
    ):
        cells(lens_of("llama"), large)
    with pytest.raises(
        InputError, match=r"the cell 'zero neurons \(layer 1, unit 4\)' twice; need each once"
    ):
        cells(
            lens_of("llama"), EditGrid(layers=1, units=[4]), EditGrid(layers=[1, 2], units=[3, 4])
        )
    cells(
        lens_of("llama"),
        EditGrid(layers=1, units=[4]),
        EditGrid(kind="scale", factors=(0.0,), layers=1, units=[4]),
    )


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (
            {"kind": "erase"},
            "no kind of edit 'erase'; need one of zero, mean_ordinary, mean_all, mean_aligned, resample, scale, add, ",
        ),
        ({"units": 80}, "units of zero neurons: 80 does not exist; need 0 to 79"),
        ({"site": "k", "heads": 2}, "heads of zero k: 2 does not exist; need 0 to 1"),
        ({"heads": 0}, "'neurons' has the axes 'batch position d_mlp', no heads; leave heads out"),
        (
            {"site": "final", "layers": 0},
            "'final' is computed once, after the last layer; leave layers out",
        ),
        (
            {"kind": "isolate", "site": "z"},
            "isolate edits 'scores'; found site = 'z': leave it out",
        ),
        (
            {"kind": "mean_all", "site": "pattern"},
            "mean_all puts in values by token, and 'pattern' has the axes 'batch head",
        ),
        ({"factors": (2.0,)}, "zero takes no factors; leave them out"),
        ({"kind": "scale"}, r"scale needs factors, each once; found \[\]"),
        ({"kind": "set", "factors": (1, 1.0)}, r"set needs factors, each once; found \[1.0, 1.0\]"),
        ({"kind": "scale", "factors": 2.0}, "factors of scale is 2.0; need a list"),
        ({"kind": "scale", "factors": ("2",)}, "a factor of scale is '2'; need numbers"),
        ({"kind": "scale", "factors": (True,)}, "a factor of scale is True; need numbers"),
        (
            {"kind": "scale", "factors": (float("nan"),)},
            "a factor of scale is nan; need numbers below 1e38",
        ),
        ({"kind": "set", "factors": (10**400,)}, "need numbers below 1e38"),
        (
            {"kind": "resample", "seeds": (-1,)},
            "a seed of resample is -1; need whole numbers from 0 on",
        ),
        ({"kind": "resample", "seeds": (0.5,)}, "a seed of resample is 0.5; need whole numbers"),
        (
            {"kind": "add", "factors": (1.0,), "vectors": ("v.pt",)},
            "a vector of add is 'v.pt'; need paths of",
        ),
        (
            {"kind": "add", "factors": (1.0,), "vectors": ("no.safetensors",)},
            "there is no file no.safetensors; need",
        ),
        ({"kind": "isolate"}, "isolate needs positions, each from 1 on; found all"),
        (
            {"kind": "isolate", "positions": 0},
            "positions of isolate scores: 0 does not exist; need 1 to",
        ),
        (
            {"kind": "amplify", "positions": 1, "centres": ("mean",)},
            "a centre of amplify is 'mean'; need some of values",
        ),
    ],
)
def test_what_a_grid_cannot_mean_is_refused(grid, text):
    one = EditGrid()
    for (
        name,
        value,
    ) in (
        grid.items()
    ):  # as a file gives it: the type hook of the tests would refuse some values before
        object.__setattr__(one, name, value)
    with pytest.raises(InputError, match=text):
        one.__post_init__()
        cells(lens_of("llama"), one)


def test_a_site_that_the_family_lacks_is_refused():
    with pytest.raises(SiteError, match="no site 'gate'"):
        cells(lens_of("gpt2"), EditGrid(site="gate"))


def test_controls_are_of_the_cell_s_group_with_none_of_its_units_and_no_more_than_asked_for():
    found = numbered(
        lens_of("llama"),
        EditGrid(layers=1, units=[[1, 2], 5]),
        EditGrid(site="mlp_out"),
        controls=2,
    )
    drawn = [found.columns[number]["where"] for number in found.drawn]
    assert (found.n, len(found.drawn), len(set(found.drawn))) == (5, 10, 10)
    for number, of_cell in enumerate(found.controls):
        assert len(of_cell) == (2 if number < 2 else 0)
        assert all(one in found.drawn[5 * number : 5 * number + 5] for one in of_cell)
    assert all("unit" in where for where in drawn)
    few = numbered(lens_of("llama"), EditGrid(site="k", layers=1, heads=[0, 1]), controls=4)
    assert few.drawn == [0, 1] or few.drawn == [1, 0]  # a control that is also a cell is run once
    assert few.controls == [[1], [0]]  # and is none of itself


def test_a_control_is_made_where_it_was_drawn():
    lens = lens_of("llama")
    grid = EditGrid(layers=1, positions=[[2, 3]], units=[[3, 9]])
    _, controls = cells(lens, grid, controls=2)
    found = numbered(lens, grid, controls=2)
    for number, control in zip(found.drawn, controls, strict=True):
        (one,) = found.every[number].make(References(lens, TOKENS))
        assert (one.layers, one.positions, one.units) == ((1,), (2, 3), drawn_of(control))


def test_cells_of_as_many_units_in_one_layer_share_their_controls():
    found, controls = cells(
        lens_of("llama"), EditGrid(layers=1, units=[1, 2, 3, [4, 5]]), controls=3
    )
    assert len({control_group(cell, axis="unit") for cell in found}) == 2
    assert len(controls) == 2 * 6  # three to spare, for those that turn out to be the cell itself
    assert sorted({len(drawn_of(control)) for control in controls}) == [1, 2]


@pytest.mark.parametrize(
    ("grid", "size"),
    [
        ({"site": "z", "heads": [1], "positions": [[2, 3]]}, 4),  # the narrowest axis: heads
        ({"site": "k", "heads": [1]}, 2),
        ({"site": "resid_post", "positions": [4]}, LENGTH),
        ({"site": "z", "heads": [1], "units": [3]}, 12),
    ],
)
def test_controls_are_drawn_in_the_narrowest_axis(grid, size):
    found, controls = cells(lens_of("llama"), EditGrid(layers=1, **grid), controls=20)
    assert {drawn_of(control) for control in controls} == {
        (index,) for index in range(size)
    }  # every one, each once
    axis = next(name for name in ("unit", "head", "position") if f"{name}s" in grid)
    assert {control_axis(control.part) for control in controls} == {axis}
    assert drawn_of(found[0]) in {drawn_of(control) for control in controls}


def test_controls_leave_out_what_cannot_be_one():
    _, controls = cells(
        lens_of("llama"), EditGrid(kind="isolate", layers=1, positions=[4]), controls=20
    )
    assert {drawn_of(control) for control in controls} == {
        (position,) for position in range(1, LENGTH)
    }
    grid = Grid.of(EditGrid(site="mlp_out", layers=1, positions=[2]), controls=20)
    _, controls = grid.specs(lens_of("llama"), n_positions=LENGTH, shortest=4)
    assert {drawn_of(control) for control in controls} <= {(position,) for position in range(4)}
    found = numbered(lens_of("llama"), EditGrid(site="pattern", keys=[0]), EditGrid(site="mlp_out"))
    assert found.drawn == []
    assert {tuple(own) for own in found.controls} == {()}


def test_draws_depend_on_the_seed_and_on_nothing_else():
    lens = lens_of("llama")
    grid = EditGrid(units=[[3, 9, 40]])

    def drawn(*grids, **options):
        return {cell.identity for cell in cells(lens, *grids, **options)[1]}

    torch.rand(1)
    assert drawn(grid, seed=1) == drawn(grid, seed=1)
    assert drawn(grid, seed=1) < drawn(
        EditGrid(site="z", heads=[1]), grid, seed=1
    )  # whatever stands beside it
    assert drawn(grid, seed=1).isdisjoint(drawn(grid, seed=2))
    by_layer = [cells(lens, EditGrid(units=[[3, 9, 40]], layers=layer))[1] for layer in (0, 1)]
    units = [{drawn_of(one) for one in layer} for layer in by_layer]
    assert units[0].isdisjoint(units[1])


def test_a_grid_is_written_and_read_again():
    lens = lens_of("llama")
    grid = Grid.of(
        EditGrid(kind="scale", site="z", heads=[[0, 1], 2], factors=(0.5, 2.0)),
        EditGrid(kind="amplify", positions="2-3", factors=(2.0,), centres=("none",)),
        controls=2,
        seed=7,
    )
    written = json.loads(json.dumps(grid.config()))
    again = Grid.of(*(EditGrid(**one) for one in written.pop("edits")), **written)
    one, other = (found.specs(lens, n_positions=LENGTH) for found in (grid, again))
    for mine, theirs in zip(one, other, strict=True):
        assert [cell.identity for cell in mine] == [cell.identity for cell in theirs]


def test_a_grid_says_which_vector_it_adds_and_not_only_the_file_s_name(tmp_path):
    path = tmp_path / "one.safetensors"
    found = []
    for size in (3, 4):
        save_file({"direction": torch.ones(size)}, path)
        found.append(Grid.of(EditGrid(kind="add", factors=(1.0,), vectors=(str(path),))).config())
    assert found[0] != found[1]
    assert [one | {"vector_hashes": None} for one in found] == [
        found[0] | {"vector_hashes": None}
    ] * 2


def test_a_cell_of_one_s_own_is_its_name_its_columns_and_its_places():
    edits = (zero("z", layers=[1], heads=[0]), scale("final", 2.0))
    cell = cell_of(edits, name="mine", dose=3)
    assert cell.columns == {"name": "mine", "dose": 3}
    assert cell_of_edits(cell.edits).touches == (("z", (1,)), ("final", None))
    assert cell.edits is edits
    others = [cell_of(edits, name="yours", dose=3), cell_of(edits, name="mine", dose=4)]
    changed = ((zero("z", layers=[1], heads=[1]), edits[1]), edits[0])
    others += [cell_of(some, name="mine", dose=3) for some in changed]
    assert len({cell.identity, *(other.identity for other in others)}) == 5
    assert cell_of(edits, name="mine", dose=3).identity == cell.identity
    one = edit("z", lambda x, at: x, reads="pattern", layers=[2])
    assert cell_of_edits(one).touches == (("z", (2,)), ("pattern", (2,)))


def test_a_cell_without_edits_or_name_or_with_a_column_of_the_numbers_is_refused():
    for edits, name in (((), "mine"), (zero("z"), "")):
        with pytest.raises(InputError, match="a cell needs at least one edit, and a name"):
            cell_of(edits, name=name)
    with pytest.raises(
        InputError, match="columns of a cell are called effect, n, as those of numbers are"
    ):
        cell_of(zero("z"), name="mine", effect=1.0, n=3, dose=2)

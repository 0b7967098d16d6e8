"""Every kind of edit in a grid is the same edit made by hand."""

import pytest
import torch
from rounding import assert_close
from safetensors.torch import save_file

from sink_lens.activations.record import capture
from sink_lens.edits.amplification import centring_means
from sink_lens.edits.constructors import edit, resample
from sink_lens.edits.metrics import loss, norm, sink_mass
from sink_lens.edits.named_edits import KINDS
from sink_lens.engine.forward import run_with
from sink_lens.sweeps.cells import grid_cells
from sink_lens.sweeps.grid import EditGrid, Grid

METRICS = (sink_mass(0), norm(0, layer=2), loss())


def token_mean(lens, tokens, site, layer):
    values = capture(lens, tokens, sites=[site], layers=[layer])[site, layer]
    real = torch.cat(
        [row[:length] for row, length in zip(values, tokens.lengths.tolist(), strict=True)]
    )
    return real.double().mean(0).float()


def written_out(lens, tokens, *, vector):
    """The kinds with their options, beside the edits written out."""
    mean = token_mean(lens, tokens, "neurons", 1)
    aligned = (
        capture(lens, tokens, sites=["neurons"], layers=[1])["neurons", 1]
        .double()
        .mean(0)
        .float()[[2, 3]]
    )
    final = token_mean(lens, tokens, "final", 0)
    other = {
        layer: capture(lens, tokens, sites=["k"], layers=[layer])["k", layer] for layer in (0, 2)
    }
    part = {layer: values[:, [2, 3]][:, :, [1]] for layer, values in other.items()}
    mu = centring_means(lens, seed=0)
    least = torch.finfo(torch.float32).min

    def isolated(scores, at):
        hidden = torch.arange(scores.shape[-1]) < at.positions[:, None]
        return torch.where(hidden, torch.tensor(least), scores)

    def amplified(z, at):
        centre = mu.aggregated[at.layer][[1]]
        return centre + 3.0 * (z - centre)

    generator = torch.Generator().manual_seed(5)
    at = {"layers": [1], "positions": [2, 3]}
    return {
        "zero": (
            EditGrid(layers=1, positions=[[2, 3]], units=[[4, 9]]),
            edit("neurons", lambda x, at: x * 0.0, units=[4, 9], **at),
        ),
        "mean_all": (
            EditGrid(kind="mean_all", layers=1, units=[[4, 9]]),
            edit("neurons", lambda x, at: mean[[4, 9]].expand(x.shape), layers=[1], units=[4, 9]),
        ),
        "mean_aligned": (
            EditGrid(kind="mean_aligned", layers=1, positions=[[2, 3]], units=[[4, 9]]),
            edit("neurons", lambda x, at: aligned[:, [4, 9]].expand(x.shape), units=[4, 9], **at),
        ),
        "mean_ordinary of the last norm": (  # an untrained model has no sink, so every token is ordinary
            EditGrid(kind="mean_ordinary", site="final", positions=[[2, 3]]),
            edit("final", lambda x, at: final.expand(x.shape), positions=[2, 3]),
        ),
        "resample": (
            EditGrid(
                kind="resample",
                site="k",
                layers=[[0, 2]],
                positions=[[2, 3]],
                heads=[1],
                seeds=(5,),
            ),
            resample("k", part, generator=generator, positions=[2, 3], heads=[1]),
        ),
        "scale": (
            EditGrid(
                kind="scale", site="z", layers=1, positions=[[2, 3]], heads=[[0, 3]], factors=(2.5,)
            ),
            edit("z", lambda x, at: x * 2.5, heads=[0, 3], **at),
        ),
        "add": (
            EditGrid(
                kind="add",
                site="resid_post",
                layers=1,
                positions=[[2, 3]],
                factors=(-2.0,),
                vectors=[vector],
            ),
            edit("resid_post", lambda x, at: x - 2.0 * torch.arange(48.0), **at),
        ),
        "set": (
            EditGrid(
                kind="set", site="pattern", layers=1, positions=[[2, 3]], keys=[0], factors=(0.25,)
            ),
            edit("pattern", lambda x, at: x * 0.0 + 0.25, keys=[0], **at),
        ),
        "isolate": (
            EditGrid(kind="isolate", layers=[[0, 1]], positions=[[2, 3]]),
            edit("scores", isolated, layers=[0, 1], positions=[2, 3]),
        ),
        "amplify": (
            EditGrid(
                kind="amplify",
                layers=1,
                positions=[[2, 3]],
                heads=[1],
                factors=(3.0,),
                centres=("aggregated",),
            ),
            edit("z_raw", amplified, heads=[1], **at),
        ),
        "amplify from nowhere": (
            EditGrid(
                kind="amplify", layers="all", positions=["0-4"], factors=(3.0,), centres=("none",)
            ),
            edit("z_raw", lambda x, at: x * 3.0, positions=range(5)),
        ),
    }


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_kind_is_the_edit_by_hand(
    lens_of, tokens_of, engine_of, swept, measured, tmp_path, family
):
    lens, tokens, vector = lens_of(family), tokens_of(), str(tmp_path / "steering.safetensors")
    save_file({"direction": torch.arange(48.0)}, vector)
    pairs = written_out(lens, tokens, vector=vector)
    assert {name.split()[0] for name in pairs} == set(KINDS)
    for name, (grid, one) in pairs.items():
        (cell,) = grid_cells(Grid.of(grid, controls=0), lens, n_positions=tokens.n_positions).every
        engine = engine_of(lens, tokens, [cell], METRICS)
        found = swept(engine)
        assert engine.run(engine.blocks[0])["changed"].all(), name
        outcome = run_with(lens, tokens, one, sites=("resid_post",), batch_size=3)
        for metric in METRICS:
            assert_close(
                found[0, metric.name], measured(metric, outcome, keys=(0,), prompts=3), name
            )


def test_seeds_of_resampling_are_other_orders(lens_of, tokens_of, engine_of, swept):
    lens, tokens = lens_of("llama"), tokens_of((8,) * 5)
    grid = EditGrid(kind="resample", site="z", layers=1, seeds=(0, 1, 2))
    cells = grid_cells(Grid.of(grid, controls=0), lens, n_positions=8).every
    found = swept(engine_of(lens, tokens, cells, [loss()]))
    again = swept(engine_of(lens, tokens, cells[::-1], [loss()]))
    for cell in range(3):
        assert_close(found[cell, "loss"], again[2 - cell, "loss"])
    assert len({tuple(found[cell, "loss"].tolist()) for cell in range(3)}) > 1


@pytest.mark.parametrize(
    ("grid", "lengths", "text"),
    [
        (
            EditGrid(kind="resample", layers=1),
            (6,),
            "needs the values of at least 2 sequences; found 1",
        ),
        (
            EditGrid(kind="resample", layers=1),
            (6, 4),
            "the shortest sequence has 4 tokens, the longest 6",
        ),
    ],
)
def test_a_cell_that_cannot_be_made_says_so(lens_of, tokens_of, engine_of, grid, lengths, text):
    lens, tokens = lens_of("llama"), tokens_of(lengths)
    cells = grid_cells(Grid.of(grid, controls=0), lens, n_positions=6).every
    engine = engine_of(lens, tokens, cells, [loss()])
    frame = engine.run(engine.blocks[0])
    assert frame["cell"].tolist() == list(engine.blocks[0].cells)
    assert all(text in error for error in frame["error"])

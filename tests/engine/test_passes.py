"""What passes unembed, what they leave behind, and cells that fail."""

import itertools
from dataclasses import replace

import pytest
import torch
from rounding import assert_close, close

from sink_lens.edits.constructors import edit, scale, set_value, zero
from sink_lens.edits.metrics import logit_difference, loss, sink_mass
from sink_lens.engine import passes
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.passes import Passes
from sink_lens.models.load import wrap
from tests.tiny_families import tiny


def cells_of(*edits):
    return [cell_of_edits(one) for one in edits]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_only_the_positions_that_are_read_are_unembedded(
    lens_of, tokens_of, engine_of, swept, monkeypatch, family
):
    lens, tokens = lens_of(family), tokens_of()  # 12, 9 and 5 tokens; and 12
    cells = cells_of(*(zero("z", layers=[1], heads=[head]) for head in (1, 2)))
    few = [logit_difference(5, 6), logit_difference(5, 7, position=2)]
    few = [replace(one, name=str(one.scored)) for one in few]
    unembedded, right = (
        [],
        passes.partial_pass,
    )  # the rows of the logits of every pass of the plain module

    def watched(*args, **options):
        out = right(*args, **options)
        unembedded.append(None if out is None else out.shape[1])
        return out

    monkeypatch.setattr(passes, "partial_pass", watched)
    found = swept(engine_of(lens, tokens, cells, few))
    # 2, 4, 8 and 11 of three sequences and 2 and 11 of one, for the clean run and for two cells
    assert sorted(rows for rows in unembedded if rows) == [2, 4, 12, 24]
    unembedded.clear()
    both = swept(engine_of(lens, tokens, cells, [*few, loss()]))  # the loss reads all of them
    assert sorted(rows for rows in unembedded if rows) == [12, 24, 36, 72]
    for cell, name in ((0, "-1"), (1, "2")):
        torch.testing.assert_close(found[cell, name], both[cell, name], rtol=1e-5, atol=1e-5)


def state_of(lens):
    """What a pass may leave behind: hooks, forwards of instances, training flags, the kernel."""
    found = [lens.plain.config._attn_implementation]
    for module in itertools.chain(lens.plain.modules(), lens.bridge.modules()):
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_with_kwargs,
        )
        found.append((module.training, "forward" in vars(module), *(tuple(one) for one in hooks)))
        found.append((len(getattr(module, "fwd_hooks", ())), len(getattr(module, "bwd_hooks", ()))))
    return found


def fails(x, at):
    raise ValueError("mine")


@pytest.mark.parametrize("path", ["blocks", "bridge"])
def test_the_model_is_left_as_it_was(tokens_of, engine_of, path):
    lens = wrap(tiny("llama"))
    lens.layer(1).mlp.train()
    before = state_of(lens)
    weights = [(tensor, tensor._version) for tensor in lens.plain.parameters()]
    for one in (
        zero("neurons", layers=[1], units=[1]),
        *(edit(site, fails, layers=[1]) for site in ("z", "mlp_out", "neurons", "pattern")),
        edit("final", fails),
        scale("resid_pre", float("nan"), layers=[1]),
    ):
        engine = engine_of(
            lens, tokens_of((6, 4)), cells_of(one, zero("k", layers=[1])), [loss()], path=path
        )
        for block in engine.blocks:
            engine.run(block)
        assert state_of(lens) == before, one
    assert all(tensor._version == version for tensor, version in weights)
    assert lens.layer(1).mlp.training
    assert not lens.layer(0).training


def test_dropout_is_off_during_a_pass(tokens_of, engine_of, swept):
    quiet, noisy = (wrap(tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)) for _ in range(2))
    noisy.plain.train()
    cells = cells_of(zero("z", layers=[1], heads=[1]))
    found = [swept(engine_of(lens, tokens_of(), cells, [loss()])) for lens in (quiet, noisy)]
    assert_close(found[0][0, "loss"], found[1][0, "loss"])
    assert noisy.plain.training


BAD = {
    "raises": (edit("z", fails, layers=[1]), "ValueError: mine"),
    "gives nan": (
        scale("z", float("nan"), layers=[1]),
        "the edit 'z x nan' of 'z' gave numbers that are not finite",
    ),
    "blocks a row": (
        set_value("scores", float("-inf"), layers=[1], positions=[5]),
        "not finite under the edits",
    ),
    "gives another shape": (
        edit("z", lambda x, at: x[:, 1:], layers=[1]),
        "need a tensor of the shape",
    ),
    "writes in place": (
        edit("z", lambda x, at: x.zero_(), layers=[1]),
        "changed its values in place",
    ),
    "wrong head": (
        zero("z", layers=[1], heads=[9]),
        "head 9 of the edit 'zero z' does not exist; need 0 to 3",
    ),
    "wrong layer": (
        zero("z", layers=[7]),
        "layer 7 of the edit 'zero z' does not exist; need 0 to 2",
    ),
    "wrong position": (
        zero("z", layers=[1], positions=[12]),
        "position 12 of the edit 'zero z' does not exist",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_cell_that_fails_is_recorded_and_the_others_keep_their_numbers(
    lens_of, tokens_of, engine_of, swept, name
):
    lens, tokens = lens_of("llama"), tokens_of()
    bad, text = BAD[name]
    good = [scale(bad.site, factor, layers=[1]) for factor in (0.5, 0.25, 0.75, 0.375, 0.875)]
    expected = swept(engine_of(lens, tokens, cells_of(*good), [loss()], pack=1))
    cells = cells_of(*good[:2], bad, *good[2:])
    engine = engine_of(lens, tokens, cells, [loss()])
    done = []
    frame = [engine.run(block, advance=done.append) for block in engine.blocks]
    assert sum(done) == 2 * len(cells)
    for part in frame:
        failed = part[part["error"].notna()]
        assert failed["cell"].tolist() == ([2] if 2 in part["cell"].tolist() else [])
        assert all(text in error for error in failed["error"])
        assert failed["value"].isna().all()
        assert not failed["changed"].any()
    for place, cell in enumerate((0, 1, 3, 4, 5)):
        values = [value for part in frame for value in part.loc[part["cell"] == cell, "value"]]
        assert values == close(expected[place, "loss"].tolist())


@pytest.mark.parametrize("name", ["wrong head", "wrong layer"])
def test_a_cell_that_would_not_be_run_is_checked_all_the_same(lens_of, tokens_of, engine_of, name):
    bad, text = BAD[name]
    engine = engine_of(
        lens_of("llama"),
        tokens_of(),
        cells_of(bad),
        [replace(sink_mass(0, layers=[0]), name="first")],
    )
    frame = engine.run(engine.blocks[0])
    assert frame["cell"].tolist() == [0]
    assert text in frame["error"][0]


def test_cells_beside_one_that_fails_are_run_once_more_each(
    lens_of, tokens_of, engine_of, monkeypatch
):
    sizes = packs_seen(monkeypatch)
    good = [
        scale("z", factor, layers=[1]) for factor in (0.5, 0.25, 0.75, 0.375, 0.875, 0.625, 0.125)
    ]
    cells = cells_of(*good[:2], edit("z", fails, layers=[1]), *good[2:])
    engine = engine_of(lens_of("llama"), tokens_of((6, 6)), cells, [loss()])
    for block in engine.blocks:
        engine.run(block)
    assert sizes == [4, 1, 1, 1, 1, 4]


@pytest.mark.parametrize(("room", "sizes"), [(5, [8, 4, 4]), (1, [8, 4, 2, *[1] * 8])])
def test_a_pack_that_the_memory_does_not_hold_is_halved(
    lens_of, tokens_of, engine_of, swept, monkeypatch, room, sizes
):
    lens, tokens = lens_of("llama"), tokens_of((6, 6))
    cells = cells_of(*(scale("z", factor / 8, layers=[1]) for factor in range(8)))
    expected = swept(engine_of(lens, tokens, cells, [loss()], pack=8))
    found = packs_seen(monkeypatch, room=room)
    values = swept(engine_of(lens, tokens, cells, [loss()], pack=8))
    assert found == sizes
    assert values.keys() == expected.keys()
    for place in expected:
        assert_close(values[place], expected[place])


def test_a_cell_that_the_memory_does_not_hold_alone_is_recorded(
    lens_of, tokens_of, engine_of, monkeypatch
):
    packs_seen(monkeypatch, room=0)
    cells = cells_of(zero("z", layers=[1]), zero("k", layers=[1]))
    engine = engine_of(lens_of("llama"), tokens_of((6, 6)), cells, [loss()])
    frame = engine.run(engine.blocks[0])
    assert frame["cell"].tolist() == [0, 1]
    assert all(error.startswith("OutOfMemoryError: no room") for error in frame["error"])


def test_an_interruption_is_not_recorded_as_a_cell_s_error(lens_of, tokens_of, engine_of):
    def interrupted(x, at):
        raise KeyboardInterrupt

    engine = engine_of(
        lens_of("llama"), tokens_of((6, 6)), cells_of(edit("z", interrupted)), [loss()]
    )
    with pytest.raises(KeyboardInterrupt):
        engine.run(engine.blocks[0])


def packs_seen(monkeypatch, *, room=None):
    """A list that gets the size of every pack that is tried; packs over ``room`` are out of memory."""
    right, sizes = Passes.run_pack, []

    def pack(self, edits, **options):
        sizes.append(len(edits))
        if room is not None and len(edits) > room:
            raise torch.OutOfMemoryError("no room")
        return right(self, edits, **options)

    monkeypatch.setattr(Passes, "run_pack", pack)
    return sizes

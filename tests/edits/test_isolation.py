"""An isolated token attends to itself only: exactly, on every family, through every window, where it was asked."""

import pytest
import torch
from rounding import assert_moved, assert_rows_close

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.isolation import isolate
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.measures.heads import expand_kv
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import TINY_FAMILIES

P, LENGTH = 9, 16
TOKENS = torch.randint(3, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def run(lens, edits=(), *, logits=False):
    return run_with(
        lens,
        TOKENS,
        edits,
        positions=(P,),
        sites=("pattern", "v", "z_raw"),
        logits=logits,
        loss=False,
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_what_it_aggregates_is_its_own_value(lens_of, family):
    lens = lens_of(family)
    found = run(lens, isolate([P])).tensors
    for layer in range(lens.n_layers):
        row = found["pattern", layer][:, :, P]  # batch, head, key
        assert not row[..., :P].any()
        own = expand_kv(found["v", layer][:, P], n_heads=lens.n_heads)
        if lens.family.sink_logit or lens.family.sigmoid:
            # the learned sink logit keeps its share: z = (1 - null mass) v; and a sigmoid is no share at all
            assert (row[..., P] < 1).all()
            torch.testing.assert_close(
                found["z_raw", layer][:, P], own * row[..., P, None], rtol=1e-6, atol=1e-7
            )
        else:
            assert torch.equal(row[..., P], torch.ones_like(row[..., P]))
            assert_rows_close(found["z_raw", layer][:, P], own)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_it_is_the_mask_of_the_raw_model(lens_of, raw_run, family):
    def block(scores):
        scores[:, :, P, :P] = torch.finfo(scores.dtype).min

    layers = range(lens_of(family).n_layers)
    expected = raw_run(family, TOKENS, [("scores", layer, block) for layer in layers])
    found = run(lens_of(family), isolate([P]), logits=True).logits
    assert_rows_close(found, expected)
    assert_moved(found, run(lens_of(family), logits=True).logits)


def test_several_positions_see_themselves_alone_each_once_in_order(lens_of):
    found = run(lens_of("llama"), isolate([11, 4, 4, 5])).tensors["pattern", 1]
    for position in (4, 5, 11):
        assert (found[:, :, position, position] == 1).all()
    assert (found[:, :, 6, :6] > 0).all()  # not isolated, and sees the isolated ones
    assert isolate([11, 4, 4]).positions == (4, 11)


def test_only_the_chosen_layers_isolate(lens_of):
    lens = lens_of("llama")
    found, plain = (run(lens, edits).tensors for edits in (isolate([P], layers=[1]), ()))
    assert torch.equal(found["pattern", 0], plain["pattern", 0])
    assert (found["pattern", 1][:, :, P, P] == 1).all()
    assert torch.equal(found["pattern", 1][:, :, :P], plain["pattern", 1][:, :, :P])
    assert (found["pattern", 2][:, :, P, :P] > 0).all()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_padding_stays(lens_of, family):
    batch = from_tensor(TOKENS, lengths=torch.tensor([LENGTH, 12]))
    found = run_with(
        lens_of(family), batch, isolate([P]), positions=(P,), sites=("pattern",), loss=True
    )
    assert (found.tensors["pattern", 1][1, :, :12, 12:] == 0).all()
    assert found.loss.isfinite().all()


def test_no_position_and_the_first_one_are_refused():
    with pytest.raises(
        InputError, match="no position was given to isolate; need at least one, from 1 on"
    ):
        isolate([])
    for position in (0, -1):
        with pytest.raises(
            InputError, match=f"position {position} cannot be isolated; need positions from 1 on"
        ):
            isolate([5, position])

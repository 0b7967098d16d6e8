"""Sequences that come with an attention mask: padded on the left or on the right, as tokenizers give them."""

import pytest
import torch
from lenses import lens_of

from sink_lens.data.tokens import from_tensor
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError


def test_left_padding_is_moved_to_the_right():
    tokens = torch.tensor([[0, 0, 7, 8], [4, 5, 6, 7], [0, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    batch = from_tensor(tokens, attention_mask=mask)
    assert batch.lengths.tolist() == [2, 4, 3]
    assert batch.tokens[0, :2].tolist() == [7, 8]
    assert batch.tokens[1].tolist() == [4, 5, 6, 7]
    assert batch.tokens[2, :3].tolist() == [1, 2, 3]


def test_right_padding_stays():
    tokens = torch.tensor([[7, 8, 0, 0], [4, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    batch = from_tensor(tokens, attention_mask=mask)
    assert torch.equal(batch.tokens, tokens)
    assert batch.lengths.tolist() == [2, 4]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_left_padded_batch_runs_as_each_sequence_alone(family):
    lens = lens_of(family)
    generator = torch.Generator().manual_seed(0)
    long, short = (torch.randint(1, lens.d_vocab, (n,), generator=generator) for n in (12, 9))
    tokens = torch.stack([long, torch.cat([torch.zeros(3, dtype=torch.int64), short])])
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :3] = 0
    both = run_with(lens, from_tensor(tokens, attention_mask=mask))
    alone = run_with(lens, short[None])
    torch.testing.assert_close(both.mass[:, 1], alone.mass[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(both.loss[1], alone.loss[0], rtol=1e-6, atol=0)


def test_masks_that_cannot_be_used_are_refused():
    tokens = torch.arange(8).view(2, 4)
    with pytest.raises(InputError, match="sequence 1 has a gap"):
        from_tensor(tokens, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]))
    with pytest.raises(InputError, match="need one of them"):
        from_tensor(tokens, attention_mask=torch.ones(2, 4), lengths=torch.tensor([4, 4]))
    with pytest.raises(InputError, match="the mask is"):
        from_tensor(tokens, attention_mask=torch.ones(2, 3))
    with pytest.raises(InputError, match="lengths go from 0"):
        from_tensor(tokens, attention_mask=torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]]))

"""A token batch is what it says, whatever it was made from, and refuses what no model can read."""

from dataclasses import FrozenInstanceError
from hashlib import sha256

import pytest
import torch
from lenses import lens_of

from sink_lens.data.tokens import TokenBatch, from_tensor
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError


def batch(tokens, lengths, **changes):
    fields = {"source": "tensor", "bos": False, "bos_condition": "auto", "seed": None} | changes
    return TokenBatch(tokens=torch.tensor(tokens), lengths=torch.tensor(lengths), **fields)


def test_valid_is_true_at_real_tokens_only_and_the_hash_is_over_shape_tokens_and_lengths():
    two = batch([[5, 6, 7], [8, 0, 0]], [3, 1])
    assert two.valid.tolist() == [[True, True, True], [True, False, False]]
    assert (two.n_sequences, two.n_positions) == (2, 3)
    # "1x2", then the ids 5 and 6 and the length 2, each as eight bytes, lowest first.
    expected = sha256(b"1x2" + b"".join(n.to_bytes(8, "little") for n in (5, 6, 2))).hexdigest()
    assert batch([[5, 6]], [2]).hash == expected
    batches = [batch([[5, 6]], [2]), batch([[5, 7]], [2]), batch([[5, 6]], [1]), batch([[5], [6]], [1, 1])]
    assert len({one.hash for one in batches}) == len(batches)
    tokens = torch.arange(6).reshape(3, 2)
    transposed = from_tensor(tokens.T.contiguous().T)
    assert transposed.hash == from_tensor(tokens).hash
    assert batch([[0, 1], [2, 3], [4, 5]], [2, 2, 2], source="random", seed=3).hash == transposed.hash


def test_batches_keep_order_width_and_provenance():
    five = batch([[i, 0] for i in range(5)], [1, 2, 1, 2, 1], source="random", seed=7)
    pieces = list(five.batches(2))
    assert [piece.n_sequences for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece.tokens for piece in pieces]), five.tokens)
    assert torch.equal(torch.cat([piece.lengths for piece in pieces]), five.lengths)
    assert {(piece.source, piece.seed, piece.n_positions) for piece in pieces} == {("random", 7, 2)}


def test_parts_of_a_batch_keep_what_they_came_from():
    five = batch([[i, 9, 8] for i in range(5)], [1, 2, 3, 2, 1], source="random", seed=7)
    parts = {
        "a slice": (five[1:3], [[1, 9, 8], [2, 9, 8]], [2, 3]),
        "a list": (five[[4, 0]], [[4, 9, 8], [0, 9, 8]], [1, 1]),
        "a tensor": (five[torch.tensor([2])], [[2, 9, 8]], [3]),
        "the first positions": (five[1:3].cut(2), [[1, 9], [2, 9]], [2, 2]),
        "more positions than there are": (five[1:3].cut(7), [[1, 9, 8], [2, 9, 8]], [2, 3]),
        "BOS in front": (five[:1].with_bos(1), [[1, 0, 9, 8]], [2]),
        "and away again": (five[1:2].with_bos(1).without_bos(), [[1, 9, 8]], [2]),
    }
    for name, (part, tokens, lengths) in parts.items():
        assert (part.tokens.tolist(), part.lengths.tolist(), part.source, part.seed) == (
            tokens,
            lengths,
            "random",
            7,
        ), name
    assert (five.with_bos(1).bos, five.with_bos(1).without_bos().bos_condition) == (True, "without")
    with pytest.raises(InputError, match="begin with BOS already"):
        five.with_bos(1).with_bos(1)
    with pytest.raises(InputError, match="do not begin with BOS"):
        five.without_bos()


def test_a_batch_cannot_be_changed_or_cut_into_nothing():
    with pytest.raises(InputError, match="batch size is 0; need at least 1"):
        batch([[1, 2]], [2]).batches(0)
    with pytest.raises(FrozenInstanceError):
        batch([[1, 2]], [2]).seed = 3


@pytest.mark.parametrize(
    ("tokens", "lengths", "text"),
    [
        (torch.zeros(1, 3, dtype=torch.int32), torch.tensor([3]), "int32 .* Use from_tensor"),
        (torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), "neither 0"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([0]), "lengths go from 0 to 0; need 1 to 3"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([4]), "lengths go from 4 to 4; need 1 to 3"),
        (torch.tensor([[4, -100]]), torch.tensor([1]), "token id -100 is negative"),
    ],
)
def test_a_batch_refuses_what_no_model_can_read(tokens, lengths, text):
    with pytest.raises(InputError, match=text):
        TokenBatch(tokens=tokens, lengths=lengths, source="tensor", bos=False, bos_condition="auto", seed=None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_tensor_of_any_integers_is_taken_whole(dtype):
    made = from_tensor(torch.tensor([[4, 5], [6, 7]], dtype=dtype))
    assert made.tokens.dtype == torch.int64
    assert made.tokens.tolist() == [[4, 5], [6, 7]]
    assert made.lengths.tolist() == [2, 2]
    assert (made.source, made.bos, made.bos_condition, made.seed) == ("tensor", False, "auto", None)


def test_a_tensor_is_copied():
    tokens, lengths = torch.tensor([[4, 5]]), torch.tensor([1])
    made = from_tensor(tokens, lengths=lengths)
    tokens[0, 0], lengths[0] = 9, 2
    assert (made.tokens.tolist(), made.lengths.tolist()) == ([[4, 5]], [1])


@pytest.mark.parametrize(
    ("tokens", "lengths", "text"),
    [
        (torch.zeros(2, 2), None, "tokens are float32 .*need integers"),
        (torch.ones(2, 2, dtype=torch.bool), None, "tokens are bool .*need integers"),
        (torch.tensor(3), None, "need two axes"),
        (torch.tensor([3, 4]), None, r"need two axes, .* tokens\[None\]"),
        (torch.tensor([[3, 4]]), torch.tensor([1.0]), "lengths are float32 .*need integers"),
        (torch.tensor([[3, 4]]), torch.tensor([[1]]), "lengths are int64 of shape"),
        (torch.tensor([[3, 4], [5, 6]]), torch.tensor([2]), r"need int64 of shape \(2,\)"),
        (torch.zeros(2, 0, dtype=torch.int64), None, "neither 0"),
    ],
)
def test_a_tensor_that_is_no_batch_is_refused(tokens, lengths, text):
    with pytest.raises(InputError, match=text):
        from_tensor(tokens, lengths=lengths)


# --- sequences that come with an attention mask: padded on the left or on the right, as tokenizers give them


def test_padding_is_moved_to_the_right():
    tokens = torch.tensor([[0, 0, 7, 8], [4, 5, 6, 7], [1, 2, 3, 0]])
    batch = from_tensor(tokens, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]))
    assert batch.lengths.tolist() == [2, 4, 3]
    rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
    assert [row[:length] for row, length in rows] == [[7, 8], [4, 5, 6, 7], [1, 2, 3]]


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

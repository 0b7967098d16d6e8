"""A token batch is what it says, whatever it was made from, and refuses what no model can read."""

import struct
from dataclasses import FrozenInstanceError
from hashlib import sha256

import pytest
import torch

from sink_lens.data.tokens import TokenBatch, from_tensor
from sink_lens.errors import InputError


def batch(tokens, lengths, **changes):
    fields = {"source": "tensor", "bos": False, "bos_condition": "auto", "seed": None} | changes
    return TokenBatch(tokens=torch.tensor(tokens), lengths=torch.tensor(lengths), **fields)


def test_valid_is_true_at_real_tokens_only_and_the_hash_is_over_shape_tokens_and_lengths():
    two = batch([[5, 6, 7], [8, 0, 0]], [3, 1])
    assert two.valid.tolist() == [[True, True, True], [True, False, False]]
    assert (two.n_sequences, two.n_positions) == (2, 3)
    # "1x2", then the ids 5 and 6 and the length 2, each as eight bytes, lowest first.
    assert batch([[5, 6]], [2]).hash == sha256(b"1x2" + struct.pack("<3q", 5, 6, 2)).hexdigest()
    batches = [
        batch([[5, 6]], [2]),
        batch([[5, 7]], [2]),
        batch([[5, 6]], [1]),
        batch([[5], [6]], [1, 1]),
    ]
    assert len({one.hash for one in batches}) == len(batches)
    transposed = from_tensor(torch.tensor([[0, 2, 4], [1, 3, 5]]).T)
    assert (
        batch([[0, 1], [2, 3], [4, 5]], [2, 2, 2], source="random", seed=3).hash == transposed.hash
    )


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
        assert (part.tokens.tolist(), part.lengths.tolist()) == (tokens, lengths), name
        assert (part.source, part.seed) == ("random", 7), name
    rows = [
        (one.tokens.tolist(), one.lengths.tolist(), one.source, one.seed) for one in five.batches(2)
    ]
    pieces = [five[:2], five[2:4], five[4:]]
    assert rows == [(one.tokens.tolist(), one.lengths.tolist(), "random", 7) for one in pieces]
    more = five.with_bos(1)
    assert (more.bos, more.bos_condition, more.without_bos().bos_condition) == (
        True,
        "with",
        "without",
    )
    with pytest.raises(InputError, match="begin with BOS already"):
        five.with_bos(1).with_bos(1)
    with pytest.raises(InputError, match="do not begin with BOS"):
        five.without_bos()


@pytest.mark.parametrize(
    ("tokens", "lengths", "text"),
    [
        (torch.zeros(1, 3, dtype=torch.int32), torch.tensor([3]), "int32 .* Use from_tensor"),
        (torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), "neither 0"),
        (
            torch.zeros(1, 3, dtype=torch.int64),
            torch.tensor([4]),
            "lengths go from 4 to 4; need 1 to 3",
        ),
        (torch.tensor([[4, -100]]), torch.tensor([1]), "token id -100 is negative"),
    ],
)
def test_a_batch_refuses_what_no_model_can_read(tokens, lengths, text):
    with pytest.raises(InputError, match=text):
        TokenBatch(
            tokens=tokens,
            lengths=lengths,
            source="tensor",
            bos=False,
            bos_condition="auto",
            seed=None,
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_tensor_of_any_integers_is_taken_whole(dtype):
    made = from_tensor(torch.tensor([[4, 5], [6, 7]], dtype=dtype))
    assert made.tokens.dtype == torch.int64
    assert made.tokens.tolist() == [[4, 5], [6, 7]]
    assert made.lengths.tolist() == [2, 2]
    assert (made.source, made.bos, made.bos_condition, made.seed) == ("tensor", False, "auto", None)


def test_a_tensor_is_copied_and_the_batch_cannot_be_changed_or_cut_into_nothing():
    tokens, lengths = torch.tensor([[4, 5]]), torch.tensor([1])
    made = from_tensor(tokens, lengths=lengths)
    tokens[0, 0], lengths[0] = 9, 2
    assert (made.tokens.tolist(), made.lengths.tolist()) == ([[4, 5]], [1])
    with pytest.raises(FrozenInstanceError):
        made.seed = 3
    with pytest.raises(InputError, match="batch size is 0; need at least 1"):
        made.batches(0)


@pytest.mark.parametrize(
    ("tokens", "lengths", "text"),
    [
        (torch.zeros(2, 2), None, "tokens are float32 .*need integers"),
        (torch.tensor([3, 4]), None, r"need two axes, .* tokens\[None\]"),
        (torch.tensor([[3, 4]]), torch.tensor([1.0]), "lengths are float32 .*need integers"),
        (torch.tensor([[3, 4]]), torch.tensor([[1]]), "lengths are int64 of shape"),
    ],
)
def test_a_tensor_that_is_no_batch_is_refused(tokens, lengths, text):
    with pytest.raises(InputError, match=text):
        from_tensor(tokens, lengths=lengths)


@pytest.mark.parametrize(
    ("mask", "more", "text"),
    [
        ([[1, 1, 1, 1], [1, 0, 1, 1]], {}, "sequence 1 has a gap"),
        ([[1] * 4] * 2, {"lengths": torch.tensor([4, 4])}, "need one of them"),
        ([[1] * 3] * 2, {}, "attention_mask"),
        ([[0] * 4, [1] * 4], {}, "lengths go from 0"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(mask, more, text):
    with pytest.raises(InputError, match=text):
        from_tensor(torch.arange(8).view(2, 4), attention_mask=torch.tensor(mask), **more)

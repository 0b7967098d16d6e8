"""Every key that a tokenizer, a collator or a trainer gives is read, or refused by its name."""

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from sink_lens.data.given import as_given, by_text
from sink_lens.data.tokens import TokenBatch, as_batch, from_tensor
from sink_lens.errors import InputError

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
TEXTS = [[5, 6, 7], [8, 9, 10, 11]]
PLACES = {
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]),
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32),
    "cu_seq_lens_q": torch.tensor([0, 3, 7], dtype=torch.int32),
}
LEFT = {
    "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4]),
}


def texts_of(batch):
    return [
        row[:length]
        for row, length in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", PLACES)
def test_each_key_that_says_where_texts_begin_is_enough(name):
    batch = as_batch({"input_ids": IDS, name: PLACES[name]})
    assert texts_of(batch) == TEXTS
    assert batch.given.index.tolist() == [[0, 1, 2, -1], [3, 4, 5, 6]]


def test_what_the_flattening_collator_gives_is_read_whole():
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = as_batch(collator([{"input_ids": one} for one in TEXTS]))
    assert texts_of(batch) == TEXTS
    assert batch.labelled is None  # -100 at first tokens alone, which nothing predicts
    assert batch.hash == from_tensor(IDS, position_ids=PLACES["position_ids"]).hash


def test_labels_leave_tokens_out_of_the_loss_alone():
    labels = torch.tensor([[-100, -100, 5, -100], [7, -100, 9, 10]])
    batch = as_batch(LEFT | {"labels": labels})
    assert batch.predicted.tolist() == [[False, False, False], [False, True, True]]
    assert batch.valid.sum() == 6
    assert batch.hash != as_batch(LEFT).hash
    parts = [batch[:1].predicted, batch.cut(2).predicted, batch.with_bos(1).predicted]
    assert [one.tolist() for one in parts] == [
        [[False, False, False]],
        [[False], [False]],
        [[True, False, False, False], [True, False, True, True]],
    ]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"inputs_embeds": torch.zeros(2, 4, 8)}, "inputs_embeds"),
        ({"token_type_ids": torch.zeros(2, 4)}, "token_type_ids"),
        ({"pixel_values": np.zeros((2, 3))}, "pixel_values"),
        ({"shift_labels": [[5, 6], [7]]}, "shift_labels"),
        ({"num_items_in_batch": torch.tensor(4)}, "num_items_in_batch"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask"),
        ({"labels": LEFT["input_ids"] + 1}, "labels"),
        ({"labels": torch.ones(2, 3)}, "labels"),
        (
            {"position_ids": torch.tensor([[0, 0, 2, 3], [0, 1, 2, 3]])},
            "position_ids",
        ),  # counts its padding
        ({"position_ids": torch.zeros(2, 4)}, "position_ids"),
        ({"position_ids": torch.zeros(3, 2, 4, dtype=torch.int64)}, "position_ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q"),
        ({"cu_seq_lens_k": torch.tensor([0, 5, 4, 8])}, "cu_seq_lens_k"),
    ],
)
def test_a_key_that_is_not_read_is_refused_by_its_name(more, named):
    with pytest.raises(InputError, match=named):
        as_batch(LEFT | more)


def test_words_and_single_numbers_beside_the_ids_are_no_tensors():
    more = {
        "text": ["a", "b"],
        "max_length_q": 4,
        "use_cache": False,
        "labels": None,
        "name": np.array(["a", "b"]),
    }
    assert as_batch(LEFT | more).hash == as_batch(LEFT).hash


def test_two_keys_that_disagree_are_refused_by_both_names():
    with pytest.raises(InputError, match=r"position_ids and seq_idx .*row 0, column 2"):
        as_batch(
            {
                "input_ids": IDS,
                "position_ids": PLACES["position_ids"],
                "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1, 1]]),
            }
        )


@pytest.mark.parametrize("value", [2, -1, 0.5, float("nan"), float("inf"), 1j, 1 + 0j])
def test_a_mask_of_other_numbers_than_0_and_1_is_refused_with_its_place(value):
    mask = LEFT["attention_mask"].to(
        torch.complex64 if isinstance(value, complex) else torch.float32
    )
    mask[1, 2] = value
    for read in (
        as_batch,
        lambda given: from_tensor(given["input_ids"], attention_mask=given["attention_mask"]),
    ):
        with pytest.raises(InputError, match="attention_mask"):
            read(LEFT | {"attention_mask": mask})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_a_mask_of_0_and_1_of_any_type_is_one(dtype):
    assert (
        as_batch(LEFT | {"attention_mask": LEFT["attention_mask"].to(dtype)}).hash
        == as_batch(LEFT).hash
    )


def test_single_tokens_beside_texts_are_padding_and_a_row_of_one_token_is_a_text():
    padded = as_batch({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 0, 0]])})
    assert texts_of(padded) == [[5, 6, 7, 8]]
    rows = as_batch({"input_ids": IDS.T, "position_ids": torch.zeros(7, 1, dtype=torch.int64)})
    assert texts_of(rows) == [[one] for one in range(5, 12)]
    with pytest.raises(InputError, match="no text has two tokens"):
        as_batch({"input_ids": IDS, "position_ids": 0 * IDS})


def test_values_are_laid_where_their_tokens_were_given_and_come_back():
    batch = as_batch({"input_ids": IDS, "position_ids": PLACES["position_ids"]})
    laid = as_given(batch.tokens.double(), batch.given)
    assert laid.tolist() == IDS.tolist()
    losses = as_given(
        batch.tokens[:, 1:].double(), batch.given, first=1
    )  # of all tokens but the first
    assert losses.nan_to_num(-1).tolist() == [[6, 7, -1, 9, 10, 11]]
    pattern = torch.arange(32.0).view(2, 1, 4, 4)
    square = as_given(pattern, batch.given, axes=("head", "position", "key"))
    assert square.shape == (1, 1, 7, 7)
    assert torch.equal(square[0, 0, :3, :3], pattern[0, 0, :3, :3])
    assert torch.equal(square[0, 0, 3:, 3:], pattern[1, 0])
    assert square[0, 0, :3, 3:].isnan().all()
    back = by_text(square, batch.given, axes=("head", "position", "key"))
    assert torch.equal(back[1], pattern[1])
    assert torch.equal(back[0, :, :3, :3], pattern[0, :, :3, :3])
    left = as_batch(LEFT)
    assert as_given(left.valid, left.given).tolist() == LEFT["attention_mask"].bool().tolist()
    assert torch.equal(by_text(LEFT["input_ids"], left.given)[left.valid], left.tokens[left.valid])


def test_a_batch_of_ones_own_and_rows_without_padding_lie_as_they_are():
    assert (
        as_batch({"input_ids": LEFT["input_ids"], "attention_mask": torch.ones(2, 4)}).given is None
    )
    batch = as_batch(LEFT)
    assert batch.given.late == (0, 2)
    assert as_batch(batch).given is None  # a TokenBatch is a layout of its own
    assert (
        TokenBatch.from_tensor(LEFT["input_ids"], attention_mask=LEFT["attention_mask"]).given
        is None
    )
    assert batch[1:].given.late is None
    assert batch.cut(1).given.index.tolist() == [[2], [4]]


def test_columns_that_are_padding_in_every_row_are_not_run():
    wide = {name: torch.nn.functional.pad(one, (2, 3)) for name, one in LEFT.items()}
    batch = as_batch(wide)
    assert batch.hash == as_batch(LEFT).hash
    laid = as_given(batch.tokens.double(), batch.given).nan_to_num(0.0).long()
    assert torch.equal(laid, wide["input_ids"] * wide["attention_mask"])


def test_a_text_over_two_rows_is_refused():
    ids = torch.arange(8).view(2, 4)
    assert texts_of(as_batch({"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 4, 8])}))
    with pytest.raises(InputError, match="goes on from a row of the tokens to the next by cu_seq"):
        as_batch({"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 3, 8])})

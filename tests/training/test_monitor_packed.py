"""Documents that are packed into rows are read as the same documents in a batch, where attention keeps them apart."""

import logging

import pytest
import torch
from tiers import first
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, DataCollatorWithFlattening

from sink_lens import TokenBatch
from sink_lens.training import SinkMonitor, monitor_attention
from sink_lens.training.monitor_documents import find_documents
from tests.tiny_families import tiny

from .monitor_ranks import batches

APART = (
    "llama",
    "gemma2",
    "gpt2",
    "headnorm_sink",
    "mistral",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "gptj",
    "gpt_neo",
)
"""Families that keep documents apart whose positions begin again."""
LENGTHS = (16, 24, 9, 31)
ANYWHERE = ("max_activation", "kurtosis", "entropy", "max_logit")


def documents(lengths=LENGTHS, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (n,), generator=generator) for n in lengths]


def flattened(found, **options):
    batch = DataCollatorWithFlattening(**options)([{"input_ids": one.tolist()} for one in found])
    del batch["labels"]
    return batch | {"use_cache": False}


def batched(found):
    lengths = torch.tensor([len(one) for one in found])
    tokens = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (torch.arange(tokens.shape[1]) < lengths[:, None]).long(),
    }


def blocks(found):
    number = torch.repeat_interleave(torch.tensor([len(one) for one in found]))
    return (number[:, None] == number) & torch.ones(len(number), len(number)).tril().bool()


def reading(model, inputs, *, sequences=4):
    with SinkMonitor(model, every=1, sequences=sequences, threshold=0.1) as monitor:
        logits = model(**inputs).logits
        return monitor.step(), logits


def close(expected):
    return pytest.approx(expected, rel=1e-4, abs=1e-6)


def of_first_tokens(found):
    return {key for key in found if key.split("/")[1] not in ANYWHERE}


@pytest.mark.parametrize("name", first(APART, stay=4))
def test_packed_documents_are_read_as_in_a_batch(name):
    model, found = tiny(name), documents()
    expected, logits = reading(model, batched(found))
    packed, flat = reading(model, flattened(found))
    for row, one in zip(logits, flat[0].split(LENGTHS), strict=True):
        assert torch.allclose(row[: len(one)], one, atol=1e-4)
    assert of_first_tokens(packed)
    assert packed == close(expected)


@pytest.mark.parametrize("name", first(["opt", "falcon", "llama", "gpt2", "gptj", "gpt_neo"]))
def test_a_block_mask_says_where_documents_begin(name):
    model, found = tiny(name), documents()
    mask = torch.zeros(80, 80).masked_fill(~blocks(found), torch.finfo(torch.float32).min)
    packed, _ = reading(model, flattened(found) | {"attention_mask": mask[None, None]})
    assert packed == close(reading(model, batched(found))[0])


def test_the_first_documents_are_read_and_single_tokens_are_none():
    model, found = tiny("llama"), documents((12, 1, 20, 9, 30))
    packed, _ = reading(model, flattened(found), sequences=2)
    assert packed == close(reading(model, batched([found[0], found[2]]))[0])


def test_documents_in_several_rows():
    model, found = tiny("llama"), documents((12, 20, 32))
    rows = torch.stack([torch.cat(found[:2]), found[2]])
    places = torch.stack([torch.cat([torch.arange(12), torch.arange(20)]), torch.arange(32)])
    packed, _ = reading(model, {"input_ids": rows, "position_ids": places, "use_cache": False})
    assert packed == close(reading(model, batched(found))[0])


def test_a_batch_that_trl_packed():
    # DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=16) of TRL 1.16 over
    # pack_dataset(..., seq_length=48, strategy="bfd") of documents of 16, 24, 9, 31, 12 and 20 tokens, but input_ids.
    ends = torch.tensor([0, 31, 47, 71, 91, 103, 112], dtype=torch.int32)
    lengths = ends.diff().tolist()
    batch = {
        "input_ids": batches(1, sequences=1, length=112)[0],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 31,
        "max_length_k": 31,
        "seq_idx": torch.repeat_interleave(torch.arange(6, dtype=torch.int32), ends.diff())[None],
        "use_cache": False,
    }
    model, found = tiny("llama"), batch["input_ids"][0].split(lengths)
    packed, _ = reading(model, batch, sequences=6)
    assert packed == close(reading(model, batched(found), sequences=6)[0])


# --- attention that crosses documents


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"attention_mask": torch.ones(1, 80, dtype=torch.long)}),
        ("llama", {"use_cache": True}),
        ("bloom", {}),
        *[
            pytest.param(name, {}, marks=pytest.mark.exhaustive)
            for name in ("falcon", "opt", "gpt_oss")
        ],
    ],
)
def test_what_asks_the_beginning_is_left_out_where_attention_crosses(name, more, caplog):
    caplog.set_level(logging.WARNING)
    packed, _ = reading(tiny(name), flattened(documents()) | more)
    assert not of_first_tokens(packed)
    assert {key.split("/")[1] for key in packed} == set(ANYWHERE)
    said = [
        one.getMessage() for one in caplog.records if "documents are packed" in one.getMessage()
    ]
    assert len(said) == 1
    assert "attention crosses them" in said[0]


def test_a_step_in_which_attention_crosses_is_not_gathered_for_the_strongest_position():
    plain = {"input_ids": torch.stack(documents((40,) * 4))}
    crossing = flattened(documents()) | {"attention_mask": torch.ones(1, 80, dtype=torch.long)}
    model, readings = tiny("llama"), []
    with SinkMonitor(model, every=4) as monitor:
        for step in range(5):
            model(**(crossing if step == 2 else plain))
            readings.append(monitor.step())
    assert [one["sinks/strongest_sequences"] for one in readings if one] == [4, 12]


def test_lengths_alone_keep_no_documents_apart_without_a_flash_kernel():
    batch = flattened(documents(), return_position_ids=False, return_flash_attn_kwargs=True)
    packed, _ = reading(tiny("llama"), batch)
    assert not of_first_tokens(packed)


def _flash(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **given):
    """A kernel that keeps documents apart by their lengths alone, as the flash kernels do."""
    assert attention_mask is None
    apart = [
        torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=scaling, enable_gqa=True
        )
        for parts in zip(
            *(one.split(cu_seq_lens_q.diff().tolist(), 2) for one in (query, key, value)),
            strict=True,
        )
    ]
    return torch.cat(apart, 2).transpose(1, 2).contiguous(), None


def test_a_flash_kernel_keeps_documents_apart(monkeypatch):
    monkeypatch.setattr(
        monitor_attention, "own_function", lambda *args, **kwargs: None
    )  # as if it were transformers'
    model, found = tiny("llama"), documents()
    expected, _ = reading(model, batched(found))
    AttentionInterface.register("flash_of_a_test", _flash)
    model.config._attn_implementation_internal = (
        "flash_of_a_test"  # the setter looks for a kernel on the hub
    )
    packed, _ = reading(model, flattened(found, return_flash_attn_kwargs=True))
    assert packed == close(expected)


def where(named, *, length=80, batch=1, most=9):
    found = find_documents(named, batch=batch, length=length, most=most)
    return found and [
        (int(row), int(place[0]), int(real.sum()))
        for row, place, real in zip(found.row, found.position, found.valid, strict=True)
    ]


def test_every_way_to_say_where_documents_begin():
    flat, mask = flattened(documents(), return_flash_attn_kwargs=True), blocks(documents())
    expected = [(0, 0, 16), (0, 16, 24), (0, 40, 9), (0, 49, 31)]
    block = create_block_mask(lambda b, h, q, k: mask[q, k], 1, 1, 80, 80, device="cpu")
    for name in ("position_ids", "cu_seq_lens_q"):
        assert where({name: flat[name]}) == expected
    for given in (mask[None, None], block, {"full_attention": mask[None, None]}):
        assert where({"attention_mask": given}) == expected
    assert where({"position_ids": flat["position_ids"].expand(3, 1, 80)}) == expected
    assert where({"position_ids": flat["position_ids"]}, batch=2)[4:] == [
        (1, *one[1:]) for one in expected
    ]


def test_rows_of_one_sequence_are_not_packed():
    ones = torch.ones(2, 8, dtype=torch.long)
    left = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    right = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8])
    causal = torch.ones(1, 1, 8, 8).tril().bool()
    for named in (
        {},
        {"position_ids": torch.arange(8)[None]},
        {"position_ids": torch.arange(5, 13)[None], "attention_mask": ones},
        {"position_ids": (right.cumsum(1) - 1).masked_fill(right == 0, 1), "attention_mask": right},
        {"attention_mask": causal},
        {"attention_mask": causal.triu(-3)},
    ):
        assert where(named, batch=2, length=8) is None, named
    for named in (
        {},
        {"position_ids": torch.arange(8)[None]},
        {"position_ids": (left.cumsum(1) - 1).clamp(min=0)},
        {"position_ids": (left.cumsum(1) - 1).masked_fill(left == 0, 1)},
    ):
        named |= {"attention_mask": left}
        assert where(named, batch=2, length=8) == [(0, 3, 5), (1, 0, 8)], named
        padded = find_documents(named, batch=2, length=8, most=4)
        assert padded is not None
        assert not padded.packed


def test_a_token_batch_of_packed_rows_has_a_sequence_for_each_document():
    found = documents()
    flat = flattened(found)
    batch = TokenBatch.from_tensor(flat["input_ids"], position_ids=flat["position_ids"])
    assert batch.lengths.tolist() == list(LENGTHS)
    assert all(
        torch.equal(row[: len(one)], one) for row, one in zip(batch.tokens, found, strict=True)
    )

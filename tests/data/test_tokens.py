"""Token batches: what is cut where, BOS exactly once or not at all, and no silent substitution."""

import functools
from itertools import pairwise

import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sink_lens.data.token_ids import bos_ids
from sink_lens.data.tokens import (
    as_batch,
    decode_tokens,
    from_dataset,
    from_prompts,
    from_tensor,
    from_text,
    random_tokens,
    repeated_tokens,
    unmasked_padding_text,
)
from sink_lens.errors import InputError
from sink_lens.models.tiny import tiny_tokenizer

N_BYTES = 256


def byte_tokenizer(*, bos="<s>", template="<s> $A", pad=None, eos=None):
    """One token a byte: id 0 is <s>, 1 </s>, 2 <x>, 3 <pad>, all special; then the 256 bytes by id 4 + rank.

    `template` is what it adds to a text by itself ("$A" alone: nothing).
    """
    special = ["<s>", "</s>", "<x>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    if template != "$A":
        core.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, i) for i, token in enumerate(special)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, pad_token=pad, eos_token=eos
    )


plain_tokenizer = functools.partial(
    byte_tokenizer, template="$A"
)  # has a BOS token and does not use it by itself


def ids_of(text, tokenizer):
    return tokenizer.convert_tokens_to_ids(list(text))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_tokenizer_without_a_token_for_the_probe_still_shows_its_bos():
    # A BPE without an unknown token drops what it does not know, so the probe "a" has no tokens of its own.
    core = Tokenizer(models.BPE(vocab={"<s>": 0, "w": 1}, merges=[]))
    core.add_special_tokens(["<s>"])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    assert bos_ids(PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>"), "auto") == [0]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("condition", ["auto", "with", "without"])
def test_every_arm_has_bos_once_or_not_at_all(adds, condition):
    tokenizer = byte_tokenizer() if adds else plain_tokenizer()
    expected = {"auto": adds, "with": True, "without": False}[condition]
    made = [
        from_text("abcdefgh", tokenizer, sequences=2, length=4, bos=condition),
        from_prompts(["abc", "defgh"], tokenizer, bos=condition),
        random_tokens(tokenizer, sequences=2, length=4, generator=generator(), bos=condition),
        repeated_tokens(tokenizer, sequences=2, length=4, generator=generator(), bos=condition),
        from_dataset([{"text": "abcdefgh"}], tokenizer, sequences=2, length=4, bos=condition),
    ]
    for one in made:
        assert one.bos is expected
        assert one.bos_condition == condition
        assert ((one.tokens == 0) & one.valid).sum(dim=1).tolist() == [int(expected)] * 2
        assert (one.tokens[:, 0] == 0).tolist() == [expected] * 2


def test_arms_that_the_tokenizer_cannot_give_are_refused():
    with pytest.raises(InputError, match="bos is 'with', but there is no BOS token"):
        from_text("abcdefgh", plain_tokenizer(bos=None), sequences=1, length=4, bos="with")
    with pytest.raises(InputError, match="there is no BOS token"):
        random_tokens(None, sequences=1, length=4, generator=generator(), bos="with", vocab_size=9)
    tokenizer = byte_tokenizer(template="<x> <s> $A")
    with pytest.raises(
        InputError, match=r"puts ids \[2, 0\] in front of a text, and its BOS token is 0"
    ):
        from_prompts(["abc"], tokenizer)
    assert from_prompts(["abc<s>"], tokenizer, bos="with").tokens[0, [0, -1]].tolist() == [0, 0]
    with pytest.raises(
        InputError, match=r"bos of from_prompts is 'yes' .*; need 'auto' or 'with' or 'without'"
    ):
        from_prompts(["abc"], plain_tokenizer(), bos="yes")


@pytest.mark.parametrize("condition", ["auto", "with", "without"])
@pytest.mark.parametrize("text", ["<s>abcdefgh", " \n<s>abcdefgh"])
def test_a_text_that_begins_with_bos_is_refused_in_every_arm(condition, text):
    for tokenizer in (byte_tokenizer(), plain_tokenizer()):
        with pytest.raises(InputError, match="prompt 1 itself begins with the BOS token '<s>'"):
            from_prompts(["ok", text], tokenizer, bos=condition)
        with pytest.raises(
            InputError, match="sequence 0 of the text 'text' itself begins with the BOS token"
        ):
            from_text(text, tokenizer, sequences=1, length=6, bos=condition)
        with pytest.raises(InputError, match="sequence 0 of the data set 'iterable' itself begins"):
            from_dataset([{"text": text}], tokenizer, sequences=1, length=6, bos=condition)


def test_bos_counts_as_part_of_the_length():
    tokenizer = byte_tokenizer()
    # Of length 3 with BOS, 2 tokens are text: 3 x 2 = 6 of 7, from floor(7i/3) = 0, 2, 4.
    made = from_text("abcdefg", tokenizer, sequences=3, length=3)
    assert made.tokens.tolist() == [[0, *ids_of(piece, tokenizer)] for piece in ("ab", "cd", "ef")]
    assert made.lengths.tolist() == [3, 3, 3]
    with pytest.raises(
        InputError, match=r"need 6 x 2 = 12 for sequences of 3 with BOS \(5 would fit\)"
    ):
        from_text("abcdefghij", tokenizer, sequences=6, length=3)


@settings(deadline=None, max_examples=50)
@given(n=st.integers(2, 90), sequences=st.integers(1, 20), length=st.integers(2, 12))
def test_sequences_are_consecutive_and_never_overlap(n, sequences, length):
    tokenizer = plain_tokenizer()
    # Printable ASCII in ascending order, so that every token names its own place in the text.
    text = "".join(chr(33 + i) for i in range(n))
    ids = ids_of(text, tokenizer)
    assert len(set(ids)) == n
    if n < sequences * length:
        with pytest.raises(
            InputError, match=rf"has {n} tokens; need .*\({n // length} would fit\)"
        ):
            from_text(text, tokenizer, sequences=sequences, length=length)
        return
    made = from_text(text, tokenizer, sequences=sequences, length=length)
    starts = [index * n // sequences for index in range(sequences)]
    assert made.tokens.tolist() == [ids[start : start + length] for start in starts]
    assert all(after - before >= length for before, after in pairwise(starts))


@pytest.mark.parametrize(
    ("sequences", "length", "text"), [(0, 4, "0 sequences"), (1, 1, "the length is 1")]
)
def test_fewer_than_one_sequence_or_two_tokens_are_refused(sequences, length, text):
    tokenizer = plain_tokenizer()
    size = {"sequences": sequences, "length": length}
    for call in (
        lambda: from_text("abcdefgh", tokenizer, **size),
        lambda: from_dataset([{"text": "abcdefgh"}], tokenizer, **size),
        lambda: random_tokens(tokenizer, generator=generator(), **size),
        lambda: repeated_tokens(tokenizer, generator=generator(), **size),
    ):
        with pytest.raises(InputError, match=text):
            call()


def test_prompts_of_unequal_length_are_padded_on_the_right_and_get_no_end_token():
    tokenizer = byte_tokenizer(template="<s> $A </s>", pad="<pad>", eos="</s>")
    made = from_prompts(["abcd", "e"], tokenizer)
    assert made.tokens.tolist() == [
        [0, *ids_of("abcd", tokenizer)],
        [0, *ids_of("e", tokenizer), 3, 3, 3],
    ]
    assert made.lengths.tolist() == [5, 2]
    assert (made.source, made.seed) == ("prompts", None)


@pytest.mark.parametrize(
    ("pad", "eos", "expected"), [("<pad>", "</s>", 3), (None, "</s>", 1), (None, None, 0)]
)
def test_padding_is_the_pad_token_else_eos_else_zero(pad, eos, expected):
    made = from_prompts(["abcd", "ef"], plain_tokenizer(pad=pad, eos=eos))
    assert made.tokens[1, 2:].tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "there is no prompt"),
        (["abc", ""], r"prompt 1 \(''\) has no tokens"),
        (["a"], "prompt 0 .* is a single token; need at least 2"),
        (["ab", "c\udcff"], r"the text 'c\\udcff' is no UTF-8 \(surrogates not allowed\)"),
        ("abc", r"prompts of from_prompts is 'abc' \(str\); need a list"),
    ],
)
def test_prompts_that_hold_nothing_are_refused(prompts, text):
    with pytest.raises(InputError, match=text):
        from_prompts(prompts, plain_tokenizer())


def test_random_tokens_are_uniform_over_the_ordinary_ids():
    made = random_tokens(plain_tokenizer(), sequences=256, length=256, generator=generator())
    counts = torch.bincount(made.tokens.flatten(), minlength=4 + N_BYTES)
    assert counts[:4].tolist() == [0, 0, 0, 0]
    # 65,536 draws of 256 ids: 256 each, standard deviation sqrt(65536 * 1/256 * 255/256) = 15.97; 5 of them.
    assert (counts[4:] - 256).abs().max() < 5 * 15.97


def test_random_tokens_are_ordinary_ids_of_the_model():
    def drawn(tokenizer, **named):
        return (
            random_tokens(tokenizer, sequences=64, length=256, generator=generator(), **named)
            .tokens.unique()
            .tolist()
        )

    # <x> has no role (not bos, eos, pad), so all_special_ids may not have it; it is special all the same.
    assert drawn(plain_tokenizer(bos=None)) == list(range(4, 4 + N_BYTES))
    assert drawn(plain_tokenizer(), vocab_size=6) == [4, 5]
    assert drawn(plain_tokenizer(), vocab_size=10**6) == list(range(4, 4 + N_BYTES))
    assert drawn(None, vocab_size=3) == [0, 1, 2]


def test_the_same_generator_state_draws_the_same_tokens_and_the_seed_is_recorded():
    size = {"sequences": 4, "length": 16}
    one, two, other = (
        random_tokens(plain_tokenizer(), generator=generator(seed), **size) for seed in (11, 11, 12)
    )
    assert one.hash == two.hash != other.hash
    assert (one.source, one.seed) == ("random", 11)


def test_repeated_tokens_hold_one_ordinary_id_a_sequence():
    made = repeated_tokens(byte_tokenizer(), sequences=32, length=9, generator=generator(5))
    body = made.tokens[:, 1:]
    assert torch.equal(body, body[:, :1].expand_as(body))
    assert body.min() >= 4
    assert body[:, 0].unique().numel() > 16
    assert (made.source, made.seed, made.n_positions) == ("repeated", 5, 9)


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "text"),
    [
        (None, None, "no tokenizer and no vocab_size"),
        (None, 0, "vocab_size is 0; need at least 1"),
        (plain_tokenizer(), 4, "no ordinary token below vocab_size"),
    ],
)
def test_drawing_from_nothing_is_refused(tokenizer, vocab_size, text):
    with pytest.raises(InputError, match=text):
        random_tokens(
            tokenizer, sequences=1, length=4, generator=generator(), vocab_size=vocab_size
        )


def test_documents_are_joined_by_an_empty_line_and_read_no_further_than_needed():
    tokenizer = plain_tokenizer()

    def rows():
        yield from ({"text": "abc"}, {"text": ""}, {"text": "def"})
        raise AssertionError("read on although there were enough tokens")

    made = from_dataset(rows(), tokenizer, sequences=2, length=3)
    # "abc\n\ndef" has 8 tokens; the sequences begin at 0 and 4: "abc" and "\ndef"[:3].
    assert [tokenizer.decode(row) for row in made.tokens.tolist()] == ["abc", "\nde"]
    assert made.source == "dataset:iterable"


def test_a_hugging_face_data_set_gives_its_column_and_its_name():
    dataset = Dataset.from_dict({"id": [1, 2], "body": ["abcdef", "ghijkl"]})
    dataset.info.dataset_name = "toy"
    made = from_dataset(dataset, plain_tokenizer(), column="body", sequences=2, length=6)
    assert (made.source, made.n_sequences) == ("dataset:toy", 2)


@pytest.mark.parametrize(
    ("rows", "column", "text"),
    [
        (
            [{"id": 1, "body": "abc"}],
            "text",
            "has the columns id, body, not 'text'; need the one with the text",
        ),
        ([{"id": 1}], "id", "column 'id' of row 0 holds a int; need text"),
        (
            DatasetDict({"train": Dataset.from_dict({"text": ["ab"]})}),
            "text",
            r"row 0 .* is a str; .* Give one split",
        ),
    ],
)
def test_a_data_set_without_a_column_of_text_is_refused(rows, column, text):
    with pytest.raises(InputError, match=text):
        from_dataset(rows, plain_tokenizer(), column=column, sequences=1, length=2)


def test_a_data_set_with_too_few_tokens_is_refused():
    with pytest.raises(InputError, match="the data set 'iterable' has 5 tokens; need 2 x 4 = 8"):
        from_dataset([{"text": "ab"}, {"text": "c"}], plain_tokenizer(), sequences=2, length=4)


def test_a_tensor_has_bos_only_where_every_sequence_begins_with_it():
    assert from_tensor(torch.tensor([[0, 5], [0, 6]]), tokenizer=plain_tokenizer()).bos
    assert not from_tensor(torch.tensor([[0, 5], [6, 0]]), tokenizer=plain_tokenizer()).bos
    assert not from_tensor(torch.tensor([[0, 5]]), tokenizer=plain_tokenizer(bos=None)).bos


def test_decoding_gives_one_row_per_real_token():
    tokenizer = byte_tokenizer(pad="<pad>")
    table = decode_tokens(from_prompts(["ab", "c"], tokenizer), tokenizer)
    a, b, c = ids_of("abc", tokenizer)
    rows = [(0, 0, 0, "<s>"), (0, 1, a, "a"), (0, 2, b, "b"), (1, 0, 0, "<s>"), (1, 1, c, "c")]
    expected = pd.DataFrame(rows, columns=["sequence", "position", "token_id", "text"])
    pd.testing.assert_frame_equal(table, expected, check_dtype=False)


def test_decoding_never_fails():
    made = from_tensor(torch.tensor([[4 + N_BYTES, 2**40]]))
    assert decode_tokens(made, byte_tokenizer())["text"].tolist() == ["<260>", f"<{2**40}>"]
    # The em dash is three bytes, so three tokens, none of which is a character.
    tokenizer = plain_tokenizer()
    assert (
        decode_tokens(from_prompts(["—"], tokenizer), tokenizer)["text"].tolist() == ["\ufffd"] * 3
    )
    one = from_tensor(torch.tensor([[7, 8]]), lengths=torch.tensor([1]))
    assert decode_tokens(one, None)["text"].tolist() == ["<7>"]


def test_what_a_tokenizer_returns_is_a_batch_with_its_mask_read():
    tokenizer = tiny_tokenizer(adds_bos=True)
    texts = ["the cat and the dog", "the dog"]
    expected = from_prompts(texts, tokenizer)
    for side in ("left", "right"):
        tokenizer.padding_side = side
        found = as_batch(tokenizer(texts, return_tensors="pt", padding=True))
        assert (found.hash, found.lengths.tolist()) == (expected.hash, expected.lengths.tolist())
    one = as_batch(tokenizer("the dog"))  # lists of one text
    assert one.tokens.tolist() == tokenizer("the dog", return_tensors="pt")["input_ids"].tolist()
    with pytest.raises(InputError, match="need input_ids in rows of one length"):
        as_batch(tokenizer(texts))
    with pytest.raises(InputError, match="a mapping with ids was given as tokens; need input_ids"):
        as_batch({"ids": [[3, 4]]})


def test_a_document_that_continues_another_row_is_refused():
    tokens, places = torch.arange(3, 9)[None], torch.tensor([[5, 6, 7, 0, 1, 2]])
    with pytest.raises(
        InputError,
        match="a document begins at position 5 by these position_ids; need documents that",
    ):
        from_tensor(tokens, position_ids=places)
    assert from_tensor(tokens[:, 2:], position_ids=places[:, 2:]).tokens.tolist() == [[6, 7, 8]]


@pytest.mark.parametrize(
    ("pad", "rows", "said"),
    [
        (0, [[5, 6, 7, 8], [5, 6, 0, 0]], "row 1 ends with the padding id 0"),
        (0, [[5, 6, 7, 8], [0, 5, 6, 7]], "row 1 begins with the padding id 0"),
        (0, [[0, 0, 5, 6], [0, 5, 0, 0], [7, 8, 7, 0]], "rows 0-1 begin and rows 1-2 end with"),
        (2, [[5, 6, 7, 2], [5, 6, 2, 2]], "row 1 ends with the padding id 2"),  # one EOS is text
        (1, [[1, 5, 6, 7], [1, 1, 5, 6]], "row 1 begins with the padding id 1"),  # and one BOS
        (None, [[5, 6, 7, 2], [5, 2, 2, 2]], "row 1 ends with the padding id 2"),
        (0, [[0, 0, 0, 0], [5, 6, 7, 8]], ""),
        (2, [[1, 6, 7, 2], [5, 6, 7, 8]], ""),
        (0, [[5, 0, 0, 8], [5, 6, 7, 8]], ""),
    ],
)
def test_padding_without_a_mask_is_named_by_its_rows(pad, rows, said):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id = pad, 2, 1
    tokens = torch.tensor(rows)
    found = unmasked_padding_text(from_tensor(tokens), tokenizer)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    if said.startswith("row 1 ends"):
        mask = tokens != (2 if pad is None else pad)
        mask[0] = True
        assert not unmasked_padding_text(from_tensor(tokens, attention_mask=mask), tokenizer)

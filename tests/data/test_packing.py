"""Packing by hand on a toy tokenizer: what stands where, what is left out, what the hash hears, what is refused."""

import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from sink_lens.data import packing
from sink_lens.data.corpora import bundled_text
from sink_lens.data.packing import pack, read_pack
from sink_lens.data.vocabulary import train_vocabulary
from sink_lens.errors import InputError


def letters(*, bos="<b>", eos="<e>", more=0):
    """One token a letter: <b> 0, <e> 1, a 2, b 3, ..."""
    words = ["<b>", "<e>", *"abcdefghijklmnopqrstuvwxyz<>", *(f"w{n}" for n in range(more))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="z"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken("<b>", special=True), AddedToken("<e>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)


def ids(split):
    return [split[n]["input_ids"].tolist() for n in range(len(split))]


TEXTS = ["abcd", "ef", "", "ghijklmno"]
# One stream, EOS (1) after each document, the empty one left out:
#   a b c d 1 e f 1 g h i j k l m n o 1   with a = 2, ..., o = 16
STREAM = [2, 3, 4, 5, 1, 6, 7, 1, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1]


def test_sequences_begin_with_bos_and_lose_nothing_but_the_tail(tmp_path):
    # length 5 is BOS and 4 of the stream: 18 // 4 = 4 sequences, 2 tokens left out. A quarter of 4 is 1, held out
    # from the middle: number (2 * 0 + 1) * 4 // 2 = 2.
    train, evaluation = pack(TEXTS, letters(), length=5, folder=tmp_path / "p", eval_frac=0.25)
    rows = [[0, *STREAM[n : n + 4]] for n in (0, 4, 8, 12)]
    assert ids(train) == [rows[0], rows[1], rows[3]]
    assert ids(evaluation) == [rows[2]]
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text())
    assert (manifest["documents"], manifest["left_out"]) == (3, 2)
    assert (len(train), train.length, train.n_tokens) == (3, 5, 15)
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [
        "evaluation.npy",
        "manifest.json",
        "train.npy",
    ]


def test_without_bos_the_whole_length_is_text(tmp_path):
    train, evaluation = pack(
        TEXTS, letters(), length=6, folder=tmp_path / "p", bos=False, eval_frac=0.3
    )
    # 18 // 6 = 3 sequences; number 3 // 2 = 1 is held out.
    assert ids(train) == [STREAM[:6], STREAM[12:18]]
    assert ids(evaluation) == [STREAM[6:12]]


def test_an_item_is_what_a_trainer_reads(tmp_path):
    train, _ = pack(TEXTS, letters(), length=5, folder=tmp_path / "p")
    item = train[0]
    assert set(item) == {"input_ids", "labels"}
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert torch.equal(item["input_ids"], item["labels"])
    item["labels"][0] = -100  # a copy: neither the other nor the file changes
    assert item["input_ids"][0] == train[0]["labels"][0] == 0
    batch = next(iter(DataLoader(train, batch_size=2)))
    assert batch["input_ids"].shape == (2, 5)
    with pytest.raises(IndexError):
        train[len(train)]


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 0.5])
def test_held_out_sequences_are_spread_and_in_neither_twice(tmp_path, share):
    texts = ["abcdefghijklmnopqrstuvwxy" * 40]
    train, evaluation = pack(texts, letters(), length=5, folder=tmp_path / "p", eval_frac=share)
    n = len(train) + len(evaluation)
    assert n == 1001 // 4
    assert len(evaluation) == max(1, round(n * share))
    numbers = packing._evaluation_indices(n, share).tolist()
    gaps = {after - before for before, after in pairwise(numbers)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_spelling_of_a_special_token_in_a_text_is_text(tmp_path):
    train, _ = pack(["a<b>c<e>" * 4], letters(), length=9, folder=tmp_path / "p", bos=False)
    # "<" is 28, "b" 3, ">" 29: no 0 and no 1 stands in the first sequence.
    assert ids(train)[0] == [2, 28, 3, 29, 4, 28, 6, 29, 2]


@pytest.mark.parametrize(("more", "dtype"), [(0, "<u2"), (70_000, "<u4")])
def test_ids_take_two_bytes_where_they_fit(tmp_path, more, dtype):
    train, _ = pack(TEXTS, letters(more=more), length=5, folder=tmp_path / "p")
    assert np.load(tmp_path / "p" / "train.npy", mmap_mode="r").dtype == np.dtype(dtype)
    assert ids(train)[0] == [0, 2, 3, 4, 5]


def test_a_pack_of_several_batches_and_writes_is_the_same(tmp_path, monkeypatch):
    whole = pack(TEXTS * 20, letters(), length=5, folder=tmp_path / "a")
    monkeypatch.setattr(packing, "_CHARACTERS_AT_ONCE", 7)
    monkeypatch.setattr(packing, "_SEQUENCES_AT_ONCE", 2)
    pieces = pack(TEXTS * 20, letters(), length=5, folder=tmp_path / "b")
    assert [split.hash for split in whole] == [split.hash for split in pieces]
    assert ids(whole[0]) == ids(pieces[0])


def test_the_hash_changes_with_every_input(tmp_path):
    def hashes(name, texts=TEXTS, **options):
        options = {"length": 5, "eval_frac": 0.25, "tokenizer": letters()} | options
        return tuple(split.hash for split in pack(texts, folder=tmp_path / name, **options))

    used = letters()
    used("abcdefgh", truncation=True, max_length=3)  # leaves truncation on in its backend
    base, others = (
        hashes("base"),
        [
            hashes("text", ["abce", "ef", "ghijklmno"]),
            hashes("tokenizer", tokenizer=letters(more=1)),
            hashes("length", length=4),
            hashes("bos", bos=False),
            hashes("share", eval_frac=0.5),
        ],
    )
    assert len({base[0], base[1], *(train for train, _ in others)}) == 2 + len(others)
    assert hashes("again", tokenizer=used) == base


def test_an_equal_pack_is_found_and_not_made_again(tmp_path):
    first = pack(TEXTS, letters(), length=5, folder=tmp_path / "p")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()}
    again = pack(iter(TEXTS), letters(), length=5, folder=tmp_path / "p")
    assert [split.hash for split in first] == [split.hash for split in again]
    assert ids(read_pack(tmp_path / "p")[0]) == ids(first[0])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()} == before


def flip(folder):
    content = bytearray((folder / "train.npy").read_bytes())
    content[-1] ^= 1
    (folder / "train.npy").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip, "train.npy has changed"),
        (lambda folder: (folder / "evaluation.npy").unlink(), "evaluation.npy is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "no whole manifest"),
    ],
)
def test_a_damaged_pack_is_refused(tmp_path, damage, named):
    folder = tmp_path / "p"
    pack(TEXTS, letters(), length=5, folder=folder)
    damage(folder)
    with pytest.raises(InputError, match=f"{named}.*pack again"):
        pack(TEXTS, letters(), length=5, folder=folder)
    with pytest.raises(InputError, match=named):
        read_pack(folder)


def test_an_interrupted_pack_leaves_nothing(tmp_path):
    def texts():
        yield "abcd" * 10
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(texts(), letters(), length=5, folder=tmp_path / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["p.lock"]


def test_a_worker_process_opens_the_file_itself(tmp_path):
    train, _ = pack(TEXTS * 100, letters(), length=5, folder=tmp_path / "p")
    sent = pickle.dumps(train)
    assert len(sent) < 1000  # the path, not the tokens
    assert ids(pickle.loads(sent)) == ids(train)  # noqa: S301


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": 1}, "length is 1; need at least 2"),
        ({"eval_frac": 0.0}, "eval_frac is 0.0"),
        ({"tokenizer": letters(eos=None)}, "no EOS token"),
        ({"tokenizer": letters(bos=None)}, "no BOS token"),
        ({"tokenizer": object()}, "need a fast one"),
        ({"folder": "file/p"}, "cannot be written"),
        ({"texts": []}, "0 tokens; need 8"),
        ({"texts": (text for text in [b"abc"])}, "a document is a bytes"),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path, change, named):
    (tmp_path / "file").touch()
    options = {"texts": TEXTS, "tokenizer": letters(), "length": 5, "folder": "p"} | change
    with pytest.raises(InputError, match=named):
        pack(**options | {"folder": tmp_path / options["folder"]})
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["file"]


def test_our_own_vocabulary_packs_and_decodes_to_the_text(tmp_path):
    text = bundled_text()[:20_000]
    tokenizer = train_vocabulary([text], vocab_size=400)
    train, evaluation = pack([text], tokenizer, length=32, folder=tmp_path / "p", eval_frac=0.1)
    numbers = packing._evaluation_indices(len(train) + len(evaluation), 0.1).tolist()
    rows, held = ids(train), ids(evaluation)
    for number, row in zip(numbers, held, strict=True):
        rows.insert(number, row)
    assert all(row[0] == tokenizer.bos_token_id for row in rows)
    decoded = tokenizer.decode([token for row in rows for token in row[1:]])
    assert text.startswith(decoded.removesuffix("<eos>"))
    assert len(decoded) > 0.99 * len(text)

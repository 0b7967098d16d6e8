"""A vocabulary of our own: deterministic, lossless for every text, with BOS where it is said to be."""

import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sink_lens.data.corpora import bundled_text
from sink_lens.data.vocabulary import BOS, EOS, SMALLEST, train_vocabulary
from sink_lens.errors import InputError

TEXT = bundled_text()[:60_000]
TOKENIZER = train_vocabulary([TEXT], vocab_size=500)


def test_the_vocabulary_has_its_size_its_special_tokens_and_frequent_pairs():
    assert len(TOKENIZER) == 500
    assert (TOKENIZER.bos_token, TOKENIZER.bos_token_id) == (BOS, 0)
    assert (TOKENIZER.eos_token, TOKENIZER.eos_token_id) == (EOS, 1)
    # " the" is the most frequent word of English; 500 tokens hold it whole.
    assert TOKENIZER.tokenize(" the") == ["Ġthe"]
    assert len(TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]) < len(TEXT) / 1.8
    ids = TOKENIZER("Call me")["input_ids"]
    assert ids[0] == 0
    assert ids[1:] == TOKENIZER("Call me", add_special_tokens=False)["input_ids"]


@given(st.text(max_size=60))
@example(" Ünïcode — 漢字 🐋 é e\u0301\n\n\ttabs  and 'quotes' , stops . don't\x00\x7f")
@settings(max_examples=60, deadline=None)
def test_every_text_comes_back(text):
    if BOS in text or EOS in text:
        return
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_the_same_texts_give_the_same_vocabulary_in_another_process():
    code = (
        "from sink_lens.data.corpora import bundled_text\nfrom sink_lens.data.vocabulary import train_vocabulary\n"
        "print(train_vocabulary([bundled_text()[:60_000]], vocab_size=500).backend_tokenizer.to_str())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == TOKENIZER.backend_tokenizer.to_str()
    assert train_vocabulary(iter([TEXT]), vocab_size=500).get_vocab() == TOKENIZER.get_vocab()


def test_a_saved_vocabulary_is_the_same_when_loaded(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("Call me Ishmael.")["input_ids"] == TOKENIZER("Call me Ishmael.")["input_ids"]
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 1)


def test_the_smallest_vocabulary_is_the_bytes():
    tokenizer = train_vocabulary(["abc"], vocab_size=SMALLEST)
    assert len(tokenizer) == 258
    assert len(tokenizer("añ", add_special_tokens=False)["input_ids"]) == 3  # ñ is two bytes
    # One word alone is learnt from its first letter on.
    assert train_vocabulary(["zebra"], vocab_size=SMALLEST + 4).tokenize("zebra") == ["zebra"]


@pytest.mark.parametrize(
    ("texts", "size", "text"),
    [(["text"], 257, "need 258"), (["text"], 1 << 21, "need 258"), ([""], 300, "no text")],
)
def test_a_size_out_of_range_and_no_text_are_refused(texts, size, text):
    with pytest.raises(InputError, match=text):
        train_vocabulary(texts, vocab_size=size)

"""Random prompts, the same with another token at one position, and a tokenizer whose spaces depend on what follows."""

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast


def pair(*, n=2, length=7, at=2):
    clean = torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, at] = 3 + (clean[:, at] + 50) % 297
    return clean, corrupted


def as_llama_2():
    """A tokenizer as Llama 2's: a space of its own before a text, words with and without one, digits alone."""
    words = [
        "?",
        "▁",
        "▁gave",
        "▁to",
        "▁Mary",
        "▁John",
        "Mary",
        "John",
        "▁year",
        "1",
        "7",
        "5",
        "=",
        ".",
    ]
    known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    known.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    known.pre_tokenizer = Split(Regex("▁?[A-Za-z]+|▁|[0-9]|[=.]"), "isolated")
    known.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")

"""Pairs of prompts of ready tasks and of files."""

import json

import numpy as np
import pandas as pd
import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Split
from transformer_lens.evals import IOIDataset
from transformers import PreTrainedTokenizerFast

from sink_lens.circuits import pairs
from sink_lens.circuits.pairs import read_pairs
from sink_lens.data.bos import answer_id, text_ids
from sink_lens.errors import InputError


def test_the_templates_of_indirect_objects_are_those_of_transformer_lens():
    assert list(pairs._TEMPLATES[:-1]) == IOIDataset.get_default_templates()
    theirs = {noun: tuple(words) for noun, words in IOIDataset.get_default_nouns().items()}
    assert list(theirs.items()) == list(pairs._OF_TEMPLATES.items())


def test_pairs_of_a_table_are_those_of_json_lines(tmp_path):
    rows = [{"clean": 'the "cat", and', "corrupted": "a dog, and", "correct": " one", "incorrect": " two"}]
    rows += [rows[0] | {"clean": "new\u2028line", "template": "b"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pd.DataFrame(rows).to_csv(tmp_path / "p.csv", index=False)
    assert read_pairs(tmp_path / "p.csv") == read_pairs(tmp_path / "p.jsonl")
    (tmp_path / "short.csv").write_text("clean,corrupted,correct\na,b,c\n")
    with pytest.raises(InputError, match=r"line 2 of .* is no pair \('incorrect'\)"):
        read_pairs(tmp_path / "short.csv")


def test_the_answer_of_a_year_is_its_next_token():
    """It has two digits in GPT-2, one elsewhere."""
    pieces = {"two": {f"{n:02}": n + 1 for n in range(100)}, "one": {str(n): n + 1 for n in range(10)}}
    for name, width in (("two", 2), ("one", 1)):
        known = Tokenizer(WordLevel({"?": 0, **pieces[name]}, unk_token="?"))
        known.pre_tokenizer = Split(Regex(rf"\d{{{width}}}"), "isolated")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")
        options = {"d_vocab": 200, "generator": np.random.default_rng(0), "file": None, "bos": "without"}
        found = pairs.pairs_that_fit("greater-than", tokenizer, pairs=4, **options)
        for clean, _, correct, incorrect, _ in found:
            right, wrong, year = (
                tokenizer.decode([one]) for one in (correct, incorrect, clean[3 if width == 1 else 2])
            )
            assert len(right) == width
            assert int(wrong[0]) < int(year[0]) < int(right[0])


def test_an_answer_is_the_token_that_it_is_behind_the_prompt():
    """A tokenizer as Mistral's puts a space before a text that stands alone, and has a token for a space alone."""
    words = ["?", "▁", "▁a", *(f"▁{name}" for name in pairs._NAMES)]
    known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    known.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    known.pre_tokenizer = Split("▁", "merged_with_next")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")
    mary = f" {pairs._NAMES[0]}"
    assert len(text_ids(mary, tokenizer)) == 2
    assert tokenizer.convert_ids_to_tokens(answer_id(mary, "a", tokenizer)) == f"▁{pairs._NAMES[0]}"
    options = {"d_vocab": len(words), "generator": np.random.default_rng(0), "file": None, "bos": "without"}
    found = pairs.pairs_that_fit("ioi", tokenizer, pairs=4, **options)
    assert len(found) == 8
    for clean, _, correct, incorrect, _ in found:
        assert {correct, incorrect} <= set(clean)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[" * 200_000, "nested too deep"),
        (json.dumps({"clean": [10**30, 2], "corrupted": [1, 2], "correct": 1, "incorrect": 2}), "clean is [1000"),
        (json.dumps({"clean": [1, 2], "corrupted": [1, 2], "correct": 10**30, "incorrect": 2}), "correct is 1000"),
        (json.dumps({"clean": [1, True], "corrupted": [1, 2], "correct": 1, "incorrect": 2}), "clean is [1, True]"),
        (json.dumps({"clean": [-1, 2], "corrupted": [1, 2], "correct": 1, "incorrect": 2}), "clean is [-1, 2]"),
    ],
)
def test_lines_that_are_no_pair_are_refused(line, says, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(InputError) as refused:
        read_pairs(tmp_path / "pairs.jsonl")
    assert "line 1 of" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", "a\x0bb", "a\u2029b"])
def test_a_text_of_a_pair_may_hold_any_line_separator_but_a_new_line(text, tmp_path):
    row = {"clean": text, "corrupted": text, "correct": " x", "incorrect": " y"}
    line = json.dumps(row, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(f"\ufeff{line}\r\n{line}\n", "utf-8")
    assert [one.clean for one in read_pairs(tmp_path / "pairs.jsonl")] == [text, text]

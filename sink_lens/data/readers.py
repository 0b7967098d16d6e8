"""From the members of an archive to documents: one function a form, each a pure function of the bytes.

Every function takes the members by path and gives (name, text) in a fixed order, whatever the archive's own.
"""

import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath

from sink_lens.data.archives import gunzipped
from sink_lens.data.binaries import r_strings, sword_books, sword_entries
from sink_lens.data.manuals import text_of_pod, text_of_rst
from sink_lens.data.markup import text_of, tidy

Documents = Iterator[tuple[str, str]]
Reader = Callable[[Mapping[str, bytes]], Documents]

_NAVIGATION = frozenset({"book-navigation", "page-links", "headerlink", "related", "sphinxsidebar", "footer", "toc"})
_SEE = re.compile(r'\(See Scofield "[^"]*"\)\.? ?')
_ACCENTS = dict(zip("'`^\"~,", "\u0301\u0300\u0302\u0308\u0303\u0327", strict=True))
_LETTERS = {
    "ae": "æ",
    "oe": "œ",
    "AE": "Æ",
    "OE": "Œ",
    "thorn": "þ",
    "eth": "ð",
    "sect": "§",
    "deg": "°",
    "frac12": "½",
}
_GUTENBERG = re.compile(r"project gutenberg|\betexts?\b|gutenberg\.(org|net)", flags=re.I)


def plain_files(members: Mapping[str, bytes]) -> Documents:
    """Each file as it is, without what Project Gutenberg once put before and after its texts."""
    for name, text in _texts(members):
        yield name, tidy(_without_gutenberg(text))


def addresses(members: Mapping[str, bytes]) -> Documents:
    """Each JSON file's ``text``, under its year and speaker."""
    for name, text in _texts(members):
        speech = json.loads(text)
        yield name, f"{speech['name']}, {speech['year']}\n\n{tidy(html.unescape(speech['text']))}"


def chapters_of_verses(members: Mapping[str, bytes]) -> Documents:
    """Lines of JSON, each a verse, as one document a chapter: its heading, then a verse a line."""
    for _, lines in _texts(members):
        chapters: dict[tuple[str, int], list[str]] = {}
        for line in lines.splitlines():
            verse = json.loads(line)
            chapters.setdefault((verse["book"], verse["chapter"]), []).append(verse["text"].strip())
        for (book, chapter), verses in chapters.items():
            yield f"{book} {chapter}", f"{book} {chapter}\n\n" + "\n".join(verses)


def tagged_words(members: Mapping[str, bytes]) -> Documents:
    """Text in which each word carries its part of speech (word/TAG), as running text."""
    for name, text in _texts(members):
        paragraphs = [" ".join(_untagged(line) for line in block.splitlines()) for block in re.split(r"\n{2,}", text)]
        yield name, tidy("\n\n".join(paragraph.strip() for paragraph in paragraphs if paragraph.strip()))


def r_books(members: Mapping[str, bytes]) -> Documents:
    """The books of an R data file, each a vector of lines."""
    for name, data in sorted(members.items()):
        for lines in r_strings(data, name=name):
            text = tidy("\n".join(lines))
            yield text.partition("\n")[0].title(), text


def sword_module(*, block: str = "b", wide: bool = False) -> Reader:
    """A reader of a SWORD Bible or commentary, a document a book or chapter; see `sword_books`."""

    def read(members: Mapping[str, bytes]) -> Documents:
        stems = sorted({path.rsplit(".", 1)[0] for path in members}, key=lambda stem: stem.endswith("nt"))
        for stem in stems:
            if any(members.get(f"{stem}.{block}z{letter}") for letter in "z"):
                for name, text in sword_books(members, stem=stem, block=block, wide=wide):
                    plain = html.unescape(text_of(re.sub(r"</?w\b[^>]*>", "", text)))  # w: a word with its number
                    yield name, tidy(_SEE.sub("", re.sub(r"</?[a-z]+>", "", plain)))

    return read


def sword_dictionary(members: Mapping[str, bytes]) -> Documents:
    """A SWORD dictionary: one document for each first letter, its entries parted by empty lines."""
    index = next(data for path, data in members.items() if path.endswith(".zdx"))
    entries = next(data for path, data in members.items() if path.endswith(".zdt"))
    letters: dict[str, list[str]] = {}
    for entry in sword_entries(index, entries, name="the dictionary"):
        text = text_of(entry).replace("&gt;", "")
        letters.setdefault(text[:1].upper(), []).append(text)
    for letter, texts in letters.items():
        yield letter, "\n\n".join(texts)


def web_pages(members: Mapping[str, bytes]) -> Documents:
    """HTML pages, without what leads from page to page."""
    for name, text in _texts(members):
        yield name, text_of(text, left_out_classes=_NAVIGATION)


def rst_pages(members: Mapping[str, bytes]) -> Documents:
    """Pages of reStructuredText, gzipped or not."""
    for name, text in _texts(members):
        yield name, text_of_rst(text)


def pod_pages(members: Mapping[str, bytes]) -> Documents:
    """Pages of Perl's pod."""
    for name, text in _texts(members):
        yield name, text_of_pod(text)


def dictionary(members: Mapping[str, bytes]) -> Documents:
    """A dictionary of the DICT server (dictzip): one document for each first letter.

    The notices before the first entry, the head words that stand again between backslashes, the braces of cross
    references and the names of sources after each sense are left out.
    """
    text = next(gunzipped(content, name=path) for path, content in members.items()).decode("utf-8", "replace")
    text = re.sub(r"^.*?^(?=\S[^\n]*\\[^\n]*\\)", "", text, count=1, flags=re.S | re.M)
    text = re.sub(r" \\[^\\\n]+\\", "", text)
    text = re.sub(r"^\s*\[(?:1913 Webster|WordNet|Webster|PJC|AS|RP|Century)[^\]\n]*\]\s*\n", "\n", text, flags=re.M)
    text = re.sub(r"\[(\w+)\]", lambda found: _LETTERS.get(found[1], found[0]), text.replace("{", "").replace("}", ""))
    text = re.sub(r"\[(['`^\"~,])([A-Za-z])\]", lambda found: f"{found[2]}{_ACCENTS[found[1]]}", text)
    text = unicodedata.normalize("NFC", text)
    letters: dict[str, list[str]] = {}
    for entry in re.split(r"\n\n(?=\S)", text):
        letter = entry.strip()[:1].upper()
        letters.setdefault(letter if "A" <= letter <= "Z" else "0", []).append(tidy(entry))
    for letter in sorted(letters):
        yield letter, "\n\n".join(letters[letter])


def _texts(members: Mapping[str, bytes]) -> Documents:
    """Members as text, by path in the order of people: chapter_2 before chapter_10."""
    for path in sorted(members, key=_in_order):
        content = gunzipped(members[path], name=path) if path.endswith(".gz") else members[path]
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("cp1252", "replace")
        yield PurePosixPath(path).name.removesuffix(".gz"), text.replace("\r\n", "\n").replace("\r", "\n")


def _in_order(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in re.split(r"(\d+)", path) if piece]


def _untagged(line: str) -> str:
    """A line of word/TAG as text, its marks set as they are written."""
    words = [word.rpartition("/")[0] or word for word in line.split()]
    text = " ".join(
        word for place, word in enumerate(words) if not (word in ";!?:" and words[place - 1 : place] == [word])
    )
    text = re.sub(r"`` ?", '"', text)
    text = re.sub(r" ?''", '"', text)
    text = re.sub(r" ([,.;:?!)\]])", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text)


def _without_gutenberg(text: str) -> str:
    """A text without the notices at its beginning and end that name Project Gutenberg."""
    start = re.search(r"^\*{3} ?START OF.*$|^\*END\*THE SMALL PRINT.*$", text, flags=re.M | re.I)
    end = re.search(r"^\*{3} ?END OF.*$|^End of (?:the |this )?Project Gutenberg.*$", text, flags=re.M | re.I)
    inner = text[start.end() if start else 0 : end.start() if end else len(text)]
    lines = inner.split("\n")
    return "\n".join(line for line in lines if not _GUTENBERG.search(line))

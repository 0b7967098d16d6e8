"""Plain text of marked-up text: HTML pages, and the OSIS and TEI of SWORD modules.

Fragments and unclosed elements are taken as they come: what is no tag is text. Nothing is fetched.
"""

import re
from html.parser import HTMLParser

_BLOCKS = {
    *("p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "dl", "dt", "dd", "tr", "table", "section"),
    *("blockquote", "article", "header", "hr"),
    *("chapter", "title", "lg", "list", "item", "entryfree", "def", "speech"),
}
"""Elements that begin and end a paragraph: of HTML, then of OSIS and TEI."""
_LINES = {"br", "lb", "l"}
_LEFT_OUT = {"script", "style", "head", "nav", "svg", "note", "form"}
"""Elements whose text is no part of the text; a note of OSIS is a footnote or a cross reference."""
_EMPTY = {"br", "hr", "img", "input", "link", "meta", "lb", "wbr", "col", "area", "base", "source"}
"""Elements that have no end."""
_VERBATIM = {"pre"}


_CONTROLS = [sign for sign in range(0x20) if chr(sign) not in "\t\n"] + [0x7F, 0xFEFF]
_SIGNS = {0xA0: " ", **dict.fromkeys(_CONTROLS, "")} | {
    sign: bytes([sign]).decode("cp1252", "ignore") for sign in range(0x80, 0xA0)
}
"""No-break spaces as spaces; control characters go, but for those that a wrong decoding of cp1252 makes."""


class _Text(HTMLParser):
    """Collects the text of a page."""

    def __init__(self, left_out_classes: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._left_out_classes = left_out_classes
        self._skipped: list[str] = []
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("type") == "x-milestone" or (tag == "l" and "eid" in given):
            return  # OSIS: the place of a verse, or the end of a line of verse
        classes = set((given.get("class") or "").split())
        if self._skipped:
            if tag == self._skipped[-1]:
                self._skipped.append(tag)
            return
        if tag in _LEFT_OUT or (classes & self._left_out_classes and tag not in _EMPTY):
            self._skipped.append(tag)
        elif tag in _VERBATIM:
            self._verbatim += 1
            self.pieces.append("\n\n")
        elif tag in _BLOCKS:
            self.pieces.append("\n\n")
            if tag == "entryfree":
                self.pieces.append(f"{given.get('n') or ''}\n")
        elif tag in _LINES or (tag == "milestone" and given.get("type") == "line"):
            self.pieces.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _LEFT_OUT:  # an empty one has no end to wait for
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag == self._skipped[-1]:
                self._skipped.pop()
                self.pieces.append(" " if tag == "note" else "")
            return
        if tag in _VERBATIM:
            self._verbatim = max(0, self._verbatim - 1)
        if tag in _BLOCKS | _VERBATIM:
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self._skipped:
            return
        text = data if self._verbatim else re.sub(r"\s+", " ", data)
        if text[:1] == " " and self.pieces and self.pieces[-1][-1:] == " " and not self._verbatim:
            text = text[1:]
        self.pieces.append(text)


def text_of(page: str, *, left_out_classes: frozenset[str] = frozenset()) -> str:
    """The text of a page or fragment, its paragraphs parted by one empty line.

    Args:
        page: HTML, OSIS or TEI.
        left_out_classes: elements with one of these classes are left out whole.
    """
    reader = _Text(left_out_classes)
    reader.feed(page)
    reader.close()
    text = "".join(reader.pieces)
    if "<note" in page or "osisID" in page:  # a note left out, or a milestone, leaves a space before a comma
        text = re.sub(r"(?<=\S) +(?=[,.;:?!)])", "", text)
    return tidy(text)


def tidy(text: str) -> str:
    """Plain line ends and spaces, no control characters, at most one empty line, none at the ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_SIGNS)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n (?=\S)", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()

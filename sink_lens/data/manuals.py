"""Plain text of manuals in reStructuredText and in Perl's pod: the words stay, the marks go.

Code examples and lists stay as they are laid out. This is no full reader of either language: what it does not
know stays as text.
"""

import html
import re
from collections.abc import Iterator

from sink_lens.data.markup import tidy

_DIRECTIVE = re.compile(r"^\s*\.\.\s+(?:\|[^|]+\|\s+)?([\w:+-]+?)\s*::(?:\s+(.*))?$")
_FOOTNOTE = re.compile(r"^\s*\.\.\s+\[#?([\w.-]*)\]\s*(.*)$")
_COMMENT = re.compile(r"^\s*\.\.(?:\s+.*)?$")
_OPTION = re.compile(r"^\s*:[\w -]+:(\s.*)?$")
_RULE = re.compile(
    r"^\s*([=\-`:.'\"~^_*+#<>])\1{2,}\s*$"  # under a title
    r"|^\s*[+|][-=+ ]{3,}[+|]\s*$|^\s*[=-]{2,}(\s+[=-]{2,})+\s*$"  # in a table
    r"|^\s*__ \S+$"  # an unnamed target
)
_DROPPED = {
    *("toctree", "contents", "index", "kernel-doc", "image", "figure", "kernel-figure", "kernel-render", "include"),
    *("kernel-include", "module", "moduleauthor", "sectionauthor", "currentmodule", "highlight", "raw", "meta"),
    *("literalinclude", "default-role", "kernel-image", "tabularcolumns", "kernel-abi", "kernel-feat", "replace"),
    *("availability", "role", "sectnum", "class", "cssclass", "program", "unicode", "maintainers-include"),
}
"""Directives that hold no text of their own; their options and content go with them."""
_CODE = (
    "code",
    "sourcecode",
    "parsed-literal",
    "testcode",
    "testsetup",
    "testoutput",
    "doctest",
    "math",
    "productionlist",
)
_TITLED = {"note", "warning", "tip", "caution", "important", "hint", "attention", "danger", "seealso"}
_VERSIONS = {
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
    "deprecated-removed": "Deprecated since version",
}


def text_of_rst(source: str) -> str:
    """The text of a page of reStructuredText, without directives, comments, targets and the lines under titles."""
    pieces: list[str] = []
    paragraph: list[str] = []
    for line, literal in _rst_lines(source.expandtabs(8).splitlines()):
        if line.strip() and not literal:
            paragraph.append(line)
            continue
        pieces += [_inline("\n".join(paragraph)), line] if paragraph else [line]
        paragraph = []
    pieces.append(_inline("\n".join(paragraph)))
    return tidy("\n".join(pieces))


def _rst_lines(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Lines that are text, and whether they are set as they are (code)."""
    place = 0
    while place < len(lines):
        line = lines[place]
        indent = len(line) - len(line.lstrip())
        place += 1
        if directive := _DIRECTIVE.match(line):
            name, rest = directive[1].lower(), (directive[2] or "").strip()
            end = _block_end(lines, place, indent=indent)
            if name in _DROPPED:
                place = end
                continue
            while place < end and _OPTION.match(lines[place]):
                place += 1
            yield " " * indent + _directive_text(name, rest), False
            if name.startswith(_CODE):
                yield from ((code, True) for code in lines[place:end])
                place = end
        elif note := _FOOTNOTE.match(line):
            yield f"{' ' * indent}[{note[1]}] {note[2]}", False
        elif _COMMENT.match(line):
            place = _block_end(lines, place, indent=indent)
        elif not _RULE.match(line):
            code = line.rstrip().endswith("::")
            yield (re.sub(r"\s*::\s*$", ":" if line.strip(" :") else "", line) if code else line), False
            if code:
                end = _block_end(lines, place, indent=indent)
                yield from ((literal, True) for literal in lines[place:end])
                place = end


def _block_end(lines: list[str], place: int, *, indent: int) -> int:
    """Where the lines end that stand further in than a directive; empty lines between them belong to them."""
    end = place
    while place < len(lines):
        line = lines[place]
        if line.strip():
            if len(line) - len(line.lstrip()) <= indent:
                break
            end = place + 1
        place += 1
    return end


def _directive_text(name: str, rest: str) -> str:
    """What a directive says itself, before its content."""
    if name in _TITLED:
        word = "See also" if name == "seealso" else name.capitalize()
        return f"{word}: {rest}".rstrip()
    if name in _VERSIONS:
        first, _, more = rest.partition(" ")
        removed = f", removed in version {more}" if name == "deprecated-removed" else f" {more}"
        return f"{_VERSIONS[name]} {first}{removed}".rstrip()
    return "" if name.startswith(_CODE) or name == "only" else rest.rstrip("\\").rstrip()


def _inline(text: str) -> str:
    """A paragraph without roles, emphasis, references and substitutions; what is set as code stays as it is."""
    if text.lstrip().startswith(">>>"):
        return text
    pieces = re.split(r"(?<!`)``(?!`)(.+?)``", text, flags=re.S)
    return "".join(piece if number % 2 else _marks_off(piece) for number, piece in enumerate(pieces))


def _marks_off(text: str) -> str:
    text = re.sub(r":([a-zA-Z][\w:+-]*):`([^`]*)`", lambda found: _role(found[1], found[2]), text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]+>`__?", r"\1", text)
    text = re.sub(r"(?<![\w`])`([^`]+)`_{0,2}", r"\1", text)
    text = re.sub(r"(?<![\w*])\*\*(\S(?:[^*]*\S)?)\*\*(?![\w*])", r"\1", text)
    text = re.sub(r"(?<![\w*\\])\*([^\s*](?:[^*]*?[^\s*])?)\*(?![\w*])", r"\1", text)
    text = re.sub(r"(?<=[a-z\]])_(?=[\s.,;:)]|$)", "", text)
    text = re.sub(r"\|(\w+)\|", r"\1", text)
    return re.sub(r"\\([*_`|\\ ])", lambda found: found[1].strip(), text)


def _role(role: str, content: str) -> str:
    shown = re.match(r"(.+?)\s*<[^>]+>$", content, flags=re.S)
    text = (shown[1] if shown else content).lstrip("!~.")
    return f"{role.upper()} {text}" if role in ("rfc", "pep") and text.isdecimal() else text


_CODES = re.compile(r"([A-Z])<(?!<)([^<>]*)>")
_LONG_CODES = re.compile(r"([A-Z])(<<+)\s+(.*?)\s+(>>+)", flags=re.S)
_OPEN, _CLOSE = "\x01", "\x02"


def text_of_pod(source: str) -> str:
    """The text of a page of pod: headings, paragraphs, items and examples; no index entries, no code beside it.

    Sections on copyright and licence are left out.
    """
    paragraphs = re.split(r"\n\s*\n", source.replace("\r\n", "\n"))
    return tidy("\n\n".join(_pod_paragraphs(paragraphs)))


def _pod_paragraphs(paragraphs: list[str]) -> Iterator[str]:
    skipped = 0
    inside = legal = False
    mark = ""
    for paragraph in paragraphs:
        command = re.match(r"=(\w+)\s*(.*)", paragraph.strip("\n"), flags=re.S)
        if command:
            inside = command[1] != "cut"
            skipped = max(0, skipped + {"begin": 1, "end": -1}.get(command[1], 0))
            if command[1].startswith("head"):
                legal = bool(re.search("copyright|licen[cs]e", command[2], flags=re.I))
            if not (skipped or legal) and re.fullmatch(r"head\d|item", command[1]):
                text = _pod_inline(command[2]).strip()
                if re.fullmatch(r"\*|\d+\.?", text):
                    mark = f"{text} "
                else:
                    yield re.sub(r"^\*\s*", "* ", text)
        elif inside and not (skipped or legal):
            code = paragraph.lstrip("\n")[:1] in (" ", "\t")
            yield paragraph.strip("\n").expandtabs(8) if code else mark + _pod_inline(paragraph).lstrip("\n")
            mark = ""


def _pod_inline(text: str) -> str:
    """A paragraph without its formatting codes, the innermost first."""

    def plain(code: str, content: str) -> str:
        if code == "E":
            return _entity(content)
        if code in "XZ":
            return ""
        if code == "L":
            shown, bar, target = content.partition("|")
            return shown if bar else _link(target or content)
        if code == "S":
            return content.replace("\n", " ")
        return content

    text = _LONG_CODES.sub(lambda found: _kept(found[3]) if found[1] not in "LXE" else plain(found[1], found[3]), text)
    for _ in range(6):
        changed = _CODES.sub(lambda found: _kept(plain(found[1], found[2])), text)
        if changed == text:
            break
        text = changed
    return text.replace(_OPEN, "<").replace(_CLOSE, ">")


def _kept(text: str) -> str:
    """Text whose angle brackets are no code any more."""
    return text.replace("<", _OPEN).replace(">", _CLOSE)


def _entity(name: str) -> str:
    own = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "lchevron": "«", "rchevron": "»"}
    if name in own:
        return own[name]
    if re.fullmatch(r"(0x[0-9a-fA-F]+|\d+)", name):
        return chr(int(name, 16 if name.startswith("0x") else 10))
    return html.unescape(f"&{name};")


def _link(target: str) -> str:
    page, slash, section = target.partition("/")
    section = section.strip('"')
    if target.startswith(("http:", "https:", "ftp:", "mailto:")) or not slash:
        return target
    return f'"{section}" in {page}' if page else f'"{section}"'

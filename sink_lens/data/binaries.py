"""Text out of two binary formats, without the programs that wrote them: SWORD modules and R's data files.

Both are read as data only. What does not fit the format is refused; nothing is guessed.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping

from sink_lens.data.archives import inflated
from sink_lens.errors import InputError

_R_STRINGS = 16
_R_TEXT = 9
_R_HEADER = 14


def sword_books(members: Mapping[str, bytes], *, stem: str, block: str, wide: bool) -> Iterator[tuple[str, str]]:
    """Blocks (a book or a chapter each) of a Bible or commentary, as OSIS: name of the block, its text.

    A module has three files: where each block lies (s), its zlib data (z), and where each verse lies in its
    block (v). Verses that share a text name the same place; it is taken once.

    Args:
        members: files of the module by path.
        stem: path of the files without their ending, as ``.../ot``.
        block: the letter of their endings for the size of a block: b (book) or c (chapter).
        wide: whether the length of a verse has four bytes and not two.

    Raises:
        InputError: a file is missing, or they do not fit together.
    """
    try:
        places, data, verses = (members[f"{stem}.{block}z{letter}"] for letter in "szv")
    except KeyError as error:
        raise InputError(f"the module has no {error}; need its three files. Leave this part out.") from error
    verse = struct.Struct("<III" if wide else "<IIH")
    try:
        blocks = [
            inflated(data[start : start + size], name=stem) if size else b""
            for start, size, _ in struct.iter_unpack("<III", places)
        ]
        found = dict.fromkeys(entry for entry in verse.iter_unpack(verses) if entry[2])
    except struct.error as error:
        raise InputError(f"{stem}: its index has half an entry; need whole files. Fetch them again.") from error
    texts: dict[int, list[str]] = {}
    for number, start, size in found:
        if number >= len(blocks) or start + size > len(blocks[number]):
            raise InputError(f"{stem}: a verse lies outside its block; need another form of index. It is not read.")
        texts.setdefault(number, []).append(blocks[number][start : start + size].decode("utf-8", "replace"))
    for number in sorted(texts):
        yield f"{stem.rsplit('/', 1)[-1]}-{number}", " ".join(texts[number])


def sword_entries(index: bytes, data: bytes, *, name: str) -> Iterator[str]:
    """Entries of a dictionary module, in order, as TEI.

    The index (zdx) says where each zlib block of the data (zdt) lies; a block begins with the number of its
    entries and where each of them lies in it.

    Raises:
        InputError: the files are damaged.
    """
    try:
        for start, size in struct.iter_unpack("<II", index):
            block = inflated(data[start : start + size], name=name)
            (count,) = struct.unpack_from("<I", block)
            for number in range(count):
                place, length = struct.unpack_from("<II", block, 4 + 8 * number)
                if place + length > len(block):
                    raise InputError(f"{name}: an entry lies outside its block; need whole files. Fetch them again.")
                yield block[place : place + length].rstrip(b"\0").decode("utf-8", "replace")
    except struct.error as error:
        raise InputError(f"{name}: its index has half an entry; need whole files. Fetch them again.") from error


def r_strings(data: bytes, *, name: str) -> Iterator[list[str]]:
    """The vectors of strings in the data file of an R package (Rdata.rdb), each a list, in order.

    The file is a row of objects, each with its size (four bytes) and its zlib data: R's serialisation, version 3,
    big-endian. Only plain vectors of strings are read.

    Raises:
        InputError: an object is damaged, or of another kind.
    """
    place = 0
    while place < len(data):
        if place + 4 > len(data):
            raise InputError(f"{name} is cut short; need whole R data. Fetch it again.")
        (size,) = struct.unpack_from(">I", data, place)
        content, used = _first_zlib(data[place + 4 :], name=name)
        if len(content) != size:
            raise InputError(f"{name}: an object has {len(content):,} bytes and says {size:,}. Fetch it again.")
        yield _r_vector(content, name=name)
        place += 4 + used


def _first_zlib(data: bytes, *, name: str) -> tuple[bytes, int]:
    """The first zlib stream of the data, unpacked, and how many bytes it takes."""
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(data, 50_000_000)
    except zlib.error as error:
        raise InputError(f"{name} is damaged ({error}); need whole R data. Fetch it again.") from error
    if not reader.eof:
        raise InputError(f"{name} is cut short, or an object is over 50 MB; need whole R data. Fetch it again.")
    return content, len(data) - len(reader.unused_data)


def _r_vector(content: bytes, *, name: str) -> list[str]:
    try:
        if content[:2] != b"X\n" or struct.unpack_from(">I", content, 2) != (3,):
            raise InputError(f"{name}: an object is not of R's serialisation 3; it is not read.")
        (encoding,) = struct.unpack_from(">I", content, _R_HEADER)
        place = _R_HEADER + 4 + encoding
        kind, count = struct.unpack_from(">II", content, place)
        if kind & 0xFF != _R_STRINGS:
            raise InputError(f"{name}: an object is of R's kind {kind & 0xFF}; need {_R_STRINGS}, strings.")
        place += 8
        strings: list[str] = []
        for _ in range(count):
            flags, length = struct.unpack_from(">Ii", content, place)
            if flags & 0xFF != _R_TEXT or length < 0 or place + 8 + length > len(content):
                raise InputError(f"{name}: a string is missing or damaged; need plain strings. Fetch it again.")
            strings.append(content[place + 8 : place + 8 + length].decode("utf-8", "replace"))
            place += 8 + length
    except struct.error as error:
        raise InputError(f"{name}: an object is cut short; need whole R data. Fetch it again.") from error
    return strings

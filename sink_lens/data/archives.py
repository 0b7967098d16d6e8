"""Reading declared members of an archive (.tar.gz, .tgz, .deb): in memory, within a limit, and nothing else.

Nothing is unpacked to the disk and nothing is run, so that a member's path is a name and no more. An archive
with a path that leaves its folder, a declared member that is a link, or more bytes than the limit is refused.
"""

import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from sink_lens.errors import InputError

LIMIT = 1_500_000_000
"""Most bytes that an archive may hold when unpacked: four times the largest that we know."""

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER = 60
_CHUNK = 1 << 20


def read_members(archive: Path, *, wanted: Sequence[str], limit: int = LIMIT) -> dict[str, bytes]:
    """The content of the members whose path fits a pattern, by path.

    Args:
        archive: a gzipped tar file (npm, PyPI) or a Debian package.
        wanted: shell patterns on the whole path (``*`` goes over folders too); one that begins with ``!`` takes
            members out again.
        limit: most bytes that the archive may hold when unpacked, all members together.

    Raises:
        InputError: the archive is damaged, of another kind, hostile, over the limit, or has no such member.
    """
    found: dict[str, bytes] = {}
    try:
        with archive.open("rb") as file:
            stream: Any = _Limited(_tar_stream(file, archive=archive), limit=limit, name=archive.name)
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    path = _safe_path(member.name, archive=archive)
                    if not _fits(path, wanted):
                        continue
                    if member.isdir():
                        continue
                    if not member.isreg():
                        raise InputError(f"{archive.name}: {path} is a link or a device; need a file. It is not read.")
                    content = tar.extractfile(member)
                    found[path] = b"" if content is None else content.read()
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise InputError(f"{archive.name} is damaged ({error}); need a whole archive. Fetch it again.") from error
    if not found:
        raise InputError(
            f"{archive.name} has no member like {', '.join(wanted)}; need the text that this version of sink_lens "
            "knows. The package has changed: leave this part out."
        )
    return found


def gunzipped(content: bytes, *, name: str, limit: int = 200_000_000) -> bytes:
    """A gzipped member, unpacked (dictzip is gzip too).

    Raises:
        InputError: it is damaged or over the limit.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            text = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{name} is damaged ({error}); need whole gzip data. Fetch it again.") from error
    if len(text) > limit:
        raise _over(name, limit)
    return text


def inflated(content: bytes, *, name: str, limit: int = 50_000_000) -> bytes:
    """A block of zlib data, unpacked.

    Raises:
        InputError: it is damaged or over the limit.
    """
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(content, limit)
        if reader.unconsumed_tail:
            raise _over(name, limit)
        if not reader.eof:
            raise zlib.error("it is cut short")
    except zlib.error as error:
        raise InputError(f"{name} is damaged ({error}); need whole zlib data. Fetch it again.") from error
    return text


class _Limited:
    """A stream that refuses to give more bytes than a limit."""

    def __init__(self, stream: Any, *, limit: int, name: str) -> None:
        self._stream = stream
        self._limit = limit
        self._name = name
        self._given = 0

    def read(self, size: int = _CHUNK) -> bytes:
        """The next bytes."""
        content = self._stream.read(size)
        self._given += len(content)
        if self._given > self._limit:
            raise _over(self._name, self._limit)
        return content


def _tar_stream(file: Any, *, archive: Path) -> Any:
    """The tar stream inside an archive, unpacked as it is read."""
    magic = file.read(len(_AR_MAGIC))
    if magic[:2] == b"\x1f\x8b":
        file.seek(0)
        return gzip.GzipFile(fileobj=file)
    if magic != _AR_MAGIC:
        raise InputError(f"{archive.name} begins with {magic!r}; need a gzipped tar file or a Debian package.")
    while header := file.read(_AR_HEADER):
        name = header[:16].decode("ascii", "replace").strip().rstrip("/")
        try:
            size = int(header[48:58])
        except ValueError as error:
            raise InputError(f"{archive.name} is damaged: no size at {name!r}. Fetch it again.") from error
        if name.startswith("data.tar"):
            return _unpacked(io.BytesIO(file.read(size)), suffix=name.removeprefix("data.tar"), archive=archive)
        file.seek(size + size % 2, io.SEEK_CUR)
    raise InputError(f"{archive.name} has no data.tar; need a whole Debian package. Fetch it again.")


def _unpacked(content: Any, *, suffix: str, archive: Path) -> Any:
    if suffix == "":
        return content
    if suffix == ".xz":
        return lzma.LZMAFile(content)
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=content)
    if suffix == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(content, "zstd")
    raise InputError(f"{archive.name} holds data.tar{suffix}; need .xz, .gz or .zst. It is not read.")


def _safe_path(name: str, *, archive: Path) -> str:
    """A member's path without a leading ``./``; refused where it leaves its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise InputError(f"{archive.name} holds the path {name!r}, which leaves its folder; the archive is not read.")
    return str(path)


def _fits(path: str, wanted: Sequence[str]) -> bool:
    inside = any(fnmatchcase(path, pattern) for pattern in wanted if not pattern.startswith("!"))
    return inside and not any(fnmatchcase(path, pattern[1:]) for pattern in wanted if pattern.startswith("!"))


def _over(name: str, limit: int) -> InputError:
    return InputError(f"{name} holds more than {limit:,} bytes unpacked; need less. It is not read.")

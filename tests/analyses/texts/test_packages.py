"""Archives are read in memory, within a limit, and what is hostile or damaged is refused; no package code is run."""

import gzip
import io
import itertools
import subprocess
import sys
import tarfile

import pytest

from analyses.texts.packages import Package, download, read_members
from sink_lens.data.cache import sha256_of
from sink_lens.errors import InputError


def tgz(path, files, *, more=()):
    """A gzipped tar file: path -> bytes, then headers of other kinds."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in more:
            archive.addfile(member)
    path.write_bytes(gzip.compress(buffer.getvalue()))
    return path


def header(name, kind=tarfile.REGTYPE, *, target="", size=0, pax=None):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size, member.pax_headers = kind, target, size, pax or {}
    return member


FILES = {"package/a.txt": b"one", "package/deep/b.txt": b"two", "package/run.js": b"no"}


def test_only_the_files_that_fit_are_read_and_nothing_is_unpacked(tmp_path):
    archive = tgz(tmp_path / "a.tgz", FILES)
    assert read_members(archive, "package/*.txt") == {"package/a.txt": b"one", "package/deep/b.txt": b"two"}
    assert read_members(archive, "*/a.txt") == {"package/a.txt": b"one"}
    assert list(tmp_path.iterdir()) == [archive]
    with pytest.raises(InputError, match=r"a\.tgz has no file like texts/\*"):
        read_members(archive, "texts/*")


@pytest.mark.parametrize("path", ["../escaped.txt", "/etc/passwd.txt", "package/../../x.txt"])
@pytest.mark.parametrize("pattern", ["*", "package/a.txt"])
def test_a_path_that_leaves_its_folder_refuses_the_archive(tmp_path, path, pattern):
    with pytest.raises(InputError, match="leaves its folder"):
        read_members(tgz(tmp_path / "a.tgz", {path: b"bad", **FILES}), pattern)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_a_link_or_device_is_refused_where_it_is_asked_for_and_passed_over_elsewhere(tmp_path, kind):
    archive = tgz(tmp_path / "a.tgz", FILES, more=[header("package/c.txt", kind, target="/etc/passwd")])
    with pytest.raises(InputError, match=r"package/c\.txt is a link, a device or sparse"):
        read_members(archive, "package/*.txt")
    assert read_members(archive, "*/a.txt") == {"package/a.txt": b"one"}


@pytest.mark.parametrize(("size", "found"), [(2**32, "no size that can be"), (100, "a link, a device or sparse")])
def test_a_sparse_file_is_refused(tmp_path, size, found):
    # Its map says "no data, up to this size": 4 GB in 1 KB.
    sparse = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "a.txt", "GNU.sparse.map": "0,0"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(header("a.txt", pax=sparse | {"GNU.sparse.size": str(size)}))
    (tmp_path / "a.tgz").write_bytes(gzip.compress(buffer.getvalue()))
    with pytest.raises(InputError, match=found):
        read_members(tmp_path / "a.tgz", "*")


def raw_header(name, *, size, kind=b"0"):
    """A tar header with any size, in base 256 where it is not a common one."""
    block = bytearray(header(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = (
        b"%011o\0" % size if 0 <= size < 8**11 else (size % 256**12 | (0x80 << 88 if size >= 0 else 0)).to_bytes(12)
    )
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(**records):
    lines = b""
    for name, value in records.items():
        line = f" {name}={value}\n".encode()
        size = next(n for n in itertools.count(len(line)) if n == len(line) + len(str(n)))
        lines += str(size).encode() + line
    return raw_header("pax", size=len(lines), kind=b"x") + lines.ljust(-(-len(lines) // 512) * 512, b"\0")


@pytest.mark.parametrize(
    "content",
    [
        raw_header("a", size=-512),
        raw_header("a", size=2**60),
        raw_header("a", size=2**90),
        pax(size=-1024) + raw_header("a", size=0),
        pax(size=2**60) + raw_header("a", size=0),
        raw_header("pax", size=2**60, kind=b"x") + raw_header("a", size=0),
        raw_header("pax", size=-512, kind=b"x") + raw_header("a", size=0),
        raw_header("long", size=2**60, kind=b"L") + raw_header("a", size=0),
        raw_header("a", size=-1024, kind=b"S") + bytes(512),
        raw_header("g", size=0, kind=b"g") * 5000 + raw_header("a", size=0),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, content):
    good = raw_header("b", size=3) + b"two".ljust(512, b"\0")
    (tmp_path / "a.tgz").write_bytes(gzip.compress(good + content + bytes(1024)))
    with pytest.raises(InputError, match=r"a\.tgz is damaged"):
        read_members(tmp_path / "a.tgz", "*")


@pytest.mark.parametrize("pattern", ["zeros", "package/a.txt"])
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"S"])
def test_every_byte_of_an_archive_counts_towards_the_limit(tmp_path, pattern, kind):
    zeros = raw_header("zeros", size=5_120_000, kind=kind) + bytes(5_120_000)
    good = raw_header("package/a.txt", size=0)
    (tmp_path / "bomb.tgz").write_bytes(gzip.compress(zeros + good + bytes(1024)))
    assert (tmp_path / "bomb.tgz").stat().st_size < 10_000
    with pytest.raises(InputError, match="more than 1,000,000 bytes, decompressed"):
        read_members(tmp_path / "bomb.tgz", pattern, limit=1_000_000)


@pytest.mark.parametrize("damage", [lambda raw: raw[:100], lambda raw: raw[:-20], lambda raw: b"PK\x03\x04" + raw])
def test_a_damaged_archive_is_refused(tmp_path, damage):
    path = tgz(tmp_path / "a.tgz", {"a": bytes(range(256)) * 400})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"a\.tgz is damaged"):
        read_members(path, "a")


# --- the users' package tools


def of(archive, *, registry="npm", sha256=None):
    return Package(registry, "toy", "1.0", sha256 or sha256_of(archive))


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a shell script in the place of npm."""

    def put(body):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "npm").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")

    return put


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_a_tool_runs_no_scripts_and_refuses_another_hash(tmp_path, tool, place):
    archive = tgz(tmp_path / "toy.tgz", FILES)
    tool(f'echo "$@" > asked; cp {archive} toy-1.0.tgz')
    assert download(of(archive), place).read_bytes() == archive.read_bytes()
    assert (place / "asked").read_text().split() == ["pack", "toy@1.0", "--ignore-scripts", "--silent"]
    with pytest.raises(InputError, match=r"toy 1\.0 has SHA-256 .*; need 000000000000"):
        download(of(archive, sha256="0" * 64), place)


def test_a_missing_tool_is_named(tmp_path, monkeypatch, place):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"npm cannot be run .*No such file.*; need it for toy"):
        download(Package("npm", "toy", "1.0", ""), place)


@pytest.mark.parametrize(
    ("body", "said"),
    [("echo noise; echo 'npm ERR! 404'; exit 1", r"\(npm ERR! 404\)"), ("exit 0", "and said nothing")],
)
def test_what_a_tool_says_is_passed_on(tool, place, body, said):
    tool(body)
    with pytest.raises(InputError, match=rf"npm brought no toy 1\.0 .*{said}"):
        download(Package("npm", "toy", "1.0", ""), place)


@pytest.fixture
def source_archive(tmp_path, monkeypatch):
    """A source archive whose set-up leaves a mark where it is run; pip finds it in a folder, and no index."""
    folder = tmp_path / "toy-1.0"
    folder.mkdir()
    mark = tmp_path / "ran"
    (folder / "setup.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='toy')"
    )
    archive = tmp_path / "found" / "toy-1.0.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "toy-1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    return archive, mark


def test_pip_brings_a_source_archive_and_runs_nothing_of_it(source_archive, place):
    archive, mark = source_archive
    assert download(of(archive, registry="pypi"), place).read_bytes() == archive.read_bytes()
    assert not mark.exists()
    # The mark would be there if the set-up ran.
    subprocess.run([sys.executable, archive.parents[1] / "toy-1.0" / "setup.py", "-q", "--name"], check=False)
    assert mark.exists()


def test_pip_refuses_an_archive_of_another_hash(source_archive, place):
    with pytest.raises(InputError, match=r"pip brought no toy 1\.0"):
        download(of(source_archive[0], registry="pypi", sha256="0" * 64), place)
    assert not source_archive[1].exists()

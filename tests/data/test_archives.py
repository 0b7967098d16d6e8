"""Archives are read in memory, only what is declared, within a limit; what is hostile or damaged is refused."""

import gzip
import io
import lzma
import tarfile
import zlib

import pyarrow
import pytest

from sink_lens.data.archives import gunzipped, inflated, read_members
from sink_lens.errors import InputError


def tar(files, *, links=()):
    """A tar file in memory: path -> bytes, and (path, target, kind) of links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for path, target, kind in links:
            member = tarfile.TarInfo(path)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    return buffer.getvalue()


def tgz(path, files, **more):
    path.write_bytes(gzip.compress(tar(files, **more)))
    return path


def ar(members):
    """An ar archive: 60 bytes of header a member, content padded to an even length."""
    parts = [b"!<arch>\n"]
    for name, content in members.items():
        header = f"{name + '/':<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        assert len(header) == 60
        parts += [header, content, b"\n" * (len(content) % 2)]
    return b"".join(parts)


def deb(path, files, *, suffix=".xz", **more):
    pack = {
        ".xz": lzma.compress,
        ".gz": gzip.compress,
        ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
        ".bz2": lambda data: data,
    }[suffix]
    control = gzip.compress(tar({"./control": b"Package: toy\n"}))
    data = pack(tar(files, **more))
    path.write_bytes(ar({"debian-binary": b"2.0\n", "control.tar.gz": control, f"data.tar{suffix}": data}))
    return path


FILES = {"package/a.txt": b"one", "package/deep/b.txt": b"two", "package/run.js": b"no"}


def test_only_declared_members_are_read(tmp_path):
    archive = tgz(tmp_path / "a.tgz", FILES)
    assert read_members(archive, wanted=["package/*.txt"]) == {"package/a.txt": b"one", "package/deep/b.txt": b"two"}
    assert read_members(archive, wanted=["package/*.txt", "!*/deep/*"]) == {"package/a.txt": b"one"}
    assert list(tmp_path.iterdir()) == [archive]  # nothing was unpacked


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
def test_a_debian_package_is_read(tmp_path, suffix):
    archive = deb(tmp_path / "a.deb", {"./usr/share/a.txt": b"text", "./usr/bin/b": b"no"}, suffix=suffix)
    assert read_members(archive, wanted=["usr/share/*"]) == {"usr/share/a.txt": b"text"}


@pytest.mark.parametrize("path", ["../escaped.txt", "/etc/passwd.txt", "package/../../x.txt"])
@pytest.mark.parametrize("wanted", ["*", "package/a.txt"])
def test_a_path_that_leaves_its_folder_refuses_the_archive(tmp_path, path, wanted):
    archive = tgz(tmp_path / "a.tgz", {path: b"bad", **FILES})
    with pytest.raises(InputError, match="leaves its folder"):
        read_members(archive, wanted=[wanted])


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_a_declared_member_that_is_a_link_is_refused(tmp_path, kind):
    archive = tgz(tmp_path / "a.tgz", FILES, links=[("package/c.txt", "/etc/passwd", kind)])
    with pytest.raises(InputError, match=r"package/c\.txt is a link or a device"):
        read_members(archive, wanted=["package/*.txt"])


def test_a_link_that_nobody_asked_for_is_passed_over(tmp_path):
    archive = deb(tmp_path / "a.deb", {"./usr/a.txt": b"text"}, links=[("./usr/doc", "/etc", tarfile.SYMTYPE)])
    assert read_members(archive, wanted=["usr/*.txt"]) == {"usr/a.txt": b"text"}


@pytest.mark.parametrize("wanted", ["zeros", "package/a.txt"])
def test_an_archive_over_the_limit_is_refused_read_or_passed_over(tmp_path, wanted):
    archive = tgz(tmp_path / "bomb.tgz", {"zeros": bytes(5_000_000), **FILES})
    assert archive.stat().st_size < 10_000  # small until it is unpacked
    with pytest.raises(InputError, match="more than 1,000,000 bytes unpacked"):
        read_members(archive, wanted=[wanted], limit=1_000_000)


def test_members_are_unpacked_within_a_limit():
    content = bytes(1_000_000)
    assert gunzipped(gzip.compress(b"text"), name="a") == b"text"
    assert inflated(zlib.compress(b"text"), name="a") == b"text"
    with pytest.raises(InputError, match="more than 1,000 bytes"):
        gunzipped(gzip.compress(content), name="a", limit=1000)
    with pytest.raises(InputError, match="more than 1,000 bytes"):
        inflated(zlib.compress(content), name="a", limit=1000)
    for damaged in (b"no gzip", gzip.compress(content)[:-20]):
        with pytest.raises(InputError, match="a is damaged"):
            gunzipped(damaged, name="a")
    for damaged in (b"no zlib", zlib.compress(b"text")[:-5]):
        with pytest.raises(InputError, match="a is damaged"):
            inflated(damaged, name="a")


@pytest.mark.parametrize("kept", [100, 0.5])
def test_a_cut_archive_is_refused(tmp_path, kept):
    content = gzip.compress(tar({"a": bytes(range(256)) * 400}), compresslevel=0)
    (tmp_path / "a.tgz").write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(InputError, match=r"a\.tgz is damaged"):
        read_members(tmp_path / "a.tgz", wanted=["a"])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"PK\x03\x04 a zip", "begins with b'PK"),
        (ar({"debian-binary": b"2.0\n"}), "has no data.tar"),
        (b"!<arch>\n" + b"x" * 60, "no size"),
    ],
)
def test_what_is_no_archive_is_refused(tmp_path, content, found):
    (tmp_path / "a.deb").write_bytes(content)
    with pytest.raises(InputError, match=found):
        read_members(tmp_path / "a.deb", wanted=["a"])


def test_an_unknown_compression_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"data\.tar\.bz2; need"):
        read_members(deb(tmp_path / "a.deb", FILES, suffix=".bz2"), wanted=["*"])


def test_a_package_without_the_declared_text_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no member like texts/\*.*has changed"):
        read_members(tgz(tmp_path / "a.tgz", FILES), wanted=["texts/*"])

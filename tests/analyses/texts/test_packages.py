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


def tgz(path, files):
    """A gzipped tar file: path -> bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    path.write_bytes(gzip.compress(buffer.getvalue()))
    return path


FILES = {"package/a.txt": b"one", "package/deep/b.txt": b"two", "package/run.js": b"no"}


def test_only_the_files_that_fit_are_read_and_nothing_is_unpacked(tmp_path):
    archive = tgz(tmp_path / "a.tgz", FILES)
    assert read_members(archive, "package/*.txt") == {
        "package/a.txt": b"one",
        "package/deep/b.txt": b"two",
    }
    assert read_members(archive, "*/a.txt") == {"package/a.txt": b"one"}
    assert list(tmp_path.iterdir()) == [archive]
    with pytest.raises(InputError, match=r"a\.tgz has no file like texts/\*"):
        read_members(archive, "texts/*")


@pytest.mark.parametrize("path", ["../escaped.txt", "/etc/passwd.txt", "package/../../x.txt"])
@pytest.mark.parametrize("pattern", ["*", "package/a.txt"])
def test_a_path_that_leaves_its_folder_refuses_the_archive(tmp_path, path, pattern):
    with pytest.raises(InputError, match="leaves its folder"):
        read_members(tgz(tmp_path / "a.tgz", {path: b"bad", **FILES}), pattern)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:100], lambda raw: raw[:-20], lambda raw: b"PK\x03\x04" + raw]
)
def test_a_damaged_archive_is_refused(tmp_path, damage):
    path = tgz(tmp_path / "a.tgz", {"a": bytes(range(256)) * 400})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"a\.tgz is damaged"):
        read_members(path, "a")


def of(archive, *, registry="npm", sha256=None):
    return Package(registry, "toy", "1.0", sha256 or sha256_of(archive))


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_a_tool_runs_no_scripts_and_refuses_another_hash(tmp_path, monkeypatch, place):
    archive, npm = tgz(tmp_path / "toy.tgz", FILES), tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\necho "$@" > asked; cp {archive} toy-1.0.tgz\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/bin:/usr/bin")
    assert download(of(archive), place).read_bytes() == archive.read_bytes()
    assert (place / "asked").read_text().split() == [
        "pack",
        "toy@1.0",
        "--ignore-scripts",
        "--silent",
    ]
    with pytest.raises(InputError, match=r"toy 1\.0 has SHA-256 .*; need 000000000000"):
        download(of(archive, sha256="0" * 64), place)


def test_pip_brings_a_source_archive_and_runs_nothing_of_it(tmp_path, monkeypatch, place):
    """The set-up leaves a mark where it is run; pip finds the archive in a folder, and no index."""
    setup, mark, archive = (tmp_path / name for name in ("setup.py", "ran", "found/toy-1.0.tar.gz"))
    setup.write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='toy')"
    )
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(setup, "toy-1.0/setup.py")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    assert download(of(archive, registry="pypi"), place).read_bytes() == archive.read_bytes()
    assert not mark.exists()
    subprocess.run(
        [sys.executable, setup, "-q", "--name"], check=False
    )  # it would be there if the set-up ran
    assert mark.exists()

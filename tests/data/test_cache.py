"""The cache: folders that are whole or not there, and how they are checked."""

import os
from pathlib import Path

import pytest

from sink_lens.data.cache import (
    describe_damage,
    lock_folder,
    read_manifest,
    write_manifest,
    write_new_folder,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(cache, kind, folder_name, content=b"content", **said):
    folder = cache / kind / folder_name
    with lock_folder(folder), write_new_folder(folder) as part:
        (part / "file").write_bytes(content)
        write_manifest(part, said)
    return folder


def test_a_file_is_hashed_again_only_where_its_time_has_changed(cache):
    folder = kept(cache, "data", "a")
    manifest, status = read_manifest(folder), (folder / "file").stat()
    (folder / "file").write_bytes(b"changed")
    assert describe_damage(folder, manifest) == "file has changed"
    os.utime(folder / "file", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert describe_damage(folder, manifest) is None
    os.utime(folder / "file", ns=(1, 1))
    assert describe_damage(folder, manifest) == "file has changed"
    assert describe_damage(folder, manifest, sizes_only=True) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"files": {"file": {"bytes": "1", "sha256": 3}}}', '{"files": [1]}']
)
def test_a_manifest_of_the_wrong_shape_is_none(cache, text):
    folder = kept(cache, "models", "abc")
    (folder / "manifest.json").write_text(text)
    assert read_manifest(folder) is None


def test_an_interrupt_while_a_folder_is_replaced_brings_the_old_one_back(cache, monkeypatch):
    folder = kept(cache, "models", "abc", b"old")
    replace = Path.replace

    def interrupted(self, target):
        if self.suffix == ".part":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept(cache, "models", "abc", b"new")
    assert (folder / "file").read_bytes() == b"old"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["abc", "abc.lock"]

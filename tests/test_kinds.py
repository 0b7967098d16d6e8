"""From one object each come a kind's command, tables and page, and another package's kind is one of them."""

import dataclasses
import json
import shutil
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.cli.run_kinds import add_command
from sink_lens.kinds import all_kinds
from sink_lens.lazy import import_object
from sink_lens.report.html import page_html
from sink_lens.report.page import Page
from sink_lens.schema import tables_of

PLUGIN = Path(__file__).parents[1] / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Another package beside ours, whose entry points are the given ones."""

    def install(entry_points):
        shutil.copytree(PLUGIN / "letters", tmp_path / "site" / "letters")
        told = tmp_path / "site" / "letters-1.dist-info"
        told.mkdir()
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: letters\nVersion: 1\n")
        (told / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(tmp_path / "site")
        all_kinds.cache_clear()

    known = list(cli.app.registered_commands)
    yield install
    cli.app.registered_commands[:] = known
    all_kinds.cache_clear()


def test_every_place_that_a_kind_names_is_there():
    texts = ("name", "tables", "heading", "help", "examples", "shards")
    for kind in all_kinds().values():
        places = [
            place for name, place in dataclasses.asdict(kind).items() if place and name not in texts
        ]
        assert [import_object(place) for place in places]
        assert isinstance(import_object(kind.page), Page)
        assert tables_of(kind.name)
        assert not kind.run or (kind.help and kind.examples and kind.config), kind.name


def test_a_kind_of_another_package_has_a_command_tables_and_a_page(installed, tmp_path):
    (line,) = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"][
        "sink_lens.kinds"
    ].items()
    installed("[sink_lens.kinds]\n{} = {}\n".format(*line))
    add_command(all_kinds()["letters"])
    run = CliRunner().invoke
    assert "letters" in run(cli.app, ["--help"]).stdout.split("Decide")[1].split("Train")[0]
    done = run(cli.app, ["letters", "abba", "--out", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["letters"] == 2
    text = page_html(tmp_path / "run")
    assert "2 different letters" in text
    assert "How often it stands in the text." in text
    assert [one.name for one in tables_of("letters")] == ["letters"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("letters = letters:NOTHING", "NOTHING"),
        ("letters = letters:__name__", "of type str; need a sink_lens.kinds.RunKind"),
        ("letters = not_installed:KIND", "not_installed"),
    ],
)
def test_a_kind_that_cannot_be_loaded_is_left_out_with_the_reason(line, why, installed):
    installed(f"[sink_lens.kinds]\n{line}\n")
    with pytest.warns(UserWarning, match=f"'letters'.*is left out: .*{why}"):
        assert "letters" not in all_kinds()


def test_no_package_takes_the_place_of_a_kind(installed):
    installed("[sink_lens.kinds]\na = letters:KIND\nb = letters:KIND\n")
    with pytest.warns(UserWarning, match="'b'.*a kind of that name is there already"):
        assert all_kinds()["letters"] is metadata.entry_points(group="sink_lens.kinds")["a"].load()

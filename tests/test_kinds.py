"""From one object each come a kind's command, tables and page, and another package's kind is one of them."""

import dataclasses
import json
import textwrap
from importlib import metadata

import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.cli.run_kinds import add_command
from sink_lens.kinds import all_kinds
from sink_lens.lazy import import_object
from sink_lens.report.html import page_html
from sink_lens.report.page import Page
from sink_lens.schema import tables_of

TOY = {
    "toy_letters/__init__.py": """
        from sink_lens.kinds import RunKind

        KIND = RunKind(
            name="letters", heading="Decide", help="Count letters.", examples="sink-lens letters abc",
            config="toy_letters.run:Config", run="toy_letters.run:letters", tables="toy_letters:tables.toml",
            page="toy_letters.page:LETTERS", answer="toy_letters.page:answer",
        )
    """,
    "toy_letters/run.py": '''
        import dataclasses
        from pathlib import Path

        import pandas as pd

        from sink_lens.records import Result, create_run


        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Config:
            text: str = dataclasses.field(default="", metadata={"positional": True})
            """What is counted."""


        def letters(config, *, out=None, overwrite=False, progress=True):
            frame = pd.DataFrame({"letter": sorted(set(config.text))}).assign(
                count=[config.text.count(one) for one in sorted(set(config.text))]
            )
            with create_run(Path(out), kind="letters", config=dataclasses.asdict(config), provenance={},
                            expects=("letters",), overwrite=overwrite) as writer:
                writer.write_table("letters", frame)
            return Result(folder=writer.folder, tables={"letters": frame}, headline=f"{len(config.text)} letters")
    ''',
    "toy_letters/page.py": """
        from sink_lens.report.page import Listed, Page, table_maker

        LETTERS = Page(
            title=lambda run: "Letters",
            headline=lambda run: [f"{len(run.tables['letters'])} different letters"],
            figures=(),
            tables=(Listed(key="letters", title="Letters", make=table_maker("letters", "All.", ("letter", "count"))),),
        )


        def answer(result):
            return {"sentence": result.headline, "rows": result.tables["letters"]}
    """,
    "toy_letters/tables.toml": """
        [letters]
        row = "one letter"
        [letters.columns]
        letter = "str, text. The letter."
        count = "int, count. How often it stands in the text."
    """,
    "toy_letters-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy-letters\nVersion: 1\n",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Another package beside ours, whose entry points are the given ones."""

    def install(entry_points):
        for name, text in TOY.items() | {("toy_letters-1.dist-info/entry_points.txt", entry_points)}:
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / "site")
        all_kinds.cache_clear()

    known = list(cli.app.registered_commands)
    yield install
    cli.app.registered_commands[:] = known
    all_kinds.cache_clear()


def test_every_place_that_a_kind_names_is_there():
    texts = ("name", "tables", "heading", "help", "examples", "shards")
    for kind in all_kinds().values():
        places = [place for name, place in dataclasses.asdict(kind).items() if place and name not in texts]
        assert [import_object(place) for place in places]
        assert isinstance(import_object(kind.page), Page)
        assert tables_of(kind.name)
        assert not kind.run or (kind.help and kind.examples and kind.config), kind.name


def test_a_kind_of_another_package_has_a_command_tables_and_a_page(installed, tmp_path):
    installed("[sink_lens.kinds]\nletters = toy_letters:KIND\n")
    add_command(all_kinds()["letters"])
    run = CliRunner().invoke
    assert "letters" in run(cli.app, ["--help"]).stdout.split("Decide")[1].split("Train")[0]
    done = run(cli.app, ["letters", "abba", "--out", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["sentence"] == "4 letters"
    assert answer["rows"] == [{"letter": "a", "count": 2}, {"letter": "b", "count": 2}]
    text = page_html(tmp_path / "run")
    assert "2 different letters" in text
    assert "How often it stands in the text." in text
    assert [one.name for one in tables_of("letters")] == ["letters"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("letters = toy_letters:NOTHING", "NOTHING"),
        ("letters = toy_letters:__name__", "of type str; need a sink_lens.kinds.RunKind"),
        ("letters = not_installed:KIND", "not_installed"),
    ],
)
def test_a_kind_that_cannot_be_loaded_is_left_out_with_the_reason(line, why, installed):
    installed(f"[sink_lens.kinds]\n{line}\n")
    with pytest.warns(UserWarning, match=f"'letters'.*is left out: .*{why}"):
        assert "letters" not in all_kinds()


def test_no_package_takes_the_place_of_a_kind(installed):
    installed("[sink_lens.kinds]\na = toy_letters:KIND\nb = toy_letters:KIND\n")
    with pytest.warns(UserWarning, match="'b'.*a kind of that name is there already"):
        assert all_kinds()["letters"] is metadata.entry_points(group="sink_lens.kinds")["a"].load()

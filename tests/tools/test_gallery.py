"""The pictures of the gallery: each has the commands that make its runs, and sink-lens takes these commands."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from sink_lens.cli import app
from tools import gallery


def test_every_picture_has_its_commands():
    assert {path.stem for path in gallery.IMAGES.glob("*.png")} == {*gallery.RUNS, gallery.VIEW}


def test_the_example_reports_are_small_and_say_nothing_of_a_machine():
    pages = sorted(gallery.REPORTS.iterdir())
    assert {page.name for page in pages} == {f"{name}.html" for name in gallery.KEPT}
    assert sum(page.stat().st_size for page in pages) < 2e6
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "SmolLM2-135M-Instruct" in text
        assert not re.search(r"[\"' (](?:/home/|/root/|/tmp/|/work/)", text)
        for listed in ("README.md", "docs/index.md"):
            assert f"reports/{page.name}" in (gallery.ROOT / listed).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", gallery.RUNS)
def test_the_commands_of_a_picture_are_taken(name, tmp_path):
    group = get_command(app)
    folders = [tmp_path / str(at) for at in range(len(gallery.RUNS[name]))]
    for folder, command in zip(folders, gallery.RUNS[name], strict=True):
        called, *words = gallery.words_of(command, folders, file=Path("sweep.toml"))
        assert str(folder) in words
        with group.commands[called].make_context(
            called, [*words, "--quiet"]
        ) as context:  # refuses unknown options
            assert context.params["quiet"]

"""The pictures of the gallery: each has the commands that make its runs, and sink-lens takes these commands."""

from pathlib import Path

import pytest
from typer.main import get_command

from sink_lens.cli import app
from tools import gallery


def test_every_picture_has_its_commands():
    assert {path.stem for path in gallery.IMAGES.glob("*.png")} == set(gallery.RUNS)


@pytest.mark.parametrize("name", gallery.RUNS)
def test_the_commands_of_a_picture_are_taken(name, tmp_path):
    group = get_command(app)
    folders = [tmp_path / str(at) for at in range(len(gallery.RUNS[name]))]
    for folder, command in zip(folders, gallery.RUNS[name], strict=True):
        called, *words = gallery.words_of(command, folders, file=Path("sweep.toml"))
        assert str(folder) in words
        with group.commands[called].make_context(called, [*words, "--quiet"]) as context:  # refuses unknown options
            assert context.params["quiet"]

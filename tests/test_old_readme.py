"""The commands and Python blocks of the README of 0.1 (``tests/old/readme.md``) still work, with warnings only.

The layers, neurons and dimensions of the default model are replaced by ones that a tiny model has.
"""

import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
import typer.main

import sink_lens
from sink_lens import cli
from sink_lens.data.tokens import from_prompts
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted, tiny, tiny_tokenizer
from sink_lens.renamed import current_options

TEXT = (Path(__file__).parent / "old" / "readme.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
COMMANDS = [
    line.split("#")[0].split(" > ")[0]
    for block in TEXT.split("```")[1::2]
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("sink-lens ")
]
TINY = {"1229": "7", "1487": "9", "507": "5", "12-29": "3-4", "8-11": "1-2", "[18]": "[3]", "=11": "=2", "[11]": "[2]"}
"""Layers, neurons and dimensions of the default model -> those of the planted one."""


def smaller(block):
    """The block with a few sequences, on layers and neurons of the planted model."""
    size = "num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=100"
    few = {", 11]": ", 2]", "sequences=200": "sequences=4", "num_hidden_layers=4": size}
    for old, new in (TINY | few).items():
        block = block.replace(old, new)
    return block


def test_there_is_something_to_run():
    assert len(BLOCKS) == 6
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line):
    name, *words = shlex.split(line)[1:]
    command = typer.main.get_command(cli.app).commands[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        words = current_options(name, words)
    assert command.make_context(name, words).info_name == name


@pytest.fixture(scope="module")
def readme(tmp_path_factory):
    """The README's Python, block by block in one namespace; what the blocks leave out is given."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("readme")
    patch.chdir(folder)
    lens, tokenizer = wrap(planted().model, tokenizer=tiny_tokenizer()), tiny_tokenizer()
    (folder / "mine.txt").write_text("the cat and the dog saw the river near the hill. " * 40)
    patch.setitem(vars(sink_lens), "load", lambda name: lens)
    space = {
        "llama": tiny("llama"),
        "clean": from_prompts(["the cat and the dog"], tokenizer),
        "corrupted": from_prompts(["the bat and the hog"], tokenizer),
    }
    yield space
    patch.undo()


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_a_block_runs_with_warnings_only(readme, number):
    if number == 1:
        pytest.importorskip("plotly", reason="sink-lens[interactive] is not installed")
    threads = torch.get_num_threads()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", FutureWarning)
        exec(compile(smaller(BLOCKS[number]), f"block {number}", "exec"), readme)
    said = {str(one.message) for one in seen if one.category is FutureWarning}
    assert said or number == 4
    assert torch.get_num_threads() == threads


def test_the_last_block_finds_its_names():
    names = re.search(r"from sink_lens import (.*)", BLOCKS[5])[1].split(", ")
    for name in names:
        with pytest.warns(FutureWarning, match=rf"sink_lens\.{name} is now sink_lens\.identity\.{name}"):
            getattr(sink_lens, name)

"""What the README and the tutorials say can be run is run: Python in its order, commands up to their options."""

import contextlib
import re
import shlex
import sys
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from tiers import first

from sink_lens import cli
from sink_lens.schema import DEFAULT_MODEL
from sink_lens.training import SinkMonitor
from tests.tiny_families import tiny

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
RUN = [page for page in PAGES if page.parent.name == "tutorials"]
"""Pages whose blocks run on a planted model in ``./my-model``; ``tests/test_docs.py`` runs those of others."""


def blocks(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S
    )


def commands(page):
    for block in blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("  #")[0].split(" > ")[0].split(" | ")[0].split(" // ")[0]
            words = re.sub(r"\s//\s.*", "", words).strip()
            if words.startswith("sink-lens "):
                yield words


SMALL = {
    "sink_lens.load()": 'sink_lens.load("./my-model")',
    f'"{DEFAULT_MODEL}"': '"./my-model"',
    '" Madrid", " Rome"': '" the", " a"',
    '"The capital city of Spain is called", "The capital city of Italy is called"': '"the cat saw", "the bat saw"',
    '"capitals", pairs=32': '"induction", pairs=4, least=0.0',
    "(model, quick=True)": "(model, quick=True, sequences=8, length=24, random_init=False, interventions=False)",
}
"""Words of a page's Python -> what stands for them on a tiny model, whose tokenizer knows few words."""


def on_a_tiny_model(block):
    """A page's Python with the words of ``SMALL``."""
    return reduce(lambda text, words: text.replace(words, SMALL[words]), SMALL, block)


@pytest.mark.parametrize(
    "page",
    first(RUN, stay=lambda page: page.stem != "find_the_circuit_of_a_task"),
    ids=lambda page: page.stem,
)
def test_the_python_of_a_page_runs_in_its_order(page, planted_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(planted_folder)
    (tmp_path / "text.txt").write_text("the cat and the dog saw the river near the hill. " * 400)
    monkeypatch.setattr(
        "sink_lens.records.display.draw_page", lambda folder: folder
    )  # pages have their own tests
    monkeypatch.setitem(
        sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object)
    )  # not installed here
    found = blocks(page, "python")
    assert found
    names = {}
    for block in found:
        exec(compile(on_a_tiny_model(block), page.name, "exec"), names)


def test_the_lightning_callback_reads_each_step_and_takes_its_hooks_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))
    page = next(page for page in RUN if page.stem == "monitor_my_training")
    names = {"SinkMonitor": partial(SinkMonitor, every=2)}
    exec(
        next(block for block in blocks(page, "python") if "Callback" in block).replace(
            "every=50, ", ""
        ),
        names,
    )
    module = SimpleNamespace(model=tiny("llama").train(), logged=[])
    module.log_dict = module.logged.append
    trainer, callback = SimpleNamespace(global_step=0), names["SinkCallback"]()
    optimizer = torch.optim.SGD(module.model.parameters(), lr=0.1)
    callback.on_train_start(trainer, module)
    for batch in range(6):  # two to a step
        tokens = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(batch))
        module.model(input_ids=tokens, labels=tokens).loss.backward()
        if batch % 2:
            optimizer.step()
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, batch)
    callback.on_exception(trainer, module, RuntimeError("of the step"))
    assert ["sinks/rate_first" in logs for logs in module.logged] == [True, False, True]
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.model.modules())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_understood(page):
    for line in commands(page):
        context, group, words = None, typer.main.get_command(cli.app), shlex.split(line)[1:]
        while hasattr(group, "commands"):
            name, *words = [words[0].rstrip("."), *words[1:]]
            group = group.commands[name]
        with contextlib.suppress(typer.Exit):  # --example prints at once, and ends
            context = group.make_context(name, words)
        assert context is None or context.info_name == name, line


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.filterwarnings("ignore:Faithfulness is undefined")  # a tiny model knows no induction
def test_the_python_of_the_readme_runs(planted_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sink_lens.records.display.draw_page", lambda folder: folder)
    (block,) = blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(planted_folder)
    names = {}
    exec(compile(on_a_tiny_model(block), "README.md", "exec"), names)
    assert len(names["heads"].frame) == names["model"].n_layers * names["model"].n_heads

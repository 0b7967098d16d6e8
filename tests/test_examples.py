"""Every example and the notebook run on a tiny model with a planted sink, and keep the output of a real one."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from tiers import first

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = [EXAMPLES / name for name in ("first_look.ipynb", "find_a_circuit.ipynb")]
SMALLER = {
    "02_patch": ["--answers", " a", " b"],
    "06_train_with_head_norm": ["--steps", "4"],
    "07_fingerprint": ["--sequences", "60"],
    "09_watch_your_training": ["--steps", "4"],
    "10_find_a_circuit": ["--task", "text", "--pairs", "4"],
    "11_keep_the_first_tokens": ["--window", "16"],
}
OF_THE_MODEL = {
    "06_train_with_head_norm": {
        "tokens,",
        "in the same order.",
        "one seed, so it has no",
        "“shared” does not reach",
    },
    "08_your_own_edit_and_metric": {
        "The next largest that is shown is",
        "Random edits of the same size",
    },
    "10_find_a_circuit": {"input->a"},
}
"""Beginnings of lines that a tiny model prints and the real one does not: another sign, another break of a line."""


def name(path):
    return path.stem


def said(path):
    """What the docstring says that the example prints."""
    head, _, block = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).partition(
        "\n\nPrints on the default model"
    )
    assert head, "no docstring before the output"
    return [line.strip() for line in block.partition("\n\n")[2].splitlines() if line.strip()]


def words(line):
    return " ".join(re.split(r"\d", line, maxsplit=1)[0].split())


def run(path, *arguments):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(arguments))


def execute(path, folder, *, changed=("", "")):
    """Run a notebook in a folder, with one text in it changed; its cells of code."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.reads(path.read_text(encoding="utf-8").replace(*changed), as_version=4)
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", first(SCRIPTS), ids=name)
def test_an_example_runs_on_a_model_of_ones_own(
    path, planted_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # where an example writes by default
    monkeypatch.setattr(
        "sink_lens.records.display.draw_page", lambda folder: None
    )  # it has its own tests, and is slow
    run(path, "--model", str(planted_folder), *SMALLER.get(path.stem, []))
    printed = (
        capsys.readouterr().out.replace(str(planted_folder), "SmolLM2-135M-Instruct").splitlines()
    )
    lines = [
        line for line in printed if line.strip() and not line.startswith("{'")
    ]  # the Trainer's own
    assert len(lines) >= 4
    kept, own = {words(line) for line in said(path)}, tuple(OF_THE_MODEL.get(path.stem, ()))
    stale = [
        line
        for line in lines
        if words(line) not in kept and not (own and words(line).startswith(own))
    ]
    assert not stale, f"make examples ONLY={path.stem[:2]}: the docstring has no such line"


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_an_example_keeps_its_real_output(path):
    assert len(said(path)) >= 4
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.exhaustive
@pytest.mark.real
def test_an_example_prints_what_it_says(capsys):
    path = EXAMPLES / "04_place_a_sink.py"
    run(path)
    found = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    number = re.compile(r"[+-]?\d+\.\d+")
    assert [number.sub("#", line) for line in found] == [
        number.sub("#", line) for line in said(path)
    ]
    here, kept = (number.findall(" ".join(lines)) for lines in (found, said(path)))
    assert [float(one) for one in here] == pytest.approx([float(one) for one in kept], abs=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_keeps_its_outputs_and_runs_offline(path, planted_folder, tmp_path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == at for at, cell in enumerate(cells, start=1))
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) // 2
    assert len(text) < 1_500_000
    monkeypatch.setenv("SINK_LENS_MODEL", str(planted_folder))
    monkeypatch.setenv("SINK_LENS_TASK", "induction")  # of the circuit; a tiny model has no names
    # Chance gives as many right answers as a tiny model does.
    execute(path, tmp_path, changed=("pairs=16,", "pairs=16, least=0,"))


@pytest.mark.exhaustive
def test_the_colab_notebook_names_the_package_once_and_runs_uninstalled(
    planted_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("SINK_LENS_MODEL", str(planted_folder))
    cells = execute(EXAMPLES / "colab.ipynb", tmp_path)
    assert sum("PACKAGE = " in cell.source for cell in cells) == 1
    assert not any(
        line.startswith(("!", "%")) for cell in cells for line in cell.source.splitlines()
    )
    assert (tmp_path / "runs" / "colab" / "report.html").is_file()
    assert "iframe" in str(cells[-2].outputs)

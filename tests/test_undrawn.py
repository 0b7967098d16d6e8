"""A run that is whole and has no page, since drawing it was stopped: the same command draws it and ends with 0."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sink_lens import TraceConfig, cli, load, read_run, trace
from sink_lens.errors import RunError
from sink_lens.models.tiny import tiny, tiny_tokenizer
from sink_lens.report import html

SMALL = "gpt2,n_layers=2,d_model=32,n_heads=4,vocab_size=100,n_context=64"
SWEEP = '[tokens]\nkind = "random"\nsequences = 2\nlength = 10\n[[edits]]\nsite = "z"\nheads = 0\nlayers = "all"\n'
RANDOM = ["--tokens", "random", "--sequences", 2, "--length", 24, "--device", "cpu", "--quiet"]
COMMANDS = {
    "trace": ["MODEL", *RANDOM, "--no-interventions", "--no-random-init"],
    "isolate": ["MODEL", *RANDOM, "--target-position", 5],
    "amplify": ["MODEL", *RANDOM, "--target-position", 5, "--layers", 0, "--factors", 2, "--centre", "none"],
    "patch": ["MODEL", "--clean", "a b c", "--corrupted", "a d c", "--layers", 0, "--device", "cpu", "--quiet"],
    "circuit": ["MODEL", "--task", "text", "--pairs", 4, "--length", 12, "--random", 1, "--device", "cpu", "--quiet"],
    "tokens": ["MODEL", *RANDOM, "--gradient-sequences", 1],
    "sweep": ["SWEEP", "--model", "MODEL", "--device", "cpu", "--quiet"],
    "preference": ["--untrained", SMALL, "--sequences", 64, "--length", 16, "--device", "cpu", "--quiet"],
    "fingerprint": ["MODEL", "MODEL-1", "--sequences", 50, "--length", 4, "--coordinates", 28, "--quiet"],
}
"""Commands that write a run and then its page."""


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("MODEL", 0), ("MODEL-1", 1)):
        tiny("llama", seed=seed).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def here(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "0")  # quiet commands set it
    for name in ("MODEL", "MODEL-1"):
        Path(name).symlink_to(models / name)
    Path("SWEEP.toml").write_text(SWEEP)


def asked(command):
    given = ["SWEEP.toml" if one == "SWEEP" else one for one in COMMANDS[command]]
    return [command, *given, "--out", "run"]


def short_page(*folders, by=()):
    """Instead of a page, which takes longer than the runs here."""
    return f"key_sink of {folders}" + 1000 * " "


def tables():
    """The files of the run but its page, with the time at which each was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path("run").iterdir() if path.suffix not in (".html",)}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.filterwarnings("ignore")  # what a run of two sequences cannot say
def test_the_same_command_draws_the_page_that_a_full_disk_left_out(command, monkeypatch):
    if command != "trace":
        monkeypatch.setattr(html, "page_text", short_page)
    written = Path.write_text

    def full(self, *given, **options):
        if self.name.startswith("report.html"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        first = run(*asked(command))
    assert first.exit_code == 2, first.output
    assert "No space left" in first.stderr
    assert "sink-lens report run" in first.stderr
    assert read_run("run").status == "finished"
    assert not Path("run/report.html").exists()
    before = tables()
    again = run(*asked(command))
    assert again.exit_code == 0, again.output
    assert "key_sink" in Path("run/report.html").read_text() or command != "trace"
    assert Path("run/report.html").stat().st_size > 1000
    if command != "sweep":  # which goes on with what is finished, and puts its table together again
        assert tables() == before
    assert read_run("run").status == "finished"


def test_a_command_killed_while_it_draws_is_finished_by_the_same_command(monkeypatch):
    """In a process of its own, as a user's: SIGKILL where the page would be written."""
    monkeypatch.setattr(html, "page_text", short_page)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "written = Path.write_text\n"
        "def killed(self, text, **options):\n"
        "    if self.name.startswith('report.html'):\n"
        "        written(self, text[:1000], **options)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return written(self, text, **options)\n"
        "Path.write_text = killed\n"
        "from sink_lens.report import html\n"
        "html.page_text = lambda *folders, by=(): 2000 * ' '\n"
        "from sink_lens import cli\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", script, *map(str, asked("trace"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = tables()
    assert read_run("run").status == "finished"
    again = run(*asked("trace"))
    assert again.exit_code == 0, again.output
    assert again.stdout.strip() == "run/report.html"
    assert not list(Path("run").glob("*.part"))
    (part,) = [name for name in before if name.startswith("report.html")]
    del before[part]
    assert tables() == before


def test_a_trace_from_python_draws_the_page_and_gives_the_same_result(monkeypatch):
    lens = load("MODEL", device="cpu")
    config = TraceConfig(model="tiny", tokens="random", sequences=4, length=24, interventions=False, random_init=False)
    whole = trace(lens, config=config, out="run", progress=False)
    whole.report_path.unlink()
    monkeypatch.setattr("sink_lens.chain.trace.scout_and_measure", None)  # nothing is measured
    drawn = trace(lens, config=config, out="run", progress=False)
    assert drawn.report_path.exists()
    assert drawn.location == whole.location
    assert set(drawn.tables) == set(whole.tables)
    for name, frame in whole.tables.items():
        assert frame.shape == drawn.tables[name].shape
    with pytest.raises(RunError, match="--overwrite"):
        trace(lens, config=config, out="run", progress=False)


def test_another_question_does_not_draw_the_page(monkeypatch):
    monkeypatch.setattr(html, "page_text", short_page)
    assert run(*asked("isolate")).exit_code == 0
    Path("run/report.html").unlink()
    other = run(*asked("isolate"), "--target-position", 7)
    assert other.exit_code == 2
    assert "sink-lens report run" in other.stderr
    assert not Path("run/report.html").exists()


def test_ctrl_c_in_the_page_says_how_it_is_drawn(monkeypatch):
    def stopped(*folders, by=()):
        raise KeyboardInterrupt

    monkeypatch.setattr(html, "page_text", stopped)
    done = run(*asked("isolate"))
    assert done.exit_code == 130
    assert "sink-lens report run" in done.stderr
    assert "nothing was written" not in done.stderr


def test_the_page_of_the_run_before_is_not_left_beside_an_overwritten_run(monkeypatch):
    monkeypatch.setattr(html, "page_text", short_page)
    assert run(*asked("isolate")).exit_code == 0
    monkeypatch.setattr(html, "page_text", lambda *folders, by=(): (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(*asked("isolate"), "--target-position", 7, "--overwrite").exit_code == 130
    assert not Path("run/report.html").exists()

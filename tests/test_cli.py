"""The command line: what it shows, what it passes on, and how errors end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.cli.console import console
from sink_lens.errors import RunError, SinkLensError
from sink_lens.records import create_run

ROOT = Path(__file__).parents[1]


def run(*arguments, **options):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
        cli.app, [*map(str, arguments)], **options
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "0")  # --quiet sets it: put back after the test
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def failing(monkeypatch):
    """``failing(error)``: the command of a trace raises this."""

    def put(error):
        def trace(config, **options):
            raise error

        monkeypatch.setitem(
            sys.modules, "sink_lens.chain.trace", types.SimpleNamespace(run_trace=trace)
        )

    return put


def test_the_version_is_shown(monkeypatch):
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "1.2.3" if name == "sink-lens" else ""
    )
    assert run("--version").stdout == "sink-lens 1.2.3\n"


@pytest.mark.parametrize("kind", SinkLensError.__subclasses__())
def test_every_error_of_ours_ends_with_code_2_and_its_whole_text(failing, kind):
    text = "found [red]; need [/blue]. " + "A long path/" * 40
    failing(kind(text))
    result = run("trace")
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"error: {text}\n", "")


def test_debugging_shows_the_traceback_too(failing):
    failing(RunError("in use"))
    result = run("--debug", "trace")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: in use" in result.stderr


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            OSError(28, "No space left on device", "/there"),
            "No space left on device at /there; need room",
        ),
        (NotADirectoryError(20, "Not a directory", "a/b"), "Not a directory at a/b; need"),
        (MemoryError(), "the memory is full; need less at once"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "the memory is full",
        ),
        (
            SinkLensError("two\nlines \x1b[31m of \u202e text"),
            "two lines ⟨U+001B⟩[31m of ⟨U+202E⟩ text",
        ),
    ],
)
def test_what_the_system_refuses_is_one_line(failing, error, says):
    failing(error)
    result = run("trace")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {says}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("cp1252", rb"\u65e5"),
        ("ascii", "日".encode()),
    ],  # click takes "ascii" for a terminal that is set up wrongly
)
def test_a_terminal_without_a_character_shows_its_number(tmp_path, encoding, shown):
    with create_run(tmp_path / "日", kind="trace", config={}, provenance={}):
        pass
    code = "import sys\nsys.argv = ['sink-lens', 'report', '日', '--status']\nfrom sink_lens.cli import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == shown + b": trace, finished\n"


def test_names_and_tables_are_shown_with_what_they_hide_spelled_out(capsys):
    with create_run("a\u202eb\x1b[31m", kind="trace", config={}, provenance={}) as writer:
        writer.write_text("table.csv", "a\n1\n")
    result = run("report", "a\u202eb\x1b[31m")
    assert result.stdout == "report: a⟨U+202E⟩b⟨U+001B⟩[31m/report.html\n"
    table = Table("\u200bname", box=None)
    table.add_row("x\u202ey")
    console().print(table)
    console().print(Text("x\u202ey"))
    assert capsys.readouterr().out.split() == ["⟨U+200B⟩name", "x⟨U+202E⟩y", "x⟨U+202E⟩y"]


def test_a_bug_is_not_hidden(failing):
    failing(ZeroDivisionError("bug"))
    assert isinstance(run("trace").exception, ZeroDivisionError)


def test_a_real_interrupt_ends_with_code_130(tmp_path):
    # The module of the chain is replaced by one that waits; the signal is a real one.
    code = (
        "import sys, threading, types\n"
        "from sink_lens.cli import main\n"
        "def trace(config, **options):\n    print('ready', flush=True)\n    threading.Event().wait()\n"
        "fake = types.SimpleNamespace(run_trace=trace)\n"
        "sys.modules['sink_lens.chain.trace'] = fake\n"
        "sys.argv = ['sink-lens', 'trace']\nmain()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == "interrupted: nothing was written\n"


def test_warnings_of_ours_are_one_line_and_those_of_others_are_not_shown(monkeypatch):
    def trace(config, **options):
        warnings.warn_explicit(
            "ours", UserWarning, str(ROOT / "sink_lens" / "models" / "load.py"), 1
        )
        warnings.warn_explicit("theirs", FutureWarning, "/somewhere/transformers/loading.py", 1)
        raise RunError("end")

    monkeypatch.setitem(
        sys.modules, "sink_lens.chain.trace", types.SimpleNamespace(run_trace=trace)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("trace").stderr == "warning: ours\nerror: end\n"
        assert "theirs" in run("--debug", "trace").stderr


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_the_command_and_not_the_library_quiets_others_and_lets_threads_sleep_soon(
    given, spins, monkeypatch
):
    monkeypatch.setattr(
        sys, "argv", ["sink-lens", "--help"]
    )  # nothing is set at import: test_house.py
    with mock.patch.dict(os.environ):
        for name in ("TRANSFORMERS_VERBOSITY", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            os.environ.pop(name, None)
        os.environ |= given | {"HF_HUB_DISABLE_TELEMETRY": "0"}
        with pytest.raises(SystemExit):
            cli.main()
        assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"  # what the user set stays
        assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_the_package_is_the_command():
    ran = subprocess.run(
        [sys.executable, "-m", "sink_lens", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("sink-lens")


def test_the_answer_about_an_unfinished_run_says_so(tmp_path):
    names = {"kind": "sweep", "config": {}, "provenance": {}, "expects": ("cells",)}
    with contextlib.suppress(KeyboardInterrupt), create_run(tmp_path / "run", **names) as writer:
        writer.list_parts(["block-0", "block-1"])
        writer.write_text("block-0.txt", "")
        raise KeyboardInterrupt
    for more in ((), ("--status",)):
        done = run("report", "run", "--json", *more)
        assert done.exit_code == 0
        found = json.loads(done.stdout)
        states = [found["state"]] if more else found["states"]
        assert states == ["interrupted, 1 of 2 blocks done"]
        assert found["finished"] is False


@pytest.mark.parametrize("arguments", [["--help"], ["sweep", "--help"], ["report", "run"]])
def test_a_reader_that_goes_away_is_no_failure(arguments, tmp_path):
    with create_run("run", kind="sweep", config={}, provenance={}, expects=()) as writer:
        writer.write_text("findings.txt", "")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "sink_lens", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
    assert arguments[0] != "report" or (tmp_path / "run" / "report.html").exists()

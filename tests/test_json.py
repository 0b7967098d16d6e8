"""Every command with ``--json``: one object on stdout, which a script can read, and everything else on stderr."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.models.tiny import planted, tiny_tokenizer

GPT2 = "gpt2,n_layers=1,d_model=16,n_heads=2,vocab_size=64,n_context=32"
SWEEP = '[tokens]\nkind = "random"\nsequences = 2\nlength = 10\n[[edits]]\nsite = "z"\nheads = 0\nlayers = "all"\n'
TRAIN = """\
n_layers = 1
d_model = 32
d_mlp = 32
n_heads = 2
vocab_size = 300
length = 16
batch = 3
steps = 4
warmup = 1
checkpoints = [0, 4]
eval_sequences = 4
"""
RANDOM = "--tokens random --sequences 4 --length 24 --device cpu"
PROSE = "--task text --pairs 2 --length 16 --method eap --device cpu"
COMMANDS = {
    "trace": f"MODEL {RANDOM} --no-interventions --no-random-init --out trace",
    "trace --dry-run": f"MODEL {RANDOM} --no-interventions --no-random-init --dry-run",
    "isolate --dry-run": f"MODEL {RANDOM} --dry-run",
    "isolate": f"MODEL {RANDOM} --target-position 5 --layers 0 --out isolate",
    "amplify --dry-run": f"MODEL {RANDOM} --factors 2 --centre none --dry-run",
    "amplify": f"MODEL {RANDOM} --target-position 5 --layers 0 --factors 2 --centre none --out amplify",
    "ablate --dry-run": f"MODEL {RANDOM} --controls 1 --dry-run",
    "ablate": f"MODEL {RANDOM} --bos with --controls 1 --out ablate",
    "quantise --dry-run": f"MODEL {RANDOM} --controls 1 --dry-run",
    "quantise": f"MODEL {RANDOM} --controls 1 --out quantise",
    "tokens --dry-run": f"MODEL {RANDOM} --gradient-sequences 1 --dry-run",
    "tokens": f"MODEL {RANDOM} --gradient-sequences 1 --out tokens",
    "patch --dry-run": "MODEL --clean abc --corrupted abd --layers 0 --device cpu --dry-run",
    "patch": "MODEL --clean abc --corrupted abd --layers 0 --device cpu --out patch",
    "circuit --dry-run": f"MODEL {PROSE} --dry-run",
    "circuit": f"MODEL {PROSE} --sizes 0.1,1 --random 0 --check 0 --out circuit",
    "sweep": "sweep.toml --model MODEL --device cpu --out sweep",
    "status": "sweep",
    "sweep --dry-run": "sweep.toml --model MODEL --device cpu --dry-run",
    "train": "train.toml --out train",
    "train --dry-run": "train.toml --dry-run",
    "watch": "train",
    "compare": "train train-1 --by lr --out compare",
    "preference": f"--untrained {GPT2} --sequences 64 --length 16 --device cpu --out preference",
    "preference --dry-run": f"--untrained {GPT2} --sequences 64 --length 16 --device cpu --dry-run",
    "contraction": f"--untrained {GPT2} --sequences 64 --length 16 --device cpu --out contraction",
    "fingerprint": "MODEL MODEL-1 --sequences 50 --length 4 --coordinates 28 --out fingerprint",
    "fingerprint --dry-run": "MODEL MODEL-1 --sequences 50 --length 4 --coordinates 28 --dry-run",
    "report": "trace",
    "cache": "",
    "card --dry-run": f"MODEL {RANDOM} --dry-run",
    "card": f"MODEL {RANDOM} --out card",
    "card --overwrite": f"MODEL MODEL-1 {RANDOM} --out two",
    "card --quiet": f"trace card MODEL {RANDOM} --out many",
    "card --refused": "trace two",
}
"""Command -> how it runs in seconds."""
WRITTEN = {text.rpartition("--out ")[2]: name for name, text in COMMANDS.items() if "--out " in text}
"""Run folder -> the command that writes it."""
REFUSED = ("card --refused",)
"""Commands that are shown to refuse something: the error is an object too."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    for name, seed in (("MODEL", 0), ("MODEL-1", 1)):
        planted(seed=seed).model.save_pretrained(folder / name)
        tiny_tokenizer(adds_bos=True).save_pretrained(folder / name)
    (folder / "sweep.toml").write_text(SWEEP)
    (folder / "train.toml").write_text(TRAIN)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def run(here, *arguments):
    env = {"COLUMNS": "80", "TERM": "dumb", "SINK_LENS_CACHE": str(here / "cache"), "TQDM_DISABLE": "1"}
    return CliRunner(env=env).invoke(cli.app, [*map(str, arguments)])


def arguments_of(command):
    name = command.partition(" --")[0]
    options = [word for word in command.split()[len(name.split()) :] if command not in REFUSED]
    return [*name.split(), *COMMANDS[command].split(), *options]


def write_what_is_read(here, command):
    """Write the runs that a command reads and no test of this process has written yet."""
    words = COMMANDS[command].partition("--out ")[0].split()
    for word in words:
        if word == "train-1" and not (here / word).exists():
            assert run(here, "train", "train.toml", "--lr", 0.004, "--out", word).exit_code == 0
        elif word in WRITTEN and not (here / word).exists():
            write_what_is_read(here, WRITTEN[word])
            assert run(here, *arguments_of(WRITTEN[word])).exit_code == 0


def named(group, before=""):
    """Every command and subcommand."""
    for name, command in group.commands.items():
        yield from named(command, f"{name} ") if hasattr(command, "commands") else [f"{before}{name}"]


def test_help_fits_80_columns_and_names_no_types(here):
    for name in named(typer.main.get_command(cli.app)):
        text, _, examples = run(here, *name.split(), "--help").stdout.partition("\nExamples:")
        assert all(len(line) <= 80 for line in text.splitlines()), text
        assert not re.search("<(bool|str|path|int|float|list)", text), text
        assert "--json" in text
        assert "--quiet" in text
        assert "[dim]" not in examples


def test_every_command_is_asked():
    assert {name.partition(" --")[0] for name in COMMANDS} == set(named(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_on_stdout_and_the_rest_is_on_stderr(here, command):
    write_what_is_read(here, command)
    if "--out " in COMMANDS[command]:
        shutil.rmtree(here / COMMANDS[command].rpartition("--out ")[2], ignore_errors=True)
    name = command.partition(" --")[0]
    done = run(here, *arguments_of(command), "--json")
    assert done.exit_code == (2 if command in REFUSED else 0), done.output
    found = json.loads(done.stdout)
    assert found["command"] == name
    assert done.stdout.count("\n") == 1
    if command in REFUSED:
        assert found["error"] in done.stderr.replace("\n", " ")
    elif "run" in found:
        assert Path(found["run"]).is_dir()
        assert "report" not in found or Path(found["report"]).is_file()
        assert found["run"] in done.stderr or found["report"] in done.stderr

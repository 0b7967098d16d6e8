"""A run that is killed at any moment leaves what a resumed run completes, to the last bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import first

SCRIPT = Path(__file__).parent / "checking" / "killed.py"


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks; on Windows nothing is forked")


def killed(*options, kills):
    """The lines that the script prints."""
    command = [sys.executable, SCRIPT, "--kills", str(kills), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", first(["sweep", "patch", "circuit", "trace", "watch"]))
def test_a_killed_run_is_resumed_to_the_same_tables(name):
    assert killed("--only", name, kills=1) == [f"{name}: 1 kills, differing: nothing"]


@pytest.mark.exhaustive
def test_runs_killed_twice_and_killed_shards_are_resumed_to_the_same_tables():
    divided = tuple(f"{name} in 8 shards" for name in ("sweep", "patch", "circuit"))
    names = ("sweep", "patch", "circuit", "trace", "watch", *divided)
    assert killed(kills=2) == [f"{name}: 2 kills, differing: nothing" for name in names]

"""A run that is killed at any moment leaves what a resumed run completes, to the last bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "checking" / "killed.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks; on Windows nothing is forked")
def test_killed_runs_are_resumed_to_the_same_tables():
    done = subprocess.run([sys.executable, SCRIPT, "--kills", "2"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    divided = tuple(f"{name} in 8 shards" for name in ("sweep", "patch", "circuit"))
    names = ("sweep", "patch", "circuit", "trace", *divided)
    assert done.stdout.splitlines() == [f"{name}: 2 kills, differing: nothing" for name in names]

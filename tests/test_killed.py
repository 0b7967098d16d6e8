"""A run that is killed at any moment leaves what a resumed run completes, to the last bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "checking" / "killed.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks; on Windows nothing is forked")
def test_killed_runs_are_resumed_to_the_same_tables():
    """One kill of each; ``checking/killed.py`` by itself makes 20, and of 8 shards."""
    asked = [sys.executable, SCRIPT, "--kills", "1", "--shards", "3"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    divided = tuple(f"{name} in 3 shards" for name in ("sweep", "patch", "circuit"))
    names = ("sweep", "patch", "circuit", "trace", *divided)
    assert done.stdout.splitlines() == [f"{name}: 1 kills, differing: nothing" for name in names]

"""A short attack, of every category; ``make attack`` is the long one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tools" / "attack" / "run.py"
CATEGORIES = (
    *("command lines", "hostile names", "settings", "run folders", "models", "checkpoints", "cache", "archives"),
    *("calls", "monitors", "outputs", "templates"),
)
"""All but kills, pages in a browser and many processes at once, which take seconds each."""


@pytest.mark.exhaustive
def test_a_short_attack_finds_nothing(tmp_path):
    chosen = [word for name in CATEGORIES for word in ("--category", name)]
    command = [sys.executable, str(RUN), "--seed", "0", "--attempts", "30", "--short", *chosen]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"^(.+?) +(\d+) attempts: ", done.stdout, re.MULTILINE))
    assert counts["together"] == "30"
    assert all(int(counts[name]) for name in ("command lines", "calls", "run folders", "models"))


def test_what_the_page_of_promises_names_is_there():
    named = re.findall(r"`((?:tests|tools|sink_lens)/[^`]*)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []

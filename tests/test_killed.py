"""A run that is killed at any moment leaves what a resumed run completes, to the last bit."""

import os
from pathlib import Path

import forks
import pytest

SCRIPT = Path(__file__).parent / "checking" / "killed.py"


pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="kills forks; on Windows nothing is forked"
)


def killed(*options, kills, said):
    code, printed = forks.run(SCRIPT, "--kills", kills, *options, said=said)
    assert code == 0, printed
    return [line for line in printed.splitlines() if " kills, differing: " in line]


@pytest.mark.exhaustive
def test_runs_killed_twice_and_killed_shards_are_resumed_to_the_same_tables(tmp_path):
    divided = tuple(f"{name} in 8 shards" for name in ("sweep", "patch", "circuit"))
    names = ("sweep", "patch", "circuit", "trace", "train", "watch", *divided)
    assert killed(kills=2, said=tmp_path / "said") == [
        f"{name}: 2 kills, differing: nothing" for name in names
    ]

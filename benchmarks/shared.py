"""A command beside busy programs: with threads that soon sleep when they wait, as ``sink-lens`` sets them, and without.

    python benchmarks/shared.py               # beside none, one and two products of matrices
    python benchmarks/shared.py --busy 2 --command "trace --quick --no-interventions"

The two run in turns. ``of`` is the first over the second.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SPINS = {"soon asleep": {}, "as torch": {"GOMP_SPINCOUNT": "300000"}}
"""Way -> environment variables that it adds; 300,000 is libgomp's own number."""
PRODUCTS = "import numpy as np\na = np.ones((1000, 1000))\nwhile True: a @ a"


def main() -> None:
    """Run the command beside each number of busy programs and print a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--busy",
        type=int,
        action="append",
        help="busy programs, one thread each; default 0, 1 and 2",
    )
    parser.add_argument("--command", default="card", help="with its options")
    parser.add_argument("--rounds", type=int, default=2, help="the fastest is taken")
    options = parser.parse_args()
    print("| busy programs | soon asleep | as torch | of | processor time | as torch |")
    print("| --- | --- | --- | --- | --- | --- |")
    for busy in options.busy or (0, 1, 2):
        with beside(busy):
            rounds = [
                {name: timed(options.command, env) for name, env in SPINS.items()}
                for _ in range(options.rounds)
            ]
        (own, own_processor), (theirs, their_processor) = (
            min(one[name] for one in rounds) for name in SPINS
        )
        print(
            f"| {busy} | {own:.0f} s | {theirs:.0f} s | {own / theirs:.2f} | {own_processor:.0f} s | "
            f"{their_processor:.0f} s |",
            flush=True,
        )


@contextmanager
def beside(busy: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    with ExitStack() as stack:
        for _ in range(busy):
            env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", PRODUCTS], env=env)
            )
            stack.callback(process.kill)
        yield


def timed(command: str, env: dict[str, str]) -> tuple[float, float]:
    """Run a command; return its seconds on the clock and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [
                str(Path(sys.executable).with_name("sink-lens")),
                *command.split(),
                "--out",
                f"{folder}/run",
            ],
            env=os.environ | env,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, used


if __name__ == "__main__":
    main()

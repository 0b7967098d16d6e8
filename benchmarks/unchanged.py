"""What it costs to see that a model is the one that was wrapped, relative to a forward pass of 14 tokens.

    python benchmarks/unchanged.py                   # the default model
    python benchmarks/unchanged.py --rounds 50

Each round times, one after the other, a forward pass of the bridge, the check, the whole of ``running`` (the lock, the
check, eval mode), and the walk over all modules that put them in eval mode before there was a list of them. The medians
of processor time are printed, and their ratios to the forward. A call of a door makes one check a forward.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")


def seconds(function: Callable[[], object], *, times: int) -> float:
    """Processor seconds of one call."""
    begin = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - begin) / times


def main() -> None:
    """Time them in turns, and print the medians."""
    import torch

    from sink_lens.models.load import load
    from sink_lens.models.running import prepare_pass, switch_to_eval_mode

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lens = load()
    tokens = torch.arange(14)[None] + 100

    @torch.no_grad()
    def forward() -> None:
        lens.bridge(tokens, use_cache=False)

    def run() -> None:
        with prepare_pass(lens):
            pass

    def walk() -> None:
        with switch_to_eval_mode(lens.bridge):
            pass

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "forward": (forward, 1),
        "check": (lens.state.unchanged.check, 20),
        "running": (run, 20),
        "walk before": (walk, 5),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds + 1):
        for name, (function, times) in ways.items():
            found[name].append(seconds(function, times=times))
    medians = {
        name: statistics.median(values[1:]) for name, values in found.items()
    }  # the first is a warm-up
    for name, value in medians.items():
        print(
            f"{name:12} {1e3 * value:8.3f} ms   {100 * value / medians['forward']:6.2f}% of a forward of 14 tokens"
        )


if __name__ == "__main__":
    main()

"""What one reading of ``SinkMonitor`` costs beside the training step that it is part of.

    python benchmarks/monitor.py           # the toy size at three batches, a minute on two cores
    python benchmarks/monitor.py --quick

A step is forward, backward, clipping and AdamW, of the toy size of ``sink-lens train`` (3M parameters, 128 tokens a
sequence). Steps without and with a reading of the default keys take turns in one process on one model, in changing
order; the number is the median over rounds of their ratio. Memory is the peak of such a step above what is held between
steps, with over without, from Linux's high-water mark.

The last line is the worst over the cases: ``reading`` (a step that is read over one that is not; a training with
``every=50`` costs a fiftieth of what is over 1) and ``memory``.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from measure import peak
from torch import Tensor, nn

from sink_lens.training.config import TrainConfig
from sink_lens.training.model import model_of
from sink_lens.training.monitor import SinkMonitor


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one case, few rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=None, help="sequences a step")
    asked = parser.parse_args()
    batches = asked.batches or ([8] if asked.quick else [8, 16, 32])
    rounds = asked.rounds or (5 if asked.quick else 15)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    found = [case(batch, rounds=rounds) for batch in batches]
    print(
        " ".join(f"{name}={max(one[name] for one in found):.3f}" for name in ("reading", "memory"))
    )


def case(batch: int, *, rounds: int) -> dict[str, float]:
    """The ratios at one batch size."""
    config = TrainConfig(batch=batch, accumulation=1, bos="without")
    model = model_of(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (batch, config.length), generator=generator)

    def read() -> None:
        with SinkMonitor(model, every=1) as monitor:
            step(model, optimizer, tokens)
            monitor.finish()

    def bare() -> None:
        step(model, optimizer, tokens)

    arms = {"with": read, "without": bare}
    for run in arms.values():
        run()
    ratios, seconds = [], []
    for number in range(rounds):
        taken = {}
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            began = time.perf_counter()
            arms[name]()
            taken[name] = time.perf_counter() - began
        ratios.append(taken["with"] / taken["without"])
        seconds.append(taken["without"])
    peaks: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, run in arms.items():
            peaks[name].append(peak(run))
    memory = {name: statistics.median(found) for name, found in peaks.items()}
    result = {"reading": statistics.median(ratios), "memory": memory["with"] / memory["without"]}
    told = " ".join(f"{name}={value:.3f}" for name, value in result.items())
    print(
        f"toy, {batch} x {config.length}, {rounds} rounds, {statistics.median(seconds) * 1e3:.0f} ms a step: {told} "
        f"(ratios {min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )
    return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """One update."""
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()

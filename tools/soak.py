"""The soak of the monitor: a long training that is killed and resumed again and again, beside one that is not.

    python tools/soak.py                            # 5,000 steps, 20 kills, about ten minutes on one core
    python tools/soak.py --steps 200 --kills 3

A tiny model is trained with a reading at every step, and saves a checkpoint every 50 steps. One process is killed with
SIGKILL at steps drawn from a seed, and a new one resumes from the last checkpoint; another training runs to its end.
Two tables are printed: for each kill the last step whose ``step()`` had returned, the last reading on the disk, and
where the training went on; and the memory of the training that was not killed, at ten steps. The exit code is 1 if a
reading is missing, if the readings of the two trainings differ in any bit, or if memory grows by more than 5%.
"""

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
sys.path.append(str(Path(__file__).parents[1]))

SAVED_EVERY = 50
MOST_GROWTH = 0.05


def train(folder: Path, *, steps: int) -> None:
    """Train from the last checkpoint on, and say each step that has ended, with the memory that is held."""
    import psutil
    import torch

    from sink_lens.models.tiny import VOCAB_SIZE
    from sink_lens.training import SinkMonitor
    from tests.tiny_families import tiny

    logging.getLogger("sink_lens").setLevel(logging.ERROR)  # its alarms are in the table
    torch.set_num_threads(1)
    model, saved, begun = tiny("llama").train(), folder / "checkpoint.pt", 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun = state["step"]
    with SinkMonitor(
        model, every=1, sequences=2, folder=folder / "monitor", first_step=begun
    ) as monitor:
        for step in range(begun, steps):
            if step % SAVED_EVERY == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, folder / "part.pt")
                (folder / "part.pt").replace(saved)
            tokens = torch.randint(
                3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(step)
            )
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            print(step, psutil.Process().memory_info().rss, flush=True)


def run(
    folder: Path, *, steps: int, killed_at: int | None = None
) -> tuple[int, int, dict[int, int]]:
    """Train in a process of its own; the first and last step that it said, and its memory by step."""
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    held: dict[int, int] = {}
    for line in process.stdout:
        step, memory = map(int, line.split())
        held[step] = memory
        if killed_at is not None and step >= killed_at:
            process.send_signal(signal.SIGKILL)
            killed_at = None
    code = process.wait()
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the training ended with {code}")
    return min(held), max(held), held


def main() -> int:
    """Train twice, kill one of them, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="train here, in this process")
    asked = parser.parse_args()
    if asked.folder is not None:
        train(asked.folder, steps=asked.steps)
        return 0
    from sink_lens.records import read_run

    wrong = []
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        killed, whole = Path(place) / "killed", Path(place) / "whole"
        for folder in (killed, whole):
            folder.mkdir()
        at = sorted(random.Random(asked.seed).sample(range(1, asked.steps), asked.kills))
        print(f"{asked.steps:,} steps, a reading at each, {asked.kills} kills, seed {asked.seed}\n")
        print("kill  began at  last step that ended  last reading on the disk  readings")
        for number, step in enumerate(at, start=1):
            first, last, _ = run(killed, steps=asked.steps, killed_at=step)
            read = sorted(set(read_run(killed / "monitor").tables["monitor"]["step"]))
            print(f"{number:4}  {first:8,}  {last:20,}  {read[-1]:24,}  {len(read):8,}", flush=True)
            if read != list(range(read[-1] + 1)) or read[-1] < last:
                wrong.append(f"after kill {number}, readings are missing")
        run(killed, steps=asked.steps)
        _, _, held = run(whole, steps=asked.steps)
        one, other = (read_run(folder / "monitor") for folder in (killed, whole))
        for name in ("monitor", "alarms"):
            a, b = one.tables[name], other.tables[name]
            same = a.equals(b)
            print(
                f"\n{name}: {len(a):,} rows of the killed training, {len(b):,} of the other, equal: {same}"
            )
            if not same:
                wrong.append(f"the table {name} differs")
    print("\n step  memory, MB")
    for part in range(1, 11):
        step = max(1, part * asked.steps // 10) - 1
        print(f"{step:5,}  {held[step] / 1e6:10.1f}")
    growth = held[asked.steps - 1] / held[asked.steps // 10] - 1
    print(f"memory grew by {growth:.2%} from step {asked.steps // 10:,} on")
    if growth > MOST_GROWTH:
        wrong.append("memory grows")
    print("\n" + ("; ".join(wrong) if wrong else "nothing is missing, nothing differs"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

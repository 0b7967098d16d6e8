"""Kills commands, and shards of some, at random (SIGKILL), resumes them, and compares tables.

``python tests/checking/killed.py`` prints a line for each; the exit code is 1 where a table, or the weights of a
checkpoint, differ from those of a run that nobody killed. The commands run on a tiny model in forks of this process,
which has everything imported.
"""

import argparse
import functools
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "MPLBACKEND": "agg",
}

import pandas as pd
import psutil
import torch
from tqdm.std import tqdm
from typer.testing import CliRunner

from sink_lens.cli import app
from sink_lens.models.tiny import planted, tiny_tokenizer

SWEEP = """\
controls = 3
tokens = { kind = "random", bos = "with", sequences = 4, length = 24 }
metrics = [{ name = "sink_mass" }, { name = "loss" }]
edits = [
    { kind = "zero", site = "z", heads = "each", layers = "each" },
    { kind = "zero", site = "neurons", layers = "1", units = "each" },
]
"""
TRAIN = """\
n_layers = 2
d_model = 32
d_mlp = 48
n_heads = 2
vocab_size = 2000
steps = 12
warmup = 2
batch = 4
length = 16
log_every = 2
eval_every = 4
save_every = 3
data = "text.txt"
tokenizer = "model"
"""
COMMANDS = {
    name: shlex.split(words)
    for name, words in {
        "sweep": "sweep sweep.toml --model model",
        "patch": "patch model --clean 'the cat and the dog' --corrupted 'the bat and the hog' --metric loss --bos with",
        "circuit": "circuit model --task text --pairs 70 --length 16 --bos with --random 2 --check 5",
        "trace": "trace model --sequences 6 --length 24 --tokens random --bos with --controls 3",
        "train": "train train.toml",
        "watch": "watch trained --sequences 4 --length 24",
    }.items()
}


def run(arguments: list[str], *, out: str) -> int:
    """Start a command in a fork; its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            done = CliRunner().invoke(app, [*arguments, "--out", out])
            code = done.exit_code
            if code:
                sys.stderr.write(f"{done.output}{done.exception!r}\n")
                sys.stderr.flush()
        finally:
            os._exit(code)
    return child


def finished(child: int) -> bool:
    """Wait for a command to end; whether it ended well."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


KILLS = {"trace": 10, "watch": 10}
"""Kills of those commands that are killed less than 20 times, unless --kills says how often."""


def tables(folder: str) -> dict[str, pd.DataFrame]:
    """The tables of a run, and the hash of each checkpoint's weights."""
    weights = sorted(Path(folder).glob("checkpoints/checkpoint-*/model.safetensors"))
    hashes = [(path.parent.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in weights]
    found = {path.name: pd.read_parquet(path) for path in sorted(Path(folder).glob("*.parquet"))}
    return found | {"weights": pd.DataFrame(hashes, columns=["checkpoint", "sha256"])}


def differing(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> list[str]:
    """The tables that are not equal to the last bit; columns with times are left out."""
    found = sorted(set(one) ^ set(other))
    for name in set(one) & set(other):
        pair = [
            frame.drop(columns=[c for c in frame.columns if "seconds" in c])
            for frame in (one[name], other[name])
        ]
        if not pair[0].equals(pair[1]):
            found.append(name)
    return found


def reached(child: int, seconds: float) -> bool:
    """Wait until a command has used so much processor time, however busy the machine is; False if it ended before."""
    process = psutil.Process(child)
    while process.status() != psutil.STATUS_ZOMBIE:
        if sum(process.cpu_times()[:2]) >= seconds:
            return True
        time.sleep(0.005)
    return False


@functools.cache
def undisturbed(name: str) -> tuple[float, dict[str, pd.DataFrame]]:
    """The seconds of processor time, and the tables, of a command that nobody kills."""
    _, status, used = os.wait4(run(COMMANDS[name], out=f"{name}-whole"), 0)
    if status:
        sys.exit(f"{name} fails where nobody kills it")
    return used.ru_utime + used.ru_stime, tables(f"{name}-whole")


def killed(name: str, *, kills: int, drawn: random.Random) -> list[str]:
    """Kill a command again and again, resume it, and give the tables that differ from those of a whole run."""
    arguments, (seconds, whole) = COMMANDS[name], undisturbed(name)
    out, done, wrong = f"{name}-killed", 0, list[str]()
    while done < kills:
        child = run(arguments, out=out)
        if not reached(
            child, drawn.uniform(0, seconds)
        ):  # it was faster: it is compared, and begins again
            wrong += (
                differing(whole, tables(out)) if finished(child) else ["a run that nobody killed"]
            )
            shutil.rmtree(out)
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done += 1
        page, about = Path(out) / "report.html", Path(out) / "run.json"
        if (
            page.exists() and json.loads(about.read_text())["status"] == "finished"
        ):  # compared, and begins again
            wrong += differing(whole, tables(out))
            shutil.rmtree(out)
    if not finished(run(arguments, out=out)):
        wrong.append("the last run, resumed")
    return wrong + differing(whole, tables(out))


SHARDS = 8
DIVIDED = ("sweep", "patch", "circuit")


def killed_shards(name: str, *, kills: int, drawn: random.Random) -> list[str]:
    """Start all shards of a run at once, kill them at random and start them again; what differs from a whole run."""
    seconds, whole = undisturbed(name)
    out = f"{name}-sharded"

    def start(number: int) -> int:
        return run([*COMMANDS[name], "--shard", f"{number}/{SHARDS}"], out=out)

    wrong = list[str]()
    running, left = {number: start(number) for number in range(1, SHARDS + 1)}, kills
    while running:
        number = drawn.choice(sorted(running))
        if left and reached(running[number], drawn.uniform(0, seconds / 4)):
            os.kill(running[number], signal.SIGKILL)
            os.waitpid(running[number], 0)
            running[number] = start(number)
            left -= 1
        elif not finished(running.pop(number)):
            wrong.append(f"shard {number}")
    if list(Path(out).glob("shard-*")):
        wrong.append("folders of shards that nobody merged")
    if not finished(start(1)):  # requeued once more: nothing is left to do
        wrong.append("a shard after the end")
    found = wrong + differing(whole, tables(out))
    shutil.rmtree(out)
    return found


def main() -> int:
    """Kill all commands, or one; 1 where something differs."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--kills", type=int)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--only", choices=(*COMMANDS, "shards"))
    options = asked.parse_args()
    torch.set_num_threads(1)
    tqdm.set_lock(
        threading.RLock()
    )  # that of transformers' bars is shared with forks: one that is killed keeps it
    drawn, failed = random.Random(options.seed), False
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["SINK_LENS_CACHE"] = "cache"
        Path("sweep.toml").write_text(SWEEP)
        Path("train.toml").write_text(TRAIN)
        Path("text.txt").write_text("the cat and the dog sat with the bat and the hog. " * 200)
        for seed, place in enumerate(
            ["model", *(f"trained/checkpoint-{step}" for step in range(10, 50, 10))]
        ):
            planted(seed=seed, sink=seed != 1).model.save_pretrained(place)
            tiny_tokenizer(adds_bos=True).save_pretrained(place)
        rounds = [(name, name, killed) for name in COMMANDS if options.only in (None, name)]
        if options.only in (None, "shards"):
            rounds += [(name, f"{name} in {SHARDS} shards", killed_shards) for name in DIVIDED]
        for name, title, kill in rounds:
            kills = options.kills or KILLS.get(name, 20)
            wrong = kill(name, kills=kills, drawn=drawn)
            sys.stdout.write(
                f"{title}: {kills} kills, differing: {', '.join(wrong) or 'nothing'}\n"
            )
            sys.stdout.flush()
            failed |= bool(wrong)
        os.chdir("/")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

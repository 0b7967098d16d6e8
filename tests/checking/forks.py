"""Scripts in processes of their own that begin with the library imported, which takes seconds in each else.

They are forks of one process, which has done nothing but import: that of the tests has threads, and what other tests
left behind.
"""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import wait
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "sink_lens.models.load",
        "sink_lens.training.train",
        "sink_lens.training.monitor",
        "sink_lens.sweeps.sweep",
    ]
)


def _main(script: Path, words: tuple[object, ...], said: Path, env: dict[str, str]) -> None:
    """Run a script as if it were started; what it prints goes into a file."""
    os.environ.update(env)
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(script), *map(str, words)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run(
    script: Path, *words: object, said: Path, ranks: int = 0, env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a script in a fork, or in one for each rank of a training; the worst exit code, and all that was printed.

    The ranks meet as under torchrun, at a store that is held here.
    """
    envs = [env or {}]
    if ranks:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meet = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        sizes = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        envs = [
            envs[0] | meet | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(ranks)
        ]
    files = [said.with_name(f"{said.name}-{place}") for place in range(len(envs))]
    processes = [
        FORKS.Process(target=_main, args=(script, words, file, env))
        for file, env in zip(files, envs, strict=True)
    ]
    for process in processes:
        process.start()
    left = {process.sentinel: process for process in processes}
    while left:
        for ended in wait(list(left)):
            process = left.pop(int(ended))
            process.join()
            if process.exitcode:  # the others would wait for it
                for other in left.values():
                    other.kill()
    codes = [process.exitcode or 0 for process in processes]
    return max(codes, key=abs), "".join(file.read_text() for file in files)

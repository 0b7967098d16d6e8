"""One attempt in a process of its own, which is watched: what it prints, opens, reaches, and how it ends."""

import io
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bad_values import CANARY

ROOM = 4 << 30
"""Bytes of address space that an attempt may take besides what it begins with."""
_LOCAL = ("localhost", "127.0.0.1", "::1", None)
_RAN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen")
_ALLOWED = ("matplotlib", "psutil")
"""What loads libraries of its own while it runs."""


class TookTooLong(BaseException):
    """Ctrl-C did not end it."""


@dataclass(kw_only=True)
class Outcome:
    """How an attempt ended."""

    code: int | None = None
    """Exit code; None if the process was lost."""
    out: str = ""
    err: str = ""
    trace: str = ""
    """Traceback of the exception that the attempt raised."""
    ours: bool = False
    """Whether the attempt raised an error of ours."""
    stopped: bool = False
    """Whether the attempt was sent a Ctrl-C because it took long."""
    seconds: float = 0.0
    """Seconds of CPU."""
    reached: list[str] = field(default_factory=list)
    """Sockets, processes, pickles."""


def attempt(
    action: Callable[[], object],
    folder: Path,
    *,
    encoding: str = "utf-8",
    patience: float = 3.0,
    most: float = 300.0,
    killed_after: float | None = None,
    by: int = signal.SIGKILL,
) -> Outcome:
    """Do something in a forked process with its own working folder.

    Args:
        action: gives an exit code, or anything.
        folder: the working folder.
        encoding: of the terminal.
        patience: seconds of the CPU before it gets a Ctrl-C; as many again, and 10, to end then.
        most: seconds on the clock.
        killed_after: seconds of the CPU after which it gets a signal.
        by: the signal.
    """
    return begun(action, folder, encoding=encoding, patience=patience, killed_after=killed_after, by=by).ended(
        most=most
    )


@dataclass(kw_only=True)
class Begun:
    """An attempt that runs in a process of its own."""

    process: int
    read: int
    killed: bool

    def ended(self, *, most: float = 300.0) -> Outcome:
        """Wait for its end, ``most`` seconds on the clock."""
        said, end = b"", time.monotonic() + most
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.read], [], [], left)[0]:
                break
            piece = os.read(self.read, 1 << 16)
            if not piece:
                break
            said += piece
        if time.monotonic() >= end:
            os.kill(self.process, signal.SIGKILL)
        os.close(self.read)
        status = os.waitpid(self.process, 0)[1]
        if said:
            return Outcome(**json.loads(said))
        died = os.WIFSIGNALED(status)
        how = signal.Signals(os.WTERMSIG(status)).name if died else f"exit code {os.WEXITSTATUS(status)}"
        return Outcome(trace="" if self.killed else f"the process was lost: {how}")


def begun(
    action: Callable[[], object],
    folder: Path,
    *,
    encoding: str = "utf-8",
    patience: float = 3.0,
    killed_after: float | None = None,
    by: int = signal.SIGKILL,
) -> Begun:
    """Begin an attempt, as ``attempt`` does, and do not wait for it."""
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns where a thread runs
        process = os.fork()
    if process == 0:
        os.close(read)
        _child(action, folder, write, encoding=encoding, patience=patience, killed_after=killed_after, by=by)
    os.close(write)
    return Begun(process=process, read=read, killed=killed_after is not None)


def _child(
    action: Callable[[], object],
    folder: Path,
    write: int,
    *,
    encoding: str,
    patience: float,
    killed_after: float | None,
    by: int,
) -> None:
    outcome = Outcome()
    try:
        os.setsid()
        os.chdir(folder)
        os.environ |= {"SINK_LENS_CACHE": "cache", "HOME": str(folder)}
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        out, err = io.BytesIO(), io.BytesIO()
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
        sys.stdout = io.TextIOWrapper(out, encoding=encoding, errors="strict")
        sys.stderr = io.TextIOWrapper(err, encoding=encoding, errors="backslashreplace")
        sys.addaudithook(_hook(outcome.reached))
        if killed_after is not None:
            signal.signal(signal.SIGPROF, lambda number, frame: os.kill(os.getpid(), by))
            signal.setitimer(signal.ITIMER_PROF, killed_after)
        else:
            _limit(outcome, patience)
        _act(action, outcome)
        for name, stream, held in (("out", sys.stdout, out), ("err", sys.stderr, err)):
            stream.flush()
            setattr(outcome, name, held.getvalue().decode(encoding, "replace"))
    except BaseException:  # noqa: BLE001  # the attack's own fault, told as such
        outcome.trace = f"the attack itself failed: {traceback.format_exc()}"
    try:
        outcome.seconds = time.process_time()
        said = json.dumps(vars(outcome)).encode()
        while said:
            said = said[os.write(write, said) :]
    finally:
        os._exit(0)


def _limit(outcome: Outcome, patience: float) -> None:
    def stop(number: int, frame: Any) -> None:
        if outcome.stopped:
            raise TookTooLong
        outcome.stopped = True
        signal.setitimer(signal.ITIMER_PROF, patience + 10)
        raise KeyboardInterrupt

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, patience)


def _act(action: Callable[[], object], outcome: Outcome) -> None:
    from sink_lens.errors import SinkLensError

    try:
        found = action()
        outcome.code = found if isinstance(found, int) else 0
    except BaseException as error:  # noqa: BLE001  # whatever comes out of it is what is looked for
        outcome.code = 1
        outcome.ours = isinstance(error, SinkLensError) or _of_a_given_function(error)
        outcome.trace = str(error) if outcome.ours else traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _of_a_given_function(error: BaseException) -> bool:
    """Check if a function that the attack gives as a metric raised it: such an error passes as it is, with a note."""
    return {f"raised in the metric {one.__name__!r}" for one in (int, len)} & set(
        getattr(error, "__notes__", ())
    ) != set()


def _hook(reached: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
            to = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[0]
            host = to[0] if isinstance(to, tuple) else to
            if host not in _LOCAL:
                reached.append(f"{event} {to!r}")
                raise OSError(f"the attack lets nobody reach {to!r}")
        elif event == "ctypes.dlopen" and arguments == (None,):  # the program itself
            return
        elif event in _RAN and not any(name in repr(arguments) for name in _ALLOWED):
            reached.append(f"{event} {arguments!r}"[:200])

    return hear


def canary(folder: Path) -> bool:
    """Return whether code ran."""
    return any(folder.rglob(CANARY)) or (folder.parent / CANARY).exists()

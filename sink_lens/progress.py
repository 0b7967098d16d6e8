"""Progress bars: text that moves for whoever watches, and one line at the end where the output is kept, as in a log."""

import io
import os
import sys
import time
from collections.abc import Iterable, Sequence
from threading import RLock
from typing import Any, TypeVar

from tqdm import std

DELAY = 1.0
"""Seconds after which a bar is shown."""
SHORT = 5.0
"""A bar that took fewer seconds leaves no line."""
BAR = "{desc}: {n_fmt} of {total_fmt}, {remaining} left"
Item = TypeVar("Item")


class tqdm(std.tqdm):  # noqa: N801 - it stands in its place
    """A progress bar of plain text: a line that changes in a notebook, and in a log only a last line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._line: Any = None
        self._watched = sys.stderr.isatty()
        if not self._watched:
            options.setdefault("file", io.StringIO())
        options.setdefault("delay", DELAY)
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if msg is None and time.time() < getattr(self, "start_t", 0.0) + DELAY:
            return
        if self._watched:
            super().display(msg, pos)
        elif msg is None and not getattr(self, "pos", 0) and _in_notebook():
            self._show_in_notebook(str(self))

    def close(self) -> None:
        told = not self.disable and not self._watched and not getattr(self, "pos", 0)
        seconds = self.format_dict["elapsed"] if told else 0.0
        super().close()
        if told and (self._line is not None or seconds >= SHORT):
            end = "" if self.n == 1 else "es" if self.unit.endswith("ch") else "s"
            counted = "" if self.unit == "it" else f"{round(self.n):,} {self.unit}{end}, "
            text = f"{self.desc.removesuffix(': ')}: {counted}{self.format_interval(seconds)}"
            if self._line is None:
                sys.stderr.write(f"{text}\n")
            else:
                self._show_in_notebook(text)

    def leave_line(self, text: str, *, seconds: float) -> None:
        """Write a line on a part of ``seconds``, if the output is kept as in a log and the part was not short."""
        if not self.disable and not self._watched and seconds >= SHORT and not _in_notebook():
            sys.stderr.write(f"{text}\n")

    def _show_in_notebook(self, text: str) -> None:
        if self._line is None:
            # a kernel has it; where there is none, nobody needs it
            display = sys.modules["IPython.display"].display
            self._line = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._line.update({"text/plain": text}, raw=True)


def _renew_lock() -> None:
    """Give the bars of this process a lock of their own; tqdm's is shared with forks.

    A fork that is killed while it holds a shared lock would stop all others.
    """
    tqdm.set_lock(RLock())


_renew_lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def progress_bar(items: Sequence[Item], *, label: str, progress: bool) -> Iterable[Item]:
    return tqdm(items, desc=label, bar_format=BAR, disable=not progress, leave=False)


def _in_notebook() -> bool:
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"

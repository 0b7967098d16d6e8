"""What can go wrong, by kind. Every message says what was found, what was needed and what to do."""

import os
from pathlib import Path

_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""Bytes that file systems take."""


class SinkLensError(Exception):
    """Base of every error that sink_lens raises on purpose; the command line turns it into exit code 2."""


class InputError(SinkLensError):
    """An argument, a file or a token batch that cannot be used."""


class ModelError(SinkLensError):
    """A model that cannot be loaded, is of no known family, or fails a check at load."""


class SiteError(SinkLensError):
    """A site that this model lacks, or that cannot be edited on it."""


class KernelError(SinkLensError):
    """An attention kernel that gives no log-sum-exp, where one is needed."""


class RunError(SinkLensError):
    """A run folder that is in use, damaged, finished already, or of other inputs."""


class UndrawnError(RunError):
    """A run that is finished and answers the very question that is asked again, without its page.

    A command that meets it draws the page and ends with 0.
    """

    def __init__(self, message: str, *, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder
        """The run that only needs its page."""


def check_name(path: str | os.PathLike[str], *, what: str) -> None:
    """Refuse what is too long to name a file.

    Raises:
        InputError: how long it is.
    """
    text = os.fspath(path)
    longest = max((len(part.encode()) for part in Path(text).parts), default=0)
    if longest > _LONGEST_NAME or len(text.encode()) > _LONGEST_PATH:
        raise InputError(
            f"{what} is too long ({text[:40]}..., {len(text):,} characters); need at most {_LONGEST_NAME} bytes in a "
            "name. Give a shorter one"
        )

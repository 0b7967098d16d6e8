"""Every error class of sink_lens. Each message says what was found, what was needed and what to do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class SinkLensError(Exception):
    """Base of every error that sink_lens raises on purpose; the command line turns it into exit code 2."""

    def __str__(self) -> str:
        return " ".join(line.strip() for line in super().__str__().splitlines())


class InputError(SinkLensError):
    """An argument, a file or a token batch that cannot be used."""


class CallError(InputError, TypeError):
    """A call of a public function with an argument that it does not have, or without one that it needs."""


class ModelError(SinkLensError):
    """A model that cannot be loaded, belongs to no known family, or fails a check while it is loaded."""


class SiteError(SinkLensError):
    """A site that this model does not have, or that cannot be edited in this model."""


class KernelError(SinkLensError):
    """An attention kernel that returns no log-sum-exp where a log-sum-exp is needed."""


class RunError(SinkLensError):
    """A run folder that is in use, is damaged, is already finished, or was made from other inputs."""


class UndrawnError(RunError):
    """An error for a folder that already holds this exact run, finished, but without its page.

    The command line then draws the page and exits with code 0.
    """

    def __init__(self, message: str, *, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


@contextmanager
def note_whose_function_failed(whose: str, *, given: Iterable[Any] = ()) -> Iterator[None]:
    """Within the block, add to an error the note that it was raised in ``whose`` code, such as "the metric 'm'".

    Code that changes one of the tensors in ``given`` in place is refused.
    """
    read = [(one, one._version) for one in given if not one.is_inference()]
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in {whose}")
        raise
    if any(one._version != version for one, version in read):
        raise InputError(
            f"{whose} changed a tensor of the run in place, with which others go on; need new values: clone it first"
        )


def is_panic(error: BaseException) -> bool:
    """Check whether an error is a panic of a library in Rust; it is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def first_line_of_error(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

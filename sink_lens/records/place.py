"""The folder of a run: the one that its user names, or a temporary one, which goes with the result."""

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from .reading import RUN_FILE, read_run_json
from .writing import default_run_folder, goes_on_note


class Place:
    """The folder to which a run is written; a temporary one is removed with the last result that has it."""

    def __init__(self, out: str | os.PathLike[str] | None) -> None:
        self.named = None if out is None else Path(out)
        """None if the folder is temporary."""
        if self.named is not None:
            self.folder = self.named
            return
        self.folder = Path(tempfile.mkdtemp(prefix="sink_lens_"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def keep_what_is_done(self, error: BaseException, *, name: str) -> None:
        """Move what a run that ended with ``error`` wrote from a temporary folder to ``runs``, and note it."""
        if self.named is not None or not (self.folder / RUN_FILE).is_file():
            return
        if not read_run_json(self.folder)["files"]:
            return
        kept = default_run_folder(name)
        kept.parent.mkdir(exist_ok=True)
        shutil.move(self.folder, kept)
        notes = [one for one in getattr(error, "__notes__", ()) if str(self.folder) not in one]
        error.__notes__ = [*notes, goes_on_note(kept)]


@contextlib.contextmanager
def place_of_run(out: str | os.PathLike[str] | None, *, name: str) -> Iterator[Place]:
    """Give the place of a run; what is finished of one that ends with an error is kept, in ``runs`` without ``out``."""
    place = Place(out)
    try:
        yield place
    except BaseException as error:  # Ctrl-C too
        place.keep_what_is_done(error, name=name)
        raise

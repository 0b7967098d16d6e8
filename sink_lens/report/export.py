"""The figures of runs as files for a paper."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from sink_lens.errors import RunError
from sink_lens.records import check_not_of_run, read_run
from sink_lens.report.html import belongs, page_of
from sink_lens.report.page import told
from sink_lens.report.style import placed

FORMATS = {"png": "", "svg": "Date", "pdf": "CreationDate"}
"""Format -> what it calls the date, which is left out: the same run gives the same files."""
_DPI = 300


def save_figures(
    runs: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str]
) -> tuple[list[Path], list[str]]:
    """Write every figure of the runs' pages as PNG (300 dpi), SVG and PDF; files of several runs begin with the run.

    Returns:
        The files, and what could not be drawn, each with the reason.

    Raises:
        RunError: There is no run in a folder, or a file cannot be written.
        InputError: A figure would be written over a file that belongs to a run.
    """
    folder, files, missing = Path(folder), [], []
    for number, path in enumerate(runs, start=1):
        run = read_run(path)
        prefix = f"run-{number}-" if len(runs) > 1 else ""
        for drawn in page_of(run).figures:
            if not belongs(run, drawn):
                continue
            made, why = told(run, lambda drawn=drawn, run=run: drawn.make(run)[1])
            if made is None:
                missing.append(f"{prefix}{drawn.key}: {why}")
                continue
            placed(made)
            settings: dict[Any, Any] = {"svg.hashsalt": drawn.key, "text.parse_math": False, "pdf.fonttype": 42}
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with mpl.rc_context(settings), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
                    for form, date in FORMATS.items():
                        file = folder / f"{prefix}{drawn.key}.{form}"
                        check_not_of_run(file, replaceable=[f".{one}" for one in FORMATS])
                        made.savefig(file, format=form, dpi=_DPI, metadata={date: None} if date else None)
                        files.append(file)
            except OSError as error:
                raise RunError(
                    f"{folder} cannot be written ({error.strerror}); need a folder with room. Choose another one."
                ) from error
    return files, missing

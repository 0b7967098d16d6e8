"""The figures of runs as files for a paper, each with its numbers beside it."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..errors import InputError, RunError
from ..files import refuse_tilde
from ..records import Run, read_run, refuse_file_of_run
from .page import Drawn, csv_text, try_make
from .pages import is_on_page, page_of_run
from .style import FORMATS, figure_bytes, fix_layout


def save_figures(
    runs: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    formats: Sequence[str] = tuple(FORMATS),
    only: Sequence[str] = (),
) -> tuple[list[Path], list[str]]:
    """Write every figure of the runs' pages, and its numbers as CSV; of several runs, names begin with ``run-1-``.

    ``formats`` are some of ``FORMATS``; pixels have 300 dpi. ``only`` are the figures to write, by the names of their
    files without an ending; all of them if empty. Returns the files; and a text for each figure that could not be
    drawn, with the reason.
    """
    refuse_tilde(folder, what="the folder of the figures")
    check_formats(formats)
    folder, files, missing = Path(folder), [], []
    shown = [
        (run, [one for one in page_of_run(run).figures if is_on_page(run, one)])
        for run in map(read_run, runs)
    ]
    keys = list(dict.fromkeys(one.key for _, figures in shown for one in figures))
    if unknown := [name for name in only if name not in keys]:
        raise InputError(f"there is no figure {unknown[0]!r}; need some of {', '.join(keys)}")
    for number, (run, every) in enumerate(shown, start=1):
        prefix = f"run-{number}-" if len(runs) > 1 else ""
        for drawn in every:
            if only and drawn.key not in only:
                continue

            def draw(run: Run = run, drawn: Drawn = drawn) -> Figure:
                figure = drawn.make(run)[1]
                fix_layout(figure)
                return figure

            made, why = try_make(run, draw)
            if made is None:
                missing.append(f"{prefix}{drawn.key}: {why}")
                continue
            data, _ = try_make(run, lambda drawn=drawn, run=run: drawn.data(run))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for form in formats:
                    files.append(_path_outside_runs(folder, f"{prefix}{drawn.key}.{form}"))
                    files[-1].write_bytes(figure_bytes(made, form, salt=drawn.key, dpi=300))
                if data is not None:
                    files.append(_path_outside_runs(folder, f"{prefix}{drawn.key}.csv"))
                    files[-1].write_text(csv_text(data), encoding="utf-8")
            except OSError as error:
                raise RunError(
                    f"{folder} cannot be written ({error.strerror}); need a folder with room. Choose another one."
                ) from error
    return files, missing


def check_formats(formats: Sequence[str]) -> None:
    for form in formats:
        if form not in FORMATS:
            raise InputError(
                f"the format is {form!r}; need some of {', '.join(FORMATS)}, as in format='pdf,svg'"
            )


def _path_outside_runs(folder: Path, name: str) -> Path:
    path = folder / name
    refuse_file_of_run(path, replaceable=[f".{one}" for one in (*FORMATS, "csv")])
    return path

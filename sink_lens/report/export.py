"""The figures of runs as files for a paper, each with its numbers beside it."""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont

from sink_lens.errors import InputError, RunError, check_home
from sink_lens.records import Run, check_not_of_run, read_run
from sink_lens.report.fitting import fit_figure
from sink_lens.report.page import Drawn, attempt, csv
from sink_lens.report.pages import belongs, page_of
from sink_lens.report.style import FORMATS, file_of

_GENERIC = ("serif", "sans-serif", "monospace")
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}
_DPI = 300


def save_figures(
    runs: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    formats: Sequence[str] = tuple(FORMATS),
    width: str | None = None,
    font: str | None = None,
    only: Sequence[str] = (),
) -> tuple[list[Path], list[str]]:
    """Write every figure of the runs' pages, and the numbers of each as CSV; several runs' files begin with the run.

    Args:
        runs: folders of runs.
        folder: where the files go.
        formats: some of ``FORMATS``; pixels have 300 dpi.
        width: of every figure, such as ``3.25in`` or ``8.3cm``; heights keep their share. As drawn if None.
        font: family of the text: serif, sans-serif, monospace, or the name of a font of this machine.
        only: the figures to write, by the names of their files without an ending; all of them if empty.

    Returns:
        The files, and what could not be drawn, each with the reason.

    Raises:
        RunError: There is no run in a folder, or a file cannot be written.
        InputError: A format, width, font or figure that is not known, or a file of a run that would be overwritten.
    """
    check_home(folder, what="the folder of the figures")
    folder, files, missing = Path(folder), [], []
    inches = check_figures(formats=formats, width=width, font=font)
    shown = [(run, [one for one in page_of(run).figures if belongs(run, one)]) for run in map(read_run, runs)]
    _check_only(only, [one.key for _, figures in shown for one in figures])
    for number, (run, every) in enumerate(shown, start=1):
        prefix = f"run-{number}-" if len(runs) > 1 else ""
        for drawn in every:
            if only and drawn.key not in only:
                continue
            make = functools.partial(_figure, run, drawn)
            made, why = attempt(run, lambda make=make: fit_figure(make, inches=inches, font=font))
            if made is None:
                narrow = f"{drawn.key}-paper"  # a figure's sketch for a column of a paper
                instead = f". Use {prefix}{narrow}" if any(one.key == narrow for one in every) else ""
                missing.append(f"{prefix}{drawn.key}: {why}{instead}")
                continue
            data, _ = attempt(run, lambda drawn=drawn, run=run: drawn.data(run))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for form in formats:
                    files.append(_file(folder, f"{prefix}{drawn.key}.{form}"))
                    files[-1].write_bytes(file_of(made, form, salt=drawn.key, dpi=_DPI))
                if data is not None:
                    files.append(_file(folder, f"{prefix}{drawn.key}.csv"))
                    files[-1].write_text(csv(data), encoding="utf-8")
            except OSError as error:
                raise RunError(
                    f"{folder} cannot be written ({error.strerror}); need a folder with room. Choose another one."
                ) from error
    return files, missing


def _figure(run: Run, drawn: Drawn) -> Figure:
    return drawn.make(run)[1]


def check_figures(*, formats: Sequence[str], width: str | None, font: str | None) -> float | None:
    """Refuse what no figure can be written with; the width in inches, if there is one."""
    for form in formats:
        if form not in FORMATS:
            raise InputError(f"the format is {form!r}; need some of {', '.join(FORMATS)}, as in --format pdf,svg")
    _check_font(font)
    return None if width is None else _inches(width)


def _check_only(only: Sequence[str], keys: Sequence[str]) -> None:
    """Refuse names of figures that the page does not have."""
    if unknown := [name for name in only if name not in keys]:
        raise InputError(f"there is no figure {unknown[0]!r}; need some of {', '.join(dict.fromkeys(keys))}")


def _file(folder: Path, name: str) -> Path:
    """The path of a file to write, which must not belong to a run."""
    path = folder / name
    check_not_of_run(path, replaceable=[f".{one}" for one in (*FORMATS, "csv")])
    return path


def _inches(width: str) -> float:
    """A width such as 3.25in or 8cm in inches."""
    match = re.fullmatch(r"([0-9.]+)\s*(in|cm|mm|pt)", width.strip())
    size = float(match[1]) * _INCHES[match[2]] if match and match[1].count(".") < 2 and match[1] != "." else 0.0
    if not 1.0 <= size <= 40.0:
        raise InputError(f"the width is {width!r}; need 1 to 40 inches, as in --width 3.25in (also cm, mm, pt)")
    return size


def _check_font(font: str | None) -> None:
    """Refuse a font that this machine does not have."""
    if font is None or font in _GENERIC:
        return
    try:
        findfont(FontProperties(family=font), fallback_to_default=False)
    except ValueError:
        raise InputError(
            f"there is no font {font!r} on this machine; need {', '.join(_GENERIC)} or a font that is installed, as in "
            "--font 'DejaVu Serif'"
        ) from None

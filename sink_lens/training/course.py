"""The figure of a watched run, in its folder."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..records import RunWriter, add_to_run, display, read_run
from .birth import Birth

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_course(
    run_folder: str | Path, frame: pd.DataFrame, *, born: Birth, writer: RunWriter | None = None
) -> "Figure":
    """Draw ``course.png`` and ``course.svg`` of a run from what was watched, and its log where it has one.

    Args:
        run_folder: the run.
        frame: what ``watch`` gives.
        born: what ``births`` gives.
        writer: the run's own, where it is open here already.
    """
    run = read_run(run_folder)
    whole = frame.loc[frame["error"].isna()]
    figure = display.figure(
        "course",
        whole,
        log=run.tables.get("log"),
        threshold=born.threshold,
        born=born.tokens,
        title=f"{run.folder.name}: {born.brief}",
    )
    with add_to_run(run.folder) if writer is None else contextlib.nullcontext(writer) as kept:
        kept.write_bytes("course.png", display.image(figure, "png"))
        kept.write_bytes("course.svg", display.image(figure, "svg"))
    return figure

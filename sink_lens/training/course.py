"""The figure of a watched run, in its folder."""

import contextlib
import io
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from ..records import RunWriter, add_to_run, read_run
from ..report.columns import select
from ..report.heatmap import png
from ..report.training import course
from .birth import Birth


def write_course(
    run_folder: str | Path, frame: pd.DataFrame, *, born: Birth, writer: RunWriter | None = None
) -> Figure:
    """Draw ``course.png`` and ``course.svg`` of a run from what was watched, and its log where it has one.

    Args:
        run_folder: the run.
        frame: what ``watch`` gives.
        born: what ``births`` gives.
        writer: the run's own, where it is open here already.
    """
    run = read_run(run_folder)
    whole = select(frame, frame["error"].isna().to_numpy(dtype=bool))
    figure = course(
        whole,
        log=run.tables.get("log"),
        threshold=born.threshold,
        born=born.tokens,
        title=f"{run.folder.name}: {born.brief}",
    )
    with add_to_run(run.folder) if writer is None else contextlib.nullcontext(writer) as kept:
        kept.write_bytes("course.png", png(figure))
        kept.write_bytes("course.svg", plain_svg(figure))
    return figure


def plain_svg(figure: Figure) -> bytes:
    """The figure as the content of an SVG file, the same at each drawing."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "sink_lens", "text.parse_math": False}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()

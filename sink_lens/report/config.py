"""Configuration of ``report``."""

from dataclasses import dataclass, field
from typing import Literal

from ..configuration import check_field_types
from ..errors import InputError

MayDiffer = Literal["dtype", "bos", "tokens", "thresholds"]
"""In what compared runs may differ, if it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Options of ``sink-lens report``: the runs whose pages and figures it draws, and the files that it writes."""

    runs: tuple[str, ...] = field(default=(), metadata={"positional": True, "metavar": "RUN"})
    """Folder of a run; several are set side by side."""
    out: str | None = field(default=None, metadata={"metavar": "FILE"})
    """File of the page. Default: report.html in the run's folder; in this folder for several runs."""
    group_by: tuple[MayDiffer, ...] = field(default=(), metadata={"metavar": "WHAT"})
    """What the compared runs may differ in: dtype, bos, tokens or thresholds; repeat for several."""
    figures: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder into which the figures are written too, and the numbers of each as CSV."""
    format: tuple[str, ...] = field(
        default=("png", "svg", "pdf"), metadata={"written": "commas", "metavar": "F,F"}
    )
    """With --figures: file formats, one or more of png, svg and pdf."""
    only: tuple[str, ...] = field(
        default=(), metadata={"written": "commas", "metavar": "NAME,NAME"}
    )
    """With --figures: which figures to write, by the names of their files, such as circuit-paper. Default: all."""

    status: bool = False
    """Only say how far the run is: its state, and that of each shard; no page is written."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("only", "format"):
            if (
                self.figures is None
                and getattr(self, name) != type(self).__dataclass_fields__[name].default
            ):
                raise InputError(f"{name} was given without figures; need the folder: figures=...")

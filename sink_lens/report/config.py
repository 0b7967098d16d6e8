"""What ``report`` is asked: one frozen record."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Which runs' pages and figures are drawn, and where."""

    runs: tuple[str, ...] = field(default=(), metadata={"positional": True, "metavar": "RUN"})
    """Folder of a run; several are set side by side."""
    out: str | None = field(default=None, metadata={"metavar": "FILE"})
    """File of the page. Default: report.html in the run's folder; in this folder for several runs."""
    figures: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder into which the figures are written too, and the numbers of each as CSV."""
    format: tuple[str, ...] = field(default=("png", "svg", "pdf"), metadata={"written": "commas", "metavar": "F,F"})
    """With --figures: formats, some of png, svg, pdf and pgf (for LaTeX)."""
    width: str | None = field(default=None, metadata={"metavar": "WIDTH"})
    """With --figures: width of every figure, such as 3.25in or 8.3cm. Default: as on the page."""
    font: str | None = field(default=None, metadata={"metavar": "NAME"})
    """With --figures: font of the text: serif, sans-serif, monospace or one that is installed."""

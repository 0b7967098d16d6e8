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
    """Folder into which the figures are written too, as PNG, SVG and PDF."""

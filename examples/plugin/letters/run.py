"""Its options, its function, and its page."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd

from sink_lens.records import Result, create_run
from sink_lens.report.page import Listed, Page, table_maker


@dataclass(frozen=True, kw_only=True)
class Config:
    """Each field is an option of the command; its docstring is the option's help."""

    text: str = field(default="", metadata={"positional": True})
    """The text whose letters are counted."""


def letters(
    config: Config, *, out: Path | None = None, overwrite: bool = False, progress: bool = True
) -> Result:
    """Count, and write the table into the run folder."""
    frame = pd.DataFrame(sorted(Counter(config.text).items()), columns=["letter", "count"])
    how = {
        "config": asdict(config),
        "provenance": {},
        "expects": ("letters",),
        "overwrite": overwrite,
    }
    with create_run(Path(out or "runs/letters"), kind="letters", **how) as writer:
        writer.write_table("letters", frame)
    said = f"{len(config.text)} letters"
    return Result(
        folder=writer.folder,
        tables={"letters": frame},
        headline=said,
        decision={"letters": len(frame)},
    )


PAGE = Page(
    title=lambda run: "Letters",
    headline=lambda run: [f"{len(run.tables['letters'])} different letters"],
    figures=(),
    tables=(
        Listed(
            key="letters", title="Letters", make=table_maker("letters", "All.", ("letter", "count"))
        ),
    ),
)

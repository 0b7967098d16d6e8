"""``sink-lens diff``: what changed from one model to another, whether it is alarming, and the line to change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..studies.config import DiffConfig
from .console import app, columns_of, hush
from .decisions import show_study
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..studies.study import Study

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens diff ./base ./tuned --text mine.txt  [dim]base and fine-tuned, or two checkpoints[/dim]

sink-lens diff ./base ./tuned --batch batch.safetensors --json  [dim]and what the data collator gives[/dim]

sink-lens diff ./base --by dtype --other-dtype bfloat16  [dim]one model in two types; or --by bos[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(DiffConfig)
def diff(
    config: DiffConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Did a fine-tune break the sink or lose BOS? Two models on the same tokens, paired, and a check of inputs."""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.comparison import diff as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    return show_study(study, lambda: _changes(study), quiet=quiet)


def _changes(study: "Study") -> "Iterator[RenderableType]":
    """Yield the changes, in numbers and in indices, and every check of the inputs."""
    changes = study.tables["changes"]
    numbers = changes.loc[changes["unit"] != "index"]
    yield columns_of(numbers, ("quantity", "first", "second", "change", "change_low", "change_high", "alarm"))
    indices = changes.loc[changes["unit"] == "index"]
    yield columns_of(indices, ("quantity", "first_indices", "second_indices", "alarm"))
    for row in study.tables["checks"].to_dict("records"):
        sign = "✗" if row["alarm"] else "✓"
        yield f"{sign} {row['check']}: {row['said']}" + (f"; change {row['line']}" if row["line"] else "")

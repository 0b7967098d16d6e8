"""``sink-lens card``: a model's sinks and outliers on one page, in one JSON object and as a Markdown block."""

from typing import TYPE_CHECKING

from ..studies.config import CardConfig
from .console import app, hush
from .decisions import show_study
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost

if TYPE_CHECKING:
    from rich.table import Table

    from ..studies.study import Study

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens card  [dim]the default model on bundled prose; card.json and card.md lie in the run folder[/dim]

sink-lens card ./my-model --text mine.txt --out runs/card --trace runs/my-trace

sink-lens card gpt2 --json > card.json
"""


@app.command(epilog=_EXAMPLES)
@configured(CardConfig)
def card(
    config: CardConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """What must whoever adopts this model know of its sinks? Sinks, BOS, outlier dimensions and what they are worth."""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.model_card import card as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    block = f"block for a model card: {study.folder / 'card.md'}"
    return show_study(study, lambda: [_fields(study)], text=block, quiet=quiet)


def _fields(study: "Study") -> "Table":
    from rich.table import Table

    from ..studies.model_card import rows_of_card

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows_of_card(study.decision):
        table.add_row(name, text)
    return table

"""``sink-lens card``: a model's sinks and outliers on one page, in one JSON object and as a Markdown block."""

from ..studies.config import CardConfig
from .console import app, console, echo, hush, reported
from .options import Answer, Out, Overwrite, Quiet, configured

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
) -> Answer:
    """What must whoever adopts this model know of its sinks? Sinks, BOS, outlier dimensions and what they are worth."""
    hush(quiet)
    from rich.table import Table

    from ..studies.model_card import card as run
    from ..studies.model_card import rows_of_card

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    page = reported(study.folder, quiet=True)
    if not quiet:
        out_to = console()
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows_of_card(study.decision):
            table.add_row(name, text)
        out_to.print(table)
        out_to.print(study.headline, soft_wrap=True)
        out_to.print(f"block for a model card: {study.folder / 'card.md'}", soft_wrap=True)
        out_to.print(f"report: {page}", soft_wrap=True)
        out_to.print(f"run: {study.folder}", soft_wrap=True)
    else:
        echo(study.folder)
    return Answer(found=lambda: {"run": study.folder, "report": page, **study.decision})

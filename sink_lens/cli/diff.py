"""``sink-lens diff``: what changed from one model to another, whether it is alarming, and the line to change."""

from ..studies.config import DiffConfig
from .console import app, columns_of, console, echo, hush, reported
from .options import Answer, Out, Overwrite, Quiet, configured

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
) -> Answer:
    """Did a fine-tune break the sink or lose BOS? Two models on the same tokens, paired, and a check of inputs."""
    hush(quiet)
    from ..studies.comparison import diff as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    page = reported(study.folder, quiet=True)
    if not quiet:
        out_to = console()
        changes = study.tables["changes"]
        numbers = changes.loc[changes["unit"] != "index"]
        out_to.print(
            columns_of(numbers, ("quantity", "first", "second", "change", "change_low", "change_high", "alarm"))
        )
        indices = changes.loc[changes["unit"] == "index"]
        out_to.print(columns_of(indices, ("quantity", "first_indices", "second_indices", "alarm")))
        for row in study.tables["checks"].to_dict("records"):
            sign = "✗" if row["alarm"] else "✓"
            out_to.print(f"{sign} {row['check']}: {row['said']}" + (f"; change {row['line']}" if row["line"] else ""))
        out_to.print(study.headline, soft_wrap=True)
        out_to.print(f"report: {page}", soft_wrap=True)
        out_to.print(f"run: {study.folder}", soft_wrap=True)
    else:
        echo(study.folder)
    return Answer(found=lambda: {"run": study.folder, "report": page, **study.decision})

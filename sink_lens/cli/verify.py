"""``sink-lens verify``: published facts about a model against what is measured on it."""

from ..studies.config import VerifyConfig
from .console import app, columns_of, hush
from .decisions import show_study
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens verify ./Llama-2-7b --as meta-llama/Llama-2-7b-hf --bos with

sink-lens verify gpt2 --text wiki.txt --text-name wikitext --length 1024 --dtype bfloat16

sink-lens verify ./my-model --facts mine.json --json > verdicts.json  [dim]facts of your own beside those we know[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(VerifyConfig)
def verify(
    config: VerifyConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Is this the model that was published? Published facts against what is measured."""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.verification import verify as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    columns = ("id", "quantity", "verdict", "published", "measured", "reason")
    facts = study.tables["facts"]
    return show_study(study, lambda: [columns_of(facts, columns)] if len(facts) else [], quiet=quiet)

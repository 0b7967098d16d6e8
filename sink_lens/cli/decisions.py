"""``sink-lens quantise`` and ``streaming``: commands that end in one sentence, with the numbers behind it."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..studies.config import QuantiseConfig, StreamingConfig
from .console import app, columns_of, console, echo, hush, render_report
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..studies.study import Study

_QUANTISE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens quantise  [dim]int8, one scale a sequence, at the inputs of the linear layers of the default model[/dim]

sink-lens quantise ./my-model --format mxfp4 --cache int4_token --weights int8_token --text mine.txt

sink-lens quantise gpt2 --site resid_post --format fp8_e4m3_tensor --json > decision.json
"""
_STREAMING_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens streaming  [dim]a cache of 64 tokens, 256 tokens of text, the default model[/dim]

sink-lens streaming ./my-model --window 512 --length 2048 --positions reindexed --text mine.txt

sink-lens streaming gpt2 --keep 0,1,4 --json > decision.json
"""


@app.command(epilog=_QUANTISE_EXAMPLES)
@configured(QuantiseConfig)
def quantise(
    config: QuantiseConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Which tokens and channels must stay in 16 bit? What a low-precision format costs, and what keeping them saves."""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.quantisation import quantise as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    columns = (
        "kept",
        "channels",
        "inputs",
        "loss_nats",
        "change_nats",
        "closed_share",
        "closed_low",
        "closed_high",
    )
    return show_study(study, lambda: [_held_out_rows(study, "conditions", columns)], quiet=quiet)


@app.command(epilog=_STREAMING_EXAMPLES)
@configured(StreamingConfig)
def streaming(
    config: StreamingConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """How many first tokens must a KV cache keep? The loss beyond its size, by how many are never evicted."""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.cache_window import streaming as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    columns = ("kept", "tokens", "loss_nats", "change_nats", "closed_share", "closed_low", "closed_high")
    return show_study(study, lambda: [_held_out_rows(study, "losses", columns)], quiet=quiet)


def _held_out_rows(study: "Study", table: str, columns: tuple[str, ...]) -> "RenderableType":
    """The held-out rows without random draws."""
    return columns_of(study.tables[table].query("part == 'judge' and kept != 'random'"), columns)


def show_study(
    study: "Study",
    tables: "Callable[[], Iterable[RenderableType]]",
    *,
    text: str = "",
    quiet: bool,
) -> Answer:
    """Draw the page of a study that gives a sentence, and print the sentence first, then tables, page and folder.

    Args:
        study: the finished study; its decision is what ``--json`` prints.
        tables: makes the tables.
        text: printed below them.
        quiet: print the folder alone.
    """
    page = render_report(study.folder, quiet=True)
    if quiet:
        echo(study.folder)
    else:
        out = console()
        out.print(study.headline, soft_wrap=True)
        for part in tables():
            out.print(part)
        for part in (*([text] if text else []), f"report: {page}", f"run: {study.folder}"):
            out.print(part, soft_wrap=True)
    return Answer(found=lambda: {"run": study.folder, "report": page, **study.decision})

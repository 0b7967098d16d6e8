"""``sink-lens quantise`` and ``streaming``: commands that end in one sentence, with the numbers behind it."""

import json
from typing import TYPE_CHECKING

import typer

from ..studies.config import QuantiseConfig, StreamingConfig
from .console import app, columns_of, console, echo, hush, reported
from .options import Json, Out, Overwrite, Quiet, configured

if TYPE_CHECKING:
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
    as_json: Json = False,
) -> None:
    """Which tokens and channels must stay in 16 bit? What a low-precision format costs, and what keeping them saves."""
    hush(quiet)
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
    shown(study, table="conditions", columns=columns, quiet=quiet, as_json=as_json)


@app.command(epilog=_STREAMING_EXAMPLES)
@configured(StreamingConfig)
def streaming(
    config: StreamingConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """How many first tokens must a KV cache keep? The loss beyond its size, by how many are never evicted."""
    hush(quiet)
    from ..studies.cache_window import streaming as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    columns = ("kept", "tokens", "loss_nats", "change_nats", "closed_share", "closed_low", "closed_high")
    shown(study, table="losses", columns=columns, quiet=quiet, as_json=as_json)


def shown(study: "Study", *, table: str, columns: tuple[str, ...], quiet: bool, as_json: bool) -> None:
    """The held-out rows without random draws, the sentence and the folder; or the decision as one JSON object."""
    from ..records.provenance import strict

    page = reported(study.folder, quiet=True)
    if not quiet:
        out = console(stderr=as_json)
        frame = study.tables[table].query("part == 'judge' and kept != 'random'")
        out.print(columns_of(frame, columns))
        out.print(study.headline, soft_wrap=True)
        out.print(f"report: {page}", soft_wrap=True)
        out.print(f"run: {study.folder}", soft_wrap=True)
    if as_json:
        found = {"command": study.kind, "run": str(study.folder), **study.decision}
        typer.echo(json.dumps(strict(found), ensure_ascii=False))
    elif quiet:
        echo(study.folder)

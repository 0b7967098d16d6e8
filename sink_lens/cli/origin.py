"""``sink-lens origin``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import INTERRUPTED, app, console, say

if TYPE_CHECKING:
    from rich.table import Table

    from ..identity.origin import Origin, OriginConfig

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens origin runs/softmax-0 runs/softmax-1 runs/softmax-2

sink-lens origin runs/softmax-* --dry-run  [dim]which checkpoints would be measured[/dim]

sink-lens origin runs/softmax-* --out runs/origin  [dim]again after an interruption: it goes on[/dim]

sink-lens origin runs/softmax-* --last-only  [dim]without the course along training[/dim]
"""


@app.command(epilog=_EXAMPLES)
def origin(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Finished runs of sink-lens train that differ in the seed only.", metavar="RUN..."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result. Default: runs/origin-DATE-TIME.", metavar="DIR")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Of the runs' own evaluation data.", metavar="N", min=1)] = 32,
    length: Annotated[int, typer.Option(help="Tokens a sequence, BOS included.", metavar="T", min=10)] = 64,
    threshold: Annotated[float, typer.Option(help="A head has a sink where its sink score is above this.")] = 0.3,
    permutations: Annotated[int, typer.Option(help="Random choices of the null.", metavar="N", min=99)] = 20_000,
    last_only: Annotated[bool, typer.Option("--last-only", help="Measure the last checkpoints only.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random tokens and the null.", metavar="N", min=0)] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the first GPU.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the result that DIR holds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the sentences.")] = False,
) -> None:
    """Which dimension and neurons carry each seed's sink, and did the initialisation foretell them?

    The last checkpoint of each run against its own first, by every statistic at once, with a permutation null.
    """
    from datetime import datetime

    from ..identity.origin import OriginConfig, seed_to_sink
    from ..records import RUN_FILE
    from ..report.html import render

    config = OriginConfig(
        sequences=sequences,
        length=length,
        threshold=threshold,
        permutations=permutations,
        last_only=last_only,
        seed=seed,
    )
    if dry_run:
        console().print(_cost(runs, config=config), soft_wrap=True)
        return
    folder = Path("runs") / f"origin-{datetime.now():%Y%m%d-%H%M%S}" if out is None else out
    try:
        found = seed_to_sink(runs, config=config, out=folder, overwrite=overwrite, device=device, progress=not quiet)
    except KeyboardInterrupt:
        kept = f"the measured checkpoints are in {folder}: the same command with --out {folder} goes on from there"
        say("interrupted", kept if (folder / RUN_FILE).exists() else "nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    if not quiet:
        console().print(_table(found))
        console().print()
    for sentence in found.sentences:
        console().print(sentence, soft_wrap=True)
    for note in found.notes:
        say("warning", note)
    typer.echo(str(render(folder)))


def _cost(runs: list[Path], *, config: "OriginConfig") -> str:
    """What would be measured."""
    from ..training.checkpoints import checkpoints_of
    from ..training.variants import seeds_of

    found, _ = seeds_of(runs)
    each = {seed: 1 if config.last_only else len(checkpoints_of(run)) for seed, run in found.items()}
    return (
        f"{sum(each.values())} checkpoints of {len(each)} runs (seeds {', '.join(map(str, each))}), one pass over "
        f"{config.sequences} sequences of {config.length} tokens each; {len(each)} initialisations, one pass more over "
        f"{config.random_sequences} random sequences of {config.random_length}"
    )


def _table(found: "Origin") -> "Table":
    """A statistic a row: where what was chosen stood at the initialisation."""
    from rich.table import Table

    from ..report.columns import named
    from ..report.origins import rank_by_seed
    from ..text import number

    table = Table(
        title="place at the initialisation (0 top, 0.5 chance, 1 bottom)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("of", no_wrap=True)
    table.add_column("statistic", no_wrap=True)
    for name in ("rank by seed", "place", "p", "corrected"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.tests.to_dict("records"):
        rows = named(found.ranks, "of", str(row["of"]))
        cells = (number(float(row[name])) for name in ("place", "p", "p_holm"))
        ranks = rank_by_seed(rows, str(row["statistic"])).removeprefix("rank ")
        table.add_row(str(row["of"]), str(row["statistic"]), ranks, *cells)
    return table

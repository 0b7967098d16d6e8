"""``sink-lens circuit``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..circuits.config import CircuitConfig
from .console import app, console, echo, hush, print_conclusion, table_of
from .options import Answer, DryRun, InShard, Out, Overwrite, Quiet, configured, print_cost, rows, unfinished

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens circuit --task ioi

sink-lens circuit gpt2 --task greater-than --pairs 64 --edges 100 --save greater_than.json --save greater_than.svg

sink-lens circuit --task file --pairs-file my_pairs.jsonl --ablation mean_ordinary --method eap

sink-lens circuit --task text --pairs 16 --metric-layers 12-29 --span sink=0 --span rest=1-63

sink-lens circuit --task ioi --circuit heads_of_a_paper.csv  [dim]judge a given circuit[/dim]

sink-lens circuit runs/ioi --against eap_ig.json

sink-lens circuit --task ioi --pairs 1000 --out runs/ioi --shard 3/8  [dim]in each of 8 jobs; or slurm[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(CircuitConfig)
def circuit(
    config: CircuitConfig,
    top: Annotated[int, typer.Option(help="Rows of the table that is shown.", metavar="N")] = 12,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare two circuits, the argument and FILE, each a file or a run, and stop.", metavar="FILE"
        ),
    ] = None,
    out: Out = None,
    shard: InShard = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Find the edges between heads and MLPs that carry a task or the sink, and judge them; write a run folder."""
    hush(quiet)
    if against is not None:
        return _compared(config.model, against, top=top)
    if dry_run:
        from ..circuits.passes import passes

        return print_cost(config, passes)
    from ..circuits.run import run

    found = run(config, out=out, shard=shard, overwrite=overwrite, progress=not quiet)
    if not found.finished:
        return unfinished(found.folder, shard=shard, quiet=quiet)
    edges = found.frame.head(top)
    answer = Answer(
        found=lambda: {
            "run": found.folder,
            "report": found.report_path,
            "sentences": list(found.sentences),
            "summary": rows(found.tables["summary"])[0],
            "strongest": rows(edges),
        }
    )
    if quiet:
        echo(found.folder)
        return answer
    print_conclusion(found.folder)
    for sentence in found.sentences:
        echo(sentence)
    console().print(_table(edges, core=found.tables.get("core")))
    echo(f"report: {found.report_path}")
    echo(f"run: {found.folder}")
    return answer


def _compared(one: str, other: str, *, top: int) -> Answer:
    """Compare two circuits."""
    from ..circuits.given import compare
    from ..text import edge_name, number

    found = compare(one, other)
    for sentence in found.sentences:
        echo(sentence)
    edges = found.frame.head(top)
    heads = ("edge", "in the first", "its score there", "in the second", "its score there")
    lines = []
    for row in edges.to_dict("records"):
        cells = [("yes" if row[name] else "", number(float(row[f"score_{name}"]))) for name in ("one", "other")]
        lines.append((edge_name(str(row["edge"])), *cells[0], *cells[1]))
    console().print(table_of(heads, lines, texts=len(heads), wrapped=heads))
    about = {"jaccard": found.jaccard, "rank_correlation": found.rank_correlation, "edges": rows(edges)}
    return Answer(found=lambda: about | {"sentences": list(found.sentences)})


def _table(edges: "pd.DataFrame", *, core: "pd.DataFrame | None") -> "Table":
    from ..text import edge_name, number

    heads = ("edge", "score", "95% interval", "in bootstraps", *(() if core is None else ("over all settings",)))
    decided = {} if core is None else core.set_index("edge").to_dict("index")
    lines = []
    for row in edges.to_dict("records"):
        interval = f"{number(float(row['low']))} to {number(float(row['high']))}"
        cells = [edge_name(str(row["edge"])), number(float(row["score"])), interval, f"{float(row['inclusion']):.0%}"]
        lines.append((*cells, *([_decided(decided.get(row["edge"]))] if core is not None else [])))
    return table_of(heads, lines, texts=len(heads), wrapped=heads)


def _decided(row: dict[str, Any] | None) -> str:
    """Core with its real patch, or the setting in which the edge is least sure."""
    from ..text import number

    if row is None:
        return ""
    if row["core"]:
        return f"core, real patch {number(float(row['exact']))}"
    name = "undecided" if row["undecided"] else "contingent"
    return f"{name}: {float(row['least']):.0%} under {row['where']}"

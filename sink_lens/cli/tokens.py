"""``sink-lens tokens``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..studies.tokens_config import TokensConfig
from .console import app, console, echo, hush, render_report
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost, rows

if TYPE_CHECKING:
    from rich.table import Table

    from ..studies.token_scan import SinkTokens

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens tokens  [dim]the default model on bundled prose, about a minute on two cores[/dim]

sink-lens tokens gpt2 --text corpus.txt --length 1024 --out runs/gpt2-tokens

sink-lens tokens ./my-checkpoint --bos without --massive-threshold 10  [dim]your own threshold[/dim]

sink-lens tokens --gradient-sequences 0 --json  [dim]thresholds, rates and dimensions for a program[/dim]
"""
_MOST_IDS = 8


@app.command(epilog=_EXAMPLES)
@configured(TokensConfig)
def tokens(
    config: TokensConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Find the tokens that are sinks or massive, and the dimensions that are large on most tokens."""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.token_scan import sink_tokens

    found = sink_tokens(config, out=out, overwrite=overwrite, progress=not quiet)
    report = render_report(found.folder, quiet=True)
    answer = Answer(found=lambda: _json_answer(found, report=report))
    if quiet:
        echo(found.folder)
        return answer
    for sentence in found.headline:
        console().print(sentence, soft_wrap=True)
    console().print(_agreement(found))
    console().print(_ids(found))
    from ..report.tokens import dimension_sentences

    for sentence in dimension_sentences(found.tables["dimensions"]):
        console().print(sentence, soft_wrap=True)
    echo(f"report: {report}")
    return answer


def _json_answer(found: "SinkTokens", *, report: Path) -> dict[str, Any]:
    """The short tables, as lists of rows; undefined numbers are null."""
    names = ("thresholds", "agreement", "dimensions", "layers", "maxima")
    ids = found.tables["token_ids"]
    tables = {name: found.tables[name] for name in names}
    tables["token_ids"] = ids.loc[(ids["sink_rate"] > 0) | (ids["massive_rate"] > 0)]
    said = {"run": found.folder, "report": report, "sentence": " ".join(found.headline)}
    return said | {name: rows(table) for name, table in tables.items()}


def _agreement(found: "SinkTokens") -> "Table":
    """Sinks and massive activations by kind of token."""
    from rich.table import Table

    from ..text import percent

    table = Table(box=None, pad_edge=False)
    table.add_column("tokens", no_wrap=True)
    for name in ("all", "sinks", "massive", "both", "only sink", "only massive", "agreement"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.tables["agreement"].to_dict("records"):
        counts = (row[name] for name in ("tokens", "sinks", "massive", "both", "sink_only", "massive_only"))
        agreed = "" if row["jaccard"] != row["jaccard"] else percent(row["jaccard"])  # nan where none is marked
        table.add_row(str(row["kind"]), *(f"{count:,}" for count in counts), agreed)
    return table


def _ids(found: "SinkTokens") -> "Table":
    """The token ids with the highest scores after position 0."""
    from rich.table import Table

    from ..text import number, percent
    from ..text import token as shown

    table = Table(box=None, pad_edge=False)
    table.add_column("after position 0", no_wrap=True)
    for name in ("id", "occurrences", "sink", "massive", "shares, at most", "norm, at most"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.tables["token_ids"].head(_MOST_IDS).to_dict("records"):
        rates = (percent(row["sink_rate"]), percent(row["massive_rate"]))
        scores = (number(row["largest_share"]), number(row["largest_norm"]))
        table.add_row(shown(row["text"]), str(row["token_id"]), str(row["tokens"]), *rates, *scores)
    return table

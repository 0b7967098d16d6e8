"""``sink-lens fingerprint``."""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..identity.config import TWO, FingerprintConfig
from ..schema import NULLS
from .console import INTERRUPTED, app, console, echo, hush, render_report, say, shown_size, table_of
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, rows

if TYPE_CHECKING:
    from rich.table import Table

    from ..identity.fingerprint import Fingerprint

_SHOWN = 20
_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens fingerprint ./base ./finetuned  [dim]two models: one seed?[/dim]

sink-lens fingerprint runs/softmax-0 runs/softmax-1 runs/softmax-2  [dim]first and last checkpoint of each[/dim]

sink-lens fingerprint --untrained gpt2,n_layers=4,d_model=192 --seeds 0-14  [dim]105 unrelated pairs[/dim]

sink-lens fingerprint A B --dry-run  [dim]time and memory; again later: states are cached, so that it goes on[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(FingerprintConfig)
def fingerprint(
    config: FingerprintConfig,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="The same as --inputs embeddings.")] = False,
    out: Out = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> Answer:
    """Do two models come from one initialisation? SeedPrint on each pair of models, with nulls that hold.

    Read tau_bar, the effect, first: a p only says how sure it is that the effect is not 0.

    With --inputs embeddings unrelated narrow models (192 wide and less), untrained or little trained, look related
    under every null: their stream carries an embedding's own coordinates to the end. At a width of 768 one pair in six
    does.
    """
    from dataclasses import replace
    from datetime import datetime

    hush(quiet)
    if not (config.models or config.untrained):  # before torch is loaded
        raise InputError(f"no model was given; {TWO}")
    from ..identity.fingerprint import cost
    from ..identity.fingerprint import fingerprint as compared

    config = replace(config, inputs="embeddings") if embeddings else config
    if dry_run:
        taken = cost(config=config)
        console().print(_cost(taken))
        return Answer(found=lambda: {"dry_run": rows(taken)})
    folder = Path("runs") / f"fingerprint-{datetime.now():%Y%m%d-%H%M%S}" if out is None else out
    try:
        found = compared(config=config, out=folder, overwrite=overwrite, progress=not quiet)
    except KeyboardInterrupt:
        kept = "the states of finished models are cached: the same command goes on"
        say("interrupted", kept if config.cache else "nothing was kept")
        raise typer.Exit(INTERRUPTED) from None
    if not quiet:
        console().print(_table(found))
        console().print()
    for sentence in found.sentences:
        console().print(sentence, soft_wrap=True)
    for note in found.notes:
        say("warning", note)
    page = render_report(folder, quiet=True)
    echo(str(page))
    answer = {"run": folder, "report": page, "sentences": found.sentences, "notes": found.notes}
    return Answer(found=lambda: {**answer, "pairs": rows(found.pairs)})


def _cost(frame: Any) -> "Table":
    """One row per model, and the whole in the title."""
    n, seconds = len(frame), float(frame["seconds"].sum())
    pairs = n * (n - 1) // 2
    title = f"{n} models, {pairs} pairs; about {seconds:,.0f} s to read the inputs, about a second per pair"
    heads = ("model", "width", "inputs", "tokens", "seconds", "states")
    lines = []
    for row in frame.to_dict("records"):
        time = "cached" if row["cached"] else f"{row['seconds']:,.1f}"
        size = shown_size(round(1e6 * row["megabytes"]))
        lines.append((row["model"], str(row["d_model"]), f"{row['inputs']:,}", f"{row['tokens']:,}", time, size))
    return table_of(heads, lines, title=title, wrapped=heads)


def _table(found: "Fingerprint") -> "Table":
    """One row per pair, the strongest effects first: the null that decides, and between which p the others lie."""
    from ..identity.pages.fingerprint import brief
    from ..text import number

    rows = found.pairs.sort_values("tau_bar", ascending=False).head(_SHOWN)
    over = f"; {_SHOWN} of {len(found.pairs)} pairs, by effect" if len(found.pairs) > _SHOWN else ""
    apart = _apart({*rows["a"], *rows["b"]})
    short, _ = brief(list(apart.values()))
    decides, others = found.config.decides, [name for name in NULLS if name != found.config.decides]
    lines = []
    for row in rows.to_dict("records"):
        pair = " · ".join(short[apart[row[end]]] for end in "ab")
        of_others = [row[f"log10_p_{name}"] for name in others]
        span = f"{number(min(of_others))} to {number(max(of_others))}"
        p = number(row[f"log10_p_{decides}"])
        lines.append((pair, row["verdict"], number(row["tau_bar"]), str(row["shared"]), p, span))
    heads = ("models", "verdict", "tau_bar", "shared", decides, "other nulls")
    title = f"log10 p (1 − Φ){over}"
    return table_of(heads, lines, title=title, texts=2, wrapped=heads[:2])


def _apart(names: Iterable[str]) -> dict[str, str]:
    """Each name without the folders that all have in common."""
    parts = {name: Path(name).parts for name in names}
    levels = zip(*(one[:-1] for one in parts.values()), strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return {name: str(Path(*one[shared:])) for name, one in parts.items()}

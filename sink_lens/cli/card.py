"""``sink-lens card``: one model, what changed from one to another, or many in a table."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..studies.config import CardConfig, is_run
from .console import app, columns_of, console, echo, hush, table_of
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost
from .run_kinds import print_result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..studies.study import Study

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens card  [dim]the default model on bundled prose; card.json and card.md lie in the run folder[/dim]

sink-lens card ./my-model --text mine.txt --out runs/card --trace runs/my-trace

sink-lens card ./base ./tuned --text mine.txt  [dim]what changed: base and fine-tuned, or two checkpoints[/dim]

sink-lens card ./base --by dtype --other-dtype bfloat16  [dim]one model in two types; or --by bos[/dim]

sink-lens card runs/* --columns model,sink_rate,loss --format latex > models.tex  [dim]a row per card or trace[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(CardConfig)
def card(
    config: CardConfig, out: Out = None, overwrite: Overwrite = False, quiet: Quiet = False, dry_run: DryRun = False
) -> Answer:
    """What must users know about a model's sinks? One model, what changed in a second one, or many in a table."""
    hush(quiet)
    from ..studies.passes import passes

    if config.makes_table():
        models = [name for name in (config.model, *config.others) if not is_run(name)]
        if not dry_run:
            return _table(config, out=out, overwrite=overwrite, quiet=quiet)
        if not models:
            raise InputError("--dry-run was given and every row is that of a run; need a model to measure")
        costs = [print_cost(replace(config, model=name, others=()), passes).found()["dry_run"] for name in models]
        return Answer(found=lambda: {"dry_run": [line for cost in costs for line in cost]})
    if dry_run:
        return print_cost(config, passes)
    from ..studies import card as make_card

    study = make_card(config, out=out, overwrite=overwrite, progress=not quiet)
    if not config.compares:
        return print_result(study, shown=_of_one, quiet=quiet)
    return replace(print_result(study, shown=_changed, quiet=quiet), exit_code=int(not study.decision["within_bound"]))


def _of_one(study: "Study") -> "Iterator[RenderableType]":
    from rich.table import Table

    from ..studies.card import rows_of_card

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows_of_card(study.decision):
        table.add_row(name, text)
    yield table
    yield f"block for a model card: {study.folder / 'card.md'}"


def _changed(study: "Study") -> "Iterator[RenderableType]":
    """Numbers of both, and what is no number."""
    from ..studies.pages.diff import with_names

    changes = study.tables["changes"]
    is_text = changes["unit"].isin(["index", "text"])
    yield columns_of(
        changes.loc[~is_text], ("quantity", "first", "second", "change", "change_low", "change_high", "changed")
    )
    texts = with_names(changes.loc[is_text])
    yield columns_of(texts, ("quantity", "first_indices", "second_indices", "changed"))


def _table(config: CardConfig, **how: Any) -> Answer:
    """Print a row per model or run folder; ``how`` are the folder, whether to replace what it holds, and quiet."""
    from ..studies.card_table import as_objects, chosen_columns, rows_of, shown_of, table_text

    quiet = how.pop("quiet")
    rows = rows_of((config.model, *config.others), config, progress=not quiet, **how)
    if config.columns == ("?",):
        known = sorted({name for row in rows for name in row})
        for name in known:
            echo(name)
        return Answer(found=lambda: {"columns": known})
    columns = chosen_columns(rows, config.columns)
    if config.format == "terminal":
        heads = [name.replace("_", " ") for name in columns]
        cells = shown_of(rows, columns).to_numpy().tolist()
        console().print(table_of(heads, cells, texts=len(heads), wrapped=heads))
    else:
        echo(table_text(rows, columns, form=config.format), nl=False)
    return Answer(found=lambda: {"columns": columns, "rows": as_objects(rows, columns)})

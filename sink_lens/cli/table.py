"""``sink-lens table``: many models in one table, from run folders alone."""

from pathlib import Path

from ..errors import InputError
from ..report.config import TableConfig
from .console import app, console, echo, table_of
from .options import Answer, Quiet, configured

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens table runs/*  [dim]one row per card or trace[/dim]

sink-lens table runs/* --columns model,sink_rate,outlier_dimensions,loss --format latex --out models.tex

sink-lens table runs/card --columns ?  [dim]the columns that there are[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(TableConfig)
def table(config: TableConfig, quiet: Quiet = False) -> Answer:
    """Put many models into one table, one row per card or trace, with the columns that you choose."""
    from ..records import check_not_of_run, write_whole
    from ..report.models import as_objects, chosen_columns, rows_of, table_text

    rows = rows_of(config.runs)
    if config.columns == ("?",):
        known = sorted({name for row in rows for name in row})
        for name in known:
            echo(name)
        return Answer(found=lambda: {"columns": known})
    columns = chosen_columns(rows, config.columns)
    answer = Answer(found=lambda: {"columns": columns, "rows": as_objects(rows, columns)})
    if config.format == "terminal":
        heads = [name.replace("_", " ") for name in columns]
        cells = [[row[name].shown if name in row else "" for name in columns] for row in rows]
        console().print(table_of(heads, cells, texts=len(heads), wrapped=heads))
        return answer
    text = table_text(rows, columns, form=config.format)
    if config.out is None:
        echo(text.removesuffix("\n"))
        return answer
    path = Path(config.out)
    check_not_of_run(path, replaceable=(path.suffix,))
    if path.exists() and not config.overwrite:
        raise InputError(f"{path} is there already; need a new name, or --overwrite to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    echo(str(path) if quiet else f"table: {path}")
    return answer

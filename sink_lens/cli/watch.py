"""``sink-lens watch``."""

from ..training.config import WatchConfig
from .console import app, console, echo, render_report, terminal_table
from .options import Answer, Quiet, add_config_options

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens watch runs/headnorm-0  [dim]again after an interruption, or after more training: it goes on[/dim]

sink-lens watch output/ --step-tokens 65536  [dim]checkpoint-500, checkpoint-1000, ... of your own trainer[/dim]

sink-lens watch runs/headnorm-0 --threshold 0.1 --again  [dim]a small model's sink may be weak[/dim]
"""


@app.command("watch", epilog=_EXAMPLES)
@add_config_options(WatchConfig)
def watch_command(config: WatchConfig, quiet: Quiet = False) -> Answer:
    """Measure the chain on every checkpoint of a training: when is the sink born?

    Checkpoints are those of a run of sink-lens train, or the subfolders of any folder whose names end in their step,
    such as checkpoint-500 of the Hugging Face Trainer. Writes watch.parquet into the folder.
    """
    from ..errors import RunError
    from ..training.pages.training import BRIEF, checkpoint_table
    from ..training.sink_birth import find_birth
    from ..training.watch import watch, watch_output_folder

    run, threshold = watch_output_folder(config), config.threshold
    frame = watch(config.run, config=config, progress=not quiet)
    if bool(frame["error"].notna().all()):
        raise RunError(f"no checkpoint of {run} could be measured; need one at least.")
    born = find_birth(frame, threshold=threshold)
    if not quiet:
        table = checkpoint_table(frame, threshold=threshold, heads=BRIEF)
        title = f"sinks above {threshold:g}, mass on position 0, its ratios to other tokens, rank with and without it"
        console().print(terminal_table(table.heads, table.rows, title=title, texts=0))
    console().print(born.sentence, soft_wrap=True)
    page = render_report(run, quiet=quiet)
    if not quiet:
        echo(str(run))
    answer = {"run": run, "report": page, "sentence": born.sentence, "table": run / "watch.parquet"}
    return Answer(found=lambda: answer)

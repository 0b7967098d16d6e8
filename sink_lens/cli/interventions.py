"""``sink-lens isolate``, ``amplify`` and ``ablate``."""

from typing import TYPE_CHECKING, Any

from ..studies.config import AblateConfig, AmplifyConfig, IsolateConfig
from .console import app, columns_of, console, echo, hush, render_report
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost, rows

if TYPE_CHECKING:
    import pandas as pd

    from ..studies.study import Study

_ISOLATE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens isolate  [dim]a third of the length, in all layers of the default model[/dim]

sink-lens isolate gpt2 --target-position 9 --target-position 20 --layers 0-5

sink-lens isolate --prompt "Call me Ishmael. Some years ago, never mind how long" --target-position 5
"""
_AMPLIFY_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens amplify  [dim]a third of the length, layer 0 to the end of the first growth step[/dim]

sink-lens amplify gpt2 --target-position 10 --factors 1,2,5,10 --centre values --centre none

sink-lens amplify --target-position 10 --layers 0-1 --factors 0,0.5  [dim]attenuate[/dim]
"""
_ABLATE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens ablate  [dim]a few minutes on two cores[/dim]

sink-lens ablate ./my-checkpoint --text mine.txt --out runs/ablation
"""


@app.command(epilog=_ISOLATE_EXAMPLES)
@configured(IsolateConfig)
def isolate(
    config: IsolateConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Isolate tokens by the attention mask: does a sink form there, is the model's own removed or relocated?"""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.isolation import isolate as run

    return _show(run(config, out=out, overwrite=overwrite, progress=not quiet), quiet=quiet, columns=_MASS)


@app.command(epilog=_AMPLIFY_EXAMPLES)
@configured(AmplifyConfig)
def amplify(
    config: AmplifyConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Amplify the variance of a token's aggregated values, by factor and centre: does a sink form there?"""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.amplification import amplify as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    return _show(study, quiet=quiet, columns=("centre", "factor", "times", *_MASS[1:]))


@app.command(epilog=_ABLATE_EXAMPLES)
@configured(AblateConfig)
def ablate(
    config: AblateConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Find the smallest set of neurons of each growth step whose joint ablation removes the sink."""
    hush(quiet)
    if dry_run:
        return print_cost(config)
    from ..studies.ablation import ablate as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    columns = ("step", "kind", "neurons", "edit", "removed", "95%")
    return _show(study, quiet=quiet, frame=_ablations(study), columns=columns)


_MASS = (
    "target_position",
    "baseline_target_mass",
    "target_mass",
    "baseline_sink_mass",
    "sink_mass",
    "outcome",
    "loss_change_nats",
)


def _ablations(study: "Study") -> "pd.DataFrame":
    """The chosen sets and their neurons, in few columns; the headline says what random sets do."""
    from ..text import interval, percent

    table = study.tables["ablations"]
    table = table[~table["kind"].str.startswith("random")]
    what = {"column": "columns", "scalar": "outlier entries"}
    edits = zip(table["method"], table["what"], table["where"], strict=True)
    bounds = zip(table["ci_low"], table["ci_high"], strict=True)
    return table.assign(
        edit=[f"{method} of {what[of]}, {where}" for method, of, where in edits],
        removed=[percent(share) for share in table["removed_share"]],
        **{"95%": [interval(low, high, shown=percent) for low, high in bounds]},
    )


def _show(study: "Study", *, quiet: bool, columns: tuple[str, ...], frame: "pd.DataFrame | None" = None) -> Answer:
    page = render_report(study.folder, quiet=True)
    if quiet:
        echo(study.folder)
    else:
        console().print(study.headline, soft_wrap=True)
        console().print(columns_of(study.tables["summary"] if frame is None else frame, columns))
        echo(f"report: {page}")
        echo(f"run: {study.folder}")

    def found() -> dict[str, Any]:
        table = study.tables.get("ablations", study.tables["summary"])
        return {"run": study.folder, "report": page, "sentence": study.headline, "rows": rows(table)}

    return Answer(found=found)

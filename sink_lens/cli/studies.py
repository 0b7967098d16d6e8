"""The commands of ``sink_lens.studies``: each runs one study, draws its page, and prints its sentence and tables.

A command's function below gets the finished study and gives what stands between the sentence and the page's name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..studies.config import (
    AblateConfig,
    AmplifyConfig,
    IsolateConfig,
    QuantiseConfig,
)
from ..studies.tokens_config import TokensConfig
from .console import app, columns_of, console, echo, hush, printed, render_report
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost, rows

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from rich.table import Table

    from ..studies.study import Study
    from ..studies.tokens import SinkTokens

_MOST_IDS = 8
_IDS = {"text": "after position 0", "token_id": "id", "tokens": "occurrences", "sink_rate": "sink"}
_IDS |= {"massive_rate": "massive", "largest_share": "shares, at most", "largest_norm": "norm, at most"}
"""Columns of the table of token ids, with their heads."""


def _study(
    kind: type, *, run: str, examples: str, found: "Callable[[Any], Mapping[str, Any]] | None" = None
) -> "Callable[[Callable[[Any], Iterable[RenderableType]]], None]":
    """Put a command that runs a study on the app, under the name and with the docstring of the decorated function.

    Args:
        kind: the study's configuration.
        run: its function, as module:name in ``sink_lens.studies``.
        examples: of the help.
        found: what ``--json`` prints beside the run and its report; the study's decision if None.
    """

    def decorate(parts: "Callable[[Any], Iterable[RenderableType]]") -> None:
        """Make the command of a study from its tables for the terminal."""

        def command(
            config: Any, out: Out = None, overwrite: Overwrite = False, quiet: Quiet = False, dry_run: DryRun = False
        ) -> Answer:
            """Run the study, draw its page and print its tables."""
            hush(quiet)
            if dry_run:
                from ..studies.passes import passes

                return print_cost(config, passes)
            module, _, name = run.partition(":")
            run_study = getattr(import_module(f"sink_lens.studies.{module}"), name)
            study = run_study(config, out=out, overwrite=overwrite, progress=not quiet)
            return shown_study(study, parts, found=found, quiet=quiet)

        command.__name__, command.__doc__ = parts.__name__, parts.__doc__
        app.command(epilog=f"[bold]Examples[/bold]\n\n{examples}")(configured(kind)(command))

    return decorate


def shown_study(
    study: Any,
    parts: "Callable[[Any], Iterable[RenderableType]]",
    *,
    found: "Callable[[Any], Mapping[str, Any]] | None" = None,
    quiet: bool,
) -> Answer:
    """Draw a study's page and print its sentence and its tables.

    Args:
        study: the finished study.
        parts: gives what stands between the sentence and the page's name.
        found: what ``--json`` prints beside the run and its report; the study's decision if None.
        quiet: print the folder alone.
    """
    page = render_report(study.folder, quiet=True)
    if quiet:
        echo(study.folder)
    else:
        for part in (study.headline, *parts(study), f"report: {page}", f"run: {study.folder}"):
            console().print(part, soft_wrap=isinstance(part, str))
    decision = study.decision if found is None else found(study)
    return Answer(found=lambda: {"run": study.folder, "report": page, **decision})


# --- which tokens


def _token_tables(found: "SinkTokens") -> dict[str, Any]:
    """Collect the short tables for ``--json``."""
    ids = found.tables["token_ids"]
    names = ("thresholds", "agreement", "dimensions", "layers", "maxima")
    tables = {name: found.tables[name] for name in names}
    tables["token_ids"] = ids.loc[(ids["sink_rate"] > 0) | (ids["massive_rate"] > 0)]
    return {"sentence": " ".join(found.sentences), **{name: rows(table) for name, table in tables.items()}}


@_study(
    TokensConfig,
    run="tokens:sink_tokens",
    found=_token_tables,
    examples="""\
sink-lens tokens  [dim]the default model on bundled prose, about a minute on two cores[/dim]

sink-lens tokens gpt2 --text corpus.txt --length 1024 --out runs/gpt2-tokens

sink-lens tokens ./my-checkpoint --bos without --massive-threshold 10  [dim]your own threshold[/dim]

sink-lens tokens --gradient-sequences 0 --json  [dim]thresholds, rates and dimensions for a program[/dim]
""",
)
def tokens(found: "SinkTokens") -> "Iterator[RenderableType]":
    """Find the tokens that are sinks or massive, and the dimensions that are large on most tokens."""
    from ..report.page import shown_table
    from ..studies.pages.tokens import AGREEMENT, dimension_sentences, with_readable_text

    ids = with_readable_text(found.tables["token_ids"].head(_MOST_IDS))
    yield printed(shown_table(found.tables["agreement"], AGREEMENT))
    yield printed(shown_table(ids, _IDS))
    yield from dimension_sentences(found.tables["dimensions"])


# --- intervene

_MASS = (
    "target_position",
    "baseline_target_mass",
    "target_mass",
    "baseline_sink_mass",
    "sink_mass",
    "outcome",
    "loss_change_nats",
)


def _rows_of(study: "Study") -> dict[str, Any]:
    """The study's rows for ``--json``."""
    table = study.tables.get("ablations", study.tables["summary"])
    return {"sentence": study.headline, "rows": rows(table)}


@_study(
    IsolateConfig,
    run="isolate:isolate",
    found=_rows_of,
    examples="""\
sink-lens isolate  [dim]a third of the length, in all layers of the default model[/dim]

sink-lens isolate gpt2 --target-position 9 --target-position 20 --layers 0-5

sink-lens isolate --prompt "Call me Ishmael. Some years ago, never mind how long" --target-position 5
""",
)
def isolate(study: "Study") -> "Iterator[RenderableType]":
    """Isolate tokens by the attention mask: does a sink form there, is the model's own removed or relocated?"""
    yield columns_of(study.tables["summary"], _MASS)


@_study(
    AmplifyConfig,
    run="amplify:amplify",
    found=_rows_of,
    examples="""\
sink-lens amplify  [dim]a third of the length, layer 0 to the end of the first growth step[/dim]

sink-lens amplify gpt2 --target-position 10 --factors 1,2,5,10 --centre values --centre none

sink-lens amplify --target-position 10 --layers 0-1 --factors 0,0.5  [dim]attenuate[/dim]
""",
)
def amplify(study: "Study") -> "Iterator[RenderableType]":
    """Amplify the variance of a token's aggregated values, by factor and centre: does a sink form there?"""
    yield columns_of(study.tables["summary"], ("centre", "factor", "times", *_MASS[1:]))


@_study(
    AblateConfig,
    run="ablate:ablate",
    found=_rows_of,
    examples="""\
sink-lens ablate  [dim]a few minutes on two cores[/dim]

sink-lens ablate ./my-checkpoint --text mine.txt --out runs/ablation
""",
)
def ablate(study: "Study") -> "Iterator[RenderableType]":
    """Find the smallest set of neurons of each growth step whose joint ablation removes the sink."""
    yield columns_of(_ablations(study.tables["ablations"]), ("step", "kind", "neurons", "edit", "removed", "95%"))


def _ablations(table: "pd.DataFrame") -> "pd.DataFrame":
    """The chosen sets and their neurons, in few columns; the headline says what random sets do."""
    from ..text import interval, percent

    table = table.loc[~table["kind"].str.startswith("random")]
    what = {"column": "columns", "scalar": "outlier entries"}
    edits = zip(table["method"], table["what"], table["where"], strict=True)
    bounds = zip(table["ci_low"], table["ci_high"], strict=True)
    return table.assign(
        edit=[f"{method} of {what[of]}, {where}" for method, of, where in edits],
        removed=[percent(share) for share in table["removed_share"]],
        **{"95%": [interval(low, high, shown=percent) for low, high in bounds]},
    )


# --- decide


@_study(
    QuantiseConfig,
    run="quantise:quantise",
    examples="""\
sink-lens quantise  [dim]int8, one scale per sequence, at the inputs of the linear layers of the default model[/dim]

sink-lens quantise ./my-model --format mxfp4 --cache int4_token --weights int8_token --text mine.txt

sink-lens quantise gpt2 --site resid_post --format fp8_e4m3_tensor --json > decision.json
""",
)
def quantise(study: "Study") -> "Iterator[RenderableType]":
    """Which tokens and channels must stay in 16 bit? What a low-precision format costs, and what keeping them saves."""
    yield _held_out_rows(study.tables["conditions"], ("kept", "channels", *_CLOSED))


_CLOSED = ("loss_nats", "change_nats", "closed_share", "closed_low", "closed_high")


def _held_out_rows(table: "pd.DataFrame", columns: tuple[str, ...]) -> "Table":
    """The held-out rows without random draws."""
    return columns_of(table.query("part == 'judge' and kept != 'random'"), columns)

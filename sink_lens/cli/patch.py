"""``sink-lens patch``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from ..patching.config import PatchConfig
from .console import app, console, echo, hush, print_conclusion, render_report, table_of
from .options import (
    Answer,
    DryRun,
    InShard,
    Out,
    Overwrite,
    Quiet,
    configured,
    print_cost,
    rows,
    unfinished,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from ..models.lens import LensModel
    from ..patching.results import AttributionResult, PatchResult

_MOST_DIFFERENCES = 20
_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens patch --clean "The capital of France is" --corrupted "The capital of Spain is" \
--metric logit_difference --correct " Paris" --incorrect " Madrid"

sink-lens patch gpt2 --clean "A cat sat down" --corrupted "A dog sat down" --site z --by layer,head \
--metric sink_mass --sink-position 0

sink-lens patch --clean "One two three" --corrupted "One four three" --site neurons --layers 3-5 --units 12,800 \
--metric norm --metric-layers 6 --direction noising

sink-lens patch --clean "One two three" --corrupted "One four three" --out runs/one --shard 3/8 \
[dim]in each of 8 jobs; --shard slurm in an array job[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(PatchConfig)
def patch(
    config: PatchConfig,
    top: Annotated[int, typer.Option(help="Rows of the table that is shown.", metavar="N")] = 10,
    out: Out = None,
    shard: InShard = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Put activations of one run into another, part by part, and measure what changes; write a run folder."""
    if not config.clean or not config.corrupted:
        raise InputError(
            "patching needs two texts with the same number of tokens; give --clean TEXT and --corrupted TEXT"
        )
    if shard is not None:
        from ..records.shards import check_shard  # which imports pandas: a dry run does without

        check_shard(shard, out=out, overwrite=overwrite)
        if config.approximate:
            raise InputError("--shard and --approximate were given; an approximation is one pass, which is not divided")
    hush(quiet)
    from ..patching.passes import check_before, passes

    if dry_run:
        return print_cost(config, passes)
    check_before(config)
    from ..models.inputs import default_folder
    from ..models.load import load
    from ..patching.patch import patch as run_patch

    lens = load(config.model, device=config.device, dtype=config.dtype, announce=None if quiet else echo)
    folder, sentence = out or default_folder(config.model), ""
    result: PatchResult | AttributionResult
    if config.approximate:
        result, sentence = _print_approximation(lens, config=config, folder=folder, overwrite=overwrite, quiet=quiet)
    else:
        result = run_patch(lens, config=config, out=folder, shard=shard, overwrite=overwrite, progress=not quiet)
        if not result.finished:
            return unfinished(folder, shard=shard, quiet=quiet)
    strongest = result.strongest(top)
    folders = [folder / site for site in config.sites] if len(config.sites) > 1 else [folder]
    pages = [render_report(one, quiet=True) for one in folders]
    told = {"run": folder, "report": pages if len(pages) > 1 else pages[0], "metric": result.metric}
    answer = Answer(found=lambda: {**told, "differences": rows(result.differences), "strongest": rows(strongest)})
    if quiet:
        echo(folder)
        return answer
    for one in folders:
        print_conclusion(one)
    console().print(_differences(result.differences))
    console().print(
        f"the strongest of {len(result.frame)} patches of {result.site}, {result.direction}: {result.metric} "
        f"{result.baseline:.4g} in the baseline run, {result.source:.4g} in the run that the values come from",
        soft_wrap=True,
    )
    console().print(_strongest(result, top=top))
    if sentence:
        echo(sentence)
    for page in pages:
        echo(f"report: {page}")
    echo(f"run: {folder}")
    return answer


def _print_approximation(
    lens: "LensModel", *, config: PatchConfig, folder: Path, overwrite: bool, quiet: bool
) -> tuple["AttributionResult", str]:
    """The approximation and what its check says; both are in the folder."""
    import torch

    from ..patching.attribution import attribution_patch
    from ..patching.results import write_result
    from ..patching.run_folder import open_run
    from ..patching.run_pair import prepare_runs

    runs, _, pair = prepare_runs(lens, None, None, metric=None, config=config)
    with open_run(folder, lens, pair, config=config, metric=runs.metric, own={}, overwrite=overwrite) as writer:
        result = attribution_patch(lens, pair.clean, pair.corrupted, metric=runs.metric, config=config)
        generator = torch.Generator().manual_seed(config.seed)
        check = result.sample(config.check, generator=generator, progress=not quiet)
        writer.write_table("check", check.frame)
        write_result(writer, result)
    return result, check.sentence


def _differences(differences: "pd.DataFrame") -> "Table":
    from ..text import plural, token

    title = f"the prompts differ in {plural(len(differences), 'token')}"
    title += f"; the first {_MOST_DIFFERENCES}" * (len(differences) > _MOST_DIFFERENCES)
    lines = [
        (str(sequence), str(position), token(clean), token(corrupted))
        for sequence, position, clean, corrupted in differences.head(_MOST_DIFFERENCES).itertuples(index=False)
    ]
    return table_of(("sequence", "position", "clean", "corrupted"), lines, title=title, texts=4)


def _strongest(result: "PatchResult | AttributionResult", *, top: int) -> "Table":
    from ..text import interval, number, token

    heads = {"value": result.metric, "effect": "effect", "95%": "95%", "control_effect": "controls"}
    heads |= {"normalised_effect": "of the way", "approximation": "approx."}
    frame = result.strongest(top)
    heads |= {"effect": "approx."} if "method" in frame else {}
    if "ci_low" in frame.columns:
        frame["95%"] = [interval(low, high) for low, high in zip(frame["ci_low"], frame["ci_high"], strict=True)]
    shown = [name for name in heads if name in frame.columns and bool(frame[name].notna().any())]
    lines = []
    for row in frame.to_dict("records"):
        text = result.labels.get(int(row["position"]), "") if "position" in row else ""
        where = [row[name] if name == "site" else str(int(row[name])) for name in result.by]
        cells = (row[name] if isinstance(row[name], str) else number(float(row[name])) for name in shown)
        lines.append((*where, token(text) if text else "", *cells))
    columns = (*result.by, "token", *(heads[name] for name in shown))
    return table_of(columns, lines, texts=len(columns), wrapped=columns)

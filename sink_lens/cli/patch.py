"""``sink-lens patch``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..patching.config import PatchConfig
from .console import app, console, echo, hush, reported
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, costed, rows

if TYPE_CHECKING:
    from rich.table import Table

    from ..models.lens import LensModel
    from ..patching.activation import PatchResult
    from ..patching.attribution import AttributionResult
    from ..patching.pairs import PromptPair

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens patch --clean "The capital of France is" --corrupted "The capital of Spain is" \
--metric logit_difference --correct " Paris" --incorrect " Madrid"

sink-lens patch gpt2 --clean "A cat sat down" --corrupted "A dog sat down" --site z --by layer,head \
--metric sink_mass --sink-position 0

sink-lens patch --clean "One two three" --corrupted "One four three" --site neurons --layers 3-5 --units 12,800 \
--metric norm --metric-layers 6 --direction noising
"""


@app.command(epilog=_EXAMPLES)
@configured(PatchConfig)
def patch(
    config: PatchConfig,
    top: Annotated[int, typer.Option(help="Rows of the table that is shown.", metavar="N")] = 10,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> Answer:
    """Put activations of one run into another, part by part, and measure what changes; write a run folder."""
    if not config.clean or not config.corrupted:
        raise InputError("patching needs two texts of as many tokens; give --clean TEXT and --corrupted TEXT")
    hush(quiet)
    if dry_run:
        return costed(config)
    from ..models.load import load
    from ..patching.activation import patch as run_patch
    from ..patching.attribution import attribution_patch
    from ..patching.named_metric import named_metric
    from ..patching.pairs import paired

    lens = load(config.model, device=config.device, dtype=config.dtype, announce=None if quiet else echo)
    pair = paired(lens, config.clean, config.corrupted, bos=config.bos)
    pair.run_and_source(config.direction)  # refuses one that does not exist
    metric = named_metric(lens, pair, config=config)
    folder = out or _default_folder(config.model)
    with _writer(folder, lens, pair, config=config, overwrite=overwrite) as writer:
        if not quiet:
            console().print(_differences(pair))
        result: PatchResult | AttributionResult
        sentence, tables = "", {}
        if config.approximate:
            import torch

            result = attribution_patch(lens, pair.clean, pair.corrupted, metric=metric, config=config)
            generator = torch.Generator().manual_seed(config.seed)
            checked = result.sample(config.check, generator=generator, progress=not quiet)
            sentence, tables = checked.sentence, {"check": checked.frame}
        else:
            result = run_patch(lens, pair.clean, pair.corrupted, metric=metric, config=config, progress=not quiet)
        writer.write_table("patches", result.frame)
        for name, frame in tables.items():
            writer.write_table(name, frame)
        writer.write_table("differences", pair.differences)
        if result.by:
            writer.write_bytes("heatmap.png", _png(result))
        strongest = _summary(result, top=top)
        writer.write_csv("summary", strongest)
    page = reported(folder, quiet=True)
    found = {"run": folder, "report": page, "metric": result.metric}
    answer = Answer(found=lambda: {**found, "differences": rows(pair.differences), "strongest": rows(strongest)})
    if quiet:
        echo(folder)
        return answer
    console().print(
        f"the strongest of {len(result.frame)} patches of {result.site}, {result.direction}: {result.metric} "
        f"{result.unpatched:.4g} unpatched, {result.source:.4g} in the run that the values come from",
        soft_wrap=True,
    )
    console().print(_strongest(result, top=top))
    if sentence:
        echo(sentence)
    echo(f"report: {page}")
    echo(f"run: {folder}")
    return answer


def _default_folder(model: str) -> Path:
    from ..chain.trace import default_folder

    return default_folder(model)


def _writer(folder: Path, lens: "LensModel", pair: "PromptPair", *, config: PatchConfig, overwrite: bool) -> Any:
    from ..models.load import weights_hash
    from ..records import create_run, versions

    provenance = {
        "model": lens.name,
        "family": lens.family.architecture,
        "weights_sha256": weights_hash(lens),
        "notes": list(lens.notes),
        "token_source": pair.clean.source,
        "tokens_sha256": pair.clean.hash,
        "corrupted_sha256": pair.corrupted.hash,
        "bos": pair.clean.bos,
        "bos_condition": pair.clean.bos_condition,
        "dtype": str(lens.dtype).removeprefix("torch."),
        "device": str(lens.device),
        "kernel": "eager",
        "versions": versions(),
        "seeds": {"sample": config.seed},
    }
    expects = ("patches", "differences", "summary")
    return create_run(
        folder, kind="patch", config=asdict(config), provenance=provenance, expects=expects, overwrite=overwrite
    )


def _png(result: "PatchResult | AttributionResult") -> bytes:
    import io

    buffer = io.BytesIO()
    result.heatmap().savefig(buffer, format="png")
    return buffer.getvalue()


def _summary(result: "PatchResult | AttributionResult", *, top: int) -> Any:
    """The strongest patches, with what they are to be compared with."""
    frame = result.strongest(top)
    return frame.assign(
        site=result.site,
        metric=result.metric,
        direction=result.direction,
        unpatched=result.unpatched,
        source=result.source,
    )


def _differences(pair: "PromptPair") -> "Table":
    from rich.table import Table

    from ..text import token

    total = len(pair.differences)
    table = Table("sequence", "position", "clean", "corrupted", box=None, pad_edge=False, title_justify="left")
    table.title = f"{total} of {int(pair.clean.lengths.sum())} tokens differ"
    for row in pair.differences.head(20).itertuples(index=False):
        sequence, position, one, other = row
        table.add_row(str(sequence), str(position), token(one), token(other))
    if total > 20:
        table.caption = f"the first 20 of {total}"
    return table


def _strongest(result: "PatchResult | AttributionResult", *, top: int) -> "Table":
    from rich.table import Table

    from ..text import number, token

    heads = {"value": result.metric, "effect": "effect", "normalised_effect": "of the way", "approximation": "approx."}
    shown = [name for name in heads if name in result.frame.columns]
    table = Table(*result.by, "token", *(heads[name] for name in shown), box=None, pad_edge=False)
    for row in result.strongest(top).to_dict("records"):
        text = result.labels.get(int(row["position"]), "") if "position" in row else ""
        where = [str(int(row[name])) for name in result.by]
        table.add_row(*where, token(text) if text else "", *(number(float(row[name])) for name in shown))
    return table

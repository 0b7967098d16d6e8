"""``sink-lens patch``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..models.bundled import DEFAULT_MODEL
from .console import app, console, numbers, reported

if TYPE_CHECKING:
    from rich.table import Table

    from ..edits.metrics import Metric
    from ..models.lens import LensModel
    from ..patching.activation import PatchResult
    from ..patching.attribution import AttributionResult
    from ..patching.pairs import Pair

METRICS = ("sink_mass", "logit_difference", "loss", "kl", "norm", "dominance")
"""Metrics that have a name on the command line."""

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens patch --clean "The capital of France is" --corrupted "The capital of Spain is" \
--metric logit_difference --correct " Paris" --incorrect " Madrid"

sink-lens patch gpt2 --clean "A cat sat down" --corrupted "A dog sat down" --site z --by layer,head_index \
--metric sink_mass --key 0

sink-lens patch --clean "One two three" --corrupted "One four three" --site neurons --layers 3-5 --units 12,800 \
--metric norm --metric-layers 6 --direction noising
"""


@app.command(epilog=_EXAMPLES)
def patch(
    model: Annotated[
        str,
        typer.Argument(
            help="The default model's name, a folder written by save_pretrained, a .gguf file or a hub name.",
            show_default=True,
        ),
    ] = DEFAULT_MODEL,
    clean: Annotated[
        list[str] | None, typer.Option(help="A clean text; repeat for several.", metavar="TEXT", show_default=False)
    ] = None,
    corrupted: Annotated[
        list[str] | None,
        typer.Option(help="The same changed, of as many tokens; one for each.", metavar="TEXT", show_default=False),
    ] = None,
    site: Annotated[str, typer.Option(help="What is patched; see sink_lens.SITES.", metavar="SITE")] = "resid_pre",
    metric: Annotated[
        str,
        typer.Option(
            help="What it is judged by; the loss is that of the tokens that are run.", metavar="|".join(METRICS)
        ),
    ] = "sink_mass",
    by: Annotated[
        str, typer.Option(help="What is swept: some of layer, pos, head_index, src_pos.", metavar="NAMES")
    ] = "layer,pos",
    direction: Annotated[
        str,
        typer.Option(help="Clean values into the corrupted run, or the reverse.", metavar="denoising|noising"),
    ] = "denoising",
    layers: Annotated[str | None, typer.Option(help="As 0-11 or 3,5. Default: all.", metavar="N-N")] = None,
    positions: Annotated[str | None, typer.Option(help="Positions, from 0. Default: all.", metavar="N-N")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads; key-value heads in k and v. Default: all.", metavar="N-N")
    ] = None,
    units: Annotated[
        str | None, typer.Option(help="Neurons or dimensions, patched together. Default: all.", metavar="N-N")
    ] = None,
    key: Annotated[int, typer.Option(help="Position of sink_mass, norm and dominance.", metavar="N")] = 0,
    metric_layers: Annotated[
        str | None,
        typer.Option(help="Layers of sink_mass (default: all); the layer of norm and dominance.", metavar="N-N"),
    ] = None,
    correct: Annotated[
        str | None, typer.Option(help="Of logit_difference: the one token that is right.", metavar="TEXT")
    ] = None,
    incorrect: Annotated[
        str | None, typer.Option(help="Of logit_difference: the one that is wrong.", metavar="TEXT")
    ] = None,
    bos: Annotated[str, typer.Option(help="The first token, as in trace.", metavar="auto|with|without")] = "auto",
    approximate: Annotated[
        bool,
        typer.Option("--approximate", help="Attribution patching: by gradients, checked on a sample of real patches."),
    ] = False,
    check: Annotated[int, typer.Option(help="With --approximate: real patches in the check.", metavar="N")] = 30,
    seed: Annotated[int, typer.Option(help="With --approximate: seed of that sample.", metavar="N")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64. Default: float32.")] = None,
    top: Annotated[int, typer.Option(help="Rows of the table that is shown.", metavar="N")] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/MODEL-DATE-TIME.", metavar="DIR")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that DIR holds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the folder.")] = False,
) -> None:
    """Put activations of one run into another, part by part, and measure what changes; write a run folder."""
    config = {name: value for name, value in locals().items() if name not in ("out", "overwrite", "quiet", "top")}
    if not clean or not corrupted:
        raise InputError("patching needs two texts of as many tokens; give --clean TEXT and --corrupted TEXT")
    if metric not in METRICS:
        raise InputError(f"there is no metric {metric!r}; need one of {', '.join(METRICS)}")
    chosen: dict[str, Any] = {
        name: numbers(given, option=name)
        for name, given in (("layers", layers), ("positions", positions), ("heads", heads), ("units", units))
    }
    read = numbers(metric_layers, option="metric-layers")
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported

    from ..models.load import load
    from ..patching.activation import patch as run_patch
    from ..patching.attribution import attribution_patch
    from ..patching.pairs import paired

    lens = load(model, device=device, dtype=dtype, announce=None if quiet else typer.echo)
    pair = paired(lens, clean, corrupted, bos=bos)
    pair.run_and_source(direction)  # refuses one that does not exist
    measured = _metric(lens, pair, name=metric, key=key, layers=read, correct=correct, incorrect=incorrect)
    options: dict[str, Any] = {
        "site": site,
        "metric": measured,
        "by": tuple(name.strip() for name in by.split(",") if name.strip()),
        "direction": direction,
        **chosen,
    }
    folder = out or _default_folder(model)
    if not quiet:
        console().print(_differences(pair))
    with _writer(folder, lens, pair, config=config, overwrite=overwrite) as writer:
        result: PatchResult | AttributionResult
        sentence, tables = "", {}
        if approximate:
            import torch

            result = attribution_patch(lens, pair.clean, pair.corrupted, **options)
            checked = result.sample(check, generator=torch.Generator().manual_seed(seed), progress=not quiet)
            sentence, tables = checked.sentence, {"check": checked.frame}
        else:
            result = run_patch(lens, pair.clean, pair.corrupted, **options, progress=not quiet)
        writer.write_table("patches", result.frame)
        for name, frame in tables.items():
            writer.write_table(name, frame)
        writer.write_table("differences", pair.differences)
        if result.by:
            writer.write_bytes("heatmap.png", _png(result))
        writer.write_csv("summary", _summary(result, top=top))
    if quiet:
        reported(folder, quiet=True)
        typer.echo(folder)
        return
    console().print(
        f"the strongest of {len(result.frame)} patches of {result.site}, {result.direction}: {result.metric} "
        f"{result.unpatched:.4g} unpatched, {result.source:.4g} in the run that the values come from",
        soft_wrap=True,
    )
    console().print(_strongest(result, top=top))
    if sentence:
        typer.echo(sentence)
    reported(folder)
    typer.echo(f"run: {folder}")


def _default_folder(model: str) -> Path:
    from ..chain.trace import default_folder

    return default_folder(model)


def _metric(
    lens: "LensModel",
    pair: "Pair",
    *,
    name: str,
    key: int,
    layers: tuple[int, ...] | None,
    correct: str | None,
    incorrect: str | None,
) -> "Metric":
    from ..edits import metrics
    from ..engine.forward import run_with

    match name:
        case "sink_mass":
            return metrics.sink_mass(key, layers=layers)
        case "loss":
            return metrics.loss()
        case "kl":
            logits = run_with(lens, pair.clean, layers=(0,), loss=False, logits=True).logits
            assert logits is not None
            return metrics.kl_to(logits)
        case "logit_difference":
            return metrics.logit_difference(
                _token(lens, correct, option="correct"), _token(lens, incorrect, option="incorrect")
            )
    if layers is None or len(layers) != 1:
        raise InputError(f"{name} is read at one layer; give it with --metric-layers N")
    return metrics.norm(key, layer=layers[0]) if name == "norm" else metrics.dominance(key, layer=layers[0])


def _token(lens: "LensModel", text: str | None, *, option: str) -> int:
    from ..data.bos import single_id

    if text is None:
        raise InputError(f'logit_difference compares two tokens; give --{option} TEXT, such as --{option} " Paris"')
    assert lens.tokenizer is not None  # the texts have been read with it
    return single_id(text, lens.tokenizer, what=f"--{option}")


def _writer(folder: Path, lens: "LensModel", pair: "Pair", *, config: dict[str, Any], overwrite: bool) -> Any:
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
        "bos_arm": pair.clean.bos_arm,
        "dtype": str(lens.dtype).removeprefix("torch."),
        "device": str(lens.device),
        "kernel": "eager",
        "versions": versions(),
        "seeds": {"sample": config["seed"]},
    }
    expects = ("patches", "differences", "summary")
    return create_run(folder, kind="patch", config=config, provenance=provenance, expects=expects, overwrite=overwrite)


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


def _differences(pair: "Pair") -> "Table":
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
        text = result.labels.get(int(row["pos"]), "") if "pos" in row else ""
        where = [str(int(row[name])) for name in result.by]
        table.add_row(*where, token(text) if text else "", *(number(float(row[name])) for name in shown))
    return table

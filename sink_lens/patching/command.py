"""The command ``patch``: patches, or their approximation with its check, in a run folder, and its terminal output."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from ..errors import InputError
from ..models.load import load
from ..records import default_run_folder
from ..text import as_text, interval_text, plural, token_text
from .attribution import attribution_patch
from .config import PatchConfig, PatchView
from .passes import check_before_loading
from .patch import patch
from .results import AttributionResult, PatchResult, write_result
from .run_folder import open_run
from .run_pair import prepare_runs

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..report.page import PageTable

log = logging.getLogger(__name__)
_MOST_DIFFERENCES = 20


def run_patch(
    config: PatchConfig,
    *,
    out: str | Path | None,
    shard: str | None,
    overwrite: bool,
    progress: bool,
) -> PatchResult | AttributionResult:
    if shard is not None and config.approximate:
        raise InputError(
            "shard=... and approximate=True were given; an approximation is one pass, which is not divided"
        )
    check_before_loading(config)
    lens = load(config.model, device=config.device, dtype=config.dtype, announce=log.info)
    folder = default_run_folder(config.model) if out is None else Path(out)
    if not config.approximate:
        return patch(
            lens, config=config, out=folder, shard=shard, overwrite=overwrite, progress=progress
        )
    runs, _, pair = prepare_runs(lens, None, None, config=config)
    with open_run(
        folder, lens=lens, pair=pair, config=config, metric=runs.metric, overwrite=overwrite
    ) as writer:
        result = attribution_patch(lens, config=config)
        generator = torch.Generator().manual_seed(config.seed)
        check = result.sample(config.check, generator=generator, progress=progress)
        writer.write_table("check", check.frame)
        write_result(writer, result)
    return replace(result, folder=folder, checked=check.sentence)


def show_patch(
    found: PatchResult | AttributionResult, view: PatchView
) -> "Iterator[RenderableType | PageTable]":
    from rich.text import Text

    from ..report.html import page_title

    for folder in found.folders:
        yield Text(f"{page_title(folder)}.", style="bold")
    n = len(found.differences)
    most = f"; the first {_MOST_DIFFERENCES}" * (n > _MOST_DIFFERENCES)
    yield f"the prompts differ in {plural(n, 'token')}{most}"
    if found.unlike:
        yield found.unlike
    few = found.differences.head(_MOST_DIFFERENCES)
    lines = [
        (str(sequence), str(position), token_text(a), token_text(b))
        for sequence, position, a, b in few.itertuples(index=False)
    ]
    yield _text_table(("sequence", "position", "clean", "corrupted"), lines)
    yield (
        f"the strongest of {len(found.frame)} patches of {found.site}, {found.direction}: {found.metric} "
        f"{found.baseline:.4g} in the baseline run, {found.source:.4g} in the run that the values come from"
    )
    yield _strongest_table(found, top=view.top)
    if isinstance(found, AttributionResult):
        yield found.checked


def _strongest_table(found: PatchResult | AttributionResult, *, top: int) -> "PageTable":
    heads = {"value": found.metric, "effect": "effect", "95%": "95%", "control_effect": "controls"}
    heads |= {"normalised_effect": "of the way", "approximation": "approx."}
    frame = found.strongest(top)
    heads |= {"effect": "approx."} if "method" in frame else {}
    if "ci_low" in frame.columns:
        frame["95%"] = [
            interval_text(low, high)
            for low, high in zip(frame["ci_low"], frame["ci_high"], strict=True)
        ]
    names = [name for name in heads if name in frame.columns and bool(frame[name].notna().any())]
    lines = []
    for row in frame.to_dict("records"):
        text = found.labels.get(int(row["position"]), "") if "position" in row else ""
        where = [row[name] if name == "site" else str(int(row[name])) for name in found.by]
        cells = (
            row[name] if isinstance(row[name], str) else as_text(float(row[name])) for name in names
        )
        lines.append((*where, token_text(text) if text else "", *cells))
    return _text_table((*found.by, "token", *(heads[name] for name in names)), lines)


def _text_table(headings: tuple[str, ...], rows: list[Any]) -> "PageTable":
    from ..report.page import PageTable

    return PageTable(heads=headings, numeric=tuple(False for _ in headings), rows=rows)


def answer_of_patch(
    found: PatchResult | AttributionResult, view: PatchView
) -> dict[str, str | pd.DataFrame]:
    tables = {"differences": found.differences, "strongest": found.strongest(view.top)}
    return {"metric": found.metric, **tables}

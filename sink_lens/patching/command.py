"""The command ``patch``: patches, or their approximation with its check, in a run folder, and its terminal output."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch

from ..errors import InputError
from ..models.load import load
from ..records import default_run_folder
from ..text import plural, token_text
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
        folder, lens=lens, metric=runs.metric, pair=pair, config=config, overwrite=overwrite
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
    from ..report.page import page_table

    for folder in found.folders:
        yield Text(f"{page_title(folder)}.", style="bold")
    n = len(found.differences)
    most = f"; the first {_MOST_DIFFERENCES}" * (n > _MOST_DIFFERENCES)
    yield f"the prompts differ in {plural(n, 'token')}{most}"
    if found.unlike:
        yield found.unlike
    few = found.differences.head(_MOST_DIFFERENCES)
    texts = {name: few[name].map(token_text) for name in ("clean", "corrupted")}
    yield page_table(few.assign(**texts), few.columns)
    yield (
        f"the strongest of {len(found.frame)} patches of {found.site}, {found.direction}: {found.metric} "
        f"{found.baseline:.4g} in the baseline run, {found.source:.4g} in the run that the values come from"
    )
    yield _strongest_table(found, top=view.top)
    if isinstance(found, AttributionResult):
        yield found.checked


def _strongest_table(found: PatchResult | AttributionResult, *, top: int) -> "PageTable":
    from ..report.page import ci_texts, page_table

    frame = found.strongest(top)
    if "ci_low" in frame.columns:
        frame["95%"] = ci_texts(frame)
    frame["token"] = ""
    if "position" in frame.columns:
        labels = [found.labels.get(int(place), "") for place in frame["position"]]
        frame["token"] = [token_text(label) if label else "" for label in labels]
    heads = {
        "value": found.metric,
        "effect": "approx." if "method" in frame.columns else "effect",
        "95%": "95%",
        "control_effect": "controls",
        "normalised_effect": "of the way",
        "approximation": "approx.",
    }
    known = [name for name in heads if name in frame.columns and bool(frame[name].notna().any())]
    shown = {name: name for name in (*found.by, "token")} | {name: heads[name] for name in known}
    return page_table(frame, shown, most=len(frame))


def answer_of_patch(
    found: PatchResult | AttributionResult, view: PatchView
) -> dict[str, str | pd.DataFrame]:
    tables = {"differences": found.differences, "strongest": found.strongest(view.top)}
    return {"metric": found.metric, **tables}

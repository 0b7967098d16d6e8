"""The command of this room, and what it prints."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from ..configuration import refuse_unread_fields
from ..errors import InputError
from ..records import default_run_folder
from ..report.html import page_title
from ..text import as_text, edge_label
from .config import CircuitConfig, CircuitView
from .given import CircuitComparison, compare
from .run import CircuitRun
from .run import run as run_circuit


def find_or_compare(
    config: CircuitConfig, *, out: Path | None, overwrite: bool, progress: bool, shard: str | None
) -> CircuitRun | CircuitComparison:
    if config.against is not None:
        if out is not None or shard is not None:
            raise InputError(
                "out=... or shard=... was given beside against=..., which compares and writes nothing; leave it out"
            )
        others = [one.name for one in fields(config) if one.name not in ("model", "against")]
        refuse_unread_fields(config, *others, reader="a run, and against compares two circuits")
        return compare(config.model, config.against)
    return run_circuit(
        config.model,
        config=config,
        out=default_run_folder(config.model) if out is None else out,
        shard=shard,
        overwrite=overwrite,
        report=False,
        progress=progress,
    )


def show_circuit(
    found: CircuitRun | CircuitComparison, view: CircuitView
) -> Iterator[str | pd.DataFrame]:
    if isinstance(found, CircuitRun):
        yield f"{page_title(found.run.folder)}."
    yield from found.sentences
    lines = []
    core = found.tables.get("core") if isinstance(found, CircuitRun) else None
    decided = {} if core is None else core.set_index("edge").to_dict("index")
    for row in found.frame.head(view.top).to_dict("records"):
        line = {"edge": edge_label(str(row["edge"]))}
        if isinstance(found, CircuitComparison):
            for name, words in (("one", "the first"), ("other", "the second")):
                line[f"in {words}"] = "yes" * row[name]
                line[f"score in {words}"] = as_text(row[f"score_{name}"])
        else:
            line["score"] = as_text(row["score"])
            line["95% interval"] = f"{as_text(row['low'])} to {as_text(row['high'])}"
            line["in bootstraps"] = f"{float(row['inclusion']):.0%}"
            if core is not None:
                line["over all settings"] = _core_verdict_text(decided.get(row["edge"]))
        lines.append(line)
    yield pd.DataFrame(lines)


def answer_of_circuit(found: CircuitRun | CircuitComparison, view: CircuitView) -> dict[str, Any]:
    answer, edges = {"sentences": list(found.sentences)}, found.frame.head(view.top)
    if isinstance(found, CircuitRun):
        summary = found.tables["summary"].to_dict("records")[0]
        return answer | {"summary": summary, "strongest": edges}
    agree = {"jaccard": found.jaccard, "rank_correlation": found.rank_correlation}
    return answer | agree | {"edges": edges}


def _core_verdict_text(row: dict[Any, Any] | None) -> str:
    if row is None:
        return ""
    if row["core"]:
        return f"core, real patch {as_text(float(row['exact']))}"
    name = "undecided" if row["undecided"] else "contingent"
    return f"{name}: {float(row['least']):.0%} under {row['where']}"

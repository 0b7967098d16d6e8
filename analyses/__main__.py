"""``python -m analyses``: run all claims or some, one after another; what is finished is not run again.

--by-model runs what docs/claims_in_detail.md asks of a trained model on one that you name, and prints its column;
--keep puts results, figures and tables into the claims' folders; --expect writes what tiny mode must give; --list
writes README.md, docs/coverage.md, the two pages of claims, and the tables of the claims, from the committed results.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analyses.answers import Page, by_model, committed, cost, models, read_page, write_pages
from analyses.claims import loaded, run_claim
from analyses.verdicts import (
    Claim,
    coverage,
    keep,
    overview,
    read_claim,
    read_coverage,
    show,
    shown,
)
from sink_lens.errors import InputError, SinkLensError
from sink_lens.schema import DEFAULT_MODEL

HERE = Path(__file__).parent
TABLES = HERE / "by_model"
README = """# Analyses: one claim a folder, by paper

Do the papers hold? [One page answers](../docs/claims.md), with [every number in detail](../docs/claims_in_detail.md).
[Coverage](../docs/coverage.md) lists the papers' figures and tables.

Each folder has:

- `claim.md`: the question, the prediction, what would refute it, and the rule that judges each number, written before
  the run; at its end what came;
- `run.py`, and the result on the default model: `result.csv`, `figure.png`;
- `expected.csv`: the numbers of tiny mode.

Two judgements are computed for each number from its 95% interval (over sequences; over seeds if models were trained):

| where the interval lies | verdict on the paper's number | our own prediction |
| --- | --- | --- |
| whole in the range that was written down | reproduced | as predicted |
| partly | not shown | not shown |
| wholly outside | not reproduced | not as predicted |
| whole in the opposite range | contradicted | opposite |

A paper that gives no number gets no verdict. *Reproduced* says where the number lies, not that the two are equal.

```
make analyses-tiny                                 # every one on a planted model, in one process
make analyses                                      # every one on the default model; a stopped one goes on
python -m analyses mask_isolation --model DIR      # one of them on a model of your own
python -m analyses --by-model --model DIR          # your model's column of the table by model
```

Each table shows its claims' first numbers; the others are in `claim.md`. This file is written by
`python -m analyses --list`.

"""


COVERAGE = """# The papers, figure by figure

Where each figure and table of the [four papers](claims.md) is answered. Claims of the abstracts are in the
[long table](claims_in_detail.md).

- *theirs*: our number, compared with the paper's.
- *ours*: the paper has no such number; we compare with the prediction that we wrote before the run.
- *not shown*: the interval lies partly in the range.

The `claim.md` beside each linked table has the question, the numbers and their intervals.
`python -m analyses NAME` runs one.

"""


def claims(names: Sequence[str] = ()) -> list[Claim]:
    """The claims of these names, or all, by paper.

    Raises:
        InputError: no claim has that name.
    """
    folders = {path.parent.name: path.parent for path in sorted(HERE.glob("*/*/claim.md"))}
    if unknown := [name for name in names if name not in folders]:
        raise InputError(
            f"no analysis is called {', '.join(unknown)}; need some of {', '.join(folders)}"
        )
    return [read_claim(folder) for name, folder in folders.items() if name in names or not names]


def list_page() -> str:
    """The README of this folder: a table of claims for each paper."""
    found, papers = claims(), {paper.letter.lower(): paper for paper in page().papers}
    parts = [README.rstrip("\n")]
    for group in dict.fromkeys(claim.folder.parent.name for claim in found):
        paper = papers.get(group.partition("_")[0])
        heading = f"{paper.letter}: {paper.title} (arXiv {paper.number})" if paper else "Our own"
        table = overview([claim for claim in found if claim.folder.parent.name == group])
        parts.append(f"## {heading}\n\nFolder: `{group}/`\n\n{table}")
    return "\n\n".join(parts) + "\n"


def coverage_page() -> str:
    """The page of the documentation that says what of the papers is here."""
    found = claims()
    rows = read_coverage(HERE / "coverage.toml", claims=found)
    return COVERAGE + coverage(rows, claims=found) + "\n"


def page() -> Page:
    """The claims of the papers and the numbers that answer them."""
    return read_page(HERE / "claims.toml")


def of_model(model: str, names: Sequence[str], *, out: Path, keeps: bool) -> int:
    """Run every analysis that decides a claim about a trained model, or some, on one text; print the model's column."""
    known = committed(page(), claims())
    wanted = {part.of.partition("/")[0] for row in page().rows for part in row.decides}
    rows = []
    for name in names or sorted(name for name in wanted if known.claims[name].model is None):
        began = time.monotonic()
        try:
            frame = run_claim(
                known.claims[name].folder, out=out / name, model=model, one_text=True
            )[["number", "value", "low", "high", "n"]]
        except SinkLensError as error:
            note = (
                str(error).partition(";")[0].replace(model, Path(model).name)
            )  # no path of a machine in a table
            frame = pd.DataFrame([{"note": note}])
        seconds = longest(out / name / "seconds.txt", time.monotonic() - began)
        rows.append(frame.assign(folder=name, seconds=round(seconds)))
        print(
            f"{name}: {'' if 'note' not in frame else frame['note'].iloc[0]} {seconds:.0f} s",
            flush=True,
        )
    parameters = sum(one.numel() for one in loaded(model).plain.parameters())
    table = pd.concat(rows, ignore_index=True).assign(
        model=Path(loaded(model).name).name, parameters=parameters
    )
    columns = [
        "model",
        "parameters",
        "folder",
        "seconds",
        "number",
        "value",
        "low",
        "high",
        "n",
        "note",
    ]
    folder = TABLES if keeps else out
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(table['model'].iloc[0]).stem}.csv"
    table.reindex(columns=columns).to_csv(
        path, index=False, float_format="%.6g", lineterminator="\n"
    )
    print(f"{path}\n{by_model(page(), known, models(folder, known))}")
    return int(table["note"].notna().sum()) if "note" in table else 0


def longest(path: Path, seconds: float) -> float:
    """Keep the longest time that an analysis took, since one that is finished is only read the next time."""
    if path.exists():
        seconds = max(seconds, float(path.read_text(encoding="utf-8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{seconds:.0f}\n", encoding="utf-8")
    return seconds


def main() -> int:
    """Run what is asked for; the number of claims that could not be run."""
    parser = argparse.ArgumentParser(prog="python -m analyses", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of claims' folders; all if none is given")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="a folder, .gguf file or hub name (%(default)s)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the planted model, in one process, in seconds"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="where the run folders go; runs/analyses if not given",
    )
    parser.add_argument(
        "--retrain", action="store_true", help="train again what is read from committed tables"
    )
    parser.add_argument(
        "--keep", action="store_true", help="put results and figures into the claims' folders"
    )
    parser.add_argument("--expect", action="store_true", help="with --tiny: write expected.csv")
    parser.add_argument(
        "--list",
        action="store_true",
        help="write README.md from the committed results, run nothing",
    )
    parser.add_argument(
        "--by-model",
        action="store_true",
        help="what docs/claims_in_detail.md asks of a trained model, on one text",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with --by-model: how long and how much memory"
    )
    parser.add_argument(
        "--parameters",
        type=float,
        default=6.7e9,
        help="with --dry-run: of your model (%(default)g)",
    )
    asked = parser.parse_args()
    if asked.by_model and asked.dry_run:
        print(cost(TABLES, parameters=asked.parameters))
        return 0
    if asked.by_model:
        out = asked.out or Path("runs/analyses-by-model") / Path(asked.model).stem
        return of_model(asked.model, asked.names, out=out, keeps=asked.keep)
    out = asked.out or Path("runs") / ("analyses-tiny" if asked.tiny else "analyses")
    try:
        asked_for = [] if asked.list else claims(asked.names)
    except InputError as error:
        parser.error(str(error))
    failed = 0
    for claim in asked_for:
        began = time.monotonic()
        options = {"model": asked.model, "tiny": asked.tiny, "retrain": asked.retrain}
        try:
            result = run_claim(
                claim.folder, out=out / claim.name, progress=not asked.tiny, **options
            )
        except SinkLensError as error:
            print(f"{claim.name}: error: {error}", file=sys.stderr)
            failed += 1
            continue
        first = result.to_dict("records")[0]
        said = f"{first['verdict']}, {first['prediction']} ({shown(first)})"
        print(f"{claim.name}: {said}, {time.monotonic() - began:.0f} s", flush=True)
        if asked.keep and not asked.tiny:
            keep(claim, result, out=out / claim.name)
        if asked.expect and asked.tiny:
            columns = ["number", "value", "low", "high"]
            result[columns].to_csv(
                claim.folder / "expected.csv", index=False, float_format="%.6g", lineterminator="\n"
            )
    if asked.list or (asked.keep and not asked.tiny):
        for claim in claims():
            show(claim)
        (HERE / "README.md").write_text(list_page(), encoding="utf-8")
        (HERE.parent / "docs" / "coverage.md").write_text(coverage_page(), encoding="utf-8")
        write_pages(page(), committed(page(), claims()), docs=HERE.parent / "docs", folder=TABLES)
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""``python -m analyses.texts``: fetch texts for the analyses, and list them.

Without names, all of them. --into FILE.parquet also writes the documents of the named texts into one file, in the order
of their names, which `sink-lens train` takes as its data.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from analyses.texts import SOURCES, choose, data_folder, documents, fetch, fetched
from sink_lens.errors import SinkLensError


def main() -> int:
    """Fetch or list what is asked for; the number of texts that could not be fetched."""
    parser = argparse.ArgumentParser(
        prog="python -m analyses.texts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", help=f"some of {', '.join(SOURCES)}; all if none is given"
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="a Parquet file for the documents of these texts"
    )
    parser.add_argument(
        "--list", action="store_true", help="show tokens, licence and state; fetch nothing"
    )
    asked = parser.parse_args()
    try:
        return _listed(asked.names) if asked.list else _fetched(asked.names, into=asked.into)
    except SinkLensError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _listed(names: list[str]) -> int:
    there = fetched()
    for name, source in choose(names).items():
        state = (
            "damaged" if isinstance(there.get(name), str) else "fetched" if name in there else "-"
        )
        print(
            f"{name:20} {source.tokens / 1e6:.1f}M tokens  {state:8} {source.licence:26} {source.title}"
        )
    return 0


def _fetched(names: list[str], *, into: Path | None) -> int:
    failed = {name: state for name, state in fetch(names).items() if isinstance(state, str)}
    for name, state in failed.items():
        print(f"{name}: {state}", file=sys.stderr)
    if into is not None and not failed:
        into.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame({"text": documents(names)}).to_parquet(into)
    print(into or data_folder())
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Make the README's picture and output from a run of the current code: ``make readme`` (RUN=folder: that run).

Traces the default model (``--quick``) unless a run is given; draws ``docs/images/circuit.png`` and the page, writes
between the README's marks what its lines of Python print, and keeps them in ``docs/images/readme.json``, which a test
compares.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from PIL import Image

from sink_lens.records import read_run
from sink_lens.report import circuit_of, sketches
from sink_lens.report.html import render
from sink_lens.schema import DEFAULT_MODEL

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- printed by these lines, from make readme -->", "<!-- end of the output -->"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help="a finished quick trace of the default model")
    asked = parser.parse_args(arguments)
    folder = Path(asked.run) if asked.run else traced()
    run = read_run(folder)
    printed = output(run.tables["links"])
    circuit = circuit_of(run)
    circuit.save(IMAGES / "circuit.png")
    drawn = sketches.sketch_chain(circuit)
    kept = {
        "started": run.started,
        "model": run.provenance["model"],
        "weights_sha256": run.provenance["weights_sha256"],
        "picture_sha256": hashlib.sha256((IMAGES / "circuit.png").read_bytes()).hexdigest(),
        "arrows": [[one.source, one.target, one.label] for one in drawn.arrows],
        "printed": printed,
    }
    (IMAGES / "readme.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    photograph(render(folder, out=ROOT / "build" / "readme.html"))
    page = ROOT / "README.md"
    page.write_text(with_output(page.read_text(encoding="utf-8"), printed), encoding="utf-8")


def photograph(page: Path) -> None:
    """Pictures of a page's first screen on a desktop and a phone, where there is a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return
    for name, size in (("desktop", "1280,900"), ("phone", "400,860")):
        picture = IMAGES / f"report-{name}.png"
        to = f"--screenshot={picture}"
        shown = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}", to]
        subprocess.run([browser, *shown, page.resolve().as_uri()], check=True, capture_output=True, timeout=300)
        with Image.open(picture) as image:
            image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)


def traced() -> Path:
    """The folder of a new quick trace, as ``sink-lens trace --quick`` makes it."""
    from sink_lens.chain.trace import trace

    return trace(DEFAULT_MODEL, quick=True, out=ROOT / "runs" / "readme", overwrite=True).folder


def output(links: pd.DataFrame) -> list[str]:
    """Return what the README's lines of Python print of a trace."""
    return links[["link", "verdict"]].drop_duplicates().to_string(index=False).splitlines()


def with_output(page: str, printed: Sequence[str]) -> str:
    """The README with the output between its marks."""
    block = "\n".join([BEGIN, "```", *printed, "```", END])
    found = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, page, flags=re.DOTALL)
    assert BEGIN in found, "the README has lost its marks"
    return found


if __name__ == "__main__":
    main()

"""Make the README's pictures and output by running its Python on the default model: ``make readme``.

Writes ``docs/images/patch.png`` and ``chain.png``, and ``patch_heads.png`` for the tutorial, puts what the Python
prints between the README's marks, and keeps hashes and numbers in ``docs/images/readme.json``, which a test compares.
RUN=folder is a finished quick trace of the default model, which is then not made again.
"""

import argparse
import contextlib
import hashlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sink_lens.chain.page.circuit import chain_circuit
from sink_lens.patching import patch
from sink_lens.records import read_run

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
BEGIN, END = "<!-- printed by these lines, from make readme -->", "<!-- end of the output -->"
PICTURES = ("patch", "patch_heads", "chain")
_TRACE = "trace = sink_lens.trace(model, quick=True)\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, draw and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", help="a finished quick trace of the default model")
    folder = Path(parser.parse_args(arguments).run or ROOT / "runs" / "readme")
    page = README.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    assert _TRACE in block, "the README's Python has lost its trace"
    if (folder / "run.json").exists():
        block = block[: block.index(_TRACE)]
    else:
        block = block.replace("quick=True", f"quick=True, out={str(folder)!r}")
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(block, README.name, "exec"), names)
    printed = [line.rstrip() for line in said.getvalue().splitlines()]
    run = read_run(folder)
    chain = chain_circuit(run)
    names["patch"].heatmap().savefig(IMAGES / "patch.png", dpi=110)
    of_heads = patch(
        names["model"], *names["prompts"], metric=names["answers"], site="z", by=("layer", "head")
    )
    of_heads.heatmap().savefig(IMAGES / "patch_heads.png", dpi=110)
    chain.save(IMAGES / "chain.png")
    for name in PICTURES:
        with Image.open(IMAGES / f"{name}.png") as image:
            small = image.convert("RGB").quantize(
                128, method=Image.Quantize.MAXCOVERAGE
            )  # keeps rare colours
            small.save(IMAGES / f"{name}.png", optimize=True)
    links = chain.edges.loc[chain.edges["quantity"] == "intervention_share"].drop_duplicates("link")
    rows = (
        links[["link", "verdict", "value", "ci_low", "ci_high"]].round(4).to_json(orient="records")
    )
    kept = {
        "weights_sha256": run.provenance["weights_sha256"],
        "pictures_sha256": {name: sha256_of(name) for name in PICTURES},
        "links": json.loads(str(rows)),
        "printed": printed,
    }
    (IMAGES / "readme.json").write_text(
        json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    README.write_text(with_output(page, printed), encoding="utf-8")


def sha256_of(name: str) -> str:
    """The hash of one of the README's pictures."""
    return hashlib.sha256((IMAGES / f"{name}.png").read_bytes()).hexdigest()


def with_output(page: str, printed: Sequence[str]) -> str:
    """The README with the output between its marks."""
    block = "\n".join([BEGIN, "```", *printed, "```", END])
    found = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, page, flags=re.DOTALL)
    assert BEGIN in found, "the README has lost its marks"
    return found


if __name__ == "__main__":
    main()

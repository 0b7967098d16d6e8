"""Make the gallery's pictures, first screens of pages of real runs: ``make gallery`` (RUNS=folder, ONLY="card patch").

Each picture is that of a small run of the default model, by the command below. A run that the folder holds already is
drawn again by the current code; one that it lacks is made first, which takes from seconds to ten minutes each. Three of
the pages are kept whole in ``docs/reports``.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

import sink_lens
from sink_lens import views
from sink_lens.report import html

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images" / "commands"
REPORTS = ROOT / "docs" / "reports"
KEPT = ("trace", "circuit", "sweep")
"""Pages that are kept whole."""
PATTERNS = 300_000
"""Bytes of patterns in a page, the strongest heads'. The three whole ones are to have less than 2 MB together."""
SIZE = (800, 562)
RUNS: Mapping[str, tuple[str, ...]] = {
    "trace": ("trace --quick --out {0}",),
    "isolate": ("isolate --sequences 4 --out {0}",),
    "quantise": ("quantise --sequences 4 --controls 3 --out {0}",),
    "card": ("card --out {0}",),
    "patch": (
        'patch --clean "The capital city of Spain is called" --corrupted "The capital city of Italy is called" '
        '--metric logit_difference --correct " Madrid" --incorrect " Rome" --out {0}',
    ),
    "circuit": (
        "circuit --task capitals --pairs 24 --method gim --sizes 0.002,0.005,0.01,0.02,0.05,1 --random 1 --check 0 "
        "--out {0}",
    ),
    "sweep": ("sweep {file} --out {0}",),
    "report": tuple(
        f"trace --sequences 4 --length 32 --no-interventions --dtype {dtype} --out {{{at}}}"
        for at, dtype in enumerate(("float32", "bfloat16"))
    ),
    "compare": (
        *(
            f"train --size toy --steps 60 --length 64 --batch 8 --eval-every 10 --watch --seed {seed} "
            f"--value-norm {norm} --out {{{at}}}"
            for at, (norm, seed) in enumerate(
                (norm, seed) for norm in ("none", "shared") for seed in (0, 1, 2)
            )
        ),
        "compare {0} {1} {2} {3} {4} {5} --out {6}",
    ),
}
"""Picture -> the commands of its runs, whose folders {0}, {1} are. The last run is shown; of ``report``, both."""
VIEW = "attention"
"""The picture of a view in a notebook, which needs no run."""
SWEPT = """\
controls = 3
[[metrics]]
name = "sink_mass"
[[metrics]]
name = "loss"
[[edits]]
site = "neurons"
layers = 11
units = [1229, 1487, 100, 200, 300, 400, [1229, 1487]]
[[edits]]
site = "mlp_out"
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are not there, and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "only", nargs="*", help=f"some of {', '.join((*RUNS, VIEW))}; all if none is named"
    )
    parser.add_argument("--runs", default=str(ROOT / "runs" / "gallery"), help="folder of the runs")
    asked = parser.parse_args(arguments)
    html.MOST_BYTES = PATTERNS
    for name in asked.only or (*RUNS, VIEW):
        if name == VIEW:
            page = ROOT / "build" / "gallery-attention.html"
            view = views.attention_patterns(
                sink_lens.load(), "The cat sat on the mat, and then it slept."
            )
            page.write_text(str(view), encoding="utf-8")
            photograph(page, IMAGES / "attention.png", width=1020)
            continue
        folders = made(name, Path(asked.runs))
        shown = {"group_by": ("dtype",)} if name == "report" else {}
        page = html.render(
            *(folders if shown else folders[-1:]),
            out=ROOT / "build" / f"gallery-{name}.html",
            **shown,
        )
        photograph(page, IMAGES / f"{name}.png")
        if name in KEPT:
            shutil.copyfile(page, REPORTS / f"{name}.html")
        sys.stdout.write(f"{name}: {', '.join(map(str, folders))}\n")


def made(name: str, runs: Path) -> list[Path]:
    """The folders of a picture's runs; those that are missing are made."""
    folders = (
        [runs / name]
        if len(RUNS[name]) == 1
        else [runs / f"{name}-{at}" for at in range(len(RUNS[name]))]
    )
    for folder, command in zip(folders, RUNS[name], strict=True):
        if not (folder / "run.json").exists():
            runs.mkdir(parents=True, exist_ok=True)
            file = runs / "sweep.toml"
            file.write_text(SWEPT, encoding="utf-8")
            subprocess.run(
                ["sink-lens", *words_of(command, folders, file=file), "--quiet"], check=True
            )
    return folders


def words_of(command: str, folders: Sequence[Path], *, file: Path) -> list[str]:
    """A command of ``RUNS`` with its folders."""
    return [word.format(*folders, file=file) for word in shlex.split(command)]


def photograph(page: Path, picture: Path, *, width: int = 1280) -> None:
    """The first screen of a page, as small as the gallery shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "no browser was found; need chromium or google-chrome"
    whole = page.with_suffix(".png")
    shown = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    shown += [
        f"--window-size={width},{width * 900 // 1280}",
        "--virtual-time-budget=5000",
        f"--screenshot={whole}",
    ]
    subprocess.run(
        [browser, *shown, page.resolve().as_uri()], check=True, capture_output=True, timeout=300
    )
    with Image.open(whole) as image:
        small = image.convert("RGB").resize(SIZE, Image.Resampling.LANCZOS)
        few = small.quantize(
            256, method=Image.Quantize.MAXCOVERAGE, kmeans=1
        )  # keeps rare colours, and white
        few.save(picture, optimize=True)


if __name__ == "__main__":
    main()

"""Pages of runs whose texts are hostile, opened in a real browser: nothing of theirs may run."""

import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pandas as pd

RAN = "RAN-IN-THE-PAGE"
_ACTS = (f"document.title='{RAN}'", f"document.body.setAttribute('x','{RAN}')", f"document.write('{RAN}')")
_TEXTS = (
    "<script>{0}</script>",
    "</script><script>{0}</script>",
    '"><img src=x onerror="{0}">',
    "<svg onload={0}>",
    "'-{0}-'",
    "</style><svg/onload={0}>",
    "javascript:{0}",
    "{{{{{0}}}}}",
    "<iframe srcdoc='<script>parent.{0}</script>'>",
    "<!--<script>{0}//-->",
    "\u2028{0}//",
    "]]><script>{0}</script>",
    "<math><mtext></mtext><script>{0}</script>",
    "<a href='javascript:{0}' autofocus onfocus={0}>",
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def text(rng: random.Random) -> str:
    """A text that acts where a page takes it for markup."""
    return rng.choice(_TEXTS).format(rng.choice(_ACTS))


def poison(folder: Path, rng: random.Random) -> str:
    """Put hostile texts into a run's record and tables; says where."""
    record = folder / "run.json"
    hostile = text(rng)
    done = []
    for path in sorted(folder.glob("*.parquet")):
        frame = pd.read_parquet(path)
        columns = [name for name in frame.columns if pd.api.types.is_string_dtype(frame[name])]
        if columns and len(frame) and rng.random() < 0.7:
            name = rng.choice(columns)
            frame.loc[frame.index[: rng.choice([1, len(frame)])], name] = hostile
            frame.to_parquet(path, index=False)
            done.append(f"{path.name}/{name}")
    if rng.random() < 0.6 or not done:
        import json

        found = json.loads(record.read_text())
        for part in ("provenance", "config"):
            texts = [name for name, value in found[part].items() if isinstance(value, str)]
            for name in rng.sample(texts, k=min(len(texts), 2)):
                found[part][name] = hostile
                done.append(name)
        record.write_text(json.dumps(found))
    return f"{hostile!r} in {', '.join(done)}"


def browser() -> str | None:
    """The program of a browser; None where none is installed."""
    names = [os.environ.get("CHROMIUM", ""), *_BROWSERS]
    return next((path for path in map(shutil.which, filter(None, names)) if path), None)


def ran(page: Path) -> str:
    """Return what a browser shows of a page if something ran in it; empty where nothing did."""
    program = browser()
    if program is None:
        return "no browser was found: apt-get install chromium, or name it in CHROMIUM"
    with tempfile.TemporaryDirectory(prefix="browser-") as home:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}"]
        done = subprocess.run(
            [*command, "--virtual-time-budget=1500", "--dump-dom", page.absolute().as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if "<html" not in done.stdout:
        return f"the browser shows nothing: {done.stderr[-300:]}"
    for sign in (f"<title>{RAN}", f'x="{RAN}"'):
        if sign in done.stdout:
            return f"a text of a run ran in its page: {sign}"
    return ""

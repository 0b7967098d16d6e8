"""How fast the explorer of circuits is in a headless Chromium: 2,000 nodes and 20,000 edges, drawn and panned.

python benchmarks/explorer.py
"""

import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from playwright.sync_api import sync_playwright

from sink_lens.report import explorer

NODES, EDGES, LAYERS, FRAMES = 2_000, 20_000, 40, 90
DRAWN = """() => {
  document.querySelector("canvas").getContext("2d").getImageData(0, 0, 1, 1); // waits for every line
  return performance.now();
}"""
PAN = """async (frames) => {
  const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
  const at = (step) => ({ clientX: box.left + 300 + step, clientY: box.top + 300, view: window, bubbles: true });
  const next = () => new Promise(requestAnimationFrame);
  canvas.dispatchEvent(new MouseEvent("mousedown", at(0)));
  const took = [];
  let last = await next();
  for (let step = 1; step <= frames; step++) {
    window.dispatchEvent(new MouseEvent("mousemove", at(step)));
    canvas.getContext("2d").getImageData(0, 0, 1, 1); // what was asked to be drawn is drawn
    const now = await next();
    took.push(now - last);
    last = now;
  }
  window.dispatchEvent(new MouseEvent("mouseup", at(frames)));
  return took;
}"""


def graph() -> dict[str, object]:
    """A circuit of the size that pages are made for."""
    generator = np.random.default_rng(0)
    heads = (NODES - 2) // LAYERS - 1
    names = ["input"]
    for layer in range(LAYERS):
        names += [f"a{layer}.h{head}" for head in range(heads)] + [f"m{layer}"]
    names += ["logits"]
    first = generator.integers(0, len(names) - 1, 2 * EDGES)
    second = first + 1 + (generator.random(len(first)) * (len(names) - 1 - first)).astype(int)
    layer = np.array([-1, *np.repeat(np.arange(LAYERS), heads + 1), LAYERS])
    rows = pd.DataFrame({"writer": np.array(names)[first], "reader": np.array(names)[second]})
    rows = rows.loc[layer[first] < layer[second]].drop_duplicates().head(EDGES)
    rows = rows.assign(span="", score=generator.standard_normal(len(rows)) ** 3)
    return explorer.edge_graph(
        rows, model="made up", title="A large circuit", n_layers=LAYERS, group=1, n_edges=len(rows)
    )


def main() -> None:
    """Print what a page weighs and how long it takes."""
    held = graph()
    page = explorer.Explorer(graphs=[held])
    data = len(explorer.explorer_script([held])) - len(explorer.explorer_script([]))
    print(f"{len(held['nodes'])} nodes, {len(held['links'])} edges")
    print(
        f"page without its data: {(len(page.html.encode()) - data) / 1e6:.2f} MB; data {data / 1e6:.2f} MB, as JSON",
        end=" ",
    )
    print(f"{len(json.dumps(held)) / 1e6:.2f} MB")
    chromium = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = page.save(Path(folder) / "page.html")
        browser = playwright.chromium.launch(executable_path=chromium, chromium_sandbox=False)
        drawn, frames = [], []
        for _ in range(5):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            tab.goto(f"file://{path}", wait_until="commit")
            tab.locator("#explorer[data-state=drawn]").wait_for()
            drawn.append(tab.evaluate(DRAWN))
            frames += tab.evaluate(PAN, FRAMES)
            tab.close()
        browser.close()
    times = f"median {statistics.median(drawn):.0f} ms, {min(drawn):.0f} to {max(drawn):.0f}"
    print(f"from opening the file to the picture: {times}")
    mean, slowest = statistics.mean(frames), float(np.quantile(frames, 0.95))
    print(f"panning: {1000 / mean:.0f} frames a second, 95% of the frames within {slowest:.0f} ms")


if __name__ == "__main__":
    main()

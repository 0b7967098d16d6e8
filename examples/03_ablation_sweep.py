"""Script an ablation sweep: are the super neurons each other's spare, and what does the model lose with them?

The neurons are found on the model itself. The grid takes each alone and the first two, three, ... together, beside
random neurons of the same layer; the table is an ordinary data frame.

Prints on the default model:

    8 super neurons; sweeping [1229, 1487] of layer 11

    sink mass at position 0, layers 12-29, 0.656 without an edit
                                   where  effect  ci_low  ci_high  control_effect
         layer 11, position 0, unit 1229 -0.0125 -0.0150  -0.0100             0.0
         layer 11, position 0, unit 1487 -0.0281 -0.0302  -0.0261             0.0
    layer 11, position 0, unit 1229,1487 -0.4412 -0.4670  -0.4132             0.0

    loss, 4.987 without an edit
                                   where  effect  ci_low  ci_high  control_effect
         layer 11, position 0, unit 1229  0.1105  0.0126   0.2195         -0.0000
         layer 11, position 0, unit 1487  0.1074  0.0614   0.1512         -0.0000
    layer 11, position 0, unit 1229,1487  2.2299  2.0383   2.4430          0.0001
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sink_lens import TokenBatch, TraceConfig, load, sweep, trace
from sink_lens.data.corpora import bundled_text
from sink_lens.sweeps import EditGrid, Grid, MetricSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the neurons, sweep, and ask the table a question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name")
    parser.add_argument("--out", default="runs/ablation", help="folder of the runs")
    parser.add_argument("--most", type=int, default=4, help="neurons that are tried")
    asked = parser.parse_args(arguments)
    out = Path(asked.out)

    lens = load(asked.model)
    short = TraceConfig(model=asked.model, sequences=4, random_init=False, interventions=False)
    found = trace(lens, config=short, out=out / "trace", overwrite=True, progress=False)
    if found.super_neurons.empty:
        print("no growth step, so no super neurons: the sink of this model, if there is one, has another cause")
        return
    layer = int(found.super_neurons["layer"].max())
    neurons = found.super_neurons.query("layer == @layer")["neuron"].tolist()[: asked.most]
    print(f"{len(found.super_neurons)} super neurons; sweeping {neurons} of layer {layer}")

    together = [neurons[:size] for size in range(2, len(neurons) + 1)]  # a list inside is edited together
    grid = Grid.of(
        EditGrid(kind="zero", site="neurons", layers=layer, positions="0", units=[*neurons, *together]), controls=3
    )
    last = lens.n_layers - 1
    sink = MetricSpec(name="sink_mass", options={"layers": f"{min(layer + 1, last)}-{last}"})
    tokens = TokenBatch.from_text(bundled_text(), lens.tokenizer, sequences=8, length=32)
    result = sweep(
        lens,
        grid,
        tokens=tokens,
        metrics=[sink, MetricSpec(name="loss")],
        out=out / "sweep",
        overwrite=True,
        progress=False,
    )
    for metric, rows in result.frame.groupby("metric", sort=False):
        print(f"\n{metric}, {rows['baseline'].iloc[0]:.3f} without an edit")
        print(rows[["where", "effect", "ci_low", "ci_high", "control_effect"]].round(4).to_string(index=False))


if __name__ == "__main__":
    main()

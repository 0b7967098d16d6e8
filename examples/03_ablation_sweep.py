"""Sweep: each head of the upper layers set to zero, beside random heads. Without which does the loss rise?

The result is an ordinary data frame, a row for each head and metric. A sweep that was stopped goes on in its folder.

Prints on the default model:

    90 heads; the loss is 5.379 without an edit
     layer  head  effect  ci_low  ci_high  control_effect
        24     8   0.073   0.042    0.103           0.021
        24     6   0.062   0.027    0.094           0.021
        24     7   0.061   0.034    0.088           0.025
        21     3   0.021  -0.013    0.056           0.003
        25     5   0.020   0.010    0.029           0.002
"""

import argparse
from collections.abc import Sequence

from sink_lens import TokenBatch, load, sweep
from sink_lens.data.corpora import bundled_text
from sink_lens.edits import metrics
from sink_lens.sweeps import EditGrid, Grid


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep, and ask the table a question."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    parser.add_argument("--out", default="runs/heads", help="folder of the run")
    asked = parser.parse_args(arguments)

    model = load(asked.model)
    tokens = TokenBatch.from_text(bundled_text(), model.tokenizer, sequences=16, length=16)
    upper = list(range(2 * model.n_layers // 3, model.n_layers))  # layers="each" takes all
    grid = Grid.of(EditGrid(kind="zero", site="z", layers=upper, heads="each"), controls=3)
    result = sweep(
        model,
        grid,
        tokens=tokens,
        metrics=[metrics.loss()],
        out=asked.out,
        overwrite=True,
        progress=False,
    )
    print(
        f"{len(result.frame)} heads; the loss is {result.frame['baseline'].iloc[0]:.3f} without an edit"
    )
    columns = ["layer", "head", "effect", "ci_low", "ci_high", "control_effect"]
    print(result.frame.nlargest(5, "effect")[columns].round(3).to_string(index=False))


if __name__ == "__main__":
    main()

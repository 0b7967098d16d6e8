"""An edit and a metric of your own, swept over layers: does the sink need the direction of its value, or only its norm?

An edit is a function of the values at a site; a metric is a function of the logits, or here of a finished run. Both are
handed to ``sweep``, which adds the baseline run, the same edits at random positions, paired intervals and a run folder.

Prints on the default model:

    8 of 30 edits change sink mass at position 0. The largest change is −0.416 [−0.446, −0.382], by layer  0.
    Without an edit it is 0.548.
    Random edits of the same size change it by −0.00119 on average.
    The next largest that is shown is −0.383 [−0.401, −0.367], by layer  2.
    12 more intervals exclude 0.
    With 8 sequences the mean of one of 30 changes must be 2.3 standard deviations over sequences (|t| 6.5) to be
    shown: use more sequences (20: one standard deviation) or fewer edits.
    A change counts if its 95% interval over 8 sequences excludes 0, and if that of the change above random edits
    does too and is at least one of their standard deviations, and the change is 0.2 standard deviations of the
    effects of random edits or more, and if chance makes the largest of all edits as large in at most 1% of sweeps.
    30 cells: about 2 intervals exclude 0 by chance.
    2 of 30 edits change largest_head. The largest change is −0.595 [−0.707, −0.497], by layer  0; random edits of
    the same size: −4.8e−04.

    sink mass at position 0: what turning the MLP's output at position 0 changes
        name  baseline  effect  ci_low  ci_high
    layer  0     0.548  -0.416  -0.446   -0.382
    layer  2     0.548  -0.383  -0.401   -0.367
    layer  1     0.548  -0.321  -0.366   -0.273
    layer 11     0.548  -0.111  -0.119   -0.101
    layer  8     0.548  -0.024  -0.027   -0.022

    largest_head: what turning the MLP's output at position 0 changes
        name  baseline  effect  ci_low  ci_high
    layer  0       1.0  -0.595  -0.707   -0.497
    layer  1       1.0  -0.515  -0.603   -0.423
    layer  2       1.0  -0.429  -0.575   -0.309
    layer  9       1.0  -0.004  -0.010   -0.000
    layer 11       1.0  -0.000  -0.001   -0.000
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from sink_lens import TokenBatch, load, sweep
from sink_lens.data.corpora import bundled_text
from sink_lens.edits import metrics
from sink_lens.edits.constructors import At, edit
from sink_lens.engine.forward import Outcome
from sink_lens.sweeps import cell_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Turn what the MLP writes at position 0 into a random direction of the same norm, layer by layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    parser.add_argument("--out", default="runs/own-edit", help="folder of the run")
    asked = parser.parse_args(arguments)

    lens = load(asked.model)
    direction = torch.nn.functional.normalize(
        torch.randn(lens.d_model, generator=torch.Generator().manual_seed(0)), dim=0
    )

    def turned(values: Tensor, at: At) -> Tensor:
        """Values of the chosen part, axes batch, position, d_model; never changed in place."""
        return values.norm(dim=-1, keepdim=True) * direction.to(values)

    def largest_head(run: Outcome) -> Tensor:
        """The most attention that any head of the last half pays to position 0, in each sequence."""
        half = run.mass[len(run.layers) // 2 :, :, :, run.positions.index(0)]
        return half.amax(dim=(0, 2))

    cells = [
        cell_of(
            edit("mlp_out", turned, layers=[layer], positions=[0]),
            name=f"layer {layer:2}",
            layer=layer,
        )
        for layer in range(lens.n_layers)
    ]
    tokens = TokenBatch.from_text(bundled_text(), lens.tokenizer, sequences=8, length=32)
    result = sweep(
        lens,
        cells,
        tokens=tokens,
        metrics=[metrics.sink_mass(0), metrics.on_outcome(largest_head)],
        out=asked.out,
        overwrite=True,
        progress=False,
    )
    print(result.headline)
    for metric in ("sink mass at position 0", "largest_head"):
        print(f"\n{metric}: what turning the MLP's output at position 0 changes")
        print(
            result.top(5, metric=metric)[["name", "baseline", "effect", "ci_low", "ci_high"]]
            .round(3)
            .to_string(index=False)
        )


if __name__ == "__main__":
    main()

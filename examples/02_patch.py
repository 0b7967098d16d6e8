"""Patch activations from Python: where does the model keep which country was asked about?

Every layer and position of the stream is patched from the clean run into the corrupted one, and the difference of two
answers' logits says where it comes back. Then all heads are screened by one backward pass, and some are patched to see
how far off that is. Last, the strongest head is patched along its path to the logits alone.

Prints on the default model:

    logit difference: 4.99 on the clean prompt, -9.05 on the corrupted one

    0:The  1: capital  2: city  3: of  4: Spain/ Italy*  5: is  6: called
    patching resid_pre there brings back this share of it
    position     4     5     6
    layer
    0         1.00   NaN   NaN
    3         1.00 -0.00  0.00
    6         1.00  0.00  0.02
    9         1.00  0.00  0.02
    12        1.01  0.01  0.02
    15        1.00  0.00  0.02
    18        1.01  0.00  0.03
    21        0.99 -0.00  0.03
    24       -0.05  0.05  0.76
    27        0.00  0.05  0.77

    the strongest heads, to first order
     layer  head  effect
        23     4  11.081
        29     1   4.349
        29     0  -4.026
        24     4  -1.808
        23     1   1.313

    of 20 heads patched for real: mean error 0.0045, mean effect 0.0915
    the strongest head's direct path to the logits moves the metric by 5.06
    picture: runs/patch/patch.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from sink_lens import load
from sink_lens.edits import metrics
from sink_lens.patching import attribution_patch, patch, path_patch

CLEAN, CORRUPTED = "The capital city of Spain is called", "The capital city of Italy is called"
ANSWERS = (" Madrid", " Rome")


def main(arguments: Sequence[str] | None = None) -> None:
    """Patch, print the strongest places and save the heat map."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    parser.add_argument(
        "--answers", nargs=2, default=ANSWERS, help="of the clean prompt, and of the corrupted one"
    )
    parser.add_argument("--out", default="runs/patch", help="folder for the picture")
    asked = parser.parse_args(arguments)
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)

    lens = load(asked.model)
    metric = metrics.logit_difference(*asked.answers)

    found = patch(lens, CLEAN, CORRUPTED, site="resid_pre", metric=metric, progress=False)
    print(
        f"logit difference: {found.source:.2f} on the clean prompt, {found.baseline:.2f} on the corrupted one"
    )
    print("\n" + "  ".join(f"{position}:{label}" for position, label in found.labels.items()))
    print("patching resid_pre there brings back this share of it")
    table = found.frame.query("changed").pivot(
        index="layer", columns="position", values="normalised_effect"
    )
    print(table.iloc[:: max(1, lens.n_layers // 8)].round(2).to_string())
    found.heatmap().save(out / "patch.png")

    screen = attribution_patch(
        lens, CLEAN, CORRUPTED, site="z", metric=metric, by=("layer", "head")
    )
    print("\nthe strongest heads, to first order")
    print(screen.strongest(5)[["layer", "head", "effect"]].round(3).to_string(index=False))
    check = screen.sample(20, generator=torch.Generator().manual_seed(0))
    print(
        f"\nof {check.n} heads patched for real: mean error {check.mean_error:.4f}, mean effect {check.mean_effect:.4f}"
    )
    layer, head = screen.strongest(1)[["layer", "head"]].iloc[0]
    sender, receiver = ("z", int(layer), int(head)), ("resid_post", lens.n_layers - 1)
    path = path_patch(
        lens, CLEAN, CORRUPTED, sender=sender, receiver=receiver, metric=metric, progress=False
    )
    print(
        f"the strongest head's direct path to the logits moves the metric by {path.frame['effect'].iloc[0]:.2f}"
    )
    print(f"picture: {out / 'patch.png'}")


if __name__ == "__main__":
    main()

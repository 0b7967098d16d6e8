"""Train two small models that differ in head-wise RMSNorm only, compare them, and open a checkpoint with the library.

Both see the same tokens in the same order. A model of this size has no sink at the usual threshold, and one seed of 120
steps says nothing of who is better: the point is the procedure, which is the same at any size. In six seeds of a larger
model, the norm's loss minus softmax's is -0.14 nats after 0.17M tokens of prose and -0.01 (-0.03 to 0.00) after 0.7M: a
head start that is gone at the end (analyses/a_structural_origin/headnorm_first_gain). The gain of the norm begins at
the size that a head's output has without the norm, which is the default. With the authors' first gain, the norm is
behind.

Prints on the default model:

    toy, softmax, seed 0: 120 steps, 122,880 tokens, 16 s; loss 5.5963 nats, held out 5.5800
    toy, softmax, value norm shared (first gain, matched: 0.0535 to 0.0846 over layers), seed 0: 120 steps,
    122,880 tokens, 18 s; loss 5.1733 nats, held out 5.1650

    The runs differ in value norm: “shared” against “none”, 1 seed each (0), 123k tokens per run, on the same data
    in the same order.
    The evaluation loss ends at 5.1650 nats for “shared” and at 5.5800 for “none”. The difference, −0.4150, is of
    one seed, so it has no interval.
    It cannot be told either if “shared” reaches the baseline's final evaluation loss sooner (seed by seed: 1.54x
    as fast).
    The training loss ends at 5.1733 nats for “shared” and at 5.5963 for “none”. The difference, −0.4231, is of
    one seed, so it has no interval.
    It cannot be told either if “shared” reaches the baseline's final training loss sooner (seed by seed: 2.33x as
    fast).

    SmolLM2-135M-Instruct: mean attention to position 0 0.466
    softmax: mean attention to position 0 0.066
    headnorm: mean attention to position 0 0.067
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sink_lens import TokenBatch, load, run_with, train
from sink_lens.data.corpora import bundled_text
from sink_lens.training import TrainConfig, compare

VARIANTS: dict[str, Any] = {"softmax": "none", "headnorm": "shared"}
SIZE: Any = {
    "n_layers": 4,
    "d_model": 96,
    "d_mlp": 256,
    "n_heads": 4,
    "vocab_size": 1024,
    "length": 64,
    "batch": 16,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train each variant, compare, and set the attention to position 0 beside that of a trained model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="the trained model to set beside them"
    )
    parser.add_argument(
        "--out", default="runs/headnorm", help="folder of the runs; a run that is there goes on"
    )
    parser.add_argument("--steps", type=int, default=120)
    asked = parser.parse_args(arguments)

    models, runs = {asked.model: asked.model}, []
    for variant, value_norm in VARIANTS.items():
        config = TrainConfig(
            **SIZE, steps=asked.steps, warmup=asked.steps // 10, value_norm=value_norm, device="cpu"
        )
        done = train(config=config, out=Path(asked.out) / variant, progress=False)
        print(textwrap.fill(done.headline, 110))
        runs.append(done.folder)
        models[variant] = done.checkpoints[asked.steps]

    print()
    for sentence in compare(runs, generator=np.random.default_rng(0)).sentences:
        print(textwrap.fill(sentence, 110))
    print()
    for name, folder in models.items():
        lens = load(folder)
        tokens = TokenBatch.from_text(
            bundled_text(), lens.tokenizer, sequences=16, length=64, bos="with"
        )
        mass = run_with(lens, tokens, loss=False).mass_at(0)
        print(f"{name}: mean attention to position 0 {float(mass.mean()):.3f}")


if __name__ == "__main__":
    main()

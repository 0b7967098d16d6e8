"""Do two models share a seed? A model, a copy of it with noise in every weight, and the same shape from another seed.

The noise stands for what training does to an initialisation. All three see the same random tokens; tau_bar is how
alike they rank them, and p what chance would give, here by relabelling the coordinates of one model.

Prints on the default model:

    a: SmolLM2-135M-Instruct
    b: SmolLM2-135M-Instruct + 0.5 sigma
    c: random init of SmolLM2-135M-Instruct (seed 1)
    pair  shared  tau_bar  z_relabelled  log10_p_relabelled                 verdict
     a-b     296    0.010         5.310              -7.260            same lineage
     a-c     274    0.001         0.415              -0.470 no common lineage shown
     b-c     276   -0.000        -0.240              -0.226 no common lineage shown
"""

import argparse
import copy
from collections.abc import Sequence

import torch

from sink_lens import LensModel, load, wrap
from sink_lens.identity import FingerprintConfig, fingerprint
from sink_lens.models.load import random_init


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare each with each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    parser.add_argument("--sequences", type=int, default=400, help="random inputs")
    asked = parser.parse_args(arguments)

    lens = load(asked.model)
    models = [lens, noisy(lens, share=0.5, seed=0), random_init(lens, seed=1)]
    config = FingerprintConfig(sequences=asked.sequences, length=8)
    pairs = fingerprint(models, config=config, cache=False, progress=False).frame

    for letter, one in zip("abc", models, strict=True):
        print(f"{letter}: {one.name}")
    columns = ["pair", "shared", "tau_bar", "z_relabelled", "log10_p_relabelled", "verdict"]
    print(pairs.assign(pair=["a-b", "a-c", "b-c"])[columns].round(3).to_string(index=False))


def noisy(lens: LensModel, *, share: float, seed: int) -> LensModel:
    """A copy whose matrices have normal noise of a share of their own standard deviation."""
    plain, generator = copy.deepcopy(lens.plain), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in plain.parameters():
            if weight.ndim > 1:
                weight += share * weight.std() * torch.randn(weight.shape, generator=generator)
    return wrap(plain, tokenizer=lens.tokenizer, name=f"{lens.name} + {share:g} sigma")


if __name__ == "__main__":
    main()

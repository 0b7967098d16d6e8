"""How many first tokens must a KV cache keep? The loss beyond a cache of fixed size, by how many it never evicts.

``edits.window`` hides from each query what the cache has evicted by then, which gives what generating token by token
with such a cache gives. All caches have the same size. The control keeps as many random tokens instead.

Prints on the default model:

    loss beyond a cache of 64 tokens, 8 sequences of 192:
    4.178 nats if nothing is evicted; what evicting changes, by the tokens kept:
     kept              first tokens             random tokens
        0 +1.282 (+1.146 to +1.409)
        1 +0.129 (+0.080 to +0.187) +1.321 (+1.203 to +1.427)
        2 +0.131 (+0.083 to +0.184) +1.285 (+1.160 to +1.414)
        4 +0.127 (+0.082 to +0.178) +1.275 (+1.150 to +1.397)
        8 +0.120 (+0.069 to +0.178) +1.341 (+1.192 to +1.481)
"""

import argparse
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sink_lens import TokenBatch, load, run_with
from sink_lens.data.corpora import bundled_text
from sink_lens.edits import Edit, window
from sink_lens.stats import paired_difference


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare caches that keep 0 to 8 first tokens with one that holds everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    parser.add_argument("--window", type=int, default=64, help="tokens that the cache holds")
    asked = parser.parse_args(arguments)

    lens = load(asked.model)
    tokens = TokenBatch.from_text(
        bundled_text(), lens.tokenizer, sequences=8, length=3 * asked.window
    )
    generator = torch.Generator().manual_seed(0)

    def loss(*edits: Edit) -> Tensor:
        """Mean loss of each sequence where the cache has evicted something."""
        run = run_with(lens, tokens, edits, layers=[0], logits=True)
        assert run.logits is not None  # they were asked for
        predictions, targets = (
            run.logits[:, asked.window : -1],
            tokens.tokens[:, asked.window + 1 :],
        )
        return torch.nn.functional.cross_entropy(
            predictions.float().mT, targets, reduction="none"
        ).mean(1)

    def random_tokens(n: int) -> Tensor:
        """Mark n random tokens of each sequence that the cache would evict, and none of its first n."""
        order = (
            torch.rand(tokens.n_sequences, asked.window - n, generator=generator).argsort(1)[:, :n]
            + n
        )
        return torch.zeros(tokens.tokens.shape, dtype=torch.bool).scatter(1, order, True)

    def change(losses: Tensor) -> str:
        """The paired change from a cache that holds everything, with its 95% interval over sequences."""
        found = paired_difference(losses, full, generator=np.random.default_rng(0))
        return f"{found.estimate:+.3f} ({found.low:+.3f} to {found.high:+.3f})"

    full = loss()
    rows = [{"kept": 0, "first tokens": change(loss(window(asked.window)))}]
    for n in (1, 2, 4, 8):
        first, random = window(asked.window, keep=n), window(asked.window, keep=random_tokens(n))
        rows.append(
            {"kept": n, "first tokens": change(loss(first)), "random tokens": change(loss(random))}
        )
    print(
        f"loss beyond a cache of {asked.window} tokens, {tokens.n_sequences} sequences of {tokens.n_positions}:"
    )
    print(
        f"{float(full.mean()):.3f} nats if nothing is evicted; what evicting changes, by the tokens kept:"
    )
    print(pd.DataFrame(rows).fillna("").to_string(index=False))


if __name__ == "__main__":
    main()

"""What `sink_mask` costs: processor time over one plain forward pass of the same tokens, in turns.

    python benchmarks/sink_mask.py            # 64 (batch 16), 256 (batch 8), 1,024 and 4,096 tokens, 7 rounds each
    python benchmarks/sink_mask.py --quick    # up to 1,024 tokens, 3 rounds

In each round the mask by attention, the mask by norm and a plain SDPA forward pass are run in one process, in changing
order, and the median of the rounds' ratios is printed. Time is that of the processor, summed over threads, which other
programs hardly change. The pass is timed until its body ends (`body`: no logits, which
the mask does not need) and as a whole (`pass`). The last line is the worst of the lengths:
`attention=<ratio> norm=<ratio> attention_body=<ratio> norm_body=<ratio>`.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from sink_lens import TokenBatch, load, sink_mask
from sink_lens.data.corpora import bundled_text
from sink_lens.models.lens import LensModel

SIZES = {64: 16, 256: 8, 1024: 1, 4096: 1}
"""Length -> sequences."""
ROUNDS = 7
NAMES = ("attention", "norm", "attention_body", "norm_body")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="up to 1,024 tokens only, three rounds each"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", choices=list(SIZES), help="these lengths only"
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help=f"rounds of each length; {ROUNDS} if not given"
    )
    parser.add_argument(
        "--model", default=None, help="what sink_lens.load takes; the default model if not given"
    )
    options = parser.parse_args()
    lens = load() if options.model is None else load(options.model)
    print(f"{lens!r}; {torch.get_num_threads()} threads", flush=True)
    rounds = options.rounds or (3 if options.quick else ROUNDS)
    assert lens.tokenizer is not None  # the default model has one
    worst = dict.fromkeys(NAMES, 0.0)
    for length, sequences in SIZES.items():
        if (options.quick and length > 1024) or (options.lengths and length not in options.lengths):
            continue
        tokens = TokenBatch.from_text(
            bundled_text(), lens.tokenizer, sequences=sequences, length=length, bos="without"
        )
        one_round(lens, tokens, index=0)  # warm up
        taken = [one_round(lens, tokens, index=index) for index in range(rounds)]
        ratios = {name: statistics.median(one[name] for one in taken) for name in NAMES}
        shown = " ".join(f"{name}={ratio:.2f}" for name, ratio in ratios.items())
        print(f"{length} tokens, batch {sequences}: {shown}", flush=True)
        worst = {name: max(worst[name], ratios[name]) for name in NAMES}
    print(" ".join(f"{name}={worst[name]:.2f}" for name in NAMES))


def one_round(lens: LensModel, tokens: TokenBatch, *, index: int) -> dict[str, float]:
    """The ratios of one round; the order changes from round to round."""
    runs = {
        "attention": lambda: masked(lens, tokens, by="attention"),
        "norm": lambda: masked(lens, tokens, by="norm"),
        "plain": lambda: plain(lens, tokens),
    }
    names = list(runs)
    seconds = {name: runs[name]() for name in (*names[index % 3 :], *names[: index % 3])}
    body, whole = seconds["plain"]
    found = {f"{by}_body": seconds[by][1] / body for by in ("attention", "norm")}
    return found | {by: seconds[by][1] / whole for by in ("attention", "norm")}


def masked(lens: LensModel, tokens: TokenBatch, *, by: str) -> tuple[float, float]:
    """Seconds of one mask, twice."""
    before = time.process_time()
    sink_mask(lens, tokens, by=by, batch_size=tokens.n_sequences)
    taken = time.process_time() - before
    return taken, taken


def plain(lens: LensModel, tokens: TokenBatch) -> tuple[float, float]:
    """The plain forward pass with logits: seconds until its body ended, and in all."""
    ends: list[float] = []
    handle = lens.plain.base_model.register_forward_hook(
        lambda *_: ends.append(time.process_time())
    )
    before = time.process_time()
    with torch.no_grad():
        lens.plain(input_ids=tokens.tokens, use_cache=False)
    handle.remove()
    return ends[0] - before, time.process_time() - before


if __name__ == "__main__":
    main()

"""What fingerprints cost: Kendall's tau of many coordinates against SciPy's loop, and the memory of streamed features.

    python benchmarks/fingerprint.py            # 2,000 samples by 400 coordinates, 7 rounds; N = 4,000, 16,000
    python benchmarks/fingerprint.py --quick    # the same, 3 rounds, N = 1,000 and 4,000: under a minute on two cores

In each round SciPy's ``kendalltau`` is called on one coordinate after the other, and ours once on all; the median of
the rounds' ratios is printed, with the largest difference of any tau, on data without and with ties. Memory is the peak
above what is resident before the states of a small untrained model are read, at 4 N inputs over that at N: states are
float32, one row an input, and nothing else may grow. The last line is
`kendall_speedup=<SciPy over ours> kendall_error=<max abs> memory_growth=<peak at 4N over peak at N>`.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from measure import peak
from scipy.stats import kendalltau

from sink_lens.identity.features import Inputs, read_features
from sink_lens.identity.nulls import tau_by_column as tau
from sink_lens.identity.untrained_models import UntrainedConfig, untrained
from sink_lens.measures.kendall import tau_b_matrix

SAMPLES, COORDINATES, MATRIX = 2000, 400, 64
LENGTH = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three rounds, and fewer inputs")
    options = parser.parse_args()
    speedup, error = kendall(rounds=3 if options.quick else 7)
    growth = memory(1000 if options.quick else 4000)
    print(f"kendall_speedup={speedup:.1f} kendall_error={error:.1e} memory_growth={growth:.2f}")


def kendall(*, rounds: int) -> tuple[float, float]:
    """SciPy's time over ours, and the largest difference."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((SAMPLES, COORDINATES))
    y = 0.3 * x + generator.standard_normal((SAMPLES, COORDINATES))
    ratios, error = [], 0.0
    tau(x, y)
    for _ in range(rounds):
        before = time.perf_counter()
        expected = np.array([kendalltau(a, b).statistic for a, b in zip(x.T, y.T, strict=True)])
        theirs = time.perf_counter() - before
        ours = []
        for _ in range(5):
            before = time.perf_counter()
            found = tau(x, y)
            ours.append(time.perf_counter() - before)
        ratios.append(theirs / statistics.median(ours))
        error = max(error, float(np.abs(found - expected).max()))
        print(
            f"SciPy {theirs * 1e3:.0f} ms, ours {statistics.median(ours) * 1e3:.1f} ms", flush=True
        )
    before = time.perf_counter()
    tau_b_matrix(*(torch.from_numpy(one[:, :MATRIX].T) for one in (x, y)))
    each = (time.perf_counter() - before) / MATRIX**2
    print(
        f"each of {MATRIX} coordinates with each: {each * 1e6:.0f} microseconds a tau, SciPy",
        end=" ",
    )
    print(f"{theirs / COORDINATES * 1e6:.0f}", flush=True)
    tied = np.round(x[:, :20], 1), np.round(y[:, :20], 1)
    expected = np.array(
        [kendalltau(a, b).statistic for a, b in zip(tied[0].T, tied[1].T, strict=True)]
    )
    return statistics.median(ratios), max(error, float(np.abs(tau(*tied) - expected).max()))


def memory(n: int) -> float:
    """Peak at 4 n inputs over that at n."""
    config = UntrainedConfig(style="llama", n_layers=2, d_model=64, n_heads=4, vocab_size=1000)
    lens = untrained(config, seed=0)

    def read(sequences: int) -> float:
        inputs = Inputs(
            kind="tokens", sequences=sequences, length=LENGTH, seed=0, ids=tuple(range(1000))
        )
        return peak(lambda: read_features(lens, inputs))

    read(n)  # what is allocated once
    small, large = (
        statistics.median(read(sequences) for _ in range(3)) for sequences in (n, 4 * n)
    )
    states = 4 * config.d_model * np.array([n, 4 * n])
    print(f"{n} inputs: {small / 1e6:.1f} MB, of which states {states[0] / 1e6:.1f}", end="; ")
    print(f"{4 * n}: {large / 1e6:.1f} MB, of which states {states[1] / 1e6:.1f}", flush=True)
    return large / small


if __name__ == "__main__":
    main()

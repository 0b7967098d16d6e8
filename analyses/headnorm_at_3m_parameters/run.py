"""Three seeds of a softmax model and of one with head-wise RMSNorm, and their comparison; see claim.md."""

import subprocess
import sys
from pathlib import Path

ARMS = {"softmax": "none", "headnorm": "shared"}
SEEDS = (0, 1, 2)
HERE = Path(__file__).parent


def main(out: Path) -> None:
    """Train what is not trained yet, and compare."""
    runs = []
    for seed in SEEDS:
        for arm, value_norm in ARMS.items():
            runs.append(str(out / f"{arm}-{seed}"))
            asked = ["--seed", str(seed), "--set", f"value_norm={value_norm}", "--out", runs[-1]]
            _sink_lens("train", str(HERE / "train.toml"), *asked)
    _sink_lens("compare", *runs, "--out", str(out / "comparison"))


def _sink_lens(*arguments: str) -> None:
    subprocess.run(["sink-lens", *arguments], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/headnorm_at_3m_parameters"))

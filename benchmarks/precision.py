"""What 16-bit types do to the numbers of the sink token of the default model: the table in ``docs/limits.md``.

    python benchmarks/precision.py

The weights are the same in each type but for their rounding to it; ``logits`` compares a type with the same (rounded)
weights in float32, on 4 sequences of 64 tokens. Norm and loss are means over 16 sequences of 64 tokens.
"""

import argparse
import os
import warnings

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from sink_lens import load
from sink_lens.activations.precision import measure_rounding
from sink_lens.chain.config import TraceConfig
from sink_lens.engine.forward import run_with
from sink_lens.models.inputs import make_tokens


def main() -> None:
    """Measure and print one row per type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    model = parser.parse_args().model
    warnings.simplefilter("ignore")  # the table says it
    print(
        "| type | logits at position 0 | elsewhere | largest value | spacing | norm before the last layer | loss |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for dtype in ("float32", "float16", "bfloat16"):
        lens = load(model, dtype=dtype)
        batch = make_tokens(
            lens, config=TraceConfig(model=model, sequences=16, length=64), bos="with"
        )
        run = run_with(lens, batch, layers=(lens.n_layers - 1,), sites=("resid_pre",))
        norm = float(run.tensors["resid_pre", lens.n_layers - 1][:, 0].float().norm(dim=-1).mean())
        found = measure_rounding(lens, batch, position=0)
        off = ("0", "0", "", "")
        if found is not None:
            off = (
                f"{found.at_position:.1%}",
                f"{found.elsewhere:.1%}",
                f"{found.value:,.0f}",
                f"{found.spacing:g}",
            )
        print(
            f"| {dtype} | {' | '.join(off)} | {norm:,.0f} | {float(run.loss.mean()):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

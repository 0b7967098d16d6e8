"""Find the circuit of a task: the edges between heads and MLPs that carry it, how faithful they are, and how stable.

With ``--task ioi`` (indirect objects) on the default model; other tasks are greater-than, agreement, capitals and
induction, or the sink of prose (``text``, which needs no corrupted prompts).

Faithfulness is judged on pairs that chose no edge, beside random circuits of the same size and depth.

Prints on the default model, with --pairs 16:

    ioi: the model prefers the right answer in 28 of 32 prompts (88%); 16 of these are used
    7046 of 70,651 edges, completeness 1.001
                 edge  score   low  high  inclusion
            input->m0   3.86  3.29  4.45        1.0
       a23.h3->logits   2.23  1.92  2.53        1.0
       m0->a23.kv1<v>   1.55  1.41  1.70        1.0
       a29.h1->logits   1.12  0.97  1.28        1.0
       a24.h4->logits  -0.88 -1.27 -0.55        1.0
    a23.h3->a24.h4<q>  -0.81 -1.01 -0.65        1.0
       m0->a23.kv0<v>  -0.72 -0.88 -0.59        1.0
      m17->a20.kv0<v>   0.69  0.52  0.81        1.0

    faithfulness of the largest edges alone
        by  share  faithfulness   low  high
     edges  0.001          0.19  0.09  0.28
     nodes  0.001          0.00  0.00  0.00
    random  0.001          0.00  0.00  0.00
     edges  0.010          0.65  0.43  0.85
     nodes  0.010          0.35  0.31  0.40
    random  0.010         -0.00 -0.00 -0.00
     edges  0.100          0.92  0.86  0.99
     nodes  0.100          0.49  0.37  0.61
    random  0.100         -0.02 -0.06  0.02

    written to runs/find-a-circuit: circuit.json, circuit.graph.json, circuit.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sink_lens import TokenBatch, circuits, load
from sink_lens.edits import metrics

TEXT = (
    "In the morning the river was quiet, and the old man walked down to the boats with his dog and a lamp. "
    * 41  # of which sequences begin at different words
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Score all edges, judge the largest, and save them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    parser.add_argument(
        "--task",
        default="ioi",
        choices=["ioi", "greater-than", "agreement", "capitals", "induction", "text"],
    )
    parser.add_argument("--pairs", type=int, default=16, help="pairs of prompts")
    parser.add_argument("--out", default="runs/find-a-circuit", help="folder for the circuit")
    asked = parser.parse_args(arguments)

    lens = load(asked.model)
    if asked.task == "text":
        batch = TokenBatch.from_text(TEXT, lens.tokenizer, sequences=asked.pairs, length=16)
        circuit = circuits.find(lens, batch, metric=metrics.sink_mass(0), ablation="mean_ordinary")
    else:
        task = circuits.task(
            lens, asked.task, pairs=asked.pairs, generator=np.random.default_rng(0)
        )
        print(task.sentence)
        circuit = circuits.find(lens, task)
    print(
        f"{circuit.n_edges} of {circuit.graph.n_edges:,} edges, completeness {circuit.scores.completeness_ratio:.3f}"
    )
    print(
        circuit.edges[["edge", "score", "low", "high", "inclusion"]]
        .head(8)
        .round(2)
        .to_string(index=False)
    )

    curve = circuit.evaluate(sizes=(0.001, 0.01, 0.1), random=1).frame
    print("\nfaithfulness of the largest edges alone")
    shown = (
        curve[["by", "share", "faithfulness", "low", "high"]].round(2).assign(share=curve["share"])
    )
    print(shown.to_string(index=False))

    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    for ending in (".json", ".graph.json", ".svg"):
        circuit.save(out / f"circuit{ending}")
    print(f"\nwritten to {out}: circuit.json, circuit.graph.json, circuit.svg")


if __name__ == "__main__":
    main()

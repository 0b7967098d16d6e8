"""Measure the circuit of IOI on the default model, and edge scores beside TransformerLens's own.

    python benchmarks/circuits.py --quick      # 8 pairs and few sizes: minutes on a busy machine
    python benchmarks/circuits.py              # 128 pairs, 20 points, ten sizes with random circuits
    python benchmarks/circuits.py --tasks      # 16 pairs of the four other tasks, as a table

The default model's part is ``circuits.find`` (EAP-IG on inputs, midpoints) and ``Circuit.evaluate``, timed apart;
``completeness`` is what the edges out of the input sum to, over the difference of the metric, and ``left`` the same for
EAP-IG's left sum. The peak is the process's largest resident size. ``speedup_over_tl`` is the time of TransformerLens's
edge attribution over ours for the same scores on a GPT-2 of 4 layers and 8 heads, in turns, one pair at a time as it
takes them. ``memory_over_tl`` is how far its resident size rises over how far ours does, for one pair on a model of
GPT-2 small's shape with random weights in float64, each in a process of its own (Linux).
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from transformer_lens.tools.analysis import attribution_patching as theirs

from sink_lens import circuits, load
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.circuits.scores import score_by_gradients
from sink_lens.edits.metrics import logit_difference
from sink_lens.models.load import wrap
from tests.tiny_families import tiny

TASKS = ("greater-than", "agreement", "capitals", "induction")
TASK_SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


def speedup(*, pairs: int = 4, turns: int = 3) -> tuple[float, float]:
    """Time of TransformerLens over ours on the same pairs, and the largest difference over the largest score."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}
    lens = wrap(tiny("gpt2", **sizes))
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(3, 300, (pairs, 16), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 6] = 3 + (clean[:, 6] + 50) % 297
    answers = [5] * pairs, [7] * pairs
    ours_s = theirs_s = 0.0
    found, total = np.zeros(0), np.zeros(0)
    for _ in range(turns):
        began = time.perf_counter()
        runs = Runs.make(
            lens, clean, corrupted, graph=Graph.of(lens), metric=logit_difference(*answers)
        )
        found = score_by_gradients(runs, method="eap-corrupted").mean
        ours_s += time.perf_counter() - began
        total = np.zeros(len(found))
        config = theirs.EdgeAttributionConfig(granularity="edge")
        began = time.perf_counter()
        for row in range(pairs):
            one = theirs.attribution_patch(
                lens.bridge,
                clean[row : row + 1],
                corrupted[row : row + 1],
                lambda logits: logits[0, -1, 5] - logits[0, -1, 7],
                config,
            )
            theirs_s += time.perf_counter() - began
            for (writer, reader), value in one.edge_scores.items():
                total[runs.graph.index[f"{name_of(writer)}->{name_of(reader)}"]] += value / pairs
            began = time.perf_counter()
    return theirs_s / ours_s, float(np.abs(found - total).max() / np.abs(total).max())


def rise(who: str) -> float:
    """MB by which the resident size rises while one pair is scored on a GPT-2 of small's shape."""
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
    lens = wrap(tiny("gpt2", **sizes).double())
    clean = torch.randint(3, 300, (1, 16), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, 6] = 3 + (clean[:, 6] + 50) % 297
    lens.bridge(clean)
    config = theirs.EdgeAttributionConfig(granularity="edge")

    def size(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10

    Path("/proc/self/clear_refs").write_text("5")  # the largest size from here on
    before = size("VmRSS")
    if who == "ours":
        runs = Runs.make(
            lens, clean, corrupted, graph=Graph.of(lens), metric=logit_difference([5], [7])
        )
        score_by_gradients(runs, method="eap-corrupted")
    else:
        theirs.attribution_patch(
            lens.bridge,
            clean,
            corrupted,
            lambda logits: logits[0, -1, 5] - logits[0, -1, 7],
            config,
        )
    return size("VmHWM") - before


def memory(*, turns: int = 3) -> tuple[float, float]:
    """Median rise of TransformerLens and of ours, in turns, each in a fresh process."""
    found: dict[str, list[float]] = {"theirs": [], "ours": []}
    for _ in range(turns):
        for who, rises in found.items():
            said = subprocess.run(
                [sys.executable, __file__, "--rise", who],
                capture_output=True,
                text=True,
                check=True,
            )
            rises.append(float(said.stdout.split()[-1]))
    return float(np.median(found["theirs"])), float(np.median(found["ours"]))


def tasks(names: Sequence[str], *, pairs: int = 16, sizes: Sequence[float] = TASK_SIZES) -> None:
    """Print a row for each task: what the model does, completeness, error by pair, faithfulness by size, random."""
    lens = load()
    print(
        "| task | right | pairs | completeness | error by pair | edges for 80% | at that size | random |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        task = circuits.task(lens, name, pairs=pairs, generator=np.random.default_rng(0))  # type: ignore[arg-type]
        given = {"metric": task.metric, "templates": task.templates, "most_steps": 20}
        circuit = circuits.find(lens, task.clean, task.corrupted, **given)
        errors = circuit.scores.completeness_by_pair["error"].abs().to_numpy()
        frame = circuit.evaluate(sizes, random=1, nodes=False).frame.set_index("share")
        edges, random = (frame[frame["by"] == by] for by in ("edges", "random"))
        reached = edges[edges["faithfulness"] >= 0.8]
        at = float(reached.index.min()) if len(reached) else float(edges.index.max())
        own = edges.loc[at]
        cells = [name, f"{task.n_answered} of {task.n_tried}", f"{circuit.runs.n_pairs}"]
        cells += [
            f"{circuit.scores.completeness_ratio:.3f}",
            f"{np.median(errors):.4f}, at most {errors.max():.4f}",
        ]
        cells += [f"{at:.1%}" if len(reached) else "none", f"{own['faithfulness']:.0%}"]
        cells[-1] += f" [{own['low']:.0%}, {own['high']:.0%}]"
        print(f"| {' | '.join(cells)} | {random['faithfulness'].loc[at]:.0%} |", flush=True)


def name_of(node: theirs.Node) -> str:
    """A node of TransformerLens by our name."""
    letter = {"q_input": "<q>", "k_input": "<k>", "v_input": "<v>"}.get(node.kind, "")
    if node.head is not None:
        return f"a{node.layer}.h{node.head}{letter}"
    return {"embed": "input", "logits": "logits"}.get(node.kind, f"m{node.layer}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both parts and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 pairs, 5 points, three sizes")
    parser.add_argument(
        "--rise",
        choices=("ours", "theirs"),
        help="print the memory that one of both takes, and end",
    )
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=TASKS,
        help="only these tasks (all four without a name), a row each",
    )
    asked = parser.parse_args(arguments)
    if asked.rise:
        print(rise(asked.rise))
        return
    if asked.tasks is not None:
        tasks(asked.tasks or TASKS)
        return
    quick = asked.quick
    faster, off = speedup(turns=1 if quick else 3)
    print(
        f"edge scores beside TransformerLens: {faster:.1f} times as fast, {off:.1e} of the largest score apart"
    )
    of_theirs, of_ours = memory(turns=1 if quick else 3)
    print(
        f"memory for one pair on GPT-2 small's shape: TransformerLens {of_theirs:.0f} MB, ours {of_ours:.0f} MB"
    )
    lens = load()
    pairs, steps = (8, 5) if quick else (128, 20)
    task = circuits.task(lens, "ioi", pairs=pairs, generator=np.random.default_rng(0))
    print(task.sentence)
    given = {
        "metric": task.metric,
        "templates": task.templates,
        "steps": steps,
        "most_steps": steps,
    }
    began = time.perf_counter()
    circuit = circuits.find(lens, task.clean, task.corrupted, **given)
    eap_ig_s = time.perf_counter() - began
    began = time.perf_counter()
    inclusion = circuit.inclusion
    print(f"1,000 bootstraps of {len(inclusion):,} edges: {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    curve = circuit.evaluate(
        (0.01, 0.1, 1.0) if quick else circuits.CircuitConfig().sizes, nodes=False
    )
    curve_s = time.perf_counter() - began
    print(curve.frame.to_string(index=False, float_format="%.3f"))
    left_sum = score_by_gradients(
        circuit.runs, method="eap-ig-left", steps=steps
    ).completeness_ratio
    errors = circuit.scores.completeness_by_pair["error"].abs().to_numpy()
    print(
        f"error by pair: median {np.median(errors):.4f}, largest {errors.max():.4f}; left sum {left_sum:.4f}"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"eap_ig_s={eap_ig_s:.0f} curve_s={curve_s:.0f} peak_gb={peak:.2f} "
        f"completeness={circuit.scores.completeness_ratio:.4f} "
        f"speedup_over_tl={faster:.1f} memory_over_tl={of_theirs / of_ours:.1f}"
    )


if __name__ == "__main__":
    main()

"""Draw the chain of a model's sink: token, average of values, neurons, dimension, key and heads.

An arrow's line and sign say the verdict on its link, the number what its intervention removes (``--interventions``).
The figure is a Matplotlib one (PNG, SVG, PDF), the circuit itself two data frames and JSON, and the heads can be looked
at in a browser, without a network. To draw a finished trace:

    python examples/05_draw_the_circuit.py --run runs/SmolLM2-135M-Instruct-20260101-120000

Prints on the default model, with --interventions:

    each link: its statistic, the share of the sink that its intervention moves, its verdict
                    link            statistic  statistic_value  share  ci_low  ci_high   verdict
    aggregation_variance             s2_ratio             1.83   0.51    0.47     0.55     holds
      variance_preserved   s2_ratio_after_w_o             1.47   0.58    0.24     0.93 undecided
        variance_neurons          spike_ratio            47.69   0.64    0.16     1.12 undecided
       neurons_dimension   contribution_share             0.95   0.35    0.08     0.62 undecided
           dimension_key           key_cosine             0.77   0.21    0.13     0.29 undecided
                key_sink logit_advantage_nats             5.77   0.91    0.89     0.92     holds

    the neurons that write the dimension (layer.neuron), and their share of it
    L11.N1229: 73%  L2.N90: 68%  L1.N83: 49%  L2.N430: 33%  L11.N1487: 26%

    written to runs/circuit: circuit.png, circuit.svg, circuit.json, column.pdf, heads.html
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sink_lens import load, read_run, trace, views


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace with few sequences, unless a run is given, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="folder, .gguf file or name"
    )
    parser.add_argument(
        "--run", help="a trace that is there already, instead of a short one of the model"
    )
    parser.add_argument(
        "--interventions", action="store_true", help="intervene too: three minutes instead of one"
    )
    parser.add_argument("--out", default="runs/circuit", help="folder for the run and the pictures")
    asked = parser.parse_args(arguments)
    out = Path(asked.out)

    if asked.run is not None:
        run = read_run(asked.run)
    else:
        run = trace(
            load(asked.model),
            sequences=8,
            random_init=False,
            interventions=asked.interventions,
            intervention_sequences=4,
            intervention_length=32,
            out=out / "trace",
            overwrite=True,
            progress=False,
        ).run
    circuit = views.circuit_of(run)
    assert isinstance(circuit, views.ChainCircuit)

    links = (
        circuit.edges.query("quantity == 'intervention_share'")
        .drop_duplicates("link")
        .rename(columns={"value": "share"})
    )
    print(
        "each link: its statistic, the share of the sink that its intervention moves, its verdict"
    )
    columns = ["link", "statistic", "statistic_value", "share", "ci_low", "ci_high", "verdict"]
    print(links[columns].round(2).to_string(index=False))
    parts = run.tables["neurons"].query("is_super").nlargest(5, "contribution_share")
    print("\nthe neurons that write the dimension (layer.neuron), and their share of it")
    shares = parts[["layer", "neuron", "contribution_share"]].itertuples(index=False)
    print(
        "  ".join(f"L{layer}.N{neuron}: {share:.0%}" for layer, neuron, share in shares) or "none"
    )

    for name in ("circuit.json", "circuit.png", "circuit.svg"):
        circuit.save(out / name)
    circuit.save(out / "column.pdf", style="paper", width=3.25)
    views.attention_heads(run).save(out / "heads.html")
    print(f"\nwritten to {out}: circuit.png, circuit.svg, circuit.json, column.pdf, heads.html")


if __name__ == "__main__":
    main()

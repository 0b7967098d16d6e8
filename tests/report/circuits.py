"""A traced run for the circuit and the views: small tables whose numbers are known."""

import numpy as np
import pandas as pd

from sink_lens.chain.judge import chain_table
from sink_lens.records import create_run

CHAIN = chain_table()
LINKS = CHAIN["link"].tolist()
NODES = [*CHAIN["source"], CHAIN["target"].iloc[-1]]
VERDICTS = dict(zip(LINKS, ("holds", "fails", "holds", "undecided", "undecided", "holds"), strict=True))
SHARES = dict(zip(LINKS, (0.5, 0.6, 0.75, 0.18, 0.26, 0.95), strict=True))


def tables(*, n_layers=12, n_heads=4, steps=((1, 2), (7, 7)), supers=2, length=8):
    """The tables of a trace with these growth steps, and as many super neurons in each of their layers."""
    grid = pd.MultiIndex.from_product([range(n_layers), range(n_heads)], names=["layer", "head"]).to_frame(index=False)
    found = {"chain": CHAIN}
    found |= {"heads": grid.assign(sink_position=0, sink_score=(grid["layer"] + grid["head"] / 100) / n_layers)}
    found["heads"]["sink_rate"] = (found["heads"]["sink_score"] > 0.3).astype(float)
    found["tokens"] = pd.DataFrame(
        {"sequence": np.repeat([0, 1], length), "position": np.tile(np.arange(length), 2), "text": "a"}
    )
    layer = np.arange(n_layers)
    found["layers"] = pd.DataFrame({"layer": layer, "sink_position": 0, "dominance_ratio": 10.0 + layer})
    found["growth_steps"] = pd.DataFrame(
        [
            {"step": n, "first_layer": a, "last_layer": b, "outlier_dimension": 40 + n, "ratio_before": 1.0}
            for n, (a, b) in enumerate(steps)
        ],
        columns=["step", "first_layer", "last_layer", "outlier_dimension", "ratio_before"],
    ).assign(ratio_after=9.0)
    rows = [
        {"layer": at, "neuron": 100 + n, "contribution_share": 0.5 / (n + 1), "is_super": n < supers}
        for first, last in steps
        for at in range(first, last + 1)
        for n in range(supers + 1)
    ]
    columns = ["layer", "neuron", "contribution_share", "is_super"]
    found["neurons"] = pd.DataFrame(rows, columns=columns).assign(sink_position=0, contribution=1.0)
    rows = []
    for link in LINKS:
        common = {"link": link, "ci_low": 0.1, "ci_high": 9.0, "verdict": VERDICTS[link], "criterion": "is over 1"}
        common |= {"measured": VERDICTS[link], "intervened": "holds"}
        rows.append(common | {"statistic": "intervention_share", "value": SHARES[link], "is_primary": False})
        rows.append(common | {"statistic": f"of_{link}", "value": 2.5, "is_primary": True})
    found["links"] = pd.DataFrame(rows).assign(null_name="random_init", null_value=1.0)
    found["effects"] = pd.DataFrame(
        {
            "link": list(LINKS), "edit": "intervention", "layers": "0-2", "position": [5, *[0] * 5],
            "read_layers": "3-6,8-11", "share": [SHARES[link] for link in LINKS], "control_share": 0.01,
            "is_primary": True,
        }
    )  # fmt: skip
    found["effects"] = found["effects"].assign(
        ci_low=found["effects"]["share"] - 0.05, ci_high=found["effects"]["share"] + 0.05
    )
    survives = {"z": 0.0, "neurons": 0.25, "dimensions": 0.8, "key": 0.0}
    found["mediation"] = pd.DataFrame(
        [
            {"intervention": kind, "frozen": hold, "step": n, "surviving_share": share, "control_surviving_share": 1.0}
            for kind in ("isolation", "natural")
            for n in range(len(steps))
            for hold, share in survives.items()
        ],
        columns=["intervention", "frozen", "step", "surviving_share", "control_surviving_share"],
    )
    found["paths"] = path_rows(len(steps))
    return found


def path_rows(steps):
    """Paths of so many growth steps, read in the layers after the target's: a chain, with one that lowers the sink."""
    found = []
    columns = ["source", "source_step", "target", "target_step", "through", "share"]

    def add(*row):
        one = dict(zip(columns, row, strict=True))
        read = {"sink": one["source_step"], "MLPs": -2}.get(one["target"], one["target_step"])
        for number in (-2, *range(steps)) if steps > 1 else (-2,):
            share = one["share"] if number == read or steps < 2 else 0.01
            told = {"share": share, "ci_low": share - 0.04, "ci_high": share + 0.04, "control_largest": 0.02}
            found.append(one | told | {"read_step": number, "control_share": 0.01, "n": 4})

    for step in range(steps) if steps else (-1,):
        add("embedding", -1, "super neurons", step, "", 0.03)
        add("attention", -1, "super neurons", step, "", 0.4)
        add("MLPs", -1, "super neurons", step, "", 0.07)
        add("everything", -1, "super neurons", step, "", 0.9)
        add("super neurons", step, "MLPs", step, "", 0.2)
        add("super neurons", step, "key", step, "", 0.6)
        add("super neurons", step, "key", step, "outlier dimensions", 0.5)
        add("everything", -1, "key", step, "outlier dimensions", -0.3)
        add("everything", -1, "key", step, "", 0.95)
        add("key", step, "sink", -1, "", 0.8)
        add("super neurons", step, "everything", -1, "", 0.7)
        if step > 0:
            add("super neurons", step - 1, "super neurons", step, "", 0.35)
    return pd.DataFrame(found)


def patterns(*, n_layers=12, n_heads=4, length=8):
    """uint8 patterns (layer, head, query, key): everything goes to the first key."""
    found = np.zeros((n_layers, n_heads, length, length), dtype=np.uint8)
    found[..., 0] = 255
    return found


def traced(folder, *, frames=None, without=(), n_layers=12, n_heads=4, length=8):
    """A finished run of these tables, but for some."""
    frames = tables() if frames is None else frames
    provenance = {"model": "toy", "n_layers": n_layers, "n_heads": n_heads, "weights_sha256": "ab"}
    config = {"threshold": 0.3, "min_sink_rate": 0.05}
    with create_run(folder, kind="trace", config=config, provenance=provenance, expects=(*frames,)) as writer:
        for name, frame in frames.items():
            if name not in without:
                writer.write_table(name, frame)
        if "patterns" not in without:
            kept = patterns(n_layers=n_layers, n_heads=n_heads, length=length)
            writer.write_tensors("patterns", {"pattern": kept})
    return folder

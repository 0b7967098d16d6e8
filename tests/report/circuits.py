"""A traced run for the circuit and the views: small tables whose numbers are known."""

import numpy as np
import pandas as pd

from sink_lens.chain.judge import chain_table
from sink_lens.records import create_run

CHAIN = chain_table()
LINKS = CHAIN["link"].tolist()
NODES = [*CHAIN["source"], CHAIN["target"].iloc[-1]]
VERDICTS = dict(
    zip(LINKS, ("holds", "fails", "holds", "undecided", "undecided", "holds"), strict=True)
)
SHARES = dict(zip(LINKS, (0.5, 0.6, 0.75, 0.18, 0.26, 0.95), strict=True))


def grid(**axes):
    """A row for each combination of the axes' values."""
    return pd.MultiIndex.from_product(axes.values(), names=list(axes)).to_frame(index=False)


def write_run(folder, kind, *, config=None, provenance=None, expects=(), tensors=None, **tables):
    """A finished run of these tables, of which the summary is a CSV file."""
    record = {"config": config or {}, "provenance": provenance or {}, "expects": expects}
    with create_run(folder, kind=kind, **record) as writer:
        for name, frame in tables.items():
            (writer.write_csv if name == "summary" else writer.write_table)(
                name, pd.DataFrame(frame)
            )
        for name, values in (tensors or {}).items():
            writer.write_tensors(name, values)
    return folder


def tables(*, n_layers=12, n_heads=4, steps=((1, 2), (7, 7)), supers=2):
    """The tables of a trace with these growth steps, and as many super neurons in each of their layers."""
    heads = grid(layer=range(n_layers), head=range(n_heads)).assign(sink_position=0)
    heads["sink_score"] = (heads["layer"] + heads["head"] / 100) / n_layers
    found = {
        "chain": CHAIN,
        "heads": heads.assign(sink_rate=(heads["sink_score"] > 0.3).astype(float)),
    }
    found["tokens"] = grid(sequence=range(2), position=range(8)).assign(text="a")
    layer = np.arange(n_layers)
    found["layers"] = pd.DataFrame(
        {"layer": layer, "sink_position": 0, "dominance_ratio": 10.0 + layer}
    )
    found["growth_steps"] = pd.DataFrame(
        [(n, first, last, 40 + n) for n, (first, last) in enumerate(steps)],
        columns=["step", "first_layer", "last_layer", "outlier_dimension"],
    ).assign(ratio_before=1.0, ratio_after=9.0)
    inside = [layer for first, last in steps for layer in range(first, last + 1)]
    neurons = grid(layer=inside, neuron=range(100, 101 + supers)).assign(
        sink_position=0, contribution=1.0
    )
    found["neurons"] = neurons.assign(
        contribution_share=0.5 / (neurons["neuron"] - 99), is_super=neurons["neuron"] < 100 + supers
    )
    rows = []
    for link in LINKS:
        common = {
            "link": link,
            "ci_low": 0.1,
            "ci_high": 9.0,
            "verdict": VERDICTS[link],
            "criterion": "is over 1",
        }
        common |= {"measured": VERDICTS[link], "intervened": "holds"}
        rows.append(
            common | {"statistic": "intervention_share", "value": SHARES[link], "is_primary": False}
        )
        rows.append(common | {"statistic": f"of_{link}", "value": 2.5, "is_primary": True})
    found["links"] = pd.DataFrame(rows).assign(null_name="random_init", null_value=1.0)
    share = np.array([*SHARES.values()])
    found["effects"] = pd.DataFrame(
        {
            "link": LINKS, "edit": "intervention", "layers": "0-2", "position": [5, *[0] * 5],
            "read_layers": "3-6,8-11", "share": share, "control_share": 0.01, "is_primary": True,
            "ci_low": share - 0.05, "ci_high": share + 0.05, "carries": False,
            "control_largest": 0.02, "baseline_loss_nats": 3.0, "loss_nats": 3.5,
        }
    )  # fmt: skip
    survives = {"z": 0.0, "neurons": 0.25, "dimensions": 0.8, "key": 0.0}
    freezes = grid(
        intervention=["isolation", "natural"], step=range(len(steps)), frozen=list(survives)
    )
    found["mediation"] = freezes.assign(
        surviving_share=freezes["frozen"].map(survives).astype(float), control_surviving_share=1.0
    )
    return found | {"paths": path_rows(len(steps))}


def path_rows(steps):
    """Paths of so many growth steps, read in the layers after the target's: a chain, with one that lowers the sink."""
    rows = []
    for step in range(steps) if steps else (-1,):
        rows += [
            ("embedding", -1, "super neurons", step, "", 0.03), ("attention", -1, "super neurons", step, "", 0.4),
            ("MLPs", -1, "super neurons", step, "", 0.07), ("everything", -1, "super neurons", step, "", 0.9),
            ("super neurons", step, "MLPs", step, "", 0.2), ("super neurons", step, "key", step, "", 0.6),
            ("super neurons", step, "key", step, "outlier dimensions", 0.5),
            ("everything", -1, "key", step, "outlier dimensions", -0.3), ("everything", -1, "key", step, "", 0.95),
            ("key", step, "sink", -1, "", 0.8), ("super neurons", step, "everything", -1, "", 0.7),
        ]  # fmt: skip
        rows += [("super neurons", step - 1, "super neurons", step, "", 0.35)] if step > 0 else []
    found = []
    for row in rows:
        one = dict(
            zip(
                ["source", "source_step", "target", "target_step", "through", "share"],
                row,
                strict=True,
            )
        )
        own = {"sink": one["source_step"], "MLPs": -2}.get(one["target"], one["target_step"])
        for read in (-2, *range(steps)) if steps > 1 else (-2,):
            share = one["share"] if read == own or steps < 2 else 0.01
            found.append(
                one
                | {
                    "share": share,
                    "ci_low": share - 0.04,
                    "ci_high": share + 0.04,
                    "read_step": read,
                }
            )
    return pd.DataFrame(found).assign(control_largest=0.02, control_share=0.01, n=4)


def traced(folder, *, frames=None, without=(), n_layers=12, n_heads=4):
    """A finished run of these tables, but for some; everything goes to the first key."""
    frames = tables() if frames is None else frames
    kept = np.zeros((n_layers, n_heads, 8, 8), dtype=np.uint8)
    kept[..., 0] = 255
    return write_run(
        folder, "trace", config={"threshold": 0.3, "min_sink_rate": 0.05}, expects=(*frames,),
        provenance={"model": "toy", "n_layers": n_layers, "n_heads": n_heads, "weights_sha256": "ab"},
        tensors={} if "patterns" in without else {"patterns": {"pattern": kept}},
        **{name: frame for name, frame in frames.items() if name not in without},
    )  # fmt: skip

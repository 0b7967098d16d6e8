"""The few boxes and arrows that a figure shows of a circuit: of a trace, or of edges."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..errors import RunError
from ..schema import LEAST_PATH
from ..text import node_label, percent, plural, safe_line
from .diagram import MOST_WORDS, Arrow, Box, Diagram

MOST_NODES = 9
_END = "metric"
_MOST_STEPS = 6
_SIGNS = {"raises": "raises it", "lowers": "lowers it"}


def sketch_paths(circuit: Any) -> Diagram:
    """Return the diagram of a trace's measured paths, with a row for each growth step.

    Raises:
        RunError: no path was measured, or none moves much of the sink.
    """
    steps = sorted(set(circuit.nodes["step"].dropna()))
    nodes = circuit.nodes.loc[~circuit.nodes["step"].isin(steps[_MOST_STEPS:])]
    paths = circuit.edges.loc[
        (circuit.edges["quantity"] == "path_share") & (circuit.edges["value"].abs() >= LEAST_PATH)
    ]
    paths = paths.loc[paths["source"].isin(nodes["id"]) & paths["target"].isin(nodes["id"])]
    if paths.empty:
        raise RunError(
            "no path of this run moves the sink, so there is nothing to draw. Trace with interventions"
        )
    rows = {step: row for row, step in enumerate(steps[:_MOST_STEPS])}
    nodes = nodes.loc[nodes["id"].isin([*paths["source"], *paths["target"]])]
    columns = list(dict.fromkeys(nodes["kind"]))
    boxes = []
    for name, part in nodes.groupby("id", sort=False):
        row = None
        if len(rows) > 1:  # what all growth steps share stands between their rows
            row = rows.get(part["step"].iloc[0], sum(rows.values()) / len(rows))
        column = None if row is None else columns.index(part["kind"].iloc[0])
        boxes.append(Box(id=str(name), text=_box_words(part), row=row, column=column))
    arrows = [
        Arrow(
            source=path["source"],
            target=path["target"],
            label=percent(float(path["value"])),
            share=float(path["value"]),
            kind=str(path["verdict"]),
        )
        for path in paths.sort_values("value", kind="stable").to_dict("records")
    ]
    says = (
        "Number: the share of its attention that the sink loses if the box at the arrow's end does not see what "
        "the box at its start writes. All other boxes see it. Paths through other MLPs are not drawn."
    )
    if any(arrow.share < 0 and arrow.source.startswith("dimension") for arrow in arrows):
        says += " An arrow into or from the dimension is negative since the norm before the keys divides by the size "
        says += "of the token: without the dimension, all other entries get larger."
    if len(steps) > _MOST_STEPS:
        says += f" {len(steps) - _MOST_STEPS} more growth steps are not drawn."
    return Diagram(
        title=f"Measured paths into the attention sink of {safe_line(circuit.about['model'], limit=40)}",
        boxes=tuple(boxes),
        arrows=tuple(arrows),
        says=says,
        key={str(kind): _SIGNS.get(str(kind), safe_line(kind)) for kind in paths["verdict"]},
    )


def _box_words(nodes: pd.DataFrame) -> str:
    first = nodes.iloc[0]
    counts = nodes["value"].to_numpy(float)
    supers = (
        "super neurons" if np.isnan(counts).any() else plural(int(counts.sum()), "super neuron")
    )
    over = [
        re.match(r"(\d+) of ", detail) for detail in nodes["detail"]
    ]  # no "of how many": the title is of all
    heads = plural(sum(int(one[1]) for one in over if one), "head") if all(over) else "heads"
    spans = [one.partition(" ")[2] for one in nodes["layers"].tolist() if one.startswith("layer")]
    many = len(spans) > 1 or "–" in "".join(spans)
    layers = f", layer{'s' * many} {', '.join(spans)}" if 1 <= len(spans) <= 3 else ""
    names = {
        "z": "averaged values z",
        "attn_out": "attention output after W_O",
        "neurons": f"{supers}{layers}",
        "dimension": _join_dimension_labels(nodes["label"].tolist()),
        "heads": f"sink in {heads}",
    }.get(str(first["kind"]), safe_line(first["label"].replace("\n", " "), limit=60, counted=False))
    return " ".join(names.split()[:MOST_WORDS])


def _join_dimension_labels(labels: Sequence[str]) -> str:
    ends = (label.rpartition(" ")[2] for label in labels if re.search(r"\d$", label))
    numbers = list(dict.fromkeys(ends))
    if not numbers:
        return safe_line(labels[0], limit=40, counted=False)
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"dimension{'s' * (len(numbers) > 1)} {', '.join(numbers[:3])}{more}"


def sketch_edges(
    edges: pd.DataFrame,
    *,
    group: int = 1,
    title: str = "",
    unit: str = "of the metric",
    outputs: Collection[str] = ("logits",),
    end: str = "logits",
    most: int = MOST_NODES,
) -> Diagram:
    """Return the diagram of the strongest part of a circuit of edges, at most ``most`` nodes.

    The picture grows backwards from the metric: the next node is always the one that writes most to a node that is
    drawn already. ``edges`` have writer, reader, score and, if it is known, share (of the metric's difference; ``unit``
    are the words after it); the largest first. ``group`` heads share a key-value head. The readers ``outputs`` are one
    box with the text ``end``.
    """
    shares = "share" in edges.columns and np.isfinite(edges["share"].to_numpy(float)).any()
    column = "share" if shares else "score"
    rows = [
        (str(row["writer"]), str(row["reader"]), float(row[column]))
        for row in edges.to_dict("records")
    ]
    if not rows:
        raise RunError(
            "the circuit has no edge, so there is nothing to draw. Ask for more with edges=..."
        )
    shown, chosen = [_END], []
    while len(shown) < most:
        parts = _edges_into_shown(rows, shown, group=group, outputs=outputs)
        into = {one: sum(shares) for one, shares in parts.items()}
        near = (one for one in into if one[0] not in shown)
        more = max(near, key=lambda one: abs(into[one]), default=None)
        if more is None:
            break
        shown.append(more[0])
        chosen.append(more)
    if not chosen:
        raise RunError(
            "no edge of the circuit leads to the metric, so there is nothing to draw. Ask for more with edges=..."
        )
    parts = _edges_into_shown(rows, shown, group=group, outputs=outputs)
    sums = {one: sum(scores) for one, scores in parts.items()}
    by_size = sorted(sums, key=lambda one: -abs(sums[one]))
    largest = max(abs(sums[one]) for one in chosen)
    also = [
        one
        for one in by_size
        if set(one) <= set(shown) and one not in chosen and abs(sums[one]) >= 0.25 * largest
    ]
    drawn = [*chosen, *also[: max(0, most - 4)]]
    arrows = []
    for writer, reader in drawn:
        size = sums[writer, reader]
        arrows.append(
            Arrow(
                source=writer,
                target=reader,
                label=percent(size) if shares else f"{size:.2g}".replace("-", "−"),
                share=abs(size) / (1.0 if shares and largest <= 1 else largest),
                kind="lowers" if size < 0 else "raises",
            )
        )
    nodes = sorted({one for pair in drawn for one in pair}, key=lambda one: (one != "input", one))
    what = f"share {unit} that" if shares else f"what is added to {unit} by"
    return Diagram(
        title=title,
        boxes=tuple(Box(id=one, text=end if one == _END else node_label(one)) for one in nodes),
        arrows=tuple(arrows),
        says=(
            f"Number: {what} the edges from one box into the other{' carry' if shares else ''} together. The picture "
            f"grows backwards from {end}: the next box is always the one with the largest number into a box that is "
            f"there. It shows {sum(len(parts[one]) for one in drawn):,} of the circuit's {len(edges):,} edges."
        ),
        key=_SIGNS,
    )


def _edges_into_shown(
    rows: Sequence[tuple[str, str, float]],
    shown: Sequence[str],
    *,
    group: int,
    outputs: Collection[str],
) -> dict[tuple[str, str], list[float]]:
    """Return (writer, shown node) -> the scores of the edges from the writer into the node.

    An edge into a key-value head belongs to the first of its ``group`` heads that is shown.
    """
    sums: dict[tuple[str, str], list[float]] = {}
    for writer, reader, share in rows:
        node = reader.partition("<")[0]
        layer, shared, head = node.partition(".kv")
        heads = [node]
        if shared:
            heads = [f"{layer}.h{int(head) * group + one}" for one in range(group)]
        into = _END if reader in outputs else next((one for one in shown if one in heads), None)
        if into is not None:
            sums.setdefault((writer, into), []).append(share)
    return sums

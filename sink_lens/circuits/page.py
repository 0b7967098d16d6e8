"""A circuit of edges as a picture: nodes by layer, from the input at the bottom to the logits at the top."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.circuits.config import MOST_DRAWN
from sink_lens.circuits.methods import METHODS
from sink_lens.records import Run
from sink_lens.report import diagram, sketches
from sink_lens.report.diagram import Style
from sink_lens.report.drawable import Drawable
from sink_lens.report.explorer import CURVE, MOST_EDGES, Explorer, bytes_of, curve_rows, edge_graph
from sink_lens.report.page import Drawn, Listed, Page, PageTable, has_table, listed_table, more, shown_table, whole
from sink_lens.report.style import FONT, INK, PAPER, canvas, finished
from sink_lens.text import capital, edge_name, listed, number, part_name, percent, plural, token, visible, words

COLOURS = {"q": "#7b3fa0", "k": "#2e8b57", "v": "#2b6cb0", "g": "#b8860b"}
"""Colour of an edge into a query, a key, a value or a gate; other edges are grey, edges that lower the metric red."""
_CARRIES = 0.8
"""Faithfulness without the sink's edges below which a circuit is largely the sink's."""
_PLAIN, _LOWERS = "#6b6b6b", "#c0392b"
_NODE = re.compile(r"[am](\d+)")
_CARRIED = {
    "resample": "what they carry in the corrupted prompt",
    "zero": "nothing",
    "mean_ordinary": "the mean over ordinary tokens",
    "mean_all": "the mean over all tokens",
    "mean_aligned": "the mean at the same position",
}
"""Ablation -> what an edge outside of the circuit carries."""
_WORDS = {"q": "a query", "k": "a key", "v": "a value", "g": "a gate", "": "an MLP or the logits"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeCircuit(Drawable):
    """The edges of a circuit, of a run or in memory."""

    about: dict[str, Any]
    """Title, what a share is of, layers, heads that share a key-value head, and the readers that the metric reads."""
    edges: pd.DataFrame = field(repr=False)
    """The run's table ``circuit``: writer, reader, score and more, the largest first."""
    make_graph: Callable[[], dict[str, Any]] = field(repr=False)
    """Gives the largest edges as Neuronpedia's JSON."""

    @property
    def graph(self) -> dict[str, Any]:
        """The largest edges of all as Neuronpedia's JSON.

        Raises:
            RunError: the run has no table of all edges.
        """
        return self.make_graph()

    @property
    def drawn(self) -> pd.DataFrame:
        """Its strongest part, which the picture shows; in runs that do not say which, the 60 largest edges."""
        return self.edges.loc[self.edges["drawn"]] if "drawn" in self.edges else self.edges.head(MOST_DRAWN)

    def explore(self) -> Explorer:
        """A page to explore the circuit in; ``.save("c.html")`` writes it."""
        return Explorer(graphs=[self.graph])

    def draw(self, style: Style = "page", *, width: float | None = None) -> Figure:
        """The circuit as a figure: ``page`` with its strongest part, up to 60 edges, ``talk`` and ``paper`` with fewer.

        Raises:
            InputError: another style, or more than fits into the width.
        """
        if style == "page":
            sizes = {name: self.about[name] for name in ("n_layers", "group")}
            return edge_figure(self.drawn, **sizes, title=self.about["title"], of=len(self.edges))
        named = {name: self.about[name] for name in ("group", "title", "unit", "outputs", "end")}
        return sketch(self.edges, **named, style=style, width=width)

    def to_json(self) -> str:
        """The circuit as JSON; undefined numbers are null."""
        rows = json.loads(str(self.edges.to_json(orient="records")))
        return json.dumps({"format": "sink_lens edges 1", "about": self.about, "edges": rows}, ensure_ascii=False)


def sketch(edges: pd.DataFrame, *, style: Style, width: float | None = None, **named: Any) -> Figure:
    """The strongest few edges that lead to the metric, for a talk or a paper; ``named`` as in ``sketches.of_edges``."""
    return diagram.draw(sketches.of_edges(edges, **named), style=style, width=width)


def edge_circuit(run: Run) -> EdgeCircuit:
    """The circuit of a run of ``sink-lens circuit``.

    Raises:
        RunError: the run has no such table.
    """
    heads, kv_heads = (int(run.provenance.get(name) or 1) for name in ("n_heads", "n_kv_heads"))
    circuit, group = run.need("circuit", columns=["writer", "reader", "score"]), max(1, heads // kv_heads)
    title = f"{_title(run)}, {visible(run.provenance.get('model') or 'a model', limit=40)}"
    return drawable(
        circuit,
        metric=words(_metric(run)),
        title=title,
        make_graph=lambda: _graph(run, title=title, group=group),
        n_layers=int(run.provenance.get("n_layers") or 0),
        group=group,
        outputs=_outputs(run, circuit),
    )


def drawable(
    edges: pd.DataFrame, *, metric: str, make_graph: Callable[[], dict[str, Any]], outputs: list[str], **about: Any
) -> EdgeCircuit:
    """A circuit to draw, of a run or in memory.

    Args:
        edges: the columns writer, reader, score, and drawn if it is known.
        metric: its name in words.
        make_graph: gives the largest edges as Neuronpedia's JSON.
        outputs: the readers that the metric reads.
        **about: title, n_layers and group (heads that share a key-value head).
    """
    about |= {"unit": f"of the {metric}", "outputs": outputs, "end": "logits" if outputs == ["logits"] else metric}
    return EdgeCircuit(about=about, edges=edges, make_graph=make_graph)


def _metric(run: Run) -> str:
    """The metric of a circuit, by its name."""
    return str(run.config.get("metric") or ("sink_mass" if run.config.get("task") == "text" else "logit_difference"))


def _outputs(run: Run, edges: pd.DataFrame) -> list[str]:
    """The readers of some edges that the metric reads: the logits, or queries and keys of its layers."""
    if _metric(run) != "sink_mass":
        return ["logits"]
    layers = run.config.get("metric_layers")
    into = edges["reader"].drop_duplicates().astype(str)
    return [one for one in into if one[-3:] in ("<q>", "<k>") and (layers is None or _order(one)[0] in layers)]


def _graph(run: Run, *, title: str, group: int) -> dict[str, Any]:
    """The largest edges of a run, and what its other tables say of them."""
    edges = run.need("edges", columns=["edge", "writer", "reader", "span", "score", "in_circuit"])
    core = run.optional("core", columns=["edge", "core"])
    curve = run.optional("curve", columns=CURVE)
    prompt = run.optional("prompt", columns=["position", "text"])
    config = run.config
    largest = edges.iloc[edges["score"].abs().argsort(kind="stable")[::-1][:MOST_EDGES]]
    if core is not None:
        largest = largest.merge(core[["edge", "core"]].astype({"core": object}), how="left", on="edge")
    return edge_graph(
        largest,
        model=visible(run.provenance.get("model") or "a model", limit=80),
        tokens=() if prompt is None else prompt["text"].astype(str).tolist(),
        title=title,
        n_layers=int(run.provenance.get("n_layers") or 0),
        group=group,
        n_edges=len(edges),
        size=config.get("edges") or int(edges["in_circuit"].to_numpy(bool).sum()),
        choice=config.get("choice"),
        method=config.get("method"),
        outputs=_outputs(run, largest),
        curve=[] if curve is None else curve_rows(curve),
        attention=_attention(run),
    )


def _attention(run: Run) -> dict[str, Any]:
    """Collect where the largest heads look in the first prompt, and the parts of query and key that cause it."""
    parts = run.optional("attention", columns=["head", "query", "key", "advantage", "side", "by", "part", "value"])
    if parts is None or not len(parts):
        return {}
    patterns = run.tensors("attention_patterns")
    by_head = {}
    for head, own in parts.groupby("head", sort=False):
        rows = own.to_dict("records")
        if str(head) in patterns:
            where = {name: float(rows[0][name]) for name in ("query", "key", "advantage")}
            why = [
                {name: row[name] for name in ("side", "by", "value")} | {"part": part_name(row["part"])} for row in rows
            ]
            by_head[str(head)] = where | {"pattern": bytes_of(patterns[str(head)]), "why": why}
    return by_head


def edge_figure(
    edges: pd.DataFrame, *, n_layers: int, group: int = 1, title: str = "", of: int | None = None
) -> Figure:
    """Edges with their scores; the width of a line is the magnitude of the score.

    Args:
        edges: the columns writer, reader and score, the largest first.
        n_layers: layers of the model.
        group: heads that share a key-value head; an edge into one is divided among those of its heads that are in the
            picture.
        title: above the figure.
        of: edges of the circuit, of which these are the strongest part.
    """
    if of is not None and of > len(edges):
        title = "\n".join([*([title] if title else []), f"The strongest {len(edges)} of {of:,} edges"])
    ends = _ends(edges, group=group)
    nodes = sorted({one for writer, reader, _ in ends for one in (writer, reader.partition("<")[0])}, key=_order)
    rows = sorted({_order(one)[:2] for one in nodes})
    level = {row: at for at, row in enumerate(rows)}
    by_row: dict[tuple[int, int], list[str]] = {}
    for node in nodes:
        by_row.setdefault(_order(node)[:2], []).append(node)
    widest = max([1, *(len(some) for some in by_row.values())])
    place = {}
    for row, some in by_row.items():
        shift = 0.32 * (level[row] % 3 - 1)  # neighbours of a column are not drawn over each other
        for at, node in enumerate(some):
            x = (at - (len(some) - 1) / 2) * max(1.0, 0.75 * widest / len(some)) + (
                shift if widest > 1 else 0.6 * shift
            )
            place[node] = (x, level[row])
    width, height = min(4.4 + 1.0 * widest, 11.0), min(1.8 + 0.42 * len(rows), 13.0)
    figure = canvas(width=width, height=height)
    axes = figure.add_subplot()
    xs = [x for x, _ in place.values()] or [0.0]
    left, right = min(xs) - 0.9, max(xs) + 0.9
    inches = ((width - 1.0) / (right - left), (height - 1.0) / len(rows))  # of one unit; names and legend take the rest
    largest = max([abs(score) for *_, score in ends], default=1.0) or 1.0
    shown: dict[str, str] = {}
    for writer, reader, score in reversed(ends):
        node, _, kind = reader.partition("<")
        kind = kind.rstrip(">")
        (x0, y0), (x1, y1) = place[writer], place[node]
        colour = _LOWERS if score < 0 else COLOURS.get(kind, _PLAIN)
        shown.setdefault("lowers the metric" if score < 0 else f"into {_WORDS[kind]}", colour)
        bend = 0.08 * (1 if x1 >= x0 else -1) * min(1.0, abs(y1 - y0) / 6)
        axes.annotate(
            "",
            xy=(x1, y1),
            xytext=(x0, y0),
            arrowprops={
                "arrowstyle": "-|>",
                "color": colour,
                "linewidth": 0.5 + 3.5 * abs(score) / largest,
                "linestyle": "--" if score < 0 else "-",
                "alpha": 0.35 + 0.6 * abs(score) / largest,
                "shrinkA": _to_border(writer, (x1 - x0, y1 - y0), inches),
                "shrinkB": _to_border(node, (x1 - x0, y1 - y0), inches) + 2,
                "connectionstyle": f"arc3,rad={bend:.3f}",
            },
        )
    box = {"boxstyle": "round,pad=0.22", "facecolor": PAPER, "edgecolor": "#999999", "linewidth": 0.7}
    for node, (x, y) in place.items():
        axes.text(x, y, part_name(node), ha="center", va="center", fontsize=FONT * 0.85, color=INK, bbox=box, zorder=5)
    axes.set_xlim(left, right)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_yticks(range(len(rows)), [_row_name(row, n_layers=n_layers) for row in rows])
    axes.set_xticks([])
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT * 0.8, colors="#777777")
    for label, colour in sorted(shown.items()):
        axes.plot([], [], color=colour, linestyle="--" if colour == _LOWERS else "-", label=label, linewidth=2)
    if shown:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=3, frameon=False, fontsize=FONT * 0.85)
    if title:
        axes.set_title(title, fontsize=FONT, color=INK, loc="left")
    return finished(figure)


def _to_border(node: str, along: tuple[float, float], inches: tuple[float, float]) -> float:
    """Points from the middle of a node's box to its border, in the direction of an edge.

    Args:
        node: its name is in the box.
        along: the edge, across and up, in units of the axes.
        inches: of one unit, across and up.
    """
    size = 0.85 * FONT
    half = (0.3 * size * len(part_name(node)) + 0.22 * size, 0.6 * size + 0.22 * size)
    across, up = (abs(one) * inch for one, inch in zip(along, inches, strict=True))
    long = np.hypot(across, up) or 1.0
    return float(min(half[0] / max(across / long, 1e-6), half[1] / max(up / long, 1e-6)))


def _ends(edges: pd.DataFrame, *, group: int) -> list[tuple[str, str, float]]:
    """Writer, reader and score; an edge into a key-value head is divided among its heads that are in the picture."""
    rows = [(str(row["writer"]), str(row["reader"]), float(row["score"])) for row in edges.to_dict("records")]
    drawn = {one for writer, reader, _ in rows for one in (writer, reader.partition("<")[0])}
    ends = []
    for writer, reader, score in rows:
        node, _, kind = reader.partition("<")
        layer, shared, head = node.partition(".kv")
        heads = [f"{layer}.h{int(head) * group + one}" for one in range(group)] if shared else []
        there = [f"{one}<{kind}" for one in heads if one in drawn]
        ends += [(writer, one, score / len(there or [reader])) for one in there or [reader]]
    return ends


def curve_figure(curve: pd.DataFrame) -> Figure:
    """Faithfulness over the share of edges or nodes, on a logarithmic axis, with its intervals and random circuits."""
    figure = canvas(width=6.4, height=3.6)
    axes = figure.add_subplot()
    styles = {"edges": ("#2b6cb0", "o", "edges"), "nodes": ("#2e8b57", "s", "whole nodes")}
    for by, (colour, marker, label) in styles.items():
        own = curve.loc[curve["by"].eq(by)].sort_values(by="share")
        if len(own):
            share, f = own["share"].to_numpy(float), own["faithfulness"].to_numpy(float)
            axes.fill_between(share, own["low"].to_numpy(float), own["high"].to_numpy(float), color=colour, alpha=0.15)
            axes.plot(share, f, color=colour, marker=marker, markersize=4, linewidth=1.5, label=label)
    random = curve[curve["by"] == "random"]
    if len(random):
        axes.plot(
            random["share"],
            random["faithfulness"],
            "x",
            color="#888888",
            markersize=5,
            label="random, same size and depth",
        )
    own = curve[curve["by"] == "circuit"]
    if len(own):
        axes.plot(own["share"], own["faithfulness"], "*", color=_LOWERS, markersize=13, label="this circuit", zorder=4)
    axes.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.axhline(0.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_xlabel("share of all edges, or of all nodes", fontsize=FONT)
    axes.set_ylabel("faithfulness", fontsize=FONT)
    values = curve["faithfulness"].to_numpy(float)
    values = values[np.isfinite(values)]
    if len(values):
        ends = curve.loc[curve["by"].isin(list(styles)), ["low", "high"]].to_numpy(float)
        ends = ends[np.isfinite(ends)].clip(-1, 2)  # wider bands are cut, so that the lines stay apart
        values = np.concatenate([values, ends])
        axes.set_ylim(min(-0.15, float(values.min()) - 0.1), max(1.15, float(values.max()) + 0.1))
    axes.legend(frameon=False, fontsize=FONT * 0.85, loc="upper left")
    return finished(figure)


def _order(node: str) -> tuple[int, int, int]:
    """Layer, sublayer and head of a node: what it is sorted by."""
    if node == "input":
        return (-1, 0, 0)
    if node == "logits":
        return (10**6, 0, 0)
    match = _NODE.match(node)
    layer = int(match.group(1)) if match else 0
    number = re.search(r"\.(?:h|kv)(\d+)", node)
    return (layer, 0 if node[0] == "a" else 1, int(number.group(1)) if number else 0)


def _row_name(row: tuple[int, int], *, n_layers: int) -> str:
    """Return what a row of the picture is called: input, a layer's attention or MLP, or logits."""
    layer, sublayer = row
    if layer < 0:
        return "input"
    if layer > n_layers:
        return "logits"
    return f"{layer} {'MLP' if sublayer else 'attn'}"


def circuit_told(summary: pd.DataFrame, *, sizes: Sequence[float] = (1.0,)) -> tuple[str, ...]:
    """The result of a run in sentences: how good the circuit is comes first.

    Args:
        summary: the run's table of this name.
        sizes: shares of the edges that were run.
    """
    row = summary.to_dict("records")[0]
    sentences = [_faithful(row), *_rule_told(row), *_sink_told(row)]
    if np.isfinite(row["rank_correlation"]):
        sentences.append(
            f"Scores and real patches of single edges have a rank correlation of {number(row['rank_correlation'])}; "
            f"scores miss {percent(row['missed'])} of the summed effect."
        )
    if row.get("patched_nodes", -1) > 0:
        sentences.append(_nodes_told(row))
    sentences.append(
        f"{row['stable_edges']} of its edges are in at least 95% of 1,000 bootstraps over pairs; the circuits of two "
        f"halves of the pairs have {percent(row['jaccard_halves'])} of all their edges in common."
    )
    if row["core_edges"] >= 0:
        sentences.append(_core_told(row))
    carried = _CARRIED.get(str(row["ablation"]), visible(row["ablation"]))
    replaced = "every edge" if row["ablation"] == "resample" else "the input alone"
    method, chosen_on = visible(row["method"]).upper(), row.get("chosen_on", row["pairs"])
    by = (
        f"Its edges were chosen by {method} on {chosen_on}"
        if chosen_on
        else f"It was given, and scored by {method} on all"
    )
    sentences += [
        f"{by} of {row['pairs']} pairs; other edges carry {carried} instead.",
        f"{capital(words(str(row['metric'])))} is {number(row['clean'])} in clean runs and "
        f"{number(row['corrupted'])} with {replaced} replaced.",
    ]
    if row["method"] in METHODS and METHODS[row["method"]].integrates and METHODS[row["method"]].along == "inputs":
        sentences.append(
            f"The edges out of the input sum to {percent(row['completeness'])} of that difference "
            f"(error by pair: median {percent(row['completeness_error_median'])}, largest "
            f"{percent(row['completeness_error_largest'])}; {number(row['steps_mean'])} integration points per pair)."
        )
    if _is_told(row) and np.isfinite(row["cpr"]):
        sentences.append(_areas_told(row, most=max(sizes)))
    if np.isfinite(row.get("left_sum", np.nan)):
        sentences.append(
            f"EAP-IG's own left sum, at the initial number of points, gives {percent(row['left_sum'])} on "
            f"{plural(int(row['left_pairs']), 'pair')}."
        )
    if row.get("outside_sampled", -1) > 0:
        outside = row["all_edges"] - row["edges"]
        sentences.append(
            f"We patched a sample of {plural(row['outside_sampled'], 'edge')} outside the circuit: "
            f"{row['outside_over']} {'does' if row['outside_over'] == 1 else 'do'} more than its weakest edge "
            f"({number(row['weakest'])}). So at most {row['outside_at_most']:,} of all {outside:,} edges outside do, "
            "at 95% confidence."
        )
    return tuple(sentences)


def _nodes_told(row: Mapping[str, Any]) -> str:
    """Name the nodes whose edges gradients do not see, and when that is no sign (analysis ``circuit_nodes``)."""
    unseen = row["unseen_nodes"].split() if isinstance(row["unseen_nodes"], str) else []
    of_zero = row["ablation"] == "zero"
    if not unseen:
        doubt = " Against zero that is no sign of a right circuit: most wrong ones have no such node." * of_zero
        return (
            f"Each of the {row['patched_nodes']} nodes was really patched, and gradients miss none of them: no "
            f"patch does both 5% of what all edges do and ten times the sum of its edges' scores.{doubt}"
        )
    if of_zero:
        doubt = " Against zero that is no sign of a wrong circuit: right ones have such nodes as often."
    else:
        doubt = " One gradient (eap) misses nodes in many right circuits too; use eap-ig." * (row["method"] == "eap")
    return (
        f"Do not believe the circuit at {listed(map(part_name, unseen))}: a real patch of the whole node does at "
        "least 5% of what all edges do, and ten times the sum of its edges' scores. Gradients do not see such edges, "
        f"for example if two parts cancel before a threshold. Score them with exact.{doubt}"
    )


def _sink_told(row: Mapping[str, Any]) -> list[str]:
    """Say how much of the scores is the sink's, and warn where faithfulness is too; where prompts differ, nothing."""
    kept, share = row.get("without_sink_faithfulness", np.nan), row.get("sink_share", np.nan)
    if not np.isfinite(kept) or share == 0:
        return []
    scores = f"{percent(share)} of the scores, and {percent(row['sink_share_top'])} of the 200 largest," * (share > 0)
    said = f"{scores} are at the sink's position. " if scores else ""
    said += f"All edges but those at the sink's position keep {_kept(row, 'without_sink_')}."
    if kept < _CARRIES and not str(row["metric"]).startswith("sink mass"):
        said += (
            " That is below 80%: much of what a circuit keeps is then the sink, which every text needs, and not the "
            "task. Resampling leaves the sink as it is, and so does the option freeze."
        )
    return [said]


def _core_told(row: Mapping[str, Any]) -> str:
    """Say how many edges are core, and how far real patches of each and of the core as a whole confirm it."""
    real = alone = ""
    if "confirmed_edges" in row:
        real = f" Real patches confirm {row['confirmed_edges']} of them (at least 1% of what all edges do)"
    if row.get("together_edges", 0) > 0:
        real += f", and {row['together_edges']} can go together at no loss, since they cancel"
    real += "." * bool(real)
    if np.isfinite(row.get("core_faithfulness", np.nan)):
        alone = f" The core alone keeps {_kept(row, 'core_')}."
    return (
        f"{_edges(row['core_edges'])} core: in at least 95% of the bootstraps under every ablation and "
        f"template.{real}{alone} {_edges(row.get('undecided_edges', 0))} undecided: in 95% of the bootstraps under "
        f"only some of these. {_edges(row['contingent_edges'])} contingent: in some circuit, but in 95% of the "
        "bootstraps under none of these."
    )


def _edges(n: int) -> str:
    """A number of edges and the verb."""
    return f"{plural(n, 'edge')} {'is' if n == 1 else 'are'}"


def _kept(row: Mapping[str, Any], name: str = "") -> str:
    """A faithfulness with its interval."""
    f, low, high = (float(row[f"{name}faithfulness{end}"]) for end in ("", "_low", "_high"))
    return f"{percent(f)}{f' [{percent(low)}, {percent(high)}]' * bool(np.isfinite(low))}"


def _edges_told(row: Mapping[str, Any]) -> str:
    """Say which part of all edges the circuit has."""
    return f"{row['edges']:,} of {row['all_edges']:,} edges ({_size(row['edges'] / row['all_edges'])})"


def _faithful(row: Mapping[str, Any]) -> str:
    """Say how much of the whole model's metric the circuit keeps, on pairs that did not choose it."""
    gap = f"{number(row['gap'])} [{number(row['gap_low'])}, {number(row['gap_high'])}]"
    if not _is_told(row):
        return (
            f"Faithfulness is undefined: the metric differs by {gap} between all edges and none, which cannot be told "
            "from 0."
        )
    if "faithfulness" not in row:
        return f"The run does not say what the circuit of {_edges_told(row)} keeps alone; the curve shows other sizes."
    return (
        f"The circuit has {_edges_told(row)} and keeps {_kept(row)} of what all edges add to the "
        f"{words(str(row['metric']))}, {gap}, on pairs that were not used to choose it. All other edges, without it, "
        f"keep {_kept(row, 'without_')}."
    )


def _areas_told(row: Mapping[str, Any], *, most: float) -> str:
    """Give faithfulness over all sizes; ``most`` is the largest share of the edges that was run."""
    cpr, cmd, cpr_log, cmd_log = (number(row[name]) for name in ("cpr", "cmd", "cpr_log", "cmd_log"))
    if most < 1:  # CPR and CMD are areas from 0 to 1
        return (
            f"Up to {100 * most:.3g}% of the edges, where the run ends, the area under faithfulness is {cpr} and that "
            f"of its distance from 1 is {cmd}; averaged over the logarithm of the size, they are {cpr_log} and "
            f"{cmd_log}."
        )
    return (
        f"Averaged over sizes, faithfulness is {cpr} (CPR) and its distance from 1 is {cmd} (CMD); over the logarithm "
        f"of the size, they are {cpr_log} and {cmd_log}."
    )


def _size(share: float) -> str:
    """A share of the edges, which may be far below a percent."""
    return percent(share) if share >= 0.1 else f"{100 * share:.2g}%"


def _rule_told(row: Mapping[str, Any]) -> list[str]:
    """Say which rule chose the circuit, and if faithfulness overshoots at some size."""
    if not _is_told(row) or "faithfulness" not in row:
        return []
    carry = "at least 80%, by the lower end of the interval, and at most 120%"
    share = row["share_at_80"]
    said = (
        f"From {_size(share)} of the edges on, circuits keep {carry}"
        if np.isfinite(share)
        else f"No size keeps {carry}"
    )
    told = {
        "smallest": f"It is the smallest size from which on every circuit that was run keeps {carry}.",
        "none": f"It has the largest scores: there is no size below all edges from which on every circuit that was run "
        f"keeps {carry}.",
        "asked": f"Its size was asked for. {said}.",
        "given": f"It was given; as many of the largest scores keep {_kept(row, 'as_many_')}. {said}.",
        "threshold": f"It has all scores above the threshold. {said}.",
    }.get(str(row["rule"]), "")
    if row["most_kept"] > 1.2:
        told += f" Faithfulness overshoots: circuits of {_size(row['most_kept_at'])} keep {percent(row['most_kept'])}."
    return [told.strip()] if told else []


def _is_told(row: Mapping[str, Any]) -> bool:
    """Check whether the metric of no edges is told from that of all, so that a share of it means something."""
    return row["gap_low"] > 0 or row["gap_high"] < 0


def _title(run: Run) -> str:
    """Head the page with what the circuit keeps."""
    task, metric = str(run.config.get("task", "")), words(str(run.config.get("metric") or ""))
    what = {"text": metric or "the sink", "file": "the pairs"}.get(task, visible(task))
    table = run.optional("summary", columns=["gap_low", "gap_high", "edges", "all_edges", "metric"])
    if table is None or not len(table):
        return f"The circuit of {what}"
    row = table.to_dict("records")[0]
    if not _is_told(row):
        return f"The circuit of {what}: what it carries is undefined"
    kept = f" keep {_kept(row)} of the {words(str(row['metric']))}" if "faithfulness" in row else ""
    return f"The circuit of {what}: {_edges_told(row)}{kept}"


def _headline(run: Run) -> list[str]:
    """The result in sentences, with the heads of the largest scores."""
    sentences = list(
        circuit_told(
            run.need("summary", columns=["edges", "cpr", "completeness"]), sizes=run.config.get("sizes") or (1.0,)
        )
    )
    nodes = run.optional("nodes", columns=["node", "kind", "score"])
    if nodes is not None and len(nodes):
        heads = nodes.loc[nodes["kind"].eq("head")].head(4)
        named = ", ".join(
            f"{part_name(str(row['node']))} ({number(float(row['score']))})" for row in heads.to_dict("records")
        )
        sentences.insert(1, f"Heads with the largest scores: {named}.")
    return sentences


def _picture(run: Run) -> tuple[str, Figure]:
    """Draw the circuit's strongest part, and say what it keeps alone."""
    circuit, alone = edge_circuit(run), ""
    summary = run.optional("summary", columns=["picture_edges", "picture_faithfulness"])
    if summary is not None and len(summary):
        row = summary.to_dict("records")[0]
        part = "All" if row["picture_edges"] == row["edges"] else f"The strongest {row['picture_edges']:,} of the"
        alone = f"{part} {row['edges']:,} edges of the circuit; alone they keep {_kept(row, 'picture_')}. "
    see = (
        f"{alone}Read upwards: what a node writes is read by the nodes above it, as a query (purple), a key (green), a "
        "value (blue) or by an MLP (grey); red and dashed lowers the metric. Width is the score's magnitude; an edge "
        "into a key or value that heads share is divided among those of them in the picture."
    )
    return see, circuit.draw()


def sketched(style: Style) -> Callable[[Run], tuple[str, Figure]]:
    """A figure for a talk or a paper, as files of figures have it."""
    return lambda run: ("The strongest edges, one number each.", edge_circuit(run).draw(style))


def _curve(run: Run) -> tuple[str, Figure]:
    """Draw faithfulness by the share of edges kept."""
    table = run.need("curve", columns=["by", "share", "faithfulness", "low", "high"])
    see = (
        "How much of the metric is left if only that many edges are kept and all others are replaced, on pairs "
        "that were not used to choose the edges. 1 is the whole model; above 1, the dropped edges lowered the "
        "metric. Bands are 95% intervals over pairs."
    )
    return see, curve_figure(table)


def _edge_table(run: Run) -> tuple[str, PageTable]:
    """The table of the circuit's edges."""
    table = run.need("circuit", columns=["edge", "score", "low", "high", "inclusion"])
    heads = {
        "edge": "edge",
        "score": "score",
        "low": "from",
        "high": "to",
        "share": "of the difference",
        "inclusion": "in bootstraps",
    }
    return "The edges of the circuit, the largest first." + more(len(table), "circuit"), _named(table, heads)


def _node_table(run: Run) -> tuple[str, PageTable]:
    """The table of the circuit's nodes."""
    table = run.need("nodes", columns=["node", "score", "edges_in", "edges_out"])
    heads = {"node": "node", "score": "score", "edges_in": "edges in", "edges_out": "edges out"}
    return "Nodes by the summed score of the edges that leave them." + more(len(table), "nodes"), _named(table, heads)


def _check_table(run: Run) -> tuple[str, PageTable]:
    """The table of scores beside real patches of edges."""
    table = run.need("check", columns=["edge", "score", "exact"])
    heads = {"edge": "edge", "score": "score", "exact": "real patch", "error": "error", "drawn": "drawn from"}
    return "Scores beside real patches of the same edge." + more(len(table), "check"), _named(table, heads)


def _node_check_table(run: Run) -> tuple[str, PageTable]:
    """The table of scores beside real patches of nodes, unseen nodes first."""
    table = run.need("check_nodes", columns=["node", "score", "exact", "unseen"])
    table = table.sort_values(["unseen", "exact"], key=lambda one: one.abs(), ascending=False, ignore_index=True)
    heads = {"node": "node", "score": "score", "exact": "real patch", "unseen": "not seen by gradients"}
    see = "What a real patch of every node does, beside the sum of its edges' scores."
    return see + more(len(table), "check_nodes"), _named(table, heads)


def _core_table(run: Run) -> tuple[str, PageTable]:
    """The table of core, undecided and contingent edges."""
    table = run.need("core", columns=["edge"])
    see = "Core edges first, then undecided ones, then contingent ones."
    return see + more(len(table), "core"), _named(table, {str(name): words(str(name)) for name in table.columns})


def _named(table: pd.DataFrame, heads: Mapping[str, str]) -> PageTable:
    """A table whose edges, or nodes, have the names that the pictures give them; its file keeps their ids."""
    (column,) = (name for name in ("edge", "node") if name in heads)
    return shown_table(table.assign(**{column: [edge_name(str(one)) for one in table[column]]}), heads)


def _pair_table(run: Run) -> tuple[str, PageTable]:
    """The table of the prompts."""
    table = run.need("pairs", columns=["clean", "corrupted", "correct", "incorrect"])
    heads = {
        "clean": "clean",
        "corrupted": "corrupted",
        "correct": "right",
        "incorrect": "wrong",
        "clean_value": "clean metric",
        "corrupted_value": "corrupted metric",
    }
    shown = table.assign(
        clean=[visible(one, limit=120) for one in table["clean"]],
        corrupted=[visible(one, limit=120) for one in table["corrupted"]],
        correct=[token(one) for one in table["correct"]],
        incorrect=[token(one) for one in table["incorrect"]],
    )
    return "The prompts (a dot is a space)." + more(len(table), "pairs"), shown_table(shown, heads, most=8)


CIRCUIT = Page(
    circuit=edge_circuit,
    explore=lambda run: edge_circuit(run).graph,
    title=_title,
    headline=_headline,
    figures=(
        Drawn(key="circuit", title="The circuit", make=_picture, data=whole("circuit"), on_page=False),
        Drawn(key="circuit-talk", title="For a talk", make=sketched("talk"), data=whole("circuit"), on_page=False),
        Drawn(key="circuit-paper", title="For a paper", make=sketched("paper"), data=whole("circuit"), on_page=False),
        Drawn(key="curve", title="How faithful it is", make=_curve, data=whole("curve")),
    ),
    tables=(
        Listed(key="edge-table", title="Edges", make=_edge_table),
        Listed(key="node-table", title="Nodes", make=_node_table),
        Listed(
            key="curve-table",
            title="The curve",
            make=listed_table(
                "curve",
                "Every circuit that was run.",
                {
                    "by": "circuit of",
                    "share": "share",
                    "connected": "connected edges",
                    "nodes": "nodes",
                    "value": "metric",
                    "faithfulness": "faithfulness",
                    "low": "from",
                    "high": "to",
                },
                need=("by", "share", "connected", "faithfulness"),
            ),
        ),
        Listed(key="check-table", title="Scores beside real patches", make=_check_table, when=has_table("check")),
        Listed(key="node-check", title="Real patches of nodes", make=_node_check_table, when=has_table("check_nodes")),
        Listed(key="core-table", title="Core and contingent edges", make=_core_table, when=has_table("core")),
        Listed(key="pair-table", title="The prompts", make=_pair_table),
    ),
)

"""Path patching: the effect of a sender on the metric through one receiver only.

There are three steps, all on the patched sequences (corrupted for denoising, clean for noising):

1. Read both runs: the sender's value in the source run, and, in the baseline run, the output that every attention
   layer and every MLP adds to the stream.
2. Repeat the baseline run with the sender's value replaced, and with every sublayer output between sender and receiver
   *frozen* at its baseline value. Only the residual stream, and the sender's and receiver's own sublayers, carry the
   change. Keep the receiver's value in this run.
3. Repeat the baseline run with the receiver set to this value and everything after it computed as usual. The metric of
   this run is the result.

The frozen outputs are ``attn_out`` and ``mlp_out`` of the layers in between, and those in the sender's and receiver's
own layers that are computed after the sender and before the receiver. The sender's own sublayer is not frozen, because
the sender reaches the stream through it. Norms are recomputed. With ``freeze="attention"`` the MLPs in between are
recomputed as well, as in Wang et al., where a path runs through residual connections and MLPs.

Reference: Wang et al., arXiv 2211.00593, appendix B; Goldowsky-Dill et al., arXiv 2304.05969.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..data.described import BosCondition
from ..data.tokens import TokenBatch
from ..edits.constructors import ORDER, Edit, Where, freeze, part_of
from ..edits.hooks import check_edits
from ..edits.metrics import Metric, as_metric, evaluate
from ..edits.outcome import Outcome
from ..engine.baseline_run import BaselineRun
from ..engine.cells import cell_of
from ..engine.engine import outcomes
from ..engine.forward import run_with
from ..engine.needs import Needs
from ..engine.plan import even_plan_of
from ..engine.trust import check_plan
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.sites import SITES
from ..records import display
from .activation import measured_run
from .pairs import Direction, Sequences, pair_prompts
from .parts import cells, place

Frozen = Literal["all", "attention"]
"""The outputs that are frozen between sender and receiver."""

_SUBLAYER = {"attn_out": ("attn_in", "attn_out"), "mlp_out": ("mlp_in", "mlp_out")}
"""Output of a sublayer -> the first and last site of the sublayer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A sender or receiver: a part of a site at one layer, where a path begins or ends."""

    site: str
    layer: int
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None

    def put(self, value: Tensor) -> Edit:
        """Make an edit that replaces this part by the same part of a given tensor."""
        layer = self.layer if SITES[self.site].per_layer else 0
        at = {"layers": (layer,), "label": f"path through {self.site}"}
        return freeze(self.site, {layer: self.of(value)}, **at, **self._chosen)

    def of(self, value: Tensor) -> Tensor:
        """Select this part from the site's whole tensor."""
        return part_of(value, self.site, Where(**self._chosen))

    @property
    def _chosen(self) -> dict[str, Any]:
        where = {"positions": self.positions, "heads": self.heads, "units": self.units}
        return {name: indices for name, indices in where.items() if indices is not None}


Path = Node | tuple[str, int] | tuple[str, int, int]
"""A node, given as a ``Node``, as (site, layer) or as (site, layer, head)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathResult:
    """The effect of each sender through the receiver."""

    frame: pd.DataFrame
    """One row per sender: ``site``, ``layer``, ``head`` (missing unless the sender is one head), ``value``,
    ``effect`` and ``normalised_effect`` as in ``PatchResult``, ``n``."""
    receiver: Node
    metric: str
    direction: Direction
    baseline: float
    source: float
    differences: pd.DataFrame = field(repr=False)
    """The positions at which the clean and the corrupted tokens differ."""

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
        return {"paths": self.frame, "differences": self.differences}

    def _repr_html_(self) -> str:
        said = f"through {self.receiver}, {self.direction}: {self.metric} is {self.baseline:.4g} in the baseline run."
        return display.html(said, self.frame)


def path_patch(
    lens: ModelLike,
    clean: Sequences,
    corrupted: Sequences,
    *,
    sender: Path | list[Path],
    receiver: Path,
    metric: Metric | Callable[[Outcome], Any],
    direction: Direction = "denoising",
    freeze: Frozen = "all",
    bos: BosCondition = "auto",
    progress: bool = False,
) -> PathResult:
    """Measure the effect of each sender through the receiver alone, directly or also through MLPs.

    Cost: five passes, and a few to compare some senders with passes of the bridge; for each sender the layers and
    positions from its own on, up to the receiver, and those from the receiver on. They are cells of ``engine``.

    Args:
        lens: the model.
        clean: text, texts, token ids or a token batch.
        corrupted: the same number of sequences, with the same lengths.
        sender: the activation to replace: (site, layer), (site, layer, head) or a ``Node``; or a list of these, for a
            sweep over senders.
        receiver: the only activation that receives the change; it must be computed after every sender.
        metric: as in ``patch``.
        direction: as in ``patch``.
        freeze: ``all`` freezes attention and MLPs between sender and receiver; ``attention`` lets MLPs pass on the
            change.
        bos: BOS condition for texts.
        progress: show a progress bar.

    Raises:
        InputError: as in ``patch``; or the receiver is computed before a sender.
        SiteError: the family lacks a site, or edits of a site have no effect on this bridge.
    """
    lens = as_lens(lens)
    pair = pair_prompts(lens, clean, corrupted, bos=bos)
    run, source = pair.run_and_source(direction)
    measured = as_metric(metric, lens=lens, n_positions=run.n_positions)
    senders = [
        _node(lens, one, n_positions=run.n_positions) for one in (sender if isinstance(sender, list) else [sender])
    ]
    if not senders:
        raise InputError("no sender was given; need at least one, such as ('z', 3, 0)")
    end = _node(lens, receiver, n_positions=run.n_positions)
    for one in senders:
        if _moment(one, lens) >= _moment(end, lens):
            raise InputError(
                f"the sender {_node_words(one)} is not computed before the receiver {_node_words(end)}; need a path "
                "forwards"
            )
    sites = {"attn_out", "mlp_out", end.site, *(one.site for one in senders)}
    held = run_with(lens, run, sites=tuple(sites), loss=False, logits="final" in sites).tensors
    given = run_with(lens, source, sites=tuple(sites), loss=False, logits="final" in sites).tensors
    check_edits(
        [one.put(held[place(one.site, one.layer)]) for one in [*senders, end]], lens=lens, n_positions=run.n_positions
    )
    edits = [
        [
            one.put(given[place(one.site, one.layer)]),
            *frozen_edits(lens, sender=one, receiver=end, held=held, which=freeze),
        ]
        for one in senders
    ]
    ending, receiving = _grounds(lens, run, receiver=end, edits=edits, metric=measured)
    baseline = evaluate(measured, ending.read(ending.needs)).double()
    wanted = evaluate(measured, measured_run(lens, source, metric=measured)).double()
    span = float((wanted - baseline).nanmean())
    key = place(end.site, end.layer)
    batches = len(ending.prompts)
    with tqdm(total=2 * len(senders) * batches, desc="path patching", disable=not progress, leave=False) as bar:
        received = outcomes(receiving, edits, needs=receiving.needs, advance=bar.update)
        before = end.of(receiving.read(receiving.needs).tensors[key])
        values = [outcome.tensors[key] for outcome, _ in received]
        puts = [[] if torch.equal(end.of(value), before) else [end.put(value)] for value in values]
        ended = outcomes(ending, puts, needs=ending.needs, advance=bar.update)
    rows = []
    for one, (outcome, _) in zip(senders, ended, strict=True):
        values = evaluate(measured, outcome).double()
        effects = values - baseline
        effect, n = float(effects.nanmean()), int((~effects.isnan()).sum())
        head = one.heads[0] if one.heads is not None and len(one.heads) == 1 else None
        normalised = effect / span if span != 0 else math.nan
        rows.append((one.site, one.layer, head, float(values.nanmean()), effect, normalised, n))
    columns = ["site", "layer", "head", "value", "effect", "normalised_effect", "n"]
    return PathResult(
        frame=pd.DataFrame(rows, columns=columns).astype({"head": "Int64"}),
        receiver=end,
        metric=measured.name,
        direction=direction,
        baseline=float(baseline.nanmean()),
        source=float(wanted.nanmean()),
        differences=pair.differences,
    )


def frozen_edits(
    lens: LensModel, *, sender: Node, receiver: Node, held: Mapping[tuple[str, int], Tensor], which: Frozen
) -> list[Edit]:
    """The edits that freeze every output between sender and receiver at its baseline value."""
    found = []
    for name, (first, last) in _SUBLAYER.items():
        if which == "attention" and name == "mlp_out":
            continue
        layers = []
        for layer in range(lens.n_layers):
            begins, ends = (layer, ORDER[first]), (layer, ORDER[last])
            carries = begins <= _moment(sender, lens) <= ends
            if not carries and _moment(sender, lens) < ends and ends < _moment(receiver, lens):
                layers.append(layer)
        if layers:
            values = {layer: held[name, layer] for layer in layers}
            found.append(freeze(name, values, layers=layers, label=f"frozen {name}"))
    return found


def _grounds(
    lens: LensModel, run: TokenBatch, *, receiver: Node, edits: Sequence[Sequence[Edit]], metric: Metric
) -> tuple[BaselineRun, BaselineRun]:
    """The baseline run as the metric reads it, and with the receiver's tensor, by a plan that was compared."""
    needs, last = Needs.of([metric], lens=lens), not SITES[receiver.site].per_layer
    at = {"keys": needs.keys or (0,), "layers": (receiver.layer,), "sites": (receiver.site,), "positions": None}
    of_receiver = Needs(**at, loss=False, logits=last, state=False, whole=last)
    cells = [cell_of(some, name=str(number)) for number, some in enumerate(edits)]
    plan, _ = check_plan(lens, run, cells, [metric], plan=even_plan_of(lens, run, needs))
    baseline_run = BaselineRun(lens, run, plan=plan, needs=needs)
    return baseline_run, baseline_run.under((), needs=of_receiver)


def _node(lens: LensModel, given: Path, *, n_positions: int) -> Node:
    if not isinstance(given, Node):
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise InputError(f"a path was given as {given!r}; need (site, layer), (site, layer, head) or a Node")
        given = Node(site=given[0], layer=given[1], heads=None if len(given) == 2 else (given[2],))
    chosen = {"layers": (given.layer,), "positions": given.positions, "heads": given.heads, "units": given.units}
    cells(lens, given.site, by=(), n_positions=n_positions, **chosen)  # refuses a node that does not exist
    return given


def _moment(node: Node, lens: LensModel) -> tuple[int, int]:
    """The place of a node in the order of computation, for comparisons."""
    return (node.layer if SITES[node.site].per_layer else lens.n_layers, ORDER[node.site])


def _node_words(node: Node) -> str:
    return f"{node.site} of layer {node.layer}"

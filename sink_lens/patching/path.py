"""Path patching: the effect of a sender s on the metric m through one receiver r only.

    effect = m(x with r := r*) - m(x),    r* = r(x with s := s(y), frozen)

1. Take both runs: x, which is patched (corrupted for denoising, clean for noising), and the source run y.
2. Read s(y), the sender's value in the source run, and the output that every attention layer and every MLP adds to the
   stream in x.
3. Repeat x with the sender set to s(y), and with every sublayer output between sender and receiver *frozen* at its
   value in x. Only the residual stream, and the sender's and receiver's own sublayers, carry the change.
4. Keep the receiver's value in this run, r*.
5. Repeat x with the receiver set to r* and everything after it computed as usual. The metric of this run minus that of
   x is the effect; the normalised effect is its share of m(y) - m(x).

The frozen outputs are what layers in between add to the stream (``attn_out``, ``mlp_out``, a mixer's, Gemma 4's inputs
of a layer), and those in the sender's and receiver's own layers that are computed after the sender and before the
receiver. The sender's own sublayer is not frozen, because the sender reaches the stream through it. Norms are
recomputed. With ``freeze="attention"`` the MLPs in between, and only these, are recomputed as well, as in Wang et al.,
where a path runs through residual connections and MLPs.

Noising a writer of a circuit's graph through a reader gives minus the exact score of their edge (``circuits.exact``,
in one run each); but a head in front of a norm has the norm's divisor recomputed here.

Reference: Wang et al., arXiv 2211.00593, appendix B; Goldowsky-Dill et al., arXiv 2304.05969.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from ..configuration import check_field_types, make_config
from ..data.described import BosCondition
from ..data.tokens import TokenBatch, positions_in_all, refuse_bos_of_ids
from ..edits.constructors import ORDER, Edit, freeze
from ..edits.effect_table import share_of_difference
from ..edits.hooks import edits_for_model
from ..edits.metrics import Metric, as_metric, check_per_sequence, evaluate
from ..edits.part import Part
from ..engine.baseline_run import BaselineRun
from ..engine.cells import cell_of_edits
from ..engine.engine import outcomes_under_edits
from ..engine.forward import run_with
from ..engine.needs import Needs
from ..engine.plan import choose_even_plan
from ..engine.trust import make_accurate_engine
from ..errors import InputError
from ..models.family import ADDED
from ..models.lens import LensModel, layers_from_zero
from ..models.load import ModelLike, as_lens
from ..models.sites import SITES, site_key
from ..progress import tqdm
from ..records import display
from ..signatures import takes
from .carried import UNLIKE, unlike_text
from .config import refuse_equal_tokens
from .pairs import Direction, Sequences, pair_prompts
from .parts import parts_to_patch
from .run_pair import run_batches

Frozen = Literal["all", "attention"]
"""The outputs that are frozen between sender and receiver."""

_BEGINS = {"attn_out": "attn_in", "mlp_out": "mlp_in"}
"""Output of a sublayer -> the first site of the sublayer, if that is another one."""


Path = Part | tuple[str, int] | tuple[str, int, int]
"""A sender or receiver: a ``Part`` of one layer, (site, layer) or (site, layer, head)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConfig:
    """The options of ``path_patch``: both ends of the paths, and the metric."""

    sender: Any = None
    """The activation to replace: (site, layer), (site, layer, head) or an ``edits.Part`` of one layer; or a list of
    these, for a sweep over senders."""
    receiver: Any = None
    """The only activation that receives the change; it must be computed after every sender."""
    metric: Any = None
    """One of ``sink_lens.edits.metrics``, or a function of the logits."""
    direction: Direction = "denoising"
    """As in ``patch``."""
    freeze: Frozen = "all"
    """all freezes what every sublayer between sender and receiver writes; attention lets MLPs pass on the change."""
    bos: BosCondition = "auto"
    """First token of each text."""

    def __post_init__(self) -> None:
        check_field_types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathResult:
    """The effect of each sender through the receiver."""

    frame: pd.DataFrame
    """One row per sender: ``site``, ``layer``, ``head`` (missing unless the sender is one head), ``value``,
    ``effect`` and ``normalised_effect`` as in ``PatchResult``, ``n``."""
    receiver: Part
    metric: str
    direction: Direction
    baseline: float
    source: float
    differences: pd.DataFrame = field(repr=False)
    """The positions at which the clean and the corrupted tokens differ."""
    bos: bool = False
    """True if the prompts begin with BOS."""
    notes: tuple[str, ...] = field(default=(), repr=False)
    """Notes on the model, such as that its weights are quantised."""

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Name -> table: the effect of each path, and the positions at which the prompts differ."""
        return {"paths": self.frame, "differences": self.differences}

    def __repr__(self) -> str:
        how = f"{self.direction}, {'with' if self.bos else 'without'} BOS"
        return f"through {self.receiver}, {how}: {self.metric} is {self.baseline:.4g} in the baseline run."

    def _repr_html_(self) -> str:
        return display.result_html(repr(self), self.frame, notes=self.notes)


@takes(PathConfig)
def path_patch(
    model: ModelLike,
    clean: Sequences,
    corrupted: Sequences,
    *,
    config: PathConfig | None = None,
    progress: bool = True,
    **fields: Any,
) -> PathResult:
    """Measure what replacing each sender does to the metric if its change reaches one receiver alone.

    Cost: five passes, and a few to compare some senders with passes of the bridge; for each sender the layers and
    positions from its own on, up to the receiver, and those from the receiver on. They are cells of ``engine``.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        clean: text, texts, token ids or a token batch.
        corrupted: the same number of sequences, with the same lengths.
        config: sender, receiver, metric and what is frozen; made of the fields if None.
        progress: show a progress bar.
        **fields: fields of ``PathConfig``, such as ``sender=("z", 3, 0)``; they win over those of ``config``.

    Raises:
        InputError: as in ``patch``; or the receiver is computed before a sender.
        SiteError: the family lacks a site, or edits of a site have no effect on this bridge.
    """
    lens, asked = as_lens(model), make_config(PathConfig, config, fields, where="path_patch")
    for name, such in (
        ("sender", "('z', 3, 0)"),
        ("receiver", "('q', 4, 1)"),
        ("metric", "metrics.sink_mass(0)"),
    ):
        if getattr(asked, name) in (None, []):
            raise InputError(f"no {name} was given; need one, such as {such}")
    refuse_bos_of_ids((clean, corrupted), asked.bos)
    pair = pair_prompts(lens, clean, corrupted, bos=asked.bos)
    refuse_equal_tokens(not pair.differences.empty)
    run, source = pair.run_and_source(asked.direction)
    measured = as_metric(asked.metric, lens, pair.clean, pair.corrupted)
    given = asked.sender if isinstance(asked.sender, list) else [asked.sender]
    *senders, end = every = [_read_part(lens, one, tokens=run) for one in (*given, asked.receiver)]
    chosen = [one for part in every for one in (*(part.positions or ()), *(part.keys or ()))]
    if said := unlike_text((one for one in chosen if pair.labels.get(one) == UNLIKE), ends=False):
        warnings.warn(said, stacklevel=2)
    for start in senders:
        if _computation_order(start, lens) >= _computation_order(end, lens):
            raise InputError(
                f"the sender {start.site} of layer {_only_layer(start)} is not computed before the receiver {end.site} "
                f"of layer {_only_layer(end)}; need an earlier sender"
            )
    added = [name for name in ADDED if lens.layers_with(name)]
    sites = tuple({*added, *(part.site for part in every)})
    kept = {"sites": sites, "loss": False, "logits": "final" in sites, "progress": False}
    own, other = (run_with(lens, batch, **kept).tensors for batch in (run, source))
    checked = [_part_edit(part, own[_tensor_key(part)]) for part in every]
    edits_for_model(lens, checked, n_positions=run.n_positions)
    edits = [
        [
            _part_edit(start, other[_tensor_key(start)]),
            *make_frozen_edits(lens, sender=start, receiver=end, baseline=own, which=asked.freeze),
        ]
        for start in senders
    ]
    ending, receiving = _baseline_runs(lens, run, receiver=end, edits=edits, metric=measured)
    before_edits = ending.read_outcome(ending.needs)
    check_per_sequence(measured, before_edits)
    baseline = evaluate(measured, before_edits).detach()
    (of_source,) = run_batches(lens, [source], Needs.of_metrics([measured], lens=lens))
    wanted = evaluate(measured, of_source).detach()
    key = _tensor_key(end)
    batches = len(ending.prompt_batches)
    with tqdm(
        total=2 * len(senders) * batches, desc="path patching", disable=not progress, leave=False
    ) as bar:
        received = outcomes_under_edits(receiving, edits, needs=receiving.needs, advance=bar.update)
        before = end.select(receiving.read_outcome(receiving.needs).tensors[key])
        values = [outcome.tensors[key] for outcome, _ in received]
        puts = [
            [] if torch.equal(end.select(value), before) else [_part_edit(end, value)]
            for value in values
        ]
        ended = outcomes_under_edits(ending, puts, needs=ending.needs, advance=bar.update)
    rows = []
    for start, (outcome, _) in zip(senders, ended, strict=True):
        values = evaluate(measured, outcome).detach()
        # these lack a position of the path
        short = run.lengths < max(start.n_tokens_needed, end.n_tokens_needed)
        values = values.masked_fill(short.any() if measured.whole_batch else short, torch.nan)
        effects = values - baseline
        effect, n = float(effects.nanmean()), int((~effects.isnan()).sum())
        head = start.heads[0] if start.heads and len(start.heads) == 1 else None
        (share,) = share_of_difference(values[None].numpy(), baseline.numpy(), wanted.numpy())
        value = float(values.nanmean())
        rows.append((start.site, _only_layer(start), head, value, effect, float(share), n))
    columns = ["site", "layer", "head", "value", "effect", "normalised_effect", "n"]
    return PathResult(
        notes=lens.notes,
        bos=pair.clean.bos,
        frame=pd.DataFrame(rows, columns=columns).astype({"head": "Int64"}),
        receiver=end,
        metric=measured.name,
        direction=asked.direction,
        baseline=float(baseline.nanmean()),
        source=float(wanted.nanmean()),
        differences=pair.differences,
    )


def make_frozen_edits(
    lens: LensModel,
    *,
    sender: Part,
    receiver: Part,
    baseline: Mapping[tuple[str, int], Tensor],
    which: Frozen,
) -> list[Edit]:
    """Hold what attention, or every sublayer, writes between both parts at its ``baseline`` values."""
    found, start, end = [], _computation_order(sender, lens), _computation_order(receiver, lens)
    for name in ADDED:
        if which == "attention" and name == "mlp_out":
            continue
        begins = ORDER[_BEGINS.get(name, name)]  # the sublayer that holds the sender carries it
        layers = [
            layer
            for layer in lens.layers_with(name)
            if start < (layer, begins) and (layer, ORDER[name]) < end
        ]
        if layers:
            values = {layer: baseline[name, layer] for layer in layers}
            found.append(freeze(name, values, layers=layers, label=f"frozen {name}"))
    return found


def _baseline_runs(
    lens: LensModel,
    run: TokenBatch,
    *,
    receiver: Part,
    edits: Sequence[Sequence[Edit]],
    metric: Metric,
) -> tuple[BaselineRun, BaselineRun]:
    """Return two baseline runs for cells of ``edits``: one keeps what the metric reads, one the receiver's tensor."""
    needs, last = Needs.of_metrics([metric], lens=lens), not SITES[receiver.site].per_layer
    of_receiver = Needs(
        keys=needs.keys or (0,),
        layers=(_only_layer(receiver),),
        sites=(receiver.site,),
        positions=None,
        loss=False,
        logits=last,
        state=False,
        whole=last,
    )
    cells = [cell_of_edits(some) for some in edits]
    plan = choose_even_plan(lens, run, needs)
    plan = make_accurate_engine(lens, run, cells, [metric], plan=plan).plan
    baseline_run = BaselineRun(lens, run, plan=plan, needs=needs)
    return baseline_run, baseline_run.with_edits((), needs=of_receiver)


def _read_part(lens: LensModel, given: Path, *, tokens: TokenBatch) -> Part:
    if not isinstance(given, Part):
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise InputError(
                f"a path was given as {given!r}; need (site, layer), (site, layer, head) or an edits.Part"
            )
        site, layer, *head = given
        given = Part(site=site, layers=(layer,), heads=tuple(head) or None)
    if given.layers is None or len(given.layers) != 1:
        raise InputError(f"a path begins or ends in one layer; found {given}: give layers=(5,)")
    places = {
        name: positions_in_all(own, tokens, of=f"the part {given}")
        for name in ("positions", "keys")
        if (own := getattr(given, name)) is not None
    }
    given = replace(given, layers=layers_from_zero(given.layers, lens.n_layers), **places)
    # refuses what does not exist
    parts_to_patch(lens, given.site, by=(), n_positions=tokens.n_positions, **given.where)
    return given


def _only_layer(part: Part) -> int:
    assert part.layers is not None  # ``_read_part`` refuses it
    return part.layers[0]


def _tensor_key(part: Part) -> tuple[str, int]:
    return site_key(part.site, _only_layer(part))


def _part_edit(part: Part, value: Tensor) -> Edit:
    _, layer = _tensor_key(part)
    where = {**part.where, "layers": (layer,), "label": f"path through {part.site}"}
    return freeze(part.site, {layer: part.select(value)}, **where)


def _computation_order(part: Part, lens: LensModel) -> tuple[int, int]:
    return (_only_layer(part) if SITES[part.site].per_layer else lens.n_layers, ORDER[part.site])

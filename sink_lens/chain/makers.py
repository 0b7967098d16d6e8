"""The makers of the sink: parts that write to its position, ranked by a screen and confirmed by ablating sets of them.

A set S of parts removes the share (A - A_S) / mean A of the sink: A is the attention to the sink in a sequence, A_S the
same with S ablated. The mean share over sequences less its standard error counts, since sequences may differ. The
search is our own.

1. Rank neurons, heads, a hybrid's mixers and Gemma 4's inputs of a layer (each one part a layer), the token's and the
   position's embedding and biases of the keys of *all* layers by the largest magnitude of their screens (``screen``),
   each over its own largest. An embedding has a screen only where most of the stream's direct effect on the keys is its
   own; if not, it is in every set below if the longest prefix (256 parts) removes half of the sink with it, and not
   without it.
2. On the sequences that the screen saw, ablate prefixes of the ranking together, to find by bisection the shortest that
   removes half, and four fifths, of the sink. If the longest removes less than half, the sets are empty.
3. Thin each: leave out what can be left out while the share still goes. It is a small set, not the smallest, and holds
   the smaller one.
4. *All makers* begin with a set that removes nearly all that the longest prefix removes, thinned while 98% of what its
   own prefix removes still goes, and those of the next parts that each remove clearly more with it.
5. Other parts can make the sink as well: those before the last gap in the integrated effects behind that set, where one
   part (with more than noise, ``LEAST_EFFECT``) has at least ``GAP`` times the effect of the next, belong to them, kind
   by kind, if those of a kind remove a quarter of the sink without that set; so does every one of the ``NEXT`` highest
   parts that alone removes that much. Embeddings that are in every set count with neither: a quarter more than they
   remove alone is asked, and a kind is thinned.
6. A maker whose ablation, alone or with its like of the same layer, takes half of what a later neuron among the makers
   has at the sink position over its mean elsewhere is *upstream* of that neuron: ablating the one or the other is the
   same cut. 32 are asked alone; what feeds none *writes*.
7. On other sequences (the same where none are left), ablate every set beside random sets of the same size and layers,
   with the loss of each. Where a layer has one such part, the random one is of another layer; an embedding has none.

To ablate is to set a part to its mean over ordinary tokens at the sink position (``mean_ordinary``), a key's bias to 0
at all keys, and a sink logit to nothing. In a model without a sink the makers of its massive activation are searched
(without 6, and without the rule on embeddings), or its learned sink logits where it has them: they alone are ranked,
and as each takes attention in its own head, all with an effect are the set, and 2 to 6 are left out. The column
``target`` says which.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..edits.constructors import At, Edit, edit, freeze
from ..edits.effects import fraction_lost
from ..edits.outcome import Outcome
from ..engine.baseline_run import BaselineRun
from ..measures.reductions import widen
from ..models.weights import attention_weights
from ..progress import progress_bar
from ..schema import column_names
from ..text import join_and
from .config import FEW_CONTROLS
from .screen import SCREENS, SITE_OF, Target, embedding_unit, read_embeddings, screen_parts
from .setting import (
    WHOLE,
    Edits,
    Kind,
    Maker,
    Run,
    Setting,
    draw_other_indices,
    hangs_on_controls,
    marked_units,
)

GOALS = {"half": 0.5, "four fifths": 0.8}
"""Name of a set -> share of the sink that it must remove on the sequences on which it is chosen. What it removes on
others is measured, and the lower end of that interval is what is said of it."""
SILENCED = 0.5
"""A part is upstream of a neuron if ablating it takes at least this share of the neuron's activation over elsewhere."""
MOST_ROLES = 32
"""Most makers that are asked whether they feed another one."""
ALL = "all makers"
SUPER = "super neurons"
UPSTREAM_SET = "upstream of them"
RANDOM = "random"
MOST = 256
"""The longest prefix of the ranking that is ablated."""
GAP = 4.0
LEAST_EFFECT = 5e-4
"""Gaps below this share of the largest effect are noise."""
NEARLY = 0.95
"""All makers remove at least this share of what the longest prefix removes."""
UPSTREAM = 0.25
THINNED = 0.98
"""All makers, thinned, remove at least this share of what their prefix removes."""
NEXT = 8
ADDS = 0.02
"""A part that is tried so is one of the makers if ablating it as well removes this much more of the sink."""
_BEFORE_MLP = ("head", "mixer")
"""Kinds of parts that come before the neurons of their layer."""
LISTED = 64
"""Number of parts at the top of the ranking that the table lists; parts of the chosen sets are listed as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """Makers of the sink that were found on the sequences set aside for the search."""

    target: Target
    ranking: pd.DataFrame
    sets: Mapping[str, tuple[Maker, ...]]
    """Set -> its parts in the order of the ranking; a goal that no prefix reaches has none."""
    alone: Mapping[Maker, float]
    """Share of the sink that each part of a set removes alone."""
    feeds: Mapping[Maker, tuple[Maker, ...]]
    """Maker -> the neurons among the makers that are silent without it."""


def choose_makers_target(setting: Setting, *, lacks_sink: bool) -> Target | None:
    """Choose the quantity whose makers are searched: the sink, or in a model that ``lacks_sink`` what it has instead.

    That is its sink logits, else its outlier dimensions; None if it has neither.
    """
    if not lacks_sink:
        return "sink"
    if setting.lens.family.sink_logit and bool(
        (setting.null_mass > setting.config.threshold).any()
    ):
        return "sink logit"
    return "outlier dimensions" if setting.location.outliers else None


def find_makers(
    setting: Setting,
    *,
    target: Target = "sink",
    kinds: Collection[Kind] | None = None,
    layers: Collection[int] | None = None,
    progress: bool = False,
) -> Makers:
    """Find the makers of ``target``: rank all parts that write to the sink position, and find the sets that make it.

    Cost: the screen, and some 20 to 80 passes of the bridge, most of which run only some of the layers.

    Args:
        setting: the sequences to search on, and where the sink is (``make_setting``). The sink is read in its
            ``sink_layers``; ``dataclasses.replace(setting, read_layers=...)`` reads it in others, such as those behind
            one growth step (``setting.segments``).
        target: the quantity that ablating the makers takes away.
        kinds: kinds of parts among which makers are searched, such as ``["neuron"]``; all if None.
        layers: layers of these parts; all if None.
        progress: show progress bars.
    """
    table = screen_parts(setting, target=target, progress=progress)
    for column, among in (("kind", kinds), ("layer", layers)):
        table = table if among is None else table.loc[table[column].isin(list(among))]
    table = table.assign(score=table[list(SCREENS)].abs().max(axis=1))
    ranking = table.sort_values("score", ascending=False, kind="stable", ignore_index=True)
    ranking.insert(0, "rank", range(1, len(ranking) + 1))
    parts = _parts_of(ranking)
    beside = tuple[Maker, ...]()
    if target == "sink" and kinds is None and layers is None:
        embedded = [
            Maker(kind=kind, layer=-1, unit=embedding_unit(setting, kind))
            for kind in read_embeddings(setting)
        ]
        beside = tuple(part for part in embedded if part not in parts)
    with_effect = parts[: int((ranking["score"].to_numpy() > 0).sum())]
    parts += beside
    shares = _RemovedShares(setting=setting, target=target, order=parts)
    if target == "sink logit":  # each takes attention in its own head
        every = dict.fromkeys((*GOALS, ALL), tuple(with_effect))
        return Makers(
            target=target, ranking=ranking, sets=every, alone=shares.alone(with_effect), feeds={}
        )
    longest = with_effect[:MOST]
    if (
        beside
        and shares.of(longest) < GOALS["half"]
        and shares.of([*beside, *longest]) >= GOALS["half"]
    ):
        shares.fixed, ranking = beside, _append_embeddings(ranking, beside)
    sets = _choose_sets(with_effect, shares, progress=progress)
    if sets[ALL]:
        before_gap = _parts_before_gap(ranking, parts, sets[ALL])
        sets[ALL] = _add_strong_parts(
            sets[ALL], shares, before_gap=before_gap, strongest=with_effect[:NEXT]
        )
    listed = [part for part in parts if any(part in some for some in sets.values())][:LISTED]
    feeds = (
        _find_silenced_neurons(setting, sets[ALL], shares.alone(listed)) if target == "sink" else {}
    )
    return Makers(
        target=target, ranking=ranking, sets=sets, alone=shares.alone(listed), feeds=feeds
    )


def _parts_of(table: pd.DataFrame) -> list[Maker]:
    named = zip(table["kind"], table["layer"], table["unit"], strict=True)
    return [Maker(kind=kind, layer=int(layer), unit=int(unit)) for kind, layer, unit in named]


def _append_embeddings(ranking: pd.DataFrame, embeddings: Sequence[Maker]) -> pd.DataFrame:
    rows = pd.DataFrame(map(asdict, embeddings)).assign(score=0.0, **dict.fromkeys(SCREENS, 0.0))
    rows["rank"] = range(len(ranking) + 1, len(ranking) + len(rows) + 1)
    return pd.concat([ranking, rows], ignore_index=True)


@dataclass(slots=True, kw_only=True)
class _RemovedShares:
    """The share of the target that ablating a set of parts removes, less its standard error; measured once a set."""

    setting: Setting
    target: Target
    order: Sequence[Maker]
    """All parts, in the order in which they are ablated."""
    fixed: tuple[Maker, ...] = ()
    """Parts that belong to every set."""
    _known: dict[frozenset[Maker], float] = field(default_factory=lambda: {frozenset(): 0.0})
    _place: dict[Maker, int] = field(init=False)

    def __post_init__(self) -> None:
        self._place = {part: place for place, part in enumerate(self.order)}

    def measure(self, several: Sequence[Sequence[Maker]]) -> None:
        """Ablate several sets of parts in one call; a set that was ablated before is not run again."""
        new = [
            chosen for chosen in dict.fromkeys(map(frozenset, several)) if chosen not in self._known
        ]
        ordered = [sorted(chosen, key=self._place.__getitem__) for chosen in new]
        ablations = [
            _ablation_run(self.setting, parts, target=self.target) for parts in ([], *ordered)
        ]
        (before, *runs) = self.setting.run_each(ablations)
        baseline = _target_size(self.setting, before, self.target)
        for chosen, run in zip(new, runs, strict=True):
            lost = (baseline - _target_size(self.setting, run, self.target)) / baseline.mean()
            self._known[chosen] = float(
                lost.mean() - (lost.std() / len(lost) ** 0.5 if len(lost) > 1 else 0.0)
            )

    def of(self, chosen: Sequence[Maker]) -> float:
        if frozenset(chosen) not in self._known:
            self.measure([chosen])
        return self._known[frozenset(chosen)]

    def with_fixed(self, chosen: Sequence[Maker]) -> float:
        return self.of([*self.fixed, *chosen])

    def alone(self, several: Sequence[Maker]) -> dict[Maker, float]:
        self.measure([[part] for part in several])
        return {part: self.of([part]) for part in several}


def _choose_sets(
    parts: Sequence[Maker], shares: _RemovedShares, *, progress: bool
) -> dict[str, tuple[Maker, ...]]:
    """Choose the set of each goal: the shortest prefix of ``parts`` that reaches it, thinned out; () if none does."""
    longest, fixed, length = shares.with_fixed(parts[:MOST]), shares.fixed, 0
    sets: dict[str, tuple[Maker, ...]] = {}
    goals = GOALS | {ALL: NEARLY * longest}
    for name, goal in progress_bar(list(goals.items()), label="makers", progress=progress):
        length, enough = 0, bool(fixed) and shares.of(fixed) >= goal
        if longest >= GOALS["half"] and not enough:
            most = min(MOST, len(parts))
            length = _shortest_prefix_length(
                lambda size: shares.with_fixed(parts[:size]), goal=goal, most=most
            )
        prefix = parts[:length]
        least = max(goal, THINNED * shares.with_fixed(prefix)) if name == ALL else goal
        inner = [part for part in prefix if any(part in smaller for smaller in sets.values())]
        sets[name] = fixed if length or enough else ()
        if length:
            sets[name] += tuple(_thin_out(prefix, shares.with_fixed, goal=least, keep=inner))
    for part in parts[length : length + NEXT] if sets[ALL] else ():
        if shares.of((*sets[ALL], part)) >= shares.of(sets[ALL]) + ADDS:
            sets[ALL] = (*sets[ALL], part)
    return sets


def _add_strong_parts(
    makers: Sequence[Maker],
    shares: _RemovedShares,
    *,
    before_gap: Sequence[Maker],
    strongest: Sequence[Maker],
) -> tuple[Maker, ...]:
    """Add to all makers the parts ``before_gap`` that remove much as one kind, and the ``strongest`` that do alone."""
    chosen, least = set(makers), UPSTREAM + shares.of(shares.fixed)
    upstream = [part for part in before_gap if part not in chosen]
    for kind in dict.fromkeys(part.kind for part in upstream):
        alike = [part for part in upstream if part.kind == kind]
        if (share := shares.with_fixed(alike)) >= least:
            chosen |= set(
                _thin_out(alike, shares.with_fixed, goal=THINNED * share) if shares.fixed else alike
            )
    shares.measure([[*shares.fixed, part] for part in strongest])
    chosen |= {part for part in strongest if shares.with_fixed([part]) >= least}
    return tuple(part for part in shares.order if part in chosen)


def _find_silenced_neurons(
    setting: Setting, makers: Sequence[Maker], alone: Mapping[Maker, float]
) -> dict[Maker, tuple[Maker, ...]]:
    """Find the neurons that each maker makes fire: maker -> later makers that are neurons and silent without it.

    Only the strongest are tried alone, and only the strongest neurons are read.
    """
    writers = sorted(
        (part for part in makers if part.kind == "neuron"), key=lambda part: -alone.get(part, 0.0)
    )
    writers = writers[:MOST_ROLES]
    layers = sorted({part.layer for part in writers})
    if len(makers) < 2 or not layers:
        return {}
    position, baseline = setting.sink_position, setting.baseline_tensors("neurons", layers=layers)
    means = {layer: setting.mean_ordinary(x)[0, 0] for layer, x in baseline.items()}
    fires = {
        part: float((baseline[part.layer][:, position] - means[part.layer])[:, part.unit].mean())
        for part in writers
    }

    def fed(several: Sequence[Sequence[Maker]]) -> list[tuple[Maker, ...]]:
        edits = [ablation_edits(setting, parts) for parts in several]
        runs = setting.run_each(
            [Run(edits=some, layers=layers, sites=("neurons",)) for some in edits]
        )
        found = []
        for parts, run in zip(several, runs, strict=True):
            silent = []
            for part in writers:
                later = part.layer > parts[0].layer or (
                    part.layer == parts[0].layer and parts[0].kind in _BEFORE_MLP
                )
                if later and part not in parts:
                    left = run.tensors["neurons", part.layer][:, position] - means[part.layer]
                    if abs(float(left[:, part.unit].mean())) <= (1 - SILENCED) * abs(fires[part]):
                        silent.append(part)
            found.append(tuple(silent))
        return found

    early = [part for part in makers if part.layer < layers[-1] + (part.kind in _BEFORE_MLP)]
    strong = sorted(early, key=lambda part: -alone.get(part, 0.0))[:MOST_ROLES]
    found = {
        part: silent
        for part, silent in zip(strong, fed([[part] for part in strong]), strict=True)
        if silent
    }
    groups: dict[tuple[str, int], list[Maker]] = {}
    for part in early:
        if part not in found:
            groups.setdefault((part.kind, part.layer), []).append(part)
    several = [parts for parts in groups.values() if len(parts) > 1]
    for parts, silent in zip(several, fed(several), strict=True):
        found |= {part: silent for part in parts if silent}
    return found


def _shortest_prefix_length(removed: Callable[[int], float], *, goal: float, most: int) -> int:
    """Find how many of the strongest parts it takes to remove the share ``goal``; 0 if ``most`` parts do not."""
    size = 1
    while size < most and removed(size) < goal:
        size = min(2 * size, most)
    if not most or removed(size) < goal:
        return 0
    low, high = size // 2, size  # the prefix of ``low`` misses the goal
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if removed(middle) >= goal else (middle, high)
    return high


def _thin_out(
    parts: Sequence[Maker],
    removed: Callable[[Sequence[Maker]], float],
    *,
    goal: float,
    keep: Sequence[Maker] = (),
) -> list[Maker]:
    """Drop parts, the lowest ranked first, in halves, quarters, ..., as long as the rest removes the share ``goal``."""
    kept = list(parts)
    size = max(1, len(kept) // 2)
    while size >= 1:
        end = len(kept)
        while end > 0 and len(kept) > 1:
            start = max(0, end - size)
            rest = [*kept[:start], *(part for part in kept[start:end] if part in keep), *kept[end:]]
            if rest and len(rest) < len(kept) and removed(rest) >= goal:
                kept = rest
            end = start
        size = size // 2
    return kept


def _parts_before_gap(
    ranking: pd.DataFrame, parts: Sequence[Maker], chosen: Sequence[Maker]
) -> list[Maker]:
    """Return the ``parts`` before the last gap (``GAP``) behind all ``chosen`` parts; [] if there is no gap.

    If nothing is behind the chosen parts, these are all parts with an effect.
    """
    effects = ranking["integrated"].to_numpy()
    order = [
        int(place)
        for place in np.argsort(-effects, kind="stable")[: MOST + 1]
        if effects[place] > 0
    ]
    least = (
        max((number for number, place in enumerate(order) if parts[place] in chosen), default=0) + 1
    )
    if len(order) <= least:
        return [parts[one] for one in order]
    values = effects[order]
    ratios = values[least - 1 : -1] / values[least:]
    gaps = ((ratios >= GAP) & (values[least - 1 : -1] >= LEAST_EFFECT * values[0])).nonzero()[0]
    return [parts[one] for one in order[: least + int(gaps[-1])]] if len(gaps) else []


def ablation_edits(setting: Setting, parts: Iterable[Maker]) -> Edits:
    """Make edits that mean ablate ``parts`` at the sink position, and remove key biases and sink logits everywhere."""
    groups: dict[tuple[Kind, int], list[int]] = {}
    for part in sorted(parts):
        groups.setdefault((part.kind, part.layer), []).append(part.unit)
    position, edits = setting.sink_position, list[Edit]()
    for (kind, layer), units in groups.items():
        if kind == "neuron":
            edits += setting.freeze_unit_edits(
                "neurons", {layer: units}, position=position, mean=True
            )
        elif kind == "head":
            value = setting.mean_ordinary(setting.baseline_tensors("z", layers=[layer])[layer])[
                :, :, units
            ]
            label = f"{len(units)} heads of layer {layer}, mean_ordinary"
            edits.append(
                freeze("z", {layer: value}, positions=[position], heads=units, label=label)
            )
        elif kind in WHOLE:
            edits.append(
                setting.freeze_site_edit(WHOLE[kind], layers=[layer], position=position, mean=True)
            )
        elif kind == "key bias":
            bias = attention_weights(setting.lens, layer=layer).b_k[units]
            label = f"key biases of layer {layer} x 0"
            edits.append(
                edit(
                    "k",
                    lambda k, at, bias=bias: k - bias.to(k.device, k.dtype),
                    layers=[layer],
                    heads=units,
                    label=label,
                )
            )
        elif kind == "sink logit":
            label = f"sink logits of layer {layer} removed"
            edits.append(edit("pattern", _rescale_rows, layers=[layer], heads=units, label=label))
        else:
            edits.append(_embedding_ablation(setting, kind))
    return tuple(edits)


def _embedding_ablation(setting: Setting, kind: Kind) -> Edit:
    written, position = read_embeddings(setting)[kind], setting.sink_position
    over = (written[:, [position]] - setting.mean_ordinary(written)).float()

    def take_away(x: Tensor, at: At) -> Tensor:
        return x - over[at.sequences].to(x.device, x.dtype)

    return edit(
        "resid_pre", take_away, layers=[0], positions=[position], label=f"{kind}, mean_ordinary"
    )


def _rescale_rows(pattern: Tensor, at: At) -> Tensor:
    """Rescale the rows of ``pattern`` to sum to 1: a sink logit's attention goes back to the keys."""
    return pattern / pattern.sum(-1, keepdim=True).clamp(min=torch.finfo(pattern.dtype).tiny)


def _ablation_run(
    setting: Setting,
    parts: Sequence[Maker],
    *,
    target: Target,
    loss: bool = False,
    of: BaselineRun | None = None,
) -> Run:
    edits, layers = ablation_edits(setting, parts), _target_layers(setting, target)
    return Run(
        edits=edits,
        layers=layers,
        loss=loss,
        of=of,
        sites=("pattern",) if target == "sink logit" else (),
        state=target == "outlier dimensions",
    )


def _target_layers(setting: Setting, target: Target) -> list[int]:
    if target == "outlier dimensions":
        return [layer for layer in sorted(setting.location.outliers) if layer >= 0] or [0]
    if target == "sink logit":
        return (setting.null_mass > setting.config.threshold).any(1).nonzero().flatten().tolist()
    return list(setting.sink_layers)


def _target_size(setting: Setting, run: Outcome, target: Target) -> Tensor:
    reads = _target_layers(setting, target)
    if target == "sink":
        return run.mass_at(setting.sink_position, layers=reads)
    if (
        target == "sink logit"
    ):  # attention that goes to no key; the first query, which sees one key, is left out
        patterns = (widen(run.tensors["pattern", layer]) for layer in reads)
        return torch.stack(
            [1 - pattern[:, :, 1:].sum(-1).mean((1, 2)) for pattern in patterns]
        ).mean(0)
    states, lasting = run.state_at(setting.sink_position), setting.lens.remaining_scales
    sizes = [
        lasting[layer + 1]
        * states[run.layers.index(layer)][:, list(setting.location.outliers.get(layer, ()))]
        .abs()
        .sum(-1)
        for layer in reads
    ]
    return torch.stack(sizes).mean(0)


def maker_tables(
    found: Makers | None, testing: Setting, *, progress: bool = False
) -> dict[str, pd.DataFrame]:
    """Make two tables: ``makers``, with a row per part, and ``maker_sets``, with a row per set and random set.

    The sets of makers that were ``found``, and the super neurons, are ablated on the sequences of ``testing``. Both
    tables are empty if no makers were searched (None).
    """
    if found is None:
        return {
            name: pd.DataFrame(columns=column_names("trace", name))
            for name in ("makers", "maker_sets")
        }
    supers = tuple(
        Maker(kind="neuron", layer=layer, unit=unit)
        for layer, units in sorted(marked_units(testing.super_neurons).items())
        for unit in units
    )
    return {
        "makers": _maker_table(found, supers=supers),
        "maker_sets": _maker_set_table(testing, found, supers=supers, progress=progress),
    }


def read_makers(table: pd.DataFrame) -> tuple[Maker, ...]:
    """Read the makers of the sink from the table ``makers``."""
    chosen = table.loc[table["is_maker"].astype(bool) & (table["target"] == "sink")]
    return tuple(_parts_of(chosen))


def _maker_table(found: Makers, *, supers: Sequence[Maker]) -> pd.DataFrame:
    members = {part for some in found.sets.values() for part in some} | set(supers)
    rows = []
    for row in found.ranking.to_dict("records"):
        part = Maker(kind=row["kind"], layer=row["layer"], unit=row["unit"])
        if part in members or row["rank"] <= LISTED:
            is_maker, fed = part in found.sets[ALL], found.feeds.get(part, ())
            role = f"upstream of {join_and(map(str, fed), most=3)}" if fed else "writes"
            said = {"sets": ", ".join(name for name, parts in found.sets.items() if part in parts)}
            said |= {
                "is_maker": is_maker,
                "role": role if is_maker else "",
                "is_super": part in supers,
            }
            rows.append(
                row
                | said
                | {"removed_alone": found.alone.get(part, math.nan), "target": found.target}
            )
    return pd.DataFrame(rows, columns=column_names("trace", "makers"))


def _maker_set_table(
    setting: Setting, found: Makers, *, supers: Sequence[Maker], progress: bool
) -> pd.DataFrame:
    target, generator = found.target, setting.make_generator()
    rng = np.random.default_rng(setting.config.seed)
    upstream = tuple(part for part in found.sets[ALL] if part in found.feeds)
    named = {**found.sets, UPSTREAM_SET: upstream, SUPER: tuple(supers)}
    sets = {name: parts for name, parts in named.items() if parts}
    draws = range(min(setting.config.controls, FEW_CONTROLS))
    first, drawn = dict[frozenset[Maker], str](), dict[str, list[tuple[Maker, ...]]]()
    for name, parts in sets.items():
        if (
            first.setdefault(frozenset(parts), name) == name
        ):  # else its controls are there under the other set's name
            drawn[name] = [
                some for _ in draws if (some := _draw_random_parts(setting, parts, generator))
            ]

    places: dict[str, set[int]] = {}
    for part in chain.from_iterable(sets.values()):
        if part.kind in SITE_OF:
            places.setdefault(SITE_OF[part.kind], set()).add(part.layer)
    setting.read_baseline(places)

    def runs_of(several: Iterable[Sequence[Maker]], *, of: BaselineRun | None = None) -> list[Run]:
        return [
            _ablation_run(setting, parts, target=target, loss=True, of=of)
            for parts in ((), *several)
        ]

    def row(
        parts: Sequence[Maker],
        name: str,
        control_of: str,
        run: Outcome,
        *,
        compared: Outcome,
        rng: np.random.Generator,
    ) -> dict[str, Any]:
        before, after = (_target_size(setting, one, target) for one in (compared, run))
        share = fraction_lost(before, after, generator=rng)
        return {
            "set": name,
            "control_of": control_of,
            "size": len(parts),
            "parts": ", ".join(map(str, parts)),
            "target": target,
            "removed": share.estimate,
            "ci_low": share.low,
            "ci_high": share.high,
            "n_controls": 0,
            "baseline": float(before.mean()),
            "value": float(after.mean()),
            "baseline_loss_nats": math.nan
            if compared.loss is None
            else float(compared.loss.nanmean()),
            "loss_nats": math.nan if run.loss is None else float(run.loss.nanmean()),
            "n": len(before),
        }

    def rows_of_controls(
        name: str,
        several: Sequence[Sequence[Maker]],
        outcomes: Sequence[Outcome],
        rng: np.random.Generator,
    ) -> list[dict[str, Any]]:
        compared, *runs = outcomes
        return [
            row(some, RANDOM, name, one, compared=compared, rng=rng)
            for some, one in zip(several, runs, strict=True)
        ]

    few, longer = (
        setting.control_run(setting.sink_position, whole=whole) for whole in (False, True)
    )
    groups = [runs_of(sets.values()), *(runs_of(some, of=few) for some in drawn.values())]
    (baseline, *made), *beside = setting.run_groups(
        groups, label="maker sets" if progress else None
    )
    outcomes = dict(zip(drawn, beside, strict=True))
    own: dict[str, dict[str, Any]] = {}
    controls: dict[str, list[dict[str, Any]]] = {}
    for (name, parts), run in zip(sets.items(), made, strict=True):
        own[name] = row(parts, name, "", run, compared=baseline, rng=rng)
        some = drawn.get(name)
        controls[name] = [] if some is None else rows_of_controls(name, some, outcomes[name], rng)

    def is_near(name: str, control: Mapping[str, Any]) -> bool:
        return hangs_on_controls(control["removed"], ends=[own[name]["ci_low"]], least=0.0)

    near = {
        name: [at for at, one in enumerate(some) if is_near(name, one)]
        for name, some in controls.items()
        if some and is_near(name, max(some, key=lambda one: one["removed"]))
    }
    closer = {name: [drawn[name][at] for at in some] for name, some in near.items()}
    again = setting.run_groups([runs_of(some, of=longer) for some in closer.values()])
    for name, found_again in zip(near, again, strict=True):
        rng = np.random.default_rng(setting.config.seed)
        rows_again = rows_of_controls(name, closer[name], found_again, rng)
        for at, one in zip(near[name], rows_again, strict=True):
            controls[name][at] = one
    for name, parts in sets.items():
        if some := controls[first[frozenset(parts)]]:
            over = [one["loss_nats"] - one["baseline_loss_nats"] for one in some]
            own[name] |= {
                "control_largest": max(one["removed"] for one in some),
                "n_controls": len(some),
                "control_loss_nats": own[name]["baseline_loss_nats"] + float(np.mean(over)),
            }
    rows = [one for name in sets for one in (own[name], *controls[name])]
    return pd.DataFrame(rows, columns=column_names("trace", "maker_sets"))


def _draw_random_parts(
    setting: Setting, parts: Sequence[Maker], generator: torch.Generator
) -> tuple[Maker, ...]:
    """Draw random other parts, as many of each kind and layer as in ``parts``; fewer if there are not enough."""
    lens, drawn = setting.lens, list[Maker]()
    for kind, site in WHOLE.items():
        taken = [part.layer for part in parts if part.kind == kind]
        others = torch.tensor(
            [layer for layer in lens.layers_with(site) if layer not in taken], dtype=torch.long
        )
        for layer in (
            others[torch.randperm(len(others), generator=generator)[: len(taken)]].tolist()
            if taken
            else ()
        ):
            drawn.append(Maker(kind=kind, layer=layer, unit=0))
    groups: dict[tuple[Kind, int], list[int]] = {}
    for part in parts:
        groups.setdefault((part.kind, part.layer), []).append(part.unit)
    for (kind, layer), units in groups.items():
        sizes = {"head": lens.n_heads, "sink logit": lens.n_heads}
        if kind == "key bias":
            sizes[kind] = lens.head_sizes(layer)["n_kv_heads"]
        elif kind == "neuron":
            sizes[kind] = lens.n_neurons(layer)
        chosen = draw_other_indices(units, n=sizes.get(kind, 0), generator=generator)
        drawn += [Maker(kind=kind, layer=layer, unit=unit) for unit in chosen]
    return tuple(drawn)

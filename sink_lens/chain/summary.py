"""The headline numbers of a trace."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.precision import Rounding
from ..activations.sink_mask import fewest_tokens_for_rates
from ..data.tokens import TokenBatch
from ..schema import column_names
from ..stats import Interval, mean_interval, studentised_interval
from ..text import as_ranges, join_and
from .at_token import Occurrences
from .config import TraceConfig
from .inputs import MarkedTokens
from .locate import onset_layer
from .measure import Panel
from .page.words import ANY_TOKEN, FEWEST, binding_sentence, makers_comparison
from .placement import binding_kind

_LEAST_MISSING = 0.01
"""Mean attention to no key from which rows count as summing to less than 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The studied sequences, and their readings."""

    batch: TokenBatch
    panel: Panel
    there: Occurrences | None
    aligned: bool
    """Each sequence was cut so that its sink stands at the same position."""
    uncut: int
    """Sequences left out since they could not be cut so."""
    elsewhere: tuple[int, ...]
    """Positions of the sink in sequences that were left out."""
    lacking: int
    """Sequences left out since they have no sink."""
    n_asked: int
    """Sequences before some of them, besides ``uncut``, were left out."""
    kept: Tensor
    """Indices among those."""

    @property
    def too_few_sequences(self) -> bool:
        return self.lacking > 0 and self.batch.n_sequences < FEWEST


def summary_table(
    located: Located,
    frames: Mapping[str, pd.DataFrame],
    *,
    config: TraceConfig,
    rounded: Rounding | None,
    marked: MarkedTokens | None,
    own_attention: bool,
) -> pd.DataFrame:
    panel, there, elsewhere = located.panel, located.there, located.elsewhere
    location, rng = panel.location, np.random.default_rng(config.seed)
    layers, neurons = frames["layers"], frames["neurons"]
    rows: list[tuple[object, ...]] = []

    def add(
        quantity: str, value: float | int | str | Interval | None, unit: str = "", note: str = ""
    ) -> None:
        low = high = np.nan
        if isinstance(value, Interval):
            value, low, high = value.estimate, value.low, value.high
        rows.append((quantity, value, low, high, unit, note))

    note = f"no position has a sink rate of {config.min_sink_rate:g}; this one is studied"
    add("sink_position", location.sink_position, "position", "" if location.sink_found else note)
    if located.aligned:
        note = "each sequence has its sink at another position; each was cut so that its sink stands here"
        add("aligned_position", location.sink_position, "position", note)
    if located.uncut:
        note = f"of {located.n_asked + located.uncut} sequences; no sink of theirs has enough tokens around it, "
        note += "and they are left out of everything else"
        add("sequences_uncut", located.uncut, "sequences", note)
    if there is not None:
        note = f"each row is one occurrence of the token; it stands {there.found} times in the sequences"
        add("at_token", there.text, "token", note)
    if elsewhere:
        at = join_and(f"position {place}" for place in dict.fromkeys(sorted(elsewhere)))
        note = f"of {located.n_asked} sequences; their sink is at {at}, and they are left out of everything else"
        add("sequences_elsewhere", len(elsewhere), "sequences", note)
    rates = panel["rate_by_key"].nanmean(dim=(0, 1))[: panel.shortest].nan_to_num(0.0)
    if there is None and not location.sink_found and float(rates.max()) > 0:
        note = f"the position with the highest sink rate, in {float(rates.max()):.1%} of layers and heads"
        add("strongest_position", int(rates.argmax()), "position", note)
        add("strongest_rate", float(rates.max()), "share of layers and heads")
    if len(location.sink_positions) > 1:
        others = list(location.sink_positions[1:])
        add("other_sink_positions", ", ".join(map(str, others)), "position")
        note = "the highest of those positions"
        add("other_sink_rate", float(rates[others].max()), "share of layers and heads", note)
    if marked is not None:
        note = "marked as sinks at other positions than the studied ones, most frequent first"
        add("marked_tokens", join_and(marked.names), "token", note)
        add(
            "marked_sequences",
            marked.n_sequences,
            "sequences",
            f"that have one, of {marked.n_asked}",
        )
        note = "of queries behind the first of them, mean over layers and heads"
        add("marked_attention", marked.attention, "attention", note)
        add(
            "attention_behind_marked",
            marked.to_studied,
            "attention",
            "to the studied position, of the same queries",
        )
    heads = frames["heads"]
    taken = heads.loc[heads["sink_position"].eq(location.sink_position), "null_mass"].to_numpy(
        dtype=float
    )
    if not own_attention and (taken > config.threshold).mean() >= config.min_sink_rate:
        note = f"in which more than {config.threshold:g} of the attention goes to no key, but to a learned sink logit"
        add(
            "sink_logit_rate",
            float((taken > config.threshold).mean()),
            "share of layers and heads",
            note,
        )
    rates = panel.sink_rate(config.threshold)
    if located.lacking:
        note = "the others have less than a quarter of their sink rate at this position, and are left out of all else"
        add("sequences_with_sink", panel.n_sequences, "sequences", note)
        add("sequences_asked", located.n_asked, "sequences")
    rate = mean_interval(rates.numpy(), generator=rng)
    add(
        "sink_rate",
        rate,
        "share of layers and heads",
        f"sink score above {config.threshold:g}, mean over sequences",
    )
    masses = panel.at_sink("sink_mass", location.sink_position).nanmean(dim=(0, 2))
    add("sink_mass", mean_interval(masses.numpy(), generator=rng), "mass")
    missing = panel["null_mass"]
    if own_attention and not bool(missing.isnan().any()) and float(missing.mean()) > _LEAST_MISSING:
        note = "rows of the pattern sum to less than 1: a head can attend to nothing without a sink"
        add(
            "attention_to_no_key",
            mean_interval(missing.mean(dim=(0, 2)).numpy(), generator=rng),
            "mass",
            note,
        )
    mass = torch.tensor(layers["sink_score"].to_numpy(dtype=float), dtype=torch.float32)
    note = "first layer whose mean sink score is above the threshold"
    add("onset_layer", onset_layer(mass, threshold=config.threshold), "layer", note)
    add("growth_steps", ", ".join(as_ranges(step.layers) for step in location.steps), "layers")
    if mixing := panel.layers("std:mixer_out"):
        note = "what their state keeps of a token has no key, and no attention to it is measured"
        add("mixer_layers", as_ranges(mixing), "layers", note)
    dimensions, brief = location.lasting_and_brief_dimensions
    note = f"those of most layers first; {len(location.outliers)} layers have some"
    note += f"; in one layer only: {join_and(brief)}" if brief else ""
    add("outlier_dimensions", ", ".join(map(str, dimensions)), "dimension", note)
    add(
        "super_neurons",
        len(neurons.loc[neurons["is_super"], ["layer", "neuron"]].drop_duplicates()),
        "neurons",
    )
    peak = int(layers["dominance_ratio"].to_numpy(dtype=float).argmax())
    add(
        "dominance_ratio",
        float(layers["dominance_ratio"].iloc[peak]),
        "ratio",
        f"largest, after layer {peak}",
    )
    middle = len(layers) // 2
    ranks = panel["effective_rank"][middle].numpy()
    note = f"after layer {middle}, {{}} sink token; all sequences"
    for place, (name, said) in enumerate(
        (("effective_rank", "with the"), ("effective_rank_without", "without any"))
    ):
        add(
            name,
            studentised_interval(ranks[:, place], generator=rng),
            "directions",
            note.format(said),
        )
    add("loss", mean_interval(panel["loss"][0].numpy(), generator=rng), "nats")
    if rounded is not None:
        add("rounding", rounded.at_position, "share of the logits' spread", rounded.sentence())
    if len(frames.get("maker_sets", ())):
        add("makers_beside_super_neurons", makers_comparison(frames))
    if len(frames.get("effects", ())):
        kind = sink_binding(frames["placement"], some=located.lacking > 0)
        add(
            "sink_bound_to",
            kind,
            "",
            binding_sentence(kind, bos="bos" in set(frames["placement"]["token"])),
        )
    return pd.DataFrame(rows, columns=column_names("trace", "summary"))


def sink_binding(placement: pd.DataFrame, *, some: bool = False) -> str:
    """Tell what the sink follows; *some tokens* if only ``some`` sequences have it."""
    kind = binding_kind(placement)
    return "some tokens" if some and kind in ANY_TOKEN else kind


def too_short_sentence(threshold: float) -> str:
    needed = fewest_tokens_for_rates(threshold)
    return f"the sequences, or the attention's windows, are too short to tell of a sink ({needed} tokens are needed)"


def first_sink_answer(
    rates: Float[Tensor, "layer batch position"],
    *,
    config: TraceConfig,
    tokens: TokenBatch,
    position: int | None,
) -> tuple[int | None, str]:
    """Return the sink's position (None: no sink), and a sentence with its sink rate.

    ``rates`` may be of some of the sequences in ``tokens`` only.
    """
    if rates.isnan().all():
        return None, too_short_sentence(config.threshold)
    rate_at = rates.nanmean(dim=(0, 1)).nan_to_num(0.0)
    place = int(rate_at.argmax()) if position is None else position
    n_read, n_positions = rates.shape[1:]
    every, cut = n_read == tokens.n_sequences, n_positions < int(tokens.lengths.min())
    first = f"the first {n_positions} tokens of " if cut else ""
    read = f"in {rate_at[place]:.0%} of heads" + (
        f" on {first}all {n_read} sequences" if every else ""
    )
    after = "" if every else f"after {first}{n_read} of {tokens.n_sequences} sequences: "
    if not bool(rate_at[place] >= config.min_sink_rate):
        has = "comes nearest, with one" if position is None else "has one"
        return None, f"{after}no attention sink so far: position {place} {has} {read}"
    return (
        place,
        f"{after}attention sink at position {place}, {read} (sink score above {config.threshold:g})",
    )

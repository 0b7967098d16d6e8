"""Contraction: how alike a model makes the states of unrelated sequences, and of one sequence's positions.

*Inter-sequence*: the mean cosine between the last-position states of two random sequences. *Intra-sequence*: the mean
cosine between two positions of one sequence. Both are taken of the stream before the first layer, after each
attention, after each MLP, and of the last norm's output. What the states share from the start, such as the embedding
of the last position, is no contraction: the value before the first layer is the *floor*, and *excess* is the value over
it. The *direction* is the unit mean of the last position's unit states.

Reference: arXiv 2602.05927 (the claims; definitions ours).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
import torch

from ..activations.record import stream
from ..activations.views import Reading
from ..chain.chain_measures import chain_measures
from ..data.described import BosCondition
from ..data.tokens import from_tensor
from ..measures.dimensions import outlier_dimensions
from ..measures.reductions import widen
from ..models.lens import LensModel, check_plain_layers
from ..models.load import ModelLike, as_lens
from ..models.packed import unpacked_weight
from ..progress import tqdm
from ..records import Finding
from ..schema import SINK_THRESHOLD
from ..stats import wilson_interval
from .config import check_contraction_length
from .cosine_sums import CosineSums, Place, PredictionCounts, jackknife_interval
from .models_to_measure import RandomSequences

SINK_MEASURES = (
    "sink_mass",
    "uniform_mass",
    "sink_rate",
    "s2_ratio",
    "norm_ratio",
    "dominance_ratio",
    "loss",
)
"""Measures of ``chain_measures`` that are reported beside the contraction."""
_SINK_SEQUENCES, _SINK_LENGTH = 32, 64


@dataclass(frozen=True, kw_only=True)
class Contraction(Finding):
    """Contraction of one model after each sublayer, its direction, and the model's sink measures.

    Its tables are ``summary`` (measure, value, low, high (95%, over sequences), unit), ``layers`` (layer, stage,
    measure (inter, intra), value, low, high, floor, excess, excess_low, excess_high, gain), ``positions`` (layer,
    stage, position, inter, excess (over the same position before the first layer), norm) and ``alignment`` (what,
    which, cosine with the direction, rank (1 is the most aligned), of, event_frac).
    """

    directions: dict[str, np.ndarray]
    """Place, as ``3.mlp`` -> contraction direction [d_model]."""


def contraction(
    model: ModelLike,
    *,
    sequences: int = 128,
    length: int = 64,
    seed: int = 0,
    bos: BosCondition = "without",
    sinks: bool = True,
    progress: bool = True,
) -> Contraction:
    """Measure the mean cosine of states of random sequences, and of one sequence's positions, after each sublayer.

    One pass over the sequences, and one over 32 of them for the sink measures.

    Args:
        model: the model, trained or not.
        sequences: how many, 50 at least.
        length: tokens of each, 10 at least.
        seed: of the sequences.
        bos: ``without``, ``with`` or ``auto``; with BOS position 0 is the same in all sequences.
        sinks: measure the attention to position 0 and what goes with it.
        progress: show a bar.

    Raises:
        InputError: too few sequences, a length that cannot be used, or states that are not finite.
        ModelError: the model is a hybrid, which has no attention in some layers.

    Reference: arXiv 2602.05927 (the claims; definitions ours).
    """
    lens = as_lens(model)
    draws = RandomSequences(sequences=sequences, length=length, seed=seed, bos=bos)
    check_contraction_length(length)
    draws.check_readable_by(lens)
    check_plain_layers(lens)
    sums = CosineSums(lens.n_layers, sequences=sequences, length=length)
    ends = PredictionCounts(lens.d_vocab, lens.d_model)
    last = Reading(
        name="ends",
        sites=("final",),
        function=lambda view: ends.add(view["final"][:, -1], lens=lens),
    )
    readings = [*sums.readings(), last]
    with tqdm(
        total=sequences, desc=lens.name, unit="seq", disable=not progress, leave=False
    ) as bar:
        for chunk in draws.chunks(lens):
            stream(lens, chunk, readings, progress=False)
            bar.update(chunk.n_sequences)
    both = {"inter": sums.inter_cosines(), "intra": sums.intra_cosines()}
    last = sums.places.index((lens.n_layers - 1, "mlp"))
    attention = [index for index, (_, name) in enumerate(sums.places) if name == "attention"]
    cosines: dict[str, np.ndarray] = {}
    for name, found in both.items():
        gain = np.diff(found[:, : last + 1], axis=1, prepend=found[:, :1])
        by_attention = gain[:, attention].sum(1)
        cosines[f"{name}_floor"] = found[:, 0]
        cosines[f"{name}_last"] = found[:, last]
        cosines[f"{name}_excess"] = found[:, last] - found[:, 0]
        cosines[f"{name}_by_attention"] = by_attention
        cosines[f"{name}_by_mlp"] = gain.sum(1) - by_attention
    first = sums.inter_cosines(end=0)
    cosines["inter_excess_first"] = first[:, last] - first[:, 0]
    cosines["discrepancy"] = cosines["inter_excess"] - cosines["inter_excess_first"]
    rows: list[tuple[object, ...]] = [
        (name, *jackknife_interval(found), "cosine") for name, found in cosines.items()
    ]
    most = int(ends.smallest.max())
    share = (most / sequences, *wilson_interval(most, sequences))
    rows.append(("smallest_dimension_share", *share, "share of sequences"))
    beside = _measure_sinks(lens, draws) if sinks else {}
    rows += [(name, value, np.nan, np.nan, unit) for name, (value, unit) in beside.items()]
    summary = pd.DataFrame(rows, columns=["measure", "value", "low", "high", "unit"])
    layers = [_layer_rows(sums.places, name, found) for name, found in both.items()]
    return Contraction(
        tables={
            "summary": summary.astype({"value": float}),
            "layers": pd.concat(layers, ignore_index=True),
            "positions": _position_rows(sums),
            "alignment": _alignment_rows(sums, ends=ends, lens=lens),
        },
        directions={
            f"{layer}.{name}": sums.direction((layer, name)) for layer, name in sums.places
        },
    )


def direction_cosines(directions: Mapping[str, Mapping[str, np.ndarray]]) -> pd.DataFrame:
    """Return the cosine of the contraction directions of every two models of one width.

    ``directions`` is model -> ``Contraction.directions``. ``stage`` is ``last`` (after the last layer) or ``final``
    (after the last norm); ``chance`` is the standard deviation for two random directions, ``1 / sqrt(d_model)``.
    """
    rows: list[tuple[object, ...]] = []
    for (a, of_a), (b, of_b) in combinations(directions.items(), 2):
        ends = (list(one.values())[-2:] for one in (of_a, of_b))
        for name, first, second in zip(("last", "final"), *ends, strict=True):
            if first.shape == second.shape:
                rows.append((a, b, name, float(first @ second), len(first) ** -0.5))
    return pd.DataFrame(rows, columns=["a", "b", "stage", "cosine", "chance"])


def _layer_rows(places: Sequence[Place], measure: str, found: np.ndarray) -> pd.DataFrame:
    """Return a row per place: a measure's cosine, its excess over the first place and gain over the last."""
    value, low, high = jackknife_interval(found)
    excess, excess_low, excess_high = jackknife_interval(found - found[:, :1])
    return pd.DataFrame(
        {
            "layer": [layer for layer, _ in places],
            "stage": [name for _, name in places],
            "measure": measure,
            "value": value,
            "low": low,
            "high": high,
            "floor": found[0, 0],
            "excess": excess,
            "excess_low": excess_low,
            "excess_high": excess_high,
            "gain": np.diff(value, prepend=value[:1]),
        }
    )


def _position_rows(sums: CosineSums) -> pd.DataFrame:
    n, frames = sums.sequences, []
    cosines = {
        place: ((units.double().square().sum(-1) - n) / (n * (n - 1))).numpy()
        for place, units in sums.units.items()
    }
    for layer, name in sums.places:
        columns = {
            "layer": layer,
            "stage": name,
            "position": sums.positions,
            "inter": cosines[layer, name],
            "excess": cosines[layer, name] - cosines[sums.places[0]],
            "norm": (sums.norms[layer, name] / n).double().numpy(),
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _alignment_rows(sums: CosineSums, *, ends: PredictionCounts, lens: LensModel) -> pd.DataFrame:
    """Return the table ``alignment``: the direction's cosine with two tokens and with one dimension.

    The tokens are those most often most and least probable; the dimension is the largest at position 0.
    """
    n = sums.sequences
    final = torch.from_numpy(sums.direction(sums.places[-1]))
    unembedding = lens.plain.get_output_embeddings()
    weight = widen(unpacked_weight(unembedding, dtype=lens.dtype).cpu())
    norm = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float64)
    cosine = (weight @ final.to(weight.dtype)).double() / norm.clamp(min=1e-30)
    rows: list[tuple[object, ...]] = []
    for name, counts, order in (
        ("argmax token", ends.argmax, cosine),
        ("argmin token", ends.argmin, -cosine),
    ):
        which = int(counts.argmax())
        rank = 1 + int((order > order[which]).sum())
        rows.append((name, which, float(cosine[which]), rank, len(counts), int(counts.max()) / n))
    layers = {place: sums.energy[place] for place in sums.places if place[1] == "mlp"}
    place = max(layers, key=lambda one: float(layers[one].max() / layers[one].mean()))
    dimension = int(outlier_dimensions(layers[place])[0])
    direction = sums.direction(place)
    rank = 1 + int((np.abs(direction) > abs(direction[dimension])).sum())
    name = f"largest dimension of position 0, after layer {place[0]}"
    rows.append((name, dimension, float(direction[dimension]), rank, len(direction), np.nan))
    return pd.DataFrame(rows, columns=["what", "which", "cosine", "rank", "of", "event_frac"])


def _measure_sinks(lens: LensModel, draws: RandomSequences) -> dict[str, tuple[float, str]]:
    few = min(_SINK_SEQUENCES, draws.sequences)
    tokens = draws.chunk(lens, 0).tokens[:few, : min(draws.length, _SINK_LENGTH)]
    frame = chain_measures(lens, from_tensor(tokens), threshold=SINK_THRESHOLD)
    elsewhere = (frame["measure"] == "sink_rate") & (frame["threshold"] != SINK_THRESHOLD)
    rows = frame.loc[frame["layer"].isna() & frame["measure"].isin(SINK_MEASURES) & ~elsewhere]
    return {
        str(row["measure"]): (float(row["value"]), str(row["unit"]))
        for row in rows.to_dict("records")
    }

"""The exact split of each growth step into neuron x column contributions, and the super neurons in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..measures import neurons as measures
from ..models.experts import expert_width, mlp_submodules
from ..models.lens import LensModel
from ..models.weights import MlpWeights, mlp_weights, norm_weights
from ..schema import column_names
from .locate import GrowthStep
from .measure import Panel

_TYPES = (
    dict.fromkeys(
        ("layer", "neuron", "expert", "sink_position", "outlier_dimension", "top_dimension"),
        "int64",
    )
    | dict.fromkeys(("activation", "spike_ratio", "contribution", "contribution_share"), "float32")
    | dict.fromkeys(("column_kurtosis", "routed_share"), "float32")
    | {"gate_norm_rank": "Int64", "up_norm_rank": "Int64", "is_super": "bool"}
)
"""Types of the columns of ``neurons`` and ``experts``; ranks are missing without such a projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """One growth layer's change of the step's outlier dimension at one position, split by neurons.

    Numbers are in units of the last layer's stream (``LensModel.remaining_scales``).
    """

    layer: int
    step: GrowthStep
    position: int
    terms: Float[Tensor, "batch neuron"]
    """Over neurons they sum to the MLP's output there, less its bias."""
    change: Float[Tensor, " batch"]
    error: float
    """Largest difference between that sum with the bias and the output, over the change."""
    is_super: Bool[Tensor, " neuron"]


def mlp_contributions(
    lens: LensModel,
    weights: MlpWeights,
    *,
    layer: int,
    activations: Float[Tensor, "batch neuron"],
    dimension: int,
) -> tuple[Float[Tensor, "batch neuron"], Float[Tensor, " batch"]]:
    """Compute what each neuron, and the bias, contributes to one ``dimension`` of the output of an MLP.

    That is after the family's norm of the output, if it has one.
    """
    column = weights.w_down[dimension].float()
    bias = weights.b_down[dimension].float().expand(len(activations))
    norm = norm_weights(lens, layer=layer, which="mlp_post_norm")
    if norm is None:
        return measures.contributions(activations, weights=column), bias
    output = activations @ weights.w_down.float().T + weights.b_down.float()
    scale, gain = 1 / norm.divisor(output), float(norm.gain[dimension])
    mean_weights = weights.w_down.float().mean(0) if norm.centred else None
    terms = measures.contributions(
        activations, weights=column, scale=scale, gain=gain, mean_weights=mean_weights
    )
    shift = weights.b_down.float().mean() if norm.centred else 0.0
    return terms, (bias - shift) * scale * gain + norm.bias[dimension]


def split_growth_layers(
    lens: LensModel, panel: Panel, *, super_share: float, chosen: Sequence[int] | None = None
) -> list[LayerSplit]:
    """Split each growth layer's change of the outlier dimension by neurons, at every sink position.

    Super neurons have at least ``super_share`` of the change on the ``chosen`` sequences.
    """
    splits = []
    rows = slice(None) if chosen is None else list(chosen)
    for layer, step in ((layer, one) for one in panel.location.steps for layer in one.layers):
        weights = mlp_weights(lens, layer=layer)
        for position in panel.location.sink_positions:
            index = panel.sink_positions.index(position)
            active = panel.at_layer("neurons_at_sinks", layer)[:, index].to(weights.w_down.device)
            terms, bias = mlp_contributions(
                lens, weights, layer=layer, activations=active, dimension=step.dimension
            )
            by = lens.remaining_scales[layer]
            terms, bias = by * terms.cpu(), by * bias.cpu()
            added = {
                site: by * panel.at_layer(f"{site}_at_sinks", layer)[:, index, step.dimension]
                for site in lens.added_sites(layer)
            }
            output, change = added["mlp_out"], torch.stack([*added.values()]).sum(0)
            share = measures.contribution_share(terms[rows], change=change[rows])
            splits.append(
                LayerSplit(
                    layer=layer,
                    step=step,
                    position=position,
                    terms=terms,
                    change=change,
                    error=float(
                        ((terms.sum(1) + bias - output).abs() / change.abs().clamp(min=1e-6)).max()
                    ),
                    is_super=measures.super_neurons(share, share=super_share),
                )
            )
    return splits


def neurons_of_same_experts(lens: LensModel, units: Sequence[int], *, layer: int) -> list[int]:
    """Return all neurons of the experts of ``units``; [] without experts, or if no other expert is left.

    A shared expert, or a dense MLP beside routed experts, counts as one.
    """
    if lens.family.experts is None or not units:
        return []
    parts = mlp_submodules(lens.layer(layer).get_submodule(str(lens.family.mlp)))
    expert = torch.zeros(lens.n_neurons(layer), dtype=torch.long)
    if "experts" in parts:
        size, n = expert_width(parts["experts"]), parts["experts"].num_experts
        expert = (torch.arange(len(expert)) // size).clamp(max=n)
    same = torch.isin(expert, expert[list(units)])
    return [] if bool(same.all()) else same.nonzero().flatten().tolist()


def super_neurons_of_layer(splits: list[LayerSplit], *, layer: int) -> Bool[Tensor, " neuron"]:
    """Mark those at one or more of the sink positions."""
    return torch.stack([split.is_super for split in splits if split.layer == layer]).any(0)


def super_units_of_layer(splits: list[LayerSplit], *, layer: int) -> list[int]:
    return super_neurons_of_layer(splits, layer=layer).nonzero().flatten().tolist()


def neuron_table(lens: LensModel, panel: Panel, splits: list[LayerSplit]) -> pd.DataFrame:
    frames = []
    for split in splits:
        layer, index = split.layer, panel.sink_positions.index(split.position)
        weights = mlp_weights(lens, layer=layer)
        activations = panel.at_layer("neurons_at_sinks", layer)[:, index]
        spike = measures.spike_ratio(
            activations, elsewhere=panel.at_layer("neurons_elsewhere", layer)
        )
        n_neurons = activations.shape[1]
        ranks = [
            [pd.NA] * n_neurons
            if weight is None
            else measures.norm_rank(measures.row_norms(weight)).cpu().numpy()
            for weight in (weights.w_gate, weights.w_up)
        ]
        gate_rank, up_rank = (pd.array(rank, dtype="Int64") for rank in ranks)
        frames.append(
            pd.DataFrame(
                {
                    "layer": layer,
                    "neuron": range(n_neurons),
                    **(
                        {}
                        if lens.d_expert is None
                        else {"expert": np.arange(n_neurons) // lens.d_expert}
                    ),
                    "sink_position": split.position,
                    "activation": activations.mean(0).numpy(),
                    "spike_ratio": spike.numpy(),
                    "contribution": split.terms.mean(0).numpy(),
                    "contribution_share": measures.contribution_share(
                        split.terms, change=split.change
                    ).numpy(),
                    "outlier_dimension": split.step.dimension,
                    "gate_norm_rank": gate_rank,
                    "up_norm_rank": up_rank,
                    "column_kurtosis": measures.column_kurtosis(weights.w_down).cpu().numpy(),
                    "top_dimension": weights.w_down.abs().argmax(0).cpu().numpy(),
                    "is_super": super_neurons_of_layer(splits, layer=layer).numpy(),
                }
            )
        )
    return _join_frames(
        frames, columns=[name for name in column_names("trace", "neurons") if name != "expert"]
    )


def expert_table(
    lens: LensModel, panel: Panel, splits: list[LayerSplit], *, super_share: float
) -> pd.DataFrame:
    frames = []
    for split in splits:
        assert lens.d_expert is not None
        index = panel.sink_positions.index(split.position)
        by_expert = split.terms.unflatten(1, (-1, lens.d_expert)).sum(2)
        routed = (
            panel.at_layer("neurons_at_sinks", split.layer)[:, index].unflatten(
                1, (-1, lens.d_expert)
            )
            != 0
        )
        share = measures.contribution_share(by_expert, change=split.change)
        frames.append(
            pd.DataFrame(
                {
                    "layer": split.layer,
                    "expert": range(by_expert.shape[1]),
                    "sink_position": split.position,
                    "routed_share": routed.any(2).float().mean(0).numpy(),
                    "contribution": by_expert.mean(0).numpy(),
                    "contribution_share": share.numpy(),
                    "outlier_dimension": split.step.dimension,
                    "is_super": measures.super_neurons(share, share=super_share).numpy(),
                }
            )
        )
    return _join_frames(frames, columns=column_names("trace", "experts"))


def _join_frames(frames: list[pd.DataFrame], *, columns: list[str]) -> pd.DataFrame:
    joined = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)
    return joined.astype({name: _TYPES[name] for name in joined})


def selectivity_table(lens: LensModel, panel: Panel, splits: list[LayerSplit]) -> pd.DataFrame:
    rows = []
    for layer in sorted({split.layer for split in splits}):
        weights = mlp_weights(lens, layer=layer)
        x = panel.at_layer("mlp_in_by_position", layer)
        activations = panel.at_layer("neurons_by_position", layer)
        for neuron in super_units_of_layer(splits, layer=layer):
            up_row = weights.w_up[neuron].float().cpu()
            gate_row = up_row if weights.w_gate is None else weights.w_gate[neuron].float().cpu()
            found = measures.selectivity(x, gate_row=gate_row, up_row=up_row)
            for place, position in enumerate(panel.positions.tolist()):
                means = [
                    float(values[:, place].nanmean())
                    for values in (activations[..., neuron], *found)
                ]
                rows.append((layer, neuron, position, *means))
    return pd.DataFrame(rows, columns=column_names("trace", "selectivity"))

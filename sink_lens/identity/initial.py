"""What a model has at its initialisation that might foretell its outlier dimension and its super neurons.

Each statistic is one number a residual dimension, or a neuron of a layer. States are read after a given layer, that
after which the outlier dimension will be. Magnitudes are compared: a sign is as likely as the other.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..activations.record import LayerView, Reading, stream
from ..chain.neurons import output_terms
from ..data.tokens import TokenBatch
from ..models.lens import LensModel
from ..models.weights import attention_weights, mlp_weights
from .measured_models import Draws
from .state_contraction import contraction

DIMENSION_STATISTICS = {
    "contraction": "the contraction direction: mean of the last position's unit states over random sequences",
    "first_state": "the state of position 0, mean over the run's own sequences",
    "any_first_mean": "the state of position 0, mean over all first tokens there are",
    "any_first_std": "the state of position 0, standard deviation over all first tokens there are",
    "embedding_norm": "the norm of the embedding's column",
    "w_o_norm": "the norm of the rows of W_O of all layers",
    "down_row_norm": "the norm of the rows of the down-projections of all layers",
}
"""Statistic of a dimension -> what it is."""
NEURON_STATISTICS = {
    "gate_norm": "the norm of its gate row",
    "up_norm": "the norm of its up row",
    "down_column_norm": "the norm of its down-projection column",
    "first_activation": "its activation at position 0, mean over the run's own sequences",
    "first_contribution": "what it writes to the later outlier dimension at position 0",
}
"""Statistic of a neuron -> what it is."""


def dimension_statistics(lens: LensModel, tokens: TokenBatch, *, draws: Draws, layer: int) -> dict[str, np.ndarray]:
    """The statistics of every residual dimension: name of ``DIMENSION_STATISTICS`` -> d_model numbers.

    Args:
        lens: the model at its initialisation.
        tokens: the run's own sequences.
        draws: the random sequences of the contraction direction.
        layer: after which the states are read.

    Reference: arXiv 2602.05927 (contraction, see ``contraction``; that any of this foretells anything is our question).
    """

    def first_state(view: LayerView) -> Tensor:
        return view["resid_post"][:, 0].double()

    reading = Reading(name="first", sites=("resid_post",), function=first_state, layers=frozenset({layer}))
    own = stream(lens, tokens, [reading])["first", layer]
    size = lens.d_vocab if lens.tokenizer is None else min(lens.d_vocab, len(lens.tokenizer))
    every = stream(lens, torch.arange(size)[:, None], [reading])["first", layer]  # no sample: nothing stands before it
    asked = {"sequences": draws.sequences, "length": draws.length, "seed": draws.seed, "bos": draws.bos}
    direction = contraction(lens, sinks=False, **asked).directions[f"{layer}.mlp"]
    embedding = lens.plain.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    w_o = [attention_weights(lens, layer=one).w_o.flatten(0, 1) for one in range(lens.n_layers)]
    found = {
        "contraction": torch.from_numpy(direction),
        "first_state": own.mean(0),
        "any_first_mean": every.mean(0),
        "any_first_std": every.std(0),
        "embedding_norm": embedding.detach().double().norm(dim=0),
        "w_o_norm": torch.cat(w_o).double().norm(dim=0),
    }
    mlps = [weights for one in range(lens.n_layers) if (weights := mlp_weights(lens, layer=one)) is not None]
    if mlps:
        found["down_row_norm"] = torch.cat([one.w_down.T for one in mlps]).double().norm(dim=0)
    return {name: found[name].abs().cpu().numpy() for name in DIMENSION_STATISTICS if name in found}


def neuron_statistics(
    lens: LensModel, tokens: TokenBatch, *, layers: Sequence[int], dimension: int
) -> dict[str, dict[int, np.ndarray]]:
    """The statistics of every neuron of some layers: name of ``NEURON_STATISTICS`` -> layer -> d_mlp numbers.

    Args:
        lens: the model at its initialisation, with a dense MLP.
        tokens: the run's own sequences.
        layers: those that later have the neurons.
        dimension: the later outlier dimension.
    """
    reading = Reading(
        name="neurons",
        sites=("neurons",),
        function=lambda view: view["neurons"][:, 0].float(),
        layers=frozenset(layers),
    )
    streamed = stream(lens, tokens, [reading])
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in NEURON_STATISTICS}
    for layer in layers:
        weights = mlp_weights(lens, layer=layer)
        assert weights is not None
        activations = streamed["neurons", layer].to(weights.w_down.device)
        terms, _ = output_terms(lens, weights, layer=layer, activations=activations, dimension=dimension)
        gate = weights.w_up if weights.w_gate is None else weights.w_gate
        of_layer = {
            "gate_norm": gate.double().norm(dim=1),
            "up_norm": weights.w_up.double().norm(dim=1),
            "down_column_norm": weights.w_down.double().norm(dim=0),
            "first_activation": activations.double().mean(0).abs(),
            "first_contribution": terms.double().mean(0).abs(),
        }
        for name, values in of_layer.items():
            found[name][layer] = values.cpu().numpy()
    return found

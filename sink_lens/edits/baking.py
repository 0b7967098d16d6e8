"""Edits of weights, taken along: a Hugging Face model that has them inside, for evaluation harnesses and servers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import InputError, SiteError
from ..models.load import ModelLike, as_lens
from ..models.packed import check_stored
from ..models.running import check_unchanged
from .part import in_range

Units = Mapping[int, Sequence[int]]
"""Layer -> neurons, or dimensions."""


def bake(
    lens: ModelLike,
    *,
    neurons: Units | None = None,
    dimensions: Units | None = None,
    entries: Mapping[int, Sequence[tuple[int, int]]] | None = None,
) -> PreTrainedModel:
    """Copy a model and set parts of its down-projections to 0; the copy is an ordinary model to save or hand on.

    ``bake(lens, neurons={11: [1229]}).save_pretrained(folder)`` writes a checkpoint without these neurons. Edits of
    weights hold at every position; what an edit does at some positions only cannot be baked.

    Args:
        lens: the model, which does not change.
        neurons: layer -> neurons whose whole columns become 0, as ``zero("neurons", layers=[...], units=[...])``.
        dimensions: layer -> dimensions that the down-projection no longer writes, its bias included, as
            ``zero("down_out", layers=[...], units=[...])``.
        entries: layer -> pairs (dimension, neuron) of single entries, as ``scalar``.

    Raises:
        InputError: nothing is given, or a layer, neuron or dimension does not exist.
        SiteError: the model is a mixture of experts, whose neurons have no down-projection of their own.
    """
    lens = as_lens(lens)
    check_unchanged(lens)
    if lens.family.experts is not None:
        raise SiteError(
            f"{lens.family.architecture} is a mixture of experts, whose neurons have no down-projection of their own; "
            "need a dense model"
        )
    given: list[Mapping[int, Sequence[Any]]] = [part or {} for part in (neurons, dimensions, entries)]
    if not any(units for part in given for units in part.values()):
        raise InputError("nothing was given to bake; need neurons, dimensions or entries of some layer")
    baked = copy.deepcopy(lens.plain)
    layers: Any = baked.get_submodule(lens.family.layers)
    path = ".".join(part for part in (lens.family.mlp, lens.family.down) if part)
    with torch.no_grad():
        for layer in sorted({layer for part in given for layer in part}):
            module = layers[in_range("layer", layer, lens.n_layers)].get_submodule(path)
            check_stored(module)
            rows = module.weight.T if lens.family.transposed else module.weight
            n_dimensions, n_neurons = rows.shape
            for neuron in given[0].get(layer, ()):
                rows[:, in_range("neuron", neuron, n_neurons)] = 0
            for dimension in given[1].get(layer, ()):
                rows[in_range("dimension", dimension, n_dimensions)] = 0
                if getattr(module, "bias", None) is not None:
                    module.bias[dimension] = 0
            for dimension, neuron in given[2].get(layer, ()):
                rows[in_range("dimension", dimension, n_dimensions), in_range("neuron", neuron, n_neurons)] = 0
    return baked

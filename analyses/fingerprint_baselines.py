"""Four fingerprints that arXiv 2509.26404 compares SeedPrint with: one number for a pair of models, without a null.

Each is near 1 for models that are related. None is a test: what unrelated models score has to be measured on pairs that
are known to be unrelated. The definitions are those of the code that was released with that paper.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from sink_lens.errors import InputError
from sink_lens.models.lens import LensModel
from sink_lens.models.weights import attention_weights, mlp_weights

__all__ = ["cka", "intrinsic_correlation", "invariant_cosine", "parameter_cosine"]

_LAST_LAYERS = 2
"""How many of the last layers ``invariant_cosine`` reads (released code: 10 and 11 of 12)."""


def cka(x: np.ndarray, y: np.ndarray) -> float:
    """Linear centred kernel alignment of two models' states on the same inputs, 0 to 1 (REEF).

    ``|Y'X|^2 / (|X'X| |Y'Y|)`` in Frobenius norms, with each column centred over the inputs. REEF reads the last
    token's residual stream after each layer, each coordinate divided by its standard deviation, on 200 statements of
    TruthfulQA; scale the columns yourself to follow it. It says how alike the states are, and so follows the training
    data as well as the lineage.

    Args:
        x: states of one model, shape (inputs, coordinates).
        y: states of the other; the widths may differ.

    Raises:
        InputError: different numbers of inputs, or states that are the same for every input.

    Reference: arXiv 2410.14273 (REEF).
    """
    if len(x) != len(y):
        raise InputError(
            f"states on {len(x)} and on {len(y)} inputs; need the same inputs for both models"
        )
    x, y = (np.asarray(one, dtype=np.float64) - one.mean(0, dtype=np.float64) for one in (x, y))
    sizes = [float(np.linalg.norm(one.T @ one)) for one in (x, y)]
    if min(sizes) == 0:
        raise InputError("the states do not depend on the input; need inputs that differ")
    return float(np.square(x.T @ y).sum() / (sizes[0] * sizes[1]))


def parameter_cosine(a: LensModel, b: LensModel) -> float:
    """Cosine of all parameters but the embedding and the unembedding, as one vector each, -1 to 1 (PCS).

    Norms' gains begin at 1 in every model and are part of the vector, so that unrelated models of one shape score
    over 0. Where one model has more parameters, what is over the other's number is cut off, as in the released code;
    such a score means nothing. It does not survive a renumbering of neurons or dimensions.

    Reference: arXiv 2312.04828 (PCS in HuRef).
    """
    x, y = (_parameters(one) for one in (a, b))
    n = min(len(x), len(y))
    return _cosine(x[:n], y[:n])


def invariant_cosine(
    a: LensModel, b: LensModel, *, ids: Sequence[int], layers: Sequence[int] | None = None
) -> float:
    """Cosine of three products of weights that renumbering neurons or dimensions leaves alone, -1 to 1 (ICS).

    With E the embeddings of some tokens: ``E W_Q W_K' E'``, ``E W_V W_O E'`` and ``E W_up W_down E'`` of each layer.
    Keys and values are repeated for the query heads that share them. HuRef takes rare tokens, whose embeddings
    training changes least.

    Args:
        a: a model.
        b: another one, with the same tokenizer.
        ids: the tokens, 2 at least; a matrix of ids by ids is made of each product.
        layers: the layers, in both models. Default: the last two.

    Raises:
        InputError: fewer than two tokens, or a layer or token that one of them does not have.

    Reference: arXiv 2312.04828 (HuRef).
    """
    x, y = (_invariants(one, ids=ids, layers=layers) for one in (a, b))
    return _cosine(x, y)


def intrinsic_correlation(a: LensModel, b: LensModel) -> float:
    """Correlation of the weights' standard deviations along the layers, mean over Q, K, V and O, -1 to 1.

    Pearson's correlation of ``std(W_Q)`` of layer 0, 1, ... in one model with that in the other, and so on. The
    shorter sequence of two is interpolated. Two models that were initialised alike and not trained have only noise in
    it. With 2 layers each is 1 or -1; nan with fewer, or where a standard deviation is the same in every layer.

    Reference: arXiv 2507.03014 (Intrinsic Fingerprint; withdrawn by arXiv in April 2026).
    """
    x, y = (_deviations(one) for one in (a, b))
    return float(np.mean([_correlation(x[name], y[name]) for name in x]))


def _parameters(lens: LensModel) -> Float[Tensor, " value"]:
    kept = [
        one.detach().flatten()
        for name, one in lens.plain.state_dict().items()
        if "lm_head" not in name and "embed" not in name
    ]
    return torch.cat([one.double().cpu() for one in kept])


def _invariants(
    lens: LensModel, *, ids: Sequence[int], layers: Sequence[int] | None
) -> Float[Tensor, " value"]:
    if len(ids) < 2 or not 0 <= min(ids) <= max(ids) < lens.d_vocab:
        raise InputError(
            f"{len(ids)} tokens were given; need two or more, from 0 to {lens.d_vocab - 1} in {lens.name}"
        )
    chosen = (
        range(max(0, lens.n_layers - _LAST_LAYERS), lens.n_layers) if layers is None else layers
    )
    if outside := [layer for layer in chosen if not 0 <= layer < lens.n_layers]:
        raise InputError(
            f"layers {outside} were asked for; {lens.name} has 0 to {lens.n_layers - 1}"
        )
    embedding: Any = lens.plain.get_input_embeddings()
    table = embedding.weight.detach()
    embedded = table[torch.tensor(ids, device=table.device)].double()
    products, pairs = [], "token head d_head, other head d_head -> token other"
    for layer in chosen:
        attention, mlp = attention_weights(lens, layer=layer), mlp_weights(lens, layer=layer)
        shared = lens.n_heads // lens.n_kv_heads
        q, k, v = (
            einsum(
                embedded, one.double(), "token d_model, head d_head d_model -> token head d_head"
            )
            for one in (attention.w_q, attention.w_k, attention.w_v)
        )
        k, v = (one.repeat_interleave(shared, dim=1) for one in (k, v))
        out = einsum(
            embedded,
            attention.w_o.double(),
            "token d_model, head d_head d_model -> token head d_head",
        )
        up, down = embedded @ mlp.w_up.double().T, embedded @ mlp.w_down.double()
        products += [einsum(q, k, pairs), einsum(v, out, pairs), up @ down.T]
    return torch.cat([one.flatten().cpu() for one in products])


def _deviations(lens: LensModel) -> dict[str, Float[np.ndarray, " layer"]]:
    weights = [attention_weights(lens, layer=layer) for layer in range(lens.n_layers)]
    return {
        name: np.array([float(getattr(one, name).double().std()) for one in weights])
        for name in ("w_q", "w_k", "w_v", "w_o")
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    n = max(len(x), len(y))
    x, y = (np.interp(np.linspace(0, len(one) - 1, n), np.arange(len(one)), one) for one in (x, y))
    if n < 2 or x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _cosine(x: Tensor, y: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x, y, dim=0))

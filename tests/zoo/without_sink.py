"""Models without a sink that resemble models with one: massive activations, sigmoid attention, random weights."""

from typing import Any

import torch

from sink_lens.models.tiny import BOS_ID, build_random_model
from tests.tiny_families import config_of

from .truth import BROKEN, LINKS, NOTHING, SEEN, Maker, Truth, ZooModel
from .with_sink import fire, mark
from .writing import D_HEAD, D_MLP, HUGE, SLOWEST, draft, last_layers, lock

_UNTRAINED_STD = 0.1
"""Standard deviation that gives 48 dimensions the same products of weights as Hugging Face's 0.02 at width 1200."""
_STD_FIELD = {"opt": "init_std"}
_LEVELLED = ("olmo2", "gemma2", "gemma3", "headnorm", "headnorm_gate")
"""Families in which a norm after the averaging makes all positions alike."""


def spike(*, seed: int, family: str) -> ZooModel:
    """(l) A neuron that BOS triggers writes a massive activation, and the norm before the keys removes it.

    In `llama` the norm before the attention has gain 0 in that dimension. In models with a QK-norm, the norm of the
    keys has gain 0 in the coordinate that reads the dimension.
    """
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    after = last_layers(made, after=layer)
    lock(made, layers=after, reads={made.outlier: made.sign})
    with torch.no_grad():
        for later in after:
            block = made.model.model.layers[later]
            if made.qk_norm:
                block.self_attn.k_norm.weight[SLOWEST::D_HEAD] = 0.0
            else:
                block.input_layernorm.weight[made.outlier] = 0.0
    truth = Truth(
        sink="none",
        feeding=tuple(range(layer + 1)),
        makers=(Maker(kind="neuron", layer=layer, index=index),),
        outliers=dict.fromkeys((layer, *after), (made.outlier,)),
        links=dict(
            zip(
                LINKS,
                (SEEN, BROKEN if made.post_norm else SEEN, SEEN, SEEN, BROKEN, NOTHING),
                strict=True,
            )
        ),
    )
    return ZooModel(
        name="spike", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def sigmoid(*, seed: int, family: str) -> ZooModel:
    """(m) Sigmoid attention with scores near 0: every key gets about one half, so values are summed, not averaged.

    The first position has the smallest aggregated value, not the largest.
    """
    model = draft(family=family, seed=seed, attention="sigmoid").model
    links = dict.fromkeys(LINKS, NOTHING) | {LINKS[0]: BROKEN, LINKS[2]: BROKEN}
    truth = Truth(sink="none", feeding=(0,), outliers={}, links=links)
    return ZooModel(name="sigmoid", family=family, seed=seed, model=model, bos_id=None, truth=truth)


def untrained(*, seed: int, family: str) -> ZooModel:
    """(o) An untrained model as Hugging Face initialises it: biases are 0, gains are 1. Every family of `tiny`."""
    fields: dict[str, Any] = {_STD_FIELD.get(family, "initializer_range"): _UNTRAINED_STD}
    model = build_random_model(config_of(family, **fields), seed=seed, noise=0.0)
    first = BROKEN if family == "headnorm_sigmoid" else SEEN
    links = dict.fromkeys(LINKS, NOTHING) | {LINKS[0]: first, LINKS[2]: BROKEN}
    if first is SEEN:
        links[LINKS[1]] = BROKEN if family in _LEVELLED else SEEN
    if (
        family == "gpt_oss"
    ):  # its seeds lie on both sides of what counts as present, so nothing is said of it
        links[LINKS[1]] = NOTHING
    truth = Truth(sink="none", feeding=(0,), outliers={}, links=links)
    return ZooModel(
        name="untrained", family=family, seed=seed, model=model, bos_id=None, truth=truth
    )

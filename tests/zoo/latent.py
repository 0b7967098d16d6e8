"""A model with latent attention: keys and values are made from one latent, which a norm brings to one length."""

import torch

from sink_lens.models.tiny import BOS_ID

from .truth import Maker, ZooModel
from .with_sink import fire, mark, token_truth
from .writing import D_MLP, HUGE, LATENT, Draft, draft, last_layers

_LOUD = 3.0
"""Weight of the keys on their coordinate of the latent; the norm leaves that coordinate below the root of the width."""


def latent_key(*, seed: int, family: str) -> ZooModel:
    """(am) A neuron that BOS triggers writes a dimension, which alone fills the latent that all heads' keys read.

    One coordinate of the latent reads the dimension. The norm then leaves nothing else of the token, so that its values
    are nearly zero. Queries of `youtu` come from another latent; queries of `deepseek_v2` come from the stream.
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
    for locked in last_layers(made, after=layer):
        _lock(made, layer=locked)
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,),
        makers=(maker,),
        enough=((maker,),),
        dimension=made.outlier,
        family=family,
        n_layers=made.n_layers,
    )
    return ZooModel(
        name="latent_key", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


@torch.no_grad()
def _lock(made: Draft, *, layer: int) -> None:
    """Write a coordinate of the latent that reads the outlier dimension, and keys that read this coordinate alone."""
    attention = made.model.model.layers[layer].self_attn
    rank, nope, value = LATENT["kv_lora_rank"], LATENT["qk_nope_head_dim"], LATENT["v_head_dim"]
    filled, at = made.pick(rank), made.pick(nope)
    into, keys = attention.kv_a_proj_with_mqa.weight, attention.kv_b_proj.weight
    into[filled] = 0.0
    into[filled, made.outlier] = made.sign
    keys[:, filled] = 0.0
    keys[at :: nope + value] = 0.0
    keys[at :: nope + value, filled] = _LOUD
    query, reads = attention.q_proj, made.shared
    if query is None:
        query, reads = attention.q_b_proj, made.pick(LATENT["q_lora_rank"])
        attention.q_a_proj.weight[reads] = 0.0
        attention.q_a_proj.weight[reads, made.shared] = 1.0
    query.weight[at :: nope + LATENT["qk_rope_head_dim"]] = 0.0
    query.weight[at :: nope + LATENT["qk_rope_head_dim"], reads] = 1.0

"""Models whose verdicts were wrong, or said nothing, until a rule was changed: one mechanism each, its truth first."""

from dataclasses import replace

import torch

from sink_lens.models.tiny import BOS_ID

from .truth import BESIDE, NO, PARTLY, YES, Answers, Maker, ZooModel
from .variance import chain_truth, write_chain
from .with_sink import after_w_o, answers, clear, fire, mark, token_truth
from .writing import D_HEAD, D_MLP, D_MODEL, HUGE, N_HEADS, N_KV_HEADS, draft, last_layers, lock

_SMALL = 8.5
"""Size of a dimension that holds some 87% of the token's squared norm, and is less than 25 times its mean."""
_LOUD = 6.0
_WEIGHT = 0.7


def bystanders(*, seed: int, family: str) -> ZooModel:
    """(an) Model (c) whose heads have seven more values each, far larger, that vary as much and that W_O does not read.

    They make nearly all of the variance of the value average. In `olmo2` a norm takes its size away, and the sink
    hangs on the direction alone; in `llama` on the size.
    """
    made = draft(family=family, seed=seed, coded=True)
    chain = write_chain(made)
    attention = made.attention(chain.layer)
    assert attention is not None
    _, _, value, output = attention
    with torch.no_grad():
        for head in range(N_KV_HEADS):
            rows = slice(head * D_HEAD + 17, (head + 1) * D_HEAD)
            value.weight[rows] = 0.0
            value.weight[rows, list(made.codes)] = _LOUD * torch.randn(7, len(made.codes), generator=made.generator)
        for head in range(N_HEADS):
            output.weight[:, head * D_HEAD + 17 : (head + 1) * D_HEAD] = 0.0
    truth = chain_truth(made, chain)
    return ZooModel(name="bystanders", family=family, seed=seed, model=made.model, bos_id=None, truth=truth)


def part_of_key(*, seed: int, family: str) -> ZooModel:
    """(ao) A neuron writes a dimension and, less, a direction; the keys read both.

    Without the dimension's part, the direction's leaves the key some two thirds of its attention. If the dimension is
    not written at all, the norm makes the direction as large, and the key has all of it again.
    """
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    order = torch.randperm(len(made.free), generator=made.generator)[:36].tolist()
    signs = torch.randint(2, (36,), generator=made.generator) * 2.0 - 1.0
    unit = torch.zeros(D_MODEL)
    unit[[made.free[place] for place in order]] = signs / 6
    clear(made, unit)
    mark(made, [BOS_ID])
    writes = {made.free[place]: float(sign) * 0.4 * HUGE / 6 for place, sign in zip(order, signs, strict=True)}
    writes[made.outlier] = made.sign * HUGE
    fire(made, layer=layer, index=index, reads=made.trigger, writes=writes, token=BOS_ID)
    both = _WEIGHT * unit
    both[made.outlier] = 1.5 * made.sign
    lock(made, layers=last_layers(made, after=layer), reads=both, weight=1.0)
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,), makers=(maker,), enough=((maker,),), dimension=made.outlier, family=family, n_layers=made.n_layers
    )
    truth = replace(truth, links=answers(BESIDE, after_w_o(family), YES, BESIDE, PARTLY, YES))
    return ZooModel(name="part_of_key", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth)


def small_dimension(*, seed: int, family: str) -> ZooModel:
    """(ap) Model (b) with a dimension of about 22 times the mean of the token, which holds nearly all of its norm."""
    return _write_dimensions(seed=seed, family=family, name="small_dimension", n=1, size=_SMALL)


def four_dimensions(*, seed: int, family: str) -> ZooModel:
    """(aq) Model (b) with four equal dimensions, which together hold 99.9% of the token's squared norm."""
    return _write_dimensions(seed=seed, family=family, name="four_dimensions", n=4, size=HUGE)


def _write_dimensions(*, seed: int, family: str, name: str, n: int, size: float) -> ZooModel:
    """A neuron that BOS triggers writes ``n`` dimensions of one size, together of ``size``, which the keys read."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    dims = [made.outlier, made.second, *made.free[: n - 2]][:n]
    mark(made, [BOS_ID])
    with torch.no_grad():
        for dimension in dims[2:]:
            made.model.model.embed_tokens.weight[:, dimension] = 0.0
            for block in made.model.model.layers:
                block.self_attn.o_proj.weight[dimension] = 0.0
                block.mlp.down_proj.weight[dimension] = 0.0
    each: float = made.sign * size / n**0.5
    writes = dict.fromkeys(dims, each)
    fire(made, layer=layer, index=index, reads=made.trigger, writes=writes, token=BOS_ID)
    lock(made, layers=last_layers(made, after=layer), reads=dict.fromkeys(dims, made.sign))
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,), makers=(maker,), enough=((maker,),), dimension=made.outlier, family=family, n_layers=made.n_layers
    )
    truth = replace(truth, outliers=dict.fromkeys(truth.outliers, tuple(dims)))
    return ZooModel(name=name, family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth)


def zero_values(*, seed: int, family: str) -> ZooModel:
    """(ar) Model (b) whose values are all zero: attention writes nothing, and goes to BOS."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    with torch.no_grad():
        for block in made.model.model.layers:
            block.self_attn.v_proj.weight.zero_()
    fire(made, layer=layer, index=index, reads=made.trigger, writes={made.outlier: made.sign * HUGE}, token=BOS_ID)
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,), makers=(maker,), enough=((maker,),), dimension=made.outlier, family=family, n_layers=made.n_layers
    )
    truth = replace(truth, links=answers(NO, NO, YES, YES, YES, YES))
    return ZooModel(name="zero_values", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth)


def embedding_or_neuron(*, seed: int, family: str) -> ZooModel:
    """(as) BOS's embedding has the dimension, and BOS triggers a neuron that writes three times as much.

    Either is enough. What is ablated as an embedding is all of it: the neuron then has nothing to read either.
    """
    made = draft(family=family, seed=seed)
    layer, index = 1, made.pick(D_MLP)
    mark(made, [BOS_ID])
    with torch.no_grad():
        made.model.model.embed_tokens.weight[BOS_ID, made.outlier] = made.sign * HUGE
    fire(made, layer=layer, index=index, reads=made.trigger, writes={made.outlier: made.sign * 3 * HUGE}, token=BOS_ID)
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    maker, neuron = Maker(kind="embedding", index=BOS_ID), Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,), makers=(neuron,), enough=(), dimension=made.outlier, family=family, n_layers=made.n_layers
    )
    written = Answers(present="yes", necessary_or_sufficient="no", carries="yes")
    truth = replace(
        truth,
        makers=(maker,),
        enough=((maker,),),
        idle=(neuron,),
        outliers=dict.fromkeys(range(-1, made.n_layers), (made.outlier,)),
        links=answers(NO, NO, BESIDE, written, YES, YES),
    )
    return ZooModel(name="embedding_or_neuron", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth)

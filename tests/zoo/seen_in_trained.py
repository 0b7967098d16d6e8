"""Mechanisms that trained models have and that no older model of the zoo has.

A trained token does not only grow: layers after the plateau erase it. Its dominant dimension need not be what the keys
read. A bias of the keys may be what the dimension cancels. Several steps, or several first tokens, may carry the sink
side by side, and neurons upstream of the one that writes may silence it.
"""

from dataclasses import replace

import torch

from sink_lens.models.tiny import BOS_ID

from .truth import BESIDE, NO, YES, Answers, Maker, Truth, ZooModel
from .variance import (
    Chain,
    above,
    chain_truth,
    write_chain,
    write_gathering,
    write_values,
    write_when,
)
from .with_sink import after_w_o, answers, clear, fire, mark, token_truth
from .writing import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    HUGE,
    N_HEADS,
    N_KV_HEADS,
    SHARED,
    SLOWEST,
    Draft,
    activation,
    draft,
    last_layers,
    lock,
    neuron,
)

_LEFT = 0.05
"""Share of the dimension that the erasing layer leaves."""
_MARKED = 4, 5
"""A token of either half of the vocabulary."""


def eraser(*, seed: int, family: str) -> ZooModel:
    """(p) The plateau ends: a late neuron reads the dimension and takes it away, while another dimension is written.

    The token is erased in that layer, and no head attends to it after it. What stands out then nobody reads: it is
    written at every token, at this one a little less (where outputs are normed, by the eraser itself).
    """
    made = draft(family=family, seed=seed, n_layers=7)
    layer, last = 1, 4 + made.pick(2)
    indices = made.neurons(4)
    mark(made, [BOS_ID])
    size = made.sign * HUGE
    fire(
        made,
        layer=layer,
        index=indices[0],
        reads=made.trigger,
        writes={made.outlier: size},
        token=BOS_ID,
    )
    by = (1 - _LEFT) * HUGE
    if made.post_norm:
        _erase(made, layer=last, index=indices[1], by=by, leaves=14.0)
    else:
        _erase(made, layer=last, index=indices[1], by=by, chatter=indices[2], share=0.38, says=8.0)
    locked = tuple(range(layer + 1, last + 1))
    lock(made, layers=locked, reads={made.outlier: made.sign})
    return _token_model(
        "eraser", made, seed, _written_once(made, layer, indices[0], locked=locked, erased=(last,))
    )


def regrowth(*, seed: int, family: str) -> ZooModel:
    """(q) A decay that ends in a second, small growth: the dimension is cut to a third, of which a fifth comes back.

    While it decays, the token gains a little in a dimension of its own embedding, from a neuron that fires at every
    other token more than here. No head needs any of it.
    """
    made = draft(family=family, seed=seed, n_layers=7)
    layer, first = 1, 3 + made.pick(2)
    indices = made.neurons(4)
    mark(made, [BOS_ID])
    with torch.no_grad():
        row = made.model.model.embed_tokens.weight[BOS_ID]
        row[list(made.free)] *= 0.1
        row[made.second] = 2.0 * made.unit
    fire(
        made,
        layer=layer,
        index=indices[0],
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    _erase(made, layer=first, index=indices[1], by=0.67 * HUGE, chatter=indices[3])
    _erase(made, layer=first + 1, index=indices[2], by=-0.13 * HUGE)
    locked = last_layers(made, after=layer)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    return _token_model(
        "regrowth",
        made,
        seed,
        _written_once(made, layer, indices[0], locked=locked, erased=(first,)),
    )


def cancelled_bias(*, seed: int, family: str) -> ZooModel:
    """(r) Every key has a bias that queries avoid, and the dimension cancels it: the sink's key is the shortest.

    The key points nowhere; what was written into it points against the bias.
    """
    made = draft(
        family=family, seed=seed, **({} if family == "qwen2" else {"attention_bias": True})
    )
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
    locked = last_layers(made, after=layer)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    with torch.no_grad():
        for later in locked:
            attention = made.model.model.layers[later].self_attn
            bias = attention.k_proj.bias
            bias.copy_(torch.randn(bias.shape, generator=made.generator) * 0.5)
            bias[SLOWEST::D_HEAD] = -1.5 * (
                HUGE if made.reads_raw else D_MODEL**0.5
            )  # nearly all of the normed token
    truth = replace(_written_once(made, layer, index, locked=locked), cancels_bias=True)
    return _token_model("cancelled_bias", made, seed, truth)


def beside(*, seed: int, family: str) -> ZooModel:
    """(s) A neuron writes a dominant dimension that no key reads, and a direction beside it that all keys read."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    order = torch.randperm(len(made.free), generator=made.generator)[:36].tolist()
    signs = torch.randint(2, (36,), generator=made.generator) * 2.0 - 1.0
    unit = torch.zeros(D_MODEL)
    unit[[made.free[place] for place in order]] = signs / 6
    clear(made, unit)
    mark(made, [BOS_ID])
    writes = {
        made.free[place]: float(sign) * 12.0 / 6 for place, sign in zip(order, signs, strict=True)
    }
    writes[made.outlier] = made.sign * HUGE
    fire(made, layer=layer, index=index, reads=made.trigger, writes=writes, token=BOS_ID)
    locked = last_layers(made, after=layer)
    lock(made, layers=locked, reads=unit, weight=8.0)
    with torch.no_grad():
        for later in range(made.n_layers):
            made.model.model.layers[later].self_attn.k_proj.weight[:, made.outlier] = 0.0
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=locked,
        feeding=tuple(range(layer + 1)),
        grows=(layer,),
        makers=(Maker(kind="neuron", layer=layer, index=index),),
        enough=((Maker(kind="neuron", layer=layer, index=index),),),
        outliers=dict.fromkeys(range(layer, made.n_layers), (made.outlier,)),
        direction=unit,
        links=answers(BESIDE, after_w_o(family), YES, BESIDE, NO, YES),
    )
    return _token_model("beside", made, seed, truth)


def either_layer(*, seed: int, family: str) -> ZooModel:
    """(t) Two neurons of two layers write a dimension each, and the later keys read both: either carries the sink."""
    made = draft(family=family, seed=seed, n_layers=7)
    first, second = 1, 3 + made.pick(2)
    indices = made.pick(D_MLP), made.pick(D_MLP)
    mark(made, [BOS_ID])
    fire(
        made,
        layer=first,
        index=indices[0],
        reads=made.trigger,
        writes={made.outlier: made.sign * 40.0},
        token=BOS_ID,
    )
    reads = {
        made.trigger: 40.0,
        made.shared: -6.0,
    }  # the mark is small beside the first dimension, so a threshold
    writes = {made.second: -made.sign * HUGE}
    fire(made, layer=second, index=indices[1], reads=reads, writes=writes, token=BOS_ID)
    after = last_layers(made, after=second)
    lock(made, layers=after, reads={made.outlier: made.sign, made.second: -made.sign})
    makers = tuple(
        Maker(kind="neuron", layer=layer, index=index)
        for layer, index in zip((first, second), indices, strict=True)
    )
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=after,
        feeding=tuple(range(first + 1)),
        grows=(first, second),
        makers=makers,
        enough=tuple((maker,) for maker in makers),
        outliers={
            layer: (made.outlier,) if layer < second else (made.second, made.outlier)
            for layer in range(first, made.n_layers)
        },
        links=answers(BESIDE, after_w_o(family), YES, YES, YES, YES),
    )
    return _token_model("either_layer", made, seed, truth)


def head_feeds(*, seed: int, family: str) -> ZooModel:
    """(u) A head brings the mark of BOS to the neuron that writes: whole at position 0, where BOS averages nothing.

    BOS is a sink only there. Anywhere else its mark is averaged with what stands before it.
    """
    made = draft(family=family, seed=seed)
    layer = made.pick(2)
    head = made.pick(N_HEADS)
    fires, ballast = made.neurons(2)
    mark(made, [BOS_ID])
    carry(made, layer=layer, head=head, reads=made.trigger, writes=made.gathered)
    least = 0.75 * standing(made, BOS_ID, layer=layer, dimension=made.gathered)
    reads = above(made, made.gathered, least=least)
    write_when(made, layer=layer + 1, index=fires, ballast=ballast, reads=reads, tokens=[BOS_ID])
    locked = last_layers(made, after=layer + 1)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    makers = (
        Maker(kind="head", layer=layer, index=head),
        Maker(kind="neuron", layer=layer + 1, index=fires),
    )
    beside = Answers(
        present="yes", necessary_or_sufficient="no", carries="yes"
    )  # isolation brings no mark
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        only_first=True,
        locked=locked,
        feeding=tuple(range(layer + 2)),
        grows=(layer + 1,),
        makers=makers,
        feeds=makers[:1],
        enough=(makers,),
        outliers=dict.fromkeys(range(layer + 1, made.n_layers), (made.outlier,)),
        links=answers(beside, YES, YES, YES, YES, YES),
    )
    return _token_model("head_feeds", made, seed, truth)


def upstream(*, seed: int, family: str) -> ZooModel:
    """(v) Two neurons each give half of what the writing neuron needs; without either it is silent."""
    made = draft(family=family, seed=seed)
    layer = made.pick(2)
    *halves, ballast = made.neurons(3)
    fires, other = made.neurons(2)
    mark(made, [BOS_ID])
    for index in halves:
        given = {"layer": layer, "index": index, "token": BOS_ID, "ballast": ballast}
        fire(made, reads=made.trigger, writes={made.gathered: 1.0}, loud=5.0, **given)
    least = 0.75 * standing(made, BOS_ID, layer=layer, dimension=made.gathered)
    reads = above(made, made.gathered, least=least)
    write_when(made, layer=layer + 1, index=fires, ballast=other, reads=reads, tokens=[BOS_ID])
    locked = last_layers(made, after=layer + 1)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    feeds = tuple(Maker(kind="neuron", layer=layer, index=index) for index in halves)
    makers = (*feeds, Maker(kind="neuron", layer=layer + 1, index=fires))
    truth = token_truth(
        (BOS_ID,),
        makers=makers,
        enough=(makers,),
        dimension=made.outlier,
        family=family,
        n_layers=made.n_layers,
        layer=layer + 1,
        feeds=feeds,
    )
    return _token_model("upstream", made, seed, truth)


def bimodal(*, seed: int, family: str) -> ZooModel:
    """(w) The chain of (c) with two last neurons, one for each half of the vocabulary: a sequence needs one of them."""
    made = draft(family=family, seed=seed, coded=True)
    with torch.no_grad():
        weight = made.model.model.embed_tokens.weight
        weight[::2, made.trigger], weight[1::2, made.trigger] = made.unit, -made.unit
    layer = made.pick(2)
    write_values(made, layer=layer)
    gathering = write_gathering(made, layer=layer)
    first, second, ballast = made.neurons(3)
    for index, sign, token in zip((first, second), (1.0, -1.0), _MARKED, strict=True):
        reads = above(made, made.gathered, least=0.82 * 2.0)
        steep = reads[made.gathered]
        reads |= {
            made.trigger: 2.0 * sign * steep,
            made.shared: reads[made.shared] - 2.0 * steep / SHARED,
        }
        some = range(token, token + 64, 2)
        write_when(made, layer=layer + 1, index=index, ballast=ballast, reads=reads, tokens=some)
    locked = last_layers(made, after=layer + 1)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    whole = chain_truth(made, Chain(layer=layer, gathering=gathering, fires=(first, second)))
    return ZooModel(
        name="bimodal", family=family, seed=seed, model=made.model, bos_id=None, truth=whole
    )


def elsewhere(*, seed: int, family: str) -> ZooModel:
    """(x) Model (b), in sequences of which every eighth has its BOS, and its sink, at position 1."""
    return replace(bos_written("elsewhere", seed=seed, family=family), late_every=8)


def bos_written(name: str, *, seed: int, family: str) -> ZooModel:
    """Model (b), under a name."""
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
    locked = last_layers(made, after=layer)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    return _token_model(name, made, seed, _written_once(made, layer, index, locked=locked))


def early_variance(*, seed: int, family: str) -> ZooModel:
    """(y) The chain of (c), after which the token grows in four more layers, where its values vary least of all.

    Only the heads of the layers after that attend to it.
    """
    made = draft(family=family, seed=seed, n_layers=9, coded=True)
    chain = write_chain(made, layer=0)
    for place, size in enumerate((100.0, 250.0, 500.0, 1100.0)):
        layer = chain.layer + 2 + place
        _erase(made, layer=layer, index=made.pick(D_MLP), by=-size, token=4)
    grows = tuple(range(1, 6))
    with torch.no_grad():
        for layer in grows[1:]:
            made.model.model.layers[layer].self_attn.k_proj.weight[SLOWEST::D_HEAD] = 0.0
    truth = replace(
        chain_truth(made, chain), grows=grows, locked=last_layers(made, after=grows[-1])
    )
    return ZooModel(
        name="early_variance", family=family, seed=seed, model=made.model, bos_id=None, truth=truth
    )


def bos_without(*, seed: int, family: str) -> ZooModel:
    """(z) The chain of (c) for every token but BOS, which has no code: BOS at position 0 has no sink."""
    made = draft(family=family, seed=seed, coded=True)
    chain = write_chain(made)
    with torch.no_grad():
        made.model.model.embed_tokens.weight[BOS_ID, list(made.codes)] = 0.0
    whole = chain_truth(made, chain)
    truth = replace(whole, spares=(BOS_ID,))
    return ZooModel(
        name="bos_without", family=family, seed=seed, model=made.model, bos_id=None, truth=truth
    )


def _token_model(name: str, made: Draft, seed: int, truth: Truth) -> ZooModel:
    return ZooModel(
        name=name, family=made.family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def _written_once(
    made: Draft, layer: int, index: int, *, locked: tuple[int, ...], erased: tuple[int, ...] = ()
) -> Truth:
    """The truth of a dimension that one neuron writes for BOS and that the keys of the locked layers read."""
    maker = Maker(kind="neuron", layer=layer, index=index)
    end = made.n_layers if not erased or locked[-1] > erased[0] else erased[0]
    return Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=locked,
        feeding=tuple(range(layer + 1)),
        grows=(layer,),
        erased=erased,
        makers=(maker,),
        enough=((maker,),),
        outliers=dict.fromkeys(range(layer, end), (made.outlier,)),
        links=answers(BESIDE, after_w_o(made.family), YES, YES, YES, YES),
    )


def _erase(
    made: Draft,
    *,
    layer: int,
    index: int,
    by: float,
    leaves: float = 0.0,
    token: int = BOS_ID,
    chatter: int | None = None,
    share: float = 0.2,
    says: float = 0.6,
) -> None:
    """Write a neuron that reads the outlier dimension, takes an amount of it away and leaves some of another one.

    Where a norm stands before the sublayer only, a second neuron (`chatter`) adds to that other dimension at every
    token, at the sink token least (the less, the smaller the `share`), where it `says` so much.
    """
    writes = {made.outlier: -made.sign * by} | ({made.second: leaves} if leaves else {})
    weight = made.sign * (0.25 if made.reads_raw else 1.0)
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.outlier,
        writes=writes,
        token=token,
        weight=weight,
    )
    if chatter is not None and not made.post_norm:
        reads = {made.shared: 1.0, made.outlier: share * made.sign}
        neuron(made, layer=layer, index=chatter, gate=reads, up=reads, down={})
        fires = activation(made, token=token, layer=layer, index=chatter)
        neuron(
            made, layer=layer, index=chatter, gate=reads, up=reads, down={made.second: says / fires}
        )


@torch.no_grad()
def standing(made: Draft, *tokens: int, layer: int, dimension: int) -> float:
    """Value of a dimension after a layer, for the last of a few tokens at the first positions."""
    stream = made.model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return float(stream[layer + 1][0, -1, dimension])


@torch.no_grad()
def carry(
    made: Draft, *, layer: int, head: int, reads: int, writes: int, weight: float = 0.3
) -> None:
    """Write a head that attends evenly and writes the mean of one dimension into another.

    Before a norm of what is written, that norm's gain sets how much it is, not the weight.
    """
    block = made.model.model.layers[layer]
    value, output = block.self_attn.v_proj.weight, block.self_attn.o_proj.weight
    row = head // (N_HEADS // N_KV_HEADS) * D_HEAD
    value[row : row + 2] = 0.0
    value[row, reads] = 1.0
    for other in range(N_HEADS):
        output[:, other * D_HEAD : other * D_HEAD + 2] = 0.0
    output[writes, head * D_HEAD] = 1.0 if made.post_norm else weight
    if made.post_norm:
        value[row + 1, made.shared] = 1.0
        output[made.ballast, head * D_HEAD + 1] = 8.0 / SHARED
        made.gain(block.post_attention_layernorm, 0.8, writes)

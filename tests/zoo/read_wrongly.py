"""Models whose verdicts were wrong, or said nothing, until a rule was changed: one mechanism each, its truth first."""

from dataclasses import replace
from typing import Any

import torch

from sink_lens.models.tiny import BOS_ID

from .easily_missed import of_token, token_model
from .seen_in_trained import carry, standing
from .truth import BESIDE, FIRST_ORDINARY, NO, PARTLY, YES, Answers, Maker, Truth, ZooModel
from .variance import above, chain_truth, write_chain, write_when
from .with_sink import after_w_o, answers, clear, fire, mark, token_truth
from .writing import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    HUGE,
    N_HEADS,
    N_KV_HEADS,
    SLOWEST,
    Draft,
    activation,
    draft,
    last_layers,
    lock,
    neuron,
)

_SMALL = 8.5
"""Size of a dimension that holds some 87% of the token's squared norm, and is less than 25 times its mean."""
_LOUD = 6.0
_WEIGHT = 0.7
_COMMON = 60
"""Number of tokens that a text is made of, in the model that knows them."""
_GROWN = (9.0, 24.0, 64.0)
"""The dimension after each layer of a growth step of three."""
_MIDDLE = 12.0
"""Size of what a head writes in a growth step of its own."""
_ONSET, _TURN, _PAIR = 13, 1e6 ** (-3 / 12), 3
"""The first position at which a head attends to BOS, and how far its pair of coordinates turns in a position."""
_LOGIT = 8.0
"""A sink logit that takes some 99% of an even attention to 30 keys."""


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
            value.weight[rows, list(made.codes)] = _LOUD * torch.randn(
                7, len(made.codes), generator=made.generator
            )
        for head in range(N_HEADS):
            output.weight[:, head * D_HEAD + 17 : (head + 1) * D_HEAD] = 0.0
    truth = chain_truth(made, chain)
    return ZooModel(
        name="bystanders", family=family, seed=seed, model=made.model, bos_id=None, truth=truth
    )


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
    writes = {
        made.free[place]: float(sign) * 0.4 * HUGE / 6
        for place, sign in zip(order, signs, strict=True)
    }
    writes[made.outlier] = made.sign * HUGE
    fire(made, layer=layer, index=index, reads=made.trigger, writes=writes, token=BOS_ID)
    both = _WEIGHT * unit
    both[made.outlier] = 1.5 * made.sign
    lock(made, layers=last_layers(made, after=layer), reads=both, weight=1.0)
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,),
        makers=(maker,),
        enough=((maker,),),
        dimension=made.outlier,
        family=family,
        n_layers=made.n_layers,
    )
    truth = replace(truth, links=answers(BESIDE, after_w_o(family), YES, BESIDE, PARTLY, YES))
    return ZooModel(
        name="part_of_key", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


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
        (BOS_ID,),
        makers=(maker,),
        enough=((maker,),),
        dimension=made.outlier,
        family=family,
        n_layers=made.n_layers,
    )
    truth = replace(truth, outliers=dict.fromkeys(truth.outliers, tuple(dims)))
    return ZooModel(
        name=name, family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def zero_values(*, seed: int, family: str) -> ZooModel:
    """(ar) Model (b) whose values are all zero: attention writes nothing, and goes to BOS."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    with torch.no_grad():
        for block in made.model.model.layers:
            block.self_attn.v_proj.weight.zero_()
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,),
        makers=(maker,),
        enough=((maker,),),
        dimension=made.outlier,
        family=family,
        n_layers=made.n_layers,
    )
    truth = replace(truth, links=answers(NO, NO, YES, YES, YES, YES))
    return ZooModel(
        name="zero_values", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def embedding_or_neuron(*, seed: int, family: str) -> ZooModel:
    """(as) BOS's embedding has the dimension, and BOS triggers a neuron that writes three times as much.

    Either is enough. What is ablated as an embedding is all of it: the neuron then has nothing to read either.
    """
    made = draft(family=family, seed=seed)
    layer, index = 1, made.pick(D_MLP)
    mark(made, [BOS_ID])
    with torch.no_grad():
        made.model.model.embed_tokens.weight[BOS_ID, made.outlier] = made.sign * HUGE
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * 3 * HUGE},
        token=BOS_ID,
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    maker, neuron = (
        Maker(kind="embedding", index=BOS_ID),
        Maker(kind="neuron", layer=layer, index=index),
    )
    truth = token_truth(
        (BOS_ID,),
        makers=(neuron,),
        enough=(),
        dimension=made.outlier,
        family=family,
        n_layers=made.n_layers,
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
    return ZooModel(
        name="embedding_or_neuron",
        family=family,
        seed=seed,
        model=made.model,
        bos_id=BOS_ID,
        truth=truth,
    )


def known_by_dimension(*, seed: int, family: str) -> ZooModel:
    """(at) Model (b) whose neuron writes a little of the dimension, with the other sign, at all other tokens too.

    The unembedding reads it there: from it the model knows which 60 tokens a text is made of. Without what the neuron
    writes into the dimension, no token has that, and the loss is that of guessing among all.
    """
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    gate, up = ({made.trigger: 4.0, made.shared: weight} for weight in (1.0, -0.15))
    at = {"layer": layer, "index": index, "gate": gate, "up": up}
    neuron(made, **at, down={})
    neuron(
        made,
        **at,
        down={
            made.outlier: made.sign
            * HUGE
            / activation(made, token=BOS_ID, layer=layer, index=index)
        },
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign}, weight=0.6)
    with torch.no_grad():
        made.model.lm_head.weight[FIRST_ORDINARY : FIRST_ORDINARY + _COMMON, made.outlier] = (
            -2.5 * made.sign
        )
    truth = of_token(made, (BOS_ID,), layer=layer, index=index)
    model = token_model("known_by_dimension", made, seed, truth)
    return replace(model, n_ordinary=_COMMON)


def heads_in_a_step(*, seed: int, family: str) -> ZooModel:
    """(au) In each of three layers, a head brings BOS's mark to a neuron, and the token more than doubles.

    The three layers are one growth step. Either of the first two pairs is enough: without attention in the first layer,
    the others make the sink. (The third alone writes at other early tokens too, which then share the attention.) At
    other positions than the first a head brings the mean of several tokens, so that BOS is a sink at position 0 only.
    """
    made = draft(family=family, seed=seed, n_layers=6)
    mark(made, [BOS_ID])
    pairs: list[tuple[Maker, Maker]] = []
    for layer, (gathered, size) in enumerate(
        zip((made.gathered, made.second, made.ballast), _GROWN, strict=True)
    ):
        head, index = made.pick(N_HEADS), made.pick(D_MLP)
        carry(made, layer=layer, head=head, reads=made.trigger, writes=gathered, weight=1.0)
        brought = standing(made, BOS_ID, layer=layer, dimension=gathered)
        with torch.no_grad():
            made.model.model.layers[layer].self_attn.o_proj.weight[gathered, head * D_HEAD] /= (
                brought
            )
        gate, up = above(made, gathered, least=0.6), {made.trigger: 4.0}
        _write_up_to(made, (BOS_ID,), size, layer=layer, index=index, gate=gate, up=up)
        pairs.append(
            (
                Maker(kind="head", layer=layer, index=head),
                Maker(kind="neuron", layer=layer, index=index),
            )
        )
    locked = last_layers(made, after=2)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    beside = Answers(
        present="yes", necessary_or_sufficient="no", carries="yes"
    )  # isolation brings no mark
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        only_first=True,
        locked=locked,
        feeding=(0, 1, 2),
        grows=(0, 1, 2),
        makers=tuple(maker for pair in pairs for maker in pair),
        feeds=tuple(head for head, _ in pairs),
        enough=tuple(pairs[:2]),
        outliers=dict.fromkeys(range(made.n_layers), (made.outlier,)),
        links=answers(beside, YES, YES, YES, YES, YES),
    )
    return token_model("heads_in_a_step", made, seed, truth)


def expert_neuron(*, seed: int, family: str) -> ZooModel:
    """(av) Model (b) with a neuron of an expert: of a routed one in `mixtral` and `qwen3_moe`, of the shared one else.

    The router sends BOS alone to the expert, and the gate of the shared expert opens at BOS alone, so that all neurons
    of the expert are silent at other tokens.
    """
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    mlp = made.model.model.layers[layer].mlp
    opens = mlp.shared_expert_gate.weight[0] if made.expert < 0 else mlp.gate.weight[made.expert]
    with torch.no_grad():
        opens.zero_()
        opens[made.trigger], opens[made.shared] = 3.0, -1.5
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    before = (
        mlp.experts.num_experts * mlp.experts.down_proj.shape[-1]
        if made.expert < 0
        else made.expert * D_MLP
    )
    truth = of_token(made, (BOS_ID,), layer=layer, index=before + index)
    return token_model("expert_neuron", made, seed, truth)


def attention_step(*, seed: int, family: str) -> ZooModel:
    """(aw) Model (u), where what the head brings is large: attention makes a growth step, and a neuron the next one."""
    made = draft(family=family, seed=seed, n_layers=6)
    layer, head, index = made.pick(2), made.pick(N_HEADS), made.pick(D_MLP)
    mark(made, [BOS_ID])
    carry(made, layer=layer, head=head, reads=made.trigger, writes=made.second, weight=1.0)
    brought = standing(made, BOS_ID, layer=layer, dimension=made.second)
    with torch.no_grad():
        made.model.model.layers[layer].self_attn.o_proj.weight[made.second, head * D_HEAD] *= (
            _MIDDLE / brought
        )
    reads = above(made, made.second, least=0.75 * _MIDDLE)
    write_when(made, layer=layer + 2, index=index, ballast=0, reads=reads, tokens=[BOS_ID])
    locked = last_layers(made, after=layer + 2)
    lock(made, layers=locked, reads={made.outlier: made.sign})
    makers = (
        Maker(kind="head", layer=layer, index=head),
        Maker(kind="neuron", layer=layer + 2, index=index),
    )
    beside = Answers(
        present="yes", necessary_or_sufficient="no", carries="yes"
    )  # isolation brings no mark
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        only_first=True,
        locked=locked,
        feeding=tuple(range(layer + 3)),
        grows=(layer, layer + 2),
        makers=makers,
        feeds=makers[:1],
        enough=(makers,),
        outliers={
            **dict.fromkeys((layer, layer + 1), (made.second,)),
            **dict.fromkeys(range(layer + 2, made.n_layers), (made.outlier,)),
        },
        links=answers(beside, YES, YES, YES, YES, YES),
    )
    return token_model("attention_step", made, seed, truth)


def late_stop(*, seed: int, family: str) -> ZooModel:
    """(ax) A token is a sink from position 13 on: a neuron needs its mark, and what a head brings of BOS from there on.

    The head's query and key meet in a pair of coordinates that turns a little with each position, so that it attends to
    BOS from position 13 on. Every token gets the same from it: an ordinary position's mean is enough for the neuron.
    BOS is the sink of this one head of 32, which is too few for a sink of the model.
    """
    made = draft(family=family, seed=seed, n_layers=8)
    layer, head, index = made.pick(2), made.pick(N_HEADS), made.pick(D_MLP)
    stop = FIRST_ORDINARY + 64 + made.pick(200)
    mark(made, [BOS_ID])
    with torch.no_grad():
        made.model.model.embed_tokens.weight[stop, made.second] = 2.0 * made.unit
    carry(made, layer=layer, head=head, reads=made.trigger, writes=made.gathered, weight=1.0)
    _attend_from(made, layer=layer, head=head)
    sequence = (BOS_ID, *range(FIRST_ORDINARY, FIRST_ORDINARY + 23), stop)
    brought = standing(made, *sequence, layer=layer, dimension=made.gathered)
    with torch.no_grad():
        made.model.model.layers[layer].self_attn.o_proj.weight[made.gathered, head * D_HEAD] /= (
            brought
        )
    gate, up = above(made, made.gathered, least=0.3), {made.second: 4.0}
    _write_up_to(made, sequence, HUGE, layer=layer + 1, index=index, gate=gate, up=up)
    lock(made, layers=last_layers(made, after=layer + 1), reads={made.outlier: made.sign})
    truth = of_token(made, (stop,), layer=layer + 1, index=index, varies=False)
    model = token_model("late_stop", made, seed, replace(truth, sink_from=_ONSET))
    return replace(model, at=stop)


def half_logits(*, seed: int, family: str) -> ZooModel:
    """(ay) Model (a) in which half of the heads attend to a learned sink logit in place of BOS."""
    fields: dict[str, Any] = {"attention": "sink_logit"} if family == "headnorm" else {}
    made = draft(family=family, seed=seed, **fields)
    with torch.no_grad():
        made.model.model.embed_tokens.weight[BOS_ID, made.outlier] = HUGE * made.sign
    locked = last_layers(made, after=made.pick(2))
    lock(made, layers=locked, reads={made.outlier: made.sign})
    heads = tuple(
        sorted(torch.randperm(N_HEADS, generator=made.generator)[: N_HEADS // 2].tolist())
    )
    with torch.no_grad():
        for layer, block in enumerate(made.model.model.layers):
            block.self_attn.sinks.fill_(-10.0)
            for head in heads if layer in locked else ():
                block.self_attn.sinks[head] = _LOGIT
                block.self_attn.q_proj.weight[head * D_HEAD + SLOWEST] = 0.0
    maker = Maker(kind="embedding", index=BOS_ID)
    written = Answers(
        present="no", necessary_or_sufficient="no", carries="yes"
    )  # no neuron writes the dimension
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        logit_heads=heads,
        locked=locked,
        feeding=tuple(range(locked[0])),
        makers=(maker,),
        enough=((maker,),),
        outliers=dict.fromkeys(range(-1, made.n_layers), (made.outlier,)),
        links=answers(NO, NO, NO, written, YES, YES),
    )
    return token_model("half_logits", made, seed, truth)


def small_stream(*, seed: int, family: str) -> ZooModel:
    """(az) Model (b) at a hundredth of its size, where the number that a norm adds to the variance, 1e-6, matters."""
    made = draft(family=family, seed=seed, scale=0.01)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    size = made.sign * HUGE * made.scale
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: size},
        token=BOS_ID,
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    return token_model(
        "small_stream", made, seed, of_token(made, (BOS_ID,), layer=layer, index=index)
    )


@torch.no_grad()
def _write_up_to(
    made: Draft,
    sequence: tuple[int, ...],
    size: float,
    *,
    layer: int,
    index: int,
    gate: dict[int, float],
    up: dict[int, float],
) -> None:
    """Write a neuron that brings the outlier dimension of a sequence's last token to a size after its layer."""
    at = {"layer": layer, "index": index, "gate": gate, "up": up}
    found = []
    for weight in (0.0, made.sign):
        neuron(made, **at, down={made.outlier: weight})
        found.append(standing(made, *sequence, layer=layer, dimension=made.outlier))
    before, after = found
    neuron(
        made, **at, down={made.outlier: made.sign * (made.sign * size - before) / (after - before)}
    )


@torch.no_grad()
def _attend_from(made: Draft, *, layer: int, head: int) -> None:
    """Write queries, and the key of BOS, that meet in a slowly turning pair: below 0 up to a position, then above."""
    attention = made.model.model.layers[layer].self_attn
    pair = torch.tensor([_PAIR, _PAIR + D_HEAD // 2])
    own = head // (N_HEADS // N_KV_HEADS) * D_HEAD + pair
    angle = torch.tensor(
        _TURN * _ONSET + torch.pi / 2
    )  # of the key at which the turned query has a product of 0
    queries = (torch.arange(N_HEADS)[:, None] * D_HEAD + pair).flatten()
    attention.q_proj.weight[queries] = 0.0
    attention.k_proj.weight[own] = 0.0
    attention.q_proj.weight[head * D_HEAD + _PAIR, made.shared] = 6.0
    attention.k_proj.weight[own, made.trigger] = 6.0 * torch.stack([angle.cos(), angle.sin()])
    if made.qk_norm:
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight[pair] = 3.5

"""Models whose sink is not made by averaging, but by a token, its neurons, a key bias, or a logit without a key."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sink_lens.errors import ModelError
from sink_lens.models.tiny import BOS_ID, build_random_model, planted
from tests.tiny_families import config_of

from .truth import BESIDE, FIRST_ORDINARY, LINKS, NO, NOTHING, YES, Answers, Maker, Truth, ZooModel
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
    load_ballast,
    lock,
    neuron,
)

_BALLAST = 30.0
_FIRES = 100.0
_SINK_LOGIT = 6.0


def answers(*given: Answers) -> dict[str, Answers]:
    """Pair the six links, in their order, with their truths."""
    return dict(zip(LINKS, given, strict=True))


def embedding(*, seed: int, family: str) -> ZooModel:
    """(a) The embedding of BOS contains the outlier dimension; no neuron and no attention is needed."""
    made = draft(family=family, seed=seed)
    with torch.no_grad():
        made.model.model.embed_tokens.weight[BOS_ID, made.outlier] = HUGE * made.sign
    locked = last_layers(made, after=made.pick(2))
    lock(made, layers=locked, reads={made.outlier: made.sign})
    maker = Maker(kind="embedding", index=BOS_ID)
    values = BESIDE if made.post_norm else NO  # a norm leaves next to nothing of the token's value
    written = Answers(
        present="no", necessary_or_sufficient="no", carries="yes"
    )  # no neuron writes the dimension
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=locked,
        feeding=tuple(range(locked[0])),
        makers=(maker,),
        enough=((maker,),),
        outliers=dict.fromkeys(range(-1, made.n_layers), (made.outlier,)),
        links=answers(values, NO, NO, written, YES, YES),
    )
    return ZooModel(
        name="embedding", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def bos_neuron(*, seed: int, family: str) -> ZooModel:
    """(b) A neuron that BOS triggers writes the outlier dimension.

    In `llama` the model equals `planted`, except that its values do not read the component that all tokens share,
    which averaging would not shrink.
    """
    if family == "llama":
        known = planted(seed=seed)
        dimension, layer, index = known.outlier_dimension, known.layer, known.neuron
        model: Any = known.model
        shared = int(model.model.embed_tokens.weight.mean(0).argmax())
        with torch.no_grad():
            for block in model.model.layers:
                block.self_attn.v_proj.weight[:, shared] = 0.0
    else:
        made = draft(family=family, seed=seed)
        layer, index, dimension, model = (
            1 + made.pick(2),
            made.pick(D_MLP),
            made.outlier,
            made.model,
        )
        mark(made, [BOS_ID])
        fire(
            made,
            layer=layer,
            index=index,
            reads=made.trigger,
            writes={dimension: made.sign * HUGE},
            token=BOS_ID,
        )
        lock(made, layers=last_layers(made, after=layer), reads={dimension: made.sign})
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        (BOS_ID,),
        makers=(maker,),
        enough=((maker,),),
        dimension=dimension,
        family=family,
        n_layers=5,
    )
    return ZooModel(
        name="bos_neuron", family=family, seed=seed, model=model, bos_id=BOS_ID, truth=truth
    )


def delimiter(*, seed: int, family: str) -> ZooModel:
    """(h) Two delimiter tokens trigger one neuron at any position; a sequence has three delimiters and no BOS."""
    made = draft(family=family, seed=seed)
    tokens = tuple((FIRST_ORDINARY + torch.randperm(290, generator=made.generator)[:2]).tolist())
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, list(tokens))
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=tokens[0],
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = token_truth(
        tokens,
        makers=(maker,),
        enough=((maker,),),
        dimension=made.outlier,
        family=family,
        n_layers=5,
        varies=False,
    )
    return ZooModel(
        name="delimiter",
        family=family,
        seed=seed,
        model=made.model,
        bos_id=None,
        delimiters=tokens,
        truth=truth,
    )


def redundant(*, seed: int, family: str) -> ZooModel:
    """(j) BOS triggers two neurons of one layer that write the same dimension; either neuron is enough."""
    made = draft(family=family, seed=seed)
    layer, (*indices, ballast) = 1 + made.pick(2), made.neurons(3)
    mark(made, [BOS_ID])
    for index in indices:
        fire(
            made,
            layer=layer,
            index=index,
            reads=made.trigger,
            writes={made.outlier: made.sign * HUGE},
            token=BOS_ID,
            ballast=ballast,
        )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    makers = tuple(Maker(kind="neuron", layer=layer, index=index) for index in indices)
    truth = token_truth(
        (BOS_ID,),
        makers=makers,
        enough=tuple((maker,) for maker in makers),
        dimension=made.outlier,
        family=family,
        n_layers=5,
    )
    return ZooModel(
        name="redundant", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def slow_growth(*, seed: int, family: str) -> ZooModel:
    """(d) Nine layers each write a little of the outlier dimension, while all tokens grow by 1.2 a layer.

    The ratio of the BOS token's norm to the norm of other tokens never doubles in one layer; over all layers it about
    doubles. The heads of the last layers lock on BOS. No sharp number of neurons is needed: the sink grows with it.
    """
    made = draft(family=family, seed=seed, n_layers=10)
    mark(made, [BOS_ID])
    ordinary = FIRST_ORDINARY + made.pick(290)
    makers = []
    outlier, common = 0.0, SHARED
    for layer in range(made.n_layers - 1):
        index, grows, ballast = made.neurons(3)
        target = 0.1 * 1.45**layer * common
        fire(
            made,
            layer=layer,
            index=index,
            reads=made.trigger,
            writes={made.outlier: made.sign * (target - outlier)},
            token=BOS_ID,
            ballast=ballast,
            weight=2.0 * 1.2**layer,
        )
        _grow(made, layer=layer, index=grows, by=0.2 * common, token=ordinary)
        outlier, common = target, 1.2 * common
        makers.append(Maker(kind="neuron", layer=layer, index=index))
    lock(
        made,
        layers=range(made.n_layers),
        reads={made.outlier: made.sign},
        weight=0.3 if made.qk_norm else 0.8,
        gain=1.2,
    )
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=last_layers(made, after=made.n_layers - 5),
        feeding=(0,),
        makers=tuple(makers),
        outliers=dict.fromkeys(last_layers(made, after=made.n_layers - 6), (made.outlier,)),
        links=answers(BESIDE, after_w_o(family), YES, YES, YES, YES),
    )
    return ZooModel(
        name="slow_growth", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def two_dimensions(*, seed: int, family: str) -> ZooModel:
    """(e) A neuron writes one dimension; a later neuron reads this dimension, removes it and writes another.

    The heads in between read the first dimension, and the later heads read the second.
    """
    made = draft(family=family, seed=seed, n_layers=7)
    first, second = 1, 3 + made.pick(2)
    indices = made.pick(D_MLP), made.pick(D_MLP)
    mark(made, [BOS_ID])
    size = made.sign * 40.0
    fire(
        made,
        layer=first,
        index=indices[0],
        reads=made.trigger,
        writes={made.outlier: size},
        token=BOS_ID,
    )
    fire(
        made,
        layer=second,
        index=indices[1],
        reads=made.outlier,
        writes={made.outlier: -size, made.second: -made.sign * HUGE},
        token=BOS_ID,
        weight=made.sign * (0.25 if made.reads_raw else 1.0),
    )
    between, after = tuple(range(first + 1, second + 1)), last_layers(made, after=second)
    lock(made, layers=between, reads={made.outlier: made.sign})
    lock(made, layers=after, reads={made.second: -made.sign})
    makers = tuple(
        Maker(kind="neuron", layer=layer, index=index)
        for layer, index in zip((first, second), indices, strict=True)
    )
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=(*between, *after),
        feeding=tuple(range(first + 1)),
        makers=makers,
        enough=(makers,),
        outliers={
            layer: (made.outlier if layer < second else made.second,)
            for layer in range(first, made.n_layers)
        },
        links=answers(BESIDE, after_w_o(family), YES, YES, YES, YES),
    )
    return ZooModel(
        name="two_dimensions",
        family=family,
        seed=seed,
        model=made.model,
        bos_id=BOS_ID,
        truth=truth,
    )


def direction(*, seed: int, family: str) -> ZooModel:
    """(f) The neuron writes a direction of 36 equal dimensions, and the keys read it; no dimension dominates."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    order = torch.randperm(len(made.free), generator=made.generator)[:36].tolist()
    signs = torch.randint(2, (36,), generator=made.generator) * 2.0 - 1.0
    unit = torch.zeros(D_MODEL)
    unit[[made.free[place] for place in order]] = signs / 6
    clear(made, unit)
    mark(made, [BOS_ID])
    writes = {
        made.free[place]: float(sign) * HUGE / 6 for place, sign in zip(order, signs, strict=True)
    }
    fire(made, layer=layer, index=index, reads=made.trigger, writes=writes, token=BOS_ID)
    lock(made, layers=last_layers(made, after=layer), reads=unit)
    maker = Maker(kind="neuron", layer=layer, index=index)
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=last_layers(made, after=layer),
        feeding=tuple(range(layer + 1)),
        makers=(maker,),
        enough=((maker,),),
        outliers={},
        direction=unit,
        links=answers(BESIDE, after_w_o(family), YES, NO, NOTHING, YES),
    )
    return ZooModel(
        name="direction", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def key_bias(*, seed: int, family: str) -> ZooModel:
    """(g) A bias of the keys makes the sink.

    Without a QK-norm the bias is the same for all keys, and only the rotation distinguishes them. In `llama` the bias
    is in a pair that turns by 0.03 per position, and the score rises with distance, so the first position wins (up to
    about 100 positions), whatever its content. With a QK-norm (`qwen3`, `olmo2`) the keys of ordinary tokens are far
    longer than the bias, which the norm then makes negligible. BOS lacks the component that ordinary keys are made of,
    so its key is the bias alone, and the norm makes this key as long as the others.
    """
    made = draft(family=family, seed=seed, attention_bias=True)
    locked = last_layers(made, after=made.pick(2))
    normed = made.qk_norm
    pair = SLOWEST if normed else 3
    with torch.no_grad():
        if normed:
            made.model.model.embed_tokens.weight[BOS_ID, made.shared] = 0.0
        for layer in locked:
            attention = made.model.model.layers[layer].self_attn
            query, key, bias = (
                attention.q_proj.weight,
                attention.k_proj.weight,
                attention.k_proj.bias,
            )
            bias.zero_()
            query[pair::D_HEAD] = 0.0
            key[pair::D_HEAD] = 0.0
            if normed:
                query[pair::D_HEAD, made.shared] = 1.0
                key.mul_(0.1)
                key[made.pick(SLOWEST) :: D_HEAD, made.shared] = 15.0
                bias[pair::D_HEAD] = 3.0
                attention.q_norm.weight[pair::D_HEAD] = 2.0
                attention.k_norm.weight[pair::D_HEAD] = 1.5
            else:
                query[pair::D_HEAD, made.shared] = 6.5 * made.sign
                bias[pair::D_HEAD] = -32.0 * made.sign
    biases = tuple(
        Maker(kind="key bias", layer=layer, index=head)
        for layer in locked
        for head in range(N_KV_HEADS)
    )
    makers = (*biases, Maker(kind="embedding", index=BOS_ID)) if normed else biases
    truth = Truth(
        sink="token" if normed else "first",
        tokens=(BOS_ID,) if normed else (),
        locked=locked,
        feeding=tuple(range(locked[0])),
        makers=makers,
        enough=(makers,),
        outliers={},
        links=answers(
            BESIDE,
            after_w_o(family),
            NO,
            NOTHING,
            NOTHING,
            YES if normed else BESIDE,
        ),
    )
    bos = BOS_ID if normed else None
    return ZooModel(
        name="key_bias", family=family, seed=seed, model=made.model, bos_id=bos, truth=truth
    )


def sink_logit(*, seed: int, family: str) -> ZooModel:
    """(i) A learned logit in every head takes nine tenths of the attention from the second layer on; no key gets it."""
    if family == "gpt_oss":
        model: Any = build_random_model(
            config_of("gpt_oss", initializer_range=0.02), seed=seed, noise=0.0
        )
    elif family == "headnorm":
        model = draft(family="headnorm", seed=seed, attention="sink_logit").model
    else:
        raise ModelError(f"{family!r} has no learned sink logit; need gpt_oss or headnorm")
    layers = range(len(model.model.layers))
    locked = tuple(layers[1:])
    with torch.no_grad():
        for layer in layers:
            model.model.layers[layer].self_attn.sinks.fill_(
                _SINK_LOGIT if layer in locked else -10.0
            )
    makers = tuple(
        Maker(kind="sink logit", layer=layer, index=head)
        for layer in locked
        for head in range(N_HEADS)
    )
    truth = Truth(
        sink="sink logit",
        locked=locked,
        feeding=(0,),
        makers=makers,
        enough=(makers,),
        outliers={},
        links=answers(BESIDE, BESIDE, NO, NOTHING, NOTHING, NOTHING),
    )
    return ZooModel(
        name="sink_logit", family=family, seed=seed, model=model, bos_id=None, truth=truth
    )


def token_truth(
    tokens: tuple[int, ...],
    *,
    makers: tuple[Maker, ...],
    enough: tuple[tuple[Maker, ...], ...],
    dimension: int,
    family: str,
    n_layers: int,
    varies: bool = True,
    layer: int | None = None,
    feeds: tuple[Maker, ...] = (),
) -> Truth:
    """The truth of models in which a token triggers neurons of one layer that write one dimension, read by later keys.

    The first position averages nothing, so its values also vary more, but this does not make the sink. For a sink token
    at any position (`varies` False) the values do not vary more either. The last neurons may fire later (`layer`), if
    others feed them.
    """
    layer = makers[0].layer if layer is None else layer
    assert layer is not None
    values = BESIDE if varies else NO
    return Truth(
        sink="token",
        tokens=tokens,
        locked=tuple(range(layer + 1, n_layers)),
        feeding=tuple(range(layer + 1)),
        grows=(layer,),
        makers=makers,
        feeds=feeds,
        enough=enough,
        outliers=dict.fromkeys(range(layer, n_layers), (dimension,)),
        links=answers(values, after_w_o(family) if varies else NO, YES, YES, YES, YES),
    )


def after_w_o(family: str) -> Answers:
    """Return whether the extra variance of the first position survives after W_O; a post-norm removes it."""
    return NO if family in ("olmo2", "gemma3") else BESIDE


@torch.no_grad()
def clear(made: Draft, unit: Float[Tensor, " d_model"]) -> None:
    """Remove a direction from the embeddings and from the outputs of the random weights."""
    embedding = made.model.model.embed_tokens.weight
    embedding -= torch.outer(embedding @ unit, unit)
    for block in made.model.model.layers:
        for writer in (block.self_attn.o_proj, block.mlp.down_proj):
            writer.weight -= torch.outer(unit, unit @ writer.weight)


@torch.no_grad()
def mark(made: Draft, tokens: list[int]) -> None:
    """Give tokens the component that the planted neurons read."""
    made.model.model.embed_tokens.weight[tokens, made.trigger] = 2.0 * made.unit


def fire(
    made: Draft,
    *,
    layer: int,
    index: int,
    reads: int | Mapping[int, float],
    writes: Mapping[int, float],
    token: int,
    ballast: int | None = None,
    weight: float = 4.0,
    loud: float = _FIRES,
) -> None:
    """Write a neuron that a token triggers and that changes dimensions of the token's stream by given amounts.

    Before a post-norm, the neuron's column is large compared with the layer's ballast (unless it is less `loud`), and
    the norm's gain sets the amounts.
    """
    size = float(torch.tensor(list(writes.values())).norm())
    given = {reads: weight} if isinstance(reads, int) else reads
    neuron(made, layer=layer, index=index, gate=given, up=given, down={})
    fires = activation(made, token=token, layer=layer, index=index)
    scale = (loud / size if made.post_norm else 1.0) / fires
    neuron(
        made,
        layer=layer,
        index=index,
        gate=given,
        up=given,
        down={d: w * scale for d, w in writes.items()},
    )
    spare = (index + 1) % D_MLP if ballast is None else ballast
    gain = size / D_MODEL**0.5 / min(1.0, loud / _BALLAST)
    gains = {dimension: gain for dimension in writes}  # noqa: C420 - pyright
    load_ballast(made, layer=layer, index=spare, size=_BALLAST, gains=gains)


@torch.no_grad()
def _grow(made: Draft, *, layer: int, index: int, by: float, token: int) -> None:
    """Write a neuron that adds to the shared component of every token."""
    given: dict[int, float] = {made.shared: 1.0}
    neuron(made, layer=layer, index=index, gate=given, up=given, down={})
    fires = activation(made, token=token, layer=layer, index=index)
    size = _BALLAST if made.post_norm else by
    neuron(made, layer=layer, index=index, gate=given, up=given, down={made.shared: size / fires})
    if made.post_norm:
        made.gain(
            made.model.model.layers[layer].post_feedforward_layernorm,
            by / (D_MODEL / 2) ** 0.5,
            made.shared,
        )

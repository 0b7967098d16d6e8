"""The sink that averaging makes, written link by link, and six models with one broken link each.

Every token has a code of 32 signs. The heads of one layer attend uniformly, so the first position keeps its full code,
and position t gets an average of t + 1 codes, whose squared length is about 1 / (t + 1). W_O writes the average into
32 dimensions. Pairs of neurons read each dimension with both signs: `silu(x) x + silu(-x) (-x) = x**2`, so together
they write the squared length into one dimension. In the next layer a single neuron fires if this length exceeds 0.82
times that of a full code, and writes the outlier dimension. After the norm the token is nearly a basis vector. W_K
reads it, and W_Q reads the component that all tokens share. The model uses neither the position nor the token: if
another position is isolated, it gets half of the sink.

In post-norm models (`olmo2`) the planted layers also write a constant, since their outputs are normed; see `writing`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .truth import BROKEN, FIRST_ORDINARY, LINKS, NOTHING, SEEN, YES, Maker, Truth, ZooModel
from .writing import (
    D_HEAD,
    HUGE,
    N_CODES,
    N_HEADS,
    SHARED,
    Draft,
    draft,
    last_layers,
    load_ballast,
    lock,
    neuron,
)

BREAKS = (
    "aggregation_variance",
    "variance_preserved",
    "variance_neurons",
    "neurons_dimension",
    "dimension_key",
    "key_sink",
)
"""The links that can be broken."""
_WHOLE = 2.0
"""Value that the gathering neurons write for a full code."""
_THRESHOLD = 0.82
_PER_HEAD = N_CODES // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Layers and indices of the planted parts of the chain."""

    layer: int
    """The layer that averages and gathers."""
    gathering: tuple[int, ...]
    """The neurons of this layer that measure the squared length of the average."""
    fires: tuple[int, ...]
    """The neurons of the next layer that write the outlier dimension."""


def variance(*, seed: int, family: str) -> ZooModel:
    """(c) The first position differs only because attention averages; every link of the chain holds."""
    made = draft(family=family, seed=seed, coded=True)
    chain = write_chain(made)
    return ZooModel(
        name="variance",
        family=family,
        seed=seed,
        model=made.model,
        bos_id=None,
        truth=chain_truth(made, chain),
    )


def first_window(*, seed: int, family: str) -> ZooModel:
    """(n) Model (c) with windows of 12: only queries of the first window can attend to the first position."""
    made = draft(family=family, seed=seed, coded=True, sliding_window=12)
    truth = replace(chain_truth(made, write_chain(made)), reach=12)
    return ZooModel(
        name="first_window", family=family, seed=seed, model=made.model, bos_id=None, truth=truth
    )


def unread_variance(*, seed: int, family: str) -> ZooModel:
    """(k) The variance discrepancy exists and W_O writes it, but no neuron and no key reads it."""
    made = draft(family=family, seed=seed, coded=True)
    layer = made.pick(2)
    write_values(made, layer=layer)
    links = dict.fromkeys(LINKS, NOTHING) | dict.fromkeys(LINKS[:2], SEEN) | {LINKS[2]: BROKEN}
    truth = Truth(sink="none", feeding=(layer,), outliers={}, links=links)
    return ZooModel(
        name="unread_variance", family=family, seed=seed, model=made.model, bos_id=None, truth=truth
    )


def broken(link: str, *, seed: int, family: str) -> ZooModel:
    """The model `variance` with one link broken; with the same seed, all other weights are bit-identical.

    aggregation_variance: all tokens have the same code, so averaging does not shrink it. variance_preserved: W_O writes
    the same vector at every position. variance_neurons: the gathering neurons read nothing. neurons_dimension: the
    firing neuron writes nothing. dimension_key: W_K does not read the dimension. key_sink: W_Q does not read the
    component that all tokens share.
    """
    made = draft(family=family, seed=seed, coded=True)
    chain = write_chain(made)
    _BREAKING[link](made, chain)
    whole = chain_truth(made, chain)
    place = LINKS.index(link)
    links = {name: SEEN if LINKS.index(name) < place else NOTHING for name in LINKS} | {
        link: BROKEN
    }
    has_outlier = place > LINKS.index("neurons_dimension")
    truth = replace(
        whole,
        sink="none",
        locked=(),
        enough=(),
        makers=whole.makers if has_outlier else (),
        outliers=whole.outliers if has_outlier else {},
        links=links,
    )
    return ZooModel(
        name=f"broken_{link}", family=family, seed=seed, model=made.model, bos_id=None, truth=truth
    )


def write_chain(made: Draft, *, layer: int | None = None, size: float = HUGE) -> Chain:
    """All links, in a random layer if none is given; the outlier dimension gets a `size`."""
    layer = made.pick(2) if layer is None else layer
    write_values(made, layer=layer)
    gathering = write_gathering(made, layer=layer)
    fires = _write_trigger(made, layer=layer + 1, size=size)
    lock(made, layers=last_layers(made, after=layer + 1), reads={made.outlier: made.sign})
    return Chain(layer=layer, gathering=gathering, fires=(fires,))


@torch.no_grad()
def write_values(made: Draft, *, layer: int) -> None:
    """Write values that read the codes and a W_O that writes them into the carried dimensions, half by each head."""
    block = made.model.model.layers[layer]
    value, output = block.self_attn.v_proj.weight, block.self_attn.o_proj.weight
    per_unit = 1.0 if made.post_norm else 0.27
    for place, (code, carried) in enumerate(zip(made.codes, made.carried, strict=True)):
        row = place // _PER_HEAD * D_HEAD + place % _PER_HEAD
        value[row] = 0.0
        value[row, code] = 1.0
        for head in (2 * (place // _PER_HEAD), 2 * (place // _PER_HEAD) + 1):
            output[:, head * D_HEAD + place % _PER_HEAD] = 0.0
            output[carried, head * D_HEAD + place % _PER_HEAD] = per_unit / 2
    if made.post_norm:
        value[_PER_HEAD] = 0.0
        value[_PER_HEAD, made.shared] = 1.0
        output[:, _PER_HEAD] = 0.0
        output[made.ballast, _PER_HEAD] = 8.0 / SHARED
        made.gain(block.post_attention_layernorm, 0.6, list(made.carried))


def write_gathering(made: Draft, *, layer: int) -> tuple[int, ...]:
    """Write two neurons for each carried dimension; together they write its square."""
    reads = 2.0 if made.post_norm else 1.0
    chosen = made.neurons(2 * N_CODES + 1)
    for place, carried in enumerate(made.carried):
        for index, sign in ((chosen[2 * place], reads), (chosen[2 * place + 1], -reads)):
            given = {carried: sign}
            neuron(made, layer=layer, index=index, gate=given, up=given, down={made.gathered: 1.0})
    load_ballast(made, layer=layer, index=chosen[-1], size=30.0, gains={made.gathered: 0.44})
    if not made.post_norm:
        _scale(made, layer=layer, neurons=chosen[:-1], dimension=made.gathered, size=_WHOLE)
    return tuple(chosen[:-1])


def _write_trigger(made: Draft, *, layer: int, size: float) -> int:
    """Write a neuron that fires if the gathered length is above the threshold and then writes the outlier dimension."""
    fires, ballast = made.neurons(2)
    reads = above(made, made.gathered, least=_THRESHOLD * _WHOLE)
    write_when(made, layer=layer, index=fires, ballast=ballast, reads=reads, size=size)
    return fires


def above(made: Draft, dimension: int, *, least: float) -> dict[int, float]:
    """Return what a neuron reads (dimension -> weight) that fires if a dimension is above a value."""
    steep = 60.0 if made.post_norm else 28.0
    return {dimension: steep, made.shared: -steep * least / SHARED}


def write_when(
    made: Draft,
    *,
    layer: int,
    index: int,
    ballast: int,
    reads: Mapping[int, float],
    size: float = HUGE,
    tokens: Sequence[int] = tuple(range(FIRST_ORDINARY, FIRST_ORDINARY + 64)),
) -> None:
    """Write a neuron that writes the outlier dimension when it fires, as it does for the tokens at position 0."""
    neuron(made, layer=layer, index=index, gate=reads, up=reads, down={made.outlier: made.sign})
    if not made.post_norm:
        _scale(made, layer=layer, neurons=[index], dimension=made.outlier, size=size, tokens=tokens)
    load_ballast(made, layer=layer, index=ballast, size=30.0, gains={made.outlier: size / 96**0.5})


@torch.no_grad()
def _scale(
    made: Draft,
    *,
    layer: int,
    neurons: list[int],
    dimension: int,
    size: float,
    tokens: Sequence[int] = tuple(range(FIRST_ORDINARY, FIRST_ORDINARY + 64)),
) -> None:
    """Scale the neurons so that their output for a token that sees only itself has a given mean over tokens."""
    alone = torch.tensor(tokens)[:, None]
    stream = made.model(alone, output_hidden_states=True).hidden_states
    written = stream[layer + 1][:, 0, dimension].abs().mean()
    made.model.model.layers[layer].mlp.down_proj.weight[dimension, neurons] *= size / written


def chain_truth(made: Draft, chain: Chain) -> Truth:
    """The truth of the full chain. The gathering neurons make the sink together; no small set of them is enough."""
    fires = tuple(Maker(kind="neuron", layer=chain.layer + 1, index=index) for index in chain.fires)
    gathering = tuple(
        Maker(kind="neuron", layer=chain.layer, index=index) for index in chain.gathering
    )
    heads = tuple(Maker(kind="head", layer=chain.layer, index=head) for head in range(N_HEADS))
    locked = last_layers(made, after=chain.layer + 1)
    makers = (*heads, *gathering, *fires)
    return Truth(
        sink="first",
        locked=locked,
        feeding=(chain.layer,),
        grows=(chain.layer + 1,),
        makers=makers,
        feeds=(*heads, *gathering),
        enough=(makers,),
        outliers=dict.fromkeys(range(chain.layer + 1, made.n_layers), (made.outlier,)),
        links=dict.fromkeys(LINKS, YES),
        by="direction"
        if made.post_norm
        else "size",  # a norm takes the size of what attention writes away
    )


def _one_code(made: Draft, chain: Chain) -> None:
    del chain
    embedding = made.model.model.embed_tokens.weight
    embedding[:, list(made.codes)] = embedding[:1, list(made.codes)].clone()


def _one_output(made: Draft, chain: Chain) -> None:
    block = made.model.model.layers[chain.layer]
    value, output = block.self_attn.v_proj.weight, block.self_attn.o_proj.weight
    value[_PER_HEAD] = 0.0
    value[_PER_HEAD, made.shared] = 1.0
    vector = torch.zeros(output.shape[0])
    vector[list(made.free)] = torch.randn(len(made.free), generator=made.generator) * 0.05
    if made.post_norm:
        vector[made.ballast] = 8.0 / SHARED
    output.zero_()
    output[:, _PER_HEAD] = vector


def _unread_length(made: Draft, chain: Chain) -> None:
    mlp = made.model.model.layers[chain.layer].mlp
    for index in chain.gathering:
        mlp.gate_proj.weight[index] = 0.0
        mlp.up_proj.weight[index] = 0.0


def _unwritten(made: Draft, chain: Chain) -> None:
    made.model.model.layers[chain.layer + 1].mlp.down_proj.weight[:, list(chain.fires)] = 0.0


def _unread_dimension(made: Draft, chain: Chain) -> None:
    for layer in last_layers(made, after=chain.layer + 1):
        made.model.model.layers[layer].self_attn.k_proj.weight[:, made.outlier] = 0.0


def _blind(made: Draft, chain: Chain) -> None:
    for layer in last_layers(made, after=chain.layer + 1):
        made.model.model.layers[layer].self_attn.q_proj.weight[:, made.shared] = 0.0


_BREAKING: dict[str, Any] = {
    link: torch.no_grad()(breaks)
    for link, breaks in zip(
        BREAKS,
        (_one_code, _one_output, _unread_length, _unwritten, _unread_dimension, _blind),
        strict=True,
    )
}

"""Mechanisms that a trace of position 0, part by part, misses.

Some sequences have the sink and others do not; there are two; it stands behind BOS; either of two makers is enough and
one is an embedding; a neuron makes it by what it does to every other token; a dimension is large, but at every token.
"""

from dataclasses import replace

import torch

from sink_lens.models.tiny import BOS_ID

from .seen_in_trained import bos_written, carry, standing
from .truth import BESIDE, FIRST_ORDINARY, NO, NOTHING, YES, Answers, Maker, Truth, ZooModel
from .variance import above
from .with_sink import after_w_o, answers, clear, fire, mark, token_truth
from .writing import (
    D_MLP,
    D_MODEL,
    HUGE,
    N_HEADS,
    Draft,
    activation,
    draft,
    last_layers,
    lock,
    neuron,
)

_COMMON, _OVER = 30.0, 50.0
"""Size of what every token has, and of what the sink has beside it."""
_EMBEDDED = 20.0
"""Size of a dimension that an embedding brings."""
_BEHIND = 0.42
"""The position behind BOS averages half of its mark, the next one a third."""
_PLACE = 4
"""Position of the second of two sinks."""


def some(name: str, every: int, *, seed: int, family: str) -> ZooModel:
    """(aa, ab) A neuron fires for eight first tokens; one in two, or in six, of the sequences begins with one."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    firsts = tuple(
        (FIRST_ORDINARY + 64 + torch.randperm(200, generator=made.generator)[:8]).tolist()
    )
    mark(made, list(firsts))
    writes = {made.outlier: made.sign * HUGE}
    fire(made, layer=layer, index=index, reads=made.trigger, writes=writes, token=firsts[0])
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    truth = of_token(made, firsts, layer=layer, index=index)
    more = {"firsts": firsts, "first_every": every}
    return ZooModel(
        name=name, family=family, seed=seed, model=made.model, bos_id=None, truth=truth, **more
    )


def two_sinks(*, seed: int, family: str) -> ZooModel:
    """(ac) Model (b) in which another token triggers the neuron too; it always stands at position 4."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    token = FIRST_ORDINARY + 64 + made.pick(200)
    mark(made, [BOS_ID, token])
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    truth = of_token(made, (BOS_ID, token), layer=layer, index=index)
    return token_model("two_sinks", made, seed, truth, placed=((_PLACE, token),))


def second(*, seed: int, family: str) -> ZooModel:
    """(ad) Model (b) in sequences that all have an ordinary token before BOS: the sink is at position 1."""
    return replace(bos_written("second", seed=seed, family=family), late_every=1)


def behind_bos(*, seed: int, family: str) -> ZooModel:
    """(ae) A head averages BOS's mark; a neuron fires where half of it is left, at the token behind BOS."""
    made = draft(family=family, seed=seed)
    mark(made, [BOS_ID])
    makers = _write_behind(made, token=FIRST_ORDINARY, size=HUGE)
    layer = makers[1].layer
    assert layer is not None
    beside = Answers(
        present="yes", necessary_or_sufficient="no", carries="yes"
    )  # isolation brings no mark
    truth = _behind(
        made, layer, makers=makers, enough=(makers,), links=(beside, YES, YES, YES, YES, YES)
    )
    return token_model("behind_bos", made, seed, truth)


def either_embedding(*, seed: int, family: str) -> ZooModel:
    """(af) Model (ae), where the token behind BOS also has the dimension in its embedding: either is enough."""
    made = draft(family=family, seed=seed)
    token = FIRST_ORDINARY + 64 + made.pick(200)
    mark(made, [BOS_ID])
    with torch.no_grad():
        made.model.model.embed_tokens.weight[token, made.outlier] = made.sign * _EMBEDDED
    makers = _write_behind(made, token=token, size=1.5 * _EMBEDDED)
    layer = makers[1].layer
    assert layer is not None
    embedded = Maker(kind="embedding", index=token)
    written = Answers(
        present="yes", necessary_or_sufficient="no", carries="yes"
    )  # the embedding writes it too
    links = (BESIDE, after_w_o(family), BESIDE, written, YES, YES)
    truth = _behind(
        made, layer, makers=(embedded, *makers), enough=((embedded,), makers), links=links
    )
    outliers = dict.fromkeys(range(-1, made.n_layers), (made.outlier,))
    truth = replace(truth, outliers=outliers, alone=(token,))
    return token_model("either_embedding", made, seed, truth, placed=((1, token),))


def held_down(*, seed: int, family: str) -> ZooModel:
    """(ag) Every token has the dimension, and a neuron takes it away from all of them but BOS."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    with torch.no_grad():
        made.model.model.embed_tokens.weight[:, made.outlier] = made.sign * _EMBEDDED
    reads = {made.shared: 1.0, made.trigger: -1.0}  # BOS has as much of the one as of the other
    neuron(made, layer=layer, index=index, gate=reads, up=reads, down={})
    tokens = range(FIRST_ORDINARY, FIRST_ORDINARY + 16)
    fires = sum(activation(made, token=token, layer=layer, index=index) for token in tokens) / len(
        tokens
    )
    takes = 1.15 * _EMBEDDED  # a little more than there is: what is left to a token draws nothing
    neuron(
        made,
        layer=layer,
        index=index,
        gate=reads,
        up=reads,
        down={made.outlier: -made.sign * takes / fires},
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign})
    truth = of_token(made, (BOS_ID,), layer=layer, index=index)
    silent = Answers(
        present="no", necessary_or_sufficient="yes", carries="yes"
    )  # the one token that it does not touch
    links = answers(BESIDE, after_w_o(family), silent, silent, YES, YES)
    return token_model("held_down", made, seed, replace(truth, links=links, elsewhere=True))


def common_dimension(*, seed: int, family: str) -> ZooModel:
    """(ah) Model (b), where every token's embedding has a large dimension that nothing reads."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    mark(made, [BOS_ID])
    _common(made)
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * _OVER},
        token=BOS_ID,
    )
    lock(made, layers=last_layers(made, after=layer), reads={made.outlier: made.sign}, weight=24.0)
    truth = of_token(made, (BOS_ID,), layer=layer, index=index)
    return token_model("common_dimension", made, seed, truth)


def common_beside_direction(*, seed: int, family: str) -> ZooModel:
    """(ai) Model (f), where every token's embedding has a large dimension that nothing reads."""
    made = draft(family=family, seed=seed)
    layer, index = 1 + made.pick(2), made.pick(D_MLP)
    order = torch.randperm(len(made.free), generator=made.generator)[:36].tolist()
    signs = torch.randint(2, (36,), generator=made.generator) * 2.0 - 1.0
    unit = torch.zeros(D_MODEL)
    unit[[made.free[place] for place in order]] = signs / 6
    clear(made, unit)
    mark(made, [BOS_ID])
    _common(made)
    writes = {
        made.free[place]: float(sign) * 2 * HUGE / 6
        for place, sign in zip(order, signs, strict=True)
    }
    fire(made, layer=layer, index=index, reads=made.trigger, writes=writes, token=BOS_ID)
    lock(made, layers=last_layers(made, after=layer), reads=unit, weight=24.0)
    links = answers(BESIDE, after_w_o(family), YES, NO, NOTHING, YES)
    truth = of_token(made, (BOS_ID,), layer=layer, index=index)
    truth = replace(truth, outliers={}, direction=unit, links=links)
    return token_model("common_beside_direction", made, seed, truth)


def token_model(
    name: str, made: Draft, seed: int, truth: Truth, *, placed: tuple[tuple[int, int], ...] = ()
) -> ZooModel:
    """A model whose sequences begin with BOS."""
    more = {"bos_id": BOS_ID, "placed": placed}
    return ZooModel(name=name, family=made.family, seed=seed, model=made.model, truth=truth, **more)


def of_token(
    made: Draft, tokens: tuple[int, ...], *, layer: int, index: int, varies: bool = True
) -> Truth:
    """The truth of a dimension that one neuron writes for some tokens and that later keys read."""
    maker = Maker(kind="neuron", layer=layer, index=index)
    at = {
        "dimension": made.outlier,
        "family": made.family,
        "n_layers": made.n_layers,
        "varies": varies,
    }
    return token_truth(tokens, makers=(maker,), enough=((maker,),), **at)


def _behind(
    made: Draft,
    layer: int,
    *,
    makers: tuple[Maker, ...],
    enough: tuple[tuple[Maker, ...], ...],
    links: tuple,
) -> Truth:
    """The truth of a dimension that a neuron of a layer writes behind BOS."""
    return Truth(
        sink="behind",
        tokens=(BOS_ID,),
        locked=last_layers(made, after=layer),
        feeding=tuple(range(layer + 1)),
        grows=(layer,),
        makers=makers,
        feeds=tuple(maker for maker in makers if maker.kind == "head"),
        enough=enough,
        outliers=dict.fromkeys(range(layer, made.n_layers), (made.outlier,)),
        links=answers(*links),
    )


@torch.no_grad()
def _write_behind(made: Draft, *, token: int, size: float) -> tuple[Maker, Maker]:
    """Write the head, the neuron that fires behind BOS, and the keys; what it writes at the token has a given size."""
    layer = made.pick(2)
    head, fires = made.pick(N_HEADS), made.pick(D_MLP)
    carry(made, layer=layer, head=head, reads=made.trigger, writes=made.gathered)
    reads = above(
        made,
        made.gathered,
        least=_BEHIND * standing(made, BOS_ID, layer=layer, dimension=made.gathered),
    )
    reads |= {made.trigger: -reads[made.gathered]}  # not at BOS itself
    at = {"layer": layer + 1, "index": fires, "gate": reads, "up": reads}
    neuron(made, **at, down={})
    before = standing(made, BOS_ID, token, layer=layer + 1, dimension=made.outlier)
    neuron(made, **at, down={made.outlier: made.sign})
    unit = abs(standing(made, BOS_ID, token, layer=layer + 1, dimension=made.outlier) - before)
    neuron(made, **at, down={made.outlier: made.sign * size / unit})
    lock(made, layers=last_layers(made, after=layer + 1), reads={made.outlier: made.sign})
    return Maker(kind="head", layer=layer, index=head), Maker(
        kind="neuron", layer=layer + 1, index=fires
    )


@torch.no_grad()
def _common(made: Draft) -> None:
    """Give every token a large dimension that neither queries nor keys read."""
    made.model.model.embed_tokens.weight[:, made.second] = _COMMON * made.unit
    for block in made.model.model.layers:
        block.self_attn.q_proj.weight[:, made.second] = 0.0
        block.self_attn.k_proj.weight[:, made.second] = 0.0

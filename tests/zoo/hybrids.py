"""Models in which attention and mixers take turns: layers 0, 2 and 4 have a mixer, layers 1, 3 and 5 attention.

A mechanism can be written into three architectures. Their mixers are a short convolution (`lfm2`), Mamba (`jamba`,
which has no positions in its attention) and Mamba 2 (`bamba`). All norm before each sublayer.
"""

from typing import Any

import torch

from sink_lens.models.tiny import BOS_ID

from .truth import (
    BESIDE,
    BROKEN,
    LINKS,
    NO,
    NOT_ASKED,
    NOTHING,
    SEEN,
    YES,
    Answers,
    Maker,
    Truth,
    ZooModel,
)
from .with_sink import answers, fire, mark
from .writing import HUGE, Draft, draft, lock

WITH, WITHOUT = (1, 3, 5), (0, 2, 4)
"""The layers with attention, and those with a mixer."""
_LOUD = 3.0
"""What the state of `state_sink` writes into every later token."""


def in_mixer_layer(*, seed: int, family: str) -> ZooModel:
    """(aj) A neuron that BOS triggers, in a layer that has a mixer in place of attention, writes the outlier dimension.

    In half of the models the layer comes before any attention, so that the first two links cannot be asked.
    """
    made = draft(family=family, seed=seed, n_layers=6)
    layer, index = 2 * made.pick(2), made.pick(160)
    mark(made, [BOS_ID])
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    maker = Maker(kind="neuron", layer=layer, index=index)
    return _read(made, layer=layer, maker=maker, links=(YES, YES), name="in_mixer_layer", seed=seed)


def mixer_spike(*, seed: int, family: str) -> ZooModel:
    """(ak) A channel of a mixer that BOS triggers writes the outlier dimension; no neuron does."""
    made = draft(family=family, seed=seed, n_layers=6)
    layer = 2 * made.pick(2)
    mark(made, [BOS_ID])
    _write_channel(made, layer=layer, channel=made.pick(96))
    written = Answers(
        present="no", necessary_or_sufficient="no", carries="yes"
    )  # no neuron writes the dimension
    maker = Maker(kind="mixer", layer=layer, index=0)
    return _read(made, layer=layer, maker=maker, links=(NO, written), name="mixer_spike", seed=seed)


def state_sink(*, seed: int, family: str) -> ZooModel:
    """(al) A neuron of BOS writes a dimension that no key reads; a mixer's state keeps it and gives it to every token.

    All later tokens hang on the first one, and no attention goes to it: there is no key, and no attention sink.
    """
    made = draft(family=family, seed=seed, n_layers=6)
    layer, index, mixer = 0, made.pick(160), 2 + 2 * made.pick(2)
    mark(made, [BOS_ID])
    fire(
        made,
        layer=layer,
        index=index,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    with torch.no_grad():
        for later in WITH:
            made.model.model.layers[later].self_attn.k_proj.weight[:, made.outlier] = 0.0
    _keep_in_state(made, layer=mixer)
    truth = Truth(
        sink="none",
        feeding=(),
        kept=mixer,
        makers=(Maker(kind="neuron", layer=layer, index=index),),
        outliers=dict.fromkeys(range(layer, made.n_layers), (made.outlier,)),
        links=dict(zip(LINKS, (NOT_ASKED, NOT_ASKED, SEEN, SEEN, BROKEN, NOTHING), strict=True)),
    )
    return ZooModel(
        name="state_sink", family=family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


def _read(
    made: Draft, *, layer: int, maker: Maker, links: tuple[Answers, Answers], name: str, seed: int
) -> ZooModel:
    """The model with heads that read the dimension in every layer with attention behind the one that writes it."""
    locked, feeding = (
        tuple(one for one in WITH if (one > layer) is behind) for behind in (True, False)
    )
    lock(made, layers=locked, reads={made.outlier: made.sign})
    values = BESIDE if feeding else NOT_ASKED
    truth = Truth(
        sink="token",
        tokens=(BOS_ID,),
        locked=locked,
        feeding=feeding,
        grows=(layer,),
        makers=(maker,),
        enough=((maker,),),
        outliers=dict.fromkeys(range(layer, made.n_layers), (made.outlier,)),
        links=answers(values, values, *links, YES, YES),
    )
    return ZooModel(
        name=name, family=made.family, seed=seed, model=made.model, bos_id=BOS_ID, truth=truth
    )


@torch.no_grad()
def _write_channel(made: Draft, *, layer: int, channel: int) -> None:
    """Write a channel of a mixer that reads the trigger and writes the outlier dimension at the same position."""
    mixer = made.mixer(layer)
    if made.family == "lfm2":
        before, after, value = (mixer.in_proj.weight[part * 96 + channel] for part in range(3))
        taps = mixer.conv.weight[channel, 0]
        reads = ((before, made.trigger), (after, made.trigger), (value, made.trigger))
    else:  # D passes the channel by the state, which it hardly enters
        value, after = mixer.in_proj.weight[channel], mixer.in_proj.weight[len(mixer.D) + channel]
        taps = mixer.conv1d.weight[channel, 0]
        reads = ((value, made.trigger), (after, made.trigger))
        mixer.D[channel] = 1.0
        mixer.x_proj.weight[:, channel] = 0.0
        mixer.dt_proj.weight[channel], mixer.dt_proj.bias[channel] = 0.0, -30.0
        mixer.conv1d.bias[channel] = 0.0
    for row, dimension in reads:
        row.zero_()
        row[dimension] = 1.0
    taps.zero_()
    taps[-1] = 1.0
    mixer.out_proj.weight[:, channel] = 0.0
    mixer.out_proj.weight[made.outlier, channel] = 1.0
    written = _written(made, layer=layer, token=BOS_ID)[0, made.outlier]
    mixer.out_proj.weight[made.outlier, channel] = made.sign * HUGE / written


@torch.no_grad()
def _keep_in_state(made: Draft, *, layer: int) -> None:
    """Write a channel whose state takes the outlier dimension up, keeps it, and gives it to every later token."""
    mixer = made.mixer(layer)
    if made.family == "jamba":
        kept, steady = made.neurons(2)
        size, rank = len(mixer.D), mixer.time_step_rank
        for row, dimension in (
            (kept, made.outlier),
            (size + kept, made.shared),
            (steady, made.shared),
        ):
            mixer.in_proj.weight[row] = 0.0
            mixer.in_proj.weight[row, dimension] = made.sign if dimension == made.outlier else 1.0
        mixer.conv1d.weight[[kept, steady]] = 0.0
        mixer.conv1d.weight[[kept, steady], 0, -1] = 1.0
        mixer.conv1d.bias[[kept, steady]] = 0.0
        mixer.x_proj.weight[rank:] = 0.0
        mixer.x_proj.weight[rank:, steady] = 1.0
        mixer.dt_proj.weight[kept], mixer.dt_proj.bias[kept] = 0.0, 0.0
        mixer.A_log[kept] = -30.0
        channels = [kept]
    else:
        head, size, states = (
            made.pick(mixer.num_heads),
            mixer.intermediate_size,
            mixer.ssm_state_size,
        )
        channels = list(range(head * mixer.head_dim, (head + 1) * mixer.head_dim))
        own = [size + one for one in channels]  # behind the gates of all channels
        both = list(range(2 * size, 2 * size + 2 * states))
        for rows, dimension, weight in (
            (own, made.outlier, 4.0 * made.sign),
            (both, made.shared, 1.0),
            (channels, made.shared, 1.0),
        ):
            mixer.in_proj.weight[rows] = 0.0
            mixer.in_proj.weight[rows, dimension] = weight
        mixer.in_proj.weight[2 * size + 2 * states + head] = 0.0
        convolved = [*channels, *range(size, size + 2 * states)]
        mixer.conv1d.weight[convolved] = 0.0
        mixer.conv1d.weight[convolved, 0, -1] = 1.0
        mixer.conv1d.bias[convolved] = 0.0
        # Ordinary tokens, which have a little of the dimension, enter nothing: a norm would raise what gathers.
        mixer.conv1d.bias[channels] = -10.0
        mixer.dt_bias[head], mixer.A_log[head], mixer.D[head] = 0.0, -30.0, 0.0
    mixer.out_proj.weight[:, channels] = 0.0
    mixer.out_proj.weight[made.gathered, channels[0]] = 1.0
    after = _written(made, layer=layer, token=BOS_ID, then=(7, 8, 9))[2:, made.gathered]
    mixer.out_proj.weight[made.gathered, channels[0]] = _LOUD / after.mean()


@torch.no_grad()
def _written(made: Draft, *, layer: int, token: int, then: tuple[int, ...] = ()) -> torch.Tensor:
    """Output of a layer's mixer on a few tokens: [position d_model]."""
    found: list[Any] = []
    take = lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out)  # noqa: E731
    handle = made.mixer(layer).register_forward_hook(take)
    made.model.model(torch.tensor([[token, *then]]), use_cache=False)
    handle.remove()
    return found[0][0]

"""The edges that carry the sink of a zoo model, derived from its construction.

An edge is *needed* where the sink goes, in part or whole, if what it carries alone is replaced by its mean over
ordinary positions. The edges of parts that stand in for each other, or that give and take what saturates, are
*spare*: they are neither right nor wrong to name. What all tokens have, as the component that queries read, is its own
mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .truth import Maker, ZooModel
from .writing import N_HEADS, N_KV_HEADS

_ONE_NEURON = (
    "bos_neuron",
    "redundant",
    "direction",
    "eraser",
    "cancelled_bias",
    "beside",
    "elsewhere",
)
_CHAIN = ("variance", "bimodal", "bos_without", "first_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkEdges:
    """Names of edges, as a circuit has them."""

    needed: frozenset[str]
    spare: frozenset[str] = frozenset()


def sink_edges(zoo: ZooModel) -> SinkEdges | None:
    """Derive the edges that carry the sink at position 0, where means over ordinary positions replace what is ablated.

    Returns:
        The edges; None where no edge is needed alone (many parts make a little each, either of two is enough, a bias or
        a learned logit makes the sink), where the sink is not at position 0, or for a kind whose edges are not derived.
    """
    truth, name = zoo.truth, zoo.name
    keys = [reader for layer in truth.locked for reader in keys_of(layer)]
    layers = sorted(
        {
            maker.layer
            for maker in truth.makers
            if maker.kind == "neuron" and maker.layer is not None
        }
    )
    if name == "embedding" or (name == "key_bias" and truth.sink == "token"):
        return SinkEdges(needed=edges(["input"], keys))
    if name in (*_ONE_NEURON, "regrowth"):
        written = edges(["input"], [mlp(layers[0])]) | edges([mlp(layers[0])], keys)
        later = [mlp(layer) for layer in (*truth.erased, *(layer + 1 for layer in truth.erased))]
        return SinkEdges(needed=written, spare=among([mlp(layers[0]), *later], keys) - written)
    if name == "two_dimensions":
        first, second = (mlp(layer) for layer in layers)
        early = [
            reader for layer in truth.locked if layer <= layers[1] for reader in keys_of(layer)
        ]
        late = [one for one in keys if one not in early]
        needed = (
            edges(["input"], [first]) | edges([first], [*early, second]) | edges([second], late)
        )
        return SinkEdges(needed=needed, spare=edges([first], late))
    if name == "upstream":
        feeds, fires = (mlp(layer) for layer in layers)
        return SinkEdges(
            needed=edges(["input"], [feeds]) | edges([feeds], [fires]) | edges([fires], keys)
        )
    if name == "head_feeds":
        head, fires = truth.makers[0], mlp(layers[0])
        read = edges(["input"], [f"a{head.layer}.kv{head.index * N_KV_HEADS // N_HEADS}<v>"])
        return SinkEdges(needed=read | edges([head_of(head)], [fires]) | edges([fires], keys))
    if name in (*_CHAIN, "early_variance"):
        heads = [maker for maker in truth.makers if maker.kind == "head"]
        values = [f"a{heads[0].layer}.kv{head}<v>" for head in range(N_KV_HEADS)]
        gathers, fires = (mlp(layer) for layer in layers)
        needed = edges(["input"], values) | edges([head_of(head) for head in heads], [gathers])
        needed |= edges([gathers], [fires])
        sizes = edges(
            ["input"], [gathers, fires]
        )  # a mean is smaller, so that the norm raises what every token gathers
        if name != "early_variance":
            return SinkEdges(needed=needed | edges([fires], keys), spare=sizes)
        return SinkEdges(
            needed=needed, spare=sizes | among([mlp(layer) for layer in truth.grows], keys)
        )
    return None


def keys_of(layer: int) -> list[str]:
    """The keys of a layer."""
    return [f"a{layer}.kv{head}<k>" for head in range(N_KV_HEADS)]


def mlp(layer: int) -> str:
    """The MLP of a layer."""
    return f"m{layer}"


def head_of(maker: Maker) -> str:
    """The head that is a maker."""
    return f"a{maker.layer}.h{maker.index}"


def layer_of(node: str) -> int:
    """The layer of a head, an MLP or a reader."""
    return int(node[1:].partition(".")[0])


def edges(writers: Iterable[str], readers: Iterable[str]) -> frozenset[str]:
    """Every writer to every reader."""
    return frozenset(f"{writer}->{reader}" for writer in writers for reader in readers)


def among(mlps: list[str], keys: list[str]) -> frozenset[str]:
    """Every MLP to every later one, and to the keys after it."""
    return frozenset(
        f"{writer}->{reader}"
        for writer in mlps
        for reader in (*mlps, *keys)
        if layer_of(writer) < layer_of(reader)
    )

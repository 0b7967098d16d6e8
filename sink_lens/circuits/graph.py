"""The graph of a dense decoder: who writes to the residual stream, who reads it, and which edges there are.

A *writer* adds to the stream: the embedding (``input``), each head (``a3.h1``), each MLP (``m5``). A *reader* reads
it: the query of each head (``a4.h1<q>``), the key and the value of each key-value head (``a4.h1<k>``; ``a4.kv0<k>``
where several heads share one), each MLP (``m5``) and the unembedding (``logits``). An edge leads from a writer to
every reader that comes after it; ``a3.h1->m5`` and ``a0.h2->a4.h1<q>`` are names of edges, as in EAP-IG. In parallel
blocks the heads of a layer do not reach the MLP beside them. A set of neurons can be a node of its own (``m5.n``),
which the MLP's node then leaves out. With spans of positions every edge exists once a span (``a3.h1->m5@subject``):
both of its ends are at the same positions, since only attention moves between positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from ..errors import InputError, ModelError

if TYPE_CHECKING:
    from ..models.load import ModelLike
    from ..models.sized import Sized

EdgeMask = Bool[np.ndarray, " edge"]
EdgeValues = Float[np.ndarray, " edge"]
_STACK_BYTES = 192 * 2**20
"""Most bytes of what all writers add in one batch of pairs."""


class Node(NamedTuple):
    """A writer or a reader."""

    name: str
    kind: str
    """input, head, mlp or neurons; of a reader q, k, v, g (the gate of a head's output), mlp, neurons or logits."""
    layer: int
    """-1 for the input, the number of layers for logits."""
    stage: int
    """Place in the order of computation: attention of layer L is 2L + 1, its MLP 2L + 2, the input 0. A reader reads
    what is written before it."""
    head: int = -1
    """The key-value head for k and v."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph of one model; edges are numbered by span, then writer, then reader."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    parallel: bool = False
    """True if attention and MLP of a layer read the same stream."""
    gated: bool = False
    """True if each head's output has a gate that reads the stream."""
    neurons: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer -> the neurons of its MLP that are a node of their own."""
    spans: tuple[str, ...] = ("",)
    """Names of the spans of positions; one without a name is all positions."""

    @classmethod
    def of(
        cls,
        model: "ModelLike",
        *,
        neurons: Mapping[int, Sequence[int]] | None = None,
        spans: Sequence[str] = ("",),
    ) -> "Graph":
        """Make a model's graph; other arguments are ``Graph``'s fields.

        Raises:
            ModelError: a mixture of experts, a hybrid, or a model that can only be measured.
            InputError: a layer or a neuron that does not exist.
        """
        from ..models.lens import check_plain_layers, is_parallel
        from ..models.load import as_lens

        lens = as_lens(model)
        if lens.why_measured_only is not None:
            raise ModelError(lens.why_measured_only)
        check_plain_layers(lens)
        if lens.family.kv_latent is not None:
            raise ModelError(
                f"{lens.name} makes its queries, keys and values from latents that are normed once more (latent "
                "attention), so that what a head reads is no sum of what was written; need another model. sink-lens "
                "patch works on this one"
            )
        if lens.family.experts is not None:
            raise ModelError(
                f"{lens.name} is a mixture of experts: which experts run changes with the input, so that what an MLP "
                "writes is no sum of fixed parts; need a dense model. sink-lens patch works on this one"
            )
        gated = bool(getattr(lens.layer(0).get_submodule(lens.family.attention), "gated", False))
        return cls.of_sizes(
            lens, parallel=is_parallel(lens), gated=gated, neurons=neurons, spans=spans
        )

    @classmethod
    def of_sizes(
        cls,
        model: "Sized",
        *,
        parallel: bool,
        gated: bool = False,
        neurons: Mapping[int, Sequence[int]] | None = None,
        spans: Sequence[str] = ("",),
    ) -> "Graph":
        """Make the graph of a dense decoder from its sizes, without weights.

        Raises:
            InputError: a layer or a neuron that does not exist.
        """
        chosen: dict[int, tuple[int, ...]] = {}
        for layer, some in sorted((neurons or {}).items()):
            if not 0 <= layer < model.n_layers:
                raise InputError(
                    f"neurons of layer {layer} were given; need a layer from 0 to {model.n_layers - 1}"
                )
            numbers = tuple(sorted({int(one) for one in some}))
            if not numbers or numbers[0] < 0 or numbers[-1] >= model.d_mlp:
                raise InputError(
                    f"neurons {list(some)} of layer {layer}: need some from 0 to {model.d_mlp - 1}"
                )
            chosen[layer] = numbers
        return cls(
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            d_model=model.d_model,
            parallel=parallel,
            gated=gated,
            neurons=chosen,
            spans=tuple(spans),
        )

    @property
    def heads_per_key(self) -> int:
        """Heads that share a key-value head."""
        return self.n_heads // self.n_kv_heads

    @cached_property
    def writers(self) -> tuple[Node, ...]:
        """The writers in the order of computation; within an MLP, the neurons that are a node come first."""
        found = [Node("input", "input", -1, 0)]
        for layer in range(self.n_layers):
            stage = 2 * layer + 1
            found += [
                Node(f"a{layer}.h{head}", "head", layer, stage, head)
                for head in range(self.n_heads)
            ]
            found += self._mlp_nodes(layer, stage + 1)
        return tuple(found)

    def _mlp_nodes(self, layer: int, stage: int) -> list[Node]:
        own = [Node(f"m{layer}.n", "neurons", layer, stage)] if layer in self.neurons else []
        return [*own, Node(f"m{layer}", "mlp", layer, stage)]

    @cached_property
    def readers(self) -> tuple[Node, ...]:
        """The readers in the order of computation."""
        found: list[Node] = []
        kv = "h" if self.heads_per_key == 1 else "kv"
        kinds = [("q", "h", self.n_heads), ("k", kv, self.n_kv_heads), ("v", kv, self.n_kv_heads)]
        kinds += [("g", "h", self.n_heads)] * self.gated
        for layer in range(self.n_layers):
            stage = 2 * layer + 1
            found += [
                Node(f"a{layer}.{word}{head}<{kind}>", kind, layer, stage, head)
                for kind, word, count in kinds
                for head in range(count)
            ]
            found += self._mlp_nodes(layer, stage + (not self.parallel))
        return (*found, Node("logits", "logits", self.n_layers, 2 * self.n_layers + 1))

    @cached_property
    def places(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """(attention, mlp or logits; layer) -> indices of the readers of the stream at that place."""
        found: dict[tuple[str, int], tuple[int, ...]] = {}
        for index, reader in enumerate(self.readers):
            place = place_of_reader(reader.kind), reader.layer
            found[place] = (*found.get(place, ()), index)
        return found

    def writers_of_layer(self, layer: int) -> slice:
        """Return the slice of ``writers`` that belongs to a layer."""
        start = 1 + layer * (self.n_heads + 1) + sum(one < layer for one in self.neurons)
        return slice(start, start + self.n_heads + 1 + (layer in self.neurons))

    def n_pairs_per_pass(self, *, n_positions: int, itemsize: int = 4, copies: int = 1) -> int:
        """Return how many pairs (1 to 32) of ``n_positions`` tokens fit a pass that keeps ``copies`` of all outputs."""
        size = len(self.writers) * n_positions * self.d_model * itemsize * copies
        return min(max(_STACK_BYTES // size, 1), 32)

    def n_writers_before(self, reader: int) -> int:
        """Return how many writers come before the reader with this index: the first of ``writers``."""
        return self._writer_counts[reader]

    @cached_property
    def _writer_counts(self) -> tuple[int, ...]:
        stages = np.array([writer.stage for writer in self.writers])
        return tuple(int(np.searchsorted(stages, reader.stage)) for reader in self.readers)

    @cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three arrays with an entry per edge: the indices of its span, its writer and its reader."""
        mask = np.arange(len(self.writers))[:, None] < np.array(self._writer_counts)[None]
        found = np.nonzero(np.broadcast_to(mask, (len(self.spans), *mask.shape)))
        return found[0], found[1], found[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of spans, writers and readers."""
        return len(self.spans), len(self.writers), len(self.readers)

    @property
    def n_edges(self) -> int:
        """Number of edges."""
        return len(self.spans) * sum(self._writer_counts)

    @cached_property
    def names(self) -> np.ndarray:
        """Name of every edge, such as a0.h2->m1, in the order of edges."""
        spans, writers, readers = self.ends
        first = np.array([f"{one.name}->" for one in self.writers], dtype=object)[writers]
        second = np.array([one.name for one in self.readers], dtype=object)[readers]
        last = np.array([f"@{one}" if one else "" for one in self.spans], dtype=object)[spans]
        return first + second + last

    @cached_property
    def index(self) -> dict[str, int]:
        """Name of an edge -> its index."""
        return {name: number for number, name in enumerate(self.names.tolist())}

    @cached_property
    def reader_of_node(self) -> np.ndarray:
        """Mask [reader writer]: True if both belong to one node, such as a head's query and the head's output."""
        found = np.zeros((len(self.readers), len(self.writers)), dtype=bool)
        for row, reader in enumerate(self.readers):
            shared = self.heads_per_key if reader.kind in ("k", "v") else 1
            kind = "head" if place_of_reader(reader.kind) == "attention" else reader.kind
            for column, writer in enumerate(self.writers):
                if writer.layer != reader.layer:  # of most pairs; a tuple each would take seconds
                    continue
                same = (writer.kind, writer.head // shared)
                found[row, column] = same == (kind, reader.head)
        return found

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """Return values, one per edge, as an array [span writer reader] that is 0 where there is no edge."""
        found = np.zeros(self.shape, dtype=values.dtype)
        found[self.ends] = values
        return found


def place_of_reader(kind: str) -> str:
    return {"mlp": "mlp", "neurons": "mlp", "logits": "logits"}.get(kind, "attention")

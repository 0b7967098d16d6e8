"""Write a mechanism with a task into a real architecture, so that every edge that it needs is known.

The stream has named features in orthonormal directions, turned by a random rotation that leaves out the mean (which a
LayerNorm takes away). The feature `constant` is 60 in every token, so that norms divide by the same number everywhere;
all other features are about 1. A head or a neuron names the features that it reads and writes, and an edge is needed
where its writer writes what its reader reads. A feature says which ablations change it:

- *answer*: it differs between the two prompts of a pair, so that every ablation changes it;
- *place*: both prompts have it, but not every position: means over positions and zero change it;
- *constant*: it is the same at every position: only zero changes it.

Where a sublayer's output is normed (`olmo2`, `gemma2`), one more head and one more neuron write a constant, beside
which the norm leaves the rest as it is. Heads and neurons without a part have random weights and write to directions
that no part reads; all weights have a little noise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sink_lens.errors import ModelError
from sink_lens.models.tiny import build_random_model

WIRED = ("llama", "qwen3", "olmo2", "gemma2", "gpt2", "gpt_neox")
"""The architectures: pre-norm; with a QK-norm; post-norm; both norms; LayerNorm and learned places; parallel blocks."""
CHANGED = {"answer": ("resample", "mean_aligned", "mean_ordinary", "mean_all", "zero")}
"""What a feature is -> the ablations that change it."""
CHANGED |= {"place": ("mean_ordinary", "mean_all", "zero"), "constant": ("zero",)}
D_MODEL, N_HEADS, D_HEAD, D_MLP = 96, 4, 24, 40
"""Sizes of every model."""
N_CODES = 14
"""Number of words; each has a direction of its own in every block of codes."""
BOS = 1
LENGTH = 9
"""Tokens of a prompt, BOS included."""
_LARGE, _BESIDE = 60.0, 8.0
_TURNS = ((1.0, 0.7), (10**-0.5, 0.3))
"""Angle per position of the coordinates that read places, and their parts of the score."""
_PLACE, _STEEP, _LOGITS = 24.0, 16.0, 10.0
_BLOCKS = ("tok", "alt", "prev", "mid", "out")
_SINGLE = (
    "constant",
    "beside",
    "bos",
    "mark",
    "second",
    "left",
    "right",
    "done",
    *(f"pos{i}" for i in range(4)),
)
_GROUPED = ("llama", "qwen3", "gemma2")
_TYPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": D_HEAD},
    "qwen3": {"num_key_value_heads": 2, "head_dim": D_HEAD},
    "olmo2": {"num_key_value_heads": N_HEADS},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": D_HEAD,
        "query_pre_attn_scalar": D_HEAD,
        "sliding_window": 256,
    },
    "gpt2": {"n_inner": D_MLP},
    "gpt_neox": {},
}
_ACTIVATIONS = {"gemma2": "gelu_pytorch_tanh", "gpt2": "gelu_new", "gpt_neox": "gelu"}
Reads = Mapping[str, Mapping[str, float]]
"""Group of a query's or key's coordinates (code, flag, other) -> feature -> weight."""


def vocabulary(word: int, variant: str = "plain") -> int:
    """Token id of a word: plain, marked, or second (another mark, and its code is in another block)."""
    return 3 + N_CODES * ("plain", "marked", "second").index(variant) + word


@dataclass(kw_only=True)
class Wiring:
    """A model that is being written, and what its parts read and write."""

    family: str
    seed: int
    n_layers: int
    sharp: float = 9.0
    """Score of a match over none."""
    noise: float = 0.02
    fixed: tuple[str, ...] = ()
    """Features of tokens that both prompts of a pair have at the same places."""
    changing: tuple[str, ...] = ()
    """Features of tokens that only differ between the prompts of this task."""
    reads: list[tuple[str, str]] = field(default_factory=list)
    """(reader, feature) of every part."""
    writes: list[tuple[str, str, str]] = field(default_factory=list)
    """(writer, feature, answer or place or constant) of every part, and of the input."""

    def __post_init__(self) -> None:
        """Lay out the features, and draw all weights that have no part in a mechanism."""
        if self.family not in WIRED:
            raise ModelError(
                f"no mechanism can be wired in {self.family!r}; need one of {', '.join(WIRED)}"
            )
        self.generator = torch.Generator().manual_seed(self.seed)
        turned = self._normal(D_MODEL, D_MODEL)
        turned[:, 0] = 1.0  # the mean of all dimensions, where nothing is
        self.basis = torch.linalg.qr(turned).Q
        at, self.at = 1, dict[str, slice]()
        for name in (*_SINGLE, *_BLOCKS):
            size = N_CODES if name in _BLOCKS else 1
            self.at[name], at = slice(at, at + size), at + size
        self.junk = slice(at, D_MODEL)
        self.n_kv = 2 if self.family in _GROUPED else N_HEADS
        self.post = self.family in ("olmo2", "gemma2")
        self.qk_norm = self.family in ("qwen3", "olmo2")
        self.scale = 1.0 if self.family == "olmo2" else _LARGE / D_MODEL**0.5
        half = 4 if self.family == "gpt_neox" else D_HEAD // 2
        self.places = [(one, one + half) for one in range(2)]
        rest = [
            one
            for one in range(D_HEAD)
            if one % half > 3 or (self.family == "gpt_neox" and one >= 2 * half)
        ]
        self.groups = {
            "code": rest[:N_CODES],
            "flag": rest[N_CODES : N_CODES + 1],
            "other": rest[N_CODES + 1 :][:1],
        }
        self.order = [self._shuffled(N_HEADS) for _ in range(self.n_layers)]
        self.used: list[list[int]] = [[] for _ in range(self.n_layers)]
        self.neurons = [self._shuffled(D_MLP) for _ in range(self.n_layers)]
        self.layers = [self._random_layer() for _ in range(self.n_layers)]
        kinds = dict.fromkeys(("tok", "alt", "mark", "second"), "answer") | {
            "bos": "place",
            "constant": "constant",
        }
        kinds |= {f"pos{one}": "place" for one in range(4)} if self.family == "gpt2" else {}
        kinds |= dict.fromkeys(self.fixed, "place") | dict.fromkeys(self.changing, "answer")
        self.writes += [("input", name, kind) for name, kind in kinds.items()]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _shuffled(self, count: int) -> list[int]:
        return [int(one) for one in torch.randperm(count, generator=self.generator)]

    def _random_layer(self) -> dict[str, Tensor]:
        """Weights that read everything a little and write to no feature."""

        def reader(*shape: int) -> Tensor:
            return self._normal(*shape, D_MODEL) * 0.1 * self.scale

        def writer(*shape: int, size: float) -> Tensor:
            found = torch.zeros(*shape, D_MODEL)
            found[..., self.junk] = self._normal(*shape, D_MODEL - self.junk.start) * size
            return found

        made = {
            "q": reader(N_HEADS, D_HEAD),
            "k": reader(self.n_kv, D_HEAD),
            "v": reader(self.n_kv, D_HEAD),
        }
        made |= {
            "gate": reader(D_MLP),
            "up": reader(D_MLP),
            "o": writer(N_HEADS, D_HEAD, size=0.006),
        }
        made["down"] = writer(
            D_MLP, size=0.005
        )  # products of two that grow where the constant is gone
        for name in ("q", "k", "v", "gate", "up"):
            made[name][..., self.at["constant"]] /= _LARGE
            made[name][..., self.at["beside"]] = 0.0
        if self.qk_norm:  # a constant beside what is read, so that the norm does not raise noise
            made["q"][:, 2, self.at["constant"]] = 2**0.5 * self.scale / _LARGE
            made["k"][:, 3, self.at["constant"]] = 2**0.5 * self.scale / _LARGE
        return made

    def _row(
        self, reads: Mapping[str, float], code: int | None = None
    ) -> Float[Tensor, " d_model"]:
        """A row that reads some features; of blocks, the direction of one code."""
        row = torch.zeros(D_MODEL)
        for name, weight in reads.items():
            at = self.at[name]
            place = at.start + (code or 0) if name in _BLOCKS else at.start
            row[place] = weight * self.scale / (_LARGE if name == "constant" else 1.0)
        return row

    def reader(self, layer: int, head: int, kind: str) -> str:
        """Name of a head's query, key or value in the graph."""
        if kind == "q" or self.n_kv == N_HEADS:
            return f"a{layer}.h{head}<{kind}>"
        return f"a{layer}.kv{head * self.n_kv // N_HEADS}<{kind}>"

    def head(
        self,
        layer: int,
        *,
        v: Mapping[tuple[str, str], float],
        q: Reads | None = None,
        k: Reads | None = None,
        back: int | None = None,
        heads: Sequence[int] | None = None,
    ) -> str:
        """Write a head, or several alike; its name.

        Args:
            layer: its layer.
            v: (feature that its values read, feature that it writes) -> weight; `yes` is two codes of `out`.
            q: what its queries read.
            k: what its keys read; a group's score is the product with the query's.
            back: positions back that it looks, instead.
            heads: which heads; a free one, of another key-value head than the others of the layer, if None.
        """
        if heads is None:
            taken = {head * self.n_kv // N_HEADS for head in self.used[layer]}
            heads = [
                next(head for head in self.order[layer] if head * self.n_kv // N_HEADS not in taken)
            ]
        self.used[layer] += heads if v else []
        for head in heads:
            self._score(layer, head, "q", q, back=back)
            self._score(layer, head, "k", k, back=None if back is None else 0)
            self._values(layer, head, v)
        return f"a{layer}.h{heads[0]}"

    def _score(
        self, layer: int, head: int, kind: str, reads: Reads | None, *, back: int | None
    ) -> None:
        name, kv = (
            self.reader(layer, head, kind),
            head if kind == "q" else head * self.n_kv // N_HEADS,
        )
        weight = self.layers[layer][kind][kv]
        weight.zero_()
        if self.qk_norm:
            weight[2 if kind == "q" else 3] = self._row({"constant": 1.0})
        sharp = 1.0 if self.qk_norm or kind == "k" else D_HEAD**0.5
        if back is not None:
            self._look_back(weight, back=back, sharp=sharp)
            features = [f"pos{one}" for one in range(4)] if self.family == "gpt2" else ["constant"]
            self.reads += [(name, feature) for feature in features]
        for group, features in (reads or {}).items():
            for code, at in enumerate(self.groups[group]):
                weight[at] = self._row(features, code) * (
                    sharp if self.qk_norm else sharp * self.sharp ** (kind == "q")
                )
            self.reads += [(name, feature) for feature in features]

    def _look_back(self, weight: Tensor, *, back: int, sharp: float) -> None:
        """Coordinates that turn with the position: by the rotary embedding, or read from learned places."""
        factor = 1.0 if self.qk_norm or sharp == 1.0 else _PLACE * sharp
        for number, ((one, other), (angle, part)) in enumerate(
            zip(self.places, _TURNS, strict=True)
        ):
            turn = torch.tensor(-angle * back)
            first, second = (
                torch.cos(turn) * part**0.5 * factor,
                torch.sin(turn) * part**0.5 * factor,
            )
            if self.family != "gpt2":
                weight[one], weight[other] = (
                    first * self._row({"constant": 1.0}),
                    second * self._row({"constant": 1.0}),
                )
                continue
            cosine, sine = (
                self._row({f"pos{2 * number}": 1.0}),
                self._row({f"pos{2 * number + 1}": 1.0}),
            )
            weight[one] = first * cosine - second * sine
            weight[other] = second * cosine + first * sine

    def _values(self, layer: int, head: int, v: Mapping[tuple[str, str], float]) -> None:
        weights, name = self.layers[layer], self.reader(layer, head, "v")
        kv = head * self.n_kv // N_HEADS
        weights["v"][kv].zero_()
        weights["o"][head].zero_()
        single = N_CODES
        for (read, wrote), size in v.items():
            coordinates = range(N_CODES) if read in _BLOCKS else range(single, single + 1)
            single += read not in _BLOCKS
            for code, at in enumerate(coordinates):
                weights["v"][kv, at] = self._row({read: 1.0}, code)
                self._write(weights["o"][head, at], wrote, size, code)
            kind = next(kind for writer, feature, kind in self.writes if feature == read)
            self.reads.append((name, read))
            written = "out" if wrote == "yes" else wrote
            self.writes.append(
                (f"a{layer}.h{head}", written, "constant" if kind == "constant" else "answer")
            )
            self.reads.append((name, "scale"))

    def _write(self, row: Tensor, feature: str, size: float, code: int = 0) -> None:
        if feature == "yes":
            row[self.at["out"].start], row[self.at["out"].start + 1] = size, -size
        else:
            row[self.at[feature].start + (code if feature in _BLOCKS else 0)] = size

    def neuron(
        self,
        layer: int,
        *,
        reads: Mapping[str, float],
        over: float,
        to: Mapping[str, float],
        full: float = 1.0,
    ) -> str:
        """Write a neuron that fires where what it reads is over a threshold; its MLP's name.

        Args:
            layer: its layer.
            reads: the features.
            over: the threshold.
            to: feature -> what it adds where it reads `full`.
            full: what it is written for.
        """
        self._neuron(layer, self._row(reads), over=over, full=full, to=to)
        self._wire_mlp(layer, reads, to)
        return f"m{layer}"

    def memory(self, layer: int, *, reads: str, to: str, shift: int) -> str:
        """Write a neuron for each word, which answers it with another word; their MLP's name."""
        for code in range(N_CODES):
            row = self._row({reads: 1.0}, code)
            self._neuron(
                layer, row, over=0.5, full=1.0, to={to: 1.0}, code=(code + shift) % N_CODES
            )
        self._wire_mlp(layer, {reads: 1.0}, {to: 1.0})
        return f"m{layer}"

    def _wire_mlp(self, layer: int, reads: Iterable[str], to: Iterable[str]) -> None:
        self.reads += [(f"m{layer}", feature) for feature in (*reads, "constant")]
        self.writes += [(f"m{layer}", "out" if one == "yes" else one, "answer") for one in to]

    def _neuron(
        self,
        layer: int,
        row: Tensor,
        *,
        over: float,
        full: float,
        to: Mapping[str, float],
        code: int = 0,
    ) -> None:
        weights, index = self.layers[layer], self.neurons[layer].pop()
        weights["gate"][index] = _STEEP * (row - over * self._row({"constant": 1.0}))
        weights["up"][index] = self._row({"constant": 1.0})
        fires = float(self.activation(torch.tensor(_STEEP * (full - over))))
        weights["down"][index] = 0.0
        for feature, size in to.items():
            self._write(weights["down"][index], feature, size / fires, code)

    @property
    def activation(self) -> Any:
        """The function of the MLP."""
        return ACT2FN[_ACTIVATIONS.get(self.family, "silu")]

    def edges(self, *, answers: bool) -> dict[str, dict[str, str]]:
        """Name of every edge of the mechanism -> the features that it carries -> answer, place or constant.

        Args:
            answers: whether the metric reads the logits.
        """
        reads = [*self.reads, *[("logits", feature) for feature in ("out", "scale")] * answers]
        sized = {feature for reader, feature in reads if not reader.endswith(("<q>", "<k>"))}
        for layer, head in self._beside.items():
            if any(
                wrote in sized
                for writer, wrote, _ in self.writes
                if writer.startswith(f"a{layer}.")
            ):
                reads.append((self.reader(layer, head, "v"), "beside"))
        found: dict[str, dict[str, str]] = {}
        for reader, feature in reads:
            if feature in (
                "scale",
                "beside",
            ):  # the input's constant: what a norm divides by, or what stays beside
                if feature == "beside" or reader == "logits" or self.family != "olmo2":
                    found.setdefault(f"input->{reader}", {})[feature] = "constant"
                continue
            for writer, wrote, kind in self.writes:
                if wrote == feature and _layer(writer) < _layer(reader):
                    of = found.setdefault(f"{writer}->{reader}", {})
                    of[feature] = "answer" if "answer" in (kind, of.get(feature)) else kind
        return found

    def places_of(self, node: str) -> tuple[str, ...]:
        """A node and the readers that are its own."""
        if node[0] == "m":
            return (node,)
        layer, head = (int(one) for one in node[1:].split(".h"))
        return (node, *(self.reader(layer, head, kind) for kind in "qkv"))

    @property
    def _beside(self) -> dict[int, int]:
        """Layer -> the head that writes a constant beside the others, where outputs are normed and one has a part."""
        if not self.post:
            return {}
        return {
            layer: next(
                (head for head in reversed(self.order[layer]) if head not in used),
                self.order[layer][-1],
            )
            for layer, used in enumerate(self.used)
            if used
        }

    @torch.no_grad()
    def model(self) -> Any:
        """The model, float32, on the CPU."""
        for layer in range(self.n_layers if self.post else 0):
            weights = self.layers[layer]
            head = self._beside.get(layer, self.order[layer][-1])
            weights["v"][head * self.n_kv // N_HEADS, D_HEAD - 1] = self._row({"constant": 1.0})
            weights["o"][head, D_HEAD - 1] = 0.0
            weights["o"][head, D_HEAD - 1, self.at["beside"]] = _BESIDE
            self._neuron(
                layer, self._row({"constant": 1.0}), over=0.5, full=1.0, to={"beside": -_BESIDE}
            )
        fields: dict[str, Any] = {
            "vocab_size": 3 + 3 * N_CODES,
            "hidden_size": D_MODEL,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": N_HEADS,
            "intermediate_size": D_MLP,
            "max_position_embeddings": 32,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": 2,
            "pad_token_id": None,
        }
        if self.family != "gpt2":
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        if (
            self.family == "gpt_neox"
        ):  # the first 8 of a head's coordinates turn, by the same angles
            fields["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 1 / 3,
            }
        config = CONFIG_MAPPING[self.family]
        names = config.attribute_map
        fields = {
            names.get(key, key): value for key, value in (fields | _TYPES[self.family]).items()
        }
        if self.family == "gpt2":
            del fields["intermediate_size"]
        made: Any = build_random_model(config(**fields), seed=self.seed, noise=0.0)
        _STORES[self.family](self, made)
        return made

    def _rough(self, weight: Tensor) -> Tensor:
        """Weights in the model's dimensions, with noise: of the features' size, so little of it reads the constant."""
        noise = self._normal(*weight.shape)
        noise[:, self.at["constant"]] /= _LARGE
        size = torch.cat(
            [weight[:, : self.at["constant"].start], weight[:, self.at["constant"].stop :]], 1
        )
        return (weight + self.noise * size.square().mean().sqrt() * noise) @ self.basis.T

    def read(self, layer: int, name: str) -> Float[Tensor, "d_head d_model"]:
        """Weights that read the stream, as the model's dimensions have it."""
        return self._rough(self.layers[layer][name].flatten(0, -2))

    def write(self, layer: int, name: str) -> Float[Tensor, "d_model d_head"]:
        """Weights that write to the stream."""
        return self._rough(self.layers[layer][name].flatten(0, -2)).T

    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        """The features that each token begins with."""
        rows = torch.zeros(3 + 3 * N_CODES, D_MODEL)
        rows[:, self.at["constant"]] = _LARGE
        rows[BOS, self.at["bos"]] = 1.0
        for variant, block, mark in (
            ("plain", "tok", None),
            ("marked", "tok", "mark"),
            ("second", "alt", "second"),
        ):
            for word in range(N_CODES):
                token = vocabulary(word, variant)
                rows[token, self.at[block].start + word] = 1.0
                if mark is not None:
                    rows[token, self.at[mark]] = 1.0
        return self._rough(rows)

    def unembedding(self) -> Float[Tensor, "vocab d_model"]:
        """The features that foretell each plain token."""
        rows = torch.zeros(3 + 3 * N_CODES, D_MODEL)
        for word in range(N_CODES):
            rows[vocabulary(word), self.at["out"].start + word] = _LOGITS * _LARGE / D_MODEL**0.5
        return self._rough(rows)

    def learned_places(self, n: int) -> Float[Tensor, "position d_model"]:
        """Cosine and sine of the angles of each position."""
        rows, at = torch.zeros(n, D_MODEL), torch.arange(n)
        for number, (angle, _) in enumerate(_TURNS):
            rows[:, self.at[f"pos{2 * number}"].start] = torch.cos(at * angle)
            rows[:, self.at[f"pos{2 * number + 1}"].start] = torch.sin(at * angle)
        return rows @ self.basis.T


def _layer(name: str) -> float:
    return {"input": -1.0, "logits": float("inf")}.get(name) or float(name[1:].partition(".")[0])


def _grouped(wiring: Wiring, made: Any) -> None:
    """Store into llama, qwen3, olmo2 or gemma2."""
    gemma = wiring.family == "gemma2"
    made.model.embed_tokens.weight.copy_(wiring.embedding() / (D_MODEL**0.5 if gemma else 1.0))
    made.get_output_embeddings().weight.copy_(wiring.unembedding())
    for layer, block in enumerate(made.model.layers):
        attention, mlp = block.self_attn, block.mlp
        for name in ("q", "k", "v"):
            attention.get_submodule(f"{name}_proj").weight.copy_(wiring.read(layer, name))
        attention.o_proj.weight.copy_(wiring.write(layer, "o"))
        mlp.gate_proj.weight.copy_(wiring.read(layer, "gate"))
        mlp.up_proj.weight.copy_(wiring.read(layer, "up"))
        mlp.down_proj.weight.copy_(wiring.write(layer, "down"))
        if wiring.post:
            for norm in (block.post_attention_layernorm, block.post_feedforward_layernorm):
                norm.weight.fill_(_BESIDE / D_MODEL**0.5 - gemma)
        if wiring.qk_norm:
            gain = torch.full((D_HEAD,), wiring.sharp)
            gain[[at for pair in wiring.places for at in pair]] = _PLACE
            gain = (gain * 2 / D_HEAD**0.5).sqrt()  # queries and keys have a length of 2**0.5
            for norm in (attention.q_norm, attention.k_norm):
                norm.weight.copy_(gain.repeat(norm.weight.numel() // D_HEAD))


def _gpt2(wiring: Wiring, made: Any) -> None:
    inner = made.transformer
    inner.wte.weight.copy_(wiring.embedding())
    inner.wpe.weight.copy_(wiring.learned_places(len(inner.wpe.weight)))
    made.get_output_embeddings().weight.copy_(wiring.unembedding())
    for layer, block in enumerate(inner.h):
        block.attn.c_attn.weight.copy_(
            torch.cat([wiring.read(layer, name) for name in ("q", "k", "v")]).T
        )
        block.attn.c_proj.weight.copy_(wiring.write(layer, "o").T)
        block.mlp.c_fc.weight.copy_(wiring.read(layer, "gate").T)
        block.mlp.c_proj.weight.copy_(wiring.write(layer, "down").T)


def _gpt_neox(wiring: Wiring, made: Any) -> None:
    inner = made.gpt_neox
    inner.embed_in.weight.copy_(wiring.embedding())
    made.get_output_embeddings().weight.copy_(wiring.unembedding())
    for layer, block in enumerate(inner.layers):
        three = [
            wiring.read(layer, name).unflatten(0, (N_HEADS, D_HEAD)) for name in ("q", "k", "v")
        ]
        block.attention.query_key_value.weight.copy_(torch.stack(three, 1).flatten(0, 2))
        block.attention.dense.weight.copy_(wiring.write(layer, "o"))
        block.mlp.dense_h_to_4h.weight.copy_(wiring.read(layer, "gate"))
        block.mlp.dense_4h_to_h.weight.copy_(wiring.write(layer, "down"))


_STORES = dict.fromkeys(("llama", "qwen3", "olmo2", "gemma2"), _grouped) | {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}

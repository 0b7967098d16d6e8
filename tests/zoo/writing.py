"""Write a mechanism into a small random model: token embeddings, neurons, value paths, and heads that lock on a token.

A few residual dimensions are reserved. Random weights hardly write to them (and never to the outlier dimensions). One
reserved dimension, `shared`, has the same value in every ordinary token; the planted parts read and write the others.
A mechanism can be written into five architectures:

- `llama`: a norm before each sublayer. After the norm, one huge dimension makes all other dimensions small.
- `qwen3`: as `llama`, plus a norm of queries and keys in each head. All keys then have the same length.
- `olmo2`: no norm before a sublayer, but a norm of its output, and a norm of queries and keys over all heads.
  Sublayers read the raw stream. A sublayer always writes a vector of the same length, so every planted layer also
  writes a constant into the dimension `ballast`, which keeps the relative size of the rest. The norm's gain makes a
  dimension large.
- `qwen2`: as `llama`, plus biases of queries, keys and values.
- `gemma3`: a norm before each sublayer and one of its output, a QK-norm, gains that are stored less 1, and embeddings
  that are multiplied by the root of the width.

Hybrids (`hybrids`) are as `llama`, with a mixer in place of the attention of every second layer; models with latent
attention (`latent`) as `llama`, with a latent between the stream and the keys and values. Mixtures of experts
(`mixtral`, `qwen3_moe`, `qwen2_moe`, `gpt_oss`) are as `llama` too; planted neurons are those of one routed expert, or
of the shared one. `stablelm` and `starcoder2` have a LayerNorm; neurons of `starcoder2` have no gate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sink_lens.errors import ModelError
from sink_lens.models.headnorm import HeadNormConfig
from sink_lens.models.tiny import BOS_ID, EOS_ID, VOCAB_SIZE, build_random_model

D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD, D_MLP = 96, 4, 2, 24, 160
"""Sizes of every model that this package writes."""
WRITTEN = ("llama", "qwen3", "olmo2")
"""The architectures: pre-norm, pre-norm with a QK-norm, post-norm with a QK-norm."""
NORMED_BEFORE = ("llama", "qwen3")
"""The first two: what a layer writes is not normed."""
LATER = ("llama", "qwen2", "qwen3", "olmo2", "gemma3")
"""The same with biases, and with norms both before a sublayer and of its output."""
N_CODES = 32
"""Number of dimensions of a token's code, and of the averaged codes."""
SHARED = 2.0
"""The component that every token has."""
HUGE = 60.0
"""Size of a massive activation; an ordinary token's norm is about 3 to 5."""
_CODE = 0.5
_CLOSEST = 0.4
_CANDIDATES = 8192
_CONTENT = 1.6
_TYPES = {name: name for name in ("llama", "qwen2", "qwen3", "olmo2", "mistral")}
_TYPES |= {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "headnorm": "sink_lens_headnorm"}
_TYPES |= {
    name: name
    for name in ("lfm2", "jamba", "bamba", "youtu", "deepseek_v2", "stablelm", "starcoder2")
}
_SHARES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _SHARES | {"moe_intermediate_size": 160, "norm_topk_prob": True},
    "qwen2_moe": _SHARES | {"shared_expert_intermediate_size": 160},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 256},
}
"""Mixture of experts -> fields of its configuration."""
_TYPES |= {name: name for name in _EXPERTS}
_MIXERS = {"lfm2": "conv", "jamba": "mamba", "bamba": "mamba"}
"""Hybrid -> the module that every second layer has in place of attention."""
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 10,
    "v_head_dim": 18,
}
"""Widths of the latents, and of the parts of a head; queries of `deepseek_v2` have no latent."""
_QUIET = 0.02
"""Factor that shrinks the random weights that write to a reserved dimension."""
_ORDINARY = 7
"""A token that is not special."""
SLOWEST = D_HEAD // 2 - 1
"""The coordinate of a head that the rotary embedding turns least: 3e-6 per position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A model that is being written, and its reserved dimensions."""

    model: Any
    family: str
    generator: torch.Generator
    """Generator of the indices and signs."""
    shared: int
    trigger: int
    outlier: int
    second: int
    gathered: int
    ballast: int
    codes: tuple[int, ...]
    """The dimensions that contain the signs of each token's code."""
    carried: tuple[int, ...]
    """The dimensions into which the averaged codes are written."""
    free: tuple[int, ...]
    """All others."""
    sign: float
    expert: int = -1
    """The routed expert of the planted neurons; -1 is the shared one, or the MLP of a model without experts."""
    scale: float = 1.0
    """Size of the stream, whose ordinary token has a norm of about 3 where it is 1."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.model.model.layers)

    @property
    def post_norm(self) -> bool:
        """True if the outputs of sublayers are normed."""
        return self.family in ("olmo2", "gemma3", "gemma4")

    @property
    def reads_raw(self) -> bool:
        """True if sublayers read the raw stream."""
        return self.family == "olmo2"

    @property
    def qk_norm(self) -> bool:
        """Return whether queries and keys are normed."""
        return self.family in ("qwen3", "olmo2", "gemma3", "gemma4", "lfm2", "qwen3_moe")

    @property
    def unit(self) -> float:
        """Entry of the embedding that is 1 in the stream."""
        return self.scale * (D_MODEL**-0.5 if self.family in ("gemma3", "gemma4") else 1.0)

    def gain(self, norm: Any, value: float, at: Any = slice(None)) -> None:
        """Set the gain of a norm."""
        with torch.no_grad():
            norm.weight[at] = value - (self.family == "gemma3")

    def scale_gain(self, norm: Any, factor: float, at: Any = slice(None)) -> None:
        """Multiply the gain of a norm."""
        stored = float(self.family == "gemma3")
        with torch.no_grad():
            norm.weight[at] = (norm.weight[at] + stored) * factor - stored

    def mlp(self, layer: int) -> tuple[Any, Any, Any]:
        """Gate, up and down-projection of a layer, those of the planted neurons' expert."""
        return self.mlps(layer)[self.expert]

    def mlps(self, layer: int) -> list[tuple[Any, Any, Any]]:
        """Gate, up and down-projections of a layer, those of each routed expert first."""
        block = self.model.model.layers[layer]
        module = block.feed_forward if self.family in _MIXERS else block.mlp
        experts = getattr(module, "experts", None)
        routed = (
            []
            if experts is None
            else [_views(experts, number) for number in range(experts.num_experts)]
        )
        dense = module if experts is None else getattr(module, "shared_expert", None)
        names = {"lfm2": ("w1", "w3", "w2"), "starcoder2": ("c_fc", "c_fc", "c_proj")}
        own = names.get(self.family, ("gate_proj", "up_proj", "down_proj"))
        return routed if dense is None else [*routed, tuple(getattr(dense, name) for name in own)]

    def mixer(self, layer: int) -> Any:
        """The mixer of a hybrid's layer."""
        return getattr(self.model.model.layers[layer], _MIXERS[self.family])

    def attention(self, layer: int) -> tuple[Any, Any, Any, Any] | None:
        """Projections of queries, keys, values and output; None in a layer without attention, or for what it lacks."""
        module: Any = getattr(self.model.model.layers[layer], "self_attn", None)
        names = ("q_proj", "k_proj", "v_proj", "out_proj" if self.family == "lfm2" else "o_proj")
        if hasattr(
            module, "kv_b_proj"
        ):  # of the latent: what makes keys and values of it, and what makes it
            queries = "q_b_proj" if module.q_proj is None else "q_proj"
            names = (queries, "kv_b_proj", "kv_a_proj_with_mqa", "o_proj")
        return None if module is None else tuple(getattr(module, name, None) for name in names)  # type: ignore[return-value]  # four

    def qk_norms(self, layer: int) -> tuple[Any, Any]:
        """Norms of queries and keys."""
        module = self.model.model.layers[layer].self_attn
        names = ("q_layernorm", "k_layernorm") if self.family == "lfm2" else ("q_norm", "k_norm")
        return tuple(getattr(module, name, None) for name in names)  # type: ignore[return-value]  # two

    def pick(self, below: int) -> int:
        """A random index."""
        return int(torch.randint(below, (), generator=self.generator))

    def neurons(self, count: int) -> list[int]:
        """Draw distinct random neurons."""
        return torch.randperm(D_MLP, generator=self.generator)[:count].tolist()


def _views(experts: Any, number: int) -> tuple[Any, Any, Any]:
    """Gate, up and down-projection of one expert, as views of the tensors of all."""
    both, down = experts.gate_up_proj.detach()[number], experts.down_proj.detach()[number]
    parts = (
        (both.T[::2], both.T[1::2], down.T)
        if hasattr(experts, "down_proj_bias")
        else (*both.chunk(2), down)
    )
    return tuple(SimpleNamespace(weight=part) for part in parts)  # type: ignore[return-value]  # three


@torch.no_grad()
def draft(
    *,
    family: str,
    seed: int,
    n_layers: int = 5,
    coded: bool = False,
    scale: float = 1.0,
    **fields: Any,
) -> Draft:
    """Make a random model whose reserved dimensions contain only the shared component and, on request, the codes.

    Args:
        family: One of `WRITTEN`; `mistral` and `headnorm`, which are Llama with a window or other attention; `gemma4`.
        seed: Seed of the weights, indices and signs.
        n_layers: Number of layers.
        coded: Whether every token has a code of random signs.
        scale: Size of the stream.
        **fields: Fields of the Hugging Face configuration.

    Raises:
        ModelError: No mechanism can be written into this family.
    """
    if family not in _TYPES:
        raise ModelError(
            f"no mechanism can be written into {family!r}; need one of {', '.join(_TYPES)}"
        )
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": D_MODEL,
        "num_hidden_layers": n_layers,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": D_HEAD,
        "intermediate_size": D_MLP,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    if family in ("olmo2", "qwen2", "qwen2_moe", "stablelm", "starcoder2"):
        del sizes["head_dim"]
    sizes |= _EXPERTS.get(family, {})
    if family in ("gemma3", "gemma4"):
        own = (
            {"query_pre_attn_scalar": D_HEAD} if family == "gemma3" else {"global_head_dim": D_HEAD}
        )
        sizes |= own | {"sliding_window": 256}
        del sizes["rope_parameters"]
    if family in _MIXERS:
        del sizes["head_dim"]
        sizes |= _hybrid(family, n_layers=n_layers)
    if family in ("youtu", "deepseek_v2"):
        del sizes["head_dim"]
        sizes |= LATENT | {"num_key_value_heads": N_HEADS, "tie_word_embeddings": False}
        sizes |= (
            {"q_lora_rank": None, "first_k_dense_replace": n_layers}
            if family == "deepseek_v2"
            else {}
        )
    if family in ("stablelm", "starcoder2"):
        sizes["layer_norm_eps" if family == "stablelm" else "norm_epsilon"] = sizes.pop(
            "rms_norm_eps"
        )
    config = HeadNormConfig if family == "headnorm" else CONFIG_MAPPING[_TYPES[family]]
    model: Any = build_random_model(config(**(sizes | fields)), seed=seed, noise=0.02)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(D_MODEL, generator=generator).tolist()
    sign = 1.0 if torch.rand((), generator=generator) < 0.5 else -1.0
    names = ("shared", "trigger", "outlier", "second", "gathered", "ballast")
    reserved, order = dict(zip(names, order, strict=False)), order[len(names) :]
    codes: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    if coded:
        codes, carried, order = (
            tuple(order[:N_CODES]),
            tuple(order[N_CODES : 2 * N_CODES]),
            order[2 * N_CODES :],
        )
    made = Draft(
        model=model,
        family=family,
        generator=generator,
        codes=codes,
        carried=carried,
        free=tuple(order),
        sign=sign,
        expert=int(torch.randint(4, (), generator=generator))
        if family in _EXPERTS and family != "qwen2_moe"
        else -1,
        scale=scale,
        **reserved,
    )
    quiet = [*reserved.values(), *codes, *carried]
    embedding = model.model.embed_tokens.weight
    content = torch.randn(VOCAB_SIZE, len(order), generator=generator)
    embedding[:, made.free] = made.unit * _CONTENT * content / content.norm(dim=-1, keepdim=True)
    embedding[:, quiet] = 0.0
    embedding[:, made.shared] = made.unit * SHARED
    if coded:
        embedding[:, list(codes)] = _code_words(generator) * made.unit * _CODE
    for layer, block in enumerate(model.model.layers):
        attention, mlps = made.attention(layer), made.mlps(layer)
        mixed = made.mixer(layer).out_proj if attention is None else attention[3]
        read = made.mixer(layer).in_proj if attention is None else attention[2]
        for writer in (mixed, *(down for *_, down in mlps)):
            writer.weight.mul_(0.5 * scale)
            writer.weight[quiet] *= _QUIET
            writer.weight[[made.outlier, made.second]] = 0.0
        for bias in _output_biases(block) if family in ("starcoder2", *_EXPERTS) else ():
            bias.mul_(scale)
            bias[..., quiet] = 0.0
        if attention is not None and read is not None:
            read.weight[:, made.shared] = 0.0
        for reader in (
            *(one for gate, up, _ in mlps for one in (gate, up)),
            *([] if read is None else [read]),
        ):
            reader.weight[:, [made.outlier, made.second, made.ballast]] = 0.0
        if made.post_norm:
            for norm in (block.post_attention_layernorm, block.post_feedforward_layernorm):
                made.scale_gain(norm, 0.1)
                made.scale_gain(norm, _QUIET, quiet)
        if attention is not None:
            _level(made, layer)
    return made


def _output_biases(block: Any) -> list[Tensor]:
    """The biases that a layer adds to the stream."""
    names = ("self_attn.o_proj.bias", "mlp.c_proj.bias", "mlp.experts.down_proj_bias")
    return [own for name, own in block.named_parameters() if name in names]


def _hybrid(family: str, *, n_layers: int) -> dict[str, Any]:
    """Fields of the configuration of a hybrid; the state is small, and its chunks are shorter than a text."""
    if family == "lfm2":
        kinds = [("conv", "full_attention")[layer % 2] for layer in range(n_layers)]
        return {"layer_types": kinds, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6}
    if family == "jamba":
        every = {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "use_mamba_kernels": False,
        }
        return every | {"mamba_d_state": 8, "mamba_dt_rank": 6}
    heads = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 24, "mamba_chunk_size": 8}
    return heads | {"attn_layer_indices": list(range(1, n_layers, 2))}


def _code_words(generator: torch.Generator) -> Float[Tensor, "vocab dimension"]:
    """Draw signs for every token such that no two tokens agree in more than 70% of them (cosine below 0.4)."""
    drawn = torch.randint(2, (_CANDIDATES, N_CODES), generator=generator) * 2.0 - 1.0
    free, chosen = torch.ones(_CANDIDATES, dtype=torch.bool), []
    while len(chosen) < VOCAB_SIZE:
        chosen.append(
            int(free.int().argmax())
        )  # take the first code that is left; there are always enough
        free &= drawn @ drawn[chosen[-1]] < _CLOSEST * N_CODES
    return drawn[chosen]


def _level(made: Draft, layer: int) -> None:
    """Make the heads attend uniformly, with scores near 0."""
    attention = made.attention(layer)
    assert attention is not None
    attention[0].weight.mul_(0.3)
    if made.qk_norm:
        made.scale_gain(made.qk_norms(layer)[0], 0.1)
    else:
        attention[1].weight.mul_(0.3)


@torch.no_grad()
def neuron(
    made: Draft,
    *,
    layer: int,
    index: int,
    gate: Mapping[int, float],
    up: Mapping[int, float],
    down: Mapping[int, float] | Float[Tensor, " d_model"],
) -> None:
    """Write one neuron: the dimensions that its gate and up projections read, and those that its column writes."""
    into_gate, into_up, out = made.mlp(layer)
    for projection, reads in ((into_gate, gate), (into_up, up)):
        projection.weight[index] = 0.0
        for dimension, weight in reads.items():
            projection.weight[index, dimension] = weight
    if isinstance(down, Tensor):
        out.weight[:, index] = down
        return
    out.weight[:, index] = 0.0
    for dimension, weight in down.items():
        out.weight[dimension, index] = weight


def load_ballast(
    made: Draft, *, layer: int, index: int, size: float, gains: Mapping[int, float]
) -> None:
    """For a post-norm: write a neuron with a constant output, and set the norm's gains for the layer's dimensions.

    If the MLP writes w into a dimension, the norm turns it into `gain * sqrt(96) * w / sqrt(size**2 + w**2)`.
    """
    if not made.post_norm:
        return
    reads = {made.shared: 2.0}
    fires = 4 * SHARED**2
    if not made.reads_raw:
        neuron(made, layer=layer, index=index, gate=reads, up=reads, down={})
        fires = activation(made, token=_ORDINARY, layer=layer, index=index)
    neuron(made, layer=layer, index=index, gate=reads, up=reads, down={made.ballast: size / fires})
    norm = made.model.model.layers[layer].post_feedforward_layernorm
    for dimension, gain in gains.items():
        made.gain(norm, gain, dimension)


def activation(made: Draft, *, token: int, layer: int, index: int) -> float:
    """Output of a neuron for a token at the first position, which sees only itself."""
    found: list[float] = []
    *_, down = made.mlp(layer)
    config = made.model.config
    if made.family in _EXPERTS:  # with the router's weight, or the gate's

        def read(_, __, out):
            out = out[0] if isinstance(out, tuple) else out
            found.append(float(out[0, 0, made.outlier]))

        handle = made.model.model.layers[layer].mlp.register_forward_hook(read)
        with torch.no_grad():
            for weight in (0.0, 1.0):
                down.weight[made.outlier, index] = weight
                made.model.model(torch.tensor([[token]]), use_cache=False)
            down.weight[made.outlier, index] = 0.0
        handle.remove()
        return found[1] - found[0]
    handle = down.register_forward_pre_hook(
        lambda _, given: found.append(float(given[0][0, 0, index]))
    )
    n_layers, config.num_hidden_layers = (
        config.num_hidden_layers,
        layer + 1,
    )  # the later layers are not run
    if made.family in {*_MIXERS, "gemma4"}:  # whose layers are counted in other fields too
        config.num_hidden_layers = n_layers
    with torch.no_grad():
        made.model.model(torch.tensor([[token]]), use_cache=False)
    config.num_hidden_layers = n_layers
    handle.remove()
    return found[0]


@torch.no_grad()
def lock(
    made: Draft,
    *,
    layers: Sequence[int],
    reads: Mapping[int, float] | Float[Tensor, " d_model"],
    weight: float = 1.5,
    gain: float = 1.5,
) -> None:
    """Write heads whose queries read the shared component and whose keys read one direction, in the slowest coordinate.

    Args:
        made: The model that is being written.
        layers: The layers of the heads.
        reads: The direction that the keys read, as dimensions with signs or as a vector.
        weight: How strongly the keys read the direction.
        gain: The gain of the keys' norm in that coordinate, if keys are normed.
    """
    for layer in layers:
        attention = made.attention(layer)
        assert attention is not None
        query, key = attention[0].weight, attention[1].weight
        query[SLOWEST::D_HEAD] = 0.0
        key[SLOWEST::D_HEAD] = 0.0
        query[SLOWEST::D_HEAD, made.shared] = 1.0
        if isinstance(reads, Tensor):
            key[SLOWEST::D_HEAD] = weight * reads
        else:
            for dimension, sign in reads.items():
                key[:, dimension] = 0.0
                key[SLOWEST::D_HEAD, dimension] = weight * sign
        if made.qk_norm:
            for norm, value in zip(made.qk_norms(layer), (2.0, gain), strict=True):
                made.gain(norm, value, slice(SLOWEST, None, D_HEAD))


def last_layers(made: Draft, *, after: int) -> tuple[int, ...]:
    """All layers after the given one."""
    return tuple(range(after + 1, made.n_layers))

"""Untrained models on demand: any configuration and seed to a ``LensModel``.

A model is a Hugging Face class of its style (Llama, Qwen3 or GPT-2) whose parts may be switched one by one. Variants
that differ in one switch and share a seed draw the same weights, so that they are compared in pairs, but for the gate,
which changes the width of the MLP. An attention or MLP that is off has an output projection of zeros; an MLP without
its gate reads a gate of ones. The configurations of arXiv 2602.05927 are not public: the defaults have the sizes of
GPT-2 small.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..arguments import check_seeds
from ..configuration import check_at_least, check_at_most, check_field_types, parse_setting
from ..errors import InputError
from ..models.checks import checked_family
from ..models.family import Family
from ..models.lens import LensModel
from ..models.load import find_device
from ..models.wrapping import assemble_lens, keep_random_state

Style = Literal["llama", "qwen", "gpt2"]
ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "identity")
"""The activations of the experiments; every other name of Hugging Face is taken too."""

_LIKE_LLAMA = {"activation": "silu", "gated": True, "norm": "rms", "positions": "rotary"}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {**_LIKE_LLAMA, "tied": False, "scaled_writers": False},
    "qwen": {**_LIKE_LLAMA, "tied": True, "scaled_writers": False},
    "gpt2": {
        "activation": "gelu",
        "gated": False,
        "norm": "layer",
        "positions": "learned",
        "tied": True,
        "scaled_writers": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedConfig:
    """Configuration of an untrained model; a field that is None is filled in with the style's own value.

    Raises:
        InputError: an unknown value, or parts that the style cannot have.
    """

    style: Style = "gpt2"
    """``llama``; ``qwen``: Qwen3, which norms queries and keys in each head; or ``gpt2``."""
    activation: str | None = None
    """Activation function of the MLP: relu, gelu, silu, tanh, identity, or another name of Hugging Face."""
    gated: bool | None = None
    """``act(gate x) * up x``, or ``act(gate x)`` alone; a gate needs the style llama or qwen."""
    norm: Literal["rms", "layer"] | None = None
    """``rms`` or ``layer`` (centred), without biases or gains that differ from 1."""
    positions: Literal["rotary", "learned", "none"] | None = None
    """``rotary`` (not in gpt2), ``learned`` (added to the embedding) or ``none``."""
    tied: bool | None = None
    """Tie the embeddings; an untrained model then predicts the current token."""
    scaled_writers: bool | None = None
    """Projections that write to the stream begin at ``init_std / sqrt(2 n_layers)``, as GPT-2's."""
    n_layers: int = 12
    d_model: int = 768
    n_heads: int = 12
    n_kv_heads: int | None = None
    """Key and value heads; None is as many as query heads, and gpt2 has no other choice."""
    d_mlp: int | None = None
    """Neurons; None is 4 d_model, or 8/3 of it (a multiple of 64) with a gate, for as many weights."""
    vocab_size: int = 50257
    n_context: int = 1024
    init_std: float = 0.02
    """Initial standard deviation of every weight."""
    attention: bool = True
    """Attention writes to the stream."""
    mlp: bool = True
    """The MLP does."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for name, own in _OWN[self.style].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, own)
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.d_mlp is None:
            width = 64 * math.ceil(self.d_model * 8 / 3 / 64) if self.gated else 4 * self.d_model
            object.__setattr__(self, "d_mlp", width)
        if _activation_name(self.activation) not in ACT2FN:
            raise InputError(
                f"activation is {self.activation!r}; need one of {', '.join(ACTIVATIONS)}, or another "
                "name of transformers.activations.ACT2FN"
            )
        widths, lengths = ("d_model", "n_heads", "n_kv_heads", "d_mlp"), ("vocab_size", "n_context")
        check_at_least(self, 1, "n_layers", *widths, *lengths)
        check_at_most(self, 10_000, "n_layers")
        check_at_most(self, 1_000_000, *widths)
        check_at_most(self, 10_000_000, *lengths)
        if not self.init_std > 0:
            raise InputError(f"init_std is {self.init_std!r}; need a positive number")
        assert self.n_kv_heads is not None
        if self.d_model % self.n_heads or self.n_heads % self.n_kv_heads:
            raise InputError(
                f"{self.n_heads} heads over {self.n_kv_heads} of width {self.d_model}; need heads that "
                "divide the width, and key-value heads that divide the heads"
            )
        if self.positions == "rotary" and (self.d_model // self.n_heads) % 2:
            raise InputError(
                f"a head has {self.d_model // self.n_heads} dimensions; need an even number to rotate"
            )
        if self.style == "gpt2" and (
            self.gated or self.positions == "rotary" or self.n_kv_heads != self.n_heads
        ):
            raise InputError(
                "GPT-2 has no gate, no rotary positions and no grouped heads; need style='llama', which "
                "takes norm='layer' and positions='learned' too"
            )

    @property
    def label(self) -> str:
        """The configuration as text, such as ``gpt2,activation=relu``; ``read_untrained`` reads it back."""
        sized = ("gated", "d_model", "n_heads")  # they decide the defaults of others
        plain = UntrainedConfig(style=self.style, **{name: getattr(self, name) for name in sized})
        own = asdict(UntrainedConfig(style=self.style))
        usual = asdict(plain) | {name: own[name] for name in sized} | {"activation": None}
        changed = (f"{k}={v}" for k, v in asdict(self).items() if usual[k] != v)
        return ",".join([self.style, *changed])


def read_untrained(text: str) -> UntrainedConfig:
    """Read a configuration from a text such as ``gpt2,activation=relu,n_layers=4``.

    Raises:
        InputError: an unknown field, or a value that is not of its kind.
    """
    style, *rest = [part.strip() for part in text.split(",")]
    known = [field.name for field in fields(UntrainedConfig)]
    given: dict[str, Any] = {"style": style}
    for part in rest:
        name, equals, value = part.partition("=")
        if not (equals and value) or name not in known:
            raise InputError(
                f"{part!r} in {text!r} is no field=value; need fields of {', '.join(known)}"
            )
        given |= [parse_setting(part.lower())]
    return UntrainedConfig(**given)


def untrained(
    config: UntrainedConfig, *, seed: int, device: str | torch.device = "cpu"
) -> LensModel:
    """Build an untrained model from a configuration and a seed: float32, in eval mode, without a tokenizer.

    Equal configuration and seed give equal weights on every device; the caller's random state is left alone.

    Args:
        config: what to build.
        seed: seed of the weights.
        device: device on which the model is put.

    Raises:
        InputError: the seed is no whole number from 0 on, or there is no such device here.
        ModelError: the model's TransformerLens bridge gives other logits than the model (checked on 64 tokens).
    """
    check_seeds({"seed": seed})
    place = find_device(device)
    with keep_random_state(), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # and not the caller's GPUs
        model: Any = AutoModelForCausalLM.from_config(
            _base_configuration(config), dtype=torch.float32, attn_implementation="sdpa"
        )
        family = replace(checked_family(model), centred_norm=config.norm == "layer")
        _switch_modules(model, family=family, config=config)
    name = f"untrained {config.label} seed {seed}"
    return assemble_lens(model.to(place).eval(), tokenizer=None, family=family, name=name)


class PositionedEmbedding(nn.Embedding):
    """Token embedding plus learned position embedding, for model classes that have only rotary positions."""

    def __init__(
        self, tokens: nn.Embedding, *, positions: Float[Tensor, "position d_model"]
    ) -> None:
        super().__init__(tokens.num_embeddings, tokens.embedding_dim, _weight=tokens.weight)
        self.weight = tokens.weight  # the same parameter, which may be tied
        self.positions = nn.Parameter(positions)

    def forward(
        self, input: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position d_model"]:
        return super().forward(input) + self.positions[: input.shape[1]]


def _base_configuration(config: UntrainedConfig) -> PreTrainedConfig:
    activation = _activation_name(config.activation)
    shared: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "max_position_embeddings": config.n_context,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.style == "gpt2":
        return GPT2Config(
            **shared,
            n_inner=config.d_mlp,
            activation_function=activation,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    of_class = Qwen3Config if config.style == "qwen" else LlamaConfig
    assert config.d_mlp is not None
    return of_class(
        **shared,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.d_model // config.n_heads,
        intermediate_size=config.d_mlp,
        hidden_act=activation,
    )


def _activation_name(name: str | None) -> str:
    return "linear" if name == "identity" else str(name)


def _switch_modules(model: Any, *, family: Family, config: UntrainedConfig) -> None:
    """Change in a new model what its Hugging Face configuration cannot set."""
    scale, own = (2 * config.n_layers) ** -0.5, _OWN[config.style]
    if config.scaled_writers == own["scaled_writers"]:  # as they were drawn
        scale = 1.0
    elif not config.scaled_writers:
        scale = 1 / scale
    for layer in model.get_submodule(family.layers):
        mlp = layer.get_submodule(str(family.mlp))
        for writer, on in (
            (layer.get_submodule(f"{family.attention}.{family.o}"), config.attention),
            (mlp.get_submodule(str(family.down)), config.mlp),
        ):
            writer.weight.mul_(scale if on else 0.0)
        if family.gate is not None and not config.gated:
            mlp.up_proj = nn.Linear(config.d_model, config.d_mlp)  # type: ignore[arg-type]  # filled in
            mlp.up_proj.weight.zero_()
            mlp.up_proj.bias.fill_(1.0)
    if config.norm != own["norm"]:
        of_class = nn.LayerNorm if config.norm == "layer" else LlamaRMSNorm
        norms = (family.attn_norm, family.mlp_norm)
        paths = [f"{family.layers}.{n}.{norm}" for n in range(config.n_layers) for norm in norms]
        for path in (*paths, family.final_norm):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, of_class(config.d_model, eps=1e-5))
    if config.style == "gpt2":
        if config.positions == "none":
            model.transformer.wpe.weight.zero_()
        return
    if config.positions != "rotary":
        model.model.rotary_emb.inv_freq.zero_()  # every angle is 0
    if config.positions == "learned":
        drawn = torch.randn(config.n_context, config.d_model, dtype=torch.float32) * config.init_std
        model.set_input_embeddings(
            PositionedEmbedding(model.get_input_embeddings(), positions=drawn)
        )

"""One decoder architecture: the paths of its parts in the Hugging Face module, and its conventions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EXPERTS_HOOK = "hook_neurons"
"""The submodule of a mixture of experts whose input and output are the site of its neurons (``experts``)."""

OF_ATTENTION = frozenset(
    {
        "attn_in",
        "q_latent",
        "kv_latent",
        "q",
        "k",
        "v",
        "scores",
        "pattern",
        "z_raw",
        "z",
        "attn_out",
    }
    | {"mass", "key_scores", "rows", "rotated_q", "rotated_k"}
)
"""Sites, and names of ``activations.attention.OBSERVED``, that a layer without attention does not have."""

ADDED = ("attn_out", "mixer_out", "mlp_out", "per_layer_out")
"""Sites of what sublayers add to the stream, in the order in which a layer computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names and conventions of one decoder architecture. Paths are relative to the layer unless stated otherwise."""

    architecture: str = field(kw_only=False)
    """Class name of the Hugging Face model."""
    layers: str = "model.layers"
    """Path of the decoder layers from the model."""
    final_norm: str = "model.norm"
    """Path of the norm before the unembedding, from the model."""
    attention: str = "self_attn"
    """The attention module; the next five paths are relative to it."""
    q: str = "q_proj"
    """Projections of what the attention reads; in latent attention to the latents."""
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv_layout: Literal["separate", "contiguous", "interleaved"] = "separate"
    """Layout of a fused projection: all q, then k, then v; or q, k, v head by head. q, k and v then name one module."""
    attn_norm: str | None = "input_layernorm"
    """The norm before the attention; None if the attention reads the residual stream directly."""
    attn_post_norm: str | None = None
    """The norm of the attention's output before it is added to the stream, if there is one."""
    mlp: str | None = "mlp"
    """The MLP module; None if the projections are in the layer itself. The next three paths are relative to it."""
    gate: str | None = "gate_proj"
    """None if the MLP has no gate."""
    up: str | None = "up_proj"
    """Without a gate its output is the pre-activation. None in a mixture of experts."""
    down: str | None = "down_proj"
    """None in a mixture of experts."""
    experts: str | None = None
    """The routed experts (``models.experts``); None in a dense MLP."""
    dense: tuple[str, ...] = ()
    """In a mixture whose layers differ, gate, up and down-projection of its dense MLPs and of its shared expert."""
    shared: str | None = None
    """The shared expert of such a mixture, if there is one."""
    shared_gate: str | None = None
    """The projection whose sigmoid the shared expert's output is multiplied by, if there is one."""
    gate_up_fused: bool = False
    """True if gate and up are the two halves of one projection."""
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm before the MLP; None if the MLP reads the residual stream directly."""
    mlp_post_norm: str | None = None
    """The norm of the MLP's output before it is added to the stream, if there is one."""
    centred_norm: bool = False
    """True if norms are LayerNorm (which subtracts the mean) rather than RMSNorm."""
    gain_offset: float = 0.0
    """Number added to the stored norm weight (Gemma stores gain - 1)."""
    transposed: bool = False
    """True if projections are stored as (in, out), as in GPT-2's Conv1D."""
    soft_capped: bool = False
    """True if attention scores go through a tanh, so that no fused kernel is exact."""
    sink_logit: bool = False
    """True if every head has a learned logit that takes mass without a key."""
    own_sdpa: bool = False
    """True if the model class itself calls SDPA, with the parts of its attention that go beyond a softmax."""
    sigmoid: bool = False
    """True if attention weights are the sigmoid of the scores."""
    head_out: str | None = None
    """The submodule of the attention that norms or gates each head's aggregated values before W_O, if there is one."""
    head_norm_flat: bool = False
    """True if ``head_out`` takes all heads side by side, as one norm over all of them does."""
    head_gate: str | None = None
    """The projection of the attention's input that gates the heads' outputs, in a layer of its own."""
    qk_norm: str | None = None
    """Norm of queries and keys after their projection: 'head' (per head) or 'width' (all heads together)."""
    rotates_in_float32: bool = False
    """True if queries and keys are rotated in float32 and rounded afterwards."""
    attn_in_multiplier: float = 1.0
    """Factor of the attention's input behind its norm (Falcon-H1)."""
    attn_multiplier: float = 1.0
    """Factor of the attention's output before it is added to the stream (Granite, Falcon-H1)."""
    mixer_multiplier: float = 1.0
    """The same of a mixer's output."""
    mlp_multiplier: float = 1.0
    """The same of the MLP's output."""
    mlp_multiplies: bool = False
    """True if the MLP's module does that itself (Falcon-H1)."""
    own_attention: bool = False
    """True if the class writes its attention out and ``interfaced`` has a subclass that calls transformers'
    interface."""
    alibi: bool = False
    """True if scores have a slope for each head times the position of the key (ALiBi)."""
    adds_inside: bool = False
    """True if attention and MLP add the residual stream to their output (BLOOM)."""
    mixer: str | None = None
    """In a hybrid, the module that layers without attention have in its place: linear attention, Mamba, a
    convolution."""
    beside: bool = False
    """True if every layer has attention and a mixer, side by side."""
    in_mixer_layers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields that are different in layers without attention."""
    layer_values: int = 0
    """Length of the tuple that a layer returns, the stream first; 0 where it returns the stream itself."""
    bridge_mlp: str = "mlp"
    """Name of the MLP's component in the bridge's blocks."""
    gated_q: bool = False
    """True if W_Q gives each head a query and, behind it, a gate for its output."""
    q_norm: str = "q_norm"
    """Path of the norm of the queries from the attention, where there is one."""
    k_norm: str = "k_norm"
    normed_qkv: bool = False
    """True if ``q``, ``k`` and ``v`` are paths of norms: some layers make keys and values by one projection."""
    own_sizes: bool = False
    """True if layers differ in the number and the width of their heads, and in their neurons."""
    shared_keys: bool = False
    """True if some layers attend to the keys and values of an earlier one."""
    per_layer: str | None = None
    """Path of the norm of what a layer adds of an input that each token has for it, if there is one."""
    layer_scale: str | None = None
    """Path, from the layer, of the number by which it multiplies the whole stream at its end, if there is one."""
    q_latent: str | None = None
    """Path, from the attention, of the norm of the latent that queries are made from, if there is one."""
    kv_latent: str | None = None
    """The same of the one latent of keys and values. Queries, keys and values are then what the heads multiply:
    rotated, and of a width of their own each."""

    @property
    def aggregated_site(self) -> str:
        """The site of the values summed by attention: ``z_raw`` or, if no module shows it, ``z``."""
        return "z" if self.gated_q else "z_raw"

    @property
    def sites_with_own_points(self) -> tuple[str, ...]:
        """The sites for which this library, and not TransformerLens, adds the hook points."""
        found = ("q",) if self.gated_q else ()
        found += ("attn_out",) if self.beside else ()
        return found if self.mixer is None else (*found, "mixer_out")

    @property
    def plain_kernel(self) -> str:
        """Name of the fastest attention of transformers that is exact for the family."""
        no_sdpa = self.soft_capped or (
            (self.sink_logit or self.own_attention) and not self.own_sdpa
        )
        return "eager" if no_sdpa else "sdpa"

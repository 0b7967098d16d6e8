"""Attention modules that take transformers' attention interface, for classes that write their attention out.

GPT-J, GPT-Neo, Falcon and BLOOM compute scores, softmax and sum themselves, so neither the observed pass
(``activations.attention``) nor the cells (``engine.layout``), which register an attention function, see anything.
``give_attention_interface`` gives their modules a subclass, which computes queries, keys and values as its parent does
and calls the registered function where the model's configuration names one; with ``eager`` and ``sdpa`` the parent
runs.

TransformerLens delegates the attention of some families to the module of transformers, and fires the hooks of scores
and pattern when both were used. ``hook_delegated_attention`` puts the hooks inside, so that edits take effect.

``watch_attention_inputs`` shows the queries, keys and values that a module gives to its attention function: in latent
attention no module of its own makes them.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import AttentionBridge
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor, dropout_add
from transformers.models.falcon.modeling_falcon import (
    FalconAttention,
    FalconDecoderLayer,
    apply_rotary_pos_emb,
)
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.nanochat.modeling_nanochat import NanoChatModel, NanoChatRMSNorm

from .private_apis import kernel_of, rebind_forward, set_attention, use_kernel

Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention function of transformers: (module, query, key, value, mask, scaling=...) -> (output, pattern)."""

_OWN = frozenset({"eager", "sdpa"})
_INSIDE = "sink_lens_hooked"
_HOOKED: ContextVar[Attend | None] = ContextVar("sink_lens_hooked", default=None)


def _chosen_attention_function(module: nn.Module) -> Attend | None:
    hooked = _HOOKED.get()
    if hooked is not None:
        return hooked
    name = kernel_of(module.config)  # type: ignore[union-attr]  # every attention of transformers has it
    return None if name in _OWN else AttentionInterface()[name]


class InterfacedGptj(GPTJAttention):
    """GPT-J's attention, calling transformers' attention interface; its products are in float32 for any type."""

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Any:
        attend = _chosen_attention_function(self)
        if attend is None:
            return super()._attn(query, key, value, attention_mask)
        return _call_attention_function(
            attend, self, query, key, value, attention_mask, scaling=1 / self.scale_attn
        )


class InterfacedGptNeo(GPTNeoSelfAttention):
    """GPT-Neo's attention, calling transformers' attention interface; its scores are not scaled."""

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Any:
        attend = _chosen_attention_function(self)
        if attend is None:
            return super()._attn(query, key, value, attention_mask)
        length = query.shape[2]
        mask = None  # the layer knows which keys a query sees; it is given no padding
        if self.attention_type == "local" and length > self.config.window_size:
            mask = self.bias[:, :, :length, :length]
        return _call_attention_function(attend, self, query, key, value, mask, scaling=1.0)


def _call_attention_function(
    attend: Attend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
) -> tuple[Tensor, Tensor | None]:
    """Call ``attend`` in float32; return output [batch head query d_head] and pattern."""
    output, pattern = attend(
        module, query.float(), key.float(), value.float(), mask, scaling=scaling
    )
    return output.transpose(1, 2).to(value.dtype), pattern


class InterfacedFalcon(FalconAttention):
    """Falcon's attention with rotary positions, calling transformers' attention interface."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        attend = _chosen_attention_function(self)
        if attend is None:
            return super().forward(hidden_states, *args, **kwargs)
        query, key, value = (
            one.transpose(1, 2) for one in self._split_heads(self.query_key_value(hidden_states))
        )
        query, key = apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
        if kwargs.get("layer_past") is not None:
            key, value = kwargs["layer_past"].update(key, value, self.layer_idx)
        mask, scaling = kwargs.get("attention_mask"), 1 / math.sqrt(self.head_dim)
        output, pattern = attend(self, query, key, value, mask, scaling=scaling)
        return self.dense(output.flatten(2)), pattern


class SeparateFalconLayer(FalconDecoderLayer):
    """Falcon's layer, changed so that it does not overwrite the MLP's output.

    The original adds the attention's output to it in place, which would change what was captured before.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; replace the MLP's output by a copy after all hooks have seen it."""
        handle = self.mlp.register_forward_hook(lambda module, args, output: output.clone())
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()


class InterfacedBloom(BloomAttention):
    """BLOOM's attention, which adds slope times position of the key to each head's scores (ALiBi)."""

    def forward(self, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
        attend = _chosen_attention_function(self)
        if attend is None:
            return super().forward(hidden_states, residual, *args, **kwargs)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if kwargs.get("layer_past") is not None:
            key, value = kwargs["layer_past"].update(key, value, self.layer_idx)
        bias = build_alibi_tensor(hidden_states.new_ones(1, 2), self.num_heads, torch.float32)
        options = {"scaling": self.inv_norm_factor, "alibi": bias[:, 0, 1]}  # the slopes: at key 1
        mask = kwargs.get("attention_mask")
        output, pattern = attend(self, query, key, value, mask, **options)
        out = dropout_add(
            self.dense(output.flatten(2)), residual, self.hidden_dropout, self.training
        )
        return out, pattern


class NanoChatBody(NanoChatModel):
    """NanoChat's layers, with a module of its own for the norm of the embeddings.

    A hook of the last norm, which the original runs there too, would otherwise see both.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        last: Any = self._modules["norm"]
        first = NanoChatRMSNorm(eps=getattr(last, "original_component", last).eps)
        first.register_forward_hook(lambda *_: self._modules.update(norm=last))
        self._modules["norm"] = first
        return super().forward(*args, **kwargs)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    GPTJAttention: InterfacedGptj,
    GPTNeoSelfAttention: InterfacedGptNeo,
    FalconAttention: InterfacedFalcon,
    FalconDecoderLayer: SeparateFalconLayer,
    BloomAttention: InterfacedBloom,
    NanoChatModel: NanoChatBody,
}


def interfaced_class(kind: type[nn.Module]) -> type[nn.Module]:
    return _CLASSES.get(kind, kind)


def give_attention_interface(model: PreTrainedModel) -> None:
    for each in model.modules():
        own = _CLASSES.get(type(each))
        if own is None:
            continue
        module: Any = each
        module.__class__ = own
        rebind_forward(module)
        if own is InterfacedGptNeo:
            module.layer_idx = module.layer_id  # the name that every other family has
        elif own is InterfacedBloom:
            module.config = model.config  # every other family's attention has it


@contextlib.contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = kernel_of(model.config)
    try:
        set_attention(model, name)
        yield
    finally:
        set_attention(model, before)


@contextlib.contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module)
    before, own["forward"] = own.get("forward"), forward
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before


See = Callable[[Literal["q", "k", "v"], Tensor], Tensor]
"""Gets a name and a tensor "batch head position d_head", and returns the one to go on with."""
_SEEN_INSIDE = "sink_lens_seen"
_SEEN: ContextVar[tuple[tuple[See, str], ...]] = ContextVar("sink_lens_seen", default=())
"""Who sees what the running module gives, and the attention function behind; the last one first."""


def watch_attention_inputs(module: nn.Module, see: See) -> contextlib.AbstractContextManager[None]:
    """Within the block, pass a module's queries, keys and values through ``see`` before its attention function."""
    AttentionInterface.register(_SEEN_INSIDE, _watch_and_attend)
    config: Any = module.config
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        token = _SEEN.set(((see, kernel_of(config)), *_SEEN.get()))
        try:
            with use_kernel(config, _SEEN_INSIDE):
                return forward(*args, **kwargs)
        finally:
            _SEEN.reset(token)

    return replace_forward(module, run)


def _watch_and_attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    (see, name), *others = _SEEN.get()
    eager: Any = sys.modules[type(module).__module__]
    attend = AttentionInterface().get_interface(name, eager.eager_attention_forward)
    token = _SEEN.set(tuple(others))
    try:
        return attend(module, see("q", query), see("k", key), see("v", value), *args, **kwargs)
    finally:
        _SEEN.reset(token)


class InterfacedAttentionBridge(AttentionBridge):
    """Bridge component of an attention that Hugging Face computes; edits of its scores and pattern take effect."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = self.original_component.config  # type: ignore[union-attr]  # every attention of transformers
        token = _HOOKED.set(self._attend)
        try:
            with use_kernel(config, _INSIDE):
                return super().forward(*args, **kwargs)
        finally:
            _HOOKED.reset(token)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention, running the hooks of scores and pattern; return the output, and None for the pattern.

        A mask is boolean (True is visible) or is added; None means causal.
        """
        length, n_keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        if mask is None:
            mask = query.new_ones(length, n_keys, dtype=torch.bool).tril(n_keys - length)
        if mask.dtype == torch.bool:
            mask = query.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(query.dtype).min)
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        scores = self.hook_attn_scores(torch.matmul(query, key.transpose(2, 3)) * scaling + mask)
        pattern = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(self.hook_pattern(pattern), value).transpose(1, 2).contiguous(), None


def hook_delegated_attention(bridge: TransformerBridge) -> None:
    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        hooked = _HOOKED.get()
        assert hooked is not None, (
            "this attention function runs inside an InterfacedAttentionBridge only"
        )
        return hooked(*args, **kwargs)

    AttentionInterface.register(_INSIDE, attend)
    for block in bridge.blocks:
        attention = block._modules.get("attn")
        if type(attention) is AttentionBridge:
            attention.__class__ = InterfacedAttentionBridge

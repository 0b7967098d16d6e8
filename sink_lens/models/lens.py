"""``LensModel``: one set of weights, as a TransformerLens bridge and a Hugging Face module; checks of its layers."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any, NoReturn

import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InputError, ModelError, SiteError
from ..text import as_ranges
from .experts import expert_width
from .families import head_sizes, layer_of_keys, setting_of, sliding_window_of
from .family import ADDED, OF_ATTENTION, Family
from .header import axis_sizes
from .offload import NoBridge, bytes_on_disk, compute_device
from .own_attention import AttentionFunction, ignored_mask_error, no_pattern_error
from .packed import input_width
from .pass_lock import LensState
from .private_apis import kernel_of


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LensModel:
    """A Hugging Face model (``plain``) and its TransformerLens bridge: two forward paths that give equal numbers."""

    bridge: TransformerBridge
    """On eager attention. Every run that edits, or needs a pattern, uses it."""
    plain: PreTrainedModel
    """The same weights (shared storage) as a Hugging Face module on its fastest exact kernel, to measure or train."""
    tokenizer: PreTrainedTokenizerBase | None
    family: Family
    state: LensState
    """The model as it was when it was wrapped, and the lock that all lenses on it share."""
    name: str
    """As the user gave it."""
    notes: tuple[str, ...] = ()
    """Facts that a reader of results must know, such as that the weights were quantised."""
    uneditable: frozenset[str] = field(default_factory=frozenset)
    """Sites whose edits have no effect on this model's bridge."""

    own_attention: AttentionFunction | None = None
    """The user's own attention function that the model runs; None if it is that of the family's row."""

    @property
    def config(self) -> Any:
        return self.plain.config

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_heads(self) -> int:
        return self.config.num_attention_heads

    @property
    def n_kv_heads(self) -> int:
        """Number of key and value heads, the smallest if layers differ."""
        return self._smallest_size("n_kv_heads")

    @property
    def d_model(self) -> int:
        return self.config.hidden_size

    @property
    def d_head(self) -> int:
        """Width of one head's queries and keys, the smallest if layers differ."""
        return self._smallest_size("d_head")

    @property
    def d_value(self) -> int:
        """Width of one head's values, the smallest if layers differ."""
        return self._smallest_size("d_value")

    @property
    def d_latents(self) -> tuple[int, int]:
        """Widths of the query latent and of the key-value latent; 0 for one that the model lacks."""
        if self.family.kv_latent is None:
            return (0, 0)
        return self.config.q_lora_rank or 0, self.config.kv_lora_rank

    def head_sizes(self, layer: int) -> dict[str, int]:
        """Return a layer's sizes by name: n_heads, n_kv_heads, d_head (of queries and keys) and d_value."""
        return head_sizes(self.config, family=self.family, layer=layer)

    def _smallest_size(self, name: str) -> int:
        return min(self.head_sizes(layer)[name] for layer in self._layers_to_compare)

    @property
    def _layers_to_compare(self) -> range:
        return range(self.n_layers if self.family.own_sizes else 1)

    def has_differing_sizes(self, axes: str) -> bool:
        """Check whether layers differ in the size of one of these axes."""
        sizes = {self.axis_sizes(axes, n_positions=1, layer=one) for one in self._layers_to_compare}
        return len(sizes) > 1

    @property
    def d_mlp(self) -> int:
        """The smallest number of neurons in an MLP, over all its experts; 0 if the model has no site ``neurons``."""
        return min(map(self.n_neurons, self._layers_to_compare))

    def n_neurons(self, layer: int) -> int:
        """Return the number of neurons in a layer's MLP, over all experts; 0 if the model has no site ``neurons``."""
        if self.family.experts is not None:
            return self.layer(layer).get_submodule(str(self.family.mlp)).__dict__["width"]
        if self.family.down is None:
            return 0
        path = ".".join(part for part in (self.family.mlp, self.family.down) if part)
        return input_width(self.layer(layer).get_submodule(path))

    @property
    def d_expert(self) -> int | None:
        """Number of neurons of one expert. Neuron n of expert e is unit ``e * d_expert + n``.

        None in a model without experts, and in one that has shared experts or dense layers too.
        """
        if self.family.experts is None or self.family.dense:
            return None
        return expert_width(self.layer(0).get_submodule(f"{self.family.mlp}.{self.family.experts}"))

    def axis_sizes(
        self, axes: str, *, n_positions: int, layer: int | None = None
    ) -> tuple[int, ...]:
        """Return the size of each of these axes (``SITES[name].axes``) in a layer, without the axis of sequences.

        Without a layer, each size is the smallest of any layer.
        """
        if layer is None or not self.family.own_sizes:
            return axis_sizes(self, axes, n_positions=n_positions)
        own = self.head_sizes(layer) | {"d_mlp": self.n_neurons(layer)}
        own |= {"kv_head": own["n_kv_heads"]}
        found = zip(axes.split()[1:], axis_sizes(self, axes, n_positions=n_positions), strict=True)
        return tuple(own.get(axis, size) for axis, size in found)

    @property
    def d_vocab(self) -> int:
        return self.config.vocab_size

    @property
    def n_context(self) -> int | None:
        """Longest input in tokens; None if the configuration does not state it."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def rotation_switch(self) -> int | None:
        """Tokens up to which a text is rotated otherwise than a longer one (longrope); None where all are alike."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        longer = rope.get("rope_type") == "longrope"
        return rope["original_max_position_embeddings"] if longer else None

    def reach(self, layer: int) -> int | None:
        """Return how many positions a layer's sliding window has, the query's own included; None without one."""
        return sliding_window_of(self.config, layer=layer)

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.plain.get_submodule(self.family.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have attention: in a hybrid only some."""
        return self._layers_with_module(self.family.attention.partition(".")[0])

    @property
    def mixer_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a mixer: empty unless the model is a hybrid."""
        return () if self.family.mixer is None else self._layers_with_module(self.family.mixer)

    def _layers_with_module(self, module: str) -> tuple[int, ...]:
        found = (getattr(layer, module, None) for layer in self.layers)
        return tuple(index for index, one in enumerate(found) if one is not None)

    def layers_with(self, *sites: str) -> tuple[int, ...]:
        """Return the numbers of the layers that have all these sites (or observed activations)."""
        having = set(range(self.n_layers)).intersection(*map(self._layers_with_site, sites))
        return tuple(sorted(having))

    def _layers_with_site(self, site: str) -> tuple[int, ...]:
        if site == "mixer_out":
            return self.mixer_layers
        if site == "per_layer_out" and self.family.per_layer is None:
            return ()
        if self.family.shared_keys and site in ("k", "v"):
            return self.key_layers(range(self.n_layers))
        return self.attention_layers if site in OF_ATTENTION else tuple(range(self.n_layers))

    def added_sites(self, layer: int) -> tuple[str, ...]:
        """Return the sites whose values a layer adds to the residual stream."""
        return tuple(site for site in ADDED if layer in self.layers_with(site))

    def scale(self, layer: int) -> float:
        """Return the factor by which a layer multiplies the residual stream at its end; 1 except in Gemma 4."""
        of = self.family.layer_scale
        return 1.0 if of is None else float(getattr(self.layer(layer), of))

    @property
    def remaining_scales(self) -> tuple[float, ...]:
        """Factors that convert the stream before each layer, and after the last, to the unit of the last.

        A layer's factor is the product of the ``scale`` of this layer and of all later ones: 1 except in Gemma 4.
        """
        scales = [self.scale(layer) for layer in reversed(range(self.n_layers))]
        return tuple(accumulate(scales, mul, initial=1.0))[::-1]

    def key_layers(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Return the layers whose keys and values the given layers attend to: the same layers, except in Gemma 4."""
        if not self.family.shared_keys:
            return tuple(layers)
        return tuple(sorted({layer_of_keys(self.config, layer=layer) for layer in layers}))

    def family_of_layer(self, layer: int) -> Family:
        """Return the family's row for one layer; a hybrid's layer without attention has a row of its own."""
        changed = self.family.in_mixer_layers
        if not changed or layer in self.attention_layers:
            return self.family
        return replace(self.family, **changed)

    def layer(self, index: int) -> nn.Module:
        """Return one decoder layer of the plain model."""
        return self.layers[index]

    @property
    def device(self) -> torch.device:
        """Device that inputs must be on."""
        embedding = self.plain.get_input_embeddings()
        assert isinstance(embedding.weight, torch.Tensor)
        return compute_device(embedding.weight, embedding)

    @property
    def offloaded(self) -> bool:
        """True if some weights are on disk; such a model has no bridge, and only the plain path runs."""
        return bytes_on_disk(self.plain) > 0

    @property
    def why_measured_only(self) -> str | None:
        """Why the model has no bridge and so can be measured but not changed; None if it has one."""
        return self.bridge.reason if isinstance(self.bridge, NoBridge) else None

    @property
    def shows_pattern(self) -> bool:
        """False if the attention function is one of the user's own that has no pattern."""
        return self.own_attention is None or "pattern" not in self.uneditable

    def uneditable_error(self, site: str) -> SiteError:
        """Return the error for a site in ``uneditable``."""
        if self.own_attention is None:
            return SiteError(
                f"this bridge delegates its attention to Hugging Face, shows no {site!r} as used, and edits of it "
                "change nothing; need capture(path='plain') to read it, "
                "or a model from load or wrap(model) of Hugging Face, not a stock bridge"
            )
        if site == "pattern":
            return no_pattern_error(self.own_attention)
        if site == "mask":
            return ignored_mask_error(self.own_attention)
        return SiteError(
            f"the attention function {self.own_attention} shows no {site!r}; need another site, as 'pattern' or 'z'"
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ModelError(
            f"the lens of {self.name} was to be sent to another process, or copied, and it stays with its model and "
            "its lock; need one that is made there. Call load(...) in the worker, or wrap a copy of the model"
        )

    def __repr__(self) -> str:
        said = [note.partition(":")[0] for note in self.notes if note.startswith("the weights")]
        weights = "".join(f"; {one}" for one in said)
        return (
            f"LensModel({self.name!r}, {self.family.architecture}, {self.n_layers} layers, "
            f"{self.n_heads} heads over {self.n_kv_heads}, d_model {self.d_model}, {self.dtype}, {self.device}, "
            f"plain kernel {kernel_of(self.plain.config)}{weights})"
        )


def layers_without_attention_text(lens: LensModel) -> str:
    """Name the layers without attention and their mixer; "" if all layers have attention."""
    skipped = sorted({*range(lens.n_layers)} - {*lens.attention_layers})
    if not skipped:
        return ""
    mixer = type(lens.layer(skipped[0]).get_submodule(lens.family.mixer or "")).__name__
    return f"layers {as_ranges(skipped)} of {lens.name} have no attention ({mixer})"


def missing_sites_text(lens: LensModel, sites: Iterable[str]) -> str:
    """Say which layers lack one of these sites, and why; "" if every layer has all of them."""
    if said := layers_without_attention_text(lens):
        return "" if OF_ATTENTION.isdisjoint(sites) else said
    others = sorted({*range(lens.n_layers)} - {*lens.layers_with("k")})
    if not others or {"k", "v"}.isdisjoint(sites):
        return ""
    return f"layers {as_ranges(others)} of {lens.name} attend to the keys and values of an earlier layer"


def is_parallel(lens: LensModel) -> bool:
    """Check whether attention and MLP of a layer read the same stream (parallel blocks)."""
    family = lens.family
    shared = family.attn_norm is not None and family.attn_norm == family.mlp_norm
    return shared or bool(setting_of(lens.config, "use_parallel_residual"))


def check_plain_layers(lens: LensModel) -> None:
    other = "need another model. This one is traced, measured, swept and patched"
    if found := layers_without_attention_text(lens):
        raise ModelError(f"{found}, and this needs it in every layer; {other}")
    if lens.own_attention is not None:
        raise ModelError(
            f"attention of {lens.name} is computed by {lens.own_attention}, and this needs scores and their softmax; "
            "need model.set_attn_implementation('eager'), and wrap it again"
        )
    if lens.family.layer_scale is not None:
        raise ModelError(
            f"the layers of {lens.name} multiply the whole stream, and add to it an input of their own, and this takes "
            f"the stream for a sum of what attention and MLPs add; {other}"
        )
    if lens.mixer_layers:
        raise ModelError(
            f"layers {as_ranges(lens.mixer_layers)} of {lens.name} have a mixer beside their attention, and this takes "
            f"attention and MLPs for all that writes to the stream; {other}"
        )


def check_layers_have_attention(lens: LensModel, layers: Iterable[int], *, what: str) -> None:
    if not set(layers) <= {*lens.attention_layers}:
        raise SiteError(
            f"{layers_without_attention_text(lens)}, so no {what}; "
            f"need one of the layers {as_ranges(lens.attention_layers)}"
        )


def layers_from_zero(layers: Iterable[int], n_layers: int) -> tuple[int, ...]:
    """Return layer numbers that count from 0; negative ones counted from the last, as in a list."""
    return tuple(n_layers + layer if -n_layers <= layer < 0 else layer for layer in layers)


def check_layers(layers: Iterable[int], lens: LensModel) -> None:
    for layer in layers:
        if not 0 <= layer < lens.n_layers:
            raise InputError(f"layer {layer} does not exist; need 0 to {lens.n_layers - 1}")


def check_layers_have_site(lens: LensModel, layers: Iterable[int], *, site: str) -> None:
    if site in OF_ATTENTION and len(lens.layers_with(site)) == len(lens.attention_layers):
        check_layers_have_attention(lens, layers, what=repr(site))
    elif not set(layers) <= {*lens.layers_with(site)}:
        found = as_ranges(lens.layers_with(site))
        raise SiteError(
            f"not all of these layers of {lens.name} have {site!r}; need one of {found}"
        )

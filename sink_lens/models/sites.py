"""The closed list of sites: the activations that can be read and edited, each with two addresses.

``hook_resid_mid`` is left out on purpose. On the bridge it is the input of the second norm, so editing it changes the
MLP's input but not the residual stream. To edit the stream after the attention, edit ``attn_out``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import InputError, SiteError
from .family import EXPERTS_HOOK, Family

if TYPE_CHECKING:  # neither torch nor the types of shapes: a dry run knows the sites without them
    from jaxtyping import Float
    from torch import Tensor

    from .lens import LensModel

_PARTS = {
    "position": "position",
    "query": "position",
    "head": "head",
    "kv_head": "head",
    "key": "key",
}
"""Axis of a site -> what an edit, a sweep or a patch chooses from on it; any other axis has units."""
Side = Literal["input", "output", "inside"]
Part = Literal["whole", "q", "k", "v", "gate", "up", "heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a site in the plain module: a submodule, its input or output, and how to read the site from it."""

    module: str
    """Path of the submodule from the layer ("" is the layer), or from the model if ``Site.per_layer`` is false."""
    side: Side
    """Inside, it is what the module gives to its attention function (``interfaced.watch_attention_inputs``)."""
    part: Part = "whole"
    """The part of a fused projection, or that the tensor is viewed by heads."""
    scale: float = 1.0
    """Factor of the submodule's tensor in the site's."""


def _at(side: Side, *path: str | None, part: Part = "whole", scale: float = 1.0) -> Address:
    module = ".".join(name for name in path if name)
    return Address(module=module, side=side, part=part, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A named activation of a decoder layer."""

    name: str
    axes: str
    """Axes of the tensor, in the words of ``sink_lens.axes``."""
    bridge: str
    """Hook name on the bridge, with ``{layer}``."""
    meaning: str
    per_layer: bool = True
    observed: bool = False
    """True if the plain path reads the site in its attention function, not by a module hook."""

    @property
    def axis_names(self) -> tuple[str, ...]:
        """``position``, ``head``, ``key`` or ``unit`` for each axis but that of sequences."""
        return tuple(_PARTS.get(axis, "unit") for axis in self.axes.split()[1:])

    @property
    def by_token(self) -> bool:
        """True if each value belongs to one token; False for scores and pattern."""
        return self.axis_names[0] == "position"

    @property
    def position_axis(self) -> int:
        """Number of the axis of positions; in scores and pattern, of queries."""
        return 1 + self.axis_names.index("position")

    def address(self, family: Family) -> Address | None:
        """Return where a family's plain model has this site; None if no module has it."""
        match self.name:
            case "resid_pre":
                return _at("input")
            case "resid_post":
                return _at("output")
            case "attn_in":
                return _at("input", family.attention)
            case "q_latent" | "kv_latent":
                norm: str | None = getattr(family, self.name)
                return None if norm is None else _at("output", family.attention, norm)
            case "q" | "k" | "v" if family.kv_latent is not None:
                return _at("inside", family.attention, part=self.name)
            case "q" | "k" | "v":
                part = "whole" if family.normed_qkv else self.name
                return _at("output", family.attention, getattr(family, self.name), part=part)
            case "z_raw" if family.gated_q:
                return None
            case "z_raw" if family.head_out is not None:
                part = "heads" if family.head_norm_flat else "whole"
                return _at("input", family.attention, family.head_out, part=part)
            case "z" | "z_raw":
                return _at("input", family.attention, family.o, part="heads")
            case "attn_out":
                path = (family.attention, family.o if family.adds_inside else None)
                if family.attn_post_norm is not None:
                    path = (family.attn_post_norm,)
                return _at("output", *path, scale=family.attn_multiplier)
            case "mixer_out" if family.mixer is not None:
                return _at("output", family.mixer, scale=family.mixer_multiplier)
            case "mlp_in":
                return _at("input", family.mlp or family.up)
            case "gate" | "up":
                name = family.gate if self.name == "gate" else family.up
                part = self.name if family.gate_up_fused else "whole"
                return None if name is None else _at("output", family.mlp, name, part=part)
            case "neurons" if family.experts is not None:
                return _at("output", family.mlp, EXPERTS_HOOK)
            case "neurons" if family.down is not None:
                return _at("input", family.mlp, family.down)
            case "down_out":  # of all experts together, the MLP's
                return _at("output", family.mlp, family.down)
            case "mlp_out":
                path = (family.mlp_post_norm or family.mlp or family.down,)
                if family.adds_inside:
                    path = (family.mlp, family.down)
                scale = 1.0 if family.mlp_multiplies else family.mlp_multiplier
                return _at("output", *path, scale=scale)
            case "per_layer_out" if family.per_layer is not None:
                return _at("output", family.per_layer)
            case "final":
                return _at("output", family.final_norm)
        return None

    def hook_name(self, layer: int) -> str:
        """Return the usual name of this site's hook point; ``bridge_hook_name`` has a family's own."""
        return self.bridge.format(layer=layer)


_STREAM, _SQUARE, _NEURONS = (
    "batch position d_model",
    "batch head query key",
    "batch position d_mlp",
)
_AS_PROJECTED = (
    "as projected, before their norm and rotation; in latent attention as the heads multiply them, in Gemma 4 after "
    "their norm"
)
_IN_LAYERS = {
    "resid_pre": (_STREAM, "hook_resid_pre", "residual stream before the layer"),
    "attn_in": (
        _STREAM,
        "attn.hook_in",
        "input of the query, key and value projections, after the norm where there is one",
    ),
    "q_latent": (
        "batch position d_q_latent",
        "attn.q_a_layernorm.hook_out",
        "what queries are made from in latent attention, after its norm",
    ),
    "kv_latent": (
        "batch position d_kv_latent",
        "attn.kv_a_layernorm.hook_out",
        "what the values, and the keys but for their rotary part, are made from in latent attention, after its norm",
    ),
    "q": ("batch position head d_head", "attn.hook_q", f"queries {_AS_PROJECTED}"),
    "k": ("batch position kv_head d_head", "attn.hook_k", f"keys {_AS_PROJECTED}"),
    "v": ("batch position kv_head d_value", "attn.hook_v", "values"),
    "scores": (
        _SQUARE,
        "attn.hook_attn_scores",
        "attention scores before the softmax, with the mask added (the type's least number)",
    ),
    "pattern": (_SQUARE, "attn.hook_pattern", "attention pattern, after the softmax"),
    "z_raw": (
        "batch position head d_value",
        "attn.hook_z",
        "aggregated values before a head norm or gate; equal to z where there is none",
    ),
    "z": (
        "batch position head d_value",
        "attn.hook_z",
        "input of the attention output projection W_O, by heads",
    ),
    "attn_out": (
        _STREAM,
        "hook_attn_out",
        "what the attention adds to the stream, after its norm where there is one",
    ),
    "mixer_out": (
        _STREAM,
        "hook_own_mixer_out",
        "what a hybrid's mixer (linear attention, Mamba, a convolution) adds to the stream",
    ),
    "mlp_in": (_STREAM, "mlp.hook_in", "input of the MLP, after the norm where there is one"),
    "gate": (_NEURONS, "mlp.hook_pre", "gate pre-activation of a gated MLP"),
    "up": (
        _NEURONS,
        "mlp.hook_pre_linear",
        "up-projection; the pre-activation where there is no gate",
    ),
    "neurons": (
        _NEURONS,
        "mlp.hook_post",
        "input of the down-projection; in a mixture of experts, of all experts, times the router's weights",
    ),
    "down_out": (
        _STREAM,
        "mlp.hook_out",
        "output of the down-projection, before its norm where there is one",
    ),
    "mlp_out": (
        _STREAM,
        "hook_mlp_out",
        "what the MLP adds to the stream, after its norm where there is one",
    ),
    "per_layer_out": (
        _STREAM,
        "post_per_layer_input_norm.hook_out",
        "what a layer adds to the stream of the input that the token has for this layer (Gemma 4)",
    ),
    "resid_post": (_STREAM, "hook_resid_post", "residual stream after the layer"),
}
"""Name of a site of every layer -> its axes, its hook name on the bridge in the layer, and its meaning."""
SITES: Mapping[str, Site] = {
    name: Site(
        name=name,
        axes=axes,
        bridge=f"blocks.{{layer}}.{hook}",
        meaning=meaning,
        observed=name in ("scores", "pattern"),
    )
    for name, (axes, hook, meaning) in _IN_LAYERS.items()
} | {
    "final": Site(
        name="final",
        axes=_STREAM,
        bridge="ln_final.hook_out",
        meaning="output of the last norm, what the unembedding reads",
        per_layer=False,
    )
}
"""Site name -> site, in the order in which a layer computes them."""
_LIST = tuple(SITES.values())
_OTHER_NAMES = {
    "attn": "'attn_out'",
    "attn_scores": "'scores'",
    "embed": "'resid_pre' of layer 0",
    "mlp": "'mlp_out'",
    "mlp_post": "'neurons'",
    "post": "'neurons'",
    "pre": "'gate', or 'up' in an MLP without a gate",
    "pre_linear": "'up'",
    "resid_mid": "'attn_out', which a layer adds to its 'resid_pre'; hook_resid_mid is read by the MLP alone",
    "result": "'z' by heads, which W_O makes the result of",
}
"""Names by which TransformerLens calls a place -> its site here."""


def unknown_site_error(name: str) -> SiteError:
    short = re.sub(r"^(blocks\.\d+\.)?((attn|mlp)\.)?(hook_)?", "", name)
    pattern = re.sub(r"^blocks\.\d+\.", "blocks.{layer}.", name)
    # z before z_raw
    hooked = [repr(site.name) for site in reversed(_LIST) if site.bridge == pattern]
    if short in _OTHER_NAMES or short in SITES:
        hooked.append(_OTHER_NAMES.get(short, repr(short)))
    if hooked:
        return SiteError(
            f"there is no site {name!r}; it is called {hooked[0]}, and layers are named apart"
        )
    return SiteError(f"there is no site {name!r}; need one of {', '.join(SITES)}")


def differing_sizes_error(site: str, *, axis: str) -> InputError:
    return InputError(
        f"layers differ in the number of {axis}s of {site!r}; need them named, and layers that have them"
    )


def site_of(name: str, *, family: Family) -> Site:
    """Look up a site by name; raise SiteError if it is unknown, or the family does not have it."""
    if name not in SITES:
        raise unknown_site_error(name)
    site = SITES[name]
    if not site.observed and site.address(family) is None:
        reason = "has no gate in its MLP"
        if family.experts is not None and name in ("gate", "up"):
            reason = "is a mixture of experts, whose gate and up-projection have no site"
        elif name == "mixer_out":
            reason = "has attention in every layer and no mixer"
        elif name == "per_layer_out":
            reason = "has no input of its own for each layer"
        elif name in ("q_latent", "kv_latent"):
            reason = "projects its queries, or its keys and values, from what the attention reads, without a latent"
        elif name == "z_raw":
            reason = "gates its aggregated values within the attention"
        elif family.down is None:
            reason = "has experts beside its MLP, whose neurons have no site"
        raise SiteError(
            f"{family.architecture} has no site {name!r}: it {reason}; need one of {', '.join(sites_of(family))}"
        )
    return site


def sites_of(family: Family) -> tuple[str, ...]:
    return tuple(
        name for name, site in SITES.items() if site.observed or site.address(family) is not None
    )


def site_key(site: str, layer: int) -> tuple[str, int]:
    """Return the key (site, layer) of a site's tensor; the layer is 0 for a site without layers."""
    return (site, layer if SITES[site].per_layer else 0)


def bridge_hook_name(site: Site, *, family: Family, layer: int) -> str:
    """Return the name of the bridge's hook point for a site, in one layer of this family."""
    if site.name in family.sites_with_own_points:
        return f"blocks.{layer}.hook_own_{site.name}"
    if site.name in ("q", "k", "v") and family.normed_qkv:
        return f"blocks.{layer}.attn.{site.name}_norm.hook_out"
    if site.name == "k" and family.mlp_multiplies:  # TransformerLens multiplies the keys
        return f"blocks.{layer}.attn.k.hook_out"
    if site.name == "up" and family.gate is None:
        return f"blocks.{layer}.mlp.hook_pre"
    if site.name == "neurons" and family.experts is not None:
        return f"blocks.{layer}.mlp.{EXPERTS_HOOK}"
    if site.name == "down_out" and (family.adds_inside or family.mlp_multiplies):
        return f"blocks.{layer}.mlp.out.hook_out"
    if site.name == "z_raw" and family.head_out is not None:
        return f"blocks.{layer}.attn.{family.head_out}.hook_in"
    return site.hook_name(layer).replace(".mlp.", f".{family.bridge_mlp}.")


_BY_FAMILY = frozenset({"z_raw", "gate", "up", "neurons", "down_out"})
"""Sites whose hook name is another site's in other families."""


def site_of_hook(name: str, *, lens: "LensModel | None" = None) -> tuple[str, int | None]:
    """Return the site and the layer of a bridge's hook name; the layer is None if the name has none.

    Without the model, hook points in the MLP are unknown, since families differ there.

    Raises:
        SiteError: no site has this hook point.
    """
    _, _, rest = name.partition("blocks.")
    number = rest.partition(".")[0]
    layer = int(number) if number.isdigit() else None
    points: Mapping[str, object] = {} if lens is None else lens.bridge.hook_dict
    # z before z_raw, mlp_out before down_out: they share a hook in most families
    for site in reversed(_LIST):
        if site.per_layer != (layer is not None):
            continue
        if lens is None:
            if site.name not in _BY_FAMILY and site.hook_name(layer or 0) == name:
                return site.name, layer
        elif site.name in sites_of(lens.family):
            own = points.get(bridge_hook_name(site, family=lens.family, layer=layer or 0))
            if own is not None and own is points.get(name):
                return site.name, layer
    known = [site.bridge for site in _LIST if lens is not None or site.name not in _BY_FAMILY]
    if lens is None:
        known[-1] += ", or the model (model=...), which tells what a hook in its MLP is"
    raise SiteError(f"the hook {name!r} is at no site; need one of {', '.join(known)}")


def read_site(
    tensor: "Tensor",
    *,
    address: Address,
    family: Family,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    d_value: int,
    batch: int,
) -> "Float[Tensor, 'batch position *value']":
    """Extract a site from a submodule's input or output: split a fused projection, view it by heads.

    Sizes are those of the layer's heads; ``batch`` is the number of sequences.
    """
    if tensor.dim() == 2:  # OPT flattens batch and position around its MLP
        tensor = tensor.unflatten(0, (batch, -1))
    if address.scale != 1:
        tensor = tensor * address.scale
    match address.part:
        case "whole":
            return tensor
        case "heads":
            return tensor.unflatten(-1, (n_heads, d_value))
        case "gate":
            return tensor.chunk(2, dim=-1)[0]
        case "up":
            return tensor.chunk(2, dim=-1)[1]
        case "q" | "k" | "v" as part:
            index = "qkv".index(part)
            heads = n_heads if part == "q" else n_kv_heads
            if family.gated_q and part == "q":
                return tensor.unflatten(-1, (heads, 2 * d_head))[..., :d_head]
            if family.qkv_layout == "separate":
                return tensor.unflatten(-1, (heads, d_head))
            if family.qkv_layout == "interleaved":
                return tensor.unflatten(-1, (n_heads, 3, d_head))[..., index, :]
            widths = [n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head]
            # a view of its own: one of several views of ``split`` cannot be changed in place under autograd
            return tensor.narrow(-1, sum(widths[:index]), widths[index]).unflatten(
                -1, (heads, d_head)
            )

"""Simulated low-precision formats: activations, caches and weights rounded to what a format holds, in the model's type.

Values are divided by their scale, rounded to the nearest element (ties to even), limited to the largest one, and
multiplied back. A scale belongs to a sequence (``tensor``), to a token (``token``), or to a block of neighbouring
channels of one token (``group``), and comes from the values that are rounded. Kept tokens and channels do not count for
it, so keeping the outlier of a tensor makes the steps of all other values finer.

Integers are symmetric, with scale max|x| / 127 (int8) or max|x| / 7 (int4). fp8 has scale max|x| / 448 (e4m3) or
max|x| / 57344 (e5m2). mxfp4 has blocks of 32 with a power of two as scale (OCP Microscaling 1.0). nvfp4 has blocks of
16 with an e4m3 scale, which in turn has one scale a sequence.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..data.given import Given, laid_by_text
from ..errors import InputError, SiteError
from ..models.families import FROM_LATENT
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.packed import check_not_packed
from ..models.sites import SITES
from ..schema import QUANTISED_FORMATS, QuantisedFormat
from .constructors import At, Change, Edit, EditError, edit, kept_of_pass

_INTEGERS = {"int8": 127, "int4": 7}
_FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_LARGEST_FP4 = 6.0
_GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A low-precision format: the type of its numbers, and the values that share one scale."""

    name: str
    element: str
    """int8, int4, fp8_e4m3, fp8_e5m2 or fp4 (e2m1)."""
    scope: str
    """tensor (a sequence), token or group."""
    size: int = 0
    """Channels in a group."""


def look_up_format(name: str) -> Format:
    if name not in QUANTISED_FORMATS:
        raise InputError(f"there is no format {name!r}; need one of {', '.join(QUANTISED_FORMATS)}")
    if name in ("mxfp4", "nvfp4"):
        return Format(name=name, element="fp4", scope="group", size=32 if name == "mxfp4" else 16)
    element, _, scope = name.rpartition("_")
    return Format(name=name, element=element, scope=scope, size=_GROUP if scope == "group" else 0)


def round_to_format(
    x: Float[Tensor, "batch position value"],
    form: Format,
    *,
    keep: Bool[Tensor, "#batch #position #value"] | None = None,
) -> Float[Tensor, "batch position value"]:
    """Round values, channels last, in float32; the result has their own type.

    Values at which ``keep`` is True stay as they are and do not count for a scale.
    """
    values = x.float() if keep is None else x.float().masked_fill(keep, 0.0)
    if form.scope == "group":
        width = values.shape[-1]
        blocks = nn.functional.pad(values, (0, -width % form.size)).unflatten(-1, (-1, form.size))
        done = _round_by_scale(blocks, form, largest=blocks.abs().amax(-1, keepdim=True)).flatten(
            -2
        )[..., :width]
    else:
        axes = -1 if form.scope == "token" else (-2, -1)
        done = _round_by_scale(values, form, largest=values.abs().amax(axes, keepdim=True))
    done = done.to(x.dtype)
    return done if keep is None else torch.where(keep, x, done)


def _round_by_scale(values: Tensor, form: Format, *, largest: Tensor) -> Tensor:
    """Round values by the scale that fits the ``largest`` magnitude of each group."""
    if form.element in _INTEGERS:
        top = _INTEGERS[form.element]
        scale = _divide_exactly(largest, top)
        return (values * (1 / _safe_divisor(scale))).round().clamp(-top - 1, top) * scale
    if form.element in _FLOAT8:
        scale = _divide_exactly(largest, torch.finfo(_FLOAT8[form.element]).max)
        return round_to_float8(values / _safe_divisor(scale), form.element) * scale
    if form.name == "mxfp4":
        scale = power_of_two_scale(largest)
    else:  # max|x| / 6, rounded to e4m3 in units that one sequence shares
        top = torch.finfo(torch.float8_e4m3fn).max
        unit = _divide_exactly(largest.amax((-3, -2), keepdim=True), _LARGEST_FP4 * top)
        scale = (
            round_to_float8(
                _divide_exactly(largest, _LARGEST_FP4) / _safe_divisor(unit), "fp8_e4m3"
            )
            * unit
        )
    return round_to_fp4(values / _safe_divisor(scale)) * scale


def round_to_float8(x: Tensor, element: str) -> Tensor:
    """Round to the nearest fp8_e4m3 or fp8_e5m2 number, limited to the largest, in float32."""
    dtype = _FLOAT8[element]
    top = torch.finfo(dtype).max
    return x.float().clamp(-top, top).to(dtype).float()


def round_to_fp4(x: Tensor) -> Tensor:
    """Round to the nearest e2m1 number (0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives), in float32."""
    size = x.float().abs().clamp(max=_LARGEST_FP4)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step).copysign(x.float())


def power_of_two_scale(largest: Tensor) -> Tensor:
    """Compute the scale of mxfp4 numbers: 2 ** (floor(log2(``largest``)) - 2), with an exponent of 8 bits."""
    _, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [1/2, 1)
    return torch.ldexp(torch.ones_like(largest), (exponent - 3).clamp(-126, 127))


def _divide_exactly(x: Tensor, number: float) -> Tensor:
    return x / torch.full_like(
        x, number
    )  # correctly rounded: a GPU multiplies by a plain number's reciprocal


def _safe_divisor(scale: Tensor) -> Tensor:
    """Return 1 for a scale that is 0 or too small to divide by; values under it become 0."""
    return torch.where(scale >= torch.finfo(scale.dtype).tiny, scale, torch.ones_like(scale))


def quantisation(
    site: str,
    form: QuantisedFormat,
    *,
    layers: Sequence[int] | None = None,
    tokens: Bool[Tensor, "batch position"] | None = None,
    channels: Mapping[int, Sequence[int]] | Mapping[str, Sequence[int]] | None = None,
    label: str = "",
) -> Edit:
    """Make an edit that rounds a site's values to a format, except kept tokens and channels.

    The site has a token axis: an input of linear layers (``attn_in``, ``z``, ``mlp_in``, ``neurons``), the cache
    (``k``, before its rotation, and ``v``), or the stream. ``tokens`` is True at those that are kept; it lies as the
    run's tokens do, such as that of ``sink_mask``. ``channels`` is layer -> those that are kept, the heads of a site
    joined into one axis; a layer that is missing keeps none. A layer may be a text, as in the ``kept_channels`` of a
    JSON file. ``layers`` are those to round; None means all. ``form`` is one of ``sink_lens.schema.QUANTISED_FORMATS``.

    Raises:
        InputError: there is no such format, or a channel is named twice.
        SiteError: there is no such site, or it has no token axis.
    """
    chosen = look_up_format(form)
    fit = [name for name, one in SITES.items() if one.by_token]
    if site not in fit:
        raise SiteError(f"{site!r} cannot be quantised; need one of {', '.join(fit)}")
    if wrong := [one for one in channels or {} if not str(one).isdecimal()]:
        raise InputError(
            f"channels of layer {wrong[0]!r} are to be kept; need the number of a layer"
        )
    kept = {int(layer): sorted(set(units)) for layer, units in (channels or {}).items()}
    for layer, units in (channels or {}).items():
        if len(kept[int(layer)]) < len(units):
            raise InputError(
                f"layer {layer} keeps a channel of {site!r} twice: {list(units)}; need each once"
            )

    def change(x: Tensor, at: At) -> Tensor:
        flat = x.flatten(2)
        keep = _unrounded_mask(flat, at, tokens=tokens, channels=kept.get(at.layer, []), site=site)
        return round_to_format(flat, chosen, keep=keep).view(x.shape)

    made = edit(site, change, layers=layers, label=label or f"{site} in {form}")
    if tokens is None:
        return made

    def laid(given: Given) -> Change:
        own = laid_by_text(tokens, given)
        return quantisation(site, form, channels=channels, tokens=own).change

    return replace(made, laid=laid)


def _unrounded_mask(
    flat: Tensor, at: At, *, tokens: Tensor | None, channels: list[int], site: str
) -> Bool[Tensor, "#batch #position #value"] | None:
    """Return a mask of the values that are not rounded: kept ones, and padding."""
    keep = None if bool(at.valid.all()) else ~at.valid.to(flat.device)[..., None]
    if tokens is not None:
        kept = kept_of_pass(tokens, at).to(flat.device)[..., None]
        keep = kept if keep is None else keep | kept
    if channels:
        if channels[-1] >= flat.shape[-1]:
            raise EditError(
                f"{site!r} has {flat.shape[-1]} channels, and channel {channels[-1]} was to be kept"
            )
        mask = torch.zeros(flat.shape[-1], dtype=torch.bool, device=flat.device)
        mask[channels] = True
        keep = mask[None, None] if keep is None else keep | mask
    return keep


def linear_layer_paths(lens: LensModel, site: str) -> tuple[str, ...]:
    """Return the module paths, within a layer, of the linear layers that read a site."""
    family = lens.family
    named = {
        "attn_in": (
            family.attention,
            ("q_proj", "k_proj", "v_proj")
            if family.normed_qkv
            else (family.q, family.k, family.v, family.head_gate),
        ),
        "q_latent": (family.attention, (family.q_latent and FROM_LATENT["q_latent"],)),
        "kv_latent": (family.attention, (family.kv_latent and FROM_LATENT["kv_latent"],)),
        "z": (family.attention, (family.o,)),
        "mlp_in": (family.mlp, (family.gate, family.up)),
        "neurons": (family.mlp, (family.down,)),
    }
    inside, names = named.get(site, (None, ()))
    return tuple(
        dict.fromkeys(f"{inside}.{name}" if inside else name for name in names if name is not None)
    )


@contextlib.contextmanager
def quantised_weights(model: ModelLike, form: QuantisedFormat) -> Iterator[None]:
    """Within the block, the linear layers of all decoder layers have weights rounded to ``form``; after it, their own.

    The scope ``token`` is an output channel here, and a group lies along the input channels. Embeddings and the
    unembedding keep their weights.

    Raises:
        InputError: there is no such format, or the model's experts have no linear layers of their own.
    """
    chosen, lens = look_up_format(form), as_lens(model)
    if lens.family.experts is not None or lens.family.down is None:
        raise InputError(
            f"{lens.family.architecture} is a mixture of experts, whose weights cannot be rounded here"
        )
    before: list[tuple[Any, Tensor]] = []
    try:
        with torch.no_grad():
            for module in (one for layer in lens.layers for one in layer.modules()):
                if getattr(module, "weight", None) is None:
                    continue
                check_not_packed(module)
                if isinstance(module, nn.Linear | Conv1D):
                    weight = module.weight
                    before.append((weight, weight.detach().clone()))
                    rows = weight.T if isinstance(module, Conv1D) else weight  # a view of it
                    rows.copy_(round_to_format(rows[None], chosen)[0])
        yield
    finally:
        with torch.no_grad():
            # layers may share a tensor, whose first copy is its own
            for weight, own in reversed(before):
                weight.copy_(own)

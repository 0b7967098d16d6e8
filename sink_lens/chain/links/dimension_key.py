"""The outlier dimension makes the sink's key: after the norm nearly nothing else is left of the token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...activations.record import LayerView, Reading
from ...circuits.stream import apply_norm
from ...edits.constructors import At, Edit, edit, freeze
from ...measures import locking
from ...measures.reductions import mean_where
from ...models.lens import LensModel
from ...models.weights import attention_weights, keys_at_position, norm_weights
from ...schema import ALL_BUT, OWN_IN_KEY
from ...stats import ratio_of_means
from ..evidence import (
    Evidence,
    Statistic,
    own_direction_statistics,
    undefined_statistic,
)
from ..locate import own_directions
from ..paths import Writings
from ..readings import OTHERS_FROM, MeasuringPass, later_queries
from ..setting import Setting
from .link import Freeze, Intervention, Link, Trial
from .neurons_dimension import draw_spans

_PARTS = {
    "key_cosine": ("key_cosine_sink", "key_cosine_random_dimensions", "key_cosine_other_positions"),
    "key_bias": ("bias_cancelled", "key_norm_ratio"),
    "logit_split": ("dimension", "rest", "bias", "random_dimensions"),
}
"""Reading -> what it holds on its last axis."""


def _make_readings(one: MeasuringPass) -> list[Reading]:
    """Read the studied key in every layer that outlier dimensions enter.

    That is the cosine of the key with what the dimensions write into it, how far they cancel a bias of the keys, and
    the parts of the key's logit, before a soft cap. The biases of the keys, and of the norm before them, add the same
    to every key, and are taken off before the cosine. The logit is split only if the key is not rotated: at position 0,
    or in models without rotary embeddings.
    """
    lens, key, dimensions = one.lens, one.plan.sink_position, one.plan.dimensions

    def draw_others(dims: tuple[int, ...]) -> Tensor:
        order = torch.randperm(lens.d_model, generator=one.generator)
        return order[~torch.isin(order, torch.tensor(dims))][: len(dims)]

    random_sets = {
        layer: torch.stack([draw_others(dims) for _ in range(one.controls)])
        for layer, dims in sorted(dimensions.items())
    }

    def others(view: LayerView) -> Tensor:
        places = torch.arange(view.valid.shape[1], device=view.valid.device)
        return view.valid & (places >= OTHERS_FROM) & (places != key)

    def cosine(view: LayerView) -> Tensor:
        weights, dims = one.layer_weights(view.layer), dimensions[view.layer]
        constants, gain = one.layer_constants(view.layer), _key_norm_gain(lens, view.layer)
        x = view["attn_in"].float() - constants.read
        k = (_keys_before_norm(lens, view) - constants.k) * gain
        along = torch.cosine_similarity(k, weights.keys(x, dimensions=dims) * gain, dim=-1).abs()
        other = others(view)
        random = weights.keys(x[:, key], dimensions=random_sets[view.layer]) * gain
        drawn = torch.cosine_similarity(k[:, key], random, dim=-1).abs().mean(0)
        return torch.stack(
            [along[:, key], drawn, mean_where(along, where=other[..., None], dim=1)], dim=-1
        )

    def cancelled(view: LayerView) -> Tensor:
        """Cosine of what the dimensions write with minus the key's bias, and the key's norm over others'."""
        weights, constants = one.layer_weights(view.layer), one.layer_constants(view.layer)
        given = weights.keys(
            view["attn_in"][:, key].float() - constants.read, dimensions=dimensions[view.layer]
        )
        against = torch.cosine_similarity(given, -constants.k.expand_as(given), dim=-1)
        norms = _keys_before_norm(lens, view).norm(dim=-1)
        ratio = norms[:, key] / mean_where(norms, where=others(view)[..., None], dim=1)
        return torch.stack([against, ratio], dim=-1)

    def split(view: LayerView) -> Tensor:
        weights, constants = one.layer_weights(view.layer), one.layer_constants(view.layer)
        x = view["attn_in"][:, key].float() - constants.read
        k = _keys_before_norm(lens, view)[:, key]
        dimension = weights.keys(x, dimensions=dimensions[view.layer])
        bias = constants.k.expand_as(k)
        drawn = weights.keys(x, dimensions=random_sets[view.layer]).mean(0)
        parts = torch.stack([dimension, k - dimension - bias, bias, drawn], dim=2)
        parts = parts * _key_norm_factor(lens, view.layer, k)
        # Where the rotary tables are stretched for long contexts (YaRN), even an unturned key is: by one number.
        width = lens.head_sizes(view.layer)["d_head"]
        as_used = view["rotated_k"][:, :, key, :width].float().norm(dim=-1)
        parts = parts * (as_used / parts[:, :, :3].sum(2).norm(dim=-1))[..., None, None]
        query = view["rotated_q"][..., :width].float()  # without the dimension of ALiBi's positions
        logits = locking.logit_split(query, parts=parts, scale=1.0)
        return mean_where(logits, where=later_queries(view, key=key)[:, None, :, None], dim=2)

    layers = frozenset(dimensions)
    if not layers:
        return []
    found = [Reading(name="key_cosine", sites=("attn_in", "k"), function=cosine, layers=layers)]
    biased = frozenset(layer for layer in layers if bool(one.layer_constants(layer).k.any()))
    if biased:
        found.append(
            Reading(name="key_bias", sites=("attn_in", "k"), function=cancelled, layers=biased)
        )
    rotates_keys = any(
        getattr(lens.config, name, None) is not None for name in ("rope_parameters", "rotary_dim")
    )
    if key == 0 or not rotates_keys:
        sites = ("attn_in", "k", "rotated_q", "rotated_k")
        found.append(Reading(name="logit_split", sites=sites, function=split, layers=layers))
    return found


def _keys_before_norm(
    lens: LensModel, view: LayerView
) -> Float[Tensor, "batch position kv_head d_head"]:
    """Return keys before their norm, also in families whose site ``k`` comes after it."""
    if not lens.family.normed_qkv:
        return view["k"].float()
    weights = attention_weights(lens, layer=view.layer)
    return weights.keys(view["attn_in"].float()) + weights.b_k.float()


def _key_norm_gain(lens: LensModel, layer: int) -> Tensor | float:
    norm = norm_weights(lens, layer=layer, which="k_norm")
    if norm is None:
        return 1.0
    by_head = norm.gain.numel() != lens.head_sizes(layer)["d_head"]
    return norm.gain.unflatten(0, (lens.n_kv_heads, lens.d_head)) if by_head else norm.gain


def _key_norm_factor(
    lens: LensModel, layer: int, k: Float[Tensor, "batch kv_head d_head"]
) -> Tensor | float:
    norm = norm_weights(lens, layer=layer, which="k_norm")
    if norm is None:
        return 1.0
    if norm.gain.numel() == k.shape[-1]:
        return (norm.gain / norm.divisor(k)[..., None])[:, :, None]
    return (norm.gain / norm.divisor(k.flatten(1))[:, None]).unflatten(-1, k.shape[1:])[:, :, None]


def _compute_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    if "key_cosine" not in panel:
        nothing = undefined_statistic(
            "key_cosine", "no outlier dimension enters any layer", absent=True, no_source=True
        )
        return [nothing, *own_direction_statistics(evidence, rng)]
    known = panel.layers("key_cosine")
    sinks = evidence.lens.key_layers(panel.sink_layers()) if panel.location.sink_found else ()
    layers = tuple(layer for layer in known if layer in sinks) or tuple(known)

    def mean_of(name: str) -> Tensor:
        return torch.cat(
            [panel.at_layer(name, at) for at in layers if at in panel.layers(name)], dim=1
        ).nanmean(1)

    cosine = mean_of("key_cosine")
    nulls = {
        "random_dimensions": float(cosine[:, 1].nanmean()),
        "other_positions": float(cosine[:, 2].nanmean()),
    }
    found = evidence.interval(cosine[:, 0], generator=rng)
    statistics = [Statistic(name="key_cosine", interval=found, nulls=nulls, layers=layers)]
    if {*panel.layers("key_bias")} & {*layers}:
        values = mean_of("key_bias")
        for place, name in enumerate(_PARTS["key_bias"]):
            found = evidence.interval(values[:, place], generator=rng)
            statistics.append(Statistic(name=name, interval=found, layers=layers))
    if "logit_split" in panel:
        parts = mean_of("logit_split")
        whole = parts[:, :3].sum(-1)
        found = evidence.interval(
            torch.stack([parts[:, 0], whole], dim=1), generator=rng, statistic=ratio_of_means
        )
        references = {
            "random_dimensions": ratio_of_means(torch.stack([parts[:, 3], whole], dim=1).numpy())
        }
        statistics.append(
            Statistic(
                name="dimension_share_of_logit",
                interval=found,
                references=references,
                layers=layers,
            )
        )
    return statistics


def _make_interventions(trial: Trial) -> list[Intervention]:
    setting = trial.setting
    lens = setting.lens
    found = {
        layer: setting.location.entering_dimensions(layer)
        for layer in lens.key_layers(setting.sink_layers)
    }
    entering = {layer: list(dims) for layer, dims in found.items() if dims}
    if not entering:
        return _ablate_own_directions_in_key(setting)
    baseline = setting.baseline_tensors("attn_in", layers=tuple(entering))
    means = {layer: setting.mean_ordinary(x)[0, 0] for layer, x in baseline.items()}
    weights = {layer: attention_weights(lens, layer=layer) for layer in entering}

    def edit_of(dimensions: Mapping[int, Sequence[int]], label: str, *, but: bool = False) -> Edit:
        def change(k: Tensor, at: At) -> Tensor:
            assert at.read is not None
            dims = list(dimensions[at.layer])
            if but:
                dims = [one for one in range(at.read.shape[-1]) if one not in dims]
            x = at.read[:, at.positions.to(at.read.device)]
            mean, here = means[at.layer].to(x.device, x.dtype), weights[at.layer]
            if here.latent is None and not lens.family.normed_qkv:
                return k - here.keys(x - mean, dimensions=dims)
            without = x.clone()
            without[..., dims] = mean[..., dims]
            return keys_at_position(
                lens, without[:, 0], layer=at.layer, position=setting.sink_position
            )[:, None]

        at = {"layers": tuple(entering), "positions": [setting.sink_position], "label": label}
        return edit("k", change, reads="attn_in", **at)

    drawn = setting.draw_other_units("attn_in", entering, generator=trial.generator)
    reads = setting.sink_layers_with_keys_of(entering)
    rest = edit_of(entering, ALL_BUT, but=True)
    return [
        Intervention(
            name="mean ablation of the outlier dimensions in the key",
            edits=(edit_of(entering, "outlier dimensions in the key"),),
            controls=tuple((edit_of(dims, "random dimensions in the key"),) for dims in drawn),
            position=setting.sink_position,
            reads=reads,
            carries=True,
        ),
        Intervention(
            name=ALL_BUT,
            edits=(rest,),
            position=setting.sink_position,
            reads=reads,
            is_primary=False,
        ),
    ]


def _ablate_own_directions_in_key(setting: Setting) -> list[Intervention]:
    lens, position = setting.lens, setting.sink_position
    writings, read, spans = Writings(setting=setting, units={}), {}, {}
    for layer in lens.key_layers(setting.sink_layers):
        norm = norm_weights(lens, layer=layer, which="attn_norm")
        plain = norm and replace(
            norm, gain=torch.ones_like(norm.gain), bias=torch.zeros_like(norm.bias)
        )
        x = apply_norm(writings.stream_read_by(layer, mlp=False).to(lens.device), plain)
        over = (x - setting.mean_ordinary(x))[:, position]
        read[layer] = norm, x[:, position], over
        spans[layer] = own_directions(over, thresholds=setting.config).float()
    if not any(span.numel() for span in spans.values()):
        return []

    def edit_of(spans: Mapping[int, Tensor], label: str) -> Edit:
        keys = {}
        for layer, (norm, x, over) in read.items():
            span = spans[layer].to(x.device, x.dtype)
            without = x - over @ span @ span.T
            without = without if norm is None else without * norm.gain + norm.bias
            keys[layer] = keys_at_position(lens, without, layer=layer, position=position)[:, None]
        return freeze("k", keys, positions=[position], label=label)

    return [
        Intervention(
            name=OWN_IN_KEY,
            edits=(edit_of(spans, OWN_IN_KEY),),
            controls=tuple(
                (edit_of(drawn, "random directions in the key"),)
                for drawn in draw_spans(setting, spans, generator=setting.make_generator())
            ),
            position=position,
            reads=setting.sink_layers,
            is_primary=False,
        )
    ]


DIMENSION_KEY = Link(
    name="dimension_key",
    source="outlier dimension",
    target="the sink's key",
    arrow="dimension → key",
    sentence="After the norm, the outlier dimension alone fixes the sink's key.",
    question="does the outlier dimension make the sink's key?",
    statistics=_compute_statistics,
    floor=lambda config, length, position: 0.5,
    readings=_make_readings,
    parts=_PARTS,
    interventions=_make_interventions,
    own_direction=(OWN_IN_KEY, OWN_IN_KEY),
    freeze=Freeze(
        name="key",
        make=lambda setting, segment, position, _: setting.freeze_site(
            "k", layers=setting.lens.key_layers(segment.layers), position=position
        ),
    ),
)

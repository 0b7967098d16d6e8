"""A screen of everything that writes to the sink position: how much of the sink each part makes, to first order.

The stream at the sink position is moved in steps from what it is at other positions (0) to what it is (1), in every
layer at once, while all other positions keep their clean values. At each step every layer is run once, with
gradients; the gradients, averaged over the steps, are multiplied through the layers from the last to the first. What
a part then gets is its change, activation minus mean over other positions, times that gradient: its *integrated*
effect, through later layers too. The *gradient* screen uses the clean model alone, where a saturated sink has no
slope. An embedding gets only its direct effect on the keys that later queries meet, and is a part only where that is
a large one; all else goes through the other parts, which are listed themselves. The third screen is the part's
*contribution* to the outlier dimensions of the sink position, as a share of their change over the layers.

A screen only ranks: parts that act together, or one instead of the other, need real ablations (``makers``).
"""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..engine.forward import skipped_prefix
from ..measures.attention import row_shares, sink_mass
from ..models.evaluating import evaluating
from ..models.sites import SITES, bridge_hook
from ..models.weights import attention_weights, mlp_weights
from .neurons import output_terms
from .setting import Kind, Setting, bar

Target = Literal["sink", "outlier dimensions", "sink logit"]
SCREENS = ("integrated", "gradient", "contribution")
EDGES = (0.0, 1 / 256, 1 / 64, 1 / 16, 1 / 6, 1 / 3, 1 / 2, 0.65, 0.8, 0.9, 0.97, 1.0)
"""Ends of the steps of the integrated screen: short where a norm lets a large dimension saturate the key, and near the
clean stream, where neurons with a threshold begin to fire."""
LEAST_DIRECT = 0.6
"""An embedding is a part where at least this share of the direct effects of the whole stream is its own."""


@dataclass(slots=True, kw_only=True)
class _Effects:
    """Mean effects over sequences and steps, by kind and layer."""

    found: dict[tuple[Kind, int], Tensor]

    def add(self, kind: Kind, layer: int, values: Tensor, weight: float) -> None:
        values = weight * values.detach().double().cpu()
        place = kind, layer
        self.found[place] = self.found[place] + values if place in self.found else values


def screened(setting: Setting, *, target: Target, progress: bool = False) -> pd.DataFrame:
    """Every part with its three screens: kind, layer, unit, ``SCREENS``; effects are shares of the largest one.

    Cost: twelve passes of the bridge with gradients over the setting's sequences, layer by layer.
    """
    if target == "sink logit":
        return _sink_logits(setting)
    lens = setting.lens
    stream = setting.clean("resid_pre", layers=range(lens.n_layers))
    sites = ["z", "neurons"]
    change = {site: _changes(setting, site) for site in sites}
    middles = [(low + high) / 2 for low, high in itertools.pairwise(EDGES)]
    widths = [high - low for low, high in itertools.pairwise(EDGES)]
    found: dict[str, _Effects] = {name: _Effects(found={}) for name in SCREENS}
    steps = {"gradient": [(1.0, 1.0)], "integrated": list(zip(middles, widths, strict=True))}
    for name, points in bar(list(steps.items()), label="screen", progress=progress):
        _propagate(setting, found[name], points=points, stream=stream, change=change, target=target)
    _contributions(setting, found["contribution"], change=change)
    return _table(setting, found)


def _table(setting: Setting, found: Mapping[str, _Effects]) -> pd.DataFrame:
    rows = []
    for kind, layer in dict.fromkeys(place for effects in found.values() for place in effects.found):
        columns = {
            name: effects.found[kind, layer].flatten().numpy()
            for name, effects in found.items()
            if (kind, layer) in effects.found
        }
        size = len(next(iter(columns.values())))
        frame = pd.DataFrame({"kind": kind, "layer": layer, "unit": range(size)})
        for name in SCREENS:
            frame[name] = columns.get(name, np.zeros(size))
        if kind == "embedding":
            frame["unit"] = _token(setting)
        if kind == "position embedding":
            frame["unit"] = setting.sink_position
        rows.append(frame)
    table = pd.concat(rows, ignore_index=True)
    for name in SCREENS:
        largest = table[name].abs().to_numpy().max()
        if largest > 0:
            table[name] /= largest
    return table


def _token(setting: Setting) -> int:
    """The token at the sink position; -1 where the sequences differ there."""
    ids = setting.tokens.tokens[:, setting.sink_position].unique()
    return int(ids[0]) if len(ids) == 1 else -1


def _changes(setting: Setting, site: str) -> dict[int, Tensor]:
    """Layer -> what the site is at the sink position, over its mean at other positions: sequence, and its axes."""
    clean = setting.clean(site, layers=range(setting.lens.n_layers))
    return {
        layer: (x[:, setting.sink_position] - setting.mean_of_others(x)[:, 0]).float() for layer, x in clean.items()
    }


def embeddings(setting: Setting) -> dict[Kind, Tensor]:
    """What is added to the stream before layer 0, token and learned position apart: batch, position, d_model."""
    whole = setting.clean("resid_pre", layers=[0])[0].float()
    lens = setting.lens
    if getattr(lens.config, "rope_parameters", None) is not None:
        return {"embedding": whole}
    table: Any = lens.plain.get_input_embeddings()
    with torch.no_grad():
        of_tokens = table(setting.tokens.tokens.to(lens.device)).float().cpu()
    if of_tokens.shape != whole.shape:  # a projection stands between, as in OPT-350M
        return {"embedding": whole}
    return {"embedding": of_tokens, "position embedding": whole - of_tokens}


def _propagate(
    setting: Setting,
    effects: _Effects,
    *,
    points: Sequence[tuple[float, float]],
    stream: Mapping[int, Tensor],
    change: Mapping[str, Mapping[int, Tensor]],
    target: Target,
) -> None:
    """Gradients of the target from the last layer to the first, averaged over the points of each layer."""
    lens, position = setting.lens, setting.sink_position
    n = setting.tokens.n_sequences
    after = torch.zeros(n, lens.d_model, device=lens.device)
    direct, whole = torch.zeros_like(after), 0.0
    for layer in reversed(range(lens.n_layers)):
        clean = stream[layer].to(lens.device)
        ordinary = setting.mean_of_others(clean)[:, 0]
        total, straight = torch.zeros_like(after), torch.zeros_like(after)
        for point, weight in points:
            at_sink = ordinary + point * (clean[:, position] - ordinary)
            found = _Layer(setting, layer=layer, stream=clean, at_sink=at_sink.float()).gradients(after, target=target)
            total += weight * found["stream"]
            straight += weight * found["direct"]
            for kind, site in (("neuron", "neurons"), ("head", "z")):
                if site in found:
                    product = found[site][:, 0] * change[site][layer].to(lens.device)
                    effects.add(kind, layer, (product.sum(-1) if kind == "head" else product).mean(0), weight)  # type: ignore[arg-type]
            if "bias" in found:  # along its own path: the stream is clean, and the bias goes from 0 to what it is
                at_clean = clean[:, position].float()
                run = _Layer(setting, layer=layer, stream=clean, at_sink=at_clean, bias=point)
                found = run.gradients(torch.zeros_like(after), target=target)
                effects.add("key bias", layer, found["bias"] / n, weight)
        whole += float((straight * (clean[:, position] - ordinary)).sum())
        after, direct = total, direct + straight
    for kind, written in embeddings(setting).items():
        over = (written[:, position] - setting.mean_of_others(written)[:, 0]).to(lens.device)
        effect = float((over * direct).sum())
        if len(points) > 1 and whole > 0 and effect >= LEAST_DIRECT * whole:
            effects.add(kind, -1, torch.tensor([effect / n]), 1.0)


class _EnoughError(Exception):
    """Raised after the last layer, to leave the unembedding out."""


class _Layer:
    """One layer, run with gradients: other positions are clean, the sink position is as given."""

    def __init__(self, setting: Setting, *, layer: int, stream: Tensor, at_sink: Tensor, bias: float = 1.0) -> None:
        """Prepare the leaves; ``bias`` is the share of the keys' bias that is left."""
        self.setting, self.layer, self.scale = setting, layer, bias
        lens = setting.lens
        self.leaf = at_sink.detach().clone().requires_grad_(True)
        place = torch.zeros(stream.shape[1], 1, device=stream.device, dtype=stream.dtype)
        place[setting.sink_position] = 1.0
        self.stream = stream.detach() * (1 - place) + (self.leaf.to(stream.dtype)[:, None] * place)
        self.zeros: dict[str, Tensor] = {}
        self.read: dict[str, Tensor] = {}
        n = len(stream)
        self.zeros["z"] = torch.zeros(n, 1, lens.n_heads, lens.d_head, device=stream.device, requires_grad=True)
        self.zeros["neurons"] = torch.zeros(n, 1, lens.d_mlp, device=stream.device, requires_grad=True)
        self.bias = attention_weights(lens, layer=layer).b_k
        if bool(self.bias.any()):
            self.zeros["bias"] = torch.zeros(lens.n_kv_heads, device=stream.device, requires_grad=True)

    def gradients(self, after: Tensor, *, target: Target) -> dict[str, Tensor]:
        """Gradients at the sink position of the layer's own target and of what later layers make of its output."""
        lens, layer = self.setting.lens, self.layer

        def name(site: str) -> str:
            return bridge_hook(SITES[site], family=lens.family, layer=layer)

        hooks: list[Any] = [(name(site), partial(self._add, site=site)) for site in self.zeros if site != "bias"]
        if "bias" in self.zeros:
            hooks.append((name("k"), self._scale_bias))
        hooks += [(name("pattern"), self._read_pattern), (name("resid_post"), self._read_stream)]
        with torch.enable_grad(), evaluating(lens.bridge), skipped_prefix(lens, layer):
            ends: dict[str, Any] = {"start_at_layer": layer, "stop_at_layer": layer + 1}
            with contextlib.suppress(_EnoughError):
                lens.bridge.run_with_hooks(self.stream, fwd_hooks=hooks, use_cache=False, **ends)
            later = (self.read["stream"] * after).sum()
            own = self._mass() if target == "sink" else self._magnitude()
            leaves = {"stream": self.leaf, **self.zeros}
            total = torch.autograd.grad(own + later, list(leaves.values()), allow_unused=True, retain_graph=True)
            (direct,) = torch.autograd.grad(own, [self.leaf], allow_unused=True)
        found = {
            key: torch.zeros_like(leaf) if gradient is None else gradient.detach()
            for (key, leaf), gradient in zip(leaves.items(), total, strict=True)
        }
        return found | {"direct": torch.zeros_like(self.leaf) if direct is None else direct.detach()}

    def _mass(self) -> Tensor:
        """Attention to the sink position, summed over sequences, mean over heads; 0 where the sink is not read."""
        setting = self.setting
        if self.layer not in setting.sink_layers:
            return self.leaf.sum() * 0
        column = self.read["column"]
        valid = setting.tokens.valid.to(column.device)
        mass = sink_mass(column, valid=valid, key=setting.sink_position, reach=setting.lens.reach(self.layer))
        return mass.nan_to_num(0.0).mean(1).sum()

    def _magnitude(self) -> Tensor:
        """Magnitude of the sink position's outlier dimensions after the layer, summed over sequences."""
        dims = self.setting.location.outliers.get(self.layer, ())
        if not dims:
            return self.leaf.sum() * 0
        written = self.read["stream"][:, list(dims)]
        clean = self.setting.baseline.state_at(self.setting.sink_position)[self.layer][:, list(dims)]
        return (written * clean.sign().to(written.device)).sum()

    def _add(self, x: Tensor, hook: object, *, site: str) -> Tensor:
        position = self.setting.sink_position
        before, at, later = x[:, :position], x[:, position : position + 1], x[:, position + 1 :]
        zero = self.zeros[site]
        return torch.cat([before, at + zero.to(x.dtype).reshape(at.shape), later], dim=1)

    def _scale_bias(self, k: Tensor, hook: object) -> Tensor:
        scale = (self.scale - 1 + self.zeros["bias"]).to(k.dtype)
        return k + scale[:, None] * self.bias.to(k.device, k.dtype)

    def _read_pattern(self, x: Tensor, hook: object) -> None:
        x = row_shares(x) if self.setting.lens.family.sigmoid else x
        self.read["column"] = x[..., self.setting.sink_position].float()

    def _read_stream(self, x: Tensor, hook: object) -> None:
        self.read["stream"] = x[:, self.setting.sink_position].float()
        if self.layer == self.setting.lens.n_layers - 1:
            raise _EnoughError


def _contributions(setting: Setting, effects: _Effects, *, change: Mapping[str, Mapping[int, Tensor]]) -> None:
    """Each neuron's and head's largest share of the change of an outlier dimension over all layers."""
    lens, position = setting.lens, setting.sink_position
    dims = sorted({one for found in setting.location.outliers.values() for one in found})
    if not dims:
        return
    states = setting.baseline.state_at(position)[..., dims].abs().mean(1)  # layer, dimension
    largest = states.max(0).values.clamp(min=1e-6)
    for layer in range(lens.n_layers):
        heads = attention_weights(lens, layer=layer).w_o[..., dims].float()
        z = change["z"][layer].to(heads.device)
        written = torch.einsum("bhd,hdo->bho", z, heads).mean(0).cpu() / largest
        if lens.family.attn_post_norm is None:
            effects.add("head", layer, written.abs().max(-1).values * lens.family.residual_multiplier, 1.0)
        weights = mlp_weights(lens, layer=layer)
        active = setting.clean("neurons", layers=[layer])[layer]
        mean = setting.mean_of_others(active)[:, 0].float().to(weights.w_down.device)
        active = active[:, position].float().to(weights.w_down.device)
        shares = []
        for place, dimension in enumerate(dims):
            options = {"layer": layer, "activations": active, "dimension": dimension}
            terms, _ = output_terms(lens, weights, **options)
            over = terms * (1 - mean / torch.where(active == 0, torch.ones_like(active), active))
            shares.append(over.mean(0).cpu().abs() / largest[place])
        effects.add("neuron", layer, torch.stack(shares).max(0).values, 1.0)


def _sink_logits(setting: Setting) -> pd.DataFrame:
    """Mean null mass of each head of a model whose heads have learned sink logits, where it is over the threshold."""
    null = setting.null_mass  # layer, head
    layers, heads = (null > setting.threshold).nonzero(as_tuple=True)
    table = pd.DataFrame({"kind": "sink logit", "layer": layers.numpy(), "unit": heads.numpy()})
    values = null[layers, heads].double().numpy()
    for name in SCREENS:
        table[name] = values / values.max() if len(values) and name == "integrated" else 0.0
    return table

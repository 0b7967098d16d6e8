"""A screen of everything that writes to the sink position: how much of the sink each part makes, to first order.

The stream at the sink position is moved in steps from what it is at other positions (0) to what it is (1), in every
layer at once, while all other positions keep their baseline values. At each step every layer is run once, with
gradients; the gradients, averaged over the steps, are multiplied through the layers from the last to the first. That
gradient times a part's change, activation minus mean over ordinary tokens, is its *integrated* effect. The *gradient*
screen uses the unchanged model alone, where a saturated sink has no slope. An embedding gets only its direct effect on
the keys that later queries meet, and is a part only where that is a large one; all else goes through the other parts.
The third screen is the part's *contribution* to the outlier dimensions of the sink position, as a share of their change
over the layers.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from ..engine.layout import Attending, Layout, attention_to_first
from ..engine.partial_pass import Pass, Visit, partial_pass
from ..measures.attention import row_shares, sink_mass
from ..models.delegation import masks_of_own_function
from ..models.packed import check_gradients_pass
from ..models.running import prepare_passes
from ..models.sites import SITES, sites_of
from ..models.weights import attention_weights, mlp_weights, output_weights
from ..progress import progress_bar
from .at_token import has_learned_positions
from .neurons import mlp_contributions
from .setting import WHOLE, Kind, Setting

Target = Literal["sink", "outlier dimensions", "sink logit"]
SCREENS = ("integrated", "gradient", "contribution")
EDGES = (0.0, 1 / 256, 1 / 64, 1 / 16, 1 / 6, 1 / 3, 1 / 2, 0.65, 0.8, 0.9, 0.97, 1.0)
"""Ends of the steps of the integrated screen: short where a norm lets a large dimension saturate the key, and near the
baseline stream, where neurons with a threshold begin to fire."""
SITE_OF: Mapping[Kind, str] = {"neuron": "neurons", "head": "z", **WHOLE}
LEAST_DIRECT = 0.6
"""Share of the direct effects of the whole stream from which an embedding is a part."""

_Effects = dict[tuple[Kind, int], Tensor]
"""Effects of the units of a kind and layer, mean over sequences and steps."""


def _add_effects(effects: _Effects, kind: Kind, layer: int, values: Tensor) -> None:
    place: tuple[Kind, int] = (kind, layer)
    values = values.detach().double().cpu()
    effects[place] = effects[place] + values if place in effects else values


def screen_parts(setting: Setting, *, target: Target, progress: bool = False) -> pd.DataFrame:
    """Estimate to first order what ablating each part takes from ``target``: a row per part, a column per screen.

    The largest effect of a screen is 1. The effect of a sink logit is its head's mean null mass, if over the threshold.
    Cost: a pass over the setting's sequences, twelve of the sink position alone with gradients, and twelve of all
    positions in layers whose keys have a bias.
    """
    if target == "sink logit":
        null = setting.null_mass  # layer, head
        layers, heads = (null > setting.config.threshold).nonzero(as_tuple=True)
        table = pd.DataFrame({"kind": "sink logit", "layer": layers.numpy(), "unit": heads.numpy()})
        values = null[layers, heads].double().numpy()
        for name in SCREENS:
            table[name] = values / values.max() if len(values) and name == "integrated" else 0.0
        return table
    lens = setting.lens
    check_gradients_pass(lens.plain)
    sites = [one for one in SITE_OF.values() if one in sites_of(lens.family)]
    setting.read_baseline({site: lens.layers_with(site) for site in ("resid_pre", *sites)})
    stream = setting.baseline_tensors("resid_pre", layers=range(lens.n_layers))
    change = {}  # at the sink position, from the mean over ordinary tokens
    for site in sites:
        change[site] = {
            layer: (x[:, setting.sink_position] - setting.mean_ordinary(x)[:, 0]).float()
            for layer, x in setting.baseline_tensors(site, layers=lens.layers_with(site)).items()
        }
    steps = [((low + high) / 2, high - low) for low, high in itertools.pairwise(EDGES)]
    found: dict[str, _Effects] = {name: {} for name in SCREENS}
    run = _LayerRuns(setting)
    for name, points in progress_bar(
        [("gradient", [(1.0, 1.0)]), ("integrated", steps)], label="screen", progress=progress
    ):
        _propagate_gradients(
            setting,
            found[name],
            run=run,
            points=points,
            stream=stream,
            change=change,
            target=target,
        )
    _add_contributions(setting, found["contribution"], change=change)
    return _screen_table(setting, found)


def _screen_table(setting: Setting, found: Mapping[str, _Effects]) -> pd.DataFrame:
    rows = []
    for kind, layer in dict.fromkeys(place for effects in found.values() for place in effects):
        own = {name: effects.get((kind, layer)) for name, effects in found.items()}
        size = max(one.numel() for one in own.values() if one is not None)
        frame = pd.DataFrame({"kind": kind, "layer": layer, "unit": range(size)})
        for name, one in own.items():
            frame[name] = np.zeros(size) if one is None else one.flatten().numpy()
        if kind in ("embedding", "position embedding"):
            frame["unit"] = embedding_unit(setting, kind)
        rows.append(frame)
    table = pd.concat(rows, ignore_index=True)
    for name in SCREENS:
        largest = table[name].abs().to_numpy().max()
        if largest > 0:
            table[name] /= largest
    return table


def embedding_unit(setting: Setting, kind: Kind) -> int:
    """Return the position, or the token id (-1 if sequences differ) at the sink."""
    if kind == "position embedding":
        return setting.sink_position
    ids = setting.tokens.tokens[:, setting.sink_position].unique()
    return int(ids[0]) if len(ids) == 1 else -1


def read_embeddings(setting: Setting) -> dict[Kind, Tensor]:
    """Read embeddings, batch x position x d_model, those of learned positions apart."""
    whole = setting.baseline_tensors("resid_pre", layers=[0])[0].float()
    lens = setting.lens
    if not has_learned_positions(lens):
        return {"embedding": whole}
    table: Any = lens.plain.get_input_embeddings()
    with torch.no_grad():
        of_tokens = table(setting.tokens.tokens.to(lens.device)).float().cpu()
    if of_tokens.shape != whole.shape:  # a projection stands between, as in OPT-350M
        return {"embedding": whole}
    return {"embedding": of_tokens, "position embedding": whole - of_tokens}


def _propagate_gradients(
    setting: Setting,
    effects: _Effects,
    *,
    run: "_LayerRuns",
    points: Sequence[tuple[float, float]],
    stream: Mapping[int, Tensor],
    change: Mapping[str, Mapping[int, Tensor]],
    target: Target,
) -> None:
    """Add each part's ``change`` times the target's gradient, averaged over ``points``.

    Each point is a share of the way from the mean over ordinary tokens to the sink token's ``stream``, and its weight.
    """
    lens, position = setting.lens, setting.sink_position
    n = setting.tokens.n_sequences
    after = torch.zeros(n, lens.d_model, device=lens.device, dtype=torch.float32)
    direct, whole, scales = torch.zeros_like(after), 0.0, lens.remaining_scales
    shares, weights = (
        torch.tensor(some, device=lens.device, dtype=torch.float32)
        for some in zip(*points, strict=True)
    )
    for layer in reversed(range(lens.n_layers)):
        baseline = stream[layer].to(lens.device)
        ordinary = setting.mean_ordinary(stream[layer])[:, 0].to(lens.device)
        at_sink = (ordinary + shares[:, None, None] * (baseline[:, position] - ordinary)).float()
        found = run.gradients(layer, at_sink=at_sink, weights=weights, after=after, target=target)
        for kind, site in SITE_OF.items():
            if site in found:
                product = found[site][:, 0] * change[site][layer].to(lens.device)
                _add_effects(
                    effects, kind, layer, (product if kind == "neuron" else product.sum(-1)).mean(0)
                )
        bias = torch.empty(0)
        if layer in lens.layers_with("k"):
            bias = attention_weights(lens, layer=layer).b_k
        # along its own path: the stream is the baseline, and the bias goes from 0 to what it is
        for share, weight in points if bool(bias.any()) else ():
            slope = run.bias_gradient(layer, stream=baseline, bias=bias, share=share, target=target)
            _add_effects(effects, "key bias", layer, weight * slope / n)
        whole += float((found["direct"] * (baseline[:, position] - ordinary)).sum())
        after, direct = found["stream"], direct + scales[0] / scales[layer] * found["direct"]
    for kind, written in read_embeddings(setting).items():
        over = (written[:, position] - setting.mean_ordinary(written)[:, 0]).to(lens.device)
        effect = float((over * direct).sum())
        if len(points) > 1 and whole > 0 and effect >= LEAST_DIRECT * whole:
            _add_effects(effects, kind, -1, torch.tensor([effect / n], dtype=torch.float32))


class _LayerRuns:
    """Runs of single layers with gradients: the stream is given at the sink position, and the baseline's elsewhere."""

    def __init__(self, setting: Setting) -> None:
        """Keep the baseline's keys, values and queries, which a layer needs of other positions."""
        self.setting, self.tokens = setting, setting.tokens.tokens
        self.held: dict[Any, tuple[Tensor, ...]] = {}
        self.queries: dict[int, Tensor] = {}
        lens = setting.lens
        with prepare_passes(lens):
            self.own = {}
            if lens.own_attention is not None:
                self.own = masks_of_own_function(lens, self.tokens.shape[1])
            whole = Pass(
                layout=self._layout((0,)),
                first=0,
                last=lens.n_layers,
                keep=self.held,
                queries=self.queries,
                own_masks=self.own,
                attention_only=True,
            )
            partial_pass(lens, self.tokens, whole)

    def gradients(
        self,
        layer: int,
        *,
        at_sink: Float[Tensor, "sample batch d_model"],
        weights: Float[Tensor, " sample"],
        after: Float[Tensor, "batch d_model"],
        target: Target,
    ) -> dict[str, Tensor]:
        """Compute the target's gradients at the sink position, through this layer and through later ones (``after``).

        They are by the stream, by each site of the layer, and (``direct``) by the stream through this layer's own part
        of the target alone: sums over the streams ``at_sink``, weighted by ``weights``.
        """
        lens = self.setting.lens
        n_points, n, _ = at_sink.shape
        leaf = at_sink.detach().clone().requires_grad_(True)
        zeros = {}
        for site in SITE_OF.values():
            if site in sites_of(lens.family) and layer in lens.layers_with(site):
                size = lens.axis_sizes(SITES[site].axes, n_positions=1, layer=layer)
                zeros[site] = torch.zeros(
                    n, *size, device=leaf.device, requires_grad=True, dtype=torch.float32
                )
        visits = {
            (site, layer): Visit(
                edits=[
                    (cell, lambda x, zero=zero: x + zero.to(x.dtype)) for cell in range(n_points)
                ]
            )
            for site, zero in zeros.items()
        }
        layout = self._layout((self.setting.sink_position,) * n_points, alone=True)
        with prepare_passes(lens), torch.enable_grad():
            own, streams = self._run_layer(
                layer, layout=layout, visits=visits, stream=leaf.flatten(0, 1)[None], target=target
            )
            direct = (weights * torch.stack(own)).sum()
            later = sum(
                (weight * (x * after).sum() for weight, x in zip(weights, streams, strict=True)),
                direct * 0,
            )
            leaves = {"stream": leaf, **zeros}
            total = torch.autograd.grad(
                direct + later, list(leaves.values()), allow_unused=True, retain_graph=True
            )
            of_own = None  # in a layer of Gemma 4 that attends with an earlier layer's keys
            if direct.requires_grad:
                (of_own,) = torch.autograd.grad(direct, [leaf], allow_unused=True)
        found = {
            name: torch.zeros_like(one) if gradient is None else gradient.detach()
            for (name, one), gradient in zip(leaves.items(), total, strict=True)
        }
        of_own = torch.zeros_like(leaf) if of_own is None else of_own.detach()
        return found | {"stream": found["stream"].sum(0), "direct": of_own.sum(0)}

    def bias_gradient(
        self,
        layer: int,
        *,
        stream: Float[Tensor, "batch position d_model"],
        bias: Tensor,
        share: float,
        target: Target,
    ) -> Float[Tensor, " kv_head"]:
        """Compute the gradient of the layer's own target by the scale of each head's key ``bias``, at ``share``."""
        lens, of_sink = self.setting.lens, target == "sink"
        n_kv_heads = lens.head_sizes(layer)["n_kv_heads"]
        leaf = torch.zeros(
            n_kv_heads, device=stream.device, requires_grad=True, dtype=torch.float32
        )
        if of_sink and layer not in lens.key_layers(self.setting.sink_layers):
            return leaf.detach()

        def change(k: Tensor) -> Tensor:
            return k + (share - 1 + leaf).to(k.dtype)[:, None] * bias.to(k.device, k.dtype)

        layout, visits = self._layout((0,)), {("k", layer): Visit(edits=[(0, change)])}
        with prepare_passes(lens), torch.enable_grad():
            own, _ = self._run_layer(
                layer,
                layout=layout,
                visits=visits,
                stream=layout.values_by_row(stream),
                target=target,
                attention_only=of_sink,
            )
            (found,) = torch.autograd.grad(own[0], [leaf], allow_unused=True)
        return torch.zeros_like(leaf) if found is None else found.detach()

    def _layout(self, begins: tuple[int, ...], *, alone: bool = False) -> Layout:
        n, length = self.tokens.shape
        return Layout(n_sequences=n, n_positions=length, begins=begins, alone=alone)

    def _run_layer(
        self,
        layer: int,
        *,
        layout: Layout,
        visits: dict[tuple[str, int], Visit],
        stream: Tensor,
        target: Target,
        attention_only: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return for each cell of ``layout`` the target and the stream after the layer.

        The target is summed over sequences, the stream is at the sink position. With ``attention_only`` there are no
        streams.
        """
        setting, lens, position = self.setting, self.setting.lens, self.setting.sink_position
        columns: list[Tensor] = []
        streams: list[Tensor] = []

        def add_column(pattern: Tensor) -> None:
            pattern = row_shares(pattern) if lens.family.sigmoid else pattern
            columns.append(pattern[..., position])

        cells = range(len(layout.begins))
        visits |= {("resid_post", layer): Visit(readers=[(cell, streams.append) for cell in cells])}
        own_column: dict[int, Tensor] = {}
        held: dict[str, Any] = {"own_masks": self.own}
        if layout.alone:
            held |= {"held": self.held, "queries": self.queries}
            if layer in setting.sink_layers and target == "sink":
                held["columns"] = own_column
        elif layer in lens.attention_layers:
            visits |= {("pattern", layer): Visit(readers=[(cell, add_column) for cell in cells])}
        handed = [
            later
            for later in setting.sink_layers  # in Gemma 4, some use the keys of an earlier layer
            if target == "sink" and later != layer and lens.key_layers([later]) == (layer,)
        ]
        kept: dict[int, tuple[Tensor, ...]] = {}
        if handed:
            held["keep"] = kept
        partial_pass(
            lens,
            self.tokens,
            Pass(
                layout=layout,
                visits=visits,
                gradients=True,
                first=layer,
                last=layer + 1,
                stream=stream.to(lens.dtype),
                attention_only=attention_only,
                **held,
            ),
        )
        at_sink = [x[:, 0 if layout.alone else position].float() for x in streams]
        if target != "sink":
            return [self._outlier_size(x, layer) for x in at_sink], at_sink
        for column in own_column.values():
            columns += column.split(layout.n_sequences)
        own = [self._sink_attention(column, layer) for column in columns]
        own = own or [x.sum() * 0 for x in at_sink]
        for later in handed:
            how = Attending(lens=lens, layout=layout, held=self.held, queries=self.queries)
            scaling: float = lens.layer(later).get_submodule(lens.family.attention).scaling  # type: ignore[assignment]
            apart = attention_to_first(how, later, kept[layer][0], scaling=scaling)
            own = [
                mass + self._sink_attention(column, later)
                for mass, column in zip(own, apart.split(layout.n_sequences), strict=True)
            ]
        return own, at_sink

    def _sink_attention(self, column: Float[Tensor, "batch head query"], layer: int) -> Tensor:
        setting = self.setting
        if layer not in setting.sink_layers:
            return column.sum() * 0
        column = column.float()
        before = setting.tokens.n_positions - column.shape[-1]  # queries that do not see the sink
        column = torch.nn.functional.pad(column, (before, 0))
        valid = setting.tokens.valid.to(column.device)
        reach = setting.lens.reach(layer)
        mass = sink_mass(column, valid=valid, key=setting.sink_position, reach=reach)
        return mass.nan_to_num(0.0).mean(1).sum()

    def _outlier_size(self, written: Float[Tensor, "batch d_model"], layer: int) -> Tensor:
        dims = list(self.setting.location.outliers.get(layer, ()))
        if not dims:
            return written.sum() * 0
        baseline = self.setting.baseline.state_at(self.setting.sink_position)[layer][:, dims]
        size = (written[:, dims] * baseline.sign().to(written.device)).sum()
        return self.setting.lens.remaining_scales[layer + 1] * size


def _add_contributions(
    setting: Setting, effects: _Effects, *, change: Mapping[str, Mapping[int, Tensor]]
) -> None:
    """Add the largest share of an outlier dimension that each part's ``change`` makes."""
    lens, position = setting.lens, setting.sink_position
    dims = sorted({one for found in setting.location.outliers.values() for one in found})
    if not dims:
        return
    states = setting.baseline.state_at(position)[..., dims].abs().mean(1)  # layer, dimension
    by = lens.remaining_scales
    largest = (
        (states * torch.tensor(by[1:], dtype=states.dtype)[:, None]).max(0).values.clamp(min=1e-6)
    )
    for layer in range(lens.n_layers):
        if layer in lens.attention_layers and lens.family.attn_post_norm is None:
            heads = output_weights(lens, layer=layer)[0][..., dims].float()
            z = change["z"][layer].to(heads.device)
            axes = "batch head d_head, head d_head d_model -> batch head d_model"
            written = (einsum(z, heads, axes).mean(0).cpu() / largest).abs().max(-1).values
            share = by[layer] * written * lens.family.attn_multiplier
            _add_effects(effects, "head", layer, share)
        for kind, site in WHOLE.items():
            if layer in lens.layers_with(site):
                mixed = by[layer] * change[site][layer][..., dims].mean(0).cpu() / largest
                _add_effects(effects, kind, layer, mixed.abs().max()[None])
        weights = mlp_weights(lens, layer=layer)
        active = setting.baseline_tensors("neurons", layers=[layer])[layer]
        mean = setting.mean_ordinary(active)[:, 0].float().to(weights.w_down.device)
        active = active[:, position].float().to(weights.w_down.device)
        shares = []
        for place, dimension in enumerate(dims):
            terms, _ = mlp_contributions(
                lens, weights, layer=layer, activations=active, dimension=dimension
            )
            over = terms * (1 - mean / torch.where(active == 0, torch.ones_like(active), active))
            shares.append(by[layer] * over.mean(0).cpu().abs() / largest[place])
        _add_effects(effects, "neuron", layer, torch.stack(shares).max(0).values)

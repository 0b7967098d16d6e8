"""A model as the cards and the comparison of two models see it: a ``Panel``, in which sinks are found as in a trace."""

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..activations.forward import check_tokens
from ..activations.record import capture_batch, stream_batch
from ..activations.sink_mask import LEAST, Received, mark_sinks, sink_rate_reading
from ..activations.views import LayerView, Reading
from ..chain import readings as r
from ..chain.config import TraceConfig
from ..chain.locate import Location
from ..chain.measure import Panel, locate_in_panel
from ..data.tokens import TokenBatch
from ..edits.constructors import freeze, zero
from ..edits.mean_ablation import Averaged
from ..engine.forward import run_with
from ..measures.dimensions import massive_ratio, residual_outliers, token_kurtosis
from ..measures.reductions import mean_where
from ..measures.sink_tokens import sampled_queries, score_gap
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.sites import SITES, sites_of
from ..models.weights import mlp_weights
from ..schema import COUNTED_QUERIES

SITES_READ = ("attn_in", "z", "attn_out", "mlp_in", "neurons", "down_out", "mlp_out", "resid_post")
"""Sites whose largest activation is read."""
RESIDUAL_FACTOR = 20.0
"""A dimension is large on a token if it is over this many times the token's median magnitude."""
COVERAGE = 0.5
"""A residual sink is large on at least this share of the tokens after the first."""
SUPER_SHARE = 0.05
"""A writing neuron makes at least this share of its layer's change of the outlier dimension."""
WRITES_MOST = 0.5
"""A super weight makes at least this share of the largest value that its layer's MLP writes."""
SPIKE = 50.0
"""A super weight writes at least this many times the median magnitude of its token's MLP output."""
OF_LARGEST = 0.25
"""A layer with super weights writes at least this share of what the strongest layer's MLP writes."""
_CORE = ("sink_score", "sink_mass", "null_mass")


class ObservedModel:
    """One model on one batch of tokens; its quantities are measured when they are first used, and kept."""

    def __init__(
        self,
        lens: ModelLike,
        tokens: TokenBatch,
        *,
        thresholds: TraceConfig | None = None,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        """Check that the model takes the tokens; nothing is run yet."""
        self.lens: LensModel = as_lens(lens)
        check_tokens(self.lens, tokens)
        self.tokens, self.batch_size = tokens, batch_size
        self.thresholds, self.seed = thresholds or TraceConfig(), seed
        self._received: list[Received] = []
        self._received_layers: set[int] = set()

    @cached_property
    def panel(self) -> Panel:
        """Readings of one forward pass, in which the first token is studied."""
        lens, n = self.lens, self.tokens.n_positions
        positions = r.sampled_positions(n)
        sites = [name for name in SITES_READ if SITES[name].address(lens.family) is not None]
        attended = r.attention_readings(
            (0,), threshold=self.thresholds.threshold, sigmoid=lens.family.sigmoid
        )
        readings = [
            *(one for one in attended if one.name in _CORE),
            sink_rate_reading(self.thresholds.threshold, shares=lens.family.sigmoid),
            *r.location_readings((0,), positions=positions),
            r.token_loss_reading(lens),
            Reading(name="received", sites=("rows",), function=self._read_attention),
            Reading(name="kurtosis", sites=("resid_post",), function=_read_kurtosis),
            Reading(name="residual", sites=("resid_post",), function=_read_large_dimensions),
            *(
                Reading(
                    name=f"largest:{site}",
                    sites=(site,),
                    function=partial(_read_largest_entry, site=site),
                )
                for site in sites
            ),
        ]
        self._received.clear()
        streamed = stream_batch(
            lens, self.tokens, readings, rows=sampled_queries(n), batch_size=self.batch_size
        )
        return Panel.unlocated(
            streamed, lens=lens, tokens=self.tokens, sink_positions=(0,), positions=positions
        )

    def _read_attention(self, view: LayerView) -> None:
        """Add a layer to the sink scores; a layer that comes again is of the next forward pass."""
        assert view.rows is not None
        if not self._received or view.layer in self._received_layers:
            self._received.append(Received(rows=view.rows.cpu(), sigmoid=self.lens.family.sigmoid))
            self._received_layers.clear()
        self._received_layers.add(view.layer)
        self._received[-1].add(view)

    @cached_property
    def token_losses(self) -> Float[Tensor, "batch target"]:
        """Loss of each token after the first, in nats; nan at padding."""
        return self.panel["token_loss"][0]

    @cached_property
    def losses(self) -> Float[Tensor, " batch"]:
        """Mean next-token loss of each sequence, in nats."""
        return self.token_losses.nanmean(1)

    @cached_property
    def marked_tokens(self) -> Bool[Tensor, "batch position"]:
        """Mask of the sinks: tokens above the gap in the attention that they get, in fair shares."""
        if len(self.tokens.lengths.unique()) > 1:  # each length has its own sampled queries
            return mark_sinks(self.lens, self.tokens, batch_size=self.batch_size)[0]
        _ = self.panel  # its pass fills ``_received``
        parts = self.tokens.valid.cpu().split(
            [len(one.shares) for one in self._received if one.shares is not None]
        )
        pairs = zip(self._received, parts, strict=True)
        scores = torch.cat([taken.scores(part) for taken, part in pairs])
        gap = score_gap(scores, least=LEAST["attention"])
        if gap is None:
            return torch.zeros_like(scores, dtype=torch.bool)
        return scores >= gap.threshold

    @cached_property
    def sink_panel(self) -> Panel:
        """The panel with the sink as studied position (0 without a sink); it is read again if the sink is elsewhere.

        Positions with fewer than 16 queries after them in the shortest sequence are left out.
        """
        panel = self.panel
        last = max(int(self.tokens.lengths.min()) - 1 - COUNTED_QUERIES, 0)
        sinks = panel.find_sink_positions(min_rate=self.thresholds.min_sink_rate)
        sinks = tuple(one for one in sinks if one <= last) or (0,)
        if sinks != panel.sink_positions:
            positions = r.sampled_positions(self.tokens.n_positions, sink_positions=sinks)
            attended = r.attention_readings(
                sinks, threshold=self.thresholds.threshold, sigmoid=self.lens.family.sigmoid
            )
            again = stream_batch(
                self.lens,
                self.tokens,
                [*attended[:2], *r.location_readings(sinks, positions=positions)],
                keys=sinks,
                rows=sampled_queries(self.tokens.n_positions),
                batch_size=self.batch_size,
            )
            values = {**again.values, "rate_by_key": panel.streamed.values["rate_by_key"]}
            streamed = replace(panel.streamed, values=values)
            panel = replace(panel, streamed=streamed, sink_positions=sinks, positions=positions)
        return replace(panel, location=locate_in_panel(panel, config=self.thresholds))

    @cached_property
    def location(self) -> Location:
        """Sink positions, and the growth steps and outlier dimensions at the strongest one, or at 0 without a sink."""
        return self.sink_panel.location

    @cached_property
    def sink_states(self) -> Float[Tensor, "layer batch d_model"]:
        """The residual stream at the sink position (0 without a sink): before layer 0, then after each layer."""
        return self.sink_panel.sink_states()

    @property
    def outlier_dimensions(self) -> list[int]:
        """Outlier dimensions at the sink after any layer; those with high ranks in many layers come first."""
        counts: Counter[int] = Counter()
        for layer, dimensions in self.location.outliers.items():
            for place, dimension in enumerate(dimensions if layer >= 0 else ()):
                counts[dimension] += len(dimensions) - place
        return sorted(counts, key=lambda one: (-counts[one], one))

    def loss_with_outliers_ablated(self, *, to_mean: bool) -> Float[Tensor, " batch"]:
        """Return each sequence's loss, in nats, with the sink's outlier dimensions set to 0, or to their mean."""
        edits = []
        position = self.location.sink_position
        over = Averaged(mean="mean_aligned", mask=self.tokens.valid[:, [position]].cpu(), n_sinks=0)
        for layer, dims in self.location.outliers.items():
            if layer < 0:  # the embedding is no layer
                continue
            at: dict[str, Any] = {"layers": [layer], "positions": [position], "units": dims}
            if to_mean:
                value = over.mean_of(self.sink_states[layer + 1][:, None, list(dims)])
                edits.append(freeze("resid_post", {layer: value}, **at))
            else:
                edits.append(zero("resid_post", **at))
        run = run_with(
            self.lens,
            self.tokens,
            edits,
            layers=[0],
            quiet=True,
            batch_size=self.batch_size,
            progress=False,
        )
        assert run.loss is not None  # it was asked for
        return run.loss

    @cached_property
    def outlier_writers(self) -> list[dict[str, Any]]:
        """The parts that write the outlier dimension in each layer of a growth step, with their shares.

        ``neurons`` are [neuron, share] of those that make at least ``SUPER_SHARE``; so are ``experts``. If a layer
        multiplies the stream (Gemma 4), the change is what it adds to the multiple. There are no neurons if the family
        norms its MLP's output.
        """
        found = []
        lens, states = self.lens, self.sink_states
        for step in self.location.steps if self.outlier_dimensions else ():
            for layer in step.layers:
                by = lens.scale(layer)
                added = (states[layer + 1] - by * states[layer])[:, step.dimension]
                change = float(added.mean())
                row: dict[str, Any] = {
                    "layer": layer,
                    "dimension": step.dimension,
                    "change": change,
                }
                sites = lens.added_sites(layer)
                is_normed = lens.family_of_layer(layer).mlp_post_norm is not None
                neurons = not is_normed and "neurons" in sites_of(lens.family)
                kept = capture_batch(
                    lens,
                    self.tokens,
                    sites=[*sites, *["neurons"] * neurons],
                    layers=[layer],
                    positions=[self.location.sink_position],
                    batch_size=self.batch_size,
                )
                for site in sites:
                    value = float(kept[site, layer][:, 0, step.dimension].float().mean())
                    row[site] = by * value / change if change else math.nan
                row["neurons"] = []
                if lens.d_expert is not None:
                    row["experts"] = []
                if neurons and change:
                    column = mlp_weights(lens, layer=layer).w_down[step.dimension].float().cpu()
                    column = column * lens.family.mlp_multiplier
                    shares = (kept["neurons", layer][:, 0].float() * column).mean(0) / change
                    row["neurons"] = _largest_shares(shares)
                    if lens.d_expert is not None:
                        of_experts = shares.unflatten(0, (-1, lens.d_expert)).sum(1)
                        row["experts"] = _largest_shares(of_experts)
                found.append(row)
        return found

    @cached_property
    def super_weights(self) -> list[dict[str, Any]]:
        """One row per super weight, a single weight that writes most of its layer's largest MLP output; largest first.

        In a mixture of experts, ``column`` numbers the neurons of all experts.

        Reference: arXiv 2411.07191 (the largest input and output of the down-projection give column and row); which
        layers count is ours (``WRITES_MOST``, ``SPIKE``, ``OF_LARGEST``).
        """
        output = "down_out" if "largest:down_out" in self.panel else "mlp_out"
        if "largest:neurons" not in self.panel:
            return []
        rows = []
        for layer in range(self.lens.n_layers):
            inputs, written = (
                self.panel.at_layer(f"largest:{site}", layer) for site in ("neurons", output)
            )
            value, _, dimension, over = written[int(written[:, 0].abs().argmax())].tolist()
            activation, _, neuron, _ = inputs[int(inputs[:, 0].abs().argmax())].tolist()
            down = mlp_weights(self.lens, layer=layer).w_down
            weight = float(down[int(dimension), int(neuron)])
            rows.append(
                {
                    "layer": layer,
                    "row": int(dimension),
                    "column": int(neuron),
                    "weight": weight,
                    "written": value,
                    "share": weight * activation / value if value else 0.0,
                    "over_median": over,
                }
            )
        largest = max(abs(row["written"]) for row in rows)
        kept = [
            row
            for row in rows
            if row["share"] >= WRITES_MOST
            and row["over_median"] >= SPIKE
            and abs(row["written"]) >= OF_LARGEST * largest
        ]
        return sorted(kept, key=lambda row: -abs(row["written"]))

    @cached_property
    def residual_sinks(self) -> dict[int, dict[str, Any]]:
        """Residual sink (a dimension) -> ``coverage`` (share of tokens where it is large), ``layers``, mean ``value``.

        Reference: arXiv 2601.22966; the factor and the coverage are ours.
        """
        flags = self.panel["residual"]
        coverage = flags[..., 0].nanmean(1)
        sizes = flags[..., 1].nanmean(1)
        found = {}
        for dimension in (coverage >= COVERAGE).any(0).nonzero().flatten().tolist():
            layers = (coverage[:, dimension] >= COVERAGE).nonzero().flatten().tolist()
            found[dimension] = {
                "coverage": float(coverage[:, dimension].max()),
                "layers": layers,
                "value": float(sizes[layers, dimension].max()),
            }
        return found


def _read_kurtosis(view: LayerView) -> Tensor:
    return token_kurtosis(view["resid_post"].float()).masked_fill(~view.valid, math.nan)


def _largest_shares(shares: Float[Tensor, " neuron"]) -> list[list[Any]]:
    top = shares.sort(descending=True, stable=True)
    pairs = zip(top.indices[:8].tolist(), top.values[:8].tolist(), strict=True)
    return [[unit, share] for unit, share in pairs if share >= SUPER_SHARE]


def _read_large_dimensions(view: LayerView) -> Tensor:
    """Return each dimension's share of later tokens that it is large on, and its mean magnitude: "batch d_model 2"."""
    others = view.valid.clone()
    others[:, 0] = False
    h = view["resid_post"].float()
    large = residual_outliers(h, valid=others, factor=RESIDUAL_FACTOR)
    return torch.stack(
        [mean_where(one, where=others[..., None], dim=1) for one in (large.float(), h.abs())],
        dim=-1,
    )


def _read_largest_entry(view: LayerView, *, site: str) -> Tensor:
    """Return value, position, channel, and ratio to the token's median, of each sequence's largest entry: "batch 4"."""
    flat = view[site].flatten(2).float()
    place = flat.abs().masked_fill(~view.valid[..., None], -1.0).flatten(1).argmax(1)
    value = flat.flatten(1).gather(1, place[:, None])[:, 0]
    position, channel = place // flat.shape[2], place % flat.shape[2]
    over = massive_ratio(flat.take_along_dim(position[:, None, None], dim=1)[:, 0])
    return torch.stack([value, position.float(), channel.float(), over], dim=1)

"""The sink's key makes the sink: every later query meets it with an advantage over the other keys."""

import math
from typing import cast

import numpy as np
import torch
from einops import einsum
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor

from ...activations.record import LayerView, Reading
from ...measures import locking
from ...measures.reductions import mean_where
from ..config import TraceConfig
from ..evidence import Evidence, Statistic, undefined_statistic
from ..readings import MeasuringPass, control_positions, later_queries
from .link import Intervention, Link, Trial, make_mean_ablation

_PARTS = {"logit_advantage": ("logit_advantage_sink", "logit_advantage_other_positions")}


def _make_readings(one: MeasuringPass) -> list[Reading]:
    """The advantage is the key's logit, before a soft cap, minus the mean logit of other keys that a query sees."""
    plan = one.plan

    def positive_share(view: LayerView) -> Tensor:
        q, k, seen = view["q"], view["k"], {"valid": view.valid, "reach": view.reach}
        shares = [locking.positive_share(q, k=k[:, p], key=p, **seen) for p in plan.sink_positions]
        return torch.stack(shares, dim=-1)

    def advantage(view: LayerView) -> Tensor:
        query, keys = view["rotated_q"].float(), view["rotated_k"].float()
        n_keys = keys.shape[2]
        window = n_keys if view.reach is None else view.reach
        # of the other keys that a later query sees
        count = torch.arange(n_keys, device=keys.device).clamp(min=1, max=max(1, window - 1))
        sums = keys.cumsum(2)
        if window < n_keys:
            sums = torch.cat(
                [sums[:, :, :window], sums[:, :, window:] - sums[:, :, :-window]], dim=2
            )
        grouped = query.unflatten(1, (keys.shape[1], -1))
        seen = (grouped * sums[:, :, None]).sum(-1).flatten(1, 2)  # of all keys that a query sees
        key = plan.sink_position
        places = [key, *control_positions(n_keys, key=key, controls=one.controls)]
        at_places = einsum(
            grouped,
            keys[:, :, places],
            "batch kv_head group query d_head, batch kv_head place d_head -> place batch kv_head group query",
        ).flatten(2, 3)
        over = at_places - (seen - at_places) / count
        later = torch.stack([later_queries(view, key=place) for place in places])
        sink, *controls = mean_where(over, where=later[:, :, None], dim=3)
        beside = torch.stack(controls).nanmean(0) if controls else torch.full_like(sink, math.nan)
        return torch.stack([sink, beside], dim=-1)

    return [
        Reading(name="positive_share", sites=("q", "k"), function=positive_share),
        Reading(name="logit_advantage", sites=("rotated_q", "rotated_k"), function=advantage),
    ]


def _compute_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    layers = panel.sink_layers()
    advantage = panel["logit_advantage"][layers].mean(dim=(0, 2))
    positive, mass = (
        panel.at_sink(name, panel.location.sink_position)[layers].nanmean(dim=(0, 2))
        for name in ("positive_share", "sink_mass")
    )
    share = undefined_statistic(
        "positive_share", "the layers in which the sink is attend to keys of earlier ones"
    )
    if {*layers} & {*panel.layers("positive_share")}:
        found = evidence.interval(positive, generator=rng)
        share = Statistic(
            name="positive_share", interval=found, references={"chance": 0.5}, layers=tuple(layers)
        )
    return [
        Statistic(
            name="logit_advantage_nats",
            interval=evidence.interval(advantage[:, 0], generator=rng),
            nulls={"other_positions": float(advantage[:, 1].nanmean())},
            layers=tuple(layers),
        ),
        share,
        Statistic(
            name="sink_mass", interval=evidence.interval(mass, generator=rng), layers=tuple(layers)
        ),
    ]


def _advantage_floor(config: TraceConfig, length: int, position: int) -> float:
    """Compute by how many nats a key's logit must exceed all others to get attention equal to the sink threshold.

    The attention is the mean over the queries behind the key's ``position`` in a sequence of ``length`` tokens.
    """
    others = np.log(
        np.arange(position + 1, max(length, position + 2))
    )  # of the keys that each later query sees beside it
    return cast(
        "float", brentq(lambda nats: expit(nats - others).mean() - config.threshold, -50.0, 50.0)
    )


def _make_interventions(trial: Trial) -> list[Intervention]:
    setting = trial.setting
    kept = setting.freeze_site(
        "k", layers=setting.lens.key_layers(setting.sink_layers), position=setting.sink_position
    )
    return [make_mean_ablation(kept, setting=setting, name="mean ablation of the key")]


KEY_SINK = Link(
    name="key_sink",
    source="the sink's key",
    target="attention sink",
    arrow="key → sink",
    sentence="Queries meet that key, so attention goes to it.",
    question="does every query meet that key with an advantage that makes a sink?",
    statistics=_compute_statistics,
    floor=_advantage_floor,
    readings=_make_readings,
    parts=_PARTS,
    interventions=_make_interventions,
)

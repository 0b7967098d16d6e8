"""Tables of a trace, from a panel."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..measures import dimensions, locking, outputs
from ..measures.attention import passes
from ..models.lens import LensModel
from ..models.weights import attention_weights
from ..schema import column_names
from ..text import as_ranges
from .config import TraceConfig
from .links.link import Link
from .locate import Location, find_outlier_dimensions
from .measure import Panel
from .readings import SITES_BY_POSITION

_TOP_DIMENSIONS = 16


def head_table(lens: LensModel, panel: Panel, *, threshold: float) -> pd.DataFrame:
    frames = []
    index = pd.MultiIndex.from_product(
        [range(lens.n_layers), range(lens.n_heads)], names=["layer", "head"]
    )
    of_key, of_head = ("sink_mass", "value_norm_ratio", "positive_share"), ("entropy", "null_mass")
    for position in panel.location.sink_positions:
        score = panel.at_sink("sink_score", position)
        rate = passes(score, threshold=threshold).nanmean(1)
        columns = {"sink_score": score.nanmean(1), "sink_rate": rate}
        columns |= {name: panel.at_sink(name, position).nanmean(1) for name in of_key}
        columns |= {name: panel[name].nanmean(1) for name in of_head}
        columns["qk_alignment"] = _qk_alignment(lens, panel.location)
        frame = pd.DataFrame(
            {name: values.flatten().numpy() for name, values in columns.items()}, index=index
        )
        frame = frame.loc[list(lens.attention_layers)].reset_index()
        frame.insert(2, "sink_position", position)
        pairs = zip(frame["value_norm_ratio"], frame["sink_score"] > threshold, strict=True)
        frame["label"] = [
            outputs.sink_head_label(float(ratio), is_sink=bool(sink)) for ratio, sink in pairs
        ]
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _qk_alignment(lens: LensModel, location: Location) -> Tensor:
    """Compute the alignment with the strongest outlier dimension that enters the layer: layer x head.

    It is nan in layers without one, and in latent attention, where a key is no fixed map of the stream.
    """
    rows = []
    for layer in range(lens.n_layers):
        entering = location.entering_dimensions(layer)
        if not entering or layer not in lens.layers_with("k") or lens.family.kv_latent is not None:
            rows.append(torch.full((lens.n_heads,), torch.nan, dtype=torch.float32))
            continue
        weights = attention_weights(lens, layer=layer)
        rows.append(
            locking.qk_alignment(
                weights.w_q.float(), w_k_column=weights.w_k[..., entering[0]].float()
            ).cpu()
        )
    return torch.stack(rows)


def position_table(panel: Panel) -> pd.DataFrame:
    frames = []
    for site in SITES_BY_POSITION:
        for layer in panel.layers(f"std:{site}"):
            std, norm = (
                panel.at_layer(f"{name}:{site}", layer).nanmean(0) for name in ("std", "norm")
            )
            frames.append(
                pd.DataFrame(
                    {
                        "layer": layer,
                        "site": site,
                        "position": panel.positions.numpy(),
                        "s1": panel.s1[site, layer].cpu().numpy(),
                        "s2": std.numpy(),
                        "norm": norm.numpy(),
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def dimension_table(panel: Panel, *, config: TraceConfig) -> pd.DataFrame:
    rows, typical = [], panel.typical_magnitudes()
    for layer, state in enumerate(panel["state"]):
        for position in panel.location.sink_positions:
            at_sink = state[:, panel.sink_positions.index(position)]
            values = at_sink.double()
            ratio = float(dimensions.dominance_ratio(at_sink).mean())
            outliers = find_outlier_dimensions(
                at_sink, thresholds=config, typical=typical[layer + 1]
            )
            shown = max(_TOP_DIMENSIONS, len(outliers))
            strongest = (
                values.square().mean(0).argsort(descending=True, stable=True)[:shown].tolist()
            )
            for dimension in dict.fromkeys([*strongest, *outliers]):
                value = float(values[:, dimension].mean())
                rows.append((layer, position, dimension, value, ratio, dimension in outliers))
    return pd.DataFrame(rows, columns=column_names("trace", "dimensions")).astype(
        {"is_outlier": bool}
    )


def key_table(panel: Panel, *, links: Sequence[Link]) -> pd.DataFrame:
    """Make one row per layer with the parts of the studied key and of its logit (means), where they were read."""
    frame = pd.DataFrame({"layer": pd.Series(dtype="int64")})
    for name, parts in (shown for link in links for shown in link.parts.items()):
        values = [
            panel.at_layer(name, layer).nanmean((0, 1)).numpy() for layer in panel.layers(name)
        ]
        columns = pd.DataFrame(np.reshape(values, (-1, len(parts))), columns=list(parts))
        columns.insert(0, "layer", panel.layers(name))
        frame = frame.merge(columns.astype({"layer": "int64"}), on="layer", how="outer")
    return frame


def layer_table(panel: Panel) -> pd.DataFrame:
    location = panel.location
    states = panel.sink_states()[1:]
    score, mass = (
        panel.at_sink(name, location.sink_position) for name in ("sink_score", "sink_mass")
    )
    ratio, rank = panel.norm_ratio().nanmean(1)[1:], panel["effective_rank"].nanmean(1)
    norm = states.norm(dim=-1).mean(1)
    strongest = states.double().square().mean(1).argmax(-1).tolist()
    rows = []
    for layer, (state, dimension) in enumerate(zip(states, strongest, strict=True)):
        rows.append(
            {
                "layer": layer,
                "sink_position": location.sink_position,
                "sink_score": float(score[layer].nanmean()),
                "sink_mass": float(mass[layer].nanmean()),
                "norm": float(norm[layer]),
                "norm_ratio": float(ratio[layer]),
                "outlier_dimension": dimension,
                "outlier_value": float(state[:, dimension].mean()),
                "dominance_ratio": float(dimensions.dominance_ratio(state).mean()),
                "dominance_ratio_fixed": float(
                    dimensions.dominance_ratio_fixed(state, dimension=dimension)
                ),
                "dominance_elsewhere": float(panel["dominance_elsewhere"][layer].nanmean()),
                "massive_ratio": float(dimensions.massive_ratio(state).mean()),
                "massive_activations": float(
                    dimensions.massive_activations(state).sum(-1).double().mean()
                ),
                "effective_rank": float(rank[layer, 0]),
                "effective_rank_without": float(rank[layer, 1]),
            }
        )
    return pd.DataFrame(rows)


def growth_step_table(panel: Panel, errors: dict[int, float]) -> pd.DataFrame:
    rows = [
        {
            "step": index,
            "first_layer": step.first_layer,
            "last_layer": step.last_layer,
            "ratio_before": step.ratio_before,
            "ratio_after": step.ratio_after,
            "sink_position": panel.location.sink_position,
            "outlier_dimension": step.dimension,
            "split_error": max(errors[layer] for layer in step.layers),
        }
        for index, step in enumerate(panel.location.steps)
    ]
    return pd.DataFrame(rows, columns=column_names("trace", "growth_steps"))


def condition_row(
    panel: Panel, *, condition: str, chosen: bool, config: TraceConfig
) -> dict[str, object]:
    location = panel.location
    counts = Counter(dimension for dims in location.outliers.values() for dimension in dims)
    return {
        "condition": condition,
        "chosen": chosen,
        "sink_position": location.sink_position,
        "sink_rate": float(panel.sink_rate(config.threshold).nanmean()),
        "s2_ratio": float(panel.std_ratio("z")[list(panel.feeding_layers)].nanmean()),
        "outlier_dimensions": ",".join(str(dimension) for dimension, _ in counts.most_common()),
        "growth_steps": ",".join(as_ranges(step.layers) for step in location.steps),
        "loss_nats": float(panel["loss"].nanmean()),
    }

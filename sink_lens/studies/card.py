"""``card``: what somebody who adopts a checkpoint must know of its sinks, on one page and in one JSON object.

A card holds no path and no time, and numbers of four digits: the same model on the same tokens gives the same bytes.
"""

import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.precision import measure_rounding
from ..activations.record import stream_batch
from ..chain import readings as r
from ..chain.config import TraceConfig
from ..data.token_ids import bos_id
from ..data.tokens import TokenBatch, Tokens, begins_with_bos
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens, config_hash, weights_hash
from ..records import check_folder_free, read_run, utc_now_text
from ..schema import CARD_SCHEMA, VERDICTS, WORTH_KEEPING_NATS, column_names
from ..signatures import takes
from ..stats import Interval, mean_interval, paired_difference
from ..text import (
    as_ranges,
    as_text,
    join_and,
    loss_change_text,
    neuron_name,
    percent,
    plural,
    safe_line,
)
from ..text import interval_text as bounds
from .bos_check import bos_counts_text, count_bos_in_front
from .card_pair import compare_models
from .config import CardConfig
from .observed import SITES_READ, ObservedModel
from .quantities import (
    found_sink_positions,
    null_mass_by_sequence,
    sink_mass,
    sink_onset_layer,
    sink_rate_by_sequence,
)
from .study import Measured, Study, resolve_inputs, short_model_name, write_study

_SUBLAYERS = (
    ("attention", "attn_out", "attention"),
    ("mixer", "mixer_out", "the mixer"),
    ("MLP", "mlp_out", "the MLP"),
    ("layer input", "per_layer_out", "the layer's own input"),
)
"""What writes to the stream, its site, and its name in a sentence."""
_MOST_LISTED = 16


@takes(CardConfig)
def card(
    model: ModelLike,
    other: ModelLike | None = None,
    *,
    config: CardConfig | None = None,
    tokens: Tokens | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Study:
    """Make the card of a model; with a second model, say what changed from the first to the second.

    A card has sinks, BOS, outlier dimensions, what writes them, largest activations, and losses without them. It costs
    one reading pass, one pass for the loss with or without BOS, and two passes with the outlier dimensions set to zero
    and to their mean. The result's ``decision`` is the card; ``card.json`` in the run folder is the same, ``card.md`` a
    block for a model card. A comparison costs one reading pass of each model.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        other: a second model, which is compared with the first on the same tokens.
        config: the card's configuration; the default one if None.
        tokens: the sequences, instead of those of the configuration.
        out: the run folder; nothing is written if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        **fields: fields of ``CardConfig``, such as ``length=128``; they win over those of ``config``.

    Raises:
        InputError: a value that cannot be used, tokens that the model cannot take, a trace of another model, or two
            models of different shapes, or of different types.
        RunError: the folder is in use, or holds another run; or the trace's folder has no run.
    """
    if other is not None:
        other = other if isinstance(other, str | Path) else as_lens(other)
        fields |= {"others": (other.name if isinstance(other, LensModel) else str(other),)}
    check_folder_free(out, overwrite=overwrite)
    started = utc_now_text()
    config, lens, batch = resolve_inputs(
        CardConfig, model, config=config, tokens=tokens, fields=fields, every_layer=False
    )
    if len(config.others) > 1:
        raise InputError(
            f"{1 + len(config.others)} models were given; need one, or two to compare. sink_lens.studies.cards takes "
            "more"
        )
    config.makes_table()  # refuses an option that nothing would read
    to = {"out": out, "overwrite": overwrite, "started": started}
    if config.is_comparison:
        return compare_models(lens, batch, config, other=other, **to)
    limits = TraceConfig(threshold=config.threshold)
    seen = ObservedModel(
        lens, batch, thresholds=limits, seed=config.seed, batch_size=config.batch_size
    )
    chain = None if config.trace is None else read_chain_answers(config.trace, lens, bos=batch.bos)
    made = card_contents(seen, chain=chain)
    found = Measured(
        frames=_card_tables(seen, made),
        kernel=seen.panel.streamed.kernel,
        decision=made,
        headline=made["sentence"],
        files={"card.json": made, "card.md": _card_markdown(made)},
    )
    return write_study("card", lens, batch, config, found, **to)


def card_contents(seen: ObservedModel, *, chain: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what ``card.json`` holds; undefined numbers are None."""
    lens, batch, threshold = seen.lens, seen.tokens, seen.thresholds.threshold
    rounded = measure_rounding(lens, batch, position=seen.location.sink_position)
    rate = _mean_with_interval(sink_rate_by_sequence(seen), seen)
    keep, marked = found_sink_positions(seen), seen.marked_tokens
    losses = {"clean": seen.losses}
    if seen.outlier_dimensions and lens.why_measured_only is None:
        losses["zeroed"] = seen.loss_with_outliers_ablated(to_mean=False)
        losses["mean_aligned"] = seen.loss_with_outliers_ablated(to_mean=True)
    found = {
        "schema": CARD_SCHEMA,
        "sink_lens": version("sink-lens"),
        "model": {
            "name": short_model_name(lens.name),
            "family": lens.family.architecture,
            "weights_sha256": weights_hash(lens),
            "dtype": str(lens.dtype).removeprefix("torch."),
            "n_layers": lens.n_layers,
            "n_heads": lens.n_heads,
            "n_kv_heads": lens.n_kv_heads,
            "d_model": lens.d_model,
            "notes": [*lens.notes, *([] if rounded is None else [rounded.sentence()])],
        },
        "measured_on": {
            "source": batch.source,
            "tokens_sha256": batch.hash,
            "sequences": batch.n_sequences,
            "length": batch.n_positions,
            "begins_with_bos": batch.bos,
        },
        "sink": {
            "found": bool(keep),
            "positions": keep,
            "at_first_position": float(marked.nonzero()[:, 1].eq(0).double().mean()),
            "tokens": _sink_token_rows(seen),
            "rate": rate | {"threshold": threshold},
            "attention": _mean_with_interval(sink_mass(seen).nanmean(dim=(0, 2)), seen),
            "to_no_key": _mean_with_interval(null_mass_by_sequence(seen), seen),
            "first_layer": sink_onset_layer(seen, threshold=threshold),
        },
        "cache": {"keep": None}
        if math.isnan(rate["value"])
        else {
            "keep": sorted(keep),
            "sink_tokens": int(marked.sum()),
            "sink_tokens_kept": int(marked[:, keep].sum()),
        },
        "bos": _compare_bos_losses(seen),
        "outlier_dimensions": _outlier_rows(seen),
        "residual_sinks": [{"dimension": one} | row for one, row in seen.residual_sinks.items()],
        "growth": [
            {
                "layers": as_ranges(list(step.layers)),
                "dimension": step.dimension,
                "norm_ratio": [step.ratio_before, step.ratio_after],
            }
            for step in seen.location.steps
        ],
        "writers": seen.outlier_writers,
        "super_weights": seen.super_weights[:_MOST_LISTED],
        "largest_activations": _largest_activation_rows(seen),
        "loss": {
            name: _mean_with_interval(samples, seen)
            | {"change": _interval_fields(_paired_change(samples, seen.losses, seen))}
            for name, samples in losses.items()
        },
        "chain": chain or {"asked": False},
    }
    found = _round_floats(found)
    return {"schema": found.pop("schema"), "sentence": card_sentence(found)} | found


def _round_floats(value: Any) -> Any:
    """Round all floats to four significant digits; nan and infinities become None."""
    if isinstance(value, Mapping):
        return {str(name): _round_floats(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_round_floats(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def _mean_with_interval(samples: Tensor, seen: ObservedModel) -> dict[str, Any]:
    rows = samples[~samples.isnan()].double().numpy()
    if not len(rows):
        return dict.fromkeys(("value", "low", "high"), math.nan) | {"n": 0}
    rng = np.random.default_rng(seen.seed)
    return _interval_fields(mean_interval(rows, generator=rng, n_resamples=1000))


def _interval_fields(found: Interval) -> dict[str, Any]:
    return {"value": found.estimate, "low": found.low, "high": found.high, "n": found.n}


def _sink_token_rows(seen: ObservedModel) -> list[dict[str, Any]]:
    tokens, valid, known = seen.tokens.tokens.cpu(), seen.tokens.valid.cpu(), seen.lens.tokenizer
    # nothing attends to the last token
    valid[torch.arange(len(valid)), seen.tokens.lengths.cpu() - 1] = False
    ids, counts = tokens[seen.marked_tokens].unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:_MOST_LISTED]
    rows = []
    for token, count in zip(ids[order].tolist(), counts[order].tolist(), strict=True):
        text = f"<{token}>" if known is None else str(known.decode([token]))
        occurs = int(((tokens == token) & valid).sum())
        rows.append(
            {"id": token, "text": safe_line(text, limit=24), "sinks": count, "occurs": occurs}
        )
    return rows


def _compare_bos_losses(seen: ObservedModel) -> dict[str, Any]:
    tokenizer, batch, n_context = seen.lens.tokenizer, seen.tokens, seen.lens.n_context
    if tokenizer is None:
        return {"needed": None, "why": "the model has no tokenizer"}
    token = bos_id(tokenizer)
    if token is None:
        return {"needed": None, "why": "the tokenizer has no BOS token"}
    found: dict[str, Any] = {"in_front": count_bos_in_front(tokenizer), "needed": None}
    if batch.bos:
        with_bos = seen.token_losses[:, 1:]
        without = _measure_token_losses(seen, batch.without_bos())
    elif bool(begins_with_bos(batch, tokenizer).any()):
        return found | {"why": "some of the sequences begin with BOS, and others do not"}
    elif n_context is not None and batch.n_positions >= n_context:
        return found | {"why": "the sequences fill the model's context; BOS does not fit in front"}
    else:
        with_bos = _measure_token_losses(seen, batch.with_bos(token))[:, 1:]
        without = seen.token_losses
    more, less = without.nanmean(1), with_bos.nanmean(1)
    change = _paired_change(more, less, seen)
    if change.estimate >= WORTH_KEEPING_NATS and not change.low <= 0:
        found["needed"] = True
    elif change.high < WORTH_KEEPING_NATS:
        found["needed"] = False
    else:
        found["why"] = f"leaving it out may cost less or more than {WORTH_KEEPING_NATS} nats"
    return found | {
        "token": {"id": token, "text": safe_line(str(tokenizer.decode([token])), limit=24)},
        "loss_with_nats": float(less.nanmean()),
        "loss_without_nats": float(more.nanmean()),
        "cost_without_nats": _interval_fields(change),
    }


def _paired_change(losses: Tensor, baseline: Tensor, seen: ObservedModel) -> Interval:
    rng = np.random.default_rng(seen.seed)
    return paired_difference(losses.double().numpy(), baseline.double().numpy(), generator=rng)


def _measure_token_losses(seen: ObservedModel, batch: TokenBatch) -> Float[Tensor, "batch target"]:
    reading = r.token_loss_reading(seen.lens)
    found = stream_batch(seen.lens, batch, [reading], batch_size=seen.batch_size)
    return found.stacked("token_loss")[0]


def _outlier_rows(seen: ObservedModel) -> list[dict[str, Any]]:
    rows = []
    for dimension in seen.outlier_dimensions:
        layers = [layer for layer, dims in seen.location.outliers.items() if dimension in dims]
        values = seen.sink_states[1:, :, dimension].mean(1)
        top = int(values.abs().argmax())
        rows.append(
            {
                "dimension": dimension,
                "position": seen.location.sink_position,
                "layers": as_ranges([layer for layer in layers if layer >= 0]),
                "in_embedding": -1 in layers,
                "value": float(values[top]),
                "at_layer": top,
            }
        )
    return rows


def _largest_activation_rows(seen: ObservedModel) -> list[dict[str, Any]]:
    rows = []
    for site in SITES_READ:
        name = f"largest:{site}"
        if name not in seen.panel:
            continue
        found = seen.panel[name]
        layer, sequence = divmod(int(found[..., 0].abs().nan_to_num(-1.0).argmax()), found.shape[1])
        value, position, channel, over = found[layer, sequence].tolist()
        rows.append(
            {
                "site": site,
                "value": value,
                "layer": layer,
                "position": int(position),
                "channel": int(channel),
                "over_median": over,
            }
        )
    return rows


def read_chain_answers(folder: str | Path, lens: LensModel, *, bos: bool) -> dict[str, Any]:
    """Read from a trace's folder the verdicts on the links of the chain, and the parts that make the sink.

    Raises:
        InputError: the run is no trace, or one of other weights, or of the other BOS condition.
    """
    run = read_run(folder)
    if run.kind != "trace":
        raise InputError(f"{folder} holds a run of {run.kind}; need one of trace")
    own = {"weights": weights_hash(lens), "configuration": config_hash(lens)}
    of_trace = (run.provenance.get(name) for name in ("weights_sha256", "config_sha256"))
    if other := [name for name, there in zip(own, of_trace, strict=True) if there != own[name]]:
        raise InputError(
            f"the trace in {folder} is of other {' and other '.join(other)} than {short_model_name(lens.name)}; need "
            "one of this model"
        )
    if run.provenance.get("bos") != bos:
        raise InputError(
            f"the trace in {folder} is of sequences {'without' if bos else 'with'} BOS, and the card's are "
            f"{'with' if bos else 'without'} it; need the same, since they may have other sinks"
        )
    table = run.need("links", columns=["link", "verdict"]).drop_duplicates("link")
    makers = run.optional("makers", columns=["kind", "layer", "unit", "is_maker", "removed_alone"])
    made = [] if makers is None else makers.loc[makers["is_maker"].astype(bool)].to_dict("records")
    return {
        "asked": True,
        "links": {str(row["link"]): str(row["verdict"]) for row in table.to_dict("records")},
        "makers": [
            {name: row[name] for name in ("kind", "layer", "unit", "removed_alone")}
            for row in made[:_MOST_LISTED]
        ],
    }


def card_sentence(found: Mapping[str, Any]) -> str:
    """Return a sentence that says what to keep: sink token, outlier dimensions, BOS."""
    sink, outliers = found["sink"], [row["dimension"] for row in found["outlier_dimensions"]]
    rate, to_no_key = sink["rate"], sink["to_no_key"]["value"] or 0
    rated = ""
    if rate["value"] is not None:
        ends = bounds(rate["low"], rate["high"], shown=percent)
        rated = f"{percent(rate['value'])} {ends} of heads".replace("  ", " ")
    if sink["found"] and rated:
        place, *others = sink["positions"]
        weaker = join_and(f"position {one}" for one in others)
        also = f", and those at {weaker}, weaker sinks" * bool(others)
        said = f"Keep the token at position {place}: it is the sink of {rated}{also}"
    elif to_no_key > 0.05:
        said = f"Keep no token: the heads have learned sink logits, which take {percent(to_no_key)}"
    elif rated:
        said = f"No position is a sink to keep: {rated} attend to the first token"
    else:
        said = "Whether the first token is a sink cannot be told: the attention windows or the sequences are too short"
    parts = [said]
    if sink["tokens"] and not sink["found"]:
        parts.append(f"the sink tokens are {_sink_tokens_text(sink)}")
    named = f"outlier dimension{'s' * (len(outliers) > 1)} {join_and(outliers)}"
    if outliers and "zeroed" not in found["loss"]:
        parts.append(
            f"whether anything hangs on its {named} was not tested: the model can only be measured"
        )
    elif outliers:
        zeroed, mean = (found["loss"][way]["change"] for way in ("zeroed", "mean_aligned"))
        cost = _cost_text(zeroed)
        low, value, high = (zeroed[end] for end in ("low", "value", "high"))
        if low is None or high is None:  # one sequence has no interval
            shown, nothing = True, False
        else:
            shown, nothing = low > 0 or high < 0, max(-low, high) < WORTH_KEEPING_NATS
        if value is not None and abs(value) >= WORTH_KEEPING_NATS and shown:
            said = f"zeroing its {named} {cost}, putting their mean in place {_cost_text(mean)}"
        elif nothing:
            said = f"nothing hangs on its {named}: zeroing {cost}"
        else:
            said = f"whether anything hangs on its {named} is not shown: zeroing {cost}"
        parts.append(said)
    bos = found["bos"]
    if "cost_without_nats" in bos:
        said = {
            True: "begin with BOS",
            False: "BOS is not needed",
            None: "whether BOS is needed is not shown",
        }[bos["needed"]]
        parts.append(f"{said}: leaving it out {_cost_text(bos['cost_without_nats'])}")
    return "; ".join(parts) + "."


def _cost_text(change: Mapping[str, Any]) -> str:
    if change["value"] is None:
        return "gives no loss to compare"
    return loss_change_text(change["value"], change["low"], change["high"])


def card_text_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the card as rows (name, text), which the terminal and the Markdown table show."""
    sink, rate = found["sink"], found["sink"]["rate"]
    rated = f"{as_text(rate['value'])} {bounds(rate['low'], rate['high'])}".strip()
    bos_needed = {True: "yes", False: "no", None: f"unknown: {found['bos'].get('why', '')}"}
    outliers = [
        f"{row['dimension']} (layers {row['layers']}, largest {as_text(row['value'])})"
        for row in found["outlier_dimensions"]
    ]
    entries = [
        f"layer {row['layer']} [{row['row']}, {row['column']}]" for row in found["super_weights"]
    ]
    largest = [
        f"{row['site']} {as_text(row['value'])} (layer {row['layer']})"
        for row in found["largest_activations"]
    ]
    links = [
        f"{VERDICTS.get(verdict, '?')} {link}"
        for link, verdict in found["chain"].get("links", {}).items()
    ]
    in_front = found["bos"].get("in_front")
    return [
        ("Sink positions", join_and(sink["positions"]) or "none"),
        ("Sink tokens", _sink_tokens_text(sink)),
        (f"Sink rate (threshold {as_text(rate['threshold'])})", rated),
        ("A KV cache must keep", _kv_cache_text(found["cache"])),
        ("BOS needed", bos_needed[found["bos"]["needed"]]),
        *([("BOS in front", bos_counts_text(in_front))] if in_front else []),
        ("Outlier dimensions", "; ".join(outliers) or "none"),
        ("Residual sinks", join_and(row["dimension"] for row in found["residual_sinks"]) or "none"),
        ("Makers", "; ".join(_writers_text(row) for row in found["writers"]) or "none"),
        ("Super weights", "; ".join(entries) or "none"),
        ("Largest activation", "; ".join(largest)),
        *((f"Loss, {_LOSSES[name]}", _loss_text(row)) for name, row in found["loss"].items()),
        ("Chain", "; ".join(links) if found["chain"]["asked"] else "not asked for"),
    ]


def _writers_text(row: Mapping[str, Any]) -> str:
    units = [(name, pair) for name in ("experts", "neurons") for pair in row.get(name, [])]
    if not units:
        units = [(said, ("", row[site])) for _, site, said in _SUBLAYERS if site in row]
    kinds: dict[str, list[str]] = {}
    for name, (unit, share) in units:
        kind, named = name, str(unit)
        if name == "neurons":
            kind, named = "", neuron_name(int(row["layer"]), int(unit))
        kinds.setdefault(kind, []).append(f"{named} ({percent(float(share))})".strip())
    told = "; ".join(f"{kind} {', '.join(each)}".strip() for kind, each in kinds.items())
    return f"layer {row['layer']}: {told} of the growth of dimension {row['dimension']}"


def _sink_tokens_text(sink: Mapping[str, Any]) -> str:
    tokens = sink["tokens"]
    if not tokens:
        return "none"
    if sink["at_first_position"] == 1 and len(tokens) > 1:
        count = sum(row["sinks"] for row in tokens)
        more = " or more" * (len(tokens) == _MOST_LISTED)
        return f"{len(tokens)}{more} different ones at position 0, in {count}{more} sequences"
    return join_and(
        f"{row['text']} ({row['id']}, {row['sinks']} of {row['occurs']})" for row in tokens
    )


def _kv_cache_text(cache: Mapping[str, Any]) -> str:
    if cache["keep"] is None:
        return "unknown"
    where = join_and(f"position {place}" for place in cache["keep"]) or "no token"
    there = f"{cache['sink_tokens_kept']} of {plural(cache['sink_tokens'], 'sink token')}"
    return f"{where} ({there})" if cache["sink_tokens"] else where


def _card_markdown(found: Mapping[str, Any]) -> str:
    on = found["measured_on"]
    lines = [f"| {name} | {_escape_for_markdown(value)} |" for name, value in card_text_rows(found)]
    bos = "with BOS" if on["begins_with_bos"] else "without BOS"
    made = (
        f"Measured with sink_lens {found['sink_lens']} ({found['schema']}) in {found['model']['dtype']} on "
        f"{on['sequences']} sequences of {on['length']} tokens ({_escape_for_markdown(on['source'])}, {bos})."
    )
    notes = [f"Note: {_escape_for_markdown(note)}." for note in found["model"]["notes"]]
    head = f"## Attention sinks\n\n{found['sentence']}\n\n| | |\n| --- | --- |"
    return "\n".join([head, *lines, "", made, *notes, ""])


_LOSSES = {
    "clean": "nats",
    "zeroed": "outlier dimensions at zero",
    "mean_aligned": "outlier dimensions at their mean over sequences",
}
"""Loss on the card -> its name in words."""


def _loss_text(row: Mapping[str, Any]) -> str:
    text, changed = (
        f"{as_text(one['value'])} {bounds(one['low'], one['high'])}" for one in (row, row["change"])
    )
    return f"{text.strip()}; change {changed}" if row["change"]["value"] else text.strip()


def _escape_for_markdown(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _card_tables(seen: ObservedModel, made: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    layers = {
        "layer": range(seen.lens.n_layers),
        "sink_attention": sink_mass(seen).nanmean(1).nanmean(1).double().numpy(),
        "norm_ratio": seen.sink_panel.norm_ratio()[1:].nanmean(1).double().numpy(),
    }
    dimensions = [{"kind": "outlier"} | row for row in made["outlier_dimensions"]]
    dimensions += [
        {"kind": "residual"} | row | {"layers": as_ranges(row["layers"])}
        for row in made["residual_sinks"]
    ]
    losses = [
        {
            "condition": name,
            "loss_nats": row["value"],
            "n": row["n"],
            "change_nats": row["change"]["value"],
            "change_low": row["change"]["low"],
            "change_high": row["change"]["high"],
        }
        for name, row in made["loss"].items()
    ]
    rate = made["sink"]["rate"]
    summary = {
        "sentence": made["sentence"],
        "sink_rate": rate["value"],
        "sink_rate_low": rate["low"],
        "sink_rate_high": rate["high"],
        "threshold": rate["threshold"],
        "sink_positions": ",".join(map(str, made["sink"]["positions"])),
        "outlier_dimensions": ",".join(str(row["dimension"]) for row in made["outlier_dimensions"]),
        "loss_nats": made["loss"]["clean"]["value"],
    }
    rows = {
        "layers": layers,
        "dimensions": dimensions,
        "writers": _writer_rows(made),
        "losses": losses,
        "maxima": made["largest_activations"],
        "summary": [summary],
    }
    frames = {
        name: pd.DataFrame(some, columns=column_names("card", name)) for name, some in rows.items()
    }
    return frames | {name: frames[name].astype(types) for name, types in _TYPES.items()}


_TYPES: Mapping[str, Mapping[str, Any]] = {
    "dimensions": {"coverage": float},
    "writers": {"unit": "Int64"},
    "losses": {"change_low": float, "change_high": float},
    "summary": dict.fromkeys(("sink_rate", "sink_rate_low", "sink_rate_high", "loss_nats"), float),
}
"""Types of columns that are undefined in some cards."""


def _writer_rows(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for row in made["writers"]:
        at = {"layer": row["layer"], "dimension": row["dimension"]}
        rows += [
            at | {"part": part, "unit": None, "share": row[site]}
            for part, site, _ in _SUBLAYERS
            if site in row
        ]
        for part in ("expert", "neuron"):
            rows += [
                at | {"part": part, "unit": unit, "share": share}
                for unit, share in row.get(f"{part}s", [])
            ]
    for row in made["super_weights"]:
        at = {"layer": row["layer"], "dimension": row["row"]}
        rows.append(at | {"part": "super weight", "unit": row["column"], "share": row["share"]})
    return rows

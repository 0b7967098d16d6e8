"""What changed from one model to another on the same tokens, whether that is alarming, and what to change.

Both models are read once on the same sequences; every difference is paired by sequence. A change is an alarm where it
is larger than short healthy fine-tunes make it: the sink gone or made, the outlier dimension moved, shrunk or grown,
the loss up. What both tokenizers do with BOS is checked beside it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..chain.config import Thresholds
from ..data.bos import bos_id
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens, load
from ..schema import GAINED_FRAC, LOST_FRAC
from ..stats import Interval, interval, paired_difference
from ..text import interval as bounds
from ..text import listed, named_parts, number, plural
from .bos_check import Finding, check_bos
from .config import CardConfig
from .observed import Observed, UnmeasuredError
from .quantities import COMPARED, first_token_share, norm_ratio, sink_positions, writing_neurons
from .study import Study, shown_name, write_study

GREW = 2.0
"""An outlier that grows by more than this factor, or shrinks by it, is an alarm."""
STANDS_OUT = 3.0
"""A first token whose norm is at least this many times that of the others is an outlier that can be lost."""
FELL = 0.75
"""A lower sink rate is an alarm only if attention fell below this share too, as the rate hangs on its threshold."""
ANOTHER = 0.5
"""A matrix that changes by this share of its norm was not fine-tuned but replaced, permuted or scaled."""
_WEIGHT_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_UNREAD = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "name_or_path"),
    *(
        "quantization_config",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "attn_implementation",
        "_attn_implementation",
    ),
    *(
        "vocab_size",
        "initializer_range",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout",
    ),
)
"""Fields of a configuration that do not change what the weights compute, or that are compared elsewhere."""
_TENSORS = 20
_FIRST = 8


def compare(
    lens: LensModel,
    sequences: TokenBatch,
    config: CardConfig,
    *,
    other: ModelLike | None = None,
    out: str | Path | None,
    overwrite: bool,
) -> Study:
    """Compare two models on the same tokens, and what their tokenizers do with BOS.

    Args:
        lens: the first model.
        sequences: the tokens.
        config: names the second model, and says by what the two may differ.
        other: the second model itself; the one that the configuration names if None.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.

    Raises:
        InputError: models of different shapes, or that differ by more than ``by`` names.
        RunError: the folder is in use, or holds another run.
    """
    second = second_of(lens, config, other)
    _check_alike(lens, second, config)
    findings = [*check_bos(lens.tokenizer, second.tokenizer), *_configurations(lens, second)]
    thresholds = Thresholds(threshold=config.threshold)
    a = Observed(lens, sequences, thresholds=thresholds, seed=config.seed, batch_size=config.batch_size)
    b = _read_second(a, second, config)
    pairs = _losses(a, b)
    changes = pd.DataFrame(_changes(a, b, pairs, config))
    tensors = None
    if config.by == "weights":
        tensors, replaced = _tensors(lens, second)
        findings += replaced
    decision = _decision(
        changes, findings, tensors, names=_names(lens, second, config, bos=a.tokens.bos), config=config, n=len(pairs[0])
    )
    frames = {
        "changes": changes,
        "positions": _positions(*pairs, seed=config.seed),
        "checks": pd.DataFrame(
            [dataclasses.asdict(one) for one in findings], columns=["check", "alarm", "said", "line"]
        ).astype({"alarm": "bool"}),
        "summary": pd.DataFrame([{name: decision[name] for name in _SUMMARY}]),
    }
    if tensors is not None:
        frames["tensors"] = tensors
    return write_study(
        "diff",
        lens,
        sequences,
        config,
        frames,
        kernel=a.core.kernel,
        decision=decision | {"checks": [dataclasses.asdict(one) for one in findings if one.alarm]},
        headline=decision["sentence"],
        out=out,
        overwrite=overwrite,
    )


_SUMMARY = ("sentence", "by", "alarms", "loss_change_nats", "loss_change_low", "loss_change_high", "n")


def second_of(lens: LensModel, config: CardConfig, other: ModelLike | None) -> LensModel:
    """The second model of a comparison."""
    if other is not None and not isinstance(other, str | Path):
        return as_lens(other)
    if config.by == "bos" and not config.others:
        return lens
    name = config.others[0] if config.others else config.model
    return load(name, device=config.device, dtype=config.other_dtype or config.dtype)


def _check_alike(first: LensModel, second: LensModel, config: CardConfig) -> None:
    """Refuse what cannot be compared, or differs by more than what is asked.

    Raises:
        InputError: in what they differ.
    """
    for name in _WEIGHT_SIZES:
        mine, its = (getattr(one.config, name, None) for one in (first, second))
        if mine != its and not (name == "vocab_size" and its is not None and mine is not None):
            raise InputError(
                f"{shown_name(first.name)} has {name} {mine} and {shown_name(second.name)} {its}; need two models of "
                "one shape. Give the folders of their cards for a table"
            )
    if first.dtype != second.dtype and config.by != "dtype":
        raise InputError(
            f"the models differ in dtype ({first.dtype}, {second.dtype}); need one type, or --by dtype if that is "
            "what is compared"
        )
    if first.dtype == second.dtype and config.by == "dtype":
        raise InputError(f"both models are in {first.dtype}; need another --other-dtype to compare by dtype")


def _read_second(a: Observed, second: LensModel, config: CardConfig) -> Observed:
    """The second model on the same tokens; with the other BOS condition where that is compared."""
    seen = Observed(second, a.tokens, thresholds=a.thresholds, seed=a.seed, batch_size=config.batch_size)
    if config.by != "bos":
        return seen
    if a.tokens.bos:
        return seen.without_bos()
    token = None if second.tokenizer is None else bos_id(second.tokenizer)
    if token is None:
        raise InputError(f"{shown_name(second.name)} has no BOS token; need one to compare by BOS")
    return seen.on(a.tokens.with_bos(token))


def _losses(a: Observed, b: Observed) -> tuple[Tensor, Tensor]:
    """Loss of the tokens that both predict, by sequence and position from 1 on; without BOS if one has none."""
    first, second = a.token_losses.double(), b.token_losses.double()
    width = min(first.shape[1], second.shape[1])
    return first[:, first.shape[1] - width :], second[:, second.shape[1] - width :]


def _pair(a: Tensor, b: Tensor, *, seed: int) -> Interval:
    """The second minus the first, paired by sequence."""
    return paired_difference(b.double().numpy(), a.double().numpy(), generator=np.random.default_rng(seed))


_ROWS = {
    "first_token_share": "first_token_attention",
    "null_mass": "attention_to_no_key",
    "norm_ratio": "first_token_norm_ratio",
    "max_activation": "largest_activation",
}
"""Quantity -> its name in ``changes``, where that is another."""


def _changes(a: Observed, b: Observed, pairs: tuple[Tensor, Tensor], config: CardConfig) -> list[dict[str, Any]]:
    """Every quantity of both, with its change and whether that is alarming."""
    by_bos = config.by == "bos"
    first, second = pairs
    rows = [_numbers("loss", "nats", first.nanmean(1), second.nanmean(1), a, most=config.most_loss)]
    blocks = ((f"loss_positions_1_to_{_FIRST}", slice(0, _FIRST)), ("loss_later_positions", slice(_FIRST, None)))
    for name, block in blocks:
        if first[:, block].shape[1]:
            rows.append(
                _numbers(
                    name, "nats", first[:, block].nanmean(1), second[:, block].nanmean(1), a, most=2 * config.most_loss
                )
            )
    mass = (first_token_share(a), first_token_share(b))
    less = _pair(*mass, seed=a.seed)
    fell = less.high < 0 and float(mass[1].nanmean()) < FELL * float(mass[0].nanmean())
    moved = not by_bos and _has_moved(sink_positions(a), sink_positions(b)) and (fell or bool(sink_positions(b)))
    alarms: dict[str, dict[str, Any]] = {
        "sink_rate": {"lost": not by_bos and (fell or less.estimate > 0)},
        "first_token_share": {"lost": not by_bos},
        "null_mass": {"lost": not by_bos},
        "norm_ratio": {"grew": not by_bos},
        "max_activation": {"grew": not by_bos, "stands": 0.0},
        "kurtosis": {},
    }
    for name, alarm in alarms.items():
        quantity = COMPARED[name]
        first, second = quantity.by_sequence(a), quantity.by_sequence(b)
        rows.append(_numbers(_ROWS.get(name, name), quantity.unit, first, second, a, **alarm))
    stands = float(norm_ratio(a).nanmean()) >= STANDS_OUT
    rows += [
        _indices("sink_positions", sink_positions(a), sink_positions(b), alarm=moved),
        _indices(
            "outlier_dimensions",
            a.outlier_dimensions,
            b.outlier_dimensions,
            alarm=not by_bos and stands and _has_moved(a.outlier_dimensions[:1], b.outlier_dimensions),
        ),
        _indices("residual_sinks", sorted(a.residual_sinks), sorted(b.residual_sinks), alarm=False),
        _indices(
            "writing_neurons",
            _writing(a),
            _writing(b),
            alarm=not by_bos and stands and bool(_writing(a)) and not set(_writing(a)) & set(_writing(b)),
        ),
    ]
    return rows


def _writing(seen: Observed) -> list[str]:
    """Names of the neurons that write the outlier dimension; empty if they cannot be read."""
    try:
        return [f"{layer}.{neuron}" for layer, neuron in writing_neurons(seen)]
    except UnmeasuredError:
        return []


def _has_moved(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Check whether the first model's first index is gone."""
    return bool(first) and first[0] not in second


def _numbers(
    name: str,
    unit: str,
    first: Tensor,
    second: Tensor,
    seen: Observed,
    *,
    most: float = math.inf,
    lost: bool = False,
    grew: bool = False,
    stands: float = STANDS_OUT,
) -> dict[str, Any]:
    """A row of numbers.

    Args:
        name: the quantity.
        unit: its unit.
        first: the first model's number of each sequence.
        second: the second model's.
        seen: the first model, for the seed.
        most: a larger rise is an alarm.
        lost: whether losing half of it, or making much of it, is an alarm.
        grew: whether growing or shrinking by ``GREW`` is an alarm where one of the two is at least ``stands``.
        stands: see ``grew``.
    """
    change = _pair(first, second, seed=seen.seed)
    mean = (float(first.nanmean()), float(second.nanmean()))
    alarm = change.estimate > most and not change.low <= 0
    if math.isnan(mean[1]) and not math.isnan(mean[0]):
        alarm = True  # the second model gives no number at all
    if lost:
        alarm |= mean[0] >= 2 * GAINED_FRAC / 5 and mean[1] < (1 - LOST_FRAC) * mean[0] and change.high < 0
        alarm |= change.estimate >= GAINED_FRAC and change.low > 0
    if grew and max(mean) >= stands and min(mean) > 0:
        alarm |= not 1 / GREW < mean[1] / mean[0] < GREW
    return {
        "quantity": name,
        "unit": unit,
        "first": mean[0],
        "second": mean[1],
        "change": change.estimate,
        "change_low": change.low,
        "change_high": change.high,
        "first_indices": "",
        "second_indices": "",
        "alarm": bool(alarm),
    }


def _indices(name: str, first: Sequence[Any], second: Sequence[Any], *, alarm: bool) -> dict[str, Any]:
    """A quantity of indices as a row of ``changes``."""
    return {
        "quantity": name,
        "unit": "index",
        **dict.fromkeys(("first", "second", "change", "change_low", "change_high"), math.nan),
        "first_indices": ", ".join(map(str, first)),
        "second_indices": ", ".join(map(str, second)),
        "alarm": alarm,
    }


def _configurations(first: LensModel, second: LensModel) -> list[Finding]:
    """Fields of the configurations that change what the same weights compute."""
    if first is second:
        return []
    mine, its = (one.config.to_dict() for one in (first, second))
    differing = [name for name in sorted({*mine, *its}) if name not in _UNREAD and mine.get(name) != its.get(name)]
    if not differing:
        return [Finding(check="configuration", alarm=False, said="both configurations compute the same")]
    return [
        Finding(
            check="configuration",
            alarm=True,
            said=f"{name} is {its.get(name)} instead of {mine.get(name)}",
            line=f'config.json: "{name}": {mine.get(name)}',
        )
        for name in differing
    ]


def _tensors(first: LensModel, second: LensModel) -> tuple[pd.DataFrame, list[Finding]]:
    """The tensors that changed most, relative to their norm; those that cannot come from a fine-tune."""
    theirs = dict(second.plain.named_parameters())
    rows, replaced = [], []
    with torch.no_grad():
        for name, weight in first.plain.named_parameters():
            other = theirs.get(name)
            if other is None or other.shape != weight.shape:
                continue
            norm = float(weight.float().norm())
            change = float((other.to(weight.device).float() - weight.float()).norm())
            relative = change / norm if norm else math.inf if change else 0.0
            rows.append({"tensor": name, "change": relative})
            if norm and (not bool(other.any()) or (weight.ndim > 1 and relative >= ANOTHER)):
                replaced.append(rows[-1] | {"zero": not bool(other.any())})
    table = pd.DataFrame(rows, columns=["tensor", "change"]).astype({"tensor": "str", "change": "float64"})
    table = table.loc[table["change"] > 0].sort_values("change", ascending=False, kind="stable")
    return table.head(_TENSORS).reset_index(drop=True), _replaced_tensors(replaced)


def _replaced_tensors(tensors: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """One finding for all tensors that are zero, or that are no longer what was fine-tuned."""
    if not tensors:
        return [Finding(check="weights", alarm=False, said=f"no matrix changed by {ANOTHER:g} of its norm")]
    most = max(tensors, key=lambda one: (one["zero"], one["change"]))
    what = "is zero" if most["zero"] else f"changed by {number(most['change'])} of its norm"
    more = f", and {plural(len(tensors) - 1, 'more tensor')} like it" if len(tensors) > 1 else ""
    return [
        Finding(
            check="weights",
            alarm=True,
            said=f"{most['tensor']} {what}{more}, which no short fine-tune does",
            line=(
                f"check how the weights were saved, merged or trained (learning rate), beginning with {most['tensor']}"
            ),
        )
    ]


def _positions(first: Tensor, second: Tensor, *, seed: int) -> pd.DataFrame:
    """The change of the loss at each position."""
    rows = []
    for at in range(first.shape[1]):
        change = _pair(first[:, at], second[:, at], seed=seed) if len(first) > 1 else _only(first[:, at], second[:, at])
        rows.append(
            {
                "position": at + 1,
                "first": float(first[:, at].nanmean()),
                "second": float(second[:, at].nanmean()),
                "change": change.estimate,
                "change_low": change.low,
                "change_high": change.high,
            }
        )
    return pd.DataFrame(rows)


def _only(first: Tensor, second: Tensor) -> Interval:
    """The change of a single sequence."""
    return interval((second - first).numpy(), generator=np.random.default_rng(0))


def _names(first: LensModel, second: LensModel, config: CardConfig, *, bos: bool) -> tuple[str, str]:
    """The names of the two that are compared."""
    names = (shown_name(first.name), shown_name(second.name))
    if config.by == "dtype":
        return f"{names[0]} in {_type(first)}", f"{names[1]} in {_type(second)}"
    if config.by == "bos":
        conditions = ("with BOS", "without BOS") if bos else ("without BOS", "with BOS")
        return f"{names[0]} {conditions[0]}", conditions[1] if first is second else f"{names[1]} {conditions[1]}"
    return names if names[0] != names[1] else (names[0], "the second model")


def _type(lens: LensModel) -> str:
    """The name of the weights' type."""
    return str(lens.dtype).removeprefix("torch.")


def _decision(
    changes: pd.DataFrame,
    findings: Sequence[Finding],
    tensors: pd.DataFrame | None,
    *,
    names: tuple[str, str],
    config: CardConfig,
    n: int,
) -> dict[str, Any]:
    """The verdict with its numbers."""
    rows = changes.to_dict("records")
    loss = rows[0]
    wrong = [row for row in rows if row["alarm"]]
    lines = [one for one in findings if one.alarm]
    found = {
        "by": config.by,
        "first": names[0],
        "second": names[1],
        "alarms": len(wrong) + len(lines),
        "loss_change_nats": loss["change"],
        "loss_change_low": loss["change_low"],
        "loss_change_high": loss["change_high"],
        "n": n,
        "changes": [row["quantity"] for row in wrong],
        "lines": [one.line for one in lines],
    }
    return {"sentence": _sentence(found, rows, wrong, lines, tensors)} | found


def _sentence(
    found: Mapping[str, Any],
    rows: Sequence[Mapping[Any, Any]],
    wrong: Sequence[Mapping[Any, Any]],
    lines: Sequence[Finding],
    tensors: pd.DataFrame | None,
) -> str:
    """The verdict in a sentence."""
    second = found["second"]
    if not wrong and not lines:
        sink = next(row for row in rows if row["quantity"] == "sink_rate")
        if found["by"] == "bos":
            return _sentence_on_bos(found, rows)
        return f"Nothing is broken from {found['first']} to {second}: {_change(rows[0])}, {_change(sink)}."
    parts = [f"{one.said} (fix: {one.line})" for one in lines[:3]]
    if wrong:
        told = listed((_change(row) for row in wrong), most=3)
        where = ""
        if tensors is not None and len(tensors) and not lines:
            top = tensors.iloc[0]
            where = f"; the tensor that changed most is {top['tensor']} (by {number(float(top['change']))} of its norm)"
        parts.append(f"{told}{where}")
    if found["by"] == "bos" and not lines:
        return f"BOS matters: from {found['first']} to {second}, {'; '.join(parts)}."
    return f"Do not use {second} yet, {plural(found['alarms'], 'alarm')}: {'; '.join(parts)}."


def _sentence_on_bos(found: Mapping[str, Any], rows: Sequence[Mapping[Any, Any]]) -> str:
    """Say at which positions BOS changes the loss, with the change at all others beside it."""
    losses = [row for row in rows if str(row["quantity"]).startswith("loss")]
    changed = [row["quantity"] for row in losses if row["change_low"] > 0 or row["change_high"] < 0]
    if f"loss_positions_1_to_{_FIRST}" in changed:
        said = f"BOS changes the loss at the first {_FIRST} positions, by less than an alarm"
    elif changed:
        said = "BOS changes the loss, by less than an alarm"
    else:
        said = "No change of the loss by BOS was measured"
    sink = next(row for row in rows if row["quantity"] == "sink_rate")
    told = ", ".join(map(_change, [*losses, sink]))
    return f"{said}: from {found['first']} to {found['second']}, {told}."


def _change(row: Mapping[Any, Any]) -> str:
    """A change in words."""
    name = str(row["quantity"]).replace("_", " ").replace("loss positions", "loss at positions")
    name += ":" * name[-1].isdigit()
    if math.isnan(row["first"]) and math.isnan(row["second"]):
        first, second = (named_parts(row[f"{which}_indices"]) or "none" for which in ("first", "second"))
        return f"{name} {first} → {second}"
    change = f"change {number(row['change'])} {bounds(row['change_low'], row['change_high'])}".strip()
    return f"{name} {number(row['first'])} → {number(row['second'])} ({change})"

"""Changes from one model to another on the same tokens: every difference is paired by sequence.

The one judgement is that of the loss, which may rise by a bound that is given.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..chain.config import TraceConfig
from ..data.token_ids import bos_id, text_ids
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens, load, weights_hash
from ..models.offload import loaded_parameter, parameter_names
from ..models.private_apis import NAME_OF_CONFIG
from ..schema import column_names
from ..stats import ROUNDING, paired_difference
from ..text import as_text, join_and, label_parts, safe_line
from ..text import interval_text as bounds
from .bos_check import count_bos_in_front
from .config import CardConfig
from .observed import ObservedModel
from .quantities import COMPARED, found_sink_positions, writing_neurons
from .study import Measured, Study, short_model_name, write_study

_WEIGHT_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_UNREAD = (
    NAME_OF_CONFIG,
    "architectures",
    "dtype",
    "quantization_config",
    "transformers_version",
    "use_cache",
)
"""Fields of a configuration that name where the weights come from, or how they are stored."""
_SAMPLE = "The whale's 2 eyes saw: nothing.\n\tWhy? naïve 東京 x = [1, 2]"
"""Text that tokenizers are compared on."""
_FIRST = 8


def compare_models(
    lens: LensModel,
    sequences: TokenBatch,
    config: CardConfig,
    *,
    other: ModelLike | None,
    **to: Any,
) -> Study:
    """Compare ``lens`` with ``other``, or with the second model of ``config``; the run's kind is ``diff``."""
    if other is None or isinstance(other, str | Path):
        second = load(config.others[0], device=config.device, dtype=config.dtype)
    else:
        second = as_lens(other)
    _refuse_unlike_models(lens, second)
    settings, same = _setting_rows(lens, second), _have_same_weights(lens, second)
    refuse_one_model(lens, second)
    a, b = (
        ObservedModel(
            one,
            sequences,
            thresholds=TraceConfig(threshold=config.threshold),
            seed=config.seed,
            batch_size=config.batch_size,
        )
        for one in (lens, second)
    )
    changes = [*_number_rows(a, b), *_list_rows(a, b), *settings]
    names = [
        unnamed if one.name == one.family.architecture else short_model_name(one.name)
        for one, unnamed in ((lens, "the first model"), (second, "the second model"))
    ]
    if names[0] == names[1]:
        names[1] = "the second model"
    tensors = _changed_weight_table(lens, second)
    decision = _make_json_answer(
        changes, tensors, names=names, config=config, n=len(a.token_losses), same=same
    )
    decision["notes"] = list(dict.fromkeys([*lens.notes, *second.notes]))
    summary = pd.DataFrame([decision], columns=column_names("diff", "summary"))
    frames = {"changes": pd.DataFrame(changes), "summary": summary, "tensors": tensors}
    found = Measured(
        frames=frames,
        kernel=a.panel.streamed.kernel,
        decision=decision,
        headline=decision["sentence"],
    )
    return write_study("diff", lens, sequences, config, found, **to)


def refuse_one_model(first: LensModel, second: LensModel) -> None:
    """Refuse two models that are one in memory, with the same weights, configuration and tokenizer."""
    if (
        _share_memory(first, second)
        and _have_same_weights(first, second)
        and not _setting_rows(first, second)
    ):
        raise InputError(
            "two of the models are one model in memory: they share their weights, and nothing differs; need two. "
            "get_peft_model puts adapters into the base model's own object: load the base model again, or give "
            "get_peft_model a copy.deepcopy of it"
        )


def _have_same_weights(first: LensModel, second: LensModel) -> bool:
    if first.offloaded or second.offloaded:
        return weights_hash(first) == weights_hash(second)
    mine, its = (dict(one.plain.named_parameters()) for one in (first, second))
    return mine.keys() == its.keys() and all(
        weight.shape == its[name].shape and torch.equal(weight, its[name].to(weight.device))
        for name, weight in mine.items()
    )


def _share_memory(first: LensModel, second: LensModel) -> bool:
    mine, its = (
        {
            (one.device, one.data_ptr())
            for one in lens.plain.parameters()
            if one.numel() and one.device.type != "meta"
        }
        for lens in (first, second)
    )
    return not mine.isdisjoint(its)


def _refuse_unlike_models(first: LensModel, second: LensModel) -> None:
    for name in _WEIGHT_SIZES:
        mine, its = (getattr(one.config, name, None) for one in (first, second))
        if mine != its and not (name == "vocab_size" and its is not None and mine is not None):
            raise InputError(
                f"{short_model_name(first.name)} has {name} {mine} and {short_model_name(second.name)} {its}; "
                "need two models of one shape. Give the folders of their cards for a table"
            )
    if first.dtype != second.dtype:
        raise InputError(
            f"the models differ in dtype ({first.dtype}, {second.dtype}); need one type. Load both with the same dtype"
        )


def _number_rows(a: ObservedModel, b: ObservedModel) -> list[dict[str, Any]]:
    first, second = a.token_losses.double(), b.token_losses.double()
    known = {"seed": a.seed, "dtype": a.lens.dtype}
    rows = [_number_row("loss", "nats", first.nanmean(1), second.nanmean(1), **known)]
    blocks = (
        (f"loss_positions_1_to_{_FIRST}", slice(0, _FIRST)),
        ("loss_later_positions", slice(_FIRST, None)),
    )
    for name, block in blocks:
        if first[:, block].shape[1]:
            mean = (first[:, block].nanmean(1), second[:, block].nanmean(1))
            rows.append(_number_row(name, "nats", *mean, **known))
    rows += [
        _number_row(name, unit, of(a), of(b), **known) for name, (unit, of) in COMPARED.items()
    ]
    return [
        row
        for row in rows
        if row["quantity"] != "attention_to_no_key"
        or not max(abs(row["first"]), abs(row["second"])) <= ROUNDING
    ]


def _number_row(
    name: str, unit: str, first: Tensor, second: Tensor, *, seed: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Compare by sequence; a change is none below the rounding of ``dtype`` at the larger of both means, or at 1."""
    change = paired_difference(
        second.double().numpy(), first.double().numpy(), generator=np.random.default_rng(seed)
    )
    mean = (float(first.nanmean()), float(second.nanmean()))
    rounding = max(ROUNDING, torch.finfo(dtype).eps) * max(1.0, *map(abs, mean))
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
        "changed": (change.excludes_zero and abs(change.estimate) > rounding)
        or math.isnan(mean[0]) != math.isnan(mean[1]),
    }


def _list_rows(a: ObservedModel, b: ObservedModel) -> list[dict[str, Any]]:
    first, second = (
        {
            "sink_positions": found_sink_positions(seen),
            "outlier_dimensions": seen.outlier_dimensions,
            "residual_sinks": sorted(seen.residual_sinks),
            "writing_neurons": [f"{layer}.{neuron}" for layer, neuron in writing_neurons(seen)],
        }
        for seen in (a, b)
    )
    return [
        _text_row(name, "index", ", ".join(map(str, own)), ", ".join(map(str, second[name])))
        for name, own in first.items()
    ]


def _text_row(name: str, unit: str, first: str, second: str) -> dict[str, Any]:
    return {
        "quantity": name,
        "unit": unit,
        **dict.fromkeys(("first", "second", "change", "change_low", "change_high"), math.nan),
        "first_indices": first,
        "second_indices": second,
        "changed": set(first.split(", ")) != set(second.split(", "))  # in any order
        if unit == "index"
        else first != second,
    }


def _setting_rows(first: LensModel, second: LensModel) -> list[dict[str, Any]]:
    mine, its = (one.config.to_dict() for one in (first, second))
    rows = [
        _text_row(name, "text", str(mine.get(name)), str(its.get(name)))
        for name in sorted({*mine, *its} - set(_UNREAD))
        if mine.get(name) != its.get(name)
    ]
    if first.tokenizer is None or second.tokenizer is None:
        return rows
    tokenizers = (first.tokenizer, second.tokenizer)
    counts = [count_bos_in_front(one) for one in tokenizers]
    for name in counts[0] | counts[1]:  # a chat needs a template, and may not be rendered
        shown = ("" if one.get(name) is None else str(one[name]) for one in counts)
        rows.append(_text_row(f"bos_in_front_of_{name}", "text", *shown))
    both = [[bos_id(one), *text_ids(_SAMPLE, one)] for one in tokenizers]
    if both[0] != both[1]:
        rows.append(_text_row("bos_and_tokens_of_a_text", "text", *map(str, both)))
    return rows


def _changed_weight_table(first: LensModel, second: LensModel) -> pd.DataFrame:
    theirs = set(parameter_names(second.plain))
    rows = []
    for name in parameter_names(first.plain):
        if name not in theirs:
            continue
        with (
            loaded_parameter(first.plain, name) as weight,
            loaded_parameter(second.plain, name) as other,
        ):
            if other.shape != weight.shape:
                continue
            norm = float(weight.float().norm())
            change = float((other.to(weight.device).float() - weight.float()).norm())
            rows.append((name, change / norm if norm else math.inf if change else 0.0))
    table = pd.DataFrame(rows, columns=["tensor", "change"])
    table = table.astype({"tensor": "str", "change": "float64"})
    table = table.loc[table["change"] > 0].sort_values("change", ascending=False, kind="stable")
    return table.head(20).reset_index(drop=True)


def _make_json_answer(
    changes: Sequence[Mapping[str, Any]],
    tensors: pd.DataFrame,
    *,
    names: Sequence[str],
    config: CardConfig,
    n: int,
    same: bool = False,
) -> dict[str, Any]:
    loss = changes[0]
    is_above = loss["change"] > config.most_loss and not loss["change_low"] <= 0
    is_lost = math.isnan(loss["second"]) and not math.isnan(loss["first"])
    found = {
        "first": names[0],
        "second": names[1],
        "most_loss": config.most_loss,
        "within_bound": not is_above and not is_lost,
        "loss_change_nats": loss["change"],
        "loss_change_low": loss["change_low"],
        "loss_change_high": loss["change_high"],
        "n": n,
        "same_weights": same,
        "changes": [row["quantity"] for row in changes if row["changed"]],
    }
    return {"sentence": _change_sentences(found, changes, tensors)} | found


def _change_sentences(
    found: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], tensors: pd.DataFrame
) -> str:
    others = [_change_text(row) for row in changes[1:] if row["changed"]]
    if len(tensors):
        name, change = tensors["tensor"].iloc[0], as_text(float(tensors["change"].iloc[0]))
        others.insert(3, f"most of all weights {name} (by {change} of its norm)")
    if others:
        rest = f"What else changed: {join_and(others, most=4)}."
    elif found["n"] == 1:
        rest = "One sequence has no interval, so no other change of a number is told."
    else:
        rest = "Nothing else changed beyond its interval."
    return (
        f"From {found['first']} to {found['second']}: {_change_text(changes[0])}, "
        f"{'within' if found['within_bound'] else 'not within'} the bound of {as_text(found['most_loss'])} nats. "
        f"{'Both have the same weights. ' * bool(found['same_weights'])}{rest}{_unchanged_sink_text(changes)}"
    )


def _unchanged_sink_text(changes: Sequence[Mapping[str, Any]]) -> str:
    names = ("sink_rate", "first_token_attention", "sink_positions")
    sink = [row for row in changes if row["quantity"] in names]
    if not sink or any(row["changed"] for row in sink) or not sink[-1]["first_indices"]:
        return ""
    if any(math.isnan(row["change_low"]) for row in sink[:2]):  # of one sequence, or too short ones
        return ""
    return f" The sink did not change beyond its interval: {join_and(map(_change_text, sink[:2]))}."


def _change_text(row: Mapping[str, Any]) -> str:
    name = row["quantity"].replace("_", " ").replace("loss positions", "loss at positions")
    name += ":" * name[-1].isdigit()
    if row["unit"] in ("index", "text"):
        shown = label_parts if row["unit"] == "index" else safe_line
        first, second = (shown(row[f"{one}_indices"]) or "none" for one in ("first", "second"))
        return f"{name} {first} → {second}"
    change = f"change {as_text(row['change'])} {bounds(row['change_low'], row['change_high'])}"
    return f"{name} {as_text(row['first'])} → {as_text(row['second'])} ({change.strip()})"

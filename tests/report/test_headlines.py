"""What the other kinds say is in tests/headlines.md, is said if what it stands on holds, and else not."""

import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from headlines import keys, without_numbers

from sink_lens.activations.sink_mask import ScoreGap
from sink_lens.identity.pages.fingerprint import NO_ANSWER, NOT_SHOWN, SAME
from sink_lens.kinds import all_kinds
from sink_lens.lazy import import_object
from sink_lens.records import Run
from sink_lens.schema import LINEAR_INPUTS
from sink_lens.studies import card_pair
from sink_lens.training.sink_birth import Birth

from ..training.runs import write_run
from .circuits import grid

card, quantise, compare, marked = (  # functions hide three of these modules
    import_module(f"sink_lens.{name}")
    for name in ("studies.card", "studies.quantise", "training.compare", "studies.tokens.run")
)
NAN = float("nan")


class Tables(dict):
    """Tables of a run in memory."""

    shortened: ClassVar[dict] = {}


def page(kind, *, config=None, folder="nowhere", **tables):
    """The title and the sentences of a page."""
    frames = {name: pd.DataFrame(table) for name, table in tables.items() if table is not None}
    run = Run(
        folder=Path(folder), kind=kind, status="finished", error=None, started="", ended=None, config=config or {},
        provenance={"least_effect": 0.01}, tables=Tables(frames), missing=[],
    )  # fmt: skip
    shown = import_object(all_kinds()[kind].page)
    return f"{shown.title(run)}. {' '.join(shown.headline(run))}"


def tokens(
    *,
    sinks=(4, 2, 1),
    massive=0,
    first=32,
    dimensions=("residual", "sink token"),
    gap=True,
    given=None,
    by="attention",
):
    between = ScoreGap(threshold=3.0, low=1.0, high=9.0, above=1, within=1) if gap else None
    found = {"gaps": between, "scores": torch.tensor([[9.0, 1.0, 1.0]]), "thresholds": 3.0}
    found = SimpleNamespace(**{name: {by: one} for name, one in found.items()})
    thresholds = marked._threshold_rows(
        found,
        SimpleNamespace(
            given_thresholds={"attention": given, "norm": None},
            least_scores={"attention": 2.5, "norm": 4.0},
        ),
    )
    row = {"massive": massive, "both": 0, "sink_only": sum(sinks), "massive_only": massive}
    names = ("first", "delimiter", "other")
    agreement = [row | {"kind": "all", "tokens": 512, "sinks": sum(sinks)}]
    agreement += [
        row | {"kind": name, "tokens": first, "sinks": n}
        for name, n in zip(names, sinks, strict=True)
    ]
    rows = {"kind": list(dimensions), "dimension": 7, "layer": 2, "coverage": 0.9, "ratio": 40.0}
    rows = rows if dimensions else pd.DataFrame(columns=list(rows))
    return page("tokens", thresholds=thresholds, agreement=agreement, dimensions=rows)


STOP = {"id": 13, "text": ".", "sinks": 31, "occurs": 40}


def card_of(
    *,
    found=True,
    rate=0.6,
    to_no_key=0.0,
    dimensions=(7,),
    zeroed=0.5,
    bos=0.3,
    needed=True,
    written=False,
    tokens=(),
):
    change = {"value": zeroed, "low": zeroed - 0.005, "high": zeroed + 0.005}
    made = {
        "sink": {"found": found, "positions": [0], "rate": {"value": rate, "low": 0.5, "high": 0.7}},
        "outlier_dimensions": [{"dimension": one} for one in dimensions],
        "loss": {name: {"change": change} for name in ("zeroed", "mean_aligned")},
        "bos": {"needed": needed, "cost_without_nats": {"value": bos, "low": bos - 0.1, "high": bos + 0.1}},
    }  # fmt: skip
    made["sink"] |= {"to_no_key": {"value": to_no_key}, "tokens": tokens, "at_first_position": 0.0}
    row = {
        "sentence": card.card_sentence(made),
        "sink_positions": "0" if found else "",
        "sink_rate": rate or NAN,
    }
    row |= {
        "outlier_dimensions": ",".join(map(str, dimensions)),
        "sink_rate_low": 0.5,
        "sink_rate_high": 0.7,
    }
    with tempfile.TemporaryDirectory() as folder:
        if written:
            (Path(folder) / "card.md").touch()
        return page("card", folder=folder, summary=[row])


def diff(*, within=True, changed=True, loss=True, tensors=(), low=0.4, same=False, n=8):
    change = {
        "change": 0.5,
        "change_low": 0.4,
        "change_high": 0.6,
        "first": 3.0,
        "second": 3.5,
        "unit": "nats",
    }
    change |= {"first_indices": [0], "second_indices": [0]}
    changes = [change | {"quantity": name, "changed": changed} for name in ("loss", "sink_rate")]
    found = {
        "first": "ONE",
        "second": "OTHER",
        "within_bound": within,
        "most_loss": 0.01,
        "same_weights": same,
        "n": n,
    }
    row = {
        "sentence": card_pair._change_sentences(found, changes, pd.DataFrame(tensors)),
        "loss_change_nats": 0.5,
    }
    row |= {"loss_change_low": low, "loss_change_high": 0.6}
    return page(
        "diff",
        config={"others": ["OTHER"]},
        summary=[row],
        changes=[{**changes[0], "changed": loss}],
    )


def quantised(**change):
    found = {
        "verdict": "keep", "format": "int8", "cost_nats": 0.5, "cost_low": 0.4, "cost_high": 0.6, "controls": 5,
        "clean_loss_nats": 3.0, "quantised_loss_nats": 3.5, "random_most": 0.1, "closed_share": 0.8, "closed_low": 0.7,
        "closed_high": 0.9, "sink_tokens": 1.0, "channels": 4, "left_nats": 0.1, "left_low": 0.05, "left_high": 0.2,
        "goal": 0.9, "sink_positions": [0], "channels_alone": (0.6, 0.5, 0.65),
        "not_chosen": [], "halves_with_sinks": ["first", "second"],
        "kept_channels": dict.fromkeys(LINEAR_INPUTS), "cache": None, "weights": None,
    } | change  # fmt: skip
    return quantise._advice_sentence(found)


MISSED = {"verdict": "goal missed"}
NO_SET = {"verdict": "no small set", "closed_share": NAN}
REACHED = {"not_chosen": [{"sink_tokens": True, "channels": 2, "closed_share": 0.91}]}


def patch(*, effects=(-9.0, -8.9, 1.0), config=None, by="layer", way=0.9, ci_low=NAN, **tables):
    rows = {
        by: range(len(effects)),
        "effect": effects,
        "normalised_effect": way,
        "ci_low": ci_low,
        "ci_high": 2.0,
    }
    rows |= {"changed": [one != 1 for one in effects]}
    config = {"metric": "loss", "site": "resid_pre", "direction": "denoising"} | (config or {})
    return page("patch", config=config, patches=rows, **tables)


def carried(*, values):
    rows = grid(position=range(2), layer=range(3)).assign(changed=True, effect=np.ravel(values))
    rows = rows.assign(normalised_effect=rows["effect"])
    return page("patch", config={"metric": "loss", "site": "resid_pre"}, patches=rows)


CELL = {
    "kind": "zero",
    "site": "z",
    "metric": "METRIC",
    "ci_low": 0.4,
    "ci_high": 0.6,
    "error": None,
    "n": 8,
}
CELL |= {
    "changed": True,
    "baseline": 0.5,
    "control_effect": 0.01,
    "over_low": 0.3,
    "over_high": 0.5,
    "effect_in_sds": 5.0,
    "n_controls": 1,
    "corrected_p": 0.0,
}


def sweep(changes=({}, {}), *, metrics=("METRIC",)):
    rows = grid(cell=range(len(changes)), metric=metrics).to_dict("records")
    rows = [
        CELL | row | {"where": f"L{row['cell']}", "effect": 0.5 - 0.01 * row["cell"]}
        for row in rows
    ]
    rows = [row | changes[row["cell"]] for row in rows]
    return page("sweep", cells=rows)


NO_CHANGE = {"ci_low": -0.1, "ci_high": 0.6}
NO_CONTROL = {"control_effect": NAN, "over_low": NAN, "over_high": NAN}


def few_of(n):
    return {"changes": ({"n": n, "corrected_p": 0.5},) * 30}


def train(*, rates=(0.0, 0.6), loss=True, held_out=True, kind="train", **config):
    steps = range(len(rates))
    log = {"step": steps, "tokens": [64 * one for one in steps], "loss": 3.0 if loss else NAN}
    log |= {"eval_loss": 3.1} if held_out else {}
    at = [{"step": step, "tokens": 64 * step, "position": NAN, "unit": "share"} for step in steps]
    watch = [
        one | {"measure": measure, "layer": layer, "threshold": threshold, "value": rate}
        for one, rate in zip(at, rates, strict=True)
        for measure, layer, threshold in (
            ("sink_rate", NAN, 0.3),
            ("sink_mass", 0, NAN),
            ("uniform_mass", NAN, NAN),
        )
    ]
    columns = ["step", "tokens", "position", "unit", "measure", "layer", "threshold", "value"]
    watch = pd.DataFrame(watch, columns=columns)
    config = {"attention": "softmax", "value_norm": "none", "checkpoints": "FOLDER"} | config
    return page(kind, config=config, log=log if kind == "train" else None, watch=watch)


def watch(**options):
    return train(kind="watch", **options)


def compared(*, low=0.1, high=0.3, mean=0.2, n=5):
    return page(
        "compare", config={"group_by": ["lr"], "runs": {"BASE": {}, "OTHER": {}}, "baseline": "BASE"},
        differences=[{"variant": "OTHER", "curve": "evaluation", "mean": mean, "low": low, "high": high, "n": n}],
    )  # fmt: skip


FINALS = grid(variant=["BASE", "OTHER"], seed=[0, 1, 2]).assign(
    curve="evaluation", loss=3.0, tokens=640.0
)
FINALS = FINALS.assign(reached=320.0, baseline_reached=640.0, acceleration=2.0)


def ahead(*, mean=-0.2, low=-0.3, high=-0.1, n=5, excludes_zero=True):
    one = {"mean": mean, "low": low, "high": high, "n": n, "excludes_zero": excludes_zero}
    one = SimpleNamespace(**one, t_p=0.01, flip_p=0.1, flip_smallest=0.06)
    return compare._difference_sentence("OTHER", one, differs=excludes_zero)


def reaching(*, reached=(320.0, 320.0, 320.0), ratio=2.0, decided=True):
    ratios = [ratio if one == one else NAN for one in reached]
    finals = FINALS.assign(reached=[*reached, *reached], acceleration=[*ratios, *ratios])
    return compare._speed_up_sentence("OTHER", "evaluation", finals, decided=decided)


def opening(*, group_by=("lr",)):
    runs = {name: {0: None, 1: None} for name in ("BASE", "OTHER")}
    return compare._opening_sentence(
        compare.Variants(group_by=group_by, runs=runs, notes=()), FINALS
    )


def sinks(*, tokens=64, before=0):
    born = Birth(
        threshold=0.3, step=1, tokens=tokens, before=before, rate=0.5, mass=0.6, layer=2, uniform=0.1,
        last=640, others=(),
    )  # fmt: skip
    return compare._sink_sentences("OTHER", [born])


def disparity(*, measured=("dominance_ratio", "effective_rank")):
    runs = {name: {0: None} for name in ("BASE", "OTHER") if measured}
    table = grid(measure=measured, variant=["BASE", "OTHER"]).assign(mean=9.0)
    return " ".join(
        compare._dominance_and_rank_sentences(
            compare.Variants(group_by=("lr",), runs=runs, notes=()), table
        )
    )


def notes(*, seeds=1, watched=True, texts="aa", attention="gate_headwise"):
    with tempfile.TemporaryDirectory() as folder:
        for variant, text in zip(("softmax", *attention.split()), texts, strict=True):
            masses = {"masses": [0.0, 0.2], "text": text} if watched else {}
            for seed in range(seeds):
                write_run(
                    Path(folder) / f"{variant}{seed}",
                    [3.0, 2.0],
                    seed=seed,
                    attention=variant,
                    **masses,
                )
        found = compare.compare(sorted(Path(folder).iterdir()))
    return ". ".join(found.notes).replace(f"{folder}/softmax0", "RUN")


def monitor(*, alarms=1, rule="sink_born", rate=True, start=0.01, end=0.02):
    values = {"mass_first": 0.5, "rate_strongest": 0.5, "strongest_position": 3.0} | (
        {"rate_first": end} if rate else {}
    )
    readings = [
        {"step": 8, "key": key, "layer": NAN, "value": value, "unit": ""}
        for key, value in values.items()
    ]
    readings += [
        {**one, "step": 4, "value": start} for one in readings if one["key"] == "rate_first"
    ]
    told = {"step": range(alarms), "rule": rule, "position": 3, "sentence": "ALARM"}
    return page("monitor", monitor=readings, alarms=told)


MEASURED = (
    "argmax_top_ratio", "argmax_covering", "argmin_top_ratio", "inter_floor", "inter_excess", "intra_excess",
    "discrepancy",
)  # fmt: skip


def surveyed(models, *, step=NAN, value=5.0):
    rows = grid(seed=range(len(models)), measure=MEASURED)
    names = [models[seed] for seed in rows["seed"]]
    rows = rows.assign(
        model=[f"{name} seed {seed}" for name, seed in zip(names, rows["seed"], strict=True)]
    )
    rows = rows.assign(variant=names, step=step, value=value, low=value, high=value)
    return rows.assign(null=1.0, null_high=2.0, unit="")


def preference(models=("MODEL",), *, value=5.0):
    return page("preference", summary=surveyed(models, value=value))


def contraction(models=("MODEL",), *, low=0.1, step=NAN, seeds=(0, 1), cosine=0.2):
    variants = grid(variant=models if step != step else [], measure=MEASURED).assign(
        n=3, mean=0.2, low=low, high=0.3
    )
    variants = variants.assign(difference=NAN, difference_low=NAN, difference_high=NAN)
    pairs = [{"a": "A", "b": "B", "stage": "last", "cosine": cosine, "chance": 0.05}]
    return page(
        "contraction", summary=surveyed(models, step=step), variants=variants, agreement=pairs,
        models={"model": ["A", "B"], "variant": "MODEL", "seed": seeds},
    )  # fmt: skip


def fingerprint(verdicts=(SAME,), *, shared="", **config):
    rows = [
        {"a": f"{shared}A{at}", "b": f"{shared}B{at}", "verdict": verdict, "why": "WHY", "tau_bar": 0.5, "shared": 90,
         "expected": 9.0}
        for at, verdict in enumerate(verdicts)
    ]  # fmt: skip
    return page("fingerprint", config=config, pairs=rows)


FIVE = tuple(f"MODEL,{one}" for one in "ABCDE")
NONE_BY_CHANCE = {"changes": (NO_CHANGE, NO_CHANGE)}
TWO_METRICS = {"metrics": ("METRIC", "OTHER")}
PLATEAUS = [[0.9, 0.9, 0.1], [0.0, 0.9, 0.9]]
SMALL = {
    "effect": 0.005,
    "effect_in_sds": 0.005,
    "ci_low": 0.001,
    "ci_high": 0.006,
    "over_low": 0.001,
    "over_high": 0.006,
}
NEVER = (NAN, NAN, NAN)
TWO = {"models": ("MODEL,A", "MODEL,B")}
CASES = {
    "tokens": [
        (tokens, {}, {"sinks": (0, 0, 0)}, ["counted"], ["none"]),
        (tokens, {}, {"sinks": (4, 0, 0)}, [], ["all first"]),
        (tokens, {}, {"gap": False}, ["gap"], ["no gap"]),
        (tokens, {"by": "norm"}, {"by": "norm", "gap": False}, ["gap in norms"], []),
        (tokens, {}, {"given": 3.0}, [], ["given"]),
        (tokens, {}, {"dimensions": ("sink token",)}, ["residual"], ["no residual"]),
        (tokens, {}, {"dimensions": ("residual",)}, ["dimensions"], []),
    ],
    "card": [
        (card_of, {}, {"found": False}, ["title", "keep", "cache"], ["no sink"]),
        (card_of, {}, {"found": False, "dimensions": ()}, [], ["title: none"]),
        (card_of, {"found": False, "to_no_key": 0.3}, {"found": False}, ["logits"], []),
        (card_of, {"found": False, "rate": None}, {"found": False}, ["unknown"], []),
        (card_of, {"found": False, "tokens": [STOP]}, {"found": False}, ["sink tokens"], []),
        (card_of, {}, {"zeroed": 0.006}, ["dimension"], ["idle dimension"]),
        (card_of, {}, {"needed": False}, ["BOS"], ["no BOS"]),
        (card_of, {}, {"written": True}, [], ["files"]),
    ],
    "diff": [
        (diff, {}, {"low": NAN}, ["title"], []),
        (diff, {}, {"loss": False}, [], ["title: same"]),
        (diff, {}, {"within": False}, ["within"], ["not within"]),
        (diff, {}, {"changed": False}, ["others"], ["nothing else", "same sink"]),
        (diff, {"changed": False, "n": 1}, {"changed": False}, ["one sequence"], []),
        (diff, {}, {"same": True}, [], ["same weights"]),
        (diff, {}, {"tensors": pd.DataFrame({"tensor": ["TENSOR"], "change": 0.3})}, [], ["weights"]),
    ],
    "quantise": [
        (quantised, {}, {"verdict": "nothing to keep"}, [], ["nothing to keep"]),
        (quantised, {}, {"verdict": "no small set"}, [], ["no small set"]),
        (quantised, {}, {"sink_tokens": 0.0}, ["keep"], []),
        (quantised, {}, {"closed_share": 1.05}, [], ["all of it"]),
        (quantised, {}, {"channels_alone": (0.75, 0.7, 0.8)}, [], ["channels alone"]),
        (quantised, {}, {"controls": 0}, ["random"], ["no random"]),
        (quantised, {}, {"verdict": "goal missed"}, [], ["missed"]),
        (quantised, MISSED | REACHED, MISSED, ["not chosen"], []),
        (quantised, {}, {"kept_channels": {"resid_post": {}}}, ["inputs"], ["other sites"]),
        (quantised, {"cache": "mxfp4"}, {}, ["rounded too"], []),
        (quantised, NO_SET, NO_SET | {"closed_share": 0.8}, ["no set"], []),
        (quantised, {"halves_with_sinks": ["first"]}, {}, ["one half"], []),
    ],
    "patch": [
        (patch, {}, {"effects": ()}, ["title"], []),
        (patch, {}, {"effects": (-9.0, -8.5, 1.0)}, ["alike"], []),
        (carried, {"values": PLATEAUS}, {"values": [[0.9, 0.9, 0.1], [0.0, 0.9, 0.1]]}, ["carried"], []),
        (patch, {}, {"config": {"clean": ["CLEAN"], "corrupted": ["CORRUPTED"]}}, [], ["prompts"]),
        (patch, {}, {"differences": {"position": [3], "clean": "A", "corrupted": "B"}}, [], ["changed"]),
        (patch, {}, {"way": NAN}, ["largest"], []),
        (patch, {}, {"way": 2.1}, [], ["far"]),
        (patch, {}, {"config": {"direction": "noising"}}, ["patched"], []),
        (patch, {}, {"effects": (-9.0, -8.9)}, ["same"], []),
        (patch, {"ci_low": -1.0}, {"ci_low": 0.5}, ["title: none"], []),
        (patch, {}, {"effects": (1.0, 1.0)}, [], ["title: unchanged"]),
        (patch, {"effects": (1.0,) * 21, "ci_low": 0.5}, {"effects": (1.0,) * 20, "ci_low": 0.5}, ["chance"], []),
    ],
    "sweep": [
        (sweep, {}, NONE_BY_CHANCE, ["title"], ["title: none"]),
        (sweep, {}, {"changes": (NO_CHANGE, {})}, [], ["title: largest"]),
        (sweep, {"changes": ({},)}, {}, ["title: one"], []),
        (sweep, few_of(8), few_of(80), ["title: few", "needed"], []),
        (sweep, {}, {"changes": ({"baseline": NAN},) * 2}, ["baseline"], []),
        (sweep, {}, {"changes": ({"control_effect": NAN},) * 2}, ["random"], []),
        (sweep, {}, {"changes": ({}, NO_CHANGE)}, ["next"], []),
        (sweep, {}, {"changes": ({}, SMALL)}, [], ["small"]),
        (sweep, {}, {"changes": ({"control_effect": NAN},)}, ["meaning"], []),
        (sweep, {}, {"changes": ({}, NO_CONTROL)}, [], ["hollow"]),
        (sweep, {"changes": ({},) * 21}, {"changes": ({},) * 20}, ["chance"], []),
        (sweep, {}, TWO_METRICS, [], ["other metric"]),
        (sweep, NONE_BY_CHANCE | TWO_METRICS, TWO_METRICS, ["other: none"], []),
        (sweep, {}, {"changes": ({}, {"changed": False})}, [], ["idle"]),
        (sweep, {"changes": ({}, {"n": 4})}, {"changes": ({}, {"n": 5})}, ["few"], []),
        (sweep, {}, {"changes": ({}, {"error": "WHY"})}, [], ["failed"]),
    ],
    "train": [
        (train, {}, {"value_norm": "rmsnorm"}, ["title"], ["title: norm"]),
        (train, {}, {"rates": (0.6, 0.04)}, ["end"], ["end: none", "no sink"]),
        (train, {}, {"held_out": False}, ["loss"], []),
        (train, {}, {"loss": False, "held_out": False}, [], ["no loss"]),
        (train, {}, {"rates": (0.05, 0.6)}, ["born"], ["from the first"]),
        (train, {}, {"rates": ()}, [], ["not measured"]),
    ],
    "watch": [
        (watch, {}, {"rates": (0.6, 0.04)}, ["title"], []),
        (watch, {}, {"rates": ()}, [], ["title: watched"]),
    ],
    "compare": [
        (compared, {}, {"mean": -0.2, "low": -0.3, "high": -0.1}, ["title: behind"], ["title: ahead"]),
        (compared, {}, {"low": -0.1}, [], ["title: untold"]),
        (compared, {"n": 2}, {"n": 3}, ["title: few"], []),
        (compared, {}, {"low": NAN, "high": NAN, "n": 1}, [], ["title: one seed"]),
        (opening, {}, {"group_by": ("lr", "data_seed")}, ["opening"], []),
        (ahead, {}, {"n": 1}, ["ends"], ["one seed"]),
        (ahead, {"n": 2}, {"n": 3}, ["few"], []),
        (ahead, {}, {"excludes_zero": False}, [], ["untold"]),
        (ahead, {}, {"mean": 0.2}, [], ["behind"]),
        (reaching, {}, {"reached": NEVER}, [], ["never"]),
        (reaching, {}, {"reached": (320.0, NAN, NAN)}, [], ["in some"]),
        (reaching, {}, {"reached": (0.0, 320.0, 320.0)}, [], ["begins there"]),
        (reaching, {}, {"ratio": 0.5}, ["sooner"], ["later"]),
        (reaching, {}, {"ratio": 1.0}, [], ["same time"]),
        (reaching, {"decided": False}, {"decided": False, "reached": NEVER}, ["perhaps"], []),
        (reaching, {"decided": False, "reached": NEVER}, {"decided": False}, ["none reaches"], []),
        (sinks, {}, {"tokens": None, "before": None}, ["sink"], ["no sink"]),
        (sinks, {"before": None}, {}, ["sink: from the first"], []),
        (disparity, {}, {"measured": ()}, ["disparity"], []),
        (notes, {}, {"seeds": 2}, ["note: one seed"], ["note: two seeds"]),
        (notes, {}, {"watched": False}, [], ["note: not watched"]),
        (notes, {}, {"texts": "ab"}, [], ["note: other text"]),
        (notes, {}, {"attention": "sigmoid"}, [], ["note: sigmoid"]),
        (notes, {"seeds": 3}, {"seeds": 3, "attention": "key_bias off_by_one", "texts": "aaa"}, [], ["note: several"]),
    ],
    "monitor": [
        (monitor, {}, {"rule": "outlier_grows"}, ["title"], []),
        (monitor, {}, {"alarms": 0}, ["alarm"], ["title: none", "no alarm"]),
        (monitor, {"alarms": 8}, {"alarms": 6}, ["more"], []),
        (monitor, {}, {"rate": False}, ["last"], ["last: short"]),
        (monitor, {"alarms": 0, "rate": False}, {"alarms": 0}, ["title: short"], []),
        (monitor, {"alarms": 0, "start": 0.5, "end": 0.5}, {"alarms": 0, "end": 0.5}, ["title: before"], []),
        (monitor, {"alarms": 0, "start": 0.5}, {"alarms": 0}, ["title: first"], []),
        (monitor, {"alarms": 0, "end": 0.5}, {"alarms": 0}, ["title: end"], []),
    ],
    "preference": [
        (preference, {}, {"value": 1.5}, ["title"], ["title: chance"]),
        (preference, {}, TWO, [], ["title: several"]),
        (preference, TWO, {"models": ("A", "B")}, ["all"], []),
        (preference, {}, {"models": ("OTHER",)}, ["model"], []),
        (preference, {"models": FIVE}, {"models": FIVE[:4]}, ["more"], []),
    ],
    "contraction": [
        (contraction, {}, {"low": -0.1}, ["title"], ["title: not shown"]),
        (contraction, {}, TWO, [], ["title: most"]),
        (contraction, TWO | {"low": -0.1}, TWO, ["title: none"], []),
        (contraction, {}, {"step": 4.0}, ["model"], ["title: training", "course"]),
        (contraction, {}, {"seeds": (0, 0)}, ["directions"], []),
        (contraction, {}, {"cosine": 0.02}, [], []),
        (contraction, TWO, {"models": ("A", "B")}, ["all"], []),
        (contraction, {"models": FIVE}, {"models": FIVE[:4]}, ["more"], []),
    ],
    "fingerprint": [
        (fingerprint, {}, {"verdicts": (NOT_SHOWN,)}, ["title", "pair"], ["title: not shown", "pair: not shown"]),
        (fingerprint, {}, {"verdicts": (NOT_SHOWN,)}, [], ["may still"]),
        (fingerprint, {}, {"verdicts": (NO_ANSWER,)}, [], ["title: no answer", "pair: no answer"]),
        (fingerprint, {}, {"verdicts": (SAME, SAME)}, [], ["title: several"]),
        (fingerprint, {}, {"verdicts": (SAME,) * 30}, [], ["many"]),
        (fingerprint, {"verdicts": (NO_ANSWER,) * 30}, {"verdicts": (SAME,) * 30}, ["many: no answer"], []),
        (fingerprint, {}, {"shared": "MODEL, "}, [], ["all"]),
        (fingerprint, {}, {"decides": "analytical"}, ["errors"], []),
        (fingerprint, {}, {"alpha": 0.05}, [], []),
    ],
}  # fmt: skip
"""Kind -> rows: a page, two sets of its arguments, keys of what only the first makes it say, the second's."""


@pytest.mark.parametrize("kind", all_kinds())
def test_every_kind_has_its_table(kind):
    asked = [key for *_, first, second in CASES.get(kind, []) for key in (*first, *second)]
    assert kind in ("trace", "circuit") or sorted(asked) == sorted(keys(kind))


@pytest.mark.parametrize(
    ("say", "one", "other"), [row[:3] for rows in CASES.values() for row in rows]
)
def test_what_is_said_if_it_holds_is_not_said_else(say, one, other):
    assert without_numbers(say(**one)) != without_numbers(say(**other))

"""``quantise`` on a model whose sink sets the scale: it is found, judged on other text, and beaten by no random set."""

import types
from dataclasses import replace
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from sink_lens.activations.sink_mask import sink_mask
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, planted, tiny_tokenizer
from sink_lens.records import read_run
from sink_lens.report.html import page_content
from sink_lens.schema import LINEAR_INPUTS
from sink_lens.studies.config import CardConfig, QuantiseConfig
from sink_lens.studies.pages.quantise import show_quantise
from sink_lens.studies.quantise import (
    draw_ordinary_tokens,
    draw_other_channels,
    largest_channels,
    quantise,
)
from tests.tiny_families import TINY_FAMILIES, tiny

module = import_module("sink_lens.studies.quantise")


def speaking(*, sink=True, sharp=4.0, sequences=8, length=32):
    """A planted model and text that it has written itself, so that any damage raises its loss."""
    truth = planted(sink=sink)
    with torch.no_grad():
        truth.model.lm_head.weight.mul_(sharp)
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(3, 300, (sequences, 3), generator=generator)
    tokens = torch.cat([torch.full((sequences, 1), BOS_ID), first], dim=1)
    with torch.no_grad():
        while tokens.shape[1] < length:
            logits = truth.model(tokens).logits[:, -1]
            logits[:, :3] = -torch.inf  # no special token
            tokens = torch.cat(
                [tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1
            )
    lens = wrap(truth.model, tokenizer=tiny_tokenizer(adds_bos=True))
    return lens, from_tensor(tokens, tokenizer=lens.tokenizer), truth


STREAM = {"sites": ("resid_post",), "channels": (1, 2), "controls": 3, "progress": False}


def test_a_sink_that_sets_the_scale_of_the_stream_is_what_must_be_kept(tmp_path):
    lens, tokens, _ = speaking()
    study = quantise(lens, tokens=tokens, out=tmp_path / "run", **STREAM)
    row = study.tables["summary"].iloc[0]
    assert row["verdict"] == "keep"
    assert (row["sink_tokens"], row["channels"]) == (1.0, 0)
    assert row["cost_low"] > 0.5
    assert row["closed_low"] > 0.9 > 0.3 > row["random_most"]
    assert study.headline.startswith(
        "Keep the sink tokens (1 a sequence, at position 0) in 16 bit: int8_tensor costs"
    )
    assert row["left_nats"] == pytest.approx(row["kept_loss_nats"] - row["clean_loss_nats"])


def test_without_the_sink_there_is_nothing_to_keep_and_nothing_more_is_run(tmp_path):
    lens, tokens, _ = speaking(sink=False)
    study = quantise(
        lens, tokens=tokens, out=tmp_path / "run", **(STREAM | {"format": "int8_token"})
    )
    row = study.tables["summary"].iloc[0]
    assert row["verdict"] == "nothing to keep"
    assert study.headline.startswith("Nothing to keep: int8_token c")
    assert set(study.tables["conditions"]["kept"]) == {"clean", "all"}
    assert study.tables["conditions"]["closed_share"].isna().all()


def test_the_run_holds_every_condition_and_the_decision_names_the_channels(tmp_path):
    lens, tokens, _ = speaking()
    fields = {"format": "int4_tensor", "channels": [1, 4], "controls": 2, "progress": False}
    study = quantise(lens, tokens=tokens, out=tmp_path / "run", **fields)
    conditions = study.tables["conditions"]
    assert {"clean", "all", "tokens", "channels", "both", "random"} == set(conditions["kept"])
    judged = conditions[conditions["part"] == "judge"].set_index(["kept", "channels"]).sort_index()
    assert judged.loc[("clean", 0), "closed_share"].item() == 1.0
    assert judged.loc[("all", 0), "closed_share"].item() == 0.0
    found = study.decision
    assert found["channels"] > 0
    sinks = sink_mask(lens, tokens, by="norm").cpu()[:4]
    largest = module._largest_magnitudes(lens, tokens[:4], sinks=sinks, sites=list(LINEAR_INPUTS))
    assert found["kept_channels"] == largest_channels(
        largest[bool(found["sink_tokens"])], found["channels"]
    )
    kept = found["kept_channels"]
    rows = {
        (site, layer, one)
        for site, layers in kept.items()
        for layer, some in layers.items()
        for one in some
    }
    table = study.tables["channels"]
    assert set(table[["site", "layer", "channel"]].itertuples(index=False, name=None)) == rows
    named = {one for some in table["modules"] for one in some.split(" ")}
    linear = {name for name, one in lens.plain.named_modules() if isinstance(one, nn.Linear)}
    assert named == linear - {"lm_head"}
    assert table.groupby("site")["modules"].first()["attn_in"].split(" ") == [
        f"model.layers.0.self_attn.{one}_proj" for one in "qkv"
    ]
    shown = list(show_quantise(study))
    assert shown[1].loc[shown[1]["chosen"] == "chosen", "channels"].tolist() == [found["channels"]]
    assert "channels.csv" in shown[-1]
    assert str(len(rows)) in shown[-1]
    assert "Channels to keep" in {one.title for one in page_content(study.run).tables}
    assert read_run(tmp_path / "run").missing == []


@pytest.mark.parametrize("half", ["first", "second"])
def test_where_one_half_has_no_sink_token_sets_with_sink_tokens_are_not_tried(half):
    lens, tokens, _ = speaking(sequences=16, length=16, sharp=8.0)
    ids = tokens.tokens.clone()
    ids[8:, 0] = ids[8:, 5]
    ids = ids if half == "first" else ids.roll(8, 0)
    fields = STREAM | {"format": "int4_tensor", "controls": 1}
    study = quantise(lens, tokens=from_tensor(ids), **fields)
    assert f"Only the {half} half of the text has sink tokens" in study.headline
    assert set(study.tables["conditions"]["kept"]) == {"clean", "all", "channels", "random"}
    without = quantise(lens, tokens=from_tensor(ids), **(fields | {"channels": ()}))
    assert set(without.tables["conditions"]["kept"]) == {"clean", "all"}
    assert without.decision["verdict"] == "no small set"
    assert without.headline.startswith("No set was tried: int4_tensor costs")


def test_a_sequence_whose_loss_counts_nowhere_is_in_neither_half():
    lens, tokens, _ = speaking()
    ids = tokens.tokens
    labels = ids.clone()
    labels[4:6] = -100
    study = quantise(lens, tokens={"input_ids": ids, "labels": labels}, **STREAM)
    kept = quantise(lens, tokens=from_tensor(ids[[0, 1, 2, 3, 6, 7]]), **STREAM)
    pd.testing.assert_frame_equal(study.tables["conditions"], kept.tables["conditions"])
    assert study.tables["sinks"]["sequence"].tolist() == [0, 1, 2, 3, 6, 7]
    labels[2:] = -100
    with pytest.raises(InputError, match="2 of 8 sequences"):
        quantise(lens, tokens={"input_ids": ids, "labels": labels}, **STREAM)


def test_sets_are_judged_on_sequences_that_they_were_not_chosen_on(tmp_path, monkeypatch):
    lens, tokens, _ = speaking()
    parts = []

    def run(lens, part, *args, **rest):
        parts.append(part)
        return types.SimpleNamespace(loss=torch.linspace(1, 2, part.n_sequences) + len(parts) * 0.1)

    monkeypatch.setattr(module, "run_with", run)
    quantise(lens, tokens=tokens, out=tmp_path / "run", **STREAM)
    first, second = ({one.hash for one in some} for some in (parts[:3], parts[-3:]))
    assert len(first) == len(second) == 1
    assert first != second
    assert sum(part.n_sequences for part in (parts[0], parts[-1])) == 8


def test_the_smallest_set_that_reaches_the_goal_is_chosen_else_the_best():
    rows = [
        ("choose", "tokens", True, 0, 0.8),
        ("choose", "channels", False, 1, 0.5),
        ("choose", "both", True, 1, 0.93),
    ]
    rows += [("choose", "channels", False, 2, 0.99), ("judge", "tokens", True, 0, 1.0)]
    names = ["part", "kept", "sink_tokens", "channels", "closed_share"]
    rows = pd.DataFrame(rows, columns=names)
    rows = rows.assign(closed_low=rows["closed_share"] - 0.02).to_dict("records")
    for goal, expected in ((0.9, ("both", 1)), (0.92, ("channels", 2)), (0.995, ("channels", 2))):
        found = module._smallest_good_set(rows, goal=goal)
        assert (found["kept"], found["channels"]) == expected


@pytest.mark.parametrize("verdict", ["goal missed", "no small set"])
def test_sets_that_reach_the_goal_but_were_not_chosen_are_named(verdict):
    rows = [
        {
            "part": part,
            "kept": kept,
            "sink_tokens": kept in ("tokens", "both"),
            "channels": channels,
        }
        | dict.fromkeys(("loss_nats", "change_nats", "change_low", "change_high"), 1.0)
        | {"closed_share": share, "closed_low": share - 0.1, "closed_high": share + 0.1, "n": 4}
        | {"chosen": (kept, channels) == ("both", 8)}
        for part in ("choose", "judge")
        for kept, channels, share in (
            *(("clean", 0, 1.0), ("all", 0, 0.0), ("tokens", 0, 0.2), ("channels", 8, 0.96)),
            *(("both", 2, 0.91), ("both", 8, 0.89)),
        )
    ]
    if verdict == "no small set":
        rows.append(rows[-1] | {"kept": "random", "closed_share": 0.8})
    lens, tokens, _ = speaking()
    sinks = {"choose": tokens.valid[:4], "judge": tokens.valid[4:]}
    found = module._make_json_answer(
        lens, QuantiseConfig(), rows, rows[5], largest={True: {}, False: {}}, sinks=sinks
    )
    assert found["verdict"] == verdict
    reached = [(one["sink_tokens"], one["channels"]) for one in found["not_chosen"]]
    assert reached == [(False, 8), (True, 2)]
    assert "8 channels (96%)" in found["sentence"]
    assert "sink tokens and 2 channels (91%)" in found["sentence"]


def test_the_sentence_names_what_was_rounded_and_the_sites_whose_channels_are_kept(
    tmp_path, monkeypatch
):
    lens, tokens, _ = speaking()
    monkeypatch.setattr(  # the two largest channels
        module, "_smallest_good_set", lambda rows, goal: next(r for r in rows if r["channels"] == 2)
    )
    study = quantise(lens, tokens=tokens, out=tmp_path / "run", **(STREAM | {"controls": 0}))
    assert "the 2 largest channels of each layer's residual stream" in study.headline
    assert not any("linear layer" in str(shown) for shown in show_quantise(study))
    (channels,) = (one for one in page_content(study.run).tables if one.title == "Channels to keep")
    assert "linear layer" not in str(channels)
    for sites, kept in (
        (("z",), "each layer's head output (z)"),
        (("v", "k"), "each layer's values and keys"),
        (LINEAR_INPUTS, "each linear layer's input"),
        ((*LINEAR_INPUTS, "k", "v"), "each linear layer's input and each layer's keys and values"),
        (LINEAR_INPUTS[:2], "each layer's attention input and head output (z)"),
    ):
        found = study.decision | {"kept_channels": dict.fromkeys(sites)}
        assert f"channels of {kept} " in module._advice_sentence(found)
    found = study.decision | {"cache": "int4_token", "weights": "mxfp4"}
    rounded = "int8_tensor, with the KV cache in int4_token and the weights in mxfp4, costs"
    assert rounded in module._advice_sentence(found)
    found = study.decision | {"channels_alone": (0.97, 0.9, 0.99), "closed_low": 0.9}
    assert "The channels alone close 97% [90%, 99%]" in module._advice_sentence(found)


def test_the_spread_over_inputs_is_in_the_interval():
    clean = torch.full((1, 8), 2.0)
    worst, near = torch.full((3, 8), 3.0), torch.tensor([2.0, 2.1, 2.2])[:, None].expand(3, 8)
    half = module._TextHalf(part="judge", clean=clean, worst=worst, best=clean, seed=0)
    row = half.condition_row("tokens", near)
    assert row["closed_share"] == pytest.approx(0.9)
    # The sequences do not differ, and 0.1 is the standard deviation of 1, 0.9 and 0.8.
    assert (row["closed_low"], row["change_high"]) == (
        pytest.approx(0.9 - 0.196),
        pytest.approx(0.1 + 0.196),
    )


def test_the_share_of_few_sequences_has_students_interval():
    clean, worst = torch.full((1, 4), 2.0), torch.full((3, 4), 3.0)
    half = module._TextHalf(part="judge", clean=clean, worst=worst, best=clean, seed=0)
    row = half.condition_row("tokens", torch.tensor([[2.0, 2.2, 2.1, 2.3]]).expand(3, 4))
    # Shares 1, 0.8, 0.9, 0.7: standard error 0.0645, times 3.182, the quantile at 3 degrees of freedom.
    assert row["closed_share"] == pytest.approx(0.85)
    assert row["closed_low"] == pytest.approx(0.85 - 0.2054, abs=1e-3)


def test_the_title_is_what_held_on_the_other_half_and_the_row_is_marked(tmp_path, monkeypatch):
    lens, tokens, _ = speaking()
    study = quantise(lens, tokens=tokens, out=tmp_path / "run", **STREAM)
    marked = study.tables["conditions"].query("chosen")
    assert set(zip(marked["part"], marked["kept"], strict=True)) == {
        ("choose", "tokens"),
        ("judge", "tokens"),
    }
    monkeypatch.setattr(
        module, "_smallest_good_set", lambda rows, goal: rows[2] | {"closed_share": 1.0}
    )
    missed = quantise(lens, tokens=tokens, out=tmp_path / "missed", goal=1.0, **STREAM)
    assert missed.decision["verdict"] in ("goal missed", "no small set")
    assert not missed.headline.startswith("Keep")


def test_random_tokens_are_as_many_others():
    sinks = torch.zeros(3, 10, dtype=torch.bool)
    sinks[0, 0], sinks[1, [0, 4]] = True, True
    valid = torch.arange(10)[None] < torch.tensor([[10], [4], [10]])
    generator = torch.Generator().manual_seed(0)
    draws = [
        draw_ordinary_tokens(sinks & valid, valid=valid, generator=generator) for _ in range(20)
    ]
    for drawn in draws:
        assert drawn.sum(1).tolist() == [1, 1, 0]
        assert not (drawn & sinks).any()
        assert not (drawn & ~valid).any()
    assert torch.stack(draws).any(0)[0, 1:].sum() > 5


def test_random_channels_are_as_many_others():
    sizes = {("z", 0): torch.zeros(6), ("z", 1): torch.zeros(6)}
    generator = torch.Generator().manual_seed(0)
    found = draw_other_channels(sizes, taken={"z": {0: [1, 2], 1: [5]}}, n=3, generator=generator)
    assert set(found["z"][0]) <= {0, 3, 4, 5}
    assert len(set(found["z"][0])) == len(set(found["z"][1])) == 3
    assert 5 not in found["z"][1]


def test_the_largest_channels_are_those_of_the_raw_model():
    lens, tokens, truth = speaking()
    sinks = sink_mask(lens, tokens, by="norm").cpu()
    found = module._largest_magnitudes(lens, tokens, sinks=sinks, sites=["z", "resid_post"])
    kept = {}
    hook = lens.layer(2).self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: kept.update(z=args[0])
    )
    with torch.no_grad():
        lens.plain(tokens.tokens)
    hook.remove()
    for among, x in ((found[False], kept["z"]), (found[True], kept["z"][:, 1:])):
        assert among["z", 2].tolist() == pytest.approx(x.abs().amax((0, 1)).tolist(), rel=1e-5)
    for among in found.values():
        chosen = largest_channels(among, 2)
        assert chosen["z"][2] == among["z", 2].topk(2).indices.tolist()
    top = largest_channels(found[False], 1)["resid_post"]
    assert all(
        top[layer] == [truth.outlier_dimension] for layer in range(truth.layer, lens.n_layers)
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_can_be_asked(family, tmp_path):
    lens = wrap(tiny(family))
    tokens = torch.randint(3, 300, (4, 16), generator=torch.Generator().manual_seed(0))
    fields = {
        "cache": "int4_token",
        "channels": [2],
        "controls": 1,
        "format": "fp8_e4m3_token",
        "progress": False,
    }
    study = quantise(lens, tokens=from_tensor(tokens), out=tmp_path / "run", **fields)
    sites = [
        "attn_in",
        "z",
        "mlp_in",
        *(["neurons"] if lens.family.experts is None else []),
        "k",
        "v",
    ]
    assert list(module._formats_by_site(lens, QuantiseConfig(cache="int4_token"))) == sites
    assert study.tables["summary"].iloc[0]["clean_loss_nats"] > 0


def test_rounded_weights_are_no_part_of_the_gap_that_is_closed(tmp_path):
    lens, tokens, _ = speaking()
    study = quantise(lens, tokens=tokens, out=tmp_path / "run", weights="int4_token", **STREAM)
    judged = study.tables["conditions"].query("part == 'judge'").set_index("kept")
    assert judged.loc["weights", "loss_nats"] > judged.loc["clean", "loss_nats"]
    assert judged.loc["weights", "closed_share"] == pytest.approx(1)


def test_what_cannot_be_asked_is_refused(tmp_path):
    lens, tokens, _ = speaking(length=8)
    for fields, said in (
        ({"format": "int2_tensor"}, "format is 'int2_tensor'; need one of int8_tensor"),
        ({"channels": (0,)}, r"channels are \[0\]; need numbers from 1 on"),
        ({"goal": 1.5}, "goal is 1.5"),
        ({"sites": ("k",), "cache": "int8_token"}, "k or v is named as a site"),
        ({"sites": ("z", "z")}, "a site is named twice"),
    ):
        with pytest.raises(InputError, match=said):
            QuantiseConfig(**fields)
    with pytest.raises(InputError, match="has no site 'stream'"):
        quantise(lens, tokens=tokens, sites=["stream"], out=tmp_path / "run", progress=False)
    with pytest.raises(InputError, match="CardConfig"):
        quantise(lens, tokens=tokens, config=CardConfig(), out=tmp_path / "run")
    quantised = replace(lens, name="it", notes=("the weights were read from a.gguf",))
    with pytest.raises(InputError, match="the weights of it come from a quantised file"):
        quantise(
            quantised, tokens=tokens, weights="int8_token", out=tmp_path / "run", progress=False
        )


def test_more_channels_than_random_sets_can_have_others_are_refused():
    lens, tokens, _ = speaking()
    width = lens.d_model
    with pytest.raises(
        InputError, match=f"resid_post of layer 0 has {width} in all; need at most {width // 2}"
    ):
        quantise(lens, tokens=tokens, **(STREAM | {"channels": (1, width // 2 + 1)}))
    with pytest.raises(InputError, match=f"need at most {width} to keep$"):
        quantise(lens, tokens=tokens, **(STREAM | {"channels": (width + 1,), "controls": 0}))


def test_the_inputs_of_a_16_bit_model_differ_too(monkeypatch):
    lens, tokens, truth = speaking()
    lens = wrap(truth.model.to(torch.bfloat16), tokenizer=lens.tokenizer)
    seen = []
    monkeypatch.setattr(
        module, "_widened", lambda found, *, by_input: seen.append(by_input) or found
    )
    quantise(lens, tokens=tokens, **(STREAM | {"channels": (1,), "controls": 0}))
    assert {len(one) for one in seen} == {1, 3}
    assert max(np.ptp(one) for one in seen) > 0

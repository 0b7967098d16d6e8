"""Cards: what they say of a planted model, the same bytes twice, their schema, and one for every family."""

import copy
import json
import math
from importlib import import_module

import pytest
import torch
from lenses import speaking

from sink_lens.activations import forward, record
from sink_lens.activations.sink_mask import sink_mask
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import from_tensor, from_text
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, planted, tiny_tokenizer
from sink_lens.records import read_run
from sink_lens.report.html import page_title
from sink_lens.studies import card
from sink_lens.studies.card_table import read_table_row
from sink_lens.studies.observed import ObservedModel
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny

model_card = import_module("sink_lens.studies.card")

SIZE = {"sequences": 4, "length": 24, "progress": False}
FIELDS = [
    *(
        "schema",
        "sentence",
        "sink_lens",
        "model",
        "measured_on",
        "sink",
        "cache",
        "bos",
        "outlier_dimensions",
    ),
    *(
        "residual_sinks",
        "growth",
        "writers",
        "super_weights",
        "largest_activations",
        "loss",
        "chain",
    ),
]


@pytest.fixture(scope="module")
def lens():
    return wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True), name="planted")


@pytest.fixture(scope="module")
def study(lens, tmp_path_factory):
    return card(lens, out=tmp_path_factory.mktemp("card") / "run", **SIZE)


def test_a_card_has_what_was_planted(study):
    truth, found = planted(), study.decision
    assert found["sink"]["positions"] == [0]
    assert [row["id"] for row in found["sink"]["tokens"]] == [truth.bos_id]
    assert found["cache"] == {"keep": [0], "sink_tokens": 4, "sink_tokens_kept": 4}
    assert ("A KV cache must keep", "position 0 (4 of 4 sink tokens)") in model_card.card_text_rows(
        found
    )
    assert found["sink"]["rate"]["value"] == pytest.approx(0.4)
    (outlier,), weight = found["outlier_dimensions"], found["super_weights"][0]
    assert (outlier["dimension"], outlier["layers"]) == (
        truth.outlier_dimension,
        f"{truth.layer}-4",
    )
    assert found["writers"][0]["neurons"][0][0] == truth.neuron
    assert (weight["row"], weight["column"]) == (truth.outlier_dimension, truth.neuron)
    assert (found["chain"], found["schema"]) == ({"asked": False}, "sink_lens.card/1")
    assert study.headline.startswith(
        "Keep the token at position 0: it is the sink of 40% [40%, 40%] of heads; "
    )
    assert read_run(study.folder).missing == []


def test_the_same_input_gives_the_same_bytes_without_a_path_or_a_time(lens, study, tmp_path):
    again = card(lens, out=tmp_path / "elsewhere", **SIZE)
    for name in ("card.json", "card.md"):
        first, second = ((one.folder / name).read_bytes() for one in (study, again))
        assert first == second
        assert not [
            one for one in (b"/tmp", str(tmp_path.parent).encode(), b"2026-") if one in first
        ]
    assert json.loads((study.folder / "card.json").read_text()) == study.decision


def test_the_markdown_is_a_table_that_no_token_breaks(study):
    text = (study.folder / "card.md").read_text()
    assert text.startswith("## Attention sinks\n\nKeep the token at position 0")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in lines)
    assert "&lt;s> (1, 4 of 4)" in text


def test_a_card_of_another_models_trace_is_refused(lens, study, tmp_path):
    with pytest.raises(InputError, match="holds a run of card; need one of trace"):
        card(lens, trace=str(study.folder), out=tmp_path / "run", **SIZE)


def test_a_dimension_that_only_the_embedding_has_is_no_outlier(tmp_path):
    """As in ``trace``; nothing writes it in a layer, and no layer's could be set to zero."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[BOS_ID, 9] = 100
        model.model.layers[0].mlp.down_proj.weight *= 1000
    lens = wrap(model, tokenizer=tiny_tokenizer(adds_bos=True))
    tokens = from_text(bundled_text(), lens.tokenizer, sequences=4, length=24)
    assert ObservedModel(lens, tokens).location.outliers == {-1: (9,)}
    found = card(lens, out=tmp_path / "run", **SIZE).decision
    assert (found["outlier_dimensions"], list(found["loss"])) == ([], ["clean"])


def test_a_short_text_beside_long_ones_has_the_sinks_that_sink_mask_finds(lens):
    tokens = torch.randint(3, 300, (8, 250), generator=torch.Generator().manual_seed(0))
    tokens[:, [0, 9]] = BOS_ID
    batch = from_tensor(tokens, lengths=torch.tensor([250] * 4 + [24] * 4))
    marked = ObservedModel(lens, batch).marked_tokens
    assert marked[:, [0, 9]].all()
    assert torch.equal(marked, sink_mask(lens, batch))


def test_sigmoid_attention_has_no_sink_logits(tmp_path):
    """Its rows need not sum to 1: what they lack goes to no logit."""
    found = card(speaking("headnorm_sigmoid"), out=tmp_path / "run", **SIZE).decision
    assert "sink logits" not in found["sentence"]
    assert found["sink"]["to_no_key"]["value"] is None


def test_one_sequence_is_judged_by_its_numbers(lens, tmp_path):
    said = card(lens, out=tmp_path / "run", sequences=1, length=24, progress=False).headline
    assert "nothing hangs on" not in said
    assert "; zeroing its outlier dimension " in said
    assert "16 bit" not in said


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *MORE_FAMILIES])
def test_every_family_has_a_card(family, tmp_path):
    lens = speaking(family)
    made = card(lens, out=tmp_path / "card", **SIZE)
    assert list(made.decision) == FIELDS
    assert len(made.tables["layers"]) == lens.n_layers
    assert (
        read_table_row(read_run(tmp_path / "card"))["loss"]
        == made.decision["loss"]["clean"]["value"]
    )


def test_the_expert_that_writes_an_outlier_is_found():
    model = tiny("gpt_oss", seed=7)
    mlp, tokenizer = model.model.layers[1].mlp, tiny_tokenizer(adds_bos=True)
    tokens = from_text(bundled_text(), tokenizer, sequences=4, length=16)
    inputs = []
    with (
        torch.no_grad(),
        mlp.register_forward_pre_hook(lambda module, given: inputs.append(given[0])),
    ):
        model.model.embed_tokens.weight[BOS_ID] *= 8
        model(tokens.tokens)
        of_bos = torch.nn.functional.normalize(inputs[0][:, 0].mean(0), dim=0)
        along = inputs[0] @ of_bos
        mlp.router.weight.zero_()
        mlp.router.bias.zero_()
        mlp.router.weight[0] = (
            40 * of_bos
        )  # BOS alone goes to expert 0, which alone writes dimension 7
        mlp.router.bias[0] = -20 * (along[:, 0].min() + along[:, 1:].max())
        mlp.experts.down_proj *= 0.05
        mlp.experts.down_proj[..., 7] = 0
        mlp.experts.down_proj[0, :, 7] = 30.0
    lens = wrap(model, tokenizer=tokenizer)
    (row,) = ObservedModel(lens, tokens).outlier_writers
    assert (row["layer"], row["dimension"]) == (1, 7)
    assert [expert for expert, _ in row["experts"]] == [0]
    assert sum(share for _, share in row["experts"]) == pytest.approx(row["mlp_out"], abs=0.01)
    assert {neuron // lens.d_expert for neuron, _ in row["neurons"]} == {0}


def test_what_granite_multiplies_by_is_in_the_shares_of_neurons():
    model, tokenizer = tiny("granite"), tiny_tokenizer(adds_bos=True)
    mlp, read, written = model.model.layers[1].mlp, 5, 7
    with torch.no_grad():
        model.model.embed_tokens.weight[:, [read, written]] = 0
        model.model.embed_tokens.weight[BOS_ID, read] = 5
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight[[read, written]] = 0
        for neuron in range(5):  # each makes a fifth
            (
                mlp.gate_proj.weight[neuron],
                mlp.up_proj.weight[neuron],
                mlp.down_proj.weight[:, neuron],
            ) = 0, 0, 0
            mlp.gate_proj.weight[neuron, read] = mlp.up_proj.weight[neuron, read] = 5
            mlp.down_proj.weight[written, neuron] = 20
    tokens = from_text(bundled_text(), tokenizer, sequences=4, length=16)
    (row,) = [
        one
        for one in ObservedModel(wrap(model, tokenizer=tokenizer), tokens).outlier_writers
        if one["layer"] == 1
    ]
    assert row["dimension"] == written
    assert [neuron for neuron, _ in sorted(row["neurons"])] == list(range(5))
    assert [share for _, share in row["neurons"]] == pytest.approx([0.2] * 5, abs=0.01)


def test_uniform_attention_to_a_short_text_is_not_told_as_a_sink():
    lens = wrap(tiny("llama", initializer_range=0.001))
    for threshold, length in ((0.3, 9), (0.2, 16), (0.05, 110)):
        tokens = torch.randint(3, 300, (2, length))
        found = card(lens, tokens=tokens, threshold=threshold, progress=False)
        assert (found.decision["sink"]["found"], found.decision["cache"]["keep"]) == (False, None)
        assert "too short" in found.headline
    found = card(lens, tokens=torch.randint(3, 300, (2, 44)), threshold=0.1, progress=False)
    assert found.decision["sink"]["rate"]["value"] == 0


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (2.7, 2.6, 2.8, "zeroing its outlier dimension 7 costs"),
        (-2.7, -2.8, -2.6, "zeroing its outlier dimension 7 changes the loss by −2.7 nats"),
        (0.001, -0.003, 0.005, "nothing hangs on its outlier dimension 7"),
        (1.2, -0.2, 2.6, "whether anything hangs on its outlier dimension 7 is not shown"),
        (0.001, -0.3, 0.3, "whether anything hangs on its outlier dimension 7 is not shown"),
        (0.001, None, None, "whether anything hangs on its outlier dimension 7 is not shown"),
        (0.5, None, None, "zeroing its outlier dimension 7 costs"),
        (None, None, None, "whether anything hangs on its outlier dimension 7 is not shown"),
    ],
)
def test_nothing_hangs_on_a_dimension_only_where_the_whole_interval_says_so(
    value, low, high, said, study
):
    change = {"value": value, "low": low, "high": high, "n": 4}
    found = study.decision | {"outlier_dimensions": [{"dimension": 7}]}
    found["loss"] = {way: {"change": change} for way in ("zeroed", "mean_aligned")}
    assert f"; {said}" in model_card.card_sentence(found)


def test_a_card_of_tokens_without_a_label_has_no_loss_and_says_so(lens):
    ids = torch.randint(3, 300, (4, 24))
    ids[:, 0] = BOS_ID
    tokens = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    found = card(lens, tokens=tokens, progress=False).decision
    assert found["loss"]["clean"]["value"] is None
    assert found["bos"]["needed"] is None
    assert "is not shown: zeroing gives no loss" in found["sentence"]
    tokens["labels"] = ids.clone()
    tokens["labels"][0] = -100
    losses = card(lens, tokens=tokens, progress=False).decision["bos"]
    assert None not in (losses["loss_with_nats"], losses["loss_without_nats"])


def test_ids_that_begin_with_bos_are_told_so_and_rows_of_both_kinds_are_not_compared(lens):
    ids = torch.randint(3, 300, (4, 24), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = BOS_ID
    given = (ids, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, from_tensor(ids))
    known = card(lens, tokens=from_tensor(ids, tokenizer=lens.tokenizer), progress=False).decision
    for tokens in given:
        found = card(lens, tokens=tokens, progress=False).decision
        assert found["measured_on"]["begins_with_bos"]
        assert found["bos"] == known["bos"]
    ids[0, 0] = 7
    found = card(lens, tokens=ids, progress=False).decision
    assert not found["measured_on"]["begins_with_bos"]
    assert (found["bos"]["needed"], "begin with BOS, and others" in found["bos"]["why"]) == (
        None,
        True,
    )


def test_bos_is_not_said_to_be_needless_where_its_cost_is_not_known(lens, monkeypatch):
    ids = torch.randint(3, 300, (4, 24))
    ids[:, 0] = BOS_ID
    seen = ObservedModel(lens, from_tensor(ids, tokenizer=lens.tokenizer))
    assert seen.tokens.bos
    for changes, needed in (
        ([0.5, 0.6, 0.5, 0.4], True),
        ([-0.5, -0.6, -0.5, -0.4], False),
        ([0.001, 0.002, -0.001, 0.0], False),
        ([1.5, -1.4, 0.7, 0.1], None),
        ([0.001, math.nan, math.nan, math.nan], None),
        ([0.5, math.nan, math.nan, math.nan], True),
    ):
        without = seen.token_losses[:, 1:] + torch.tensor(changes)[:, None]
        monkeypatch.setattr(model_card, "_measure_token_losses", lambda *_, x=without: x)
        assert model_card._compare_bos_losses(seen)["needed"] is needed


def with_sink_behind(*, second=None):
    """Tokens whose sink, BOS, is at position 5; some with another one later."""
    ids = torch.randint(3, 300, (4, 48), generator=torch.Generator().manual_seed(2))
    ids[:, 0], ids[:, 5] = 7, BOS_ID
    if second is not None:
        ids[:2, second] = BOS_ID
    return from_tensor(ids)


def test_the_rate_on_a_card_is_that_of_the_sink_wherever_it_is(lens, tmp_path):
    behind = card(lens, tokens=with_sink_behind(), out=tmp_path / "run", progress=False)
    sink = behind.decision["sink"]
    assert (sink["positions"], sink["first_layer"]) == ([5], planted().layer + 1)
    assert sink["rate"]["value"] == pytest.approx(0.4, abs=0.05)
    assert sink["attention"]["value"] > 0.25
    assert behind.headline.startswith("Keep the token at position 5: it is the sink of 40% ")
    assert "position 5 in 40%" in page_title(behind.folder)
    layers = behind.tables["layers"]
    assert layers["sink_attention"].iloc[-1] > 0.5
    assert layers["norm_ratio"].iloc[-1] > 5
    row = read_table_row(behind.run)
    assert (row["sink_rate"], row["sink_mass"]) == (
        sink["rate"]["value"],
        sink["attention"]["value"],
    )
    other = wrap(copy.deepcopy(lens.plain), name="other")
    compared = card(lens, other, tokens=with_sink_behind(), progress=False)
    (changes,) = compared.tables["changes"].query("quantity == 'sink_rate'").to_dict("records")
    assert changes["first"] == changes["second"] == pytest.approx(sink["rate"]["value"], rel=1e-3)


def test_the_strongest_sink_has_the_rate_and_weaker_ones_are_named_behind_it(lens):
    found = card(lens, tokens=with_sink_behind(second=3), progress=False).decision
    assert found["sink"]["positions"] == [5, 3]
    assert found["cache"]["keep"] == [3, 5]
    assert "position 5: it is the sink of" in found["sentence"]
    assert "those at position 3" in found["sentence"]


def test_a_late_sink_is_not_studied(lens):
    ids = with_sink_behind().tokens.clone()
    ids[:, 5], ids[:, 35] = 9, BOS_ID  # 12 queries follow, and it takes 16
    found = card(lens, tokens=from_tensor(ids), progress=False)
    assert (found.decision["sink"]["positions"], found.decision["outlier_dimensions"]) == ([], [])
    assert found.tables["layers"]["norm_ratio"].max() < 3
    assert "; the sink tokens are <s> (1, 4 of 4)" in found.headline


def test_every_pass_has_the_sequences_that_were_asked_for(lens, monkeypatch):
    asked = []
    for one in (record, forward):
        monkeypatch.setattr(one, "sequences_per_forward", lambda n, _: asked.append(n) or n or 4)
    card(lens, batch_size=2, **SIZE)
    assert set(asked) == {2}

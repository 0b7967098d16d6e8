"""Two models compared: planted breakages are found, the loss has a bound, what differs too much is refused."""

import copy
import math

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model

from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import from_text
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, planted, tiny_tokenizer
from sink_lens.records import read_run
from sink_lens.report.html import page_content
from sink_lens.studies import card, cards
from sink_lens.studies.card_pair import (
    _change_text,
    _make_json_answer,
    _number_row,
    _setting_rows,
    _text_row,
)
from sink_lens.studies.config import CardConfig
from tests.tiny_families import tiny


def tokenizer(*, adds_bos=True):
    made = tiny_tokenizer(adds_bos=adds_bos)
    made.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return made


def sequences():
    return from_text(bundled_text(), tokenizer(), sequences=8, length=48)


def trained(model, *, steps, seed, lr, only=""):
    """The model after some steps on pieces of the bundled text, by those of its weights that a name is part of."""
    chosen = [weight for name, weight in model.named_parameters() if only in name]
    optimizer = torch.optim.AdamW(chosen, lr=lr, weight_decay=0.01)
    ids = torch.tensor(
        tiny_tokenizer(adds_bos=False)(bundled_text()[:200_000], verbose=False)["input_ids"]
    )
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(ids) - 48, (8,), generator=generator).tolist()
        rows = torch.stack([ids[start : start + 47] for start in starts])
        batch = torch.cat([torch.full((8, 1), BOS_ID), rows], dim=1)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(
    ("first", "second", "dtype", "changed"),
    [
        (4.7e-8, 5.6e-8, torch.float32, False),
        (0.3, 0.31, torch.float32, True),
        (3.0, 3.003, torch.bfloat16, False),
        (3e5, 3e5 + 1, torch.float32, False),
    ],
)
def test_a_difference_below_rounding_is_no_change(first, second, dtype, changed):
    first, second = (torch.full((8,), one, dtype=torch.float64) for one in (first, second))
    assert _number_row("loss", "nats", first, second, seed=0, dtype=dtype)["changed"] == changed


def without_key(model, truth):
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight[:, truth.outlier_dimension] = 0.0


def in_another_dimension(model, truth):
    weight = model.model.layers[truth.layer].mlp.down_proj.weight
    largest = weight[truth.outlier_dimension, truth.neuron].clone()
    weight[:, truth.neuron] = 0.0
    weight[(truth.outlier_dimension + 5) % 48, truth.neuron] = largest


def noisy_unembedding(model, truth):
    weight = model.lm_head.weight
    weight.add_(
        torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * weight.std()
    )


BREAKAGES = {
    "super neuron's column is zero": (
        lambda model, truth: (
            model.model.layers[truth.layer].mlp.down_proj.weight[:, truth.neuron].zero_()
        ),
        {"sink_rate", "first_token_norm_ratio", "outlier_dimensions", "writing_neurons"},
    ),
    "keys do not read the outlier": (without_key, {"sink_rate", "first_token_attention"}),
    "outlier in another dimension": (in_another_dimension, {"outlier_dimensions"}),
    "last norm is tripled": (lambda model, truth: model.model.norm.weight.mul_(3.0), {"loss"}),
    "unembedding is noisy": (noisy_unembedding, {"loss"}),
}
"""Name -> the breakage, and what must be among the changes."""


def broken(model, name):
    other = copy.deepcopy(model)
    with torch.no_grad():
        BREAKAGES[name][0](other, planted())
    return other


def compared(first, second, *, out, own=None):
    a = wrap(first, tokenizer=tokenizer(), name="base")
    b = wrap(second, tokenizer=own or tokenizer(), name="tuned")
    return card(a, b, tokens=sequences(), out=out, overwrite=True, progress=False)


@pytest.fixture(scope="module")
def base():
    return trained(planted().model, steps=20, seed=0, lr=5e-3, only="lm_head")


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_breakage_of_the_weights_is_found_by_what_it_breaks(base, name, tmp_path):
    other = broken(base, name)
    study = compared(base, other, out=tmp_path / "run")
    assert BREAKAGES[name][1] <= set(study.decision["changes"])
    assert study.headline.startswith("From base to tuned: loss ")
    assert read_run(tmp_path / "run").missing == []
    pairs = zip(base.named_parameters(), other.parameters(), strict=True)
    changed = {key for (key, first), second in pairs if not torch.equal(first, second)}
    assert set(study.tables["tensors"]["tensor"]) == changed
    assert [key for key in changed if key in study.headline]
    if name == "last norm is tripled":
        assert not study.decision["within_bound"]
        assert ", not within the bound of 0.25 nats. " in study.headline


def test_one_sequence_has_no_interval_and_shows_no_unchanged_sink(base):
    said = card(base, copy.deepcopy(base), tokens=sequences()[:1], progress=False).headline
    assert "did not change" not in said
    assert "changed beyond" not in said
    assert "One sequence has no interval" in said


def test_another_field_of_the_configuration_stands_beside_the_first(base, tmp_path):
    config = copy.deepcopy(base.config)
    config.rms_norm_eps = 1e-1
    other = type(base)(config).eval()
    other.load_state_dict(base.state_dict())
    study = compared(base, other, out=tmp_path / "run")
    row = study.tables["changes"].set_index("quantity").loc["rms_norm_eps"]
    assert (row["first_indices"], row["second_indices"]) == (str(base.config.rms_norm_eps), "0.1")
    assert "rms_norm_eps" in study.decision["changes"]
    part = page_content(read_run(tmp_path / "run"))
    assert ("rms norm eps", str(base.config.rms_norm_eps), "0.1") in part.tables[1].table.rows


@pytest.mark.parametrize(
    ("drops", "changes"),
    [
        (True, ["bos_in_front_of_text", "bos_in_front_of_chat_tokenised_again"]),
        (False, ["bos_in_front_of_text", "bos_and_tokens_of_a_text"]),
    ],
)
def test_a_tokenizer_that_drops_bos_or_has_another_is_a_change(base, drops, changes, tmp_path):
    own = tokenizer(adds_bos=not drops)
    own.bos_token = own.bos_token if drops else own.eos_token
    study = compared(base, base, own=own, out=tmp_path / "run")
    assert set(changes) <= set(study.decision["changes"])
    assert "bos in front of text 1 → 0" in study.headline
    assert study.decision["within_bound"]


def test_two_more_tokens_are_a_field_and_no_weights(base, tmp_path):
    other = copy.deepcopy(base)
    other.resize_token_embeddings(302, mean_resizing=False)
    study = compared(base, other, out=tmp_path / "run")
    assert "vocab_size" in study.decision["changes"]
    assert study.decision["within_bound"]
    assert study.tables["tensors"].empty


def test_a_fine_tune_keeps_the_bound(base, tmp_path):
    other = trained(copy.deepcopy(base), steps=8, seed=51, lr=1e-4)
    study = compared(base, other, out=tmp_path / "run")
    assert study.decision["within_bound"]
    assert ", within the bound of 0.25 nats. " in study.headline
    changes = study.tables["changes"].set_index("quantity")
    assert (
        changes.loc["loss", "change_low"]
        <= changes.loc["loss", "change"]
        <= changes.loc["loss", "change_high"]
    )


def test_a_loss_that_is_no_number_is_not_within_its_bound():
    row = {"quantity": "loss", "unit": "nats", "first": 5.0, "changed": True}
    row |= dict.fromkeys(("second", "change", "change_low", "change_high"), math.nan)
    found = _make_json_answer(
        [row], pd.DataFrame(), names=("base", "tuned"), config=CardConfig(), n=4
    )
    assert not found["within_bound"]
    assert "loss 5 → undefined" in found["sentence"]


def test_the_difference_of_a_loss_is_paired_by_sequence(base, tmp_path):
    other = broken(base, "unembedding is noisy")
    study = compared(base, other, out=tmp_path / "run")
    with torch.no_grad():
        tokens = sequences().tokens
        logits = [one(tokens).logits[:, :-1].flatten(0, 1) for one in (base, other)]
    first, second = (
        float(torch.nn.functional.cross_entropy(one, tokens[:, 1:].flatten())) for one in logits
    )
    row = study.tables["changes"].iloc[0]
    assert (row["first"], row["change"]) == pytest.approx((first, second - first), rel=1e-4)


def test_models_of_other_shapes_and_one_model_alone_are_refused(base, tmp_path):
    lens = wrap(base, tokenizer=tokenizer(), name="base")
    given = {"tokens": sequences(), "out": tmp_path / "run", "progress": False}
    with pytest.raises(InputError, match="has num_hidden_layers 5 and other 3"):
        card(lens, wrap(tiny("llama"), tokenizer=tokenizer(), name="other"), **given)
    with pytest.raises(InputError, match="3 models were given; need one, or two to compare"):
        card(lens, others=("a", "b"), **given)
    half = wrap(copy.deepcopy(base).bfloat16(), tokenizer=tokenizer(), name="half")
    with pytest.raises(
        InputError, match=r"differ in dtype .*need one type. Load both with the same dtype"
    ):
        card(lens, half, **given)


def test_a_change_names_neurons_as_neurons():
    row = {
        "quantity": "writing_neurons",
        "unit": "index",
        "first_indices": "1.49, 11.1229",
        "second_indices": "",
    }
    assert _change_text(row) == "writing neurons L1.N49, L11.N1229 → none"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_model_is_not_compared_with_itself_in_memory(base):
    held = copy.deepcopy(base)
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        tuned = get_peft_model(held, settings).eval()
    for pair in ((held, tuned), (base, base)):
        for made in (
            lambda pair=pair: card(*pair, tokens=sequences()),
            lambda pair=pair: cards(pair, sequences()),
        ):
            with pytest.raises(InputError, match="one model in memory"):
                made()
    study = card(base, tuned, tokens=sequences(), progress=False)
    assert list(study.tables["tensors"]["tensor"])
    assert (study.decision["first"], study.decision["second"]) == (
        "the first model",
        "the second model",
    )
    assert not study.decision["same_weights"]


def test_equal_weights_and_an_unchanged_sink_are_said(base):
    study = card(base, copy.deepcopy(base), tokens=sequences(), progress=False)
    assert study.decision["same_weights"]
    assert "Both have the same weights. " in study.headline
    assert "The sink did not change" in study.headline
    assert "attention_to_no_key" not in set(study.tables["changes"]["quantity"])


def test_a_model_that_was_read_from_a_file_named_by_a_hash_has_no_name():
    model = copy.deepcopy(planted().model)
    model.config._name_or_path = f"/cache/{'b1' * 32}"
    assert wrap(model).name == "LlamaForCausalLM"


def test_indices_in_another_order_are_the_same_ones():
    assert not _text_row("outlier_dimensions", "index", "5, 3", "3, 5")["changed"]
    assert _text_row("outlier_dimensions", "index", "5, 3", "5")["changed"]
    assert _text_row("rope", "text", "5, 3", "3, 5")["changed"]


def test_a_template_that_is_not_rendered_is_set_beside_one_that_is(base):
    own = tokenizer()
    own.chat_template = "{% for m in messages %}{% for n in m %}{{ n }}{% endfor %}{% endfor %}"
    one, other = (wrap(copy.deepcopy(base), tokenizer=made) for made in (tokenizer(), own))
    for pair, place in (((one, other), "second"), ((other, one), "first")):
        rows = {row["quantity"]: row for row in _setting_rows(*pair)}
        row = rows["bos_in_front_of_chat_not_rendered"]
        assert "loops within loops" in row[f"{place}_indices"]

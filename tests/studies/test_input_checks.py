"""The linter of inputs: every planted breakage is found and names a line, and healthy inputs raise no alarm."""

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import diff_blind, diff_held_out
from benchmarks.diff_alarms import BATCHES, HEALTHY_BATCHES, TOKENIZERS, padded, plain, text_rows, tokenizer
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, planted, tiny
from sink_lens.studies.input_checks import (
    check_batch,
    check_rows,
    check_tokenizers,
    leading_bos,
    read_batch,
    template_bos,
)


@pytest.fixture(scope="module")
def lens():
    return wrap(planted().model, tokenizer=tokenizer())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_broken_tokenizer_is_found_and_names_the_file_to_change(name):
    alarms = [one for one in check_tokenizers(tokenizer(), TOKENIZERS[name]()) if one.alarm]
    assert len(alarms) == 1
    assert alarms[0].line.startswith(("tokenizer.json: ", "tokenizer_config.json: ", "chat_template.jinja: "))


@pytest.mark.parametrize("name", BATCHES)
def test_a_broken_batch_is_found_and_names_the_line(lens, name):
    alarms = [one for one in check_batch(lens, BATCHES[name]()) if one.alarm]
    assert len(alarms) == 1
    assert alarms[0].line


@pytest.mark.parametrize("name", HEALTHY_BATCHES)
def test_a_healthy_batch_raises_no_alarm(lens, name):
    found = check_batch(lens, HEALTHY_BATCHES[name]())
    assert [one.check for one in found if one.alarm] == []
    assert len(found) >= 2


@pytest.mark.parametrize("name", diff_held_out.TOKENIZERS)
def test_a_tokenizer_that_no_rule_was_made_on_is_found(name):
    pair = {"before": tokenizer(), "own": tokenizer()} | diff_held_out.TOKENIZERS[name]()
    assert any(one.alarm for one in check_tokenizers(pair["before"], pair["own"]))


@pytest.mark.parametrize("name", [name for name, (kind, _) in diff_held_out.BATCHES.items() if kind != "gpt2"])
def test_a_batch_that_no_rule_was_made_on_is_found(lens, name):
    assert any(one.alarm for one in check_batch(lens, diff_held_out.BATCHES[name][1]()))


@pytest.mark.parametrize("name", diff_held_out.HEALTHY_TOKENIZERS)
def test_a_tokenizer_of_a_healthy_fine_tune_raises_no_alarm(name):
    assert not any(one.alarm for one in check_tokenizers(tokenizer(), diff_held_out.HEALTHY_TOKENIZERS[name]()))


def test_positions_may_restart_at_documents_and_nowhere_else(lens):
    packed = HEALTHY_BATCHES["packed with a mask"]()
    assert not any(one.alarm for one in check_batch(lens, packed))
    jumping = plain(text_rows()) | {"position_ids": torch.arange(24).mul(2).repeat(4, 1)}
    assert [one.check for one in check_batch(lens, jumping) if one.alarm] == ["positions"]


def test_sequences_cut_from_packed_texts_may_begin_without_bos(lens):
    ids = text_rows()
    ids[2] = ids[2].roll(-5)  # its BOS stands inside
    assert not any(one.check == "batch_bos_mixed" and one.alarm for one in check_batch(lens, plain(ids)))


def test_the_same_tokenizer_twice_raises_no_alarm():
    assert not any(one.alarm for one in check_tokenizers(tokenizer(), tokenizer()))
    assert check_tokenizers(None, tokenizer()) == []


def test_a_template_that_adds_bos_where_the_first_had_none_is_found():
    base = tokenizer(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (alarm,) = [one for one in check_tokenizers(base, tokenizer()) if one.alarm]
    assert alarm.check == "template_adds_bos"
    assert "with 2 where its text is tokenised again" in alarm.said
    assert template_bos(tokenizer()) == (1, 2)


def test_learned_positions_move_under_padding_on_the_left():
    batch = padded(left=True)
    gpt2 = wrap(tiny("gpt2"), tokenizer=tokenizer())
    assert [one.check for one in check_batch(gpt2, batch) if one.alarm] == ["padding_moves"]
    places = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert not any(one.alarm for one in check_batch(gpt2, batch | {"position_ids": places}))


def test_bos_is_counted_at_the_beginning_only():
    assert leading_bos([1, 1, 5, 1], 1) == 2
    assert leading_bos([5, 1], 1) == 0
    assert leading_bos([1], None) == 0


def test_a_batch_is_read_from_a_file_and_refused_where_it_does_not_fit(lens, tmp_path):
    save_file({name: one.contiguous() for name, one in plain(text_rows()).items()}, tmp_path / "batch.safetensors")
    assert not any(one.alarm for one in check_batch(lens, read_batch(tmp_path / "batch.safetensors")))
    with pytest.raises(InputError, match="cannot be read as a batch"):
        read_batch(tmp_path / "none.safetensors")
    with pytest.raises(InputError, match="has no input_ids"):
        check_batch(lens, {"labels": torch.ones(2, 4)})
    with pytest.raises(InputError, match="has no input_ids"):
        check_batch(lens, {"input_ids": torch.zeros(0, 12, dtype=torch.long)})
    with pytest.raises(InputError, match="holds something that is not a tensor"):
        check_batch(lens, {"input_ids": [[1, 2], [3]]})
    with pytest.raises(InputError, match="labels of the batch has the shape"):
        check_batch(lens, {"input_ids": torch.full((4, 8), BOS_ID), "labels": torch.tensor(3)})
    with pytest.raises(InputError, match=r"attention_mask of the batch has the shape \(4, 3\)"):
        check_batch(lens, {"input_ids": torch.full((4, 8), BOS_ID), "attention_mask": torch.ones(4, 3)})


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("tokenizer adds EOS at the end", "eos_added"),
        ("template lost the end of a turn", "template_lost_end"),
        ("template reads another key", "template_loses_messages"),
        ("template shows only the last message", "template_loses_messages"),
        ("template ignores the generation prompt", "template_never_asks"),
        ("padding is the full stop", "pad_is_text"),
    ],
)
def test_what_a_chat_or_a_text_loses_is_named(name, check):
    given = {"before": tokenizer()} | diff_blind.BREAKAGES[name][1](None)
    assert [one.check for one in check_tokenizers(given["before"], given["own"]) if one.alarm] == [check]


@pytest.mark.parametrize("name", diff_blind.HEALTHY_TOKENIZERS)
def test_another_template_or_padding_is_healthy(name):
    assert not [one for one in check_tokenizers(tokenizer(), diff_blind.HEALTHY_TOKENIZERS[name]()) if one.alarm]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("no label is left", "no_labels"),
        ("labels of EOS are left out", "eos_not_trained"),
        ("the mask shows later tokens", "later_seen"),
        ("padding between prompt and answer is seen", "padding_seen"),
        ("-100 stands among the ids", "ids_beyond"),
    ],
)
def test_what_a_batch_hides_or_shows_is_named(lens, name, check):
    batch = diff_blind.BREAKAGES[name][1](None)["batch"]
    assert [one.check for one in check_batch(lens, batch) if one.alarm] == [check]


@pytest.mark.parametrize("name", ["answers that end in EOS", "documents in one row", "a mask of ones"])
@pytest.mark.parametrize("pads", ["<pad>", "</s>"])
def test_the_eos_that_ends_an_answer_is_no_padding(name, pads):
    one = wrap(planted().model, tokenizer=diff_held_out.tokenizer_with(pad_token=pads))
    assert not [found for found in check_batch(one, diff_blind.HEALTHY_BATCHES[name]()) if found.alarm]


def test_learned_positions_that_begin_above_0_are_named_and_rotary_ones_are_not():
    batch = diff_blind.BREAKAGES["learned positions begin at two"][1](None)["batch"]
    for family, alarms in (("gpt2", ["positions_begin"]), ("llama", [])):
        found = check_batch(wrap(tiny(family), tokenizer=tokenizer()), batch)
        assert [one.check for one in found if one.alarm] == alarms


def test_a_token_without_a_row_and_a_row_of_zeros_are_named():
    base = wrap(tiny("llama"), tokenizer=tokenizer())
    own = diff_blind.BREAKAGES["padding is beyond the embedding"][1](None)["own"]
    assert check_rows(wrap(tiny("llama"), tokenizer=own), before=base).check == "tokens_without_rows"
    model = tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[70] = 0.0
    zero = wrap(model, tokenizer=tokenizer())
    assert check_rows(zero, before=base).check == "rows_of_zeros"
    assert not check_rows(zero, before=zero).alarm


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system') }}",
        "{{ messages[9].content }}",
        "{% for m in messages %}{{ m.name.first }}{% endfor %}",
        "{% if add_generation_prompt %}{{ 1 / 0 }}{% endif %}a",
        "{% for m in messages %}",
        "{{ messages | nosuch }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'x' %}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_chat_template_that_fails_is_a_finding(template):
    base, tuned = tokenizer(), tokenizer()
    base.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tuned.chat_template = template
    (alarm,) = [one for one in check_tokenizers(base, tuned) if one.alarm]
    assert (alarm.check, alarm.said.partition(":")[0]) == ("template_fails", "the chat template ends with an error")
    assert "\n" not in alarm.said
    assert not [one for one in check_tokenizers(tuned, base) if one.alarm]
    assert not [one for one in check_tokenizers(tuned, tuned) if one.alarm]

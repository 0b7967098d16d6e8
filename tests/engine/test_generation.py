"""Generation under edits: equal to Hugging Face without one, and to a loop of whole runs with one."""

import itertools

import pytest
import torch
from lenses import lens_of, speaking, tokens

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import EditError, edit, scale, zero
from sink_lens.edits.eviction import window
from sink_lens.engine import generation
from sink_lens.engine.forward import run_with
from sink_lens.engine.generation import _logits_by_whole_pass as last_logits
from sink_lens.engine.generation import generate
from sink_lens.errors import InputError, SiteError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import TINY_FAMILIES, tiny


def loop(lens, ids, edits, n, *, end=2):
    """Greedy continuation, with a whole forward pass for each token."""
    ids = list(ids)
    for _ in range(n):
        logits = run_with(
            lens, torch.tensor([ids]), edits, layers=(2,), loss=False, logits=True, quiet=True
        ).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == end:
            break
    return tuple(ids)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_without_edits_it_is_what_hugging_face_generates(family):
    lens = speaking(family)
    found = generate(lens, "the cat and the", max_new_tokens=10)
    assert found.ids == found.plain_ids
    ids = torch.tensor([found.prompt_ids])
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = lens.plain.generate(ids, **options)
    assert found.ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_under_edits_it_is_a_loop_of_edited_runs():
    lens = speaking()
    edit = zero("attn_out", layers=[1], positions=[0, 2])
    found = generate(lens, "the cat and the", edit, max_new_tokens=8)
    assert found.prompt_ids + found.ids == loop(lens, found.prompt_ids, edit, 8)
    assert found.prompt_ids + found.plain_ids == loop(lens, found.prompt_ids, (), 8)
    assert found.ids != found.plain_ids
    assert found.ids[: found.same] == found.plain_ids[: found.same]
    assert found.text == lens.tokenizer.decode(list(found.ids), skip_special_tokens=True)
    assert found.prompt == "the cat and the"


def test_a_window_goes_on_with_the_tokens_that_are_written():
    lens = speaking()
    for one in (window(5, keep=1), whole_passes_only()):
        found = generate(lens, "the cat and the dog", one, max_new_tokens=6)
        assert found.prompt_ids + found.ids == loop(lens, found.prompt_ids, one, 6)
        assert found.ids != found.plain_ids


def from_nine_tokens(x, at):
    """Turn every position round, once there are nine."""
    return x * -4 if at.valid.shape[1] >= 9 else x


def evens_out(x, at):
    """Take off the mean of all positions once there are eight, so that earlier ones change with every token."""
    return x - 4 * x.mean(1, keepdim=True) if at.valid.shape[1] >= 8 else x


def last_alone(x, at):
    """Zero the last position only, whose keys and values are then those of an edited one for one pass."""
    return torch.where(
        (at.positions == at.valid.shape[1] - 1).view(-1, *[1] * (x.dim() - 2)), 0.0, x
    )


def first_key(x, at):
    """Attend to the first key alone, once there are nine."""
    return torch.eye(x.shape[-1])[0].expand_as(x) if x.shape[-1] >= 9 else x


def other_scores(x, at):
    """Turn the scores of what is seen round, once there are nine keys."""
    return torch.where((x > -1e4) & (x.shape[-1] >= 9), x * -5, x)


@pytest.mark.parametrize(
    ("site", "change"),
    [
        *itertools.product(["v", "resid_post", "z"], [from_nine_tokens, evens_out, last_alone]),
        ("pattern", first_key),
        ("scores", other_scores),
    ],
)
def test_an_edit_that_comes_to_act_on_earlier_positions_is_a_loop_of_edited_runs(
    site, change, monkeypatch
):
    monkeypatch.setattr(generation, "_end_ids", lambda lens: set())
    lens = speaking()
    for where in ({}, {"positions": [1, 3]}) if change in (from_nine_tokens, evens_out) else ({},):
        one = edit(site, change, layers=[0, 1], **where)
        found = generate(lens, [5, 6, 7, 8, 9], one, max_new_tokens=12)
        assert found.prompt_ids + found.ids == loop(lens, found.prompt_ids, one, 12, end=None)


def test_an_edit_that_stays_takes_one_whole_pass(monkeypatch):
    lens, whole = speaking(), []
    monkeypatch.setattr(
        generation,
        "_logits_by_whole_pass",
        lambda *a, **k: (whole.append(1), last_logits(*a, **k))[1],
    )
    direction = torch.randn(lens.d_model, generator=torch.Generator().manual_seed(0))
    for one in (
        zero("attn_out", layers=[1], positions=[0, 2]),
        edit(
            "resid_post",
            lambda x, at: x - (x @ direction)[..., None] * direction / direction.dot(direction),
        ),
        window(5, keep=1),
    ):
        whole.clear()
        generate(lens, "the cat and the dog", one, max_new_tokens=8)
        assert len(whole) == 2  # the first token with a cache, edited and not
    monkeypatch.setattr(generation, "_MOST_HELD", 1000)  # too many values to hold
    found = generate(lens, "the cat and the dog", one, max_new_tokens=8)
    assert len(whole) > 4
    assert found.prompt_ids + found.ids == loop(lens, found.prompt_ids, one, 8)


def whole_passes_only():
    """An edit of one's own that takes no pass over the last position alone."""

    def change(x, at):
        if len(at.positions) < at.valid.shape[1]:
            raise EditError("every position is needed")
        return x * torch.linspace(1, 3, x.shape[1])[:, None]

    return edit("mlp_out", change, layers=[1])


def test_a_position_that_is_not_there_yet_is_edited_when_it_is():
    lens = speaking()
    n = len(generate(lens, "the cat", max_new_tokens=1).prompt_ids)
    edit = scale("mlp_out", -3.0, positions=[n + 2])
    found = generate(lens, "the cat", edit, max_new_tokens=8)
    assert found.same >= 3
    ids = found.prompt_ids + found.ids
    assert ids == loop(lens, ids[: n + 3], edit, len(found.ids) - 3)


def test_texts_on_both_sides_of_a_change_of_the_rotation_are_whole_passes_or_refused():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]}
    lens = wrap(
        tiny(
            "phi3",
            sliding_window=None,
            original_max_position_embeddings=16,
            rope_parameters=rope,
        )
    )
    ids = tokens(1, 10)
    found = generate(lens, ids, max_new_tokens=20).plain_ids
    for n in range(len(found)):
        with torch.no_grad():
            logits = lens.plain(torch.cat([ids, torch.tensor([found[:n]]).long()], 1)).logits
        assert int(logits[0, -1].argmax()) == found[n]
    with pytest.raises(InputError, match="longrope"):
        run_with(lens, from_tensor(tokens(2, 20), lengths=torch.tensor([20, 10])))


def test_drawing_is_repeatable_and_paired():
    lens = speaking()

    def drawn(seed, *edits):
        generator = torch.Generator().manual_seed(seed)
        return generate(
            lens, [5, 6, 7], edits, max_new_tokens=6, temperature=1.5, generator=generator
        )

    assert drawn(0).ids == drawn(0).ids
    assert drawn(0).ids != drawn(1).ids
    assert drawn(0, zero("attn_out", layers=[1])).plain_ids == drawn(0).ids


def test_it_ends_where_the_model_ends_the_text():
    lens = speaking()
    first = generate(lens, "the cat", max_new_tokens=3).ids[1]
    ended = wrap(tiny("llama"), tokenizer=tiny_tokenizer())
    ended.plain.generation_config.eos_token_id = [first]
    assert generate(ended, "the cat", max_new_tokens=9).ids[-1] == first
    assert len(generate(ended, "the cat", max_new_tokens=9).ids) == 2


def test_token_ids_need_no_tokenizer_and_an_edit_that_changes_nothing_warns_once():
    found = generate(lens_of(), torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    assert (found.prompt, found.text, found.plain) == ("", "", "")
    assert len(found.ids) == 3
    with pytest.warns(UserWarning, match="changed nothing") as caught:
        generate(speaking(), "the cat", scale("z", 1.0), max_new_tokens=4)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"max_new_tokens": 254},
            r"the prompt has 3 tokens and 254 more were asked for; .* takes 256 in all",
        ),
        ({"max_new_tokens": 0}, "0 new tokens were asked for"),
        ({"temperature": -1.0}, "the temperature is -1"),
        ({"temperature": 1.0}, "pass generator=torch.Generator"),
        ({"edits": zero("z", positions=[50])}, "50"),
        ({"edits": zero("z", heads=[7])}, "7"),
    ],
)
def test_what_cannot_be_generated_is_refused(options, text):
    with pytest.raises(InputError, match=text):
        generate(speaking(), [5, 6, 7], **options)


def test_prompts_that_are_none_and_edits_without_a_place_are_refused():
    with pytest.raises(InputError, match=r"shape \(2, 3\); need the ids of one sequence"):
        generate(speaking(), torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="has no tokenizer"):
        generate(lens_of(), "text")
    with pytest.raises(InputError, match="outside the vocabulary"):
        generate(speaking(), [5, 300])
    with pytest.raises(SiteError, match="no site 'gate'"):
        generate(speaking("gpt2"), [5, 6], zero("gate"))


def test_settings_of_a_generation_config_that_change_the_text_are_noted_and_others_are_not():
    lens = wrap(tiny("llama"), tokenizer=tiny_tokenizer())
    assert generate(lens, "the cat", max_new_tokens=1).note == ""
    lens.plain.generation_config.max_length = 77
    assert generate(lens, "the cat", max_new_tokens=1).note == ""
    lens.plain.generation_config.repetition_penalty = 1.5
    assert "repetition_penalty=1.5" in generate(lens, "the cat", max_new_tokens=1).note

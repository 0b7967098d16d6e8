"""Identity features: what is read, on what inputs, and that nothing is read twice."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sink_lens import load
from sink_lens.activations.record import capture
from sink_lens.chain.at_token import token_ids
from sink_lens.errors import InputError, ModelError
from sink_lens.identity import features as reading
from sink_lens.identity.features import (
    Inputs,
    cached_features,
    read_facts,
    read_features,
    shared_inputs,
)
from sink_lens.identity.models_to_measure import RandomSequences
from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import tiny

INPUTS = Inputs(kind="tokens", sequences=60, length=6, seed=0, ids=tuple(range(3, 300)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))


def gapped_tokenizer():
    """A tokenizer of two ids, 3 and 250."""
    core = Tokenizer(models.WordLevel({"a": 3, "b": 250}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=core)


def lens(family="llama", *, seed=0, tokenizer=None, **fields):
    return load(tiny(family, seed=seed, **fields), tokenizer=tokenizer)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "headnorm"])
def test_it_is_the_last_state_after_the_final_norm(family):
    model = lens(family)
    found = torch.from_numpy(read_features(model, INPUTS))
    tokens = torch.cat(list(INPUTS.chunks()))
    expected = capture(model, tokens, sites=("final",))["final"][:, -1]
    assert torch.allclose(found, expected, atol=1e-5 * expected.norm(dim=-1).max().item())


def test_inputs_depend_on_the_seed_and_not_on_how_many_there_are():
    few, many, other = (
        torch.cat(
            list(
                Inputs(
                    kind="tokens", sequences=n, length=6, seed=seed, ids=tuple(range(9))
                ).chunks()
            )
        )
        for n, seed in ((60, 0), (130, 0), (60, 1))
    )
    assert few.shape == (60, 6)
    assert torch.equal(few, many[:60])
    assert not torch.equal(few, other)
    assert set(many.ravel().tolist()) == set(range(9))


def test_the_size_of_a_forward_does_not_matter(monkeypatch):
    model = lens()
    whole = read_features(model, INPUTS)
    monkeypatch.setattr(reading, "_TOKENS_A_FORWARD", 7 * INPUTS.length)
    assert read_features(model, INPUTS) == pytest.approx(whole, abs=1e-5)


def test_embeddings_are_shared_where_the_width_is():
    known = {"a": read_facts(lens()), "b": read_facts(lens(seed=1))}
    inputs = shared_inputs(known, kind="embeddings", sequences=50, length=4, seed=0)
    assert inputs.width == 48
    assert read_features(lens(), inputs).shape == (50, 48)
    with pytest.raises(InputError, match=r"widths 32, 48; need one width. Use random tokens"):
        wide = {"a": read_facts(lens()), "b": read_facts(lens(hidden_size=32))}
        shared_inputs(wide, kind="embeddings", sequences=50, length=4, seed=0)


def test_released_embeddings_have_the_mean_and_deviation_of_the_first_models_matrix():
    first, other = lens(), lens(seed=1)
    with torch.no_grad():
        first.plain.get_input_embeddings().weight.mul_(3).add_(0.5)
    known = {"a": read_facts(first), "b": read_facts(other)}
    ours = shared_inputs(known, kind="embeddings", sequences=200, length=8, seed=0)
    theirs = shared_inputs(known, kind="released_embeddings", sequences=200, length=8, seed=0)
    drawn, plain = (torch.cat(list(one.chunks())) for one in (theirs, ours))
    matrix = first.plain.get_input_embeddings().weight
    assert drawn.mean().item() == pytest.approx(matrix.mean().item(), abs=0.002)
    assert drawn.std().item() == pytest.approx(matrix.std().item(), rel=0.02)
    assert plain.std().item() == pytest.approx(0.02, rel=0.02)
    turned = shared_inputs(
        dict(reversed(known.items())), kind="released_embeddings", sequences=200, length=8, seed=0
    )
    assert len({ours.digest, theirs.digest, turned.digest}) == 3
    assert read_features(other, theirs).shape == (200, 48)


def test_tokens_are_those_that_every_model_has():
    small = lens(vocab_size=40)
    known = {"small": read_facts(small), "large": read_facts(lens(tokenizer=tiny_tokenizer()))}
    inputs = shared_inputs(known, sequences=50, length=4, seed=0)
    assert inputs.ids == tuple(
        range(3, 40)
    )  # 0 to 2 are the special tokens of the one that has a tokenizer


def test_tokens_that_a_fine_tuning_added_are_not_drawn():
    more = tiny_tokenizer()
    more.add_tokens(["zzz"])
    models = {
        "base": lens(tokenizer=tiny_tokenizer()),
        "tuned": lens(tokenizer=more, vocab_size=310),
    }
    known = {name: read_facts(model) for name, model in models.items()}
    assert known["tuned"].ids == (*known["base"].ids, 300)
    inputs = shared_inputs(known, sequences=50, length=4, seed=0)
    assert inputs == shared_inputs({"base": known["base"]}, sequences=50, length=4, seed=0)


def test_ids_behind_a_gap_of_the_tokenizer_are_known_and_those_in_it_are_not():
    model = lens(tokenizer=gapped_tokenizer())
    assert read_facts(model).ids == (3, 250)
    chunk = RandomSequences(sequences=50, length=4, seed=0).chunk(model, 0)
    assert chunk.tokens.unique().tolist() == [3, 250]
    assert token_ids("b", lens=model) == (250,)


def test_different_tokenizers_are_refused():
    one = read_facts(lens(tokenizer=tiny_tokenizer()))
    known = {"a": one, "b": replace(one, texts={**one.texts, 7: "x", 9: "y"})}
    with pytest.raises(InputError, match=r"a, b have different tokenizers: 2 of their 297"):
        shared_inputs(known, sequences=50, length=4, seed=0)


def test_what_cannot_be_read_is_refused():
    known = {"a": read_facts(lens())}
    for change, says in (
        ({"sequences": 49}, "49 sequences were asked for; need at least 50"),
        ({"length": 257}, "the length is 257 tokens; a takes at most 256"),
        ({"length": 0}, "need one token or more"),
    ):
        with pytest.raises(InputError, match=says):
            shared_inputs(known, **{"sequences": 50, "length": 4, "seed": 0} | change)
    model = tiny("llama").half()
    with torch.no_grad():
        model.model.norm.weight.fill_(6e4)
    overflowing = lens()
    object.__setattr__(overflowing, "plain", model)
    with pytest.raises(ModelError, match=r"in float16 are not finite.*float32.* or .*bfloat16"):
        read_features(overflowing, INPUTS)


def read_again():
    pytest.fail("read again")


def test_states_are_read_once_for_weights_configuration_and_inputs(tmp_path):
    longer = Inputs(kind="tokens", sequences=60, length=7, seed=0, ids=INPUTS.ids)
    cases = [(lens(), INPUTS), (lens(seed=1), INPUTS), (lens(), longer)]
    cases.append((lens(hidden_act="relu"), INPUTS))  # the same weights as the first
    first, *_ = (
        cached_features(lambda one=model: one, inputs, of=read_facts(model))
        for model, inputs in cases
    )
    files = list((tmp_path / "cache").rglob("*.safetensors"))
    assert len(files) == 4
    assert (cached_features(read_again, INPUTS, of=read_facts(lens())) == first).all()
    for file in files:
        file.write_bytes(b"damaged")
    assert (cached_features(lens, INPUTS, of=read_facts(lens())) == first).all()

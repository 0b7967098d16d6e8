"""``--at``: the chain of a sink that is a token, one occurrence a row."""

import dataclasses
import functools

import pytest
import torch
from lenses import lens_of, speaking

from sink_lens.chain import at_token
from sink_lens.chain.at_token import cut_at_token, token_ids
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.page.story import headline_numbers
from sink_lens.chain.trace import trace
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.records import read_run
from tests.zoo import build

CONFIG = TraceConfig(
    model="zoo", random_init=False, sequences=16, controls=3, intervention_sequences=6
)


@functools.cache
def delimited():
    zoo = build("delimiter", seed=0, family="llama")
    return zoo, dataclasses.replace(wrap(zoo.model), name="delimiter")


@functools.cache
def drawn():
    """Sequences of 40 ordinary tokens with three delimiters, of two kinds."""
    zoo, _ = delimited()
    return from_tensor(zoo.draw(48, length=40, generator=torch.Generator().manual_seed(0)))


asked = functools.partial(dataclasses.replace, CONFIG)


def test_a_row_has_one_occurrence_and_it_stands_at_one_position():
    zoo, lens = delimited()
    token = zoo.delimiters[0]
    found = cut_at_token(lens, drawn(), config=asked(at=str(token)))
    assert (found.ids, found.position) == ((token,), 8)
    assert found.found == int((drawn().tokens == token).sum())
    rows = found.tokens.tokens
    assert (rows[:, 8] == token).all()
    assert ((rows == token).sum(1) == 1).all()
    whole = [row.unfold(0, rows.shape[1], 1) for row in drawn().tokens]
    assert all(
        any(bool((part == row).all(1).any()) for part in whole) for row in rows
    )  # cut, not made


def test_bos_stays_in_front():
    zoo, lens = delimited()
    ids = drawn().tokens.clone()
    ids[:, 0] = 1
    batch = dataclasses.replace(drawn(), tokens=ids, bos=True, bos_condition="with")
    found = cut_at_token(lens, batch, config=asked(at=str(zoo.delimiters[0])))
    assert found.position == 9
    assert found.tokens.tokens[:, [0, 9]].unique(dim=0).tolist() == [[1, zoo.delimiters[0]]]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_token_that_is_a_sink_from_some_position_on_is_one_in_every_row(family):
    zoo = build("late_stop", seed=1, family=family)
    batch = from_tensor(zoo.draw(32, length=48, generator=torch.Generator().manual_seed(0)))
    batch = dataclasses.replace(batch, bos=True, bos_condition="with")
    found = cut_at_token(wrap(zoo.model), batch, config=asked(at=str(zoo.at)))
    assert found.position == 16  # the first one that is a sink stands there; earlier ones are none
    assert zoo.sinks(found.tokens.tokens)[:, found.position].all()
    assert found.found == 32


@pytest.mark.parametrize("name", ["id", "auto"])
def test_the_delimiter_of_the_zoo_is_traced(name, tmp_path):
    zoo, lens = delimited()
    at = "auto" if name == "auto" else str(zoo.delimiters[1])
    config = asked(at=at, interventions=name == "id")
    found = trace(
        lens, config=config, tokens=drawn(), out=tmp_path / "run", progress=False, report=False
    )
    assert found.location.sink_found
    assert found.location.sink_positions == (8,)
    (written, *_) = zoo.truth.outliers.values()
    assert {one for dimensions in found.location.outliers.values() for one in dimensions} == set(
        written
    )
    run = read_run(tmp_path / "run")
    assert run.provenance["at"]["ids"][0] in zoo.delimiters
    summary = run.tables.cached_copy()["summary"].set_index("quantity")
    assert summary.loc["at_token", "value"] == f"id {run.provenance['at']['ids'][0]}"
    assert f"{summary.loc['at_token', 'value']} is an attention sink" in found.headline
    assert "at the studied token" in found.headline
    assert "position 8" not in found.headline  # of the cut sequences alone
    assert "at the studied token" in headline_numbers(run)[0][1]
    (maker,) = zoo.truth.makers
    supers = found.tables["neurons"].query("is_super")
    assert supers[["layer", "neuron"]].to_numpy().tolist() == [[maker.layer, maker.index]]
    if name == "id":
        verdicts = dict(found.tables["links"].query("is_primary")[["link", "verdict"]].to_numpy())
        for link in ("variance_neurons", "neurons_dimension", "dimension_key", "key_sink"):
            assert verdicts[link] == "holds", verdicts


def test_an_ordinary_token_has_no_sink_to_trace(tmp_path):
    zoo, lens = delimited()
    counts = torch.bincount(drawn().tokens.flatten(), minlength=lens.d_vocab)
    counts[list(zoo.delimiters)] = 0
    batch = from_tensor(drawn().tokens.masked_fill(torch.arange(40) == 20, int(counts.argmax())))
    config = asked(at=str(int(counts.argmax())), interventions=False)
    found = trace(
        lens, config=config, tokens=batch, out=tmp_path / "run", progress=False, report=False
    )
    assert not found.location.sink_found
    assert found.location.sink_position == 8
    assert "is no attention sink" in found.headline
    assert "osition" not in found.headline.split(". ")[0]
    assert "comes nearest" not in found.headline


def test_a_text_is_every_token_that_reads_so_and_needs_a_tokenizer():
    lens = speaking("llama")
    assert token_ids("17", lens=lens) == (17,)
    for text in ("a", "\\n"):
        wanted = text.replace("\\n", "\n")
        found = token_ids(text, lens=lens)
        assert {lens.tokenizer.decode([one]) for one in found} <= {wanted, f" {wanted}"}
        assert lens.tokenizer.convert_tokens_to_ids("Ġa") in found or text != "a"
    with pytest.raises(InputError, match="has no tokenizer, so the token 'a' has no id"):
        token_ids("a", lens=lens_of("llama"))


@pytest.mark.parametrize(
    ("at", "text"),
    [
        ("300", "id 300 is outside the vocabulary of 300"),
        ("no such token", "no token of .* reads 'no such token'"),
        ("299", "stands 0 times in 48 sequences"),
        ("auto", "is a sink there in"),
    ],
)
def test_what_cannot_be_traced_is_refused(at, text):
    lens = speaking("llama")
    ids = torch.randint(3, 290, (48, 40), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=text):
        cut_at_token(lens, from_tensor(ids), config=asked(at=at, min_sink_rate=0.9))


def test_occurrences_that_too_few_queries_follow_do_not_count_as_no_sinks(monkeypatch):
    ids, rates = torch.arange(100, 180).view(4, 20), torch.zeros(1, 4, 20)
    ids[:, [9, 15]], rates[..., 9], rates[..., 11:] = 7, 0.06, torch.nan
    monkeypatch.setattr(at_token, "sink_rates", lambda *_, **__: rates)
    config = asked(at="auto")
    assert at_token._strongest_sink_token(delimited()[1], from_tensor(ids), config=config) == 7


def test_a_token_is_a_text():
    with pytest.raises(InputError, match="at is 7"):
        TraceConfig(at=7)

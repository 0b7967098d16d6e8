"""``sink_mask`` finds what was planted in the models of the zoo, and nothing where nothing was."""

import logging
import math
from functools import partial

import pytest
import torch

from sink_lens import TokenBatch, load, sink_mask, wrap
from sink_lens.activations.record import capture
from sink_lens.activations.sink_mask import gap_answer, sink_positions, sink_rates, sink_scores
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.measure import scout
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import InputError
from sink_lens.measures.sink_tokens import earlier_keys, fair_shares, share_score
from sink_lens.models.tiny import BOS_ID, planted
from sink_lens.studies.observed import ObservedModel
from tests.tiny_families import TINY_FAMILIES, tiny
from tests.zoo import ZOO, build

WITH_SINK = [
    (name, family)
    for name in (
        "embedding",
        "bos_neuron",
        "variance",
        "slow_growth",
        "key_bias",
        "delimiter",
        "direction",
    )
    for family in ZOO[name].families
]
WITHOUT = [
    *(
        (name, family)
        for name in ("spike", "sigmoid", "sink_logit")
        for family in ZOO[name].families
    ),
    *(("untrained", family) for family in TINY_FAMILIES),
    ("broken_key_sink", "llama"),
]


def drawn(model, *, length=64):
    return model.draw(8, length=length, generator=torch.Generator().manual_seed(0))


def f1(found, truth):
    return 2 * int((found & truth).sum()) / (int(found.sum()) + int(truth.sum()))


@pytest.mark.parametrize(("name", "family"), WITH_SINK)
def test_planted_sinks_are_found(name, family):
    model = build(name, family=family)
    tokens = drawn(model)
    assert f1(sink_mask(wrap(model.model), tokens), model.sinks(tokens)) >= 0.95


@pytest.mark.parametrize(("name", "family"), WITHOUT)
def test_a_model_without_a_sink_has_no_false_positive(name, family):
    model = build(name, family=family)
    assert not sink_mask(wrap(model.model), drawn(model)).any()


def test_no_sink_and_not_decided_are_told_apart(caplog):
    caplog.set_level(logging.INFO)
    untrained, sink = wrap(tiny("llama")), build("embedding", family="llama")
    for lens, tokens, answer, level in (
        (untrained, drawn(sink)[:, :32] % 60, "no sink", "WARNING"),
        (untrained, drawn(sink)[:, :8] % 60, "not decided", "WARNING"),
        (wrap(sink.model), drawn(sink), "threshold", "INFO"),
    ):
        caplog.clear()
        assert sink_mask(lens, tokens).any() == (level == "INFO")
        (record,) = [one for one in caplog.records if one.name.endswith("sink_mask")]
        assert (answer in record.getMessage(), record.levelname) == (True, level)


@pytest.mark.parametrize("family", ZOO["spike"].families)
def test_a_massive_activation_that_is_no_sink_is_marked_by_its_norm_and_by_either(family):
    model = build("spike", family=family)
    tokens, lens = drawn(model), wrap(model.model)
    by = {rule: sink_mask(lens, tokens, by=rule) for rule in ("attention", "norm", "either")}
    assert torch.equal(by["norm"], tokens == model.bos_id)
    assert torch.equal(by["either"], by["norm"])
    assert not by["attention"].any()


def test_a_sink_that_is_not_massive_is_marked_by_attention_and_by_either():
    model = build("key_bias", family="llama")
    tokens, lens = drawn(model), wrap(model.model)
    by = {rule: sink_mask(lens, tokens, by=rule) for rule in ("attention", "norm", "either")}
    assert torch.equal(by["attention"], model.sinks(tokens))
    assert torch.equal(by["either"], by["attention"])
    assert not by["norm"].any()


def test_the_gap_is_stated_and_so_is_its_absence(caplog):
    with caplog.at_level(logging.DEBUG, logger="sink_lens"):
        found = build("bos_neuron", family="llama")
        sink_mask(wrap(found.model), drawn(found))
        none = build("untrained", family="llama")
        sink_mask(wrap(none.model), drawn(none))
    said = [record.message for record in caplog.records]
    with_gap, without = [one for one in said if one.startswith("marked as sinks by attention: ")]
    assert with_gap.startswith("marked as sinks by attention: 8 of 512 tokens are at 1")
    assert "threshold" in with_gap
    assert without.startswith(
        "marked as sinks by attention: no sink, so no token is marked; the largest of 512 is 1."
    )


def test_a_threshold_and_double_precision_are_taken_as_they_are():
    model = build("untrained", family="llama")
    lens, tokens = wrap(model.model), drawn(model)
    scores = sink_scores(lens, tokens)
    assert torch.equal(sink_mask(lens, tokens, threshold=1.05), scores >= 1.05)
    model = build("bos_neuron")
    tokens = drawn(model)
    single = sink_mask(wrap(model.model), tokens, by="either")
    assert torch.equal(sink_mask(wrap(model.model.double()), tokens, by="either"), single)


@pytest.mark.parametrize("by", ["attention", "norm", "rate"])
def test_padding_other_sequences_and_batch_size_change_no_score(by):
    model = build("delimiter")
    lens, tokens = wrap(model.model), drawn(model, length=48)
    lengths = torch.tensor([48, 30, 5, 1, 2, 17, 48, 33])
    together = sink_scores(lens, from_tensor(tokens, lengths=lengths), by=by)
    smaller = sink_scores(lens, from_tensor(tokens, lengths=lengths), by=by, batch_size=1)
    marked = sink_mask(lens, from_tensor(tokens, lengths=lengths), by=by)
    assert (marked.shape, marked.dtype) == (tokens.shape, torch.bool)
    assert not marked[together.isnan()].any()  # padding
    for row, length in enumerate(lengths.tolist()):
        assert together[row, length:].isnan().all()
        assert by == "rate" or not together[row, :length].isnan().any()
        same = partial(torch.testing.assert_close, together[row, :length], equal_nan=True)
        same(smaller[row, :length])
        if length > 1:
            alone = sink_scores(lens, tokens[row : row + 1, :length], by=by)
            same(alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", ["attention", "rate"])
def test_a_text_whose_queries_are_sampled_has_the_score_that_it_has_alone(by):
    lens, lengths = wrap(planted().model), [120, 91, 72, 91]
    tokens = torch.randint(3, 300, (4, 120), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = BOS_ID
    together = sink_scores(lens, from_tensor(tokens, lengths=torch.tensor(lengths)), by=by)
    for row, length in enumerate(lengths):
        alone = sink_scores(lens, tokens[row : row + 1, :length], by=by)[0]
        torch.testing.assert_close(
            together[row, :length], alone, rtol=1e-4, atol=1e-4, equal_nan=True
        )


def test_texts_that_are_too_short_to_be_judged_beside_the_others_are_counted(caplog):
    lens, lengths = wrap(planted().model), [250, 250, 250, 250, 20, 20, 20, 3]
    tokens = torch.randint(3, 300, (8, 250), generator=torch.Generator().manual_seed(0))
    tokens[:, [0, 9]] = BOS_ID
    marked = sink_mask(lens, from_tensor(tokens, lengths=torch.tensor(lengths)))
    assert marked[:, 0].tolist() == [True] * 4 + [False] * 4
    (record,) = [one for one in caplog.records if one.name.endswith("sink_mask")]
    assert record.levelname == "WARNING"
    assert "; 4 texts without a mark" in record.getMessage()


def test_short_texts_in_wide_rows_decide_nothing():
    scores = torch.full((2, 64), math.nan)
    scores[:, :8] = 1.0
    assert gap_answer(None, scores, by="attention")[0] == "undecided"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss", "mistral"])
def test_the_scores_are_those_of_the_bridges_pattern(family):
    lens = wrap(tiny(family))
    tokens = torch.randint(5, lens.d_vocab, (3, 40), generator=torch.Generator().manual_seed(0))
    pattern = capture(lens, tokens, sites=["pattern"], path="bridge")
    positions = torch.arange(1, 40)
    shares, layers = torch.zeros(3, 39, 40), torch.zeros(39, 40)
    for layer in range(lens.n_layers):
        reach = lens.reach(layer)
        reach = None if reach is None or reach > 40 else reach
        rows = pattern["pattern", layer][:, :, positions].float()
        shares += fair_shares(rows, row_positions=positions, reach=reach)
        layers += earlier_keys(positions, n_keys=40, reach=reach)
    every = torch.ones(3, 39, dtype=torch.bool)
    expected = share_score(
        shares / layers.clamp(min=1), seen=layers > 0, row_positions=positions, row_valid=every
    )
    torch.testing.assert_close(sink_scores(lens, tokens), expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_marked_is_refused():
    lens = wrap(tiny("llama"))
    with pytest.raises(InputError, match="a sequence has a single token; need at least 2"):
        sink_mask(lens, torch.ones(2, 1, dtype=torch.int64))
    with pytest.raises(
        InputError, match="a threshold was given for either; need by='attention' or by='norm'"
    ):
        sink_mask(lens, torch.ones(2, 8, dtype=torch.int64), by="either", threshold=2.0)
    with pytest.raises(InputError, match="the batch size is 0"):
        sink_mask(lens, torch.ones(2, 8, dtype=torch.int64), batch_size=0)


@pytest.mark.exhaustive
@pytest.mark.real
def test_the_first_tokens_of_the_default_model_are_marked_and_no_others():
    lens = load()
    for bos in ("with", "without"):
        tokens = TokenBatch.from_text(
            bundled_text(), lens.tokenizer, sequences=16, length=64, bos=bos
        )
        for by in ("attention", "norm"):
            found = sink_mask(lens, tokens, by=by)
            assert found[:, 0].all(), (bos, by)
            assert not found[:, 1:].any(), (bos, by)


def test_sink_positions_are_those_at_the_least_rate_strongest_first():
    def positions(*rates, **options):
        return sink_positions(torch.tensor(rates)[None, None], **options)

    assert positions(0.05, 0.0, 0.7, 0.04, 0.2) == (2, 4, 0)
    assert positions(0.05, 0.0, 0.7, 0.04, 0.2, shortest=3) == (2, 0)
    assert positions(0.2, 0.5, 0.2, 0.5, min_rate=0.1) == (1, 3, 0, 2)  # equal ones in their order
    assert positions(0.1, 0.2, 0.3, 0.4, 0.5) == (4, 3, 2, 1)  # at most four
    assert positions(0.1, math.nan, math.nan) == (0,)  # late keys that cannot be told
    assert positions(math.nan, math.nan) == ()


def test_a_trace_a_card_and_the_finder_see_one_sink():
    lens = wrap(planted().model)
    tokens = from_tensor(torch.randint(3, 300, (4, 48), generator=torch.Generator().manual_seed(2)))
    tokens.tokens[:, 5] = 1  # BOS, which is the sink wherever it stands
    tokens.tokens[:, 0] = 7
    rates = sink_rates(lens, tokens)
    marked = sink_mask(lens, tokens, by="rate")
    assert sink_positions(rates) == scout(lens, tokens, config=TraceConfig()).sink_positions == (5,)
    assert ObservedModel(lens, tokens).location.sink_positions == (5,)
    assert marked.nonzero()[:, 1].unique().tolist() == [5]
    assert torch.equal(marked, sink_mask(lens, tokens))
    torch.testing.assert_close(
        sink_scores(lens, tokens, by="rate"), rates.nanmean(0), equal_nan=True
    )


@pytest.mark.parametrize(
    ("threshold", "lengths", "window", "told"),
    [
        (0.2, (17, 16), None, (False, False)),
        (0.2, (18, 17), None, (True, False)),
        (0.1, (44, 43), None, (True, False)),
        (0.1, (100, 50, 44), None, (True, True, True)),  # as alone
        (0.1, (60,), 43, (False,)),
        (0.1, (64,), 44, (True,)),
        (0.1, (120,), 44, (False,)),  # 23 sampled queries see key 0: .11
        (0.05, (116, 64), None, (False, False)),
        (0.05, (117, 110), None, (True, False)),
        (0.05, (185, 118), None, (True, True)),
    ],
)
def test_uniform_attention_has_no_sink_at_a_low_threshold(threshold, lengths, window, told):
    family = "llama" if window is None else "mistral"
    fields = {} if window is None else {"sliding_window": window}
    lens = load(tiny(family, initializer_range=1e-4, **fields))
    given = torch.tensor(lengths)
    tokens = from_tensor(torch.randint(3, 300, (len(lengths), max(lengths))), lengths=given)
    rates = sink_rates(lens, tokens, threshold=threshold)
    assert not bool((rates > 0).any())
    assert (~rates.isnan()).any(dim=(0, 2)).tolist() == [*told]


@pytest.mark.parametrize("length", [8, 9, 10])
def test_uniform_attention_to_a_short_text_has_no_sink_rate(length):
    lens = load(tiny("llama", initializer_range=0.001))
    rate = sink_rates(lens, from_tensor(torch.randint(3, 300, (4, length))))[..., 0]
    assert bool(rate.isnan().all()) == (length < 10)  # at 9 tokens its score is .314
    assert not bool((rate > 0).any())


def test_a_rule_that_has_no_scores_of_its_own_is_refused():
    lens, tokens = wrap(tiny("llama")), torch.randint(3, 20, (2, 20))
    with pytest.raises(InputError, match="by is 'either'; need attention, norm or rate"):
        sink_scores(lens, tokens, by="either")

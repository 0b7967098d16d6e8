"""Where a token was given is where its results lie, and its loss is what its labels say."""

import pytest
import torch
from forms import FORMS, RESULTS, check, padded, texts
from lenses import lens_of
from transformers import DataCollatorWithFlattening

from sink_lens import capture, edits, run_with, sink_mask, stream, wrap
from sink_lens.activations.record import Reading, bytes_to_capture
from sink_lens.activations.sink_mask import sink_scores
from sink_lens.data.tokens import as_batch
from sink_lens.edits import metrics
from sink_lens.errors import InputError
from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import tiny

ROWS = texts()
LEFT = padded(ROWS, before=[12 - len(row) for row in ROWS])
REFUSED = {
    "ragged lists",
    "zeros as token types",
    "ids with embeds",
    "a mask with four axes",
    "a mask of text numbers",
    "a key that nothing reads",
    "labels of other tokens",
}
FEW = [result for result in RESULTS if result not in ("circuit", "patch", "attribution")]
"""Results whose check takes no more than milliseconds."""
FIRST = {
    ("llama", form, result)
    for number, form in enumerate(FORMS)
    for result in (
        *FEW[number % 2 :: 2][:3],
        *(("patch",) if form in ("padded on the left", "NumPy arrays") else ()),
    )
}


def test_a_text_is_taken_where_tokens_are():
    lens = wrap(tiny("llama"), tokenizer=tiny_tokenizer(adds_bos=True))
    said = ["the cat and", "the bat and the hog"]
    batch = as_batch(said, lens.tokenizer)
    assert torch.equal(run_with(lens, said).loss, run_with(lens, batch).loss)
    assert torch.equal(
        sink_scores(lens, said).nan_to_num(-1), sink_scores(lens, batch).nan_to_num(-1)
    )
    assert torch.equal(sink_mask(lens, said), sink_mask(lens, batch))
    found, expected = (
        capture(lens, one, sites=("z",), layers=[1])["z", 1] for one in (said, batch)
    )
    assert torch.equal(found[batch.valid], expected[batch.valid])
    logits = run_with(lens, said, logits=True).logits
    for one in (found.flatten(2), logits):  # behind the end of a shorter text is no number
        assert torch.equal(one.isnan().all(-1), ~batch.valid)
    one = run_with(lens, said[0], sites=("z",), logits=True)
    assert one.loss.shape == (1,)
    assert repr(one).endswith("; with logits, z")
    assert repr(batch).startswith("TokenBatch of 2 x ")
    assert len((repr(one) + repr(batch)).splitlines()) == 1
    with pytest.raises(InputError, match="no tokenizer"):
        run_with(wrap(tiny("llama")), said)


def test_a_pad_token_behind_the_vocabulary_is_no_token_of_a_text():
    tokenizer = tiny_tokenizer(adds_bos=True)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    lens = wrap(tiny("llama"), tokenizer=tokenizer)
    assert tokenizer.pad_token_id == lens.d_vocab
    said = ["the cat and", "the bat and the hog"]
    alone = [float(run_with(lens, one).loss) for one in said]
    for given in (said, tokenizer(said, return_tensors="pt", padding=True)):
        assert run_with(lens, given).loss.tolist() == pytest.approx(alone, abs=1e-5)


def hugging_face(family="llama"):
    positions = (LEFT["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return tiny(family)(**LEFT, position_ids=positions, output_hidden_states=True)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "mistral", "bloom", "falcon", "mixtral"]
)
def test_the_last_column_of_a_batch_padded_on_the_left_is_that_of_hugging_face(family):
    theirs, lens = hugging_face(family), lens_of(family)
    run = run_with(lens, LEFT, logits=True)
    torch.testing.assert_close(run.logits[:, -1], theirs.logits[:, -1], rtol=1e-4, atol=1e-4)
    stream_before = capture(lens, LEFT, sites=["resid_pre"], layers=[1])["resid_pre", 1]
    torch.testing.assert_close(
        stream_before[:, -1], theirs.hidden_states[1][:, -1], rtol=1e-4, atol=1e-4
    )
    real = LEFT["attention_mask"].bool()
    assert torch.equal(run.valid, real)
    assert torch.equal(run.logits.isnan().all(-1), ~real)
    assert torch.equal(stream_before.isnan().all(-1), ~real)


def test_the_marks_of_sinks_lie_over_the_users_own_activations():
    lens = lens_of("llama")
    scores = sink_scores(lens, LEFT, by="norm")
    marked = sink_mask(lens, LEFT, by="norm", threshold=float(scores[~scores.isnan()].median()))
    norms = capture(lens, LEFT, sites=["resid_post"])
    wanted = torch.stack([norms["resid_post", layer].norm(dim=-1) for layer in range(3)])
    wanted = (wanted / wanted.nanquantile(0.5, dim=2, keepdim=True)).amax(0)
    torch.testing.assert_close(scores, wanted, equal_nan=True)
    assert torch.equal(marked, scores >= scores[~scores.isnan()].median())


def test_an_edit_at_a_column_of_such_a_batch_is_refused_and_at_the_end_of_unequal_texts_too():
    for at in (11, -1):
        with pytest.raises(InputError, match=str(at)):
            run_with(lens_of("llama"), LEFT, edits.add("resid_post", 1.0, positions=[at]))


def test_the_loss_of_a_flattened_batch_is_that_of_its_texts():
    collated = DataCollatorWithFlattening()([{"input_ids": row} for row in ROWS])
    with torch.no_grad():
        theirs = float(tiny("llama")(**collated, use_cache=False).loss)
    run = run_with(lens_of("llama"), collated)
    assert run.loss.tolist() == pytest.approx([theirs], abs=1e-4)
    assert float(run.token_loss.nanmean()) == pytest.approx(theirs, abs=1e-4)
    assert run.mass.shape[1] == 3  # by text


def test_a_row_without_a_token_has_no_loss_though_there_are_as_many_texts_as_rows():
    lens, rows = lens_of("llama"), ROWS[:2]
    n = sum(map(len, rows))
    given = {
        "input_ids": torch.tensor([rows[0] + rows[1], [0] * n]),
        "attention_mask": torch.tensor([[1] * n, [0] * n]),
        "position_ids": torch.tensor([[*range(len(rows[0])), *range(len(rows[1]))], [0] * n]),
    }
    run = run_with(lens, given)
    torch.testing.assert_close(run.loss, run.token_loss.nanmean(1), equal_nan=True)
    assert run.loss.isnan().tolist() == [False, True]


def test_labels_of_minus_100_leave_their_tokens_out_of_the_loss():
    labels = torch.where(LEFT["attention_mask"] == 1, LEFT["input_ids"], -100)
    labels[:, :9] = -100
    positions = (LEFT["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = float(tiny("llama")(**LEFT, position_ids=positions, labels=labels).loss)
    run = run_with(lens_of("llama"), LEFT | {"labels": labels})
    assert float(run.token_loss.nanmean()) == pytest.approx(theirs, abs=1e-4)
    assert run.token_loss.isfinite().sum() == (labels[:, 1:] != -100).sum() == 9
    torch.testing.assert_close(run.loss, run.token_loss.nanmean(1))


def test_layers_are_read_in_the_order_in_which_they_are_asked_for():
    lens, tokens = lens_of("llama"), torch.tensor(ROWS[:1])
    every, some = run_with(lens, tokens), run_with(lens, tokens, layers=(2, 0))
    assert some.layers == (2, 0)
    assert torch.equal(some.mass, every.mass[[2, 0]])
    assert torch.equal(some.state, every.state[[2, 0]])
    assert torch.equal(
        run_with(lens, tokens, layers=(-1, 1), loss=False).state, every.state[[2, 1]]
    )


def test_a_metric_of_an_outcome_is_by_text_wherever_its_tokens_lie():
    lens, difference = lens_of("llama"), metrics.logit_difference(17, 40)
    alone = [run_with(lens, torch.tensor([row]), logits=True) for row in ROWS]
    wanted = [float(metrics.evaluate(difference, one)) for one in alone]
    flat = DataCollatorWithFlattening()([{"input_ids": row} for row in ROWS])
    for given in (LEFT, flat):
        run = run_with(lens, given, logits=True)
        assert metrics.evaluate(difference, run).tolist() == pytest.approx(wanted, abs=1e-4)
        losses = [float(one.loss) for one in alone]
        assert metrics.evaluate(metrics.loss(), run).tolist() == pytest.approx(losses, abs=1e-4)


def test_logits_that_lie_elsewhere_are_compared_text_by_text_or_refused():
    lens = lens_of("llama")
    run = run_with(lens, LEFT, logits=True)
    batch = metrics.TokenBatch.from_tensor(LEFT["input_ids"], attention_mask=LEFT["attention_mask"])
    own, wide = (run_with(lens, one, logits=True) for one in (batch, padded(ROWS, width=20)))
    for one in (own, wide):
        assert float(metrics.evaluate(metrics.kl_to(one.logits), one).abs().max()) < 1e-6
    with pytest.raises(InputError, match="token 0 of sequence 0"):
        metrics.evaluate(metrics.kl_to(run.logits), own)


@pytest.mark.parametrize("site", ["z", "pattern"])
def test_values_captured_with_padding_can_be_put_back(site):
    lens, flat = (
        lens_of("llama"),
        DataCollatorWithFlattening()([{"input_ids": row} for row in ROWS]),
    )
    for given in (padded(ROWS), padded(ROWS, width=20), LEFT, flat):
        kept = capture(lens, given, sites=[site], layers=[1])
        frozen = edits.freeze(site, {1: kept[site, 1]})
        change = edits.zero(site, layers=[1])
        before, after = (
            run_with(lens, given, some, quiet=True, logits=True).logits
            for some in ((), [change, frozen])
        )
        torch.testing.assert_close(after, before, equal_nan=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda marks: edits.window(4, keep=marks),
        lambda marks: edits.quantise("resid_post", "int4_tensor", tokens=marks),
    ],
)
def test_marks_that_an_edit_is_given_lie_as_the_tokens_do(make):
    lens = lens_of("llama")
    marks = [torch.arange(len(row)) == 1 for row in ROWS]
    alone = [
        run_with(lens, torch.tensor([row]), make(one[None]), logits=True).logits[0]
        for row, one in zip(ROWS, marks, strict=True)
    ]
    left = torch.stack([torch.nn.functional.pad(one, (12 - len(one), 0)) for one in marks])
    flat = DataCollatorWithFlattening()([{"input_ids": row} for row in ROWS])
    for given, laid in ((LEFT, left), (flat, torch.cat(marks)[None])):
        logits = run_with(lens, given, make(laid), logits=True).logits
        torch.testing.assert_close(
            logits[~logits.isnan().all(-1)], torch.cat(alone), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("positions", [None, [-1, -2]])
def test_the_size_of_a_capture_is_known_wherever_its_tokens_lie(positions):
    lens, sites = lens_of("llama"), ["z", "pattern"]
    for given in (LEFT, DataCollatorWithFlattening()([{"input_ids": row} for row in ROWS])):
        kept = capture(lens, given, sites=sites, layers=[1], positions=positions)
        size = bytes_to_capture(lens, as_batch(given), sites=sites, layers=[1], positions=positions)
        assert sum(one.numel() * one.element_size() for one in kept.tensors.values()) == size


def broken(token):
    """A model whose embedding of one id is nan."""
    lens = wrap(tiny("llama"))
    with torch.no_grad():
        lens.plain.get_input_embeddings().weight[token] = torch.nan
    return lens


@pytest.mark.parametrize("by", ["attention", "norm", "either", "rate"])
def test_a_nan_is_refused_by_sequence_and_token(by):
    long = torch.randint(3, 200, (3, 90), generator=torch.Generator().manual_seed(0))
    long[2, 71] = 250
    with pytest.raises(InputError, match="sequence 2 at token 71"):
        sink_mask(broken(250), long, by=by)


@pytest.mark.parametrize(
    "sites", [("resid_post",), ("mass",), ("rows",), ("key_scores", "neurons"), ("final",)]
)
def test_every_reading_refuses_a_nan(sites):
    tokens = torch.tensor([ROWS[1], [*ROWS[1][:4], 250, *ROWS[1][5:]]])
    reading = Reading(name="mine", sites=sites, function=lambda view: view[sites[0]])
    with pytest.raises(InputError, match="sequence 1 at token 4"):
        stream(broken(250), tokens, [reading], rows=torch.arange(12), batch_size=1)


def combinations():
    from forms import FAMILIES

    return [(family, form, result) for family in FAMILIES for form in FORMS for result in RESULTS]


@pytest.mark.parametrize(
    ("name", "form", "result"),
    [
        one if one in FIRST else pytest.param(*one, marks=pytest.mark.exhaustive)
        for one in combinations()
    ],
)
def test_a_result_of_any_form_is_that_of_plain_hugging_face_at_the_same_index_or_refused(
    name, form, result
):
    refused = check(name, form, result)
    dense = result != "circuit" or name not in ("mixtral", "qwen3_5", "lfm2", "deepseek_v3")
    if result != "monitor" and dense:
        assert bool(refused) == (form in REFUSED), refused

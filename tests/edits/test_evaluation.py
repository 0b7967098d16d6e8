"""A metric and an edit are of each sequence alone, or say that they are not; no number of theirs is a batch's."""

import pytest
import torch
from lenses import lens_of, speaking, tokens

from sink_lens import circuits, run_with, sweep
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import edit, metrics, zero
from sink_lens.engine import plan as planning
from sink_lens.errors import InputError
from sink_lens.patching import patch
from sink_lens.patching.path import path_patch
from sink_lens.sweeps import cell_of

N, LENGTH = 6, 12
BATCH = from_tensor(tokens(N, LENGTH))
OTHER = from_tensor(BATCH.tokens.roll(1, 0))
CELL = cell_of(zero("mlp_out", layers=[1], positions=[3]), name="one")
ANSWERS = list(range(5, 5 + N))


@pytest.fixture
def in_small_batches(monkeypatch):
    """A pass has two sequences."""
    monkeypatch.setattr(planning, "_CPU_TOKENS", 2 * LENGTH)


def swept(out, metric, *, cells=(CELL,), **options):
    given = {"tokens": BATCH, "metrics": [metric], "progress": False} | options
    return sweep(lens_of(), list(cells), out=out, **given)


@pytest.mark.parametrize("of", [torch.sum, torch.amax], ids=["sum", "maximum"])
def test_one_number_for_all_sequences_is_that_of_all(tmp_path, in_small_batches, of):
    whole = metrics.on_batch(metrics.on_outcome(lambda run: of(run.loss), name="whole"))
    row = swept(tmp_path, whole).frame.iloc[0]
    (edited,) = CELL.edits
    for name, edits in (("baseline", ()), ("value", edited)):
        assert row[name] == pytest.approx(
            float(of(run_with(lens_of(), BATCH, edits).loss)), rel=1e-6
        )
    assert row["n"] == 1
    assert torch.tensor([row["ci_low"], row["ci_high"]]).isnan().all()


LOOKS_AT_OTHERS = {
    "rank": lambda logits: logits[:, -1, 5].argsort().argsort(),
    "difference from the mean": lambda logits: logits[:, -1, 5] - logits[:, -1, 5].mean(),
    "small difference": lambda logits: (one := logits[:, -1].softmax(-1)[:, 5]) - one.mean(),
    "closure": lambda logits: logits[torch.arange(N), -1, ANSWERS],
    "first answers": lambda logits: logits[torch.arange(len(logits)), -1, ANSWERS[: len(logits)]],
    "of an outcome": metrics.on_outcome(lambda run: run.loss / run.loss.sum()),
}


@pytest.mark.parametrize("name", LOOKS_AT_OTHERS)
def test_a_metric_that_looks_at_other_sequences_is_refused_everywhere(
    tmp_path, in_small_batches, name
):
    lens, metric = lens_of(), LOOKS_AT_OTHERS[name]
    ends = {"sender": ("z", 0), "receiver": ("q", 2), "progress": False}
    for ask in (
        lambda: swept(tmp_path / "sweep", metric),
        lambda: patch(lens, BATCH, OTHER, metric=metric, progress=False),
        lambda: path_patch(lens, BATCH, OTHER, metric=metric, **ends),
        lambda: circuits.find(lens, BATCH, OTHER, metric=metric, batch_size=1),
    ):
        with pytest.raises((InputError, IndexError)) as found:
            ask()
        assert "on_logits" in " ".join([str(found.value), *getattr(found.value, "__notes__", ())])


def test_answers_of_each_sequence_are_cut_as_the_sequences_are(tmp_path, in_small_batches):
    own = metrics.on_logits(
        lambda logits, ids: logits[torch.arange(len(ids)), -1, ids], ids=ANSWERS
    )
    found = swept(tmp_path, own).values["value"]
    edited = run_with(lens_of(), BATCH, CELL.edits, logits=True).logits
    assert found.tolist() == pytest.approx(edited[torch.arange(N), -1, ANSWERS].tolist(), abs=1e-5)
    with pytest.raises(InputError, match=f"data of 2 sequences and is read of {N}"):
        swept(tmp_path / "few", metrics.on_logits(lambda logits, ids: logits[:, -1, 5], ids=[1, 2]))


MIXES = {
    "mean ablation": lambda x, at: x.mean(0, keepdim=True).expand_as(x),
    "permutation": lambda x, at: x.roll(1, 0),
    "mean of what it reads": lambda x, at: x + at.read.mean(),
    "closure": lambda x, at: x[torch.arange(len(x)).flip(0)],
    "noise": lambda x, at: x + torch.randn_like(x),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("batch_size", [1, 4, N])
def test_an_edit_that_mixes_sequences_is_refused_whatever_the_batch(name, batch_size):
    mixes = edit("mlp_out", MIXES[name], reads="attn_out", layers=[1])
    with pytest.raises(InputError, match="whole_batch=True"):
        run_with(lens_of(), BATCH, mixes, batch_size=batch_size)
    run_with(lens_of(), BATCH[:1], mixes, quiet=True)  # there is nothing to mix


def test_an_edit_that_hangs_on_the_row_of_a_pass_is_refused():
    vectors = torch.randn(2, 1, 48, generator=torch.Generator().manual_seed(0))
    by_row = edit("mlp_out", lambda x, at: x + vectors, layers=[1])
    with pytest.raises(InputError, match="whole_batch=True"):
        run_with(lens_of(), BATCH[:4], by_row, batch_size=2)
    run_with(lens_of(), BATCH[:2], by_row)  # which are the rows of the run


def test_an_edit_of_the_whole_batch_has_one_number_for_a_sequence(
    tmp_path, in_small_batches, monkeypatch
):
    mean = edit("mlp_out", MIXES["mean ablation"], layers=[1], whole_batch=True)
    monkeypatch.setattr("sink_lens.engine.forward._TOKENS_A_FORWARD", 2 * LENGTH)
    by_hand = edit("mlp_out", lambda x, at: values.mean(0, keepdim=True).expand_as(x), layers=[1])
    values = run_with(lens_of(), BATCH, sites=("mlp_out",)).tensors["mlp_out", 1]
    wanted = run_with(lens_of(), BATCH, by_hand).loss
    torch.testing.assert_close(run_with(lens_of(), BATCH, mean).loss, wanted)
    found = swept(
        tmp_path, metrics.loss(), cells=[cell_of(mean, name="mean"), CELL], controls=0
    ).values
    assert found["value"][:N].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    beside = patch(
        lens_of(),
        BATCH,
        OTHER,
        metric=metrics.loss(),
        edits=mean,
        layers=[2],
        positions=[3],
        controls=0,
    )
    assert beside.baseline == pytest.approx(
        run_with(lens_of(), OTHER, mean).loss.mean().item(), abs=1e-5
    )
    with pytest.raises(InputError, match=f"this pass has 2 of {N}"):
        run_with(lens_of(), BATCH, mean, batch_size=2)


@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf, torch.nan])
def test_a_sequence_whose_number_is_not_finite_is_left_out_of_baseline_value_and_effect(
    tmp_path, nothing
):
    plus = torch.zeros(N)
    plus[2] = nothing
    row = swept(
        tmp_path, metrics.on_logits(lambda logits, plus: logits[:, -1, 5] + plus, plus=plus)
    ).frame.iloc[0]
    kept = [0, 1, 3, 4, 5]
    before, after = (
        run_with(lens_of(), BATCH, one, logits=True).logits[kept, -1, 5] for one in ((), CELL.edits)
    )
    assert row["n"] == len(kept)
    assert row["baseline"] == pytest.approx(before.mean().item(), abs=1e-5)
    assert row["value"] == pytest.approx(after.mean().item(), abs=1e-5)
    assert row["effect"] == pytest.approx((after - before).mean().item(), abs=1e-5)
    with pytest.raises(InputError, match="infinite in pair 2"):
        circuits.find(
            lens_of(),
            BATCH,
            OTHER,
            metric=metrics.on_logits(lambda logits, plus: logits[:, -1, 5] + plus, plus=plus),
        )


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_a_metric_keeps_what_float32_cannot_hold(tmp_path, kind):
    large = metrics.on_logits(lambda logits: (logits[:, -1, 5] * 100).round().to(kind) + 2**30)
    row = swept(tmp_path, large).frame.iloc[0]
    runs = (
        run_with(lens_of(), BATCH, one, logits=True).logits[:, -1, 5] for one in ((), CELL.edits)
    )
    before, after = ((one * 100).round().double() for one in runs)
    assert row["effect"] == pytest.approx((after - before).mean().item(), abs=0.2)
    assert row["effect"] != 0


def test_texts_of_answers_are_read_by_the_models_own_tokenizer():
    lens = speaking()
    words = metrics.logit_difference("!", "?")
    ids = metrics.logit_difference(*(lens.tokenizer.convert_tokens_to_ids(one) for one in "!?"))
    texts = ["x y", "y x"], ["y y", "x x"]
    found = circuits.find(lens, *texts, metric=words, method="eap", edges=20)
    assert torch.equal(
        found.runs.clean_values,
        circuits.find(lens, *texts, metric=ids, method="eap", edges=20).runs.clean_values,
    )
    assert (
        patch(lens, *texts, metric=words, layers=[1], progress=False).metric
        == "logit difference (! − ?)"
    )
    with pytest.raises(InputError, match="need a tokenizer"):
        patch(lens_of(), BATCH, OTHER, metric=words)


@pytest.mark.parametrize("parameter", ["logits", "x"])
def test_the_last_column_is_the_last_token_if_prompts_differ_in_length(parameter):
    last = eval(f"lambda {parameter}: {parameter}[:, -1, 5]")
    lengths = torch.tensor([LENGTH, 7, LENGTH, 9, 7, LENGTH])
    pair = [from_tensor(one.tokens, lengths=lengths) for one in (BATCH, OTHER)]
    found = patch(lens_of(), *pair, metric=last, layers=[1], positions=[3], progress=False)
    for row, length in enumerate(lengths.tolist()):
        alone = [from_tensor(one.tokens[row : row + 1, :length]) for one in (BATCH, OTHER)]
        own = patch(lens_of(), *alone, metric=last, layers=[1], positions=[3], progress=False)
        assert found.values[0, row].item() == pytest.approx(own.values.item(), abs=1e-5)

"""Three means, by hand, and one meaning in every command that takes one."""

import numpy as np
import pandas as pd
import pytest
import torch

from sink_lens import TokenBatch, capture, edits, run_with, sweep, wrap
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.measure import scout
from sink_lens.chain.setting import make_setting
from sink_lens.edits import MEANS
from sink_lens.edits.mean_ablation import Averaged, tokens_to_average
from sink_lens.edits.normalisation import natural_rms
from sink_lens.errors import InputError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.sweeps import EditGrid, Grid, MetricSpec
from sink_lens.sweeps.cells import grid_cells
from tests.tiny_families import tiny

LENGTHS = (24, 14, 19)
BOS = 1


@pytest.fixture(scope="module")
def lens():
    return wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True))


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (3, 24), generator=generator)
    tokens[:, 0] = BOS
    tokens[2, 7] = BOS  # a second sink, inside
    return TokenBatch.from_tensor(tokens, lengths=torch.tensor(LENGTHS))


def test_the_three_means_by_hand(lens, batch):
    clean = capture(lens, batch, sites=["mlp_out"], layers=[3], path="bridge")[
        "mlp_out", 3
    ].double()
    real = [(row, position) for row, length in enumerate(LENGTHS) for position in range(length)]
    ordinary = [(row, p) for row, p in real if int(batch.tokens[row, p]) != BOS]
    assert (len(real), len(ordinary)) == (24 + 14 + 19, 24 + 14 + 19 - 4)

    def set_to(make):
        edit = make(lens, batch, "mlp_out", layers=[3])
        return run_with(lens, batch, [edit], sites=("mlp_out",)).tensors["mlp_out", 3]

    for make, places in ((edits.mean_all, real), (edits.mean_ordinary, ordinary)):
        wanted = torch.stack([clean[place] for place in places]).mean(0).float()
        found = set_to(make)
        torch.testing.assert_close(found, wanted.expand_as(found), rtol=1e-5, atol=1e-6)
    found = set_to(edits.mean_aligned)
    for position in range(24):
        rows = [row for row, length in enumerate(LENGTHS) if length > position]
        wanted = torch.stack([clean[row, position] for row in rows]).mean(0).float()
        torch.testing.assert_close(found[0, position], wanted, rtol=1e-5, atol=1e-6)


def test_means_are_the_same_where_rows_are_padded_on_the_left(lens, batch):
    ids, mask = torch.zeros(2, 3, 24, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, 24 - length :], mask[row, 24 - length :] = batch.tokens[row, :length], 1
    left = {"input_ids": ids, "attention_mask": mask}
    for make in (edits.mean_ordinary, edits.mean_all, edits.mean_aligned):
        own, other = (make(lens, tokens, "mlp_out", layers=[3]) for tokens in (batch, left))
        losses = [run_with(lens, batch, edit).loss for edit in (own, other)]
        torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    grid = Grid.of(*(EditGrid(kind=mean, site="mlp_out", layers=3) for mean in MEANS))
    metric = MetricSpec(name="loss")
    swept = [
        sweep(lens, grid, tokens=tokens, metrics=[metric], progress=False).values
        for tokens in (batch, left)
    ]
    pd.testing.assert_frame_equal(*swept, atol=1e-6)


def test_texts_and_what_a_tokenizer_returns_are_tokens(lens):
    texts = ["x y z x", "y x"]
    given = lens.tokenizer(texts, padding=True, return_tensors="pt")
    batch = TokenBatch.from_prompts(texts, lens.tokenizer)
    for make in (edits.mean_ordinary, edits.mean_all, edits.mean_aligned):
        wanted = run_with(lens, batch, make(lens, batch, "z", heads=[0])).loss
        for tokens in (texts, dict(given)):
            torch.testing.assert_close(
                run_with(lens, batch, make(lens, tokens, "z", heads=[0])).loss, wanted
            )
    assert edits.mean_all(lens, texts[0], "z").label == "z, mean_all: all of 8 tokens"
    by_text = natural_rms(lens, texts, first_position=1)
    for layer, size in natural_rms(lens, batch, first_position=1).items():
        torch.testing.assert_close(by_text[layer], size)


def test_every_command_that_takes_a_mean_takes_the_same_one(lens, batch, tmp_path):
    config = TraceConfig(intervention_sequences=3, intervention_length=16)
    location = scout(lens, batch, config=config)
    with pytest.warns(UserWarning, match="interventions read the first 14 of each"):
        setting = make_setting(lens, batch, location=location, config=config)
    few = setting.tokens  # 3 sequences of 14 tokens
    where = {"layers": [3], "positions": [0], "units": [4, 9]}
    (kept,) = setting.freeze_unit_edits("mlp_out", {3: [4, 9]}, position=0, mean=True)
    by_hand = edits.mean_ordinary(lens, few, "mlp_out", **where)
    grid = EditGrid(kind="mean_ordinary", site="mlp_out", layers=3, positions=[0], units=[[4, 9]])
    swept = sweep(
        lens,
        Grid.of(grid, controls=0),
        tokens=few,
        metrics=[MetricSpec(name="loss")],
        out=tmp_path / "a",
    )
    losses = [run_with(lens, few, [one], loss=True).loss for one in (kept, by_hand)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    assert float(swept.frame["value"].iloc[0]) == pytest.approx(float(losses[0].mean()), rel=1e-6)
    assert setting.averaged.words == "mean_ordinary: 42 tokens without 4 sinks"
    assert setting.averaged.words in swept.headline
    assert by_hand.label == f"mlp_out, {setting.averaged.words}"


def test_of_a_short_pair_nothing_but_the_sink_is_left_out(lens, batch):
    pair = TokenBatch.from_tensor(batch.tokens[:2, :14])
    assert (
        tokens_to_average(lens, pair, "mean_ordinary").mask.tolist() == [[False] + [True] * 13] * 2
    )


def test_where_there_is_no_sink_it_says_so():
    tokens = TokenBatch.from_tensor(
        torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    )
    found = tokens_to_average(wrap(tiny("llama")), tokens, "mean_ordinary")
    assert found.words == "mean_ordinary: no sink was found among 24 tokens, so all of them"
    assert found.mask.all()


def test_refusals(lens, batch):
    with pytest.raises(
        InputError, match="no position is left for mean_ordinary: all 57 tokens are sinks"
    ):
        tokens_to_average(lens, batch, "mean_ordinary", sinks=torch.ones_like(batch.valid))
    with pytest.raises(
        InputError, match=r"no kind of edit 'mean'; need .* mean_ordinary, mean_all, mean_aligned"
    ):
        grid_cells(Grid.of(EditGrid(kind="mean", site="mlp_out")), lens, n_positions=24)
    for make in (edits.mean_ordinary, edits.mean_all, edits.mean_aligned):
        with pytest.raises(
            InputError, match=r"'pattern' has the axes .*; need a site with positions"
        ):
            make(lens, batch, "pattern")
        with pytest.raises(InputError, match="unit 48 does not exist; need 0 to 47"):
            make(lens, batch, "mlp_out", units=[48])
        with pytest.raises(
            InputError, match=rf"EditGrid\(kind='{make.__name__}', site='z', heads="
        ):
            make(lens, batch, "z", heads="each")


def test_indices_may_be_an_array(lens, batch):
    made = edits.mean_all(lens, batch, "z", layers=[1], heads=np.arange(2))
    assert made.heads == (0, 1)


def test_a_mean_is_0_where_no_sequence_has_a_token():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.arange(6.0).reshape(2, 3, 1)
    aligned = Averaged(mean="mean_aligned", mask=mask, n_sinks=0).mean_of(values)
    assert aligned.tolist() == [[[1.5], [1.0], [0.0]]]  # (0 + 3) / 2, 1 alone, nothing
    values[1, 1:] = torch.nan  # padding
    assert torch.equal(Averaged(mean="mean_aligned", mask=mask, n_sinks=0).mean_of(values), aligned)
    assert set(MEANS) == {"mean_ordinary", "mean_all", "mean_aligned"}

"""Metrics: the number that each gives, checked by hand, and what is refused."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from lenses import lens_of, speaking
from prompt_pairs import as_llama_2

from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.edits.metrics import Metric, as_metric, evaluate
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, SiteError

LENS = lens_of("llama")
TOKENS = torch.randint(3, 300, (3, 9), generator=torch.Generator().manual_seed(0))
BATCH = from_tensor(TOKENS)
PADDED = from_tensor(TOKENS, lengths=torch.tensor([9, 5, 9]))


def outcome(tokens=TOKENS, **options):
    return run_with(LENS, tokens, logits=True, **options)


def test_sink_mass_is_the_mean_over_heads_and_the_chosen_layers():
    run = outcome(positions=(0, 2))
    assert torch.equal(
        evaluate(metrics.sink_mass(2, layers=[1]), run), run.mass[1, :, :, 1].mean(1).double()
    )
    assert torch.allclose(
        evaluate(metrics.sink_mass(0), run), run.mass[..., 0].mean((0, 2)).double()
    )
    assert math.isnan(evaluate(metrics.sink_mass(8), outcome(positions=(8,)))[0])


def test_logit_difference_reads_each_sequences_own_tokens_at_its_last_real_position():
    run = outcome(PADDED)
    found = evaluate(metrics.logit_difference([5, 6, 7], 8), run)
    by_hand = [
        run.logits[row, at, one] - run.logits[row, at, 8]
        for row, at, one in ((0, 8, 5), (1, 4, 6), (2, 8, 7))
    ]
    assert found.tolist() == pytest.approx([float(one) for one in by_hand])
    early = evaluate(metrics.logit_difference(5, 8, position=3), run)
    assert torch.equal(early, (run.logits[:, 3, 5] - run.logits[:, 3, 8]).double())


def test_divergence_from_itself_is_zero_and_from_others_the_textbook_sum():
    run, other = outcome(PADDED), outcome(from_tensor(TOKENS.flip(1), lengths=PADDED.lengths))
    assert evaluate(metrics.kl_to(run.logits), run).abs().max() < 1e-6
    found = evaluate(metrics.kl_to(other.logits), run)
    p, q = other.logits.double().softmax(-1), run.logits.double().softmax(-1)
    by_position = (p * (p.log() - q.log())).sum(-1)
    assert found[1].item() == pytest.approx(by_position[1, :5].mean().item(), rel=1e-4)


@pytest.mark.parametrize("site", ["resid_post", "z", "neurons"])
def test_norm_is_euclidean_over_everything_at_the_position(site):
    run = outcome(sites=(site,))
    found = evaluate(metrics.norm(3, layer=1, site=site), run)
    assert torch.allclose(
        found, run.tensors[site, 1][:, 3].flatten(1).square().sum(1).sqrt().double()
    )


def test_dominance_is_largest_over_mean_magnitude():
    run = outcome(positions=(0,))
    state = run.state[2, :, 0].abs()
    assert torch.allclose(
        evaluate(metrics.dominance(0, layer=2), run), (state.amax(1) / state.mean(1)).double()
    )


def test_a_function_of_ones_own_reads_logits_loss_and_all_layers():
    def mine(run):
        return run.logits[:, -1, 0] + run.loss

    made = as_metric(metrics.on_outcome(mine), LENS, BATCH)
    assert (made.name, made.loss, made.logits, made.layers) == ("mine", True, True, None)
    assert evaluate(made, outcome()).shape == (3,)


@pytest.mark.parametrize("value", [2, torch.tensor(1.5)])
def test_a_single_number_is_of_the_whole_batch(value):
    single = Metric(name="m", function=lambda run: value)
    assert evaluate(metrics.on_batch(single), outcome()).tolist() == [float(value)]
    with pytest.raises(InputError, match="on_batch"):
        evaluate(single, outcome())


@pytest.mark.parametrize(
    "bad", [torch.ones(2), torch.ones(3, 9), "text", [1.0, 2.0, 3.0], None, torch.ones(3) * 1j]
)
def test_anything_else_than_one_number_a_sequence_is_refused(bad):
    with pytest.raises(InputError, match=r"for 3 sequences"):
        evaluate(Metric(name="m", function=lambda run: bad), outcome())


def test_what_the_run_or_the_model_does_not_have_is_refused():
    for change in (lambda one: one.mass.mul_(0), lambda one: one.tensors["z", 1].zero_()):
        with pytest.raises(InputError, match="the metric 'm' changed a tensor of the run in place"):
            evaluate(Metric(name="m", function=change), outcome(sites=("z",)))
    with pytest.raises(InputError, match="the metric is str; need a Metric"):
        as_metric("loss", LENS, BATCH)
    with pytest.raises(SiteError, match="no site 'gate'"):
        as_metric(Metric(name="m", function=len, sites=("gate",)), lens_of("gpt2"), BATCH)
    for site in ("pattern", "final", "nowhere"):
        with pytest.raises(InputError, match="no norm of a position"):
            metrics.norm(0, layer=0, site=site)
    for made in (metrics.norm(6, layer=0), metrics.dominance(6, layer=0)):
        with pytest.raises(InputError, match="position 6 is padding"):
            evaluate(made, outcome(PADDED, positions=(6,), sites=("resid_post",)))
    with pytest.raises(
        InputError, match="position 5 is outside a sequence of 5 tokens; need -5 to 4"
    ):
        evaluate(metrics.logit_difference(1, 2, position=5), outcome(PADDED))
    with pytest.raises(InputError, match="data of 2 sequences and is read of 3"):
        evaluate(metrics.logit_difference([1, 2], 3), outcome())
    with pytest.raises(InputError, match="not all in the vocabulary; need 0 to 299"):
        evaluate(metrics.logit_difference(300, 3), outcome())
    with pytest.raises(InputError, match=r"shape \(3, 4, 300\), those of the run \(3, 9, 300\)"):
        evaluate(metrics.kl_to(outcome().logits[:, :4]), outcome())
    with pytest.raises(InputError, match="no layers"):
        metrics.sink_mass(0, layers=[])


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (Metric(name="m", function=len, layers=(7,)), "reads layer 7; need 0 to 2"),
        (Metric(name="m", function=len, positions=(9,)), "reads position 9; need 0 to 8"),
        (Metric(name="m", function=len, positions=()), "names no position"),
        (Metric(name="m", function=len, layers=()), "reads no layers, no loss and no logits"),
    ],
)
def test_what_a_metric_cannot_read_is_refused(metric, text):
    with pytest.raises(InputError, match=text):
        as_metric(metric, LENS, BATCH)


OWN = {
    "last": lambda logits: logits[:, -1, 5],
    "mean": lambda logits: logits[..., 5].mean(1),
    "right or wrong": lambda logits: logits[:, -1, 5] > logits[:, -1, 6],
    "of an outcome": metrics.on_outcome(
        lambda run: run.logits[:, -1, 5] + run.loss + run.token_loss[:, -1]
    ),
    "a site": metrics.on_outcome(lambda run: run.tensors["z", 1][:, -1, 0, 0], sites=("z",)),
    "attention": metrics.on_outcome(
        lambda run: run.tensors["pattern", 1][:, 0, -1, -1], sites=("pattern",)
    ),
    "answers": metrics.on_logits(
        lambda logits, ids, names: logits[torch.arange(len(ids)), -1, ids] + len(names[0]),
        ids=[5, 6, 7],
        names="aaa",
    ),
    "one logit": replace(metrics.logit_difference(5, 6), name="scored"),
    "masked": lambda logits: logits.log_softmax(-1)[..., 5].mean(1),
    "loss": metrics.on_outcome(lambda run: run.loss),
}


@pytest.mark.parametrize("name", OWN)
def test_a_function_gets_sequences_of_one_length(name):
    metric = as_metric(OWN[name], LENS, PADDED)
    found = evaluate(metric, outcome(PADDED, sites=("z", "pattern")))
    for row, length in enumerate(PADDED.lengths.tolist()):
        run = replace(
            outcome(TOKENS[row : row + 1, :length], sites=("z", "pattern")),
            sequences=slice(row, row + 1),
        )
        assert found[row].item() == pytest.approx(evaluate(metric, run).item(), abs=1e-5)


def test_a_function_of_the_whole_batch_gets_nan_at_padding():
    run = outcome(PADDED, sites=("z",))
    last = metrics.on_batch(lambda logits: logits[:, -1, 5].mean())
    site = metrics.on_batch(
        metrics.on_outcome(lambda run: run.tensors["z", 1][:, -1].sum(), sites=("z",))
    )
    assert evaluate(last, run).isnan().all()
    assert evaluate(site, run).isnan().all()
    assert evaluate(last, outcome()).item() == pytest.approx(
        outcome().logits[:, -1, 5].mean().item()
    )
    assert (
        evaluate(metrics.on_batch(metrics.on_outcome(lambda run: run.loss.max())), run)
        == run.loss.max()
    )


def test_an_answer_is_the_token_behind_the_prompt_and_the_metric_names_it():
    tokenizer = as_llama_2()
    of = functools.partial(metrics.logit_difference, tokenizer=tokenizer)
    for prompt, answers, read in (
        ("gave to", (" Mary", " John"), ("▁Mary", "▁John")),
        ("year 1", ("7", "5"), ("7", "5")),
        ("year", ("=", "."), ("=", ".")),
        ("year ", ("7", "5"), ("7", "5")),
    ):
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        for found in (
            of(*answers, prompt=prompt),
            of(*answers).on([from_tensor(torch.tensor([ids, ids]))], None),
        ):
            assert found.name == f"logit difference ({' − '.join(one.strip('▁') for one in read)})"
    with pytest.raises(
        InputError, match=r"'Mary' changes the tokens of the prompt .*\('gave to'\)"
    ):
        of("Mary", "John", prompt="gave to")
    with pytest.raises(InputError, match="'17' is 2 tokens behind 'year '; need one"):
        of("17", "5", prompt="year ")


def test_an_answer_whose_space_may_be_forgotten_warns_and_the_name_shows_it():
    tokenizer = speaking().tokenizer
    assert [
        len(tokenizer(text, add_special_tokens=False).input_ids) for text in ("a", " a", " the")
    ] == [1] * 3
    of = functools.partial(metrics.logit_difference, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match=r"'a' behind 'x y' has no space .* ' a'") as told:
        found = of("a", " the", prompt="x y")
    assert told[0].filename == __file__
    assert found.name == "logit difference ('a' − the)"
    assert of(" the", " a", prompt="x y").name == "logit difference (the − a)"
    for prompt in ("x (", "x\n"):  # no word before it: no warning, which is an error here
        of("a", 5, prompt=prompt)


def test_a_metric_is_printed_in_one_line():
    said = repr(metrics.logit_difference(" A", " B"))
    assert "(' A' − ' B')" in said
    assert "0x" not in said
    assert len(said) < 80

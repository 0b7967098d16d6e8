"""What a sweep reads, by name: every option, what is refused, and what the record keeps of a metric."""

import functools
import json
from typing import get_args

import pytest
import torch

from sink_lens import TokenBatch, run_with
from sink_lens.edits.metrics import as_metric, kl_to, logit_difference, loss, on_outcome, sink_mass
from sink_lens.edits.named_metrics import METRICS
from sink_lens.engine.forward import baseline_logits
from sink_lens.engine.measured import metric_config, resolve_metrics
from sink_lens.engine.needs import Needs
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.patching.config import MetricName
from sink_lens.sweeps import MetricSpec
from tests.tiny_families import tiny

EIGHT = TokenBatch.from_tensor(torch.arange(3, 11)[None])


@functools.cache
def llama():
    return wrap(tiny("llama", num_hidden_layers=3), tokenizer=tiny_tokenizer())


def metric(name, **options):
    return as_metric(MetricSpec(name=name, options=options).make_metric(llama()), llama(), EIGHT)


def test_every_metric_by_name_is_the_metric_of_these_options():
    mass = metric("sink_mass", sink_position=2, layers="0,2")
    assert (mass.positions, mass.layers) == ((2,), (0, 2))
    assert mass.name == "sink mass at position 2, layers 0,2"
    assert metric("sink_mass").layers is metric("sink_mass", layers="all").layers is None
    assert metric("sink_mass", layers=[[0, 1], 1]).layers == (0, 1)
    assert metric("loss").loss
    assert (
        metric("norm", layer=1, sink_position=3, site="z").name
        == "norm of z at position 3, layer 1"
    )
    assert metric("norm", layer="2").sites == ("resid_post",)
    assert metric("dominance", layer=1).layers == (1,)
    assert metric("logit_difference", correct=5, incorrect=6, position=2).scored == 2
    kl = MetricSpec(name="kl").make_metric(
        llama(), functools.partial(baseline_logits, llama(), EIGHT)
    )
    run = run_with(llama(), EIGHT, logits=True)
    assert float(kl.function(run).abs().max()) < 1e-6  # of the baseline run with itself
    with pytest.raises(
        InputError,
        match="kl compares with the predictions of a baseline run; need what computes them",
    ):
        metric("kl")
    assert set(METRICS) == set(get_args(MetricName))


def test_the_last_layer_is_that_up_to_which_a_pass_is_run():
    options = {
        "logit_difference": {"correct": 5, "incorrect": 6},
        "norm": {"layer": 1},
        "dominance": {"layer": 0},
    }
    specs = [MetricSpec(name=name, options=options.get(name, {})) for name in METRICS]
    specs += [MetricSpec(name="sink_mass", options={"layers": "0-1"})]
    for spec in specs:
        made = spec.make_metric(llama(), functools.partial(baseline_logits, llama(), EIGHT))
        needs = Needs.of_metrics([made], lens=llama())
        assert spec.last_layer(llama()) == (None if needs.whole else needs.n_layers_needed - 1), (
            spec
        )


def test_the_tokens_of_a_logit_difference_can_be_texts():
    by_text = MetricSpec(name="logit_difference", options={"correct": " the", "incorrect": "a"})
    ids = [llama().tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" the", "a")]
    assert [len(one) for one in ids] == [1, 1]
    found = as_metric(by_text.make_metric(llama()), llama(), EIGHT)
    run = run_with(llama(), EIGHT, logits=True)
    assert torch.equal(
        found.function(run), logit_difference(*(one[0] for one in ids)).function(run)
    )
    assert (
        resolve_metrics([by_text], llama(), tokens=EIGHT)[0].name
        == found.name
        == "logit difference (the − 'a')"
    )


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("mass", {}, "there is no metric 'mass'; need one of sink_mass, loss"),
        ("loss", {"key": 0}, "the metric loss takes no options and needs none; found key"),
        ("sink_mass", {"layer": 1}, "takes sink_position, layers and needs none; found layer"),
        ("norm", {}, "needs layer; found none"),
        (
            "sink_mass",
            {"sink_position": "0"},
            "sink_position of a metric is '0'; need a whole number",
        ),
        ("sink_mass", {"layers": "0-3"}, "layers of a metric: 3 does not exist; need 0 to 2"),
        ("sink_mass", {"layers": []}, "layers of a metric is empty"),
        ("norm", {"layer": "0-1"}, "the layer of a metric is '0-1'; need one number"),
        ("norm", {"layer": 1, "site": "pattern"}, "no norm of a position at 'pattern'"),
        (
            "logit_difference",
            {"correct": "two words", "incorrect": 1},
            r"'two words' is \d+ tokens behind .*; need",
        ),
        (
            "logit_difference",
            {"correct": True, "incorrect": 1},
            "is True; need an id, or the text of one token",
        ),
    ],
)
def test_a_metric_that_cannot_be_made_is_refused(name, options, text):
    with pytest.raises(InputError, match=text):
        metric(name, **options)


def test_texts_without_a_tokenizer_and_two_metrics_of_one_name_are_refused():
    bare = wrap(tiny("llama"))
    with pytest.raises(
        InputError, match="the token is the text 'a'; need a tokenizer to read it, or its id"
    ):
        resolve_metrics(
            [MetricSpec(name="logit_difference", options={"correct": "a", "incorrect": 2})],
            bare,
            tokens=EIGHT,
        )
    with pytest.raises(InputError, match="two metrics have one name: loss, loss"):
        resolve_metrics([MetricSpec(name="loss"), loss()], llama(), tokens=EIGHT)


def test_two_metrics_of_one_kind_are_named_with_their_options():
    pairs = [{"correct": 5, "incorrect": 6}, {"correct": 7, "incorrect": 6, "position": 3}]
    specs = [MetricSpec(name="logit_difference", options=one) for one in pairs]
    assert [
        one.name
        for one in resolve_metrics([*specs, MetricSpec(name="loss")], llama(), tokens=EIGHT)
    ] == [
        "logit difference (correct 5, incorrect 6)",
        "logit difference (correct 7, incorrect 6, position 3)",
        "loss",
    ]
    assert [one.name for one in resolve_metrics(specs[:1], llama(), tokens=EIGHT)] == [
        "logit difference"
    ]
    with pytest.raises(InputError, match="two metrics have one name"):
        resolve_metrics([specs[0], specs[0]], llama(), tokens=EIGHT)


def test_the_record_of_a_metric_tells_what_its_function_holds():
    # Two logit differences have one name and read the same things: only their tokens differ.
    one, other = metric_config(logit_difference(5, 6)), metric_config(logit_difference(5, 7))
    assert one != other
    assert one == metric_config(logit_difference(5, 6))
    logits = torch.zeros(1, 2, 3)
    assert metric_config(kl_to(logits)) == metric_config(kl_to(logits.clone()))
    assert metric_config(kl_to(logits)) != metric_config(kl_to(torch.arange(6.0).view(1, 2, 3)))

    def scaled(factor):
        return on_outcome(lambda run: factor * run.loss)

    assert metric_config(scaled(2.0)) != metric_config(scaled(3.0))
    for made in (one, metric_config(sink_mass(0, layers=[1])), metric_config(kl_to(logits))):
        json.dumps(made, allow_nan=False)

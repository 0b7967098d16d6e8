"""What a trace says of mechanisms that trained models have: one model of the zoo for each, beside its truth."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiers import first

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.evidence import gather_evidence
from sink_lens.chain.links import LINKS
from sink_lens.chain.links.words import Phrase
from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.page import story
from sink_lens.chain.page import words as findings
from sink_lens.chain.placement import binding_kind, placement_table
from sink_lens.chain.setting import make_setting
from sink_lens.chain.trace import trace
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, tiny_tokenizer
from sink_lens.records import read_run
from sink_lens.schema import ALL_STEPS
from tests.zoo import ZOO, build, headlines

CONFIG = TraceConfig(model="zoo", random_init=False, quick=True, controls=2)
LINK = {link.name: link for link in LINKS}


def drawn(name, family, *, sequences):
    zoo = build(name, seed=1, family=family)
    lens = replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=name)
    return zoo, lens, headlines.drawn(zoo, sequences=sequences, length=40)


def measured(name, family):
    """The model and what one measuring pass gives."""
    zoo, lens, tokens = drawn(name, family, sequences=12)
    panel = scout_and_measure(
        lens, from_tensor(tokens), config=CONFIG, own=[link.readings for link in LINKS]
    )
    return zoo, gather_evidence(lens, panel, config=CONFIG)


def statistics(evidence, link):
    return {one.name: one for one in LINK[link].statistics(evidence, np.random.default_rng(0))}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The traces that several tests read: name -> model, its sequences, its run folder."""
    done = {}

    def make(name, family):
        if name not in done:
            zoo, lens, tokens = drawn(name, family, sequences=24)
            folder = tmp_path_factory.mktemp(name) / "run"
            trace(
                lens,
                config=CONFIG,
                tokens=from_tensor(tokens),
                out=folder,
                progress=False,
                report=False,
            )
            done[name] = zoo, tokens, read_run(folder)
        return done[name]

    return make


@pytest.mark.parametrize("name", ["eraser", "regrowth"])
def test_what_is_erased_does_not_grow(name):
    for family in ZOO[name].families:
        zoo, evidence = measured(name, family)
        found = evidence.panel.location
        assert found.growth_layers == zoo.truth.grows, family


def test_a_step_that_erases_does_not_decide_whether_neurons_fire():
    _, evidence = measured("eraser", "llama")
    found = statistics(evidence, "variance_neurons")
    assert found["spike_ratio"].interval.low > 1000
    assert "spike_ratio_step_1" not in found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_variance_is_read_before_the_growth(family):
    zoo, evidence = measured("early_variance", family)
    ratio = statistics(evidence, "aggregation_variance")["s2_ratio"]
    assert ratio.layers == tuple(range(zoo.truth.grows[0] + 1))
    assert ratio.interval.low > 2
    while_it_grows = evidence.panel.std_ratio("z")[list(zoo.truth.grows)].mean()
    assert while_it_grows < 1.25  # read there, the link fails


@pytest.mark.parametrize("family", ZOO["cancelled_bias"].families)
def test_a_bias_is_no_part_of_what_is_written_into_the_key(family):
    _, evidence = measured("cancelled_bias", family)
    found = statistics(evidence, "dimension_key")
    assert found["key_cosine"].interval.low > 0.9
    assert found["bias_cancelled"].interval.low > 0.9
    assert found["key_norm_ratio"].interval.high < 0.5


def test_a_dimension_that_no_key_reads_carries_nothing(traced):
    _, _, run = traced("beside", "llama")
    keys = {key for phrase in phrases(run) for key in phrase.key.split(" + ")}
    assert "direction" in keys
    assert "by dimension_key" not in keys
    (said,) = findings.link_remarks(story.evidence_tables(run), "neurons_dimension")
    assert said.startswith("the neurons write it, but the sink does not hang on it")
    assert any(
        "everything else in it" in one
        for one in findings.link_remarks(story.evidence_tables(run), "dimension_key")
    )


@pytest.mark.exhaustive
def test_where_no_dimension_stands_out_none_is_said_not_to_carry_the_sink(traced):
    _, _, run = traced("key_bias", "qwen3")
    assert "direction" not in {phrase.key for phrase in phrases(run)}


def test_what_feeds_the_writer_is_told_from_it(traced):
    zoo, _, run = traced("upstream", "qwen2")
    makers = run.tables["makers"].query("is_maker")
    found = {(row.layer, row.unit): row.role for row in makers.itertuples()}
    writer = zoo.truth.makers[-1]
    assert found == {(writer.layer, writer.index): "writes"} | {
        (maker.layer, maker.index): f"upstream of {writer.layer}.{writer.index}"
        for maker in zoo.truth.feeds
    }


@pytest.mark.exhaustive
def test_larger_sets_hold_the_smaller_ones_and_are_beyond_chance(traced):
    _, _, run = traced("bimodal", "llama")
    sets = run.tables["maker_sets"].query("control_of == ''").set_index("set")
    half, more, every = (
        set(sets.loc[name, "parts"].split(", ")) for name in ("half", "four fifths", "all makers")
    )
    assert half <= more <= every
    for row in sets.reset_index().to_dict("records"):
        assert findings.is_beyond_chance(row)


@pytest.mark.exhaustive
def test_all_steps_are_frozen_together(traced):
    _, _, run = traced("either_layer", "llama")
    natural = (
        run.tables["mediation"]
        .query("intervention == 'natural' and frozen == 'neurons'")
        .set_index("step")
    )
    assert natural.loc[1, "surviving_share"] > 0.9  # no head needs step 0 alone
    assert natural.loc[ALL_STEPS, "surviving_share"] < 0.2


def test_sequences_whose_sink_is_elsewhere_are_counted(traced):
    zoo, tokens, run = traced("elsewhere", "llama")
    summary = run.tables["summary"].set_index("quantity")
    assert (
        int(float(summary.loc["sequences_elsewhere", "value"]))
        == int((~zoo.sinks(tokens)[:, 0]).sum())
        == 3
    )
    assert "position 1" in summary.loc["sequences_elsewhere", "note"]
    names = [repeat["name"] for repeat in run.provenance["repeats"]]
    assert "measuring where the sink is" in names
    assert run.tables["links"]["n"].max() <= 21


def test_a_position_that_is_no_sink_for_bos_says_so(traced):
    _, _, run = traced("bos_without", "qwen2")
    assert (
        run.tables["summary"].set_index("quantity").loc["sink_bound_to", "value"]
        == "positional, not BOS"
    )


def test_what_a_first_token_has_beside_a_sink_of_bos_is_not_that_sink():
    # next to nothing is left of a sink at position 0 whatever stands there; BOS brings the dimension
    zoo, lens, tokens = drawn("variance", "llama", sequences=8)
    writer, (dimension,) = zoo.truth.makers[-1], zoo.truth.outliers[zoo.truth.grows[-1]]
    tokens[:, 0] = BOS_ID
    with torch.no_grad():
        zoo.model.model.layers[writer.layer].mlp.down_proj.weight[:, writer.index] *= 0.008
        zoo.model.get_input_embeddings().weight[BOS_ID, dimension] = 60.0
    panel = scout_and_measure(
        lens, from_tensor(tokens), config=CONFIG, own=[link.readings for link in LINKS]
    )
    table = placement_table(
        make_setting(lens, from_tensor(tokens), location=panel.location, config=CONFIG)
    )
    found = table[~table["isolated"].astype(bool)].set_index(["position", "token"])
    faint = found.loc[(0, "ordinary")]
    assert faint["sink_mass"] > max(
        0.1, 4 * faint["ordinary_mass"]
    )  # more than other tokens, and little
    assert found.loc[(0, "bos"), "sink_mass"] > 0.9
    assert found["is_sink"].groupby("token").all().to_dict() == {"bos": True, "ordinary": False}
    assert not found.loc[(0, "ordinary"), "is_sink"]
    assert binding_kind(table) == "token"


TRACED = {
    "beside": "llama",
    "upstream": "qwen2",
    "bimodal": "llama",
    "either_layer": "llama",
    "elsewhere": "llama",
}


def phrases(run):
    found = story.find_story(run)
    at = {"is_sink": bool(found.is_sink), "rate": found.sink_rate, "position": found.position}
    return findings.headline_phrases(story.evidence_tables(run), **at)


@pytest.mark.parametrize("name", first(TRACED))
def test_the_headline_is_true_and_short(name, traced):
    zoo, tokens, run = traced(name, TRACED[name])
    found = phrases(run)
    assert headlines.untrue(zoo, tokens, found) == []
    assert story.title(run) == findings.join_phrases(found)
    assert len(story.title(run).split()) <= findings.MOST_WORDS
    assert {"sink", f"bound: {headlines.bound_of(zoo)}"} <= {phrase.key for phrase in found}
    carried = {key for phrase in found for key in phrase.key.split(" + ") if key.startswith("by ")}
    assert carried  # and none that is untrue


def test_a_phrase_without_its_rows_is_not_said(traced):
    _, _, run = traced("bimodal", "llama")
    tables = story.evidence_tables(run)
    whole = {phrase.key for phrase in phrases(run)}
    at = {"is_sink": True, "rate": 0.6, "position": 0}
    carried = {key for key in whole if key.startswith("by ")}
    for name, instead in (("links", set()), ("effects", {"untested"})):
        others = {key: table for key, table in tables.items() if key != name}
        left = {phrase.key for phrase in findings.headline_phrases(others, **at)}
        assert left - {"makers"} == (whole - carried - {"makers"}) | instead, name
    links = tables["links"].assign(carries="undecided")
    keys = [phrase.key for phrase in findings.headline_phrases(tables | {"links": links}, **at)]
    assert "nothing shown" in keys
    assert not any(key.startswith("by ") for key in keys)


def test_untrue_phrases_are_found():
    zoo, _, tokens = drawn("beside", "llama", sequences=4)
    said = Phrase(
        key="by variance_neurons + by dimension_key", text="Dimension 3 carries it", rows=()
    )
    assert headlines.untrue(zoo, tokens, [said]) == [
        "by variance_neurons + by dimension_key: Dimension 3 carries it"
    ]
    assert torch.equal(zoo.sinks(tokens)[:, 0], torch.ones(4, dtype=torch.bool))

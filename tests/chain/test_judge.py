"""Verdicts by hand, and the links of models whose truth is known."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from evidences import evidence_of, planted_evidence

from sink_lens import schema
from sink_lens.chain.evidence import Statistic
from sink_lens.chain.judge import (
    Answers,
    chain_table,
    derive_verdict,
    intervention_verdict,
    link_answers,
    link_statistic_values,
    link_table,
    statistic_verdict,
)
from sink_lens.chain.links import LINKS
from sink_lens.chain.page.words import is_off_distribution, link_remarks, why_undecided
from sink_lens.schema import COSTLY, INTERVENTION_FLOOR
from sink_lens.stats import Interval

NAMES = (
    "aggregation_variance", "variance_preserved", "variance_neurons", "neurons_dimension", "dimension_key", "key_sink",
)  # fmt: skip


def statistic(low, high, *, estimate=None, nulls=None, **options):
    middle = (low + high) / 2 if estimate is None else estimate
    return Statistic(
        name="x",
        interval=Interval(estimate=middle, low=low, high=high, n=8),
        nulls=nulls or {},
        **options,
    )


NAN = math.nan


@pytest.mark.parametrize(
    ("given", "decided"),
    [
        (statistic(1.1, 2.0), "holds"),  # floor 1
        (statistic(0.2, 0.9), "fails"),
        (statistic(0.9, 1.1), "undecided"),
        (statistic(1.0, 2.0), "undecided"),  # over means strictly over
        (statistic(2.0, 3.0, nulls={"a": 1.5}), "holds"),
        (statistic(2.0, 3.0, nulls={"a": 1.5, "b": 2.5}), "undecided"),
        (statistic(2.0, 3.0, nulls={"a": 1.5, "b": 3.5}), "fails"),
        (statistic(2.0, 3.0, nulls={"a": NAN}), "holds"),  # a null that is undefined says nothing
        (statistic(1.5, 2.5, references={"other": 100.0}), "holds"),  # references decide nothing
        (statistic(NAN, NAN, estimate=5.0), "undecided"),  # one sequence has no interval
        (statistic(NAN, NAN, estimate=NAN, note="not measurable"), "undecided"),
        (statistic(NAN, NAN, estimate=NAN, note="not there", absent=True), "fails"),
    ],
)
def test_verdict(given, decided):
    assert statistic_verdict(given, floor=1.0) == decided


def test_the_links_are_those_of_the_chain_in_order_and_its_table_says_what_they_say():
    assert tuple(link.name for link in LINKS) == NAMES
    assert all(link.target == following.source for link, following in itertools.pairwise(LINKS))
    table = chain_table()
    assert table["order"].tolist() == [0, 1, 2, 3, 4, 5]
    assert table["link"].tolist() == [link.name for link in LINKS]
    for column in ("source", "target", "sentence", "question"):
        assert table[column].tolist() == [getattr(link, column) for link in LINKS]


def test_the_criterion_stands_beside_the_verdict():
    table = link_table(planted_evidence(), random_init=None, length=24).set_index("link")
    key = table.loc["dimension_key", "criterion"].iloc[0]
    assert (
        key
        == "present if the interval of key_cosine is above 0.5 and above random_dimensions, other_positions"
    )
    none = link_table(planted_evidence(sink=False), random_init=None, length=24).set_index("link")
    text = none.loc["variance_neurons", "criterion"]
    assert (
        text
        == "present if the interval of spike_ratio is above 10 (here: no growth step was found)"
    )


def test_the_twin_is_a_row_of_every_statistic_and_decides_nothing():
    values = link_statistic_values(planted_evidence())
    higher = values.assign(value=values["value"] + 1000)
    table = link_table(planted_evidence(), random_init=higher, length=24)
    twin = table[table["null_name"] == "random_init"].set_index(["link", "statistic"])["null_value"]
    assert set(twin.index) == set(zip(table["link"], table["statistic"], strict=True))
    assert twin["dimension_key", "key_cosine"] == pytest.approx(1001, abs=0.1)
    alone = link_table(planted_evidence(), random_init=None, length=24)
    assert (
        table.groupby("link")["verdict"].first().to_dict()
        == alone.groupby("link")["verdict"].first().to_dict()
    )


def effect(link, *, low=0.6, high=0.9, control=0.01, had=0.5, uniform=0.0, primary=True):
    """One row of ``effects``, with the columns that verdicts read."""
    return {
        "link": link, "edit": f"intervention on {link}", "baseline_sink_mass": had, "uniform_sink_mass": uniform,
        "share": (low + high) / 2, "ci_low": low, "ci_high": high, "control_largest": control, "is_primary": primary,
        "carries": primary, "n": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "decided"),
    [
        (effect("x"), "holds"),
        (effect("x", low=INTERVENTION_FLOOR), "undecided"),  # over means strictly over
        (effect("x", low=0.1, high=0.2), "in part"),
        (
            effect("x", low=0.221, high=0.245, control=0.018),
            "in part",
        ),  # the default model's fifth link
        (effect("x", low=0.1, high=0.2, control=0.15), "undecided"),  # a control lies in it
        (effect("x", low=0.1, high=0.2, control=0.21), "fails"),
        (effect("x", low=0.1, high=0.4), "undecided"),
        (
            effect("x", low=-0.1, high=0.1),
            "undecided",
        ),  # with more sequences it may be nothing, or some
        (effect("x", low=-0.1, high=0.04), "fails"),
        (effect("x", control=0.7), "undecided"),  # within the interval
        (effect("x", control=0.95), "fails"),  # random places do more
        (effect("x", control=NAN), "holds"),  # no controls: against the floor alone
        (effect("x", low=NAN, high=NAN), "undecided"),  # one sequence has no interval
        (effect("x", had=0.04), "undecided"),  # a share of hardly any sink
        (effect("x", had=NAN), "undecided"),
        (effect("x", had=0.1, uniform=0.06), "undecided"),  # hardly more than uniform attention
        (effect("x", had=0.12, uniform=0.06), "holds"),
        (effect("x", low=-0.3, high=-0.1), "fails"),
    ],
)
def test_intervention_verdict(row, decided):
    assert intervention_verdict(row) == decided


@pytest.mark.parametrize(
    ("row", "decided"),
    [
        (effect("x", low=0.6, high=0.8), "holds"),
        (
            effect("x", low=0.2, high=0.3),
            "in part",
        ),  # about the lower floor, and below the higher one
        (effect("x", low=0.3, high=0.4), "in part"),
        (effect("x", low=0.4, high=0.6), "undecided"),
        (effect("x", low=0.04, high=0.06), "undecided"),
        (effect("x", low=-0.02, high=0.02), "fails"),
    ],
)
def test_one_interval_that_answers_both_questions_lies_between_bars(row, decided):
    found = link_answers(statistic(1.1, 2.0), floor=1.0, effects=(row, row), has_sink=True)
    assert derive_verdict(found) == decided
    narrower = row | {
        "ci_low": 0.7 * row["ci_low"] + 0.3 * row["ci_high"],
        "ci_high": 0.3 * row["ci_low"] + 0.7 * row["ci_high"],
    }
    more = derive_verdict(
        link_answers(statistic(1.1, 2.0), floor=1.0, effects=(narrower, narrower), has_sink=True)
    )
    assert decided in (more, "undecided")


def test_more_sequences_turn_no_verdict_over():
    settled = ("yes", "in part", "no")
    for answers in itertools.product(("yes", "no", "undecided"), *[(*settled, "undecided")] * 2):
        later = itertools.product(
            *[("yes", "no", "undecided") if answers[0] == "undecided" else answers[:1]],
            *[(*settled, "undecided") if one == "undecided" else (one,) for one in answers[1:]],
        )
        before = derive_verdict(Answers(*answers))
        assert before == "undecided" or {derive_verdict(Answers(*one)) for one in later} == {
            before
        }, answers


def test_a_costly_intervention_is_undecided_and_cost_alone_never_says_no():
    costly = effect("x") | {
        "baseline_loss_nats": 3.0,
        "uniform_loss_nats": 10.8,
        "beyond_masking_nats": 2.0,
    }
    assert is_off_distribution(costly)
    assert intervention_verdict(costly) == "undecided"
    assert (
        intervention_verdict(costly | {"beyond_masking_nats": COSTLY}) == "holds"
    )  # over means strictly over
    near_uniform = costly | {
        "baseline_loss_nats": 10.0
    }  # over 0.9 of 10.8: the model predicts hardly anything
    assert not is_off_distribution(near_uniform)
    assert intervention_verdict(near_uniform) == "holds"
    assert intervention_verdict(costly | {"beyond_masking_nats": NAN}) == "holds"


COSTS = {
    "baseline_loss_nats": 3.0,
    "loss_nats": 8.5,
    "uniform_loss_nats": 10.8,
    "beyond_masking_nats": 2.0,
}
LESS, MORE, NEAR = (
    {"low": 0.2},
    {"control": 0.7},
    "what was measured is too close to its floor to tell",
)


def undecided_link(
    row,
    *,
    of="variance_neurons",
    costs=(),
    present="yes",
    necessary="undecided",
    floors="calibrated",
):
    answers = {"present": present, "necessary_or_sufficient": necessary, "carries": "undecided"}
    link = {"link": "variance_neurons", "verdict": "undecided", "floors": floors} | answers
    return {
        "links": pd.DataFrame([link]),
        "effects": pd.DataFrame([effect(of, **row) | dict(costs)]),
    }


def undecided_statistic(**columns):
    tables = undecided_link({}, present="undecided")
    return tables | {"links": tables["links"].assign(is_primary=True, **columns)}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (undecided_link(LESS), "breaking it may remove more or less than 25% of the sink"),
        (
            undecided_link(LESS | MORE),
            "breaking it may remove more or less than 25% of the sink and a random control does",
        ),
        (undecided_link({}), "the sequences are too short to tell of a sink"),
        (undecided_link(MORE), "breaking it may remove more or less than a random control does"),
        (
            undecided_link(LESS, floors="not calibrated"),
            "breaking it may remove less than the floor that was asked for, or than a random control does",
        ),
        (undecided_link({}, costs=COSTS), "this edit damages the model itself (loss +5.5 nats)"),
        (
            undecided_link({"had": 0.1, "uniform": 0.06}),
            "the sink has hardly more attention than chance",
        ),
        (undecided_link({"low": NAN, "high": NAN}), "one sequence gives no interval"),
        (
            undecided_link({}, costs=COSTS, present="undecided"),
            f"{NEAR}, and this edit damages the model itself (loss +5.5 nats)",
        ),
        (undecided_link({}, present="undecided"), NEAR),
        (undecided_statistic(measured="present"), "the sequences are too short to tell of a sink"),
        (
            undecided_statistic(measured="undecided", ci_low=NAN),
            "what was measured has no interval",
        ),
        (
            undecided_link({"low": 0.4}, necessary="yes"),
            "ablating what it leads to may remove more or less than 50% of the sink",
        ),
        (undecided_link({}, of="key_sink"), "there was nothing to intervene on"),
        (undecided_link({}) | {"effects": None}, ""),
    ],
)
def test_what_keeps_a_link_undecided_is_said(tables, said):
    assert why_undecided(tables, "variance_neurons") == said
    assert link_remarks(tables, "variance_neurons")[:1] == ([f"undecided: {said}"] if said else [])
    decided = tables | {"links": tables["links"].assign(verdict="holds")}
    assert why_undecided(decided, "variance_neurons") == ""


@pytest.mark.parametrize(
    ("answers", "decided"),
    [
        (("yes", "yes", "yes"), "holds"),
        (("yes", "yes", "undecided"), "undecided"),
        (("yes", "yes", "in part"), "in part"),
        (("yes", "in part", "yes"), "in part"),
        (("yes", "yes", "no"), "undecided"),
        (("no", "yes", "yes"), "undecided"),
        (("yes", "undecided", "yes"), "undecided"),
        (("undecided", "yes", "yes"), "undecided"),
        (("no", "undecided", "yes"), "undecided"),
        (("no", "no", "yes"), "fails"),
        (("yes", "no", "no"), "fails"),
        (("yes", "not applicable", "not applicable"), "not applicable"),
        (("not applicable", "not applicable", "not applicable"), "not applicable"),
    ],
)
def test_the_verdict_follows_from_the_answers(answers, decided):
    assert derive_verdict(Answers(*answers)) == decided


def test_every_three_answers_have_a_verdict():
    verdicts = {"holds", "in part", "fails", "undecided", "not applicable", "not asked"}
    assert {
        derive_verdict(Answers(*answers)) for answers in itertools.product(schema.ANSWERS, repeat=3)
    } <= verdicts


def test_the_documentation_prints_the_table_of_verdicts():
    text = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text("utf-8")
    rows = [f"| {' | '.join(row)} |" for row in schema.DERIVED]
    assert "\n".join(rows) in text


ABSENT, THERE = statistic(NAN, NAN, estimate=NAN, absent=True), statistic(2.0, 3.0)


@pytest.mark.parametrize(
    ("given", "options", "decided"),
    [
        # a link is not failed by the absence of what it starts from
        (
            replace(ABSENT, no_source=True),
            {"effects": (effect("x", low=0.0, high=0.1), None)},
            ("not applicable",) * 3,
        ),
        # what is not there makes no sink, and carries may still be yes
        (ABSENT, {"effects": (None, effect("x", low=0.8))}, ("no", "no", "yes")),
        (ABSENT, {"effects": None}, ("no", "not tested", "not tested")),
        # without a sink only presence is answered
        (THERE, {"has_sink": False}, ("yes", "not applicable", "not applicable")),
        (THERE, {"has_sink": False, "starts": False}, ("not applicable",) * 3),
    ],
)
def test_questions_about_what_is_not_there_or_leads_to_no_sink(given, options, decided):
    both = {"effects": (effect("x"), effect("x")), "has_sink": True}
    assert link_answers(given, floor=1.0, **(both | options)) == decided


def with_effects(*rows):
    return link_table(planted_evidence(), random_init=None, effects=pd.DataFrame(rows), length=24)


def test_the_verdict_is_that_of_both():
    rows = [effect(name) for name in NAMES if name not in ("neurons_dimension", "dimension_key")]
    table = with_effects(*rows, effect("neurons_dimension", low=0.0, high=0.04))
    found = table.groupby("link")[["measured", "intervened", "verdict"]].first()
    assert (table.groupby("link")[["measured", "intervened", "verdict"]].nunique() == 1).all(
        axis=None
    )
    assert found.loc["variance_neurons"].tolist() == ["present", "holds", "holds"]
    assert found.loc["neurons_dimension"].tolist() == ["present", "fails", "fails"]
    assert found.loc["dimension_key"].tolist() == [
        "present",
        "no intervention",
        "undecided",
    ]  # the others are cut
    alone = (
        link_table(planted_evidence(), random_init=None, length=24)
        .groupby("link")["measured"]
        .first()
    )
    assert found["measured"].to_dict() == alone.to_dict()


def test_the_share_of_the_cut_is_a_row_of_its_own():
    table = with_effects(*(effect(name) for name in NAMES))
    shares = table[table["statistic"] == "intervention_share"]
    assert tuple(shares["link"]) == NAMES
    row = shares.iloc[0]
    assert row[["value", "ci_low", "ci_high", "null_value", "n"]].tolist() == [
        0.75,
        0.6,
        0.9,
        0.01,
        8,
    ]
    assert (row["null_name"], bool(row["is_primary"])) == ("largest_control", False)
    assert row["criterion"].endswith(
        ", and that of the intervention's share above 25% and above its largest control"
    )


def test_only_the_primary_cut_of_a_link_decides():
    rows = [effect(name) for name in NAMES]
    more = effect("variance_neurons", low=0.0, high=0.1, primary=False)
    pd.testing.assert_frame_equal(with_effects(*rows), with_effects(*rows, more))


def test_without_interventions_no_link_holds_and_none_fails():
    alone = link_table(planted_evidence(), random_init=None, length=24)
    empty = link_table(
        planted_evidence(),
        random_init=None,
        effects=pd.DataFrame(columns=["link", "is_primary"]),
        length=24,
    )
    pd.testing.assert_frame_equal(alone, empty)
    assert set(alone["intervened"]) == {"no intervention"}
    assert set(alone["verdict"]) <= {"present, not tested", "absent", "undecided"}
    said = {"present": "present, not tested"}
    assert (alone["verdict"] == alone["measured"].replace(said)).all()
    assert set(alone["necessary_or_sufficient"]) == set(alone["carries"]) == {"not tested"}
    assert alone["criterion"].str.startswith("present if").all()


@pytest.mark.parametrize("length", [2, 8])
def test_sequences_without_other_tokens_are_undecided(length):
    found = link_table(
        evidence_of("llama", length=length), random_init=None, length=length
    ).set_index("link")
    for name in ("aggregation_variance", "variance_neurons", "neurons_dimension"):
        assert found.loc[[name], "verdict"].iloc[0] == "undecided"
        assert "no other token at or after position 8" in found.loc[[name], "criterion"].iloc[0]


def test_one_sequence_has_no_interval_and_nothing_holds():
    table = link_table(evidence_of("llama", sequences=1), random_init=None, length=24)
    assert table["ci_low"].isna().all()
    assert not (table["verdict"] == "holds").any()
    assert table.loc[table["statistic"] == "s2_ratio", "value"].notna().all()
